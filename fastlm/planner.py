"""What fits: the memory that a training step will take, by part, before anything is downloaded or allocated.

    >>> print(fastlm.plan("Qwen/Qwen3-8B", gpu_memory=24, max_length=4096, batch_size=4, load_in_4bit=True))

The bytes come from training/costs.py; seconds come from the table below.
"""

from __future__ import annotations

import copy
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from . import keywords as kw
from .console import table
from .gguf_weights import GGUFCheckpoint, find_gguf
from .loader import base_of_adapter, existing, load_config
from .models import graphs, watched
from .models.adapters import adapter_ranks
from .models.patch import unwrap_peft
from .models.twin import twin_of
from .options import bits_of, check_bits, fit_length
from .training.costs import LONG_SAMPLE, POLICIES, Samples, StepCosts, in_words, ladder, overall, per_layer, step_costs
from .training.memory import MARGIN, RESERVE
from .training.report import PEAK_TFLOPS, Operations, attended_pairs, count_operations, gpu_of
from .training.small_steps import TWICE, ways, worthwhile

__all__ = ["GPUS", "Plan", "plan", "twin_of"]

_MOST_TOKENS = 2**31
_LENGTH = 2048  # tokens of a sample where nobody says, or what the model takes if that is less
_SHORTEST = 128  # tokens of a sample below which a smaller setting is not offered


@dataclass(frozen=True)
class GPU:
    """GB of memory, TFLOP/s of large 16-bit products, TB/s of a copy, GB/s to host memory; compute capability; how the
    speeds are known.
    """

    memory: int
    products: float
    copy: float
    link: float
    capability: tuple[int, int]
    known: str = "measured"


# An H200 reaches 66% of its data sheet's products and 89% of its bandwidth; the others are taken to do the same.
def _from_sheet(name: str, memory: int, bandwidth: float, link: float, capability: tuple[int, int]) -> GPU:
    products = PEAK_TFLOPS[name] * 650 / 989
    return GPU(memory, products, bandwidth * 4.27 / 4.8, link, capability, "data sheet, not measured")


GPUS = {
    "H200": GPU(141, 650, 4.27, 50, (9, 0)),  # its link is not measured
    "B200": _from_sheet("B200", 180, 8.0, 50, (10, 0)),
    "H100": _from_sheet("H100", 80, 3.35, 50, (9, 0)),
    "A100": _from_sheet("A100", 80, 2.04, 25, (8, 0)),
    "L4": _from_sheet("L4", 24, 0.3, 25, (8, 9)),
    "T4": _from_sheet("T4", 16, 0.32, 12, (7, 5)),
}
# What follows is an H200's, of Llama-3-8B's shapes.
# TFLOP/s of attention, as a share of the products', and the tokens of a sample that reach half of it: 131,072 tokens in
# samples of 240 and 8,192 take 7.4 and 73 ms (triton), 13.6 and 99 (varlen), 25.4 and 230 (efficient), flash4's of
# 8,192 56; in a step of one sample of 350,000 it reaches as much.
_ATTENTION = {
    "flash4": (550 / 650, 250), "triton": (450 / 650, 550), "varlen": (350 / 650, 930), "efficient": (145 / 650, 650),
}  # fmt: skip
# Every byte that a layer keeps makes up for the rest if it is read or written this often: norms, rotations, gates,
# adapters. 16,338 tokens: 0.867 to 0.916 s a step in five runs, of which products take 0.755 and attention 0.026.
# Without adapters less often: Qwen3-1.7B, every weight trained, 0.311 s a step with the optimiser's.
_TRAFFIC, _TRAFFIC_FULL = 7, 5
_FIRST = 0.0004  # seconds a layer that few rows take as well: a step of 476 tokens as CUDA graphs 0.040 to 0.046 s
# Seconds in which the host launches a layer, forward and backward: 0.235 s for 32; where forward runs twice, 10 ms.
_HOST, _HOST_TWICE = 0.007, 0.010
# Steps that were measured: of models this wide and more, of so many tokens
_WIDTH, _TOKENS = 2048, (476, 350_000)


