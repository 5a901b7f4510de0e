"""The same operations in Liger (BSD-2-Clause), looked up when called: without it there is no comparison.

Each function takes the tensors that fastlm's takes and returns Liger's outputs, differentiable. Liger writes
into its inputs here and there (rope in forward, the gated units in backward): give it tensors of its own.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

__all__ = ["liger_glu", "liger_glu_packed", "liger_head", "liger_rms_norm", "liger_rope"]


def _liger(name: str) -> Any:
    """One of Liger's autograd Functions; ModuleNotFoundError where Liger is not installed."""
    return getattr(import_module("liger_kernel.ops"), name)


def liger_rms_norm(x: Tensor, weight: Tensor, offset: float, cast_before_scale: bool) -> Tensor:
    """Out of place: in place, a kept graph would normalise its own result."""
    casting = "llama" if cast_before_scale else "gemma"
    return _liger("LigerRMSNormFunction").apply(x, weight, 1e-6, offset, casting, False, None)


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, T, heads, D], contiguous: Liger then rotates them in place."""
    q, k = _liger("LigerRopeFunction").apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def liger_glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation: "silu" or "gelu_tanh"."""
    name = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}[activation]
    return _liger(name).apply(gate, up)


def liger_glu_packed(gate_up: Tensor, activation: str) -> Tensor:
    """One tensor [..., 2I]; for GELU Liger has the split form only."""
    if activation == "silu":
        rows = gate_up.flatten(0, -2)  # it returns its gradient as rows
        return _liger("LigerFusedGateUpSiLUMulFunction").apply(rows).unflatten(0, gate_up.shape[:-1])
    gate, up = gate_up.chunk(2, dim=-1)
    return liger_glu(gate, up, activation)


def liger_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, reduction: str = "mean"
) -> Tensor:
    """The mean loss [] of the head's rows, or with "none" each row's [N], whose weights are known in backward only."""
    loss = _liger("LigerFusedLinearCrossEntropyFunction").apply(
        hidden, weight, targets, None, None, -100, 0.0, 0.0, reduction, softcap
    )
    return loss[0]
