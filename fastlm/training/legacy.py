"""Argument names of older transformers and TRL, and what they are called today; and fastlm's two options of its own.

A configuration has no model when it is built. So one that is built with old names takes the values under
today's names and remembers what it was called with; the trainer, which knows the model, then either says
which names are old (fastlm model) or raises what Python would have raised at once (any other model).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "TRAINER_NAMES",
    "apply_trainer_names",
    "bf16_was_refused",
    "given_fields",
    "refuse_old_names",
    "remember_call",
    "set_given",
    "settle_options",
    "warn_old_names",
]

# not a dataclass field, and plain builtins: invisible to to_dict, repr and ==, harmless in a pickle
_CALL = "_fastlm_call"


@dataclasses.dataclass(frozen=True)
class _OldName:
    """now: what to write today, or why nothing. convert: (value, values given) -> today's fields."""

    now: str
    convert: Callable[[Any, Mapping[str, Any]], dict[str, Any]] = lambda value, given: {}


def _renamed(new: str) -> _OldName:
    return _OldName(new, lambda value, given: {new: value})


def _switch(field: str, on: Any) -> _OldName:
    return _OldName(f"{field}={on!r}", lambda value, given: {field: on} if value else {})


def _gone(why: str) -> _OldName:
    return _OldName(f"nothing: {why}")


def _warmup_ratio(ratio: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if not 0 <= ratio <= 1:
        raise ValueError(f"warmup_ratio={ratio!r} must lie between 0 and 1")
    steps = given.get("warmup_steps", 0)
    if ratio and steps and steps != ratio:
        raise ValueError(f"warmup_ratio={ratio!r} and warmup_steps={steps!r} contradict each other: keep warmup_steps")
    # 1.0 would read as one step; the float below it still rounds up to all of them
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))} if ratio else {}


