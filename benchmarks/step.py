"""One training step, seen whole: tokens per second, memory, where the GPU's time goes, launches.

A model of a real architecture with random weights, made in memory; token ids drawn at random, in samples with
lognormal lengths (median 200, sigma 0.6, at least 24: the spread of alpaca-cleaned), packed into rows or not;
forward, backward, clipping and optimiser without a Trainer. ``--stock`` does the same samples with the
unpatched model, padded to the longest of every micro-batch, with SDPA. The last line is one JSON object.

    python -m benchmarks.step --arch llama8b                          16 rows of 1,024 tokens, LoRA
    python -m benchmarks.step --arch llama8b --samples 2              a notebook's step, not packed
    python -m benchmarks.step --arch llama8b --stock --recompute      the same in transformers and PEFT
"""

import argparse
import json
import math
import statistics
import sys
import time
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floor import step_floor
from benchmarks.timing import DEVICE, on_gpu, record, save
from fastlm import FastLanguageModel, PaddingFreeCollator, pack, patch, report
from fastlm.keywords import PROJECTIONS
from fastlm.training.profile import ACTIVITIES, Profile, profile_of

LLAMA_8B: dict[str, Any] = dict(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
    rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)  # fmt: skip
QWEN3_8B: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
QWEN3_1B7 = QWEN3_8B | dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    tie_word_embeddings=True,
)  # fmt: skip
TINY: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama8b": ("llama", LLAMA_8B),
    "qwen3_8b": ("qwen3", QWEN3_8B),
    "qwen3_1b7": ("qwen3", QWEN3_1B7),
    "tiny": ("llama", TINY),
}
PROFILED_STEPS = 3


def arguments_from(command: list[str] | None) -> argparse.Namespace:
    """The command line; rows and lengths of the tiny model are small."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama8b")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--full", action="store_true", help="train every weight, in bf16")
    kind.add_argument("--qlora", action="store_true", help="LoRA on an NF4 base")
    parser.add_argument("--stock", action="store_true", help="unpatched, padded, SDPA")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples of a padded batch (--stock)")
    parser.add_argument("--recompute", action="store_true", help="recompute every layer in backward")
    parser.add_argument("--rows", type=int, default=16, help="packed rows a step")
    parser.add_argument("--row-length", type=int, help="tokens of a row, and of the longest sample; 1024")
    parser.add_argument("--samples", type=int, help="this many samples a step, not packed, instead of rows")
    parser.add_argument("--median", type=float, help="tokens of the median sample; 200")
    parser.add_argument("--steps", type=int, default=8, help="the second half of them is timed")
    parser.add_argument("--floor", action="store_true", help="time the bare products and the attention too")
    parser.add_argument("--save", metavar="FOLDER", help="keep the JSON object there")
    parser.add_argument("--commit", help="what is running, where git cannot say it")
    given = parser.parse_args(command)
    tiny = given.arch == "tiny"
    given.row_length = given.row_length or (64 if tiny else 1024)
    given.median = given.median or (given.row_length / 5 if tiny else 200.0)
    if given.steps < 2:
        parser.error("--steps must be at least 2: the first half warms up")
    return given


def plain(arch: str, kind: Any = AutoModelForCausalLM, **facts: Any) -> Any:
    """A model of transformers' own with random weights in bf16; facts: more of its configuration."""
    family, known = ARCHITECTURES[arch]
    config = AutoConfig.for_model(family, **known, **facts)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = kind.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    return model


