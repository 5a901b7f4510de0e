"""Timing of operations on a GPU: median milliseconds, counted bytes, the share of a plain copy, and rivals.

A benchmark calls `measure` once per case with the fast function, and with what does the same work otherwise:
the torch expression that it replaces, torch.compile of that expression, Liger's kernel. `report` comes at the
end. The counted bytes are those that the operation must move (each input read once, each output written
once); the share is against a copy measured on the same GPU in the same process.

Times are the GPU's own. Before each timed call the L2 cache is overwritten and the GPU is kept busy for as
long as the host needs to enqueue the call, so that a kernel of microseconds is not charged for Python's
launch of it.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = [
    "DEVICE", "SETTINGS", "Rival", "Settings", "Timing", "copy_bandwidth", "failures", "measure", "median_ms",
    "on_gpu", "peak_gib", "record", "report", "require_gpu", "rival_ms", "save", "torch_compile",
]  # fmt: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # CPU: dry runs only


@dataclass
class Settings:
    """What a run measures; the command line narrows it before anything is timed."""

    tokens: tuple[int, ...] = (1024, 16_384, 131_072)  # a notebook's step, a packed row, a long context
    compared_at: int = 16_384  # tokens at which torch.compile and forced LONG_INDEXING are measured too
    compile: bool = True
    warmup_ms: float = 10.0
    slow_warmup_ms: float = 300.0  # of large products, whose power draw sets the clock: all at the one they can hold
    repeat_ms: float = 40.0


SETTINGS = Settings()


@dataclass(frozen=True)
class Timing:
    """One case. Bandwidths are in GB/s (1e9 bytes a second), times in milliseconds.

    A time that is None was not measured: nothing to compare with, not installed, out of memory, or left out.
    """

    operation: str
    case: str
    tokens: int
    ms: float
    bytes: int
    gb_per_s: float
    share_of_copy: float
    torch_ms: float | None
    compile_ms: float | None = field(default=None, kw_only=True)  # torch.compile of the torch expression
    liger_ms: float | None = field(default=None, kw_only=True)
    int64_ms: float | None = field(default=None, kw_only=True)  # our kernel, LONG_INDEXING forced on

    def __str__(self) -> str:
        others = (("torch", self.torch_ms), ("compile", self.compile_ms), ("liger", self.liger_ms),
                  ("int64", self.int64_ms))  # fmt: skip
        ratios = "".join(f"  {name} {f'{ms / self.ms:.2f}x' if ms is not None else '-':>6}" for name, ms in others)
        return (
            f"{self.operation:<20} {self.case:<22} {self.tokens:>7,} tokens {self.ms:>9.4f} ms "
            f"{self.bytes / 1e6:>9.1f} MB {self.gb_per_s:>6.0f} GB/s {self.share_of_copy:>7.1%}{ratios}"
        )


class Rival:
    """Another implementation of the same differentiable function, run forward and backward.

    function: takes the leaves, returns a tensor or a tuple of them; may compile or import at its first call.
    leaves: its arguments; gradients are taken of those that require one.
    gradients: of the outputs.
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._function, self._leaves, self._gradients = function, tuple(leaves), tuple(gradients)
        self._outputs: tuple[Tensor, ...] | None = None

    def forward(self) -> Any:
        """One forward in training mode: what backward needs is kept, then dropped."""
        return self._function(*self._leaves)

    def backward(self) -> Any:
        """One backward through a graph that is built at the first call and kept."""
        if self._outputs is None:
            outputs = self._function(*self._leaves)
            self._outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        return torch.autograd.grad(self._outputs, wanted, self._gradients, retain_graph=True)


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, at the first call, for these shapes alone; the graph of its backward may be kept."""

    @lru_cache(maxsize=1)
    def compiled() -> Callable[..., Any]:
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as functorch_config

        functorch_config.donated_buffer = False  # else a kept graph is refused
        dynamo_config.recompile_limit = 64  # one closure, many shapes
        return torch.compile(function, dynamic=False)

    return lambda *leaves: compiled()(*leaves)


def on_gpu() -> bool:
    """Whether times are a GPU's."""
    return DEVICE.type == "cuda"


