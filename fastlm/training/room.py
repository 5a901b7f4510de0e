"""How much memory a GPU has for a step; a first batch that fits under no policy is refused, with what would fit."""

from __future__ import annotations

from typing import Any

import torch

from ..models.patch import decoder_layers, offloads, patched_core
from .step import State, state_of

__all__ = ["check_batch", "free_bytes", "refusal", "tokens_of"]

_SLACK = 1.03  # peaks are predicted this well; a batch that may yet fit is tried


def free_bytes(device: torch.device) -> int:
    """What a GPU still has for this process: of its memory, and of what the process may use."""
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device) - allocated, limit - allocated)


def tokens_of(inputs: dict[str, Any]) -> int:
    """Of a micro-batch, without padding. The GPU is waited for where there is a mask."""
    padded = inputs.get("attention_mask")
    return int(padded.sum()) if padded is not None else inputs["input_ids"].numel()


def check_batch(trainer: Any, inputs: dict[str, Any]) -> None:
    """ValueError where the first micro-batch of a run takes more than its GPU has, whatever is computed again.

    Counted from shapes, as `fastlm.plan` does; a run of which that cannot count everything passes.
    """
    state = state_of(trainer)
    if state is None or state.first_batch_checked:
        return
    state.first_batch_checked = True
    devices = {parameter.device for parameter in trainer.model.parameters()}
    if "input_ids" not in inputs or not _counted(trainer, devices):
        return
    if reason := refusal(trainer, state, tokens_of(inputs), free_bytes(*devices)):
        raise ValueError(reason)


def _counted(trainer: Any, devices: set[torch.device]) -> bool:
    """Whether `plan` counts what this run does: one GPU, one dtype, something to train in every layer."""
    args, core = trainer.args, patched_core(trainer.model)
    if core is None or len(devices) > 1 or next(iter(devices)).type != "cuda" or args.n_gpu > 1:
        return False
    if trainer.accelerator.distributed_type != "NO" or args.auto_find_batch_size:  # which looks for one that fits
        return False
    if trainer.optimizer is not None and trainer.optimizer.state:  # its states are not free any more
        return False
    in_two_dtypes = core.dtype.itemsize == 4 and (args.bf16 or args.fp16)
    if in_two_dtypes or getattr(args, "activation_offloading", False):
        return False
    if getattr(core, "_fastlm_full_finetuning", False):
        return all(parameter.requires_grad for parameter in trainer.model.parameters())
    return all(any(parameter.requires_grad for parameter in layer.parameters()) for layer in decoder_layers(core))


def refusal(trainer: Any, state: State, tokens: int, free: int) -> str | None:
    """Why so many tokens do not fit into so many free bytes, weights being there already; None if they may."""
    from ..planner import plan  # which counts with this package

    args, core, rows = trainer.args, patched_core(trainer.model), trainer._train_batch_size
    setting: bool | str = "fastlm"
    if state.activations is None:
        recomputed = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        setting = ("offload" if offloads(core) else "recompute") if recomputed else False
    settings: dict[str, Any] = dict(
        max_length=-(-tokens // rows), batch_size=rows, optim=str(getattr(args.optim, "value", args.optim)),
        gradient_accumulation_steps=args.gradient_accumulation_steps, use_gradient_checkpointing=setting,
    )  # fmt: skip
    try:
        standing = plan(trainer.model, gpu_memory=1, **settings).parts
        if sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad) < standing["adapters"]:
            return None  # adapters of another kind or dtype, or some that do not train: plan counts more
        memory_gib = (free + standing["weights"] + standing["adapters"]) / 2**30
        made = plan(trainer.model, gpu_memory=memory_gib, **settings)
    except ValueError:  # layers that are not fused, another optimiser, a length past the model's limit
        return None
    least = min(made.peaks.values())
    if least <= _SLACK * made.memory_bytes:
        return None
    forced = f"with use_gradient_checkpointing={setting!r}"
    how = "even with layer inputs in host memory" if setting == "fastlm" else forced
    return (
        f"a micro-batch of {tokens:,} tokens takes {least / 2**30:.1f} GiB {how}; {memory_gib:.1f} GiB of the GPU are "
        f"there for it. {made.advice}"
    )
