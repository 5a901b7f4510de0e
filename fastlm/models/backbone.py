"""Sample boundaries on their way into the backbone, and whether a model can honour them at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import forms
from .checkpointing import choose
from .fingerprint import fingerprint
from .head import boundaries_from, boundaries_on
from .layers import Switch
from .offload import Offload
from .padding import PaddedLayout, call_inputs, call_layout, flatten_call

__all__ = ["ModelPatch", "boundary_obstacle", "prepare_backbone", "restore_rows", "stock_class"]

_PADDED = "_fastlm_padded"  # on the backbone, the layout of the call that is running


def stock_class(module: nn.Module) -> type:
    """The module's class as its library wrote it: FSDP2 puts a subclass of its own in front."""
    module_class = type(module)
    return module_class.__mro__[2] if module_class.__name__.startswith("FSDP") else module_class


@dataclass(eq=False)
class ModelPatch:
    """What patching left on the causal LM (or headless model), as ``model._fastlm_model``."""

    switch: Switch
    report: Any  # PatchReport
    limits: dict[str, int] = field(default_factory=dict)  # rope type -> longest sample that it rotates independently
    offload: Offload = field(default_factory=Offload)


def boundary_obstacle(core: PreTrainedModel, stock: dict[str, str]) -> tuple[str | None, dict[str, int]]:
    """Why several samples may not share a row (None where they may), and the longest sample per coupling rope type.

    They may where backbone and decoder layers are known code, whose only mixing of tokens is an attention of ours.
    """
    backbone: Any = core.base_model
    if fingerprint(stock_class(backbone), False) not in forms.BACKBONE:
        return f"unknown backbone code ({type(backbone).__name__})", {}
    for index, layer in enumerate(backbone.layers):
        if fingerprint(stock_class(layer), False) not in forms.DECODER_LAYER:
            return f"unknown decoder layer code ({type(layer).__name__})", {}
        bound = layer.self_attn.__dict__.get("_fastlm")
        if bound is None:
            reasons = [reason for name, reason in stock.items() if name.endswith(f"layers.{index}.self_attn")]
            return f"layer {index} runs stock attention" + (f" ({reasons[0]})" if reasons else ""), {}
    config = core.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits = {}
    for entry in sets:
        rope_type = entry.get("rope_type", "default")
        if rope_type in ("dynamic", "longrope"):
            original = entry.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits[rope_type] = int(original or config.max_position_embeddings)
    return None, limits


def prepare_backbone(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the backbone: sample boundaries in, and no mask built; a known padding taken out.

    transformers returns a 4-D mask unread, so an empty one skips its mask building (and the device sync in it).
    """
    backbone.__dict__.pop(_PADDED, None)  # of a call that failed
    patched: ModelPatch | None = backbone.__dict__.get("_fastlm_backbone")
    if patched is None or not patched.switch.on:
        return None
    choose(getattr(backbone, "layers", ()), patched.offload)
    layout = call_layout(backbone, args, kwargs)
    if layout is not None:
        args, kwargs = (), flatten_call(layout, args, kwargs)
        backbone.__dict__[_PADDED] = layout
    boundaries = boundaries_from(kwargs)
    if boundaries is None:
        kwargs.pop("boundaries", None)
        return args, kwargs
    if patched.report.obstacle is not None:
        raise ValueError(
            f"this batch holds several samples in one row, which this model cannot take: {patched.report.obstacle}. "
            "Use a padding collator."
        )
    for rope_type, limit in patched.limits.items():
        if boundaries.max_length > limit:
            raise ValueError(
                f"a sample of {boundaries.max_length} tokens is past the {limit} up to which {rope_type} rotary "
                "embeddings keep packed samples independent; use a padding collator or shorter samples"
            )
    if kwargs.get("attention_mask") is not None:
        raise ValueError("a batch with sample boundaries has no padding: pass boundaries or attention_mask, not both")
    if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
        raise ValueError("sample boundaries and a key-value cache exclude each other; pass use_cache=False")
    if kwargs.get("output_attentions"):
        raise ValueError("attention weights cannot be returned for packed samples; use a padding collator")
    inputs: Any = call_inputs(args, kwargs)
    if inputs.shape[0] != 1 or inputs.shape[1] != boundaries.token_count:
        raise ValueError(
            f"sample boundaries cover {boundaries.token_count} tokens in one row, but the inputs are "
            f"{tuple(inputs.shape[:2])}"
        )
    kwargs = {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens_", "max_length_"))}
    boundaries = boundaries_on(boundaries, inputs.device)
    kwargs.update(boundaries=boundaries, position_ids=boundaries.position_ids, use_cache=False)
    kwargs["attention_mask"] = torch.empty(1, 1, 0, 0, device=inputs.device)
    kwargs.pop("seq_idx", None)
    return args, kwargs


def restore_rows(backbone: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the backbone: where prepare_backbone took padding out, last_hidden_state is [B, S, H] again."""
    layout: PaddedLayout | None = backbone.__dict__.pop(_PADDED, None)
    if layout is None or "_fastlm_backbone" not in backbone.__dict__:
        return None
    if isinstance(output, tuple):
        return (layout.restore(output[0]), *output[1:])
    output["last_hidden_state"] = layout.restore(output["last_hidden_state"])
    return output
