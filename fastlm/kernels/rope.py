"""Rotary position embedding (Su et al., 2021) of queries and keys in one launch.

Replaces apply_rotary_pos_emb of transformers, which writes rotate_half(x), two products and a sum for each of
q and k. Here q and k are read once and written once, straight from the projections' strided outputs; cos and
sin are read once a token and used by all heads. Backward is the same kernel with the sign of sin exchanged (a
rotation's transpose); the incoming gradients are only read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import device_guard, long_indexing, next_power_of_2, tl, triton, use_triton

__all__ = ["LAYOUTS", "RopeFunction", "check_rope", "load_heads", "load_pairs", "rope", "rope_bwd", "rope_fwd",
           "rope_reference", "rope_tables", "store_pairs"]  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Which dimensions form a pair, and where in cos and sin the angle of pair i stands."""

    neighbours: bool  # pair i is (2i, 2i+1), else (i, i + R/2)
    table_step: int  # pair i's angle is at table_step * i
    table_repeats: int  # times that each angle stands in a table, which has repeats * R / 2 entries


LAYOUTS = {
    "half": Layout(neighbours=False, table_step=1, table_repeats=2),  # a b c a b c
    "half_once": Layout(neighbours=False, table_step=1, table_repeats=1),  # a b c
    "interleaved": Layout(neighbours=True, table_step=2, table_repeats=2),  # a a b b c c
    "interleaved_halves": Layout(neighbours=True, table_step=1, table_repeats=2),  # a b c a b c
}

PAIRS_PER_BLOCK = 2048  # 16 pairs a thread with 4 warps: two 16-byte loads of each half
WARPS = 4


