"""Tokenised rows as Arrow tables: what they hold, checked, and their padding and their tails taken off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..packing.boundaries import IGNORE_INDEX
from ..packing.dataset import PER_TOKEN

__all__ = ["cut_rows", "lists_of", "row_facts", "strip_padding"]


def lists_of(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists as (lengths [R], values [sum of lengths])."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = table.column(name).chunks
    lengths = np.concatenate(
        [np.zeros(0, np.int64), *(pc.list_value_length(c).fill_null(0).to_numpy() for c in chunks)]
    )
    values = pa.concat_arrays([chunk.flatten() for chunk in chunks]).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), values


def _check_ids(ids: np.ndarray, vocabulary: int, name: str) -> None:
    """ValueError for a token that has no row in the embedding table: a GPU would only say "device-side assert"."""
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if len(wrong):
        raise ValueError(
            f"the {name} data set has the token {wrong[0]}, and the model's tokens go from 0 to "
            f"{vocabulary - 1}: use the model's own tokenizer, or grow the model before adding LoRA: "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def _check_weights(table: Any, row_lengths: np.ndarray, name: str) -> None:
    import pyarrow.types as types

    kind = table.schema.field("weights").type
    good = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    good = good and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))
    if good:
        lengths, values = lists_of(table, "weights")
        good = np.array_equal(lengths, row_lengths) and bool(np.isfinite(values.astype(float)).all())
    if not good:
        raise ValueError(
            f"the column 'weights' of the {name} data set must hold one finite number for each of a row's input_ids "
            "(the weight of that token's loss): rename or mend it"
        )


def row_facts(table: Any, name: str, first: int, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Per row: tokens, and targets (labels that are not -100, a sample's first token aside), int64 [R].

    first: the number of the first row, for errors. vocabulary: rows of the embedding table, which every token id
    must lie within; None: not checked. ValueError names what is wrong with the rows.
    """
    row_lengths, ids = lists_of(table, "input_ids")
    if vocabulary is not None:
        _check_ids(ids, vocabulary, name)
    label_lengths, labels = lists_of(table, "labels")
    if not np.array_equal(row_lengths, label_lengths):
        row = first + int(np.argmax(row_lengths != label_lengths))
        raise ValueError(f"row {row} of the {name} data set has input_ids and labels of different lengths")
    if "weights" in table.column_names:
        _check_weights(table, row_lengths, name)
    packed = "seq_lengths" in table.column_names
    sample_lengths = lists_of(table, "seq_lengths")[1].astype(np.int64) if packed else row_lengths
    if sample_lengths.sum() != row_lengths.sum():
        raise ValueError(f"seq_lengths of the {name} data set do not sum to the rows' lengths: pack it again")
    starts = np.cumsum(sample_lengths) - sample_lengths
    is_target = labels != IGNORE_INDEX
    is_target[starts[starts < len(is_target)]] = False
    before = np.concatenate(([0], np.cumsum(is_target)))
    ends = np.cumsum(row_lengths)
    return row_lengths, before[ends] - before[ends - row_lengths]


def strip_padding(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The per-token columns without the tokens that attention_mask hides at either end of a row."""
    columns = [name for name in PER_TOKEN if name in batch]
    out: dict[str, list[Any]] = {name: [] for name in columns}
    for *values, mask in zip(*(batch[name] for name in columns), batch["attention_mask"], strict=True):
        if len(mask) != len(values[0]):
            raise ValueError(
                f"a row has {len(values[0])} input_ids and an attention_mask of {len(mask)}: they must be equal"
            )
        seen = np.flatnonzero(mask)
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        if len(seen) != last - first:
            raise ValueError(
                "an attention_mask hides tokens in the middle of a row, which flattened rows cannot express; "
                "drop those tokens, or set their labels to -100"
            )
        for name, value in zip(columns, values, strict=True):
            out[name].append(value[first:last])
    return out


def cut_rows(batch: dict[str, list[Any]], limit: int, from_end: bool) -> dict[str, list[Any]]:
    """The first ``limit`` tokens of each row, or its last; labels, weights and sample lengths alike."""
    kept = slice(-limit, None) if from_end else slice(None, limit)
    out: dict[str, list[Any]] = {name: [row[kept] for row in batch[name]] for name in PER_TOKEN if name in batch}
    if "seq_lengths" in batch:  # samples of a row that was packed before it came here
        step = -1 if from_end else 1
        out["seq_lengths"] = [_first(lengths[::step], limit)[::step] for lengths in batch["seq_lengths"]]
    return out


def _first(lengths: Sequence[int], limit: int) -> list[int]:
    """Lengths of samples within the first ``limit`` tokens, the last one cut: ([5, 4, 3], 7) -> [5, 2]."""
    ends = np.minimum(np.cumsum(lengths), limit)
    return [int(n) for n in np.diff(ends, prepend=0) if n > 0]
