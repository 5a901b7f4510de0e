"""An SFTTrainer's data set, from what the user gave to rows that the collator flattens.

Formatting, chat templates, tokenising and the labels are TRL's. What follows is done here, so that it can be
counted and cannot lose a sample's start: padding removed, rows cut to max_length, rows without a target
dropped, packed.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..packing.boundaries import IGNORE_INDEX
from ..packing.dataset import pack_dataset
from .formatting import format_rows
from .step import Counts, State

__all__ = ["check_not_empty", "prepare_dataset"]

_TABLE_ROWS = 10_000


def check_not_empty(dataset: Any, name: str) -> dict[str, Any]:
    """The first example. ValueError if there is none."""
    example: dict[str, Any] | None = next(iter(dataset), None)
    if example is None:
        raise ValueError(f"the {name} data set is empty: it must hold at least one example")
    return example


def prepare_dataset(
    original: Callable[..., Any], trainer: Any, state: State, dataset: Any, processing_class: Any,
    config: Any, packing: bool, formatting_func: Callable[..., Any] | None, name: str,
) -> Any:  # fmt: skip
    """TRL's SFTTrainer._prepare_dataset for a fastlm model; ``original`` is TRL's.

    Returns a data set with input_ids and labels, and seq_lengths if packed. ValueError for an empty data set,
    one without a column that can be trained on, and one where no row has a target.
    """
    from datasets import Dataset

    _check_columns(dataset, config, formatting_func, name)
    if packing and config.max_length is None:
        raise ValueError("packing=True fills rows of max_length tokens, so max_length cannot be None")
    if formatting_func is not None and "input_ids" not in (dataset.column_names or ()):
        formatted = format_rows(dataset, formatting_func, config.dataset_text_field)
        if formatted is not None:
            dataset, formatting_func = formatted, None
    if not isinstance(dataset, Dataset):  # streamed: nothing can be counted beforehand
        dataset = original(trainer, dataset, processing_class, config, packing, formatting_func, name)
        _check_stream(dataset, name)
        return dataset
    untouched = copy.copy(config)
    untouched.max_length, untouched.shuffle_dataset = None, False
    dataset = original(trainer, dataset, processing_class, untouched, False, formatting_func, name)
    counts = state.counts[name] = Counts(samples=len(dataset))
    dataset = _without_padding(dataset, config, name)
    whole = config.packing_strategy == "bfd"  # the strategies that split samples are TRL's own
    lengths, targets = _row_facts(dataset, name, state.vocabulary)
    had_target = targets > 0
    if config.max_length is not None and (whole or not packing) and (lengths > config.max_length).any():
        counts.cut = int((lengths > config.max_length).sum())
        dataset = _cut(dataset, config, name)
        lengths, targets = _row_facts(dataset, name)
    dataset = _with_targets(dataset, targets, had_target, counts, state, trainer, config, name)
    lengths = lengths[targets > 0]
    if packing and "seq_lengths" not in dataset.column_names:
        dataset = _packed(original, trainer, dataset, processing_class, config, name)
        counts.packed_to = config.max_length
    elif config.shuffle_dataset:
        dataset = dataset.shuffle(seed=config.seed)
    counts.rows, counts.tokens = len(dataset), int(lengths.sum())
    return dataset


def _check_columns(dataset: Any, config: Any, formatting_func: Any, name: str) -> None:
    example, text = check_not_empty(dataset, name), config.dataset_text_field
    if formatting_func is not None or "input_ids" in example or {"prompt", "completion"} <= example.keys():
        return
    for column, keys in (("messages", {"role", "content"}), ("conversations", {"from", "value"})):
        turns = example.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and keys <= turns[0].keys():
            return
    if text not in example:
        raise ValueError(
            f"the {name} data set has the columns {sorted(example)}, and none of what can be trained on: "
            f"{text!r} (dataset_text_field), 'messages' of role/content turns, 'prompt' with 'completion', "
            "'conversations' of from/value turns, or 'input_ids'. Rename one, set dataset_text_field, or give "
            "formatting_func"
        )
    if not isinstance(example[text], str):
        raise ValueError(
            f"the column {text!r} of the {name} data set must hold strings; the first row holds "
            f"{example[text]!r:.80} ({type(example[text]).__name__})"
        )
    for number, table in enumerate(_tables(dataset, [text]) if hasattr(dataset, "__len__") else ()):  # not streamed
        if table.column(text).null_count:
            row = number * _TABLE_ROWS + table.column(text).is_null().to_pylist().index(True)
            raise ValueError(f"row {row} of the {name} data set has None for {text!r}: filter such rows out")


def _check_stream(dataset: Any, name: str) -> None:
    rows = itertools.islice(dataset, 100)  # in all but bad data the first row settles it
    if all(label == IGNORE_INDEX for row in rows for label in row.get("labels", row["input_ids"])[1:]):
        raise ValueError(
            f"none of the first 100 rows of the {name} data stream has a token to learn: every label is -100 "
            "(or max_length cuts every answer off)"
        )


def _tables(dataset: Any, columns: Sequence[str]) -> Any:
    """Arrow tables of the data set as it stands (selected, shuffled), a bounded number of rows at a time."""
    return dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _lists(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
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


def _row_facts(dataset: Any, name: str, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Per row: tokens, and targets (labels that are not -100, a sample's first token aside), int64 [R].

    vocabulary: rows of the embedding table, which every token id must lie within; None: not checked.
    """
    packed = "seq_lengths" in dataset.column_names
    columns = ["input_ids", "labels", *(["seq_lengths"] if packed else [])]
    lengths, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in _tables(dataset, columns):
        row_lengths, ids = _lists(table, "input_ids")
        if vocabulary is not None:
            _check_ids(ids, vocabulary, name)
        label_lengths, labels = _lists(table, "labels")
        if not np.array_equal(row_lengths, label_lengths):
            row = sum(map(len, lengths)) + int(np.argmax(row_lengths != label_lengths))
            raise ValueError(f"row {row} of the {name} data set has input_ids and labels of different lengths")
        sample_lengths = _lists(table, "seq_lengths")[1].astype(np.int64) if packed else row_lengths
        if sample_lengths.sum() != row_lengths.sum():
            raise ValueError(f"seq_lengths of the {name} data set do not sum to the rows' lengths: pack it again")
        starts = np.cumsum(sample_lengths) - sample_lengths
        is_target = labels != IGNORE_INDEX
        is_target[starts[starts < len(is_target)]] = False
        before = np.concatenate(([0], np.cumsum(is_target)))
        ends = np.cumsum(row_lengths)
        lengths.append(row_lengths)
        targets.append(before[ends] - before[ends - row_lengths])
    return np.concatenate(lengths), np.concatenate(targets)


