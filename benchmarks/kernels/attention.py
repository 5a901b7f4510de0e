"""Packed causal attention, forward and forward with backward, by every backend that this machine has, one by one.

Llama-3-8B's heads on samples of about 240 tokens and on samples of 8,192, these with Mistral-7B's window too;
Gemma-2-9B's (softcap, window) and gpt_oss's (sinks, window) on the short ones. The torch column is attention sample
by sample: scaled_dot_product_attention, or eager where there are softcap or sinks; the compile column, at 16,384
tokens, is flex_attention compiled with a document mask. TFLOP/s count the products of the visible pairs only. What a
backend cannot serve, and one that fails, is said on stderr.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastlm.kernels.flash as flash
from benchmarks.timing import DEVICE, SETTINGS, Timing, failures, measure, on_gpu, report, require_gpu, rival_ms
from fastlm.kernels.attention import BACKENDS, attention, backend_refusal, oversized


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
MISTRAL = Heads("Mistral-7B", 32, 8, 128, window=4096)
GEMMA = Heads("Gemma-2-9B", 16, 8, 256, window=4096, softcap=50.0)
GPT_OSS = Heads("gpt_oss", 64, 8, 64, window=128, sinks=True)
LONG = 8192  # tokens of a long sample


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
    timings = []
    for tokens in SETTINGS.tokens:
        kinds = (LLAMA, GEMMA, GPT_OSS) if tokens <= SETTINGS.compared_at else (LLAMA,)
        cases = [(heads, "240", short_samples(tokens)) for heads in kinds]
        if tokens >= LONG:
            cases += [(LLAMA, "8k", [LONG] * (tokens // LONG))]
        if tokens == 2 * LONG:
            cases += [(MISTRAL, "8k", [LONG] * 2)]
        timings += [timing for case in cases for timing in _case(*case)]
    return timings


def _case(heads: Heads, spread: str, lengths: list[int]) -> Iterator[Timing]:
    tokens, kind = sum(lengths), dict(dtype=torch.bfloat16, device=DEVICE)
    shapes = [(tokens, count, heads.head_dim) for count in (heads.query_heads, *[heads.key_heads] * 2)]
    q, k, v = (torch.randn(shape, **kind).requires_grad_() for shape in shapes)
    leaves = [q, k, v, *([torch.randn(heads.query_heads, **kind).requires_grad_()] if heads.sinks else [])]
    above = torch.randn_like(q)
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)
    features: dict[str, Any] = dict(window=heads.window, softcap=heads.softcap)
    asked = dict(features, sinks=heads.sinks)
    if heads.sinks:
        features["sinks"] = leaves[3]

    def by(backend: str) -> Tensor:
        return attention(q, k, v, cu_seqlens, max(lengths), lengths=lengths, backend=backend, **features)

    def both(function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(), leaves, above)

    window = heads.window or max(lengths)
    pairs = sum(min(i + 1, window) for length in lengths for i in range(length))
    operations = 4 * heads.query_heads * heads.head_dim * pairs  # two products
    inputs, output = q.nbytes + k.nbytes + v.nbytes, q.nbytes
    reference = "sdpa" if heads.softcap is None and not heads.sinks else "eager"
    flex = _flex(leaves, heads, lengths) if SETTINGS.compile and tokens == SETTINGS.compared_at else None
    gpu = torch.cuda.get_device_capability() if on_gpu() else None
    too_large = oversized(tokens, len(lengths), max(lengths), heads.query_heads, heads.head_dim)
    able = [reference] if tokens <= SETTINGS.compared_at else []  # sample by sample: 600 of them take a minute
    for backend in (name for name in BACKENDS if name not in ("sdpa", "eager")):
        reason = backend_refusal(
            backend, DEVICE.type, gpu, torch.bfloat16, heads.head_dim, too_large=too_large, **asked
        )  # fmt: skip
        if reason is None:
            able.append(backend)
        else:
            _say(f"attention {backend}, {heads.name}: {reason}")
    # forward: in training mode, where what backward needs is kept, and flex_attention compiles once
    for direction, way, counted, products in (
        ("fwd", lambda function: function(), inputs + output, operations),
        ("fwd+bwd", both, 3 * inputs + 3 * output, 3.5 * operations),
    ):
        case = f"{heads.name} {spread} {direction}"
        flex_ms = rival_ms(f"flex_attention, {case}", flex and partial(way, flex))
        reference_ms = None
        for backend in able:
            module = flash if backend == "triton" else None
            try:
                ours = partial(way, partial(by, backend))
                one = measure(f"attention {backend}", case, tokens, counted, ours, module=module)
            except failures() as error:
                _say(f"attention {backend}, {case}, {tokens} tokens: {type(error).__name__}: {error}")
                continue
            reference_ms = one.ms if backend == reference else reference_ms
            one = replace(one, torch_ms=reference_ms, compile_ms=flex_ms)
            yield AttentionTiming(**asdict(one), tflop_per_s=products / one.ms / 1e9)


@lru_cache(maxsize=256)
def _say(line: str) -> None:
    """Once."""
    print(line, file=sys.stderr, flush=True)


def _flex(leaves: list[Tensor], heads: Heads, lengths: list[int]) -> Callable[[], Tensor]:
    """The same by flex_attention, compiled and its mask made at the first call."""
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(DEVICE)
    window = heads.window or len(sample)

    def visible(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (sample[i] == sample[j]) & (i >= j) & (i - j < window)

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return heads.softcap * torch.tanh(score / heads.softcap)

    @lru_cache(maxsize=1)
    def made() -> tuple[Callable[..., Any], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(visible, None, None, len(sample), len(sample), device=DEVICE.type)
        return torch.compile(flex_attention, dynamic=False), mask

    def attend() -> Tensor:
        function, mask = made()
        q, k, v = (x.transpose(0, 1)[None] for x in leaves[:3])
        options = dict(score_mod=heads.softcap and capped, block_mask=mask, enable_gqa=True)
        if not heads.sinks:
            return function(q, k, v, **options)[0].transpose(0, 1)
        out, lse = function(q, k, v, return_lse=True, **options)
        kept = torch.sigmoid(lse - leaves[3][None, :, None])  # what the sinks leave of the softmax
        return (out * kept[..., None].to(out.dtype))[0].transpose(0, 1)

    return attend


if __name__ == "__main__":
    require_gpu()
    report(run())
