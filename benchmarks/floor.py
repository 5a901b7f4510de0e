"""What one training step cannot do without, timed: its products and its attention."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import DEVICE, median_ms, on_gpu
from fastlm.kernels.attention import attention
from fastlm.packing import SequenceBoundaries

__all__ = ["step_floor"]


def step_floor(config: Any, boundaries: SequenceBoundaries, *, full: bool) -> dict[str, float]:
    """Milliseconds of one product forward and one backward for every frozen weight (two for a trained one),
    and of attention over these samples, in bf16; the head for the labelled tokens only.

    Nothing is recomputed and nothing else is counted. Each is timed in bursts, at clocks that a long run may
    not hold: the true floor lies a few percent higher.
    """
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    tokens = boundaries.token_count
    if on_gpu():
        torch.cuda.empty_cache()  # a step's blocks have other sizes

    def products(out: int, width: int, rows: int = tokens) -> float:
        weight, x, dy = _random(out, width), _random(rows, width), _random(rows, out)
        ms = median_ms(lambda: x @ weight.t()) + median_ms(lambda: dy @ weight)
        return ms + (median_ms(lambda: dy.t() @ x) if full else 0.0)

    projections = products(heads * head_dim, hidden) + 2 * products(key_heads * head_dim, hidden)
    projections += products(hidden, heads * head_dim)
    mlp = 2 * products(config.intermediate_size, hidden) + products(hidden, config.intermediate_size)
    head = products(config.vocab_size, hidden, boundaries.label_count or tokens)
    q, k, v = (_random(tokens, count, head_dim).requires_grad_() for count in (heads, key_heads, key_heads))
    above = _random(tokens, heads, head_dim)

    def attend() -> Any:
        out = attention(q, k, v, boundaries.cu_seqlens, boundaries.max_length, lengths=boundaries.lengths)
        return torch.autograd.grad(out, (q, k, v), above)

    products_ms, attention_ms = layers * (projections + mlp) + head, layers * median_ms(attend)
    return {
        "products_ms": products_ms,
        "attention_ms": attention_ms,
        "tokens_per_second": tokens / (products_ms + attention_ms) * 1e3,
    }


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
