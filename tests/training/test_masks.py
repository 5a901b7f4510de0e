"""Which tokens are learned, and how much each counts, survives preparation, cutting and packing."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Sequence, Value

import fastlm

from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)


def samples(dataset: Any) -> Counter[tuple[Any, ...]]:
    """Every sample's (input_ids, labels, weights) of a prepared data set; a first label is never a target."""
    found: Counter[tuple[Any, ...]] = Counter()
    for arrays in dataset:
        row = {name: np.asarray(values).tolist() for name, values in arrays.items() if name != "messages"}
        start = 0
        for length in row.get("seq_lengths", [len(row["input_ids"])]):
            part = slice(start, start + length)
            labels = [-100, *row["labels"][part][1:]]
            weights = row["weights"][part] if "weights" in row else [1.0] * length
            found[tuple(row["input_ids"][part]), tuple(labels), tuple(weights)] += 1
            start += length
    return found


def weighted(lengths: tuple[int, ...] = runs.LENGTHS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    data = runs.rows(lengths)
    for row in data:
        row["weights"] = (torch.randint(0, 9, (len(row["input_ids"]),), generator=generator) / 4).tolist()
    return data


def chats() -> list[dict[str, Any]]:
    def turn(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    return [
        {"messages": [turn("user", "q" * n), turn("assistant", "a" * n), turn("user", "r"), turn("assistant", "bb")]}
        for n in (1, 3, 2, 5)
    ]


PAIRS = [{"prompt": "p" * n, "completion": "c" * (7 - n)} for n in (1, 2, 4, 6)]
USER = [{**row, "labels": [-100, *row["input_ids"][1:-2], 7, -100]} for row in runs.rows((5, 12, 6, 9))]
MASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user_labels": (USER, {}),
    "completion_only": (PAIRS, dict(completion_only_loss=True)),
    "whole_pairs": (PAIRS, dict(completion_only_loss=False)),
    "assistant_only": (chats(), dict(assistant_only_loss=True)),
    "weights": (weighted(), {}),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_pass_through_packing_unchanged(kind: str, streamed: bool, tmp_path: Any) -> None:
    data, given = MASKS[kind]

    def prepared(**layout: Any) -> Any:
        dataset = Dataset.from_list(data)
        dataset = dataset.to_iterable_dataset() if streamed else dataset
        return runs.trainer(runs.model(), dataset, runs.config(tmp_path, **given, **layout)).train_dataset

    before, after = samples(prepared(max_length=64)), samples(prepared(packing=True, max_length=64))
    assert before == after and before.total() == len(data)
    kept = [label for (_, labels, _), count in before.items() for label in labels * count if label != -100]
    whole = kind in ("whole_pairs", "weights")
    tokens = sum(len(ids) * count for (ids, _, _), count in before.items())
    assert len(kept) == tokens - len(data) if whole else 0 < len(kept) < tokens - len(data)
    if kind in ("user_labels", "weights"):
        expected = [(*row["labels"][1:], *row.get("weights", [])) for row in data]
        found = [(*labels[1:], *(weights if kind == "weights" else ())) for _, labels, weights in before.elements()]
        assert sorted(found) == sorted(expected)


def truth(data: list[dict[str, Any]]) -> float:
    """sum of w x -log p over the count of targets, from a stock model's logits, each row alone."""
    model, total = runs.model(patched=False), 0.0
    for row in data:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        total += float((losses * torch.tensor(row["weights"][1:])).sum())
    return total / runs.targets(data)


LAYOUTS: dict[str, dict[str, Any]] = {
    "padding_free": dict(per_device_train_batch_size=8),
    "padded": dict(per_device_train_batch_size=8, padding_free=False),
    "packed": dict(per_device_train_batch_size=8, packing=True, max_length=24),
    "accumulated": dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_weight_each_targets_loss(layout: str, tmp_path: Any) -> None:
    data = weighted()
    args = runs.config(tmp_path, per_device_eval_batch_size=3, learning_rate=0.0, **LAYOUTS[layout])
    trainer, gradients = runs.train(runs.model(), data, args, eval_dataset=Dataset.from_list(data))
    assert runs.logged(trainer)[0] == pytest.approx(truth(data), rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(truth(data), rel=1e-5)
    predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
    assert predicted == pytest.approx(truth(data), rel=1e-5)
    unweighted = [{name: row[name] for name in ("input_ids", "labels")} for row in data]
    plain, _ = runs.train(runs.model(), unweighted, args)
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):  # TRL's metrics know no weights
        assert runs.logged(trainer, name) == pytest.approx(runs.logged(plain, name), rel=1e-5)
    halved = [{**row, "weights": [weight / 2 for weight in row["weights"]]} for row in data]
    _, half = runs.train(runs.model(), halved, args)
    assert runs.worst_error({name: 2 * tensor for name, tensor in half[0].items()}, gradients[0]) < 1e-5


def test_weights_are_cut_and_stripped_with_their_tokens(tmp_path: Any) -> None:
    data = weighted((9, 4))
    padded = [{name: [values[0], *values] for name, values in row.items()} for row in data]
    for row in padded:
        row["attention_mask"] = [0] + [1] * (len(row["input_ids"]) - 1)
    with pytest.warns(UserWarning, match="1 of 2 train rows"):
        trainer = runs.trainer(runs.model(), padded, runs.config(tmp_path, max_length=6, truncation_mode="keep_end"))
    assert trainer.train_dataset["weights"][:] == [row["weights"][-6:] for row in data]


def test_rows_of_weight_zero_stay_and_count(tmp_path: Any) -> None:
    """They add nothing to the loss; their targets stay in the denominator, as with any other weight."""
    data = weighted((6, 5))
    data[1]["weights"] = [0.0] * 5
    trainer, _ = runs.train(runs.model(), data, runs.config(tmp_path))
    assert len(trainer.train_dataset) == 2
    assert runs.logged(trainer)[0] == pytest.approx(truth(data), rel=1e-5)


@pytest.mark.parametrize("weights", [1.0, [1.0, 2.0], [1.0, 2.0, float("nan")], ["a", "b", "c"]])
def test_wrong_weights_are_named(weights: Any, tmp_path: Any) -> None:
    data = [{"input_ids": [4, 5, 6], "weights": weights}]
    with pytest.raises(ValueError, match="'weights' of the train data set must hold one finite number for each"):
        runs.trainer(runs.model(), data, runs.config(tmp_path))


def test_weights_of_rows_of_one_length(tmp_path: Any) -> None:
    """Arrow's lists of a fixed size."""
    data = weighted((6, 6, 6))
    features = Features(
        {
            "input_ids": Sequence(Value("int64"), length=6),
            "labels": Sequence(Value("int64"), length=6),
            "weights": Sequence(Value("float32"), length=6),
        }
    )
    fixed = Dataset.from_list(data, features=features)
    for layout in ({}, dict(packing=True, max_length=13)):
        trainer, _ = runs.train(runs.model(), fixed, runs.config(tmp_path, **layout))
        assert runs.logged(trainer)[0] == pytest.approx(truth(data), rel=1e-5)
    with pytest.warns(UserWarning, match="3 of 3 train rows"):
        trainer, _ = runs.train(runs.model(), fixed, runs.config(tmp_path, max_length=4))
    assert runs.logged(trainer)[0] == pytest.approx(truth([{n: v[:4] for n, v in r.items()} for r in data]), rel=1e-5)


@pytest.mark.parametrize("padding_free", [True, False])
def test_weights_of_another_length_are_named_without_preparation_too(padding_free: bool, tmp_path: Any) -> None:
    data = [{**row, "weights": row["weights"][:-1]} for row in weighted((5, 4))]
    args = runs.config(tmp_path, padding_free=padding_free, dataset_kwargs={"skip_prepare_dataset": True})
    with pytest.raises(ValueError, match=r"weights has \d entries, but input_ids has"):
        runs.train(runs.model(), data, args)


def test_weights_that_the_users_collator_is_not_given_are_spoken_of(tmp_path: Any, capsys: Any) -> None:
    def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        names = [name for name in ("input_ids", "labels", "weights") if name in examples[0]]
        batch = {name: torch.tensor([row[name] for row in examples]) for name in names}
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    data = weighted((6, 6))
    for given, expected in (({}, False), ({"remove_unused_columns": False}, True)):
        trainer, _ = runs.train(runs.model(), data, runs.config(tmp_path, **given), data_collator=padded)
        assert ("the column 'weights' is not used" in capsys.readouterr().out) is not expected
        rows = data if expected else [{**row, "weights": [1.0] * 6} for row in data]
        assert runs.logged(trainer)[0] == pytest.approx(truth(rows), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
@pytest.mark.parametrize("padding_free", [True, False])
def test_weights_and_a_loss_of_the_users_contradict_each_other(padding_free: bool, tmp_path: Any) -> None:
    args = runs.config(tmp_path, padding_free=padding_free)
    with pytest.raises(ValueError, match="remove it"):
        runs.train(runs.model(), weighted(), args, compute_loss_func=lambda outputs, labels, **given: labels.sum())