def _inside(holder: str, key: str) -> _OldName:
    """A field that now is one key of a configuration dictionary."""

    def convert(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        held = given.get(holder)
        if isinstance(held, str):
            raise ValueError(f"{holder} is read from {held!r}: put {key} into that file")
        held = dict(held) if isinstance(held, Mapping) else dict(vars(held)) if held is not None else {}
        if held.get(key) not in (None, value):
            raise ValueError(f"{holder}[{key!r}]={held[key]!r} and the old name's {value!r} contradict each other")
        return {holder: {**held, key: value}}

    return _OldName(f"{holder}={{{key!r}: ...}}", convert)


def _organization(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    name = given.get("hub_model_id") or os.path.basename(os.path.abspath(given.get("output_dir") or "trainer_output"))
    organization, _, name = name.rpartition("/")
    if organization not in ("", value):
        raise ValueError(
            f"push_to_hub_organization={value!r} and hub_model_id of {organization!r} contradict each other"
        )
    return {"hub_model_id": f"{value}/{name}"}


_OLD_ARGUMENTS: dict[str, _OldName] = {
    "evaluation_strategy": _renamed("eval_strategy"),
    "warmup_ratio": _OldName("warmup_steps, where a value below 1 is a ratio", _warmup_ratio),
    "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
    "no_cuda": _renamed("use_cpu"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "adafactor": _switch("optim", "adafactor"),
    "include_inputs_for_metrics": _switch("include_for_metrics", ["inputs"]),
    "torchdynamo": _renamed("torch_compile_backend"),
    "dispatch_batches": _inside("accelerator_config", "dispatch_batches"),
    "split_batches": _inside("accelerator_config", "split_batches"),
    "fsdp_min_num_params": _inside("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": _inside("fsdp_config", "transformer_layer_cls_to_wrap"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "push_to_hub_organization": _OldName("hub_model_id='organization/name'", _organization),
    "push_to_hub_token": _renamed("hub_token"),
    "overwrite_output_dir": _gone("checkpoints are always written into output_dir"),
    "logging_dir": _gone("set TENSORBOARD_LOGGING_DIR to move TensorBoard's logs"),
    "save_safetensors": _gone("checkpoints are always safetensors"),
    "use_mps_device": _gone("an Apple GPU is used where there is one"),
    "half_precision_backend": _gone("PyTorch's autocast is the only one left"),
    "fp16_backend": _gone("PyTorch's autocast is the only one left"),
    "fp16_opt_level": _gone("it was for Apex"),
    "use_ipex": _gone("it was for Intel's extension"),
    "jit_mode_eval": _gone("it was for TorchScript"),
    "tpu_num_cores": _gone("the launcher decides"),
    "tpu_metrics_debug": _gone("use debug"),
    "past_index": _gone("no model here returns a memory"),
    "use_legacy_prediction_loop": _gone("there is one prediction loop"),
    "mp_parameters": _gone("the launcher decides"),
    "ray_scope": _gone("give scope to hyperparameter_search"),
    "include_tokens_per_second": _gone("use include_num_input_tokens_seen"),
}
_OLD_SFT_ARGUMENTS: dict[str, _OldName] = {
    "max_seq_length": _renamed("max_length"),
    "dataset_batch_size": _gone("rows are tokenised one by one"),
    "num_of_sequences": _gone("packing looks at the whole data set"),
    "chars_per_token": _gone("packing counts tokens"),
    "use_liger": _gone("fastlm brings its own kernels"),
}
# what SFTConfig takes beside TRL's own fields; an attribute of the configuration, not a field
_OPTIONS = ("tokens_per_step", "embedding_learning_rate")
# SFTTrainer's old names: processing_class, fields of the configuration, or gone
TRAINER_NAMES: dict[str, str] = {
    "tokenizer": "processing_class",
    "max_seq_length": "max_length",
    **{
        name: name
        for name in (
            "dataset_text_field", "packing", "dataset_num_proc", "neftune_noise_alpha", "dataset_kwargs",
            "eval_packing", "model_init_kwargs",
        )
    },
    "dataset_batch_size": "",
    "num_of_sequences": "",
    "chars_per_token": "",
    "infinite": "",
}  # fmt: skip


def remember_call(config_class: type, *, sft: bool) -> Callable[..., None]:
    """Wrap a configuration's ``__init__``: takes old names too, and remembers which fields the caller gave.

    ``SFTConfig(tokens_per_step=N)``: at most N tokens in an optimiser step, instead of a batch size.
    ``SFTConfig(embedding_learning_rate=L)``: of the embedding and the head, where they are trained.

    Nothing is said or refused here; an unknown keyword raises Python's TypeError as before. SFTConfig turns
    bf16 on by default and then refuses machines without it: that refusal is remembered as well, for models
    that are not fastlm's.
    """
    original: Callable[..., None] = config_class.__init__  # type: ignore[misc]
    names = tuple(field.name for field in dataclasses.fields(config_class) if field.init)
    table = {**_OLD_ARGUMENTS, **(_OLD_SFT_ARGUMENTS if sft else {})}
    table = {name: old for name, old in table.items() if name not in names}

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        old = {name: kwargs.pop(name) for name in table if name in kwargs}
        options = {name: kwargs.pop(name) for name in _OPTIONS if sft and name in kwargs and name not in names}
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        changes, problem = _modernise(table, old, values)
        kwargs.update(changes)
        values.update(changes)
        refusal = None
        try:
            original(self, *args, **kwargs)
        except ValueError as error:
            if not sft or values.get("bf16") is not None or values.get("fp16"):
                raise
            try:
                original(self, *args, **{**kwargs, "bf16": False})
            except ValueError:
                raise error from None  # it was not about bf16
            refusal = str(error)
        given = frozenset(name for name, value in values.items() if name != "bf16" or value is not None)
        call = {"given": given, "old": old, "callable": original.__qualname__}
        self.__dict__.update(options)
        self.__dict__[_CALL] = {**call, "problem": problem, "refusal": refusal, "options": tuple(options)}

    return __init__


def _modernise(
    table: Mapping[str, _OldName], old: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Today's fields for old names, and what contradicts what (given values then stay)."""
    changes: dict[str, Any] = {}
    problem = None
    for name, value in old.items():
        if value is None:
            continue
        try:
            wanted = table[name].convert(value, {**given, **changes})
        except ValueError as error:
            problem = problem or str(error)
            continue
        for field, new in wanted.items():
            known = {**given, **changes}
            merged = field in ("warmup_steps", "accelerator_config", "fsdp_config", "hub_model_id")
            if field in known and known[field] != new and not merged:
                problem = problem or (
                    f"{name}={value!r} and {field}={known[field]!r} contradict each other: {name} is the old "
                    f"name of {field}, keep that"
                )
            else:
                changes[field] = new
    return changes, problem


def given_fields(config: Any) -> frozenset[str]:
    """Names of the fields that the caller set, old names under today's name.

    A call that gives most fields (HfArgumentParser, dataclasses.replace) and a subclass with an ``__init__``
    of its own tell nothing: then a field counts as given if it differs from its default.
    """
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    call = config.__dict__.get(_CALL)
    if call is not None and 2 * len(call["given"]) < len(fields):
        given: frozenset[str] = call["given"]
        return given
    differing = {name for name, field in fields.items() if getattr(config, name) != _default(field)}
    if _default(fields["bf16"]) is None and (config.bf16 != config.fp16 or bf16_was_refused(config)):
        differing.discard("bf16")  # what the default becomes
    for name in {"gradient_checkpointing", "activation_checkpointing"} & differing:
        if _default(fields[name]) is None and not getattr(config, name):
            differing.discard(name)  # None becomes False
    return frozenset(differing)


def bf16_was_refused(config: Any) -> bool:
    """Whether TRL's own default of bf16 was refused on this machine and replaced by off."""
    call = config.__dict__.get(_CALL)
    return call is not None and call["refusal"] is not None


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def set_given(config: Any, given: Iterable[str]) -> None:
    """Remember these fields as given, and no old names."""
    call = {"given": frozenset(given), "old": {}, "callable": type(config).__qualname__}
    config.__dict__[_CALL] = {**call, "problem": None, "refusal": None, "options": ()}


def settle_options(config: Any, given: frozenset[str]) -> None:
    """fastlm's options of a fastlm trainer's configuration, None by default. ValueError if one cannot be meant."""
    budget = config.tokens_per_step = getattr(config, "tokens_per_step", None)
    rate = config.embedding_learning_rate = getattr(config, "embedding_learning_rate", None)
    if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < math.inf):
        raise ValueError(f"embedding_learning_rate is {rate!r}: give a rate of 0 or more, or None for learning_rate")
    if budget is None:
        return
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ValueError(f"tokens_per_step is {budget!r}: give the tokens that an optimiser step may have, or None")
    if "per_device_train_batch_size" in given:
        raise ValueError(
            f"tokens_per_step={budget} and per_device_train_batch_size={config.per_device_train_batch_size} "
            "contradict each other: a step has a budget of tokens, or a number of rows; keep one"
        )


def refuse_old_names(config: Any) -> None:
    """For a model that is not fastlm's: raise what building the configuration would have raised."""
    call = getattr(config, "__dict__", {}).get(_CALL)
    if call is None:
        return
    for name in (*call["old"], *call["options"]):
        raise TypeError(f"{call['callable']}() got an unexpected keyword argument '{name}'")
    if call["refusal"] is not None:
        raise ValueError(call["refusal"])


def warn_old_names(config: Any, *, stacklevel: int) -> None:
    """For a fastlm model: one line per old name. ValueError where old and new names contradict each other."""
    call = getattr(config, "__dict__", {}).get(_CALL)
    if call is None:
        return
    if call["problem"] is not None:
        raise ValueError(call["problem"])
    table = {**_OLD_ARGUMENTS, **_OLD_SFT_ARGUMENTS}
    owner = call["callable"].partition(".")[0]
    for name in call["old"]:
        _warn(f"{owner}({name}=...)", table[name].now, stacklevel + 1)


def apply_trainer_names(
    config: Any, old: Mapping[str, Any], given: frozenset[str], *, stacklevel: int
) -> frozenset[str]:
    """Put SFTTrainer's old keywords where they live today, on ``config``; returns the fields now given.

    One line per name; ValueError where a keyword contradicts the configuration.
    """
    for name, value in old.items():
        field = TRAINER_NAMES[name]
        owner = "SFTTrainer" if name == "tokenizer" else "SFTConfig"
        gone = "nothing: packing looks at the whole data set, and max_steps bounds it"
        _warn(f"SFTTrainer({name}=...)", f"{owner}({field}=...)" if field else gone, stacklevel + 1)
        if not field or value is None or owner == "SFTTrainer":
            continue
        known = getattr(config, field)
        if field in given and known != value:
            raise ValueError(
                f"SFTTrainer({name}={value!r}) and SFTConfig({field}={known!r}) contradict each other: keep "
                f"SFTConfig({field}=...)"
            )
        setattr(config, field, value)
        given |= {field}
    return given


def _warn(old: str, now: str, stacklevel: int) -> None:
    warnings.warn(f"fastlm: {old} is an old name; write {now}", FutureWarning, stacklevel=stacklevel + 1)