@dataclass(frozen=True)
class Plan:
    """What a training step takes, in bytes as torch's allocator counts them.

    fits: whether it fits with ``policy``, the fastest that does: "keep" all activations, all but the norms' outputs
        ("light"), all but these and the MLPs' gate and up products ("lean"), "recompute" the layers, or "offload" their
        inputs too; "mixed" where layers differ. Where none does, the one that takes least; ``advice`` names what would
        fit.
    layers: how many of them have each policy; of a mix, the last ones keep most.
    peak_bytes: at the worst moment. parts: "weights", "adapters", "optimiser", "gradients", "activations", "loss" and
        "workspace" then, and "CUDA graphs" where a step has so few tokens that it runs as one and there is room, which
        add up to it. peaks: of each policy, were it all layers', without graphs.
    memory_bytes: of the GPU. largest_batch, longest_length: that fit if nothing else changes; 0 where nothing does.
    seconds_per_step: by GPU, this machine's or those that have the memory. known: of each, whether steps like it were
        "measured", or it is "estimated" from others, or from a "data sheet, not measured".
    """

    fits: bool
    policy: str
    layers: dict[str, int]
    peak_bytes: int
    parts: dict[str, int]
    peaks: dict[str, int]
    memory_bytes: int
    largest_batch: int
    longest_length: int
    seconds_per_step: dict[str, float]
    known: dict[str, str]
    advice: str | None
    setting: str

    def __str__(self) -> str:
        how = {
            "keep": "all activations kept",
            "light": "all activations kept but norms",
            "lean": "all activations kept but norms, gate and up products",
            "recompute": "layers recomputed",
            "offload": "layer inputs in host memory",
            "mixed": f"activations {in_words([name for name, count in self.layers.items() for _ in range(count)])}",
        }
        verdict = f"fits, {how[self.policy]}" if self.fits else "does not fit"
        rows: list[tuple[str, ...]] = [("part", "GiB")]
        rows += [(name, _gib(value)) for name, value in self.parts.items()]
        rows += [("peak", f"{_gib(self.peak_bytes)} of {_gib(self.memory_bytes)}")]
        lines = [f"{self.setting}: {verdict}", "", table(rows), ""]
        lines.append("peak by policy: " + ", ".join(f"{name} {_gib(value)}" for name, value in self.peaks.items()))
        if self.largest_batch or self.longest_length:
            lines.append(f"fits up to batch {self.largest_batch:,}, or samples of {self.longest_length:,} tokens")
        for name, seconds in self.seconds_per_step.items():
            speed = "estimated" if self.known[name] == "estimated" else f"its speed: {self.known[name]}"
            lines.append(f"{name}: {seconds:.3g} s a step ({speed})")
        return "\n".join(lines + ([] if self.advice is None else [self.advice]))

    def facts(self) -> dict[str, Any]:
        """Everything as one JSON object."""
        return asdict(self)


