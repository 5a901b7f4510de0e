"""Sums of what the programs of a kernel leave, in a fixed order: gradients without atomics."""

import torch
from torch import Tensor

from .launch import device_guard, long_indexing, next_power_of_2, tl, triton

__all__ = ["sum_partials"]


@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(
    partial_pointer, out_pointer, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LONG_INDEXING: tl.constexpr
):  # fmt: skip
    # width is no constant: attention's grows with the tokens, and each would be compiled
    program = tl.program_id(0)
    if LONG_INDEXING:
        program = program.to(tl.int64)
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        if LONG_INDEXING:
            row = row.to(tl.int64)
        mask = (row < count)[:, None] & column_mask[None, :]
        total += tl.load(partial_pointer + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out_pointer + column, tl.sum(total, axis=0).to(out_pointer.dtype.element_ty), mask=column_mask)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of contiguous fp32 [P, N], in a fixed order, rounded once to dtype: [N]."""
    count, width = partial.shape
    out = torch.empty(width, dtype=dtype, device=partial.device)
    rows = min(512, next_power_of_2(count))
    columns = 4096 // rows  # 8 at least: whole 32-byte sectors; many programs, one or two loads each
    with device_guard(partial):
        _sum_partials_kernel[(triton.cdiv(width, columns),)](
            partial, out, count, width, ROWS=rows, COLUMNS=columns, LONG_INDEXING=long_indexing(partial), num_warps=8
        )
    return out