def build(given: argparse.Namespace) -> Any:
    """The model, ready to train: patched by fastlm, or as transformers and PEFT make it."""
    model = plain(given.arch)
    if given.qlora:
        quantise(model)
        model.is_loaded_in_4bit = True  # PEFT asks for it
    if given.full:
        if not given.stock:
            patch(model)
    elif given.stock:
        from peft import LoraConfig, get_peft_model

        targets = list(PROJECTIONS)
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    else:
        model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, use_gradient_checkpointing=given.recompute)
    if given.qlora:  # as TRL casts the adapters of a quantised base
        for parameter in trained(model):
            parameter.data = parameter.data.to(torch.bfloat16)
    if given.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def quantise(model: nn.Module) -> None:
    """Every projection but the head in doubly quantised NF4, where it stands."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or name == "lm_head":
                continue
            layer = Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16,
                quant_type="nf4", device="meta",
            )  # fmt: skip
            layer.bias = None if child.bias is None else nn.Parameter(child.bias.data, requires_grad=False)
            packed: Any = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4", module=layer)
            layer.weight = packed.to(child.weight.device)  # quantises
            setattr(module, name, layer)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimiser gets."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sample_steps(given: argparse.Namespace, steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    """The token ids of every sample of every step."""
    rng = np.random.default_rng(seed)
    vocabulary = ARCHITECTURES[given.arch][1]["vocab_size"]
    per_step = given.samples or math.ceil(1.2 * given.rows * given.row_length / given.median)
    drawn = rng.lognormal(math.log(given.median), 0.6, steps * per_step).astype(np.int64)
    lengths = np.clip(drawn, min(24, given.row_length // 4), given.row_length)
    if given.samples:
        groups = np.split(np.arange(len(lengths)), steps)
    else:
        packed = pack(lengths, given.row_length)
        starts = packed.row_offsets[:: given.rows]
        groups = [packed.indices[begin:end] for begin, end in pairwise(starts)][:steps]
        if len(groups) < steps:
            raise ValueError(f"the samples fill {len(groups)} steps of {given.rows} rows, not {steps}")
    return [[rng.integers(5, vocabulary, lengths[i]) for i in group] for group in groups]


def padding_free(samples: list[np.ndarray]) -> list[dict[str, Any]]:
    """One flattened batch, on the device."""
    batch = PaddingFreeCollator()([{"input_ids": ids} for ids in samples])
    return [{name: part.to(DEVICE, non_blocking=True) for name, part in batch.items()}]


def padded(samples: list[np.ndarray], micro_batch: int) -> list[dict[str, Any]]:
    """Micro-batches, each padded to its longest sample, whose losses add up to the mean over all targets."""
    targets = sum(len(ids) - 1 for ids in samples)
    batches = []
    for first in range(0, len(samples), micro_batch):
        group = [torch.from_numpy(ids) for ids in samples[first : first + micro_batch]]
        ids = nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=0)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(sample) for sample in group], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batches.append({name: part.to(DEVICE) for name, part in batch.items()} | {"num_items_in_batch": targets})
    return batches


class Trainer:
    """Model, optimiser, and one step: what the library's user pays for, and nothing else."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.model = build(given)
        self.parameters = trained(self.model)
        self.optimiser: torch.optim.Optimizer
        if given.full:
            self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        elif on_gpu():
            from bitsandbytes.optim import AdamW8bit

            self.optimiser = AdamW8bit(self.parameters, lr=1e-4)
        else:
            self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-4)

    def step(self, batches: list[dict[str, Any]]) -> Tensor:
        """The mean loss over all targets, detached; no device sync."""
        total = torch.zeros((), device=DEVICE)
        self.optimiser.zero_grad(set_to_none=True)
        for batch in batches:
            with autocast():
                loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        return total


