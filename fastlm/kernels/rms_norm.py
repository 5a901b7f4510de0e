"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * w, with one read and one write of x.

Replaces the RMSNorm modules of transformers, which read and write x about six times, half of them in fp32, and
the residual add before (`add_rms_norm`) or after (`rms_norm_add`) them. Forward keeps one fp32 number a row (the
reciprocal root); backward forms dx and, for a trainable weight, dw in one pass over x and dy. The weight gradient
is summed in fp32 in a fixed order, without atomics. `layer_norm` runs the same kernels, less the mean.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import (
    as_rows,
    device_guard,
    long_indexing,
    looping_programs,
    next_power_of_2,
    row_offset,
    tl,
    triton,
    use_triton,
)
from .partial_sums import sum_partials

__all__ = ["RMSNormFunction", "RMSNormOptions", "add_rms_norm", "check_norm", "rms_norm",
           "rms_norm_add", "rms_norm_beside", "rms_norm_bwd", "rms_norm_fwd", "rms_norm_reference"]  # fmt: skip


@dataclass(frozen=True)
class RMSNormOptions:
    """What is not differentiated."""

    eps: float
    offset: float
    cast_before_scale: bool
    add: str = ""  # a residual is added "before" the norm (the sum is returned too) or "after" it; x stays "beside" it
    centred: bool = False  # the mean is subtracted first: LayerNorm


