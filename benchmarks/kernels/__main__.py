"""`python -m benchmarks.kernels [--json] [--quick] [operation ...]` times all operations, or those named.

The last line is one JSON object; with --json it is the only line. An operation that fails costs its own rows
only, and the exit status is then 1.
"""

import argparse
import gc
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.timing import SETTINGS, Timing, failures, on_gpu, record, report, require_gpu, save


def main() -> None:
    """Runs the `run()` of each module here that has one."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description="Time fastlm's kernels on this GPU.")
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"any of {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="16,384 tokens only, without torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: half the time")
    parser.add_argument("--save", metavar="FOLDER", help="keep the object there, as in benchmarks/results")
    parser.add_argument("--commit", help="what is running, where git cannot say it")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.operations) - set(known))
    if unknown:
        parser.error(f"unknown operation {', '.join(unknown)}; there are {', '.join(known)}")
    require_gpu()
    SETTINGS.compile = not (arguments.quick or arguments.no_compile)
    if arguments.quick:
        SETTINGS.tokens = (SETTINGS.compared_at,)
    timings: list[Timing] = []
    failed: list[str] = []
    path = None
    for operation in arguments.operations or known:
        new, bad = collect([operation])
        timings, failed = timings + new, failed + bad
        if arguments.save:  # whatever happens to the next
            path = save(record(timings, commit=arguments.commit), arguments.save, path)
    report(timings, table=not arguments.json, commit=arguments.commit)
    if failed:
        raise SystemExit(1)


def collect(operations: list[str]) -> tuple[list[Timing], list[str]]:
    """The timings of the named operations, and the names of those that failed; progress goes to stderr."""
    timings: list[Timing] = []
    failed = []
    for name in operations:
        begin = time.perf_counter()
        module = import_module(f"benchmarks.kernels.{name}")
        if not hasattr(module, "run"):
            continue
        try:
            timings += module.run()
        except failures() as error:
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()  # the next operation's sizes are others
    return timings, failed


if __name__ == "__main__":
    main()
