"""Padded batches without their padding: what the layout says of a mask, and that the numbers stay the stock model's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlm
from fastlm.models.padding import PaddedLayout, attach, call_layout
from tests.tiny import FAMILIES, add_lora, relative_error, tiny_model

RUNS = {"right": [(0, 9), (0, 4), (0, 7)], "left": [(0, 9), (5, 9), (2, 9)], "both": [(1, 8), (0, 3), (4, 9)]}
S = 9


def mask_of(runs: list[tuple[int, int]]) -> Tensor:
    mask = torch.zeros(len(runs), S, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    return mask


def batch_of(side: str, pad: int = 0) -> dict[str, Tensor]:
    """Ids with ``pad`` at padding; the first token of each row is no target."""
    mask = mask_of(RUNS[side])
    ids = torch.randint(3, 300, mask.shape, generator=torch.Generator().manual_seed(2))
    labels = ids.masked_fill(mask == 0, -100)
    for row, (start, _) in enumerate(RUNS[side]):
        labels[row, start] = -100
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask, "labels": labels}


def pair(family: str = "llama", **facts: Any) -> tuple[Any, Any]:
    stock = add_lora(tiny_model(family, **facts)).train()
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    return stock, fast


def with_layout(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    layout = PaddedLayout.from_mask(batch["attention_mask"], batch["labels"] != -100)
    assert layout is not None
    attach(batch["attention_mask"], layout)
    return batch


def embedded(model: Any) -> list[tuple[int, ...]]:
    """Fills with the shapes of the ids that the model embeds."""
    shapes: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    return shapes


def test_the_layout_of_a_mask() -> None:
    targets = torch.zeros(2, S, dtype=torch.bool)
    targets[0, [0, 3]] = targets[1, 5] = True  # nothing predicts column 0
    layout = PaddedLayout.from_mask(mask_of([(0, 4), (3, 6)]), targets)
    assert layout is not None
    assert layout.indices.tolist() == [0, 1, 2, 3, 12, 13, 14]
    assert layout.predictors.tolist() == [2, 5]
    assert layout.boundaries.lengths == (4, 3) and layout.boundaries.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    every = PaddedLayout.from_mask(mask_of([(0, 4), (3, 6)]).bool())
    assert every is not None and every.predictors.tolist() == [0, 1, 2, 4, 5]
    values, places = every.shifted_targets(torch.arange(2 * S).view(2, S))
    assert values.tolist() == [1, 2, 3, 13, 14]
    assert torch.arange(2 * S).view(2, S)[:, 1:].flatten()[places].tolist() == values.tolist()


@pytest.mark.parametrize(
    "mask",
    [[[1, 0, 1]], [[0, 0, 0], [1, 1, 1]], [[1, 2, 0]], [[1.0, 0.5, 0.0]], [[]], [1, 1, 0], [[[1, 1]]]],
    ids=["hole", "empty row", "segments", "weights", "no columns", "1-D", "3-D"],
)
def test_masks_that_are_no_padding(mask: Any) -> None:
    assert PaddedLayout.from_mask(torch.tensor(mask)) is None


@pytest.mark.parametrize("target", [2, 5], ids=["predicted from padding", "at padding"])
def test_targets_that_need_the_padding(target: int) -> None:
    targets = torch.zeros(1, S, dtype=torch.bool)
    targets[0, target] = True
    assert PaddedLayout.from_mask(mask_of([(2, 5)]), targets) is None


def test_flatten_and_restore() -> None:
    layout = PaddedLayout.from_mask(mask_of(RUNS["both"]))
    assert layout is not None
    values = torch.randn(3, S, 4)
    flat = layout.flatten(values).requires_grad_()
    restored = layout.restore(flat)
    assert torch.equal(restored, values * layout.real[..., None])
    meta = layout.restore(flat.to("meta"))  # where a model's last layer is on another device
    assert meta.is_meta and layout.missed(torch.zeros(3, S, dtype=torch.int64, device="meta")).is_meta
    weight = torch.randn_like(restored)
    (restored * weight).sum().backward()
    assert torch.equal(flat.grad, layout.flatten(weight))


def test_a_layout_travels_and_rows_of_its_mask_know_theirs() -> None:
    _, fast = pair()
    batch = with_layout(batch_of("both"))
    mask = batch["attention_mask"]

    def found(part: Tensor, ids: Tensor) -> PaddedLayout | None:
        return call_layout(fast.get_base_model().base_model, (ids,), {"attention_mask": part})

    whole, part = found(mask, batch["input_ids"]), found(mask[1:], batch["input_ids"][1:])
    expected = PaddedLayout.from_mask(mask[1:], batch["labels"][1:] != -100)
    assert whole is not None and part is not None and expected is not None
    for name in ("indices", "predictors", "real"):
        assert torch.equal(getattr(part, name), getattr(expected, name))
        assert torch.equal(getattr(pickle.loads(pickle.dumps(whole)), name), getattr(whole, name))
    assert found(mask[0:], batch["input_ids"]) is whole
    assert found(mask[:, 1:], batch["input_ids"][:, 1:]) is None and found(mask.t(), batch["input_ids"].t()) is None
    assert found(mask[::2], batch["input_ids"][::2]) is None and found(mask.clone(), batch["input_ids"]) is None
    assert found(mask, batch["input_ids"]) is not None
    mask[0, 1] = 0  # it is another mask now
    assert found(mask, batch["input_ids"]) is None


def test_a_copy_of_a_mask_that_was_changed_has_no_layout() -> None:
    """A copy keeps the attributes of its tensor, and counts its changes anew: it may have as many as were noted."""
    _, fast = pair()
    batch = batch_of("right")
    mask = torch.zeros(3, S, dtype=torch.int64).index_copy(0, torch.arange(3), batch["attention_mask"])
    for _ in range(copy.deepcopy(mask)._version):
        mask.add_(0)
    with_layout({**batch, "attention_mask": mask})
    mask[0, 8] = 0
    part = {"attention_mask": copy.deepcopy(mask)}
    assert call_layout(fast.get_base_model().base_model, (batch["input_ids"],), part) is None


@pytest.mark.parametrize("side", RUNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_every_gradient(family: str, side: str) -> None:
    """A model's body alone, its loss read at real tokens; the windows of some families are shorter than a row."""
    stock, fast = pair(family)
    batch = with_layout(batch_of(side))
    batch.pop("labels")
    real, shapes = batch["attention_mask"].bool(), embedded(fast)
    results = []
    for model in (stock, fast):
        hidden = model.get_base_model().base_model(**batch, use_cache=False).last_hidden_state
        (hidden[real] ** 3).mean().backward()
        results.append((hidden, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (expected, truth), (hidden, gradients) = results
    assert shapes == [(1, int(real.sum()))]
    assert relative_error(hidden[real], expected[real]) < 1e-5 and not hidden[~real].any()
    assert gradients.keys() == truth.keys() and len(truth) >= 16
    assert max(relative_error(gradients[name], truth[name]) for name in truth) < 1e-5


@pytest.mark.parametrize("fused_head", [False, True])
@pytest.mark.parametrize("side", RUNS)
def test_padding_ids_change_nothing(side: str, fused_head: bool) -> None:
    _, fast = pair("gemma2")
    results = []
    for pad in (0, 77):
        fast.zero_grad()
        loss = fast(**with_layout(batch_of(side, pad)), **({"fused_lm_head": True} if fused_head else {})).loss
        loss.backward()
        results.append([loss, *(p.grad for p in fast.parameters() if p.grad is not None)])
    assert len(results[0]) > 20 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


STAYS_PADDED: dict[str, dict[str, Any]] = {
    "cache": {"use_cache": True},
    "hidden states": {"output_hidden_states": True},
    "positions": {"position_ids": torch.arange(S)[None]},
}


@pytest.mark.parametrize("why", STAYS_PADDED)
def test_what_reads_more_than_real_tokens_stays_padded(why: str) -> None:
    stock, fast = pair()
    batch, shapes = with_layout(batch_of("right")), embedded(fast)
    expected, found = (model(**batch, **STAYS_PADDED[why]) for model in (stock, fast))
    assert shapes == [(3, S)]
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    assert (found.hidden_states is None) == (why != "hidden states")


def test_evaluation_stays_padded_where_logits_are_read() -> None:
    stock, fast = pair()
    batch, shapes = with_layout(batch_of("right")), embedded(fast)
    assert fast.eval()(**batch).past_key_values is not None
    found, expected = (model.eval()(**batch, use_cache=False).logits for model in (fast, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # at padding too
    ids, mask, _ = batch.values()
    found = fast.get_base_model()(ids, mask, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    fast(**batch, use_cache=False, fused_lm_head=True)
    assert shapes == [(3, S), (3, S), (3, S), (1, 20)]


@pytest.mark.parametrize("limit", [S - 1, S])
def test_rotations_that_depend_on_the_rows_width(limit: int) -> None:
    """Dynamic RoPE changes where S passes its limit, however short the samples are."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    stock, fast = pair(rope_parameters=rope, max_position_embeddings=limit)
    batch, shapes = with_layout(batch_of("both")), embedded(fast)
    torch.testing.assert_close(fast(**batch).loss, stock(**batch).loss, rtol=1e-5, atol=0)
    assert shapes == [(1, 15) if limit == S else (3, S)]


def test_other_models_do_not_look_at_layouts() -> None:
    stock, fast = pair()
    plain = stock(**batch_of("right")).logits
    assert torch.equal(stock(**with_layout(batch_of("right"))).logits, plain)
    fast(**with_layout(batch_of("right")))
    fastlm.unpatch(fast)
    assert torch.equal(fast(**with_layout(batch_of("right"))).logits, plain)


def test_a_call_that_failed_leaves_nothing_behind() -> None:
    _, fast = pair()
    batch = with_layout(batch_of("right"))
    handle = fast.get_base_model().model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fast(**batch)
    handle.remove()
    ids = batch["input_ids"][:1]
    assert fast(ids).logits.shape == (1, S, 300)
    fastlm.unpatch(fast)
    assert fast(ids).logits.shape == (1, S, 300)


@pytest.mark.gpu
def test_no_copy_waits_for_the_gpu() -> None:
    layout = PaddedLayout.from_mask(mask_of(RUNS["both"]))
    assert layout is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = layout.on(torch.device("cuda", 0))
        part = moved.rows(1, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert part is not None and torch.equal(moved.indices.cpu(), layout.indices) and part.indices.is_cuda
