"""rms_norm against the torch expression, over the hidden states and, for Qwen3, over the query heads."""

import torch

import fastlm.kernels.rms_norm as module
from benchmarks.kernels import cases, distinct
from benchmarks.peers import liger_rms_norm
from benchmarks.timing import DEVICE, Rival, Timing, measure, report, require_gpu, torch_compile
from fastlm.kernels.rms_norm import RMSNormOptions, rms_norm_bwd, rms_norm_fwd, rms_norm_reference


def run() -> list[Timing]:
    """Forward, backward with a frozen weight, backward with a trained one; bf16."""
    timings = []
    for name, model, tokens in distinct(lambda model: (model.hidden, model.norm_offset)):
        timings += _one("rms_norm", name, tokens, (1, tokens, model.hidden), model.norm_offset)
    for model, tokens in cases():
        if model.query_key_norm:
            shape = (1, tokens, model.query_heads, model.head_dim)
            timings += _one("head norm", model.name, tokens, shape, model.norm_offset)
    return timings


def _one(operation: str, case: str, tokens: int, shape: tuple[int, ...], offset: float) -> list[Timing]:
    x = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(shape[-1], dtype=torch.bfloat16, device=DEVICE)
    dy = torch.randn_like(x)
    options = RMSNormOptions(1e-6, offset, offset == 0)
    *_, statistics = rms_norm_fwd(x, weight, options)  # fp32, one number a row
    leaf, trained_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight, offset=options.offset, cast_before_scale=options.cast_before_scale)

    def liger(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(x, weight, options.offset, options.cast_before_scale)

    implementations = reference, torch_compile(reference), liger
    frozen = [Rival(function, (leaf, weight), (dy,)) for function in implementations]
    trained = [Rival(function, (leaf, trained_weight), (dy,)) for function in implementations]
    forward, backward = 2 * x.nbytes + statistics.nbytes, 3 * x.nbytes + statistics.nbytes
    return [
        measure(
            f"{operation} fwd", case, tokens, forward,
            lambda: rms_norm_fwd(x, weight, options),
            frozen[0].forward, compiled=frozen[1].forward, liger=frozen[2].forward, module=module,
        ),
        measure(
            f"{operation} bwd", case, tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, statistics, options, weight_gradient=False),
            frozen[0].backward, compiled=frozen[1].backward, liger=frozen[2].backward, module=module,
        ),
        measure(
            f"{operation} bwd dw", case, tokens, backward,
            lambda: rms_norm_bwd(dy, x, weight, statistics, options, weight_gradient=True),
            trained[0].backward, compiled=trained[1].backward, liger=trained[2].backward, module=module,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
