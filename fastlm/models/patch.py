"""Patches one model, instance by instance; says what it did; puts everything back.

``patch`` walks the modules of a causal LM or a headless model, recognises each layer's stock forward by fingerprint,
binds ours on the instance, and hangs one pre-hook on the backbone that turns a batch's sample boundaries into what
attention takes. Classes, registries and other models are never touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.attention import choose_backend
from . import forms
from .adapters import adapter_obstacle, is_adapted
from .fingerprint import fingerprint
from .head import boundaries_from, boundaries_on, head_forward_for, head_obstacle
from .layers import LayerPatch, Switch, activation_name, attention_features, forward_for

__all__ = [
    "PatchReport", "honours_boundaries", "is_patched", "padding_free_obstacle", "patch", "patched_core", "rebind_head",
    "report", "unpatch",
]  # fmt: skip


@dataclass(frozen=True)
class PatchReport:
    """What runs where in a patched model.

    fused: layer kind -> number of layers that run fastlm's forward; "lora" counts adapted projections.
    stock: layer name -> why it runs its own forward.
    backends: "attention" -> what computes it over sample boundaries, and why.
    obstacle: why sample boundaries cannot be honoured (padding-free and packing are then off); None where they can.
    """

    fused: dict[str, int]
    stock: dict[str, str]
    backends: dict[str, str]
    obstacle: str | None = None

    def __str__(self) -> str:
        rows = [(kind, f"fastlm x {count}") for kind, count in self.fused.items()]
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.stock.items():  # layers that differ only by their number share a line
            reasons.setdefault((re.sub(r"\.\d+\.", ".*.", name), reason), []).append(name)
        rows += [(name, f"stock x {len(names)}: {reason}") for (name, reason), names in reasons.items()]
        rows += list(self.backends.items())
        rows.append(("padding-free", "yes" if self.obstacle is None else f"no: {self.obstacle}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {what}" for name, what in rows)


@dataclass(eq=False)
class _ModelPatch:
    """What patching left on the causal LM (or headless model), as ``model._fastlm_model``."""

    switch: Switch
    report: PatchReport
    limits: dict[str, int] = field(
        default_factory=dict
    )  # rope type -> longest sample that it rotates independently


def patch(model: nn.Module) -> PatchReport:
    """Run fastlm's forwards in this model; returns what is fused and what stays stock.

    Takes a transformers causal LM, a headless model, or either of them inside PEFT's wrappers; before or after LoRA is
    added. Calling it again refreshes the report and patches what has been added. Raises TypeError for anything else,
    and ValueError for a model that FSDP, DDP or torch.compile has wrapped: patch first, wrap then.
    """
    core = _core(model)
    patched: _ModelPatch | None = core.__dict__.get("_fastlm_model")
    switch = patched.switch if patched is not None else Switch()
    switch.on = True
    fused: dict[str, int] = {}
    stock: dict[str, str] = {}
    backends: dict[str, str] = {}
    for name, module in core.named_modules():
        kind, form, reason = _recognise(core, module)
        if kind is None:
            continue
        if reason is None:
            reason = _bind(module, kind, form, switch, backends)
        _note(fused, stock, kind, name or type(module).__name__, reason)
        for child, projection in module.named_children() if kind in ("attention", "mlp") else ():
            if is_adapted(projection):
                why = adapter_obstacle(projection, core.dtype) if reason is None else f"its {kind} runs stock code"
                _note(fused, stock, "lora", f"{name}.{child}", why)
    obstacle, limits = _boundary_obstacle(core, stock)
    result = PatchReport(fused, stock, backends, obstacle)
    core._fastlm_model = _ModelPatch(switch, result, limits)  # type: ignore[assignment]
    backbone = core.base_model
    backbone._fastlm_backbone = core.__dict__["_fastlm_model"]
    if _prepare_backbone not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_prepare_backbone, with_kwargs=True)
    return result


def _note(fused: dict[str, int], stock: dict[str, str], kind: str, name: str, reason: str | None) -> None:
    if reason is None:
        fused[kind] = fused.get(kind, 0) + 1
    else:
        stock[name] = reason


def unpatch(model: nn.Module) -> None:
    """Put every stock forward back. A model that is not patched is left as it is."""
    core = _core(model, wrapped_is_fine=True)
    patched: _ModelPatch | None = core.__dict__.get("_fastlm_model")
    if patched is None:
        return
    patched.switch.on = (
        False  # whoever captured one of our forwards (TRL's fused head does) gets stock from it
    )
    for module in core.modules():
        layer: LayerPatch | None = module.__dict__.pop("_fastlm", None)
        if layer is None:
            continue
        slot = _slot(module)
        if _is_ours(module.__dict__.get(slot)):
            if layer.previous is not None:
                module.__dict__[slot] = layer.previous
            else:
                del module.__dict__[slot]
    backbone = core.base_model
    for key, hook in list(backbone._forward_pre_hooks.items()):
        if hook is _prepare_backbone:
            del backbone._forward_pre_hooks[key]
            backbone._forward_pre_hooks_with_kwargs.pop(key, None)
    backbone.__dict__.pop("_fastlm_backbone", None)
    del core.__dict__["_fastlm_model"]


def report(model: nn.Module) -> PatchReport:
    """What runs where in a patched model, as it was when patch last looked. ValueError if it is not patched."""
    core = patched_core(model)
    if core is None:
        raise ValueError(
            "this model is not patched; call fastlm.patch(model) or load it with FastLanguageModel"
        )
    return core.__dict__["_fastlm_model"].report


def patched_core(model: Any) -> PreTrainedModel | None:
    """The patched transformers model inside PEFT's wrappers, or None where there is none."""
    core = _unwrap_peft(model)
    patched = core.__dict__.get("_fastlm_model") if isinstance(core, PreTrainedModel) else None
    return core if patched is not None and patched.switch.on else None


