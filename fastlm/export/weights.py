"""What a merged model's weights are: base plus adapters, formed one module at a time.

Each weight is formed alone, in float32, by PEFT's own merge on a copy of its LoRA layer: W + scale·B·A, or
DoRA's m·(W + scale·B·A)/‖W + scale·B·A‖, then rounded once. The live model is only read. A 4-bit or 8-bit
base is dequantised: the merged model answers as the live one does, up to that one rounding, and not as an
adapter on the original 16-bit base would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.patch import unwrap_peft

__all__ = ["MergedWeight", "Pair", "base_model", "form_tensors", "merged_weights"]

Pair = tuple[str, str]  # (module, adapter)


@dataclass(frozen=True)
class MergedWeight:
    """Tensors of one module of the merged model, before they are formed.

    tensors: name in the plain model -> (shape, dtype); what is taken out of it is not saved.
    form: makes the tensors, on the module's device, and says which (module, adapter) pairs it put in.
    origin: id of the live parameter that is written as it is, which tied weights share; else None.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    form: Callable[[], tuple[dict[str, Tensor], list[Pair]]]
    origin: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.tensors.values())


def merged_weights(model: nn.Module) -> list[MergedWeight]:
    """Every tensor of the merged model, in module order, none formed yet. Errors as in ``save_merged``."""
    core = base_model(model)
    dtype = core.config.dtype if isinstance(core.config.dtype, torch.dtype) else core.dtype
    return list(_walk(core, "", dtype))


@torch.no_grad()
def form_tensors(weight: MergedWeight) -> tuple[dict[str, Tensor], list[Pair]]:
    """The tensors of ``weight.tensors``, and the adapter pairs that went into them."""
    tensors, pairs = weight.form()
    return {name: tensors[name] for name in weight.tensors}, pairs


def base_model(model: Any) -> PreTrainedModel:
    """The transformers model, looked for inside PEFT's wrapper; TypeError where there is none."""
    core = unwrap_peft(model)
    if not isinstance(core, PreTrainedModel):
        raise TypeError(f"only a transformers model, bare or inside PEFT, is merged, not {type(model).__name__}")
    return core


def _walk(module: nn.Module, path: str, dtype: torch.dtype) -> Iterator[MergedWeight]:
    """path: the module's name in the plain model, "" for the root."""
    if isinstance(module, ModulesToSaveWrapper):
        _check_enabled(module, path)
        original = module.original_module
        trained = module.modules_to_save[module.active_adapters[0]] if module.active_adapters else original
        for name, part in trained.named_modules(prefix=path):
            like = original.get_submodule(name[len(path) + 1 :])
            yield from _own_tensors(part, name, dtype, like)
    elif isinstance(module, TrainableTokensWrapper):
        _check_enabled(module.token_adapter, path)
        yield _token_rows(module, path)
    elif isinstance(module, lora.LoraLayer):
        yield from _lora(module, path, dtype)
    elif isinstance(module, BaseTunerLayer):
        raise TypeError(f"{path} carries a {type(module).__name__}; only LoRA adapters can be merged")
    else:
        yield from _own_tensors(module, path, dtype, module)
        for name, child in module.named_children():
            yield from _walk(child, f"{path}.{name}" if path else name, dtype)


