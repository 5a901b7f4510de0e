"""What a user asks of loading, resolved and checked: device, dtype, bits, sequence length."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from .keywords import nearest
from .models.twin import meta_model
from .training.costs import weight_bytes
from .training.room import free_bytes

__all__ = [
    "bits_of", "check_bits", "check_room", "choose_dtype", "fit_length", "is_bfloat16_supported", "keep_quantisation",
    "place", "quantisation_keywords",
]  # fmt: skip

_DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip


def is_bfloat16_supported() -> bool:
    """Whether the current GPU computes in bfloat16 in hardware (Ampere or newer). False without a GPU."""
    if not torch.cuda.is_available():
        return False
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return native and torch.cuda.get_device_capability()[0] >= 8


def check_bits(**asked: bool | None) -> None:
    """ValueError where two of these options, which exclude each other, are on."""
    both = [name for name, on in asked.items() if on]
    if len(both) > 1 and set(both) != {"load_in_16bit", "full_finetuning"}:
        raise ValueError(f"{' and '.join(both)} contradict each other; choose one")


def place(device_map: Any) -> tuple[Any, bool]:
    """(device map for transformers, whether the model computes on a GPU); ValueError for a GPU that is missing."""
    has_gpu = torch.cuda.is_available()
    if device_map is None:
        local_rank = os.environ.get("LOCAL_RANK")  # set by torchrun and accelerate: one process for each GPU
        index = int(local_rank) if local_rank is not None else torch.cuda.current_device() if has_gpu else 0
        return {"": index if has_gpu else "cpu"}, has_gpu
    targets = device_map.values() if isinstance(device_map, dict) else [device_map]
    if not has_gpu and any(isinstance(target, int) or str(target).startswith("cuda") for target in targets):
        raise ValueError(f"device_map={device_map!r} asks for a GPU and there is none; leave it out to use the CPU")
    return device_map, has_gpu and any(str(target) not in ("cpu", "disk") for target in targets)


def choose_dtype(dtype: torch.dtype | str | None, on_gpu: bool, full_finetuning: bool) -> torch.dtype:
    """The one dtype of weights and computing; ValueError for one that the machine cannot train in."""
    if isinstance(dtype, str) and dtype != "auto":
        named = _DTYPES.get(dtype.removeprefix("torch."))
        if named is None:
            raise ValueError(f"dtype {dtype!r} is unknown; the nearest is {nearest(dtype, _DTYPES)!r}")
        dtype = named
    if dtype is None or isinstance(dtype, str):
        if not on_gpu:
            return torch.float32
        if is_bfloat16_supported():
            return torch.bfloat16
        return torch.float32 if full_finetuning else torch.float16
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype {dtype} cannot be computed in; pass bfloat16, float16 or float32")
    if dtype == torch.float16 and not on_gpu:
        raise ValueError("float16 does not train on a CPU; pass dtype=None (float32) or torch.bfloat16")
    if dtype == torch.float16 and full_finetuning:
        raise ValueError("float16 weights cannot be trained themselves; pass float32 or bfloat16")
    if dtype == torch.bfloat16 and on_gpu and not is_bfloat16_supported():
        raise ValueError("this GPU has no bfloat16; pass dtype=None or torch.float16")
    return dtype


def fit_length(config: Any, length: int, rope_scaling: dict[str, Any] | None, is_default: bool) -> int:
    """The length in tokens, checked against the model's limit; only ``rope_scaling`` moves that limit.

    is_default: nobody asked for this length, so that it may be cut down to the limit.
    """
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    limit = own if rope_scaling is None else _scale_rope(text, dict(rope_scaling), own)
    if own is None or limit is None or length <= limit:
        return int(length)
    if is_default:
        return int(limit)
    raise ValueError(
        f"max_seq_length is {length}, but this model takes {limit} tokens; pass at most that, or scale its "
        f"positions: rope_scaling={{'rope_type': 'linear', 'factor': {float(math.ceil(length / own))}}}"
    )


def _scale_rope(text: Any, scaling: dict[str, Any], limit: int | None) -> int:
    """Write the scaling into the configuration as transformers 5 keeps it; returns the new limit."""
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
    kind, factor = scaling["rope_type"], scaling.get("factor")
    known = ("linear", "dynamic", "yarn", "longrope", "llama3")
    if kind not in known or not isinstance(factor, int | float) or factor < 1:
        raise ValueError(
            f"rope_scaling={scaling} is not understood: pass 'rope_type' ({', '.join(known)}) and 'factor', 1 or more"
        )
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or limit is None:
        raise ValueError(f"{text.model_type} has no rotary embeddings to scale; leave rope_scaling out")
    original = scaling.get("original_max_position_embeddings", limit)
    if kind in ("yarn", "longrope", "llama3"):
        scaling["original_max_position_embeddings"] = original
    nested = isinstance(parameters.get("full_attention"), dict)
    old = parameters["full_attention"] if nested else parameters
    new = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old} | scaling
    # windowed layers keep their own: they see no farther than before
    text.rope_parameters = {**parameters, "full_attention": new} if nested else new
    if kind != "dynamic":  # it measures its growth from max_position_embeddings
        text.max_position_embeddings = int(original * factor)
    return int(original * factor)


def quantisation_keywords(in_4bit: bool, in_8bit: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers takes to quantise while loading: LLM.int8, doubly quantised NF4, or nothing."""
    if in_8bit:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if not in_4bit:
        return {}
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": nf4}


