"""Causal attention over packed samples: no token sees another sample, and never a T x T mask.

Backends, first that can wins, unless one is forced:

- ``flash4``: FlashAttention-4 (package flash-attn-4) where installed, on Hopper and data-centre Blackwell,
  for samples of 2,048 tokens and more. Llama-3-8B heads on an H200, 32 layers forward and backward: 794 ms
  against varlen's 1,466 ms for 32,768 tokens in 16k samples, 39 against 55 ms for 16,384 tokens in samples of
  about 240, where varlen stays, since it needs no compilation at run time.
- ``varlen``: torch.nn.attention.varlen, on Ampere and newer, bf16 and fp16, head sizes to 256.
- ``sdpa``: torch's scaled_dot_product_attention sample by sample, on any device and in any dtype.
- ``eager``: the formula sample by sample, softmax in fp32; the only one with softcap and sinks.

Under torch.use_deterministic_algorithms(True) all four are deterministic: torch's flash and memory-efficient
backward read that flag (though not its warn_only form), flash4 is handed it, the rest has no atomics.

    y_i = sum_j softmax_j(softcap * tanh(scale q_i k_j / softcap)) v_j,  j in i's sample, 0 <= i - j < window
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BACKENDS", "attention", "backend_refusal", "choose_backend"]

BACKENDS = ("flash4", "varlen", "sdpa", "eager")  # in order of preference
_LONG_SAMPLE = 2048  # tokens from which flash4 goes first
_QUERY_BLOCK = 1024  # queries a mask covers at once, where there has to be a mask
_HALF = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def _flash4_function() -> Callable[..., Any] | None:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@lru_cache(maxsize=1)
def _varlen_function() -> tuple[Callable[..., Any], frozenset[str]]:
    """torch's function and its keywords: 2.11 takes grouped heads as they are, 2.13 wants enable_gqa=True."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def backend_refusal(
    backend: str,
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> str | None:
    """Why a backend cannot serve this case, or None if it can. Arguments as for `choose_backend`."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "eager":
        return None
    if softcap:
        return "takes no softcap"
    if sinks:
        return "takes no attention sinks"
    if backend == "sdpa":
        return None
    if device_type != "cuda" or capability is None:
        return f"needs a CUDA GPU, the tensors are on {device_type}"
    if dtype not in _HALF:
        return f"needs bf16 or fp16, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head size that is a multiple of 8 and at most 256, not {head_dim}"
    version = ".".join(map(str, capability))
    if backend == "varlen":
        return None if capability >= (8, 0) else f"needs compute capability 8.0, this GPU has {version}"
    if capability[0] not in (9, 10):
        return f"needs Hopper or data-centre Blackwell (compute capability 9 or 10), this GPU has {version}"
    return None if _flash4_function() is not None else "is not installed (pip install flash-attn-4)"


@lru_cache(maxsize=1024)
def choose_backend(
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    long_samples: bool = False,
    backend: str | None = None,
) -> str:
    """Name of the backend for tensors of this kind; pure, and cached.

    capability is the GPU's (major, minor), None elsewhere; `long_samples`: some have 2,048 tokens or more. A
    forced `backend` is returned if it can honour everything asked for; else a ValueError says what it cannot.
    """
    case = (device_type, capability, dtype, head_dim)
    features: dict[str, Any] = dict(window=window, softcap=softcap, sinks=sinks)
    if backend is not None:
        reason = backend_refusal(backend, *case, **features)
        if reason is not None:
            able = [name for name in BACKENDS if backend_refusal(name, *case, **features) is None]
            raise ValueError(f"attention backend {backend!r} {reason}; use one of {', '.join(able)}")
        return backend
    candidates = BACKENDS if long_samples else BACKENDS[1:]
    return next(name for name in candidates if backend_refusal(name, *case, **features) is None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    lengths: Sequence[int] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention within each packed sample; differentiable in q, k, v and sinks.

    q [T, Hq, D]; k, v [T, Hk, D], Hq a multiple of Hk, any strides; cu_seqlens [S + 1] int32, where samples
    begin and end; max_length at least the longest sample's tokens. Returns [T, Hq, D]. scale defaults to
    D**-0.5; with a window w a token sees itself and the w - 1 before it (None and 0: all before it); sinks
    [Hq]: a learned logit a head that joins the softmax and is dropped. Under autocast q, k and v are cast to
    its dtype first.

    lengths, the samples' tokens as host integers, is used by the backends that go sample by sample; without
    it they read cu_seqlens, which on a GPU is one device sync. Equivalent, for each sample:
    ``F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)``.

    Raises ValueError for shapes that do not fit and for a forced backend that cannot honour what is asked
    for.
    """
    _check(q, k, v, cu_seqlens, window, softcap)
    device = q.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.shape[0] == 0:
        return q + (k.sum() + v.sum() + (0 if sinks is None else 0 * sinks.sum())).to(q.dtype)
    if not window or window >= max_length:
        window = None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = choose_backend(
        device.type,
        _capability(device),
        q.dtype,
        q.shape[-1],
        window=window,
        softcap=softcap,
        sinks=sinks is not None,
        long_samples=max_length >= _LONG_SAMPLE,
        backend=backend,
    )
    if name == "varlen":
        return _varlen(q, k, v, cu_seqlens, max_length, scale, window)
    if name == "flash4":
        return _flash4(q, k, v, cu_seqlens, max_length, scale, window)
    host_lengths = cu_seqlens.diff().tolist() if lengths is None else list(lengths)
    if sum(host_lengths) != q.shape[0]:
        raise ValueError(f"samples of {sum(host_lengths)} tokens in all, but q has {q.shape[0]}")
    if name == "sdpa":
        return _per_sample(q, k, v, host_lengths, partial(_sdpa, scale=scale, window=window))
    eager = partial(_eager, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return _per_sample(q, k, v, host_lengths, eager)


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, softcap: float | None
) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"expected q [T, Hq, D] and k, v [T, Hk, D]; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"expected cu_seqlens [S + 1] int32; got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if window is not None and window < 0:
        raise ValueError(f"window must be positive, or None or 0 for none; got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap}")


