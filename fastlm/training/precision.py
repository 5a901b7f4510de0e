"""One compute dtype for model and trainer: the one that the model was loaded in decides.

TRL turns bf16 on unless fp16 is. On a model in float16, or in float32 on a CPU, that is the wrong autocast or
a slow one; the flags are corrected before the accelerator, which fixes the autocast, is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["hold_float32_masters", "restore_float32_masters", "settle_precision"]


def settle_precision(
    config: Any, dtype: torch.dtype, given: frozenset[str], say: Callable[[str], None], *, device_type: str,
    bf16_refused: bool = False,
) -> None:  # fmt: skip
    """Correct ``bf16``, ``fp16`` and ``mixed_precision`` of ``config`` in place, one line per correction.

    dtype: of the model's weights. given: fields that the user set. bf16_refused: the machine has no bf16.
    ValueError where what was asked for cannot run: fp16 autocast on a CPU.
    """
    if getattr(config, "deepspeed_plugin", None) is not None:
        return  # DeepSpeed has taken the flags over already
    cpu = device_type == "cpu"
    name = str(dtype).removeprefix("torch.")
    if cpu and config.fp16 and dtype != torch.bfloat16:
        raise ValueError("fp16=True needs a GPU: its autocast and loss scaling do not exist on a CPU; leave it out")
    asked_bf16 = "bf16" in given and config.bf16
    wanted: str | None = None
    if dtype == torch.float32:
        if (cpu or bf16_refused) and not asked_bf16:
            wanted = "no"
    elif dtype == torch.bfloat16:
        if config.fp16 or ("bf16" not in given and (cpu or not bf16_refused)):
            wanted = "bf16"
    elif dtype == torch.float16:
        if cpu:
            wanted = "no"
        elif config.bf16 or not {"bf16", "fp16"} & given:
            wanted = "fp16"
    if wanted is None:
        return
    before = (config.bf16 or bf16_refused, config.fp16)  # TRL's default is bf16, refused or not
    config.bf16, config.fp16 = wanted == "bf16", wanted == "fp16"
    config.mixed_precision = wanted
    if (config.bf16, config.fp16) != before:
        where = " on a CPU" if cpu else ""
        flags = {"no": "bf16=False and fp16=False", "bf16": "bf16=True", "fp16": "fp16=True"}[wanted]
        say(f"the model is {name}{where}, so training runs with {flags}")


def hold_float32_masters(model: Any) -> dict[str, Tensor]:
    """The trainable tensors as they are, before TRL rounds the adapters of a quantised model to bfloat16."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def restore_float32_masters(model: nn.Module, held: dict[str, Tensor]) -> None:
    """Make every trainable tensor float32, in place: fp16's loss scaler takes gradients of no other dtype."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = held.get(name, parameter.data).to(parameter.device, torch.float32)