def keep_quantisation(
    config: Any, dtype: torch.dtype, in_4bit: bool | None, in_8bit: bool, full_finetuning: bool
) -> None:
    """A checkpoint that is quantised already stays so, computing in ``dtype``; contradictions are errors."""
    facts = _facts(config.quantization_config)
    bits = _stored_bits(facts)
    if full_finetuning:
        raise ValueError(f"this checkpoint is stored in {bits} and cannot be trained; load the original one")
    if (in_4bit and bits != "4-bit") or (in_8bit and bits != "8-bit"):
        raise ValueError(f"this checkpoint is stored in {bits}; leave load_in_4bit and load_in_8bit out")
    if in_4bit is False:
        print(f"fastlm: the checkpoint is stored in {bits} and stays so")
    if bits == "4-bit":
        config.quantization_config = {**facts, "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch.")}


def check_room(name: str, config: Any, dtype: torch.dtype, device_map: Any, quantisation: Any) -> None:
    """ValueError, before anything is loaded, where the weights take more than the one GPU they go to has free.

    Weights in 16 or 32 bits and in NF4 are counted; other quantisations, and models spread over devices, are not.
    """
    index = device_map.get("") if isinstance(device_map, dict) else None
    in_4bit = getattr(quantisation, "load_in_4bit", False)
    if not isinstance(index, int) or getattr(config, "quantization_config", None) or (quantisation and not in_4bit):
        return
    twin, free = meta_model(config, dtype), free_bytes(torch.device("cuda", index))
    taken = weight_bytes(twin, in_4bit)
    if taken <= free:
        return
    in_nf4 = weight_bytes(twin, True)
    spelled = "NF4" if in_4bit else str(dtype).removeprefix("torch.")
    fits = not in_4bit and in_nf4 <= free
    raise ValueError(
        f"the weights of {name} take {taken / 2**30:.1f} GiB in {spelled}, and {free / 2**30:.1f} GiB of the GPU are "
        f"free: {f'load_in_4bit=True takes {in_nf4 / 2**30:.1f}' if fits else 'free some, or take a smaller model'}"
    )


def bits_of(model: Any) -> str:
    """How the model's weights are held: "4-bit", "8-bit", "16-bit", "32-bit", or another method's name."""
    quantisation = getattr(model.config, "quantization_config", None)
    return f"{model.dtype.itemsize * 8}-bit" if quantisation is None else _stored_bits(_facts(quantisation))


def _stored_bits(facts: dict[str, Any]) -> str:
    if facts.get("load_in_4bit"):
        return "4-bit"
    return "8-bit" if facts.get("load_in_8bit") else str(facts.get("quant_method"))


def _facts(quantisation: Any) -> dict[str, Any]:
    return dict(quantisation if isinstance(quantisation, dict) else quantisation.to_dict())