@triton.jit
def _pair_dims(DIMS: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr, LONG_INDEXING: tl.constexpr):
    """Where the members of each pair stand in the "half" layouts: [1, PAIR_BLOCK] each."""
    pair = tl.arange(0, PAIR_BLOCK)
    if LONG_INDEXING:
        pair = pair.to(tl.int64)
    first = pair
    second = pair + ROTATED // 2
    if ROTATED < DIMS:  # dimensions that are not rotated form pairs after those that are
        ALIGNED: tl.constexpr = (ROTATED // 2 | DIMS // 2) & -(ROTATED // 2 | DIMS // 2)
        first = tl.where(pair < ROTATED // 2, first, pair + ROTATED // 2)
        second = tl.where(pair < ROTATED // 2, second, pair + DIMS // 2)
        first = tl.max_contiguous(tl.multiple_of(first, ALIGNED), ALIGNED)
        second = tl.max_contiguous(tl.multiple_of(second, ALIGNED), ALIGNED)
    return first[None, :], second[None, :]


@triton.jit
def load_pairs(
    pointer, mask, dim_stride, DIMS: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """The members of the DIMS / 2 pairs of some heads (pointer, mask: [HEADS, 1]), fp32 [HEADS, PAIR_BLOCK] each."""
    if NEIGHBOURS:
        dim = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
        if LONG_INDEXING:
            dim = dim.to(tl.int64)
        x = tl.load(pointer + dim * dim_stride, mask=mask & (dim < DIMS), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], PAIR_BLOCK, 2)))
    else:
        first_dim, second_dim = _pair_dims(DIMS, ROTATED, PAIR_BLOCK, LONG_INDEXING)
        mask = mask & (tl.arange(0, PAIR_BLOCK) < DIMS // 2)[None, :]
        first = tl.load(pointer + first_dim * dim_stride, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(pointer + second_dim * dim_stride, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    pointer, mask, first, second, DIMS: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """The opposite of `load_pairs`, into contiguous heads."""
    if NEIGHBOURS:
        dim = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
        y = tl.reshape(tl.join(first, second), (first.shape[0], 2 * PAIR_BLOCK))
        tl.store(pointer + dim, y.to(pointer.dtype.element_ty), mask=mask & (dim < DIMS))
    else:
        first_dim, second_dim = _pair_dims(DIMS, ROTATED, PAIR_BLOCK, LONG_INDEXING)
        mask = mask & (tl.arange(0, PAIR_BLOCK) < DIMS // 2)[None, :]
        tl.store(pointer + first_dim, first.to(pointer.dtype.element_ty), mask=mask)
        tl.store(pointer + second_dim, second.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_heads(
    pointer, START: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, head_stride, dim_stride,
    DIMS: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """`load_pairs` of heads START to START + HEAD_BLOCK - 1 of the token at pointer; 0 past its HEADS."""
    head = START + tl.arange(0, HEAD_BLOCK)[:, None]
    mask = head < HEADS
    if LONG_INDEXING:
        head = head.to(tl.int64)
    return load_pairs(
        pointer + head * head_stride, mask, dim_stride, DIMS, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING
    )


@triton.jit
def _rotate_heads(
    in_pointer, out_pointer, x1, x2, cos, sin, in_head_stride, in_dim_stride,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr, LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """All heads of one token: pointers stand at its first element, out is contiguous [HEADS, HEAD_DIM].

    x1, x2: the pairs of the first HEAD_BLOCK of them.
    """
    for start in tl.static_range(0, HEADS, HEAD_BLOCK):
        head = start + tl.arange(0, HEAD_BLOCK)[:, None]  # [HEAD_BLOCK, 1]
        mask = head < HEADS
        if LONG_INDEXING:
            head = head.to(tl.int64)
        out_head = out_pointer + head * HEAD_DIM
        if start > 0:
            x1, x2 = load_heads(
                in_pointer, start, HEADS, HEAD_BLOCK, in_head_stride, in_dim_stride,
                ROTATED, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
            )  # fmt: skip
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        store_pairs(out_head, mask, y1, y2, ROTATED, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING)
        if ROTATED < HEAD_DIM:  # the rest passes through, bit by bit
            rest = ROTATED + tl.arange(0, REST_BLOCK)[None, :]
            if LONG_INDEXING:
                rest = rest.to(tl.int64)
            rest_mask = mask & (rest < HEAD_DIM)
            passed = tl.load(in_pointer + head * in_head_stride + rest * in_dim_stride, mask=rest_mask)
            tl.store(out_head + rest, passed, mask=rest_mask)


@triton.jit(do_not_specialize=["token_count"])
def _rope_kernel(
    q_pointer, k_pointer, cos_pointer, sin_pointer, q_out_pointer, k_out_pointer, token_count,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride,
    cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_HEAD_BLOCK: tl.constexpr, K_HEAD_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr, TABLE_STEP: tl.constexpr, BATCHED: tl.constexpr, BACKWARD: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    # one program a token; token_count is T, of one row of the batch
    program = tl.program_id(0)
    if LONG_INDEXING:
        program = program.to(tl.int64)
    batch = program // token_count if BATCHED else 0  # a division is 20 instructions before the first load
    token = program - batch * token_count
    q_token = q_pointer + batch * q_batch_stride + token * q_token_stride
    k_token = k_pointer + batch * k_batch_stride + token * k_token_stride
    q1, q2 = load_heads(
        q_token, 0, Q_HEADS, Q_HEAD_BLOCK, q_head_stride, q_dim_stride,
        ROTATED, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
    )  # fmt: skip
    k1, k2 = load_heads(
        k_token, 0, K_HEADS, K_HEAD_BLOCK, k_head_stride, k_dim_stride,
        ROTATED, ROTATED, PAIR_BLOCK, NEIGHBOURS, LONG_INDEXING,
    )  # fmt: skip
    tl.debug_barrier()  # keeps ptxas from moving the loads above down to where the first use of each is
    pair = tl.arange(0, PAIR_BLOCK)
    pair_mask = pair < ROTATED // 2
    cos_token = cos_pointer + batch * cos_batch_stride + token * cos_token_stride
    sin_token = sin_pointer + batch * sin_batch_stride + token * sin_token_stride
    cos = tl.load(cos_token + pair * TABLE_STEP, mask=pair_mask, other=0.0).to(tl.float32)[None, :]  # [1, PAIR_BLOCK]
    sin = tl.load(sin_token + pair * TABLE_STEP, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        sin = -sin
    _rotate_heads(
        q_token, q_out_pointer + program * (Q_HEADS * HEAD_DIM), q1, q2, cos, sin, q_head_stride, q_dim_stride,
        Q_HEADS, Q_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, REST_BLOCK, NEIGHBOURS, LONG_INDEXING,
    )  # fmt: skip
    _rotate_heads(
        k_token, k_out_pointer + program * (K_HEADS * HEAD_DIM), k1, k2, cos, sin, k_head_stride, k_dim_stride,
        K_HEADS, K_HEAD_BLOCK, HEAD_DIM, ROTATED, PAIR_BLOCK, REST_BLOCK, NEIGHBOURS, LONG_INDEXING,
    )  # fmt: skip


def rope_tables(cos: Tensor, sin: Tensor, layout: str) -> tuple[Tensor, Tensor, tuple[int, ...], int]:
    """cos and sin [B or 1, T, R] with contiguous rows, their batch and token strides, and how many dims they rotate."""
    # a last dimension of tables that is strided is rare and small: copy
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    strides = [table.stride(i) if table.shape[i] > 1 else 0 for table in (cos, sin) for i in (0, 1)]
    return cos, sin, tuple(strides), cos.shape[-1] * 2 // LAYOUTS[layout].table_repeats


def rope_fwd(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str = "half", *, backward: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotates q [B, T, Hq, D] and k [B, T, Hk, D] (backwards if asked to) into fresh contiguous tensors.

    in_place: into q and k, which then are contiguous and nobody else's.
    """
    q_out, k_out = (q, k) if in_place else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    batch_size, token_count, q_heads, head_dim = q.shape
    if batch_size * token_count == 0:
        return q_out, k_out
    cos, sin, table_strides, rotated = rope_tables(cos, sin, layout)
    facts, k_heads = LAYOUTS[layout], k.shape[2]
    pair_block = next_power_of_2(max(rotated // 2, 1))
    head_limit = max(1, PAIRS_PER_BLOCK // pair_block)
    with device_guard(q):
        _rope_kernel[(batch_size * token_count,)](
            q, k, cos, sin, q_out, k_out, token_count, *q.stride(), *k.stride(), *table_strides,
            Q_HEADS=q_heads, K_HEADS=k_heads,
            Q_HEAD_BLOCK=min(next_power_of_2(q_heads), head_limit),
            K_HEAD_BLOCK=min(next_power_of_2(k_heads), head_limit),
            HEAD_DIM=head_dim, ROTATED=rotated, PAIR_BLOCK=pair_block,
            REST_BLOCK=next_power_of_2(max(head_dim - rotated, 1)),
            NEIGHBOURS=facts.neighbours, TABLE_STEP=facts.table_step, BATCHED=batch_size > 1, BACKWARD=backward,
            LONG_INDEXING=long_indexing(q, k, cos, sin, q_out, k_out), num_warps=WARPS,
        )  # fmt: skip
    return q_out, k_out


def rope_bwd(dq_out: Tensor, dk_out: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> tuple[Tensor, Tensor]:
    """Gradients of q and k, fresh and contiguous; dq_out and dk_out, of any strides, are only read."""
    return rope_fwd(dq_out, dk_out, cos, sin, layout, backward=True)


class RopeFunction(torch.autograd.Function):
    """RoPE by the kernel above; see `rope`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return rope_fwd(q, k, cos, sin, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dq, dk = rope_bwd(dq_out, dk_out, cos, sin, ctx.layout)
        return dq, dk, None, None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, out of place.

    Pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin), in fp32. R dimensions are rotated, the D - R
    others pass through. Which dimensions form a pair, and how cos and sin hold the R/2 angles of a token:

    - "half": pairs (i, i + R/2); tables of R entries whose halves are equal (llama; with R < D phi3).
    - "half_once": the same pairs; tables of R/2 entries (gpt_oss).
    - "interleaved": pairs (2i, 2i+1); tables of R entries, each angle twice in a row (cohere).
    - "interleaved_halves": the same pairs; tables of R entries with equal halves (glm, ernie4_5, helium).

    Args:
        q: [B, T, Hq, D], k: [B, T, Hk, D]; any strides, only read.
        cos, sin: [B or 1, T, R] (R/2 for "half_once"), any floating dtype; one that requires grad
            takes the torch path.
        layout: see above.
    Returns:
        q and k rotated, in their own dtypes and shapes.
    Raises:
        ValueError: shapes that do not fit together, an odd or too large R, an unknown layout.
    """
    check_rope(q, k, cos, sin, layout)
    if cos.requires_grad or sin.requires_grad or not use_triton(q, k, cos, sin):
        return rope_reference(q, k, cos, sin, layout=layout)
    return RopeFunction.apply(q, k, cos, sin, layout)


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> tuple[Tensor, Tensor]:
    """`rope` in plain torch, with the operations of transformers' apply_rotary_pos_emb in their order."""
    facts = LAYOUTS[layout]
    if layout == "half_once":
        cos, sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    elif layout == "interleaved_halves":
        cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B or 1, T, 1, R]
    rotated = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        turned = x[..., :rotated]
        if facts.neighbours:
            if x.dtype in (torch.bfloat16, torch.float16):
                turned = turned.float()  # as cohere and ernie4_5 do
            partner = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        else:
            partner = torch.cat((-turned[..., rotated // 2 :], turned[..., : rotated // 2]), dim=-1)
        turned = (turned * cos + partner * sin).to(x.dtype)
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)

    return rotate(q), rotate(k)


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    """Raises ValueError where q, k [B, T, H, D] and cos, sin [B or 1, T, R] do not fit together."""
    if layout not in LAYOUTS:
        raise ValueError(f"rope: unknown layout {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"rope: expected q [B, T, Hq, D] and k [B, T, Hk, D] with equal B, T and D, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}; transpose [B, H, T, D] first (a view will do)"
        )
    batches = (1, q.shape[0])
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in batches or cos.shape[1] != q.shape[1]:
        raise ValueError(
            f"rope: expected cos and sin [{q.shape[0]} or 1, {q.shape[1]}, R], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    rotated = cos.shape[-1] * 2 // LAYOUTS[layout].table_repeats
    if rotated % 2 or not 0 < rotated <= q.shape[3]:
        raise ValueError(
            f"rope: cos has {cos.shape[-1]} entries, to rotate {rotated} dimensions ({layout}), expected an "
            f"even number, at most the head size {q.shape[3]}"
        )
