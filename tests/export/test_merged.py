"""Merged checkpoints: equal to the live model, to PEFT's own merge, and once reloaded."""

from __future__ import annotations

import copy
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fastlm.export import merged as saving
from fastlm.export import weights as merging
from fastlm.export.merged import save_merged, save_pretrained_merged
from fastlm.loader import FastLanguageModel
from tests.tiny import FAMILIES, add_lora, relative_error, tiny_model, tiny_tokenizer

IDS = torch.randint(4, 250, (2, 12), generator=torch.Generator().manual_seed(0))
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def reload(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


def merged(model: Any, path: Path) -> Any:
    """Save merged; the live model is bit for bit what it was; reloaded with plain transformers."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_merged(model, tiny_tokenizer(), path)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" not in config and "_pre_quantization_dtype" not in config
    return reload(path)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox"])
def test_e_merge_noop(family: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A large random adapter on every target: each pair goes in once, W' - W = scale·B·A, logits as live."""
    model = add_lora(tiny_model(family))
    pairs = [name for name, _ in model.named_parameters() if "lora_A" in name]
    live = merged(model, tmp_path / "out")
    assert f"float32, {len(pairs)} adapter pairs merged" in capsys.readouterr().out
    assert relative_error(logits(live), logits(model)) < 1e-5
    core, stock = model.get_base_model(), live.state_dict()
    for name, module in core.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            delta = stock[f"{name}.weight"] - module.base_layer.weight
            assert relative_error(delta, 2.0 * b @ a) < 1e-5 and delta.norm() > 0.01


def test_e_merge_noop_counts_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that the walk misses, or takes twice, are an error, and nothing is left."""
    model = add_lora(tiny_model())
    walk = merging._walk

    def without_adapter(module: Any, path: str, dtype: torch.dtype) -> Any:
        for weight in walk(module, path, dtype):
            if any(name.endswith("layers.1.mlp.up_proj.weight") for name in weight.tensors):
                base = model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
                name = next(iter(weight.tensors))
                yield merging.MergedWeight(weight.tensors, lambda name=name, base=base: ({name: base}, []))
            else:
                yield weight

    monkeypatch.setattr(merging, "_walk", without_adapter)
    with pytest.raises(RuntimeError, match=r"1 adapter pairs .* model\.layers\.1\.mlp\.up_proj \(default\)"):
        save_merged(model, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variant", [{"use_rslora": True}, {"use_dora": True}, {"use_rslora": True, "use_dora": True}])
def test_d_dora_rslora_dropped(variant: dict[str, bool], tmp_path: Path) -> None:
    """Equal to PEFT's own merge, scale 4 and not 2 for rsLoRA with r 4 and alpha 8, magnitudes included."""
    model = add_lora(tiny_model(), **variant)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1.0 + 0.3 * torch.rand_like(parameter)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == (4.0 if variant.get("use_rslora") else 2.0)
    ours = merged(model, tmp_path / "out").state_dict()
    peft = copy.deepcopy(model).merge_and_unload().state_dict()
    assert set(ours) == set(peft)
    assert all(relative_error(ours[name], peft[name]) < 1e-6 for name in peft)


def test_several_adapters_and_merged_ones(tmp_path: Path) -> None:
    from peft import LoraConfig

    model = add_lora(tiny_model())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert relative_error(logits(merged(model, tmp_path / "one")), logits(model)) < 1e-5
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    assert relative_error(logits(merged(model, tmp_path / "two")), both) < 1e-5
    model.merge_adapter(["second"])
    assert relative_error(logits(merged(model, tmp_path / "three")), both) < 1e-5
    with model.disable_adapter(), pytest.raises(ValueError, match="switched off"):
        save_merged(model, None, tmp_path / "off")


def test_mixture_of_experts_keeps_its_checkpoint_layout(tmp_path: Path) -> None:
    """Experts that are fused in memory lie apart in the file, as the family's own checkpoints have them."""
    model = add_lora(tiny_model("qwen3_moe", **MOE), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    live = merged(model, tmp_path / "out")
    assert relative_error(logits(live), logits(model)) < 1e-5
    model.get_base_model().__class__.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "stock")
    ours, stock = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "stock"))
    assert set(ours) == set(stock) and "model.layers.0.mlp.experts.3.up_proj.weight" in ours


