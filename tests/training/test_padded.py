"""TRL's other trainers and a plain Trainer on padded batches: stock's loss and gradients, from the real tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

import fastlm
from fastlm.models import head
from fastlm.models.checkpointing import policy_of
from fastlm.models.padding import PaddedLayout, call_layout
from fastlm.models.patch import decoder_layers, patched_core
from fastlm.training import memory
from fastlm.training.legacy import given_fields

from ..tiny import add_lora, tiny_config, tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

PAD = 0  # the tokenizer's, which no text contains
PROMPTS = ("ab", "a longer one", "mid size", "x")
ANSWERS = ("yes it is", "no", "perhaps so", "certainly not, I say")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head knows the layouts that the trainers attached, and reads no mask and no labels itself."""

    def attached(model: Any, args: Any, kwargs: Any, labels: Any) -> PaddedLayout | None:
        layout = call_layout(model.base_model, args, kwargs)
        assert layout is None or layout.missed(labels) == 0
        return layout

    monkeypatch.setattr(head, "_padded_layout", attached)


class Seen:
    """The shape of the ids of each call that embedded any, and how many of them were real."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.real: list[int] = []
        model.get_input_embeddings().register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.shapes.append(tuple(args[0].shape))
        self.real.append(int((args[0] != PAD).sum()))


def quiet(**given: Any) -> dict[str, Any]:
    return {**runs.quiet(), "bf16": False, "per_device_train_batch_size": 4, "seed": 3, **given}


def step(trainer_class: Any, args: Any, model: Any, data: Any, **given: Any) -> tuple[Any, list[dict[str, Any]], Seen]:
    """(trainer, gradients of every step, shapes) of a training run."""
    recorder, seen = runs.Recorder(), Seen(model)
    callbacks = [recorder, *given.pop("also", [])]
    trainer = trainer_class(
        model=model, args=args, train_dataset=data, processing_class=tiny_tokenizer(), callbacks=callbacks, **given
    )
    trainer.train()
    return trainer, recorder.gradients, seen


def assert_equal(stock: Any, ours: Any) -> None:
    """Loss and every gradient of every step are stock's, and no call embedded a padding token."""
    (stock_trainer, truth, stock_seen), (trainer, gradients, seen) = stock, ours
    # terms of GRPO's loss are about 1 and cancel
    assert runs.logged(trainer) == pytest.approx(runs.logged(stock_trainer), rel=1e-5, abs=1e-6)
    assert len(truth) == len(gradients) == trainer.args.max_steps
    for expected, found in zip(truth, gradients, strict=True):
        assert runs.worst_error(found, expected) < 1e-5
        assert len(expected) > 20 and max(g.abs().max() for g in expected.values()) > 1e-4
    assert len(seen.real) == len(stock_seen.real)
    assert sum(stock_seen.real) < sum(rows * width for rows, width in stock_seen.shapes)
    assert seen.shapes == [(1, real) for real in stock_seen.real]


def preferences() -> Dataset:
    rows = zip(PROMPTS, ANSWERS, reversed(ANSWERS), strict=True)
    return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows])


def both(
    trainer_class: Any, config: Any, data: Any, family: str = "llama", *, adapter: str = "given", generate: Any = None,
    **given: Any,
) -> list[Any]:  # fmt: skip
    """The run of the stock model, and of the patched one.

    TRL takes a copy of an adapter that it is given as the reference, and disables one that it has added.
    """
    results = []
    for patched in (False, True):
        model = runs.model(family, patched=patched, lora=adapter == "given")
        if adapter == "added":
            torch.manual_seed(1)  # A and B are drawn in the trainer
            given["peft_config"] = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        if generate is not None:
            model.generate = generate
        results.append(step(trainer_class, config(), model, data, **given))
    return results


