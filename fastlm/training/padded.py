"""Trainers that pad, on a patched model: what the mask holds is read on the host, so that the model drops the padding.

A data collator's mask is described where it is made. GRPO, RLOO and distillation make theirs on the device: it is read
once per rollout. The rest of a trainer, its batches and its loss are as they were; where a loss is the user's own,
batches stay padded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.padding import LAYOUT_SUFFIX, PaddedLayout, attach
from ..models.patch import is_patched, padding_free_obstacle, patched_core, rebind_head, report
from ..packing.boundaries import IGNORE_INDEX
from ..packing.collators import PaddingFreeCollator

__all__ = ["LayoutCollator", "wrappers"]

_ROLLOUT = "fastlm_mask"  # in a rollout's batch, its mask [B, S] on the host; on the trainer while a loss is computed


def wrappers() -> list[tuple[type, str, Callable[..., Any]]]:
    """(class, method name, function called with the method, the trainer and the arguments) of all that is wrapped."""
    from transformers import Trainer

    found: list[tuple[type, str, Callable[..., Any]]] = [
        (Trainer, "_get_dataloader", _get_dataloader),
        (Trainer, "_prepare_inputs", _prepare_inputs),
    ]
    if importlib.util.find_spec("trl") is None:
        return found
    from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer

    found += [(owner, "__init__", _init_with_head) for owner in (DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer)]
    for owner, scoring in (
        (GRPOTrainer, "_get_per_token_logps_and_entropies"),
        (RLOOTrainer, "_get_per_token_logps_and_entropies"),
        (DistillationTrainer, "_get_last_hidden_state"),
    ):
        found += [
            (owner, "_generate_and_score_completions", _roll_out),
            (owner, "compute_loss", _rollout_loss),
            (owner, scoring, _score_rollout),
        ]
    return found


@dataclass
class LayoutCollator:
    """A data collator's batch, and beside each of its padding masks that is understood a PaddedLayout.

    It is understood where the batch says which tokens are targets (``labels``, or TRL's ``completion_mask``), so that
    nobody reads the model's output at padding, or where the model pools the output of one token per row: ``pools``,
    as transformers' sequence classifiers do with the last token that is not ``pad_token_id``.
    """

    collate: Callable[[Any], Any]
    pools: bool = False
    pad_token_id: int | None = None

    def __call__(self, examples: Any) -> Any:
        batch = self.collate(examples)
        if isinstance(batch, MutableMapping):
            for name in [name for name in batch if str(name).endswith("attention_mask")]:
                layout = self._layout(batch, name)
                if layout is not None:
                    batch[name + LAYOUT_SUFFIX] = layout
        return batch

    def _layout(self, batch: Mapping[str, Any], name: str) -> PaddedLayout | None:
        prefix = name.removesuffix("attention_mask")
        mask, ids = batch[name], batch.get(f"{prefix}input_ids")
        if not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.dim() != 2 or ids.shape != mask.shape:
            return None
        for key, nothing in (("labels", IGNORE_INDEX), ("completion_mask", 0)):
            wanted = batch.get(prefix + key)
            if isinstance(wanted, Tensor) and wanted.shape == mask.shape:
                return PaddedLayout.from_mask(mask, wanted != nothing)
        if not self.pools:
            return None
        last = torch.full_like(ids[:, :1], ids.shape[1] - 1)
        if self.pad_token_id is not None:
            last = ((ids != self.pad_token_id) * torch.arange(ids.shape[1])).argmax(1, keepdim=True)
        return PaddedLayout.from_mask(mask) if mask.gather(1, last).all() else None


def _get_dataloader(original: Callable[..., Any], trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's collator stays as it is: only loaders whose batches come to _prepare_inputs add to it."""
    core: Any = patched_core(trainer.model)
    collate, loading = trainer.data_collator, trainer.accelerator.dataloader_config
    dispatch, non_blocking = loading.dispatch_batches, loading.non_blocking
    streamed = isinstance(dataset, torch.utils.data.IterableDataset)
    # accelerate's dispatch mode cuts and joins batches, of tensors only
    dispatches = dispatch or (dispatch is None and streamed and trainer.accelerator.num_processes > 1)
    padding_free = isinstance(collate, PaddingFreeCollator)
    if core is None or padding_free_obstacle(core) is not None or dispatches or padding_free:
        return original(trainer, dataset, *args, **kwargs)
    pools = type(core).__name__.endswith("ForSequenceClassification")
    if not pools and (_reads_anything(trainer) or not (kwargs.get("is_training") or "head" in report(core).fused)):
        return original(trainer, dataset, *args, **kwargs)  # somebody may read the output at padding
    trainer.data_collator = LayoutCollator(collate, pools, core.config.get_text_config().pad_token_id)
    loading.dispatch_batches = False  # with one process it changes nothing else
    loading.non_blocking = non_blocking or trainer.args.dataloader_pin_memory  # this step goes on while that is copied
    try:
        return original(trainer, dataset, *args, **kwargs)
    finally:
        trainer.data_collator = collate
        loading.dispatch_batches, loading.non_blocking = dispatch, non_blocking


def _reads_anything(trainer: Any) -> bool:
    """Whether the loss is computed by code of the user's, which may read any of the model's outputs."""
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return callable(trainer.compute_loss_func) or not owner.__module__.startswith(("transformers.", "trl.trainer."))


def _prepare_inputs(original: Callable[..., Any], trainer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Layouts leave the batch and are attached to their masks, which are on the device now."""
    layouts = {}
    if isinstance(inputs, MutableMapping):
        layouts = {name: value for name, value in inputs.items() if isinstance(value, PaddedLayout)}
        for name in layouts:
            del inputs[name]
    prepared = original(trainer, inputs, *args, **kwargs)
    for name, layout in layouts.items():
        attach(prepared[name.removesuffix(LAYOUT_SUFFIX)], layout)
    return prepared


def _init_with_head(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Our head outermost again, where it gives what the trainer differentiates."""
    original(trainer, *args, **kwargs)
    ours = not getattr(trainer, "aux_loss_enabled", False) and not getattr(trainer, "_entropy_bonus_enabled", False)
    if ours and is_patched(trainer.model):
        rebind_head(trainer.model)


def _roll_out(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A rollout keeps its mask on the host: shuffled and split with the rest, it serves the steps to come."""
    batch = original(trainer, *args, **kwargs)
    if is_patched(trainer.model):
        batch[_ROLLOUT] = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).cpu()
    return batch


def _rollout_loss(
    original: Callable[..., Any], trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    mask = inputs.get(_ROLLOUT) if isinstance(inputs, Mapping) else None
    if mask is None:
        return original(trainer, model, inputs, *args, **kwargs)
    trainer.__dict__[_ROLLOUT] = mask
    try:
        return original(trainer, model, inputs, *args, **kwargs)
    finally:
        trainer.__dict__.pop(_ROLLOUT, None)


def _score_rollout(
    original: Callable[..., Any], trainer: Any, model: Any, input_ids: Any, attention_mask: Tensor,
    logits_to_keep: int, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Before the mask [B, S] is used it is described; only the last logits_to_keep tokens are targets."""
    if is_patched(trainer.model):
        mask = trainer.__dict__.get(_ROLLOUT)
        if mask is None and not torch.is_grad_enabled():
            mask = attention_mask.cpu()  # outside a step, where the rollout waits for the device anyway
        if mask is not None and mask.shape == attention_mask.shape:
            targets = mask != 0
            targets[:, :-logits_to_keep] = False
            layout = PaddedLayout.from_mask(mask, targets)
            if layout is not None:
                attach(attention_mask, layout)
    return original(trainer, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
