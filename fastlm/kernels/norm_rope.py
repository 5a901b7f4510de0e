"""RMSNorm of every query and key head, then the rotation, in one launch for q and k; out of place.

Replaces q_norm, k_norm and apply_rotary_pos_emb of qwen3, gemma3 and their like: q and k are read once and written
once. Backward is one launch too, with the weights' gradients, if any, summed in fp32 in a fixed order. It reads q
and k anyway, so it recomputes the reciprocal root of each head: saving that would move 4 bytes a head more, twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import device_guard, long_indexing, multiprocessor_count, next_power_of_2, tl, triton, use_triton
from .rms_norm import RMSNormOptions, check_norm, rms_norm_reference, sum_partials
from .rope import LAYOUTS, check_rope, load_angles, load_pairs, rope_reference, rope_tables, store_pairs

__all__ = ["NormRopeFunction", "norm_rope", "norm_rope_bwd", "norm_rope_fwd", "norm_rope_reference"]

_Pair = tuple[Tensor, Tensor]  # of q and of k; cos and sin

WARPS = 4
PAIRS_PER_BLOCK = 2048  # 16 pairs a thread, as in rope
PAIRS_PER_BACKWARD_BLOCK = 1024  # which holds twice as much
PROGRAMS_PER_MULTIPROCESSOR = 4  # weight gradients: as many as are resident at 128 registers a thread
TOKENS_PER_PROGRAM = 4  # at least, for the same


@triton.jit
def _norm_rotate_heads(
    x_pointer, dout_pointer, out_pointer, weight1, weight2, cos, sin, dweight1, dweight2, eps,
    x_head_stride, x_dim_stride, dout_head_stride, dout_dim_stride,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, CAST_BEFORE_SCALE: tl.constexpr, NEIGHBOURS: tl.constexpr, BACKWARD: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """All heads of one token; out, contiguous [HEADS, HEAD_DIM], gets the rotated norms or the gradient of x."""
    for start in range(0, HEADS, HEAD_BLOCK):
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
    BACKWARD: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # program p takes tokens p, p + program_count, ... of all rows of the batch, each of token_count
    program = tl.program_id(0)
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
    for turn in range(0, tl.cdiv(row_count - program, program_count)):
        row = program + turn * program_count
        if LONG_INDEXING:
            row = row.to(tl.int64)
        batch = row // token_count
        token = row % token_count
        cos = load_angles(
            cos_pointer, batch, token, cos_batch_stride, cos_token_stride, ROTATED, PAIR_BLOCK, TABLE_STEP, 1.0
        )
        sin = load_angles(
            sin_pointer, batch, token, sin_batch_stride, sin_token_stride, ROTATED, PAIR_BLOCK, TABLE_STEP, 0.0
        )
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


def norm_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: RMSNormOptions,
    layout: str = "half",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the rotated norms of q [B, T, Hq, D] and k [B, T, Hk, D], fresh and contiguous."""
    promote = torch.promote_types if options.cast_before_scale else lambda dtype, _weight_dtype: dtype
    q_out = torch.empty(q.shape, dtype=promote(q.dtype, q_weight.dtype), device=q.device)
    k_out = torch.empty(k.shape, dtype=promote(k.dtype, k_weight.dtype), device=k.device)
    _launch((q, k), (q_weight, k_weight), (cos, sin), None, (q_out, k_out), options, layout)
    return q_out, k_out


def norm_rope_bwd(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    options: RMSNormOptions, layout: str = "half", *, weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q and k, fresh and contiguous, and of both weights (None unless asked for)."""
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    dweights = _launch(
        (q, k), (q_weight, k_weight), (cos, sin), (dq_out, dk_out), (dq, dk), options, layout,
        weight_gradient=weight_gradient,
    )  # fmt: skip
    return dq, dk, *dweights


def _launch(
    heads: _Pair, weights: _Pair, tables: _Pair, incoming: _Pair | None, outs: _Pair, options: RMSNormOptions, layout: str, *,
    weight_gradient: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Pairs of tensors, for q and for k; incoming is None in forward. Returns the weights' gradients, if wanted."""
    (q, k), (dq_out, dk_out) = heads, incoming or heads
    batch_size, token_count, q_heads, head_dim = q.shape
    row_count, k_heads = batch_size * token_count, k.shape[2]
    if row_count == 0:
        return tuple(torch.zeros_like(weight) if weight_gradient else None for weight in weights)  # type: ignore
    cos, sin, table_strides, rotated = rope_tables(tables[0], tables[1], layout)
    pair_block = next_power_of_2(head_dim // 2)
    head_limit = max(1, (PAIRS_PER_BACKWARD_BLOCK if incoming else PAIRS_PER_BLOCK) // pair_block)
    programs, partial = row_count, q  # partial is never written without WEIGHT_GRADIENT
    if weight_gradient:
        resident = PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(q.device)
        programs = min(triton.cdiv(row_count, TOKENS_PER_PROGRAM), resident)
        partial = torch.empty(programs, 2 * head_dim, dtype=torch.float32, device=q.device)
    with device_guard(q):
        _norm_rope_kernel[(programs,)](
            q, k, dq_out, dk_out, *(weight.contiguous() for weight in weights), cos, sin, *outs, partial,
            token_count, row_count, programs, options.eps,
            *q.stride(), *k.stride(), *dq_out.stride(), *dk_out.stride(), *table_strides,
            Q_HEADS=q_heads, K_HEADS=k_heads, Q_HEAD_BLOCK=min(next_power_of_2(q_heads), head_limit),
            K_HEAD_BLOCK=min(next_power_of_2(k_heads), head_limit), HEAD_DIM=head_dim, ROTATED=rotated,
            PAIR_BLOCK=pair_block, OFFSET=options.offset, CAST_BEFORE_SCALE=options.cast_before_scale,
            NEIGHBOURS=LAYOUTS[layout].neighbours, TABLE_STEP=LAYOUTS[layout].table_step,
            BACKWARD=incoming is not None, WEIGHT_GRADIENT=weight_gradient,
            LONG_INDEXING=long_indexing(q, k, dq_out, dk_out, cos, sin, *outs), num_warps=WARPS,
        )  # fmt: skip
    if not weight_gradient:
        return None, None
    sums = sum_partials(partial, torch.promote_types(*(weight.dtype for weight in weights)))
    return sums[:head_dim].to(weights[0].dtype), sums[head_dim:].to(weights[1].dtype)


class NormRopeFunction(torch.autograd.Function):
    """Normalised and rotated q and k by the kernel above; see `norm_rope`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        options: RMSNormOptions, layout: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.options, ctx.layout = options, layout
        return norm_rope_fwd(q, k, q_weight, k_weight, cos, sin, options, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradients = norm_rope_bwd(dq_out, dk_out, *ctx.saved_tensors, ctx.options, ctx.layout, weight_gradient=wanted)
        return *gradients, None, None, None, None


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
    return NormRopeFunction.apply(q, k, q_weight, k_weight, cos, sin, options, layout)


def norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    layout: str = "half", **flavour: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_rope` in plain torch, operation by operation as transformers does it."""
    q, k = rms_norm_reference(q, q_weight, eps, **flavour), rms_norm_reference(k, k_weight, eps, **flavour)
    return rope_reference(q, k, cos, sin, layout=layout)
