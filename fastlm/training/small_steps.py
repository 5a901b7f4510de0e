"""Which steps of a run are so small that they go as CUDA graphs (models/graphs.py), and what is captured ahead.

Where a layer's products take less time than the host needs to launch it, the GPU waits. Sizes that the run will meet
more than once, by the lengths in its data set, are captured together after the second step, the largest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.checkpointing import policy_of
from ..models.graphs import LayerGraphs, Size, largest_size, size_of
from ..models.patch import decoder_layers, patched_core
from ..packing.dataset import lengths_of
from . import memory, optimizers
from .costs import overall
from .report import PEAK_TFLOPS, Operations, count_operations, gpu_of
from .room import costs_of, free_bytes
from .step import State, one_process, state_of

__all__ = ["train", "training_step", "worthwhile"]

_HOST = 0.006  # seconds in which the host launches a layer, forward and backward: 0.2 s for 32 (16-core server, H200)
_SHARE = 0.65  # of the data sheet's TFLOP/s that products of some thousand rows reach
_OTHERS = 100.0  # TFLOP/s of a GPU that is not in the table
_DRAWS = 2000


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.train; however it ends, the graphs and their memory are gone."""
    state = state_of(trainer)
    if state is not None:
        state.graphs, state.steps = None, 0
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
        chosen = state.activations is None or state.activations.policy != "first"
        state.graphs = (_graphs(trainer, state, inputs) or False) if chosen else None
    loss = memory.training_step(original, trainer, model, inputs, *args, **kwargs)
    if state is not None:
        state.steps += 1
    return loss


def _graphs(trainer: Any, state: State, inputs: dict[str, Any]) -> LayerGraphs | None:
    """Bound to the model, with what to capture; None where they are of no use, or cannot be, which is said."""
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
    sizes = _expected(trainer, limit)
    if not sizes and (sizes is not None or boundaries.token_count > limit):
        return None
    graphs = LayerGraphs(core.base_model, limit, state.voice.say)
    obstacle = graphs.obstacle or _repeatable() or _too_large(trainer, core, state, limit, largest)
    if obstacle is not None:
        state.voice.say(f"steps of few tokens run without CUDA graphs: {obstacle}")
        return None
    graphs.plan(sizes or ())
    graphs.bind(core.base_model)
    return graphs


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


def _expected(trainer: Any, limit: int) -> list[Size] | None:
    """Sizes up to the limit that serve what the rest of the run meets: each, by chance, one of its steps or more, and
    those that come less often together. None where nothing tells.
    """
    from datasets import Dataset

    dataset, samples = trainer.train_dataset, trainer._train_batch_size
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return None
    if "seq_lengths" in dataset.column_names or getattr(trainer.args, "tokens_per_step", None) is not None:
        return None
    lengths, random = lengths_of(dataset), np.random.default_rng(0)
    drawn = lengths[random.integers(len(lengths), size=(_DRAWS, samples))]
    met = Counter(size_of(int(row.sum()), samples, int(row.max())) for row in drawn)
    batches = (trainer.state.max_steps - trainer.state.global_step) * trainer.args.gradient_accumulation_steps
    sizes, rare, steps = list[Size](), list[Size](), 0.0
    for size in [*sorted((s for s in met if s is not None and s.tokens <= limit), reverse=True), None]:
        own = met[size] * batches / _DRAWS if size is not None else 1
        if size is not None and own < 1:
            rare.append(size)
            steps += own
        if rare and steps >= (1 if own < 1 else 0.5):  # one that serves all of them
            sizes.append(Size(rare[0].tokens, max(s.entries for s in rare), max(s.longest for s in rare)))
        if steps >= 1 or own >= 1:
            rare, steps = [], 0.0
        if size is not None and own >= 1:
            sizes.append(size)
    return sizes


def _too_large(trainer: Any, core: Any, state: State, limit: int, largest: int) -> str | None:
    """Why the graphs of so many tokens cannot be held beside a step of the largest batch without a graph."""
    layers = decoder_layers(core)
    policies = [policy_of(layer, core._fastlm_model.offload.on) for layer in layers]
    if state.activations is not None and overall(policies) == "keep":  # as measured
        kept = sum(memory.kept_bytes(layers))
        needed = memory.MARGIN * kept / max(state.activations.tokens, 1) * (limit + largest) + memory.RESERVE
    elif (costs := costs_of(trainer, core)) is None:
        return "nobody could count what they take"
    else:
        step = sum(costs.worst_moment(policies, largest).values()) - sum(costs.standing().values())
        needed = memory.MARGIN * (step + costs.graphs(limit, policies)) + memory.RESERVE
    free = free_bytes(core.device)
    if needed < free:
        return None
    return f"{needed / 2**30:.1f} GiB would have to be free for their activations, and {free / 2**30:.1f} are"
