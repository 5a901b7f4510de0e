"""fastlm/kernels/partial_sums.py against fp64."""

import pytest
import torch

from fastlm.kernels.partial_sums import sum_partials

from .interpreter import DEVICE, kernel_test, run_interpreted


def test_interpreted() -> None:
    run_interpreted(__file__)


@kernel_test
@pytest.mark.parametrize(("count", "width"), [(1, 3), (5, 4100), (700, 24)])  # one; many columns; many rows
def test_partial_sums(count: int, width: int) -> None:
    partial = torch.randn(count, width, device=DEVICE)
    total = sum_partials(partial, torch.float32)
    torch.testing.assert_close(total, partial.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert sum_partials(partial, torch.float16).dtype == torch.float16
