"""fastlm.packing.collators: which token is whose, which is a target, with which weight."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fastlm import PackingCollator, PaddingFreeCollator, SequenceBoundaries

PAD = EOS = 0
TABLE = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_sum(batch):
    """Summed cross entropy of a model whose logits depend on the current token and its position alone."""
    bounds = batch["boundaries"]
    hidden = TABLE[batch["input_ids"][0]] * (1 + batch["position_ids"][0, :, None])
    return F.cross_entropy(hidden[bounds.label_positions], bounds.targets, reduction="sum")


def samples_of(batch):
    """Token lists of the samples in a batch."""
    return [part.tolist() for part in batch["input_ids"][0].split(batch["boundaries"].lengths)]


def test_a_bounds_column_dropped():
    batch = PaddingFreeCollator()([{"input_ids": list(range(1, 10)), "seq_lengths": [5, 4]}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch["boundaries"].cu_seqlens.tolist() == [0, 5, 9]
    assert batch["boundaries"].lengths == (5, 4)
    assert batch["boundaries"].position_ids is batch["position_ids"]


def test_a_boundary_target():
    first, second = {"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}
    collate = PaddingFreeCollator()
    batch = collate([first, second])
    assert batch["boundaries"].label_count == 5
    assert batch["boundaries"].targets.tolist() == [2, 3, 5, 6, 7]
    assert batch["boundaries"].label_positions.tolist() == [0, 1, 3, 4, 5]
    alone = loss_sum(collate([first])) + loss_sum(collate([second]))
    torch.testing.assert_close(loss_sum(batch), alone, rtol=1e-12, atol=0)


def test_b_denominator_twice():
    collate = PaddingFreeCollator()
    ids = torch.randint(1, 64, (8, 16), generator=torch.Generator().manual_seed(1)).tolist()
    ignored_first = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids]
    free = collate(ignored_first)
    assert free["boundaries"].label_count == 120
    assert int((free["labels"][:, 1:] != -100).sum()) == 120  # what a trainer counts
    packed = collate(
        [
            {
                "input_ids": [token for row in ids for token in row],
                "labels": [label for row in ignored_first for label in row["labels"]],
                "seq_lengths": [16] * 8,
            }
        ]
    )
    padded = collate(
        [
            {
                "input_ids": [*row["input_ids"], PAD, PAD],
                "labels": [*row["labels"], PAD, PAD],
                "attention_mask": [1] * 16 + [0, 0],
            }
            for row in ignored_first
        ]
    )
    no_labels = collate([{"input_ids": row} for row in ids])
    for other in (packed, padded, no_labels):
        assert other["boundaries"].label_count == 120
        assert torch.equal(other["labels"], free["labels"])
        assert loss_sum(other) == loss_sum(free)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_b_mask_from_pad_scan(side):
    rows = [
        [7, PAD, EOS],
        [PAD, 3, PAD, 4, 5, EOS],
    ]  # pad id 0 = eos is also a real token, first, inside and last
    left, right = {"left": (4, 0), "right": (0, 4), "both": (1, 3)}[side]
    collate = PaddingFreeCollator()
    unpadded = collate([{"input_ids": row} for row in rows])
    assert samples_of(unpadded) == rows
    padded = [
        {
            "input_ids": [PAD] * left + row + [PAD] * right,
            "attention_mask": [0] * left + [1] * len(row) + [0] * right,
        }
        for row in rows
    ]
    for batch in (unpadded, collate(padded), collate([padded[0], {"input_ids": rows[1]}])):
        assert samples_of(batch) == rows
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
        assert batch["boundaries"].targets.tolist() == [PAD, EOS, 3, PAD, 4, 5, EOS]
        assert batch["boundaries"].label_positions.tolist() == [0, 1, 3, 4, 5, 6, 7]


def test_e_pad_is_eos():
    rows = [[5, 6, 7, EOS], [8, 9, EOS, 10, 11, 12, EOS]]  # eos also between turns
    collate = PaddingFreeCollator()
    free = collate([{"input_ids": row} for row in rows])
    packed = collate([{"input_ids": rows[0] + rows[1], "seq_lengths": [4, 7]}])
    padded = collate(
        [
            {"input_ids": rows[0] + [PAD] * 3, "attention_mask": [1] * 4 + [0] * 3},
            {"input_ids": rows[1], "attention_mask": [1] * 7},
        ]
    )
    for batch in (free, packed, padded):
        assert batch["boundaries"].targets.tolist() == [6, 7, EOS, 9, EOS, 10, 11, 12, EOS]
        assert batch["labels"].tolist() == [[-100, 6, 7, EOS, -100, 9, EOS, 10, 11, 12, EOS]]
        assert batch["boundaries"].lengths == (4, 7)


def test_b_max_length_guard_cuts_to_max_length():
    collate = PackingCollator(8)
    long = {
        "input_ids": list(range(1, 13)),
        "labels": [-100] * 4 + list(range(5, 13)),
        "weights": [0.5] * 12,
        "attention_mask": [1] * 12,
    }
    with pytest.warns(UserWarning, match="longer than max_length 8"):
        batch = collate([{"input_ids": [1, 2, 3, 4, 5]}, long])
    assert samples_of(batch) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch["boundaries"].targets.tolist() == [2, 3, 4, 5, 5, 6, 7, 8]
    assert batch["boundaries"].row_weight.tolist() == [1.0] * 4 + [0.5] * 4
    assert batch["boundaries"].max_length == 8
    assert collate.truncated == 1
    collate([long, long])  # counted, not warned about again
    assert collate.truncated == 3


def test_packing_collator_cuts_samples_of_a_row_after_its_padding():
    collate = PackingCollator(3)
    row = {
        "input_ids": [PAD, PAD, 1, 2, 3, 4, 5, 6, PAD],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1, 0],
        "seq_lengths": [6, 3],
    }
    with pytest.warns(UserWarning, match="max_length 3"):
        batch = collate([row])
    assert samples_of(batch) == [[1, 2, 3], [5, 6]]
    assert collate.truncated == 1


def test_packing_collator_within_its_length_equals_padding_free():
    examples = [{"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1]}, {"input_ids": [5, 6]}]
    collate = PackingCollator(3)
    ours, plain = collate(examples), PaddingFreeCollator()(examples)
    assert torch.equal(ours["input_ids"], plain["input_ids"])
    assert ours["boundaries"].lengths == plain["boundaries"].lengths == (3, 1, 2)
    assert collate.truncated == 0
    with pytest.raises(ValueError, match="max_length is 0"):
        PackingCollator(0)


@st.composite
def padded_rows(draw):
    """Examples that are packed rows of samples with padding on both sides, and what must come out."""
    examples, expected = [], []
    for _ in range(draw(st.integers(1, 4))):
        example = {"input_ids": [], "labels": [], "weights": [], "attention_mask": [], "seq_lengths": []}
        for _ in range(draw(st.integers(1, 4))):
            tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
            labels = [draw(st.sampled_from([-100, token])) for token in tokens]
            weights = [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in tokens]
            left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            example["input_ids"] += [9] * left + tokens + [9] * right
            example["labels"] += [9] * left + labels + [9] * right
            example["weights"] += [9.0] * left + weights + [9.0] * right
            example["attention_mask"] += [0] * left + [1] * len(tokens) + [0] * right
            example["seq_lengths"].append(left + len(tokens) + right)
            expected.append((tokens, labels, weights))
        examples.append(example)
    return examples, expected


@given(padded_rows(), st.sampled_from([list, np.array, torch.tensor]))
@settings(deadline=None, max_examples=150)
def test_equals_a_loop_over_samples(rows, kind):
    examples, expected = rows
    batch = PaddingFreeCollator()([{name: kind(column) for name, column in example.items()} for example in examples])
    labels, targets, weights = [], [], []
    for _, sample_labels, sample_weights in expected:
        labels += [-100, *sample_labels[1:]]
        kept = [i for i in range(1, len(sample_labels)) if sample_labels[i] != -100]
        targets += [sample_labels[i] for i in kept]
        weights += [sample_weights[i] for i in kept]
    assert set(batch) == {"input_ids", "labels", "position_ids", "boundaries"}
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    assert samples_of(batch) == [tokens for tokens, _, _ in expected]
    assert batch["labels"].tolist() == [labels]
    assert batch["position_ids"].tolist() == [[p for tokens, _, _ in expected for p in range(len(tokens))]]
    assert batch["boundaries"].targets.tolist() == targets
    assert batch["boundaries"].row_weight.tolist() == weights
    assert batch["boundaries"].label_count == len(targets)


def test_labels_that_are_all_ignored():
    batch = PaddingFreeCollator()([{"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [3]}])
    assert batch["boundaries"].label_count == 0
    assert batch["boundaries"].targets.tolist() == []
    assert batch["labels"].tolist() == [[-100, -100, -100]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_examples_are_not_written(kind):
    examples = [{"input_ids": kind([1, 2, 3]), "labels": kind([1, 2, 3])}]
    before = copy.deepcopy(examples)
    batch = PaddingFreeCollator()(examples)
    batch["input_ids"].zero_()
    assert [list(value) for value in examples[0].values()] == [list(value) for value in before[0].values()]


def test_samples_without_tokens_in_a_packed_row_are_dropped():
    batch = PaddingFreeCollator()([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1], "seq_lengths": [1, 0, 1, 1]}])
    assert samples_of(batch) == [[1], [3]]
    assert batch["boundaries"].cu_seqlens.tolist() == [0, 1, 2]


def test_metadata_is_left_behind():
    example = {
        "input_ids": [1, 2],
        "text": "a b",
        "source": None,
        "index": 3,
        "score": torch.tensor(0.5),
        "messages": [{"role": "user"}, {"role": "assistant"}],
        "tags": np.array(["a", "b"]),
        "token_type_ids": [0, 0],
        "labels": None,
    }
    batch = PaddingFreeCollator()([example])
    assert set(batch) == {"input_ids", "labels", "position_ids", "boundaries"}
    assert batch["boundaries"].targets.tolist() == [2]


GOOD = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"text": "a"}, ValueError, r"has no input_ids, only \['text'\].*tokenise"),
        ({"input_ids": []}, ValueError, "input_ids is empty"),
        ({"input_ids": [[1, 2]]}, ValueError, r"one dimension, got shape \(1, 2\)"),
        ({"input_ids": [1.0, 2.0]}, TypeError, "must be integers, got float64"),
        ({"input_ids": [1, 2], "labels": [1]}, ValueError, "labels has 1 entries, but input_ids has 2"),
        ({"input_ids": [1, 2], "labels": [0.5, 1]}, TypeError, "labels must be integers"),
        ({"input_ids": [1, 2], "weights": [1.0]}, ValueError, "weights has 1 entries"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, ValueError, "attention_mask has 1 entries"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, ValueError, r"0 or 1, got values \[1, 2\]"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, ValueError, "zeros between ones"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, ValueError, "0 everywhere"),
        (
            {"input_ids": [1, 2], "seq_lengths": [2, 1]},
            ValueError,
            r"sum to the 2 tokens of input_ids, got 3",
        ),
        ({"input_ids": [1, 2], "seq_lengths": [3, -1]}, ValueError, "seq_lengths"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, ValueError, "turn it into labels"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, ValueError, "as seq_lengths"),
        (
            {"input_ids": [1, 2], "pixel_values": np.zeros((3, 4))},
            ValueError,
            "'pixel_values' holds an array",
        ),
    ],
)
def test_wrong_examples_are_named(bad, error, message):
    with pytest.raises(error, match=f"(?s)example 1.*{message}"):
        PaddingFreeCollator()([GOOD, bad])


def test_no_examples():
    with pytest.raises(ValueError, match="no examples"):
        PaddingFreeCollator()([])


def test_a_completion_mask_beside_labels_is_done_with():
    batch = PaddingFreeCollator()([{**GOOD, "labels": [-100, -100, 3], "completion_mask": [0, 0, 1]}])
    assert batch["boundaries"].targets.tolist() == [3]


def test_through_a_loader_with_a_worker():
    examples = [{"input_ids": list(range(1, n + 2)), "weights": [float(n)] * (n + 1)} for n in range(6)]
    loader = DataLoader(examples, batch_size=3, collate_fn=PaddingFreeCollator(), num_workers=1)
    batches = list(loader)
    assert [batch["boundaries"].lengths for batch in batches] == [(1, 2, 3), (4, 5, 6)]
    assert batches[1]["boundaries"].cu_seqlens.tolist() == [0, 4, 9, 15]
    assert batches[0]["boundaries"].targets.tolist() == [2, 2, 3]
    assert batches[0]["boundaries"].row_weight.tolist() == [1.0, 2.0, 2.0]
    assert isinstance(batches[0]["boundaries"], SequenceBoundaries)