def test_sixteen_bits_round_once(tmp_path: Path) -> None:
    model = add_lora(tiny_model(dtype=torch.bfloat16), dtype=torch.float32)
    live = merged(model, tmp_path / "out")
    assert live.dtype == torch.bfloat16
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.equal(live.model.layers[0].self_attn.q_proj.weight, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [{}, {"use_dora": True}])
def test_d_merge_base_4bit(tmp_path: Path, dtype: torch.dtype, variant: dict[str, bool]) -> None:
    """An adapter far below a quantisation step survives: the base is dequantised, never quantised again."""
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True, dtype=dtype)
    plain = logits(base)
    model = add_lora(base, dtype=torch.float32, **variant)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data *= 0.02
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    delta = layer.get_delta_weight("default")
    step = merging._dequantise(layer.base_layer, "weight").float().abs().max() / 8
    assert 0 < delta.abs().max() < step / 10
    live, again = logits(model), merged(model, tmp_path / "out")
    assert again.dtype == dtype
    moved, error = relative_error(live, plain), relative_error(logits(again), live)
    if dtype == torch.float32:
        assert error < 1e-5 < moved / 10
    else:  # about as far from the same weights in float32 as the live model's own bfloat16 is
        model.get_base_model().config.dtype = torch.float32
        save_merged(model, None, tmp_path / "exact")
        truth = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32))
        assert relative_error(logits(again), truth) < 1.5 * relative_error(live, truth)


def test_repacked_4bit_weights_are_read_as_they_compute(tmp_path: Path) -> None:
    """bitsandbytes' inference on an AVX512 CPU repacks weights and rounds their scales to bfloat16."""
    from bitsandbytes import functional

    tiny_model(intermediate_size=128).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=True)
    layer = base.model.layers[0].mlp.up_proj
    before = merging._dequantise(layer, "weight")
    layer.weight.data, layer.weight.quant_state = functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    packed = (layer.weight.data.clone(), layer.weight.quant_state.absmax.clone())
    after = merging._dequantise(layer, "weight")
    assert ((after - before).abs() <= before.abs() * 2**-7).all()
    assert torch.equal(layer.weight.data, packed[0]) and torch.equal(layer.weight.quant_state.absmax, packed[1])


def test_eight_bits_are_dequantised(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    model = add_lora(base)
    again = merged(model, tmp_path / "out")
    assert relative_error(logits(again), logits(model)) < 0.03  # LLM.int8 rounds its inputs too


def trained_tables(tied: bool, modules: list[str], **config: Any) -> Any:
    """A model whose saved modules have moved, each in its own direction where it is its own."""
    model = add_lora(tiny_model(tie_word_embeddings=tied), target_modules=["q_proj"], modules_to_save=modules, **config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            parameter.data += torch.randn_like(parameter) * 0.05
    return model


@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], ["lm_head"], ["embed_tokens"]])
@pytest.mark.parametrize("kept_tied", [False, True])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_d_tied_drift(modules: list[str], kept_tied: bool, tmp_path: Path) -> None:
    """Tables that training took apart are saved as two, and the configuration says so."""
    model = trained_tables(True, modules, ensure_weight_tying=kept_tied)
    again = merged(model, tmp_path / "out")
    assert again.config.tie_word_embeddings is kept_tied
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is kept_tied
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not kept_tied
    assert relative_error(logits(again), logits(model)) < 1e-5


