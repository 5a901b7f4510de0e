"""fastlm/models/remaking.py: norms' outputs are made again in backward, and no gradient changes by a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlm
from fastlm.kernels.rms_norm import rms_norm
from fastlm.models import remaking
from fastlm.models.checkpointing import leave_out
from fastlm.models.patch import decoder_layers, patched_core
from fastlm.models.remaking import NormAgain
from tests.models.batches import LAYOUTS, loss_and_gradients, samples, target_count
from tests.tiny import FAMILIES, add_lora, tiny_model

ROWS = samples()
OPTIONS = {"eps": 1e-6, "offset": 0.0, "cast_before_scale": True}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each output that was made again."""
    counts: list[int] = []

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        counts.append(x.numel())
        return rms_norm(x, *args, **options)

    monkeypatch.setattr(remaking, "rms_norm", counted)
    return counts


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_bits(made, family, lora, autocast):
    model = tiny_model(family, dtype=torch.bfloat16 if autocast else torch.float32)
    model = add_lora(model) if lora else model
    fastlm.patch(model)
    batches, count = LAYOUTS["flattened"](ROWS), target_count(ROWS)
    loss, gradients = loss_and_gradients(model, batches, count, autocast=autocast)
    for layer in decoder_layers(patched_core(model)):
        layer._fastlm.norms_kept = False
    again, remade = loss_and_gradients(model, batches, count, autocast=autocast)
    assert again == loss and gradients.keys() == remade.keys() and gradients
    assert all(torch.equal(remade[name], gradients[name]) for name in gradients)
    # two norms a layer where they come first: once for all projections with adapters, else for each that reads it
    readers = 2 if lora or family == "phi3" else 5
    tokens = sum(len(row["input_ids"]) for row in ROWS)
    assert made == ([] if family in ("olmo2", "olmo3") else [64 * tokens] * 2 * readers)


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_gradients_are_the_same_bits_on_a_gpu(family, lora):
    model = tiny_model(family, hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=352)
    model = add_lora(model) if lora else model
    fastlm.patch(model.to("cuda", torch.bfloat16))
    torch.use_deterministic_algorithms(True)
    batches = [{name: value.to("cuda") for name, value in batch.items()} for batch in LAYOUTS["flattened"](ROWS)]
    found = []
    try:
        for policy in ("keep", "light", "lean"):
            for layer in decoder_layers(patched_core(model)):
                leave_out(layer, policy)
            found.append(loss_and_gradients(model, batches, target_count(ROWS)))
    finally:
        torch.use_deterministic_algorithms(False)
    (loss, gradients), *others = found
    assert all(again == loss and remade.keys() == gradients.keys() for again, remade in others) and gradients
    assert all(torch.equal(remade[name], gradients[name]) for _, remade in others for name in gradients)


def step(write: Any = None) -> torch.Tensor:
    """The gradient of the weight w of (norm(x) w)^2, w being written to between forward and backward."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8), torch.rand(8)
    w = torch.randn(8, 4, requires_grad=True)
    y = rms_norm(x, weight, **OPTIONS)
    with NormAgain(y, x, weight, OPTIONS):
        out = (y.view(-1, 8) @ w).pow(2)
    if write is not None:
        with torch.no_grad():
            write(x, weight, w)
    return torch.autograd.grad(out.sum(), w)[0]


def test_a_view_is_made_again_and_the_rest_kept(made):
    torch.manual_seed(0)
    x, weight, w = torch.randn(3, 5, 8), torch.rand(8), torch.randn(8, 4, requires_grad=True)
    y = rms_norm(x, weight, **OPTIONS).view(-1, 8)
    (expected,) = torch.autograd.grad((y @ w).pow(2).sum(), w)
    assert torch.equal(step(), expected) and made == [x.numel()]


@pytest.mark.parametrize("write", [lambda x, weight, w: x.add_(1), lambda x, weight, w: weight.mul_(2)])
def test_what_was_written_to_is_an_error_and_not_a_wrong_number(write):
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[15, 8\]"):
        step(write)


def test_so_is_a_kept_tensor_that_was_written_to():
    w, x = torch.randn(8, requires_grad=True), torch.randn(8)
    with NormAgain(torch.randn(4), torch.randn(4), torch.ones(4), OPTIONS):
        out = w * x
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[8\]"):
        out.sum().backward()


def test_a_second_backward_is_torchs_own_error():
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    for layer in decoder_layers(patched_core(model)):
        layer._fastlm.norms_kept = False
    loss = model.train()(**LAYOUTS["flattened"](ROWS)[0], use_cache=False).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("block", ["self_attn", "mlp", "q_proj"])
def test_what_a_hook_has_written_to_is_kept(block, lora):
    model = tiny_model("llama")
    model = add_lora(model) if lora else model
    fastlm.patch(model)

    def louder(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (args[0] if args else kwargs["hidden_states"]).mul_(1.5)

    for name, module in model.named_modules():
        if name.endswith(block):
            module.register_forward_pre_hook(louder, with_kwargs=True)
    batches, count = LAYOUTS["flattened"](ROWS), target_count(ROWS)
    _, gradients = loss_and_gradients(model, batches, count)
    for layer in decoder_layers(patched_core(model)):
        layer._fastlm.norms_kept = False
    _, again = loss_and_gradients(model, batches, count)
    assert all(torch.equal(again[name], gradients[name]) for name in gradients) and gradients


def test_a_compiled_model_keeps_all():
    torch._dynamo.reset()
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model.train())
    gradients = []
    for kept in (True, False):
        for layer in decoder_layers(patched_core(model)):
            layer._fastlm.norms_kept = kept
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        model.zero_grad()
        compiled(**LAYOUTS["padded"](ROWS)[0], use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    kept, light = gradients
    assert kept.keys() == light.keys() and all(torch.equal(light[name], kept[name]) for name in kept)


def test_half_of_an_output_is_kept():
    torch.manual_seed(0)
    x, weight, w = torch.randn(4, 8), torch.rand(8), torch.randn(8, 4, requires_grad=True)
    y = rms_norm(x, weight, **OPTIONS)
    (expected,) = torch.autograd.grad((y[:2] @ w).pow(2).sum(), w)
    with NormAgain(y, x, weight, OPTIONS):
        out = (y[:2] @ w).pow(2)
    assert torch.equal(torch.autograd.grad(out.sum(), w)[0], expected)
