"""How each attention backend is called, and the table of what it honours; `attention` chooses from it.

A new backend is a function of a `Call` and a line of the table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .flash import FlashSettings, flash_attention
from .launch import device_guard

__all__ = ["BACKENDS", "Backend", "Call", "package_function"]

_HALF = (torch.bfloat16, torch.float16)
_KERNEL_DTYPES = (*_HALF, torch.float32)
_CAUSAL = 1  # the memory-efficient kernel's mask type: causal from a sample's first token
_QUERY_BLOCK = 1024  # queries a mask covers at once, where there has to be a mask


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `attention`, checked; at least one token; window None where it hides nothing."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    max_length: int
    lengths: Sequence[int] | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def unit_stride(self) -> list[Tensor]:
        """q, k, v with contiguous head vectors, which is all that the kernels ask of strides."""
        return [x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v)]

    def host_lengths(self) -> list[int]:
        """Tokens of each sample; one device sync if nobody gave them."""
        lengths = self.cu_seqlens.diff().tolist() if self.lengths is None else list(self.lengths)
        if sum(lengths) != self.q.shape[0]:
            raise ValueError(f"samples of {sum(lengths)} tokens in all, but q has {self.q.shape[0]}")
        return lengths


@lru_cache(maxsize=1)
def _varlen_function() -> tuple[Callable[..., Any], frozenset[str]]:
    """torch's function and its keywords: 2.11 takes grouped heads as they are, 2.13 wants enable_gqa=True."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(signature(varlen_attn).parameters)


def _varlen(call: Call) -> Tensor:
    varlen_attn, keywords = _varlen_function()
    window = (-1 if call.window is None else call.window - 1, 0)
    options: dict[str, Any] = {"window_size": window, "scale": call.scale}
    if call.q.shape[1] != call.k.shape[1] and "enable_gqa" in keywords:
        options["enable_gqa"] = True
    boundaries = (call.cu_seqlens, call.cu_seqlens, call.max_length, call.max_length)
    return varlen_attn(*call.unit_stride(), *boundaries, **options)


def _flash_package(call: Call, name: str, unlimited: int | None) -> Tensor:
    """FlashAttention-2, -3 and -4, whose functions have the same keywords."""
    function = package_function(name)
    assert function is not None  # choose_backend saw it
    with device_guard(call.q):  # flash4 asks the current GPU what it is
        out = function(
            *call.unit_stride(), cu_seqlens_q=call.cu_seqlens, cu_seqlens_k=call.cu_seqlens,
            max_seqlen_q=call.max_length, max_seqlen_k=call.max_length, causal=True, softmax_scale=call.scale,
            window_size=(unlimited, unlimited) if call.window is None else (call.window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({"softcap": call.softcap} if call.softcap else {}),
        )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def _triton(call: Call) -> Tensor:
    settings = FlashSettings(call.scale, call.window, call.softcap)
    sinks = None if call.sinks is None else call.sinks.contiguous()
    return flash_attention(call.q, call.k, call.v, call.cu_seqlens, settings, sinks)


class _EfficientFunction(torch.autograd.Function):
    """torch's memory-efficient (cutlass) attention with boundaries; its own derivative forgets the window."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, length: int, options: dict[str, Any]
    ) -> Tensor:  # fmt: skip
        packed = (q[None], k[None], v[None], None)  # [1, T, H, D], no bias
        ctx.boundaries, ctx.options = (cu_seqlens, cu_seqlens, length, length), options
        out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            *packed, *ctx.boundaries, 0.0, _CAUSAL, True, **options
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)  # lse [S, H, length rounded up]
        return out[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        packed = (dout[None], q[None], k[None], v[None], None, out)
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            *packed, *ctx.boundaries, lse, 0.0, *random, _CAUSAL, False, **ctx.options
        )
        return dq[0], dk[0], dv[0], None, None, None


def _efficient(call: Call) -> Tensor:
    q, k, v = call.unit_stride()
    k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    options = dict(scale=call.scale, window_size=call.window)  # its window too is i - j < w
    return _EfficientFunction.apply(q, k, v, call.cu_seqlens, min(call.max_length, q.shape[0]), options)


def _xformers(call: Call) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("attention backend 'xformers' is not deterministic; leave the choice open")
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    lengths = [length for length in call.host_lengths() if length]
    mask = BlockDiagonalCausalMask.from_seqlens(lengths, device=call.q.device)
    if call.window is not None:
        mask = mask.make_local_attention(call.window)
    q, k, v = call.unit_stride()
    k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    function = package_function("xformers")
    assert function is not None
    return function(q[None], k[None], v[None], attn_bias=mask, scale=call.scale)[0]


def _per_sample(call: Call, attend: Callable[..., Tensor]) -> Tensor:
    """attend(call, [n, H, L, D] x 3) for every n samples of equal length L; results in the samples' order."""
    lengths, members = call.host_lengths(), dict[int, list[int]]()
    for sample, length in enumerate(lengths):
        members.setdefault(length, []).append(sample)
    members.pop(0, None)  # unused entries of a padded cu_seqlens
    pieces = [x.split(lengths) for x in (call.q, call.k, call.v)]
    outputs: dict[int, Tensor] = {}
    for samples in members.values():
        if len(samples) == 1:  # no copy
            batch = [piece[samples[0]].unsqueeze(0) for piece in pieces]
        else:
            batch = [torch.stack([piece[sample] for sample in samples]) for piece in pieces]
        out = attend(call, *(x.transpose(1, 2) for x in batch)).transpose(1, 2)  # [n, L, Hq, D]
        outputs.update(zip(samples, out.unbind(0), strict=True))
    return torch.cat([outputs[sample] for sample in sorted(outputs)])


def _query_blocks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first) for each block of queries start..stop-1, which see keys first..stop-1."""
    for start in range(0, length, _QUERY_BLOCK):
        yield start, min(start + _QUERY_BLOCK, length), 0 if window is None else max(0, start - window + 1)


def _visible(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[stop - start, stop - first] bool: which of the keys first..stop-1 each query start..stop-1 sees."""
    visible = torch.ones(stop - start, stop - first, dtype=torch.bool, device=device).tril_(start - first)
    return visible if window is None else visible.triu_(start - first - window + 1)


