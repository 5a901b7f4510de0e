"""SFTTrainer end to end: padding-free, packed, padded and accumulated runs give one loss and one gradient."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import fastlm
from fastlm.training.sft import install

from ..tiny import tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)


def first_batch(trainer: Any) -> dict[str, Any]:
    return next(iter(trainer.get_train_dataloader()))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of TRL's own trainer on an unpatched model, all rows in one padded batch."""
    args = runs.config(tmp_path_factory.mktemp("stock"), bf16=False, per_device_train_batch_size=8)
    trainer, gradients = runs.train(runs.model(patched=False), runs.rows(), args)
    return runs.logged(trainer)[0], gradients[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "padding_free": dict(per_device_train_batch_size=8),
    "padded": dict(per_device_train_batch_size=8, padding_free=False),
    "packed": dict(per_device_train_batch_size=8, packing=True, max_length=24),
    "accumulated": dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
    "packed_accumulated": dict(
        per_device_train_batch_size=1, gradient_accumulation_steps=4, packing=True, max_length=24
    ),
    "checkpointed": dict(per_device_train_batch_size=8, gradient_checkpointing=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_loss_and_one_gradient(layout: str, stock: Any, tmp_path: Any) -> None:
    trainer, gradients = runs.train(runs.model(), runs.rows(), runs.config(tmp_path, **LAYOUTS[layout]))
    if layout.startswith("packed"):
        assert len(trainer.train_dataset) == 4  # 74 tokens in rows of 24
    assert runs.logged(trainer)[0] == pytest.approx(stock[0], rel=1e-5)
    assert runs.worst_error(gradients[0], stock[1]) < 1e-5


@pytest.mark.parametrize("adapters", [None, "all-linear"])
def test_whole_models_and_adapters_that_the_trainer_adds(adapters: str | None, tmp_path: Any) -> None:
    results = []
    for patched in (False, True):
        given = {} if patched else {"bf16": False}
        peft = None if adapters is None else LoraConfig(target_modules=adapters, task_type="CAUSAL_LM")
        model = runs.model(patched=patched, lora=False)
        args = runs.config(tmp_path, per_device_train_batch_size=8, **given)
        trainer, gradients = runs.train(model, runs.rows(), args, peft_config=peft)
        results.append((runs.logged(trainer)[0], gradients[0]))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    moving = {name for name, tensor in results[0][1].items() if float(tensor.norm()) > 0}
    assert len(moving) == (7 * 2 if adapters else 21)  # lora_B, as lora_B = 0 lets nothing through to lora_A
    truth, value = ({name: step[name] for name in moving} for step in (results[0][1], results[1][1]))
    assert runs.worst_error(value, truth) < 1e-5


@pytest.mark.parametrize("loss", [dict(loss_type="dft"), dict(label_smoothing_factor=0.1)])
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_other_losses_equal_trl(loss: dict[str, Any], tmp_path: Any) -> None:
    args = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, **loss)
    truth, expected = runs.train(runs.model(patched=False), runs.rows(), runs.config(tmp_path, bf16=False, **args))
    trainer, gradients = runs.train(runs.model(), runs.rows(), runs.config(tmp_path, **args))
    assert runs.logged(trainer)[0] == pytest.approx(runs.logged(truth)[0], rel=1e-5)
    assert runs.worst_error(gradients[0], expected[0]) < 1e-5


def test_b_unequal_microbatches(tmp_path: Any) -> None:
    """10 and 90 targets in two accumulation steps, or alone as one batch: the mean over 100 targets."""
    data = runs.rows((11, 91), prompt=1)
    assert runs.targets(data) == 100
    one, whole = runs.train(runs.model(), data, runs.config(tmp_path, per_device_train_batch_size=2))
    two, parts = runs.train(
        runs.model(),
        data,
        runs.config(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2),
    )
    alone = []
    for row in data:
        single, _ = runs.train(runs.model(), [row], runs.config(tmp_path, per_device_train_batch_size=1))
        alone.append(runs.logged(single)[0])
    assert runs.logged(two)[0] == pytest.approx(runs.logged(one)[0], rel=1e-5)
    assert runs.logged(two)[0] == pytest.approx(0.1 * alone[0] + 0.9 * alone[1], rel=1e-5)
    assert runs.worst_error(parts[0], whole[0]) < 1e-5


def test_b_denominator_twice(tmp_path: Any) -> None:
    """Eight samples of 16 tokens whose first label is ignored already: 120 targets in every layout."""
    data = runs.rows((16,) * 8, prompt=1)
    losses = []
    for layout in (dict(), dict(padding_free=False), dict(packing=True, max_length=32)):
        args = runs.config(tmp_path, per_device_train_batch_size=8, **layout)
        trainer = runs.trainer(runs.model(), data, args)
        batches, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, args.device)
        assert int(count) == 120
        with torch.no_grad():
            losses.append(float(trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=count)))
        assert trainer._fastlm.pending["train"][0][0, 0].item() == 120
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("tokenised", [False, True])
def test_b_max_length_guard(tokenised: bool, tmp_path: Any) -> None:
    """An untouched configuration: the trainer builds, and the 12-token row is cut to 8 once, labels alike."""
    if tokenised:
        data = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in runs.rows((5, 12), prompt=2)]
    else:
        data = [{"text": "abcd"}, {"text": "abcdefghijk"}]  # and one eos each
    with pytest.warns(UserWarning, match="1 of 2 train rows were longer than max_length=8"):
        trainer = runs.trainer(runs.model(), data, trl.SFTConfig(str(tmp_path), max_length=8, report_to="none"))
    assert [len(row) for row in trainer.train_dataset["input_ids"]] == [5, 8]
    assert [len(row) for row in trainer.train_dataset["labels"]] == [5, 8]
    if tokenised:
        assert trainer.train_dataset["labels"][1] == data[1]["labels"][:8]
    boundaries = first_batch(trainer)["boundaries"]
    assert sorted(boundaries.lengths) == [5, 8]


