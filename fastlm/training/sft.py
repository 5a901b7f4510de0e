"""The seam with TRL's SFTTrainer (and transformers' Trainer): what changes for a model of fastlm's, and only
for one.

``install`` wraps a few methods of the classes in place, so it does not matter who imported them, when, or
subclasses them. Each wrapper first asks whether the model is fastlm's; with any other model it calls the
method it wraps, with the arguments it was given.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..models.patch import is_patched, padding_free_obstacle, patched_core, rebind_head, report
from ..packing.collators import PaddingFreeCollator
from . import legacy, memory, optimizers, padded, prepare, resume, small_steps, step
from .batches import train_sampler
from .precision import hold_float32_masters, restore_float32_masters, settle_precision
from .report import TrainingReport, add_to_log, get_batch_samples
from .say import Voice
from .step import State, state_of
from .streamed import fill_rows

__all__ = ["install"]

_MARK = "_fastlm_wraps"


def install() -> None:
    """Wrap transformers' and TRL's trainer classes in place. Calling it again does nothing."""
    from transformers import Trainer, TrainingArguments

    _replace(TrainingArguments, "__init__", functools.partial(_remembering, TrainingArguments))
    _replace(Trainer, "__init__", lambda original: _method(original, _trainer_init))
    function: Callable[..., Any]
    for name, function in (
        ("train", resume.train),
        ("_save_checkpoint", resume.save_checkpoint),
        ("_load_from_checkpoint", resume.keep_dtypes),
        ("_load_best_model", resume.keep_dtypes),
        ("_init_training_state", resume.init_training_state),
        ("_load_rng_state", resume.load_rng_state),
        ("get_batch_samples", resume.get_batch_samples),
    ):
        _replace(Trainer, name, functools.partial(_method, function=function))
    for owner, name, function in padded.wrappers():  # before SFTTrainer's, which call on to these
        _replace(owner, name, functools.partial(_method, function=function))
    if importlib.util.find_spec("trl") is None:
        return
    import trl

    for owner in (trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.RewardConfig, trl.GRPOConfig, trl.RLOOConfig,
                  trl.DistillationConfig):  # fmt: skip
        _replace(owner, "__init__", functools.partial(_remembering, owner))
    _replace(trl.SFTTrainer, "__init__", lambda original: _method(original, _sft_init))
    for name, function in (
        ("train", small_steps.train),
        ("create_optimizer", optimizers.create_optimizer),
        ("get_batch_samples", get_batch_samples),
        ("training_step", small_steps.training_step),
        ("compute_loss", step.compute_loss),
        ("evaluation_loop", step.evaluation_loop),
        ("floating_point_ops", step.floating_point_ops),
        ("log", _log),
        ("_prepare_dataset", _prepare_dataset),
        ("_get_dataloader", _get_dataloader),
        ("_get_train_sampler", _get_train_sampler),
        ("get_eval_dataloader", functools.partial(_logits_dataloader, "eval")),
        ("get_test_dataloader", functools.partial(_logits_dataloader, "test")),
    ):
        _replace(trl.SFTTrainer, name, functools.partial(_method, function=function))


def _replace(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if name in owner.__dict__ and hasattr(original, _MARK):
        return
    wrapper = wrap(original)
    setattr(wrapper, _MARK, original)
    setattr(owner, name, wrapper)


def _remembering(owner: type, original: Callable[..., None]) -> Callable[..., None]:
    return legacy.remember_call(owner, sft=owner.__name__ == "SFTConfig")


def _method(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs ``function(original, self, ...)``, with the name and signature of ``original``."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    return method


# --- building an SFTTrainer


def _sft_init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    model = args[0] if args else kwargs.get("model")
    if not is_patched(model):
        legacy.refuse_old_names(args[1] if len(args) > 1 else kwargs.get("args"))
        return original(trainer, *args, **kwargs)
    old = {name: kwargs.pop(name) for name in legacy.TRAINER_NAMES if name in kwargs}
    try:
        call = inspect.signature(original).bind(trainer, *args, **kwargs).arguments
    except TypeError:
        return original(trainer, *args, **kwargs)  # raises it under its own name
    call.pop(next(iter(call)))  # self
    _take_tokenizer(call, old)
    core: Any = patched_core(model)
    config, given, bf16_refused = _settle_names(call.get("args"), old, core)
    vocabulary = getattr(core.config.get_text_config(), "vocab_size", None)
    state = State(Voice(speaks=config.process_index == 0), vocabulary=vocabulary)
    trainer.__dict__["_fastlm"] = state
    _settle_max_length(config, core, given, state)
    settle_precision(
        config, core.dtype, given, state.voice.say, device_type=config.device.type,
        bf16_refused=bf16_refused,
    )  # fmt: skip
    memory.settle_checkpointing(config, core, given, state)
    _settle_throughput(config, given, state)
    if call.get("train_dataset") is None:
        return original(trainer, **{**call, "args": config})  # TRL says that it is needed
    example = prepare.check_not_empty(call["train_dataset"], "train")
    collator = call.get("data_collator")
    reason = _obstacle(model, config, call, example)
    state.padding_free = _decide_padding_free(config, given, reason, state)
    config.padding_free = False  # TRL refuses it together with max_length, which is enforced here
    if isinstance(collator, PaddingFreeCollator):
        del call["data_collator"]  # TRL then makes its own, for evaluation that reads logits
    held = hold_float32_masters(model) if config.fp16 else {}
    original(trainer, **{**call, "args": config})
    if config.fp16:
        restore_float32_masters(trainer.model, held)
    _finish(trainer, state, collator)


def _take_tokenizer(call: dict[str, Any], old: dict[str, Any]) -> None:
    if old.get("tokenizer") is not None:
        if call.get("processing_class") not in (None, old["tokenizer"]):
            raise ValueError("tokenizer and processing_class are different objects: keep processing_class")
        call["processing_class"] = old["tokenizer"]


def _settle_names(given_config: Any, old: dict[str, Any], core: Any) -> tuple[Any, frozenset[str], bool]:
    """The trainer's own SFTConfig, the fields that the user set, and whether bf16 was refused."""
    from transformers import TrainingArguments
    from trl import SFTConfig

    level = 4  # _settle_names, _sft_init, the method, the user's line
    legacy.warn_old_names(given_config, stacklevel=level)
    if given_config is None:
        name = str(getattr(core.config, "_name_or_path", "") or type(core).__name__).rstrip("/").rpartition("/")[2]
        config = SFTConfig(f"{name}-SFT")
        given = frozenset[str]()
    elif isinstance(given_config, TrainingArguments) and not isinstance(given_config, SFTConfig):
        given = legacy.given_fields(given_config)
        known = SFTConfig.__dataclass_fields__
        values = {n: getattr(given_config, n) for n, f in given_config.__dataclass_fields__.items() if f.init}
        config = SFTConfig(**{name: value for name, value in values.items() if name in known})
    else:
        given = legacy.given_fields(given_config)
        config = copy.copy(given_config)  # the user's object may serve another model next
    refused = legacy.bf16_was_refused(config)
    given = legacy.apply_trainer_names(config, old, given, stacklevel=level)
    legacy.settle_options(config, given)
    legacy.set_given(config, given)
    return config, given, refused


