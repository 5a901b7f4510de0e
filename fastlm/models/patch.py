"""Patches one model, instance by instance; says what it did; puts everything back.

``patch`` walks the modules of a causal LM or a headless model, recognises each layer's stock forward by fingerprint,
binds ours on the instance, and hangs two hooks on the backbone: one turns a batch's sample boundaries into what
attention takes, the other puts back the padding that was taken out. Classes, registries and other models are never
touched.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.attention import BACKENDS, backend_refusal, choose_backend
from . import forms
from .adapters import adapter_limits, autocast_dtype, is_adapted, is_class_forward, is_ours
from .backbone import ModelPatch, boundary_obstacle, prepare_backbone, restore_rows, stock_class
from .checkpointing import restore
from .fingerprint import fingerprint
from .graphs import LayerGraphs
from .head import head_forward_for, head_obstacle
from .layers import (
    LayerPatch,
    Switch,
    activation_name,
    attention_features,
    forward_for,
    mlp_obstacle,
    projection_groups,
)
from .offload import Offload

__all__ = [
    "PatchReport", "attention_backends", "decoder_layers", "is_patched", "offloads", "padding_free_obstacle", "patch",
    "patched_core", "rebind_head", "report", "unpatch", "unwrap_peft",
]  # fmt: skip


@dataclass(frozen=True)
class PatchReport:
    """What runs where in a patched model.

    fused: layer kind -> number of layers that run fastlm's forward; "lora" counts adapted projections.
    stock: layer name -> why it runs its own forward.
    backends: "attention" -> what computes it over sample boundaries, and why.
    obstacle: why sample boundaries cannot be honoured (padding-free and packing are then off); None where they can.
    conditions: name of an adapted projection or MLP that counts as fused -> when, or how far. Float32 adapters over a
        16-bit base are fused under autocast only, as SFTTrainer runs with bf16=True or fp16=True; without it PEFT's own
        forward runs.
    """

    fused: dict[str, int]
    stock: dict[str, str]
    backends: dict[str, str]
    obstacle: str | None = None
    conditions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(kind, f"fastlm x {count}") for kind, count in self.fused.items()]
        rows += [("of these", f"{count} {when}") for when, count in Counter(self.conditions.values()).items()]
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.stock.items():  # layers that differ only by their number share a line
            reasons.setdefault((re.sub(r"\.\d+\.", ".*.", name), reason), []).append(name)
        rows += [(name, f"stock x {len(names)}: {reason}") for (name, reason), names in reasons.items()]
        rows += list(self.backends.items())
        rows.append(("padding-free", "yes" if self.obstacle is None else f"no: {self.obstacle}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {what}" for name, what in rows)


def patch(model: nn.Module, *, attention_backend: str | None = None) -> PatchReport:
    """Run fastlm's forwards in this model; returns what is fused and what stays stock.

    Takes a transformers causal LM, a headless model, or either of them inside PEFT's wrappers; before or after LoRA is
    added. Calling it again refreshes the report and patches what has been added. Raises TypeError for anything else,
    and ValueError for a model that FSDP, DDP or torch.compile has wrapped: patch first, wrap then.

    attention_backend: what computes attention over packed and padding-free batches (kernels/attention.py lists them);
        None: what an earlier call chose (unpatch forgets it), at first the fastest that can. Padded batches and
        generation go by the model's attn_implementation. ValueError, and nothing patched, for one that is unknown,
        cannot run here, cannot honour the model's window or softcap, or would never be used.
    """
    core = _core(model)
    backends: dict[str, str] = {}
    found = []
    for name, module in core.named_modules():
        kind, form, reason = _recognise(core, module)
        if kind == "attention" and reason is None and (reason := _attention_obstacle(module)) is None:
            wanted = attention_backend
            if wanted is None:
                wanted = getattr(module.__dict__.get("_fastlm"), "backend", None)
            features = attention_features(module, form)
            described = ", ".join(f"{what} {value}" for what, value in features.items() if value)
            backends["attention" + (f" ({described})" if described else "")] = attention_backends(
                module.o_proj.weight.device, core.dtype, module.head_dim, wanted, **features
            )
        if kind is not None:
            found.append((name, module, kind, form, reason))
    patched: ModelPatch | None = core.__dict__.get("_fastlm_model")
    switch = patched.switch if patched is not None else Switch()
    switch.on = True
    offload = patched.offload if patched is not None else Offload()
    offload.on = offloads(core)
    fused: dict[str, int] = {}
    stock: dict[str, str] = {}
    conditions: dict[str, str] = {}
    for name, module, kind, form, reason in found:
        if reason is None:
            reason = _bind(module, kind, form, switch, attention_backend)
        if reason is None and kind == "mlp":
            reason = mlp_obstacle(module, form)  # bound all the same: hooks come and go
        _note(fused, stock, kind, name or type(module).__name__, reason)
        if kind in ("attention", "mlp"):
            adapted = [child for child, projection in module.named_children() if is_adapted(projection)]
            if reason is not None:
                stock |= {f"{name}.{child}": f"its {kind} runs stock code" for child in adapted}
            elif adapted:
                groups = projection_groups(form)
                unfused, when = adapter_limits(module, groups, core.dtype)
                unfused |= {child: "no projection" for child in adapted if child not in sum(map(tuple, groups), ())}
                if count := len(adapted) - len(unfused):
                    fused["lora"] = fused.get("lora", 0) + count
                stock |= {f"{name}.{child}": why for child, why in unfused.items()}
                conditions |= {f"{name}.{child}".rstrip("."): how for child, how in when.items()}
    obstacle, limits = boundary_obstacle(core, stock)
    result = PatchReport(fused, stock, backends, obstacle, conditions)
    core._fastlm_model = ModelPatch(switch, result, limits, offload)  # type: ignore[assignment]
    backbone = core.base_model
    backbone._fastlm_backbone = core.__dict__["_fastlm_model"]
    if prepare_backbone not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(prepare_backbone, with_kwargs=True)
        backbone.register_forward_hook(restore_rows, prepend=True)  # before hooks that expect [B, S]
    if attention_backend is not None and obstacle is not None:
        if patched is None:
            unpatch(core)
        raise ValueError(f"attention_backend={attention_backend!r} would not be used in this model: {obstacle}")
    return result


def _note(fused: dict[str, int], stock: dict[str, str], kind: str, name: str, reason: str | None) -> None:
    if reason is None:
        fused[kind] = fused.get(kind, 0) + 1
    else:
        stock[name] = reason


def unpatch(model: nn.Module) -> None:
    """Put every stock forward back. A model that is not patched is left as it is."""
    core = _core(model, wrapped_is_fine=True)
    patched: ModelPatch | None = core.__dict__.get("_fastlm_model")
    if patched is None:
        return
    patched.switch.on = False  # whoever captured one of our forwards (TRL's fused head does) gets stock from it
    for module in core.modules():
        layer: LayerPatch | None = module.__dict__.pop("_fastlm", None)
        if layer is None:
            continue
        restore(module)
        slot = _slot(module)
        if is_ours(module.__dict__.get(slot)):
            if layer.previous is not None and not layer.above_hook:
                module.__dict__[slot] = layer.previous
            elif slot == "forward":
                del module.__dict__[slot]
            else:  # accelerate's hook calls it
                module.__dict__[slot] = MethodType(type(module).forward, module)
            if layer.above_hook:
                module.__dict__["forward"] = layer.previous
    backbone = core.base_model
    LayerGraphs.unbind(backbone)
    for key, hook in list(backbone._forward_pre_hooks.items()):
        if hook is prepare_backbone:
            del backbone._forward_pre_hooks[key]
            backbone._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(backbone._forward_hooks.items()):
        if hook is restore_rows:
            del backbone._forward_hooks[key]
    backbone.__dict__.pop("_fastlm_backbone", None)
    del core.__dict__["_fastlm_model"]


def report(model: nn.Module) -> PatchReport:
    """What runs where in a patched model, as it was when patch last looked. ValueError if it is not patched."""
    core = patched_core(model)
    if core is None:
        raise ValueError("this model is not patched; call fastlm.patch(model) or load it with FastLanguageModel")
    return core.__dict__["_fastlm_model"].report


def patched_core(model: Any) -> PreTrainedModel | None:
    """The patched transformers model inside PEFT's wrappers, or None where there is none."""
    core = unwrap_peft(model)
    patched = core.__dict__.get("_fastlm_model") if isinstance(core, PreTrainedModel) else None
    return core if patched is not None and patched.switch.on else None


