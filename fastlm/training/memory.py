"""Which activations a training step keeps, layer by layer: all of them where they fit, else all but the norms' outputs,
which backward makes again, else all but these and the MLP's gate and up products, which its own backward makes again,
else the layer's input alone, and if that is too much in host memory.

A run under ``use_gradient_checkpointing="fastlm"`` begins with every layer recomputed. Its first step shows the peak,
and running the layers again in backward shows what each would have kept, whatever its family, adapters and dtypes are.
Before the second step that is compared with the memory there is, and as many layers keep more as fit, the last first.
Where recomputing all takes more than there is, by that or as room.py counts the first batch, inputs go to host memory.
Numbers do not change: the policies, and mixes of them, give the same gradients. Should a batch not fit after all, its
step is done again with a tenth less kept, and so on until all layers are recomputed, then with their inputs in host
memory, and so are the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from ..models.checkpointing import KEEPING, leave_out, set_policies
from ..models.layers import LayerPatch
from ..models.offload import Offload
from ..models.patch import decoder_layers, offloads, patched_core
from .costs import in_words, ladder, left_out, overall, per_layer, spared
from .room import agreed, check_batch, free_bytes, largest_batch, last_policy, offload_ahead, tokens_of
from .say import Voice
from .step import State, one_process, state_of

__all__ = ["MARGIN", "RESERVE", "Activations", "begin", "kept_bytes", "largest_batch", "present_need",
           "set_policy", "settle_checkpointing", "training_step"]  # fmt: skip

# Fragmentation, and what the counts leave out. Steps of different lengths ran out of memory at 93% and at 94% of what
# the process could have (Llama-3-8B shapes in 24 GiB, Qwen3-8B's in 140; H200).
MARGIN = 1.1
RESERVE = 2**29  # bytes: libraries' workspaces
_KEEPING = (*KEEPING, "mixed")
_LONGER = 1.5  # times the tokens of the first batch: what a later one is taken to have, where it could be done again


@dataclass
class Activations:
    """What a trainer has found out about its activations, as ``State.activations``.

    policy: "first" until a step has been taken, then "keep", "light" (all but norms), "lean" (all but norms, gate and
        up) or "recompute"; "mixed" where layers differ; "offload" where none of them did.
    mix: policy of each layer, where they differ.
    levels: bytes that have to be free for each mix that could be chosen, and the mix; rising.
    tokens: of the batch that was measured.
    before: bytes allocated before the first step. peak: at the worst moment of its forwards and backwards.
    """

    policy: str = "first"
    mix: tuple[str, ...] = ()
    levels: list[tuple[int, tuple[str, ...]]] = field(default_factory=list, repr=False)
    tokens: int = 0
    before: int = 0
    peak: int = 0
    trained: list[Tensor] = field(default_factory=list, repr=False)  # walking the modules takes 3 ms


@dataclass(frozen=True)
class _Gauge:
    """Bytes on the model's GPU: allocated now, allocated at the worst moment so far, still to be had."""

    allocated: int
    peak: int
    free: int


def _gauge(trainer: Any, begin: bool = False) -> _Gauge | None:
    """None where memory is not counted: on a CPU. begin: forget the worst moment so far."""
    device = next(trainer.model.parameters()).device
    if device.type != "cuda":
        return None
    if begin:
        torch.cuda.reset_peak_memory_stats(device)
    peak = torch.cuda.max_memory_allocated(device)
    return _Gauge(torch.cuda.memory_allocated(device), peak, free_bytes(device))


