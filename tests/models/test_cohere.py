"""Cohere's layers, a LayerNorm that attention and MLP read both, and neighbours turned: stock's loss and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlm
from fastlm.models import layers
from tests.models.batches import LAYOUTS, alone, loss_and_gradients, samples, target_count
from tests.models.test_equality import assert_bf16_errs_no_more, assert_no_leak
from tests.tiny import add_lora, enable_checkpointing, relative_error, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])  # the second turns nothing
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {}), "heads normed": ("cohere", dict(use_qk_norm=True)), "cohere2": ("cohere2", SLIDING),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", MODELS)


def pair(name: str, lora: bool = True, **options: Any) -> tuple[Any, Any]:
    """The same weights twice: stock, and patched."""
    family, facts = MODELS[name]
    stock: Any = tiny_model(family, logit_scale=0.25, **facts, **options)
    stock = add_lora(stock) if lora else stock
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    return stock, fast


def assert_equal(fast: Any, truth: tuple[float, dict[str, Tensor]], layout: str, **extra: Any) -> None:
    loss, gradients = loss_and_gradients(fast, LAYOUTS[layout](ROWS), COUNT, **extra)
    assert abs(loss - truth[0]) <= 1e-5 * abs(truth[0])
    assert gradients.keys() == truth[1].keys() and len(gradients) >= 15
    worst = max((relative_error(gradients[name], truth[1][name]), name) for name in gradients)
    assert worst[0] <= 1e-5, (layout, worst)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@each_model
def test_fp32_loss_and_every_gradient(name: str, lora: bool) -> None:
    stock, fast = pair(name, lora)
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    for layout in LAYOUTS:
        assert_equal(fast, truth, layout)
        assert_equal(fast, truth, layout, fused_lm_head=True)


@each_model
def test_recomputed_gradients_are_the_same_bits(name: str) -> None:
    _, fast = pair(name)
    loss, gradients = loss_and_gradients(fast, LAYOUTS["packed"](ROWS), COUNT)
    enable_checkpointing(fast)
    again, recomputed = loss_and_gradients(fast, LAYOUTS["packed"](ROWS), COUNT)
    assert again == loss and all(torch.equal(recomputed[key], gradients[key]) for key in gradients)


@each_model
def test_all_of_it_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *args, **options: ran.append(function.__name__) or function(*args, **options)

    for function in (layers.layer_norm, layers.rope, layers.attention):
        monkeypatch.setattr(layers, function.__name__, counted(function))
    _, fast = pair(name)
    report = fastlm.report(fast)
    assert not report.stock and report.obstacle is None
    norms = 7 if name == "heads normed" else 3
    assert report.fused == {"layer": 2, "norm": norms, "mlp": 2, "attention": 2, "lora": 14, "head": 1}
    fast(**LAYOUTS["flattened"](ROWS)[0])
    turns = 1 if name == "cohere2" else 2
    assert {kind: ran.count(kind) for kind in ran} == {"layer_norm": norms, "rope": turns, "attention": 2}


@each_model
def test_late_logits_are_scaled(name: str) -> None:
    stock, fast = pair(name)
    batch = LAYOUTS["padded"](ROWS)[0]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(fast(**batch).logits[real], stock(**batch).logits[real], rtol=1e-5, atol=2e-5)


@each_model
def test_switched_off_it_is_stock(name: str) -> None:
    stock, fast = pair(name, False)
    forwards = [(layer, layer.forward) for layer in fast.model.layers]
    fastlm.unpatch(fast)
    for layer, forward in forwards:  # as whoever wrapped one of ours would call it
        layer.forward = forward
    ids = torch.tensor([ROWS[0]["input_ids"]])
    assert torch.equal(fast(ids).logits, stock(ids).logits)


@each_model
def test_bf16_errs_no_more_than_stock(name: str) -> None:
    assert_bf16_errs_no_more(lambda seed: pair(name, seed=seed, dtype=torch.bfloat16))


@each_model
def test_leak_is_exactly_zero(name: str) -> None:
    assert_no_leak(pair(name)[1])
