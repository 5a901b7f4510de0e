"""`python -m benchmarks.kernels [--json] [operation ...]` times all operations here, or those named.

The last line is one JSON object; with --json it is the only line.
"""

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.timing import Timing, report, require_gpu


def main() -> None:
    """Runs the `run()` of each module here that has one."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels", description="Time fastlm's kernels on this GPU."
    )
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"any of {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.operations) - set(known))
    if unknown:
        parser.error(f"unknown operation {', '.join(unknown)}; there are {', '.join(known)}")
    require_gpu()
    timings: list[Timing] = []
    for name in arguments.operations or known:
        module = import_module(f"benchmarks.kernels.{name}")
        if hasattr(module, "run"):
            timings += module.run()
    report(timings, table=not arguments.json)


if __name__ == "__main__":
    main()
