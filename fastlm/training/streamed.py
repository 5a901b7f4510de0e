"""Streamed data sets, with what map-style ones get; and rows for several ranks that evaluate, none of them twice."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ..packing.boundaries import IGNORE_INDEX
from ..packing.dataset import PER_TOKEN, columns_of
from .step import State
from .tables import cut_rows, row_facts, strip_padding

__all__ = ["fill_rows", "tidy_stream"]

_STREAM_ROWS = 100  # are tidied at a time


def tidy_stream(stream: Any, state: State, config: Any, name: str, *, cuts: bool) -> Any:
    """The stream of TRL's rows with padding removed, cut to max_length if ``cuts``, without rows that have no target.

    The first rows that are cut or dropped are counted in one warning each. ValueError if the first 100 rows are
    all dropped.
    """
    columns = columns_of(stream)
    limit = config.max_length if cuts else None
    tidy = _Tidy(name, limit, config.truncation_mode == "keep_end", state.vocabulary, state.voice.speaks)
    stream = stream.map(tidy, batched=True, batch_size=_STREAM_ROWS, remove_columns=columns)
    if next(iter(stream), None) is None:
        raise ValueError(tidy.nothing())
    return stream


@dataclass
class _Tidy:
    """Some rows of a stream at a time; counts what it has seen, again if the stream is read again."""

    name: str
    limit: int | None
    from_end: bool
    vocabulary: int | None
    speaks: bool
    seen: int = 0
    cut: int = 0
    dropped: int = 0

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        import pyarrow as pa

        if "attention_mask" in batch:
            batch = {**batch, **strip_padding(batch)}
        batch = {name: batch[name] for name in (*PER_TOKEN, "seq_lengths") if name in batch}
        lengths, targets = row_facts(pa.table(batch), self.name, self.seen, self.vocabulary)
        self.seen += len(lengths)
        if self.limit is not None and (lengths > self.limit).any():
            self._count("cut", int((lengths > self.limit).sum()), f"were longer than max_length={self.limit}")
            batch = cut_rows(batch, self.limit, self.from_end)
            lengths, targets = row_facts(pa.table(batch), self.name, self.seen)
        keep = np.flatnonzero(targets)
        if len(keep) < len(lengths):
            if self.dropped + len(lengths) - len(keep) == self.seen:
                raise ValueError(self.nothing())
            self._count("dropped", len(lengths) - len(keep), "had no token to learn")
        return {name: [values[i] for i in keep] for name, values in batch.items()}

    def _count(self, what: str, count: int, why: str) -> None:
        if self.speaks and not getattr(self, what):
            rows = f"{count} of the first {self.seen} {self.name} rows {why} and were {what}"
            warnings.warn(f"fastlm: {rows}, as later ones will be", UserWarning, stacklevel=2)
        setattr(self, what, getattr(self, what) + count)

    def nothing(self) -> str:
        return (
            f"none of the first {self.seen} rows of the {self.name} data stream has a token to learn: every label is "
            f"-100 (or max_length={self.limit} cuts every answer off)"
        )


def fill_rows(dataset: Any, multiple: int, flattened: bool) -> Any:
    """Rows for several ranks' evaluation: copies of the first row without targets, up to a multiple of ``multiple``.

    Otherwise accelerate repeats rows to give the ranks equal shares; in padded batches of known length (not
    ``flattened``) those can be told apart, and the data set is returned as it is.
    """
    from datasets import Dataset, concatenate_datasets
    from datasets import IterableDataset as Stream

    if isinstance(dataset, Stream):
        return _FilledStream(dataset, multiple)
    if not (
        flattened and isinstance(dataset, Dataset) and "labels" in dataset.column_names and len(dataset) % multiple
    ):
        return dataset
    row = _without_targets(dataset.with_format(None)[0])
    filler = Dataset.from_list([row] * (-len(dataset) % multiple), features=dataset.features)
    return concatenate_datasets([dataset, filler])


class _FilledStream(IterableDataset):
    """A stream read whole by every rank, of which accelerate takes the rank's share, filled like ``fill_rows``."""

    def __init__(self, stream: Any, multiple: int) -> None:
        self.stream, self.multiple = stream, multiple

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count, row = 0, None
        for row in self.stream:
            count += 1
            yield row
        if row is not None:
            yield from itertools.repeat(_without_targets(row), -count % self.multiple)


def _without_targets(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [IGNORE_INDEX] * len(row["input_ids"])}
