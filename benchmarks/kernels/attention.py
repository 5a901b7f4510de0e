"""Packed causal attention, forward and forward with backward, by every backend that this GPU has.

Llama-3-8B's heads on 16,384 tokens in samples of about 240 and on two of 14,000: the torch column is
scaled_dot_product_attention sample by sample. Gemma-2-9B's (softcap, window) and gpt_oss's (sinks, window) on
the short ones: the torch column is eager attention sample by sample, the compile column flex_attention
compiled with a document mask. TFLOP/s count the products of the visible pairs only.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import DEVICE, Timing, measure, on_gpu, report, require_gpu
from fastlm.kernels.attention import attention, backend_refusal


@dataclass(frozen=True)
class Heads:
    """The attention of one model."""

    name: str
    query_heads: int
    key_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


LLAMA = Heads("Llama-3-8B", 32, 8, 128)
GEMMA = Heads("Gemma-2-9B", 16, 8, 256, window=4096, softcap=50.0)
GPT_OSS = Heads("gpt_oss", 64, 8, 64, window=128, sinks=True)


@dataclass(frozen=True)
class AttentionTiming(Timing):
    """TFLOP/s of the products of visible pairs."""

    tflop_per_s: float

    def __str__(self) -> str:
        return f"{super().__str__()}  {self.tflop_per_s:.0f} TFLOP/s"


def short_samples(tokens: int) -> list[int]:
    """Lognormal lengths, median 200, clipped to 24..1024: the spread of alpaca-cleaned."""
    rng, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(rng.lognormal(math.log(200), 0.6), 24, 1024)))
    lengths[-1] -= sum(lengths) - tokens
    return [length for length in lengths if length > 0]


def run() -> list[Timing]:
    """All heads, each available backend, forward and forward with backward."""
    short = short_samples(16_384)
    cases = [(LLAMA, "14k", [14_000, 14_000]), *((heads, "240", short) for heads in (LLAMA, GEMMA, GPT_OSS))]
    return [timing for heads, name, lengths in cases for timing in _case(heads, name, lengths)]


def _case(heads: Heads, spread: str, lengths: list[int]) -> Iterator[Timing]:
    tokens, kind = sum(lengths), dict(dtype=torch.bfloat16, device=DEVICE)
    shapes = [(tokens, count, heads.head_dim) for count in (heads.query_heads, *[heads.key_heads] * 2)]
    q, k, v = (torch.randn(shape, **kind).requires_grad_() for shape in shapes)
    leaves = [q, k, v, *([torch.randn(heads.query_heads, **kind).requires_grad_()] if heads.sinks else [])]
    above = torch.randn_like(q)
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)
    features: dict[str, Any] = dict(window=heads.window, softcap=heads.softcap)
    if heads.sinks:
        features["sinks"] = leaves[3]

    def by(backend: str) -> Tensor:
        return attention(q, k, v, cu_seqlens, max(lengths), lengths=lengths, backend=backend, **features)

    def forward(function: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return function()

    def both(function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(), leaves, above)

    window = heads.window or max(lengths)
    pairs = sum(min(i + 1, window) for length in lengths for i in range(length))
    operations = 4 * heads.query_heads * heads.head_dim * pairs  # two products
    inputs, output = q.nbytes + k.nbytes + v.nbytes, q.nbytes
    reference, flex = partial(by, "sdpa"), None
    if heads.softcap is not None or heads.sinks:
        reference, flex = partial(by, "eager"), _flex(leaves, heads, lengths)
    gpu = torch.cuda.get_device_capability() if on_gpu() else None
    asked = dict(window=heads.window, softcap=heads.softcap, sinks=heads.sinks)
    for backend in ("varlen", "flash4", "flash3", "flash2", "triton", "efficient"):
        if backend_refusal(backend, DEVICE.type, gpu, torch.bfloat16, heads.head_dim, **asked) is not None:
            continue
        for direction, way, counted, products in (
            ("fwd", forward, inputs + output, operations),
            ("fwd+bwd", both, 3 * inputs + 3 * output, 3.5 * operations),
        ):
            base = measure(
                f"attention {backend}", f"{heads.name} {spread} {direction}", tokens, counted,
                partial(way, partial(by, backend)), partial(way, reference),
                compiled=flex and partial(way, flex),
            )  # fmt: skip
            yield AttentionTiming(**asdict(base), tflop_per_s=products / base.ms / 1e9)


def _flex(leaves: list[Tensor], heads: Heads, lengths: list[int]) -> Callable[[], Tensor]:
    """The same by flex_attention, compiled and its mask made at the first call."""
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(DEVICE)
    window = heads.window or len(sample)

    def visible(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (sample[i] == sample[j]) & (i >= j) & (i - j < window)

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return score if heads.softcap is None else heads.softcap * torch.tanh(score / heads.softcap)

    @lru_cache(maxsize=1)
    def made() -> tuple[Callable[..., Any], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(visible, None, None, len(sample), len(sample), device=DEVICE.type)
        return torch.compile(flex_attention, dynamic=False), mask

    def attend() -> Tensor:
        function, mask = made()
        q, k, v = (x.transpose(0, 1)[None] for x in leaves[:3])
        options = dict(score_mod=capped, block_mask=mask, enable_gqa=True)
        if not heads.sinks:
            return function(q, k, v, **options)[0].transpose(0, 1)
        out, lse = function(q, k, v, return_lse=True, **options)
        kept = torch.sigmoid(lse - leaves[3][None, :, None])  # what the sinks leave of the softmax
        return (out * kept[..., None].to(out.dtype))[0].transpose(0, 1)

    return attend


if __name__ == "__main__":
    require_gpu()
    report(run())
