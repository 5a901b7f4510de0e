"""One file per operation, named after it. Each defines `run() -> list[Timing]`, which `__main__` calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import SETTINGS, Settings

__all__ = ["MODELS", "TOKENS", "ModelShapes", "cases", "distinct"]


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
    softcap: float | None = None  # of the head's logits


MODELS = (
    ModelShapes("Llama-3-8B", 4096, 14336, 32, 8, 128, 128_256, "silu"),
    ModelShapes("Qwen3-8B", 4096, 12288, 32, 8, 128, 151_936, "silu", query_key_norm=True),
    ModelShapes("Gemma-2-9B", 3584, 14336, 16, 8, 256, 256_000, "gelu_tanh", norm_offset=1.0, softcap=30.0),
)
TOKENS = Settings().tokens


def cases() -> Iterator[tuple[ModelShapes, int]]:
    """Every model at every number of tokens."""
    for model in MODELS:
        for tokens in SETTINGS.tokens:
            yield model, tokens


def distinct(key: Callable[[ModelShapes], Any]) -> Iterator[tuple[str, ModelShapes, int]]:
    """(name, model, tokens) like `cases`, but models that the operation cannot tell apart are measured once.

    key: what the operation sees of a model. The name lists all models of one key, the model is their first.
    """
    groups: dict[Any, list[ModelShapes]] = {}
    for model in MODELS:
        groups.setdefault(key(model), []).append(model)
    for group in groups.values():
        for tokens in SETTINGS.tokens:
            yield ", ".join(model.name for model in group), group[0], tokens
