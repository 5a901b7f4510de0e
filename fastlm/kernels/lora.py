"""Low-rank adapters (Hu et al., 2021) over frozen projections, with the backward written out.

    y = x W^T + b + s (x A^T) B^T                                    W, b frozen; A [r, in], B [out, r] trained
    dx = dy W + s (dy B) A       dA = s (dy B)^T x       dB = s dy^T (x A^T)

autograd over PEFT's modules keeps a copy of x per dtype, writes the low-rank product and the sum as tensors of their
own and forms dx in pieces that it then adds. Here projections that read the same input share one skinny product for
all their A, the low-rank term is added inside the product that has to run anyway (addmm), and dx is accumulated in
place. `lora_mlp` does the whole gated MLP and keeps gate and up only: the product of the two is rebuilt in backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .glu import ACTIVATIONS, glu_bwd, glu_fwd, glu_reference
from .launch import use_triton
from .low_rank import (
    Dequantizable,
    Projection,
    a_gradients,
    b_gradients,
    dense,
    in_dtype,
    input_gradient,
    low_gradient,
    split_low,
    stack,
    summed,
)
from .rope import rope_fwd, rope_reference

__all__ = ["TILE", "Projection", "Rotation", "lora_linear", "lora_linear_reference", "lora_mlp", "lora_mlp_reference"]

TILE = 16_384  # tokens of an MLP at once: gate and up of Llama-3-8B take 0.9 GiB, and products run at full speed


@dataclass(frozen=True, eq=False)
class Rotation:
    """What turns queries and keys by their positions; see `rope`, layout "half".

    cos, sin: [B or 1, T, R], constants. head_dim: D of each head.
    """

    cos: Tensor
    sin: Tensor
    head_dim: int


@dataclass(frozen=True, eq=False)
class _Frozen:
    """The parts of projections that take no gradient, for ctx; tensors that do are explicit inputs of the Function."""

    weights: tuple[Tensor | Dequantizable, ...]
    biases: tuple[Tensor | None, ...]
    scales: tuple[float, ...]
    dtype: torch.dtype
    activation: str = ""
    output_needed: bool = True
    products_kept: bool = True
    head_dim: int = 0
    casts: tuple[tuple[Tensor, Tensor] | None, ...] = ()

    def cast(self, adapters: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """All a and all b in the compute dtype; a as it is where no cast is there, which `stack` makes."""
        count = len(self.weights)
        a, b = list(adapters[:count]), list(adapters[count:])
        for index, made in enumerate(self.casts):
            if made is not None and made[0].dtype == self.dtype:
                a[index], b[index] = made
        return a, [in_dtype(tensor, self.dtype) for tensor in b]


def _compute_dtype(x: Tensor, weight: Tensor | Dequantizable) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype if isinstance(weight, Tensor) else x.dtype


def _project(
    x: Tensor, low: Tensor | None, weight: Tensor, bias: Tensor | None, b: Tensor | None, s: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, in], low [T, r] -> [T, out], written into out if that is given."""
    if b is None or low is None:
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)
    if low.shape[1] % 2 and low.device.type == "cpu":  # with AMX it reads a column more, times zero: NaN stays NaN
        low = low.contiguous()
    out = torch.mm(low, b.t(), out=out) if bias is None else torch.addmm(bias.to(x.dtype), low, b.t(), alpha=s, out=out)
    return torch.addmm(out, x, weight.t(), beta=s if bias is None else 1.0, out=out)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(dtype)


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """y [T, out] -> [..., out] as x is, and no view for autograd: a caller may write into what a Function returns."""
    return torch.ops.aten._unsafe_view.default(y, x.shape[:-1] + y.shape[-1:])


def _turned(x: Sequence[Tensor], cos: Tensor, sin: Tensor, head_dim: int, *, backward: bool) -> list[Tensor]:
    """Queries and keys [B, T, heads * D]: forward in their own memory, backward in other."""
    q, k = (each.unflatten(-1, (-1, head_dim)) for each in x)
    if not use_triton(q, k, cos, sin):
        q, k = rope_reference(q, k, cos, -sin if backward else sin)
    else:
        q, k = rope_fwd(q, k, cos, sin, backward=backward, in_place=not backward)
    return [q.flatten(2), k.flatten(2)]


