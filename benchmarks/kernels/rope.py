"""rope of queries and keys, as views of one packed projection, in one launch, against the torch expression.

Out of place, as the public function, stand beside it two launches of the same kernel, one for the queries and one for
the keys: alone, and each after a copy to a [B, heads, T, D] of its own, which a kernel needs that knows only that
layout and rotates in place (forward: the projection's output is shared; backward: the incoming gradient is not its to
overwrite). In place, as the fused QKV function rotates its own products, stands Liger, which can do no other; both on
contiguous tensors of their own. Like with like: lines that are written in place are in the cache, having just been
read, and those of fresh memory are not.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import fastlm.kernels.rope as module
from benchmarks.kernels import ModelShapes, distinct
from benchmarks.peers import liger_rope
from benchmarks.timing import DEVICE, Rival, Timing, measure, median_ms, report, require_gpu, torch_compile
from fastlm.kernels.rope import rope_bwd, rope_fwd, rope_reference


@dataclass(frozen=True)
class RopeTiming(Timing):
    """Milliseconds of two launches, and of two launches with the copies and transposes that one saves."""

    two_launches_ms: float
    copies_and_two_launches_ms: float

    def __str__(self) -> str:
        two, copies = self.two_launches_ms / self.ms, self.copies_and_two_launches_ms / self.ms
        return f"{super().__str__()}  two launches {two:.2f}x, with copies {copies:.2f}x"


def run() -> list[Timing]:
    """Forward and backward; bf16, tables too."""
    shapes = distinct(lambda model: (model.query_heads, model.key_heads, model.head_dim))
    return [timing for name, model, tokens in shapes for timing in _one(name, model, tokens)]


def _one(case: str, model: ModelShapes, tokens: int) -> list[Timing]:
    heads = model.query_heads + 2 * model.key_heads
    packed = torch.randn(1, tokens, heads, model.head_dim, dtype=torch.bfloat16, device=DEVICE)
    q, k = packed[:, :, : model.query_heads], packed[:, :, model.query_heads : -model.key_heads]
    angles = torch.rand(1, tokens, model.head_dim // 2, device=DEVICE).repeat(1, 1, 2) * 50
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    dq, dk = (torch.randn(x.shape, dtype=x.dtype, device=DEVICE) for x in (q, k))
    leaves = q.detach().requires_grad_(), k.detach().requires_grad_(), cos, sin
    own, theirs = ([x.detach().clone() for x in (q, k, dq, dk)] for _ in range(2))
    plain = Rival(rope_reference, leaves, (dq, dk))
    compiled = Rival(torch_compile(_reference), leaves, (dq, dk))
    liger = Rival(liger_rope, (*(x.requires_grad_() for x in theirs[:2]), cos, sin), theirs[2:])
    counted = 2 * (dq.nbytes + dk.nbytes) + cos.nbytes  # half of cos and half of sin
    forward = measure(
        "rope fwd", case, tokens, counted, lambda: rope_fwd(q, k, cos, sin),
        plain.forward, compiled=compiled.forward, module=module,
    )  # fmt: skip
    backward = measure(
        "rope bwd", case, tokens, counted, lambda: rope_bwd(dq, dk, cos, sin),
        plain.backward, compiled=compiled.backward, module=module,
    )  # fmt: skip
    return [
        _beside_two_launches(forward, rope_fwd, q, k, cos, sin),
        _beside_two_launches(backward, rope_bwd, dq, dk, cos, sin),
        measure(
            "rope in place fwd", case, tokens, counted, lambda: rope_fwd(*own[:2], cos, sin, in_place=True),
            liger=liger.forward, module=module,
        ),
        measure(
            "rope in place bwd", case, tokens, counted,
            lambda: rope_fwd(*own[2:], cos, sin, backward=True, in_place=True), liger=liger.backward, module=module,
        ),
    ]  # fmt: skip


def _reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rope_reference(q, k, cos, sin)


def _beside_two_launches(
    one: Timing, function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> RopeTiming:
    def alone(x: Tensor) -> Tensor:
        return function(x, x[:, :, :0], cos, sin)[0]  # no keys

    def copied(x: Tensor) -> Tensor:
        heads_first = x.transpose(1, 2).contiguous()  # [B, heads, T, D]
        return alone(heads_first.transpose(1, 2)).transpose(1, 2)

    two = median_ms(lambda: (alone(q), alone(k)))
    copies = median_ms(lambda: (copied(q), copied(k)))
    return RopeTiming(**asdict(one), two_launches_ms=two, copies_and_two_launches_ms=copies)


if __name__ == "__main__":
    require_gpu()
    report(run())
