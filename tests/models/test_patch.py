"""Binding, reporting and undoing: what patching changes, and that nothing else changes."""

import copy
import dataclasses
import functools
import pickle
import unittest.mock
from types import MethodType

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from trl.trainer.utils import add_fused_lm_head

import fastlm
from fastlm.kernels.attention import choose_backend
from fastlm.kernels.attention_backends import BACKENDS as TABLE
from fastlm.models.head import _trl_forward
from fastlm.models.layers import _open_norms
from fastlm.models.patch import attention_backends, is_patched, padding_free_obstacle, rebind_head
from tests.models.batches import LAYOUTS, alone, loss_and_gradients, samples, target_count
from tests.tiny import FAMILIES, add_lora, relative_error, tiny_config, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)
IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(5))


def state_of(model):
    """Everything that patching might have left on an instance."""
    return {
        name: (
            sorted(k for k in module.__dict__ if not k.startswith("_output_capturing")),
            len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_of_the_known_families_is_fused(family):
    model = tiny_model(family)
    report = fastlm.patch(model)
    norms = sum("norm" in name.rsplit(".", 1)[-1] for name, _ in model.named_modules())
    assert report.fused == {"head": 1, "layer": 2, "norm": norms, "attention": 2, "mlp": 2}
    assert report.stock == {} and report.obstacle is None
    assert padding_free_obstacle(model) is None
    assert "fastlm x 2" in str(report) and "padding-free" in str(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_puts_everything_back(family):
    model = tiny_model(family)
    before, expected = state_of(model), model(IDS).logits
    fastlm.patch(model)
    fastlm.unpatch(model)
    assert state_of(model) == before
    assert torch.equal(model(IDS).logits, expected)
    fastlm.unpatch(model)  # harmless twice
    assert not is_patched(model)
    with pytest.raises(ValueError, match="not patched"):
        fastlm.report(model)


def test_a_second_model_of_the_class_is_untouched():
    """Also one that shares the config object; bit for bit."""
    config = tiny_config("llama")
    torch.manual_seed(0)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    class_forward, before = LlamaForCausalLM.forward, state_of(second)
    expected = second(IDS, labels=IDS)
    expected.loss.backward()
    gradients = {n: p.grad.clone() for n, p in second.named_parameters()}
    second.zero_grad()
    fastlm.patch(first)
    first(IDS, labels=IDS).loss.backward()
    again = second(IDS, labels=IDS)
    again.loss.backward()
    assert LlamaForCausalLM.forward is class_forward and state_of(second) == before
    assert torch.equal(again.loss, expected.loss) and torch.equal(again.logits, expected.logits)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in second.named_parameters())


def test_patch_is_idempotent_and_sees_lora_added_later():
    model = tiny_model("qwen3")
    first = fastlm.patch(model)
    wrapped = add_lora(model)
    second = fastlm.patch(wrapped)
    assert second.fused == {**first.fused, "lora": 14} and second.stock == {}
    assert sum(hook.__module__.startswith("fastlm") for hook in model.base_model._forward_pre_hooks.values()) == 1
    truth_loss, truth = loss_and_gradients(add_lora(tiny_model("qwen3")), alone(ROWS), COUNT)
    loss, gradients = loss_and_gradients(wrapped, LAYOUTS["flattened"](ROWS), COUNT)
    assert loss == pytest.approx(truth_loss, rel=1e-5)
    assert max(relative_error(gradients[n], truth[n]) for n in truth) <= 1e-5
    fastlm.unpatch(wrapped)
    assert not is_patched(model)


def test_deepcopy_is_patched_and_independent():
    model = tiny_model("gemma2")
    fastlm.patch(model)
    twin = copy.deepcopy(model)
    assert is_patched(twin)
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.zero_()
    assert not torch.equal(model(IDS).logits, twin(IDS).logits)
    for name, module in twin.named_modules():
        bound = module.__dict__.get("forward")
        assert bound is None or bound.__self__ is module, name
    fastlm.unpatch(twin)
    assert is_patched(model) and not is_patched(twin)


def test_pickle_restores_the_stock_model(tmp_path):
    model = tiny_model("llama")
    expected = model(IDS).logits
    fastlm.patch(model)
    restored = pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    for twin in (restored, torch.load(tmp_path / "model.pt", weights_only=False)):
        assert not is_patched(twin)
        assert torch.equal(twin(IDS).logits, expected)
        assert fastlm.patch(twin).fused["attention"] == 2
        loss, _ = loss_and_gradients(twin, LAYOUTS["flattened"](ROWS), COUNT)
        assert loss == pytest.approx(loss_and_gradients(twin, alone(ROWS), COUNT)[0], rel=1e-5)


def test_save_pretrained_writes_the_stock_layout(tmp_path):
    model = tiny_model("phi3")
    expected = model(IDS).logits
    keys = set(model.state_dict())
    fastlm.patch(model)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, expected)


def test_merge_and_unload_keeps_the_numbers():
    model = add_lora(tiny_model("llama"))
    fastlm.patch(model)
    expected = model.eval()(IDS).logits
    merged = model.merge_and_unload()
    assert is_patched(merged)
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_torch_compile_runs_a_patched_model():
    model = tiny_model("llama").eval()
    fastlm.patch(model)
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"torch\.compile"):
        fastlm.patch(compiled)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layout", ["flattened", "padded"])
