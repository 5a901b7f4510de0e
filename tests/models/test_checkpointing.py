"""fastlm/models/checkpointing.py: recomputed layers keep their input alone, and no gradient changes by a bit."""

import pytest
import torch
from torch import Tensor

import fastlm
from fastlm.models import checkpointing
from tests.models.batches import LAYOUTS, loss_and_gradients, samples, target_count
from tests.tiny import FAMILIES, add_lora, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)


def enable(model, **kwargs):
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = "activation_checkpointing_enable" if hasattr(core, "activation_checkpointing_enable") else None
    getattr(core, name or "gradient_checkpointing_enable")(**kwargs)


def kept(model, layout: str) -> int:
    """Elements of the tensors that a step's forward keeps for backward."""
    count = [0]

    def pack(tensor: Tensor) -> Tensor:
        count[0] += tensor.numel()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**LAYOUTS[layout](ROWS)[0], use_cache=False)
    return count[0]


@pytest.mark.parametrize("layout", ["flattened", "padded"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_gradients_are_the_same_bits(family, lora, layout):
    model = tiny_model(family)
    model = add_lora(model) if lora else model
    fastlm.patch(model)
    loss, gradients = loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT)
    enable(model)
    again, recomputed = loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT)
    assert again == loss and gradients.keys() == recomputed.keys() and gradients
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients)


def test_layers_keep_their_input_alone():
    kept_by = {}
    for layers in (1, 5):
        model = add_lora(tiny_model("llama", num_hidden_layers=layers))
        fastlm.patch(model)
        enable(model)
        kept_by[layers] = kept(model, "flattened")
    tokens = sum(len(row["input_ids"]) for row in ROWS)
    assert kept_by[5] - kept_by[1] == 4 * tokens * 64  # hidden_size


@pytest.fixture
def runs(monkeypatch):
    """How often our function recomputed."""
    count = []
    original = checkpointing._Recompute.backward
    monkeypatch.setattr(checkpointing._Recompute, "backward", lambda *args: count.append(1) or original(*args))
    return count


def test_ours_recomputes_and_stock_takes_over_after_unpatch(runs):
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    enable(model)
    loss, gradients = loss_and_gradients(model, LAYOUTS["padded"](ROWS), COUNT)
    assert len(runs) == 2  # layers
    fastlm.unpatch(model)
    again, stock = loss_and_gradients(model, LAYOUTS["padded"](ROWS), COUNT)
    assert len(runs) == 2 and again == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(stock[n], gradients[n], rtol=1e-4, atol=1e-7) for n in gradients)


def test_the_down_product_is_left_out_of_the_second_run(monkeypatch):
    from fastlm.kernels import lora

    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    enable(model)
    widths = []
    original = lora._project
    monkeypatch.setattr(lora, "_project", lambda x, *rest: widths.append(x.shape[1]) or original(x, *rest))
    loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    assert widths.count(96) == 2  # intermediate_size: once a layer, in the first run


def test_dropout_draws_the_same_numbers_again():
    model = add_lora(tiny_model("llama"), lora_dropout=0.5)
    fastlm.patch(model)
    torch.manual_seed(0)
    _, gradients = loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    enable(model)
    torch.manual_seed(0)
    _, recomputed = loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients)
    after = torch.random.get_rng_state()
    torch.manual_seed(0)
    loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    assert torch.equal(torch.random.get_rng_state(), after)


def test_autocast_is_restored():
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)

    def step():
        model.train()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**LAYOUTS["flattened"](ROWS)[0], use_cache=False).loss
        loss.backward()  # outside: the second run must enter it by itself
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    gradients = step()
    enable(model)
    recomputed = step()
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients) and gradients


def test_a_users_own_function_stays():
    model = tiny_model("llama")
    fastlm.patch(model)
    enable(model)
    calls = []

    def mine(run, *args):
        calls.append(1)
        return run(*args)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = mine
    loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    assert len(calls) == 2


def test_an_error_in_the_second_run_leaves_the_layer_as_it_was(monkeypatch):
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    enable(model)
    model.train()
    loss = model(**LAYOUTS["flattened"](ROWS)[0], use_cache=False).loss
    monkeypatch.setattr("fastlm.models.layers.add_rms_norm", lambda *a, **k: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        loss.backward()
    assert not any(layer._fastlm.recomputing for layer in model.get_base_model().model.layers)
