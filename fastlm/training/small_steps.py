"""Which steps of a run are so small that they go as CUDA graphs (models/graphs.py), and what is captured ahead.

Where a layer's products take less time than the host needs to launch it, the GPU waits. Sizes that the run will meet,
by the lengths in its data set, are captured together once policies are chosen, the largest first. Where there is too
little memory for what these keep, they recompute, or are those of 99 steps of 100, or of nine of ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..models.checkpointing import KEEPING, policy_of
from ..models.graphs import LayerGraphs, Size, largest_size, size_of
from ..models.patch import decoder_layers, patched_core
from ..packing.dataset import lengths_of
from . import memory, optimizers
from .costs import StepCosts, overall
from .report import PEAK_TFLOPS, Operations, count_operations, gpu_of
from .room import costs_of, free_bytes
from .step import State, one_process, state_of

__all__ = ["TWICE", "Prospect", "train", "training_step", "ways", "worthwhile"]

_HOST = 0.006  # seconds in which the host launches a layer, forward and backward: 0.2 s for 32 (16-core server, H200)
_SHARE = 0.65  # of the data sheet's TFLOP/s that products of some thousand rows reach
TWICE = 0.75  # of these steps' tokens, where graphs run layers again that otherwise would not be: three passes, not two
_SERVED = (0.99, 0.9)  # shares of the steps to be served where there is no memory for all, the first that fits
_OTHERS = 100.0  # TFLOP/s of a GPU that is not in the table
_DRAWS = 2000

_Limit = TypeVar("_Limit", int, float)


@dataclass(frozen=True, eq=False)
class Prospect:
    """Graphs that wait for policies to be chosen.

    met: sizes of steps, as `_met` tells them. fewer: tokens of the largest step in which recomputing for a graph alone
    pays. costs: of a step; None where nobody can count them.
    """

    graphs: LayerGraphs
    met: Counter[Size | None] | None
    fewer: int
    costs: StepCosts | None


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.train; however it ends, the graphs and their memory are gone."""
    state = state_of(trainer)
    if state is not None:
        state.graphs, state.prospect, state.steps, state.graph_rooms = None, None, 0, ()
    try:
        return optimizers.train(original, trainer, *args, **kwargs)
    finally:
        core: Any = patched_core(trainer.model)
        if state is not None and core is not None:
            LayerGraphs.unbind(core.base_model)
        if state is not None and state.graphs:
            state.graphs.release()


