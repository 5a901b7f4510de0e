"""Causal attention over packed samples: no token sees another sample, and never a T x T mask.

Backends, first that can wins, unless one is forced; `attention_backends` has the table of what each honours:

- ``flash4``: FlashAttention-4 (package flash-attn-4) where installed, on Hopper and data-centre Blackwell,
  for samples of 2,048 tokens and more. It compiles once for each head size, number of heads that share a key
  head, window or none, determinism, and more than 256 samples or fewer; other lengths cost nothing.
  FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps what it compiled for later processes.
- ``varlen``: torch.nn.attention.varlen, on Ampere and newer, bf16 and fp16, head sizes to 256.
- ``triton``: our kernel, on Ampere and newer, bf16 and fp16; the first with softcap and sinks, and before varlen
  on Hopper for heads of 64 and 128. Llama-3-8B heads on an H200, 16,384 tokens, forward and backward: 0.97 ms in
  samples of about 240 (varlen 1.72, flash4 1.20), 3.3 of 2,048 (3.8, 2.1), 12.0 of 8,192 (12.6, 6.4). Heads of
  80, 96 and 192 are padded to the next power of two, and those of 256 have small blocks: varlen is as fast.
- ``efficient``: torch's memory-efficient attention with boundaries, before Ampere in fp16 (tested on an H200).
- ``sdpa``: torch's scaled_dot_product_attention sample by sample, on any device and in any dtype.
- ``eager``: the formula sample by sample, softmax in fp32; softcap and sinks on a CPU, before Ampere and in fp32.

Only when forced, until they have run: ``flash3``, ``flash2`` and ``xformers`` where installed.

Under torch.use_deterministic_algorithms(True) all are deterministic, or refuse (xformers): torch's flash and
memory-efficient backward read that flag (though not its warn_only form), the flash packages are handed it,
the rest has no atomics.

    y_i = sum_j softmax_j(softcap * tanh(scale q_i k_j / softcap)) v_j,  j in i's sample, 0 <= i - j < window
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .attention_backends import BACKENDS as TABLE
from .attention_backends import Call, package_function

__all__ = ["BACKENDS", "LONG_SAMPLE", "attention", "backend_refusal", "choose_backend", "oversized"]

BACKENDS = tuple(TABLE)  # in order of preference
_TRITON_FIRST = {9: (64, 128)}  # head sizes, by major compute capability
LONG_SAMPLE = 2048  # tokens from which flash4 goes first
_FORCED_ONLY = frozenset({"flash3", "flash2", "xformers"})  # their packages have not been tried
_INT32_MAX = 2**31 - 1


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def oversized(tokens: int, samples: int, max_length: int, heads: int, head_dim: int) -> tuple[str, ...]:
    """Backends whose buffers, padded sample by sample, go past what 32 bits index: many short samples.

    The flash backward passes keep 128 more rows of dQ for every sample, efficient max_length statistics:
    16,384 samples of one token at 32 heads of 128 make 8.7e9 elements. Asked without gradients too, since a
    recomputed forward must take the same backend.
    """
    width = 256 if head_dim > 192 else -(-head_dim // 32) * 32  # what the flash kernels round a head to
    padded = (tokens + 128 * samples) * heads * width
    statistics = samples * heads * -(-max_length // 32) * 32
    sizes = {name: padded for name, backend in TABLE.items() if backend.pads_samples}
    sizes["efficient"] = max(statistics, tokens * heads * head_dim)
    return tuple(name for name, size in sizes.items() if size > _INT32_MAX)


def backend_refusal(
    backend: str, device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, *,
    window: int | None = None, softcap: float | None = None, sinks: bool = False,
    too_large: tuple[str, ...] = (),
) -> str | None:  # fmt: skip
    """Why a backend cannot serve this case, or None if it can. Arguments as for `choose_backend`."""
    if backend not in TABLE:
        raise ValueError(f"unknown attention backend {backend!r}; there are {', '.join(BACKENDS)}")
    able = TABLE[backend]
    for asked, honoured, feature in (
        (window, able.window, "window"),
        (softcap, able.softcap, "softcap"),
        (sinks, able.sinks, "attention sinks"),
    ):
        if asked and not honoured:
            return f"takes no {feature}"
    if able.capability is None:
        return None
    if device_type != "cuda" or capability is None:
        return f"needs a CUDA GPU, the tensors are on {device_type}"
    if dtype not in able.dtypes:
        return f"needs {' or '.join(str(known) for known in able.dtypes)}, not {dtype}"
    if head_dim > 256 or head_dim % able.head_multiple:
        return f"needs a head size that is a multiple of {able.head_multiple} and at most 256, not {head_dim}"
    needed = max(able.capability, (8, 0)) if dtype == torch.bfloat16 else able.capability
    version = ".".join(map(str, capability))
    if capability < needed:
        return f"needs compute capability {'.'.join(map(str, needed))}, this GPU has {version}"
    if able.majors and capability[0] not in able.majors:
        return f"needs compute capability {' or '.join(map(str, able.majors))}, this GPU has {version}"
    if capability[0] in able.gap_majors and 128 < head_dim < 256:
        return f"takes no head size between 128 and 256 on compute capability {version}, such as {head_dim}"
    if able.package is not None and package_function(backend) is None:
        return f"is not installed ({able.package[2]})"
    return "would index past 2^31 - 1 with so many samples" if backend in too_large else None


@lru_cache(maxsize=1024)
def choose_backend(
    device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, *,
    window: int | None = None, softcap: float | None = None, sinks: bool = False, long_samples: bool = False,
    too_large: tuple[str, ...] = (), backend: str | None = None,
) -> str:  # fmt: skip
    """Name of the backend for tensors of this kind; pure, and cached.

    capability is the GPU's (major, minor), None elsewhere; `long_samples`: some have 2,048 tokens or more;
    `too_large`: what `oversized` says. A forced `backend` is returned if it can honour everything asked for;
    else a ValueError says what it cannot.
    """

    def refusal(name: str) -> str | None:
        return backend_refusal(
            name, device_type, capability, dtype, head_dim, window=window, softcap=softcap, sinks=sinks,
            too_large=too_large,
        )  # fmt: skip

    if backend is not None:
        reason = refusal(backend)
        if reason is not None:
            able = [name for name in BACKENDS if refusal(name) is None]
            raise ValueError(f"attention backend {backend!r} {reason}; use one of {', '.join(able)}")
        return backend
    candidates = [name for name in BACKENDS if name not in _FORCED_ONLY and (name != "flash4" or long_samples)]
    if capability is not None and head_dim in _TRITON_FIRST.get(capability[0], ()):
        candidates.remove("triton")
        candidates.insert(candidates.index("varlen"), "triton")
    if dtype == torch.float32:  # somebody who computes in fp32 wants torch's own digits
        candidates = ["sdpa", "eager"]
    return next(name for name in candidates if refusal(name) is None)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, *,
    lengths: Sequence[int] | None = None, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
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
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return q + (k.sum() + v.sum() + (0 if sinks is None else 0 * sinks.sum())).to(q.dtype)
    if not window or window >= max_length:
        window = None
    features: dict[str, Any] = dict(window=window, softcap=softcap)
    name = choose_backend(
        device.type, _capability(device), q.dtype, head_dim, sinks=sinks is not None, backend=backend,
        long_samples=max_length >= LONG_SAMPLE,
        too_large=oversized(tokens, len(cu_seqlens) - 1, max_length, heads, head_dim), **features,
    )  # fmt: skip
    scale = head_dim**-0.5 if scale is None else scale
    return TABLE[name].run(Call(q, k, v, cu_seqlens, max_length, lengths, scale, sinks=sinks, **features))


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, softcap: float | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"expected q [T, Hq, D] and k, v [T, Hk, D]; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"expected cu_seqlens [S + 1] int32; got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if window is not None and window < 0:
        raise ValueError(f"window must be positive, or None or 0 for none; got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap}")