def plan(
    model: Any, *, gpu_memory: float | None = None, max_length: int | None = None, batch_size: int = 1, r: int = 16,
    target_modules: Sequence[str] | str | None = kw.PROJECTIONS, load_in_4bit: bool = False,
    full_finetuning: bool = False, optim: str = "adamw_8bit", gradient_accumulation_steps: int = 1,
    use_gradient_checkpointing: bool | str = "fastlm", trust_remote_code: bool = False, **hub: Any,
) -> Plan:  # fmt: skip
    """Predict whether, how and how fast a model trains on a GPU, and what would still fit.

    model: a folder, hub name, adapter or GGUF file, of which the configuration alone is read; a configuration; or a
        loaded model, whose adapters, dtype and quantisation then hold.
    gpu_memory: GiB; None is this machine's GPU. Attention is this GPU's; without one here, from Ampere on what takes
        most. max_length, batch_size: tokens of a sample (None: 2,048, or what the model takes if that is less) and
        samples of a micro-batch, all of them that long. r, target_modules, load_in_4bit, full_finetuning: as for
        FastLanguageModel.
    optim: as SFTConfig's. use_gradient_checkpointing: False, "recompute" or "offload" force that policy.
    hub: token, revision, cache_dir and the like.

    Activations are taken to be in 16 bits, for a loaded model in its dtype.

    Raises ValueError for settings that exclude each other, layers that fastlm does not fuse, a length past the
    model's limit, and no GPU; FileNotFoundError where there is no model.
    """
    check_bits(load_in_4bit=load_in_4bit, full_finetuning=full_finetuning)
    micro_batches = gradient_accumulation_steps
    for name, value in (
        ("max_length", _LENGTH if max_length is None else max_length), ("batch_size", batch_size), ("r", r),
        ("gradient_accumulation_steps", micro_batches),
    ):  # fmt: skip
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
    memory = _memory(gpu_memory)
    checkpointing = kw.check_checkpointing(use_gradient_checkpointing)
    forced = {False: "keep", "recompute": "recompute", "offload": "offload"}.get(checkpointing)

    core = unwrap_peft(model)
    loaded = isinstance(core, PreTrainedModel)
    config = copy.deepcopy(core.config if loaded else _config(model, trust_remote_code, hub))
    length = fit_length(config, max_length or _LENGTH, None, is_default=True)
    if max_length is not None and max_length > length:
        raise ValueError(f"max_length (--max-length) is {max_length}, but this model takes {length} tokens")
    dtype = core.dtype if loaded else torch.bfloat16
    bits = bits_of(SimpleNamespace(config=config, dtype=dtype))
    if bits not in ("4-bit", "16-bit", "32-bit"):
        raise ValueError(f"plan knows weights in 16 bits and in NF4; these are {bits}")
    twin = twin_of(config, dtype, trust_remote_code)
    full = full_finetuning or getattr(core, "_fastlm_full_finetuning", False)
    ranks = _ranks(core) if loaded else {}
    lora = {} if full else ranks or dict.fromkeys(_targets(twin, target_modules), r)
    if not full and not lora:
        raise ValueError("target_modules is empty: name what is to be adapted, or set full_finetuning")

    names = _gpus(memory)
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None

    def costs_of(in_4bit: bool, full: bool, longest: int = length, device: tuple[int, int] | None = here) -> StepCosts:
        return step_costs(
            twin, {} if full else lora, full=full, quantised=in_4bit, optimiser=optim, accumulates=micro_batches > 1,
            samples=None if device is None else Samples(device, longest),
        )  # fmt: skip

    in_4bit, tokens = load_in_4bit or bits == "4-bit", batch_size * length
    costs = costs_of(in_4bit, full)
    able = {"keep", "recompute", "offload"}.union(*(layer.spared() for layer in costs.layers))
    policies = [name for name in POLICIES if name in able] if forced is None else [forced]
    peaks = {policy: sum(costs.worst_moment(policy, tokens).values()) for policy in policies}
    count = sum(parameter.numel() for parameter in twin.parameters()) / 1e9
    operations = count_operations(twin.requires_grad_(full), any(".mlp." in name for name in lora))
    assert operations is not None  # of layers that are fused
    smallest = min(names, key=lambda name: GPUS[name].memory, default=None)

    def graph_size(name: str | None, share: float = 1.0) -> int:
        """Tokens of the CUDA graph for a micro-batch, one of a share of those that the GPU would wait for; or 0."""
        limited = twin._fastlm_model.limits
        return 0 if limited else _graph_size(name, operations, costs, batch_size, length, share)

    chosen = None
    if forced is None and (size := graph_size(smallest, TWICE)):  # as small_steps.py leaves room
        chosen = _fastest(costs, policies, memory - int(MARGIN * costs.graphs(size, "recompute")), tokens)
        if chosen in (None, "offload") and _needed(costs, "recompute", tokens) <= memory:
            chosen = "recompute"
    chosen = chosen or _fastest(costs, policies, memory, tokens)
    most = _most_tokens(costs, policies, memory)
    longest = most // batch_size
    if length < LONG_SAMPLE <= longest:  # other attention
        longer = _most_tokens(costs_of(in_4bit, full, longest), policies, memory) // batch_size
        longest = max(longer, LONG_SAMPLE - 1)
    limit = getattr(config.get_text_config(), "max_position_embeddings", _MOST_TOKENS)
    advice = None
    if chosen is None:
        settings = {"": costs} | ({} if in_4bit else {"load_in_4bit=True, ": costs_of(True, False)})
        advice = _advice(settings, policies, memory, batch_size, length)
    each = per_layer(chosen or min(peaks, key=lambda name: peaks[name]), len(costs.layers))
    held = "NF4" if in_4bit else str(dtype).removeprefix("torch.")
    how = "every weight trained" if full else f"LoRA r={max(lora.values())}"

    def captured(name: str | None) -> tuple[int, Sequence[str]]:
        """Tokens of a micro-batch as a CUDA graph, 0 where it is none, and its policies; as small_steps.py decides."""
        for share, own in ways(1.0, TWICE, each, forced is None):
            size = graph_size(name, share)
            if size and _needed(costs, each, tokens) + MARGIN * costs.graphs(size, own) <= memory:
                return size, own
        return 0, each

    spent, (size, inside) = costs.worst_moment(each, tokens), captured(smallest)
    if size:
        spent["CUDA graphs"] = costs.graphs(size, inside)
    seconds, known = {}, {}
    for name in names if chosen is not None else ():
        own, gpu, (graph, inside) = costs_of(in_4bit, full, device=GPUS[name].capability), GPUS[name], captured(name)
        setting = (inside, graph or tokens, length, micro_batches, in_4bit, full)
        seconds[name], known[name] = _seconds(gpu, own, operations, *setting, graphed=graph > 0)
    return Plan(
        fits=chosen is not None, policy=overall(each), layers=dict(Counter(each)),
        peak_bytes=sum(spent.values()), parts=spent, peaks=peaks, memory_bytes=memory,
        largest_batch=most // length, longest_length=min(longest, limit),
        seconds_per_step=seconds, known=known, advice=advice,
        setting=f"{config.model_type}, {count:.2f} billion weights in {held}, {how}, {optim}, "
        f"{batch_size} x {length:,} tokens",
    )  # fmt: skip