def test_checkpointing_changes_no_gradient(reentrant, layout):
    model = add_lora(tiny_model("qwen3"))
    fastlm.patch(model)
    loss, gradients = loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT)
    assert again == loss and gradients.keys() == recomputed.keys()
    assert all(torch.equal(recomputed[n], gradients[n]) for n in gradients)


def test_patching_again_leaves_what_was_bound_around_the_head():
    """accelerate's autocast, say: ours over it would run without."""
    model = tiny_model("llama")
    first = fastlm.patch(model)
    inner = model.forward
    model.forward = outer = lambda *args, **kwargs: inner(*args, **kwargs)
    assert fastlm.patch(model).fused == first.fused
    assert model.forward is outer


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_with_left_padding_equals_stock(family):
    stock = tiny_model(family).eval()
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    ids = torch.tensor([[0] * 7 + [5, 9], [7, 8, 9, 10, 11, 12, 13, 14, 15]])
    mask = (ids != 0).long()
    options = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(ids, **options), stock.generate(ids, **options))


def test_unknown_code_stays_stock_and_is_named():
    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states):
            return self.inner(hidden_states) * 2

    class OddMLP(Doubled):
        pass

    model = tiny_model("llama")
    model.model.layers[1].mlp = OddMLP(model.model.layers[1].mlp.down_proj)
    report = fastlm.patch(model)
    assert report.fused["mlp"] == 1
    assert "unknown mlp code (OddMLP" in report.stock["model.layers.1.mlp"]
    assert "model.layers.*.mlp  stock x 1: unknown mlp code" in str(report)


def test_unknown_family_keeps_its_attention_and_refuses_boundaries():
    model = tiny_model("stablelm")
    report = fastlm.patch(model)
    assert "attention" not in report.fused and padding_free_obstacle(model) is not None
    assert report.obstacle is not None
    with pytest.raises(ValueError, match="padding collator"):
        model(**LAYOUTS["flattened"](ROWS)[0])
    stock = tiny_model("stablelm")
    assert relative_error(model(IDS).logits, stock(IDS).logits) <= 1e-6


def test_an_instance_with_a_forward_of_its_own_is_left_alone():
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mine = MethodType(lambda self, x: x * 0, mlp)
    mlp.forward = mine
    report = fastlm.patch(model)
    assert report.fused["mlp"] == 1 and "already replaced" in report.stock["model.layers.0.mlp"]
    fastlm.unpatch(model)
    assert mlp.__dict__["forward"] is mine


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_the_report_says_what_computes_attention_and_why(family):
    expected = {
        "llama": {"attention": "sdpa"},
        "gemma2": {"attention (window 6, softcap 20.0)": "eager", "attention (softcap 20.0)": "eager"},
        "gemma3_text": {"attention (window 6)": "sdpa", "attention": "sdpa"},
    }[family]
    report = fastlm.patch(tiny_model(family))
    assert {name: text.partition(" (")[0] for name, text in report.backends.items()} == expected
    for name, text in report.backends.items():
        assert "triton" in text and "needs a CUDA GPU, the tensors are on cpu" in text
        assert ("varlen, efficient, xformers, sdpa takes no softcap" in text) == ("softcap" in name)
        assert text in str(report)


