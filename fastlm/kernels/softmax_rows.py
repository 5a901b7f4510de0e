"""Cross-entropy over rows of logits in one launch: statistics first, then the gradient over the logits.

One program walks one row twice: an online pass (largest logit, sum of exponentials, target, mean, entropy,
argmax), and, when a gradient is wanted, a second pass that overwrites each raw logit x with ``factor
dloss/dx``. A row of V bf16 logits costs 6 V bytes of traffic with the gradient, 2 V without. All arithmetic
is fp32 in registers, one rounding at the store. The torch reference computes the same anywhere, in fp64 for
fp64 logits.

    z       = softcap * tanh(logit_scale * x / softcap) / temperature        (no tanh without a softcap)
    log p_v = z_v - lse(z)
    loss    = -(1 - label_smoothing) log p_y - label_smoothing mean_v(log p_v) + z_loss lse(z)^2
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import device_guard, exp_accurate, exponential, long_indexing, next_power_of_2, tl, triton, use_triton

__all__ = ["IGNORED", "RowLoss", "RowStatistics", "cross_entropy_rows", "cross_entropy_rows_reference"]

IGNORED = -100  # target of a row that has no loss
# Logits that a program takes in a step, and its warps (H200: 82% and 62% of a copy's bandwidth)
_LARGEST_BLOCK, _WARPS = 8192, 8
_LARGEST_CAPPED_BLOCK, _CAPPED_WARPS = 4096, 16  # fp32 too
_LARGEST_BOUND = 40.0  # exp(-2 * 40) is far above the smallest fp32


@dataclass(frozen=True)
class RowLoss:
    """What the loss of a row is; see the module's formula."""

    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Where the results of R rows go: contiguous [R] in fp32 (fp64 for fp64 logits), `is_top1` in bool.

    `entropy` and `is_top1` are both None where statistics are not wanted.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device, *, statistics: bool) -> "RowStatistics":
        loss, log_probs, entropy = (torch.empty(rows, dtype=dtype, device=device) for _ in range(3))
        if not statistics:
            return cls(loss, log_probs, None, None)
        return cls(loss, log_probs, entropy, torch.empty(rows, dtype=torch.bool, device=device))

    def rows(self, start: int, stop: int) -> "RowStatistics":
        entropy = None if self.entropy is None else self.entropy[start:stop]
        is_top1 = None if self.is_top1 is None else self.is_top1[start:stop]
        return RowStatistics(self.loss[start:stop], self.log_probs[start:stop], entropy, is_top1)


