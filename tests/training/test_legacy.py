"""Scripts written for older transformers and TRL, and models that are not fastlm's."""

import copy
import math
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import fastlm
from fastlm.training import legacy

from ..tiny import tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

TEXTS = Dataset.from_dict({"body": ["one two", "three", "four five six"], "other": [1, 2, 3]})


def same(left: SFTConfig, right: SFTConfig) -> None:
    a, b = left.to_dict(), right.to_dict()
    assert {name: a[name] for name in a if a[name] != b[name]} == {}


def test_i_renamed_args(tmp_path: Any) -> None:
    """The old call, its names on the trainer and plain training arguments, builds what the new one builds."""
    common = dict(report_to="none", use_cpu=True, learning_rate=2e-4, seed=7, save_strategy="no")
    with pytest.warns(FutureWarning) as record:
        old = SFTTrainer(
            model=runs.model(), tokenizer=tiny_tokenizer(), train_dataset=TEXTS, max_seq_length=64,
            dataset_text_field="body", dataset_num_proc=1, packing=True, neftune_noise_alpha=None,
            args=TrainingArguments(str(tmp_path), evaluation_strategy="no", warmup_ratio=0.1, **common),
        )  # fmt: skip
    new = SFTTrainer(
        model=runs.model(), processing_class=tiny_tokenizer(), train_dataset=TEXTS,
        args=SFTConfig(
            str(tmp_path), dataset_text_field="body", max_length=64, dataset_num_proc=1, packing=True,
            eval_strategy="no", warmup_steps=0.1, gradient_checkpointing=False, logging_steps=500,
            logging_nan_inf_filter=False, **common,
        ),
    )  # fmt: skip
    same(old.args, new.args)
    assert old.args.get_warmup_steps(100) == 10
    assert old.train_dataset[:] == new.train_dataset[:]
    said = [str(warning.message) for warning in record if "is an old name" in str(warning.message)]
    for name in (
        "SFTTrainer(tokenizer=...)", "SFTTrainer(dataset_text_field=...)", "SFTTrainer(max_seq_length=...)",
        "SFTTrainer(dataset_num_proc=...)", "SFTTrainer(packing=...)", "SFTTrainer(neftune_noise_alpha=...)",
        "TrainingArguments(evaluation_strategy=...)", "TrainingArguments(warmup_ratio=...)",
    ):  # fmt: skip
        assert sum(name in line for line in said) == 1, name
    assert len(said) == 8
    assert all(warning.filename == __file__ for warning in record if "is an old name" in str(warning.message))


CONFIGURATION_NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_seq_length": (64, {"max_length": 64}),
    "evaluation_strategy": ("steps", {"eval_strategy": "steps"}),
    "warmup_ratio": (0.25, {"warmup_steps": 0.25}),
    "group_by_length": (True, {"train_sampling_strategy": "group_by_length"}),
    "no_cuda": (True, {"use_cpu": True}),
    "per_gpu_train_batch_size": (3, {"per_device_train_batch_size": 3}),
    "per_gpu_eval_batch_size": (3, {"per_device_eval_batch_size": 3}),
    "adafactor": (True, {"optim": "adafactor"}),
    "include_inputs_for_metrics": (True, {"include_for_metrics": ["inputs"]}),
    "dispatch_batches": (False, {"accelerator_config": {"dispatch_batches": False}}),
    "split_batches": (True, {"accelerator_config": {"split_batches": True}}),
    "fsdp_min_num_params": (5, {"fsdp_config": {"min_num_params": 5}}),
    "fsdp_transformer_layer_cls_to_wrap": ("X", {"fsdp_config": {"transformer_layer_cls_to_wrap": "X"}}),
    "push_to_hub_model_id": ("m", {"hub_model_id": "m"}),
    "push_to_hub_organization": ("org", {"hub_model_id": "org/out"}),
    "push_to_hub_token": ("t", {"hub_token": "t"}),
    **dict.fromkeys(
        (
            "overwrite_output_dir", "logging_dir", "save_safetensors", "use_mps_device", "use_ipex",
            "half_precision_backend", "fp16_backend", "fp16_opt_level", "jit_mode_eval", "tpu_num_cores",
            "tpu_metrics_debug", "past_index", "use_legacy_prediction_loop", "mp_parameters", "ray_scope",
            "include_tokens_per_second", "dataset_batch_size", "num_of_sequences", "chars_per_token",
            "use_liger",
        ),
        (1, {}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATION_NAMES)
def test_every_old_configuration_name(name: str, tmp_path: Any) -> None:
    value, today = CONFIGURATION_NAMES[name]
    out = str(tmp_path / "out")
    same(SFTConfig(out, **{name: value}), SFTConfig(out, **today))
    call = SFTConfig(out, **{name: value})._fastlm_call
    assert call["old"] == {name: value}
    with pytest.warns(FutureWarning, match=rf"SFTConfig\({name}=...\) is an old name") as record:
        legacy.warn_old_names(SFTConfig(out, **{name: value}), stacklevel=1)
    assert len([warning for warning in record if "is an old name" in str(warning.message)]) == 1


def test_no_old_name_is_missing() -> None:
    """torchdynamo turns torch.compile on, which a test of all names need not do."""
    assert set(legacy._OLD_ARGUMENTS) | set(legacy._OLD_SFT_ARGUMENTS) == {
        *CONFIGURATION_NAMES,
        "torchdynamo",
    }
    assert not set(legacy._OLD_ARGUMENTS) & set(TrainingArguments.__dataclass_fields__)


def test_an_old_strategy_is_known_when_the_configuration_checks_itself(tmp_path: Any) -> None:
    args = SFTConfig(
        str(tmp_path), evaluation_strategy="steps", save_strategy="steps", load_best_model_at_end=True,
        logging_steps=5, eval_steps=10, save_steps=20,
    )  # fmt: skip
    assert args.eval_strategy == "steps" and args.do_eval is True


@pytest.mark.parametrize("ratio, steps, total", [(0.0, 0, 50), (0.1, 5, 50), (1.0, 50, 50)])
def test_warmup_ratio_of_any_size(ratio: float, steps: int, total: int, tmp_path: Any) -> None:
    assert SFTConfig(str(tmp_path), warmup_ratio=ratio).get_warmup_steps(total) == steps == math.ceil(ratio * total)


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_seq_length": 8, "max_length": 16}, {}, "max_seq_length=8 and max_length=16"),
    (
        {"evaluation_strategy": "steps", "eval_strategy": "no"},
        {},
        "evaluation_strategy='steps' and eval_strategy='no'",
    ),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, {}, "warmup_ratio=0.1 and warmup_steps=5"),
    ({"warmup_ratio": 3}, {}, "warmup_ratio=3 must lie between 0 and 1"),
    (
        {"max_length": 16},
        {"max_seq_length": 8},
        r"Trainer\(max_seq_length=8\) and SFTConfig\(max_length=16\)",
    ),
    ({"packing": True}, {"packing": False}, r"SFTTrainer\(packing=False\) and SFTConfig\(packing=True\)"),
    ({"max_seq_length": 16}, {"max_seq_length": 8}, r"\(max_seq_length=8\) and SFTConfig\(max_length=16\)"),
]


