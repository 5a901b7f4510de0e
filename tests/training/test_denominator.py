"""One denominator, on ragged batches that hypothesis makes up: every way to batch a step gives what its samples,
run alone through a stock model, add up to."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastlm

from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

Row = dict[str, Any]


@st.composite
def steps(draw: Any) -> tuple[list[Row], int, bool]:
    """(the rows of one optimiser step, micro-batches, whether they have weights); some row has a target."""
    rows = []
    weighted = draw(st.booleans())
    for length in draw(st.lists(st.integers(2, 19), min_size=2, max_size=8)):
        ids = draw(st.lists(st.integers(0, 259), min_size=length, max_size=length))  # pad and eos among them
        shown = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        row = {"input_ids": ids, "labels": [token if show else -100 for token, show in zip(ids, shown, strict=True)]}
        if weighted:
            row["weights"] = draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=length, max_size=length))
        rows.append(row)
    rows[0]["labels"][-1] = rows[0]["input_ids"][-1]
    return rows, draw(st.integers(1, len(rows))), weighted


def alone(rows: list[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient from a stock model's logits, in float64 sums: each sample by itself, over all targets."""
    model, total, count = runs.model(patched=False), 0.0, runs.targets(rows)
    for row in rows:
        labels = torch.tensor(row["labels"][1:])
        if not (labels != -100).any():
            continue
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        loss = (losses * torch.tensor(row.get("weights", [1.0] * len(row["labels"]))[1:])).sum() / count
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def layouts(rows: list[Row], splits: int) -> dict[str, dict[str, Any]]:
    size = -(-len(rows) // splits)
    accumulated = dict(per_device_train_batch_size=size, gradient_accumulation_steps=-(-len(rows) // size))
    whole = dict(per_device_train_batch_size=len(rows))
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        "padding_free": whole,
        "token_budget": dict(tokens_per_step=sum(len(row["input_ids"]) for row in rows)),
        "padded": dict(padding_free=False, **whole),
        "packed": dict(packing=True, max_length=longest + 5, **whole),
        "accumulated": accumulated,
        "padded_accumulated": dict(padding_free=False, **accumulated),
        "packed_accumulated": dict(
            packing=True, max_length=longest, per_device_train_batch_size=1, gradient_accumulation_steps=len(rows)
        ),
    }  # fmt: skip


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps())
@pytest.mark.filterwarnings("ignore:fastlm:UserWarning")
def test_every_layout_is_the_sum_of_its_samples(step: tuple[list[Row], int, bool]) -> None:
    rows, splits, _ = step
    kept = [row for row in rows if any(label != -100 for label in row["labels"][1:])]
    loss, gradient = alone(kept)
    for name, layout in layouts(kept, min(splits, len(kept))).items():
        with tempfile.TemporaryDirectory() as out:
            made, gradients = runs.train(runs.model(), rows, runs.config(out, **layout))
        assert made._fastlm.counts["train"].dropped == len(rows) - len(kept), name
        assert runs.logged(made) == [pytest.approx(loss, rel=1e-5, abs=1e-7)], name
        if max(float(tensor.abs().max()) for tensor in gradient.values()) > 0:
            assert runs.worst_error(gradients[0], gradient) < 1e-5, name
        else:  # all weights are 0
            assert all(not tensor.any() for tensor in gradients[0].values()), name