def is_patched(model: Any) -> bool:
    """Whether fastlm's forwards run in this model (PEFT's wrappers are looked through)."""
    return patched_core(model) is not None


def padding_free_obstacle(model: Any, max_length: int | None = None) -> str | None:
    """Why this model cannot take several samples in one row, or None where it can.

    max_length: longest sample in tokens; rotary embeddings that change with the longest position of a batch couple
    its samples past a limit.
    """
    core = patched_core(model)
    if core is None:
        return "the model is not patched by fastlm"
    patched: _ModelPatch = core.__dict__["_fastlm_model"]
    if patched.report.obstacle is not None:
        return patched.report.obstacle
    for rope_type, limit in patched.limits.items():
        if max_length is not None and max_length > limit:
            return (
                f"{rope_type} rotary embeddings couple the samples of a batch past {limit} tokens "
                f"(max_length is {max_length})"
            )
    return None


def honours_boundaries(model: Any) -> bool:
    """Whether the model takes several samples in one row without letting one see another."""
    return padding_free_obstacle(model) is None


def rebind_head(model: nn.Module) -> None:
    """Make our causal-LM forward the outermost again, over one that a trainer has bound since."""
    core = patched_core(model)
    if core is None:
        raise ValueError("this model is not patched; call fastlm.patch(model) first")
    layer: LayerPatch | None = core.__dict__.get("_fastlm")
    if layer is None or layer.kind != "head":
        return
    slot = _slot(core)
    if not _is_ours(core.__dict__.get(slot)):
        layer.previous = core.__dict__.get(slot)
        core.__dict__[slot] = MethodType(head_forward_for(_stock_class(core)), core)


def _core(model: Any, wrapped_is_fine: bool = False) -> PreTrainedModel:
    names = {cls.__name__ for cls in type(model).__mro__}
    if not wrapped_is_fine:
        for wrapper, what in (
            ("DistributedDataParallel", "DDP"), ("FullyShardedDataParallel", "FSDP"), ("FSDPModule", "FSDP2"),
            ("OptimizedModule", "torch.compile"), ("DataParallel", "DataParallel"),
        ):  # fmt: skip
            if wrapper in names:
                raise ValueError(
                    f"the model is already wrapped by {what}; call fastlm.patch before wrapping it"
                )
    core = _unwrap_peft(
        getattr(model, "_orig_mod", getattr(model, "module", model)) if wrapped_is_fine else model
    )
    if not isinstance(core, PreTrainedModel):
        raise TypeError(
            f"fastlm patches transformers models and PEFT models around them, not {type(model).__name__}"
        )
    return core


def _unwrap_peft(model: Any) -> Any:
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None and hasattr(model, "peft_config") else model


_LOOKS_LIKE = {
    "norm": re.compile(r"Norm$"),
    "mlp": re.compile(r"(MLP|Mlp|FeedForward|Experts|MoeBlock)$"),
    "attention": re.compile(r"(Attention|DeltaNet|Mixer|ShortConv)$"),
}


def _recognise(core: PreTrainedModel, module: nn.Module) -> tuple[str | None, Any, str | None]:
    """(kind, form, reason to stay stock) of a module; kind None where it is nothing that fastlm replaces."""
    if module is core and core.can_generate() and core.get_output_embeddings() is not None:
        known = fingerprint(_stock_class(module), False) in forms.HEAD
        return "head", None, None if known else "unknown causal-LM forward"
    module_class = _stock_class(module)
    if module_class.__module__.startswith(("torch.", "peft.", "bitsandbytes.")):
        return None, None, None
    for kind, pattern in _LOOKS_LIKE.items():
        if pattern.search(module_class.__name__):
            hashed = fingerprint(module_class)
            table: Any = {"norm": forms.NORM, "mlp": forms.MLP, "attention": forms.ATTENTION}[kind]
            if hashed is None:
                return kind, None, "its source cannot be read"
            form = table.get(hashed)
            return (
                kind,
                form,
                None if form is not None else f"unknown {kind} code ({module_class.__name__} {hashed})",
            )
    return None, None, None


