"""fastlm.packing.sampler: which samples a step holds, how evenly they are dealt, and the order of delivery."""

from itertools import chain, islice

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from fastlm.packing import BalancedBatchSampler
from fastlm.packing.sampler import deal


def shuffled(count, seed=3):
    return SeedableRandomSampler(range(count), data_seed=seed)


def lognormal(count, longest=2048, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(200), 0.6, count).astype(np.int64), 1, longest)


def steps_of(batches, per_step):
    """The samples of each step, sorted."""
    return [sorted(chain(*batches[i : i + per_step])) for i in range(0, len(batches), per_step)]


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 4))
@example([1.0] * 8, 4, 2)
@settings(deadline=None, max_examples=150)
def test_every_deal(costs, rounds, ranks):
    bins = rounds * ranks
    if len(costs) < bins:
        return
    dealt = deal(costs, bins, ranks)
    assert len(dealt) == bins and all(dealt)
    assert sorted(chain(*dealt)) == list(range(len(costs)))
    loads = [sum(costs[i] for i in one) for one in dealt]
    # Graham: longest processing time first is within 4/3 of the best, which is no less than these bounds
    best = max(sum(costs) / bins, max(costs), sum(sorted(costs)[-bins - 1 : -bins + 1]) if len(costs) > bins else 0)
    assert max(loads) <= 4 / 3 * max(best, min(loads)) + 1e-9
    for begin in range(ranks, bins, ranks):  # what runs at once is alike: rounds do not overlap
        assert max(loads[begin - ranks : begin]) <= min(loads[begin : begin + ranks]) + 1e-9


def test_deal_by_hand():
    assert deal([7, 5, 4, 4, 3, 1], 2) == [[0, 3, 5], [1, 2, 4]]
    # loads 9, 8, 7, 6: the two lightest run beside each other, then the two heaviest, the other way round
    assert deal([9, 8, 7, 6], 4, ranks=2) == [[3], [2], [0], [1]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("count", [4, 24, 47, 48, 53])
def test_a_step_holds_the_samples_of_the_unbalanced_run(count, accumulation, ranks, drop_last):
    costs = lognormal(count).astype(float)

    def by_rank(make):
        if ranks == 1:
            return [list(make())]
        shards = [list(BatchSamplerShard(make(), ranks, rank)) for rank in range(ranks)]  # each rank has its own
        assert {len(shard) for shard in shards} == {len(BatchSamplerShard(make(), ranks, 0))}
        return shards

    stock = by_rank(lambda: BatchSampler(shuffled(count), 4, drop_last))
    ours = by_rank(
        lambda: BalancedBatchSampler(
            shuffled(count), costs, 4, accumulation=accumulation, ranks=ranks, drop_last=drop_last
        )
    )
    assert len(ours[0]) == len(stock[0])
    assert all(batch for shard in ours for batch in shard)
    for begin in range(0, len(stock[0]), accumulation):
        sets = [
            sorted(i for shard in shards for batch in shard[begin : begin + accumulation] for i in batch)
            for shards in (stock, ours)
        ]
        assert sets[0] == sets[1]


def test_work_is_even():
    tokens = lognormal(4096)
    costs = tokens * (1 + tokens / 20_000)
    batches = list(BalancedBatchSampler(shuffled(4096), costs, 8, accumulation=4, ranks=4))
    worst = max(
        max(loads) / np.mean(loads)
        for begin in range(0, len(batches), 16)
        for loads in [[costs[batch].sum() for batch in batches[begin : begin + 16]]]
    )
    plain = list(BatchSampler(shuffled(4096), 8, False))
    plain_worst = max(costs[plain[b : b + 16]].sum(1).max() / costs[plain[b : b + 16]].sum(1).mean()
                      for b in range(0, len(plain), 16))  # fmt: skip
    assert worst < 1.03 < 1.5 < plain_worst


@given(
    st.lists(st.integers(1, 100), min_size=40, max_size=200),
    st.integers(0, 400),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
@settings(deadline=None, max_examples=100)
def test_steps_of_a_token_budget(lengths, extra, split):
    tokens = np.array(lengths)
    accumulation, ranks = split
    budget = accumulation * ranks * 2 * 100 + extra
    sampler = BalancedBatchSampler(
        shuffled(len(tokens)), tokens.astype(float), 4, accumulation=accumulation, ranks=ranks, tokens=tokens,
        tokens_per_step=budget,
    )  # fmt: skip
    epochs = [list(sampler) for _ in range(2)]
    for batches in epochs:
        assert len(batches) == len(sampler)
        assert all(batches)
        steps = steps_of(batches, accumulation * ranks)
        assert sorted(chain(*steps)) == list(range(len(tokens)))
        assert max(tokens[step].sum() for step in steps) <= budget


def test_a_token_budget_is_used():
    tokens = lognormal(20_000)
    sampler = BalancedBatchSampler(shuffled(20_000), tokens, 1, accumulation=2, tokens=tokens, tokens_per_step=16_384)
    sums = [tokens[step].sum() for step in steps_of(list(sampler), 2)]
    assert max(sums) <= 16_384
    assert np.mean(sums) > 0.99 * 16_384
    assert min(sums) > 0.98 * 16_384  # no small step at the end
    packed = np.full(100, 4096)  # rows that are full already
    sampler = BalancedBatchSampler(shuffled(100), packed, 1, tokens=packed, tokens_per_step=16_384)
    assert [len(batch) for batch in sampler] == [4] * 25


@pytest.mark.parametrize("count", [1, 2, 513, 3000])
@pytest.mark.parametrize("length", [51, 60, 100])
def test_a_budget_for_one_row_has_a_step_for_each(count, length):
    tokens = np.full(count, length)
    sampler = BalancedBatchSampler(SequentialSampler(range(count)), tokens, 1, tokens=tokens, tokens_per_step=100)
    batches = list(sampler)
    assert len(sampler) == len(batches) == count
    assert sorted(chain(*batches)) == list(range(count))


@pytest.mark.parametrize("budget", [None, 4096])
def test_the_order_follows_seed_and_epoch_and_can_be_resumed(budget):
    tokens = lognormal(300)

    def sampler(seed=3):
        return BalancedBatchSampler(
            shuffled(300, seed), tokens.astype(float), 4, accumulation=2, tokens=tokens, tokens_per_step=budget
        )

    def epoch(number, seed=3, skip=0):
        made = sampler(seed)
        made.set_epoch(number)
        return list(SkipBatchSampler(made, skip))

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(0)
    assert epoch(1) != epoch(1, seed=4)
    assert len(epoch(1)) == len(epoch(0))
    assert epoch(1, skip=5) == epoch(1)[5:]
    running = sampler()
    assert [list(running), list(running)] == [epoch(0), epoch(1)]


def test_only_what_is_asked_for_is_drawn():
    drawn = []

    class Counting(SequentialSampler):
        def __iter__(self):
            for i in super().__iter__():
                drawn.append(i)
                yield i

    list(islice(BalancedBatchSampler(Counting(range(100)), np.ones(100), 2, accumulation=3), 3))
    assert drawn == list(range(6))


@pytest.mark.parametrize(
    ("budget", "accumulation", "message"),
    [(99, 1, "tokens_per_step=99 is less than the longest row's 100 tokens"), (100, 2, "has 1 rows, too few for 2")],
)
def test_a_budget_that_cannot_be_kept(budget, accumulation, message):
    tokens = np.full(20, 100)
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(shuffled(20), tokens, 1, accumulation=accumulation, tokens=tokens, tokens_per_step=budget)
