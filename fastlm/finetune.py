"""One LoRA run, as ``fastlm train`` and ``fastlm quickstart`` share it: train, measure, save, answer.

What makes the run fast is FastLanguageModel's and the wrapped SFTTrainer's; this file only watches it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import has_generation_markers

from .console import Interrupted
from .export.atomic import move_into_place
from .loader import FastLanguageModel
from .rows import Row
from .training.profile import Profile, StepProfiler

__all__ = ["Training", "answer", "make_trainer", "padding_share", "save_adapter", "train"]


@dataclass(frozen=True)
class Training:
    """What was measured: losses as logged, valid tokens a second, the share that padding would have been.

    profile: where the time of a few steps went, if that was asked for.
    """

    steps: int
    losses: list[float]
    tokens_per_second: float
    padding_avoided: float
    profile: Profile | None = None

    def facts(self) -> dict[str, Any]:
        """What every command's JSON object says of its training."""
        return {
            "steps": self.steps,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "tokens_per_second": self.tokens_per_second,
            "padding_avoided": self.padding_avoided,
            **({} if self.profile is None else {"profile": self.profile.facts()}),
        }


@dataclass
class _Recorder:
    """Stands in for the collator and notes the lengths of the samples that every batch is made of."""

    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        lengths = (sample.get("seq_lengths") or [len(sample["input_ids"])] for sample in samples)
        self.batches.append([int(length) for row in lengths for length in row])
        return self.collate(samples)


class _Progress(TrainerCallback):
    """A progress bar with the last loss, and the times at which steps ended."""

    def __init__(self) -> None:
        self.bar = tqdm(desc="training", unit="step", delay=1e-9)  # shown from its first step on
        self.ended: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.reset(state.max_steps)
        self.ended = [time.perf_counter()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(time.perf_counter())
        self.bar.update(1)
        control.should_log |= state.global_step == state.max_steps  # the last loss, whatever logging_steps is

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")


def make_trainer(
    model: Any, tokenizer: Any, rows: list[Row], held_out: list[Row] | None, *, batch_size: int, **config: Any
) -> SFTTrainer:
    """An SFTTrainer over rows of one kind (see fastlm.rows), quiet and saving nothing by itself.

    config: more fields of SFTConfig. The loss covers completions only for prompt-completion rows, marked
    answers only for chats whose template marks them, and everything otherwise.
    """
    arguments = SFTConfig(
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        lr_scheduler_type="cosine",
        assistant_only_loss="messages" in rows[0] and has_generation_markers(tokenizer.chat_template or ""),
        bf16=model.dtype == torch.bfloat16,
        fp16=model.dtype == torch.float16,
        use_cpu=model.device.type == "cpu",
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **config,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out) if held_out else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: SFTTrainer, adapter_dir: Path, tokenizer: Any, *, profile: Path | None = None) -> Training:
    """Train to the end and measure; on Ctrl-C save the adapter as it is and raise Interrupted.

    Tokens a second counts valid tokens over the steps after the first, which also pays for compiling and
    warming up (over all of them where there is one step only). profile: a folder for the trace of a few steps, whose
    table is printed.
    """
    progress, recorder = _Progress(), _Recorder(trainer.data_collator)
    profiler = None if profile is None else StepProfiler(profile)
    callbacks = [progress] if profiler is None else [profiler, progress]
    trainer.data_collator = recorder
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        trainer.train()
    except KeyboardInterrupt as interruption:
        save_adapter(trainer.model, tokenizer, adapter_dir)
        raise Interrupted(
            f"interrupted after {trainer.state.global_step} of {trainer.state.max_steps} steps; the adapter "
            f"as it is now is in {adapter_dir}, for FastLanguageModel.from_pretrained or PEFT"
        ) from interruption
    finally:
        progress.bar.close()
        for callback in callbacks:
            trainer.remove_callback(callback)
        trainer.data_collator = recorder.collate
    if profiler is not None and profiler.profile is not None:
        print(f"\n{profiler.profile}\nthe trace is {profiler.folder / 'trace.json'}\n")
    steps = trainer.state.global_step
    batches = recorder.batches[:steps]  # the loader fetches one batch ahead
    first = 1 if steps > 1 else 0
    tokens = sum(sum(batch) for batch in batches[first:])
    return Training(
        steps=steps,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        tokens_per_second=tokens / (progress.ended[steps] - progress.ended[first]),
        padding_avoided=padding_share(batches),
        profile=None if profiler is None else profiler.profile,
    )


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """1 - valid / padded tokens, had every batch of these lengths been padded to its longest sample.

    >>> padding_share([[2, 4], [3, 3]])
    0.14285714285714285
    """
    padded = sum(len(batch) * max(batch) for batch in batches if batch)
    return 1 - sum(map(sum, batches)) / padded if padded else 0.0


def save_adapter(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write adapter and tokenizer beside ``folder``, and put them in its place once they are complete."""
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    try:
        # Embeddings are not trained here; left on "auto", PEFT would ask the hub about the base model.
        model.save_pretrained(partial, save_embedding_layers=False)
        tokenizer.save_pretrained(partial)
        move_into_place(partial, folder, old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)  # one that a crash left


def answer(model: Any, tokenizer: Any, prompt: str | list[dict[str, str]], max_new_tokens: int = 64) -> str:
    """The model's greedy answer to messages or to plain text; the model is left in training mode."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = inputs.to(model.device)
    FastLanguageModel.for_inference(model)
    try:
        generated = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    finally:
        FastLanguageModel.for_training(model)
    return tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
