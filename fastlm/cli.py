"""The command line: ``fastlm quickstart | train | doctor``.

Exit codes: 0 done, 1 ``doctor`` found a requirement out of range, 2 a mistake of the user's (one line on
stderr), 130 interrupted. A traceback is a bug. With ``--json`` the last line of stdout is one JSON object.
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

    quick = commands.add_parser(
        "quickstart", help="fine-tune a real small model on this machine, and check it"
    )
    quick.set_defaults(command=_quickstart)
    quick.add_argument(
        "--dataset", type=Path, metavar="FILE.jsonl", help="your own chat, prompt-completion or text rows"
    )
    quick.add_argument(
        "--steps", type=_positive_int, help="training steps (default: 16 on a CPU, 60 on a GPU)"
    )
    quick.add_argument(
        "--batch-size", type=_positive_int, help="samples a step (default: 4 on a CPU, 16 on a GPU)"
    )
    _add_common(quick, output_dir="outputs/quickstart")

    train = commands.add_parser("train", help="LoRA fine-tuning of any supported model on your rows")
    train.set_defaults(command=_train)
    train.add_argument("--model", required=True, help="a folder, a .gguf file, or a name on the hub")
    train.add_argument(
        "--dataset",
        required=True,
        type=Path,
        metavar="FILE.jsonl",
        help="chat, prompt-completion or text rows",
    )
    train.add_argument(
        "--max-seq-length", type=_positive_int, default=2048, help="tokens of a sample; longer ones are cut"
    )
    train.add_argument(
        "--batch-size", type=_positive_int, default=4, help="samples (with --packing: rows) a step"
    )
    length = train.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_positive_float, default=1.0)
    length.add_argument("--max-steps", type=_positive_int)
    train.add_argument("--lr", type=_positive_float, default=2e-4, help="learning rate (default: 2e-4)")
    train.add_argument("--r", type=_positive_int, default=16, help="rank of the adapter (default: 16)")
    train.add_argument(
        "--packing", action="store_true", help="pack samples into rows of --max-seq-length tokens"
    )
    train.add_argument(
        "--load-in-4bit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="default: on a GPU yes, on a CPU no",
    )
    _add_common(train, output_dir="outputs/train")

    doctor = commands.add_parser(
        "doctor", help="show versions and devices; exit 1 where a requirement is out of range"
    )
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

    return quickstart.run(
        quickstart.QuickstartOptions(
            dataset=options.dataset,
            steps=options.steps,
            batch_size=options.batch_size,
            output_dir=options.output_dir,
            seed=options.seed,
        )
    )


def _train(options: argparse.Namespace) -> dict[str, Any]:
    from .quickstart import output_folder
    from .rows import read_rows, training_columns

    output_dir = output_folder(options.output_dir)
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
            model, tokenizer, rows, max_length=options.max_seq_length, batch_size=options.batch_size,
            max_steps=options.max_steps or -1, epochs=options.epochs, learning_rate=options.lr,
            packing=options.packing, output_dir=output_dir, logging_steps=10, seed=options.seed,
        )  # fmt: skip
    report = fastlm.report(model)
    print(f"\n{report}\n")
    measured = train(trainer, output_dir / "adapter", tokenizer)
    save_adapter(model, tokenizer, output_dir / "adapter")
    speed = f"{measured.tokens_per_second:,.0f} tokens/s"
    print(f"loss {measured.losses[0]:.3f} -> {measured.losses[-1]:.3f}, {speed}")
    print(f"the adapter is in {output_dir / 'adapter'}")
    return {
        "steps": measured.steps,
        "loss_first": measured.losses[0],
        "loss_last": measured.losses[-1],
        "tokens_per_second": measured.tokens_per_second,
        "padding_avoided": measured.padding_avoided,
        "fused": dict(report.fused),
        "output_dir": str(output_dir),
    }


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from . import doctor

    return doctor.run()
