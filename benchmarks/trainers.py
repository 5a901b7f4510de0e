"""Every trainer that pads, and whole-model training, twice: stock transformers, PEFT and TRL, and fastlm.

A model of a real architecture with random weights, the same in both; LoRA r=16 on all seven projections, A and B
random, unless a row says otherwise; bf16, every layer recomputed (TRL's default). Samples have the lengths of
alpaca-cleaned (lognormal, median 200, sigma 0.6, cut at max_length), a quarter of each is its prompt; a step trains
on --batch of them, whatever a trainer calls a row. Stock pads and has SDPA; fastlm is the same model, patched.

dpo, reward: pairs of samples. kto: a sample each, and a second one for its KL term. grpo, rloo: four completions a
    prompt, recorded ones in place of what generate would return, so that both systems train on the same and a step
    is all that TRL does but generating. distillation: likewise, one a prompt; the teacher is the stock base model.
trainer: transformers' own Trainer, with DataCollatorForSeq2Seq and with PaddingFreeCollator.
full: SFTTrainer on text, every weight. pretraining: LoRA, and embedding and head trained whole. Both once more with
    fastlm's own policy, which keeps what fits.

The steps repeat the batches of the warm-up, so that no size is new; what stops the GPU between them is the trainers'
own, and one log. The last line is one JSON object.

    python -m benchmarks.trainers --save benchmarks/results
    python -m benchmarks.trainers --only dpo grpo --batch 32
    python -m benchmarks.trainers --smoke
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    PrinterCallback,
)  # fmt: skip

import fastlm
from benchmarks import step
from benchmarks.packing_training import Watch, free_memory, lognormal_lengths, tokenizer
from benchmarks.timing import failures, on_gpu, record, save
from fastlm.keywords import PROJECTIONS

STOCK, FASTLM, KEEPING = "stock", "fastlm", "fastlm, keeping what fits"
GENERATIONS = 4  # completions of a prompt
PAD, END = 0, 1  # ids of `tokenizer`
Samples = list[list[int]]


# --- rows of the data sets


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def prompt(ids: list[int]) -> list[int]:
    return ids[: len(ids) // 4]


def completion(ids: list[int]) -> list[int]:
    return ids[len(ids) // 4 :]


def preferences(samples: Samples) -> Iterator[dict[str, Any]]:
    """Pairs that share the first one's prompt."""
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        answers = {"chosen": " " + text(completion(chosen)), "rejected": " " + text(completion(rejected))}
        yield {"prompt": text(prompt(chosen))} | answers


def comparisons(samples: Samples) -> Iterator[dict[str, Any]]:
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        yield {"chosen": text(chosen), "rejected": text(rejected)}


def judged(samples: Samples) -> Iterator[dict[str, Any]]:
    for i, ids in enumerate(samples):
        yield {"prompt": text(prompt(ids)), "completion": " " + text(completion(ids)), "label": i % 2 == 0}


def prompts(samples: Samples) -> Iterator[dict[str, Any]]:
    for ids in samples:
        yield {"prompt": text(prompt(ids))}


def tokens(samples: Samples) -> Iterator[dict[str, Any]]:
    for ids in samples:
        yield {"input_ids": ids, "labels": ids}


def texts(samples: Samples) -> Iterator[dict[str, Any]]:
    for ids in samples:
        yield {"text": text(ids)}


# --- what is measured


@dataclass(frozen=True)
class Work:
    """One row. rows: of the data set; per_row: samples that one holds; options: of its configuration.

    adapted: LoRA, else every weight. saved: modules trained whole beside it. rolls_out: completions come from generate.
    """

    trainer: Any
    config: Any
    rows: Callable[[Samples], Iterator[dict[str, Any]]]
    per_row: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    adapted: bool = True
    saved: tuple[str, ...] = ()
    rolls_out: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        return (STOCK, FASTLM, KEEPING) if self.trainer is trl.SFTTrainer else (STOCK, FASTLM)