def _products(
    frozen: _Frozen, weights: Sequence[Tensor | Dequantizable], b: Sequence[Tensor | None], rows: Tensor,
    low: Tensor | None, outs: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Of as many projections as there are b: rows [T, in] -> [T, out] of each, written where room is given."""
    lows, outs = split_low(low, b), outs or [None] * len(b)
    return [
        _project(rows, lows[i], dense(weights[i], frozen.dtype), frozen.biases[i], b[i], frozen.scales[i], outs[i])
        for i in range(len(b))
    ]


class LoraLinearFunction(torch.autograd.Function):
    """n projections of one input; see `lora_linear`. Tensor inputs after ``frozen``: cos, sin, a_1..a_n, b_1..b_n."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, frozen: _Frozen, cos: Tensor | None, sin: Tensor | None, *adapters: Tensor | None
    ) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(x, frozen.dtype)
            a, cast = frozen.cast(adapters)
            stacked = stack(a, frozen.dtype)
            low = None if stacked is None else rows @ stacked.t()  # [T, sum of r]
            outputs = [_shaped(y, x) for y in _products(frozen, frozen.weights, cast, rows, low)]
            if cos is not None and sin is not None:
                outputs[:2] = _turned(outputs[:2], cos, sin, frozen.head_dim, backward=False)
        needed = None if stacked is None else rows
        ctx.save_for_backward(needed, low, stacked, cos, sin, *cast)  # adapters as cast: not cast again
        ctx.frozen, ctx.shape, ctx.dtype, ctx.dtypes = frozen, x.shape, x.dtype, _dtypes(adapters)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        rows, low, stacked, cos, sin, *b = ctx.saved_tensors
        frozen: _Frozen = ctx.frozen
        count = len(frozen.weights)
        if cos is not None:
            douts = (*_turned(douts[:2], cos, sin, frozen.head_dim, backward=True), *douts[2:])
        dys = [_rows(dout, frozen.dtype) for dout in douts]
        a_dtypes, b_dtypes = ctx.dtypes[:count], ctx.dtypes[count:]
        dlow = low_gradient(dys, b, frozen.scales)
        db = b_gradients([None] * count, dys, split_low(low, b), frozen.scales, b_dtypes)
        da = a_gradients(dlow, rows, b, a_dtypes)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dys, frozen.weights, frozen.dtype, dlow, stacked).view(ctx.shape).to(ctx.dtype)
        return dx, None, None, None, *da, *map(in_dtype, db, b_dtypes)


def _dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return glu_fwd(gate, up, activation) if use_triton(gate, up) else glu_reference(gate, up, activation)


def _gated_backward(
    dhidden: Tensor, gate: Tensor, up: Tensor, activation: str, rebuild: bool, owned: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dgate, dup, act(gate) * up or None), in one pass over gate and up; dhidden, and they if owned, make room."""
    if use_triton(dhidden, gate, up):
        if owned:  # if they were saved, another backward through the same graph meets torch's own error
            dgate, dup = gate, up
            torch.autograd.graph.increment_version((gate, up))
        else:
            dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        glu_bwd(dhidden, gate, up, activation, dgate, dup, dhidden if rebuild else None)
        return dgate, dup, dhidden if rebuild else None
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        hidden = glu_reference(gate, up, activation)
    dgate, dup = torch.autograd.grad(hidden, (gate, up), dhidden)
    return dgate, dup, hidden.detach()


def _mlp_tile(
    frozen: _Frozen, weights: Sequence[Tensor | Dequantizable], b: Sequence[Tensor | None], rows: Tensor,
    low: Tensor | None, low_down: Tensor | None = None, gate: Tensor | None = None, up: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(low_down, gate, up, out) of these rows, written where room is given; b: of gate, up and down, and down's A."""
    gate, up = _products(frozen, weights, b[:2], rows, low, (gate, up))
    if frozen.output_needed or b[3] is not None:
        hidden = _gated(gate, up, frozen.activation)
        if b[3] is not None:
            low_down = torch.mm(hidden, b[3].t(), out=low_down)
        if frozen.output_needed:
            weight = dense(weights[2], frozen.dtype)
            out = _project(hidden, low_down, weight, frozen.biases[2], b[2], frozen.scales[2], out)
    return low_down, gate, up, out


