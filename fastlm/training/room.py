"""How much memory a GPU has for a step; a first batch that fits under no policy is refused, with what would fit, and
one that fits only with layer inputs in host memory begins with them there.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import torch

from ..models.adapters import adapter_ranks
from ..models.patch import decoder_layers, offloads, patched_core
from ..models.twin import twin_of
from ..packing.dataset import EVEN_AT, lengths_of
from .costs import OPTIMISERS, StepCosts, in_words, step_costs
from .step import State, one_process, state_of

__all__ = ["agreed", "check_batch", "costs_of", "counted", "free_bytes", "largest_batch", "last_policy",
           "offload_ahead", "optimiser_as_asked", "refusal", "tokens_of"]  # fmt: skip

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
    if padded is not None:
        return int(padded.sum())
    ids = inputs.get("input_ids")
    return ids.numel() if ids is not None else inputs["inputs_embeds"][..., 0].numel()


def largest_batch(trainer: Any, state: State, measured: int) -> float:
    """Tokens that a micro-batch of this run may have, at most; of a stream max_length tells, if there is one."""
    from datasets import Dataset

    dataset, size = trainer.train_dataset, trainer._train_batch_size
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return max(measured, (trainer.args.max_length or 0) * size)
    rising = np.sort(lengths_of(dataset))
    budget = getattr(trainer.args, "tokens_per_step", None)
    if budget is not None:  # dealt into micro-batches of equal work (work_of), to within a row
        share = budget / (trainer.args.gradient_accumulation_steps * trainer.args.world_size) + rising[-1]
        return float(min(budget, share * (1 + rising[-1] / EVEN_AT)))
    return float(rising[-size:].sum() if state.padding_free else size * rising[-1])


def last_policy(layers: list[Any]) -> str:
    """Of these decoder layers, the one that takes least."""
    return "offload" if "_fastlm" in layers[0].__dict__ else "recompute"  # only ours know how


def agreed(trainer: Any, choice: int) -> int:
    """The least of what the ranks choose."""
    if trainer.accelerator.num_processes == 1:
        return choice
    votes = torch.tensor([choice], device=trainer.accelerator.device)
    return int(trainer.accelerator.gather(votes).min())


def offload_ahead(trainer: Any, state: State, missing: int) -> bool:
    """Whether layer inputs are to be in host memory from here on, because else so many bytes are missing on a rank."""
    missing = -agreed(trainer, -missing)
    if missing <= 0:
        return False
    state.activations.policy = "offload"
    state.voice.say(
        f"activations are {in_words(['offload'])}: with these on the GPU {missing / 2**30:.2g} GiB would be missing"
    )
    return True


def check_batch(trainer: Any, inputs: dict[str, Any]) -> None:
    """ValueError where the first micro-batch of a run takes more than its GPU has, whatever is computed again, or the
    optimiser's step does. One that fits only with layer inputs in host memory begins with them there.

    Counted from shapes (costs.py), as `fastlm.plan` does; a run of which that cannot count everything passes, and so
    does one of several ranks, where one alone must not stop.
    """
    state = state_of(trainer)
    if state is None or state.first_batch_checked:
        return
    state.first_batch_checked = True
    devices = {parameter.device for parameter in trainer.model.parameters()}
    core: Any = patched_core(trainer.model)
    if "input_ids" not in inputs or not _alike(trainer, devices) or (costs := costs_of(trainer, core)) is None:
        return
    tokens, there = tokens_of(inputs), free_bytes(*devices) + costs.weights + costs.adapters
    if one_process(trainer) and (reason := refusal(trainer, state, costs, tokens, there)):
        raise ValueError(reason)
    if state.activations is not None:
        recomputed, offloaded = (_needed(costs, policy, tokens) for policy in ("recompute", "offload"))
        helps = last_policy(decoder_layers(core)) == "offload" and offloaded <= _SLACK * there < recomputed
        offload_ahead(trainer, state, (recomputed - there) * helps)


def counted(trainer: Any, devices: set[torch.device]) -> bool:
    """Whether costs.py counts what this run does: one GPU, one dtype, something to train in every layer."""
    return one_process(trainer) and _alike(trainer, devices)


def _alike(trainer: Any, devices: set[torch.device]) -> bool:
    """The same of each of several ranks that hold the whole model: what they exchange has its memory by then."""
    args = trainer.args
    core: Any = patched_core(trainer.model)
    if core is None or len(devices) > 1 or next(iter(devices)).type != "cuda" or args.n_gpu > 1:
        return False
    if trainer.accelerator.distributed_type not in ("NO", "MULTI_GPU"):  # whole models on every rank
        return False
    if args.auto_find_batch_size:  # looks for one that fits
        return False
    in_two_dtypes = core.dtype.itemsize == 4 and (args.bf16 or args.fp16)
    if in_two_dtypes or getattr(args, "activation_offloading", False):
        return False
    if getattr(core, "_fastlm_full_finetuning", False):
        return all(parameter.requires_grad for parameter in trainer.model.parameters())
    return all(any(parameter.requires_grad for parameter in layer.parameters()) for layer in decoder_layers(core))


def _needed(costs: StepCosts, policy: str, tokens: int) -> int:
    """Bytes of a first micro-batch: the optimiser has no states yet, or they are not free any more."""
    return sum(costs.worst_moment(policy, tokens).values()) - costs.optimiser


def refusal(trainer: Any, state: State, costs: StepCosts, tokens: int, there: int) -> str | None:
    """Why so many bytes, weights included, do not do for so many tokens or the optimiser's step; None if they may."""
    stepping = sum(costs.standing().values()) + costs.gradients + costs.stepping
    if costs.optimiser and stepping > _SLACK * there:
        return (
            f"the optimiser's step takes {stepping / 2**30:.1f} GiB, whatever the batch: weights, gradients and the "
            f"states of optim={str.__str__(trainer.args.optim)!r}; {there / 2**30:.1f} GiB are there for it. "
            "An optimiser in 8 bits or paged, LoRA and 4 bits take less; `fastlm plan` tells what fits."
        )
    if state.activations is not None:
        least, how = "offload", "even with layer inputs in host memory"
    else:
        recomputed = getattr(trainer.args, "activation_checkpointing", trainer.args.gradient_checkpointing)
        least = ("offload" if offloads(patched_core(trainer.model)) else "recompute") if recomputed else "keep"
        how = f"with use_gradient_checkpointing={least if recomputed else False!r}"

    def needed(count: int) -> int:
        return _needed(costs, least, count)

    if needed(tokens) <= _SLACK * there:
        return None
    most = bisect_right(range(1, tokens), _SLACK * there, key=needed)
    return (
        f"a micro-batch of {tokens:,} tokens takes {needed(tokens) / 2**30:.1f} GiB {how}; {there / 2**30:.1f} GiB of "
        f"the GPU are there for it, enough for about {most:,} tokens. Lower per_device_train_batch_size (and raise "
        "gradient_accumulation_steps) or max_length, or load the model in 4 bits; `fastlm plan` tells what fits."
    )


