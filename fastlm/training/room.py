"""How much memory a GPU has for a step; a first batch that fits under no policy is refused, with what would fit."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

from ..models.adapters import adapter_ranks
from ..models.patch import decoder_layers, offloads, patched_core
from ..models.twin import twin_of
from .costs import StepCosts, step_costs
from .step import State, one_process, state_of

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

    Counted from shapes (costs.py), as `fastlm.plan` does; a run of which that cannot count everything passes.
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
    """Whether costs.py counts what this run does: one GPU, one dtype, something to train in every layer."""
    args = trainer.args
    core: Any = patched_core(trainer.model)
    if core is None or len(devices) > 1 or next(iter(devices)).type != "cuda" or args.n_gpu > 1:
        return False
    if not one_process(trainer) or args.auto_find_batch_size:  # which looks for one that fits
        return False
    in_two_dtypes = core.dtype.itemsize == 4 and (args.bf16 or args.fp16)
    if in_two_dtypes or getattr(args, "activation_offloading", False):
        return False
    if getattr(core, "_fastlm_full_finetuning", False):
        return all(parameter.requires_grad for parameter in trainer.model.parameters())
    return all(any(parameter.requires_grad for parameter in layer.parameters()) for layer in decoder_layers(core))


def refusal(trainer: Any, state: State, tokens: int, free: int) -> str | None:
    """Why so many tokens do not fit into so many free bytes, weights being there already; None if they may."""
    core: Any = patched_core(trainer.model)
    costs = _costs(trainer, core)
    if costs is None:
        return None
    if state.activations is not None:
        least, how = "offload", "even with layer inputs in host memory"
    else:
        recomputed = getattr(trainer.args, "activation_checkpointing", trainer.args.gradient_checkpointing)
        least = ("offload" if offloads(core) else "recompute") if recomputed else "keep"
        how = f"with use_gradient_checkpointing={least if recomputed else False!r}"
    there = free + costs.weights + costs.adapters

    def needed(count: int) -> int:
        return sum(costs.worst_moment(least, count).values())

    if needed(tokens) <= _SLACK * there:
        return None
    most = bisect_right(range(1, tokens), _SLACK * there, key=needed)
    return (
        f"a micro-batch of {tokens:,} tokens takes {needed(tokens) / 2**30:.1f} GiB {how}; {there / 2**30:.1f} GiB of "
        f"the GPU are there for it, enough for about {most:,} tokens. Lower per_device_train_batch_size (and raise "
        "gradient_accumulation_steps) or max_length, or load the model in 4 bits; `fastlm plan` tells what fits."
    )


def _costs(trainer: Any, core: Any) -> StepCosts | None:
    """Of a first micro-batch of this run; None where something trains that is not counted, or a layer is not fused."""
    full, in_4bit = getattr(core, "_fastlm_full_finetuning", False), getattr(core, "is_loaded_in_4bit", False)
    ranks = adapter_ranks(core)
    if (getattr(core, "is_quantized", False) and not in_4bit) or bool(full) == bool(ranks):
        return None
    try:
        twin = twin_of(core.config, core.dtype)
    except (RuntimeError, ValueError):  # layers that are not fused, a class of the user's own
        return None
    if not ranks.keys() <= dict(twin.named_modules()).keys():
        return None
    accumulates = trainer.args.gradient_accumulation_steps > 1
    # the optimiser has no states yet, or they are not free any more
    costs = step_costs(twin, ranks, full=full, quantised=in_4bit, optimiser="sgd", accumulates=accumulates)
    trained = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
    return None if trained < costs.adapters else costs  # adapters of another kind or dtype, or some that do not train