@pytest.mark.parametrize("given, on_trainer, message", CONFLICTS)
@pytest.mark.filterwarnings("ignore:fastlm:FutureWarning")
def test_old_and_new_values_in_conflict(given: Any, on_trainer: Any, message: str, tmp_path: Any) -> None:
    args = runs.config(tmp_path, **given)  # no model is known here: nothing is raised
    with pytest.raises(ValueError, match=message):
        runs.trainer(runs.model(), runs.rows(), args, **on_trainer)


@pytest.mark.filterwarnings("ignore:fastlm:FutureWarning")
def test_equal_old_and_new_values_are_no_conflict(tmp_path: Any) -> None:
    args = runs.config(tmp_path, max_seq_length=16, max_length=16)
    made = runs.trainer(runs.model(), runs.rows((4,)), args, max_seq_length=16, infinite=None, packing=None)
    assert made.args.max_length == 16
    with pytest.raises(ValueError, match="tokenizer and processing_class are different"):
        runs.trainer(runs.model(), runs.rows((4,)), runs.config(tmp_path), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("name", legacy.TRAINER_NAMES)
def test_every_old_trainer_name(name: str, tmp_path: Any) -> None:
    values = {"tokenizer": tiny_tokenizer(), "model_init_kwargs": {"revision": "x"}, "dataset_kwargs": {}}
    values |= {"max_seq_length": 16, "dataset_text_field": "body", "neftune_noise_alpha": 5.0}
    value = values.get(name, True if "packing" in name or name == "infinite" else 1)
    processing = {} if name == "tokenizer" else {"processing_class": tiny_tokenizer()}
    data = Dataset.from_list(runs.rows((4,)))
    with pytest.warns(FutureWarning, match=rf"SFTTrainer\({name}=...\) is an old name; write ") as record:
        made = SFTTrainer(
            model=runs.model(), args=runs.config(tmp_path), train_dataset=data, **processing, **{name: value}
        )
    assert sum("is an old name" in str(warning.message) for warning in record) == 1
    field = legacy.TRAINER_NAMES[name]
    if name == "tokenizer":
        assert made.processing_class is value and not hasattr(made.args, "processing_class")
    elif field:
        assert getattr(made.args, field) == value


def message_of(call: Any) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return caught.type, str(caught.value)


def test_other_models_get_the_errors_that_trl_raises(tmp_path: Any) -> None:
    """Where TRL or Python would have refused, the same error: at the latest when the model is known."""
    plain = runs.model(patched=False)
    trainer_with = {"model": plain, "train_dataset": Dataset.from_list(runs.rows())}

    def build(trainer: type = SFTTrainer, config: type = SFTConfig, extra: Any = None, **given: Any) -> None:
        processing = {} if extra else {"processing_class": tiny_tokenizer()}
        args = config(str(tmp_path), report_to="none", **given)
        trainer(args=args, **trainer_with, **processing, **(extra or {}))  # type: ignore[call-arg]

    cases: list[dict[str, Any]] = [
        dict(max_seq_length=8, bf16=False),
        dict(bf16=False, warmup_ratio=0.1, max_seq_length=8),
        dict(config=TrainingArguments, evaluation_strategy="no"),
        dict(trainer=Trainer, config=TrainingArguments, evaluation_strategy="no"),
        dict(bf16=False, extra={"tokenizer": tiny_tokenizer()}),
        dict(bf16=False, extra={"dataset_text_field": "text"}),
        dict(bf16=False, tokens_per_step=64),
        dict(nonsense=1),
        dict(config=TrainingArguments, max_seq_length=8),
        dict(),  # bf16 by default, on a machine without it
        dict(bf16=True),
        dict(fp16=True, bf16=True),
    ]
    for case in cases:
        wrapped = message_of(lambda case=case: build(**case))
        with runs.not_installed():
            assert message_of(lambda case=case: build(**case)) == wrapped


def test_unknown_names_are_refused_at_once_whatever_the_model(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"SFTConfig.__init__\(\) got an unexpected keyword argument 'nonsense'"):
        SFTConfig(str(tmp_path), nonsense=1, max_seq_length=8)
    with pytest.raises(TypeError, match=r"SFTTrainer.__init__\(\) got an unexpected keyword argument 'nonsense'"):
        runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path), nonsense=1)


