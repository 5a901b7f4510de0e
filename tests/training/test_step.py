"""Metrics stay on the device until something is logged, and are then TRL's numbers."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import fastlm
from fastlm.kernels import linear_cross_entropy
from fastlm.training import step

from ..tiny import tiny_model
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens")


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_metrics_equal_trl_on_the_same_padded_batches(logging_steps: int, tmp_path: Any) -> None:
    data = runs.rows(prompt=2)
    data[5]["labels"] = [-100] * len(data[5]["labels"])  # TRL keeps the row: an empty batch where it comes alone
    data = Dataset.from_list(data)
    histories = []
    for patched in (False, True):
        args = runs.config(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
            padding_free=False, logging_steps=logging_steps, eval_strategy="steps", eval_steps=2, bf16=False,
            learning_rate=0.05, dataset_kwargs={"skip_prepare_dataset": True}, per_device_eval_batch_size=1,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer, _ = runs.train(runs.model(patched=patched), data, args, eval_dataset=data)
        histories.append(trainer.state.log_history)
    for expected, entry in zip(*histories, strict=True):
        prefix = "eval_" if "eval_loss" in expected else ""
        for name in METRICS:
            if prefix + name in expected and prefix + name != "eval_loss":  # one mean over targets, of no batches
                assert entry[prefix + name] == pytest.approx(expected[prefix + name], rel=1e-5, abs=1e-7)
        assert entry.keys() == expected.keys() and entry.get("total_flos") == expected.get("total_flos")
    assert sum("entropy" in entry for entry in histories[1]) == 6 // logging_steps
    assert len({entry["mean_token_accuracy"] for entry in histories[1] if "entropy" in entry}) > 1


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("padding_free", [False, True])
def test_a_trained_head_takes_three_products(
    padding_free: bool, loss_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is formed with the loss; logits are made again only where a row's weight is not known before."""
    passes = []
    rows = linear_cross_entropy._linear_cross_entropy_rows
    monkeypatch.setattr(
        linear_cross_entropy, "_linear_cross_entropy_rows", lambda *args: passes.append(args[-1]) or rows(*args)
    )
    args = runs.config(
        tmp_path, per_device_train_batch_size=4, max_steps=1, loss_type=loss_type, padding_free=padding_free,
        gradient_checkpointing=False,
    )  # fmt: skip
    model = runs.model().requires_grad_()
    runs.train(model, runs.rows(), args)
    assert [wanted.weight for wanted in passes] == ([True] if loss_type == "nll" else [False, True])


def test_weights_and_tokens_that_have_none(tmp_path: Any) -> None:
    """Prompt learning adds tokens to the labels, not to the column."""
    rows = [dict(row, weights=[0.5] * len(row["input_ids"])) for row in runs.rows((9, 5))]
    model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    fastlm.patch(model)
    args = runs.config(tmp_path, per_device_train_batch_size=2, gradient_checkpointing=False)
    with pytest.raises(ValueError, match="prompt learning adds tokens that have none; remove the column"):
        runs.train(model, Dataset.from_list(rows), args)


def test_padding_free_metrics_equal_padded_ones(tmp_path: Any) -> None:
    histories = []
    for layout in ({}, {"padding_free": False}):
        args = runs.config(tmp_path, per_device_train_batch_size=4, max_steps=2, **layout)
        trainer, _ = runs.train(runs.model(), runs.rows(), args)
        histories.append({name: runs.logged(trainer, name) for name in METRICS})
    for name in METRICS:
        assert histories[0][name] == pytest.approx(histories[1][name], rel=1e-5)
    assert histories[0]["num_tokens"][-1] == sum(runs.LENGTHS)