GROUPS = {"num_generations": GENERATIONS}
WORKS = {
    "dpo": Work(trl.DPOTrainer, trl.DPOConfig, preferences, per_row=2),
    "kto": Work(trl.KTOTrainer, trl.KTOConfig, judged),
    "reward": Work(trl.RewardTrainer, trl.RewardConfig, comparisons, per_row=2),
    "grpo": Work(trl.GRPOTrainer, trl.GRPOConfig, prompts, options=GROUPS, rolls_out=True),
    "rloo": Work(trl.RLOOTrainer, trl.RLOOConfig, prompts, options=GROUPS, rolls_out=True),
    "distillation": Work(
        trl.DistillationTrainer, trl.DistillationConfig, prompts, options={"gradient_accumulation_steps": 1},
        rolls_out=True,
    ),
    "trainer": Work(transformers.Trainer, transformers.TrainingArguments, tokens),
    "full": Work(trl.SFTTrainer, trl.SFTConfig, texts, adapted=False),
    "pretraining": Work(trl.SFTTrainer, trl.SFTConfig, texts, saved=("embed_tokens", "lm_head")),
}  # fmt: skip


def plain(given: argparse.Namespace, kind: Any = AutoModelForCausalLM, **facts: Any) -> Any:
    return step.plain(given.arch, kind, pad_token_id=PAD, bos_token_id=None, eos_token_id=END, **facts)


def build(given: argparse.Namespace, work: Work, system: str) -> Any:
    """The model as the trainer gets it: the same weights in every system."""
    reward = work.trainer is trl.RewardTrainer
    model = plain(given, AutoModelForSequenceClassification, num_labels=1) if reward else plain(given)
    if system == FASTLM:
        model._fastlm_checkpointing = "recompute"
    if work.adapted:
        lora = LoraConfig(
            r=16, lora_alpha=16, target_modules=list(PROJECTIONS), init_lora_weights=False,
            task_type="SEQ_CLS" if reward else "CAUSAL_LM", modules_to_save=list(work.saved) or None,
            ensure_weight_tying=bool(work.saved) and model.config.tie_word_embeddings,
        )  # fmt: skip
        model = get_peft_model(model, lora)
    if system != STOCK:
        fastlm.patch(model)
    return model


def recorded(samples: Samples, rows: int) -> Callable[..., Tensor]:
    """A generate whose n-th call returns the completions of the n-th rows samples, over and over."""
    calls = cycle(range(0, len(samples), rows))

    def generate(input_ids: Tensor, **kwargs: Any) -> Tensor:
        first = next(calls)
        made = [torch.tensor([*completion(ids), END]) for ids in samples[first : first + rows]]
        padded = torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=PAD)
        return torch.cat([input_ids, padded.to(input_ids.device)], dim=1)

    return generate


def parity(completion_ids: Samples, **kwargs: Any) -> list[float]:
    """A reward of no meaning that differs from completion to completion."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(given: argparse.Namespace, name: str, system: str, model: Any, watch: Watch) -> Any:
    """The trainer of one run, its data set and configuration."""
    work, words = WORKS[name], tokenizer(given.words)
    rng = np.random.default_rng(0)
    # one token more is TRL's end; below 4 there is no prompt
    lengths = lognormal_lengths(rng, given.warmup * given.batch, given.max_length - 1, given.median).clip(4)
    samples = [rng.integers(3, given.words, length).tolist() for length in lengths]
    options, more = dict(work.options), dict[str, Any](processing_class=words)
    if work.rolls_out:
        options |= {"max_completion_length": given.max_length, "shuffle_dataset": False}
        model.generate = recorded(samples, given.batch)
    else:
        options["train_sampling_strategy"] = "sequential"
    if work.trainer is transformers.Trainer:
        more["data_collator"] = DataCollatorForSeq2Seq(words) if system == STOCK else fastlm.PaddingFreeCollator()
    elif not work.rolls_out:
        options["max_length"] = given.max_length
    if "num_generations" in options:
        more["reward_funcs"], samples = parity, samples[::GENERATIONS]
    elif work.rolls_out:
        more["teacher_model"] = plain(given)
    config = work.config(
        output_dir="unused", report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=not on_gpu(), bf16=True,
        per_device_train_batch_size=given.batch // work.per_row, max_steps=given.warmup + given.steps,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=given.warmup, **options,
    )  # fmt: skip
    data = Dataset.from_list(list(work.rows(samples)) * math.ceil(config.max_steps / given.warmup))
    trainer = work.trainer(model=model, args=config, train_dataset=data, callbacks=[watch], **more)
    trainer.remove_callback(PrinterCallback)
    watch.listen(trainer)
    return trainer


def measured(given: argparse.Namespace, name: str, system: str) -> dict[str, Any]:
    """One run: its row of the record."""
    free_memory()
    model, watch = build(given, WORKS[name], system), Watch(given.warmup)
    trainer = trainer_of(given, name, system, model, watch)
    held = torch.cuda.memory_allocated() / 2**30 if on_gpu() else 0.0  # weights; a reference's and a teacher's too
    trainer.train()
    valid, computed = watch.tokens()
    return {
        "trainer": name,
        "system": system,
        "speedup": None,
        "seconds_per_step": watch.seconds / given.steps,
        "valid_tokens_per_second": valid / watch.seconds,
        "valid_token_share": valid / computed,
        "peak_less_weights_gib": max(watch.peak_gib - held, 0.0),
        "largest_loss_difference": None,
        "largest_gradient_norm_difference": None,
        "losses": [float(loss) for loss in watch.losses],
        "gradient_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Fills in what each run of a trainer is beside the first, stock's."""
    for row in rows:
        row["speedup"] = rows[0]["seconds_per_step"] / row["seconds_per_step"]
        for name, values, least in (("loss", "losses", 1.0), ("gradient_norm", "gradient_norms", 0.0)):
            furthest = max(abs(ours - stock) for ours, stock in zip(row[values], rows[0][values], strict=True))
            row[f"largest_{name}_difference"] = furthest / max(least, *map(abs, rows[0][values]))


