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
    "interpreting",
    "long_indexing",
    "multiprocessor_count",
    "next_power_of_2",
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
        extent = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += max(size - 1, 0) * stride
        if extent * tensor.element_size() > _INT32_MAX:
            return True
    return False


def as_rows(x: Tensor) -> Tensor:
    """View x [..., H] as [outer, inner, H] with contiguous last dimension; x must not be empty.

    Two leading dimensions with any strides cover [B, T, H], and [B, T, heads, D] inside a packed projection.
    Copies only what does not fit that: a strided last dimension, or three leading ones that do not collapse
    into two.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1])


def device_guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU current, where Triton launches; does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 for a CPU, where a program takes a millisecond to interpret."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1); block sizes must be powers of two."""
    return 1 << (n - 1).bit_length()
