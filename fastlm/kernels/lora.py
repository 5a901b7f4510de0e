"""Low-rank adapters (Hu et al., 2021) over frozen projections, with the backward written out.

    y = x W^T + b + s (x A^T) B^T                                    W, b frozen; A [r, in], B [out, r] trained
    dx = dy W + s (dy B) A       dA = s (dy B)^T x       dB = s dy^T (x A^T)

autograd over PEFT's modules keeps a copy of x per dtype, writes the low-rank product and the sum as tensors of their
own and forms dx in pieces that it then adds. Here projections that read the same input share one skinny product for
all their A, the low-rank term is added inside the product that has to run anyway (addmm), and dx is accumulated in
place. `lora_mlp` does the whole gated MLP and keeps gate and up only: the product of the two is rebuilt in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .glu import ACTIVATIONS, glu_bwd, glu_fwd, glu_reference
from .launch import use_triton
from .rope import rope_fwd, rope_reference

__all__ = ["Projection", "Rotation", "lora_linear", "lora_linear_reference", "lora_mlp", "lora_mlp_reference"]


class Dequantizable(Protocol):
    """A frozen weight that is stored in fewer bits and made dense when it is needed."""

    def dense(self, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Projection:
    """One frozen projection and its adapter.

    weight: [out, in], or an object whose ``dense(dtype)`` gives it; requires no gradient.
    bias: [out] or None; requires no gradient.
    a, b: [r, in] and [out, r], trained; both None for a projection without an adapter.
    scale: s, the factor of the low-rank term.
    """

    weight: Tensor | Dequantizable
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


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


def _dense(weight: Tensor | Dequantizable, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


def _compute_dtype(x: Tensor, weight: Tensor | Dequantizable) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype if isinstance(weight, Tensor) else x.dtype


def _stack(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """The A of every projection that has one, [sum of r, in], in the compute dtype."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    return (present[0] if len(present) == 1 else torch.cat(present)).to(dtype)


def _project(x: Tensor, low: Tensor | None, weight: Tensor, bias: Tensor | None, b: Tensor | None, s: float) -> Tensor:
    """x [T, in], low [T, r] -> [T, out]."""
    if b is None or low is None:
        return x @ weight.t() if bias is None else torch.addmm(bias.to(x.dtype), x, weight.t())
    out = torch.mm(low, b.t()) if bias is None else torch.addmm(bias.to(x.dtype), low, b.t(), alpha=s)
    return torch.addmm(out, x, weight.t(), beta=s if bias is None else 1.0, out=out)