def test_d_tied_drift_through_training(tmp_path: Path) -> None:
    """Loaded and adapted by fastlm, tied tables stay tied: three steps, merge, reload."""
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    model = FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["embed_tokens", "lm_head"])
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    start = model.get_input_embeddings().weight.detach().clone()
    for _ in range(3):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert not torch.equal(model.get_input_embeddings().weight, start)
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    again = reload(tmp_path / "out")
    assert again.config.tie_word_embeddings and relative_error(logits(again), logits(model)) < 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("config", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [3, 7]}])
def test_adapted_embeddings(config: dict[str, Any], tmp_path: Path) -> None:
    model = add_lora(tiny_model(tie_word_embeddings=True), **{"target_modules": ["q_proj"], **config})
    for name, parameter in model.named_parameters():
        if "trainable_tokens" in name:
            parameter.data += 0.1
    assert relative_error(logits(merged(model, tmp_path / "out")), logits(model)) < 1e-5


def test_e_sidefiles_lost(tmp_path: Path) -> None:
    """Template, special tokens, ids, generation settings and a sentencepiece file come along."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": ["<|tool|>"]})
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    tokenizer.vocab_file = str(tmp_path / "tokenizer.model")
    model = add_lora(tiny_model())
    core = model.get_base_model()
    core.generation_config.max_new_tokens = 17
    core.config.use_cache = False  # what training leaves
    save_pretrained_merged(model, tmp_path / "out", tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == tokenizer.chat_template and again.eos_token == "<|end|>"
    assert again.eos_token_id == tokenizer.eos_token_id and again.all_special_ids == tokenizer.all_special_ids
    texts = [f"text {i} <|tool|> {chr(200 + i)}<|end|>" for i in range(100)]
    assert again(texts).input_ids == tokenizer(texts).input_ids
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"sentencepiece"
    live = reload(tmp_path / "out")
    assert live.generation_config.max_new_tokens == 17 and live.config.use_cache is True
    assert core.config.use_cache is False


def test_generation_settings_that_cannot_be_saved_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tiny_model()
    model.generation_config.temperature = 0.6
    save_merged(model, tiny_tokenizer(), tmp_path / "out")
    assert "do_sample=True is saved" in capsys.readouterr().out and not model.generation_config.do_sample
    settings = reload(tmp_path / "out").generation_config
    assert settings.do_sample and settings.temperature == 0.6


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SHARD_BYTES", 100_000)
    model = add_lora(tiny_model())
    again = merged(model, tmp_path / "out")
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 110_000 for file in files)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert relative_error(logits(again), logits(model)) < 1e-5


def test_bare_model_and_lora_method(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bare = tiny_model()
    save_pretrained_merged(bare, tmp_path / "bare")
    said = capsys.readouterr().out
    assert "no tokenizer was given" in said and "0 adapter pairs merged" in said
    assert torch.equal(logits(reload(tmp_path / "bare")), logits(bare))
    model = add_lora(bare)
    save_pretrained_merged(model, tmp_path / "lora", tiny_tokenizer(), save_method="lora")
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match="'merged_4bit' is not supported"):
        save_pretrained_merged(model, tmp_path / "four", save_method="merged_4bit")


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    from peft import IA3Config, get_peft_model

    with pytest.raises(TypeError, match="only a transformers model"):
        save_merged(torch.nn.Linear(2, 2), None, tmp_path / "out")
    ia3 = get_peft_model(tiny_model(), IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(TypeError, match="only LoRA adapters can be merged"):
        save_merged(ia3, None, tmp_path / "out")
    other = tiny_model()
    other.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quantised with gptq"):
        save_merged(other, None, tmp_path / "out")
    with torch.device("meta"):
        offloaded = type(other)(tiny_model().config)
    with pytest.raises(ValueError, match="is offloaded"):
        save_merged(offloaded, None, tmp_path / "out")
    broken = add_lora(tiny_model())
    next(p for n, p in broken.named_parameters() if "lora_B" in n).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        save_merged(broken, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"not enough disk space for .*out: [\d,]+ bytes needed, 1,000 free"):
        save_merged(add_lora(tiny_model()), tiny_tokenizer(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