@triton.jit
def _transform(
    x, logit_scale, softcap, temperature,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Raw logits to z, and dz/dx; what the caller drops is not computed."""
    z = x * logit_scale
    slope = logit_scale / temperature
    if HAS_SOFTCAP:
        if ACCURATE:  # tanh within two ulps, without libdevice, which has no interpreter
            ratio = tl.div_rn(z, softcap)
            square = ratio * ratio
            series = ratio * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
            e = exp_accurate(-2 * tl.abs(ratio))
            tanh = tl.where(ratio < 0, e - 1, 1 - e) / (1 + e)
            z = softcap * tl.where(square < 0.0225, series, tanh)
            slope = slope * (4 * e / ((1 + e) * (1 + e)))  # 1 - tanh^2, which keeps its digits at the cap
        else:  # to an ulp of the cap, and of 1
            half = 1 / (1 + tl.exp(z * (2 / softcap)))  # (1 - tanh) / 2
            z = softcap - 2 * softcap * half
            slope = slope * (4 * half * (1 - half))
    if HAS_TEMPERATURE:
        z = tl.div_rn(z, temperature)  # plain division is off by two ulps on a GPU, which exp multiplies
    return z, slope


@triton.jit
def _load_block(row_ptr, column, start, vocabulary, BLOCK: tl.constexpr):
    """A block of raw logits in fp32; only the last is masked: at an odd V a mask undoes vector loads."""
    if start + BLOCK <= vocabulary:
        x = tl.load(row_ptr + column)
    else:
        x = tl.load(row_ptr + column, mask=column < vocabulary, other=0.0)
    return x.to(tl.float32)


@triton.jit
def cross_entropy_rows_kernel(
    logits_ptr, logits_stride, targets_ptr, factor_ptr, loss_ptr, log_probs_ptr, entropy_ptr, is_top1_ptr,
    vocabulary, logit_scale, softcap, temperature, label_smoothing, z_loss,
    IGNORE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_STATISTICS: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    HAS_FACTOR: tl.constexpr, IS_BOUNDED: tl.constexpr, LONG_INDEXING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits [R, V]; the rest are [R]."""
    # with 16-bit logits, what the fast forms lose is a thousandth of the rounding of a logit
    ACCURATE: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    row_offset = row * logits_stride
    if LONG_INDEXING:
        row_offset = row.to(tl.int64) * logits_stride
    row_ptr = logits_ptr + row_offset

    target = tl.load(targets_ptr + row)
    valid = target != IGNORE
    known = (target >= 0) & (target < vocabulary)
    x_target = tl.load(row_ptr + tl.where(known, target, 0)).to(tl.float32)
    z_target, _target_slope = _transform(
        x_target, logit_scale, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE, ACCURATE
    )
    z_target = tl.where(known, z_target, float("nan"))  # a target outside the vocabulary must show

    best = -float("inf")
    if IS_BOUNDED:
        best = softcap / temperature  # what no z exceeds: nothing to search, and no exp(z - best) vanishes
    best_column = 0
    total = 0.0  # sum of exp(z - best)
    weighted = 0.0  # sum of exp(z - best) * (z - best)
    plain = 0.0  # sum of z
    totals = tl.zeros([BLOCK], dtype=tl.float32)  # IS_BOUNDED: of exp(z - best), column by column
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = _load_block(row_ptr, column, start, vocabulary, BLOCK)
        z, _slope = _transform(x, logit_scale, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE, ACCURATE)
        if HAS_SMOOTHING:
            plain += tl.sum(tl.where(inside, z, 0.0), axis=0)
        z = tl.where(inside, z, -float("inf"))
        if IS_BOUNDED:
            totals += exponential(z - best, ACCURATE)
        else:
            block_best = tl.max(z, axis=0)
            new_best = tl.maximum(best, block_best)
            shrink = exponential(best - new_best, ACCURATE)
            shifted = z - new_best
            e = exponential(shifted, ACCURATE)
            if HAS_STATISTICS:
                block_column = tl.min(tl.where(z == block_best, column, vocabulary), axis=0)  # first of equals
                best_column = tl.where(block_best > best, block_column, best_column)
                moved = tl.where(total > 0, best - new_best, 0.0)  # best is -inf before the first block
                weighted = shrink * (weighted + moved * total)
                weighted += tl.sum(e * tl.where(inside, shifted, 0.0), axis=0)
            total = shrink * total + tl.sum(e, axis=0)
            best = new_best

    if IS_BOUNDED:
        total = tl.sum(totals, axis=0)
    log_total = tl.log(total)
    lse = best + log_total
    log_prob = (z_target - best) - log_total  # not z_target - lse: a confident row would lose its digits
    loss = -log_prob
    if HAS_SMOOTHING:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - plain / vocabulary)
    loss += z_loss * lse * lse
    tl.store(loss_ptr + row, tl.where(valid, loss, 0.0))
    tl.store(log_probs_ptr + row, tl.where(valid, log_prob, 0.0))
    if HAS_STATISTICS:
        tl.store(entropy_ptr + row, tl.where(valid, log_total - weighted / total, 0.0))
        tl.store(is_top1_ptr + row, (valid & (best_column == target)).to(tl.int8))

    if HAS_GRADIENT:
        factor = 1.0
        if HAS_FACTOR:
            factor = tl.load(factor_ptr + row)
        inverse_total = 1.0 / total
        lse_gain = 1 + 2 * z_loss * lse
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = _load_block(row_ptr, column, start, vocabulary, BLOCK)
            z, slope = _transform(x, logit_scale, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE, ACCURATE)
            gradient = exponential(z - best, ACCURATE) * inverse_total * lse_gain
            if HAS_SMOOTHING:
                gradient -= label_smoothing / vocabulary
            gradient = tl.where(column == target, gradient - (1 - label_smoothing), gradient)
            gradient = tl.where(valid, gradient * slope * factor, 0.0)
            gradient = gradient.to(logits_ptr.dtype.element_ty)
            if start + BLOCK <= vocabulary:
                tl.store(row_ptr + column, gradient)
            else:
                tl.store(row_ptr + column, gradient, mask=column < vocabulary)


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    results: RowStatistics,
    row_loss: RowLoss,
    *,
    gradient: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Fill `results` for R rows of raw logits and, with `gradient`, overwrite the logits with their gradient.

    logits [R, V] bf16, fp16 or fp32, rows at any stride, columns contiguous; targets [R] int64, `IGNORED` for
    a row whose results and gradient are 0. With `gradient`, logits become ``factor[r] dloss_r/dlogits[r]``
    (`factor` [R] fp32, None: 1). A target outside [0, V) raises on a CPU and makes the loss NaN on a GPU,
    where raising would make the GPU wait. Nothing here makes it wait.
    """
    if not use_triton(logits, targets, results.loss):
        cross_entropy_rows_reference(logits, targets, results, row_loss, gradient=gradient, factor=factor)
        return
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    if logits.stride(1) != 1:
        raise ValueError(f"columns of the logits must be contiguous, their stride is {logits.stride(1)}")
    has_statistics = results.entropy is not None and results.is_top1 is not None
    unused = results.loss
    largest, warps = _LARGEST_BLOCK, _WARPS
    if row_loss.softcap is not None or logits.dtype == torch.float32:
        largest, warps = _LARGEST_CAPPED_BLOCK, _CAPPED_WARPS
    block = min(next_power_of_2(vocabulary), largest)
    with device_guard(logits):
        cross_entropy_rows_kernel[(rows,)](
            logits,
            logits.stride(0),
            targets.contiguous(),
            unused if factor is None else factor.contiguous(),
            results.loss,
            results.log_probs,
            results.entropy if has_statistics else unused,
            results.is_top1.view(torch.int8) if results.is_top1 is not None else unused,
            vocabulary,
            float(row_loss.logit_scale),
            float(row_loss.softcap or 1.0),
            float(row_loss.temperature),
            float(row_loss.label_smoothing),
            float(row_loss.z_loss),
            IGNORE=IGNORED,
            HAS_SOFTCAP=row_loss.softcap is not None,
            HAS_TEMPERATURE=row_loss.temperature != 1.0,
            HAS_SMOOTHING=row_loss.label_smoothing != 0.0,
            HAS_STATISTICS=has_statistics,
            HAS_GRADIENT=gradient,
            HAS_FACTOR=factor is not None,
            IS_BOUNDED=not has_statistics and 0 < (row_loss.softcap or 0.0) / row_loss.temperature <= _LARGEST_BOUND,
            LONG_INDEXING=long_indexing(logits),
            BLOCK=block,
            num_warps=warps if block == largest else 4,
        )


def cross_entropy_rows_reference(
    logits: Tensor,
    targets: Tensor,
    results: RowStatistics,
    row_loss: RowLoss,
    *,
    gradient: bool = False,
    factor: Tensor | None = None,
) -> None:
    """The same as `cross_entropy_rows`, in torch operations; fp64 logits are computed in fp64."""
    valid = targets != IGNORED
    column = torch.where(valid, targets, 0).unsqueeze(-1)  # [R, 1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * row_loss.logit_scale  # [R, V], a copy
    tanh = None
    if row_loss.softcap is not None:
        tanh = z.div_(row_loss.softcap).tanh_()
        z = tanh * row_loss.softcap
    z.div_(row_loss.temperature)

    best = z.amax(-1, keepdim=True)
    z.sub_(best)  # a confident row would lose its digits in z - lse
    p = torch.exp(z)
    total = p.sum(-1, keepdim=True)
    p.div_(total)
    log_total = total.log().squeeze(-1)
    lse = best.squeeze(-1) + log_total
    log_probs = z.gather(-1, column).squeeze(-1) - log_total
    loss = -log_probs
    if row_loss.label_smoothing:
        loss = torch.lerp(loss, log_total - z.mean(-1), row_loss.label_smoothing)
    if row_loss.z_loss:
        loss = loss + row_loss.z_loss * lse.square()
    results.loss.copy_(loss.masked_fill(~valid, 0.0))
    results.log_probs.copy_(log_probs.masked_fill(~valid, 0.0))
    if results.entropy is not None and results.is_top1 is not None:
        results.entropy.copy_((log_total - (p * z).sum(-1)).masked_fill(~valid, 0.0))
        results.is_top1.copy_((z.argmax(-1, keepdim=True) == column).squeeze(-1) & valid)

    if gradient:
        if row_loss.z_loss:
            p.mul_((1 + 2 * row_loss.z_loss * lse).unsqueeze(-1))
        if row_loss.label_smoothing:
            p.sub_(row_loss.label_smoothing / logits.shape[-1])
        p.scatter_add_(-1, column, torch.full_like(column, row_loss.label_smoothing - 1, dtype=p.dtype))
        if tanh is not None:
            p.mul_(1 - tanh.square())
        slope = row_loss.logit_scale / row_loss.temperature
        p.mul_(slope if factor is None else (factor * slope).unsqueeze(-1))
        logits.copy_(p.masked_fill_(~valid.unsqueeze(-1), 0.0))
