"""Fixtures of the kernel tests."""

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on torch.empty is full of NaN, so that whatever a kernel fails to write shows."""
    with torch.device("cpu"):
        empty = torch.empty
        empty(0)  # torch looks its constructors up once; finding ours, torch.device("meta") would allocate

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
