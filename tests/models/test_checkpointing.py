"""fastlm/models/checkpointing.py: recomputed layers keep their input alone, and no gradient changes by a bit."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.utils.output_capturing import OutputRecorder

import fastlm
from fastlm.models import checkpointing
from fastlm.models.layers import add_rms_norm
from tests.models.batches import LAYOUTS, loss_and_gradients, samples, target_count
from tests.tiny import FAMILIES, add_lora, enable_checkpointing, tiny_config, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)


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
    enable_checkpointing(model)
    again, recomputed = loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT)
    assert again == loss and gradients.keys() == recomputed.keys() and gradients
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients)


def test_layers_keep_their_input_alone():
    kept_by = {}
    for layers in (1, 5):
        model = add_lora(tiny_model("llama", num_hidden_layers=layers))
        fastlm.patch(model)
        enable_checkpointing(model)
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
    enable_checkpointing(model)
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
    enable_checkpointing(model)
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
    enable_checkpointing(model)
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
    enable_checkpointing(model)
    recomputed = step()
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients) and gradients


def test_a_users_own_function_stays():
    model = tiny_model("llama")
    fastlm.patch(model)
    enable_checkpointing(model)
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
    enable_checkpointing(model)
    model.train()
    loss = model(**LAYOUTS["flattened"](ROWS)[0], use_cache=False).loss
    monkeypatch.setattr("fastlm.models.layers.add_rms_norm", lambda *a, **k: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        loss.backward()
    assert not any(layer._fastlm.recomputing for layer in model.get_base_model().model.layers)


def test_a_counted_run_that_fails_holds_nothing(monkeypatch):
    """A graph whose saved tensors hold the graph would never be freed: no garbage collector sees it."""
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    enable_checkpointing(model)
    for layer in model.get_base_model().model.layers:
        layer._fastlm.kept = 0
    model.train()
    loss = model(**LAYOUTS["flattened"](ROWS)[0], use_cache=False).loss
    held = []

    def fails(*args, **kwargs):
        normed, total = add_rms_norm(*args, **kwargs)
        held.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (args[1], normed, total))
        raise MemoryError("full")

    monkeypatch.setattr("fastlm.models.layers.add_rms_norm", fails)
    with pytest.raises(MemoryError, match="full"):
        loss.backward()
    del loss
    assert len(held) == 3 and all(reference.expired() for reference in held)


def test_products_that_tiles_left_out_are_counted(monkeypatch):
    """What the layer would keep, which is not what its second run saved; its gradients are those of keeping."""
    monkeypatch.setattr("fastlm.kernels.lora.TILE", 4)
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    loss, gradients = loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    enable_checkpointing(model)
    counts = []
    for tile in (1000, 4):  # to the layer; the MLP takes tiles of 4 both times
        monkeypatch.setattr("fastlm.models.layers.TILE", tile)
        for layer in (layers := model.get_base_model().model.layers):
            layer._fastlm.kept = 0
        again, recomputed = loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
        assert again == loss and all(torch.equal(recomputed[n], gradients[n]) for n in gradients)
        counts.append(layers[0]._fastlm.kept)
    assert (
        counts[1] - counts[0]
        == layers[0].mlp._fastlm.products
        == 2 * 96 * 4 * sum(len(row["input_ids"]) for row in ROWS)
    )


def test_weights_that_have_no_memory_of_their_own_are_counted_without(runs):
    """As quantised and distributed tensors are: wrappers around others."""
    model = tiny_model("llama")
    model.requires_grad_(False)
    fastlm.patch(model)
    enable_checkpointing(model)
    first, second = model.model.layers
    results = []
    for wrapped in (False, True):
        first.input_layernorm.weight.requires_grad_()
        first._fastlm.kept = 0
        if wrapped:
            weight = second.mlp.down_proj.weight.data
            second.mlp.down_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight), requires_grad=False)
            second._fastlm.kept = 0
        results.append((*loss_and_gradients(model, LAYOUTS["padded"](ROWS), COUNT), first._fastlm.kept))
    (loss, gradients, kept_bytes), (again, counted, still) = results
    assert len(runs) == 4 and again == loss and still == kept_bytes > 0
    assert gradients and all(torch.equal(counted[n], gradients[n]) for n in gradients)


def step(model, use, **inputs):
    """Gradients of a loss that reads the logits and whatever use() gives after the forward."""
    model.train()
    model.zero_grad()
    (model(**inputs, use_cache=False).logits.pow(2).mean() + use()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("at", ["", ".mlp", ".self_attn.q_proj"])
def test_what_a_hook_sees_takes_a_gradient_and_is_the_true_output(at):
    """A loss on activations inside a layer; the second run without the down product must not show."""
    results = []
    for ours in (False, True):
        model = tiny_model("llama")
        if ours:
            fastlm.patch(model)
        enable_checkpointing(model)
        seen = []
        module = model.get_submodule(f"model.layers.0{at}")
        module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        gradients = step(model, lambda seen=seen: seen[0].pow(2).mean(), input_ids=torch.arange(3, 19)[None])
        results.append((gradients, seen))
    (expected, stock_seen), (gradients, seen) = results
    assert gradients.keys() == expected.keys() and len(seen) == len(stock_seen)
    assert all(torch.allclose(gradients[n], expected[n], rtol=1e-4, atol=1e-7) for n in expected)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(seen, stock_seen, strict=True))


def test_hidden_states_take_a_gradient_and_later_steps_are_ours_again(runs):
    """transformers leaves the hooks that record them on the layers."""
    results = []
    for ours in (False, True):
        model = tiny_model("llama").train()
        if ours:
            fastlm.patch(model)
        enable_checkpointing(model)
        hidden = model(torch.arange(3, 19)[None], output_hidden_states=True, use_cache=False).hidden_states
        hidden[1].pow(2).mean().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys() and not runs and model.model.layers[0]._forward_hooks
    assert all(torch.allclose(results[1][n], results[0][n], rtol=1e-4, atol=1e-7) for n in results[0])
    step(model, lambda: 0.0, input_ids=torch.arange(3, 19)[None])
    assert len(runs) == 2  # layers


class RecordingModel(modeling_llama.LlamaModel):
    _can_record_outputs = modeling_llama.LlamaModel._can_record_outputs | {
        "acts": OutputRecorder(None, class_name="act_fn")
    }


def test_what_is_recorded_inside_a_layer_is_computed_in_both_runs_alike():
    """The hook acts in the first run only; a fused MLP in the second would save other tensors."""
    results = []
    for ours in (False, True):
        model = LlamaForCausalLM(tiny_config("llama"))
        torch.manual_seed(0)
        model.model = RecordingModel(model.config)
        if ours:
            fastlm.patch(model.train())
        enable_checkpointing(model)
        acts = model.model(torch.arange(3, 19)[None], use_cache=False, output_acts=True)["acts"]
        sum(one.pow(2).mean() for one in acts).backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(acts) == 2 and results[0].keys() == results[1].keys() and len(results[0]) > 10
    assert all(torch.allclose(results[1][n], results[0][n], rtol=1e-4, atol=1e-9) for n in results[0])


def test_a_mask_that_takes_a_gradient_gets_it():
    gradients = []
    for ours in (False, True):
        model = tiny_model("llama", attention="eager")
        if ours:
            fastlm.patch(model)
        enable_checkpointing(model)
        mask = torch.full((1, 1, 6, 6), -1e9).triu(1).requires_grad_()
        step(model, lambda: 0.0, input_ids=torch.arange(3, 9)[None], attention_mask=mask)
        gradients.append(mask.grad)
    assert torch.allclose(gradients[1], gradients[0], rtol=1e-4, atol=1e-9) and gradients[0].norm() > 0


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_called_by_hand(named):
    model = tiny_model("llama")
    fastlm.patch(model)
    enable_checkpointing(model)
    model.train()
    model(input_ids=torch.arange(3, 9)[None], use_cache=False)  # puts our function on the layers
    hidden = torch.randn(1, 6, 64, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(6)[None])
    layer, gradients = model.model.layers[0], []
    for checkpointed in (True, False):
        layer.gradient_checkpointing = checkpointed
        args = ((), {"hidden_states": hidden}) if named else ((hidden, None), {})
        layer(*args[0], **args[1], position_embeddings=positions).pow(2).sum().backward()
        gradients.append(hidden.grad)
        hidden.grad = None
    assert torch.equal(gradients[0], gradients[1])


def test_layers_that_fsdp_manages_are_left_to_torch(runs):
    model = tiny_model("llama")
    fastlm.patch(model)
    enable_checkpointing(model)
    model.model.layers[1]._is_fsdp_managed_module = True  # its parameters are views of FSDP's while it runs
    loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    assert len(runs) == 1


def test_copies_and_pickles_recompute_too(runs):
    model = tiny_model("llama")
    fastlm.patch(model)
    enable_checkpointing(model)
    loss, gradients = loss_and_gradients(model, LAYOUTS["padded"](ROWS), COUNT)
    again, copied = loss_and_gradients(copy.deepcopy(model), LAYOUTS["padded"](ROWS), COUNT)
    assert again == loss and all(torch.equal(copied[n], gradients[n]) for n in gradients) and len(runs) == 4
    layer = pickle.loads(pickle.dumps(model.model.layers[0]))
    func = layer._gradient_checkpointing_func
    assert func.func is checkpointing.recompute and func.args[0].keywords == {"use_reentrant": False}


def test_layers_that_are_not_ours_have_no_policy_to_set() -> None:
    """Those of lfm2 have no ``mlp``."""
    layer = torch.nn.Module()
    checkpointing.set_policies([layer], ["lean"])
    assert layer.gradient_checkpointing is False and "_fastlm" not in layer.__dict__
    checkpointing.leave_out(layer, "keep")
