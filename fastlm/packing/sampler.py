"""Optimiser steps dealt into micro-batches of equal work, over gradient accumulation and ranks."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from torch.utils.data import BatchSampler, Sampler

__all__ = ["BalancedBatchSampler", "deal"]


def deal(costs: Sequence[float] | np.ndarray, bins: int, ranks: int = 1) -> list[list[int]]:
    """Deal samples into bins of as equal cost as possible: longest processing time first.

    Args:
        costs: of n >= bins samples, each above 0.
        bins: how many, a multiple of ranks.
        ranks: bin i is worked on by rank i % ranks, beside the other ranks' bins of the same i // ranks.

    Returns:
        For each bin the samples in it, rising; no bin is empty. Bins that are worked on at once cost about
        the same, and so do a rank's bins together.

    >>> deal([7, 5, 4, 4, 3, 1], 2)
    [[0, 3, 5], [1, 2, 4]]
    """
    loads: list[tuple[float, int]] = [(0.0, i) for i in range(bins)]  # a heap
    dealt: list[list[int]] = [[] for _ in range(bins)]
    for i in np.argsort(-np.asarray(costs), kind="stable").tolist():
        load, least = loads[0]
        dealt[least].append(i)
        heapq.heapreplace(loads, (load + float(costs[i]), least))
    rising = [sorted(dealt[i]) for _, i in sorted(loads)]
    rounds = [rising[i : i + ranks] for i in range(0, bins, ranks)]
    return [one for number, group in enumerate(rounds) for one in group[:: -1 if number % 2 else 1]]


class BalancedBatchSampler(BatchSampler):
    """The micro-batches of all ranks: each step's samples dealt into ``accumulation * ranks`` of equal work.

    Rank r takes the batches r, r + ranks, r + 2 * ranks, ... (accelerate's BatchSamplerShard), and there are
    equally many for each. What a step holds is one of

    - ``batch_size * accumulation * ranks`` samples in the sampler's order: the samples that it would hold if
      nothing were balanced. So is the last step, which has fewer micro-batches and, with several ranks, is
      filled up from the start of the order (or cut, with drop_last).
    - at most ``tokens_per_step`` tokens. The samples are dealt to the steps from the longest to the shortest
      (the sampler's order decides among equals), each to the step that has least. So all steps have about
      as many tokens and the same mix of lengths, and every epoch has as many steps.

    Args:
        sampler: yields the indices 0 to N - 1 in an order of its own; its ``set_epoch`` is passed on to.
        costs: [N], what each sample costs (``work_of``).
        batch_size: samples of a micro-batch when nothing is balanced.
        accumulation: micro-batches of a step on each rank.
        ranks: how many.
        drop_last: leave out what does not fill a micro-batch of every rank.
        tokens: int [N], tokens of each sample, for tokens_per_step.
        tokens_per_step: tokens that a step may have, over all its micro-batches and ranks.

    Raises:
        ValueError: tokens_per_step below the longest sample, or so low that a step has fewer samples than
            micro-batches.
    """

    # each batch has a size of its own; accelerate then leaves their sizes alone
    batch_size: int = None  # type: ignore[assignment]

    def __init__(
        self,
        sampler: Sampler[int],
        costs: np.ndarray,
        batch_size: int,
        *,
        accumulation: int = 1,
        ranks: int = 1,
        drop_last: bool = False,
        tokens: np.ndarray | None = None,
        tokens_per_step: int | None = None,
    ) -> None:
        self.sampler, self.drop_last = sampler, drop_last
        self._costs, self._size, self._ranks = costs, batch_size, ranks
        self._bins = accumulation * ranks
        self._tokens = tokens
        self._steps: int | None = None
        if tokens_per_step is not None:
            if tokens is None:
                raise ValueError("tokens_per_step was given without the tokens of each sample")
            self._steps = _step_count(tokens, tokens_per_step, self._bins)
        self._batches = self._batch_count()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, whose order it decides."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self._batches

    def _batch_count(self) -> int:
        if self._steps is not None:
            return self._steps * self._bins
        rounds = len(self._costs) / (self._size * self._ranks)
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self._ranks

    def __iter__(self) -> Iterator[list[int]]:
        left = self._batches
        for step in self._by_count() if self._steps is None else self._by_tokens(self._steps):
            bins = min(self._bins, left)
            for one in deal(self._costs[step], bins, self._ranks):
                yield step[one].tolist()
            left -= bins

    def _by_count(self) -> Iterator[np.ndarray]:
        order, group = iter(self.sampler), self._size * self._ranks
        first = None
        while len(step := _indices(islice(order, self._size * self._bins))):
            first = step[:group] if first is None else first
            missing = -len(step) % group
            if missing and self.drop_last:
                step = step[: len(step) // group * group]
            elif missing and self._ranks > 1:
                step = np.concatenate([step, np.resize(first, missing)])
            if len(step):
                yield step

    def _by_tokens(self, steps: int) -> Iterator[np.ndarray]:
        assert self._tokens is not None
        order = _indices(self.sampler)
        longest_first = np.argsort(-self._tokens[order], kind="stable")  # places in the order
        step_of = np.empty(len(order), np.int64)
        step_of[longest_first] = _deal_falling(self._tokens[order][longest_first], steps)[0]
        by_step = np.argsort(step_of, kind="stable")  # within a step in the sampler's order
        groups = np.split(order[by_step], np.cumsum(np.bincount(step_of, minlength=steps))[:-1])
        _, begins = np.unique(step_of, return_index=True)
        for step in np.argsort(begins).tolist():  # the steps too: by the place of their first sample
            yield groups[step]


def _indices(order: Iterable[int]) -> np.ndarray:
    return np.fromiter(order, np.int64)


def _deal_falling(values: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """What `deal` does, for values that fall and bins by the thousand: each value's bin, and the bins' sums.

    A round at a time: of the bins that have least, as many as would each get a value before any gets two.
    """
    bin_of, sums = np.empty(len(values), np.int64), np.zeros(bins, np.int64)
    begin = 0
    while begin < len(values):
        least_first = np.argsort(sums, kind="stable")
        waiting = np.searchsorted(sums[least_first], sums[least_first[0]] + values[begin])
        taken = values[begin : begin + waiting]
        least_first = least_first[: len(taken)]
        bin_of[begin : begin + waiting] = least_first
        sums[least_first] += taken
        begin += waiting
    return bin_of, sums


def _step_count(tokens: np.ndarray, tokens_per_step: int, bins: int) -> int:
    """The fewest steps (within half a percent) of which none has more tokens than allowed."""
    falling = np.sort(tokens)[::-1]
    if tokens_per_step < falling[0]:
        raise ValueError(
            f"tokens_per_step={tokens_per_step} is less than the longest row's {falling[0]} tokens: raise it to "
            "at least that, or lower max_length"
        )
    steps = math.ceil(int(tokens.sum()) / tokens_per_step)
    while (dealt := _deal_falling(falling, steps))[1].max() > tokens_per_step:
        steps = min(steps + max(1, steps // 256), len(tokens))  # one sample a step is always within the budget
    fewest = int(np.bincount(dealt[0]).min())
    if fewest < bins:
        raise ValueError(
            f"a step of tokens_per_step={tokens_per_step} has {fewest} rows, too few for {bins} micro-batches "
            "(gradient_accumulation_steps times ranks): raise it, or accumulate less"
        )
    return steps
