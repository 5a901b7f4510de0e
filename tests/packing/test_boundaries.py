"""fastlm.packing.boundaries against loops over tokens."""

import copy
import pickle

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from fastlm import SequenceBoundaries

TENSORS = ("cu_seqlens", "position_ids", "label_positions", "targets", "row_weight")


def brute_force(lengths, labels, weights):
    """Positions, boundaries and (position, target, weight) of every target, token by token."""
    positions, bounds, targets = [], [0], []
    for length in lengths:
        start = bounds[-1]
        positions += range(length)
        targets += [
            (p, labels[p + 1], weights[p + 1]) for p in range(start, start + length - 1) if labels[p + 1] != -100
        ]
        bounds.append(start + length)
    return positions, bounds, targets


@st.composite
def samples(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    total = sum(lengths)
    labels = draw(st.lists(st.sampled_from([-100, 0, 1, 2, 31999]), min_size=total, max_size=total))
    weights = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.5]), min_size=total, max_size=total))
    return lengths, labels, weights


def example():
    return SequenceBoundaries.from_lengths(
        [3, 1, 4], torch.tensor([5, 6, -100, 8, 9, 10, 11, 12]), torch.tensor([0.5, 1, 2, 3, 4, 5, 6, 7.0])
    )


def assert_same(a, b):
    for name in TENSORS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.max_length, a.label_count, a.lengths) == (b.max_length, b.label_count, b.lengths)


@given(samples())
@settings(deadline=None, max_examples=150)
def test_equals_a_loop_over_tokens(batch):
    lengths, labels, weights = batch
    made = SequenceBoundaries.from_lengths(lengths, torch.tensor(labels), torch.tensor(weights))
    positions, bounds, targets = brute_force(lengths, labels, weights)
    assert made.position_ids.tolist() == [positions]
    assert made.cu_seqlens.tolist() == bounds
    rows = zip(made.label_positions.tolist(), made.targets.tolist(), made.row_weight.tolist(), strict=True)
    assert list(rows) == targets
    assert made.label_count == len(targets)
    assert made.max_length == max(lengths)
    assert made.lengths == tuple(lengths)
    assert (made.token_count, made.sample_count) == (sum(lengths), len(lengths))


def test_types():
    made = example()
    assert [getattr(made, name).dtype for name in TENSORS] == [
        torch.int32,
        torch.int64,
        torch.int64,
        torch.int64,
        torch.float32,
    ]
    assert [type(value) for value in (made.max_length, made.label_count, made.lengths[0])] == [int, int, int]


@pytest.mark.parametrize("lengths", [[2, 3], (2, 3), np.array([2, 3], np.int32), torch.tensor([2, 3])])
def test_lengths_of_any_kind(lengths):
    made = SequenceBoundaries.from_lengths(lengths)
    assert made.cu_seqlens.tolist() == [0, 2, 5]
    assert made.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert made.label_positions is made.targets is made.row_weight is made.label_count is None


def test_labels_are_not_written():
    labels = torch.tensor([1, 2, 3, 4])
    made = SequenceBoundaries.from_lengths([2, 2], labels)
    assert labels.tolist() == [1, 2, 3, 4]
    assert made.targets.tolist() == [2, 4]


def test_no_targets_at_all():
    made = SequenceBoundaries.from_lengths([1, 1, 1], torch.tensor([4, 5, 6]))
    assert made.label_count == 0
    assert made.label_positions.shape == made.targets.shape == (0,)


@pytest.mark.parametrize(
    ("lengths", "labels", "weights", "error", "message"),
    [
        ([], None, None, ValueError, "non-empty"),
        ([[2, 3]], None, None, ValueError, r"shape \(1, 2\)"),
        ([2, 0, 3], None, None, ValueError, r"lengths\[1\] is 0"),
        ([2, -4], None, None, ValueError, r"lengths\[1\] is -4"),
        ([2.0, 3.0], None, None, TypeError, "float64"),
        ([True, True], None, None, TypeError, "bool"),
        ([2**31 - 1, 1], None, None, ValueError, "int32"),  # refused before anything of that size is made
        ([2, 3], torch.zeros(4, dtype=torch.int64), None, ValueError, r"labels must be \[5\].*got \[4\]"),
        ([2, 3], torch.zeros(1, 5, dtype=torch.int64), None, ValueError, r"got \[1, 5\]"),
        ([2, 3], torch.zeros(5), None, TypeError, "torch.float32"),
        ([2, 3], torch.zeros(5, dtype=torch.int64, device="meta"), None, ValueError, "on meta"),
        ([2, 3], torch.zeros(5, dtype=torch.int64), torch.ones(6), ValueError, r"weights must be \[5\]"),
        ([2, 3], None, torch.ones(5), ValueError, "without labels"),
    ],
)
def test_wrong_arguments(lengths, labels, weights, error, message):
    with pytest.raises(error, match=message):
        SequenceBoundaries.from_lengths(lengths, labels, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 4, 7], dtype=torch.int32)}, "ends at 7, but there are 8"),
        ({"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}, "3 lengths, but cu_seqlens holds 1"),
        ({"cu_seqlens": torch.tensor([0], dtype=torch.int32)}, r"got shape \[1\]"),
        ({"position_ids": torch.arange(8)}, r"must be \[1, T\]"),
        ({"position_ids": torch.arange(7)[None]}, "ends at 8, but there are 7"),
        ({"lengths": (3, 1, 5)}, "sum to 9, but there are 8"),
        ({"max_length": 3}, "max_length is 3, but the longest sample has 4"),
    ],
)
def test_parts_that_contradict_each_other(change, message):
    made = example()
    parts = {name: getattr(made, name) for name in (*TENSORS, "max_length", "label_count", "lengths")}
    with pytest.raises(ValueError, match=message):
        SequenceBoundaries(**{**parts, **change})


