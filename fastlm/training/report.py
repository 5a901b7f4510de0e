"""What a training run achieved, printed at its end and logged with the trainer's last line.

Tokens, targets and sample lengths are known on the host (the batches' boundaries), and time is taken by events on the
GPU's own clock, so that counting holds up nothing. Operations are those of the model's own products. Useful are one
product forward and one for the input's gradient of every weight, one more where it is trained, the head's for labelled
positions alone, and six of attention (two forward, four backward) for the pairs of tokens that attend to each other.
Spent are these and what is computed twice: attention's scores in backward, and the forward of recomputed layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from ..models.adapters import adapter_ranks
from ..models.checkpointing import policy_of
from ..models.layers import attention_features
from ..models.patch import decoder_layers, patched_core
from .costs import OPTIMISERS
from .profile import StepProfiler
from .room import costs_of, counted, optimiser_as_asked
from .step import State, one_process, state_of

__all__ = ["PEAK_TFLOPS", "Operations", "TrainingReport", "add_to_log", "attended_pairs", "count_operations",
           "get_batch_samples", "gpu_of"]  # fmt: skip

# dense half-precision TFLOP/s of the data sheets, by the word that stands in torch.cuda.get_device_name
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L4": 121, "T4": 65}
_GIB = 2**30


# --- counting


@dataclass(frozen=True)
class LayerOperations:
    """Multiplications of one decoder layer: a token's, of its projections and adapters; a pair's, of its attention.

    forward, backward: of all products. again: of the forward that a recomputed layer runs once more. gated: of the
        gate and up products, which a lean layer makes once more.
    width: query heads x head_dim, one product for one pair of tokens. window: tokens that one sees, or None for all.
    """

    forward: int
    backward: int
    again: int
    gated: int
    width: int
    window: int | None


@dataclass(frozen=True)
class Operations:
    """Multiplications of a model: its decoder layers', and its head's for one target, forward and backward."""

    layers: tuple[LayerOperations, ...]
    head: int

    def useful(self, tokens: int, targets: int, pairs: Counter[int | None]) -> float:
        """Floating-point operations of forward and backward, two a multiplication; nothing counts twice."""
        layers = sum(tokens * (one.forward + one.backward) + 6 * one.width * pairs[one.window] for one in self.layers)
        return 2.0 * (layers + targets * self.head)

    def repeated(self, tokens: int, pairs: Counter[int | None], policies: Iterable[str]) -> float:
        """What is computed a second time; policies: of each layer's activations."""
        total = 0
        for one, policy in zip(self.layers, policies, strict=True):
            total += one.width * pairs[one.window]
            if policy == "lean":
                total += tokens * one.gated
            elif policy not in ("keep", "light"):
                total += tokens * one.again + 2 * one.width * pairs[one.window]
        return 2.0 * total


def count_operations(core: Any, adapted_mlp: bool | None = None) -> Operations | None:
    """Of a patched causal LM; None where layers are built otherwise, or multiply by other weights (experts).

    adapted_mlp: whether gate, up or down are to have adapters; None: as they have now.
    """
    layers, head = [_count_layer(layer, adapted_mlp) for layer in decoder_layers(core)], core.get_output_embeddings()
    known = tuple(one for one in layers if one is not None)
    if not known or len(known) < len(layers) or not isinstance(getattr(head, "weight", None), torch.Tensor):
        return None
    rows, width = head.weight.shape
    return Operations(known, rows * width * (3 if head.weight.requires_grad else 2))


