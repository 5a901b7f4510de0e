"""Models without weights, to count on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .patch import patch

__all__ = ["meta_model", "twin_of"]


def meta_model(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A causal LM without weights, not quantised. RuntimeError, and nothing allocated, where it would get some."""
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        # torch looks for its constructors once: they are not found where they were replaced by others at that time
        if not all(make(1).is_meta for make in (torch.empty, torch.ones, torch.zeros)):
            raise RuntimeError(
                "torch.device('meta') has no effect in this process, so the weights would be allocated: something "
                "replaced torch.empty while torch first looked for it; call this in a new process"
            )
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def twin_of(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A patched causal LM without weights. ValueError for layers that fastlm does not fuse."""
    twin = meta_model(config, dtype, trust_remote_code)
    for name, reason in patch(twin).stock.items():
        if not name.endswith(type(twin).__name__):  # the head may
            raise ValueError(f"plan counts what layers keep that fastlm fuses, and {name} runs stock code ({reason})")
    return twin
