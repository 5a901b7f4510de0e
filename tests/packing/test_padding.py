"""fastlm.packing.padding against every batch there is."""

from itertools import combinations

import numpy as np
import pytest

from fastlm.packing import expected_speedup


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9, 10, 12])
def test_equals_the_mean_over_all_batches(batch_size):
    lengths = np.random.default_rng(0).integers(1, 100, 10)
    longest = [max(batch) for batch in combinations(lengths, min(batch_size, 10))]
    assert expected_speedup(lengths, batch_size) == pytest.approx(np.mean(longest) / lengths.mean(), rel=1e-12)


def test_two_lengths_and_large_batches():
    lengths = [1000] * 2000 + [100] * 8000
    assert expected_speedup(lengths, 64) == pytest.approx(1000 / (0.2 * 1000 + 0.8 * 100), rel=1e-5)
    assert expected_speedup(lengths, 64, max_length=500) == pytest.approx(500 / (0.2 * 500 + 0.8 * 100), rel=1e-5)


def test_equal_lengths_need_no_padding():
    assert expected_speedup([7] * 100_000, 32) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(("lengths", "batch_size"), [([], 2), ([3], 0)])
def test_wrong_arguments(lengths, batch_size):
    with pytest.raises(ValueError, match="at least one"):
        expected_speedup(lengths, batch_size)