def _memory(gpu_memory: float | None) -> int:
    if gpu_memory is not None:
        if not 0 < gpu_memory < float("inf"):
            raise ValueError(f"gpu_memory is {gpu_memory!r}; it must be a number of GiB above 0")
        return int(gpu_memory * 2**30)
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: say for how many GiB to plan (gpu_memory, --gpu-memory)")
    return int(torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction())


def _gpus(memory: int) -> list[str]:
    """Those to tell seconds for: this machine's, or all of the table that have this memory."""
    if torch.cuda.is_available():
        name = gpu_of(torch.cuda.get_device_name())
        return [] if name is None else [name]
    return [name for name, gpu in GPUS.items() if gpu.memory * 2**30 >= memory]


def _config(model: Any, trust_remote_code: bool, hub: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"plan takes a model, its configuration or its name, not {type(model).__name__}")
    name = existing(model)
    base = base_of_adapter(name, hub)
    name = name if base is None else existing(base, f", the base of the adapter {name}")
    gguf = find_gguf(name)
    return load_config(name, trust_remote_code, hub) if gguf is None else GGUFCheckpoint(gguf).config


def _ranks(core: Any) -> dict[str, int]:
    """Rank of every adapter of a loaded model, by the name that the adapted module has without PEFT."""
    for name, module in core.named_modules():
        if type(module).__name__ == "ModulesToSaveWrapper":
            raise ValueError(f"plan does not count modules_to_save ({name})")
    return adapter_ranks(core)


