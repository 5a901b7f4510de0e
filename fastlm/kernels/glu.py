"""Gated linear units (Shazeer, 2020): act(gate) * up in one pass, for SwiGLU and GEGLU.

Replaces the activation and the product of transformers' MLPs: two reads and one write forward, where torch
writes act(gate) too; three reads and two writes backward, with act and its derivative recomputed from the
gate. Everything is fp32 between load and store, and rounded once. `glu_packed` reads both halves of one
projection's output in place and writes one packed gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .launch import (
    as_rows,
    device_guard,
    exp_accurate,
    exponential,
    long_indexing,
    next_power_of_2,
    row_offset,
    tl,
    triton,
    use_triton,
)

__all__ = ["ACTIVATIONS", "GluFunction", "PackedGluFunction", "glu", "glu_bwd", "glu_fwd", "glu_packed",
           "glu_packed_reference", "glu_reference"]  # fmt: skip

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}
# Columns a program: one 16-byte load of each operand a thread with 4 warps. With two, a store came between the loads,
# and backward in its inputs' memory took 1.29 ms, not 0.67 (16,338 x 14,336, H200).
MAX_BLOCK = 1024
WARPS = 4


@triton.jit
def _sigmoid(z, ACCURATE: tl.constexpr):
    """sigmoid(z) and 1 - sigmoid(z): ACCURATE to a few ulps of each, else to an ulp of 1, for half the instructions."""
    if ACCURATE:
        decay = exp_accurate(-tl.abs(z))
        large = 1.0 / (1.0 + decay)
        small = decay * large
        return tl.where(z >= 0, large, small), tl.where(z >= 0, small, large)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        return sigmoid, 1.0 - sigmoid


@triton.jit
def _activation(gate, ACTIVATION: tl.constexpr, ACCURATE: tl.constexpr):
    """act(gate) and its derivative, fp32; what the caller drops is not computed."""
    if ACTIVATION == "silu":
        sigmoid, rest = _sigmoid(gate, ACCURATE)
        activated = gate * sigmoid
        derivative = sigmoid * (1.0 + gate * rest)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3)
        square = gate * gate
        sigmoid, rest = _sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * square), ACCURATE)
        activated = gate * sigmoid
        derivative = sigmoid * (1.0 + gate * rest * 1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        normal = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        activated = gate * normal
        derivative = normal + gate * 0.3989422804014327 * exponential(-0.5 * gate * gate, ACCURATE)
    return activated, derivative


@triton.jit
def _saturated(out, SATURATE: tl.constexpr):
    """fp16: finite operands give a finite product."""
    if SATURATE:
        out = tl.where((out > 65504.0) & (out < float("inf")), 65504.0, out)
        out = tl.where((out < -65504.0) & (out > float("-inf")), -65504.0, out)
    return out


@triton.jit(do_not_specialize=["inner"])
def _glu_forward_kernel(
    gate_pointer, up_pointer, out_pointer, inner,
    gate_outer_stride, gate_inner_stride, up_outer_stride, up_inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMN_BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCURATE: tl.constexpr, SATURATE: tl.constexpr, FLAT: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    if LONG_INDEXING:
        row = row.to(tl.int64)
    mask = column < WIDTH
    gate_row = gate_pointer + row_offset(row, inner, gate_outer_stride, gate_inner_stride, FLAT)
    up_row = up_pointer + row_offset(row, inner, up_outer_stride, up_inner_stride, FLAT)
    gate = tl.load(gate_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_row + column, mask=mask, other=0.0).to(tl.float32)
    activated, _derivative = _activation(gate, ACTIVATION, ACCURATE)
    out = _saturated(activated * up, SATURATE)
    tl.store(out_pointer + row * WIDTH + column, out.to(out_pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner"])
def _glu_backward_kernel(
    dout_pointer, gate_pointer, up_pointer, dgate_pointer, dup_pointer, out_pointer, inner,
    dout_outer_stride, dout_inner_stride, gate_outer_stride, gate_inner_stride,
    up_outer_stride, up_inner_stride, gradient_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMN_BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCURATE: tl.constexpr, SATURATE: tl.constexpr, REBUILD: tl.constexpr,
    FLAT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    if LONG_INDEXING:
        row = row.to(tl.int64)
    mask = column < WIDTH
    dout_row = dout_pointer + row_offset(row, inner, dout_outer_stride, dout_inner_stride, FLAT)
    gate_row = gate_pointer + row_offset(row, inner, gate_outer_stride, gate_inner_stride, FLAT)
    up_row = up_pointer + row_offset(row, inner, up_outer_stride, up_inner_stride, FLAT)
    dout = tl.load(dout_row + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_row + column, mask=mask, other=0.0).to(tl.float32)
    activated, derivative = _activation(gate, ACTIVATION, ACCURATE)
    if REBUILD:
        out = _saturated(activated * up, SATURATE)
        tl.store(out_pointer + row * WIDTH + column, out.to(out_pointer.dtype.element_ty), mask=mask)
    if SATURATE:  # flat where the forward product was cut
        size = tl.abs(activated * up)
        dout = tl.where((size > 65504.0) & (size < float("inf")), 0.0, dout)
    dgate = dout * up * derivative
    dup = dout * activated
    gradient = row * gradient_stride + column
    tl.store(dgate_pointer + gradient, dgate.to(dgate_pointer.dtype.element_ty), mask=mask)
    tl.store(dup_pointer + gradient, dup.to(dup_pointer.dtype.element_ty), mask=mask)


def glu_fwd(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous, in the dtype that torch promotes the two to."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if gate.numel() == 0:
        return out
    gate, up = as_rows(gate, up)  # [outer, inner, I]
    with device_guard(gate):
        width, block, column_blocks = _columns(gate)
        _glu_forward_kernel[(gate.shape[0] * gate.shape[1] * column_blocks,)](
            gate, up, out, gate.shape[1], gate.stride(0), gate.stride(1), up.stride(0), up.stride(1),
            WIDTH=width, BLOCK=block, COLUMN_BLOCKS=column_blocks, ACTIVATION=activation,
            ACCURATE=dtype == torch.float32, SATURATE=dtype == torch.float16, FLAT=gate.shape[1] == 1,
            LONG_INDEXING=long_indexing(gate, up, out), num_warps=WARPS,
        )  # fmt: skip
    return out


def glu_bwd(
    dout: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, out: Tensor | None = None
) -> None:  # fmt: skip
    """Writes the gradients into dgate and dup [..., I]: contiguous, or the halves of one packed tensor.

    out: contiguous [..., I], filled with the forward's result in the same pass, so that nobody has to keep it.
    Each may be the memory of an input of its shape: an element is read before anything is written in its place.
    """
    if gate.numel() == 0:
        return
    dout, gate, up = as_rows(dout, gate, up)
    dgate, dup = (gradient.view(-1, gradient.shape[-1]) for gradient in (dgate, dup))
    dtype = torch.promote_types(gate.dtype, up.dtype)
    with device_guard(gate):
        width, block, column_blocks = _columns(gate)
        _glu_backward_kernel[(gate.shape[0] * gate.shape[1] * column_blocks,)](
            dout, gate, up, dgate, dup, dgate if out is None else out, gate.shape[1], dout.stride(0), dout.stride(1),
            gate.stride(0), gate.stride(1), up.stride(0), up.stride(1), dgate.stride(0),
            WIDTH=width, BLOCK=block, COLUMN_BLOCKS=column_blocks, ACTIVATION=activation,
            ACCURATE=dtype == torch.float32, SATURATE=dtype == torch.float16, REBUILD=out is not None,
            FLAT=gate.shape[1] == 1, LONG_INDEXING=long_indexing(dout, gate, up, dgate, dup), num_warps=WARPS,
        )  # fmt: skip


def _columns(rows: Tensor) -> tuple[int, int, int]:
    """Width of a row, columns that a program takes, programs a row."""
    width = rows.shape[-1]
    block = min(next_power_of_2(width), MAX_BLOCK)
    return width, block, -(-width // block)


class GluFunction(torch.autograd.Function):
    """act(gate) * up by the kernels above; see `glu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_fwd(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        glu_bwd(dout, gate, up, ctx.activation, dgate, dup)
        return dgate, dup, None


class PackedGluFunction(torch.autograd.Function):
    """act(gate) * up on the halves of one tensor; see `glu_packed`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return glu_fwd(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        gate, up = gate_up.chunk(2, dim=-1)
        dgate, dup = gradient.chunk(2, dim=-1)
        glu_bwd(dout, gate, up, ctx.activation, dgate, dup)
        return gradient, None


def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, element by element, differentiable in both.

    Computed in fp32 and rounded once. In fp16 a product of finite operands beyond 65504, infinity in
    torch, is cut to +-65504 with gradient 0; infinite operands stay infinite and NaN stays NaN.

    Args:
        gate, up: [..., I] of one shape; bf16, fp16 or fp32 (fp64 on the torch path); any strides.
        activation: "silu", "gelu_tanh" or "gelu" (exact, by erf).
    Returns:
        [..., I], in the dtype that torch promotes gate and up to.
    Raises:
        ValueError: shapes differ, or the activation is unknown.
    """
    _check_activation(activation)
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"glu: expected gate and up of one shape [..., I], got {tuple(gate.shape)}, {tuple(up.shape)}")
    if not use_triton(gate, up):
        return glu_reference(gate, up, activation)
    return GluFunction.apply(gate, up, activation)


def glu_packed(gate_up: Tensor, activation: str) -> Tensor:
    """`glu` of the two halves of gate_up [..., 2I], the gate first, without copying them apart.

    Returns:
        [..., I]; the gradient of gate_up is written as one tensor.
    Raises:
        ValueError: the last dimension is odd, or the activation is unknown.
    """
    _check_activation(activation)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"glu_packed: expected gate_up [..., 2I] with an even last size, got {tuple(gate_up.shape)}")
    if not use_triton(gate_up):
        return glu_packed_reference(gate_up, activation)
    return PackedGluFunction.apply(gate_up, activation)


def glu_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`glu` in plain torch, as the MLPs of transformers do it (fp16 overflow apart: see `glu`)."""
    activated = ACTIVATIONS[activation](gate)
    if torch.promote_types(gate.dtype, up.dtype) != torch.float16:
        return activated * up
    product = activated.float() * up.float()  # exact: rounded once, as a product in fp16 is
    return torch.where(product.isinf(), product, product.clamp(-65504.0, 65504.0)).half()


def glu_packed_reference(gate_up: Tensor, activation: str) -> Tensor:
    """`glu_packed` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return glu_reference(gate, up, activation)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