def _share_heads(x: Tensor, heads: int) -> Tensor:
    """Hk heads in dimension 1 to `heads`: each key head for the query heads of its group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.is_cuda:  # enable_gqa would rule out the memory-efficient kernel, which fp32, masks and Turing need
        k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    attend = partial(F.scaled_dot_product_attention, scale=call.scale, enable_gqa=grouped)
    if call.window is None or call.window >= length:
        return attend(q, k, v, is_causal=True)
    outputs = []
    for start, stop, first in _query_blocks(length, call.window):
        mask = _visible(start, stop, first, call.window, q.device)
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        outputs.append(attend(q[:, :, start:stop], keys, values, attn_mask=mask))
    return torch.cat(outputs, dim=2)


def _eager(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """transformers' eager attention of gemma2 and gpt_oss, operation by operation; the softmax in fp32."""
    k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for start, stop, first in _query_blocks(q.shape[2], call.window):
        logits = torch.matmul(q[:, :, start:stop], k[:, :, first:stop].transpose(2, 3)) * call.scale
        if call.softcap is not None:
            logits = torch.tanh(logits / call.softcap) * call.softcap
        visible = _visible(start, stop, first, call.window, q.device)
        logits = logits.masked_fill(~visible, -torch.inf)  # [n, Hq, stop - start, stop - first]
        if call.sinks is not None:
            sink = call.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink.to(logits.dtype)], dim=-1)
        p = torch.softmax(logits, dim=-1, dtype=softmax_dtype)
        p = p if call.sinks is None else p[..., :-1]
        outputs.append(torch.matmul(p.to(v.dtype), v[:, :, first:stop]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class Backend:
    """What a backend honours and where it runs."""

    run: Callable[[Call], Tensor]
    window: bool = True
    softcap: bool = False
    sinks: bool = False
    dtypes: tuple[torch.dtype, ...] = _HALF
    capability: tuple[int, int] | None = (8, 0)  # at least; None: any device, any dtype, any head size
    majors: tuple[int, ...] = ()  # compute capabilities 9.x and so on; empty: no matter
    head_multiple: int = 8
    gap_majors: tuple[int, ...] = ()  # compute capabilities on which it takes no head size between 128 and 256
    pads_samples: bool = False  # backward indexes (T + 128 S) Hq D elements with 32 bits
    package: tuple[str, str, str] | None = None  # module, function, how to get it


# In order of preference. Before 8.0 Triton has no tensor-core products: softcap and sinks stay with eager.
BACKENDS: dict[str, Backend] = {
    "flash4": Backend(  # its softcap and sinks have not been tried
        partial(_flash_package, name="flash4", unlimited=None), majors=(9, 10), gap_majors=(10,), pads_samples=True,
        package=("flash_attn.cute", "flash_attn_varlen_func", "pip install flash-attn-4"),
    ),
    "varlen": Backend(_varlen, pads_samples=True),
    "triton": Backend(
        _triton, softcap=True, sinks=True, head_multiple=1,  # no fp32: a GPU's exp2 is not torch's
        package=("triton", "jit", "pip install triton"),
    ),
    "efficient": Backend(_efficient, dtypes=_KERNEL_DTYPES, capability=(7, 0)),
    "flash3": Backend(
        partial(_flash_package, name="flash3", unlimited=-1), softcap=True, majors=(9,), pads_samples=True,
        package=("flash_attn_interface", "flash_attn_varlen_func", "build flash-attention's hopper folder"),
    ),
    "flash2": Backend(
        partial(_flash_package, name="flash2", unlimited=-1), softcap=True, pads_samples=True,
        package=("flash_attn", "flash_attn_varlen_func", "pip install flash-attn"),
    ),
    "xformers": Backend(
        _xformers, dtypes=_KERNEL_DTYPES, capability=(7, 0),
        package=("xformers.ops", "memory_efficient_attention", "pip install xformers"),
    ),
    "sdpa": Backend(partial(_per_sample, attend=_sdpa), capability=None),
    "eager": Backend(partial(_per_sample, attend=_eager), softcap=True, sinks=True, capability=None),
}  # fmt: skip


@lru_cache(maxsize=16)
def package_function(name: str) -> Callable[..., Any] | None:
    """The function that a backend's package gives; None where it is not installed, or cannot be imported."""
    package = BACKENDS[name].package
    assert package is not None
    try:
        return getattr(import_module(package[0]), package[1], None)
    except (ImportError, OSError, AttributeError):  # not there, or not with the libraries and versions that it needs
        return None
