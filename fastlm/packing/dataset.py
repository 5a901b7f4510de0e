"""Packing of a tokenised ``datasets.Dataset`` as a whole, on its Arrow columns."""

from typing import TYPE_CHECKING

import numpy as np

from .packer import pack

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

__all__ = ["MAX_SAMPLES_PER_ROW", "PER_TOKEN", "columns_of", "lengths_of", "pack_dataset", "work_of"]

PER_TOKEN = ("input_ids", "labels", "weights")  # the columns that are packed
# Kernels of variable-length attention have a block per sample along a dimension of the CUDA grid that ends at
# 65,535: so many samples at most in a batch, here of 32 rows.
MAX_SAMPLES_PER_ROW = 65_535 // 32
# Tokens of a sample whose attention takes as long as all else (Llama-3-8B shapes, H200: 14,000 to 26,000 by backend)
EVEN_AT = 20_000
_INT32_MAX = 2**31 - 1


def columns_of(dataset: "Dataset | IterableDataset") -> list[str]:
    """Column names; of a stream that does not know them its first row's, none if it is empty."""
    return dataset.column_names or list(next(iter(dataset), {}))


def lengths_of(dataset: "Dataset") -> np.ndarray:
    """Tokens of each sample, int64 [N], in the data set's order (after select, shuffle, shards and slices).

    Reads the offsets of the column ``input_ids``, not its tokens.

    Raises:
        ValueError: no column ``input_ids``, or a sample without a value there.
    """
    return _list_lengths(_column(dataset, "input_ids"))


def work_of(dataset: "Dataset") -> np.ndarray:
    """What training on each row costs, in tokens of a short sample: float64 [N].

    A sample of n tokens costs n * (1 + n / 20,000): all but attention grows with n, causal attention with its
    square. A packed row (``seq_lengths``) costs what its samples do.

    Raises:
        ValueError: as ``lengths_of``.
    """
    lengths = lengths_of(dataset)
    squares = lengths.astype(np.float64) ** 2
    if "seq_lengths" in dataset.column_names:
        column = _column(dataset, "seq_lengths")
        before = np.concatenate(([0], np.cumsum(_flat(column).to_numpy().astype(np.float64) ** 2)))
        ends = np.cumsum(_list_lengths(column))
        squares = np.diff(before[ends], prepend=0)
    return lengths + squares / EVEN_AT


def pack_dataset(
    dataset: "Dataset",
    max_length: int,
    *,
    seed: int = 0,
    max_samples_per_row: int | None = MAX_SAMPLES_PER_ROW,
) -> "Dataset":
    """Pack the samples of a tokenised data set into rows of at most ``max_length`` tokens (see ``pack``).

    Args:
        dataset: with ``input_ids`` (lists of integers) and optionally ``labels`` and ``weights`` of the same
            lengths. Other columns are left behind; an ``attention_mask`` must be all ones.
        max_length: tokens that a row may hold.
        seed: of the order of the rows and of the choice among samples of one length.
        max_samples_per_row: at most so many samples in a row; None: as many as fit.

    Returns:
        A data set of R rows, in memory (12 bytes a token for 32-bit ids and 64-bit labels), with ``input_ids``,
        ``labels`` (``input_ids`` if there were none; the collators ignore the label of each sample's first
        token), ``weights`` if given, and ``seq_lengths``, the lengths of the samples in the row, from which
        the collators restore the boundaries.

    Raises:
        ValueError: a sample without tokens or with more than ``max_length``, columns that do not fit
            together, a missing value, a data set that is packed already, or one with padding.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import Dataset
    from datasets.fingerprint import Hasher

    if "seq_lengths" in dataset.column_names:
        raise ValueError("the data set has a column 'seq_lengths': it is packed already")
    if "attention_mask" in dataset.column_names:
        mask = _flat(_column(dataset, "attention_mask"))
        if not pc.all(pc.equal(mask, 1)).as_py():
            raise ValueError("attention_mask has zeros: tokenise without padding before packing")
    lengths = lengths_of(dataset)
    packed = pack(lengths, max_length, seed=seed, max_samples_per_row=max_samples_per_row)
    sample_offsets = np.concatenate(([0], np.cumsum(lengths[packed.indices])))  # [N + 1], in packed order
    token_offsets = sample_offsets[packed.row_offsets]  # [R + 1]
    columns: dict[str, pa.Array] = {}
    for name in PER_TOKEN:
        if name not in dataset.column_names:
            continue
        column = _column(dataset, name)
        if not np.array_equal(_list_lengths(column), lengths):
            worst = int(np.argmax(_list_lengths(column) != lengths))
            raise ValueError(f"sample {worst}: {name} and input_ids have different lengths")
        values = _flat(column)
        if values.null_count:
            raise ValueError(f"{values.null_count} tokens have no value in {name!r}: give all of them one")
        columns[name] = _lists(pa.array(_gathered(values, lengths, packed.indices)), token_offsets)
    columns.setdefault("labels", columns["input_ids"])
    columns["seq_lengths"] = _lists(pa.array(lengths[packed.indices]), packed.row_offsets)
    # without a fingerprint datasets would hash every token: 1.1 s of 1.7 for 100,000 samples
    fingerprint = Hasher.hash(["fastlm.pack_dataset", dataset._fingerprint, max_length, seed, max_samples_per_row])
    return Dataset(pa.table(columns), fingerprint=fingerprint)


def _column(dataset: "Dataset", name: str) -> "pa.ChunkedArray":
    if name not in dataset.column_names:
        raise ValueError(f"the data set has no column {name!r}, only {dataset.column_names}: tokenise it first")
    return dataset.select_columns([name]).with_format("arrow")[:].column(0)  # applies select and shuffle


def _list_lengths(column: "pa.ChunkedArray") -> np.ndarray:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column)
    if lengths.null_count:
        raise ValueError(f"{lengths.null_count} samples have no value at all in a column of tokens: drop them")
    return lengths.to_numpy().astype(np.int64)


def _flat(column: "pa.ChunkedArray") -> "pa.Array":
    """The values of all lists, one after the other."""
    import pyarrow as pa

    chunks = [chunk.flatten() for chunk in column.chunks]  # honours the offsets of a slice
    return pa.concat_arrays(chunks) if chunks else pa.array([], column.type.value_type)


def _gathered(values: "pa.Array", lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The values of lists that lie one after the other, in another order of the lists.

    Arrow's own `take` is several times slower, and cannot join lists of more than 2^31 values.
    """
    source, starts = values.to_numpy(zero_copy_only=False), np.cumsum(lengths) - lengths
    out = np.empty(len(source), source.dtype)
    begin = 0
    for block in np.array_split(order, len(order) // 100_000 + 1):  # 8 bytes a value for the index, of a block
        sizes = lengths[block]
        ends = np.cumsum(sizes)
        index = np.arange(sizes.sum())
        index += np.repeat(starts[block] - ends + sizes, sizes)
        np.take(source, index, out=out[begin : begin + len(index)], mode="clip")  # "raise" would buffer
        begin += len(index)
    return out


def _lists(values: "pa.Array", offsets: np.ndarray) -> "pa.Array":
    import pyarrow as pa

    if offsets[-1] > _INT32_MAX:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