def test_a_bounds_column_dropped(tmp_path: Any) -> None:
    """Two samples in one packed row, unused columns pruned: boundaries arrive, logits as of each alone."""
    model, data = runs.model(), runs.rows((5, 4))
    sft = runs.trainer(model, data, runs.config(tmp_path, packing=True, max_length=9))
    assert len(sft.train_dataset) == 1
    row = sft.train_dataset[0]
    plain = Trainer(
        model=model, args=TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
        data_collator=fastlm.PaddingFreeCollator(), train_dataset=sft.train_dataset,
    )  # fmt: skip
    lengths = row["seq_lengths"]
    for trainer in (sft, plain):
        batch = first_batch(trainer)
        assert batch["boundaries"].cu_seqlens.tolist() == [0, lengths[0], 9]
        assert batch["position_ids"].tolist() == [[*range(lengths[0]), *range(lengths[1])]]
        second = torch.tensor([row["input_ids"][lengths[0] :]])
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, lengths[0] :]
            expected = model(input_ids=second).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_plain_trainer_trains_packed_rows(stock: Any, tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    packed = fastlm.packing.pack_dataset(data, 24)
    recorder = runs.Recorder()
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, **runs.quiet())
    trainer = Trainer(
        model=runs.model(), args=args, train_dataset=packed, data_collator=fastlm.PaddingFreeCollator(),
        callbacks=[recorder],
    )  # fmt: skip
    trainer.train()
    assert runs.logged(trainer)[0] == pytest.approx(stock[0], rel=1e-5)
    assert runs.worst_error(recorder.gradients[0], stock[1]) < 1e-5


def test_plain_trainer_streams_without_cutting_boundaries(tmp_path: Any) -> None:
    stream = Dataset.from_list(runs.rows()).to_iterable_dataset()
    trainer = Trainer(
        model=runs.model(), args=TrainingArguments(str(tmp_path), use_cpu=True, **runs.quiet()),
        train_dataset=stream, data_collator=fastlm.PaddingFreeCollator(),
    )  # fmt: skip
    assert first_batch(trainer)["boundaries"].lengths == runs.LENGTHS


def test_a_requeued_tail(tmp_path: Any) -> None:
    """Overlong samples lose their tail; no fragment of one starts a packed sample."""
    data = runs.rows((13, 11), prompt=4)
    with pytest.warns(UserWarning, match="2 of 2 train rows were longer than max_length=10 and were cut"):
        trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, packing=True, max_length=10))
    assert trainer.train_dataset["seq_lengths"][:] == [[10], [10]]
    assert sorted(trainer.train_dataset["input_ids"]) == sorted(row["input_ids"][:10] for row in data)
    split = runs.trainer(
        runs.model(), data, runs.config(tmp_path, packing=True, max_length=10, packing_strategy="bfd_split")
    )
    assert sum(map(len, split.train_dataset["input_ids"])) == 24  # only when asked for


