"""4-bit weights of bitsandbytes (Dettmers et al., 2023) made dense in one launch, bit for bit as bitsandbytes does it.

    value[i] = code[nibble[i]] * (code2[absmax[i // 64]] * absmax2[i // 64 // 256] + offset)

bitsandbytes takes three launches for double-quantised weights and writes the block scales to memory in between.
The high nibble of a byte comes first.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import device_guard, long_indexing, next_power_of_2, tl, triton, use_triton

__all__ = ["NF4Weight", "dequantize"]

WORDS = 256  # of eight values a program: two a thread. 84% of a copy's bandwidth on an H200, where bytes reach 64%
WARPS = 4


@triton.jit
def _nibble(code_ptr, word, NUMBER: tl.constexpr):
    """The code of a word's value NUMBER: bytes come in order, the high nibble of each first."""
    return tl.load(code_ptr + ((word >> (NUMBER // 2 * 8 + 4 - NUMBER % 2 * 4)) & 15))


@triton.jit
def _dequantize_kernel(
    word_ptr, code_ptr, absmax_ptr, code2_ptr, absmax2_ptr, offset_ptr, out_ptr, word_count,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, NESTED: tl.constexpr, WORDS: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """Packed values as [word_count] int32 -> out [8 * word_count]. A word lies in one block: its scale is read once."""
    program = tl.program_id(0)
    if LONG_INDEXING:
        program = program.to(tl.int64)
    number = program * WORDS + tl.arange(0, WORDS)
    inside = number < word_count
    word = tl.load(word_ptr + number, mask=inside, other=0)
    block = number // (BLOCKSIZE // 8)
    if NESTED:
        level = tl.load(absmax_ptr + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(code2_ptr + level) * tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=inside, other=0.0)
        scale = scale + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=inside, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    even04 = tl.interleave(
        (_nibble(code_ptr, word, 0) * scale).to(dtype), (_nibble(code_ptr, word, 4) * scale).to(dtype)
    )
    even26 = tl.interleave(
        (_nibble(code_ptr, word, 2) * scale).to(dtype), (_nibble(code_ptr, word, 6) * scale).to(dtype)
    )
    odd15 = tl.interleave(
        (_nibble(code_ptr, word, 1) * scale).to(dtype), (_nibble(code_ptr, word, 5) * scale).to(dtype)
    )
    odd37 = tl.interleave(
        (_nibble(code_ptr, word, 3) * scale).to(dtype), (_nibble(code_ptr, word, 7) * scale).to(dtype)
    )
    values = tl.interleave(tl.interleave(even04, even26), tl.interleave(odd15, odd37))  # [8 * WORDS]
    position = program * (8 * WORDS) + tl.arange(0, 8 * WORDS)
    tl.store(out_ptr + position, values, mask=position < word_count * 8)


def dequantize(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """A dense weight of shape ``state.shape`` in dtype, from bitsandbytes' packed bytes and QuantState.

    packed: the storage of a Params4bit, in any dtype (it is read as bytes). state: a bitsandbytes QuantState of
    quant_type "nf4" or "fp4", double-quantised or not. Equal to ``dequantize_4bit(packed, state).to(dtype)``.
    """
    data = packed.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)
    count = state.shape.numel()
    nested = state.nested
    kernel_takes = (
        use_triton(data, state.absmax) and dtype == state.dtype and count % 8 == 0 and state.blocksize % 8 == 0
        and data.data_ptr() % 4 == 0 and (not nested or (state.state2.blocksize & (state.state2.blocksize - 1)) == 0)
    )  # fmt: skip
    if not kernel_takes:
        return dequantize_reference(packed, state, dtype)
    out = torch.empty(state.shape, dtype=dtype, device=data.device)
    absmax2 = state.state2.absmax if nested else state.absmax
    code2 = state.state2.code if nested else state.code
    words = data.view(torch.int32)
    block = min(WORDS, next_power_of_2(count // 8))
    with device_guard(data):
        _dequantize_kernel[(triton.cdiv(count // 8, block),)](
            words, state.code, state.absmax, code2, absmax2, state.offset if nested else state.absmax, out, count // 8,
            BLOCKSIZE=state.blocksize, BLOCKSIZE2=state.state2.blocksize if nested else 1, NESTED=nested, WORDS=block,
            LONG_INDEXING=long_indexing(out), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip  # fused multiply-add would round once where bitsandbytes rounds twice
    return out


def dequantize_reference(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """`dequantize` by bitsandbytes' own function."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed.detach(), state).to(dtype)


@dataclass(frozen=True, eq=False)
class NF4Weight:
    """A frozen 4-bit weight that is made dense where a product needs it; nothing dense is kept."""

    packed: Tensor
    state: Any

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in dtype, a fresh tensor."""
        return dequantize(self.packed, self.state, dtype)
