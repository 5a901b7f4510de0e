"""Packed causal attention at Llama-3-8B's heads: 16,384 tokens in samples of about 240, and two of 14,000.

Every flash backend that this GPU has, forward and forward with backward; the torch column is
scaled_dot_product_attention sample by sample. TFLOP/s count the products of the causal half only.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.timing import Timing, measure, report, require_gpu
from fastlm.kernels.attention import attention, backend_refusal

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class AttentionTiming(Timing):
    """TFLOP/s of the products in the causal half."""

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
    """Both spreads, each available backend, forward and forward with backward."""
    return _spread("240", short_samples(16_384)) + _spread("14k", [14_000, 14_000])


def _spread(name: str, lengths: list[int]) -> list[Timing]:
    tokens = sum(lengths)
    shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for shape in shapes)
    above = torch.randn_like(q)
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
    operations = 2 * HEADS * HEAD_DIM * sum(length**2 for length in lengths)  # two products, half of each
    qkv_bytes, out_bytes = q.nbytes + k.nbytes + v.nbytes, above.nbytes

    def forward(backend: str) -> torch.Tensor:
        return attention(q, k, v, cu_seqlens, max(lengths), lengths=lengths, backend=backend)

    def forward_only(backend: str) -> torch.Tensor:
        with torch.no_grad():
            return forward(backend)

    def both(backend: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(backend), (q, k, v), above)

    timings: list[Timing] = []
    gpu = torch.cuda.get_device_capability()
    for backend in ("varlen", "flash4"):
        if backend_refusal(backend, "cuda", gpu, torch.bfloat16, HEAD_DIM) is not None:
            continue
        for direction, function, counted, products in (
            ("fwd", forward_only, qkv_bytes + out_bytes, operations),
            ("fwd+bwd", both, 3 * qkv_bytes + 3 * out_bytes, 3.5 * operations),
        ):
            base = measure(
                f"attention {backend}", f"{name} {direction}", tokens, counted,
                partial(function, backend), partial(function, "sdpa"),
            )  # fmt: skip
            timings.append(AttentionTiming(**asdict(base), tflop_per_s=products / base.ms / 1e9))
    return timings


if __name__ == "__main__":
    require_gpu()
    report(run())