def test_the_choice_for_long_samples_and_under_autocast(monkeypatch):
    """As on a Hopper GPU with FlashAttention-4: not here, but the choice is a function of names and numbers."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("fastlm.kernels.attention.package_function", lambda name: print)
    gpu = torch.device("cuda")
    choose_backend.cache_clear()
    try:
        assert attention_backends(gpu, torch.bfloat16, 128) == "triton, for long samples flash4 (the first choice)"
        assert attention_backends(gpu, torch.bfloat16, 256) == "varlen, for long samples flash4 (the first choice)"
        capped = attention_backends(gpu, torch.bfloat16, 128, softcap=20.0)
        assert capped == "triton (flash4, varlen takes no softcap)"
        full = attention_backends(gpu, torch.float32, 128)
        assert full.startswith("sdpa (") and "not torch.float32" in full
        assert full.endswith("); under autocast triton, for long samples flash4 (the first choice)")
        assert attention_backends(gpu, torch.float32, 128, "varlen") == "varlen under autocast only (asked for)"
        assert attention_backends(gpu, torch.float16, 128, "sdpa") == "sdpa (asked for)"
        with pytest.raises(ValueError, match="takes no softcap"):
            attention_backends(gpu, torch.bfloat16, 128, "varlen", softcap=20.0)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
        turing = attention_backends(gpu, torch.float32, 128)
        assert "; under autocast efficient (" in turing and "needs compute capability 8.0, this GPU has 7.5" in turing
        with pytest.raises(ValueError, match=r"'varlen' needs compute capability 8\.0, this GPU has 7\.5"):
            attention_backends(gpu, torch.float16, 128, "varlen")
    finally:
        choose_backend.cache_clear()


def used_backends(model, monkeypatch):
    """What a batch with sample boundaries runs on."""
    used = set()
    for name, backend in TABLE.items():
        spy = functools.partial(lambda call, name, run: used.add(name) or run(call), name=name, run=backend.run)
        monkeypatch.setitem(TABLE, name, dataclasses.replace(backend, run=spy))
    loss, _ = loss_and_gradients(model, LAYOUTS["flattened"](ROWS), COUNT)
    return used, loss


def test_a_backend_that_is_asked_for_runs_and_stays(monkeypatch):
    model = tiny_model("gemma3_text")
    fastlm.patch(model)
    chosen, loss = used_backends(model, monkeypatch)
    assert chosen == {"sdpa"}
    report = fastlm.patch(model, attention_backend="eager")
    assert set(report.backends.values()) == {"eager (asked for)"}
    assert fastlm.patch(add_lora(model)).backends == report.backends  # and of None the earlier choice is kept
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert fastlm.patch(again).backends == report.backends
    plain = tiny_model("gemma3_text")
    fastlm.patch(plain, attention_backend="eager")
    used, forced = used_backends(plain, monkeypatch)
    assert used == {"eager"} and forced == pytest.approx(loss, rel=1e-5)
    fastlm.unpatch(plain)
    assert fastlm.patch(plain).backends["attention"].startswith("sdpa")


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        ("llama", "flash_attention_2", "unknown attention backend 'flash_attention_2'; there are flash4, varlen"),
        ("llama", "varlen", "'varlen' needs a CUDA GPU, the tensors are on cpu; use one of sdpa, eager"),
        ("gemma2", "sdpa", "'sdpa' takes no softcap; use one of eager"),
        ("stablelm", "eager", "attention_backend='eager' would not be used in this model: unknown backbone code"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_and_nothing_patched(family, backend, message):
    model = tiny_model(family)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        fastlm.patch(model, attention_backend=backend)
    assert state_of(model) == before and not is_patched(model)


def test_a_refused_backend_leaves_an_earlier_patch():
    model = add_lora(tiny_model("stablelm"))
    before = fastlm.patch(model)
    assert before.fused["mlp"] == 2
    with pytest.raises(ValueError, match="would not be used in this model"):
        fastlm.patch(model, attention_backend="eager")
    assert fastlm.report(model) == before
    with pytest.raises(ValueError, match="unknown attention backend ''"):
        fastlm.patch(tiny_model(), attention_backend="")


def test_attention_dropout_and_unknown_activation_stay_stock():
    model = tiny_model("llama", attention_dropout=0.1, hidden_act="relu")
    report = fastlm.patch(model)
    assert report.fused == {"head": 1, "layer": 2, "norm": 5}
    assert "attention dropout 0.1" in report.stock["model.layers.0.self_attn"]
    assert "activation" in report.stock["model.layers.0.mlp"]
    assert padding_free_obstacle(model) is not None


def test_a_hook_that_fusing_would_skip_runs():
    model = tiny_model("llama")
    fastlm.patch(model)
    seen = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    model.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert sorted(seen) == ["act", "head"]


def dispatched(model):
    """The model behind accelerate's hooks, as over several GPUs."""
    core = model.get_base_model()
    layers = {f"model.layers.{index}": "cpu" for index in range(len(core.model.layers))}
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    dispatch_model(core, {**rest, **layers}, force_hooks=True)
    return model


