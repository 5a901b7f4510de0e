"""The command line: ``fastlm quickstart | train | plan | doctor``.

Exit codes: 0 done, 1 ``doctor`` found a requirement out of range or ``plan`` found no way to fit, 2 a mistake of the
user's (one line on stderr), 130 interrupted. A traceback is a bug. With ``--json`` the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .console import Interrupted, UserError, user_mistakes

__all__ = ["main", "make_parser"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fastlm: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse itself exits for --help and bad options)."""
    options = make_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, lines come in order
    try:
        result = options.command(options)
    except UserError as error:
        print(f"fastlm: {error}", file=sys.stderr)
        return 2
    except Interrupted as interruption:
        print(f"fastlm: {interruption}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("fastlm: interrupted; nothing was saved by what was running", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(result), flush=True)
    return 0 if result.get("ok", True) else 1


def make_parser() -> argparse.ArgumentParser:
    """The parser; every sub-command sets ``command`` to the function that runs it."""
    parser = _Parser(prog="fastlm", description="Fast fine-tuning of Hugging Face language models.")
    parser.add_argument("--version", action="version", version=f"fastlm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    quick = commands.add_parser("quickstart", help="fine-tune a real small model here, and check it")
    quick.set_defaults(command=_quickstart)
    add = quick.add_argument
    add("--dataset", type=Path, metavar="FILE.jsonl", help="your own chat, prompt-completion or text rows")
    add("--steps", type=_positive_int, help="default: 16 on a CPU, 60 on a GPU")
    add("--batch-size", type=_positive_int, help="samples a step (default: 4 on a CPU, 16 on a GPU)")
    _add_common(quick, output_dir="outputs/quickstart")

    train = commands.add_parser("train", help="LoRA fine-tuning of any supported model on your rows")
    train.set_defaults(command=_train)
    add = train.add_argument
    add("--model", required=True, help="a folder, a .gguf file, or a name on the hub")
    add("--dataset", required=True, type=Path, metavar="FILE.jsonl", help="chat, prompt-completion or text")
    add("--max-seq-length", type=_positive_int, default=2048, help="tokens of a sample; longer ones are cut")
    add("--batch-size", type=_positive_int, default=4, help="samples (with --packing: rows) a step")
    length = train.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_positive_float, default=1.0)
    length.add_argument("--max-steps", type=_positive_int)
    add("--lr", type=_positive_float, default=2e-4, help="learning rate (default: 2e-4)")
    add("--r", type=_positive_int, default=16, help="rank of the adapter (default: 16)")
    add("--packing", action="store_true", help="pack samples into rows of --max-seq-length tokens")
    bits = argparse.BooleanOptionalAction
    add("--load-in-4bit", action=bits, default=None, help="default: on a GPU yes, on a CPU no")
    add("--profile", type=Path, metavar="FOLDER", help="trace a few steps into it, and show where their time goes")
    _add_common(train, output_dir="outputs/train")

    planner = commands.add_parser("plan", help="what a training step will take, before anything is downloaded")
    planner.set_defaults(command=_plan)
    add = planner.add_argument
    add("model", help="a folder, a .gguf file, or a name on the hub; only its configuration is read")
    add("--gpu-memory", type=_positive_float, metavar="GIB", help="default: what this machine's GPU has")
    add("--max-length", type=_positive_int, help="tokens of a sample (default: 2048, or what the model takes)")
    add("--batch", type=_positive_int, default=1, help="samples of a micro-batch (default: 1)")
    add("--accumulate", type=_positive_int, default=1, help="micro-batches a step (default: 1)")
    add("--rank", type=_positive_int, default=16, help="rank of the adapter (default: 16)")
    kind = planner.add_mutually_exclusive_group()
    kind.add_argument("--4bit", dest="load_in_4bit", action="store_true", help="adapters on an NF4 base")
    kind.add_argument("--full", action="store_true", help="train every weight")
    add("--optim", default="adamw_8bit", help="as SFTConfig names it (default: adamw_8bit)")
    add("--json", action="store_true", help="print one JSON object last")

    doctor = commands.add_parser("doctor", help="versions and devices; exit 1 if a requirement is not met")
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object last")
    return parser


def _add_common(parser: argparse.ArgumentParser, *, output_dir: str) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path(output_dir), help=f"default: {output_dir}")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")


def _positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, not {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, not {text!r}")
    return value


def _quickstart(options: argparse.Namespace) -> dict[str, Any]:
    from . import quickstart

    given = {name: value for name, value in vars(options).items() if name not in ("command", "json")}
    return quickstart.run(**given)


def _train(options: argparse.Namespace) -> dict[str, Any]:
    from .quickstart import output_folder
    from .rows import read_rows, training_columns

    output_folder(options.output_dir)
    if options.profile is not None:
        output_folder(options.profile)
    with user_mistakes():
        rows = training_columns(read_rows(options.dataset))

    import fastlm  # from here on seconds long: what was wrong above is said at once

    from .finetune import make_trainer, save_adapter, train

    with user_mistakes():
        bits = {} if options.load_in_4bit is None else {"load_in_4bit": options.load_in_4bit}
        model, tokenizer = fastlm.FastLanguageModel.from_pretrained(
            options.model, max_seq_length=options.max_seq_length, random_state=options.seed, **bits
        )
        model = fastlm.FastLanguageModel.get_peft_model(
            model, r=options.r, lora_alpha=options.r, random_state=options.seed
        )
        trainer = make_trainer(
            model, tokenizer, rows, None, batch_size=options.batch_size, max_steps=options.max_steps or -1,
            num_train_epochs=options.epochs, max_length=options.max_seq_length, packing=options.packing,
            learning_rate=options.lr, warmup_steps=0.03, logging_steps=10, seed=options.seed,
            output_dir=str(options.output_dir),
        )  # fmt: skip
    report = fastlm.report(model)
    print(f"\n{report}\n")
    adapter = options.output_dir / "adapter"
    measured = train(trainer, adapter, tokenizer, profile=options.profile)
    save_adapter(model, tokenizer, adapter)
    speed = f"{measured.tokens_per_second:,.0f} tokens/s"
    print(f"loss {measured.losses[0]:.3f} -> {measured.losses[-1]:.3f}, {speed}; the adapter is in {adapter}")
    return {**measured.facts(), "fused": dict(report.fused), "output_dir": str(options.output_dir)}


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    import fastlm

    with user_mistakes():
        plan = fastlm.plan(
            options.model, gpu_memory=options.gpu_memory, max_length=options.max_length, batch_size=options.batch,
            r=options.rank, load_in_4bit=options.load_in_4bit, full_finetuning=options.full, optim=options.optim,
            gradient_accumulation_steps=options.accumulate,
        )  # fmt: skip
    print(str(plan).replace("load_in_4bit=True", "--4bit"))  # in what is advised
    return {"ok": plan.fits, **plan.facts()}


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from . import doctor

    return doctor.run()
