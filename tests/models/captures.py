"""What stands in for a CUDA graph on a CPU: the work is run again, in the same buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastlm.models import capture

__all__ = ["run_again"]


def run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on captures are such."""

    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return torch.enable_grad()(work)

    monkeypatch.setattr(capture, "recorder", lambda device: record)