def training_step(
    original: Callable[..., Tensor], trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Tensor:
    """SFTTrainer.training_step: forward and backward of one micro-batch under the policy that fits."""
    check_batch(trainer, inputs)
    try:
        return _training_step(original, trainer, model, inputs, *args, **kwargs)
    except torch.OutOfMemoryError as error:
        error.add_note(
            "fastlm: this micro-batch was too much. A smaller per_device_train_batch_size (with more "
            "gradient_accumulation_steps), a smaller max_length and 4 bits take less; `fastlm plan` says how much."
        )
        raise


def _training_step(
    original: Callable[..., Tensor], trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Tensor:  # fmt: skip
    state = state_of(trainer)
    activations = None if state is None else state.activations
    if state is None or activations is None or not (layers := _layers(trainer)):
        return original(trainer, model, inputs, *args, **kwargs)
    first = state.steps < trainer.args.gradient_accumulation_steps  # of this run, which may go on with an earlier one
    counting = activations.policy == "first" and (first or not activations.tokens)
    if counting:
        _begin_to_count(trainer, layers, activations, inputs)
    elif activations.policy == "first":
        _choose(trainer, layers, state, activations)
    elif activations.policy in _KEEPING and layers[-1].gradient_checkpointing:  # train() was called again
        set_policy(layers, activations.mix or activations.policy)
    _offload(trainer).on = activations.policy == "offload"
    if _can_be_done_again(trainer, layers, activations):
        loss = _again_if_too_large(original, trainer, layers, state, activations, model, inputs, *args, **kwargs)
    else:
        loss = original(trainer, model, inputs, *args, **kwargs)
    if counting and (gauge := _gauge(trainer)) is not None:
        activations.peak = gauge.peak
    return loss


def settle_checkpointing(config: Any, core: Any, given: frozenset[str], state: State | None = None) -> None:
    """An explicit value wins, then the model's own setting; TRL's default of True is not explicit. In a subclass of
    TrainingArguments a value that is the default cannot be told from one that was given.

    True leaves it to the model's policy; without one it means "fastlm", which keeps all activations that fit. That is
    for a trainer with a state: any other, whose model has a setting, then recomputes layers, and one line says so.
    """
    # transformers 5.24 calls it activation_checkpointing, keeps the old name beside it and reads the new one only
    names = {name for name in ("gradient_checkpointing", "activation_checkpointing") if hasattr(config, name)}
    setting = policy = getattr(core, "_fastlm_checkpointing", None)
    if state is None and (setting is None or _fsdp_recomputes(config)):
        return  # transformers refuses both
    if given & names or setting is None:
        policy = config.gradient_checkpointing and (setting or "fastlm")
    for name in names:
        setattr(config, name, bool(policy))
        # on a CPU they are in host memory anyway; TRL's other trainers pass the option on to torch, which knows none
        if policy == "offload" and config.device.type != "cpu" and state is not None:
            options = getattr(config, f"{name}_kwargs") or {}
            setattr(config, f"{name}_kwargs", {**options, "offload": True})
    if state is not None and policy in (True, "fastlm"):
        state.activations = Activations()
    if not policy and any(getattr(module, "gradient_checkpointing", False) for module in core.modules()):
        new_name = getattr(core, "activation_checkpointing_disable", None)
        (new_name or core.gradient_checkpointing_disable)()
    if state is None:
        layers = decoder_layers(core)
        how = last_policy(layers) if policy == "offload" and layers else "recompute" if policy else "keep"
        why = f"gradient_checkpointing={bool(policy)}" if given & names else f"use_gradient_checkpointing={setting!r}"
        also = " (keeping what fits is SFTTrainer's)" if policy in (True, "fastlm") else ""
        Voice(config.process_index == 0).say(f"activations are {in_words([how])}: {why}{also}")


def _fsdp_recomputes(config: Any) -> bool:
    """Whether FSDP is on and wraps layers to recompute them, as the arguments or accelerate's launcher ask."""
    asked = (config.fsdp_config or {}).get("activation_checkpointing", os.environ.get("FSDP_ACTIVATION_CHECKPOINTING"))
    on = config.fsdp or os.environ.get("ACCELERATE_USE_FSDP")
    return all(str(value or "false").lower() not in ("false", "0") for value in (on, asked))


def begin(trainer: Any) -> None:
    """Before Trainer.train: what an earlier trainer chose for the model is not the setting of this one."""
    if not (layers := _layers(trainer)):
        return
    core: Any = patched_core(trainer.model)
    _offload(trainer).on = offloads(core)
    for layer in layers:
        leave_out(layer, "keep")


def _layers(trainer: Any) -> list[Any]:
    """The decoder layers; none where the model is not patched (any more) or is none of the known families."""
    core: Any = patched_core(trainer.model)
    layers = decoder_layers(core) if core is not None else []
    return layers if all(hasattr(layer, "gradient_checkpointing") for layer in layers) else []


def _offload(trainer: Any) -> Offload:
    core: Any = patched_core(trainer.model)
    return core._fastlm_model.offload


def _can_be_done_again(trainer: Any, layers: list[Any], activations: Activations) -> bool:
    """Whether something is left to try should this micro-step not fit; earlier gradients are set aside for that.

    Where a layer keeps more than its input there is room for them. Else they must not take what offloading would free.
    """
    if not one_process(trainer) or activations.policy == last_policy(layers):
        return False
    if activations.policy in _KEEPING:
        return True
    earlier = sum(parameter.grad.nbytes for parameter in activations.trained if parameter.grad is not None)
    return earlier <= len(layers) * _input(trainer, activations)


def _input(trainer: Any, activations: Activations) -> int:
    """Bytes of what a layer reads."""
    core: Any = patched_core(trainer.model)
    return activations.tokens * core.config.get_text_config().hidden_size * core.dtype.itemsize


def _left_gradients_alone(trainer: Any, activations: Activations) -> bool:
    """Whether a backward that failed touched only gradients that were set aside: not those of parameters that train
    since the first step, nor any that a hook has applied already, as optimizers that step in backward do.
    """
    known = {id(parameter) for parameter in activations.trained}
    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    return all(id(parameter) in known and not parameter._post_accumulate_grad_hooks for parameter in trained)


def set_policy(layers: list[Any], policy: str | Sequence[str]) -> None:
    """policy: of all layers, or of each."""
    set_policies(layers, per_layer(policy, len(layers)))


def _patch(module: Any) -> LayerPatch | None:
    return module.__dict__.get("_fastlm")


def _begin_to_count(trainer: Any, layers: list[Any], activations: Activations, inputs: dict[str, Any]) -> None:
    if activations.tokens:
        return
    activations.tokens = tokens_of(inputs)
    activations.trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if (gauge := _gauge(trainer, begin=True)) is not None:  # loading or an earlier run may have taken more
        activations.before = gauge.allocated
    for patch in filter(None, map(_patch, layers)):
        patch.kept = 0


def kept_bytes(layers: list[Any]) -> list[int]:
    """What each layer would keep of the batch that was counted; 0 where nobody counted."""
    return [(one.kept or 0) if one is not None else 0 for one in map(_patch, layers)]


def _choose(trainer: Any, layers: list[Any], state: State, activations: Activations) -> None:
    """Set the layers' policies for the rest of the run, the same on every rank: the highest level that fits."""
    kept = kept_bytes(layers)
    norms, products = ([0 if one is None else getattr(one, what) for one in map(_patch, layers)]
                       for what in ("norms", "products"))  # fmt: skip
    levels = ladder([spared(*sizes) for sizes in zip(norms, products, strict=True)])
    gauge, needed, taken = _gauge(trainer), list[int](), activations.peak - activations.before
    if gauge is not None:
        longer = max(1.0, largest_batch(trainer, state, activations.tokens) / activations.tokens)
        trained = sum(parameter.nbytes for parameter in activations.trained)
        aside = trained * (trainer.args.gradient_accumulation_steps > 1)  # during a micro-step
        # what can be done again shows by itself that a longer batch is too much
        again = one_process(trainer) and aside <= len(layers) * _input(trainer, activations)
        missing = int(taken + max(0, taken - trained) * (0 if again else longer - 1)) - gauge.free
        leaves = int((len(layers) - 2) * (1 if again else longer) * _input(trainer, activations))
        helps = last_policy(layers) == "offload" and missing <= leaves
        if offload_ahead(trainer, state, missing * helps):
            return
    if gauge is not None and all(kept):
        longer = min(longer, _LONGER) if one_process(trainer) else longer
        steps = _worst_moments(levels[1:], kept, norms, products, taken)
        needed = [int(longer * MARGIN * step) + RESERVE + aside for step in steps]
    room = 0 if gauge is None else _graph_room(state, gauge.free, needed)
    free = 0 if gauge is None else max(0, gauge.free - room)
    choice = 0 if gauge is None else agreed(trainer, sum(size < free for size in needed))  # they rise
    level = levels[choice]
    activations.levels = list(zip([0, *needed], levels, strict=False))
    if choice:
        _take(activations, layers, level)
    else:  # as they are: the user may have some of them recomputed only
        activations.policy = "recompute"
    if gauge is not None and needed:
        sizes = f"{needed[-1] / 2**30:.1f} GiB"
        least = levels[len(layers)]  # without recomputing
        if level != levels[-1] and overall(least) in ("light", "lean"):
            sizes += f", {in_words(least)} {needed[len(layers) - 1] / 2**30:.1f}"
        state.voice.say(
            f"activations are {in_words(level)}: keeping them takes up to {sizes}, "
            f"and {free / 2**30:.1f} GiB are free" + " beside CUDA graphs" * bool(room)
        )


def _graph_room(state: State, free: int, needed: list[int]) -> int:
    """Bytes to leave for CUDA graphs: for most steps, if some layers may keep something beside them."""
    rooms = state.graph_rooms or (0,)
    return next((room for room in rooms if needed and free - room > needed[0]), rooms[-1])


def present_need(activations: Activations, count: int) -> int:
    """Bytes that have to be free for a step under the policies that so many layers have now."""
    return max(_asked(activations, count), int(MARGIN * (activations.peak - activations.before)))


def _asked(activations: Activations, count: int) -> int:
    """Bytes that had to be free when the present policies of so many layers were chosen; 0 where they were not."""
    present = activations.mix or (activations.policy,) * count
    return next((size for size, level in activations.levels if level == present), 0)


def _take(activations: Activations, layers: list[Any], level: tuple[str, ...]) -> None:
    activations.policy = overall(level)
    activations.mix = level if activations.policy == "mixed" else ()
    set_policy(layers, level)


def _lower(activations: Activations, count: int) -> tuple[str, ...]:
    """The highest level that needs a tenth less than the present one, which was too much."""
    most = 0.9 * _asked(activations, count)
    return next((level for size, level in reversed(activations.levels) if size < most), ("recompute",) * count)


def _worst_moments(
    levels: Sequence[Sequence[str]], kept: Sequence[int], norms: Sequence[int], products: Sequence[int], recomputed: int
) -> list[int]:  # fmt: skip
    """Bytes that a step takes at each level, none of which recomputes the last layer, from what it took recomputed.

    Worst is the last layer's backward, when all is held; layers that are recomputed find it gone. What it keeps was
    there in the measured step too, but for its products: none in tiles, and else their gradients took their place. Its
    second norm is there again.
    Where the head's moment was worse than a layer's, it misses the difference: MARGIN and RESERVE are larger.
    """
    own, norms = kept[-1] - products[-1], [*norms[:-1], norms[-1] // 2]
    return [
        recomputed - own + sum(
            all_of_it - left_out(policy, *sizes)
            for policy, all_of_it, *sizes in zip(level, kept, norms, products, strict=True) if policy != "recompute"
        )
        for level in levels
    ]  # fmt: skip


def _again_if_too_large(
    original: Callable[..., Tensor], trainer: Any, layers: list[Any], state: State, activations: Activations,
    model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The micro-step; if the GPU's memory does not do, again with layers recomputed, then with inputs offloaded."""
    one_per_device = {parameter.device: parameter for parameter in activations.trained}.values()
    random, (devices, states) = torch.get_rng_state(), get_device_states(*one_per_device)
    pending = {mode: list(rows) for mode, rows in state.pending.items()}
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}  # of a loss not ours
    seen = trainer._total_train_tokens
    with _earlier_gradients(activations.trained):
        while activations.policy != last_policy(layers):
            try:
                return original(trainer, model, dict(inputs), *args, **kwargs)
            except torch.OutOfMemoryError:
                if not _left_gradients_alone(trainer, activations):
                    raise
            # outside the handler, whose traceback would hold on to the activations
            _clear(activations.trained)
            state.pending.update({mode: list(rows) for mode, rows in pending.items()})
            trainer._metrics["train"].clear()
            trainer._metrics["train"].update({name: list(values) for name, values in metrics.items()})
            trainer._total_train_tokens = seen
            torch.set_rng_state(random)
            if devices:
                set_device_states(devices, states)
                torch.cuda.empty_cache()
            tokens = tokens_of(inputs)
            if state.graphs and state.graphs.holds:
                state.graphs.stop()
                state.voice.say(f"a batch of {tokens} tokens needs the memory of the CUDA graphs: from here on without")
                continue
            if kept := activations.policy in _KEEPING:
                level = _lower(activations, len(layers))
                _take(activations, layers, level)
            else:
                activations.policy = "offload"
            _offload(trainer).on = not kept
            what, then = ("activations", in_words(level)) if kept else ("layer inputs", "in host memory")
            state.voice.say(f"keeping {what} was too much for a batch of {tokens} tokens: from here on {then}")
        return original(trainer, model, inputs, *args, **kwargs)


@contextmanager
def _earlier_gradients(trained: list[Tensor]) -> Iterator[None]:
    """Sets earlier micro-batches' gradients aside; then adds the new ones, or drops those of a backward that failed."""
    earlier = [(parameter, parameter.grad) for parameter in trained if parameter.grad is not None]
    _clear([parameter for parameter, _ in earlier])
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            _clear(trained)
        both = [(gradient, parameter.grad) for parameter, gradient in earlier if parameter.grad is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))  # a launch for many
        for parameter, gradient in earlier:
            parameter.grad = gradient


def _clear(trained: list[Tensor]) -> None:
    for parameter in trained:
        parameter.grad = None