def _optimiser(trainer: Any) -> str:
    """Under which name costs.py counts states that are still to come; "sgd", which has none, where none are or another
    optimiser is at work than the arguments name.
    """
    name: str = trainer.args.optim
    optimiser = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's
    as_named = name in OPTIMISERS and optimiser is not None and not optimiser.state and optimiser_as_asked(trainer)
    return name if as_named else "sgd"


def optimiser_as_asked(trainer: Any) -> bool:
    """Whether the optimiser at work is the one that the arguments name, and not one of the user's own."""
    optimiser = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    try:
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except (ImportError, ValueError):  # not installed, and not asked for
        return False
    return type(optimiser) is kind and all(optimiser.defaults.get(key, own) == own for key, own in options.items())


def costs_of(
    trainer: Any, core: Any, *, full: bool | None = None, optimiser: str | None = None
) -> StepCosts | None:  # fmt: skip
    """Of a step of this run; None where something trains that is not counted, or a layer is not fused.

    full: every weight trains; by default what the loader said. optimiser: its name; by default as for the first step.
    """
    full = getattr(core, "_fastlm_full_finetuning", False) if full is None else full
    in_4bit = getattr(core, "is_loaded_in_4bit", False)
    ranks = adapter_ranks(core)
    if (getattr(core, "is_quantized", False) and not in_4bit) or bool(full) == bool(ranks):
        return None
    state = state_of(trainer)
    assert state is not None  # else nobody counts
    try:
        twin = state.twin = twin_of(core.config, core.dtype) if state.twin is None else state.twin
    except (RuntimeError, ValueError):  # layers that are not fused, a class of the user's own
        return None
    if not ranks.keys() <= dict(twin.named_modules()).keys():
        return None
    accumulates = trainer.args.gradient_accumulation_steps > 1
    name = optimiser or _optimiser(trainer)
    costs = step_costs(twin, ranks, full=full, quantised=in_4bit, optimiser=name, accumulates=accumulates)
    trained = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
    return None if trained < costs.adapters else costs  # adapters of another kind or dtype, or some that do not train
