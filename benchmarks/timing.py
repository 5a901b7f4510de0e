"""Timing of memory-bound operations on a GPU: median milliseconds, counted bytes, the share of a plain copy.

A benchmark calls `measure` once per case with the fast function and the torch expression that it replaces,
and `report` at the end. The counted bytes are those that the operation must move (each input read once, each
output written once); the share is against a copy measured on the same GPU in the same process.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["Timing", "copy_bandwidth", "measure", "median_ms", "record", "report", "require_gpu"]


@dataclass(frozen=True)
class Timing:
    """One case. Bandwidths are in GB/s (1e9 bytes a second), times in milliseconds."""

    operation: str
    case: str
    tokens: int
    ms: float
    bytes: int
    gb_per_s: float
    share_of_copy: float
    torch_ms: float | None  # None: torch ran out of memory, or there is nothing to compare with

    def __str__(self) -> str:
        ratio = f"{self.torch_ms / self.ms:.1f}x torch" if self.torch_ms else "- torch"
        return (
            f"{self.operation:<20} {self.case:<12} {self.tokens:>7} tokens {self.ms:>9.4f} ms "
            f"{self.bytes / 1e6:>9.1f} MB {self.gb_per_s:>6.0f} GB/s {self.share_of_copy:>7.1%} {ratio:>12}"
        )


def require_gpu() -> None:
    """Stops with a sentence where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("These benchmarks need a CUDA GPU: torch.cuda.is_available() is False here.")


def median_ms(function: Callable[[], Any]) -> float:
    """Median milliseconds of one call on the GPU's clock, with the L2 cache flushed between calls."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=200, return_mode="median"))


@lru_cache(maxsize=1)
def copy_bandwidth() -> float:
    """GB/s of a 1 GiB copy on the current GPU: bytes read plus bytes written, by time."""
    source = torch.ones(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6


def measure(
    operation: str,
    case: str,
    tokens: int,
    counted_bytes: int,
    function: Callable[[], Any],
    torch_function: Callable[[], Any] | None = None,
) -> Timing:
    """Times the function and, where given, the torch expression for the same work; prints nothing."""
    ms = median_ms(function)
    torch_ms = None
    if torch_function is not None:
        try:
            torch_ms = median_ms(torch_function)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
    bandwidth = counted_bytes / ms / 1e6
    return Timing(
        operation, case, tokens, ms, counted_bytes, bandwidth, bandwidth / copy_bandwidth(), torch_ms
    )


def record(timings: list[Timing]) -> dict[str, Any]:
    """The object that benchmarks/results keeps (see its README for the keys)."""
    return {
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "device": {"name": torch.cuda.get_device_name(), "count": 1, "cuda": torch.version.cuda},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": _triton()},
        "work": "random bf16 tensors of one layer; bytes: every input read once, every output written once",
        "results": [asdict(timing) for timing in timings],
        "floor": {"copy_gb_per_s": copy_bandwidth()},
        "notes": "triton.testing.do_bench: 50 ms warm-up, median of 200 ms, L2 flushed between calls",
    }


def report(timings: list[Timing], *, table: bool = True) -> None:
    """Prints the table, then `record` as one JSON object on the last line."""
    if table:
        for timing in timings:
            print(timing)
    print(json.dumps(record(timings)))


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:  # a build bundled with torch may carry another name
        return None
