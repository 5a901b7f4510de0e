"""Every kernel benchmark at tiny sizes: prints what `python -m benchmarks.kernels` would.

For a CPU, with TRITON_INTERPRET=1 (Triton's interpreter). Times mean nothing here.
"""

import benchmarks.kernels as kernels
from benchmarks.kernels import (
    ModelShapes,
    add_rms_norm,
    attention,
    glu,
    layer_norm,
    linear_cross_entropy,
    lora,
    nf4,
    norm_rope,
    rms_norm,
    rope,
)
from benchmarks.timing import SETTINGS, report

LLAMA = ModelShapes("Llama", 32, 48, 2, 1, 16, 70, "silu")
QWEN = ModelShapes("Qwen", 32, 48, 2, 1, 16, 70, "silu", query_key_norm=True)
GEMMA = ModelShapes("Gemma", 24, 40, 2, 2, 8, 60, "gelu_tanh", norm_offset=1.0, softcap=30.0)


def main() -> None:
    """One number of tokens, compared as 16,384 are."""
    kernels.MODELS = (LLAMA, QWEN, GEMMA)
    SETTINGS.tokens, SETTINGS.compared_at, SETTINGS.compile = (2,), 2, False
    report(
        [
            *rms_norm.run(),
            *add_rms_norm.run(),
            *layer_norm.run(),
            *rope.run(),
            *norm_rope.run(),
            *glu.run(),
            *nf4.run(((64, 64),)),
            *lora.run(LLAMA, 2),
            *linear_cross_entropy.run(8, 16, 70),
            *attention.run(),
        ]
    )


if __name__ == "__main__":
    main()
