"""Packing of a tokenised stream (``datasets.IterableDataset``), one bounded buffer of samples at a time."""

import zlib
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .dataset import MAX_SAMPLES_PER_ROW, PER_TOKEN, columns_of
from .packer import pack

if TYPE_CHECKING:
    from datasets import IterableDataset

__all__ = ["pack_stream"]


def pack_stream(
    stream: "IterableDataset",
    max_length: int,
    *,
    buffer_size: int = 20_000,
    seed: int = 0,
    max_samples_per_row: int | None = MAX_SAMPLES_PER_ROW,
) -> "IterableDataset":
    """Pack a tokenised stream into rows of at most ``max_length`` tokens: every sample whole, and once.

    As many samples as the buffer holds are read and packed as ``pack`` packs a data set, their rows are given
    out, and so on to the end of the stream. No sample waits for the next buffer, so a buffer's rows depend on
    its samples and the arguments alone. A stream that is resumed, by ``load_state_dict`` or by skipping rows,
    goes on with the rows that it would have given; shards (of DataLoader workers, of ranks) are packed each by
    itself. For another order of samples and rows in every epoch, shuffle the stream before packing it.

    What that costs: with lognormal lengths (median 200, sigma 0.6), rows of 2,048 and of 4,096 tokens are 99.85%
    and 99.89% full with 10,000 samples in the buffer, 99.88% and 99.93% with 20,000, 99.90% and 99.95% with
    50,000; a whole data set reaches 99.90% and 99.96%.

    Args:
        stream: of samples with ``input_ids`` and optionally ``labels`` and ``weights``, as in ``pack_dataset``.
        max_length: tokens that a row may hold.
        buffer_size: samples that are packed together. Each takes 16 bytes a token, 24 with weights.
        seed: of the order of a buffer's rows and of the choice among samples of one length.
        max_samples_per_row: at most so many samples in a row; None: as many as fit.

    Returns:
        A stream of rows with the columns that ``pack_dataset`` makes, as numpy arrays (``weights`` in float32,
        all else in int64). Iterating it raises ValueError for a sample without tokens, longer than
        ``max_length``, with padding, or with columns that do not fit together.

    Raises:
        ValueError: a stream without ``input_ids`` or one that is packed already, a limit below 1.
    """
    for name, value in (("max_length", max_length), ("buffer_size", buffer_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    stream = stream.with_format(None)
    columns = columns_of(stream) or ["input_ids"]  # an empty stream has none
    if "seq_lengths" in columns:
        raise ValueError("the stream has a column 'seq_lengths': it is packed already")
    if "input_ids" not in columns:
        raise ValueError(f"the stream has no column 'input_ids', only {columns}: tokenise it first")
    samples = stream.map(_as_arrays, remove_columns=columns)  # Python's integers would take five times the memory
    arguments = {"max_length": max_length, "seed": seed, "max_samples_per_row": max_samples_per_row}
    return samples.map(_pack_buffer, batched=True, batch_size=buffer_size, fn_kwargs=arguments)


def _as_arrays(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    if not np.all(sample.get("attention_mask", 1)):
        raise ValueError("attention_mask has zeros: tokenise without padding before packing")
    if missing := [name for name in PER_TOKEN if sample.get(name, ()) is None]:
        raise ValueError(f"a sample has no value at all in {missing[0]!r}: drop it before packing")
    arrays = {
        name: np.asarray(sample[name], np.float32 if name == "weights" else np.int64)
        for name in PER_TOKEN
        if name in sample
    }
    arrays.setdefault("labels", arrays["input_ids"])
    for name, values in arrays.items():
        if values.shape != arrays["input_ids"].shape:
            raise ValueError(f"{name} of a sample has shape {values.shape}, input_ids {arrays['input_ids'].shape}")
    return arrays


def _pack_buffer(
    buffer: dict[str, list[np.ndarray]], *, max_length: int, seed: int, max_samples_per_row: int | None
) -> dict[str, Iterable[np.ndarray]]:
    lengths = np.array([len(ids) for ids in buffer["input_ids"]])
    number = zlib.crc32(lengths.tobytes())  # the buffer's own: the same after resuming as before
    packed = pack(lengths, max_length, seed=(seed, number), max_samples_per_row=max_samples_per_row)
    rows = [packed.indices[begin:end] for begin, end in pairwise(packed.row_offsets)]
    out = {name: [np.concatenate([values[i] for i in row]) for row in rows] for name, values in buffer.items()}
    return {**out, "seq_lengths": [lengths[row] for row in rows]}
