"""Where the time of a few training steps goes: the GPU's busy share, launches, the kernels that take longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

__all__ = ["ACTIVITIES", "LONGEST_NAME", "Profile", "StepProfiler", "profile_of"]

ACTIVITIES = (ProfilerActivity.CUDA,) if torch.cuda.is_available() else (ProfilerActivity.CPU,)  # both slow the host
LONGEST_NAME = 90
_STEPS = 3
_BUSY = 0.9  # of the time: where the GPU computes less than this, it waits for the host


@dataclass(frozen=True)
class Profile:
    """Of one step, the mean over those profiled; without a GPU the kernels are the host's operators.

    kernels: the ten that take longest: {"name", "ms", "share" (of all of them), "calls"}. launches: copies included.
    kernel_ms: of all. busy_share: of the time from the first one's start to the last one's end, some kernel runs.
    The last three are None without a GPU.
    """

    steps: int
    kernels: list[dict[str, Any]]
    launches: float | None = None
    kernel_ms: float | None = None
    busy_share: float | None = None

    def facts(self) -> dict[str, Any]:
        """For a JSON object."""
        return asdict(self) | {"host_bound": self.host_bound}

    @property
    def host_bound(self) -> bool | None:
        """Whether the GPU waits for launches; None without one."""
        return None if self.busy_share is None else self.busy_share < _BUSY

    def __str__(self) -> str:
        lines = [f"{'kernel':<{LONGEST_NAME}} {'ms':>9} {'share':>7} {'calls':>7}   (per step)"]
        lines += [
            f"{one['name']:<{LONGEST_NAME}} {one['ms']:>9.3f} {one['share']:>7.1%} {one['calls']:>7.1f}"
            for one in self.kernels
        ]
        if self.busy_share is not None:
            bound = "host-bound: it waits for launches" if self.host_bound else "not host-bound"
            lines.append(f"GPU busy {self.busy_share:.1%} of the time, {self.launches:,.0f} launches a step; {bound}")
        return "\n".join(lines)


def profile_of(profiler: profile, steps: int) -> Profile:
    """What a profiler with ``ACTIVITIES`` has seen of this many steps."""
    if not torch.cuda.is_available():
        seen = [one for one in profiler.key_averages() if not one.is_user_annotation]
        rows = [(one.key, one.self_cpu_time_total, one.count) for one in seen]
        return Profile(steps, _largest(rows, steps))
    seen = [
        event for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    totals: dict[str, tuple[float, int]] = {}
    for event in seen:
        us, calls = totals.get(event.name, (0.0, 0))
        totals[event.name] = us + event.time_range.elapsed_us(), calls + 1
    ran = sum(us for us, _ in totals.values())
    busy = _busy_share([(event.time_range.start, event.time_range.end) for event in seen])
    kernels = _largest([(name, us, calls) for name, (us, calls) in totals.items()], steps)
    return Profile(steps, kernels, len(seen) / steps, ran / steps / 1e3, busy)


def _busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """Of the time from the first start to the last end, what at least one of the spans covers."""
    covered, first, until = 0.0, None, 0.0
    for start, end in sorted(spans):
        first, until = (start, start) if first is None else (first, until)
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - first) if first is not None and until > first else 0.0


def _largest(rows: Sequence[tuple[str, float, int]], steps: int) -> list[dict[str, Any]]:
    """rows: name, microseconds, calls, of all steps together."""
    total = sum(us for _, us, _ in rows) or 1.0
    return [
        {"name": name[:LONGEST_NAME], "ms": us / steps / 1e3, "share": us / total, "calls": calls / steps}
        for name, us, calls in sorted(rows, key=lambda row: -row[1])[:10]
    ]


class StepProfiler(TrainerCallback):
    """Profiles three steps of a run after three others, or as many as there are; ``profile`` is there when they are.

    Writes folder/trace.json, for chrome://tracing or Perfetto. Waits for the GPU before and after those steps, which
    the run's report leaves out (``slows_next``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profile: Profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        left = max(1, state.max_steps - state.global_step)
        self._warm = warm = min(1, left - 1)
        self._steps = min(_STEPS, left - warm)
        self._idle = min(3, left - warm - self._steps) + warm  # steps before
        self._done = 0
        plan = schedule(skip_first=self._idle - warm, wait=0, warmup=warm, active=self._steps, repeat=1)
        self._profiler = profile(activities=ACTIVITIES, schedule=plan, on_trace_ready=self._keep)
        self._profiler.start()

    @property
    def slows_next(self) -> bool:
        """Whether the next step is one to profile, or the one before them, with the profiler on already."""
        return self._idle - self._warm <= self._done < self._idle + self._steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done += 1
        if self._done in (self._idle, self._idle + self._steps) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._done <= self._idle + self._steps:
            self._profiler.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profile is None:  # training was stopped early
            self._profiler.stop()

    def _keep(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        self.profile = profile_of(profiler, max(1, min(self._steps, self._done - self._idle)))