@pytest.mark.parametrize("patched_first", [True, False])
def test_h_wrong_device_hooks_that_move_inputs_are_no_obstacle(patched_first):
    """Of a model over several GPUs all is fused, and gives the same bits."""
    alone_there = add_lora(tiny_model("llama")).train()
    spread = copy.deepcopy(alone_there)
    fused = fastlm.patch(alone_there).fused
    if patched_first:
        fastlm.patch(spread)
    report = fastlm.patch(dispatched(spread))
    assert report.stock == {} and report.fused == fused and fused["head"] == 1 and fused["lora"] > 0
    rows = samples((9, 4))
    (batch,) = LAYOUTS["flattened"](rows)
    gradients = [loss_and_gradients(model, [batch], target_count(rows))[1] for model in (alone_there, spread)]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    output = spread(**batch)
    assert torch.equal(output.loss, alone_there(**batch).loss) and output.logits.shape[-1] == spread.config.vocab_size
    fastlm.unpatch(spread)
    fastlm.unpatch(alone_there)
    padded = {"input_ids": IDS, "labels": IDS}
    assert not is_patched(spread) and torch.equal(spread(**padded).loss, alone_there(**padded).loss)
    remove_hook_from_submodules(spread.get_base_model())
    assert fastlm.patch(spread).stock == {}


def test_trl_s_head_over_accelerate_s_hook():
    """Ours answers inside the hook, which puts its outputs where the batch was; unpatching gives TRL's back."""
    model = add_lora(tiny_model("llama")).train()
    core = model.get_base_model()
    fastlm.patch(dispatched(model))
    add_fused_lm_head(core, outputs=("log_probs", "entropy", "is_top1"))
    rebind_head(model)
    fastlm.patch(model)
    assert _trl_forward(core) is not None and isinstance(core.forward, functools.partial)  # the hook is outermost
    padded = {"input_ids": IDS, "labels": IDS}
    ours = model(**padded, fused_lm_head=True)
    assert ours.entropy.grad_fn.name().startswith("_WithoutGradient")
    smoothed = model(**padded, fused_lm_head=True, label_smoothing=0.1).loss
    fastlm.unpatch(model)
    torch.testing.assert_close(model(**padded, fused_lm_head=True).loss, ours.loss)
    torch.testing.assert_close(model(**padded).loss, ours.loss)
    assert abs(smoothed - ours.loss) > 1e-4


def test_h_wrong_device_late_logits_and_a_norm_elsewhere():
    model = tiny_model("llama").train()
    fastlm.patch(model)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    fastlm.patch(model)
    with unittest.mock.patch("accelerate.hooks.find_device", lambda _: torch.device("meta")):  # where the batch was
        assert model(input_ids=IDS, labels=IDS).logits.device.type == "meta"
    norm = model.model.layers[0].input_layernorm
    assert _open_norms(norm.weight, norm) is not None and _open_norms(norm.weight.to("meta"), norm) is None


