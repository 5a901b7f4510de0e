"""Reads PEFT's wrappers: what `lora_linear` and `lora_mlp` need of a projection, or why it must run unfused.

Everything is read anew at every call: adapters are added, merged, disabled and swapped after patching, and FSDP2
replaces the parameters around each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import output_capturing

from ..kernels.lora import Projection
from ..kernels.nf4 import NF4Weight

__all__ = [
    "CASTS", "adapter_limits", "adapter_ranks", "autocast_dtype", "factors", "fusable", "global_hooks", "has_hooks",
    "is_adapted", "is_class_forward", "is_ours", "runs_hooks",
]  # fmt: skip


CASTS = "_fastlm_casts"  # on an adapted projection while a pass is captured (capture.py): A and B in its dtype


def has_hooks(module: nn.Module, idle: bool = True) -> bool:
    """Whether calling the module would run more than its class's forward, or ours; idle: as for ``runs_hooks``.

    Moving its inputs to the GPU that its layer is on does not count: they are there.
    """
    if "_hf_hook" in module.__dict__:
        return runs_hooks(module, idle) or not _only_places(module)
    own = module.__dict__.get("forward")
    return runs_hooks(module, idle) or (own is not None and not _is_plain_forward(module, own))


def _only_places(module: nn.Module) -> bool:
    """Whether accelerate's hook only does what it does in a model over several GPUs: brings no weights along."""
    hook: Any = module._hf_hook
    inner = module.__dict__.get("_old_forward")
    return _is_plain_forward(module, inner) and not hook.no_grad and all(
        type(one).__module__ == "accelerate.hooks" and type(one).__name__ == "AlignDevicesHook"
        and not one.offload and not one.io_same_device
        for one in getattr(hook, "hooks", (hook,))
    )  # fmt: skip


def _is_plain_forward(module: nn.Module, bound: Any) -> bool:
    return is_ours(bound) or is_class_forward(module, bound)


def is_class_forward(module: nn.Module, bound: Any) -> bool:
    """Whether a forward found on an instance is its class's: unpickling and accelerate, taking a hook off, leave it."""
    return getattr(bound, "__func__", None) is type(module).forward


def runs_hooks(module: nn.Module, idle: bool = True) -> bool:
    """Whether hooks of torch's are registered on this module itself.

    idle: whether those count that do nothing now. transformers leaves hooks on the layers once a call has asked for
    hidden states; they act in calls that ask, but not when such a call's layers are recomputed in backward: what is
    decided anew there has to count them always.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return bool(module._forward_hooks) and (idle or any(map(_acts, module._forward_hooks.values())))


def _acts(hook: Any) -> bool:
    theirs = getattr(hook, "__module__", None) == output_capturing.__name__
    return not theirs or bool(output_capturing._active_collector.get())


def global_hooks() -> bool:
    """Whether hooks are registered on every module there is, those that fusing would skip among them."""
    return bool(_has_any_global_hook())


def is_ours(bound: Any) -> bool:
    """Whether a forward found on an instance is one that patch bound."""
    function = getattr(bound, "__func__", None)
    return function is not None and function.__code__.co_filename.startswith(_FOLDER)


_FOLDER = __file__.rpartition("/")[0]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has wrapped this projection."""
    return type(module).__module__.startswith("peft.tuners.")


def fusable(x: Tensor, modules: Sequence[nn.Module]) -> list[Projection] | None:
    """The projections of these modules if one function can run them all on x and one has an adapter; else None."""
    if torch.compiler.is_compiling():
        return None
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    projections = []
    for module, projection in zip(modules, _verdicts(modules, dtype, autocast, x.dtype), strict=True):
        if isinstance(projection, str) or module.weight.device != x.device:
            return None
        projections.append(projection)
    return projections if any(projection.a is not None for projection in projections) else None


