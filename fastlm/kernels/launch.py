"""What every Triton kernel file needs around its kernels: is Triton there, may it run, how wide are offsets.

Import ``triton`` and ``tl`` from here, so that a machine without Triton can still import every kernel file.
Kernel files must not use ``from __future__ import annotations``: Triton reads ``tl.constexpr`` in signatures.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "as_rows",
    "device_guard",
    "exp_accurate",
    "exponential",
    "interpreting",
    "long_indexing",
    "looping_programs",
    "multiprocessor_count",
    "next_power_of_2",
    "resident_programs",
    "row_offset",
    "tl",
    "triton",
    "use_triton",
]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _TritonStub:
        """Stands in for ``triton``: decorated kernels stay plain functions that nobody launches."""

        @staticmethod
        def jit(function: Any = None, **_options: Any) -> Any:
            return function if function is not None else (lambda decorated: decorated)

    class _LanguageStub:
        """Stands in for ``triton.language`` in kernel signatures."""

        constexpr = object

    triton: Any = _TritonStub()  # type: ignore[no-redef]
    tl: Any = _LanguageStub()  # type: ignore[no-redef]


@triton.jit
def exp_accurate(x):
    """exp(x) to about an fp32 ulp, where tl.exp's error grows with |x|: it rounds x log2(e) before exponentiating.

    Cody and Waite: exp(x) = 2^n exp(x - n ln 2), with ln 2 in two parts so that the difference is exact. 0 below -104.
    """
    x = tl.where(x < -104.0, -104.0, x)  # keeps NaN
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp2(n) * tl.exp(x - n * 0.693359375 + n * 2.12194440054690581e-4)


@triton.jit
def exponential(x, ACCURATE: tl.constexpr):
    """exp(x): `exp_accurate`, or off by |x| 6e-8 of it, which 16-bit operands do not show, in a fifth of the time."""
    if ACCURATE:
        return exp_accurate(x)
    else:
        return tl.exp(x)


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Where a row of what `as_rows` gives begins; FLAT: inner is 1, which saves two divisions."""
    if FLAT:
        return row * outer_stride
    else:
        return (row // inner) * outer_stride + (row % inner) * inner_stride


_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INT32_MAX = 2**31 - 1


def interpreting() -> bool:
    """Whether kernels are interpreted on CPU tensors (``TRITON_INTERPRET=1`` before triton was imported)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def use_triton(*tensors: Tensor) -> bool:
    """Whether Triton kernels can and should run on these tensors; the torch reference is for all else.

    True for plain tensors on one GPU (or on the CPU while interpreting) whose floating dtypes are bf16, fp16
    or fp32. False while torch.compile is tracing: the compiler fuses the reference itself, in one graph.
    """
    if not HAS_TRITON or torch.compiler.is_compiling():
        return False
    first = tensors[0].device
    if first.type != "cuda" and not (first.type == "cpu" and interpreting()):
        return False
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device != first:
            return False  # a subclass (DTensor, for one) does not hold what its data_ptr says
        if tensor.is_floating_point() and tensor.dtype not in _KERNEL_DTYPES:
            return False
    return True


def long_indexing(*tensors: Tensor) -> bool:
    """Whether the largest byte offset into any of the tensors exceeds 2^31 - 1: kernels then need int64.

    Counts index times stride, not elements: a view that picks few rows far apart is large too.
    """
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() <= _INT32_MAX:  # nothing in it lies further away
            continue
        extent = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += max(size - 1, 0) * stride
        if extent * tensor.element_size() > _INT32_MAX:
            return True
    return False


def as_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View each x [..., H], all of one shape, as [outer, inner, H] with contiguous last dimension; none may be empty.

    Two leading dimensions with any strides cover [B, T, H], and [B, T, heads, D] inside a packed projection;
    where one covers all tensors, inner is 1. Copies only what does not fit that: a strided last dimension, or
    three leading ones that do not collapse into two.
    """
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(-1, 1, x.shape[-1]) for x in tensors)
    views = []
    for x in tensors:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        views.append(x.reshape(-1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1]))
    if all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in views):
        return tuple(x.flatten(0, 1).unsqueeze(1) for x in views)
    return tuple(views)


def device_guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU current, where Triton launches; does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 for a CPU, where a program takes a millisecond to interpret."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Of a program that loops, at 128 registers a thread. With twice as many programs the norm's weight gradient took two
# waves: 0.147 ms for 16,384 x 4,096, where 0.099 ms did without it (H200).
RESIDENT_WARPS = 16
TURNS = 4  # of the loop of a program that sums, at least: each costs a row of partial sums, written and read


def resident_programs(warps: int, device: torch.device) -> int:
    """Programs of so many warps that loop over their work: as many as a GPU holds at once."""
    return RESIDENT_WARPS // warps * multiprocessor_count(device)


def looping_programs(block_count: int, warps: int, device: torch.device) -> int:
    """Programs that share block_count blocks between them, for a weight gradient."""
    return min(triton.cdiv(block_count, TURNS), resident_programs(warps, device))


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1); block sizes must be powers of two."""
    return 1 << (n - 1).bit_length()
