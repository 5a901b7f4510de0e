"""That the report says of adapters what really runs: its counts against calls of the fused functions."""

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import fastlm
from fastlm.models import layers
from tests.models.batches import LAYOUTS, samples
from tests.tiny import add_lora, tiny_model

HOOKED = "a hook on it would be skipped"


def first(model):
    return model.get_base_model().model.layers[0]


def hooked(*path, **config):
    def build():
        model = add_lora(tiny_model(), **config)
        first(model).get_submodule(".".join(path)).register_forward_hook(lambda *_: None)
        return model

    return build


def trained_base(name):
    model = add_lora(tiny_model(), target_modules=["q_proj", "v_proj", "gate_proj", "up_proj"])
    for layer in model.get_base_model().model.layers:
        layer.get_submodule(name).weight.requires_grad_(True)
    return model


def one_active(*active):
    model = add_lora(tiny_model())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(list(active))
    return model


def merged():
    model = add_lora(tiny_model())
    first(model).self_attn.q_proj.merge()
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(first(model).mlp, name).merge()
    return model


def disabled():
    model = add_lora(tiny_model())
    model.base_model.disable_adapter_layers()
    return model


def eight_bits():
    """PEFT's class for int8 by name alone; bitsandbytes has no int8 product here."""
    model = add_lora(tiny_model())
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.__class__ = type("Linear8bitLt", (type(module),), {"__module__": "peft.tuners.lora.bnb"})
    return model


class Sharded(nn.Parameter):
    """A parameter that does not hold its own numbers, as FSDP2's DTensor."""


def sharded():
    model = add_lora(tiny_model())
    factor = first(model).self_attn.v_proj.lora_A["default"]
    factor.weight = torch.Tensor._make_subclass(Sharded, factor.weight.data, True)
    return model


def four_bits(dtype, adapters, folder):
    tiny_model().save_pretrained(folder)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return add_lora(model, dtype=adapters)


def adapters_fused(model, monkeypatch, autocast):
    """How many adapters one training step hands to the fused functions, and how many MLPs run as one."""
    adapters, mlps = [], []

    def linear(x, projections, *args):
        adapters.extend(one for one in projections if one.a is not None)
        return lora_linear(x, projections, *args)

    def mlp(x, gate, up, down, *args, **kwargs):
        adapters.extend(one for one in (gate, up, down) if one.a is not None)
        mlps.append(x)
        return lora_mlp(x, gate, up, down, *args, **kwargs)

    lora_linear, lora_mlp = layers.lora_linear, layers.lora_mlp
    with monkeypatch.context() as patching, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patching.setattr(layers, "lora_linear", linear)
        patching.setattr(layers, "lora_mlp", mlp)
        model.train()(**LAYOUTS["flattened"](samples((9, 4)))[0])
    return len(adapters), len(mlps)


