"""Samples into batches. Knows nothing of models."""

from .boundaries import IGNORE_INDEX, SequenceBoundaries
from .collators import PackingCollator, PaddingFreeCollator
from .dataset import lengths_of, pack_dataset
from .packer import PackedRows, pack

__all__ = [
    "IGNORE_INDEX",
    "PackedRows",
    "PackingCollator",
    "PaddingFreeCollator",
    "SequenceBoundaries",
    "lengths_of",
    "pack",
    "pack_dataset",
]
