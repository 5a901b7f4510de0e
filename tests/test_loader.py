"""Loading, LoRA set-up and the switches of FastLanguageModel, on tiny models in a temporary folder."""

from __future__ import annotations

import copy
import inspect
import pickle
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast

import fastlm
from fastlm import loader, options
from fastlm.loader import FastLanguageModel, is_bfloat16_supported
from fastlm.training import costs
from tests.tiny import FAMILIES, relative_error, tiny_model, tiny_tokenizer

IDS = torch.randint(4, 250, (2, 12), generator=torch.Generator().manual_seed(0))


def save(folder: Path, family: str = "llama", tokenizer: Any = None, **overrides: Any) -> str:
    """A tiny checkpoint with its tokenizer."""
    tiny_model(family, **overrides).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save(tmp_path / "model")


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def randomise(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.05


# --- from_pretrained


def test_signatures_are_the_published_ones() -> None:
    names = list(inspect.signature(FastLanguageModel.from_pretrained).parameters)
    assert names == [
        "model_name", "max_seq_length", "dtype", "load_in_4bit", "load_in_8bit", "full_finetuning", "token",
        "device_map", "rope_scaling", "trust_remote_code", "revision", "use_gradient_checkpointing",
        "random_state", "cuda_graphs", "attention_backend", "transformers_kwargs",
    ]  # fmt: skip
    parameters = inspect.signature(FastLanguageModel.get_peft_model).parameters
    assert list(parameters) == [
        "model", "r", "target_modules", "lora_alpha", "lora_dropout", "bias", "layers_to_transform",
        "layers_pattern", "use_gradient_checkpointing", "random_state", "use_rslora", "use_dora",
        "modules_to_save", "init_lora_weights", "loftq_config", "lora_config_kwargs",
    ]  # fmt: skip
    assert parameters["use_gradient_checkpointing"].default == "fastlm"
    assert parameters["random_state"].default == 3407
    assert inspect.signature(FastLanguageModel.from_pretrained).parameters["max_seq_length"].default == 2048


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_with_the_logits_of_stock(family: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = save(tmp_path / family, family)
    model, tokenizer = FastLanguageModel.from_pretrained(path, max_seq_length=64)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"fastlm: {path}:")]
    assert said == [f"fastlm: {path}: float32, 32-bit, cpu"]
    assert model.max_seq_length == 64 and model._fastlm_checkpointing == "fastlm"
    assert tokenizer.pad_token == "<pad>" and fastlm.report(model).fused
    implementation = "eager" if family == "gemma2" else "sdpa"
    assert model.config._attn_implementation == implementation
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation=implementation)
    assert relative_error(logits(model), logits(stock)) < 1e-5