def line(row: dict[str, Any]) -> str:
    """The row for a reader."""
    return (
        f"{row['trainer']:12} {row['system']:24} {row['seconds_per_step']:8.4f} s a step {row['speedup']:6.2f}x "
        f"{row['valid_tokens_per_second']:10,.0f} valid tokens/s ({row['valid_token_share']:4.0%}) "
        f"{row['peak_less_weights_gib']:7.2f} GiB  loss off by {row['largest_loss_difference']:.1e}, "
        f"gradient norm by {row['largest_gradient_norm_difference']:.1e}"
    )


def arguments_from(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.trainers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=step.ARCHITECTURES, default="qwen3_1b7")
    parser.add_argument("--only", choices=WORKS, nargs="+", default=list(WORKS), metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--median", type=float, default=200.0, help="tokens of the median sample")
    parser.add_argument("--steps", type=int, default=6, help="timed, after --warmup more, whose batches they repeat")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, on any machine")
    parser.add_argument("--save", metavar="FOLDER", help="keep the JSON object there")
    parser.add_argument("--commit", help="what is running, where git cannot say it")
    given = parser.parse_args(command)
    if given.smoke:
        given.arch, given.batch, given.max_length, given.median = "tiny", 8, 64, 16.0
        given.steps, given.warmup = 2, 2
    if given.batch % (2 * GENERATIONS):
        parser.error(f"--batch must be a multiple of {2 * GENERATIONS}: pairs, and {GENERATIONS} completions a prompt")
    given.words = min(step.ARCHITECTURES[given.arch][1]["vocab_size"], 4096)
    return given


def main(command: list[str] | None = None) -> None:
    """Runs, prints, keeps; exit status 1 where a trainer failed, with the rest done."""
    given = arguments_from(command)
    datasets.disable_progress_bars()
    work = (
        f"{given.arch}, random weights, bf16, layers recomputed (but where a system keeps what fits), LoRA r=16; "
        f"{given.batch} lognormal samples a step, median {given.median}, at most {given.max_length} tokens"
    )
    notes = (
        f"{given.steps} steps after {given.warmup}, whose batches they repeat, timed in one; stock is padded, SDPA; "
        "completions are recorded: generating is not in the times of grpo, rloo and distillation; "
        "peak_less_weights_gib: allocated at the peak, less what the trainer held when it was built; full and "
        "pretraining: gradients and optimiser states are in it; valid_token_share: of the batches as trainers make "
        "them, whose padding fastlm then takes out; differences: the furthest apart that a step's values are, over "
        "stock's largest, for losses over 1 at least (those of grpo and rloo are terms of about 1 that cancel)"
    )
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    kept: dict[str, Any] = {}
    path = None
    for name in given.only:
        rows = []
        try:
            for system in WORKS[name].systems:
                begin = time.perf_counter()
                rows.append(measured(given, name, system))
                print(f"{name}, {system}: {time.perf_counter() - begin:.1f} s in all", file=sys.stderr, flush=True)
        except failures():
            traceback.print_exc()
            failed.append(name)
        compare(rows)
        for row in rows:
            print(line(row), flush=True)
        results += rows
        kept = record(results, script="trainers", work=work, notes=notes, floor={}, commit=given.commit)
        if given.save is not None:
            path = save(kept, given.save, path)
    print(json.dumps(kept))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
