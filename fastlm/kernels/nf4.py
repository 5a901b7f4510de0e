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

BYTES = 1024  # packed bytes a program: 2,048 values, 16 a thread with 4 warps
WARPS = 4


@triton.jit
def _dequantize_kernel(
    packed_ptr, code_ptr, absmax_ptr, code2_ptr, absmax2_ptr, offset_ptr, out_ptr, count,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, NESTED: tl.constexpr, BYTES: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):  # fmt: skip
    """packed [count / 2] uint8 -> out [count]."""
    program = tl.program_id(0)
    if LONG_INDEXING:
        program = program.to(tl.int64)
    byte = program * BYTES + tl.arange(0, BYTES)
    inside = byte * 2 < count
    packed = tl.load(packed_ptr + byte, mask=inside, other=0).to(tl.int32)
    block = byte // (BLOCKSIZE // 2)
    if NESTED:
        level = tl.load(absmax_ptr + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(code2_ptr + level) * tl.load(absmax2_ptr + block // BLOCKSIZE2, mask=inside, other=0.0)
        scale = scale + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=inside, other=0.0)
    high = tl.load(code_ptr + (packed >> 4)) * scale
    low = tl.load(code_ptr + (packed & 15)) * scale
    values = tl.interleave(high, low)  # [2 * BYTES]
    position = program * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + position, values.to(out_ptr.dtype.element_ty), mask=position < count)


def dequantize(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """A dense weight of shape ``state.shape`` in dtype, from bitsandbytes' packed bytes and QuantState.

    packed: the storage of a Params4bit, in any dtype (it is read as bytes). state: a bitsandbytes QuantState of
    quant_type "nf4" or "fp4", double-quantised or not. Equal to ``dequantize_4bit(packed, state).to(dtype)``.
    """
    data = packed.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)
    count = state.shape.numel()
    nested = state.nested
    kernel_takes = (
        use_triton(data, state.absmax) and dtype == state.dtype and count % 2 == 0
        and (not nested or (state.state2.blocksize & (state.state2.blocksize - 1)) == 0)
    )  # fmt: skip
    if not kernel_takes:
        return dequantize_reference(packed, state, dtype)
    out = torch.empty(state.shape, dtype=dtype, device=data.device)
    absmax2 = state.state2.absmax if nested else state.absmax
    code2 = state.state2.code if nested else state.code
    block = min(BYTES, next_power_of_2(count // 2))
    with device_guard(data):
        _dequantize_kernel[(triton.cdiv(count // 2, block),)](
            data, state.code, state.absmax, code2, absmax2, state.offset if nested else state.absmax, out, count,
            BLOCKSIZE=state.blocksize, BLOCKSIZE2=state.state2.blocksize if nested else 1, NESTED=nested, BYTES=block,
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
