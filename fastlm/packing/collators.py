"""Collators that flatten samples into one row without padding, and record where each sample lies."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .boundaries import IGNORE_INDEX, SequenceBoundaries

__all__ = ["PackingCollator", "PaddingFreeCollator"]

_USED = frozenset(("input_ids", "labels", "attention_mask", "seq_lengths", "weights"))
# per-token columns that tokenizers add and causal text models ignore
_MEANINGLESS = frozenset(("token_type_ids", "special_tokens_mask"))


@dataclass
class PaddingFreeCollator:
    """Flatten a list of examples into one row: no padding token is added, and none is guessed from token ids.

    Each example is a mapping with

    - ``input_ids``: n integers (a list, array or tensor);
    - ``labels``: n integers, -100 where there is no target; ``input_ids`` if absent;
    - ``seq_lengths``: the lengths of the samples in this example if it is a packed row; they sum to n;
    - ``attention_mask``: n values, 0 at padding that the data already holds on either side of a sample. Those
      tokens are removed;
    - ``weights``: n floats, the weight of each token's loss as a target; 1 in examples without them.

    Further columns are dropped if they are metadata (text, single numbers). Per-token columns and arrays are
    refused, because dropping them would change what is trained.

    Returns:
        ``input_ids``, ``labels`` (-100 at every sample's first token) and ``position_ids``, int64 [1, T]
        each, and ``boundaries``, a SequenceBoundaries. All on the CPU.

    Raises:
        ValueError: an example without tokens or with parts that contradict each other; the message names it.
        TypeError: token ids or labels that are not integers.

    >>> batch = PaddingFreeCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["labels"].tolist(), batch["position_ids"].tolist(), batch["boundaries"].cu_seqlens.tolist()
    ([[-100, 6, 7, -100, 9]], [[0, 1, 2, 0, 1]], [0, 3, 5])
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if len(examples) == 0:
            raise ValueError("the collator was given no examples: a batch must hold at least one")
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        has_mask = any(example.get("attention_mask") is not None for example in examples)
        has_weights = any(example.get("weights") is not None for example in examples)
        for i, example in enumerate(examples):
            tokens = _integers(example, "input_ids", i)
            _check_extra_columns(example, i, len(tokens))
            ids.append(tokens)
            labels.append(_integers(example, "labels", i, len(tokens)) if _has(example, "labels") else tokens)
            lengths.append(_sample_lengths(example, i, len(tokens)))
            if has_mask:
                masks.append(_mask(example, i, len(tokens)))
            if has_weights:
                weights.append(_weights(example, i, len(tokens)))
        flat_lengths = np.concatenate(lengths)
        keep = np.concatenate(masks) if has_mask else None
        if keep is not None:
            _check_padding(keep, flat_lengths, [len(part) for part in lengths])
        keep = self._cut(keep, flat_lengths)
        flat_ids, flat_labels = np.concatenate(ids), np.concatenate(labels)
        flat_weights = np.concatenate(weights) if has_weights else None
        if keep is not None:
            kept_before = np.concatenate(([0], np.cumsum(keep)))
            ends = np.cumsum(flat_lengths)
            flat_lengths = kept_before[ends] - kept_before[ends - flat_lengths]
            flat_lengths = flat_lengths[flat_lengths > 0]
            flat_ids, flat_labels = flat_ids[keep], flat_labels[keep]
            flat_weights = None if flat_weights is None else flat_weights[keep]
        flat_labels[np.cumsum(flat_lengths) - flat_lengths] = IGNORE_INDEX  # concatenate has made it a copy
        label_row = torch.from_numpy(flat_labels)
        boundaries = SequenceBoundaries.from_lengths(
            flat_lengths, label_row, None if flat_weights is None else torch.from_numpy(flat_weights)
        )
        return {
            "input_ids": torch.from_numpy(flat_ids)[None],
            "labels": label_row[None],
            "position_ids": boundaries.position_ids,
            "boundaries": boundaries,
        }

    def _cut(self, keep: np.ndarray | None, lengths: np.ndarray) -> np.ndarray | None:
        """Which of the tokens stay, bool [T]; None for all."""
        return keep


@dataclass
class PackingCollator(PaddingFreeCollator):
    """A PaddingFreeCollator that lets no sample be longer than ``max_length``.

    A batch is one flattened row in any case, so there is nothing to pack within it: to fill every batch
    evenly, make the rows beforehand with ``pack_dataset`` (or ``pack``) and feed those, ``seq_lengths``
    included, one or more a batch. Raw samples are accepted as well. Longer samples lose their tail, labels
    and weights alike; the first time there is a warning.

    Attributes:
        max_length: the most tokens of one sample, at least 1.
        truncated: samples cut so far, in this process (DataLoader workers count their own).
    """

    max_length: int
    truncated: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}: a sample must hold at least one token")

    def _cut(self, keep: np.ndarray | None, lengths: np.ndarray) -> np.ndarray | None:
        total = int(lengths.sum())
        counted = np.arange(1, total + 1) if keep is None else np.cumsum(keep)  # tokens up to here, [T]
        before = np.concatenate(([0], counted))[np.cumsum(lengths) - lengths]  # tokens before the sample, [S]
        within = counted - np.repeat(before, lengths) <= self.max_length
        if keep is not None:
            within &= keep
        last = np.cumsum(lengths) - 1
        cut = int((counted[last] - before > self.max_length).sum())
        if not cut:
            return keep
        if not self.truncated:
            warnings.warn(
                f"a sample is longer than max_length {self.max_length}: its tail is cut, as will be those of "
                "later ones (counted in the collator's attribute truncated)",
                stacklevel=3,
            )
        self.truncated += cut
        return within


