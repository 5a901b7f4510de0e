"""glu, and the same on the halves of one packed projection, against act(gate) * up in torch."""

import torch
from torch import Tensor

import fastlm.kernels.glu as module
from benchmarks.kernels import ModelShapes, distinct
from benchmarks.peers import liger_glu, liger_glu_packed
from benchmarks.timing import DEVICE, Rival, Timing, measure, report, require_gpu, torch_compile
from fastlm.kernels.glu import glu_bwd, glu_fwd, glu_packed_reference, glu_reference


def run() -> list[Timing]:
    """Forward and backward, separate and packed operands; bf16. "rebuild": the product is formed again, in dout's
    memory, as the fused MLP has it."""
    timings = []
    for name, model, tokens in distinct(lambda model: (model.intermediate, model.activation)):
        timings += _packed(name, model, tokens)
        timings += _separate(name, model, tokens)
    return timings


def _packed(case: str, model: ModelShapes, tokens: int) -> list[Timing]:
    packed = torch.randn(1, tokens, 2 * model.intermediate, dtype=torch.bfloat16, device=DEVICE)
    dout = torch.randn(1, tokens, model.intermediate, dtype=torch.bfloat16, device=DEVICE)
    gate, up = packed.chunk(2, dim=-1)
    dgate, dup = torch.empty_like(packed).chunk(2, dim=-1)

    def reference(gate_up: Tensor) -> Tensor:
        return glu_packed_reference(gate_up, model.activation)

    def liger(gate_up: Tensor) -> Tensor:
        return liger_glu_packed(gate_up, model.activation)

    leaf = packed.detach().requires_grad_()
    own = packed.detach().clone().requires_grad_()
    rivals = [Rival(reference, [leaf], [dout]), Rival(torch_compile(reference), [leaf], [dout]),
              Rival(liger, [own], [dout])]  # fmt: skip
    return _both("glu packed", case, model, tokens, dout, (gate, up), (dgate, dup), rivals)


def _separate(case: str, model: ModelShapes, tokens: int) -> list[Timing]:
    shape = 1, tokens, model.intermediate
    gate, up, dout = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        return glu_reference(gate, up, model.activation)

    def liger(gate: Tensor, up: Tensor) -> Tensor:
        return liger_glu(gate, up, model.activation)

    leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
    own = gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_()
    rivals = [Rival(reference, leaves, [dout]), Rival(torch_compile(reference), leaves, [dout]),
              Rival(liger, own, [dout])]  # fmt: skip
    timings = _both("glu", case, model, tokens, dout, (gate, up), (dgate, dup), rivals)
    room = dout.clone()
    rebuild = measure(
        "glu bwd rebuild", case, tokens, 6 * dout.nbytes,
        lambda: glu_bwd(room, gate, up, model.activation, dgate, dup, room), module=module,
    )  # fmt: skip
    return [*timings, rebuild]


def _both(
    operation: str, case: str, model: ModelShapes, tokens: int, dout: Tensor,
    operands: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor], rivals: list[Rival],
) -> list[Timing]:  # fmt: skip
    plain, compiled, liger = rivals
    return [
        measure(
            f"{operation} fwd", case, tokens, 3 * dout.nbytes, lambda: glu_fwd(*operands, model.activation),
            plain.forward, compiled=compiled.forward, liger=liger.forward, module=module,
        ),
        measure(
            f"{operation} bwd", case, tokens, 5 * dout.nbytes,
            lambda: glu_bwd(dout, *operands, model.activation, *gradients),
            plain.backward, compiled=compiled.backward, liger=liger.backward, module=module,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    require_gpu()
    report(run())
