"""One recorded set of ragged samples, laid out alone, padded, or flattened, and what a model makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlm.packing.collators import PaddingFreeCollator

LENGTHS = (9, 1, 14, 5, 2)


def samples(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, vocabulary: int = 300) -> list[dict[str, list[int]]]:
    """Token ids and labels; the first third of each sample is a prompt without labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        labels = [-100] * (length // 3) + ids[length // 3 :]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def target_count(rows: list[dict[str, list[int]]]) -> int:
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def alone(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    return [{name: torch.tensor(value)[None] for name, value in row.items()} for row in rows]


def padded(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {name: torch.tensor([row[name] + [fill[name]] * (width - len(row[name])) for row in rows]) for name in fill}
    batch["attention_mask"] = torch.tensor(
        [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]
    )
    return [batch]


def flattened(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    return [dict(PaddingFreeCollator()(rows))]


def packed(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """The same samples as two packed rows, the form in which packed data sets reach the collator."""
    merged: list[dict[str, Any]] = []
    for group in (rows[:2], rows[2:]):
        joined: dict[str, Any] = {name: [t for row in group for t in row[name]] for name in ("input_ids", "labels")}
        merged.append({**joined, "seq_lengths": [len(row["input_ids"]) for row in group]})
    return [dict(PaddingFreeCollator()(merged))]


def foreign(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """What TRL's own padding-free collator emits."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return [dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows))]


LAYOUTS = {"padded": padded, "flattened": flattened, "packed": packed, "foreign": foreign}


def loss_and_gradients(
    model: nn.Module, batches: list[dict[str, Any]], count: int, *, autocast: bool = False, **extra: Any
) -> tuple[float, dict[str, Tensor]]:
    """Sum of token losses over ``count``, and every trainable tensor's gradient, over all batches."""
    model.zero_grad()
    model.train()
    total = 0.0
    for batch in batches:
        if int((batch["labels"][..., 1:] != -100).sum()) == 0:
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch, num_items_in_batch=torch.tensor(count), use_cache=False, **extra).loss
        loss.backward()
        total += loss.item()
    gradients = {n: p.grad.clone().float() for n, p in model.named_parameters() if p.grad is not None}
    return total, gradients
