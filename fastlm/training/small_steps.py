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
from .report import PEAK_TFLOPS, Operations, count_operations, gpu_of
from .room import free_bytes
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
        state.graphs = None
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
    if state is not None and state.graphs is None and trainer.state.global_step > 0:
        chosen = state.activations is None or state.activations.policy != "first"
        state.graphs = (_graphs(trainer, state, inputs) or False) if chosen else None
    return memory.training_step(original, trainer, model, inputs, *args, **kwargs)


def _graphs(trainer: Any, state: State, inputs: dict[str, Any]) -> LayerGraphs | None:
    """Bound to the model, with what to capture; None where they are of no use, or cannot be, which is said."""
    core: Any = patched_core(trainer.model)
    boundaries = inputs.get("boundaries")
    if core is None or boundaries is None or not getattr(core, "_fastlm_cuda_graphs", True):
        return None
    most = _worthwhile(core)
    unfit = _unfit(trainer, state, core)
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
    obstacle = graphs.obstacle or _repeatable() or _too_large(core, state, limit, largest)
    if obstacle is not None:
        state.voice.say(f"steps of few tokens run without CUDA graphs: {obstacle}")
        return None
    graphs.plan(sizes or ())
    graphs.bind(core.base_model)
    return graphs


def _unfit(trainer: Any, state: State, core: Any) -> str | None:
    """What about this run graphs cannot be had with, whatever its batches."""
    if not one_process(trainer):
        return "other processes or DeepSpeed take part"
    if core._fastlm_model.limits:
        return "its rotary embedding depends on the longest sample"
    if any(policy_of(layer, False) != "keep" for layer in decoder_layers(core)):
        return "not all activations are kept"
    # nobody could do a step again for which graphs left too little memory
    return 'only use_gradient_checkpointing="fastlm" has them' if state.activations is None else None


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
    """Sizes up to the limit that the rest of the run meets, by chance, at least once; None where nothing tells."""
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
    return [s for s, n in met.items() if s is not None and s.tokens <= limit and n * batches >= _DRAWS]


def _too_large(core: Any, state: State, limit: int, largest: int) -> str | None:
    """Why the activations of a pass of limit tokens cannot be held beside those of a step without a graph."""
    kept = sum(memory.kept_bytes(decoder_layers(core)))
    needed = memory.MARGIN * kept / max(state.activations.tokens, 1) * (limit + largest) + memory.RESERVE
    free = free_bytes(core.device)
    if needed < free:
        return None
    return f"{needed / 2**30:.1f} GiB would have to be free for their activations, and {free / 2**30:.1f} are"