def training_step(
    original: Callable[..., Tensor], trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Tensor:
    """SFTTrainer.training_step, after a look whether graphs are of use, once there is something to judge by."""
    state = state_of(trainer)
    if state is not None and state.graphs is None and state.steps >= trainer.args.gradient_accumulation_steps:
        if state.prospect is None:
            state.prospect = _graphs(trainer, state, inputs)
        if state.prospect is None:
            state.graphs = False
        elif state.activations is None or state.activations.policy != "first":
            state.graphs, state.prospect = _bound(trainer, state, state.prospect) or False, None
    loss = memory.training_step(original, trainer, model, inputs, *args, **kwargs)
    if state is not None:
        state.steps += 1
    return loss


def _graphs(trainer: Any, state: State, inputs: dict[str, Any]) -> Prospect | None:
    """What is to be captured once policies are chosen; None where it is of no use, or cannot be, which is said."""
    core: Any = patched_core(trainer.model)
    boundaries = inputs.get("boundaries")
    if core is None or boundaries is None or not getattr(core, "_fastlm_cuda_graphs", True):
        return None
    most = _worthwhile(core)
    unfit = _unfit(trainer, core)
    if unfit is not None:
        if boundaries.token_count <= most:
            state.voice.say(f"steps of few tokens run without CUDA graphs: {unfit}")
        return None
    largest = int(memory.largest_batch(trainer, state, boundaries.token_count))
    whole = size_of(largest, boundaries.sample_count, boundaries.max_length)
    limit = min(most, largest if whole is None else whole.tokens)
    met = _met(trainer)
    if not _expected(trainer, met, limit) if met is not None else boundaries.token_count > limit:
        return None
    graphs = LayerGraphs(core.base_model, limit, state.voice.say)
    obstacle = graphs.obstacle or _repeatable()
    if obstacle is not None:
        state.voice.say(f"steps of few tokens run without CUDA graphs: {obstacle}")
        return None
    fewer, costs = min(limit, largest_size(int(TWICE * most))), costs_of(trainer, core)
    few = 0 if met is None else sum(count for size, count in met.items() if size and size.tokens <= fewer)
    if met is not None and few > met.total() / 2 and costs is not None:
        largest_of = [_usual(met, fewer, share) for share in _SERVED]
        state.graph_rooms = tuple(int(memory.MARGIN * costs.graphs(size, "recompute")) for size in largest_of)
    return Prospect(graphs, met, fewer, costs)


def _bound(trainer: Any, state: State, prospect: Prospect) -> LayerGraphs | None:
    """They, with as many tokens and as much kept as there is memory for; None where there is not enough, and said."""
    core: Any = patched_core(trainer.model)
    layers, missing = decoder_layers(core), list[str]()
    graphs, met, costs = prospect.graphs, prospect.met, prospect.costs
    policies = [policy_of(layer, core._fastlm_model.offload.on) for layer in layers]
    may_recompute = state.activations is not None and costs is not None
    for most, inside in ways(graphs.limit, prospect.fewer, policies, may_recompute):
        limits = [most] if met is None else [most, *(_usual(met, most, share) for share in _SERVED)]
        for limit in dict.fromkeys(limits):
            sizes = None if met is None else _expected(trainer, met, limit)
            if sizes == []:
                continue
            if (reason := _too_large(trainer, core, state, costs, limit, inside, policies)) is None:
                graphs.limit, graphs.recomputed = limit, inside is not policies
                graphs.plan(sizes or ())
                graphs.bind(core.base_model)
                return graphs
            missing.append(reason)
    if missing:
        state.voice.say(f"steps of few tokens run without CUDA graphs: {missing[-1]}")
    return None


def ways(
    most: _Limit, fewer: _Limit, policies: Sequence[str], may_recompute: bool
) -> list[tuple[_Limit, Sequence[str]]]:  # fmt: skip
    """Up to which size, and under which policies of layers, graphs are of use, the fastest first.

    fewer: where all recompute. may_recompute: whether they may where layers do not.
    """
    found = [(most, policies)]
    if may_recompute and not set(KEEPING).isdisjoint(policies):
        found.append((fewer, ["recompute"] * len(policies)))
    return found


def _unfit(trainer: Any, core: Any) -> str | None:
    """What about this run graphs cannot be had with, whatever its batches."""
    if not one_process(trainer):
        return "other processes or DeepSpeed take part"
    return "its rotary embedding depends on the longest sample" if core._fastlm_model.limits else None


def _repeatable() -> str | None:
    """A run that stops and goes on would not capture at the same steps, and round otherwise in these."""
    return "deterministic algorithms are asked for" if torch.are_deterministic_algorithms_enabled() else None


def _worthwhile(core: Any) -> int:
    """Tokens of the largest step in which the GPU would wait for the host; 0 on a CPU."""
    operations = count_operations(core)
    if operations is None or core.device.type != "cuda":
        return 0
    return worthwhile(operations, gpu_of(torch.cuda.get_device_name(core.device)))


def worthwhile(operations: Operations, gpu: str | None) -> int:
    """The same of a model with these operations, on a GPU of the table, or another."""
    seconds = operations.useful(1, 0, Counter()) / (_SHARE * PEAK_TFLOPS.get(gpu or "", _OTHERS) * 1e12)  # a token's
    return largest_size(int(_HOST * len(operations.layers) / seconds))


def _met(trainer: Any) -> Counter[Size | None] | None:
    """Sizes of steps that chance makes of the data set's lengths; None where nothing tells."""
    from datasets import Dataset

    dataset, samples = trainer.train_dataset, trainer._train_batch_size
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return None
    if "seq_lengths" in dataset.column_names or getattr(trainer.args, "tokens_per_step", None) is not None:
        return None
    lengths, random = lengths_of(dataset), np.random.default_rng(0)
    drawn = lengths[random.integers(len(lengths), size=(_DRAWS, samples))]
    return Counter(size_of(int(row.sum()), samples, int(row.max())) for row in drawn)


def _usual(met: Counter[Size | None], limit: int, share: float) -> int:
    """Tokens that this share of the steps does not exceed, and no more than the limit."""
    return min(limit, int(np.quantile([size.tokens if size else limit for size in met.elements()], share)))


def _expected(trainer: Any, met: Counter[Size | None], limit: int) -> list[Size]:
    """Sizes up to the limit that serve what the rest of the run meets: each, by chance, one of its steps or more, and
    those that come less often together.
    """
    batches = (trainer.state.max_steps - trainer.state.global_step) * trainer.args.gradient_accumulation_steps
    sizes, rare = list[Size](), list[Size]()

    def serve_rare(least: float) -> None:
        """By one size, where they are so many steps."""
        if rare and sum(met[size] for size in rare) * batches >= least * met.total():
            sizes.append(Size(rare[0].tokens, max(s.entries for s in rare), max(s.longest for s in rare)))
            rare.clear()

    for size in sorted((s for s in met if s is not None and s.tokens <= limit), reverse=True):
        if met[size] * batches < met.total():
            rare.append(size)
            serve_rare(1)
        else:
            serve_rare(0.5)
            rare.clear()  # fewer are not worth a capture
            sizes.append(size)
    serve_rare(0.5)
    return sizes


def _too_large(
    trainer: Any, core: Any, state: State, costs: StepCosts | None, limit: int, inside: Sequence[str],
    policies: Sequence[str],
) -> str | None:  # fmt: skip
    """Why graphs of so many tokens, under policies inside, cannot be held beside a step without one under its own."""
    activations = state.activations
    if costs is not None:
        held = costs.graphs(limit, inside)
    elif activations is not None and overall(inside) == "keep":  # as measured
        held = sum(memory.kept_bytes(decoder_layers(core))) * limit // max(activations.tokens, 1)
    else:
        return "nobody could count what they take"
    if activations is not None and activations.policy not in ("recompute", "offload"):
        step = memory.present_need(activations, len(policies))
    else:  # it may be that nobody can do a step again for which graphs left too little memory
        assert costs is not None
        largest = int(memory.largest_batch(trainer, state, limit))
        most = sum(costs.worst_moment(policies, largest).values()) - sum(costs.standing().values())
        step = int(memory.MARGIN * most) + memory.RESERVE
    needed, free = memory.MARGIN * held + max(step, memory.RESERVE), free_bytes(core.device)
    if needed < free:
        return None
    return f"{needed / 2**30:.1f} GiB would have to be free for their activations, and {free / 2**30:.1f} are"
