"""fastlm.packing.stream: every sample once and whole, and the same rows however the stream is read."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fastlm import PaddingFreeCollator, pack
from fastlm.packing import pack_stream
from fastlm.packing.dataset import MAX_SAMPLES_PER_ROW

SHARDS = list(range(6))


def read(shards, columns=("input_ids",)):
    for shard in shards:
        rng = np.random.default_rng(shard)
        for number, length in enumerate(rng.integers(1, 17, 30)):
            ids = [1000 * shard + number] * int(length)  # which sample a token is of
            facts = {"input_ids": ids, "labels": [-100, *ids[1:]], "weights": [token / 2 for token in ids]}
            yield {name: facts[name] for name in columns} | {"text": "x"}


def stream(columns=("input_ids",)):
    return IterableDataset.from_generator(read, gen_kwargs={"shards": SHARDS, "columns": columns})


def plain(rows):
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


def samples_in(rows):
    """The samples of packed rows, sorted."""
    parts = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        ends = np.cumsum(row["seq_lengths"])
        parts += [row["input_ids"][end - n : end] for end, n in zip(ends, row["seq_lengths"], strict=True)]
    return sorted(parts)


SAMPLES = sorted(sample["input_ids"] for sample in read(SHARDS))


@pytest.mark.parametrize("buffer_size", [1, 7, 40, 10_000])
def test_every_sample_once_and_whole(buffer_size):
    rows = plain(pack_stream(stream(), 32, buffer_size=buffer_size))
    assert samples_in(rows) == SAMPLES
    assert max(len(row["input_ids"]) for row in rows) <= 32


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 25), st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_any_lengths_and_buffers(lengths, buffer_size, seed):
    data = Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]}).to_iterable_dataset()
    rows = plain(pack_stream(data, 20, buffer_size=buffer_size, seed=seed))
    assert samples_in(rows) == [[i] * n for i, n in enumerate(lengths)]
    buffers = [lengths[i : i + buffer_size] for i in range(0, len(lengths), buffer_size)]
    assert len(rows) == sum(pack(buffer, 20).rows for buffer in buffers)


def test_labels_and_weights_come_along():
    for row in plain(pack_stream(stream(("input_ids", "labels", "weights")), 32)):
        starts = np.cumsum(row["seq_lengths"]) - row["seq_lengths"]
        labels = np.array(row["input_ids"])
        labels[starts] = -100
        assert row["labels"] == labels.tolist()
        assert row["weights"] == [token / 2 for token in row["input_ids"]]
    first = plain(pack_stream(stream(), 32).take(1))[0]
    assert first.keys() == {"input_ids", "labels", "seq_lengths"}
    assert first["labels"] == first["input_ids"]


def test_through_the_collator():
    batch = PaddingFreeCollator()(list(pack_stream(stream(), 32)))
    parts = batch["input_ids"][0].split(batch["boundaries"].lengths)
    assert sorted(part.tolist() for part in parts) == SAMPLES


def test_the_same_rows_for_a_seed():
    first, again, other = (plain(pack_stream(stream(), 32, buffer_size=40, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("given_out", [0, 1, 13, 50])
def test_resumed_rows_are_those_that_would_have_come(given_out):
    rows = plain(pack_stream(stream(), 32, buffer_size=40))
    packed = pack_stream(stream(), 32, buffer_size=40)
    reader = iter(packed)
    begun = [next(reader) for _ in range(given_out)]
    assert plain(begun) == rows[:given_out]
    resumed = pack_stream(stream(), 32, buffer_size=40)
    resumed.load_state_dict(packed.state_dict())
    assert plain(resumed) == rows[given_out:]
    assert plain(pack_stream(stream(), 32, buffer_size=40).skip(given_out)) == rows[given_out:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores is meant
@pytest.mark.parametrize("workers", [0, 3])
def test_workers_give_every_sample_and_the_same_rows_again(workers):
    def batches():
        packed = pack_stream(stream(), 32, buffer_size=20)
        return [plain(rows) for rows in DataLoader(packed, batch_size=2, num_workers=workers, collate_fn=list)]

    first = batches()
    assert samples_in(row for rows in first for row in rows) == SAMPLES
    assert batches() == first


def test_ranks_share_the_shards():
    rows = [row for rank in range(2) for row in plain(pack_stream(stream(), 32).shard(2, rank))]
    assert samples_in(rows) == SAMPLES


def test_an_epoch_of_a_shuffled_stream_has_an_order_of_its_own():
    packed = pack_stream(stream().shuffle(seed=1, buffer_size=50), 32, buffer_size=40)
    epochs = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        epochs.append(plain(packed))
    assert epochs[0] == epochs[2] != epochs[1]
    assert samples_in(epochs[1]) == SAMPLES


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow"])
def test_formatted_streams(form):
    data = Dataset.from_list(list(read(SHARDS))).to_iterable_dataset()
    assert plain(pack_stream(data.with_format(form), 32)) == plain(pack_stream(data, 32))


def test_samples_per_row():
    data = Dataset.from_dict({"input_ids": [[1]] * 100}).to_iterable_dataset()
    counts = [len(row["seq_lengths"]) for row in pack_stream(data, 64, max_samples_per_row=30)]
    assert sorted(counts) == [10, 30, 30, 30]
    many = Dataset.from_dict({"input_ids": [[1]] * (MAX_SAMPLES_PER_ROW + 1)}).to_iterable_dataset()
    rows = pack_stream(many, 4096)
    assert sorted(len(row["seq_lengths"]) for row in rows) == [1, MAX_SAMPLES_PER_ROW]


def test_fill():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(200), 0.6, 20_000).astype(np.int64), 1, 2048)
    data = Dataset.from_dict({"input_ids": [np.zeros(n, np.int8) for n in lengths]}).to_iterable_dataset()
    rows = sum(1 for _ in pack_stream(data, 4096))
    assert lengths.sum() / (rows * 4096) >= 0.999


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"text": "a"}], {}, r"no column 'input_ids', only \['text'\]"),
        ([{"input_ids": [1], "seq_lengths": [1]}], {}, "packed already"),
        ([{"input_ids": [1]}, {"input_ids": []}], {}, r"lengths\[1\] is 0"),
        ([{"input_ids": [1] * 5}], {}, r"lengths\[0\] is 5, which exceeds max_length 4"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, r"labels of a sample has shape \(1,\), input_ids \(2,\)"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], {}, "attention_mask has zeros"),
        ([{"input_ids": [1]}, {"input_ids": None}], {}, "no value at all in 'input_ids'"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [2], "labels": None}], {}, "no value at all in 'labels'"),
        ([{"input_ids": [1]}], {"buffer_size": 0}, "buffer_size is 0"),
        ([{"input_ids": [1]}], {"max_samples_per_row": 0}, "max_samples_per_row is 0"),
    ],
)
def test_wrong_streams(rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        list(pack_stream(Dataset.from_list(rows).to_iterable_dataset(), 4, **arguments))


def test_empty():
    assert list(pack_stream(IterableDataset.from_generator(lambda: iter(())), 4)) == []