def autocast() -> AbstractContextManager[Any]:
    """As TRL's bf16=True."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


def run(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains, times, profiles: the row that goes into the record, and the floor if it is asked for."""
    begin = time.perf_counter()
    trainer = Trainer(given)
    steps = sample_steps(given, given.steps)
    if given.stock:
        batches = [padded(samples, given.micro_batch) for samples in steps]
    else:
        batches = [padding_free(samples) for samples in steps]
    synchronise()
    print(f"built in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    half = given.steps // 2
    losses = [trainer.step(batch) for batch in batches[:half]]
    seconds, wall, timed = _timed(trainer, batches[half:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu() else 0.0
    tokens = [sum(len(ids) for ids in samples) for samples in steps]
    computed = [sum(batch["input_ids"].numel() for batch in group) for group in batches]
    profiled = profile_steps(trainer, batches[-PROFILED_STEPS:])
    seconds_per_step = statistics.median(seconds)
    losses_read = [float(loss) for loss in losses + timed]
    facts = None if given.stock else report(trainer.model)
    row = {
        "arch": given.arch,
        "system": "stock" if given.stock else "fastlm",
        "training": "full" if given.full else "qlora" if given.qlora else "lora",
        "recompute": given.recompute,
        "samples_per_step": statistics.mean(len(samples) for samples in steps),
        "tokens_per_step": statistics.mean(tokens[half:]),
        "padded_tokens_per_step": statistics.mean(computed[half:]),
        "tokens_per_second": sum(tokens[half:]) / wall,
        "seconds_per_step": seconds_per_step,
        "peak_gib": peak,
        "launches_per_step": profiled.launches,
        "gpu_busy_share": profiled.kernel_ms / 1e3 / seconds_per_step if profiled.kernel_ms is not None else None,
        "losses": [losses_read[0], losses_read[half], losses_read[-1]],
        "fused": None if facts is None else facts.fused,
        "stock_layers": None if facts is None else len(facts.stock),
        "backends": None if facts is None else facts.backends,
        "kernels": profiled.kernels,
    }
    if not given.floor or given.stock:
        return row, {}
    config, boundaries = trainer.model.config.get_text_config(), batches[-1][0]["boundaries"]
    del trainer
    return row, step_floor(config, boundaries, full=given.full)


def synchronise() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def _timed(trainer: Trainer, steps: list[list[dict[str, Any]]]) -> tuple[list[float], float, list[Tensor]]:
    """Seconds of each step on the GPU's clock (no stop between them), of all on the host's, the losses."""
    synchronise()
    begin, losses, marks = time.perf_counter(), [], []
    for batches in steps:
        marks.append(_mark())
        losses.append(trainer.step(batches))
    marks.append(_mark())
    synchronise()
    wall = time.perf_counter() - begin
    seconds = [a.elapsed_time(b) / 1e3 if on_gpu() else b - a for a, b in pairwise(marks)]
    return seconds, wall, losses


def _mark() -> Any:
    if not on_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def profile_steps(trainer: Trainer, batches: list[list[dict[str, Any]]]) -> Profile:
    """Some steps, seen by the profiler."""
    synchronise()
    with profile(activities=ACTIVITIES) as profiler:
        for batch in batches:
            trainer.step(batch)
        synchronise()
    return profile_of(profiler, len(batches))


def table(row: dict[str, Any]) -> str:
    """The row for a reader."""
    lines = []
    for name, value in row.items():
        if name != "kernels":
            lines.append(f"{name:<24} {f'{value:,.6g}' if isinstance(value, float) else value}")
    lines.append(str(Profile(PROFILED_STEPS, row["kernels"])))
    return "\n".join(lines)


def main(command: list[str] | None = None) -> None:
    """Runs, prints, keeps."""
    given = arguments_from(command)
    row, floor = run(given)
    kept = record(
        [row],
        script=f"step-{row['arch']}-{row['training']}-{row['system']}",
        work="random weights and token ids, lognormal samples; LoRA r=16 on 7 projections, or every weight",
        notes=f"{given.steps} steps, the second half timed without a stop, {PROFILED_STEPS} more profiled; "
        "busy is the kernels' time in those over the timed steps' median",
        floor=floor,
        commit=given.commit,
    )
    if given.save is not None:
        save(kept, given.save)
    print(table(row | {f"floor_{name}": value for name, value in floor.items()}))
    print(json.dumps(kept))


if __name__ == "__main__":
    main()
