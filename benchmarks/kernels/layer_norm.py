"""layer_norm against the torch expression, over hidden states and query heads of Command R (35B)."""

import torch

import fastlm.kernels.rms_norm as module  # whose kernels run
from benchmarks.timing import DEVICE, SETTINGS, Rival, Timing, measure, report, require_gpu, torch_compile
from fastlm.kernels.layer_norm import layer_norm_reference
from fastlm.kernels.rms_norm import RMSNormOptions, rms_norm_bwd, rms_norm_fwd

OPTIONS = RMSNormOptions(1e-5, offset=0.0, cast_before_scale=False, centred=True)


def run(hidden: int = 8192, heads: int = 64, head_dim: int = 128) -> list[Timing]:
    """Forward, backward with a frozen weight, backward with a trained one; bf16."""
    timings = []
    for tokens in SETTINGS.tokens:
        timings += _one("layer_norm", tokens, (1, tokens, hidden), (hidden,))
        timings += _one("head layer_norm", tokens, (1, tokens, heads, head_dim), (heads, head_dim))
    return timings


def _one(operation: str, tokens: int, shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> list[Timing]:
    x = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(weight_shape, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.randn_like(x)
    *_, statistics = rms_norm_fwd(x, weight, OPTIONS)  # fp32, two numbers a row
    leaf, trained_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    implementations = layer_norm_reference, torch_compile(layer_norm_reference)
    frozen = [Rival(function, (leaf, weight), (dy,)) for function in implementations]
    trained = [Rival(function, (leaf, trained_weight), (dy,)) for function in implementations]
    forward, backward = 2 * x.nbytes + statistics.nbytes, 3 * x.nbytes + statistics.nbytes
    return [
        measure(
            f"{operation} fwd", "Command-R", tokens, forward,
            lambda: rms_norm_fwd(x, weight, OPTIONS),
            frozen[0].forward, compiled=frozen[1].forward, module=module,
        ),
        measure(
            f"{operation} bwd", "Command-R", tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, statistics, OPTIONS, weight_gradient=False),
            frozen[0].backward, compiled=frozen[1].backward, module=module,
        ),
        measure(
            f"{operation} bwd dw", "Command-R", tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, statistics, OPTIONS, weight_gradient=True),
            trained[0].backward, compiled=trained[1].backward, module=module,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
