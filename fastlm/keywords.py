"""Names that users give: keywords of the loader, projections to adapt.

One that nobody knows is an error that names the nearest known one; nothing is swallowed.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .models.patch import attention_backends

__all__ = [
    "HUB_KEYWORDS", "PROJECTIONS", "check_adapted", "check_attention_backend", "check_checkpointing",
    "check_same_adapter", "lora_keywords", "model_keywords", "nearest", "resolve_saved_modules", "resolve_targets",
    "set_config_keywords", "shares_a_table",
]  # fmt: skip

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PACKED = {name: "qkv_proj" for name in PROJECTIONS[:3]} | {name: "gate_up_proj" for name in PROJECTIONS[4:6]}
_EXPERT_PROJECTIONS = PROJECTIONS[4:]

# where files come from: these go to the configuration and the tokenizer as well as to the model
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "code_revision")
# what transformers' from_pretrained takes out of its **kwargs
_MODEL_KEYWORDS = (
    "attn_implementation", "experts_implementation", "quantization_config", "max_memory", "offload_folder",
    "offload_buffers", "offload_state_dict", "output_loading_info", "subfolder", "variant", "proxies",
    "code_revision", "adapter_kwargs", "generation_config", "distributed_config", "device_mesh", "tp_plan",
    "tp_size", "use_kernels", "allow_all_kernels", "kernel_config", "key_mapping", "low_cpu_mem_usage",
    "tqdm_class", "torch_dtype",
)  # fmt: skip
_NOT_MODEL_KEYWORDS = ("pretrained_model_name_or_path", "model_args", "kwargs", "token", "revision")
_NOT_LORA_KEYWORDS = ("peft_type", "auto_mapping", "peft_version", "task_type")
# keywords of older scripts that mean nothing here
_WITHOUT_EFFECT = (
    "use_exact_model_name", "fix_tokenizer", "max_lora_rank", "disable_log_stats", "gpu_memory_utilization",
    "float8_kv_cache", "fast_inference", "unsloth_vllm_standby", "temporary_location", "max_seq_length",
)  # fmt: skip
_CHECKPOINTING = (True, False, "fastlm", "unsloth", "recompute", "offload")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like ``name`` ("" if none is known)."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)), "")


def model_keywords(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the extra keywords of ``from_pretrained`` into those of transformers' loader and the rest.

    The rest can only be attributes of the configuration (``set_config_keywords``). Keywords of older scripts
    that have no effect are dropped with one line said; ``fast_inference=True`` is a ValueError.
    """
    if keywords.get("fast_inference"):
        raise ValueError("fast_inference=True (generation through vLLM) is not supported; leave it out")
    rest = _without_old(keywords)
    known = {*inspect.signature(PreTrainedModel.from_pretrained).parameters, *_MODEL_KEYWORDS}
    known -= set(_NOT_MODEL_KEYWORDS)
    return {k: v for k, v in rest.items() if k in known}, {k: v for k, v in rest.items() if k not in known}


def set_config_keywords(config: Any, keywords: dict[str, Any], own: Iterable[str]) -> None:
    """Set attributes of a loaded configuration; one that it lacks is a TypeError with the nearest keyword.

    own: the keywords that fastlm's function itself takes, to look for the nearest one in.
    """
    for name, value in keywords.items():
        if not hasattr(config, name) or callable(getattr(config, name)):
            raise _unknown("from_pretrained", name, {*own, *_MODEL_KEYWORDS, *config.to_dict()})
        setattr(config, name, value)


