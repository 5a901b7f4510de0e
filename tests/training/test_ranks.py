"""Two ranks compute what one would: loss, gradient and metrics of unequal batches, and one evaluation loss."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.ranks import run_on_two_ranks

from . import runs, test_resume

ON_RANKS = dict(per_device_train_batch_size=1, use_cpu=True, ddp_backend="gloo")


def train(out: str) -> None:
    args = runs.config(out, **ON_RANKS)
    trainer, gradients = runs.train(runs.model(), runs.rows((11, 91)), args)
    torch.save((trainer.state.log_history[0], gradients[0]), f"{out}/rank{args.process_index}.pt")


def test_b_unequal_microbatches_on_two_ranks(tmp_path: Path) -> None:
    """10 and 90 targets, one row a rank: the mean over 100 targets."""
    run_on_two_ranks(train, tmp_path)
    whole, truth = runs.train(runs.model(), runs.rows((11, 91)), runs.config(tmp_path, per_device_train_batch_size=2))
    expected = whole.state.log_history[0]
    for rank in (0, 1):
        log, gradients = torch.load(tmp_path / f"rank{rank}.pt")
        gradients = {name.removeprefix("module."): tensor for name, tensor in gradients.items()}
        assert runs.worst_error(gradients, truth[0]) < 1e-5
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
            assert log[name] == pytest.approx(expected[name], rel=1e-5), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "padding_free": {},
    "padded": dict(padding_free=False),
    "packed": dict(packing=True, max_length=24),
    "metrics": {},
}
UNEVEN = (5, 12, 3, 9, 20)


def evaluate(out: str) -> None:
    """Five rows in batches of two: the second rank's last batch has none of its own, and nothing counts twice."""
    data, results = Dataset.from_list(runs.rows(UNEVEN)), {}
    for name, layout in LAYOUTS.items():
        args = runs.config(out, per_device_eval_batch_size=2, **ON_RANKS, **layout)
        given = {"compute_metrics": lambda p: {"rows": len(p.label_ids)}} if name == "metrics" else {}
        results[name] = runs.trainer(runs.model(), data, args, eval_dataset=data, **given).evaluate()
    for shards in (1, 2):
        args = runs.config(out, per_device_eval_batch_size=2, **ON_RANKS)
        stream = data.to_iterable_dataset(num_shards=shards)
        results[f"stream{shards}"] = runs.trainer(runs.model(), data, args, eval_dataset=stream).evaluate()
    args = runs.config(out, **{**ON_RANKS, "per_device_train_batch_size": 2}, max_steps=2)
    trained, _ = runs.train(runs.model(), runs.rows((7,) * 5), args)
    results["trained"] = runs.logged(trained, "num_tokens")
    torch.save(results, f"{out}/rank{args.process_index}.pt")


def test_one_evaluation_loss_on_two_ranks(tmp_path: Path) -> None:
    run_on_two_ranks(evaluate, tmp_path)
    data = Dataset.from_list(runs.rows(UNEVEN))
    args = runs.config(tmp_path, per_device_eval_batch_size=5)
    expected = runs.trainer(runs.model(), data, args, eval_dataset=data).evaluate()
    for rank in (0, 1):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        # accelerate repeats rows to fill the last batches of both ranks; they are trained on, and so they count
        assert results.pop("trained") == [4 * 7, 8 * 7]
        for name, result in results.items():
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5), name
        assert results["metrics"]["eval_rows"] == 5


RESUMED: dict[str, dict[str, Any]] = {
    "padding_free": {},
    "accumulated": dict(gradient_accumulation_steps=2, max_steps=4),
    "stream": dict(streamed=True),
}


def stop_and_go_on(out: str) -> None:
    """Straight through, and stopped and resumed in the second epoch, each rank for itself."""
    # transformers 5.17 loads the optimiser's state to "cpu:0", which torch does not know
    torch.serialization.register_package(
        30, lambda storage: None, lambda storage, place: storage if place == "cpu:0" else None
    )
    results = {}
    for name, facts in RESUMED.items():
        given = {**ON_RANKS, "max_steps": 7, "save_strategy": "steps", "save_steps": 1, "seed": 5, **facts}
        streamed = given.pop("streamed", False)
        logs, weights = [], []
        for folder, stop, again in (("straight", None, None), ("stopped", given["max_steps"] - 1, None),
                                    ("stopped", None, True)):  # fmt: skip
            args = runs.config(f"{out}/{name}/{folder}", **given)
            data = Dataset.from_list(runs.rows())
            data = data.to_iterable_dataset(num_shards=2) if streamed else data
            trainer = runs.trainer(test_resume.model(), data, args, callbacks=[test_resume.Stop(stop)])
            trainer.train(resume_from_checkpoint=again)
            logs.append(
                [(entry["loss"], entry["num_tokens"]) for entry in trainer.state.log_history if "loss" in entry]
            )
            weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
        assert logs[0] == logs[2] != logs[1]
        results[name] = all(torch.equal(weights[0][n], weights[2][n]) for n in weights[0])
    torch.save(results, f"{out}/rank{args.process_index}.pt")


def test_two_ranks_resume_as_one_run(tmp_path: Path) -> None:
    run_on_two_ranks(stop_and_go_on, tmp_path)
    for rank in (0, 1):
        assert torch.load(tmp_path / f"rank{rank}.pt") == dict.fromkeys(RESUMED, True)
    kept = tmp_path / "accumulated" / "stopped" / "checkpoint-3"
    assert {"rng_state_0.pth", "rng_state_1.pth", "fastlm_state.json"} <= set(os.listdir(kept))
    assert not (kept.parent / "_checkpoint.partial").exists()