class Synchronising(TorchDispatchMode):
    """Names of the operations that would make the host wait for a GPU."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        indexes = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.waits or indexes:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_no_operation_of_the_loss_waits_for_the_device(tmp_path: Any) -> None:
    """Forward, loss, metrics and backward; TRL's own step waits, and so does ours, at logging."""
    trainer = runs.trainer(runs.model(), runs.rows((9, 5)), runs.config(tmp_path, gradient_checkpointing=False))
    batches, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    trainer.model.train()
    trl_step = type(trainer).compute_loss._fastlm_wraps
    with Synchronising() as mode:
        trl_step(trainer, trainer.model, batches[0], num_items_in_batch=count)
    assert mode.seen.count("_local_scalar_dense") >= 4
    trainer._metrics["train"].clear()
    trainer._total_train_tokens = 0
    with Synchronising() as mode:
        trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=count).backward()
    assert mode.seen == []
    assert isinstance(trainer._fastlm.pending["train"][0], torch.Tensor)
    assert trainer._metrics["train"] == {}
    trainer.log({})
    assert trainer._fastlm.pending["train"] == []
    assert trainer.state.log_history[-1]["num_tokens"] == 14


def test_pending_rows_are_joined(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_MERGE_EVERY", 4)
    args = runs.config(tmp_path, max_steps=9, logging_strategy="no", per_device_train_batch_size=8)
    trainer, _ = runs.train(runs.model(), runs.rows(), args)
    assert len(trainer._fastlm.pending["train"]) < 4
    assert sum(len(part) for part in trainer._fastlm.pending["train"]) in (0, 9)
    args = runs.config(tmp_path, max_steps=9, logging_steps=9, per_device_train_batch_size=8)
    trainer, _ = runs.train(runs.model(), runs.rows(), args)
    assert runs.logged(trainer, "num_tokens") == [9 * sum(runs.LENGTHS)]


def test_flops_are_counted_as_transformers_does(tmp_path: Any) -> None:
    trainer = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path))
    inputs = {"input_ids": torch.zeros(1, 70, dtype=torch.long)}
    expected = 6 * 70 * trainer.model.num_parameters(exclude_embeddings=True)
    assert trainer.floating_point_ops(inputs) == expected == trainer.floating_point_ops(inputs)
    assert trainer.floating_point_ops({}) == 0


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
def test_a_loss_function_of_the_users_sees_logits(tmp_path: Any) -> None:
    seen = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(outputs.logits.shape)
        flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") / num_items_in_batch

    args = dict(per_device_train_batch_size=8)
    expected, truth = runs.train(runs.model(patched=False), runs.rows(), runs.config(tmp_path, bf16=False, **args))
    trainer, gradients = runs.train(runs.model(), runs.rows(), runs.config(tmp_path, **args), compute_loss_func=loss)
    assert seen == [torch.Size([1, sum(runs.LENGTHS), 300])]
    assert runs.logged(trainer)[0] == pytest.approx(runs.logged(expected)[0], rel=1e-5)
    assert runs.worst_error(gradients[0], truth[0]) < 1e-5


def test_a_batch_without_targets_has_a_finite_zero(tmp_path: Any) -> None:
    data = runs.rows((6, 4))
    for row in data:
        row["labels"] = [-100] * len(row["labels"])
    args = runs.config(tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    trainer, gradients = runs.train(runs.model(), data, args)
    assert runs.logged(trainer) == [0.0]
    assert runs.logged(trainer, "entropy") == runs.logged(trainer, "mean_token_accuracy") == [0.0]
    assert gradients[0] and all(float(tensor.abs().max()) == 0.0 for tensor in gradients[0].values())


def test_boundaries_reach_the_model_on_its_device(tmp_path: Any) -> None:
    model = runs.model()
    seen = []
    model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("boundaries")), with_kwargs=True
    )
    runs.train(model, runs.rows(), runs.config(tmp_path, per_device_train_batch_size=8))
    assert len(seen) == 1 and sorted(seen[0].lengths) == sorted(runs.LENGTHS)
    assert seen[0].label_count == runs.targets(runs.rows()) and seen[0].targets.device.type == "cpu"
