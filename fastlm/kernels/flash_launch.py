"""How the kernels of `flash` are launched: blocks by GPU, dtype, head size and length, grid, constants."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .launch import next_power_of_2

__all__ = ["LOG2_E", "Blocks", "FlashSettings", "blocks_for", "launch_parameters"]

LOG2_E = math.log2(math.e)
_LONG_SAMPLE = 4096  # tokens in the mean, from which on a launch takes the blocks for long samples


@dataclass(frozen=True)
class FlashSettings:
    """What is neither tensor nor shape; see `flash_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Blocks:
    """Rows that a program owns, rows that it takes in a step, warps, loads in flight."""

    own: int
    step: int
    warps: int
    stages: int


# Head size rounded up: forward, dQ, dK and dV. 64 rows a program waste least on samples of 240 tokens (70% of
# the pairs computed count, 59% with 128). On Hopper the fastest of about ten each, on such samples; else what fits
# without spilling.
_HOPPER = {  # and data-centre Blackwell: 227 KiB of shared memory
    64: (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 4)),
    128: (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    256: (Blocks(64, 32, 4, 2), Blocks(128, 32, 8, 2), Blocks(32, 32, 4, 2)),
}
# On an H200, 2 samples of 8,192 tokens, 32 heads on 8, these and those above, in ms: forward 2.40 and 2.62, dQ 2.85
# and 3.09. Samples of 2,048 lose by them (forward 0.74 and 0.70).
_HOPPER_LONG = {128: (Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 3), _HOPPER[128][2])}
_OTHERS = {  # 99 KiB or more
    64: (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
    256: (Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
}
_FP32 = {  # operands live in registers, since ieee products run on the plain cores
    64: (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    128: (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 1)),
    256: (Blocks(32, 16, 8, 1), Blocks(16, 16, 8, 1), Blocks(32, 16, 8, 1)),
}


def launch_parameters(
    kernel: int, q: Tensor, k: Tensor, cu_seqlens: Tensor, settings: FlashSettings
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, shared arguments and constants of the forward (0), dQ (1) or dK and dV (2) kernel."""
    (tokens, heads, head_dim), samples = q.shape, len(cu_seqlens) - 1
    block_d = max(next_power_of_2(head_dim), 16)  # 16: the smallest product
    blocks = _blocks(q.device, q.dtype, block_d, tokens // max(samples, 1) >= _LONG_SAMPLE)[kernel]
    scales = (1.0, settings.scale * LOG2_E)  # before the cap, and after: then exp2 gives the logit's exp
    if settings.softcap:
        scales = (settings.scale / settings.softcap, settings.softcap * LOG2_E)
    options: dict[str, Any] = dict(
        HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP=heads // k.shape[1], OWN=blocks.own, STEP=blocks.step,
        HAS_WINDOW=bool(settings.window), HAS_SOFTCAP=bool(settings.softcap),
        SEARCH_STEPS=max(1, -(-(samples - 1).bit_length() // 7)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    grid = (tokens // blocks.own + samples, k.shape[1] if kernel == 2 else heads)
    return grid, (cu_seqlens, samples, tokens, settings.window or 0, *scales), options


@lru_cache(maxsize=64)
def _blocks(device: torch.device, dtype: torch.dtype, block_d: int, long: bool) -> tuple[Blocks, Blocks, Blocks]:
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
    return blocks_for(major, dtype, block_d, long)


def blocks_for(
    major: int, dtype: torch.dtype, block_d: int, long: bool = False
) -> tuple[Blocks, Blocks, Blocks]:  # fmt: skip
    """Forward's, dQ's, and dK and dV's blocks on a GPU of that compute capability, for long samples or others."""
    table = _FP32 if dtype == torch.float32 else _HOPPER if major in (9, 10) else _OTHERS
    if long and table is _HOPPER:
        table = _HOPPER | _HOPPER_LONG
    return table[max(block_d, 64)]
