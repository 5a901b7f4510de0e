"""Frozen projections with low-rank adapters: the products that `lora` is made of, for rows of tokens.

Gradients of A and B are sums over tokens. Rows may come tile by tile: the sums then are fp32, and rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Dequantizable", "Projection", "a_gradients", "b_gradients", "dense", "in_dtype", "input_gradient", "low_gradient",
    "split_low", "stack", "summed",
]  # fmt: skip


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
    casts: a and b in the compute dtype, where somebody has made them for all projections at once.
    """

    weight: Tensor | Dequantizable
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    casts: tuple[Tensor, Tensor] | None = None


def dense(weight: Tensor | Dequantizable, dtype: torch.dtype) -> Tensor:
    """[out, in] in dtype."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


def in_dtype(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """The tensor in dtype, if there is one."""
    return None if tensor is None else tensor.to(dtype)


def stack(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """The A of every projection that has one, [sum of r, in], in the compute dtype."""
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < 2:
        return present[0].to(dtype) if present else None
    if all(upper.dtype == dtype and _follows(upper, lower) for upper, lower in pairwise(present)):
        rows, width = sum(len(tensor) for tensor in present), present[0].shape[1]
        return present[0].as_strided((rows, width), (width, 1))  # a contiguous row may have any stride
    out = present[0].new_empty(sum(len(tensor) for tensor in present), present[0].shape[1], dtype=dtype)
    for piece, tensor in zip(out.split([len(tensor) for tensor in present]), present, strict=True):
        piece.copy_(tensor)  # cast in its place; _foreach_copy_ takes 15 us for six, these 1.5 each (H200)
    return out


def _follows(upper: Tensor, lower: Tensor) -> bool:
    """Whether lower begins in memory where upper ends."""
    return (
        upper.is_contiguous() and lower.is_contiguous() and upper.dtype == lower.dtype
        and upper.data_ptr() + upper.nbytes == lower.data_ptr()
        and upper.untyped_storage().data_ptr() == lower.untyped_storage().data_ptr()
    )  # fmt: skip


def split_low(low: Tensor | None, b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """[T, sum of r] -> one [T, r] per projection with an adapter (views), None for the others."""
    if low is None:
        return [None] * len(b)
    pieces = iter(low.split([up.shape[1] for up in b if up is not None], dim=1))
    return [None if up is None else next(pieces) for up in b]


def summed(
    total: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, *, several: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """scale a b, over the tokens of all rows; several: of one tile, added to the fp32 total of those before it.

    dtype: that the sum is wanted in; a GPU's products write fp32 as well as what they read.
    """
    beta = 1 if several else 0
    if not several:
        wide = a.is_cuda and a.itemsize == 2 and dtype == torch.float32
        total = a.new_empty(a.shape[0], b.shape[1], dtype=dtype if wide else a.dtype)
    elif total is None:
        wider = torch.promote_types(a.dtype, torch.float32)
        total = torch.zeros(a.shape[0], b.shape[1], dtype=wider, device=a.device)
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, beta=beta, alpha=scale, out=total)
    if total.is_cuda:
        return torch.addmm(total, a, b, beta=beta, alpha=scale, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=scale)


def input_gradient(
    dys: Sequence[Tensor], weights: Sequence[Tensor | Dequantizable], dtype: torch.dtype, dlow: Tensor | None,
    stacked: Tensor | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """sum_i dy_i W_i + dlow A, accumulated in one buffer; it is written into out if that is given."""
    for index, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
        w = dense(weight, dtype)
        out = torch.mm(dy, w, out=out) if index == 0 else torch.addmm(out, dy, w, out=out)  # type: ignore[arg-type]
    assert out is not None
    return out if dlow is None or stacked is None else torch.addmm(out, dlow, stacked, out=out)


def low_gradient(
    dys: Sequence[Tensor], b: Sequence[Tensor | None], scales: Sequence[float], out: Tensor | None = None
) -> Tensor | None:
    """s dy B of every adapter side by side, [T, sum of r], written into out if that is given."""
    width = sum(up.shape[1] for up in b if up is not None)
    if width == 0:
        return None
    out = dys[0].new_empty(dys[0].shape[0], width) if out is None else out
    for dy, part, up, scale in zip(dys, split_low(out, b), b, scales, strict=True):
        if part is not None and up is not None:
            torch.addmm(part, dy, up, beta=0, alpha=scale, out=part)
    return out


def b_gradients(
    totals: Sequence[Tensor | None], dys: Sequence[Tensor], lows: Sequence[Tensor | None], scales: Sequence[float],
    dtypes: Sequence[torch.dtype | None], *, several: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """dB = s dy^T low of every projection, as `summed` does it; dtypes: of the parameters."""
    return [
        None if low is None else summed(total, dy.t(), low, scale, several=several, dtype=dtype)
        for total, dy, low, scale, dtype in zip(totals, dys, lows, scales, dtypes, strict=True)
    ]


def a_gradients(
    dlow: Tensor | None, rows: Tensor, b: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:  # fmt: skip
    """dA = dlow^T x of every projection, in its parameter's dtype, by one product [sum of r, in] for all."""
    if dlow is None:
        return [None] * len(b)
    present = {dtype for dtype in dtypes if dtype is not None}
    dtype = present.pop() if len(present) == 1 else None  # one cast for all
    stacked = summed(None, dlow.t(), rows, dtype=dtype)
    stacked = stacked if dtype is None else stacked.to(dtype)
    pieces = iter(stacked.split([up.shape[1] for up in b if up is not None]))
    return [in_dtype(None if up is None else next(pieces), dtype) for up, dtype in zip(b, dtypes, strict=True)]