# what is built, adapters that are fused, some of the report's reasons
Q, K, V, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
NO_K = "k_proj cannot be fused: its base weight is trained"
NOT_THERE = "adapter 'other' is not in this layer"
INT8 = "bitsandbytes' int8 product rounds activations too: a dense one would give other numbers"
CASES = {
    "all": (lambda: add_lora(tiny_model()), 14, {}),
    "packed": (lambda: add_lora(tiny_model("phi3")), 8, {}),
    "hook on q": (
        hooked("self_attn", "q_proj"), 11,
        {Q: HOOKED, K: f"q_proj cannot be fused: {HOOKED}", V: f"q_proj cannot be fused: {HOOKED}"},
    ),
    "hook on k, unadapted": (
        hooked("self_attn", "k_proj", **ATTENTION), 2, dict.fromkeys((Q, V), f"k_proj cannot be fused: {HOOKED}"),
    ),
    "hook on down": (hooked("mlp", "down_proj"), 13, {DOWN: HOOKED}),
    "hook on down, unadapted": (hooked("mlp", "down_proj", target_modules=["gate_proj", "up_proj"]), 4, {}),
    "hook on the activation": (
        hooked("mlp", "act_fn"), 11,
        {"model.layers.0.mlp": "a hook on its activation would be skipped",
         **dict.fromkeys((GATE, UP, DOWN), "its mlp runs stock code")},
    ),
    "k trained": (lambda: trained_base("self_attn.k_proj"), 4, dict.fromkeys((Q, V), NO_K)),
    "down trained": (lambda: trained_base("mlp.down_proj"), 8, {}),
    "k saved": (
        lambda: add_lora(tiny_model(), modules_to_save=["k_proj"], **ATTENTION), 0, dict.fromkeys((Q, V), NO_K),
    ),
    "q alone active": (
        lambda: one_active("other"), 0,
        {Q: f"k_proj cannot be fused: {NOT_THERE}", OUT: NOT_THERE},
    ),
    "two active": (lambda: one_active("default", "other"), 0, dict.fromkeys((Q, K, OUT, UP), "2 active adapters")),
    "merged": (merged, 10, dict.fromkeys((Q, GATE, UP, DOWN), "its adapter is merged or disabled")),
    "disabled": (disabled, 0, dict.fromkeys((Q, OUT, DOWN), "its adapter is merged or disabled")),
    "dropout": (lambda: add_lora(tiny_model(), lora_dropout=0.5), 0, dict.fromkeys((Q, OUT), "adapter dropout")),
    "int8": (eight_bits, 0, dict.fromkeys((Q, K, V, OUT, GATE, UP, DOWN), INT8)),
    "sharded": (sharded, 11, {V: "sharded adapter", Q: "v_proj cannot be fused: sharded adapter"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_report_counts_and_names_what_runs(case, monkeypatch):
    build, count, reasons = CASES[case]
    model = build()
    report = fastlm.patch(model)
    assert {name: report.stock.get(name) for name in reasons} == reasons
    adapted = sum(hasattr(module, "lora_A") for module in model.modules())
    named = [name for name in report.stock if hasattr(model.get_base_model().get_submodule(name), "lora_A")]
    assert report.fused.get("lora", 0) == count == adapted - len(named)
    parts = [name for name, how in report.conditions.items() if how.startswith("mlp in parts")]
    for autocast in (False, True):
        fused, whole = adapters_fused(model, monkeypatch, autocast)
        assert fused == count
        if case in ("all", "hook on down", "hook on down, unadapted", "down trained"):
            assert whole == 2 - len(parts)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(hooked("mlp", "down_proj"), HOOKED), (lambda: trained_base("mlp.down_proj"), "its base weight is trained")],
    ids=["hook", "trained"],
)
def test_an_mlp_that_runs_in_parts_is_named(build, reason):
    report = fastlm.patch(build())
    assert report.conditions["model.layers.0.mlp"] == f"mlp in parts: down_proj cannot be fused: {reason}"
    assert f"{len(report.conditions)} mlp in parts: down_proj cannot be fused: {reason}" in str(report)


@pytest.mark.parametrize(
    ("base", "adapters", "when"),
    [
        (torch.bfloat16, torch.float32, "lora under autocast only"),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, "lora under autocast only"),
    ],
)  # fmt: skip
def test_adapters_of_another_dtype_than_the_base_need_autocast(base, adapters, when, monkeypatch):
    model = add_lora(tiny_model(dtype=base), dtype=adapters)
    report = fastlm.patch(model)
    assert report.fused["lora"] == 14 and report.stock == {}
    assert list(report.conditions.values()) == ([] if when is None else [when] * 14)
    assert (f"14 {when}" in str(report)) == (when is not None)
    assert adapters_fused(model, monkeypatch, False) == ((14, 2) if when is None else (0, 0))
    assert adapters_fused(model, monkeypatch, True) == (14, 2)


@pytest.mark.parametrize(
    ("base", "adapters"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),  # under autocast bitsandbytes goes on in float32
    ],
)
def test_four_bit_bases(base, adapters, tmp_path, monkeypatch):
    model = four_bits(base, adapters, tmp_path)
    report = fastlm.patch(model)
    limits = list(report.conditions.values())
    without, under = (limits.count(f"lora {when} autocast only") for when in ("without", "under"))
    fused = report.fused.get("lora", 0)
    assert adapters_fused(model, monkeypatch, False)[0] == fused - under
    assert adapters_fused(model, monkeypatch, True)[0] == fused - without
    assert (fused, without, under) == (14, 14 * (base == torch.float32), 14 * (base != adapters))


def test_four_bits_under_a_float32_stream(tmp_path, monkeypatch):
    """PEFT's preparation turns norms and embeddings to float32, and bitsandbytes gives back what it reads."""
    model = four_bits(torch.bfloat16, torch.float32, tmp_path)
    prepare_model_for_kbit_training(model.get_base_model(), use_gradient_checkpointing=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    report = fastlm.patch(model)
    limits = list(report.conditions.values())
    without, under = (limits.count(f"lora {when} autocast only") for when in ("without", "under"))
    fused = report.fused.get("lora", 0)
    assert adapters_fused(model, monkeypatch, False)[0] == fused - under == 0
    assert adapters_fused(model, monkeypatch, True)[0] == fused - without == 2
    assert "bitsandbytes gives back torch.float32, what it reads" in report.stock[Q]


def test_adapters_of_norms_are_no_lora():
    config = LNTuningConfig(target_modules=["q_norm", "k_norm"])
    report = fastlm.patch(get_peft_model(tiny_model("qwen3"), config))
    assert "lora" not in report.fused and report.stock["model.layers.0.self_attn.q_norm"] == "no projection"


def test_hooks_on_every_module_are_named(monkeypatch):
    model = add_lora(tiny_model())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        report = fastlm.patch(model)
        assert "lora" not in report.fused and adapters_fused(model, monkeypatch, False) == (0, 0)
        assert report.stock[Q] == "a hook on every module would be skipped"
    finally:
        handle.remove()
    assert adapters_fused(model, monkeypatch, False) == (14, 2)
    assert fastlm.patch(model).fused["lora"] == 14
