"""Q, K, V and the gated MLP of a Llama-3-8B layer with LoRA: rank 16, 16,384 tokens, bf16 base, fp32 factors.

Beside each time stand the bare products of the frozen weights (forward; forward and input gradient), which
nothing can do without, and in the torch column PEFT's way: autograd over the plain expression under autocast.
Peak memory is what forward and backward allocate together.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import MODELS, ModelShapes
from benchmarks.timing import DEVICE, Timing, measure, median_ms, peak_gib, report, require_gpu
from fastlm.kernels.lora import Projection, lora_linear, lora_linear_reference, lora_mlp, lora_mlp_reference

TOKENS, RANK = 16_384, 16


@dataclass(frozen=True)
class LoraTiming(Timing):
    """Milliseconds of the bare products and their share of ours; GiB at the peak, here and in torch."""

    products_ms: float
    share_of_products: float
    peak_gib: float
    torch_peak_gib: float

    def __str__(self) -> str:
        products = f"products {self.products_ms:.2f} ms ({self.share_of_products:.0%} of ours)"
        peaks = f"peak {self.peak_gib:.2f} GiB, torch {self.torch_peak_gib:.2f}"
        return f"{super().__str__()}  {products}, {peaks}"


def run(model: ModelShapes = MODELS[0], tokens: int = TOKENS) -> list[Timing]:
    """Forward, and forward with backward."""
    x = torch.randn(1, tokens, model.hidden, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    wide, narrow = model.query_heads * model.head_dim, model.key_heads * model.head_dim
    qkv = [_projection(width, model.hidden) for width in (wide, narrow, narrow)]
    gate, up = (_projection(model.intermediate, model.hidden) for _ in range(2))
    down = _projection(model.hidden, model.intermediate)
    return [
        *_one("lora qkv", model, x, qkv, lambda: lora_linear(x, qkv), lambda: lora_linear_reference(x, qkv)),
        *_one(
            "lora mlp", model, x, [gate, up, down],
            lambda: (lora_mlp(x, gate, up, down, model.activation),),
            lambda: (lora_mlp_reference(x, gate, up, down, model.activation),),
        ),
    ]  # fmt: skip


def _projection(out: int, width: int) -> Projection:
    weight = torch.randn(out, width, dtype=torch.bfloat16, device=DEVICE) * width**-0.5
    a = (torch.randn(RANK, width, device=DEVICE) * width**-0.5).requires_grad_()
    b = (torch.randn(out, RANK, device=DEVICE) * 0.02).requires_grad_()
    return Projection(weight, None, a, b, 1.0)


def _one(
    operation: str, model: ModelShapes, x: Tensor, projections: list[Projection],
    fused: Callable[[], tuple[Tensor, ...]], stock: Callable[[], tuple[Tensor, ...]],
) -> list[Timing]:  # fmt: skip
    gradients = [torch.randn_like(output) for output in _forward(stock)]
    adapters = [part for p in projections for part in (p.a, p.b) if part is not None]
    weights = [p.weight for p in projections if isinstance(p.weight, Tensor)]
    inputs, above = (
        [torch.randn(*x.shape[:-1], weight.shape[side], dtype=x.dtype, device=DEVICE) for weight in weights]
        for side in (1, 0)
    )  # what each product reads, forward and backward

    def both(function: Callable[[], tuple[Tensor, ...]]) -> Any:
        return torch.autograd.grad(_forward(function), [x, *adapters], gradients)

    def products() -> None:
        for given, weight in zip(inputs, weights, strict=True):
            F.linear(given, weight)

    def products_both() -> None:
        products()
        for gradient, weight in zip(above, weights, strict=True):
            gradient @ weight

    tokens = x.shape[1]
    moved = sum(tensor.nbytes for tensor in (x, *weights, *gradients))
    measured: list[tuple[Timing, float]] = []
    for direction, counted, ours, theirs, bare in (
        ("fwd", moved, lambda: _forward(fused), lambda: _forward(stock), products),
        ("fwd+bwd", 2 * moved, lambda: both(fused), lambda: both(stock), products_both),
    ):
        base = measure(f"{operation} {direction}", model.name, tokens, counted, ours, theirs)
        measured.append((base, median_ms(bare)))
    ours_gib, torch_gib = peak_gib(lambda: both(fused)), peak_gib(lambda: both(stock))
    return [
        LoraTiming(
            **asdict(base), products_ms=floor, share_of_products=floor / base.ms, peak_gib=ours_gib,
            torch_peak_gib=torch_gib,
        )
        for base, floor in measured
    ]  # fmt: skip


def _forward(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return function()


if __name__ == "__main__":
    require_gpu()
    report(run())