def _settle_max_length(config: Any, core: Any, given: frozenset[str], state: State) -> None:
    """An explicit max_length wins, then the length that the model was loaded for, then TRL's default."""
    loaded_for = getattr(core, "max_seq_length", None)
    if "max_length" not in given and loaded_for is not None and config.max_length != loaded_for:
        state.voice.say(
            f"max_length is {loaded_for}, the model's max_seq_length (TRL's default is {config.max_length})"
        )
        config.max_length = loaded_for
    if config.max_length is not None and (not isinstance(config.max_length, int) or config.max_length <= 0):
        raise ValueError(
            f"max_length is {config.max_length!r}: give the tokens that a row may hold, or None for no limit"
        )


def _leave_liger_out(config: Any, voice: Voice) -> None:
    if config.use_liger_kernel:
        voice.say("use_liger_kernel is ignored: fastlm's kernels are in its place")
        config.use_liger_kernel = False


def _settle_throughput(config: Any, given: frozenset[str], state: State) -> None:
    if "logging_nan_inf_filter" not in given:
        config.logging_nan_inf_filter = False  # it asks the GPU twice a step whether the loss is finite
    _leave_liger_out(config, state.voice)
    accelerator = config.accelerator_config = copy.copy(config.accelerator_config)
    if accelerator.dispatch_batches:
        state.voice.say("dispatch_batches is off: it would cut the sample boundaries of a batch apart")
    accelerator.dispatch_batches = False
    if config.device.type == "cpu":
        config.dataloader_pin_memory = False  # there is no copy to speed up
    elif config.dataloader_pin_memory:
        accelerator.non_blocking = True  # the next batch's copy does not hold up this step


