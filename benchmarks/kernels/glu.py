"""glu, and the same on the halves of one packed projection, against act(gate) * up in torch."""

import torch
from torch import Tensor

from benchmarks.kernels import ModelShapes, cases
from benchmarks.timing import Timing, measure, report, require_gpu
from fastlm.kernels.glu import glu_bwd, glu_fwd, glu_reference


def run() -> list[Timing]:
    """Forward and backward, separate and packed operands; bf16."""
    timings = []
    for model, tokens in cases():
        packed = torch.randn(1, tokens, 2 * model.intermediate, dtype=torch.bfloat16, device="cuda")
        gate, up = packed.chunk(2, dim=-1)
        dgate, dup = torch.empty_like(packed).chunk(2, dim=-1)
        timings += _one("glu packed", model, tokens, gate, up, dgate, dup)
        gate, up, dgate, dup = (tensor.contiguous() for tensor in (gate, up, dgate, dup))
        timings += _one("glu", model, tokens, gate, up, dgate, dup)
    return timings


def _one(
    operation: str, model: ModelShapes, tokens: int, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor
) -> list[Timing]:
    leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = glu_reference(*leaves, activation=model.activation)
    dout = torch.randn_like(out)
    return [
        measure(
            f"{operation} fwd", model.name, tokens, 3 * dout.nbytes,
            lambda: glu_fwd(gate, up, model.activation),
            lambda: glu_reference(gate, up, model.activation),
        ),
        measure(
            f"{operation} bwd", model.name, tokens, 5 * dout.nbytes,
            lambda: glu_bwd(dout, gate, up, model.activation, dgate, dup),
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
