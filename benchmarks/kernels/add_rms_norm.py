"""add_rms_norm (residual added before the norm) and rms_norm_add (after it) against the torch expressions."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import fastlm.kernels.rms_norm as module
from benchmarks.kernels import distinct
from benchmarks.timing import DEVICE, Rival, Timing, measure, report, require_gpu, torch_compile
from fastlm.kernels.rms_norm import RMSNormOptions, rms_norm_bwd, rms_norm_fwd, rms_norm_reference


def run() -> list[Timing]:
    """Forward, backward with a frozen weight, backward with a trained one; bf16."""
    shapes = distinct(lambda model: (model.hidden, model.norm_offset))
    return [timing for name, model, tokens in shapes for timing in _one(name, tokens, model.hidden, model.norm_offset)]


def _one(case: str, tokens: int, hidden: int, offset: float) -> list[Timing]:
    x, residual, dy, dsummed = (torch.randn(1, tokens, hidden, dtype=torch.bfloat16, device=DEVICE) for _ in range(4))
    weight = torch.randn(hidden, dtype=torch.bfloat16, device=DEVICE)
    before = RMSNormOptions(1e-6, offset, offset == 0, add="before")
    after = replace(before, add="after")
    _, summed, statistics = rms_norm_fwd(x, weight, before, residual)
    frozen = [x.detach().requires_grad_(), residual.detach().requires_grad_(), weight]
    trained = [*frozen[:2], weight.detach().requires_grad_()]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        cast = before.cast_before_scale
        return rms_norm_reference(x, weight, offset=offset, cast_before_scale=cast)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return norm(summed, weight), summed

    def norm_add(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return residual + norm(x, weight)

    def liger(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        casting = "llama" if before.cast_before_scale else "gemma"
        function = import_module("liger_kernel.ops").LigerFusedAddRMSNormFunction
        return function.apply(x, residual, weight, 1e-6, offset, casting, False)

    def backward(*, weight_gradient: bool) -> Any:
        wanted = {"weight_gradient": weight_gradient, "dsummed": dsummed}
        return rms_norm_bwd(dy, summed, weight, statistics, before, **wanted)

    rivals = add_norm, torch_compile(add_norm), liger
    kept, trained_ones = (
        [Rival(function, leaves, (dy, dsummed)) for function in rivals] for leaves in (frozen, trained)
    )
    last = [Rival(function, frozen, (dy,)) for function in (norm_add, torch_compile(norm_add))]
    counted = 4 * x.nbytes + statistics.nbytes  # forward: two read, two written; backward: three and one
    return [
        measure(
            "add_rms_norm fwd", case, tokens, counted,
            lambda: rms_norm_fwd(x, weight, before, residual),
            kept[0].forward, compiled=kept[1].forward, liger=kept[2].forward, module=module,
        ),
        measure(
            "add_rms_norm bwd", case, tokens, counted,
            lambda: backward(weight_gradient=False),
            kept[0].backward, compiled=kept[1].backward, liger=kept[2].backward, module=module,
        ),
        measure(
            "add_rms_norm bwd dw", case, tokens, counted,
            lambda: backward(weight_gradient=True),
            trained_ones[0].backward, compiled=trained_ones[1].backward, liger=trained_ones[2].backward,
            module=module,
        ),
        measure(
            "rms_norm_add fwd", case, tokens, counted - x.nbytes,
            lambda: rms_norm_fwd(x, weight, after, residual),
            last[0].forward, compiled=last[1].forward, module=module,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