def _without_padding(dataset: Any, config: Any, name: str) -> Any:
    """Honour an attention_mask that the data brings: tokens at either end that it hides are taken out."""
    if "attention_mask" not in dataset.column_names:
        return dataset
    if all((_lists(table, "attention_mask")[1] != 0).all() for table in _tables(dataset, ["attention_mask"])):
        return dataset.remove_columns("attention_mask")
    if "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"the {name} data set is packed (seq_lengths), but attention_mask has zeros: pack unpadded rows"
        )
    return dataset.map(
        _strip, batched=True, remove_columns="attention_mask", num_proc=config.dataset_num_proc,
        desc=f"Removing padding from {name} dataset",
    )  # fmt: skip


def _strip(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        if len(mask) != len(ids):
            raise ValueError(f"a row has {len(ids)} input_ids and an attention_mask of {len(mask)}: they must be equal")
        seen = np.flatnonzero(mask)
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        if len(seen) != last - first:
            raise ValueError(
                "an attention_mask hides tokens in the middle of a row, which flattened rows cannot express; "
                "drop those tokens, or set their labels to -100"
            )
        out["input_ids"].append(ids[first:last])
        out["labels"].append(labels[first:last])
    return out


def _cut(dataset: Any, config: Any, name: str) -> Any:
    if config.truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode must be 'keep_start' or 'keep_end', not {config.truncation_mode!r}")
    return dataset.map(
        _cut_rows, batched=True, num_proc=config.dataset_num_proc, desc=f"Truncating {name} dataset",
        fn_kwargs={"limit": config.max_length, "from_end": config.truncation_mode == "keep_end"},
    )  # fmt: skip


def _cut_rows(batch: dict[str, list[Any]], limit: int, from_end: bool) -> dict[str, list[Any]]:
    kept = slice(-limit, None) if from_end else slice(None, limit)
    out: dict[str, list[Any]] = {column: [row[kept] for row in batch[column]] for column in ("input_ids", "labels")}
    if "seq_lengths" in batch:  # samples of a row that was packed before it came here
        step = -1 if from_end else 1
        out["seq_lengths"] = [_first(lengths[::step], limit)[::step] for lengths in batch["seq_lengths"]]
    return out


def _first(lengths: Sequence[int], limit: int) -> list[int]:
    """Lengths of samples within the first ``limit`` tokens, the last one cut: ([5, 4, 3], 7) -> [5, 2]."""
    ends = np.minimum(np.cumsum(lengths), limit)
    return [int(n) for n in np.diff(ends, prepend=0) if n > 0]


def _with_targets(
    dataset: Any, targets: np.ndarray, had_target: np.ndarray, counts: Counts, state: State, trainer: Any,
    config: Any, name: str,
) -> Any:  # fmt: skip
    """Drop the rows from which nothing is learned: a batch of them has no loss. ValueError if those are all."""
    keep = targets > 0
    counts.dropped = int((~keep).sum())
    lost = int((had_target & ~keep).sum())
    if not keep.any():
        text = trainer._tokenizer.decode(dataset[0]["input_ids"])
        why = (
            f"max_length={config.max_length} cuts every answer off; raise it"
            if lost
            else "every label is -100 (or the row has one token): check the completions, the template's "
            "assistant markers, or the response markers"
        )
        raise ValueError(
            f"no row of the {name} data set has a token to learn: {why}. The first row reads {text!r:.600}"
        )
    if state.voice.speaks and counts.cut:
        _warn(
            f"{counts.cut} of {counts.samples} {name} rows were longer than max_length={config.max_length} and were cut"
        )
    if not counts.dropped:
        return dataset
    if state.voice.speaks:
        detail = f", {lost} of them because max_length={config.max_length} cut their answer off" if lost else ""
        _warn(f"{counts.dropped} of {counts.samples} {name} rows had no token to learn and were dropped{detail}")
    return dataset.select(np.flatnonzero(keep))


def _warn(text: str) -> None:
    warnings.warn(f"fastlm: {text}", UserWarning, stacklevel=3)


def _packed(
    original: Callable[..., Any], trainer: Any, dataset: Any, processing_class: Any, config: Any, name: str
) -> Any:  # fmt: skip
    if config.packing_strategy != "bfd":
        return original(trainer, dataset, processing_class, config, True, None, name)
    return pack_dataset(dataset.select_columns(["input_ids", "labels"]), config.max_length, seed=config.seed)
