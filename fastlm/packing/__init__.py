"""Samples into batches. Knows nothing of models."""

from .boundaries import IGNORE_INDEX, SequenceBoundaries
from .collators import PackingCollator, PaddingFreeCollator
from .dataset import lengths_of, pack_dataset, work_of
from .packer import PackedRows, pack
from .padding import expected_speedup
from .sampler import BalancedBatchSampler
from .stream import pack_stream

__all__ = [
    "IGNORE_INDEX",
    "BalancedBatchSampler",
    "PackedRows",
    "PackingCollator",
    "PaddingFreeCollator",
    "SequenceBoundaries",
    "expected_speedup",
    "lengths_of",
    "pack",
    "pack_dataset",
    "pack_stream",
    "work_of",
]
