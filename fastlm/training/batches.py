"""The training batches of an SFTTrainer whose model is fastlm's: every step's samples in micro-batches of
equal work, or as many samples as a budget of tokens holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ..packing.dataset import lengths_of, work_of
from ..packing.sampler import BalancedBatchSampler
from .step import state_of

__all__ = ["train_sampler"]


class _RankSampler(BalancedBatchSampler, BatchRebalanceSampler):
    """One rank's batches, under the type of which Trainer makes a DataLoader's batch sampler."""

    def __init__(self, *args: Any, rank: int, ranks: int, **kwargs: Any) -> None:
        BalancedBatchSampler.__init__(self, *args, ranks=ranks, **kwargs)
        self._rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self._rank, None, self._ranks)

    def __len__(self) -> int:
        return super().__len__() // self._ranks


def train_sampler(original: Callable[..., Any], trainer: Any, dataset: Any = None) -> Any:
    """Trainer._get_train_sampler: balanced, if batches are padding-free and in an order of Trainer's own.

    Without ``tokens_per_step`` each optimiser step keeps its samples, and so its loss and gradient; only how
    they lie in micro-batches and on ranks changes. A sampler of the user's or for grouping by length is left
    alone, as is a data set without ``input_ids`` to measure.

    Raises:
        ValueError: ``tokens_per_step`` where it cannot be honoured.
    """
    sampler = original(trainer, dataset)
    state = state_of(trainer)
    if state is None:
        return sampler
    budget = getattr(trainer.args, "tokens_per_step", None)
    obstacle = _obstacle(trainer, state, sampler, budget)
    if obstacle is not None:
        if budget is not None:
            raise ValueError(f"tokens_per_step={budget} cannot be honoured: {obstacle}")
        return sampler
    args = trainer.args
    if budget is None and args.gradient_accumulation_steps * args.world_size == 1:
        return sampler  # a step is one batch
    dataset = trainer.train_dataset if dataset is None else dataset
    return _RankSampler(
        sampler, work_of(dataset), trainer._train_batch_size, accumulation=args.gradient_accumulation_steps,
        rank=args.process_index, ranks=args.world_size, drop_last=args.dataloader_drop_last,
        tokens=lengths_of(dataset), tokens_per_step=budget,
    )  # fmt: skip


def _obstacle(trainer: Any, state: Any, sampler: Any, budget: int | None) -> str | None:
    """Why the batches stay as they are, or None."""
    from datasets import Dataset

    accelerator = trainer.accelerator
    if not state.padding_free:
        return "batches are padded"
    if not isinstance(trainer.train_dataset, Dataset) or "input_ids" not in trainer.train_dataset.column_names:
        return "the training data set is streamed or tells no lengths"
    if type(sampler) is not RandomSampler and (budget is not None or type(sampler) is not SequentialSampler):
        return f"the order of the samples comes from a {type(sampler).__name__}"
    if accelerator.parallelism_config is not None:
        return "a batch is shared by several ranks"
    if accelerator.split_batches or not accelerator.even_batches:
        return "split_batches is on or even_batches is off"
    return None
