"""Which activations a training step keeps: all of them where they fit, else each decoder layer's input alone.

A run under ``use_gradient_checkpointing="fastlm"`` begins with every layer recomputed. Its first step shows the peak,
and running the layers again in backward shows what each would have kept, whatever its family, adapters and dtypes are.
Before the second step that sum is compared with the memory there is. Numbers do not change: the policies give the same
gradients. Should a batch not fit after all, its step is done again with the layers recomputed, and so are the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..models.patch import patched_core
from .step import State, state_of

__all__ = ["Activations", "training_step"]

_MARGIN = 1.05  # fragmentation, and what the counts leave out
_RESERVE = 2**29  # bytes: libraries' workspaces
_LONGER = 1.5  # how many times the tokens of the first batch a later one is taken to have, at most


@dataclass
class Activations:
    """What a trainer has found out about its activations, as ``State.activations``.

    policy: "first" until a step has been taken, then "keep" or "recompute" for good.
    tokens: of the batch that was measured.
    largest: an upper bound for a batch's tokens, or None.
    """

    largest: int | None = None
    policy: str = "first"
    tokens: int = 0
    trained: list[Tensor] = field(default_factory=list, repr=False)  # walking the modules takes 3 ms


@dataclass(frozen=True)
class _Gauge:
    """Bytes on the model's GPU: allocated now, allocated at the worst moment so far, still to be had."""

    allocated: int
    peak: int
    free: int


def _gauge(device: torch.device) -> _Gauge | None:
    """None where memory is not counted: on a CPU."""
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return _Gauge(allocated, torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[0] + unused)


def training_step(
    original: Callable[..., Tensor], trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Tensor:
    """SFTTrainer.training_step: forward and backward of one micro-batch under the policy that fits."""
    state = state_of(trainer)
    activations = None if state is None else state.activations
    if state is None or activations is None or activations.policy == "recompute":
        return original(trainer, model, inputs, *args, **kwargs)
    if activations.policy == "first":
        if trainer.state.global_step == 0 or not activations.tokens:
            _count_kept(trainer, activations, inputs)
            return original(trainer, model, inputs, *args, **kwargs)
        _choose(trainer, state, activations)
    elif _layers(trainer)[0].gradient_checkpointing:  # train() was called again
        _set_recompute(trainer, False)
    if activations.policy == "recompute" or trainer.accelerator.num_processes > 1:
        return original(trainer, model, inputs, *args, **kwargs)
    return _again_if_too_large(original, trainer, state, activations, model, inputs, *args, **kwargs)


def _layers(trainer: Any) -> list[Any]:
    core: Any = patched_core(trainer.model)
    return list(core.base_model.layers)


def _set_recompute(trainer: Any, on: bool) -> None:
    for layer in _layers(trainer):
        layer.gradient_checkpointing = on


def _count_kept(trainer: Any, activations: Activations, inputs: dict[str, Any]) -> None:
    if activations.tokens:
        return
    activations.tokens = inputs["input_ids"].numel()
    for layer in _layers(trainer):
        if "_fastlm" in layer.__dict__:
            layer._fastlm.kept = 0


def _choose(trainer: Any, state: State, activations: Activations) -> None:
    """Set the policy for the rest of the run, the same on every rank."""
    layers = _layers(trainer)
    activations.trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    kept = [layer._fastlm.kept or 0 if "_fastlm" in layer.__dict__ else 0 for layer in layers]
    gauge = _gauge(next(trainer.model.parameters()).device)
    fits, needed = False, 0
    if gauge is not None and all(kept):
        longer = max(1.0, (activations.largest or 0) / activations.tokens)
        if trainer.accelerator.num_processes == 1:
            longer = min(longer, _LONGER)  # a batch that does not fit can be done again
        # one layer's are part of the peak already: it was recomputed there
        needed = int(longer * _MARGIN * (gauge.peak - gauge.allocated + sum(kept) - max(kept))) + _RESERVE
        if trainer.args.gradient_accumulation_steps > 1:
            needed += sum(parameter.nbytes for parameter in activations.trained)  # set aside during a micro-step
        fits = needed < gauge.free
    if trainer.accelerator.num_processes > 1:
        votes = torch.tensor([int(fits)], device=trainer.accelerator.device)
        fits = bool(trainer.accelerator.gather(votes).all())
    activations.policy = "keep" if fits else "recompute"
    _set_recompute(trainer, not fits)
    if gauge is not None and needed:
        verb = "kept" if fits else "recomputed"
        state.voice.say(
            f"activations are {verb}: keeping them takes up to {needed / 2**30:.1f} GiB, and {gauge.free / 2**30:.1f} "
            "GiB are free"
        )


def _again_if_too_large(
    original: Callable[..., Tensor], trainer: Any, state: State, activations: Activations, model: Any,
    inputs: dict[str, Any], *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The micro-step, with activations kept; if the GPU's memory does not do, once more with layers recomputed.

    Earlier micro-batches' gradients are set aside and added on success, so that none is lost or added twice.
    """
    trained = activations.trained
    earlier = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    noted = {mode: list(rows) for mode, rows in state.pending.items()}
    device = trained[0].device
    random = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)
    try:
        loss = original(trainer, model, dict(inputs), *args, **kwargs)
    except torch.OutOfMemoryError:
        failed = True
    else:
        failed = False
    if failed:  # outside the handler, whose traceback would hold on to the activations
        for parameter in trained:
            parameter.grad = None
        state.pending.update(noted)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)
            torch.cuda.empty_cache()
        activations.policy = "recompute"
        _set_recompute(trainer, True)
        tokens = inputs["input_ids"].numel()
        state.voice.say(f"keeping activations was too much for a batch of {tokens} tokens: from here on recomputed")
        loss = original(trainer, model, inputs, *args, **kwargs)
    for parameter, gradient in zip(trained, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    return loss