def assert_logged_equal(results: list[Any], *names: str) -> None:
    for name in names:
        stock, ours = (runs.logged(trainer, name)[0] for trainer, *_ in results)
        assert ours == pytest.approx(stock, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("family", "adapter", "options"),
    [
        ("llama", "given", {}),
        ("llama", "added", {"loss_type": "ipo"}),
        ("llama", "added", {"use_weighting": True}),
        ("gemma2", "given", {}),
    ],
)
def test_dpo(family: str, adapter: str, options: dict[str, Any], tmp_path: Any) -> None:
    """Weighting and a softcap need statistics of the logits that TRL's head has and ours has not."""
    config = lambda: trl.DPOConfig(str(tmp_path), **quiet(**options))  # noqa: E731
    results = both(trl.DPOTrainer, config, preferences(), family, adapter=adapter)
    assert_equal(*results)
    assert_logged_equal(results, "logits/chosen", "logits/rejected", "logps/rejected", "entropy", "mean_token_accuracy")


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, tmp_path: Any) -> None:
    """The mask of the KL completions is another one, in the same batch."""
    rows = zip(PROMPTS, ANSWERS, (True, False, True, False), strict=True)
    data = Dataset.from_list([{"prompt": p, "completion": c, "label": label} for p, c, label in rows])
    results = both(trl.KTOTrainer, lambda: trl.KTOConfig(str(tmp_path), **quiet(loss_type=loss_type)), data)
    assert_equal(*results)
    assert_logged_equal(results, "logits/chosen", "logps/rejected", "kl" if loss_type == "kto" else "entropy")


def reward_model(patched: bool) -> Any:
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1), dtype=torch.float32)
    model = add_lora(model, task_type="SEQ_CLS")
    if patched:
        fastlm.patch(model)
    return model


def test_reward(tmp_path: Any) -> None:
    data = preferences().remove_columns("prompt")
    results = [
        step(trl.RewardTrainer, trl.RewardConfig(str(tmp_path), **quiet()), reward_model(patched), data)
        for patched in (False, True)
    ]
    assert_equal(*results)
    assert_logged_equal(results, "mean_reward", "margin")


COMPLETIONS = ([5, 6, 7, 2], [9, 2], [10, 11, 12, 13, 14, 2], [16, 17, 2], [18, 19, 20, 2], [21, 2], [22, 23, 2], [2])


def generate(input_ids: Any, **kwargs: Any) -> Any:
    made = torch.tensor([c + [PAD] * (6 - len(c)) for c in COMPLETIONS[: len(input_ids)]])
    return torch.cat([input_ids, made.to(input_ids.device)], dim=1)


def rollouts(trainer_class: Any, config: Any, **given: Any) -> list[Any]:
    """Two steps on one rollout of eight recorded completions, whose rows are shuffled and split between the steps."""
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    return both(trainer_class, config, data, generate=generate, **given)


