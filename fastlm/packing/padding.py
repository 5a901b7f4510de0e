"""What padding would have cost: tokens of padded batches over tokens of samples."""

from collections.abc import Sequence

import numpy as np

__all__ = ["expected_speedup"]


def expected_speedup(lengths: Sequence[int] | np.ndarray, batch_size: int, max_length: int | None = None) -> float:
    """Tokens in padded batches over tokens in samples: the speed-up to expect where time follows tokens.

    Batches of B samples are drawn at random without putting back and padded to their longest, whose expected
    length follows from the order statistics of the N lengths l_1 <= ... <= l_N:

        E[max] = sum_i l_i * C(i - 1, B - 1) / C(N, B),    speed-up = E[max] / mean(l)

    For large B and a share p of samples of length L, 1 - p of length S, that is L / (p L + (1 - p) S). The
    share of the padded batches' tokens that is padding, and so is avoided, is 1 - 1 / speed-up.

    Args:
        lengths: tokens of each sample, N > 0 of them.
        batch_size: B; at most all samples are in a batch.
        max_length: longer samples are cut to it.

    Raises:
        ValueError: no lengths, or a batch size below 1.

    >>> expected_speedup([1, 3], 2)
    1.5
    """
    rising = np.sort(np.asarray(lengths, np.float64))
    if max_length is not None:
        rising = np.minimum(rising, max_length)
    n, b = len(rising), min(batch_size, len(rising))
    if b < 1:
        raise ValueError(f"{n} lengths in batches of {batch_size}: there must be at least one of each")
    i = np.arange(n, 1, -1)
    chances = b / n * np.cumprod(np.concatenate(([1.0], np.maximum(i - b, 0) / (i - 1))))  # of being longest, i = n..1
    return float(rising[::-1] @ chances / rising.mean())
