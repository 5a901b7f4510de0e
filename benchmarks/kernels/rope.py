"""rope of queries and keys, as views of one packed projection, against the torch expression."""

import torch

from benchmarks.kernels import ModelShapes, cases
from benchmarks.timing import Timing, measure, report, require_gpu
from fastlm.kernels.rope import rope_bwd, rope_fwd, rope_reference


def run() -> list[Timing]:
    """Forward and backward; bf16, tables too."""
    return [timing for model, tokens in cases() for timing in _one(model, tokens)]


def _one(model: ModelShapes, tokens: int) -> list[Timing]:
    heads = model.query_heads + 2 * model.key_heads
    packed = torch.randn(1, tokens, heads, model.head_dim, dtype=torch.bfloat16, device="cuda")
    q, k = packed[:, :, : model.query_heads], packed[:, :, model.query_heads : -model.key_heads]
    angles = torch.rand(1, tokens, model.head_dim // 2, device="cuda").repeat(1, 1, 2) * 50
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    dq, dk = (torch.randn(x.shape, dtype=x.dtype, device="cuda") for x in (q, k))
    leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = rope_reference(*leaves, cos=cos, sin=sin)
    counted = 2 * (dq.nbytes + dk.nbytes) + cos.nbytes  # half of cos and half of sin
    return [
        measure(
            "rope fwd", model.name, tokens, counted,
            lambda: rope_fwd(q, k, cos, sin),
            lambda: rope_reference(q, k, cos, sin),
        ),
        measure(
            "rope bwd", model.name, tokens, counted,
            lambda: rope_bwd(dq, dk, cos, sin),
            lambda: torch.autograd.grad(outputs, leaves, (dq, dk), retain_graph=True),
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