def even_more_than_odd(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [float(sum(1 - 2 * (token % 2) for token in ids)) for ids in completion_ids]


def rollout_options(**given: Any) -> dict[str, Any]:
    return quiet(
        max_steps=2, optim="sgd", num_generations=2, max_completion_length=8, temperature=0.7, beta=0.1, **given
    )


@pytest.mark.parametrize(
    ("adapter", "options"),
    [("given", {}), ("added", {"loss_type": "grpo", "top_entropy_quantile": 0.5}), ("added", {"entropy_coef": 0.05})],
)
def test_grpo(adapter: str, options: dict[str, Any], tmp_path: Any) -> None:
    """Also with an entropy bonus, whose gradient TRL's head has and ours has not."""
    config = lambda: trl.GRPOConfig(str(tmp_path), **rollout_options(steps_per_generation=2, **options))  # noqa: E731
    results = rollouts(trl.GRPOTrainer, config, reward_funcs=even_more_than_odd, adapter=adapter)
    assert_equal(*results)
    assert_logged_equal(results, "kl", "entropy", "reward")
    assert adapter == "given" or runs.logged(results[0][0], "kl")[0] > 1e-3


def test_grpo_without_truncated_completions(tmp_path: Any) -> None:
    """Their mask ends with the prompt."""

    def cut(input_ids: Any, **kwargs: Any) -> Any:
        return generate(input_ids).where(torch.arange(len(input_ids), device=input_ids.device)[:, None] != 2, 7)

    config = lambda: trl.GRPOConfig(str(tmp_path), **rollout_options(mask_truncated_completions=True))  # noqa: E731
    (stock, truth, stock_seen), (trainer, gradients, seen) = both(
        trl.GRPOTrainer, config, Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        generate=cut, reward_funcs=even_more_than_odd,
    )  # fmt: skip
    assert runs.logged(trainer) == pytest.approx(runs.logged(stock), rel=1e-5, abs=1e-6)
    assert all(runs.worst_error(ours, theirs) < 1e-5 for ours, theirs in zip(gradients, truth, strict=True))
    assert {rows for rows, _ in seen.shapes} == {1} and sum(width for _, width in seen.shapes) < sum(stock_seen.real)


def test_rloo(tmp_path: Any) -> None:
    config = lambda: trl.RLOOConfig(str(tmp_path), **rollout_options(steps_per_generation=2))  # noqa: E731
    results = rollouts(trl.RLOOTrainer, config, reward_funcs=even_more_than_odd)
    assert_equal(*results)
    assert_logged_equal(results, "kl", "entropy", "reward")


def test_distillation(tmp_path: Any) -> None:
    """It calls the backbones itself; the teacher is a stock model."""
    results = rollouts(
        trl.DistillationTrainer,
        lambda: trl.DistillationConfig(
            str(tmp_path), **quiet(max_steps=2, optim="sgd", max_completion_length=8, gradient_accumulation_steps=1)
        ),
        teacher_model=runs.model(patched=False, lora=False, seed=7),
    )
    assert_equal(*results)
    assert_logged_equal(results, "entropy")


def plain(collator: Any, data: Any, tmp_path: Any, **options: Any) -> list[Any]:
    args = lambda: TrainingArguments(str(tmp_path), **quiet(**options))  # noqa: E731
    return both(Trainer, args, data, data_collator=collator)


def padding_collator(side: str = "right") -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    return transformers.DataCollatorForSeq2Seq(tokenizer)


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_plain_trainer(side: str, options: dict[str, Any], tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows((5, 12, 3, 9)))
    assert_equal(*plain(padding_collator(side), data, tmp_path, **options))


def test_plain_trainer_evaluates_on_padded_rows(tmp_path: Any) -> None:
    """Its logits may be read anywhere, at padding too."""
    data = Dataset.from_list(runs.rows((5, 12, 3, 9)))
    results = []
    for patched in (False, True):
        args = TrainingArguments(str(tmp_path), **quiet(per_device_eval_batch_size=4))
        trainer = Trainer(runs.model(patched=patched), args, padding_collator(), eval_dataset=data)
        seen = Seen(trainer.model)
        results.append((trainer.predict(data), seen.shapes))
    (truth, _), (found, shapes) = results
    assert found.metrics["test_loss"] == pytest.approx(truth.metrics["test_loss"], rel=1e-5)
    assert shapes == [(4, 12)]
    assert abs(found.predictions - truth.predictions).max() < 1e-4


class ReadsPadding(Trainer):
    """A loss of the user's own, without labels in the call."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        inputs.pop("labels")
        return model(**inputs).logits.square().mean()


@pytest.mark.parametrize("trainer_class", [Trainer, ReadsPadding])
def test_a_loss_of_the_users_may_read_padding(trainer_class: Any, tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows((5, 12, 3, 9)))
    given = {} if trainer_class is ReadsPadding else {
        "compute_loss_func": lambda outputs, labels, **kwargs: outputs.logits.square().mean()
    }  # fmt: skip
    (stock, truth, _), (trainer, gradients, seen) = both(
        trainer_class, lambda: TrainingArguments(str(tmp_path), **quiet()), data,
        data_collator=padding_collator(), **given,
    )  # fmt: skip
    assert runs.logged(trainer) == pytest.approx(runs.logged(stock), rel=1e-5)
    assert runs.worst_error(gradients[0], truth[0]) < 1e-5 and seen.shapes == [(4, 12)]


@pytest.mark.parametrize("head_class", [AutoModelForCausalLM, AutoModelForTokenClassification])
def test_predictions_of_a_head_that_is_not_ours_are_stocks_at_padding_too(head_class: Any, tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows((5, 12, 3, 9)))
    found = []
    for patched in (False, True):
        torch.manual_seed(5)
        model = head_class.from_config(tiny_config("llama", num_labels=300), dtype=torch.float32)
        model = add_lora(model, target_modules=["q_proj", "lm_head"], task_type=None)
        if patched:
            assert "head" not in fastlm.patch(model).fused
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **quiet()), padding_collator())
        found.append(trainer.predict(data).predictions)
    assert abs(found[0]).max() > 0.1 and abs(found[1] - found[0]).max() < 1e-4


def test_streamed_data(tmp_path: Any) -> None:
    """accelerate joins the batches of a stream by its tensors alone, unless it is told not to."""
    data = Dataset.from_list(runs.rows((5, 12, 3, 9))).to_iterable_dataset()
    assert_equal(*plain(padding_collator(), data, tmp_path))


class LabelledPadding:
    """Labels copied from the padded ids, as some notebooks do: stock trains on padding too."""

    def __call__(self, examples: Any) -> Any:
        batch = padding_collator()(examples)
        return {**batch, "labels": batch["input_ids"].clone()}


def test_targets_at_padding_stay_padded(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows((5, 12, 3, 9)))
    (stock, truth, stock_seen), (trainer, gradients, seen) = plain(LabelledPadding(), data, tmp_path)
    assert seen.shapes == stock_seen.shapes == [(4, 12)]
    assert runs.logged(trainer) == pytest.approx(runs.logged(stock), rel=1e-5)
    assert runs.worst_error(gradients[0], truth[0]) < 1e-5


def test_the_users_collator_stays_the_trainers(tmp_path: Any) -> None:
    collator = padding_collator()
    trainer = Trainer(
        runs.model(), TrainingArguments(str(tmp_path), **quiet()), collator, Dataset.from_list(runs.rows())
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.data_collator is collator
    assert set(batch) == {"input_ids", "attention_mask", "labels", "attention_mask_layout"}
    assert trainer.model(**batch).loss.isfinite()  # a loop of the user's own
    prepared = trainer._prepare_inputs(batch)
    assert set(prepared) == {"input_ids", "attention_mask", "labels"}


def test_other_models_get_the_batch_as_it_was(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    trainer = Trainer(runs.model(patched=False), TrainingArguments(str(tmp_path), **quiet()), padding_collator(), data)
    assert set(next(iter(trainer.get_train_dataloader()))) == {"input_ids", "attention_mask", "labels"}


class Policies(TrainerCallback):
    """Of the layers, in a step."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        core = patched_core(kwargs["model"])
        self.seen = [policy_of(layer, core._fastlm_model.offload.on) for layer in decoder_layers(core)]


R, K = ["recompute"] * 2, ["keep"] * 2
OURS = " (keeping what fits is SFTTrainer's)"


@pytest.mark.parametrize("trainer_class", [Trainer, trl.DPOTrainer])
@pytest.mark.parametrize(("setting", "given", "expected", "said"), [
    ("recompute", {}, R, "recomputed: use_gradient_checkpointing='recompute'"),
    ("offload", {}, ["offload"] * 2, "recomputed from inputs in host memory: use_gradient_checkpointing='offload'"),
    ("fastlm", {}, R, f"recomputed: use_gradient_checkpointing='fastlm'{OURS}"),
    (True, {}, R, f"recomputed: use_gradient_checkpointing=True{OURS}"),
    (False, {}, K, "kept: use_gradient_checkpointing=False"),
    ("offload", {"gradient_checkpointing": True}, ["offload"] * 2,
     "recomputed from inputs in host memory: gradient_checkpointing=True"),
    ("offload", {"gradient_checkpointing": False}, K, "kept: gradient_checkpointing=False"),
    (False, {"gradient_checkpointing": True}, R, f"recomputed: gradient_checkpointing=True{OURS}"),
])  # fmt: skip
def test_every_trainer_recomputes_as_the_model_was_loaded(
    tmp_path, capsys, trainer_class, setting, given, expected, said
):
    """The same bits as with all kept; and the user's own arguments stay as they are."""
    plain = trainer_class is Trainer
    ids = [{"input_ids": list(range(5, 14)), "labels": list(range(5, 14))} for _ in range(4)]
    data = ids if plain else preferences()
    results = []
    for own, options in ((setting, given), (False, {"gradient_checkpointing": False})):
        model = runs.model("llama")
        core = patched_core(model)
        core._fastlm_checkpointing = own
        if own is False:
            getattr(core, "activation_checkpointing_enable", core.gradient_checkpointing_enable)()  # an earlier trainer
        args = (TrainingArguments if plain else trl.DPOConfig)(str(tmp_path), use_cpu=True, **quiet(**options))
        before, policies = args.to_dict(), Policies()
        capsys.readouterr()
        _, gradients, _ = step(trainer_class, args, model, data, also=[policies])
        assert args.to_dict() == before
        results.append((gradients, policies.seen, capsys.readouterr().out))
    (gradients, seen, out), (kept, all_kept, _) = results
    assert seen == expected and all_kept == K
    assert out.count("fastlm: activations are ") == 1 and f"fastlm: activations are {said}\n" in out
    assert len(gradients) == len(kept) == 1 and gradients[0].keys() == kept[0].keys() and gradients[0]
    assert all(torch.equal(gradients[0][name], kept[0][name]) for name in kept[0])


def test_a_model_without_a_setting_follows_the_arguments(tmp_path, capsys):
    ids = [{"input_ids": list(range(5, 14)), "labels": list(range(5, 14))} for _ in range(4)]
    for given, expected in ((True, R), (False, K)):
        args = TrainingArguments(str(tmp_path), use_cpu=True, **quiet(gradient_checkpointing=given))
        step(Trainer, args, runs.model("llama"), ids, also=[policies := Policies()])
        assert policies.seen == expected
    assert "activations are" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "environment", "recomputes"),
    [
        (True, {"ACCELERATE_USE_FSDP": "true"}, True),
        (None, {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, True),  # accelerate launch
        (True, {}, False),  # FSDP is not on
        ("false", {"ACCELERATE_USE_FSDP": "true"}, False),
        (None, {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false"}, False),
    ],
)
def test_where_fsdp_recomputes_nobody_else_does(asked, environment, recomputes, tmp_path, monkeypatch):
    args = TrainingArguments(str(tmp_path), use_cpu=True, **quiet())
    args.fsdp_config = {} if asked is None else {"activation_checkpointing": asked}
    for name in ("ACCELERATE_USE_FSDP", "FSDP_ACTIVATION_CHECKPOINTING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    core = patched_core(runs.model("llama"))
    core._fastlm_checkpointing = "recompute"
    args.gradient_checkpointing = False
    memory.settle_checkpointing(args, core, frozenset())
    assert args.gradient_checkpointing is not recomputes


def test_liger_is_left_out_of_every_trainer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_liger_kernel_available", lambda: True, raising=False)
    args = TrainingArguments(str(tmp_path), use_cpu=True, **quiet())
    args.use_liger_kernel = True
    trainer = Trainer(runs.model("llama"), args)
    assert not trainer.args.use_liger_kernel and args.use_liger_kernel
    assert "use_liger_kernel is ignored" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation"])
def test_an_explicit_value_that_is_the_default_is_known(tmp_path, name):
    config = getattr(trl, f"{name}Config")
    for given in ({}, {"gradient_checkpointing": True}):
        found = given_fields(config(str(tmp_path), bf16=False, **given))
        assert ("gradient_checkpointing" in found) == bool(given)


def test_torch_is_not_told_of_offloading(tmp_path, monkeypatch):
    """TRL's trainers pass the options on when they have had layers kept for a while."""
    args = trl.DPOConfig(str(tmp_path), bf16=False)
    monkeypatch.setattr(type(args), "device", torch.device("cuda", 0))
    core = patched_core(runs.model("llama"))
    core._fastlm_checkpointing = "offload"
    memory.settle_checkpointing(args, core, frozenset())
    assert args.gradient_checkpointing and not args.gradient_checkpointing_kwargs