def test_other_models_train_bit_for_bit_as_without_fastlm(tmp_path: Any) -> None:
    def losses() -> tuple[Any, Any]:
        args = SFTConfig(
            str(tmp_path), bf16=False, report_to="none", save_strategy="no", logging_steps=1, max_steps=3,
            per_device_train_batch_size=3, packing=True, max_length=20, disable_tqdm=True,
        )  # fmt: skip
        model = runs.model(patched=False, attention="sdpa")
        trainer, gradients = runs.train(model, runs.rows(), args)
        assert trainer.args is args
        kept = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm")
        return [{name: entry.get(name) for name in kept} for entry in trainer.state.log_history], gradients

    with runs.not_installed():
        before, gradients = losses()
    after, same_gradients = losses()
    assert before == after
    for left, right in zip(gradients, same_gradients, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_counts_as_given(tmp_path: Any) -> None:
    out = str(tmp_path)
    assert legacy.given_fields(SFTConfig(out, max_length=1024)) == {"output_dir", "max_length"}
    assert legacy.given_fields(SFTConfig(out, bf16=None)) == {"output_dir"}
    line = ["--output_dir", out, "--packing", "True"]
    parsed = legacy.given_fields(HfArgumentParser(SFTConfig).parse_args_into_dataclasses(line)[0])
    assert parsed >= {"output_dir", "packing"}
    assert not parsed & {"max_length", "padding_free", "bf16", "gradient_checkpointing"}
    copied = replace(SFTConfig(out, max_length=7, bf16=False), packing=True)
    assert legacy.given_fields(copied) >= {"max_length", "packing"}
    assert "padding_free" not in legacy.given_fields(copied)
    made = SFTConfig(out, padding_free=False)
    for survivor in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert "output_dir" in legacy.given_fields(survivor)

    @dataclass
    class Mine(SFTConfig):
        mine: int = 0

    args = Mine(out, max_length=5, bf16=False)
    assert legacy.given_fields(args) >= {"max_length"} and "padding_free" not in legacy.given_fields(args)
    args = Mine(out, max_length=5, mine=3, bf16=False, report_to="none")
    made = runs.trainer(runs.model(), runs.rows((4,)), args)
    assert made.args.mine == 3 and made.args.max_length == 5


def test_tokens_per_step_is_an_option_of_fastlms_alone(tmp_path: Any) -> None:
    args = runs.config(tmp_path, tokens_per_step=64)
    assert "tokens_per_step" not in args.to_dict() and "tokens_per_step=" not in repr(args)
    for survivor in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert runs.trainer(runs.model(), runs.rows(), survivor).args.tokens_per_step == 64
    made = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path))
    assert made.args.tokens_per_step is None
    for wrong, given, message in (
        (0, {}, "tokens_per_step is 0: give"), ("64", {}, "tokens_per_step is '64'"), (True, {}, "is True"),
        (64, {"per_device_train_batch_size": 8}, "tokens_per_step=64 and per_device_train_batch_size=8 contradict"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, tokens_per_step=wrong, **given))
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokens_per_step'"):
        TrainingArguments(str(tmp_path), tokens_per_step=64)


@pytest.mark.filterwarnings("ignore:fastlm:FutureWarning")
def test_no_deprecation_warning_of_trl_or_transformers_comes_from_us(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows())
    model, args = runs.model(), runs.config(tmp_path, eval_strategy="steps", eval_steps=1)  # PEFT's and TRL's own warn
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = trl.SFTTrainer(
            model=model, args=args,
            train_dataset=data, eval_dataset=data, processing_class=tiny_tokenizer(),
            compute_metrics=lambda prediction: {"x": 0.0},
        )  # fmt: skip
        trainer.train()
    assert trainer.state.log_history[-1]
