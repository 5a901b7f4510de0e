"""An evaluation's loss is one mean over its targets, however it is batched; callbacks and predict see that one."""

import functools
from typing import Any

import pytest
import trl
from datasets import Dataset
from transformers import TrainerCallback

import fastlm

from ..tiny import tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Sum of token losses over the count of targets, each row evaluated alone."""
    total = 0.0
    for row in runs.rows():
        data = Dataset.from_list([row])
        args = runs.config(tmp_path_factory.mktemp("alone"), bf16=False)
        loss = runs.trainer(runs.model(patched=False), data, args, eval_dataset=data).evaluate()["eval_loss"]
        total += loss * runs.targets([row])
    return total / runs.targets(runs.rows())


LAYOUTS: dict[str, dict[str, Any]] = {
    "padding_free": {},
    "padded": dict(padding_free=False),
    "packed": dict(packing=True, max_length=24),
    "packed_training_only": dict(packing=True, eval_packing=False, max_length=24),
}


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_loss_for_every_layout_and_batch_size(layout: str, size: int, expected: float, tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    args = runs.config(tmp_path, per_device_eval_batch_size=size, **LAYOUTS[layout])
    trainer = runs.trainer(runs.model(), data, args, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_metrics_and_streams_have_the_same_loss(expected: float, tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    args = runs.config(tmp_path, per_device_eval_batch_size=3)
    trainer = runs.trainer(runs.model(), data, args, eval_dataset=data, compute_metrics=lambda p: {"my_loss": 7.0})
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(expected, rel=1e-5) and result["eval_my_loss"] == 7.0
    stream = data.to_iterable_dataset()
    streamed = runs.trainer(runs.model(), data, args, eval_dataset=stream)
    assert streamed.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_callbacks_and_the_best_checkpoint_see_it(expected: float, tmp_path: Any) -> None:
    """transformers' mean of the batches' means would be another number here."""
    seen: list[float] = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            seen.append(metrics["eval_loss"])

    data = Dataset.from_list(runs.rows())
    args = runs.config(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.0, max_steps=1,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    trainer = runs.trainer(runs.model(), data, args, eval_dataset=data, callbacks=[Watch()])
    trainer.train()
    assert seen == [trainer.state.best_metric] == runs.logged(trainer, "eval_loss")
    assert seen[0] == pytest.approx(expected, rel=1e-5)
    args = runs.config(tmp_path, bf16=False, per_device_eval_batch_size=1)
    stock = runs.trainer(runs.model(patched=False), data, args, eval_dataset=data).evaluate()["eval_loss"]
    assert abs(stock - expected) > 1e-3


def add_hundred(loss: Any, *args: Any, **given: Any) -> Any:
    found = loss(*args, **given)
    return (found[0] + 100, found[1]) if isinstance(found, tuple) else found + 100


class Mine(trl.SFTTrainer):
    def compute_loss(self, *args: Any, **given: Any) -> Any:
        return add_hundred(super().compute_loss, *args, **given)


@pytest.mark.parametrize("kind", [Mine, trl.SFTTrainer])
def test_a_loss_that_the_user_makes_of_ours_is_what_is_reported(kind: Any, tmp_path: Any) -> None:
    """TRL's mean over the batches: what is added to our loss is not lost."""
    data, results = Dataset.from_list(runs.rows()), []
    for patched in (False, True):
        args = runs.config(tmp_path, per_device_eval_batch_size=3, bf16=False)
        trainer = kind(
            model=runs.model(patched=patched), args=args, train_dataset=data, eval_dataset=data,
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        if kind is trl.SFTTrainer:
            trainer.compute_loss = functools.partial(add_hundred, trainer.compute_loss)
        predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
        results.append((trainer.evaluate()["eval_loss"], predicted))
    assert results[1] == pytest.approx(results[0], rel=1e-6) and results[1][0] > 100


def test_several_data_sets_keep_their_own_losses(tmp_path: Any) -> None:
    short, long = Dataset.from_list(runs.rows((5, 3))), Dataset.from_list(runs.rows((20, 9, 16), seed=1))
    args = runs.config(tmp_path, per_device_eval_batch_size=1)
    trainer = runs.trainer(runs.model(), short, args, eval_dataset={"short": short, "long": long})
    both = trainer.evaluate()
    for name, data in (("short", short), ("long", long)):
        alone = runs.trainer(runs.model(), data, args, eval_dataset=data).evaluate()["eval_loss"]
        assert both[f"eval_{name}_loss"] == alone
