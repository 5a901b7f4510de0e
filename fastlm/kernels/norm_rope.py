"""RMSNorm of every query and key head, then the rotation, in one launch for q and k; out of place.

Replaces q_norm, k_norm and apply_rotary_pos_emb of qwen3, gemma3 and their like: q and k are read once and written
once. Backward is one launch too, with the weights' gradients, if any, summed in fp32 in a fixed order. It reads q
and k anyway, so it recomputes the reciprocal root of each head: saving that would move 4 bytes a head more, twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import device_guard, long_indexing, next_power_of_2, tl, triton, use_triton
from .rms_norm import RMSNormOptions, check_norm, looping_programs, rms_norm_reference, sum_partials
from .rope import LAYOUTS, check_rope, load_pairs, rope_reference, rope_tables, store_pairs

__all__ = ["NormRopeFunction", "norm_rope", "norm_rope_fwd_bwd", "norm_rope_reference"]

PAIRS_PER_BLOCK = 2048  # as in rope: all heads of most models at once
WARPS = 4
# Weight gradients: programs that loop over tokens, with the next ones on their way; 8 warps hold the sums in 128
# registers a thread (sm_90), where 4 take 168
WEIGHT_GRADIENT_WARPS = 8
BYTES_IN_FLIGHT = 80 * 1024  # at most, of shared memory: an sm_86 has 99 KiB


@triton.jit
def _norm_rotate_heads(
    x_pointer, dout_pointer, out_pointer, weight1, weight2, cos, sin, dweight1, dweight2, eps,
    x_head_stride, x_dim_stride, dout_head_stride, dout_dim_stride,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, NEIGHBOURS: tl.constexpr, BACKWARD: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """All heads of one token; out, contiguous [HEADS, HEAD_DIM], gets the rotated norms or the gradient of x."""
    for start in tl.static_range(0, HEADS, HEAD_BLOCK):  # unrolled: loads of the next token join its pipeline
        head = start + tl.arange(0, HEAD_BLOCK)[:, None]  # [HEAD_BLOCK, 1]
        mask = head < HEADS
        if LONG_INDEXING:
            head = head.to(tl.int64)
        x_head = x_pointer + head * x_head_stride
        x1, x2 = load_pairs(x_head, mask, x_dim_stride, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING)
        rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / HEAD_DIM + eps)[:, None]
        x1 *= rstd
        x2 *= rstd
        normed1 = x1  # what the weight multiplies
        normed2 = x2
        if CAST_BEFORE_SCALE:
            normed1 = x1.to(x_pointer.dtype.element_ty).to(tl.float32)
            normed2 = x2.to(x_pointer.dtype.element_ty).to(tl.float32)
        if BACKWARD:
            dout_head = dout_pointer + head * dout_head_stride
            dout1, dout2 = load_pairs(
                dout_head, mask, dout_dim_stride, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING
            )
            scaled1 = dout1 * cos + dout2 * sin  # rotated back
            scaled2 = dout2 * cos - dout1 * sin
            if WEIGHT_GRADIENT:
                dweight1 += scaled1 * normed1
                dweight2 += scaled2 * normed2
            scaled1 *= weight1
            scaled2 *= weight2
            slope = (tl.sum(scaled1 * x1 + scaled2 * x2, axis=1) / HEAD_DIM)[:, None]
            y1 = rstd * (scaled1 - x1 * slope)
            y2 = rstd * (scaled2 - x2 * slope)
        else:
            scaled1 = normed1 * weight1
            scaled2 = normed2 * weight2
            y1 = scaled1 * cos - scaled2 * sin
            y2 = scaled2 * cos + scaled1 * sin
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
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr, OFFSET: tl.constexpr,
    CAST_BEFORE_SCALE: tl.constexpr, NEIGHBOURS: tl.constexpr, TABLE_STEP: tl.constexpr,
    STAGES: tl.constexpr, BACKWARD: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # program p takes tokens p, p + program_count, ... of all rows of the batch, each of token_count
    program = tl.program_id(0)
    pair = tl.arange(0, PAIR_BLOCK)
    one = tl.zeros([1, 1], dtype=tl.int32)  # as if one head
    q_weight1, q_weight2 = load_pairs(
        q_weight_pointer + one, one == 0, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
    )
    k_weight1, k_weight2 = load_pairs(
        k_weight_pointer + one, one == 0, 1, HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False
    )
    dq_weight1 = tl.zeros([Q_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dq_weight2 = tl.zeros([Q_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dk_weight1 = tl.zeros([K_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    dk_weight2 = tl.zeros([K_HEAD_BLOCK, PAIR_BLOCK], dtype=tl.float32)
    for turn in tl.range(0, tl.cdiv(row_count - program, program_count), num_stages=STAGES):
        row = program + turn * program_count
        if LONG_INDEXING:
            row = row.to(tl.int64)
        batch = row // token_count
        token = row % token_count
        cos_token = cos_pointer + batch * cos_batch_stride + token * cos_token_stride
        sin_token = sin_pointer + batch * sin_batch_stride + token * sin_token_stride
        # pairs that are not rotated turn by nothing
        cos = tl.load(cos_token + pair * TABLE_STEP, mask=pair < ROTATED // 2, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_token + pair * TABLE_STEP, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)[None, :]
        dq_weight1, dq_weight2 = _norm_rotate_heads(
            q_pointer + batch * q_batch_stride + token * q_token_stride,
            dq_out_pointer + batch * dq_out_batch_stride + token * dq_out_token_stride,
            q_out_pointer + row * (Q_HEADS * HEAD_DIM), q_weight1 + OFFSET, q_weight2 + OFFSET, cos, sin,
            dq_weight1, dq_weight2, eps, q_head_stride, q_dim_stride, dq_out_head_stride, dq_out_dim_stride,
            Q_HEADS, Q_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, CAST_BEFORE_SCALE, NEIGHBOURS, BACKWARD,
            WEIGHT_GRADIENT, LONG_INDEXING,
        )  # fmt: skip
        dk_weight1, dk_weight2 = _norm_rotate_heads(
            k_pointer + batch * k_batch_stride + token * k_token_stride,
            dk_out_pointer + batch * dk_out_batch_stride + token * dk_out_token_stride,
            k_out_pointer + row * (K_HEADS * HEAD_DIM), k_weight1 + OFFSET, k_weight2 + OFFSET, cos, sin,
            dk_weight1, dk_weight2, eps, k_head_stride, k_dim_stride, dk_out_head_stride, dk_out_dim_stride,
            K_HEADS, K_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, CAST_BEFORE_SCALE, NEIGHBOURS, BACKWARD,
            WEIGHT_GRADIENT, LONG_INDEXING,
        )  # fmt: skip
    if WEIGHT_GRADIENT:  # partial: [programs, 2, HEAD_DIM]
        store_pairs(
            partial_pointer + program * (2 * HEAD_DIM) + one, one == 0, tl.sum(dq_weight1, axis=0)[None, :],
            tl.sum(dq_weight2, axis=0)[None, :], HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False,
        )  # fmt: skip
        store_pairs(
            partial_pointer + (program * 2 + 1) * HEAD_DIM + one, one == 0, tl.sum(dk_weight1, axis=0)[None, :],
            tl.sum(dk_weight2, axis=0)[None, :], HEAD_DIM, ROTATED, PAIR_BLOCK, NEIGHBOURS, False,
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
    pair_block = next_power_of_2(head_dim // 2)
    q_block, k_block = (min(next_power_of_2(n), max(1, PAIRS_PER_BLOCK // pair_block)) for n in (q_heads, k_heads))
    programs, warps, stages, partial = row_count, WARPS, 1, q  # partial is never written without WEIGHT_GRADIENT
    if weight_gradient:
        warps = WEIGHT_GRADIENT_WARPS
        programs = looping_programs(row_count, warps, q.device)
        heads = triton.cdiv(q_heads, q_block) * q_block + triton.cdiv(k_heads, k_block) * k_block
        token_bytes = heads * 2 * pair_block * (q.element_size() + dq_out.element_size())
        stages = 1 + min(2, BYTES_IN_FLIGHT // token_bytes)
        partial = torch.empty(programs, 2 * head_dim, dtype=torch.float32, device=q.device)
    with device_guard(q):
        _norm_rope_kernel[(programs,)](
            q, k, dq_out, dk_out, q_weight.contiguous(), k_weight.contiguous(), cos, sin, q_out, k_out, partial,
            token_count, row_count, programs, options.eps,
            *q.stride(), *k.stride(), *dq_out.stride(), *dk_out.stride(), *table_strides,
            Q_HEADS=q_heads, K_HEADS=k_heads, Q_HEAD_BLOCK=q_block, K_HEAD_BLOCK=k_block,
            HEAD_DIM=head_dim, ROTATED=rotated, PAIR_BLOCK=pair_block, OFFSET=options.offset,
            CAST_BEFORE_SCALE=options.cast_before_scale, NEIGHBOURS=LAYOUTS[layout].neighbours,
            TABLE_STEP=LAYOUTS[layout].table_step, STAGES=stages, BACKWARD=incoming is not None,
            WEIGHT_GRADIENT=weight_gradient,
            LONG_INDEXING=long_indexing(q, k, dq_out, dk_out, cos, sin, q_out, k_out), num_warps=warps,
        )  # fmt: skip
    if not weight_gradient:
        return q_out, k_out
    sums = sum_partials(partial, torch.promote_types(q_weight.dtype, k_weight.dtype))
    return q_out, k_out, sums[:head_dim].to(q_weight.dtype), sums[head_dim:].to(k_weight.dtype)


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
    """`rms_norm` of each head of q and k, then `rope`; differentiable in q, k and both weights.

    fp32 from load to store, but for the cast before the scale where `rms_norm` has it.

    Args:
        q: [B, T, Hq, D], k: [B, T, Hk, D]; D even; any strides, only read.
        q_weight, k_weight: [D].
        eps, offset, cast_before_scale: see `rms_norm`.
        cos, sin: [B or 1, T, R], layout: see `rope`.
    Returns:
        Both, contiguous, in the dtypes that `rms_norm` gives.
    Raises:
        ValueError: what does not fit together, as in `rms_norm` and `rope`.
    """
    check_rope(q, k, cos, sin, layout)
    for x, weight in ((q, q_weight), (k, k_weight)):
        check_norm("norm_rope", x, weight, offset=offset, cast_before_scale=cast_before_scale)
    unsupported = cos.requires_grad or sin.requires_grad or q.shape[-1] % 2
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
    q, k = rms_norm_reference(q, q_weight, eps, **flavour), rms_norm_reference(k, k_weight, eps, **flavour)
    return rope_reference(q, k, cos, sin, layout=layout)