def test_sliced_apart_by_dispatch_is_an_error():
    """Dispatching a batch slices along dimension 0: [0, 5, 9] arrives as [0]."""
    made = SequenceBoundaries.from_lengths([5, 4])
    with pytest.raises(ValueError, match=r"must rise from 0 to the token count, got \[0\]"):
        SequenceBoundaries.from_cu_seqlens(made.cu_seqlens[:1], 5, made.position_ids)


def test_foreign_batch_on_the_cpu():
    cu_seqlens = torch.tensor([0, 3, 3, 4, 8, 8], dtype=torch.int32)  # two samples without tokens
    made = SequenceBoundaries.from_cu_seqlens(cu_seqlens, 6)
    assert made.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert made.cu_seqlens.dtype == torch.int32
    assert made.lengths == (3, 1, 4)
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert made.max_length == 6
    assert made.label_positions is made.targets is made.label_count is None
    given_positions = torch.arange(8)[None]
    assert SequenceBoundaries.from_cu_seqlens(cu_seqlens, 4, given_positions).position_ids is given_positions


def test_foreign_batch_on_a_device_never_reads_it():
    cu_seqlens = torch.empty(4, dtype=torch.int64, device="meta")  # reading a meta tensor raises
    made = SequenceBoundaries.from_cu_seqlens(cu_seqlens, 6, torch.empty(1, 9, dtype=torch.int64, device="meta"))
    assert (made.token_count, made.sample_count, made.max_length) == (9, 3, 6)
    assert made.cu_seqlens.dtype == torch.int32
    assert made.lengths is None
    with pytest.raises(ValueError, match="pass position_ids"):
        SequenceBoundaries.from_cu_seqlens(cu_seqlens, 6)


@pytest.mark.parametrize("values", [[1, 3], [0, 5, 3], [0], [0, 0]])
def test_foreign_boundaries_that_are_none(values):
    with pytest.raises(ValueError):
        SequenceBoundaries.from_cu_seqlens(torch.tensor(values, dtype=torch.int32), 5)


def test_foreign_max_length_too_small():
    with pytest.raises(ValueError, match="longest sample has 4"):
        SequenceBoundaries.from_cu_seqlens(torch.tensor([0, 3, 7], dtype=torch.int32), 3)


def test_moving_makes_a_new_object():
    made = example()
    moved = made.to("cpu")
    assert moved is not made
    assert_same(moved, made)
    far = made.to(torch.device("meta"), non_blocking=True)
    assert {getattr(far, name).device.type for name in TENSORS} == {"meta"}
    assert (far.max_length, far.label_count, far.lengths) == (4, 4, (3, 1, 4))
    assert made.cu_seqlens.device.type == "cpu"
    no_labels = SequenceBoundaries.from_lengths([2]).to("meta")
    assert no_labels.targets is no_labels.row_weight is None


def test_accelerate_moves_it():
    sent = send_to_device({"boundaries": example()}, torch.device("meta"), non_blocking=True)
    assert {getattr(sent["boundaries"], name).device.type for name in TENSORS} == {"meta"}
    assert sent["boundaries"].lengths == (3, 1, 4)


def test_the_loader_pins_it(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    made = example()
    pinned = pin_memory({"boundaries": made})["boundaries"]
    assert_same(pinned, made)
    assert all(getattr(pinned, name) is not getattr(made, name) for name in TENSORS)


@pytest.mark.gpu
def test_pinned_and_moved_on_a_gpu():
    made = example()
    pinned = made.pin_memory()
    assert all(getattr(pinned, name).is_pinned() for name in TENSORS)
    assert_same(pinned.to("cuda", non_blocking=True).to("cpu"), made)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda b: pickle.loads(pickle.dumps(b))])
def test_duplicates(duplicate):
    made = example()
    assert_same(duplicate(made), made)


def test_frozen_and_compared_by_identity():
    made = example()
    with pytest.raises(AttributeError):
        made.max_length = 7
    assert made != example()
    assert {made: 1}[made] == 1