def _count_layer(layer: Any, adapted_mlp: bool | None) -> LayerOperations | None:
    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    counted = {id(module.weight) for module in linear.values()}
    o_proj = linear.get("self_attn.o_proj", linear.get("self_attn.o_proj.base_layer"))
    if any(p.dim() > 1 and id(p) not in counted for p in layer.parameters()) or o_proj is None:
        return None
    size = {name: module.in_features * module.out_features for name, module in linear.items()}
    forward, attention = sum(size.values()), layer.self_attn
    if adapted_mlp is None:
        adapted_mlp = any(name.startswith("mlp.") and ".lora_A." in name for name in linear)
    trained = sum(size[name] for name, module in linear.items() if module.weight.requires_grad)

    def made(names: str) -> int:
        """By these projections of the MLP and their B; what A made is kept."""
        return sum(size[name] for name in size if re.fullmatch(rf"mlp\.{names}_proj(\.base_layer|\.lora_B\..*)?", name))

    left_out = made("down") if adapted_mlp and _leaves_out_down(layer) else 0
    patch = attention.__dict__.get("_fastlm")
    window = attention_features(attention, patch.form)["window"] if patch is not None else None
    return LayerOperations(
        forward, forward + trained, forward - left_out, made("(gate|up)"), o_proj.in_features, window
    )  # fmt: skip


def _leaves_out_down(layer: Any) -> bool:
    """Whether a second run of the layer, its MLP adapted, needs no down product: see models/checkpointing.py."""
    patches = [module.__dict__.get("_fastlm") for module in (layer, getattr(layer, "mlp", layer))]
    return None not in patches and not (patches[0].form.norm_out or patches[1].form.packed)


