"""Head and loss of a padded batch: TRL's fields from the labelled tokens alone."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from trl.trainer.utils import add_fused_lm_head

import fastlm
from fastlm.models import head
from fastlm.models.adapters import is_ours
from fastlm.models.patch import rebind_head
from tests.models.test_padding import RUNS, batch_of, embedded, pair, with_layout
from tests.tiny import relative_error, tiny_model

OURS = ("log_probs", "entropy", "mean_logits", "is_top1")


def heads(family: str = "llama", **told: Any) -> tuple[Any, Any]:
    """TRL's head on a stock model, and ours in the place of the same on a patched one."""
    stock = tiny_model(family).train()
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    for model in (stock, fast):
        add_fused_lm_head(model, **told)
    rebind_head(fast)
    assert is_ours(fast.forward)
    return stock, fast


def scored_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the rows of each call of our head."""
    counts: list[int] = []

    def counting(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(hidden))
        return scored(hidden, *args, **kwargs)

    scored = head.linear_cross_entropy
    monkeypatch.setattr(head, "linear_cross_entropy", counting)
    return counts


@pytest.mark.parametrize("side", RUNS)
def test_every_field_that_trl_asks_for(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, fast = heads(temperature=0.7, outputs=OURS)
    batch, counts = batch_of(side), scored_rows(monkeypatch)
    expected, found = (model(**batch, fused_lm_head=True) for model in (stock, fast))
    for name in ("loss", "log_probs", "entropy", "mean_logits"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(found.is_top1, expected.is_top1) and torch.equal(found.label_mask, expected.label_mask)
    assert counts == [int((batch["labels"] != -100).sum())]
    weight = torch.randn(found.log_probs.shape, generator=torch.Generator().manual_seed(0))
    for output in (expected, found):
        (output.log_probs * weight).sum().backward()
    for (name, ours), theirs in zip(fast.named_parameters(), stock.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-5, name


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("llama", {"outputs": ("log_probs", "log_sum_sq_probs")}),
        ("llama", {"cast_lm_head_to_fp32": True}),
        ("gemma2", {"outputs": OURS}),
    ],
)
def test_what_ours_does_not_give_comes_from_trl(family: str, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From padding-free hidden states all the same, where the layout is known."""
    stock, fast = heads(family, **told)
    batch, counts, shapes = with_layout(batch_of("right")), scored_rows(monkeypatch), embedded(fast)
    expected, found = (model(**batch, fused_lm_head=True) for model in (stock, fast))
    assert found.keys() == expected.keys() and counts == [] and shapes == [(1, 20)]
    for name in expected.keys() - {"is_top1", "label_mask"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("names", ["temperature, outputs", "temperature, cast_lm_head_to_fp32, outputs, top_k"])
def test_a_forward_of_trls_that_is_not_understood_answers_itself(names: str) -> None:
    """Its closure, which says what it was asked, is no interface: another release may have another one."""
    fast = tiny_model()
    fastlm.patch(fast)
    make = f"lambda {names}: lambda self, *args, fused_lm_head=False, **kwargs: (fused_lm_head, args, {names})"
    told = (0.7, False, ("log_probs",), 9)[: names.count(",") + 1]
    fast.forward = MethodType(eval(make)(*told), fast)
    rebind_head(fast)
    assert is_ours(fast.forward) and fast(3, fused_lm_head=True, labels=None) == (True, (3,), *told)


def test_a_second_trainer_asks_anew() -> None:
    stock, fast = heads(temperature=0.7)
    for model in (stock, fast):
        add_fused_lm_head(model)
    rebind_head(fast)
    fastlm.patch(fast)
    expected, found = (model(**batch_of("right"), fused_lm_head=True).loss for model in (stock, fast))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_that_are_read_are_stocks_at_padding_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, fast = pair(family)
    batch, counts, shapes = with_layout(batch_of("both")), scored_rows(monkeypatch), embedded(fast)
    expected, found = stock(**batch), fast(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    assert counts == [int((batch["labels"] != -100).sum())] and shapes == [(1, counts[0] + 3)]
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert list(found) == ["loss", "logits"]
    for output in (expected, found):
        (output.loss + output.logits.square().mean()).backward()
    for (name, ours), theirs in zip(fast.named_parameters(), stock.parameters(), strict=True):
        assert theirs.grad is None or relative_error(ours.grad, theirs.grad) < 1e-5, name


def test_logits_can_be_read_of_an_output_that_was_built_anew() -> None:
    """As DDP does when it looks for unused parameters, which is the Trainer's default."""
    stock, fast = pair()
    ids = batch_of("right")["input_ids"]
    expected, found = stock(ids, labels=ids).logits, fast(ids, labels=ids)
    anew = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, found)
    assert type(anew) is type(found) and anew.loss is not found.loss
    torch.testing.assert_close(anew["logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused_head", [False, True])
def test_a_padded_batch_without_targets_is_a_finite_zero(fused_head: bool) -> None:
    _, fast = pair()
    batch = batch_of("left")
    batch["labels"].fill_(-100)
    loss = fast(**batch, **({"fused_lm_head": True} if fused_head else {})).loss
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in fast.parameters() if p.requires_grad)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fused_head", [False, True])
def test_targets_that_need_the_padding_are_stocks(fused_head: bool, known: bool) -> None:
    """Labels at padding, and a first token that padding predicts: stock counts both. Also where they are new."""
    stock, fast = heads()
    for side in RUNS:
        batch, shapes = batch_of(side), embedded(fast)
        batch = with_layout(batch) if known else batch
        batch["labels"] = batch["input_ids"]
        extra = {"fused_lm_head": True} if fused_head else {}
        expected, found = (model(**batch, **extra).loss for model in (stock, fast))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert shapes[0][0] == 3


def test_the_entropy_has_no_silent_gradient() -> None:
    _, fast = pair()
    output = fast(**batch_of("right"), fused_lm_head=True)
    with pytest.raises(RuntimeError, match="gives the entropy no gradient"):
        (output.loss - output.entropy.sum()).backward()


def test_weights_that_would_be_lost_are_refused():
    _, fast = pair()
    ids = torch.randint(3, 200, (2, 7))
    with pytest.raises(ValueError, match="'weights' of its tokens' losses"):
        fast(ids, labels=ids, weights=torch.ones(2, 7))
