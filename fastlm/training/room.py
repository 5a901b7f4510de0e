"""Before the first step: a batch that fits under no policy is refused, with what would fit."""

from __future__ import annotations

from typing import Any

from ..models.patch import offloads, patched_core
from . import memory
from .step import State, state_of

__all__ = ["check_batch", "refusal"]

_SLACK = 1.03  # peaks are predicted this well; a batch that may yet fit is tried


def check_batch(trainer: Any) -> None:
    """ValueError where a step of this run takes more than its GPU has, whatever is computed again.

    Counted from shapes, as `fastlm.plan` does, for a fresh run of SFTTrainer on one GPU; what that cannot count passes.
    """
    state, device = state_of(trainer), next(trainer.model.parameters()).device
    alone = trainer.accelerator.distributed_type == "NO"
    if state is None or device.type != "cuda" or not alone or trainer.optimizer is not None:
        return
    if trainer.args.auto_find_batch_size or _partly_frozen(trainer.model):
        return
    if reason := refusal(trainer, state, memory.free_bytes(device)):
        raise ValueError(reason)


def _partly_frozen(model: Any) -> bool:
    """Whether weights train, and not all of them."""
    full = getattr(patched_core(model), "_fastlm_full_finetuning", False)
    return full and not all(parameter.requires_grad for parameter in model.parameters())


def refusal(trainer: Any, state: State, free: int) -> str | None:
    """Why the largest micro-batch does not fit into so many free bytes, weights being there already; None if it may."""
    from ..planner import plan  # which counts with this package

    args, core = trainer.args, patched_core(trainer.model)
    setting: bool | str = "fastlm"
    if state.activations is None:
        recomputed = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        setting = ("offload" if offloads(core) else "recompute") if recomputed else False
    tokens, rows = int(memory.largest_batch(trainer, state, 1)), trainer._train_batch_size
    settings: dict[str, Any] = dict(
        max_length=-(-tokens // rows), batch_size=rows, optim=str(getattr(args.optim, "value", args.optim)),
        gradient_accumulation_steps=args.gradient_accumulation_steps, use_gradient_checkpointing=setting,
    )  # fmt: skip
    try:
        standing = plan(trainer.model, gpu_memory=1, **settings).parts
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
        f"a micro-batch of this run has up to {tokens:,} tokens and takes {least / 2**30:.1f} GiB {how}; "
        f"{memory_gib:.1f} GiB of the GPU are there for it. {made.advice}"
    )