def _obstacle(model: Any, config: Any, call: dict[str, Any], example: dict[str, Any]) -> str | None:
    """Why batches cannot be flattened, or None where they can."""
    peft = call.get("peft_config") or getattr(model, "active_peft_config", None)
    collator = call.get("data_collator")
    if _is_the_users(collator):
        return "the data collator is your own"
    if "image" in example or "images" in example:
        return "the data set has images"
    if getattr(peft, "is_prompt_learning", False):
        return "prompt learning puts its virtual tokens before each row, not each sample"
    return padding_free_obstacle(model, config.max_length)


def _is_the_users(collator: Any) -> bool:
    return collator is not None and not isinstance(collator, PaddingFreeCollator)


def _decide_padding_free(config: Any, given: frozenset[str], obstacle: str | None, state: State) -> bool:
    """Whether batches are flattened; else one line says why. ValueError if what was asked for cannot be."""
    packs = config.packing and config.packing_strategy != "wrapped"  # rows hold several samples
    chosen = config.padding_free if "padding_free" in given else None
    if chosen is False and not packs:
        return False
    if obstacle is None and config.neftune_noise_alpha is not None and not packs and not chosen:
        obstacle = "NEFTune scales its noise by the length of the padded row"
    if obstacle is None:
        return True
    if packs or chosen:
        asked = "packing" if packs else "padding_free"
        raise ValueError(f"{asked}=True cannot be honoured: {obstacle}; set {asked}=False")
    state.voice.say(f"padding-free is off: {obstacle}")
    return False


def _finish(trainer: Any, state: State, collator: Any) -> None:
    """What TRL's constructor left, made ours: the collator, the head outermost, the summary."""
    trainer.args.padding_free = trainer.padding_free = state.padding_free
    state.model = trainer.model
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    if state.padding_free:
        packs = trainer.args.packing if trainer.args.eval_packing is None else trainer.args.eval_packing
        packs = packs and trainer.args.packing_strategy != "wrapped"
        by_row = step.WeightedCollator(copy.copy(trainer.data_collator))
        by_row.inner.padding_free = packs  # packed rows of evaluation stay flattened, as in TRL
        trainer.data_collator = PaddingFreeCollator() if collator is None else collator
        state.padded_collators["test"] = by_row  # predict returns logits
        if trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None:
            state.padded_collators["eval"] = by_row
            if not packs:
                state.voice.say("evaluation is padded: its metrics read logits row by row")
        _keep_columns(trainer)
    elif not _is_the_users(collator) and hasattr(trainer.data_collator, "padding_free"):  # TRL's, of text
        trainer.data_collator = step.WeightedCollator(trainer.data_collator)
        _keep_columns(trainer)
    elif trainer.args.remove_unused_columns and "weights" in columns:
        state.voice.say("the column 'weights' is not used: your data collator gets it with remove_unused_columns=False")
    if not trainer.aux_loss_enabled:  # the experts' auxiliary loss is computed by TRL's head
        rebind_head(trainer.model)
        state.own_head = report(trainer.model).fused.get("head", 0) > 0
    trainer.add_callback(TrainingReport(state))
    state.voice.say(_summary(trainer, state))


def _summary(trainer: Any, state: State) -> str:
    words = [f"padding-free {'on' if state.padding_free else 'off'}"]
    for name, counts in state.counts.items():
        if counts.packed_to is not None:
            fill = counts.tokens / (counts.rows * counts.packed_to)
            kept = counts.samples - counts.dropped
            part = f"{name}: {counts.rows} packed rows of {counts.packed_to} from {kept} samples"
            part += f", {fill:.1%} full"
        else:
            part = f"{name}: {counts.rows} rows"
        part += f", {counts.cut} cut" if counts.cut else ""
        part += f", {counts.dropped} dropped" if counts.dropped else ""
        words.append(part)
        if name == "train" and state.padding_free and counts.speedup > 1:
            padding, size = 1 - 1 / counts.speedup, trainer.args.per_device_train_batch_size
            words.append(
                f"padded batches of {size} would be {padding:.0%} padding: expect {counts.speedup:.2f}x their speed"
            )
    if not state.counts:
        words.append("data as it comes")
    return "; ".join(words)


