"""Padded, padding-free and packed training through SFTTrainer on the same samples (see benchmarks/packing.py).

training: a model of a real architecture with random weights and LoRA, bf16, every layer recomputed; samples
    with the lengths of alpaca-cleaned (lognormal, median 200, sigma 0.6, cut at max_length). Stock TRL pads; fastlm
    runs padding-free on the same batches, then on as many packed rows of max_length tokens. Counted are the
    samples' own tokens over the steps after the warm-up, without a stop between them, and the memory at its
    peak beyond the weights. The losses of the padded and the padding-free run are kept beside each other.
curves: the quick start's model and data in fp32, each step on the same samples three times: stock TRL padded,
    padding-free, and all samples of a step in one packed row. The curves must agree to 1e-4, or the run fails,
    its record kept.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

import fastlm
from benchmarks import step
from benchmarks.timing import on_gpu
from fastlm.packing import expected_speedup, pack_dataset

__all__ = [
    "PARTS", "Watch", "add_arguments", "draw", "free_memory", "lognormal_lengths", "require_equal", "tokenizer",
]  # fmt: skip

SYSTEMS = ("TRL padded", "fastlm padding-free", "fastlm packed")
TOLERANCE = 1e-4


def add_arguments(parts: Any) -> None:
    """The two parts' command lines."""
    one = parts.add_parser("training")
    one.add_argument("--arch", choices=step.ARCHITECTURES, default="qwen3_1b7")
    one.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    one.add_argument("--max-lengths", type=int, nargs="+", default=[1024, 2048])
    one.add_argument("--median", type=float, default=200.0, help="tokens of the median sample")
    one.add_argument("--steps", type=int, default=20, help="timed, after --warmup more")
    one.add_argument("--warmup", type=int, default=5)
    one.add_argument("--smoke", action="store_true", help="a tiny model and few steps, on any machine")
    two = parts.add_parser("curves")
    two.add_argument("--steps", type=int, default=300)
    two.add_argument("--batch-size", type=int, default=16)
    two.add_argument("--max-length", type=int, default=1024)
    three = parts.add_parser("draw", help="a PNG beside each record, on any machine that has matplotlib")
    three.add_argument("files", nargs="+", metavar="FILE", type=Path)


def lognormal_lengths(rng: np.random.Generator, samples: int, longest: int, median: float = 200.0) -> np.ndarray:
    """Tokens of each sample, int64 [samples]: the spread of alpaca-cleaned."""
    return np.clip(rng.lognormal(math.log(median), 0.6, samples).astype(np.int64), 1, longest)


class Watch(TrainerCallback):
    """Notes a run without stopping the GPU: the loss and the tokens of each step, the clock, the memory.

    losses, valid, computed: a step each, on the device; computed: tokens of the batch, of which valid are the samples'.
    seconds: of the steps after the warm-up. peak_gib: allocated in these.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.losses: list[Tensor] = []
        self.valid: list[Tensor] = []
        self.computed: list[int] = []
        self.begin = self.seconds = self.peak_gib = 0.0

    def listen(self, trainer: Any) -> None:
        """To a trainer of one micro-batch a step, when it is built."""
        compute_loss = trainer.compute_loss

        def noted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            names = ("attention_mask", "prompt_mask", "completion_mask")
            masks = [inputs[name] for name in names if name in inputs] or [torch.ones_like(inputs["input_ids"])]
            self.valid.append(torch.stack([mask.sum() for mask in masks]).sum())
            self.computed.append(sum(mask.numel() for mask in masks))
            loss = compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(loss.detach())
            return loss

        trainer.compute_loss = noted

    def tokens(self) -> tuple[int, int]:
        """Valid and computed, after the warm-up."""
        return sum(int(n) for n in self.valid[self.warmup :]), sum(self.computed[self.warmup :])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.warmup:
            step.synchronise()
            if on_gpu():
                torch.cuda.reset_peak_memory_stats()
            self.begin = time.perf_counter()
        elif state.global_step == state.max_steps:
            step.synchronise()
            self.seconds = time.perf_counter() - self.begin
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu() else 0.0


def tokenizer(words: int = 3) -> PreTrainedTokenizerFast:
    """Ids 0 to 2 are pad, end and unknown; from there to words - 1 every id is the word that writes it, "17"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {str(i): i for i in range(3, words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _model(given: argparse.Namespace, stock: bool) -> Any:
    """The same weights every time, adapters too, layers recomputed."""
    facts = dict(arch=given.arch, full=False, qlora=False, recompute="recompute", stock=stock)
    model = step.build(argparse.Namespace(**facts))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            drawn = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1])
            parameter.data.copy_(drawn)
        elif "lora_B" in name:
            parameter.data.zero_()
    return model


