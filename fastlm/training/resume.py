"""Checkpoints that appear whole or not at all, and runs that go on from one as if they had never stopped.

transformers restores weights, optimiser, schedule, random numbers and the place in the data. What it leaves is
done here: the adapters' dtype, the place in a stream that is read more than once, and what the next line of the
log averages over.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..models.patch import is_patched
from . import memory
from .step import drain_metrics, state_of

__all__ = [
    "get_batch_samples",
    "init_training_state",
    "keep_dtypes",
    "load_rng_state",
    "repeat_by_epoch",
    "save_checkpoint",
    "train",
]

_RECORD = "fastlm_state.json"
# not checkpoint-*: neither resuming nor rotation looks at it; _*: pushing the run's folder leaves it out
_STAGING = "_checkpoint.partial"
_NAMES = "_fastlm_trainable"  # on a trainer whose model is fastlm's, from the start of training


def train(
    original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Trainer.train. ValueError, before anything is loaded, if the checkpoint trained other parameters."""
    if is_patched(trainer.model):
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        trainer.__dict__[_NAMES] = names
        _check_names(names, _folder(trainer, resume_from_checkpoint))
        memory.begin(trainer)
    return original(trainer, resume_from_checkpoint, *args, **kwargs)


def _folder(trainer: Any, resume_from_checkpoint: Any) -> Any:
    from transformers.trainer_utils import get_last_checkpoint

    if resume_from_checkpoint is True:
        run = trainer.args.output_dir
        return get_last_checkpoint(run) if os.path.isdir(run) else None
    return resume_from_checkpoint or None


def _check_names(names: list[str], folder: Any) -> None:
    then = _record(folder).get("trainable", names)
    if then == names:
        return
    only_then, only_now = ([n for n in a if n not in set(b)] for a, b in ((then, names), (names, then)))
    parts = [
        f"trained {which}: {', '.join(some[:20])}{f' and {len(some) - 20} more' if len(some) > 20 else ''}"
        for which, some in (("only in the checkpoint", only_then), ("only now", only_now))
        if some
    ]
    if not parts:
        place = next(i for i, (a, b) in enumerate(zip(then, names, strict=True)) if a != b)
        parts = [f"the same parameters in another order, from {then[place]} (now {names[place]}) on"]
    raise ValueError(
        f"{folder} does not fit this run: {'; '.join(parts)}. Nothing was loaded; build the model as it was built "
        "then (LoRA targets, modules_to_save, what is frozen), or start anew"
    )


def _record(folder: Any) -> dict[str, Any]:
    path = Path(folder or "", _RECORD)
    return json.loads(path.read_text()) if folder and path.exists() else {}


# --- saving


def save_checkpoint(original: Callable[..., None], trainer: Any, model: Any, trial: Any) -> None:
    """Trainer._save_checkpoint into a folder beside, which becomes checkpoint-N by a rename when all ranks are done.

    Killed at any moment, what ``resume_from_checkpoint=True`` finds is the last whole checkpoint. Older ones are
    deleted, and the new one is pushed, after that.
    """
    from transformers.trainer_utils import rotate_checkpoints

    if _NAMES not in trainer.__dict__:
        return original(trainer, model, trial)
    args, state, wait = trainer.args, trainer.state, trainer.accelerator.wait_for_everyone
    run, name = trainer._get_output_dir(trial=trial), f"checkpoint-{state.global_step}"
    staging = os.path.join(run, _STAGING)
    if args.local_process_index == 0:
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    wait()
    trainer._get_output_dir = lambda trial: staging
    trainer._push_from_checkpoint = lambda folder: None
    try:
        original(trainer, model, trial)
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint
    if state.best_global_step:
        best = os.path.join(run, f"checkpoint-{state.best_global_step}")
        if state.best_global_step == state.global_step or os.path.exists(best):
            state.best_model_checkpoint = best
    record = _what_to_remember(trainer)
    if args.should_save:
        state.save_to_json(os.path.join(staging, name, "trainer_state.json"))
        Path(staging, name, _RECORD).write_text(json.dumps(record))
    wait()
    if args.local_process_index == 0:
        _move(Path(staging), Path(run, name))
    wait()
    if args.push_to_hub:
        trainer._push_from_checkpoint(os.path.join(run, name))
    if args.should_save:
        rotate_checkpoints(
            output_dir=run, save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint, use_mtime=True,
        )  # fmt: skip