def test_evaluation_with_metrics_is_padded_and_training_is_not(tmp_path: Any, capsys: Any) -> None:
    data = Dataset.from_list(runs.rows())
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        hit = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"hits": float(hit[prediction.label_ids[:, 1:] != -100].mean())}

    def evaluate(patched: bool, **given: Any) -> dict[str, float]:
        model = runs.model(patched=patched)
        args = runs.config(tmp_path, per_device_eval_batch_size=4, **given)
        trainer = runs.trainer(model, data, args, eval_dataset=data, compute_metrics=metrics)
        if patched:
            assert "boundaries" in first_batch(trainer)
        result = trainer.evaluate()
        assert ("boundaries" in next(iter(trainer.get_eval_dataloader()))) is False
        predicted = trainer.predict(trainer.eval_dataset).predictions
        return {**result, "predicted": float(abs(predicted).sum())}

    expected = evaluate(False, bf16=False)
    expected["eval_loss"] = one_batch_loss(data, tmp_path)
    capsys.readouterr()
    result = evaluate(True)
    assert capsys.readouterr().out.count("evaluation is padded") == 1
    assert seen[0] == seen[-1]
    for name in ("eval_loss", "eval_hits", "eval_entropy", "eval_mean_token_accuracy", "predicted"):
        assert result[name] == pytest.approx(expected[name], rel=1e-5)


def one_batch_loss(data: Dataset, out: Any) -> float:
    """TRL's own evaluation loss where it is the mean over all targets: everything in one batch."""
    args = runs.config(out, per_device_eval_batch_size=len(data), bf16=False)
    return runs.trainer(runs.model(patched=False), data, args, eval_dataset=data).evaluate()["eval_loss"]


def test_evaluation_without_metrics_equals_trl(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    results = []
    for patched in (False, True):
        args = runs.config(tmp_path, per_device_eval_batch_size=3, **({} if patched else {"bf16": False}))
        results.append(runs.trainer(runs.model(patched=patched), data, args, eval_dataset=data).evaluate())
    results[0]["eval_loss"] = one_batch_loss(data, tmp_path)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5), name


def test_padding_free_is_off_with_a_line_where_it_must_be(tmp_path: Any, capsys: Any) -> None:
    collator = transformers.DataCollatorForSeq2Seq(tiny_tokenizer())
    prompted = get_peft_model(runs.model(lora=False), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3))
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        (runs.model(), {}, {"data_collator": collator}, "padding-free is off: the data collator is your own"),
        (runs.model(), {"neftune_noise_alpha": 5.0}, {}, "padding-free is off: NEFTune"),
        (runs.model(), {"padding_free": False}, {}, "padding-free off; train: 8 rows"),
        (prompted, {}, {}, "padding-free is off: prompt learning"),
    ]
    for model, given, keywords, line in cases:
        trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path, **given), **keywords)
        assert capsys.readouterr().out.count(line) == 1
        assert "attention_mask" in first_batch(trainer) and trainer.args.padding_free is False
    with pytest.raises(ValueError, match="packing=True cannot be honoured: the data collator is your own"):
        runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, packing=True), data_collator=collator)


def test_unknown_layers_turn_padding_free_off_and_refuse_packing(
    tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs.model()
    monkeypatch.setattr("fastlm.training.sft.padding_free_obstacle", lambda model, length: "layer 0 is unknown")
    trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path))
    assert "padding-free is off: layer 0 is unknown" in capsys.readouterr().out
    assert "attention_mask" in first_batch(trainer)
    with pytest.raises(ValueError, match="packing=True cannot be honoured: layer 0 is unknown"):
        runs.trainer(model, runs.rows(), runs.config(tmp_path, packing=True))
    with pytest.raises(ValueError, match="padding_free=True cannot be honoured"):
        runs.trainer(model, runs.rows(), runs.config(tmp_path, padding_free=True))


def test_max_length_precedence(tmp_path: Any, capsys: Any) -> None:
    model = runs.model()
    assert runs.trainer(model, runs.rows(), runs.config(tmp_path)).args.max_length == 1024
    model.get_base_model().max_seq_length = 16
    capsys.readouterr()
    with pytest.warns(UserWarning, match="longer than max_length=16"):
        trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path))
    assert capsys.readouterr().out.count("max_length is 16, the model's max_seq_length") == 1
    assert trainer.args.max_length == 16 and max(map(len, trainer.train_dataset["input_ids"])) == 16
    assert runs.trainer(model, runs.rows(), runs.config(tmp_path, max_length=1024)).args.max_length == 1024
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"max_length is {wrong}"):
            runs.trainer(model, runs.rows(), runs.config(tmp_path, max_length=wrong))


def test_checkpointing_precedence(tmp_path: Any) -> None:
    """An explicit value, then the model's own, then TRL's default; off is off."""
    for own, given, expected in (
        (None, {}, True), (False, {}, False), ("fastlm", {}, True), ("unsloth", {}, True), (True, {}, True),
        ("fastlm", {"gradient_checkpointing": False}, False), (False, {"gradient_checkpointing": True}, True),
    ):  # fmt: skip
        model = runs.model()
        core = model.get_base_model()
        if own is not None:
            core._fastlm_checkpointing = own
        core.gradient_checkpointing_enable()
        trainer, _ = runs.train(model, runs.rows(), runs.config(tmp_path, **given))
        assert trainer.args.gradient_checkpointing is expected
        assert any(getattr(module, "gradient_checkpointing", False) for module in core.modules()) is expected