def _unit_stride(x: Tensor) -> Tensor:
    """x with contiguous head vectors, which is all that the flash kernels ask of strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float, window: int | None
) -> Tensor:
    varlen_attn, keywords = _varlen_function()
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
    if q.shape[1] != k.shape[1] and "enable_gqa" in keywords:
        options["enable_gqa"] = True
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, **options)


def _flash4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float, window: int | None
) -> Tensor:
    function = _flash4_function()
    assert function is not None  # choose_backend saw it
    out = function(
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_length,
        max_seqlen_k=max_length,
        causal=True,
        softmax_scale=scale,
        window_size=(None, None) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out


def _per_sample(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], attend: Callable[..., Tensor]) -> Tensor:
    """attend([n, H, L, D] x 3) for every n samples of equal length L; results in the samples' order."""
    members: dict[int, list[int]] = {}
    for sample, length in enumerate(lengths):
        members.setdefault(length, []).append(sample)
    members.pop(0, None)  # unused entries of a padded cu_seqlens
    pieces = [x.split(lengths) for x in (q, k, v)]
    outputs: dict[int, Tensor] = {}
    for samples in members.values():
        if len(samples) == 1:  # no copy
            batch = [piece[samples[0]].unsqueeze(0) for piece in pieces]
        else:
            batch = [torch.stack([piece[sample] for sample in samples]) for piece in pieces]
        out = attend(*(x.transpose(1, 2) for x in batch)).transpose(1, 2)  # [n, L, Hq, D]
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
    """[n, Hk, L, D] to [n, heads, L, D]: each key head for the query heads of its group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    if q.is_cuda:  # enable_gqa would rule out the memory-efficient kernel, which fp32, masks and Turing need
        k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    outputs = []
    for start, stop, first in _query_blocks(length, window):
        mask = _visible(start, stop, first, window, q.device)
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop], keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """transformers' eager attention of gemma2 and gpt_oss, operation by operation; the softmax in fp32."""
    k, v = _share_heads(k, q.shape[1]), _share_heads(v, q.shape[1])
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for start, stop, first in _query_blocks(q.shape[2], window):
        logits = torch.matmul(q[:, :, start:stop], k[:, :, first:stop].transpose(2, 3)) * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        visible = _visible(start, stop, first, window, q.device)
        logits = logits.masked_fill(~visible, -torch.inf)  # [n, Hq, stop - start, stop - first]
        if sinks is not None:
            sink = sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink.to(logits.dtype)], dim=-1)
        p = torch.softmax(logits, dim=-1, dtype=softmax_dtype)
        p = p if sinks is None else p[..., :-1]
        outputs.append(torch.matmul(p.to(v.dtype), v[:, :, first:stop]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