def _tiles(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Those that there are [T, ...], TILE tokens of each at a time: views."""
    return zip(*(repeat(None) if tensor is None else tensor.split(TILE) for tensor in tensors), strict=False)


class LoraMLPFunction(torch.autograd.Function):
    """A gated MLP; see `lora_mlp`. Tensor inputs after ``frozen``: a and b of gate, up, down.

    More than TILE tokens go through in tiles, however much is kept: one tile's gate, up and product of the two, and
    their gradients, are all there is besides what is kept. So every way of keeping gives the same bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: _Frozen, *adapters: Tensor | None) -> Tensor:
        dtype = frozen.dtype
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(x, dtype)
            a, b = frozen.cast(adapters)
            cast = [*b, in_dtype(a[2], dtype)]
            stacked = stack(a[:2], dtype)
            low = None if stacked is None else rows @ stacked.t()
            several = len(rows) > TILE
            kept = frozen.products_kept and (frozen.output_needed or not several)
            low_down, gate, up, out = None, None, None, None
            if not several:
                low_down, gate, up, out = _mlp_tile(frozen, frozen.weights, cast, rows, low)
            elif frozen.output_needed:  # else backward makes all that it needs
                weights = [dense(weight, dtype) for weight in frozen.weights]
                if cast[3] is not None:
                    low_down = rows.new_empty(len(rows), len(cast[3]))
                if kept:
                    gate, up = (rows.new_empty(len(rows), len(weight)) for weight in weights[:2])
                out = rows.new_empty(len(rows), len(weights[2]))
                for tile in _tiles(rows, low, low_down, gate, up, out):
                    _mlp_tile(frozen, weights, cast, *tile)
            out = rows.new_zeros(()).expand(x.shape) if out is None else _shaped(out, x)
        products = (gate, up) if kept else (None, None)
        needed = None if stacked is None and kept else rows
        ctx.save_for_backward(needed, low, low_down, *products, stacked, *cast)
        ctx.frozen, ctx.shape, ctx.dtype, ctx.dtypes = frozen, x.shape, x.dtype, _dtypes(adapters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        rows, low, low_down, gate, up, stacked, *b, a_down = ctx.saved_tensors
        frozen: _Frozen = ctx.frozen
        dtype, a_dtypes, b_dtypes = frozen.dtype, ctx.dtypes[:3], ctx.dtypes[3:]
        dy = _rows(dout, dtype)
        several, dx_wanted = len(dy) > TILE, ctx.needs_input_grad[0]
        # dense once for all tiles
        weights = [dense(weight, dtype) for weight in frozen.weights] if several else frozen.weights
        dlow_down = low_gradient([dy], b[2:], frozen.scales[2:])
        db_down = b_gradients([None], [dy], [low_down], frozen.scales[2:], b_dtypes[2:])
        owned = not (frozen.output_needed and frozen.products_kept)  # nobody else's, or of a graph of one backward
        sums: list[Tensor | None] = [None] * 3  # dB of gate and up, dA of down

        def run(
            dy: Tensor, dlow_down: Tensor | None, rows: Tensor, low: Tensor | None, gate: Tensor | None,
            up: Tensor | None, low_down: Tensor | None = None, dlow: Tensor | None = None, dx: Tensor | None = None,
        ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
            dhidden = input_gradient([dy], weights[2:], dtype, dlow_down, a_down)
            if gate is None or up is None:
                gate, up = _products(frozen, weights, b[:2], rows, low)
            dgate, dup, hidden = _gated_backward(dhidden, gate, up, frozen.activation, a_down is not None, owned)
            if dlow_down is not None and hidden is not None:
                sums[2] = summed(sums[2], dlow_down.t(), hidden, several=several, dtype=a_dtypes[2])
                if low_down is not None:
                    torch.mm(hidden, a_down.t(), out=low_down)
            dlow = low_gradient([dgate, dup], b[:2], frozen.scales[:2], dlow)
            lows = split_low(low, b[:2])
            sums[:2] = b_gradients(sums[:2], [dgate, dup], lows, frozen.scales[:2], b_dtypes[:2], several=several)
            del hidden, dhidden
            dx = input_gradient([dgate, dup], weights[:2], dtype, dlow, stacked, dx) if dx_wanted else None
            return dlow, dx

        if not several:
            dlow, dx = run(dy, dlow_down, rows, low, gate, up)
        else:
            late = None if a_down is None or low_down is not None else dy.new_empty(len(dy), len(a_down))
            dlow = None if low is None else torch.empty_like(low)
            dx = dy.new_empty(len(dy), ctx.shape[-1]) if dx_wanted else None
            for tile in _tiles(dy, dlow_down, rows, low, gate, up, late, dlow, dx):
                run(*tile)
            if late is not None:
                db_down = b_gradients([None], [dy], [late], frozen.scales[2:], b_dtypes[2:])
        da = (*a_gradients(dlow, rows, b[:2], a_dtypes[:2]), in_dtype(sums[2], a_dtypes[2]))
        dx = None if dx is None else dx.view(ctx.shape).to(ctx.dtype)
        return dx, None, *da, *map(in_dtype, (*sums[:2], *db_down), b_dtypes)


def _split(
    projections: Sequence[Projection],
    x: Tensor,
    activation: str = "",
    *,
    output_needed: bool = True,
    products_kept: bool = True,
    head_dim: int = 0,
) -> tuple[_Frozen, list[Tensor | None]]:
    for index, projection in enumerate(projections):
        trained = [t for t in (projection.weight, projection.bias) if isinstance(t, Tensor) and t.requires_grad]
        if trained:
            raise ValueError(f"projection {index}: weight and bias must be frozen; run a trained projection unfused")
        if (projection.a is None) != (projection.b is None):
            raise ValueError(f"projection {index} has one half of an adapter; give both a and b, or neither")
    frozen = _Frozen(
        tuple(p.weight for p in projections), tuple(p.bias for p in projections), tuple(p.scale for p in projections),
        _compute_dtype(x, projections[0].weight), activation, output_needed, products_kept, head_dim,
        tuple(p.casts for p in projections),
    )  # fmt: skip
    return frozen, [*(p.a for p in projections), *(p.b for p in projections)]


def lora_linear(
    x: Tensor, projections: Sequence[Projection], rotation: Rotation | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """Outputs of projections that read the same input: Q, K and V, or one alone.

    rotation: turns the first two, queries and keys of x [B, T, in], where they are; no copy of them is made.

    x [..., in]; returns one [..., out_i] per projection, in the compute dtype: autocast's where it is on, else the
    weight's (x's for a quantised weight). Gradients come back in x's and each adapter's own dtype. Equivalent to
    ``F.linear(x, W, b) + scale * F.linear(F.linear(x, A), B)`` with one rounding at the end.

    Raises ValueError for a trained weight or bias, or half an adapter.
    """
    frozen, adapters = _split(projections, x, head_dim=0 if rotation is None else rotation.head_dim)
    tables = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    return LoraLinearFunction.apply(x, frozen, *tables, *adapters)


def lora_mlp(
    x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str, *, output_needed: bool = True,
    products_kept: bool = True,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) * up(x)) with adapters on any of the three; x [..., in] -> [..., out].

    activation: "silu", "gelu_tanh" or "gelu". Dtypes and errors as for `lora_linear`. Keeps x, the gate and up
    products and the skinny products for backward. output_needed: False for a call whose backward alone is wanted,
    once, where out = in: zeros come back, without the down product, and the gradients are those of the full call.
    products_kept: False makes the gate and up products again in backward, for half of what a layer keeps; same bits.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    frozen, adapters = _split(
        (gate, up, down), x, activation, output_needed=output_needed,
        products_kept=products_kept and torch.is_grad_enabled(),
    )  # fmt: skip
    return LoraMLPFunction.apply(x, frozen, *adapters)


def lora_linear_reference(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """`lora_linear` in plain torch."""
    outputs = []
    for p in projections:
        weight = p.weight if isinstance(p.weight, Tensor) else p.weight.dense(x.dtype)
        y = torch.nn.functional.linear(x.to(weight.dtype), weight, p.bias)
        if p.a is not None and p.b is not None:
            y = y + p.scale * (x.to(p.a.dtype) @ p.a.t() @ p.b.t()).to(y.dtype)
        outputs.append(y)
    return tuple(outputs)


def lora_mlp_reference(x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str) -> Tensor:
    """`lora_mlp` in plain torch."""
    gated, lifted = lora_linear_reference(x, (gate, up))
    return lora_linear_reference(ACTIVATIONS[activation](gated) * lifted, (down,))[0]
