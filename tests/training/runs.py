"""Short SFTTrainer runs on tiny models, recorded; and the trainer classes without fastlm's wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

import fastlm
from fastlm.training.sft import _MARK, install

from ..tiny import add_lora, tiny_model, tiny_tokenizer

LENGTHS = (5, 12, 3, 9, 20, 2, 7, 16)


def rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, prompt: int = 1) -> list[dict[str, list[int]]]:
    """Tokenised rows with labels; the first ``prompt`` tokens of each have none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(4, 260, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * min(prompt, length) + ids[prompt:]})
    return made


def targets(examples: list[dict[str, list[int]]]) -> int:
    return sum(label != -100 for row in examples for label in row["labels"][1:])


def config(out: Any, **given: Any) -> trl.SFTConfig:
    return trl.SFTConfig(str(out), **{**quiet(), **given})


def quiet() -> dict[str, Any]:
    return dict(report_to="none", save_strategy="no", logging_steps=1, max_steps=1, disable_tqdm=True,
                max_grad_norm=0.0, learning_rate=1e-3)  # fmt: skip


def model(family: str = "llama", *, patched: bool = True, lora: bool = True, **facts: Any) -> Any:
    made = tiny_model(family, **facts)
    made = add_lora(made) if lora else made
    if patched:
        fastlm.patch(made)
    return made


class Recorder(TrainerCallback):
    """Every optimiser step's gradients, and what the model was called with."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})


def trainer(run_model: Any, data: Any, args: Any, **given: Any) -> trl.SFTTrainer:
    data = Dataset.from_list(data) if isinstance(data, list) else data
    return trl.SFTTrainer(model=run_model, args=args, train_dataset=data, processing_class=tiny_tokenizer(), **given)


def train(run_model: Any, data: Any, args: Any, **given: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """(trainer, gradients per optimiser step) of a whole run."""
    recorder = Recorder()
    made = trainer(run_model, data, args, callbacks=[recorder], **given)
    made.train()
    return made, recorder.gradients


def logged(made: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def worst_error(value: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest of the tensors' relative errors."""
    assert value.keys() == truth.keys() and truth
    return max(
        float((value[n].double() - truth[n].double()).norm() / truth[n].double().norm().clamp_min(1e-12)) for n in truth
    )


@contextlib.contextmanager
def not_installed() -> Iterator[None]:
    """transformers' and TRL's own classes, as if fastlm had never been used."""
    owners = (transformers.TrainingArguments, transformers.Trainer, trl.SFTConfig, trl.SFTTrainer)
    wrapped = {(o, n): f for o in owners for n, f in list(o.__dict__.items()) if hasattr(f, _MARK)}
    assert wrapped
    inherited = {
        key for key, function in wrapped.items()
        if any(vars(base).get(key[1]) is getattr(function, _MARK) for base in key[0].__mro__[1:])
    }  # fmt: skip
    for (owner, name), function in wrapped.items():
        if (owner, name) in inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, getattr(function, _MARK))
    try:
        yield
    finally:
        install()