def require_gpu() -> None:
    """Stops with a sentence where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("These benchmarks need a CUDA GPU: torch.cuda.is_available() is False here.")


def median_ms(function: Callable[[], Any], *, least: int = 5) -> float:
    """Median milliseconds of one call on the GPU's clock, at least `least` calls, with a cold L2 cache.

    Without a GPU: of two calls on the host's clock, for dry runs.
    """
    if not on_gpu():
        return statistics.median(_host_ms(function) for _ in range(2))
    function()  # compiles, allocates
    wall, _, events = _calls(function, 1, 0.0)
    if wall > SLOW_MS:
        _calls(function, int(SETTINGS.slow_warmup_ms / wall), 0.0)
        _, _, events = _calls(function, least, 0.0)
    else:
        _, host, _ = _calls(function, 5, 0.0)
        busy = min(1.5 * host, 2.0)  # the host's time of a call that itself waits for the GPU says nothing
        wall, _, _ = _calls(function, 5, busy)
        _calls(function, int(SETTINGS.warmup_ms / wall), busy)
        _, _, events = _calls(function, max(least, int(SETTINGS.repeat_ms / wall)), busy)
    return statistics.median(start.elapsed_time(end) for start, end in events)


SLOW_MS = 20.0  # from here on launching is no part of a call


def _calls(
    function: Callable[[], Any], repeats: int, busy_ms: float
) -> tuple[float, float, list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Calls enqueued without waiting: wall milliseconds a call, the host's part of them, the events."""
    cache, events, host = _cache(), [], 0.0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cache.zero_()
        if busy_ms:
            torch.cuda._sleep(int(busy_ms * 2e6))  # cycles, at about 2 GHz
        enqueued = time.perf_counter()
        start.record()
        function()
        end.record()
        host += time.perf_counter() - enqueued
        events.append((start, end))
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    return wall * 1e3 / max(repeats, 1), host * 1e3 / max(repeats, 1), events


@lru_cache(maxsize=1)
def _cache() -> Tensor:
    """256 MiB, several times any L2 cache."""
    return torch.empty(2**28, dtype=torch.int8, device=DEVICE)


def _host_ms(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return max((time.perf_counter() - begin) * 1e3, 1e-6)


@lru_cache(maxsize=1)
def copy_bandwidth() -> float:
    """GB/s of a 1 GiB copy on the current GPU: bytes read plus bytes written, by time."""
    source = torch.ones(2**29 if on_gpu() else 2**20, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), least=20) / 1e6


def peak_gib(function: Callable[[], Any]) -> float:
    """GiB that one call, not its first, allocates at its peak beyond what was there; 0 without a GPU."""
    if not on_gpu():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def rival_ms(name: str, function: Callable[[], Any] | None, *, least: int = 5) -> float | None:
    """`median_ms` of others' code: None where it is not there, does not fit, or fails (said on stderr)."""
    if function is None:
        return None
    try:
        return median_ms(function, least=least)
    except ModuleNotFoundError:
        return None
    except failures() as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        print(f"{name}: {type(error).__name__}: {reason}", file=sys.stderr)
        if on_gpu():
            torch.cuda.empty_cache()
        return None


def failures() -> tuple[type[BaseException], ...]:
    """What compilers and libraries raise; out of memory is a RuntimeError."""
    common = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError, ImportError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return common
    return (*common, TritonError)