def _train(model: Any, dataset: Dataset, watch: Watch, **given: Any) -> list[float]:
    """A run in the data set's order; the loss of every step."""
    arguments = SFTConfig(
        output_dir="unused", report_to="none", save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        train_sampling_strategy="sequential", lr_scheduler_type="constant", max_grad_norm=1.0, use_cpu=not on_gpu(),
        logging_strategy="no", **given,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer(), callbacks=[watch]
    )
    trainer.remove_callback(PrinterCallback)
    watch.listen(trainer)
    trainer.train()
    return [float(loss) for loss in watch.losses]


def free_memory() -> None:
    """Nothing is left of a run that nobody holds any more."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def training(given: argparse.Namespace) -> tuple[list[dict[str, Any]], str, str]:
    """The rows of the record, its work and its notes."""
    if given.smoke:
        given.arch, given.batch_sizes, given.max_lengths, given.median = "tiny", [1, 4], [64], 12.0
        given.steps, given.warmup = 3, 1
    rows = []
    for max_length in given.max_lengths:
        for system in SYSTEMS:
            for batch_size in given.batch_sizes:
                rows.append(_measured(given, system, batch_size, max_length))
                facts = {name: value for name, value in rows[-1].items() if name != "losses"}
                print("  ".join(f"{name} {_short(value)}" for name, value in facts.items()), flush=True)
    for row in rows:
        twins = {r["system"]: r for r in rows if all(r[n] == row[n] for n in ("batch_size", "max_length"))}
        padded, speed = twins[SYSTEMS[0]]["valid_tokens_per_second"], row["valid_tokens_per_second"]
        row["speedup"] = speed / padded if speed and padded else None
        ours, truth = row["losses"], twins[SYSTEMS[0]]["losses"]
        if row["system"] == SYSTEMS[1] and ours and truth:
            row["largest_loss_difference"] = max(abs(a / b - 1) for a, b in zip(ours, truth, strict=True))
    work = f"{given.arch}, random weights, LoRA r=16, bf16, layers recomputed; lognormal samples, median {given.median}"
    notes = (
        f"{given.steps} steps after {given.warmup}, through SFTTrainer, without a stop; peak_less_weights_gib: "
        "allocated at the peak, less the weights; packed: batch_size rows of max_length tokens a step; "
        "formula: the padded batches' tokens over the samples' that order statistics expect"
    )
    return rows, work, notes


def _measured(given: argparse.Namespace, system: str, batch_size: int, max_length: int) -> dict[str, Any]:
    steps = given.warmup + given.steps
    rng = np.random.default_rng(0)
    vocabulary = step.ARCHITECTURES[given.arch][1]["vocab_size"]
    per_row = max_length / given.median if system == SYSTEMS[2] else 1
    lengths = lognormal_lengths(rng, math.ceil(steps * batch_size * per_row), max_length, given.median)
    ids = [rng.integers(5, vocabulary, n) for n in lengths]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    expected = expected_speedup(lengths, batch_size)
    if system == SYSTEMS[2]:
        dataset = pack_dataset(dataset, max_length)
    row: dict[str, Any] = {"system": system, "batch_size": batch_size, "max_length": max_length, "formula": expected}
    watch = Watch(given.warmup)
    model: Any = None
    try:
        model = _model(given, stock=system == SYSTEMS[0])
        weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        losses = _train(
            model, dataset, watch, max_steps=steps, per_device_train_batch_size=batch_size, max_length=max_length,
            bf16=True, learning_rate=1e-4, gradient_checkpointing=True, padding_free=system != SYSTEMS[0],
        )  # fmt: skip
    except torch.OutOfMemoryError:
        losses = None
    finally:
        del model
        free_memory()
    if losses is None:
        nothing = ("valid_tokens_per_second", "valid_token_share", "peak_less_weights_gib", "seconds_per_step")
        return row | dict.fromkeys(nothing) | {"losses": None, "out_of_memory": True}
    valid, computed = watch.tokens()
    return row | {
        "valid_tokens_per_second": valid / watch.seconds,
        "valid_token_share": valid / computed,
        "peak_less_weights_gib": max(watch.peak_gib - weights, 0.0),
        "seconds_per_step": watch.seconds / given.steps,
        "losses": losses,
    }


def curves(given: argparse.Namespace) -> tuple[list[dict[str, Any]], str, str]:
    """As `training`."""
    from fastlm.quickstart import choose_rows, find_model
    from fastlm.quickstart_data import standard_library_pairs

    torch.backends.cuda.matmul.allow_tf32 = False
    count, longest = given.steps * given.batch_size, given.max_length

    def build(stock: bool) -> tuple[Any, Any]:
        model, tokenizer = fastlm.FastLanguageModel.from_pretrained(
            str(find_model()), max_seq_length=longest, load_in_4bit=False, dtype=torch.float32
        )
        model = fastlm.FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, use_gradient_checkpointing=False)
        if stock:
            fastlm.unpatch(model)
        return model, tokenizer

    model, tokenizer = build(stock=False)
    chosen, _ = choose_rows(standard_library_pairs(), tokenizer, count, 1, longest, 3407)
    chosen = [chosen[i % len(chosen)] for i in range(count)]  # Python's library has fewer than 300 steps of 16
    settled = SFTConfig(output_dir="unused", max_length=longest, shuffle_dataset=False, bf16=False,
                        use_cpu=not on_gpu(), report_to="none", padding_free=True)  # fmt: skip
    prepared = SFTTrainer(
        model=model, args=settled, processing_class=tokenizer, train_dataset=Dataset.from_list(chosen)
    ).train_dataset.select_columns(["input_ids", "labels"])
    groups = [range(i, i + given.batch_size) for i in range(0, count, given.batch_size)]
    one_row = given.batch_size * longest
    packed = concatenate_datasets([pack_dataset(prepared.select(group), one_row) for group in groups])
    rows = []
    for system in SYSTEMS:
        watch = Watch(0)
        model, _ = build(stock=system == SYSTEMS[0])
        is_packed = system == SYSTEMS[2]
        losses = _train(
            model, packed if is_packed else prepared, watch, max_steps=given.steps, bf16=False, learning_rate=1e-4,
            per_device_train_batch_size=1 if is_packed else given.batch_size, gradient_checkpointing=False,
            max_length=None if is_packed else longest, padding_free=system != SYSTEMS[0],
        )  # fmt: skip
        rows.append({"system": system, "losses": losses, "computed_tokens": sum(watch.computed)})
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        row["largest_loss_difference"] = max(abs(ours / padded - 1) for ours, padded in pairs)
        print(f"{row['system']:20} last loss {row['losses'][-1]:.6f}, off by {row['largest_loss_difference']:.1e}")
    work = f"SmolLM2-135M-Instruct, fp32, LoRA r=16, {given.batch_size} samples a step of Python's standard library"
    return rows, work, f"{given.steps} steps; differences are relative to the padded run's loss of the same step"


PARTS = {"training": training, "curves": curves}


def require_equal(rows: Sequence[dict[str, Any]]) -> None:
    """SystemExit where the curves part."""
    worst = max(row["largest_loss_difference"] for row in rows)
    if not worst < TOLERANCE:
        raise SystemExit(f"the loss curves part by {worst:.1e}; {TOLERANCE} is allowed")


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def draw(file: Path) -> None:
    """The figure of a record of `training` or `curves`, under its name, as PNG."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    figures = {"packing-training": draw_training, "packing-curves": draw_losses}
    if kept["script"] not in figures:
        raise SystemExit(f"{file} is a record of {kept['script']}; there are figures of {' and '.join(figures)}")
    figures[kept["script"]](kept["results"], file.with_suffix(".png"))