def _move(staging: Path, target: Path) -> None:
    whole = staging / "whole"
    try:
        (staging / target.name).rename(whole)
    except FileNotFoundError:
        return  # another node that shares this disk was first
    if target.exists():
        if not (target / "trainer_state.json").exists():  # no checkpoint: what a subclass has put there already
            for entry in target.iterdir():
                if not (whole / entry.name).exists():
                    entry.rename(whole / entry.name)
        target.rename(staging / "replaced")
    whole.rename(target)
    shutil.rmtree(staging, ignore_errors=True)


def _what_to_remember(trainer: Any) -> dict[str, Any]:
    state, args = trainer.state, trainer.args
    passes = math.ceil(state.epoch) - 1  # whole ones; state.epoch = passes + batches / batches of all steps
    record: dict[str, Any] = {
        "trainable": trainer.__dict__[_NAMES],
        "passes": passes,
        "batches": round((state.epoch - passes) * state.max_steps * args.gradient_accumulation_steps),
        "losses": trainer.accelerator.gather(trainer._tr_loss.reshape(1)).tolist(),  # of each rank since the last log
        "last_logged": trainer._globalstep_last_logged,
    }
    ours = state_of(trainer)
    if ours is not None:
        drain_metrics(trainer, ours)
        record |= {"metrics": trainer._metrics["train"], "tokens": trainer._total_train_tokens}
    return record


# --- going on


def keep_dtypes(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer._load_from_checkpoint and _load_best_model. PEFT loads half-precision adapters as float32: they stay."""
    if _NAMES not in trainer.__dict__:
        return original(trainer, *args, **kwargs)
    held = {name: parameter.dtype for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    original(trainer, *args, **kwargs)
    for name, parameter in trainer.model.named_parameters():
        if parameter.dtype != held.get(name, parameter.dtype):
            parameter.data = parameter.data.to(held[name])


def init_training_state(original: Callable[..., Any], trainer: Any, *args: Any) -> tuple[int, int]:
    """Trainer._init_training_state: (passes over the data, batches to skip in this one).

    transformers takes max_steps for the length of a stream, and so would skip into nothing after a second pass.
    """
    done = original(trainer, *args)
    record = _record(args[3]) if _NAMES in trainer.__dict__ else {}
    if not _streams(trainer) or "passes" not in record or trainer.args.ignore_data_skip:
        return done
    return record["passes"], record["batches"]


def load_rng_state(original: Callable[..., None], trainer: Any, checkpoint: Any) -> None:
    """Trainer._load_rng_state, the last thing done before training goes on; and the log's running sums."""
    original(trainer, checkpoint)
    record = _record(checkpoint) if _NAMES in trainer.__dict__ else {}
    if len(record.get("losses", ())) == trainer.accelerator.num_processes:
        loss = record["losses"][trainer.accelerator.process_index]
        trainer._tr_loss += loss
        trainer._total_loss_scalar -= loss  # the mean that training ends with is of the steps taken here
        trainer._globalstep_last_logged = record["last_logged"]
    if "metrics" in record and state_of(trainer) is not None:
        trainer._metrics["train"].update(record["metrics"])
        trainer._total_train_tokens = record["tokens"]


def get_batch_samples(
    original: Callable[..., Any], trainer: Any, epoch_iterator: Any, num_batches: int, *args: Any
) -> tuple[list[Any], Any]:
    """Trainer.get_batch_samples. Batches at a stream's end that fill no step are left out of it.

    transformers would add their gradient, a mean of its own, to that of the next pass's first step. ValueError if
    the whole stream fills none.
    """
    batches, count = original(trainer, epoch_iterator, num_batches, *args)
    state = state_of(trainer)
    if state is None or not 0 < len(batches) < num_batches or not _streams(trainer):
        return batches, count
    if trainer.state.global_step == 0:
        raise ValueError(
            f"the training stream holds {len(batches)} batches, and gradient_accumulation_steps={num_batches} of them "
            "make a step: lower gradient_accumulation_steps or per_device_train_batch_size"
        )
    state.voice.say(
        f"the stream ends {num_batches - len(batches)} batches short of gradient_accumulation_steps: the last "
        f"{len(batches)} of each pass are left out"
    )
    return [], None


def repeat_by_epoch(sampler: Any, seed: int) -> Any:
    """The sampler; one that groups by length draws an epoch's order from seed and epoch, as Trainer's others do.

    Left alone it would draw from the random numbers as dropout has left them.
    """
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if isinstance(sampler, LengthGroupedSampler) and sampler.generator is None:
        generator = sampler.generator = torch.Generator().manual_seed(seed)
        sampler.set_epoch = lambda epoch: generator.manual_seed(seed + epoch)  # type: ignore[attr-defined]
    return sampler


def _streams(trainer: Any) -> bool:
    return not hasattr(trainer.train_dataset, "__len__")