def test_dtype_by_name_and_for_every_weight(tmp_path: Path) -> None:
    """A checkpoint that mixes bf16 weights and fp32 norms comes out in one dtype."""
    path = tmp_path / "mixed"
    model = tiny_model("llama", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    for dtype, expected in (
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
        ("torch.float32", torch.float32),
    ):
        loaded, _ = FastLanguageModel.from_pretrained(path, dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert FastLanguageModel.from_pretrained(path, torch_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_k_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without bfloat16 gets float16 for everything, and bfloat16 on request is refused."""
    assert is_bfloat16_supported() is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert is_bfloat16_supported() is False
    assert options.choose_dtype(None, True, False) == torch.float16
    assert options.choose_dtype(None, True, True) == torch.float32  # float16 weights cannot be trained
    with pytest.raises(ValueError, match="no bfloat16"):
        options.choose_dtype("bfloat16", True, False)
    with pytest.raises(ValueError, match="float16 weights cannot be trained"):
        options.choose_dtype(torch.float16, True, True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert is_bfloat16_supported() is False  # emulated on this capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert is_bfloat16_supported() is True and options.choose_dtype(None, True, True) == torch.bfloat16


def test_places_each_rank_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.place(None) == ({"": "cpu"}, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert options.place(None) == ({"": 1}, True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert options.place(None) == ({"": 3}, True)
    assert options.place("cpu") == ("cpu", False) and options.place({"": 0}) == ({"": 0}, True)


def test_load_in_4bit_unset_follows_the_machine() -> None:
    nf4 = options.quantisation_keywords(True, False, torch.bfloat16)["quantization_config"]
    assert (nf4.load_in_4bit, nf4.bnb_4bit_quant_type, nf4.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert nf4.bnb_4bit_compute_dtype == torch.bfloat16
    assert options.quantisation_keywords(False, True, torch.float16)["quantization_config"].load_in_8bit
    assert options.quantisation_keywords(False, False, torch.float32) == {}


def test_four_bits_on_a_cpu_and_a_checkpoint_that_is_quantised_already(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = save(tmp_path / "model", intermediate_size=160)  # a width that bitsandbytes cannot repack on AVX512
    model, tokenizer = FastLanguageModel.from_pretrained(path, load_in_4bit=True)
    assert "float32, 4-bit, cpu" in capsys.readouterr().out
    first = logits(model)
    assert torch.equal(logits(model), first)
    stored = tmp_path / "stored"
    model.save_pretrained(stored)
    tokenizer.save_pretrained(stored)
    again, _ = FastLanguageModel.from_pretrained(stored)
    assert "float32, 4-bit, cpu" in capsys.readouterr().out
    assert torch.equal(logits(again), first)
    for keywords in ({"full_finetuning": True}, {"load_in_4bit": None, "full_finetuning": True}):
        with pytest.raises(ValueError, match="stored in 4-bit"):
            FastLanguageModel.from_pretrained(stored, **keywords)
    half, _ = FastLanguageModel.from_pretrained(stored, load_in_4bit=False, dtype="bfloat16")
    assert "stored in 4-bit and stays so" in capsys.readouterr().out
    assert half.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"load_in_4bit": True, "full_finetuning": True}, "load_in_4bit and full_finetuning contradict"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit contradict"),
        ({"load_in_4bit": True, "load_in_16bit": True}, "load_in_4bit and load_in_16bit contradict"),
        ({"load_in_8bit": True}, "load_in_8bit needs a GPU"),
        ({"dtype": torch.float16}, "float16 does not train on a CPU"),
        ({"dtype": "bflot16"}, "nearest is 'bfloat16'"),
        ({"dtype": torch.int8}, "cannot be computed in"),
        ({"max_seq_length": 0}, "max_seq_length is 0"),
        ({"max_seq_length": -3}, "max_seq_length is -3"),
        ({"max_seq_length": 12.5}, "max_seq_length is 12.5"),
        ({"max_seq_length": True}, "max_seq_length is True"),
        ({"max_seq_length": 513}, r"takes 512 tokens; .*'factor': 2.0"),
        ({"max_seq_length": 1025, "rope_scaling": {"type": "linear", "factor": 2.0}}, "takes 1024 tokens"),
        ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, "'rope_type' \\(linear"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'factor', 1 or more"),
        ({"device_map": "cuda"}, "device_map='cuda' asks for a GPU and there is none"),
        ({"device_map": {"": 0}}, "asks for a GPU"),
        ({"use_gradient_checkpointing": "offlaod"}, "'recompute' or 'offload'"),
        ({"fast_inference": True}, "fast_inference=True"),
    ],
)
def test_bad_options_say_what_is_wrong(folder: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.from_pretrained(folder, **keywords)


def test_a_backend_of_attention_is_kept_through_lora_and_apart_from_transformers_own(folder: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder, attention_backend="eager", attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    model = FastLanguageModel.get_peft_model(model, r=2, use_gradient_checkpointing=False)
    assert fastlm.report(model).backends == {"attention": "eager (asked for)"}
    plain, _ = FastLanguageModel.from_pretrained(folder, attn_implementation="eager")
    assert plain.config._attn_implementation == "eager"
    assert fastlm.report(plain).backends["attention"].startswith("sdpa (flash4, varlen")


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        ("llama", "sdap", "unknown attention backend 'sdap'; there are flash4"),
        ("llama", "triton", "'triton' needs a CUDA GPU"),
        ("gemma2", "sdpa", "'sdpa' takes no softcap"),
    ],
)
def test_a_backend_of_attention_that_cannot_run_is_refused_before_weights_are_read(
    family: str, backend: str, message: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.from_pretrained(folder, attention_backend=backend)


def test_length_left_out_stays_within_the_model(folder: str) -> None:
    assert FastLanguageModel.from_pretrained(folder)[0].max_seq_length == 512
    assert FastLanguageModel.from_pretrained(folder, max_position_embeddings=4096)[0].max_seq_length == 2048


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rope_is_scaled_only_on_request(family: str, tmp_path: Path) -> None:
    path = save(tmp_path / "model", family)
    plain, _ = FastLanguageModel.from_pretrained(path)
    scaled, _ = FastLanguageModel.from_pretrained(
        path, max_seq_length=1024, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert scaled.max_seq_length == scaled.config.max_position_embeddings == 1024
    prefix = "full_attention_" if family == "gemma3_text" else ""
    before = getattr(plain.model.rotary_emb, f"{prefix}inv_freq")
    assert torch.equal(getattr(scaled.model.rotary_emb, f"{prefix}inv_freq"), before / 2)
    if prefix:  # windowed layers see no farther than before
        name = "sliding_attention_inv_freq"
        assert torch.equal(getattr(scaled.model.rotary_emb, name), getattr(plain.model.rotary_emb, name))
    yarn, _ = FastLanguageModel.from_pretrained(
        path, max_seq_length=2000, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    parameters = yarn.config.rope_parameters
    parameters = parameters["full_attention"] if prefix else parameters
    assert parameters["original_max_position_embeddings"] == 512 and yarn.config.max_position_embeddings == 2048


def test_unknown_keywords_name_the_nearest(folder: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(TypeError, match="'lod_in_4bit'; the nearest is 'load_in_4bit'"):
        FastLanguageModel.from_pretrained(folder, lod_in_4bit=True)
    with pytest.raises(TypeError, match="'atn_implementation'; the nearest is 'attn_implementation'"):
        FastLanguageModel.from_pretrained(folder, atn_implementation="sdpa")
    model, _ = FastLanguageModel.from_pretrained(
        folder, attn_implementation="eager", initializer_range=0.5, use_exact_model_name=True,
        max_lora_rank=8, fast_inference=False,
    )  # fmt: skip
    assert model.config._attn_implementation == "eager" and model.config.initializer_range == 0.5
    assert "fastlm: use_exact_model_name, max_lora_rank have no effect here\n" in capsys.readouterr().out
    with pytest.raises(TypeError, match="'lora_dropuot'; the nearest is 'lora_dropout'"):
        FastLanguageModel.get_peft_model(model, lora_dropuot=0.1)


def test_full_finetuning_trains_every_weight(folder: str, capsys: pytest.CaptureFixture) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder, full_finetuning=True, dtype="bfloat16")
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    assert FastLanguageModel.get_peft_model(model) is model
    assert "no LoRA is added" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bits", "free", "message"),
    [
        (dict(load_in_16bit=True), 0, r"take 0\.0 GiB in float16.* free some, or take a smaller model"),
        (dict(load_in_4bit=True), 0, "in NF4, and 0.0 GiB of the GPU are free: free some"),
        (dict(load_in_16bit=True), -1, r"free: load_in_4bit=True takes 0\.0"),
    ],
)
def test_weights_too_large_for_the_gpu_are_refused_before_loading(
    bits: dict[str, bool], free: int, message: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "place", lambda _: ({"": 0}, True))
    twin = options.meta_model(AutoConfig.from_pretrained(folder), torch.float16)
    plain, nf4 = (costs.weight_bytes(twin, quantised) for quantised in (False, True))
    assert plain == 2 * sum(p.numel() for p in twin.parameters()) and nf4 < plain - 1
    monkeypatch.setattr(options, "free_bytes", lambda device: free if free == 0 else plain - 1)
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.from_pretrained(folder, **bits)
    monkeypatch.setattr(options, "free_bytes", lambda device: plain)
    options.check_room("it", twin.config, torch.float16, {"": 0}, None)
    monkeypatch.setattr(options, "free_bytes", lambda device: 0)
    for elsewhere in ("auto", {"": "cpu"}, {"model": 0, "lm_head": 1}):
        options.check_room("it", twin.config, torch.float16, elsewhere, None)
    options.check_room("it", twin.config, torch.float16, {"": 0}, BitsAndBytesConfig(load_in_8bit=True))


def test_missing_things_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        FastLanguageModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        FastLanguageModel.from_pretrained("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        FastLanguageModel.from_pretrained(tmp_path / "empty")
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer could be loaded.*tokenizer\.save_pretrained"):
        FastLanguageModel.from_pretrained(tmp_path / "bare")
    weights = tmp_path / "bare" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(FileNotFoundError, match="no tokenizer could be loaded"):  # said before weights are read
        FastLanguageModel.from_pretrained(tmp_path / "bare")
    tiny_tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"weights of .*bare cannot be read"):
        FastLanguageModel.from_pretrained(tmp_path / "bare")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every try to reach the network, all of which fail."""
    tried: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("offline", [True, False])
def test_k_offline_ignored(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[Any], offline: bool
) -> None:
    """Base, adapter, tokenizer, merging: the network is never tried, with or without the variable."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter")
    again.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged, _ = FastLanguageModel.from_pretrained(tmp_path / "merged")
    assert relative_error(logits(merged), logits(model)) < 1e-5
    assert attempts == []
    if offline:
        for name in ("nobody/nothing", "nothing"):
            with pytest.raises(FileNotFoundError, match=f"no model could be loaded from {name}"):
                FastLanguageModel.from_pretrained(name)
        assert attempts == []


# --- the pad token


def bare_tokenizer(*special: str, bos: str = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """Byte level, with these tokens before the bytes; neither pad nor unknown token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([bos, eos, *special, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)


def load_with(tokenizer: Any, path: Path, **keywords: Any) -> tuple[Any, Any]:
    overrides = {name: keywords.pop(name) for name in ("vocab_size", "eos_token_id") if name in keywords}
    overrides = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None, **overrides}
    return FastLanguageModel.from_pretrained(save(path, tokenizer=tokenizer, **overrides), **keywords)


def check_pad(model: Any, tokenizer: Any) -> None:
    """One pad id everywhere, inside the table, not an end of sequence; a padded batch runs."""
    pad = tokenizer.pad_token_id
    assert pad is not None and pad != tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == pad
    assert pad < model.get_input_embeddings().weight.shape[0] == model.config.vocab_size
    batch = tokenizer(["ab", "abcdef"], padding=True, return_tensors="pt")
    assert batch["input_ids"].max() < model.config.vocab_size
    alone = logits(model, tokenizer("ab", return_tensors="pt")["input_ids"])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert relative_error(together[0, :2], alone[0]) < 1e-5


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_k_pad_out_of_range(tmp_path: Path, capsys: pytest.CaptureFixture, tied: bool, in_4bit: bool) -> None:
    """No spare token and a full table: one is added and the table grown, with the old logits kept."""
    tokenizer = bare_tokenizer()
    path = save(tmp_path / "m", tokenizer=tokenizer, vocab_size=258, eos_token_id=1, bos_token_id=0,
                pad_token_id=None, tie_word_embeddings=tied)  # fmt: skip
    stock = AutoModelForCausalLM.from_pretrained(path)
    model, tokenizer = FastLanguageModel.from_pretrained(path, load_in_4bit=in_4bit)
    assert "new pad token '<|pad|>', id 258 (was None); embedding table grown from 258 to 320 rows" in (
        capsys.readouterr().out
    )
    check_pad(model, tokenizer)
    table = model.get_input_embeddings().weight
    assert torch.equal(table[:258], stock.get_input_embeddings().weight)
    assert relative_error(table[258:], table[:258].mean(0).expand(62, -1)) < 1e-6
    assert (model.get_output_embeddings().weight is table) == tied
    if not in_4bit:
        assert relative_error(logits(model)[..., :258], logits(stock)) < 1e-5


def test_k_pad_out_of_range_room_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = load_with(bare_tokenizer(), tmp_path / "m", vocab_size=300)
    assert "new pad token '<|pad|>', id 258 (was None)\n" in capsys.readouterr().out
    assert tokenizer.pad_token_id == 258 and model.config.vocab_size == 300
    check_pad(model, tokenizer)


@pytest.mark.parametrize(
    "special, expected",
    [
        (("<|reserved_special_token_0|>",), "<|reserved_special_token_0|>"),
        (("<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"), "<|finetune_right_pad_id|>"),
        (("<unused0>", "<unused1>"), "<unused0>"),
        (("<pad>",), "<pad>"),
    ],
)
def test_k_pad_out_of_range_spare_token(tmp_path: Path, special: tuple[str, ...], expected: str) -> None:
    model, tokenizer = load_with(bare_tokenizer(*special), tmp_path / "m", vocab_size=258 + len(special))
    assert tokenizer.pad_token == expected and model.config.vocab_size == 258 + len(special)
    check_pad(model, tokenizer)


def test_pad_is_never_an_end_of_sequence(tmp_path: Path) -> None:
    tokenizer = bare_tokenizer("<|im_end|>", "<unk>")
    tokenizer.pad_token, tokenizer.unk_token = "<|im_end|>", "<unk>"
    model, tokenizer = load_with(tokenizer, tmp_path / "m", vocab_size=300, eos_token_id=[1, 2])
    assert tokenizer.pad_token == "<unk>"  # the model ends turns with the declared one
    check_pad(model, tokenizer)


def test_declared_pad_outside_the_table_is_replaced_and_one_inside_kept(tmp_path: Path) -> None:
    tokenizer = bare_tokenizer("<|reserved_0|>")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # id 259 of a table with 259 rows
    model, tokenizer = load_with(tokenizer, tmp_path / "out", vocab_size=259)
    assert tokenizer.pad_token == "<|reserved_0|>"
    check_pad(model, tokenizer)
    tokenizer = bare_tokenizer("<|reserved_0|>")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model, tokenizer = load_with(tokenizer, tmp_path / "in", vocab_size=300)
    assert tokenizer.pad_token == "[PAD]"
    check_pad(model, tokenizer)


# --- LoRA


def test_lora_defaults_and_attributes(folder: str) -> None:
    base, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=77, use_gradient_checkpointing=False)
    model = FastLanguageModel.get_peft_model(base)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.bias, config.task_type) == (16, 16, "none", "CAUSAL_LM")
    assert config.target_modules == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 7 * 2 and all("lora_" in n and p.dtype == torch.float32 for n, p in trainable.items())
    assert model.max_seq_length == 77 and model._fastlm_checkpointing is False
    assert fastlm.report(model).fused == fastlm.report(base).fused
    assert FastLanguageModel.get_peft_model(model) is model
    with pytest.raises(ValueError, match="has an adapter already, with r 16"):
        FastLanguageModel.get_peft_model(model, r=8)


def test_checkpointing_of_get_peft_model_wins(folder: str) -> None:
    for given, expected in (
        ("unsloth", "fastlm"),
        ("fastlm", "fastlm"),
        (True, True),
        ("offload", "offload"),
    ):
        base, _ = FastLanguageModel.from_pretrained(folder, use_gradient_checkpointing=False)
        model = FastLanguageModel.get_peft_model(base, r=2, use_gradient_checkpointing=given)
        assert model._fastlm_checkpointing == expected and type(model._fastlm_checkpointing) is type(expected)
    with pytest.raises(ValueError, match="use_gradient_checkpointing='none'"):
        FastLanguageModel.get_peft_model(base, use_gradient_checkpointing="none")


def test_adapters_are_seeded_apart_from_the_global_generator(folder: str) -> None:
    def adapters(**keywords: Any) -> list[torch.Tensor]:
        base, _ = FastLanguageModel.from_pretrained(folder)
        before = torch.get_rng_state()
        model = FastLanguageModel.get_peft_model(base, r=4, **keywords)
        assert torch.equal(torch.get_rng_state(), before)
        return [p.detach() for name, p in model.named_parameters() if "lora_A" in name]

    first = adapters()
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, adapters(), strict=True))
    assert not torch.equal(first[0], adapters(random_state=1)[0])


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"r": 0}, "r is 0"),
        ({"r": -1}, "r is -1"),
        ({"r": 2.5}, "r is 2.5"),
        ({"target_modules": ["q_prj"]}, "'q_prj' \\(the nearest is 'q_proj'\\); there are down_proj"),
        ({"target_modules": ["q_proj", "qkv_proj"]}, "no module is called 'qkv_proj'"),
        ({"target_modules": r".*\.nothing"}, "matches no module"),
        ({"target_modules": ["lm_head"]}, "modules_to_save=\\['lm_head'\\]"),
        ({"target_modules": ["q_proj", "lm_head"]}, "would not train"),
        ({"modules_to_save": ["lm_haed"]}, "nearest is 'lm_head'"),
    ],
)
def test_bad_lora_options_say_what_is_wrong(folder: str, keywords: dict[str, Any], message: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.get_peft_model(model, **keywords)
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("named", [False, True])
def test_packed_projections_are_mapped(named: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, _ = FastLanguageModel.from_pretrained(save(tmp_path / "m", "phi3"))
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(model, r=4, **({"target_modules": seven} if named else {}))
    assert model.peft_config["default"].target_modules == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert "q_proj -> qkv_proj" in capsys.readouterr().out


@pytest.mark.parametrize("targets", ["all-linear", r".*layers\.1\.self_attn\.(q|v)_proj"])
def test_targets_as_text(targets: str, folder: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=targets)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == (14 if targets == "all-linear" else 2)


def test_fused_experts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Frozen unless named; named where PEFT cannot adapt them, an error."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    path = save(tmp_path / "qwen", "qwen3_moe", **experts)
    model = FastLanguageModel.get_peft_model(FastLanguageModel.from_pretrained(path)[0], r=2)
    assert model.peft_config["default"].target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "experts stay frozen" in capsys.readouterr().out
    model = FastLanguageModel.get_peft_model(
        FastLanguageModel.from_pretrained(path)[0], r=2, target_modules=["q_proj", "gate_proj", "up_proj"]
    )
    assert any("experts.lora_A" in name for name, _ in model.named_parameters())
    path = save(tmp_path / "mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    model, _ = FastLanguageModel.from_pretrained(path)
    with pytest.raises(ValueError, match="PEFT added no adapter for 'gate_proj'"):
        FastLanguageModel.get_peft_model(model, target_modules=["q_proj", "gate_proj"])


def test_rslora_and_dora_reach_peft(folder: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, use_rslora=True, use_dora=True)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == 4.0 and "default" in layer.lora_magnitude_vector


@pytest.mark.parametrize("targets", [["embed_tokens"], ["q_proj"], ["q_proj", "embed_tokens"]])
@pytest.mark.parametrize("saved", [None, ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("tied", [False, True])
def test_d_head_target_dead(tmp_path: Path, targets: list[str], saved: list[str] | None, tied: bool) -> None:
    """Whatever is reported trainable has a gradient in the first step and has moved after the third."""
    if saved and set(targets) & set(saved):
        pytest.skip("one module cannot be adapted and trained whole")
    model, _ = FastLanguageModel.from_pretrained(save(tmp_path / "m", tie_word_embeddings=tied))
    if tied and saved and "embed_tokens" in targets:
        with pytest.raises(ValueError, match="are one table"):
            FastLanguageModel.get_peft_model(model, r=4, target_modules=targets, modules_to_save=saved)
        return
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=targets, modules_to_save=saved)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trainable.items()}
    optimiser = torch.optim.SGD(trainable.values(), lr=0.5)
    model.train()
    for step in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        if step == 0:  # the factor that does not start at zero waits for the other
            dead = [name for name, p in trainable.items() if p.grad is None or not p.grad.any()]
            assert all("lora_A" in name or "lora_embedding_B" in name for name in dead), dead
        optimiser.step()
        optimiser.zero_grad()
    assert [name for name, p in trainable.items() if torch.equal(p, before[name])] == []


def test_adapters_left_in_the_base_are_named(folder: str) -> None:
    base, _ = FastLanguageModel.from_pretrained(folder)
    FastLanguageModel.get_peft_model(base, layers_to_transform=[0])
    with pytest.raises(ValueError, match="adapters are in this model already"):
        FastLanguageModel.get_peft_model(base)


def test_adapter_folder_is_loaded_trainable_on_its_base(folder: str, tmp_path: Path) -> None:
    base, _ = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(base, r=4)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", max_seq_length=99)
    assert isinstance(again, PeftModel) and fastlm.report(again).fused and again.max_seq_length == 99
    assert torch.equal(logits(again), expected)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == {
        name for name, p in model.named_parameters() if p.requires_grad
    }
    assert FastLanguageModel.get_peft_model(again, r=4) is again
    with pytest.raises(ValueError, match="is an adapter; full_finetuning"):
        FastLanguageModel.from_pretrained(tmp_path / "adapter", full_finetuning=True)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(FileNotFoundError, match="adapter has no weights"):
        FastLanguageModel.from_pretrained(tmp_path / "adapter")
    (tmp_path / "weights").rename(tmp_path / "adapter" / "adapter_model.safetensors")
    Path(folder).rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"no model at .*model, the base of the adapter"):
        FastLanguageModel.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]])