def measure(
    operation: str,
    case: str,
    tokens: int,
    counted_bytes: int,
    function: Callable[[], Any],
    torch_function: Callable[[], Any] | None = None,
    *,
    compiled: Callable[[], Any] | None = None,
    liger: Callable[[], Any] | None = None,
    module: ModuleType | None = None,
    least: int = 5,
) -> Timing:
    """Times the function and, where given, what else does the same work; prints only failures of the latter.

    compiled (a `Rival` of `torch_compile`) and module (the kernel's, its `long_indexing` made to say yes)
    count at ``SETTINGS.compared_at`` tokens only. least: calls of each to take the median of.
    """
    median_ms(function, least=1)  # thrown away: what comes first after a while without work is up to 4% late
    where = f"{operation}, {case}, {tokens} tokens"
    torch_ms = rival_ms(f"{where}: torch", torch_function, least=least)
    compared = tokens == SETTINGS.compared_at
    compile_ms = rival_ms(f"{where}: torch.compile", compiled) if compared and SETTINGS.compile else None
    liger_ms = rival_ms(f"{where}: Liger", liger, least=least)
    int64_ms = None
    if compared and module is not None:
        with patch.object(module, "long_indexing", lambda *tensors: True):
            int64_ms = median_ms(function, least=least)
    ms = median_ms(function, least=least)
    bandwidth = counted_bytes / ms / 1e6
    return Timing(
        operation, case, tokens, ms, counted_bytes, bandwidth, bandwidth / copy_bandwidth(), torch_ms,
        compile_ms=compile_ms, liger_ms=liger_ms, int64_ms=int64_ms,
    )  # fmt: skip


_DESCRIBE = (
    "--match=",
    "--always",
    "--abbrev=40",
    "--dirty",
)  # the hash; -dirty where the tree has changed since
_PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger_kernel",
    "flash-attn-4",
)  # fmt: skip
_WORK = "random bf16 tensors of one layer; bytes: every input read once, every output written once"
_NOTES = (
    "median of 40 ms of calls after 10 ms of warm-up, on the GPU's clock (2 to 5 calls if slow); "
    "L2 overwritten and the GPU kept busy before each call, so that the host's time to launch is not in it"
)


def record(
    results: Sequence[Timing | dict[str, Any]],
    *,
    script: str = "kernels",
    work: str = _WORK,
    notes: str = _NOTES,
    floor: dict[str, Any] | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """The object that benchmarks/results keeps (see its README for the keys).

    commit: what ran, where the machine has a copy of the tree without its history.
    """
    return {
        "script": script,
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit or _said_by("git", "-C", str(Path(__file__).parent), "describe", *_DESCRIBE),
        "date": date.today().isoformat(),
        "device": _device(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "work": work,
        "results": [asdict(result) if isinstance(result, Timing) else result for result in results],
        "floor": {"copy_gb_per_s": copy_bandwidth()} if floor is None else floor,
        "notes": notes,
    }


def report(timings: Sequence[Timing], *, table: bool = True, commit: str | None = None) -> None:
    """Prints the table, then `record` as one JSON object on the last line."""
    if table:
        for timing in timings:
            print(timing)
    print(json.dumps(record(timings, commit=commit)))


def save(kept: dict[str, Any], folder: str | Path, path: Path | None = None) -> Path:
    """Writes the record as date-script-device.json into the folder; a second run of a day gets a number.

    path: what an earlier save of the same run returned, which is then replaced.
    """
    if path is not None:
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return path
    device = "-".join("".join(c if c.isalnum() else " " for c in kept["device"]["name"].lower()).split())
    stem, number = f"{kept['date']}-{kept['script']}-{device}", 1
    path = Path(folder) / f"{stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}.json")
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return path


def _device() -> dict[str, Any]:
    if not on_gpu():
        return {"name": platform.processor() or platform.machine(), "count": 1, "cuda": None, "driver": None}
    driver = _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    name = torch.cuda.get_device_name()
    return {"name": name, "count": 1, "cuda": torch.version.cuda, "driver": driver and driver.splitlines()[0]}


def _said_by(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # not installed, or bundled with torch under another name
        return None