# --- the other wrappers


def _trainer_init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Any other trainer: old names, what layers keep, and what a flattened batch needs of a plain Trainer."""
    if state_of(trainer) is not None:
        return original(trainer, *args, **kwargs)
    model = args[0] if args else kwargs.get("model")
    config = args[1] if len(args) > 1 else kwargs.get("args")
    if not is_patched(model):
        legacy.refuse_old_names(config)
        return original(trainer, *args, **kwargs)
    legacy.warn_old_names(config, stacklevel=3)
    collator = args[2] if len(args) > 2 else kwargs.get("data_collator")
    if config is None:
        from transformers import TrainingArguments

        config = TrainingArguments(output_dir="tmp_trainer")  # as Trainer would
    config = copy.copy(config)
    given = legacy.given_fields(config)
    _leave_liger_out(config, Voice(config.process_index == 0))
    memory.settle_checkpointing(config, patched_core(model), given)
    flattened = isinstance(collator, PaddingFreeCollator)
    if flattened:
        # accelerate's dispatch mode, its default for streamed data, would cut the sample boundaries apart
        accelerator: Any = copy.copy(config.accelerator_config)
        accelerator.dispatch_batches = False
        config.accelerator_config = accelerator
    if len(args) > 1:
        args = (args[0], config, *args[2:])
    else:
        kwargs["args"] = config
    original(trainer, *args, **kwargs)
    if flattened:
        _keep_columns(trainer)


def _keep_columns(trainer: Any) -> None:
    """What only the collators read: pruning unused columns would join the samples and lose the weights."""
    trainer._set_signature_columns_if_needed()
    missing = {"seq_lengths", "weights"} - set(trainer._signature_columns)
    trainer._signature_columns.extend(sorted(missing))


def _prepare_dataset(
    original: Callable[..., Any], trainer: Any, dataset: Any, processing_class: Any, args: Any, packing: bool,
    formatting_func: Any, dataset_name: str,
) -> Any:  # fmt: skip
    state = state_of(trainer)
    if state is None:
        return original(trainer, dataset, processing_class, args, packing, formatting_func, dataset_name)
    return prepare.prepare_dataset(
        original, trainer, state, dataset, processing_class, args, packing, formatting_func, dataset_name
    )


def _log(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    state = state_of(trainer)
    if state is not None:
        step.drain_metrics(trainer, state)
        add_to_log(trainer, args[0] if args else kwargs["logs"])
    return original(trainer, *args, **kwargs)


def _get_train_sampler(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    sampler = train_sampler(original, trainer, *args, **kwargs)
    return sampler if state_of(trainer) is None else resume.repeat_by_epoch(sampler, trainer.args.seed)


def _get_dataloader(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    state, ranks, trains = state_of(trainer), trainer.accelerator.num_processes, kwargs.get("is_training")
    if state is not None and ranks > 1 and not trains:
        flat = getattr(trainer.data_collator, "inner", trainer.data_collator)
        flat = isinstance(flat, PaddingFreeCollator) or getattr(flat, "padding_free", False)
        kwargs["dataset"] = fill_rows(kwargs["dataset"], kwargs["batch_size"] * ranks, flat)
    loader = original(trainer, *args, **kwargs)
    if state is not None and trains and trainer.args.dataloader_persistent_workers:
        # workers that stay draw one seed a run, and one more after resuming: not from what dropout draws from
        loader.base_dataloader.generator = torch.Generator().manual_seed(trainer.args.seed)
    return loader


def _logits_dataloader(which: str, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    state = state_of(trainer)
    if state is None or which not in state.padded_collators:
        return original(trainer, *args, **kwargs)
    ours, trainer.data_collator = trainer.data_collator, state.padded_collators[which]
    try:
        return original(trainer, *args, **kwargs)
    finally:
        trainer.data_collator = ours
