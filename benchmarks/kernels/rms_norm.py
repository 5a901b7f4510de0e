"""rms_norm against the torch expression, over the hidden states and, for Qwen3, over the query heads."""

import torch

from benchmarks.kernels import ModelShapes, cases
from benchmarks.timing import Timing, measure, report, require_gpu
from fastlm.kernels.rms_norm import RMSNormOptions, rms_norm_bwd, rms_norm_fwd, rms_norm_reference


def run() -> list[Timing]:
    """Forward, backward with a frozen weight, backward with a trained one; bf16."""
    timings = []
    for model, tokens in cases():
        timings += _one("rms_norm", model, tokens, (1, tokens, model.hidden))
        if model.query_key_norm:
            timings += _one("head norm", model, tokens, (1, tokens, model.query_heads, model.head_dim))
    return timings


def _one(operation: str, model: ModelShapes, tokens: int, shape: tuple[int, ...]) -> list[Timing]:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(shape[-1], dtype=torch.bfloat16, device="cuda")
    dy = torch.randn_like(x)
    options = RMSNormOptions(1e-6, model.norm_offset, model.norm_offset == 0)
    _, rstd = rms_norm_fwd(x, weight, options)
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cast = options.cast_before_scale
        return rms_norm_reference(x, weight, offset=options.offset, cast_before_scale=cast)

    frozen, trained = reference(leaves[0], weight), reference(*leaves)
    forward, backward = 2 * x.nbytes + rstd.nbytes, 3 * x.nbytes + rstd.nbytes
    return [
        measure(
            f"{operation} fwd", model.name, tokens, forward,
            lambda: rms_norm_fwd(x, weight, options),
            lambda: reference(x, weight),
        ),
        measure(
            f"{operation} bwd", model.name, tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, rstd, options, weight_gradient=False),
            lambda: torch.autograd.grad(frozen, leaves[:1], dy, retain_graph=True),
        ),
        measure(
            f"{operation} bwd dw", model.name, tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, rstd, options, weight_gradient=True),
            lambda: torch.autograd.grad(trained, leaves, dy, retain_graph=True),
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
