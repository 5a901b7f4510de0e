"""Loads a Llama-architecture GGUF file as a transformers model: weights dequantised, tokenizer rebuilt.

transformers' own loader (``gguf_file=``) gives the same weights in three times the time, marks the model as
quantised, and lacks the pre-tokenizer that splits digits apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["GGUFCheckpoint", "find_gguf", "load_gguf"]

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")

# llama.cpp's name of a pre-tokenizer -> the same splits in `tokenizers`
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token in tokenizer.ggml.token_type


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that ``path`` means: itself, or the only one in a folder without config.json. Else None.

    Raises ValueError for such a folder with several of them.
    """
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{place} holds several GGUF files ({names}); give the path of one")
    return files[0] if files else None


def load_gguf(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, **model_keywords: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A LlamaForCausalLM with the file's weights dequantised to ``dtype``, and its tokenizer.

    path: a .gguf file of architecture "llama" with a GPT-2 style vocabulary (pre-tokenizers: smollm, gpt-2).
    model_keywords: to transformers' ``from_pretrained``, such as device_map or quantization_config.

    The pad token is the one that the file names, which may be its end of sequence.

    Raises:
        ImportError: the package gguf is not installed.
        FileNotFoundError: no such file.
        ValueError: another architecture, vocabulary, pre-tokenizer or an unknown tensor.
    """
    checkpoint = GGUFCheckpoint(path)
    return checkpoint.model(dtype=dtype, **model_keywords), checkpoint.tokenizer()


class GGUFCheckpoint:
    """A GGUF file, read once. ``config``: its LlamaConfig, which may be changed before ``model`` is called.

    Errors as in ``load_gguf``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._reader = _reader(path)
        self.config = _config(self._reader, path)

    def model(self, *, dtype: torch.dtype = torch.float32, **model_keywords: Any) -> PreTrainedModel:
        """The model, dequantised to ``dtype``, or quantised anew where a quantization_config is given."""
        state = _state_dict(self._reader, self.config)
        model = LlamaForCausalLM.from_pretrained(
            None, config=self.config, state_dict=state, dtype=dtype, **model_keywords
        )
        model.name_or_path = model.config.name_or_path = self.path
        return model

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, rebuilt from the file's metadata."""
        return _tokenizer(self._reader, self.path)


def _reader(path: str | os.PathLike[str]) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no GGUF file {os.fspath(path)}")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {path} needs the package gguf: pip install 'fastlm[gguf]'") from error
    return GGUFReader(path)


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _config(reader: Any, path: Any) -> LlamaConfig:
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{path} is of architecture {architecture!r}; only llama is read from GGUF. Load the model's "
            "original checkpoint instead"
        )

    def fact(name: str, default: Any = None) -> Any:
        value = _value(reader, f"llama.{name}", default)
        if value is None:
            raise ValueError(f"{path} lacks the metadata llama.{name}")
        return value

    width, heads = fact("embedding_length"), fact("attention.head_count")
    head_dim = fact("attention.key_length", width // heads)
    if fact("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path} rotates a part of each head only, which the Llama architecture does not")
    if _value(reader, "llama.rope.scaling.type", "none") != "none" or _value(reader, "llama.expert_count", 0):
        raise ValueError(f"{path} has scaled rotary embeddings or experts; load the original checkpoint instead")
    names = {tensor.name for tensor in reader.tensors}
    tokens = {name: _value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    return LlamaConfig(
        vocab_size=len(_value(reader, "tokenizer.ggml.tokens", ())) or fact("vocab_size"),
        hidden_size=width,
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=fact("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fact("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fact("context_length"),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": float(fact("rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        bos_token_id=tokens["bos"],
        eos_token_id=tokens["eos"],
        pad_token_id=tokens["padding"],
        architectures=["LlamaForCausalLM"],
    )


def _state_dict(reader: Any, config: LlamaConfig) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or 0}
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        block = _BLOCK_TENSOR.match(tensor.name)
        part = block[2] if block else tensor.name
        if part not in _TENSORS:
            raise ValueError(f"unknown GGUF tensor {tensor.name}; the model is not a plain Llama")
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = _unpermute(values, heads[part])
        name = f"model.layers.{block[1]}.{_TENSORS[part]}.{block[3]}" if block else _TENSORS[part]
        state[name] = torch.from_numpy(np.require(values, np.float32, ("C", "W")))
    return state


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows that rotate together: side by side in llama.cpp, [pair, 2]; half a head apart here, [2, pair]."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _tokenizer(reader: Any, path: Any) -> PreTrainedTokenizerFast:
    kind = _value(reader, "tokenizer.ggml.model")
    splits = _value(reader, "tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or splits not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path} has a vocabulary of kind {kind!r} with pre-tokenizer {splits!r}; read from GGUF are gpt2"
            f" with {', '.join(_PRE_TOKENIZERS)}. Load the model's original checkpoint instead"
        )
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges", ())]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = _PRE_TOKENIZERS[splits]()
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    core.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in added])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: _value(reader, f"tokenizer.ggml.{name}_token_id") for role, name in named.items()}
    special: dict[str, Any] = {f"{role}_token": tokens[number] for role, number in ids.items() if number is not None}
    if _value(reader, "tokenizer.ggml.add_bos_token", False):
        core.post_processor = processors.TemplateProcessing(
            single=f"{special['bos_token']} $A",
            pair=f"{special['bos_token']} $A {special['bos_token']} $B",
            special_tokens=[(special["bos_token"], ids["bos"])],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = _value(reader, "tokenizer.chat_template")
    return tokenizer
