"""Causal flash attention over packed samples in Triton, with sliding window, softcap and sinks.

After FlashAttention-2 (Dao, 2023) and the online softmax (Milakov and Gimelshein, 2018); serves what torch's
varlen does not take: gemma2's capped logits, gpt_oss's sinks, fp32, GPUs from Turing on. Logits, softmax and
sums are fp32; P and its gradient are rounded to the inputs' dtype for the products. No T x T tensor, no host
sync, no atomics: two runs give the same bits.

A launch has T // BLOCK + S tiles a head. Sample s owns those from cu_seqlens[s] // BLOCK + s on, never fewer
than it needs, and a program finds its sample by a search in cu_seqlens: less than one idle tile a sample,
where a grid of samples x max_length is mostly idle on ragged samples (196 tiles of 128 against 544 for 16,384
tokens in 68 samples of up to 1,024).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import device_guard, long_indexing, next_power_of_2, tl, triton

__all__ = ["FlashFunction", "FlashSettings", "flash_attention", "flash_bwd", "flash_fwd"]

_LOG2_E = math.log2(math.e)
_SEARCH = 128  # samples that a step of the search tells apart


@dataclass(frozen=True)
class FlashSettings:
    """What is neither tensor nor shape; see `flash_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Blocks:
    """Rows that a program owns, rows that it takes in a step, warps, loads in flight."""

    own: int
    step: int
    warps: int
    stages: int


# (shared memory of a multiprocessor in KiB, head size rounded up): forward, dQ, dK and dV. Chosen so that the
# operands fit and nothing spills, as compiled by Triton 3.6 for compute capabilities 9.0, 8.6 and 7.5.
_BLOCKS: dict[tuple[int, int], tuple[Blocks, Blocks, Blocks]] = {
    (160, 64): (Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2)),
    (160, 128): (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2)),
    (160, 256): (Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2)),
    (99, 64): (Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    (99, 128): (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
    (99, 256): (Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    (64, 64): (Blocks(64, 64, 4, 1), Blocks(64, 32, 4, 1), Blocks(32, 64, 4, 1)),
    (64, 128): (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
    (64, 256): (Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}


@triton.jit
def _tile(cu_seqlens_pointer, tile, sample_count, BLOCK: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """A tile's sample: its first token, its length, and the tile's first row in it (past the end: an idle tile)."""
    sample = 0
    for step in tl.static_range(SEARCH_STEPS):
        stride: tl.constexpr = 128 ** (SEARCH_STEPS - 1 - step)
        candidate = sample + tl.arange(0, 128) * stride
        start = tl.load(cu_seqlens_pointer + candidate, mask=candidate < sample_count, other=2147483647)
        sample += (tl.sum((start // BLOCK + candidate <= tile).to(tl.int32), 0) - 1) * stride
    start = tl.load(cu_seqlens_pointer + sample)
    length = tl.load(cu_seqlens_pointer + sample + 1) - start
    return start, length, (tile - start // BLOCK - sample) * BLOCK


@triton.jit
def _load(
    pointer, row, stride, length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_D]: head vectors, 0 past the head size and, if CHECKED, past the sample."""
    if LONG_INDEXING:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    address = pointer + row[:, None] * stride + column[None, :]
    if CHECKED:
        inside = row[:, None] < length
        if HEAD_DIM != BLOCK_D:
            inside = inside & (column[None, :] < HEAD_DIM)
        values = tl.load(address, mask=inside, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        values = tl.load(address, mask=column[None, :] < HEAD_DIM, other=0.0)
    else:
        values = tl.load(address)
    return values


@triton.jit
def _store(
    pointer, row, stride, values, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LONG_INDEXING: tl.constexpr
):  # fmt: skip
    if LONG_INDEXING:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < length) & (column[None, :] < HEAD_DIM)
    address = pointer + row[:, None] * stride + column[None, :]
    tl.store(address, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _logits(a, b, inner_scale, outer_scale, HAS_SOFTCAP: tl.constexpr):
    """Logits of all pairs of rows of a and b in units of ln 2, and the derivative of the cap (1 without)."""
    product = tl.dot(a, tl.trans(b), input_precision="ieee")
    slope = 1.0
    if HAS_SOFTCAP:
        x = product * inner_scale
        product = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # tanh(x): to 1e-7, not relative to x
        if a.dtype == tl.float32:  # there small x count too: least squares for tanh(x) / x, to 1e-9
            z = x * x
            small = 0.02104217 + z * -0.00623885
            small = 0.13332468 + z * (-0.05384337 + z * small)
            product = tl.where(z < 0.3025, x * (1.0 + z * (-0.33333311 + z * small)), product)
        slope = 1.0 - product * product
    return product * outer_scale, slope


@triton.jit
def _visible(query, key, window, HAS_WINDOW: tl.constexpr):
    visible = query >= key
    if HAS_WINDOW:
        visible = visible & (query - key < window)
    return visible


@triton.jit
def _key_bounds(
    first, length, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """begin, full_begin, full_end, end: some queries of first..first + QUERIES - 1 see the keys from begin to end,
    all of them those from full_begin to full_end. All but the end are multiples of KEYS."""
    begin, full_begin = 0, 0
    full_end = first // KEYS * KEYS
    if HAS_WINDOW:
        begin = tl.maximum(first + 1 - window, 0) // KEYS * KEYS
        full_begin = tl.minimum((tl.maximum(first + QUERIES - window, 0) + KEYS - 1) // KEYS * KEYS, full_end)
    return begin, full_begin, full_end, tl.minimum(first + QUERIES, length)


@triton.jit
def _attend(
    out, peak, total, q, query, k_pointer, v_pointer, k_stride, v_stride, begin, end, length, window,
    inner_scale, outer_scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys begin..end-1."""
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        k = _load(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, MASKED, LONG_INDEXING)
        logits, _slope = _logits(q, k, inner_scale, outer_scale, HAS_SOFTCAP)  # [QUERIES, KEYS]
        if MASKED:
            visible = _visible(query[:, None], key[None, :], window, HAS_WINDOW)
            logits = tl.where(visible, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))  # finite, so that a row that sees nothing yet stays 0
        p = tl.exp2(logits - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        v = _load(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, MASKED, LONG_INDEXING)
        out = tl.dot(p.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _forward_kernel(
    q_pointer, k_pointer, v_pointer, sinks_pointer, out_pointer, lse_pointer, cu_seqlens_pointer,
    sample_count, token_count, window, inner_scale, outer_scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a sample's last queries, which see most, go first
    start, length, first = _tile(cu_seqlens_pointer, tile, sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    if LONG_INDEXING:
        start, head = start.to(tl.int64), head.to(tl.int64)
    k_pointer += start * k_stride + head // GROUP * k_head_stride
    v_pointer += start * v_stride + head // GROUP * v_head_stride
    query = first + tl.arange(0, OWN)
    q_pointer += start * q_stride + head * q_head_stride
    q = _load(q_pointer, query, q_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    out = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    if HAS_SINKS:  # one more logit, whose value is 0
        peak = tl.zeros([OWN], dtype=tl.float32) + tl.load(sinks_pointer + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([OWN], 1.0, dtype=tl.float32)
    else:
        peak = tl.full([OWN], -1e38, dtype=tl.float32)
        total = tl.zeros([OWN], dtype=tl.float32)
    bounds = _key_bounds(first, length, window, OWN, STEP, HAS_WINDOW)
    for phase in tl.static_range(1 - HAS_WINDOW, 3):  # the window's edge, seen whole, the diagonal
        out, peak, total = _attend(
            out, peak, total, q, query, k_pointer, v_pointer, k_stride, v_stride, bounds[phase], bounds[phase + 1],
            length, window, inner_scale, outer_scale,
            HEAD_DIM, BLOCK_D, STEP, HAS_WINDOW, HAS_SOFTCAP, phase != 1, LONG_INDEXING,
        )  # fmt: skip
    out_pointer += (start * heads + head) * HEAD_DIM
    _store(out_pointer, query, heads * HEAD_DIM, out / total[:, None], length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    tl.store(lse_pointer + head * token_count + start + query, peak + tl.log2(total), mask=query < length)


@triton.jit
def _dq_keys(
    dq, q, dout, lse, delta, query, k_pointer, v_pointer, k_stride, v_stride, begin, end, length, window,
    inner_scale, outer_scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """Adds what the keys begin..end-1 give to dQ / scale."""
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        k = _load(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, MASKED, LONG_INDEXING)
        v = _load(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, MASKED, LONG_INDEXING)
        logits, slope = _logits(q, k, inner_scale, outer_scale, HAS_SOFTCAP)  # [QUERIES, KEYS]
        p = tl.exp2(logits - lse[:, None])
        if MASKED:
            p = tl.where(_visible(query[:, None], key[None, :], window, HAS_WINDOW), p, 0.0)
        dlogits = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None]) * slope
        dq = tl.dot(dlogits.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _dq_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, dout_pointer, lse_pointer, delta_pointer, dq_pointer,
    cu_seqlens_pointer, sample_count, token_count, window, inner_scale, outer_scale, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and delta_i = sum_d dO_id O_id, which the other kernel needs too."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, length, first = _tile(cu_seqlens_pointer, tile, sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    if LONG_INDEXING:
        start, head = start.to(tl.int64), head.to(tl.int64)
    k_pointer += start * k_stride + head // GROUP * k_head_stride
    v_pointer += start * v_stride + head // GROUP * v_head_stride
    query = first + tl.arange(0, OWN)
    q_pointer += start * q_stride + head * q_head_stride
    q = _load(q_pointer, query, q_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    dout_pointer += start * dout_stride + head * dout_head_stride
    dout = _load(dout_pointer, query, dout_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    row = (start * heads + head) * HEAD_DIM  # out and dQ are contiguous
    out = _load(out_pointer + row, query, heads * HEAD_DIM, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    statistics = head * token_count + start + query
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_pointer + statistics, delta, mask=query < length)
    lse = tl.load(lse_pointer + statistics, mask=query < length, other=0.0)
    dq = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    bounds = _key_bounds(first, length, window, OWN, STEP, HAS_WINDOW)
    for phase in tl.static_range(1 - HAS_WINDOW, 3):
        dq = _dq_keys(
            dq, q, dout, lse, delta, query, k_pointer, v_pointer, k_stride, v_stride, bounds[phase], bounds[phase + 1],
            length, window, inner_scale, outer_scale,
            HEAD_DIM, BLOCK_D, STEP, HAS_WINDOW, HAS_SOFTCAP, phase != 1, LONG_INDEXING,
        )  # fmt: skip
    _store(dq_pointer + row, query, heads * HEAD_DIM, dq * scale, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)


@triton.jit(do_not_specialize=["sample_count", "token_count", "window"])
def _dkv_kernel(
    q_pointer, k_pointer, v_pointer, dout_pointer, lse_pointer, delta_pointer, dk_pointer, dv_pointer,
    cu_seqlens_pointer, sample_count, token_count, window, inner_scale, outer_scale, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SEARCH_STEPS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys: the sum over its group's query heads in one program, in order."""
    start, length, first = _tile(cu_seqlens_pointer, tl.program_id(0), sample_count, OWN, SEARCH_STEPS)
    if first >= length:
        return
    key_head, key_heads = tl.program_id(1), tl.num_programs(1)
    if LONG_INDEXING:
        start, key_head = start.to(tl.int64), key_head.to(tl.int64)
    key = first + tl.arange(0, OWN)
    k_pointer += start * k_stride + key_head * k_head_stride
    v_pointer += start * v_stride + key_head * v_head_stride
    k = _load(k_pointer, key, k_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    v = _load(v_pointer, key, v_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
    dk = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([OWN, BLOCK_D], dtype=tl.float32)
    begin = first // STEP * STEP  # the first block of queries that sees a key of the tile
    end = length
    if HAS_WINDOW:
        end = tl.minimum(first + OWN - 1 + window, length)
    count = (end - begin + STEP - 1) // STEP
    for step in range(GROUP * count):  # one loop over heads and blocks: loads run ahead across both
        head = key_head * GROUP + step // count
        query = begin + step % count * STEP + tl.arange(0, STEP)
        head_pointer = q_pointer + start * q_stride + head * q_head_stride
        q = _load(head_pointer, query, q_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
        head_pointer = dout_pointer + start * dout_stride + head * dout_head_stride
        dout = _load(head_pointer, query, dout_stride, length, HEAD_DIM, BLOCK_D, True, LONG_INDEXING)
        statistics = head * token_count + start + query
        lse = tl.load(lse_pointer + statistics, mask=query < length, other=0.0)
        delta = tl.load(delta_pointer + statistics, mask=query < length, other=0.0)
        logits, slope = _logits(k, q, inner_scale, outer_scale, HAS_SOFTCAP)  # [KEYS, QUERIES]
        visible = _visible(query[None, :], key[:, None], window, HAS_WINDOW)
        p = tl.where(visible, tl.exp2(logits - lse[None, :]), 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")  # past the sample dO and delta are 0
        dlogits = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :]) * slope
        dk = tl.dot(dlogits.to(q.dtype), q, dk, input_precision="ieee")
    row = (start * key_heads + key_head) * HEAD_DIM
    _store(dk_pointer + row, key, key_heads * HEAD_DIM, dk * scale, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)
    _store(dv_pointer + row, key, key_heads * HEAD_DIM, dv, length, HEAD_DIM, BLOCK_D, LONG_INDEXING)


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, settings: FlashSettings
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and lse [Hq, T] fp32: log2 of the softmax's denominator. Last strides must be 1."""
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    with device_guard(q):
        grid, options = _launch(0, q, k, cu_seqlens, settings, heads, (q, k, v, out))
        _forward_kernel[grid](
            q, k, v, q if sinks is None else sinks, out, lse, cu_seqlens, len(cu_seqlens) - 1, tokens,
            settings.window or 0, *_scales(settings), *_strides(q, k, v), HAS_SINKS=sinks is not None, **options,
        )  # fmt: skip
    return out, lse


def flash_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    sinks: Tensor | None, settings: FlashSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and sinks, contiguous, in the dtypes of these."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    extents = (q, k, v, out, dout)
    rest = (
        cu_seqlens, len(cu_seqlens) - 1, q.shape[0], settings.window or 0, *_scales(settings), settings.scale,
        *_strides(q, k, v, dout),
    )  # fmt: skip
    with device_guard(q):
        grid, options = _launch(1, q, k, cu_seqlens, settings, q.shape[1], extents)
        _dq_kernel[grid](q, k, v, out, dout, lse, delta, dq, *rest, **options)
        grid, options = _launch(2, q, k, cu_seqlens, settings, k.shape[1], extents)
        _dkv_kernel[grid](q, k, v, dout, lse, delta, dk, dv, *rest, **options)
    if sinks is None:
        return dq, dk, dv, None
    share = torch.exp2(sinks.float()[:, None] * _LOG2_E - lse)  # [Hq, T]: the sinks' part of the softmax
    return dq, dk, dv, -(share * delta).sum(1).to(sinks.dtype)


def _launch(
    kernel: int, q: Tensor, k: Tensor, cu_seqlens: Tensor, settings: FlashSettings, heads: int,
    tensors: tuple[Tensor, ...],
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """Grid and constants of the forward (0), dQ (1) or dK and dV (2) kernel."""
    samples, head_dim = len(cu_seqlens) - 1, q.shape[2]
    block_d = max(next_power_of_2(head_dim), 16)
    blocks = _blocks(q.device, q.dtype, block_d)[kernel]
    options = dict(
        HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP=q.shape[1] // k.shape[1], OWN=blocks.own, STEP=blocks.step,
        HAS_WINDOW=bool(settings.window), HAS_SOFTCAP=bool(settings.softcap), LONG_INDEXING=long_indexing(*tensors),
        SEARCH_STEPS=max(1, -(-(samples - 1).bit_length() // 7)), num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return (q.shape[0] // blocks.own + samples, heads), options


@lru_cache(maxsize=64)
def _blocks(device: torch.device, dtype: torch.dtype, block_d: int) -> tuple[Blocks, Blocks, Blocks]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 6)
    if capability < (8, 0):
        memory = 64
    else:
        memory = 160 if capability in ((8, 0), (8, 7)) or capability[0] in (9, 10, 11) else 99
    return _BLOCKS[memory, max(block_d, 64)]


def _scales(settings: FlashSettings) -> tuple[float, float]:
    """What q k is multiplied by before the cap, and the logit (capped or not) after: then exp2 gives its exp."""
    if settings.softcap:
        return settings.scale / settings.softcap, settings.softcap * _LOG2_E
    return 1.0, settings.scale * _LOG2_E


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class FlashFunction(torch.autograd.Function):
    """Packed causal attention by the kernels above; see `flash_attention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, settings: FlashSettings
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
        dq, dk, dv, dsinks = flash_bwd(
            _unit_stride(dout), q, k, v, out, lse, cu_seqlens, sinks, ctx.settings
        )
        return dq, dk, dv, None, dsinks, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, settings: FlashSettings, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention within each packed sample, differentiable in q, k, v and sinks; see `attention`.

    Args:
        q: [T, Hq, D], k and v: [T, Hk, D], Hq a multiple of Hk, D at most 256; bf16, fp16 or fp32, all alike;
            any strides (a last one other than 1 costs a copy).
        cu_seqlens: [S + 1] int32 on the same device, from 0 to T; empty samples are fine.
        settings: scale of q k; window w: a token sees itself and the w - 1 before it; softcap c: logits become
            c tanh(logit / c).
        sinks: [Hq], contiguous, a logit a head that joins the softmax with value 0.
    Returns:
        [T, Hq, D] contiguous.
    """
    return FlashFunction.apply(q, k, v, cu_seqlens, sinks, settings)