def draw_training(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG with a row of panels for each max_length: speed, speed-up beside the formula, share, losses."""
    from matplotlib.figure import Figure

    lengths = sorted({row["max_length"] for row in rows})
    figure = Figure(figsize=(18, 4 * len(lengths)), dpi=110, layout="constrained")
    panels = figure.subplots(len(lengths), 4, squeeze=False)
    titles = ("valid tokens a second", "speed-up over padded", "share of tokens that are valid", "loss")
    for max_length, line in zip(lengths, panels, strict=True):
        here = [row for row in rows if row["max_length"] == max_length]
        for axes, title in zip(line, titles, strict=True):
            axes.set(title=f"{title}, max_length {max_length:,}", xlabel="batch size")
            axes.grid(alpha=0.3)
        for system in SYSTEMS:
            run = [row for row in here if row["system"] == system]
            sizes = [row["batch_size"] for row in run]
            names = ("valid_tokens_per_second", "speedup", "valid_token_share")
            for axes, name in zip(line, names, strict=False):
                axes.plot(sizes, [math.nan if r.get(name) is None else r[name] for r in run], ".-", label=system)
        padded = [row for row in here if row["system"] == SYSTEMS[0]]
        sizes, formula = [row["batch_size"] for row in padded], [row["formula"] for row in padded]
        line[1].plot(sizes, formula, "k--", label="padded tokens / valid tokens, expected")
        line[2].plot(sizes, [1 / value for value in formula], "k--", label="expected of padding")
        largest = [row for row in here if row["losses"] and row["system"] != SYSTEMS[2]]
        _overlay(line[3], [row for row in largest if row["batch_size"] == max(r["batch_size"] for r in largest)])
        for axes in line[:3]:
            axes.set_ylim(bottom=0)
            axes.legend()
    figure.savefig(path)


def draw_losses(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG with the loss of every step, one run over the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(title="the same samples each step", ylabel="loss per token (nats)")
    axes.grid(alpha=0.3)
    _overlay(axes, rows)
    figure.savefig(path)


def _overlay(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        width, style = (4, "-") if number == 0 else (1.2, ("--", ":")[number % 2])
        axes.plot(range(1, len(row["losses"]) + 1), row["losses"], style, linewidth=width, label=row["system"])
    axes.set_xlabel("step")
    axes.legend()
