"""One LoRA run, as ``fastlm train`` and ``fastlm quickstart`` share it: train, measure, save, answer.

Everything that makes the run fast is FastLanguageModel's and the wrapped SFTTrainer's; this file only watches
it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import has_generation_markers

from .console import Interrupted
from .loader import FastLanguageModel
from .rows import Row

__all__ = ["Training", "answer", "make_trainer", "padding_share", "replace_folder", "save_adapter", "train"]


@dataclass(frozen=True)
class Training:
    """What was measured: losses as logged, valid tokens a second, the share that padding would have been."""

    steps: int
    losses: list[float]
    tokens_per_second: float
    padding_avoided: float


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
        self.bar: tqdm | None = None
        self.ended: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(total=state.max_steps, desc="training", unit="step")
        self.ended = [time.perf_counter()]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.ended.append(time.perf_counter())
        if self.bar is not None:
            self.bar.update(1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs.get("logs") or {}
        if self.bar is not None and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def make_trainer(
    model: Any,
    tokenizer: Any,
    train_rows: Sequence[Row],
    eval_rows: Sequence[Row] | None = None,
    *,
    max_length: int,
    batch_size: int,
    learning_rate: float,
    output_dir: str | Path,
    max_steps: int = -1,
    epochs: float = 1.0,
    packing: bool = False,
    logging_steps: int = 1,
    seed: int = 3407,
) -> SFTTrainer:
    """An SFTTrainer over rows of one kind (see fastlm.rows), quiet and saving nothing by itself.

    The loss covers completions only for prompt-completion rows, marked answers only for chats whose template
    marks them, and everything otherwise.
    """
    dtype, on_cpu = model.dtype, model.device.type == "cpu"
    marked = "messages" in train_rows[0] and has_generation_markers(tokenizer.chat_template or "")
    arguments = SFTConfig(
        output_dir=str(output_dir),
        max_steps=max_steps,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share of the steps
        max_length=max_length,
        packing=packing,
        assistant_only_loss=marked,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        logging_steps=logging_steps,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(list(train_rows)),
        eval_dataset=Dataset.from_list(list(eval_rows)) if eval_rows else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: SFTTrainer, adapter_dir: Path, tokenizer: Any) -> Training:
    """Train to the end and measure; on Ctrl-C save the adapter as it is and raise Interrupted.

    Tokens a second counts valid tokens over the steps after the first, which also pays for compiling and
    warming up (over all of them where there is one step only).
    """
    progress, recorder = _Progress(), _Recorder(trainer.data_collator)
    trainer.data_collator = recorder
    trainer.add_callback(progress)
    try:
        trainer.train()
    except KeyboardInterrupt as interruption:
        progress.close()
        save_adapter(trainer.model, tokenizer, adapter_dir)
        raise Interrupted(
            f"interrupted after {trainer.state.global_step} of {trainer.state.max_steps} steps; the adapter "
            f"as it is now is in {adapter_dir}, for FastLanguageModel.from_pretrained or PEFT"
        ) from interruption
    finally:
        progress.close()
        trainer.remove_callback(progress)
        trainer.data_collator = recorder.collate
    steps = trainer.state.global_step
    batches = recorder.batches[:steps]  # the loader fetches one batch ahead
    first = 1 if steps > 1 else 0
    tokens = sum(sum(batch) for batch in batches[first:])
    return Training(
        steps=steps,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        tokens_per_second=tokens / (progress.ended[steps] - progress.ended[first]),
        padding_avoided=padding_share(batches),
    )


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """1 - valid / padded tokens, had every batch of these lengths been padded to its longest sample.

    >>> padding_share([[2, 4], [3, 3]])
    0.14285714285714285
    """
    padded = sum(len(batch) * max(batch) for batch in batches if batch)
    return 1 - sum(map(sum, batches)) / padded if padded else 0.0


def save_adapter(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write adapter and tokenizer beside ``folder`` and put them there once they are complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # Embeddings are not trained here; left on "auto", PEFT would ask the hub about the base model.
        model.save_pretrained(partial, save_embedding_layers=False)
        tokenizer.save_pretrained(partial)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename ``new`` to ``folder``; an older ``folder`` is removed only after that."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


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