@dataclass(frozen=True)
class _Launch:
    """Block sizes for rows of H elements."""

    block: int  # columns of a program: H padded to a power of two, a row never leaves its program
    rows: int  # rows of a program: short rows (query and key norms) share one
    warps: int
    stages: int = 0  # rows in flight in a program that loops, the next ones on their way; 0: it takes one turn

    @classmethod
    def of(cls, width: int, head_warps: int, *, twice: bool = False) -> "_Launch":
        """For programs that take one turn, the fastest of each width (H200); twice: that sum a row and sum it again.

        16 elements a thread, in head_warps warps where a row is a head; long rows in 4 where padding leaves some idle.
        """
        block = next_power_of_2(width)
        if block <= 2048:
            elements, warps = 1024 if twice else 2048, head_warps if block <= 256 else 4
        else:
            elements, warps = block, 4 if width < block or twice else 8
        return cls(block, max(1, elements // block), warps if block <= 8192 else 16)

    @classmethod
    def looping(cls, width: int, element_size: int) -> "_Launch":
        """For the weight gradient and long rows: 16 elements a thread, whose sums, x, dy and w fill 128 registers."""
        block = next_power_of_2(width)
        rows = max(1, min(32, 2048 // block))
        # at most 96 KiB of x, dy and dsummed in shared memory: an sm_86 has 99
        stages = 1 + min(2, 32 * 1024 // (block * rows * element_size))
        return cls(block, rows, max(4, min(16, block * rows // 512)), stages)


@triton.jit
def _load_weight(
    weight_pointer, row, column, mask, WIDTH: tl.constexpr, WEIGHT_ROWS: tl.constexpr, OFFSET: tl.constexpr
):
    """offset + weight in fp32, for rows of x: [1, BLOCK], or [ROWS, BLOCK] where rows take turns (heads)."""
    if WEIGHT_ROWS == 1:
        weight = tl.load(weight_pointer + column, mask=mask, other=0.0)[None, :]
    else:
        address = weight_pointer + (row % WEIGHT_ROWS)[:, None] * WIDTH + column[None, :]
        weight = tl.load(address, mask=mask[None, :], other=0.0)
    return weight.to(tl.float32) + OFFSET


@triton.jit(do_not_specialize=["row_count", "inner"])
def _rms_norm_forward_kernel(
    x_pointer, residual_pointer, weight_pointer, y_pointer, summed_pointer, statistics_pointer, row_count, inner,
    x_outer_stride, x_inner_stride, residual_outer_stride, residual_inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WEIGHT_ROWS: tl.constexpr, OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr, FLAT: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    if LONG_INDEXING:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    row_mask = row < row_count
    column_mask = column < WIDTH
    mask = row_mask[:, None] & column_mask[None, :]
    x_row = row_offset(row, inner, x_outer_stride, x_inner_stride, FLAT)
    out = row[:, None] * WIDTH + column[None, :]

    x_stored = tl.load(x_pointer + x_row[:, None] + column[None, :], mask=mask, other=0.0)  # [ROWS, BLOCK]
    weight = _load_weight(weight_pointer, row, column, column_mask, WIDTH, WEIGHT_ROWS, OFFSET)
    if ADD != "":
        residual_row = row_offset(row, inner, residual_outer_stride, residual_inner_stride, FLAT)
        residual = tl.load(residual_pointer + residual_row[:, None] + column[None, :], mask=mask, other=0.0)
    if ADD == "before":  # rounded as torch rounds it; the norm is that of the rounded sum
        x_stored = (x_stored.to(tl.float32) + residual.to(tl.float32)).to(summed_pointer.dtype.element_ty)
        tl.store(summed_pointer + out, x_stored, mask=mask)
    x = x_stored.to(tl.float32)
    if CENTRED:
        mean = tl.div_rn(tl.sum(x, axis=1), WIDTH * 1.0)
        tl.store(statistics_pointer + row_count + row, mean, mask=row_mask)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1), WIDTH * 1.0) + eps)  # [ROWS]
    tl.store(statistics_pointer + row, rstd, mask=row_mask)

    normed = x * rstd[:, None]
    if CAST_BEFORE_SCALE:
        normed = normed.to(x_stored.dtype).to(tl.float32)
    y = normed * weight
    if ADD == "after":
        if not CAST_BEFORE_SCALE or x_stored.dtype == weight_pointer.dtype.element_ty:
            y = y.to(x_stored.dtype).to(tl.float32)  # the norm's own result, which two dtypes promote to fp32
        y += residual.to(tl.float32)
    tl.store(y_pointer + out, y.to(y_pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_count", "inner", "program_count"])
def _rms_norm_backward_kernel(
    dy_pointer, x_pointer, weight_pointer, statistics_pointer, dsummed_pointer, dx_pointer, partial_pointer,
    row_count, inner, program_count, dy_outer_stride, dy_inner_stride, x_outer_stride, x_inner_stride,
    dsummed_outer_stride, dsummed_inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, OFFSET: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, ADD: tl.constexpr,
    CENTRED: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, FLAT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # program p takes row blocks p, p + program_count, ... (STAGES 0: only p): with xhat = x * rstd and g = dy * w,
    # dx = rstd * (g - xhat * mean(g * xhat)) and dw = sum over rows of dy * xhat;
    # LayerNorm: xhat = (x - mean(x)) * rstd, and dx is less by rstd * mean(g)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_mask = column < WIDTH
    lane = tl.arange(0, ROWS)
    weight_row = program * ROWS + lane  # program_count * ROWS is a multiple of WEIGHT_ROWS: a lane meets one row only
    if STAGES > 0:
        weight = _load_weight(weight_pointer, weight_row, column, column_mask, WIDTH, WEIGHT_ROWS, OFFSET)
    weight_gradient = tl.zeros([ROWS, BLOCK], dtype=tl.float32)  # lanes are summed once, at the end

    turns = tl.cdiv(tl.cdiv(row_count, ROWS) - program, program_count) if STAGES > 0 else 1
    for turn in tl.range(0, turns, num_stages=STAGES):
        row = (program + turn * program_count) * ROWS + lane
        if LONG_INDEXING:
            row = row.to(tl.int64)
        row_mask = row < row_count
        mask = row_mask[:, None] & column_mask[None, :]
        x_row = row_offset(row, inner, x_outer_stride, x_inner_stride, FLAT)
        dy_row = row_offset(row, inner, dy_outer_stride, dy_inner_stride, FLAT)

        x_stored = tl.load(x_pointer + x_row[:, None] + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_pointer + dy_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_pointer + row, mask=row_mask, other=0.0)
        if STAGES == 0:  # after the rows, which it would keep waiting
            weight = _load_weight(weight_pointer, weight_row, column, column_mask, WIDTH, WEIGHT_ROWS, OFFSET)

        normed = x_stored.to(tl.float32) * rstd[:, None]
        scaled = dy * weight
        if CENTRED:
            mean = tl.load(statistics_pointer + row_count + row, mask=row_mask, other=0.0)
            normed = (x_stored.to(tl.float32) - mean[:, None]) * rstd[:, None]
        slope = tl.sum(scaled * normed, axis=1) / WIDTH
        dx = scaled - normed * slope[:, None]
        if CENTRED:
            dx -= (tl.sum(scaled, axis=1) / WIDTH)[:, None]
        dx = rstd[:, None] * dx
        if ADD == "before":
            dsummed_row = row_offset(row, inner, dsummed_outer_stride, dsummed_inner_stride, FLAT)
            dsummed = tl.load(dsummed_pointer + dsummed_row[:, None] + column[None, :], mask=mask, other=0.0)
            dx += dsummed.to(tl.float32)
        dx_address = dx_pointer + row[:, None] * WIDTH + column[None, :]
        tl.store(dx_address, dx.to(dx_pointer.dtype.element_ty), mask=mask)
        if WEIGHT_GRADIENT:
            if CAST_BEFORE_SCALE:
                normed = normed.to(x_stored.dtype).to(tl.float32)  # what the weight really multiplied
            weight_gradient += dy * normed

    if WEIGHT_GRADIENT:  # a few hundred programs: int32 is enough
        if WEIGHT_ROWS == 1:
            total = tl.sum(weight_gradient, axis=0)
            tl.store(partial_pointer + program * WIDTH + column, total, mask=column_mask)
        else:
            address = partial_pointer + (program * ROWS + lane)[:, None] * WIDTH + column[None, :]
            tl.store(address, weight_gradient, mask=column_mask[None, :])


def rms_norm_fwd(
    x: Tensor, weight: Tensor, options: RMSNormOptions, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [..., H], what was normalised (x, or x + residual) and fp32 [1, rows]: rstd ([2, ..] centred: mean)."""
    added = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = torch.empty(x.shape, dtype=added, device=x.device) if options.add == "before" else x
    dtype = torch.promote_types(added, weight.dtype) if options.cast_before_scale else added
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    width, row_count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    statistics = torch.empty(1 + options.centred, row_count, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, summed, statistics
    rows, residual_rows = as_rows(x, x if residual is None else residual)
    weight = weight.contiguous()
    launch = _Launch.of(width, 2, twice=options.centred)
    with device_guard(x):
        _rms_norm_forward_kernel[(triton.cdiv(row_count, launch.rows),)](
            rows, residual_rows, weight, y, summed, statistics, row_count, rows.shape[1],
            rows.stride(0), rows.stride(1), residual_rows.stride(0), residual_rows.stride(1), options.eps,
            WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, WEIGHT_ROWS=weight.numel() // width,
            OFFSET=options.offset, CAST_BEFORE_SCALE=options.cast_before_scale,
            ADD=options.add if residual is not None else "",
            CENTRED=options.centred, FLAT=rows.shape[1] == 1,
            LONG_INDEXING=long_indexing(rows, residual_rows, y), num_warps=launch.warps,
        )  # fmt: skip
    return y, summed, statistics


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, options: RMSNormOptions, *, weight_gradient: bool,
    dsummed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Of what was normalised, x: dx [..., H] (plus dsummed), contiguous; dw in the weight's dtype, if asked for."""
    width = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if weight_gradient else None
    x_rows, dy_rows, dsummed_rows = as_rows(x, dy, dy if dsummed is None else dsummed)
    weight = weight.contiguous()
    launch, row_count, weight_rows = _Launch.of(width, 4), statistics.shape[1], weight.numel() // width
    partial = dx  # never written without WEIGHT_GRADIENT
    # without a weight's gradient too where it is faster: 0.204 ms, not 0.272, for 8,192 columns (H200)
    loops = weight_gradient or width > 4096
    if loops:
        launch = _Launch.looping(width, max(x.element_size(), dy.element_size()))
    programs = triton.cdiv(row_count, launch.rows)
    if loops:
        turn = weight_rows // gcd(weight_rows, launch.rows)  # programs whose lanes cover whole weights
        programs = triton.cdiv(looping_programs(programs, launch.warps, x.device), turn) * turn
    if weight_gradient:
        partial_rows = programs if weight_rows == 1 else programs * launch.rows // weight_rows
        partial = torch.empty(partial_rows, weight.numel(), dtype=torch.float32, device=x.device)
    with device_guard(x):
        _rms_norm_backward_kernel[(programs,)](
            dy_rows, x_rows, weight, statistics, dsummed_rows, dx, partial, row_count, x_rows.shape[1], programs,
            dy_rows.stride(0), dy_rows.stride(1), x_rows.stride(0), x_rows.stride(1),
            dsummed_rows.stride(0), dsummed_rows.stride(1),
            WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, STAGES=launch.stages, WEIGHT_ROWS=weight_rows,
            OFFSET=options.offset, CAST_BEFORE_SCALE=options.cast_before_scale,
            ADD="" if dsummed is None else "before", CENTRED=options.centred, WEIGHT_GRADIENT=weight_gradient,
            FLAT=x_rows.shape[1] == 1, LONG_INDEXING=long_indexing(x_rows, dy_rows, dsummed_rows, dx),
            num_warps=launch.warps,
        )  # fmt: skip
    return dx, sum_partials(partial, weight.dtype).view(weight.shape) if weight_gradient else None


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm by the kernels above, with or without a residual, and LayerNorm; see `rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, options: RMSNormOptions, residual: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, summed, statistics = rms_norm_fwd(x, weight, options, residual)
        ctx.save_for_backward(summed, weight, statistics)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y if options.add in ("", "after") else (y, summed)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dsummed: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        if dy is None:  # nobody used the norm
            return dsummed, None, None, dsummed if ctx.options.add == "before" else None
        (x, weight, statistics), wanted = ctx.saved_tensors, ctx.needs_input_grad[1]
        dx, dw = rms_norm_bwd(dy, x, weight, statistics, ctx.options, weight_gradient=wanted, dsummed=dsummed)
        # one tensor for two inputs, as torch's own add returns it: autograd steals or writes to no shared gradient
        return dx, dw, None, {"before": dx, "after": dy}.get(ctx.options.add)


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
    check_norm("rms_norm", x, weight, offset=offset, cast_before_scale=cast_before_scale)
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps, offset=offset, cast_before_scale=cast_before_scale)
    return RMSNormFunction.apply(x, weight, RMSNormOptions(eps, offset, cast_before_scale), None)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, cast_before_scale: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm` of x + residual, and the sum itself, in one pass; differentiable in all three, through both results.

    Args and errors as `rms_norm`; residual has x's shape.
    Returns:
        y and summed, [..., H] each; summed is rounded to the dtype that torch promotes x and residual to.
    """
    check_norm("add_rms_norm", x, weight, residual, offset=offset, cast_before_scale=cast_before_scale)
    if not use_triton(x, residual, weight):
        summed = x + residual
        return rms_norm(summed, weight, eps, offset=offset, cast_before_scale=cast_before_scale), summed
    return RMSNormFunction.apply(x, weight, RMSNormOptions(eps, offset, cast_before_scale, "before"), residual)


def rms_norm_beside(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_scale: bool = True
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x, and x itself, whose gradient backward adds to the norm's in the same pass; args as there."""
    check_norm("rms_norm_beside", x, weight, offset=offset, cast_before_scale=cast_before_scale)
    if not use_triton(x, weight):
        return rms_norm(x, weight, eps, offset=offset, cast_before_scale=cast_before_scale), x
    return RMSNormFunction.apply(x, weight, RMSNormOptions(eps, offset, cast_before_scale, "beside"), None)


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, cast_before_scale: bool = True,
) -> Tensor:  # fmt: skip
    """residual + `rms_norm` of x, in one pass (gemma2, gemma3, olmo2, glm4); differentiable in all three.

    Args and errors as `rms_norm`; residual has x's shape. The norm is rounded before it is added, as in torch."""
    check_norm("rms_norm_add", x, weight, residual, offset=offset, cast_before_scale=cast_before_scale)
    if not use_triton(x, residual, weight):
        return residual + rms_norm(x, weight, eps, offset=offset, cast_before_scale=cast_before_scale)
    return RMSNormFunction.apply(x, weight, RMSNormOptions(eps, offset, cast_before_scale, "after"), residual)


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


def check_norm(
    name: str, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, offset: float, cast_before_scale: bool
) -> None:  # fmt: skip
    """Raises ValueError where x, weight [H], residual and options do not fit together."""
    shape, given = tuple(x.shape), tuple(weight.shape)
    if x.dim() == 0 or given != shape[-1:]:
        raise ValueError(f"{name}: weight has shape {given}, expected the last size of x {shape}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{name}: residual has shape {tuple(residual.shape)}, expected x's {shape}")
    if offset and cast_before_scale:
        raise ValueError(f"{name}: offset={offset} is added to an fp32 weight: pass cast_before_scale=False with it")