def adapter_limits(
    layer: nn.Module, groups: Sequence[Sequence[str]], dtype: torch.dtype
) -> tuple[dict[str, str], dict[str, str]]:
    """Which adapted projections of a layer in a model of this dtype train by PEFT's own forward, and which at times.

    groups: names of the projections that are fused together or not at all. Returns child -> why it is never fused, and
    child -> "lora under autocast only" or without it; "" -> why a gated MLP does not run as one function.
    """
    modes = [(dtype, False), (autocast_dtype(dtype, next(layer.parameters()).device), True)]
    without, under = [_obstacles(layer, groups, *mode, dtype) for mode in modes]
    never = {child: why for child, why in under.items() if why is not None and without[child] is not None}
    limits = {
        child: f"lora {'under' if why is None else 'without'} autocast only"
        for child, why in under.items()
        if (why is None) != (without[child] is None)
    }
    if ("gate_proj", "up_proj") in groups:  # one function with down_proj, or else two
        whole = [[child for group in groups for child in group]]
        for parts, mode in zip((without, under), modes, strict=True):
            for child, why in _obstacles(layer, whole, *mode, dtype).items():
                if why is not None and parts[child] is None:
                    limits[""] = f"mlp in parts: {why}"
    return never, limits


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In what a model of this dtype computes where a trainer switches autocast on."""
    if dtype != torch.float32:
        return dtype
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def _obstacles(
    layer: nn.Module, groups: Sequence[Sequence[str]], dtype: torch.dtype, autocast: bool, x_dtype: torch.dtype
) -> dict[str, str | None]:
    """Why each adapted projection of a layer trains by PEFT's own forward; None where it is fused.

    The first group reads x_dtype, later ones what products in dtype made.
    """
    obstacles = {}
    for names in groups:
        modules = [getattr(layer, name) for name in names]
        verdicts = dict(zip(names, _verdicts(modules, dtype, autocast, x_dtype, training=True), strict=True))
        faults = {name: found for name, found in verdicts.items() if isinstance(found, str)}
        shared = next((f"{name} cannot be fused: {reason}" for name, reason in faults.items()), None)
        for name, module in zip(names, modules, strict=True):
            if is_adapted(module):
                alone = None if getattr(verdicts[name], "a", None) is not None else "its adapter is merged or disabled"
                obstacles[name] = faults.get(name, shared or alone)
        four_bit = any(type(getattr(m, "base_layer", m)).__name__ == "Linear4bit" for m in modules)
        if not (faults and four_bit and names[0] == "gate_proj"):  # unfused, bitsandbytes gives back x's dtype
            x_dtype = dtype
    return obstacles


def _verdicts(
    modules: Sequence[nn.Module], dtype: torch.dtype, autocast: bool, x_dtype: torch.dtype, training: bool = False
) -> Iterator[Projection | str]:
    """Each module as what a fused function takes, or why it cannot be; with training, as if it were in training."""
    hooked = global_hooks()
    for module in modules:
        if hooked:
            yield "a hook on every module would be skipped"
        else:
            yield _projection(module, dtype, autocast, x_dtype, training or module.training)


_INT8 = "bitsandbytes' int8 product rounds activations too: a dense one would give other numbers"


def _projection(
    module: Any, dtype: torch.dtype, autocast: bool, x_dtype: torch.dtype, training: bool
) -> Projection | str:
    if has_hooks(module):
        return "a hook on it would be skipped"
    base, a, b, scale, casts = module, None, None, 1.0, None
    if is_adapted(module):
        method = type(module).__module__.removeprefix("peft.tuners.").partition(".")[0]
        if method == "lora" and type(module).__name__ == "Linear8bitLt":
            return _INT8
        if method != "lora" or type(module).__name__ not in ("Linear", "Linear4bit"):
            return f"adapter layer of type {method}.{type(module).__name__}"
        base = module.base_layer
        if has_hooks(base):
            return "a hook on its base layer would be skipped"
        if module._disable_adapters:
            if module.merged_adapters:
                return "merged adapters are disabled"
        elif not module.merged_adapters:
            adapter = _adapter(module, dtype, autocast, training)
            if isinstance(adapter, str):
                return adapter
            a, b, scale = adapter
            casts = module.__dict__.get(CASTS)
    weight = _frozen_weight(base, dtype, x_dtype)
    if isinstance(weight, str):
        return weight
    if base.bias is not None and base.bias.requires_grad:
        return "its bias is trained"
    return Projection(weight, base.bias, a, b, scale, casts)


def factors(module: nn.Module, dtype: torch.dtype, autocast: bool) -> tuple[Tensor, Tensor] | None:
    """A and B of the adapter that a fused function would take from this module, if it is a projection with one."""
    found = _projection(module, dtype, autocast, dtype, module.training) if is_adapted(module) else None
    return None if not isinstance(found, Projection) or found.a is None or found.b is None else (found.a, found.b)


def _adapter(module: Any, dtype: torch.dtype, autocast: bool, training: bool) -> tuple[Tensor, Tensor, float] | str:
    active = module.active_adapters
    if len(active) != 1 or active[0] not in module.lora_A:
        return f"{len(active)} active adapters" if len(active) != 1 else f"adapter {active[0]!r} is not in this layer"
    name = active[0]
    if name in module.lora_variant:
        return f"{type(module.lora_variant[name]).__name__} is not plain LoRA"
    down, up, scale, dropout = (getattr(module, part)[name] for part in ("lora_A", "lora_B", "scaling", "lora_dropout"))
    if not isinstance(dropout, nn.Identity) and training and getattr(dropout, "p", 1.0) > 0:
        return "adapter dropout"
    if getattr(module, "fan_in_fan_out", False) or not isinstance(scale, int | float):
        return "transposed weight or trained scale"
    if type(down) is not nn.Linear or type(up) is not nn.Linear or up.bias is not None:
        return "adapter factors with a bias or of another type"
    if has_hooks(down) or has_hooks(up) or has_hooks(dropout):
        return "a hook on its adapter would be skipped"
    a, b = down.weight, up.weight
    if not (_is_plain(a) and _is_plain(b)):
        return "sharded adapter"
    if not autocast and a.dtype != dtype:
        return "PEFT computes in the adapter's dtype without autocast"
    if a.device != module.base_layer.weight.device:
        return "adapter on another device"
    return a, b, float(scale)


def _frozen_weight(base: Any, dtype: torch.dtype, x_dtype: torch.dtype) -> Tensor | NF4Weight | str:
    weight = getattr(base, "weight", None)
    if type(base).__name__ == "Linear8bitLt":
        return _INT8
    if not isinstance(weight, Tensor):
        return f"base layer of type {type(base).__name__}"
    if weight.requires_grad:
        return "its base weight is trained"
    if type(base) is nn.Linear:
        return weight if _is_plain(weight) and weight.is_floating_point() else "sharded or quantised base weight"
    if type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes."):
        state = getattr(weight, "quant_state", None)
        if state is None:
            return "its 4-bit weight is not quantised yet"
        if getattr(state, "packing_format_for_cpu", False):
            return "bitsandbytes repacked its 4-bit weight for this CPU"
        if base.compute_dtype not in (None, dtype):
            return f"bitsandbytes computes in {base.compute_dtype}"
        if x_dtype != dtype:
            return f"bitsandbytes gives back {x_dtype}, what it reads"
        return NF4Weight(weight, state)
    return f"base layer of type {type(base).__name__}"


def adapter_ranks(core: nn.Module) -> dict[str, int]:
    """Rank of every adapter of a loaded model, by the name that the adapted module has without PEFT."""
    return {name: max(module.r.values()) for name, module in core.named_modules() if hasattr(module, "lora_A")}


def _is_plain(parameter: Tensor) -> bool:
    """A tensor that holds its own numbers: no DTensor, no subclass of another kind."""
    return type(parameter) in (nn.Parameter, Tensor)