def lora_keywords(keywords: dict[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """The extra keywords of ``get_peft_model`` that are fields of LoraConfig; any other is a TypeError."""
    from peft import LoraConfig

    rest = _without_old(keywords)
    known = {field.name for field in fields(LoraConfig)} - set(_NOT_LORA_KEYWORDS)
    for name in rest:
        if name not in known:
            raise _unknown("get_peft_model", name, {*own, *known})
    return rest


def _unknown(function: str, name: str, known: Iterable[str]) -> TypeError:
    return TypeError(f"{function} takes no keyword {name!r}; the nearest is {nearest(name, known)!r}")


def _without_old(keywords: dict[str, Any]) -> dict[str, Any]:
    old = [name for name in keywords if name in _WITHOUT_EFFECT]
    spoken = [name for name in old if name != "fast_inference"]
    if spoken:
        print(f"fastlm: {', '.join(spoken)} {'has' if len(spoken) == 1 else 'have'} no effect here")
    return {name: value for name, value in keywords.items() if name not in old}


def check_checkpointing(value: Any) -> bool | str:
    """A valid ``use_gradient_checkpointing``, with "unsloth" read as "fastlm"; else a ValueError."""
    if not isinstance(value, bool | str) or value not in _CHECKPOINTING:
        raise ValueError(
            f"use_gradient_checkpointing={value!r} is unknown: pass True or 'fastlm' (pick the cheapest that "
            "fits), False, 'recompute' or 'offload'"
        )
    if isinstance(value, bool):
        return value
    return "fastlm" if value == "unsloth" else str(value)


def check_attention_backend(backend: str, config: Any, dtype: torch.dtype, on_gpu: bool) -> None:
    """ValueError for a backend of attention that is unknown or cannot serve such a model here; reads no weights."""
    heads = getattr(config, "num_attention_heads", None)
    if heads:  # else patch says that the model has nothing to use it
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        softcap = getattr(config, "attn_logit_softcapping", None)
        attention_backends(torch.device("cuda" if on_gpu else "cpu"), dtype, head_dim, backend, softcap=softcap)


def resolve_targets(model: PreTrainedModel, targets: Any) -> list[str] | str:
    """LoRA targets as PEFT takes them, checked against the modules of ``model``.

    targets: PROJECTIONS itself or None (those that the model has), a list of module names or suffixes,
    "all-linear", or a regular expression. Projections that the model keeps packed (phi3: qkv_proj,
    gate_up_proj) are mapped.

    Raises ValueError for a target that no module answers to, and for the output head, which
    ``modules_to_save`` trains instead.
    """
    everything = targets is None or targets is PROJECTIONS
    names = _adaptable(model)
    leaves = sorted({name.rpartition(".")[2] for name in names})
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, name) for name in names):
            raise ValueError(f"target_modules={targets!r} matches no module; there are {', '.join(leaves)}")
        return targets
    wanted = list(PROJECTIONS if everything else targets)
    mapped = {name: _PACKED[name] for name in wanted if name not in leaves and _PACKED.get(name) in leaves}
    if mapped:
        print(f"fastlm: this model packs projections: {', '.join(f'{a} -> {b}' for a, b in mapped.items())}")
    wanted = list(dict.fromkeys(mapped.get(name, name) for name in wanted))
    fused_experts = any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    found = [name for name in wanted if _matches(name, names)]
    if everything and found:
        if fused_experts:
            print("fastlm: experts stay frozen; name gate_proj, up_proj and down_proj to train them too")
        return found
    head = _leaf_of(model, model.get_output_embeddings())
    for name in wanted:
        if head is not None and name.rpartition(".")[2] == head:
            raise ValueError(
                f"LoRA on {head} is not supported: the loss reads its plain weight, so the adapter would not "
                f"train. Train the whole module: modules_to_save=[{head!r}]"
            )
        if name not in found and not (fused_experts and name in _EXPERT_PROJECTIONS):
            raise ValueError(
                f"target_modules: no module is called {name!r} (the nearest is {nearest(name, leaves)!r}); "
                f"there are {', '.join(leaves)}"
            )
    return wanted


def check_adapted(model: nn.Module, targets: list[str] | str) -> None:
    """ValueError where PEFT added no adapter for one of the targets, which would then not train."""
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    experts = any(type(module).__name__ == "ParamWrapper" for module in adapted.values())
    for target in [] if isinstance(targets, str) else targets:
        if not _matches(target, adapted) and not (experts and target in _EXPERT_PROJECTIONS):
            raise ValueError(
                f"PEFT added no adapter for {target!r} of target_modules; leave it out, or name the weights "
                "of fused experts in target_parameters"
            )


def check_same_adapter(model: Any, r: int, lora_alpha: float, target_modules: Any) -> None:
    """ValueError unless the adapter that the model has is the one asked for."""
    config = model.peft_config[model.active_adapter]
    asked: dict[str, Any] = {"r": r, "lora_alpha": lora_alpha}
    if target_modules is not None and target_modules is not PROJECTIONS:
        asked["target_modules"] = target_modules if isinstance(target_modules, str) else set(target_modules)
    differing = {name: new for name, new in asked.items() if getattr(config, name) != new}
    if differing:
        what = ", ".join(f"{name} {getattr(config, name)} (not {new})" for name, new in differing.items())
        raise ValueError(f"this model has an adapter already, with {what}; load its base to add another")
    print("fastlm: the model has this adapter already; it is trained further")


def resolve_saved_modules(model: PreTrainedModel, modules: Any) -> list[str] | None:
    """``modules_to_save`` as a list, each of which names a module; else a ValueError."""
    if not modules:
        return None
    names = [name for name, _ in model.named_modules() if name]
    leaves = {name.rpartition(".")[2] for name in names}
    wanted = [modules] if isinstance(modules, str) else list(modules)
    for name in wanted:
        if not _matches(name, names):
            close = nearest(name, leaves)
            raise ValueError(f"modules_to_save: no module is called {name!r}; the nearest is {close!r}")
    return wanted


def shares_a_table(model: PreTrainedModel, names: Iterable[str] | None) -> bool:
    """Whether one of these module names means the embedding or the head of a model that ties the two."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    tables = [name for name, module in model.named_modules() if module is embedding or module is head]
    return any(_matches(name, tables) for name in names or ())


def _adaptable(model: PreTrainedModel) -> list[str]:
    """Full names of the modules that can carry LoRA: linear layers and embeddings, without the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if module is not head and (isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D")
    ]


def _matches(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _leaf_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((name.rpartition(".")[2] for name, other in model.named_modules() if other is module), None)
