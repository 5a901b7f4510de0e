"""One file per operation, named after it. Each defines `run() -> list[Timing]`, which `__main__` calls."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MODELS", "TOKENS", "ModelShapes", "cases"]


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of one layer, and of the head."""

    name: str
    hidden: int
    intermediate: int
    query_heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    activation: str
    norm_offset: float = 0.0  # 1.0: the norm scales by 1 + weight before its cast
    query_key_norm: bool = False


MODELS = (
    ModelShapes("Llama-3-8B", 4096, 14336, 32, 8, 128, 128_256, "silu"),
    ModelShapes("Qwen3-8B", 4096, 12288, 32, 8, 128, 151_936, "silu", query_key_norm=True),
    ModelShapes("Gemma-2-9B", 3584, 14336, 16, 8, 256, 256_000, "gelu_tanh", norm_offset=1.0),
)
TOKENS = (1024, 16_384, 131_072)  # a notebook's step, a packed row, a long context


def cases() -> Iterator[tuple[ModelShapes, int]]:
    """Every model at every number of tokens."""
    for model in MODELS:
        for tokens in TOKENS:
            yield model, tokens
