"""norm_rope, over views of one packed projection, beside three launches of ours: two norms and rope.

Each head by itself (qwen3), and all heads in one norm (olmo2), at the same shapes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import fastlm.kernels.norm_rope as module
from benchmarks.kernels import ModelShapes, cases
from benchmarks.timing import DEVICE, Rival, Timing, measure, median_ms, report, require_gpu, torch_compile
from fastlm.kernels.norm_rope import norm_rope_fwd_bwd, norm_rope_reference
from fastlm.kernels.rms_norm import RMSNormOptions, rms_norm_bwd, rms_norm_fwd
from fastlm.kernels.rope import rope_bwd, rope_fwd


@dataclass(frozen=True)
class NormRopeTiming(Timing):
    """Milliseconds of three launches that do the same."""

    three_launches_ms: float

    def __str__(self) -> str:
        return f"{super().__str__()}  three launches {self.three_launches_ms / self.ms:.2f}x"


def run() -> list[Timing]:
    """Forward, backward with frozen weights, backward with trained ones; bf16, tables too."""
    chosen = [(model, tokens) for model, tokens in cases() if model.query_key_norm]
    return [timing for together in (False, True) for case in chosen for timing in _one(*case, together)]


def _one(model: ModelShapes, tokens: int, together: bool) -> list[Timing]:
    heads = model.query_heads + 2 * model.key_heads
    packed = torch.randn(1, tokens, heads, model.head_dim, dtype=torch.bfloat16, device=DEVICE)
    q, k = packed[:, :, : model.query_heads], packed[:, :, model.query_heads : -model.key_heads]
    rows = [x.flatten(2) if together else x for x in (q, k)]  # what one norm covers is the last dimension
    weights = [torch.randn(row.shape[-1], dtype=torch.bfloat16, device=DEVICE) for row in rows]
    angles = torch.rand(1, tokens, model.head_dim // 2, device=DEVICE).repeat(1, 1, 2) * 50
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    incoming = [torch.randn(x.shape, dtype=x.dtype, device=DEVICE) for x in (q, k)]
    options = RMSNormOptions(1e-6, 0.0, True)
    inputs = (q, k, *weights, *tables)
    statistics = [rms_norm_fwd(row, w, options)[2] for row, w in zip(rows, weights, strict=True)]

    def apart() -> Any:
        normed = [rms_norm_fwd(row, w, options)[0] for row, w in zip(rows, weights, strict=True)]
        return rope_fwd(*(y.view(x.shape) for y, x in zip(normed, (q, k), strict=True)), *tables)

    def apart_backward(weight_gradient: bool) -> Any:
        gradients = rope_bwd(*incoming, *tables)
        return [
            rms_norm_bwd(dy.view(row.shape), row, w, rstd, options, weight_gradient=weight_gradient)
            for dy, row, w, rstd in zip(gradients, rows, weights, statistics, strict=True)
        ]

    leaves = [x.detach().requires_grad_() for x in (q, k)]
    trained = [w.detach().requires_grad_() for w in weights]
    moved = sum(x.nbytes for x in incoming)
    kind = "together " if together else ""
    timings = [
        _measured(
            f"{kind}fwd", model, tokens, 2 * moved + tables[0].nbytes,  # half of cos and half of sin
            lambda: norm_rope_fwd_bwd(inputs, None, options), apart,
            [Rival(f, (*leaves, *weights, *tables), incoming).forward for f in _rivals()],
        )
    ]  # fmt: skip
    for name, wanted in (("bwd", False), ("bwd dw", True)):
        rivals = [Rival(f, (*leaves, *(trained if wanted else weights), *tables), incoming).backward for f in _rivals()]
        timings.append(
            _measured(
                f"{kind}{name}", model, tokens, 3 * moved + tables[0].nbytes,
                lambda wanted=wanted: norm_rope_fwd_bwd(inputs, incoming, options, weight_gradient=wanted),
                lambda wanted=wanted: apart_backward(wanted), rivals,
            )
        )  # fmt: skip
    return timings


def _rivals() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return norm_rope_reference, torch_compile(_reference)


def _reference(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    return norm_rope_reference(*inputs)


def _measured(
    direction: str, model: ModelShapes, tokens: int, counted: int, ours: Callable[[], Any],
    apart: Callable[[], Any], rivals: list[Callable[[], Any]],
) -> Timing:  # fmt: skip
    operation = f"norm_rope {direction}"
    one = measure(operation, model.name, tokens, counted, ours, rivals[0], compiled=rivals[1], module=module)
    return NormRopeTiming(**asdict(one), three_launches_ms=median_ms(apart))


if __name__ == "__main__":
    require_gpu()
    report(run())
