"""fastlm.training.batches: a step balanced over micro-batches, or made to a budget of tokens, is still that step."""

from itertools import chain

import numpy as np
import pytest
import torch
import trl
from torch.utils.data import RandomSampler, WeightedRandomSampler

from fastlm.training import batches
from tests.ranks import run_on_two_ranks

from .runs import Recorder, config, logged, model, rows, targets, trainer, worst_error

DATA = rows((5, 12, 3, 9, 20, 2, 7, 16, 30, 4, 11, 6, 25, 8, 10, 3, 14))  # 17 rows


class Seen(Recorder):
    """The gradients of every step, and the rows of every micro-batch that reached the model."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def watch(self, made):
        collate = made.data_collator

        def noted(examples):
            self.batches.append([tuple(example["input_ids"]) for example in examples])
            return collate(examples)

        made.data_collator = noted


def run(tmp_path, *, budget=None, balanced=True, resume=None, data=DATA, epochs=2, **given):
    """(trainer, what was seen) of a run of two epochs without dropout."""
    seen = Seen()
    facts = dict(max_steps=-1, num_train_epochs=epochs, shuffle_dataset=False, **given)
    made = trainer(model(), data, config(tmp_path, **facts), callbacks=[seen])
    made.args.tokens_per_step = budget
    seen.watch(made)
    if not balanced:
        made._get_train_sampler = lambda dataset=None: RandomSampler(made.train_dataset)
    made.train(resume_from_checkpoint=resume)
    return made, seen


def steps(seen, accumulation, per_epoch):
    """The rows of each step, sorted; the last step of an epoch may have fewer micro-batches."""
    out = []
    for begin in range(0, len(seen.batches), per_epoch):
        epoch = seen.batches[begin : begin + per_epoch]
        out += [sorted(chain(*epoch[i : i + accumulation])) for i in range(0, len(epoch), accumulation)]
    return out


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_balanced_step_is_the_step_undivided(tmp_path, accumulation):
    size = 2
    made, seen = run(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    plain, plain_seen = run(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
                            balanced=False)  # fmt: skip
    whole, whole_seen = run(tmp_path, per_device_train_batch_size=size * accumulation)
    assert (
        made.state.global_step == plain.state.global_step == whole.state.global_step == 2 * -(-17 // (2 * accumulation))
    )
    held = steps(seen, accumulation, 9)
    assert held == steps(plain_seen, accumulation, 9) == [sorted(batch) for batch in whole_seen.batches]
    assert logged(made) == pytest.approx(logged(whole), rel=1e-5)
    assert logged(made) == pytest.approx(logged(plain), rel=1e-5)
    for ours, truth in zip(seen.gradients, whole_seen.gradients, strict=True):
        assert worst_error(ours, truth) < 1e-5
    if accumulation == 3:
        assert seen.batches != plain_seen.batches
        spread = [np.ptp([sum(map(len, batch)) for batch in s.batches[:3]]) for s in (seen, plain_seen)]
        assert spread[0] < spread[1]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_of_a_token_budget_are_those_steps_undivided(tmp_path, accumulation):
    made, seen = run(tmp_path, budget=100, gradient_accumulation_steps=accumulation)
    whole, whole_seen = run(tmp_path, budget=100)
    per_epoch = len(seen.batches) // 2
    assert made.state.global_step == whole.state.global_step == len(whole_seen.batches) == 2 * per_epoch // accumulation
    held = steps(seen, accumulation, per_epoch)
    assert held == [sorted(batch) for batch in whole_seen.batches]
    assert max(sum(map(len, step)) for step in held) <= 100
    everything = sorted(tuple(row["input_ids"]) for row in DATA)
    assert sorted(chain(*held[: len(held) // 2])) == everything  # each epoch has every row once
    assert logged(made) == pytest.approx(logged(whole), rel=1e-5)
    for ours, truth in zip(seen.gradients, whole_seen.gradients, strict=True):
        assert worst_error(ours, truth) < 1e-5


def test_the_denominator_is_the_whole_step(tmp_path):
    counts = []

    class Counting(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
            counts.append((int(num_items_in_batch), int((inputs["labels"] != -100).sum())))
            return super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)

    from datasets import Dataset

    from ..tiny import tiny_tokenizer

    made = Counting(
        model=model(), train_dataset=Dataset.from_list(DATA), processing_class=tiny_tokenizer(),
        args=config(tmp_path, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=1),
    )  # fmt: skip
    made.args.tokens_per_step = 100
    made.train()
    assert len(counts) % 3 == 0 and sum(own for _, own in counts) == targets(DATA)
    for i in range(0, len(counts), 3):
        assert {whole for whole, _ in counts[i : i + 3]} == {sum(own for _, own in counts[i : i + 3])}


@pytest.mark.parametrize(("budget", "stop"), [(None, 2), (None, 4), (100, 1), (100, 3)])  # in either epoch
def test_resumed_batches_are_those_that_would_have_come(tmp_path, budget, stop):
    given = dict(gradient_accumulation_steps=2, per_device_train_batch_size=3, save_strategy="steps", save_steps=stop)
    made, whole = run(tmp_path / "a", budget=budget, **given)
    resumed, rest = run(tmp_path / "b", budget=budget, resume=str(tmp_path / "a" / f"checkpoint-{stop}"), **given)
    assert rest.batches == whole.batches[-len(rest.batches) :]
    assert len(rest.gradients) == len(whole.gradients) - stop
    assert logged(resumed)[-len(rest.gradients) :] == logged(made)[stop:]
    for ours, truth in zip(rest.gradients, whole.gradients[stop:], strict=True):
        assert all(torch.equal(ours[name], truth[name]) for name in truth)


def test_packed_rows_are_balanced_by_their_samples(tmp_path):
    made = trainer(
        model(), DATA, config(tmp_path, packing=True, max_length=30, gradient_accumulation_steps=2,
                              per_device_train_batch_size=2)
    )  # fmt: skip
    sampler = made._get_train_sampler()
    lengths = made.train_dataset["seq_lengths"]
    assert sampler._costs.tolist() == pytest.approx([sum(n * (1 + n / 20_000) for n in row) for row in lengths])


def test_others_samplers_and_padded_batches_are_left_alone(tmp_path):
    accumulated = dict(gradient_accumulation_steps=2)
    grouped = trainer(model(), DATA, config(tmp_path, train_sampling_strategy="group_by_length", **accumulated))
    assert type(grouped._get_train_sampler()).__name__ == "LengthGroupedSampler"
    padded = trainer(model(), DATA, config(tmp_path, padding_free=False, **accumulated))
    assert type(padded._get_train_sampler()) is RandomSampler
    stock = trainer(model(patched=False), DATA, config(tmp_path, bf16=False, **accumulated))
    assert type(stock._get_train_sampler()) is RandomSampler
    alone = trainer(model(), DATA, config(tmp_path))
    assert type(alone._get_train_sampler()) is RandomSampler  # nothing to deal

    class Own(trl.SFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return WeightedRandomSampler([1.0] * 17, 17)

    from datasets import Dataset

    own = Own(model=model(), args=config(tmp_path, **accumulated), train_dataset=Dataset.from_list(DATA),
              processing_class=grouped.processing_class)  # fmt: skip
    assert type(own._get_train_sampler()) is WeightedRandomSampler


@pytest.mark.parametrize(
    ("budget", "given", "message"),
    [
        (29, {}, "less than the longest row's 30 tokens"),
        (40, {"gradient_accumulation_steps": 4}, "too few for 4 micro-batches"),
        (100, {"padding_free": False}, "cannot be honoured: batches are padded"),
        (100, {"train_sampling_strategy": "group_by_length"}, "comes from a LengthGroupedSampler"),
        (100, {"train_sampling_strategy": "sequential"}, "comes from a SequentialSampler"),
    ],
)
def test_a_budget_that_cannot_be_honoured(tmp_path, budget, given, message):
    made = trainer(model(), DATA, config(tmp_path, **given))
    made.args.tokens_per_step = budget
    with pytest.raises(ValueError, match=message):
        made.get_train_dataloader()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_take_turns(ranks):
    costs = np.arange(1.0, 48.0)
    given = dict(accumulation=2, tokens=costs.astype(int), tokens_per_step=None)
    shards = [list(batches._RankSampler(range(47), costs, 4, rank=rank, ranks=ranks, **given)) for rank in range(ranks)]
    flat = list(batches.BalancedBatchSampler(range(47), costs, 4, ranks=ranks, **given))
    assert [shard for group in zip(*shards, strict=True) for shard in group] == flat
    assert {len(batches._RankSampler(range(47), costs, 4, rank=0, ranks=ranks, **given))} == {len(shards[0])}


def on_two_ranks(out):
    """What each process of the test below runs."""
    for budget in (None, 120):
        given = dict(
            use_cpu=True,
            ddp_backend="gloo",
            **({} if budget else {"per_device_train_batch_size": 1}),
            max_steps=-1,
            num_train_epochs=1,
            gradient_accumulation_steps=2,
        )
        seen = Seen()
        made = trainer(model(), DATA[:16], config(out, **given), callbacks=[seen])
        made.args.tokens_per_step = budget
        seen.watch(made)
        made.train()
        torch.save(
            (made.state.log_history, seen.gradients, seen.batches), f"{out}/{budget}-{made.args.process_index}.pt"
        )


def test_two_ranks_train_the_undivided_step(tmp_path):
    run_on_two_ranks(on_two_ranks, tmp_path)
    for budget in (None, 120):
        size = {} if budget else {"per_device_train_batch_size": 4}
        whole, whole_seen = run(tmp_path, budget=budget, data=DATA[:16], epochs=1, **size)
        ranks = [torch.load(tmp_path / f"{budget}-{rank}.pt") for rank in (0, 1)]
        count = len(whole_seen.batches)
        assert [len(batches) for _, _, batches in ranks] == [2 * count] * 2
        for number, held in enumerate(whole_seen.batches):
            dealt = [batch for _, _, batches in ranks for batch in batches[2 * number : 2 * number + 2]]
            assert sorted(chain(*dealt)) == sorted(held)
        for log, gradients, _ in ranks:
            losses = [entry["loss"] for entry in log if "loss" in entry]
            assert losses == pytest.approx(logged(whole), rel=1e-5)
            for ours, truth in zip(gradients, whole_seen.gradients, strict=True):
                named = {name.removeprefix("module."): tensor for name, tensor in ours.items()}
                assert worst_error(named, truth) < 1e-5
