"""An SFTTrainer's data set, from what the user gave to rows that the collator flattens.

Formatting, chat templates, tokenising and the labels are TRL's. What follows is done here, so that it can be
counted and cannot lose a sample's start: padding removed, rows cut to max_length, rows without a target
dropped, packed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..packing.dataset import PER_TOKEN, columns_of, pack_dataset
from ..packing.padding import expected_speedup
from ..packing.stream import pack_stream
from .formatting import format_rows
from .step import Counts, State
from .streamed import tidy_stream
from .tables import cut_rows, lists_of, row_facts, strip_padding

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

    Returns a data set with input_ids and labels, weights if given, and seq_lengths if packed; a stream for a
    stream. ValueError for an empty data set, one without a column that can be trained on, and one where no row
    (of the first 100 of a stream) has a target.

    weights: one number per token of tokenised rows, the weight of its loss (see ``step.compute_loss``). They
    decide nothing here: a row whose targets all weigh 0 stays, and its targets count in the mean.
    """
    from datasets import Dataset

    _check_columns(dataset, config, formatting_func, name)
    if packing and config.max_length is None:
        raise ValueError("packing=True fills rows of max_length tokens, so max_length cannot be None")
    if formatting_func is not None and "input_ids" not in (dataset.column_names or ()):
        formatted = format_rows(dataset, formatting_func, config.dataset_text_field)
        if formatted is not None:
            dataset, formatting_func = formatted, None
    if not isinstance(dataset, Dataset):
        dataset = dataset.with_format(None)  # rows of lists, not of tensors
    untouched = copy.copy(config)
    untouched.max_length, untouched.shuffle_dataset = None, False
    dataset = original(trainer, dataset, processing_class, untouched, False, formatting_func, name)
    whole = config.packing_strategy == "bfd"  # the strategies that split samples are TRL's own
    if config.truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode must be 'keep_start' or 'keep_end', not {config.truncation_mode!r}")
    if not isinstance(dataset, Dataset):
        dataset = tidy_stream(dataset, state, config, name, cuts=whole or not packing)
        dataset = dataset.shuffle(seed=config.seed) if config.shuffle_dataset else dataset
        packing = packing and "seq_lengths" not in columns_of(dataset)
        return _packed(original, trainer, dataset, processing_class, config, name) if packing else dataset
    counts = state.counts[name] = Counts(samples=len(dataset))
    dataset = _without_padding(dataset, config, name)
    lengths, targets = _row_facts(dataset, name, state.vocabulary)
    had_target = targets > 0
    if config.max_length is not None and (whole or not packing) and (lengths > config.max_length).any():
        long = np.flatnonzero(lengths > config.max_length)
        counts.cut = len(long)
        dataset = _cut(dataset, config, name)
        lengths[long], targets[long] = _row_facts(dataset.select(long), name)
    dataset = _with_targets(dataset, targets, had_target, counts, state, trainer, config, name)
    lengths = lengths[targets > 0]
    if "seq_lengths" not in dataset.column_names:
        counts.speedup = expected_speedup(lengths, config.per_device_train_batch_size)
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


def _tables(dataset: Any, columns: Sequence[str]) -> Any:
    """Arrow tables of the data set as it stands (selected, shuffled), a bounded number of rows at a time."""
    return dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _row_facts(dataset: Any, name: str, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    columns = [column for column in (*PER_TOKEN, "seq_lengths") if column in dataset.column_names]
    lengths, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in _tables(dataset, columns):
        facts = row_facts(table, name, sum(map(len, lengths)), vocabulary)
        lengths.append(facts[0])
        targets.append(facts[1])
    return np.concatenate(lengths), np.concatenate(targets)


def _without_padding(dataset: Any, config: Any, name: str) -> Any:
    """Honour an attention_mask that the data brings: tokens at either end that it hides are taken out."""
    if "attention_mask" not in dataset.column_names:
        return dataset
    if all((lists_of(table, "attention_mask")[1] != 0).all() for table in _tables(dataset, ["attention_mask"])):
        return dataset.remove_columns("attention_mask")
    if "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"the {name} data set is packed (seq_lengths), but attention_mask has zeros: pack unpadded rows"
        )
    return dataset.map(
        strip_padding, batched=True, remove_columns="attention_mask", num_proc=config.dataset_num_proc,
        desc=f"Removing padding from {name} dataset",
    )  # fmt: skip


def _cut(dataset: Any, config: Any, name: str) -> Any:
    return dataset.map(
        cut_rows, batched=True, num_proc=config.dataset_num_proc, desc=f"Truncating {name} dataset",
        fn_kwargs={"limit": config.max_length, "from_end": config.truncation_mode == "keep_end"},
    )  # fmt: skip


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
    columns = [column for column in PER_TOKEN if column in columns_of(dataset)]
    if config.packing_strategy != "bfd":
        if "weights" in columns:
            raise ValueError(f"packing_strategy={config.packing_strategy!r} loses the column 'weights': use 'bfd'")
        return original(trainer, dataset, processing_class, config, True, None, name)
    pack = pack_dataset if hasattr(dataset, "__len__") else pack_stream
    return pack(dataset.select_columns(columns), config.max_length, seed=config.seed)