def test_g_frozen_input_no_grad(tmp_path: Any) -> None:
    """LoRA on attention over frozen embeddings: gradients as without checkpointing, wherever it is set."""
    gradients = []
    for own, given in (
        (False, {"gradient_checkpointing": False}), ("fastlm", {}), (None, {"gradient_checkpointing": True}),
        (None, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ):  # fmt: skip
        model = runs.model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and "self_attn" in name)
        if own is not None:
            model.get_base_model()._fastlm_checkpointing = own
        _, steps = runs.train(model, runs.rows(), runs.config(tmp_path, **given))
        gradients.append(steps[0])
    assert min(float(tensor.norm()) for tensor in gradients[0].values()) > 0
    for other in gradients[1:]:
        assert runs.worst_error(other, gradients[0]) < 1e-6


def test_the_users_configuration_is_left_alone(tmp_path: Any) -> None:
    args = runs.config(tmp_path)
    before = args.to_dict()
    trainer = runs.trainer(runs.model(), runs.rows(), args)
    assert args.to_dict() == before
    assert trainer.args is not args and trainer.args.padding_free is True
    assert trainer.args.logging_nan_inf_filter is False
    for survivor in (pickle.loads(pickle.dumps(args)), replace(args), trainer.args):
        assert "fastlm" not in json.dumps(survivor.to_dict()) + repr(survivor)
    kept = runs.config(tmp_path, logging_nan_inf_filter=True)
    assert runs.trainer(runs.model(), runs.rows(), kept).args.logging_nan_inf_filter is True


def test_install_twice_wraps_once_and_early_imports_are_reached(tmp_path: Any) -> None:
    with runs.not_installed():
        early = trl.SFTTrainer
        untouched = early.__init__
    wrapper = early.__init__
    install()
    assert early.__init__ is wrapper and wrapper.__wrapped__ is untouched

    class Mine(early):  # type: ignore[misc, valid-type]
        pass

    made = Mine(
        model=runs.model(), args=runs.config(tmp_path), processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_list(runs.rows()),
    )  # fmt: skip
    assert "boundaries" in first_batch(made)


def test_streamed_data_is_padding_free(tmp_path: Any) -> None:
    stream = Dataset.from_list(runs.rows()).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    trainer = runs.trainer(runs.model(), stream, runs.config(tmp_path, max_length=10))
    batch = first_batch(trainer)
    assert batch["boundaries"].lengths == tuple(min(n, 10) for n in runs.LENGTHS)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_label_smoothing_falls_back_without_our_head(tmp_path: Any) -> None:
    smoothed = []
    trainer = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, label_smoothing_factor=0.1))
    trainer._fastlm.own_head = False
    theirs = trainer.label_smoother
    trainer.label_smoother = lambda *args, **given: smoothed.append(1) or theirs(*args, **given)
    trainer.train()
    args = runs.config(tmp_path, bf16=False, label_smoothing_factor=0.1)
    stock, _ = runs.train(runs.model(patched=False), runs.rows(), args)
    assert smoothed and runs.logged(trainer)[0] == pytest.approx(runs.logged(stock)[0], rel=1e-5)


def test_unpatch_after_building_the_trainer_is_noticed(tmp_path: Any) -> None:
    trainer = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path))
    batch = first_batch(trainer)
    fastlm.unpatch(trainer.model)
    with pytest.raises(ValueError, match="unpatch was called"):
        trainer.compute_loss(trainer.model, batch)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_a_model_unpatched_since_has_trls_loss_of_padded_batches(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    args = runs.config(tmp_path, padding_free=False, label_smoothing_factor=0.3, bf16=False)
    trainer = runs.trainer(runs.model(), data, args, eval_dataset=data)
    ours = trainer.evaluate()["eval_loss"]
    fastlm.unpatch(trainer.model)
    stock = runs.trainer(runs.model(patched=False), data, args, eval_dataset=data).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(stock, rel=1e-6) == pytest.approx(ours, rel=1e-5)


def test_a_model_that_is_wrapped_for_training_is_still_fastlms(tmp_path: Any) -> None:
    """As FullyShardedDataParallel does: Trainer puts the wrapper into trainer.model."""

    class Wrapped(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    trainer = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path))
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, dict(batch))
    trainer.model = trainer.model_wrapped = Wrapped(trainer.model)
    assert torch.equal(trainer.compute_loss(trainer.model, dict(batch)), expected)
