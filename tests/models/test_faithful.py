"""What a user does to a patched model after patching: the numbers and the outputs stay those of the stock model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.loss.loss_utils import ForCausalLMLoss

import fastlm
from fastlm.models.head import LossOutput
from tests.models.batches import LAYOUTS, samples
from tests.tiny import add_lora, relative_error, tiny_model

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(5))


def pair(family="llama", **lora):
    stock = add_lora(tiny_model(family), **lora).train()
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    return stock, fast


def loss_and_gradients(model, **batch):
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, **batch}).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(stock, fast, **batch):
    (expected, truth), (loss, gradients) = (loss_and_gradients(model, **batch) for model in (stock, fast))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert gradients.keys() == truth.keys()
    assert max(relative_error(gradients[name], truth[name]) for name in truth) <= 1e-4


def test_a_peft_model_trains_without_a_logits_tensor():
    """PEFT passes return_dict=None; the row weights of the boundaries reach the loss through it as well."""
    _, fast = pair()
    output = fast(IDS, labels=IDS)
    assert isinstance(output, LossOutput) and callable(dict.get(output, "logits"))
    rows = samples()
    batch = LAYOUTS["flattened"]([{**row, "weights": [2.0] * len(row["input_ids"])} for row in rows])[0]
    plain = LAYOUTS["flattened"](rows)[0]
    torch.testing.assert_close(fast(**batch).loss, 2 * fast(**plain).loss, rtol=1e-6, atol=0)


def test_output_is_read_by_name_index_and_tuple():
    stock, fast = pair()
    expected = stock(IDS, labels=IDS, output_hidden_states=True)
    reads = {
        "index": lambda o: o[1], "name": lambda o: o["logits"], "get": lambda o: o.get("logits"),
        "tuple": lambda o: o.to_tuple()[1], "slice": lambda o: o[:2][1], "copy": lambda o: copy.copy(o).logits,
    }  # fmt: skip
    for name, read in reads.items():
        got = fast(IDS, labels=IDS, output_hidden_states=True, use_cache=True)
        assert "logits" in got, name
        torch.testing.assert_close(read(got), expected.logits, rtol=1e-5, atol=1e-5, msg=name)
        assert list(got.keys()) == list(expected.keys()), name
    assert fast(IDS, labels=IDS).get("attentions", "none") == "none"


def test_logits_survive_accelerate_and_remember_autocast():
    """accelerate rebuilds the output outside autocast, where a float32 head and bfloat16 states do not multiply."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = tiny_model(dtype=torch.bfloat16)
    model.lm_head.float()
    fastlm.patch(model)
    model.train()
    forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    output = convert_outputs_to_fp32(forward)(IDS, labels=IDS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.eval()(IDS).logits
    torch.testing.assert_close(output.logits.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_a_loss_function_of_the_users_own_is_called():
    def smoothed(logits, labels, vocab_size, **_):
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten(), label_smoothing=0.3
        )

    stock, fast = pair()
    for model in (stock, fast):
        model.get_base_model().loss_function = smoothed
    assert_same(stock, fast)
    for model in (stock, fast):
        model.get_base_model().loss_function = ForCausalLMLoss
    assert_same(stock, fast)
    assert_same(stock, fast, ignore_index=int(IDS[0, 5]))


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"use_cache": True}], ids=str)
def test_restarting_position_ids_are_read_as_stock_reads_them(options):
    """transformers takes them for packing only without a cache, and its default has one."""
    stock, fast = pair()
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    assert_same(stock, fast, input_ids=IDS[:1], labels=IDS[:1], position_ids=positions, **options)


@pytest.mark.parametrize("fused_head", [False, True])
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)], ids=str)
def test_a_batch_without_labels_is_a_finite_zero(count, fused_head):
    _, fast = pair()
    extra = {"fused_lm_head": True} if fused_head else {}
    labels = torch.full_like(IDS, -100)
    loss, gradients = loss_and_gradients(fast, labels=labels, num_items_in_batch=count, **extra)
    assert loss.item() == 0
    trained = {name for name, parameter in fast.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained and all((g == 0).all() for g in gradients.values())


@pytest.mark.parametrize(
    "child", ["mlp", "self_attn", "post_attention_layernorm", "q_proj", "down_proj", "lora_A.default"]
)
def test_a_hook_may_write_into_what_it_is_given(child):
    def double(module, inputs, output):
        (output[0] if isinstance(output, tuple) else output).mul_(2)

    stock, fast = pair()
    for model in (stock, fast):
        for name, module in model.named_modules():
            if name.endswith(f".{child}"):
                module.register_forward_hook(double)
    assert_same(stock, fast)


@pytest.mark.parametrize(
    "child",
    [
        "q_proj",
        "q_proj.base_layer",
        "down_proj",
        "lora_A.default",
        "post_attention_layernorm",
        "q_norm",
        "act_fn",
        "lm_head",
    ],
)
def test_a_forward_replaced_after_patching_runs(child):
    def replaced(forward):
        return lambda *args, **kwargs: forward(*args, **kwargs) * 1.5

    stock, fast = pair("qwen3")
    for model in (stock, fast):
        for name, module in model.named_modules():
            if name.endswith(f".{child}"):
                module.forward = replaced(module.forward)
    assert_same(stock, fast)


def test_an_activation_swapped_after_patching_is_the_one_that_runs():
    stock, fast = pair()
    for activation in (nn.ReLU(), nn.GELU()):  # no kernel, another kernel
        for model in (stock, fast):
            for layer in model.get_base_model().model.layers:
                layer.mlp.act_fn = activation
        assert_same(stock, fast)


def test_row_weights_count_in_evaluation_too():
    fast = tiny_model().train()
    fastlm.patch(fast)
    rows = samples()
    for index, row in enumerate(rows):
        row["weights"] = [0.5 + index] * len(row["input_ids"])
    batch = LAYOUTS["flattened"](rows)[0]
    training = fast(**batch)
    with torch.no_grad():
        evaluated = fast.eval()(**batch)
    torch.testing.assert_close(evaluated.loss, training.loss.detach(), rtol=1e-6, atol=0)
    assert list(evaluated.keys()) == ["loss", "logits"] and evaluated.logits.shape == (1, 31, 300)


def test_a_hook_on_every_module_runs():
    def scaled(module, inputs, output):
        return output * 1.1 if type(module).__name__ in ("LlamaRMSNorm", "SiLUActivation", "Linear") else None

    stock, fast = pair()
    handle = register_module_forward_hook(scaled)
    try:
        assert_same(stock, fast)
    finally:
        handle.remove()
    assert_same(stock, fast)


def test_a_trained_head_that_the_active_adapter_lacks():
    from peft import LoraConfig

    stock = add_lora(tiny_model(), modules_to_save=["lm_head"]).train()
    with torch.no_grad():
        stock.get_output_embeddings().modules_to_save["default"].weight.mul_(1.5)
    stock.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    for name in ("default", "other", "default"):
        for model in (stock, fast):
            model.set_adapter(name)
        assert_same(stock, fast)


def test_adapters_of_another_method_stay_stock_and_are_named():
    from peft import IA3Config, get_peft_model

    targets = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    stock = get_peft_model(tiny_model(), IA3Config(task_type="CAUSAL_LM", **targets)).train()
    fast = copy.deepcopy(stock)
    assert "ia3.Linear" in fastlm.patch(fast).stock["model.layers.0.mlp.down_proj"]
    assert_same(stock, fast)