def _check_enabled(layer: Any, path: str) -> None:
    if layer.disable_adapters:
        raise ValueError(f"the adapter of {path} is switched off; leave disable_adapter() before merging")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own saved tensors, by name."""
    saved = {**module._parameters, **module._buffers}
    skipped = module._non_persistent_buffers_set
    tensors = {name: t for name, t in saved.items() if t is not None and name not in skipped}
    if any(tensor.device.type == "meta" for tensor in tensors.values()):
        raise ValueError(f"a {type(module).__name__} is offloaded; load the model on one device to merge it")
    return tensors


def _own_tensors(module: nn.Module, path: str, dtype: torch.dtype, like: nn.Module) -> Iterator[MergedWeight]:
    """The tensors of a module without adapters, one by one, in the dtypes of the module ``like``."""
    kept = _dtypes(like, dtype)
    for name, tensor in _tensors(module).items():
        key = f"{path}.{name}" if path else name
        form = partial(_plain_tensor, module, name, key, kept[name])
        origin = None if _is_quantised(tensor) else id(tensor)
        yield MergedWeight({key: (_shape(tensor), kept[name])}, form, origin)


def _plain_tensor(module: nn.Module, name: str, key: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Pair]]:
    return {key: _dequantise(module, name).to(dtype)}, []


def _lora(layer: Any, path: str, dtype: torch.dtype) -> Iterator[MergedWeight]:
    chain = [layer]  # outermost first: the adapters of stacked experts wrap one another
    while isinstance(chain[-1].base_layer, lora.LoraLayer):
        chain.append(chain[-1].base_layer)
    base = chain[-1].base_layer
    if isinstance(base, BaseTunerLayer):
        raise TypeError(f"{path} carries a {type(base).__name__} too; only LoRA adapters can be merged")
    for wrapper in chain:
        _check_enabled(wrapper, path)
    kept = _dtypes(base, dtype)

    def form() -> tuple[dict[str, Tensor], list[Pair]]:
        plain = nn.Module()
        for name in kept:
            tensor = _dequantise(base, name).float().clone()
            plain.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        current, pairs = plain, []
        for depth, wrapper in reversed(list(enumerate(chain))):
            current = _float_copy(wrapper, current)
            # a quantised layer's own merge would quantise again; its copy has a plain base
            owner = lora.Linear if type(wrapper).__module__.endswith(".bnb") else type(wrapper)
            owner.merge(current, safe_merge=True)
            pairs += [(path + ".base_layer" * depth, adapter) for adapter in current.merged_adapters]
        return {f"{path}.{name}": plain.get_parameter(name).data.to(out) for name, out in kept.items()}, pairs

    shapes = {f"{path}.{name}": (_shape(t), kept[name]) for name, t in _tensors(base).items()}
    yield MergedWeight(shapes, form)
    for name, child in base.named_children():
        yield from _walk(child, f"{path}.{name}", dtype)


def _float_copy(layer: Any, base: nn.Module) -> Any:
    """The LoRA layer on another base, adapters in float32; shares nothing that merging changes."""
    twin = copy.copy(layer)
    children = layer._modules.items()
    twin._modules = {n: base if n == "base_layer" else copy.deepcopy(child).float() for n, child in children}
    twin.merged_adapters = list(layer.merged_adapters)
    twin._caches = {}
    return twin


def _token_rows(wrapper: Any, path: str) -> MergedWeight:
    weight = wrapper.token_adapter.base_layer.weight
    if isinstance(wrapper.token_adapter.base_layer, BaseTunerLayer) or _is_quantised(weight):
        raise TypeError(f"{path}: trained token rows can be merged into a plain embedding only")
    key = f"{path}.weight"
    active = wrapper.token_adapter.active_adapters

    def form() -> tuple[dict[str, Tensor], list[Pair]]:
        return {key: wrapper.token_adapter.get_merged_weights(active).detach()}, []

    return MergedWeight({key: (weight.shape, weight.dtype)}, form)


def _dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype if _is_quantised(t) else t.dtype for name, t in _tensors(module).items()}


def _is_quantised(tensor: Tensor) -> bool:
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _shape(tensor: Any) -> torch.Size:
    return tensor.quant_state.shape if type(tensor).__name__ == "Params4bit" else tensor.shape


def _dequantise(module: Any, name: str) -> Tensor:
    """A tensor of the module as it multiplies; 8 bits: code · scale / 127 in float32."""
    tensor = getattr(module, name)
    if type(tensor).__name__ == "Params4bit":
        from bitsandbytes import functional

        codes, state = tensor.data, tensor.quant_state
        if getattr(state, "packing_format_for_cpu", False):  # what bitsandbytes' inference on AVX512 leaves
            scales, state = state.absmax, copy.copy(state)
            state.original_nested = False  # its scales are bfloat16 now: undo the layout, not the rounding
            codes, state = functional._convert_weight_packed_for_cpu_inverse(codes, state)
            state.absmax = scales.T.reshape(-1).float()
        return functional.dequantize_4bit(codes, state)
    if type(tensor).__name__ == "Int8Params":
        codes = tensor.data if module.state.CB is None else module.state.CB
        scales = tensor.SCB if module.state.SCB is None else module.state.SCB
        return codes.float() * (scales.float() / 127.0).to(codes.device).unsqueeze(1)
    return tensor.detach()