def _has(example: Mapping[str, Any], name: str) -> bool:
    return example.get(name) is not None


def _array(example: Mapping[str, Any], name: str, i: int, size: int | None) -> np.ndarray:
    value = example[name]
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"example {i}: {name} must have one dimension, got shape {array.shape}")
    if size is not None and len(array) != size:
        raise ValueError(f"example {i}: {name} has {len(array)} entries, but input_ids has {size}")
    return array


def _integers(example: Mapping[str, Any], name: str, i: int, size: int | None = None) -> np.ndarray:
    if name not in example:
        raise ValueError(
            f"example {i} has no {name}, only {sorted(example)}: tokenise the data set, and keep the column "
            "(a Trainer drops columns that the model's forward does not name: remove_unused_columns=False)"
        )
    array = _array(example, name, i, size)
    if array.size == 0:
        raise ValueError(f"example {i}: {name} is empty: drop samples without tokens from the data set")
    if array.dtype.kind not in "iu":
        raise TypeError(f"example {i}: {name} must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _weights(example: Mapping[str, Any], i: int, size: int) -> np.ndarray:
    if not _has(example, "weights"):
        return np.ones(size, np.float32)
    return _array(example, "weights", i, size).astype(np.float32, copy=False)


def _mask(example: Mapping[str, Any], i: int, size: int) -> np.ndarray:
    if not _has(example, "attention_mask"):
        return np.ones(size, bool)
    array = _array(example, "attention_mask", i, size)
    mask = array.astype(bool)
    if not np.array_equal(mask, array):
        raise ValueError(
            f"example {i}: attention_mask must be 0 or 1, got values {np.unique(array)[:5].tolist()}: "
            "give the samples of a packed row as seq_lengths"
        )
    return mask


def _sample_lengths(example: Mapping[str, Any], i: int, size: int) -> np.ndarray:
    if not _has(example, "seq_lengths"):
        return np.array([size])
    lengths = _array(example, "seq_lengths", i, None)
    if lengths.dtype.kind not in "iu" or (lengths < 0).any() or lengths.sum() != size:
        raise ValueError(
            f"example {i}: seq_lengths {lengths.tolist()[:8]} must be integers that sum to the {size} tokens "
            f"of input_ids, got {lengths.sum()}: was the row cut after it was packed?"
        )
    return lengths[lengths > 0].astype(np.int64, copy=False)


def _check_padding(keep: np.ndarray, lengths: np.ndarray, samples_per_example: Sequence[int]) -> None:
    """Each sample must be one run of ones: a hole inside is no padding, closing it would move positions."""
    starts = np.cumsum(lengths) - lengths
    begins = keep.copy()  # [T], where a run of ones begins
    begins[1:] &= ~keep[:-1]
    begins[starts] = keep[starts]
    runs = np.add.reduceat(begins, starts, dtype=np.int64)  # [S]
    example_of = np.repeat(np.arange(len(samples_per_example)), samples_per_example)
    if (runs > 1).any():
        raise ValueError(
            f"example {example_of[np.argmax(runs > 1)]}: attention_mask has zeros between ones of a sample; "
            "only padding on its left or right can be removed (a packed row needs its seq_lengths)"
        )
    empty = np.bincount(example_of, weights=runs) == 0
    if empty.any():
        raise ValueError(f"example {int(np.argmax(empty))}: attention_mask is 0 everywhere: drop this sample")


def _check_extra_columns(example: Mapping[str, Any], i: int, size: int) -> None:
    for name in example.keys() - _USED - _MEANINGLESS:
        value = example[name]
        if isinstance(value, np.ndarray | torch.Tensor):
            per_token = value.ndim > 0 and not (isinstance(value, np.ndarray) and value.dtype.kind in "OUS")
        else:
            per_token = isinstance(value, list) and len(value) == size and isinstance(value[0], int | float)
        if not per_token or (name in ("completion_mask", "assistant_masks") and _has(example, "labels")):
            continue
        hint = "remove the column"
        if name in ("completion_mask", "assistant_masks"):
            hint = "turn it into labels, -100 where it is 0"
        elif name == "position_ids":
            hint = "positions are counted here; give the samples of a packed row as seq_lengths"
        raise ValueError(f"example {i}: column {name!r} holds an array, which is not used here: {hint}")
