"""Tiny models and a tokenizer for tests: real transformers classes, random weights, no network."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3")
VOCABULARY = 300

_EXTRA: dict[str, dict[str, Any]] = {
    "mistral": dict(sliding_window=6),
    "qwen2": dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": dict(head_dim=16),
    "gemma": dict(head_dim=16, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=6, attn_logit_softcapping=20.0,
                   final_logit_softcapping=10.0),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=6,
                        layer_types=["sliding_attention", "full_attention"]),
    "phi3": dict(sliding_window=None),
    "olmo3": dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
}  # fmt: skip


def tiny_config(family: str, **overrides: Any) -> Any:
    facts: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoConfig.for_model(family, **{**facts, **_EXTRA.get(family, {}), **overrides})


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A stock model whose norm weights are random too (all-ones weights would hide a missing multiplication)."""
    config = tiny_config(family, **overrides)
    implementation = attention or ("eager" if family == "gemma2" else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.data.copy_(torch.randn_like(parameter) * 0.1)
    return model


def enable_checkpointing(model: Any) -> None:
    """Recompute decoder layers, under the name that this transformers has for it; inside PEFT's wrapper too."""
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    getattr(core, "activation_checkpointing_enable", core.gradient_checkpointing_enable)()


def add_lora(model: PreTrainedModel, *, dtype: torch.dtype | None = None, seed: int = 1, **config: Any) -> Any:
    """Wrap with PEFT; A and B are both random, so that no gradient is zero by construction."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    wrapped = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype or parameter.dtype) * 0.05
    return wrapped


def tiny_tokenizer(*, pad: str | None = "<pad>", chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with 260 ids: <pad> <s> </s> <unk> then one per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )
    if chat:
        tokenizer.chat_template = (
            "{% for message in messages %}[{{ message['role'] }}]{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
            "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    return tokenizer


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """‖value - truth‖ / ‖truth‖, in float64; NaN never passes a comparison with ``<``."""
    value, truth = value.detach().double().cpu(), truth.detach().double().cpu()
    return ((value - truth).norm() / truth.norm().clamp_min(1e-30)).item()