def offloads(core: Any) -> bool:
    """Whether the model's own setting is to hold layer inputs in host memory."""
    return getattr(core, "_fastlm_checkpointing", None) == "offload"


def decoder_layers(core: Any) -> list[Any]:
    """Of a transformers causal LM, or a headless one; none where its layers are held otherwise."""
    return list(getattr(core.base_model, "layers", ()))


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
    patched: ModelPatch = core.__dict__["_fastlm_model"]
    if patched.report.obstacle is not None:
        return patched.report.obstacle
    for rope_type, limit in patched.limits.items():
        if max_length is not None and max_length > limit:
            return (
                f"{rope_type} rotary embeddings couple the samples of a batch past {limit} tokens "
                f"(max_length is {max_length})"
            )
    return None


def rebind_head(model: nn.Module) -> None:
    """Make our causal-LM forward the outermost again, over one that a trainer has bound since."""
    core = patched_core(model)
    if core is None:
        raise ValueError("this model is not patched; call fastlm.patch(model) first")
    layer: LayerPatch | None = core.__dict__.get("_fastlm")
    if layer is None or layer.kind != "head":
        return
    slot, outer = _slot(core), core.__dict__.get("forward")
    if slot != "forward" and hasattr(outer, "__func__") and is_ours(core.__dict__.get(slot)):
        from accelerate.hooks import add_hook_to_module

        layer.previous, layer.above_hook = outer, True  # it has accelerate's hook inside: that goes outermost again
        add_hook_to_module(core, core._hf_hook)
    elif not is_ours(core.__dict__.get(slot)):
        layer.previous = core.__dict__.get(slot)
        core.__dict__[slot] = MethodType(head_forward_for(stock_class(core)), core)


