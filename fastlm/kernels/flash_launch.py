"""How the kernels of `flash` are launched: blocks by GPU, dtype, head size and length, grid, constants, descriptors."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .launch import next_power_of_2

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton
    TensorDescriptor = None

__all__ = ["LOG2_E", "Blocks", "FlashSettings", "blocks_for", "launch_parameters"]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class FlashSettings:
    """What is neither tensor nor shape; see `flash_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Blocks:
    """Rows that a program owns, rows that it takes in a step, warps, loads in flight.

    described: full blocks that all of a program's rows see, or are seen by, come through tensor descriptors
    (the hardware's TMA) in a loop of their own, without masks; where there can be none, by the loop for all blocks.
    """

    own: int
    step: int
    warps: int
    stages: int
    described: bool = False


# Head size rounded up: forward, dQ, dK and dV. 64 rows a program waste least on samples of 240 tokens (70% of
# the pairs computed count, 59% with 128). On Hopper the fastest of about ten each, on such samples; else what fits
# without spilling.
_HOPPER = {  # and data-centre Blackwell: 227 KiB of shared memory
    64: (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 4)),
    128: (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    256: (Blocks(64, 32, 4, 2), Blocks(128, 32, 8, 2), Blocks(32, 32, 4, 2)),
}
# Hopper, by the mean length of a launch's samples from which on they are faster. H200, 16,384 tokens, 32 heads on 8, in
# ms, with these and with those above. 128 wide: samples of 2,048 forward 0.626 and 0.708, dQ 0.814 and 0.859, dK and
# dV 1.14 and 1.50; of 8,192 2.11 and 2.53, 2.58 and 2.99, 4.17 and 5.65. 64 wide: 1.30 and 1.36, 1.30 and 1.62, 2.71
# and 3.58. Samples of 240: forward 0.256 and 0.248, dQ 0.335 and 0.327. 256 wide, 16 heads on 8 with softcap, samples
# of 8,192: forward 2.55 and 3.08, the rest 4% less.
_HOPPER_BY_LENGTH = {
    4096: {128: (Blocks(128, 128, 8, 3, True), Blocks(128, 64, 8, 3, True), Blocks(64, 64, 4, 2, True))},
    2048: {256: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2, True), Blocks(32, 32, 4, 2, True))},
    1024: {
        64: (Blocks(64, 64, 4, 2, True), Blocks(64, 64, 4, 2, True), Blocks(64, 64, 4, 3, True)),
        128: (Blocks(64, 64, 4, 3, True), Blocks(64, 64, 4, 2, True), Blocks(64, 64, 4, 2, True)),
    },
}
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
    kernel: int, q: Tensor, k: Tensor, cu_seqlens: Tensor, settings: FlashSettings, **rows: Tensor
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, shared arguments and constants of the forward (0), dQ (1) or dK and dV (2) kernel; rows: to describe."""
    (tokens, heads, head_dim), samples = q.shape, len(cu_seqlens) - 1
    block_d = max(next_power_of_2(head_dim), 16)  # 16: the smallest product
    blocks = _blocks(q.device, q.dtype, block_d, next_power_of_2(tokens // max(samples, 1) + 1) // 2)[kernel]
    described = blocks.described and head_dim == block_d and _describable(*rows.values())
    scales = (1.0, settings.scale * LOG2_E)  # before the cap, and after: then exp2 gives the logit's exp
    if settings.softcap:
        scales = (settings.scale / settings.softcap, settings.softcap * LOG2_E)
    options: dict[str, Any] = dict(
        HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP=heads // k.shape[1], OWN=blocks.own, STEP=blocks.step,
        HAS_WINDOW=bool(settings.window), HAS_SOFTCAP=bool(settings.softcap), DESCRIBED=described,
        SEARCH_STEPS=max(1, -(-(samples - 1).bit_length() // 7)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    options |= {name: _described(x, blocks.step) if described else None for name, x in rows.items()}
    grid = (tokens // blocks.own + samples, k.shape[1] if kernel == 2 else heads)
    return grid, (cu_seqlens, samples, tokens, settings.window or 0, *scales), options


@lru_cache(maxsize=256)
def _blocks(device: torch.device, dtype: torch.dtype, block_d: int, length: int) -> tuple[Blocks, Blocks, Blocks]:
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
    return blocks_for(major, dtype, block_d, length)


def blocks_for(major: int, dtype: torch.dtype, block_d: int, length: int = 0) -> tuple[Blocks, Blocks, Blocks]:
    """Forward's, dQ's, and dK and dV's blocks on a GPU of that compute capability, for samples of a mean length."""
    size = max(block_d, 64)
    if dtype == torch.float32:
        return _FP32[size]
    if major == 9:
        for longer, table in _HOPPER_BY_LENGTH.items():
            if length >= longer and size in table:
                return table[size]
    return _HOPPER[size] if major in (9, 10) else _OTHERS[size]


def _describable(*tensors: Tensor) -> bool:
    """Whether a descriptor can show each x [T, H, D] as [T, H D]: 16-bit, heads side by side, in steps of 16 bytes."""
    return TensorDescriptor is not None and all(
        x.element_size() == 2
        and x.stride(1) == x.shape[2]
        and x.stride(0) >= x.shape[1] * x.shape[2]  # rows that overlap may be none to the hardware
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        for x in tensors
    )


def _described(x: Tensor, step: int) -> Any:
    """A descriptor of x [T, H, D] as [T, H D], which loads [step, D]."""
    return TensorDescriptor.from_tensor(x.flatten(1), [step, x.shape[2]])
