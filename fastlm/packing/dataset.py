"""Packing of a tokenised ``datasets.Dataset`` as a whole, on its Arrow columns."""

from typing import TYPE_CHECKING

import numpy as np

from .packer import pack

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

__all__ = ["lengths_of", "pack_dataset"]

_PER_TOKEN = ("input_ids", "labels", "weights")
_INT32_MAX = 2**31 - 1


def lengths_of(dataset: "Dataset") -> np.ndarray:
    """Tokens of each sample, int64 [N], in the data set's order (after select, shuffle, shards and slices).

    Reads the offsets of the column ``input_ids``, not its tokens.

    Raises:
        ValueError: no column ``input_ids``, or a sample without a value there.
    """
    return _list_lengths(_column(dataset, "input_ids"))


def pack_dataset(dataset: "Dataset", max_length: int, *, seed: int = 0) -> "Dataset":
    """Pack the samples of a tokenised data set into rows of at most ``max_length`` tokens (see ``pack``).

    Args:
        dataset: with ``input_ids`` (lists of integers) and optionally ``labels`` and ``weights`` of the same
            lengths. Other columns are left behind; an ``attention_mask`` must be all ones.
        max_length: tokens that a row may hold.
        seed: of the order of the rows and of the choice among samples of one length.

    Returns:
        An in-memory data set of R rows with ``input_ids``, ``labels`` (``input_ids`` if there were none; the
        collators ignore the label of each sample's first token), ``weights`` if given, and ``seq_lengths``,
        the lengths of the samples in the row, from which the collators restore the boundaries.

    Raises:
        ValueError: a sample without tokens or with more than ``max_length``, columns that do not fit
            together, a data set that is packed already, or one with padding.
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
    packed = pack(lengths, max_length, seed=seed)
    sample_offsets = np.concatenate(([0], np.cumsum(lengths[packed.indices])))  # [N + 1], in packed order
    token_offsets = sample_offsets[packed.row_offsets]  # [R + 1]
    order = pa.array(packed.indices)
    columns: dict[str, pa.Array] = {}
    for name in _PER_TOKEN:
        if name not in dataset.column_names:
            continue
        column = _column(dataset, name)
        if not np.array_equal(_list_lengths(column), lengths):
            worst = int(np.argmax(_list_lengths(column) != lengths))
            raise ValueError(f"sample {worst}: {name} and input_ids have different lengths")
        columns[name] = _lists(_flat(column.take(order)), token_offsets)
    columns.setdefault("labels", columns["input_ids"])
    columns["seq_lengths"] = _lists(pa.array(lengths[packed.indices]), packed.row_offsets)
    # without a fingerprint datasets would hash every token: 1.1 s of 1.7 for 100,000 samples
    fingerprint = Hasher.hash(["fastlm.pack_dataset", dataset._fingerprint, max_length, seed])
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


def _lists(values: "pa.Array", offsets: np.ndarray) -> "pa.Array":
    import pyarrow as pa

    if offsets[-1] > _INT32_MAX:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