def _core(model: Any, wrapped_is_fine: bool = False) -> PreTrainedModel:
    names = {cls.__name__ for cls in type(model).__mro__}
    if not wrapped_is_fine:
        for wrapper, what in (
            ("DistributedDataParallel", "DDP"), ("FullyShardedDataParallel", "FSDP"), ("FSDPModule", "FSDP2"),
            ("OptimizedModule", "torch.compile"), ("DataParallel", "DataParallel"),
        ):  # fmt: skip
            if wrapper in names:
                raise ValueError(f"the model is already wrapped by {what}; call fastlm.patch before wrapping it")
    core = unwrap_peft(getattr(model, "_orig_mod", getattr(model, "module", model)) if wrapped_is_fine else model)
    if not isinstance(core, PreTrainedModel):
        raise TypeError(f"fastlm patches transformers models and PEFT models around them, not {type(model).__name__}")
    return core


def unwrap_peft(model: Any) -> Any:
    """The model inside PEFT's wrapper, or the model itself."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None and hasattr(model, "peft_config") else model


_LOOKS_LIKE = {
    "layer": re.compile(r"DecoderLayer$"),
    "norm": re.compile(r"Norm$"),
    "mlp": re.compile(r"(MLP|Mlp|FeedForward|Experts|MoeBlock)$"),
    "attention": re.compile(r"(Attention|DeltaNet|Mixer|ShortConv)$"),
}


_TABLES: dict[str, dict[str, Any]] = {
    "layer": forms.DECODER_LAYER, "norm": forms.NORM, "mlp": forms.MLP, "attention": forms.ATTENTION,
}  # fmt: skip


def _recognise(core: PreTrainedModel, module: nn.Module) -> tuple[str | None, Any, str | None]:
    """(kind, form, reason to stay stock) of a module; kind None where it is nothing that fastlm replaces."""
    if module is core and core.can_generate() and core.get_output_embeddings() is not None:
        known = fingerprint(stock_class(module), False) in forms.HEAD
        return "head", None, None if known else "unknown causal-LM forward"
    module_class = stock_class(module)
    if module_class.__module__.startswith(("torch.", "peft.", "bitsandbytes.")):
        return None, None, None
    for kind, pattern in _LOOKS_LIKE.items():
        if pattern.search(module_class.__name__):
            hashed = fingerprint(module_class, kind != "layer")
            if hashed is None:
                return kind, None, "its source cannot be read"
            form = _TABLES[kind].get(hashed)
            unknown = f"unknown {kind} code ({module_class.__name__} {hashed})"
            return kind, form, unknown if form is None else None
    return None, None, None


def _bind(module: Any, kind: str, form: Any, switch: Switch, backend: str | None) -> str | None:
    """Bind our forward on the instance, or return why not. Instance facts that the kernels do not cover stay stock."""
    slot = _slot(module)
    existing = module.__dict__.get(slot)
    if is_class_forward(module, existing):
        existing = None
    ours = is_ours(existing)
    if existing is not None and not ours and kind != "head":
        return "its forward was already replaced by something else"
    if existing is not None and not ours and "_fastlm" in module.__dict__:
        return head_obstacle(module)  # accelerate's autocast or TRL's head around ours: it stays outermost
    before: LayerPatch | None = module.__dict__.get("_fastlm")
    layer = LayerPatch(kind, form, switch, backend or (before.backend if before is not None else None))
    if kind == "layer" and form.drops and (module.resid_attn_dropout.p or module.resid_mlp_dropout.p):
        return "dropout on the residual stream is not fused"
    if kind == "mlp" and activation_name(getattr(module, form.activation)) is None:
        return mlp_obstacle(module, form)
    if kind == "head":
        reason = head_obstacle(module)
        if reason is not None:
            return reason
    if ours and before is not None:
        layer.previous, layer.above_hook = before.previous, before.above_hook
    elif existing is not None:
        layer.previous = existing
    function = head_forward_for(stock_class(module)) if kind == "head" else forward_for(kind, stock_class(module))
    module.__dict__[slot] = MethodType(function, module)
    module._fastlm = layer
    return None


def _attention_obstacle(module: Any) -> str | None:
    if getattr(module, "attention_dropout", 0.0):
        return f"attention dropout {module.attention_dropout} is not fused"
    if not getattr(module, "is_causal", True):
        return "attention is bidirectional"
    return None


def attention_backends(
    device: torch.device, dtype: torch.dtype, head_dim: int, wanted: str | None = None, *, window: int | None = None,
    softcap: float | None = None,
) -> str:  # fmt: skip
    """What computes attention over sample boundaries in a model of this dtype, and why; under autocast too, if else.

    wanted: the only one that may; ValueError where that is unknown or cannot, with autocast or without.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    choices: dict[bool, tuple[str, str]] = {}  # under autocast? -> what, why
    for autocast, computed in (False, dtype), (True, autocast_dtype(dtype, device)):
        case = functools.partial(choose_backend, device.type, capability, computed, head_dim, window=window)
        try:
            short, long = (case(softcap=softcap, backend=wanted, long_samples=long) for long in (False, True))
        except ValueError as error:
            refusal = error
            continue
        passed: dict[str, list[str]] = {}
        for name in BACKENDS[: BACKENDS.index(short)]:
            reason = backend_refusal(name, device.type, capability, computed, head_dim, window=window, softcap=softcap)
            passed.setdefault(reason or "", []).append(name)
        why = "; ".join(f"{', '.join(names)} {reason}" for reason, names in passed.items() if reason)
        chosen = short if short == long else f"{short}, for long samples {long}"
        choices[autocast] = chosen, "asked for" if wanted else why or "the first choice"
    if not choices:
        raise refusal
    if False not in choices:
        return f"{choices[True][0]} under autocast only ({choices[True][1]})"
    (chosen, why), under = choices[False], choices.get(True)
    text = f"{chosen} ({why})"
    return text if under is None or under[0] == chosen else f"{text}; under autocast {under[0]} ({under[1]})"


def _slot(module: nn.Module) -> str:
    """Where a forward is replaced: accelerate's hooks keep the one that they wrap in _old_forward."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"
