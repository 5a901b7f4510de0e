"""RMSNorm of every query and key head, or of all heads of a token together, then the rotation, in one launch for q
and k; out of place.

Replaces q_norm, k_norm and apply_rotary_pos_emb of qwen3 and gemma3 (each head), of olmo2 and olmo3 (all heads
together), and of their like: q and k are read once and written once. Backward is one launch too, with the weights'
gradients, if any, summed in fp32 in a fixed order. It reads q and k anyway, so it recomputes the reciprocal root of
each norm: saving that would move 4 bytes a head more, twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import (
    device_guard,
    long_indexing,
    looping_programs,
    next_power_of_2,
    resident_programs,
    tl,
    triton,
    use_triton,
)
from .partial_sums import sum_partials
from .rms_norm import RMSNormOptions, check_norm, rms_norm_reference
from .rope import LAYOUTS, check_rope, load_heads, load_pairs, rope_reference, rope_tables, store_pairs

__all__ = ["NormRopeFunction", "norm_rope", "norm_rope_fwd_bwd", "norm_rope_reference"]

PAIRS_PER_BLOCK = 2048  # as in rope: all heads of most models at once
# without a sum to carry a token a program, with fewer registers each: 0.0879 ms where looping took 0.0944, for 16,384
# tokens of Qwen3-8B, and 0.1232 where blocks of 2,048 took 0.1374 backward (H200)
ONE_TURN_PAIRS = 1024
WIDE_PAIRS = 3072  # of q and k: with 32 heads each, one norm over all, 0.1484 ms with 8 warps and 0.1717 with 4
TOGETHER_PAIRS = 4096  # at most, where all heads share one norm and so one block: 8,192 elements
WARPS = 4
# All heads together, and weight gradients: programs that loop over tokens, with the next ones on their way. 8 warps
# hold the sums of weight gradients in 128 registers a thread (sm_90), where 4 take 168.
LOOP_WARPS = 8
BYTES_IN_FLIGHT = 80 * 1024  # at most, of shared memory: an sm_86 has 99 KiB


@dataclass(frozen=True)
class _Launch:
    """Heads of q and of k in a block, warps, programs; tokens in flight in each that loops, 0: one turn each."""

    q_block: int
    k_block: int
    warps: int
    programs: int
    stages: int = 0

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, tokens: int, pair_block: int, together: bool, incoming: Sequence[Tensor] | None,
        weight_gradient: bool,
    ) -> "_Launch":  # fmt: skip
        """For q and k [B, T, heads, D], of so many tokens in all."""
        q_block, k_block = (next_power_of_2(x.shape[2]) for x in (q, k))
        if not together:
            pairs = PAIRS_PER_BLOCK if weight_gradient else ONE_TURN_PAIRS
            q_block, k_block = (min(block, max(1, pairs // pair_block)) for block in (q_block, k_block))
            if not weight_gradient:
                return cls(q_block, k_block, WARPS, tokens)
        wide = (q_block + k_block) * pair_block > WIDE_PAIRS
        warps = LOOP_WARPS << (q_block * pair_block > PAIRS_PER_BLOCK) if incoming else LOOP_WARPS if wide else WARPS
        programs = looping_programs(tokens, warps, q.device) if incoming else resident_programs(warps, q.device)
        if not (incoming or wide):  # more than can be loading at a time: 0.0943 ms, not 0.0962, for 32 and 8 heads
            programs = programs * 3 // 4
        programs = triton.cdiv(tokens, triton.cdiv(tokens, programs))  # no last turn for a few: 3% of 32 turns
        heads = sum(triton.cdiv(x.shape[2], block) * block for x, block in ((q, q_block), (k, k_block)))
        token_bytes = heads * 2 * pair_block * (q.element_size() + (incoming[0].element_size() if incoming else 0))
        stages = 1 + min(2, BYTES_IN_FLIGHT // token_bytes) if programs < tokens else 0
        return cls(q_block, k_block, warps, programs, stages)


@triton.jit
def _mean(sums_of_pairs, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOGETHER: tl.constexpr):
    """Over what one norm covers: [HEAD_BLOCK, PAIR_BLOCK] -> [HEAD_BLOCK, 1], or a scalar for all heads together."""
    by_head = tl.sum(sums_of_pairs, axis=1)
    if TOGETHER:
        return tl.sum(by_head, axis=0) / (HEADS * HEAD_DIM)
    else:
        return (by_head / HEAD_DIM)[:, None]


@triton.jit
def _norm_rotate_heads(
    x_pointer, dout_pointer, out_pointer, x1, x2, dout1, dout2, weight1, weight2, cos, sin, dweight1, dweight2, eps,
    x_head_stride, x_dim_stride, dout_head_stride, dout_dim_stride,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, TOGETHER: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BACKWARD: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """All heads of one token; out, contiguous [HEADS, HEAD_DIM], gets the rotated norms or the gradient of x.

    x1, x2, dout1, dout2: the pairs of the first HEAD_BLOCK of them.
    """
    for start in tl.static_range(0, HEADS, HEAD_BLOCK):  # unrolled: loads of the next token join its pipeline
        if start > 0:
            x1, x2 = load_heads(
                x_pointer, start, HEADS, HEAD_BLOCK, x_head_stride, x_dim_stride,
                HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
            )  # fmt: skip
            if BACKWARD:
                dout1, dout2 = load_heads(
                    dout_pointer, start, HEADS, HEAD_BLOCK, dout_head_stride, dout_dim_stride,
                    HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
                )  # fmt: skip
        rstd = tl.rsqrt(_mean(x1 * x1 + x2 * x2, HEADS, HEAD_DIM, TOGETHER) + eps)
        x1 *= rstd
        x2 *= rstd
        normed1 = x1  # what the weight multiplies
        normed2 = x2
        if CAST_BEFORE_SCALE:
            normed1 = x1.to(x_pointer.dtype.element_ty).to(tl.float32)
            normed2 = x2.to(x_pointer.dtype.element_ty).to(tl.float32)
        if BACKWARD:
            scaled1 = dout1 * cos + dout2 * sin  # rotated back
            scaled2 = dout2 * cos - dout1 * sin
            if WEIGHT_GRADIENT:
                dweight1 += scaled1 * normed1
                dweight2 += scaled2 * normed2
            scaled1 *= weight1
            scaled2 *= weight2
            slope = _mean(scaled1 * x1 + scaled2 * x2, HEADS, HEAD_DIM, TOGETHER)
            y1 = rstd * (scaled1 - x1 * slope)
            y2 = rstd * (scaled2 - x2 * slope)
        else:
            scaled1 = normed1 * weight1
            scaled2 = normed2 * weight2
            y1 = scaled1 * cos - scaled2 * sin
            y2 = scaled2 * cos + scaled1 * sin
        head = start + tl.arange(0, HEAD_BLOCK)[:, None]  # [HEAD_BLOCK, 1]
        mask = head < HEADS
        if LONG_INDEXING:
            head = head.to(tl.int64)
        out_head = out_pointer + head * HEAD_DIM
        store_pairs(out_head, mask, y1, y2, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING)
    return dweight1, dweight2


@triton.jit(do_not_specialize=["token_count", "row_count", "program_count"])
def _norm_rope_kernel(
    q_pointer, k_pointer, dq_out_pointer, dk_out_pointer, q_weight_pointer, k_weight_pointer, cos_pointer, sin_pointer,
    q_out_pointer, k_out_pointer, partial_pointer, token_count, row_count, program_count, eps,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride,
    dq_out_batch_stride, dq_out_token_stride, dq_out_head_stride, dq_out_dim_stride,
    dk_out_batch_stride, dk_out_token_stride, dk_out_head_stride, dk_out_dim_stride,
    cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_HEAD_BLOCK: tl.constexpr, K_HEAD_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    OFFSET: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, NEIGHBOURS: tl.constexpr, TABLE_STEP: tl.constexpr,
    BATCHED: tl.constexpr, STAGES: tl.constexpr, BACKWARD: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # program p takes tokens p, p + program_count, ... of all rows of the batch, each of token_count
    program = tl.program_id(0)
    pair = tl.arange(0, PAIR_BLOCK)
    q_row = tl.arange(0, Q_HEAD_BLOCK if TOGETHER else 1)[:, None]  # of the weight: one a head, or one for all
    k_row = tl.arange(0, K_HEAD_BLOCK if TOGETHER else 1)[:, None]
    Q_ROWS: tl.constexpr = Q_HEADS if TOGETHER else 1
    K_ROWS: tl.constexpr = K_HEADS if TOGETHER else 1
    if STAGES > 0:
        q_weight1, q_weight2 = load_pairs(
            q_weight_pointer + q_row * HEAD_DIM, q_row < Q_ROWS, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
        )
        k_weight1, k_weight2 = load_pairs(
            k_weight_pointer + k_row * HEAD_DIM, k_row < K_ROWS, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
        )
    dq_weight1 = tl.zeros([Q_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dq_weight2 = tl.zeros([Q_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dk_weight1 = tl.zeros([K_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dk_weight2 = tl.zeros([K_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    turns = tl.cdiv(row_count - program, program_count) if STAGES > 0 else 1
    for turn in tl.range(0, turns, num_stages=STAGES):
        row = program + turn * program_count
        if LONG_INDEXING:
            row = row.to(tl.int64)
        batch = row // token_count if BATCHED else 0
        token = row - batch * token_count
        q_token = q_pointer + batch * q_batch_stride + token * q_token_stride
        k_token = k_pointer + batch * k_batch_stride + token * k_token_stride
        dq_out_token = dq_out_pointer + batch * dq_out_batch_stride + token * dq_out_token_stride
        dk_out_token = dk_out_pointer + batch * dk_out_batch_stride + token * dk_out_token_stride
        q1, q2 = load_heads(
            q_token, 0, Q_HEADS, Q_HEAD_BLOCK, q_head_stride, q_dim_stride,
            HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
        )  # fmt: skip
        k1, k2 = load_heads(
            k_token, 0, K_HEADS, K_HEAD_BLOCK, k_head_stride, k_dim_stride,
            HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
        )  # fmt: skip
        dq1, dq2, dk1, dk2 = q1, q2, k1, k2
        if BACKWARD:
            dq1, dq2 = load_heads(
                dq_out_token, 0, Q_HEADS, Q_HEAD_BLOCK, dq_out_head_stride, dq_out_dim_stride,
                HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
            )  # fmt: skip
            dk1, dk2 = load_heads(
                dk_out_token, 0, K_HEADS, K_HEAD_BLOCK, dk_out_head_stride, dk_out_dim_stride,
                HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
            )  # fmt: skip
        if STAGES == 0:  # the token's loads go first
            tl.debug_barrier()  # as in rope
            q_weight1, q_weight2 = load_pairs(
                q_weight_pointer + q_row * HEAD_DIM, q_row < Q_ROWS, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
            )
            k_weight1, k_weight2 = load_pairs(
                k_weight_pointer + k_row * HEAD_DIM, k_row < K_ROWS, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
            )
        cos_token = cos_pointer + batch * cos_batch_stride + token * cos_token_stride
        sin_token = sin_pointer + batch * sin_batch_stride + token * sin_token_stride
        # pairs that are not rotated turn by nothing
        cos = tl.load(cos_token + pair * TABLE_STEP, mask=pair < ROTATED // 2, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_token + pair * TABLE_STEP, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)[None, :]
        dq_weight1, dq_weight2 = _norm_rotate_heads(
            q_token, dq_out_token, q_out_pointer + row * (Q_HEADS * HEAD_DIM), q1, q2, dq1, dq2,
            q_weight1 + OFFSET, q_weight2 + OFFSET, cos, sin, dq_weight1, dq_weight2, eps,
            q_head_stride, q_dim_stride, dq_out_head_stride, dq_out_dim_stride,
            Q_HEADS, Q_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, TOGETHER, CAST_BEFORE_SCALE, NEIGHBOURS,
            BACKWARD, WEIGHT_GRADIENT, LONG_INDEXING,
        )  # fmt: skip
        dk_weight1, dk_weight2 = _norm_rotate_heads(
            k_token, dk_out_token, k_out_pointer + row * (K_HEADS * HEAD_DIM), k1, k2, dk1, dk2,
            k_weight1 + OFFSET, k_weight2 + OFFSET, cos, sin, dk_weight1, dk_weight2, eps,
            k_head_stride, k_dim_stride, dk_out_head_stride, dk_out_dim_stride,
            K_HEADS, K_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, TOGETHER, CAST_BEFORE_SCALE, NEIGHBOURS,
            BACKWARD, WEIGHT_GRADIENT, LONG_INDEXING,
        )  # fmt: skip
    if WEIGHT_GRADIENT:  # partial: [programs, Q_ROWS + K_ROWS, HEAD_DIM]
        if not TOGETHER:
            dq_weight1 = tl.sum(dq_weight1, axis=0)[None, :]
            dq_weight2 = tl.sum(dq_weight2, axis=0)[None, :]
            dk_weight1 = tl.sum(dk_weight1, axis=0)[None, :]
            dk_weight2 = tl.sum(dk_weight2, axis=0)[None, :]
        partial_row = partial_pointer + program * ((Q_ROWS + K_ROWS) * HEAD_DIM)
        store_pairs(
            partial_row + q_row * HEAD_DIM, q_row < Q_ROWS, dq_weight1, dq_weight2,
            HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False,
        )  # fmt: skip
        store_pairs(
            partial_row + (Q_ROWS + k_row) * HEAD_DIM, k_row < K_ROWS, dk_weight1, dk_weight2,
            HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False,
        )  # fmt: skip


def norm_rope_fwd_bwd(
    inputs: Sequence[Tensor], incoming: Sequence[Tensor] | None, options: RMSNormOptions, layout: str = "half",
    weight_gradient: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Forward of inputs q, k, q_weight, k_weight, cos, sin without incoming, backward with it (dq_out and dk_out).

    Returns q and k rotated, or their gradients and, if asked for, the weights'; fresh and contiguous.
    """
    q, k, q_weight, k_weight, cos, sin = inputs
    dq_out, dk_out = incoming or (q, k)
    promote = options.cast_before_scale and not incoming
    q_out, k_out = (
        torch.empty(x.shape, dtype=torch.promote_types(x.dtype, w.dtype) if promote else x.dtype, device=x.device)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    batch_size, token_count, q_heads, head_dim = q.shape
    row_count, k_heads = batch_size * token_count, k.shape[2]
    if row_count == 0:
        dweights = (torch.zeros_like(q_weight), torch.zeros_like(k_weight)) if weight_gradient else ()
        return q_out, k_out, *dweights
    cos, sin, table_strides, rotated = rope_tables(cos, sin, layout)
    pair_block, together = next_power_of_2(head_dim // 2), _together(q, k, q_weight, k_weight)
    launch = _Launch.of(q, k, row_count, pair_block, together, incoming, weight_gradient)
    partial = q  # only written with WEIGHT_GRADIENT
    if weight_gradient:
        columns = q_weight.numel() + k_weight.numel()
        partial = torch.empty(launch.programs, columns, dtype=torch.float32, device=q.device)
    with device_guard(q):
        _norm_rope_kernel[(launch.programs,)](
            q, k, dq_out, dk_out, q_weight.contiguous(), k_weight.contiguous(), cos, sin, q_out, k_out, partial,
            token_count, row_count, launch.programs, options.eps,
            *q.stride(), *k.stride(), *dq_out.stride(), *dk_out.stride(), *table_strides,
            Q_HEADS=q_heads, K_HEADS=k_heads, Q_HEAD_BLOCK=launch.q_block, K_HEAD_BLOCK=launch.k_block,
            HEAD_DIM=head_dim, ROTATED=rotated, PAIR_BLOCK=pair_block, TOGETHER=together, OFFSET=options.offset,
            CAST_BEFORE_SCALE=options.cast_before_scale, NEIGHBOURS=LAYOUTS[layout].neighbours,
            TABLE_STEP=LAYOUTS[layout].table_step, BATCHED=batch_size > 1, STAGES=launch.stages,
            BACKWARD=incoming is not None, WEIGHT_GRADIENT=weight_gradient,
            LONG_INDEXING=long_indexing(q, k, dq_out, dk_out, cos, sin, q_out, k_out), num_warps=launch.warps,
        )  # fmt: skip
    if not weight_gradient:
        return q_out, k_out
    sums = sum_partials(partial, torch.promote_types(q_weight.dtype, k_weight.dtype))
    q_sums, k_sums = sums.split([q_weight.numel(), k_weight.numel()])
    return q_out, k_out, q_sums.to(q_weight.dtype), k_sums.to(k_weight.dtype)


def _together(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> bool:
    """Whether one norm covers all heads of q, and one all of k, as the weights [Hq * D] and [Hk * D] say."""
    wanted = [(x.shape[2] * x.shape[3],) for x in (q, k)]
    return wanted == [q_weight.shape, k_weight.shape] and q.shape[2] > 1


class NormRopeFunction(torch.autograd.Function):
    """Normalised and rotated q and k by the kernel above; see `norm_rope`."""

    @staticmethod
    def forward(ctx: Any, options: RMSNormOptions, layout: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.options, ctx.layout = options, layout
        return norm_rope_fwd_bwd(inputs, None, options, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        gradients = norm_rope_fwd_bwd(ctx.saved_tensors, incoming, ctx.options, ctx.layout, wanted)
        return None, None, *gradients, *[None] * (6 - len(gradients))


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, cast_before_scale: bool = True, layout: str = "half",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm` of q and k, then `rope`; differentiable in q, k and both weights.

    fp32 from load to store, but for the cast before the scale where `rms_norm` has it.

    Args:
        q: [B, T, Hq, D], k: [B, T, Hk, D]; D even; any strides, only read.
        q_weight, k_weight: [D] each, for a norm of each head, or [Hq * D] and [Hk * D], for one norm of all heads.
        eps, offset, cast_before_scale: see `rms_norm`.
        cos, sin: [B or 1, T, R], layout: see `rope`.
    Returns:
        Both, contiguous, in the dtypes that `rms_norm` gives.
    Raises:
        ValueError: what does not fit together, as in `rms_norm` and `rope`.
    """
    check_rope(q, k, cos, sin, layout)
    together = _together(q, k, q_weight, k_weight)
    for x, weight in ((q, q_weight), (k, k_weight)):
        row = weight if together else x
        check_norm("norm_rope", row, weight, offset=offset, cast_before_scale=cast_before_scale)
    pairs = next_power_of_2(max(q.shape[2], k.shape[2])) * next_power_of_2(q.shape[-1] // 2) if together else 0
    unsupported = cos.requires_grad or sin.requires_grad or q.shape[-1] % 2 or pairs > TOGETHER_PAIRS
    if unsupported or not use_triton(q, k, q_weight, k_weight, cos, sin):
        flavour = {"offset": offset, "cast_before_scale": cast_before_scale}
        return norm_rope_reference(q, k, q_weight, k_weight, cos, sin, eps, layout=layout, **flavour)
    options = RMSNormOptions(eps, offset, cast_before_scale)
    return NormRopeFunction.apply(options, layout, q, k, q_weight, k_weight, cos, sin)


def norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    layout: str = "half", **flavour: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_rope` in plain torch, operation by operation as transformers does it."""
    together = _together(q, k, q_weight, k_weight)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        row = x.flatten(2) if together else x
        return rms_norm_reference(row, weight, eps, **flavour).view(x.shape)

    return rope_reference(norm(q, q_weight), norm(k, k_weight), cos, sin, layout=layout)
