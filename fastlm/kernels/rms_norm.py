"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * w, with one read and one write of x.

Replaces the RMSNorm modules of transformers, which read and write x about six times, half of them in fp32.
Forward keeps one fp32 number a row (the reciprocal root); backward forms dx and, for a trainable weight, dw
in one pass over x and dy. The weight gradient is summed in fp32 in a fixed order, without atomics.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import (
    as_rows,
    device_guard,
    long_indexing,
    multiprocessor_count,
    next_power_of_2,
    tl,
    triton,
    use_triton,
)

__all__ = [
    "RMSNormFunction",
    "RMSNormOptions",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_reference",
]


@dataclass(frozen=True)
class RMSNormOptions:
    """What is not differentiated."""

    eps: float
    offset: float
    cast_before_scale: bool


@dataclass(frozen=True)
class _Launch:
    """Block sizes for rows of H elements."""

    block: int  # columns of a program: H padded to a power of two, a row never leaves its program
    rows: int  # rows of a program: short rows (query and key norms) share one, about 4096 elements each
    warps: int

    @classmethod
    def of(cls, width: int) -> "_Launch":
        block = next_power_of_2(width)
        warps = 4 if block <= 2048 else 8 if block <= 8192 else 16  # 16 to 32 fp32 values of x a thread
        return cls(block, max(1, min(32, 4096 // block)), warps)


PROGRAMS_PER_MULTIPROCESSOR = 4  # weight gradient: enough to hide latency, few partial sums to reduce


@triton.jit(do_not_specialize=["row_count", "inner"])
def _rms_norm_forward_kernel(
    x_pointer, weight_pointer, y_pointer, rstd_pointer,
    row_count, inner, x_outer_stride, x_inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    OFFSET: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    if LONG_INDEXING:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    row_mask = row < row_count
    column_mask = column < WIDTH
    mask = row_mask[:, None] & column_mask[None, :]
    x_row = (row // inner) * x_outer_stride + (row % inner) * x_inner_stride

    x_stored = tl.load(x_pointer + x_row[:, None] + column[None, :], mask=mask, other=0.0)  # [ROWS, BLOCK]
    x = x_stored.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)  # [ROWS]
    tl.store(rstd_pointer + row, rstd, mask=row_mask)

    weight = tl.load(weight_pointer + column, mask=column_mask, other=0.0).to(tl.float32)
    normed = x * rstd[:, None]
    if CAST_BEFORE_SCALE:
        y = normed.to(x_stored.dtype).to(tl.float32) * weight[None, :]
    else:
        y = normed * (weight + OFFSET)[None, :]
    y_address = y_pointer + row[:, None] * WIDTH + column[None, :]
    tl.store(y_address, y.to(y_pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_count", "inner", "program_count"])
def _rms_norm_backward_kernel(
    dy_pointer, x_pointer, weight_pointer, rstd_pointer, dx_pointer, partial_pointer,
    row_count, inner, program_count,
    dy_outer_stride, dy_inner_stride, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # program p takes row blocks p, p + program_count, ...: with xhat = x * rstd and g = dy * w,
    # dx = rstd * (g - xhat * mean(g * xhat)) and dw = sum over rows of dy * xhat
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_mask = column < WIDTH
    weight = tl.load(weight_pointer + column, mask=column_mask, other=0.0).to(tl.float32) + OFFSET
    weight_gradient = tl.zeros([BLOCK], dtype=tl.float32)

    for block in range(program, tl.cdiv(row_count, ROWS), program_count):
        row = block * ROWS + tl.arange(0, ROWS)
        if LONG_INDEXING:
            row = row.to(tl.int64)
        row_mask = row < row_count
        mask = row_mask[:, None] & column_mask[None, :]
        x_row = (row // inner) * x_outer_stride + (row % inner) * x_inner_stride
        dy_row = (row // inner) * dy_outer_stride + (row % inner) * dy_inner_stride

        x_stored = tl.load(x_pointer + x_row[:, None] + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_pointer + dy_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_pointer + row, mask=row_mask, other=0.0)

        normed = x_stored.to(tl.float32) * rstd[:, None]
        scaled = dy * weight[None, :]
        mean = tl.sum(scaled * normed, axis=1) / WIDTH
        dx = rstd[:, None] * (scaled - normed * mean[:, None])
        dx_address = dx_pointer + row[:, None] * WIDTH + column[None, :]
        tl.store(dx_address, dx.to(dx_pointer.dtype.element_ty), mask=mask)
        if WEIGHT_GRADIENT:
            if CAST_BEFORE_SCALE:
                normed = normed.to(x_stored.dtype).to(tl.float32)  # what the weight really multiplied
            weight_gradient += tl.sum(dy * normed, axis=0)

    if WEIGHT_GRADIENT:  # at most a few hundred programs: int32 is enough
        tl.store(partial_pointer + program * WIDTH + column, weight_gradient, mask=column_mask)


def rms_norm_fwd(x: Tensor, weight: Tensor, options: RMSNormOptions) -> tuple[Tensor, Tensor]:
    """Returns y [..., H], contiguous, and rstd [rows] fp32."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if options.cast_before_scale else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    row_count = x.numel() // max(x.shape[-1], 1)
    rstd = torch.empty(row_count, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd
    rows, weight = as_rows(x), weight.contiguous()
    launch = _Launch.of(x.shape[-1])
    with device_guard(x):
        _rms_norm_forward_kernel[(triton.cdiv(row_count, launch.rows),)](
            rows, weight, y, rstd, row_count, rows.shape[1], rows.stride(0), rows.stride(1), options.eps,
            WIDTH=x.shape[-1], BLOCK=launch.block, ROWS=launch.rows, OFFSET=options.offset,
            CAST_BEFORE_SCALE=options.cast_before_scale, LONG_INDEXING=long_indexing(rows, y),
            num_warps=launch.warps,
        )  # fmt: skip
    return y, rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, options: RMSNormOptions, *, weight_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns dx [..., H], contiguous, and dw [H] in the weight's dtype (None unless asked for)."""
    width = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if weight_gradient else None
    x_rows, dy_rows, weight = as_rows(x), as_rows(dy), weight.contiguous()
    launch, row_count = _Launch.of(width), rstd.numel()
    programs = triton.cdiv(row_count, launch.rows)
    partial = dx  # never written without WEIGHT_GRADIENT
    if weight_gradient:
        programs = min(programs, PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(x.device))
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with device_guard(x):
        _rms_norm_backward_kernel[(programs,)](
            dy_rows, x_rows, weight, rstd, dx, partial, row_count, x_rows.shape[1], programs,
            dy_rows.stride(0), dy_rows.stride(1), x_rows.stride(0), x_rows.stride(1),
            WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, OFFSET=options.offset,
            CAST_BEFORE_SCALE=options.cast_before_scale, WEIGHT_GRADIENT=weight_gradient,
            LONG_INDEXING=long_indexing(x_rows, dy_rows, dx), num_warps=launch.warps,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype) if weight_gradient else None


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm by the kernels above; see `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: RMSNormOptions) -> Tensor:
        y, rstd = rms_norm_fwd(x, weight, options)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dx, dw = rms_norm_bwd(dy, x, weight, rstd, ctx.options, weight_gradient=wanted)
        return dx, dw, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_scale: bool = True
) -> Tensor:
    """Root mean square normalisation of the last dimension, differentiable in x and weight.

    With xhat = x * rsqrt(mean(x^2) + eps) in fp32:

    - cast_before_scale=True (llama, qwen, mistral, phi3): ``weight * xhat.to(x.dtype)``; the result has
      the dtype that torch promotes x and weight to.
    - cast_before_scale=False (gemma with offset=1; olmo2, gpt_oss with offset=0):
      ``(xhat * (offset + weight.float())).to(x.dtype)``.

    Args:
        x: [..., H], bf16, fp16 or fp32 (fp64 only on the torch path); any strides.
        weight: [H].
        eps: added to the mean of squares.
        offset: added to the weight in fp32; needs cast_before_scale=False.
    Returns:
        [..., H], contiguous.
    Raises:
        ValueError: weight is not [H], or offset is given with cast_before_scale.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, expected the last size of x {tuple(x.shape)}"
        )
    if offset and cast_before_scale:
        raise ValueError(
            f"rms_norm: offset={offset} is added to the weight in fp32: pass cast_before_scale=False with it"
        )
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps, offset=offset, cast_before_scale=cast_before_scale)
    return RMSNormFunction.apply(x, weight, RMSNormOptions(eps, offset, cast_before_scale))


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_scale: bool = True
) -> Tensor:
    """`rms_norm` in plain torch, operation by operation as the modules of transformers do it."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_scale:
        return weight * normed.to(x.dtype)
    scale = offset + weight.float() if offset else weight.float()
    return (normed * scale).to(x.dtype)
