"""Causal flash attention over packed samples in Triton, with sliding window, softcap and sinks.

After FlashAttention-2 (Dao, 2023) and the online softmax (Milakov and Gimelshein, 2018), for what torch's
varlen does not take, gemma2's capped logits, gpt_oss's sinks, fp32, and where it is faster. Logits, softmax and
sums are fp32; P and its gradient are rounded to the inputs' dtype for the products. No T x T tensor, no host sync,
no atomics: two runs give the same bits.

Full blocks that all rows of a tile see, or are seen by, take neither masks nor bounds: on Hopper, in long samples, they
come through tensor descriptors in a loop of their own, which never reads past its sample.

A launch has T // OWN + S tiles a head. Sample s owns those from cu_seqlens[s] // OWN + s on, never fewer than
it needs, and a program finds its sample by a search in cu_seqlens. That leaves at most one idle tile a
sample, where a grid of samples x max_length is mostly idle on ragged samples: 324 tiles of 64 against 1,088
for 16,384 tokens in 68 samples of up to 1,024.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .flash_launch import LOG2_E, FlashSettings, launch_parameters
from .flash_tiles import (
    described_rows,
    hides_some,
    keys_of,
    left_over,
    load_rows,
    logits_of,
    queries_of,
    row_address,
    sees,
    tile_of,
)  # fmt: skip
from .launch import device_guard, long_indexing, multiprocessor_count, tl, triton
from .partial_sums import sum_partials

__all__ = ["FlashFunction", "FlashSettings", "flash_attention", "flash_bwd", "flash_fwd"]

_FEW_PROGRAMS = 2  # dK and dV's a multiprocessor: below, each query head has its own, and their sum is another launch


@triton.jit
def _forward_step(
    q, k, v, out, peak, total, query, key, window, hides, inner_scale, outer_scale,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Output, largest logit and sum of a tile of queries with a block of keys more.

    hides: whether some query does not see some key; only then are query and key, their positions, read.
    """
    logits, _slope = logits_of(q, k, inner_scale, outer_scale, HAS_SOFTCAP)  # [OWN, STEP]
    if hides:
        logits = tl.where(sees(query[:, None], key[None, :], window, HAS_WINDOW), logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    p = tl.exp2(logits - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    out = tl.dot(p.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
    return out, new_peak, total * decay + tl.sum(p, 1)


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _forward_kernel(
    q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, lse_pointer, cu_seqlens_pointer,
    sample_count, token_count, window, inner_scale, outer_scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, k_rows, v_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DESCRIBED: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a sample's last queries, which see most, go first
    start, length, first = tile_of(cu_seqlens_pointer, tile, sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    if LONG_INDEXING:
        start, head = start.to(tl.int64), head.to(tl.int64)
    k_pointer += start * k_stride + head // GROUP * k_head_stride
    v_pointer += start * v_stride + head // GROUP * v_head_stride
    query = first + tl.arange(0, OWN)
    q_pointer += start * q_stride + head * q_head_stride
    q = load_rows(q_pointer, query, q_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    peak = tl.full([OWN], -1e38, dtype=tl.float32)  # finite, so that a row that has seen no key yet stays 0
    total = tl.zeros([OWN], dtype=tl.float32)
    if HAS_SINKS:  # one more logit, whose value is 0
        peak = tl.zeros_like(peak) + tl.load(sinks_pointer + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    out = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    begin, end, low, high = keys_of(first, length, window, OWN, STEP, HAS_WINDOW)
    if DESCRIBED:
        for block in range(low, high, STEP):
            k = described_rows(k_rows, start + block, head // GROUP, HEAD_DIM)
            v = described_rows(v_rows, start + block, head // GROUP, HEAD_DIM)
            out, peak, total = _forward_step(
                q, k, v, out, peak, total, query, query, window, False, inner_scale, outer_scale,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        end -= high - low
    # one loop, pipelined whole, that masks where a block needs it: 0.70 ms, 0.76 masking always (8 samples of 2,048)
    for index in range(begin, end, STEP):
        block = left_over(index, low, high, DESCRIBED)
        key = block + tl.arange(0, STEP)
        k = load_rows(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        v = load_rows(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        out, peak, total = _forward_step(
            q, k, v, out, peak, total, query, key, window, hides_some(first, block, window, OWN, STEP, HAS_WINDOW),
            inner_scale, outer_scale, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    row = out_pointer + (start * heads + head) * HEAD_DIM
    address, inside = row_address(row, query, heads * HEAD_DIM, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    tl.store(address, (out / total[:, None]).to(out_pointer.dtype.element_ty), mask=inside)
    tl.store(lse_pointer + head * token_count + start + query, peak + tl.log2(total), mask=query < length)


@triton.jit
def _dq_step(
    dq, q, k, v, dout, lse, delta, query, key, window, hides, inner_scale, outer_scale,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries with a block of keys more."""
    logits, slope = logits_of(q, k, inner_scale, outer_scale, HAS_SOFTCAP)  # [OWN, STEP]
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")  # before exp2, which then runs beside it
    p = tl.exp2(logits - lse[:, None])
    if hides:
        p = tl.where(sees(query[:, None], key[None, :], window, HAS_WINDOW), p, 0.0)
    dlogits = p * (dp - delta[:, None]) * slope
    return tl.dot(dlogits.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _dq_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, dout_pointer, lse_pointer, delta_pointer, dq_pointer,
    cu_seqlens_pointer, sample_count, token_count, window, inner_scale, outer_scale, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride,
    k_rows, v_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and delta_i = sum_d dO_id O_id, which the other kernel needs too."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, length, first = tile_of(cu_seqlens_pointer, tile, sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    if LONG_INDEXING:
        start, head = start.to(tl.int64), head.to(tl.int64)
    k_pointer += start * k_stride + head // GROUP * k_head_stride
    v_pointer += start * v_stride + head // GROUP * v_head_stride
    query = first + tl.arange(0, OWN)
    q_pointer += start * q_stride + head * q_head_stride
    q = load_rows(q_pointer, query, q_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    dout_pointer += start * dout_stride + head * dout_head_stride
    dout = load_rows(dout_pointer, query, dout_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    row = (start * heads + head) * HEAD_DIM  # out and dQ are contiguous
    out = load_rows(out_pointer + row, query, heads * HEAD_DIM, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    statistics = head * token_count + start + query
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_pointer + statistics, delta, mask=query < length)
    lse = tl.load(lse_pointer + statistics, mask=query < length, other=0.0)
    dq = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    begin, end, low, high = keys_of(first, length, window, OWN, STEP, HAS_WINDOW)
    if DESCRIBED:
        for block in range(low, high, STEP):
            k = described_rows(k_rows, start + block, head // GROUP, HEAD_DIM)
            v = described_rows(v_rows, start + block, head // GROUP, HEAD_DIM)
            dq = _dq_step(
                dq, q, k, v, dout, lse, delta, query, query, window, False, inner_scale, outer_scale,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        end -= high - low
    for index in range(begin, end, STEP):
        block = left_over(index, low, high, DESCRIBED)
        key = block + tl.arange(0, STEP)
        k = load_rows(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        v = load_rows(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        dq = _dq_step(
            dq, q, k, v, dout, lse, delta, query, key, window, hides_some(first, block, window, OWN, STEP, HAS_WINDOW),
            inner_scale, outer_scale, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    address, inside = row_address(dq_pointer + row, query, heads * HEAD_DIM, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    tl.store(address, (dq * scale).to(dq_pointer.dtype.element_ty), mask=inside)


@triton.jit
def _dkv_step(
    dk, dv, k, v, q, dout, lse, delta, query, key, window, MASKED: tl.constexpr, inner_scale, outer_scale,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys with a block of queries more; rows past the sample: dO and delta are 0."""
    logits, slope = logits_of(k, q, inner_scale, outer_scale, HAS_SOFTCAP)  # [OWN, STEP]
    p = tl.exp2(logits - lse[None, :])
    if MASKED:  # no branch by what a block needs: it saves time in the other kernels and takes some here
        p = tl.where(sees(query[None, :], key[:, None], window, HAS_WINDOW), p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dlogits = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :]) * slope
    return tl.dot(dlogits.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _dkv_kernel(
    q_pointer, k_pointer, v_pointer, dout_pointer, lse_pointer, delta_pointer, dk_pointer, dv_pointer,
    cu_seqlens_pointer, sample_count, token_count, window, inner_scale, outer_scale, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride,
    apart_stride, q_rows, dout_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, HEADS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, from HEADS query heads: its whole group, or parts apart_stride elements apart."""
    start, length, first = tile_of(cu_seqlens_pointer, tl.program_id(0), sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    first_head = tl.program_id(1) * HEADS
    key_head, key_heads = first_head // GROUP, tl.num_programs(1) * HEADS // GROUP
    if LONG_INDEXING:
        start, first_head, key_head = start.to(tl.int64), first_head.to(tl.int64), key_head.to(tl.int64)
    key = first + tl.arange(0, OWN)
    k_pointer += start * k_stride + key_head * k_head_stride
    v_pointer += start * v_stride + key_head * v_head_stride
    k = load_rows(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    v = load_rows(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    dk = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    begin, end, low, high = queries_of(first, length, window, OWN, STEP, HAS_WINDOW)
    # each a loop over heads and blocks: loads stay in flight across both (4.2 ms, heads in a loop of their own 5.2)
    if DESCRIBED:
        count = (high - low) // STEP
        for step in range(HEADS * count):
            head = first_head + step // count
            block = low + step % count * STEP
            q = described_rows(q_rows, start + block, head, HEAD_DIM)
            dout = described_rows(dout_rows, start + block, head, HEAD_DIM)
            statistics = head * token_count + start + block + tl.arange(0, STEP)
            dk, dv = _dkv_step(
                dk, dv, k, v, q, dout, tl.load(lse_pointer + statistics), tl.load(delta_pointer + statistics),
                key, key, window, False, inner_scale, outer_scale, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        end -= high - low
    count = (end - begin + STEP - 1) // STEP
    for step in range(HEADS * count):
        head = first_head + step // count
        block = left_over(begin + step % count * STEP, low, high, DESCRIBED)
        query = block + tl.arange(0, STEP)
        q_head = q_pointer + start * q_stride + head * q_head_stride
        q = load_rows(q_head, query, q_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        dout_head = dout_pointer + start * dout_stride + head * dout_head_stride
        dout = load_rows(dout_head, query, dout_stride, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
        statistics = head * token_count + start + query
        lse = tl.load(lse_pointer + statistics, mask=query < length, other=0.0)
        delta = tl.load(delta_pointer + statistics, mask=query < length, other=0.0)
        dk, dv = _dkv_step(
            dk, dv, k, v, q, dout, lse, delta, query, key, window, True, inner_scale, outer_scale,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    row = first_head % GROUP * apart_stride + (start * key_heads + key_head) * HEAD_DIM
    address, inside = row_address(row, key, key_heads * HEAD_DIM, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    tl.store(dk_pointer + address, (dk * scale).to(dk_pointer.dtype.element_ty), mask=inside)
    tl.store(dv_pointer + address, dv.to(dv_pointer.dtype.element_ty), mask=inside)


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, settings: FlashSettings
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and lse [Hq, T] fp32: log2 of the softmax's denominator. Last strides must be 1."""
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    with device_guard(q):
        grid, arguments, options = launch_parameters(0, q, k, cu_seqlens, settings, k_rows=k, v_rows=v)
        _forward_kernel[grid](
            q, k, v, q if sinks is None else sinks, out, lse, *arguments, *_strides(q, k, v),
            HAS_SINKS=sinks is not None, LONG_INDEXING=long_indexing(q, k, v, out), **options,
        )  # fmt: skip
    return out, lse


def flash_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    sinks: Tensor | None, settings: FlashSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and sinks, contiguous, in the dtypes of these."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    strides, long = _strides(q, k, v, dout), long_indexing(q, k, v, out, dout)
    with device_guard(q):
        grid, arguments, options = launch_parameters(1, q, k, cu_seqlens, settings, k_rows=k, v_rows=v)
        _dq_kernel[grid](
            q, k, v, out, dout, lse, delta, dq, *arguments, settings.scale, *strides, LONG_INDEXING=long, **options
        )  # fmt: skip
        grid, arguments, options = launch_parameters(2, q, k, cu_seqlens, settings, q_rows=q, dout_rows=dout)
        group = options["GROUP"]
        apart = group > 1 and math.prod(grid) < _FEW_PROGRAMS * multiprocessor_count(q.device)
        dtype, count = (torch.float32, group) if apart else (k.dtype, 1)
        parts = torch.empty(count, 2, *k.shape, dtype=dtype, device=k.device)
        _dkv_kernel[(grid[0], q.shape[1]) if apart else grid](
            q, k, v, dout, lse, delta, *parts[0], *arguments, settings.scale, *strides, parts.stride(0),
            HEADS=1 if apart else group, LONG_INDEXING=long, **options,
        )  # fmt: skip
    dk, dv = sum_partials(parts.view(group, -1), k.dtype).view(2, *k.shape) if apart else parts[0]
    if sinks is None:
        return dq, dk, dv, None
    share = torch.exp2(sinks.float()[:, None] * LOG2_E - lse)  # [Hq, T]: the sinks' part of the softmax
    return dq, dk, dv, -(share * delta).sum(1).to(sinks.dtype)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class FlashFunction(torch.autograd.Function):
    """Packed causal attention by the kernels above; see `flash_attention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None,
        settings: FlashSettings,
    ) -> Tensor:  # fmt: skip
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        out, lse = flash_fwd(q, k, v, cu_seqlens, sinks, settings)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, sinks)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, sinks = ctx.saved_tensors
        dout = _unit_stride(dout)
        dq, dk, dv, dsinks = flash_bwd(dout, q, k, v, out, lse, cu_seqlens, sinks, ctx.settings)
        return dq, dk, dv, None, dsinks, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, settings: FlashSettings, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention within each packed sample, differentiable in q, k, v and sinks; see `attention`.

    Args:
        q: [T, Hq, D], k and v: [T, Hk, D], Hq a multiple of Hk, D at most 256; bf16, fp16 or fp32, all alike;
            any strides (a last one other than 1 costs a copy).
        cu_seqlens: [S + 1] int32 on the same device, from 0 to T; empty samples are fine.
        settings: scale of q k; window w < 2^30: a token sees itself and the w - 1 before it; softcap c: logit
            x becomes c tanh(x / c).
        sinks: [Hq], contiguous: a logit a head that joins the softmax with value 0.
    Returns:
        [T, Hq, D] contiguous.
    """
    return FlashFunction.apply(q, k, v, cu_seqlens, sinks, settings)