def _stock_class(module: nn.Module) -> type:
    """The module's class as its library wrote it: FSDP2 puts a subclass of its own in front."""
    module_class = type(module)
    return module_class.__mro__[2] if module_class.__name__.startswith("FSDP") else module_class


def _bind(module: Any, kind: str, form: Any, switch: Switch, backends: dict[str, str]) -> str | None:
    """Bind our forward on the instance, or return why not. Instance facts that the kernels do not cover stay stock."""
    slot = _slot(module)
    existing = module.__dict__.get(slot)
    if existing is not None and getattr(existing, "__func__", None) is type(module).forward:
        existing = None  # what unpickling a patched model leaves
    ours = _is_ours(existing)
    if existing is not None and not ours and kind != "head":
        return "its forward was already replaced by something else"
    layer = LayerPatch(kind, form, switch)
    if kind == "mlp":
        layer.activation = activation_name(getattr(module, form.activation))
        if layer.activation is None:
            return f"activation {type(getattr(module, form.activation)).__name__} has no kernel"
    elif kind == "attention":
        reason = _attention_obstacle(module, form, backends)
        if reason is not None:
            return reason
    elif kind == "head":
        reason = head_obstacle(module)
        if reason is not None:
            return reason
    if ours:
        layer.previous = module.__dict__["_fastlm"].previous
    elif existing is not None:
        layer.previous = existing
    function = (
        head_forward_for(_stock_class(module)) if kind == "head" else forward_for(kind, _stock_class(module))
    )
    module.__dict__[slot] = MethodType(function, module)
    module._fastlm = layer
    return None


def _attention_obstacle(module: Any, form: forms.AttentionForm, backends: dict[str, str]) -> str | None:
    if getattr(module, "attention_dropout", 0.0):
        return f"attention dropout {module.attention_dropout} is not fused"
    if not getattr(module, "is_causal", True):
        return "attention is bidirectional"
    features = attention_features(module, form)
    weight = module.o_proj.weight
    device = weight.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype = weight.dtype if weight.is_floating_point() else module.config.dtype or torch.bfloat16
    backend = choose_backend(device.type, capability, dtype, module.head_dim, sinks=False, **features)
    described = ", ".join(f"{name} {value}" for name, value in features.items() if value)
    key = "attention" + (f" ({described})" if described else "")
    backends[key] = backend
    return None


def _boundary_obstacle(core: PreTrainedModel, stock: dict[str, str]) -> tuple[str | None, dict[str, int]]:
    """Why several samples may not share a row (None where they may), and the longest sample per coupling rope type.

    They may where backbone and decoder layers are known code, whose only mixing of tokens is an attention of ours.
    """
    backbone: Any = core.base_model
    if fingerprint(_stock_class(backbone), False) not in forms.BACKBONE:
        return f"unknown backbone code ({type(backbone).__name__})", {}
    for index, layer in enumerate(backbone.layers):
        if fingerprint(_stock_class(layer), False) not in forms.DECODER_LAYER:
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


def _slot(module: nn.Module) -> str:
    """Where a forward is replaced: accelerate's hooks keep the one that they wrap in _old_forward."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _is_ours(bound: Any) -> bool:
    function = getattr(bound, "__func__", None)
    return function is not None and function.__code__.co_filename.startswith(_FOLDER)


_FOLDER = __file__.rpartition("/")[0]


def _prepare_backbone(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the backbone: sample boundaries in, and no mask built.

    transformers returns a 4-D mask unread, so an empty one skips its mask building (and the device sync in it).
    """
    patched: _ModelPatch | None = backbone.__dict__.get("_fastlm_backbone")
    if patched is None or not patched.switch.on:
        return None
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
        raise ValueError(
            "a batch with sample boundaries has no padding: pass boundaries or attention_mask, not both"
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
        raise ValueError("sample boundaries and a key-value cache exclude each other; pass use_cache=False")
    if kwargs.get("output_attentions"):
        raise ValueError("attention weights cannot be returned for packed samples; use a padding collator")
    inputs = next(
        value for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if value is not None
    )
    if inputs.shape[0] != 1 or inputs.shape[1] != boundaries.token_count:
        raise ValueError(
            f"sample boundaries cover {boundaries.token_count} tokens in one row, but the inputs are "
            f"{tuple(inputs.shape[:2])}"
        )
    kwargs = {
        name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens_", "max_length_"))
    }
    boundaries = boundaries_on(boundaries, inputs.device)
    kwargs.update(boundaries=boundaries, position_ids=boundaries.position_ids, use_cache=False)
    kwargs["attention_mask"] = torch.empty(1, 1, 0, 0, device=inputs.device)
    kwargs.pop("seq_idx", None)
    return args, kwargs
