"""fastlm.packing.dataset against the samples taken one by one."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from fastlm import PaddingFreeCollator, pack
from fastlm.packing import dataset as dataset_module
from fastlm.packing.dataset import MAX_SAMPLES_PER_ROW, lengths_of, pack_dataset, work_of

SAMPLES = [list(range(10 * i, 10 * i + 1 + i % 7)) for i in range(40)]


def plain(**columns):
    return Dataset.from_dict({"input_ids": SAMPLES, "text": ["x"] * len(SAMPLES), **columns})


VIEWS = {
    "plain": lambda d: d,
    "select": lambda d: d.select([7, 3, 3, 12]),
    "slice": lambda d: d.select(range(5, 21)),
    "shuffle": lambda d: d.shuffle(seed=3),
    "shard": lambda d: d.shard(3, 1),
    "chunks": lambda d: concatenate_datasets([d.select(range(4)), d, d.shuffle(seed=1)]),
    "torch": lambda d: d.with_format("torch"),
    "columns": lambda d: d.with_format("numpy", columns=["text"]),
    "filtered": lambda d: d.filter(lambda row: len(row["input_ids"]) > 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_data_set(view):
    dataset = VIEWS[view](plain(labels=[[-100, *row[1:]] for row in SAMPLES]))
    samples = dataset.with_format(None)["input_ids"][:]
    lengths = lengths_of(dataset)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [len(row) for row in samples]
    packed = pack_dataset(dataset, 16, seed=5)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    layout = pack(lengths, 16, seed=5)
    assert len(packed) == layout.rows
    for row, begin, end in zip(packed, layout.row_offsets[:-1], layout.row_offsets[1:], strict=True):
        chosen = [samples[i] for i in layout.indices[begin:end]]
        assert row["input_ids"] == [token for sample in chosen for token in sample]
        assert row["labels"] == [label for sample in chosen for label in [-100, *sample[1:]]]
        assert row["seq_lengths"] == [len(sample) for sample in chosen]


def test_labels_default_to_the_tokens_and_weights_come_along():
    weights = [[float(token) for token in row] for row in SAMPLES]
    packed = pack_dataset(plain(weights=weights), 16)
    assert packed["labels"][:] == packed["input_ids"][:]
    assert packed["weights"][:] == [[float(token) for token in row] for row in packed["input_ids"]]


def test_through_the_collator():
    batch = PaddingFreeCollator()(list(pack_dataset(plain(), 16)))
    parts = batch["input_ids"][0].split(batch["boundaries"].lengths)
    assert sorted(part.tolist() for part in parts) == sorted(SAMPLES)
    assert batch["boundaries"].label_count == sum(len(row) - 1 for row in SAMPLES)


def test_saved_and_loaded(tmp_path):
    packed = pack_dataset(plain(), 16)
    packed.save_to_disk(tmp_path)
    assert Dataset.load_from_disk(tmp_path)[:] == packed[:]


def test_fingerprint_follows_data_and_arguments():
    first, other = plain(), plain().shuffle(seed=1)
    prints = [
        packed._fingerprint
        for packed in (
            pack_dataset(first, 16),
            pack_dataset(first, 16),
            pack_dataset(first, 17),
            pack_dataset(first, 16, seed=1),
            pack_dataset(first, 16, max_samples_per_row=2),
            pack_dataset(other, 16),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


def test_token_types_are_kept():
    dataset = Dataset.from_dict({"input_ids": [np.array([1, 2], np.int32)]})
    assert pack_dataset(dataset, 4).features["input_ids"] == dataset.features["input_ids"]


def test_samples_per_row():
    ones = Dataset.from_dict({"input_ids": [[1]] * (MAX_SAMPLES_PER_ROW + 1)})
    assert sorted(map(len, pack_dataset(ones, 4096)["seq_lengths"])) == [1, MAX_SAMPLES_PER_ROW]
    assert [len(row) for row in pack_dataset(ones, 4096, max_samples_per_row=None)["seq_lengths"]] == [len(ones)]


def test_offsets_of_64_bits_change_nothing(monkeypatch):
    small = pack_dataset(plain(), 16)
    monkeypatch.setattr(dataset_module, "_INT32_MAX", 10)
    large = pack_dataset(plain(), 16)
    assert str(large.features["input_ids"]).startswith("LargeList")
    assert large[:] == small[:]


def test_work_of_samples_and_of_packed_rows():
    costs = [n * (1 + n / 20_000) for n in map(len, SAMPLES)]
    assert work_of(plain()).tolist() == pytest.approx(costs, rel=1e-12)
    packed = pack_dataset(plain(), 16)
    rows = [sum(n * (1 + n / 20_000) for n in row) for row in packed["seq_lengths"]]
    assert work_of(packed).tolist() == pytest.approx(rows, rel=1e-12)
    assert work_of(packed.select([3, 1])).tolist() == pytest.approx([rows[3], rows[1]], rel=1e-12)


def test_empty():
    packed = pack_dataset(plain().select([]), 16)
    assert len(packed) == 0
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    assert lengths_of(plain().select([])).tolist() == []


def test_an_attention_mask_of_ones_is_left_behind():
    packed = pack_dataset(plain(attention_mask=[[1] * len(row) for row in SAMPLES]), 16)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"text": ["a"]}), r"no column 'input_ids', only \['text'\]"),
        (Dataset.from_dict({"input_ids": [[1], None]}), "1 samples have no value"),
        (Dataset.from_dict({"input_ids": [[1], []]}), r"lengths\[1\] is 0"),
        (Dataset.from_dict({"input_ids": [[1], [2] * 5]}), r"lengths\[1\] is 5, which exceeds max_length 4"),
        (Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}), "sample 1: labels"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[None, 2]]}), "1 tokens have no value in 'labels'"),
        (Dataset.from_dict({"input_ids": [[1]], "seq_lengths": [[1]]}), "packed already"),
        (Dataset.from_dict({"input_ids": [[1, 0]], "attention_mask": [[1, 0]]}), "attention_mask has zeros"),
    ],
)
def test_wrong_data_sets(dataset, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(dataset, 4)