def _split_low(low: Tensor | None, b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """[T, sum of r] -> one [T, r] per projection with an adapter (views), None for the others."""
    if low is None:
        return [None] * len(b)
    pieces = iter(low.split([up.shape[1] for up in b if up is not None], dim=1))
    return [None if up is None else next(pieces) for up in b]


def _input_gradient(
    dys: Sequence[Tensor], weights: Sequence[Tensor | Dequantizable], dtype: torch.dtype, dlow: Tensor | None,
    stacked: Tensor | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """sum_i dy_i W_i + dlow A, accumulated in one buffer."""
    for dy, weight in zip(dys, weights, strict=True):
        dense = _dense(weight, dtype)
        out = dy @ dense if out is None else torch.addmm(out, dy, dense, out=out)
    assert out is not None
    return out if dlow is None or stacked is None else torch.addmm(out, dlow, stacked, out=out)


def _adapter_gradients(
    dys: Sequence[Tensor], lows: Sequence[Tensor | None], b: Sequence[Tensor | None], scales: Sequence[float],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """(s dy B of every adapter side by side [T, sum of r], dB of every projection in its parameter's dtype)."""
    width = sum(up.shape[1] for up in b if up is not None)
    if width == 0:
        return None, [None] * len(b)
    dlow = dys[0].new_empty(dys[0].shape[0], width)
    start = 0
    db: list[Tensor | None] = []
    for dy, low, up, scale, dtype in zip(dys, lows, b, scales, dtypes, strict=True):
        if up is None or low is None:
            db.append(None)
            continue
        part = dlow[:, start : start + up.shape[1]]
        torch.addmm(part, dy, up, beta=0, alpha=scale, out=part)
        start += up.shape[1]
        gradient = torch.empty_like(up)
        db.append(torch.addmm(gradient, dy.t(), low, beta=0, alpha=scale, out=gradient).to(dtype))
    return dlow, db


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


class LoraLinearFunction(torch.autograd.Function):
    """n projections of one input; see `lora_linear`. Tensor inputs after ``frozen``: cos, sin, a_1..a_n, b_1..b_n."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, frozen: _Frozen, cos: Tensor | None, sin: Tensor | None, *adapters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(frozen.weights)
        a, b = adapters[:count], adapters[count:]
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(x, frozen.dtype)
            stacked = _stack(a, frozen.dtype)
            low = None if stacked is None else rows @ stacked.t()  # [T, sum of r]
            cast = [_cast(tensor, frozen.dtype) for tensor in b]
            outputs = []
            for i, part in enumerate(_split_low(low, cast)):
                weight = _dense(frozen.weights[i], frozen.dtype)
                y = _project(rows, part, weight, frozen.biases[i], cast[i], frozen.scales[i])
                outputs.append(_shaped(y, x))
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
        dlow, db = _adapter_gradients(dys, _split_low(low, b), b, frozen.scales, ctx.dtypes[count:])
        da = _a_gradients(dlow, rows, b, ctx.dtypes[:count])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dys, frozen.weights, frozen.dtype, dlow, stacked).view(ctx.shape).to(ctx.dtype)
        return dx, None, None, None, *da, *db


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _a_gradients(
    dlow: Tensor | None, rows: Tensor | None, b: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """dA of every projection, in its parameter's dtype: dlow^T x, one skinny product for all."""
    if dlow is None or rows is None:
        return [None] * len(b)
    stacked = dlow.t() @ rows
    present = {dtype for dtype in dtypes if dtype is not None}
    if len(present) == 1:  # one cast for all
        stacked = stacked.to(present.pop())
    pieces = iter(stacked.split([up.shape[1] for up in b if up is not None]))
    return [None if up is None else next(pieces).to(dtype) for up, dtype in zip(b, dtypes, strict=True)]


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


def _gate_and_up(
    rows: Tensor, low: Tensor | None, b: Sequence[Tensor | None], frozen: _Frozen
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate, up = (
        _project(rows, part, _dense(frozen.weights[i], frozen.dtype), frozen.biases[i], b[i], frozen.scales[i])
        for i, part in enumerate(_split_low(low, b[:2]))
    )
    return gate, up


class LoraMLPFunction(torch.autograd.Function):
    """A gated MLP; see `lora_mlp`. Tensor inputs after ``frozen``: a and b of gate, up, down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: _Frozen, *adapters: Tensor | None) -> Tensor:
        a, b = adapters[:3], adapters[3:]
        dtype = frozen.dtype
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(x, dtype)
            stacked = _stack(a[:2], dtype)
            low = None if stacked is None else rows @ stacked.t()
            cast = [_cast(tensor, dtype) for tensor in (*b, a[2])]
            gate, up = _gate_and_up(rows, low, cast, frozen)
            rebuilt = a[2] is not None or frozen.output_needed
            hidden = _gated(gate, up, frozen.activation) if rebuilt else None
            low_down = None if cast[3] is None or hidden is None else hidden @ cast[3].t()
            if frozen.output_needed and hidden is not None:
                out = _project(hidden, low_down, _dense(frozen.weights[2], dtype), frozen.biases[2], cast[2],
                               frozen.scales[2])  # fmt: skip
                out = _shaped(out, x)
            else:
                out = rows.new_zeros(()).expand(x.shape)
        products = (gate, up) if frozen.products_kept else (None, None)
        needed = None if stacked is None and frozen.products_kept else rows
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
        dlow_down, db_down = _adapter_gradients([dy], [low_down], b[2:], frozen.scales[2:], b_dtypes[2:])
        dhidden = _input_gradient([dy], frozen.weights[2:], dtype, dlow_down, a_down)
        owned = not (frozen.output_needed and frozen.products_kept)  # nobody else's, or of a graph of one backward
        if not frozen.products_kept:
            gate, up = _gate_and_up(rows, low, b, frozen)
        dgate, dup, hidden = _gated_backward(dhidden, gate, up, frozen.activation, a_down is not None, owned)
        da_down = _a_gradients(dlow_down, hidden, b[2:], a_dtypes[2:])
        del hidden, dhidden
        dlow, db = _adapter_gradients([dgate, dup], _split_low(low, b[:2]), b[:2], frozen.scales[:2], b_dtypes[:2])
        da = _a_gradients(dlow, rows, b[:2], a_dtypes[:2])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient([dgate, dup], frozen.weights[:2], dtype, dlow, stacked).view(ctx.shape).to(ctx.dtype)
        return dx, None, *da, *da_down, *db, *db_down


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
        (gate, up, down), x, activation, output_needed=output_needed, products_kept=products_kept
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