def test_adapter_on_a_table_that_the_user_grew(saved: list[str] | None, folder: str, tmp_path: Path) -> None:
    base, tokenizer = FastLanguageModel.from_pretrained(folder)
    tokenizer.add_tokens([f"<new {i}>" for i in range(60)])
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model = FastLanguageModel.get_peft_model(base, r=4, modules_to_save=saved)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter")
    assert again.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert torch.equal(logits(again), logits(model))


def test_adapter_with_a_grown_vocabulary_loads_again(tmp_path: Path) -> None:
    tokenizer = bare_tokenizer()
    model, tokenizer = load_with(tokenizer, tmp_path / "m", vocab_size=258)
    model = FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["embed_tokens"])
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, tokenizer_again = FastLanguageModel.from_pretrained(tmp_path / "adapter")
    assert tokenizer_again.pad_token == "<|pad|>" and torch.equal(logits(again), logits(model))


# --- on a GPU


@pytest.mark.gpu
def test_gpu_defaults_to_4bit_and_one_dtype(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = save(tmp_path / "m")
    model, tokenizer = FastLanguageModel.from_pretrained(path)
    dtype = torch.bfloat16 if is_bfloat16_supported() else torch.float16
    assert f"{str(dtype).removeprefix('torch.')}, 4-bit, cuda:" in capsys.readouterr().out
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {dtype}
    before = torch.cuda.get_rng_state()
    model = FastLanguageModel.get_peft_model(model, r=4)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    randomise(model)
    ids = IDS.to(model.device)
    live = logits(model, ids)
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", device_map={"": model.device})
    assert merged.dtype == dtype
    truth = logits(merged.float(), ids)
    assert relative_error(live, truth) < 0.03
    whole, _ = FastLanguageModel.from_pretrained(path, full_finetuning=True)
    assert whole.dtype == (dtype if dtype == torch.bfloat16 else torch.float32)
    assert FastLanguageModel.from_pretrained(path, device_map="cpu")[0].dtype == torch.float32


# --- switches and copies


def test_inference_and_training_switch_back_and_forth(folder: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4)
    core = model.get_base_model()
    core.gradient_checkpointing_enable()
    core.config.use_cache = False
    model.train()
    assert FastLanguageModel.for_inference(model) is model
    FastLanguageModel.for_inference(model)  # twice is once
    assert not model.training and core.config.use_cache and not core.is_gradient_checkpointing
    assert FastLanguageModel.for_training(model) is model
    assert model.training and core.config.use_cache is False and core.is_gradient_checkpointing


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_save_pretrained_merged_belongs_to_the_copy(make: Any, folder: str, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    twin = make(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2.0)
    twin.save_pretrained_merged(tmp_path / "twin", tokenizer)
    model.save_pretrained_merged(tmp_path / "own", tokenizer)
    saved = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("twin", "own")}
    assert torch.equal(saved["own"].model.norm.weight, model.model.norm.weight)
    assert torch.equal(saved["twin"].model.norm.weight, model.model.norm.weight * 2.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "twin").pad_token == "<pad>"