def test_hooks_that_do_more_than_move_inputs_run():
    model = add_lora(tiny_model("llama")).train()
    layer, attention = model.get_base_model().model.layers[0].mlp, model.get_base_model().model.layers[0].self_attn
    for projection, hook in (
        (layer.gate_proj, AlignDevicesHook("cpu")),
        (layer.up_proj, AlignDevicesHook("cpu", io_same_device=True)),
        (layer.down_proj, SequentialHook(AlignDevicesHook("cpu"), ModelHook())),
        (attention.q_proj, AlignDevicesHook("cpu")),
    ):
        add_hook_to_module(projection, hook)
    attention.q_proj._hf_hook.no_grad = True
    layer.gate_proj._old_forward = layer.gate_proj.base_layer.forward  # not its own
    stock = fastlm.patch(model).stock
    hooked, beside = "a hook on it would be skipped", "q_proj cannot be fused: a hook on it would be skipped"
    assert {name.removeprefix("model.layers.0."): reason for name, reason in stock.items()} == {
        **dict.fromkeys(("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), hooked),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), beside),
    }
    model = add_lora(tiny_model("llama"))
    add_hook_to_module(model.get_base_model().lm_head, AlignDevicesHook("cpu", offload=True, weights_map={}))
    assert "a hook on lm_head would be skipped" in fastlm.patch(model).stock.values()


def test_hidden_states_and_attentions_are_captured():
    stock = tiny_model("llama", attention="eager").eval()
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    options = dict(output_hidden_states=True, output_attentions=True)
    expected, got = stock(IDS, **options), fast(IDS, **options)
    assert len(got.hidden_states) == 3 and len(got.attentions) == 2
    for a, b in zip(expected.hidden_states + expected.attentions, got.hidden_states + got.attentions, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    rows = LAYOUTS["flattened"](ROWS)[0]
    assert len(fast.train()(**rows, output_hidden_states=True).hidden_states) == 3


def test_headless_model_takes_boundaries():
    torch.manual_seed(0)
    model = LlamaModel(tiny_config("llama")).eval()
    batch = LAYOUTS["flattened"](ROWS)[0]
    expected = torch.cat([model(input_ids=one["input_ids"]).last_hidden_state for one in alone(ROWS)], 1)
    report = fastlm.patch(model)
    assert "head" not in report.fused
    got = model(input_ids=batch["input_ids"], boundaries=batch["boundaries"]).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    fastlm.unpatch(model)
    assert not is_patched(model)


def test_j_empty_logits():
    """Real logits whenever somebody reads them: in evaluation, and after a training step's loss too."""
    stock = tiny_model("gemma2")
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    for mode in (True, False):
        stock.train(mode), fast.train(mode)
        expected, got = stock(IDS, labels=IDS), fast(IDS, labels=IDS)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(got["logits"], got.logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(attention_mask=torch.ones(1, 31)), "not both"),
        (dict(output_attentions=True), "attention weights"),
        (dict(input_ids=torch.ones(2, 31, dtype=torch.long)), "cover 31 tokens in one row"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(change, message):
    model = tiny_model("llama")
    fastlm.patch(model)
    batch = LAYOUTS["flattened"](ROWS)[0]
    with pytest.raises(ValueError, match=message):
        model(**{**batch, **change})


def test_coupling_rotary_embeddings_are_refused_past_their_limit():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", max_position_embeddings=8, rope_parameters=rope)
    fastlm.patch(model)
    assert padding_free_obstacle(model, 8) is None
    assert "dynamic" in padding_free_obstacle(model, 9)
    with pytest.raises(ValueError, match="dynamic"):
        model(**LAYOUTS["flattened"](ROWS)[0])  # holds a sample of 14 tokens
    short = samples((7, 3, 8))
    loss, _ = loss_and_gradients(model, LAYOUTS["flattened"](short), target_count(short))
    truth = tiny_model("llama", max_position_embeddings=8, rope_parameters=rope)
    assert loss == pytest.approx(loss_and_gradients(truth, alone(short), target_count(short))[0], rel=1e-5)


def test_what_is_no_transformers_model_is_a_type_error():
    with pytest.raises(TypeError, match="transformers models"):
        fastlm.patch(nn.Linear(2, 2))


def test_rebinding_the_head_over_trl_and_undoing():
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_model("llama")
    expected = model(IDS, labels=IDS)
    fastlm.patch(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    trl_forward = model.__dict__["forward"]
    trl = model(IDS, labels=IDS, fused_lm_head=True)
    rebind_head(model)
    assert model.__dict__["forward"] is not trl_forward
    ours = model(IDS, labels=IDS, fused_lm_head=True)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(trl, name), rtol=1e-5, atol=1e-5)
    for name in ("is_top1", "label_mask"):
        assert torch.equal(getattr(ours, name).bool(), getattr(trl, name).bool())
    fastlm.unpatch(model)
    assert model.__dict__["forward"] is trl_forward  # the trainer's, over the class's own
    torch.testing.assert_close(model(IDS, labels=IDS).loss, expected.loss)
    assert not any("_fastlm" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(lora_dropout=0.1), "adapter dropout"),
        (dict(use_dora=True), "Dora"),
        (dict(bias="lora_only"), "its bias is trained"),
        (dict(lora_bias=True), "with a bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_adapters_that_cannot_be_fused_run_stock_and_are_named(options, reason):
    family = "qwen2" if "bias" in options else "llama"  # qwen2's projections have biases
    stock = add_lora(tiny_model(family), **options).eval()
    fast = copy.deepcopy(stock)
    report = fastlm.patch(fast)
    named = [name for name, why in report.stock.items() if reason in why]
    assert "model.layers.0.self_attn.q_proj" in named
    torch.testing.assert_close(fast(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)


def test_adapter_states_are_read_at_every_call():
    """Disabled, merged, switched and second adapters after patching: always PEFT's own numbers."""
    from peft import LoraConfig

    stock = add_lora(tiny_model("llama")).eval()
    stock.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)

    def same():
        torch.testing.assert_close(fast(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)

    same()
    with stock.disable_adapter(), fast.disable_adapter():
        same()
    for model in (stock, fast):
        model.set_adapter("other")
    same()
    for model in (stock, fast):
        model.base_model.set_adapter(["default", "other"])
    same()
    for model in (stock, fast):
        model.set_adapter("default")
        model.merge_adapter()
    same()
    for model in (stock, fast):
        model.unmerge_adapter()
    same()
