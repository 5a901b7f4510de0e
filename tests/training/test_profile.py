"""A few steps, profiled: the trace, the table, and what share of the time something ran."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

from fastlm.training.profile import Profile, StepProfiler, _busy_share

from . import runs


def test_the_busy_share_counts_overlaps_once() -> None:
    assert _busy_share([(0, 2), (3, 4)]) == 3 / 4
    assert _busy_share([(3, 4), (0, 2), (1, 2), (1, 3.5)]) == 1.0
    assert _busy_share([(0, 10), (2, 3), (19, 20)]) == 11 / 20
    assert _busy_share([]) == 0.0


@pytest.mark.filterwarnings("ignore:.*warmup.*:UserWarning")  # one step leaves none for it
@pytest.mark.parametrize("steps, profiled", [(8, 3), (5, 3), (3, 2), (1, 1), (0, 1)])  # 0: transformers takes one
def test_steps_after_warm_up_are_profiled(tmp_path: Any, steps: int, profiled: int) -> None:
    watch = StepProfiler(tmp_path / "trace")
    args = runs.config(tmp_path, max_steps=steps, per_device_train_batch_size=4)
    trainer = runs.trainer(runs.model(), runs.rows(), args, callbacks=[watch])
    trainer.train()
    assert watch.profile is not None and watch.profile.steps == profiled
    if torch.cuda.is_available():
        return
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    updates = [event for event in events if "Optimizer.step#AdamW.step" in event["name"]]
    assert len(updates) == profiled
    kernels = watch.profile.kernels
    assert len(kernels) == 10 and all(a["ms"] >= b["ms"] for a, b in pairwise(kernels))
    assert all("#" not in one["name"] and "ProfilerStep" not in one["name"] for one in kernels)  # no annotations
    assert 0 < sum(one["share"] for one in kernels) < 1 and watch.profile.host_bound is None


def test_a_run_that_stops_early_is_profiled_as_far_as_it_went(tmp_path: Any) -> None:
    class Stop(runs.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    watch = StepProfiler(tmp_path / "trace")
    args = runs.config(tmp_path, max_steps=20, per_device_train_batch_size=4)
    runs.trainer(runs.model(), runs.rows(), args, callbacks=[watch, Stop()]).train()
    assert watch.profile is not None and watch.profile.steps == 2
    assert (tmp_path / "trace" / "trace.json").exists()


def test_the_table() -> None:
    kernels = [{"name": "product", "ms": 3.25, "share": 0.75, "calls": 2.0}]
    lines = str(Profile(3, kernels, 1234.0, 4.0, 0.62)).splitlines()
    assert lines[1].split() == ["product", "3.250", "75.0%", "2.0"]
    assert lines[2] == "GPU busy 62.0% of the time, 1,234 launches a step; host-bound: it waits for launches"
    assert str(Profile(3, kernels, 10.0, 4.0, 0.97)).endswith("10 launches a step; not host-bound")
    assert Profile(3, kernels, 10.0, 4.0, 0.97).facts()["host_bound"] is False


@pytest.mark.gpu
def test_kernels_of_a_gpu(tmp_path: Any) -> None:
    watch = StepProfiler(tmp_path)
    args = runs.config(tmp_path, max_steps=8, per_device_train_batch_size=4, bf16=True)
    runs.trainer(runs.model().cuda(), runs.rows(), args, callbacks=[watch]).train()
    profile = watch.profile
    assert profile is not None and profile.steps == 3
    assert profile.launches is not None and profile.launches > 50
    assert profile.busy_share is not None and 0 < profile.busy_share <= 1 and profile.host_bound
    assert (tmp_path / "trace.json").stat().st_size > 10_000