def _targets(twin: Any, targets: Any) -> list[str]:
    """Full names of the modules that target_modules means."""
    named = kw.resolve_targets(twin, targets)
    if isinstance(named, str):
        head = twin.get_output_embeddings()
        linear = [name for name, m in twin.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
        return [name for name in linear if named == "all-linear" or re.fullmatch(named, name)]
    return [name for name, _ in twin.named_modules() if name.rpartition(".")[2] in named or name in named]


def _fastest(costs: StepCosts, policies: Sequence[str], memory: int, tokens: int) -> str | Sequence[str] | None:
    """The fastest that fits, for all layers or for each; None where none does. Of policies, one alone is forced."""
    if len(policies) > 1:
        levels = ladder([layer.spared() for layer in costs.layers])
        fitting = bisect_right(levels, memory, key=lambda level: _needed(costs, level, tokens))
        if fitting:
            return levels[fitting - 1]
    return policies[-1] if _needed(costs, policies[-1], tokens) <= memory else None


def _needed(costs: StepCosts, policy: str | Sequence[str], tokens: int) -> int:
    """Bytes that a GPU must have for a run to go through, its steps of other lengths and what is lost between blocks.

    More than training/room.py asks of a first batch: that tries what may just fit, and refuses what cannot. Batches
    counted at 97% and 102% of 12 GiB were tried so, found no room, and went through under the last policy (H200).
    """
    standing = sum(costs.standing().values())
    return int(standing + MARGIN * (sum(costs.worst_moment(policy, tokens).values()) - standing)) + RESERVE


def _most_tokens(costs: StepCosts, policies: Sequence[str], memory: int) -> int:
    """Of a micro-batch that fits under one of the policies."""
    return bisect_right(
        range(1, _MOST_TOKENS), memory, key=lambda tokens: min(_needed(costs, policy, tokens) for policy in policies)
    )


def _advice(
    settings: dict[str, StepCosts], policies: Sequence[str], memory: int, batch_size: int, max_length: int
) -> str:
    """The first of these settings that fits with fewer or shorter samples, or the memory that the last one needs."""
    shortest = min(_SHORTEST, max_length)
    for change, costs in settings.items():
        most = _most_tokens(costs, policies, memory)
        if most >= shortest:
            length = min(max_length, most if most < 64 else most // 64 * 64)
            return f"would fit: {change}batch {min(batch_size, most // length)}, samples of {length:,} tokens"
    least = min(_needed(costs, policy, shortest) for policy in policies)
    return f"no setting fits: {change}batch 1, samples of {shortest} tokens takes a GPU of {least / 2**30:.1f} GiB"


def _graph_size(
    name: str | None, operations: Operations, costs: StepCosts, samples: int, length: int, share: float = 1.0
) -> int:
    """Tokens of the CUDA graph that serves so many samples of this length; 0 where the GPU would not wait without."""
    size = graphs.size_of(samples * length, samples, length)
    if size is None or size.tokens > share * worthwhile(operations, name) or costs.gradients > watched.MOST_TRAINED:
        return 0
    return size.tokens


def _seconds(
    gpu: GPU, costs: StepCosts, operations: Operations, policy: str | Sequence[str], tokens: int, length: int,
    micro_batches: int, in_4bit: bool, full: bool, graphed: bool = False,
) -> tuple[float, str]:  # fmt: skip
    """Of a step, and how they are known: micro-batches of so many tokens, in samples of this length, as CUDA graphs or
    launched one by one, and the optimiser's part.
    """
    policies = per_layer(policy, len(costs.layers))
    products = operations.useful(tokens, tokens, Counter()) + operations.repeated(tokens, Counter(), policies)
    computing, moved, host = products / (gpu.products * 1e12), 0.0, 0.0
    for layer, one, own in zip(costs.layers, operations.layers, policies, strict=True):
        twice = own in ("recompute", "offload")
        share, half = _ATTENTION.get(layer.backend, _ATTENTION["efficient"])
        pairs = tokens * (attended_pairs([length], one.window) / length + half / 2)
        computing += 2 * (9 if twice else 7) * one.width * pairs / (share * gpu.products * 1e12) + _FIRST
        again = {"keep": 1.0, "light": 1.02, "lean": 1.12}.get(own, 1.3)
        moved += tokens * layer.kept * (_TRAFFIC_FULL if full else _TRAFFIC) * again
        moved += (2 + twice) * 3 * one.forward * in_4bit  # dequantised: 2.5 bytes a weight at 83% of a copy's bandwidth
        host += (_HOST_TWICE if twice else _HOST) * (not graphed)
    sent = 2 * tokens * sum(layer.entering for layer in costs.layers) if policies[0] == "offload" and not graphed else 0
    computing += moved / (gpu.copy * 1e12)  # copies to host memory and back, and launches, run beside all this
    longest = max(host, sent / (gpu.link * 1e9))
    stepping = 2 * (costs.optimiser + costs.gradients + costs.adapters + costs.weights * full) / (gpu.copy * 1e12)
    alike = costs.hidden >= _WIDTH * costs.size and _TOKENS[0] <= tokens <= _TOKENS[1] and longest < computing
    known = gpu.known if alike or gpu.known != "measured" else "estimated"
    return micro_batches * max(computing, longest) + stepping, known


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