def attended_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Pairs of a token and one that it sees, itself included, in causal attention within each sample.

    >>> attended_pairs([3, 1]), attended_pairs([4], window=2)
    (7, 7)
    """
    tokens = np.asarray(lengths, np.int64)
    full = tokens if not window else np.minimum(tokens, window)
    return int((full * (full + 1) // 2 + (tokens - full) * full).sum())


# --- the report


@dataclass
class _Counts:
    """Of some batches. pairs: by window. padded: tokens, had each been padded to its longest sample. largest: tokens
    of the largest one.
    """

    batches: int = 0
    tokens: int = 0
    targets: int = 0
    padded: int = 0
    largest: int = 0
    pairs: Counter[int | None] = field(default_factory=Counter)
    repeated: float = 0.0
    unknown: int = 0  # batches without boundaries: nobody on the host knows their tokens

    def add(self, other: _Counts) -> None:
        for name in ("batches", "tokens", "targets", "padded", "repeated", "unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self.pairs.update(other.pairs)


class TrainingReport(TrainerCallback):
    """Prints what a run achieved; every trainer of a fastlm model has one.

    ``trainer.remove_callback(TrainingReport)`` takes it away. The first step, which compiles, is not counted, and
    neither are steps that a profiler slows, evaluations and checkpoints. On several ranks the numbers are one GPU's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._begin(None, torch.device("cpu"), None)

    def _begin(self, core: Any, device: torch.device, half: torch.dtype | None) -> None:
        self._core, self._device, self._half = core, device, half
        self._operations = None if core is None else count_operations(core)
        self._windows = {one.window for one in self._operations.layers} if self._operations else set()
        self._step, self._total, self._steps, self._warm = _Counts(), _Counts(), 0, False
        self._slowed = False  # the step that is next, or runs
        self._largest: dict[tuple[str, ...], int] = {}  # tokens of a micro-batch, by the policies that it met
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None  # of the span that is running
        self._last: Any = None  # the end of its last step; None before the first
        self._facts: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        core = patched_core(model)
        dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else getattr(core, "dtype", torch.float32)
        self._begin(core, args.device, dtype if dtype.itemsize == 2 else None)
        if args.device.type == "cuda":  # loading or an earlier run may have taken more
            torch.cuda.reset_peak_memory_stats(args.device)

    def note(self, batches: Iterable[Any], slowed: bool = False) -> None:
        """Count the micro-batches of the step that is next. slowed: by a profiler, so that its time tells nothing."""
        self._slowed = slowed
        if slowed:
            self._pause()
        for batch in batches:
            boundaries = batch.get("boundaries") if isinstance(batch, dict) else None
            lengths = getattr(boundaries, "lengths", None)
            one = _Counts(batches=1, unknown=int(lengths is None))
            if boundaries is not None and lengths is not None:
                one.tokens = one.largest = boundaries.token_count
                one.padded = len(lengths) * max(lengths)
                one.targets = one.tokens if boundaries.label_count is None else boundaries.label_count
                one.pairs.update({window: attended_pairs(lengths, window) for window in self._windows})
            self._step.add(one)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._start is None:
            self._start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = self._now()
        if self._operations is not None:
            policies = tuple(_policies(self._core))
            self._step.repeated = self._operations.repeated(self._step.tokens, self._step.pairs, policies)
            self._largest[policies] = max(self._largest.get(policies, 0), self._step.largest)
        if self._slowed:
            self._warm, self._start, self._last = True, None, None
        elif self._warm or state.global_step >= state.max_steps:
            self._total.add(self._step)
            self._steps += 1
        else:
            self._warm, self._start = True, self._last
        self._step = _Counts()

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        """What comes between the last step and now is not training."""
        if self._last is not None:
            self._spans.append((self._start, self._last))
        self._start, self._last = self._now(), None

    on_evaluate = on_save = _pause

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self) -> float:
        self._pause()
        if self._device.type != "cuda":
            return sum(end - start for start, end in self._spans)
        self._spans[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans) / 1e3

    def facts(self, trainer: Any = None) -> dict[str, float]:
        """The numbers, as far as they are known; made once, when training ends (waits for the GPU).

        valid_tokens_per_second; padding_avoided, a share of padded batches' tokens; tflops_per_second, useful ones;
        tflops_per_second_spent; mfu, a share of the GPU's peak; floor_share, of a bare product's speed here, which
        bounds what the useful ones could reach; peak_memory_gib; predicted_peak_gib, as costs.py counts it for
        the trainer, if given; layers_<policy>.
        """
        if self._facts or not (self._warm or self._steps):
            return self._facts
        total, facts = self._total, self._facts
        if self._device.type == "cuda":
            facts["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / _GIB
        if not total.unknown and trainer is not None and (predicted := _predicted_peak(trainer, self._largest)):
            facts["predicted_peak_gib"] = predicted / _GIB
        if total.unknown or not total.tokens or (seconds := self._seconds()) <= 0:
            return facts
        facts["valid_tokens_per_second"] = total.tokens / seconds
        facts["padding_avoided"] = 1 - total.tokens / total.padded
        facts.update({f"layers_{policy}": n for policy, n in Counter(_policies(self._core)).items()})
        if self._operations is not None:
            useful = self._operations.useful(total.tokens, total.targets, total.pairs)
            facts["tflops_per_second"] = useful / seconds / 1e12
            facts["tflops_per_second_spent"] = (useful + total.repeated) / seconds / 1e12
            facts.update(self._shares(facts["tflops_per_second"], total.tokens // total.batches))
        return facts

    def _shares(self, achieved: float, tokens: int) -> dict[str, float]:
        if self._device.type != "cuda" or self._half is None:
            return {}
        peak = _peak_tflops(torch.cuda.get_device_name(self._device))
        bare = _bare_tflops(self._core, tokens, self._half)
        shares = {} if peak is None else {"mfu": achieved / peak}
        return shares if bare is None else shares | {"floor_share": achieved / bare}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for line in _lines(self.facts(), self._steps, args.world_size):
            self._state.voice.say(line)


def gpu_of(device_name: str) -> str | None:
    """The entry of ``PEAK_TFLOPS`` that torch's name of a GPU means."""
    words = re.split(r"[\s-]+", device_name)
    return next((name for name in PEAK_TFLOPS if name in words), None)


def _peak_tflops(device_name: str) -> float | None:
    name = gpu_of(device_name)
    return None if name is None else float(PEAK_TFLOPS[name])


def _bare_tflops(core: Any, tokens: int, dtype: torch.dtype) -> float | None:
    """TFLOP/s of the largest projection's plain product, for as many tokens as a micro-batch has; None if too large."""
    linear = [m for layer in decoder_layers(core)[:1] for m in layer.modules() if isinstance(m, nn.Linear)]
    width, out = max(((m.in_features, m.out_features) for m in linear), key=lambda size: size[0] * size[1])
    device, rows = core.device, max(1, min(tokens, 16_384))
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay as they are
    try:
        x, weight = (torch.randn(n, width, dtype=dtype, device=device, generator=own) for n in (rows, out))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        for repeat in range(25):
            if repeat == 5:
                start.record(stream)
            x @ weight.t()
        end.record(stream)
    except torch.OutOfMemoryError:
        return None
    end.synchronize()
    return 20 * 2 * rows * width * out / start.elapsed_time(end) / 1e9


def _policies(core: Any) -> list[str]:
    """Of every decoder layer of a model that is patched, or was."""
    if core is None:
        return []
    offload = getattr(core.__dict__.get("_fastlm_model"), "offload", None)
    return [policy_of(layer, getattr(offload, "on", False)) for layer in decoder_layers(core)]


def _predicted_peak(trainer: Any, largest: Mapping[tuple[str, ...], int]) -> int | None:
    """Bytes of a run's worst moment, from its tokens by policies; None where something is not counted (costs.py)."""
    core, state, args, model = patched_core(trainer.model), state_of(trainer), trainer.args, trainer.model
    if core is None or state is None or not state.own_head or state.graphs or trainer.compute_loss_func is not None:
        return None
    devices = {parameter.device for parameter in model.parameters()}
    if not min(largest.values(), default=0) or not one_process(trainer) or not counted(trainer, devices):
        return None
    patched, ranks = core.__dict__["_fastlm_model"].report, adapter_ranks(core)
    if patched.stock or patched.fused.get("lora", 0) != len(ranks):
        return None
    if args.optim not in OPTIMISERS or not optimiser_as_asked(trainer):
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtype = core.dtype  # which transformers looks for in all parameters
    if any(parameter.dtype != dtype for parameter in trained) and not (args.bf16 or args.fp16):
        return None  # such adapters run unfused
    costs = costs_of(trainer, core, full=not ranks, optimiser=args.optim)
    if costs is None or sum(parameter.nbytes for parameter in trained) != costs.gradients:
        return None
    return max(sum(costs.worst_moment(policies, tokens).values()) for policies, tokens in largest.items())


def _lines(facts: dict[str, float], steps: int, ranks: int = 1) -> list[str]:
    lines = []
    if "valid_tokens_per_second" in facts:
        lines.append(
            f"{steps} steps counted: {facts['valid_tokens_per_second']:,.0f} valid tokens/s{' a GPU' * (ranks > 1)}, "
            f"{facts['padding_avoided']:.0%} padding avoided"
        )
    if "tflops_per_second" in facts:
        useful, spent = facts["tflops_per_second"], facts["tflops_per_second_spent"]
        line = f"{useful:.4g} useful TFLOP/s, {spent:.4g} with what is computed twice"
        line += f"; MFU {facts['mfu']:.1%}" if "mfu" in facts else ""
        lines.append(line + (f"; {facts['floor_share']:.2f} of the floor" if "floor_share" in facts else ""))
    beside = f" (counted {facts['predicted_peak_gib']:.1f})" if "predicted_peak_gib" in facts else ""
    words = [f"peak memory {facts['peak_memory_gib']:.1f} GiB{beside}"] if "peak_memory_gib" in facts else []
    policies = [f"{name.removeprefix('layers_')} x {n:.0f}" for name, n in facts.items() if name.startswith("layers_")]
    words += [f"activations: {', '.join(policies)}"] if policies else []
    return lines + (["; ".join(words)] if words else [])


def _report_of(trainer: Any) -> TrainingReport | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, TrainingReport)), None)


def get_batch_samples(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.get_batch_samples, its batches noted."""
    batches, count = original(trainer, *args, **kwargs)
    report = _report_of(trainer)
    if report is not None:
        callbacks = trainer.callback_handler.callbacks
        report.note(batches, any(isinstance(one, StepProfiler) and one.slows_next for one in callbacks))
    return batches, count


def add_to_log(trainer: Any, logs: dict[str, float]) -> None:
    """Add the facts to the line that ends training; integrations have closed when ``on_train_end`` comes to them."""
    report = _report_of(trainer)
    if report is not None and "train_runtime" in logs:
        logs.update(report.facts(trainer))
