"""Where kernel tests run: compiled on a GPU, else in Triton's interpreter, in one child process a test file.

The interpreter must be switched on before triton is imported, which other tests of the session may already
have done; hence the child. A test file marks its kernel tests with `kernel_test`, those that assert what a
plain CPU tensor gets with `cpu_path_test`, and calls `run_interpreted(__file__)` from one more test.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlm.kernels.launch import HAS_TRITON, interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_runs_kernels = HAS_TRITON and (DEVICE == "cuda" or interpreting())
kernel_test = pytest.mark.skipif(not _runs_kernels, reason="runs in the child process of the interpreter test")
cpu_path_test = pytest.mark.skipif(interpreting(), reason="a CPU tensor takes the kernel path here")


def run_interpreted(file: str) -> None:
    """Run the file's tests again in a child process with Triton's interpreter on."""
    if _runs_kernels or not HAS_TRITON:
        pytest.skip("the kernels run in this process" if HAS_TRITON else "triton is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-rf", file],
        env={**environment, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0 and " passed" in child.stdout, child.stdout[-8000:] + child.stderr[-2000:]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random normal values that take a gradient, where the kernels run."""
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype).requires_grad_()


def far_apart(count: int, *shape: int) -> list[Tensor]:
    """`count` random bf16 tensors [4, *shape] whose rows lie 2^30 + 64 elements apart: the last beyond 2^31.

    The stride fits in int32, index times stride does not. They share one storage, whose untouched pages cost
    nothing on a CPU.
    """
    length, apart = math.prod(shape), 2**30 + 64
    storage = torch.empty_strided((3 * apart + count * length,), (1,), dtype=torch.bfloat16, device=DEVICE)
    strides = (apart, *torch.empty(shape, device="meta").stride())
    tensors = [storage.as_strided((4, *shape), strides, i * length) for i in range(count)]
    for tensor in tensors:
        tensor.copy_(torch.randn(4, *shape))
    return tensors


def assert_three_way(
    kernel: Sequence[Tensor], torch_results: Sequence[Tensor], truth: Sequence[Tensor], *, ulps: float
) -> None:
    """The kernel errs against the fp64 truth at most as much as torch does in the same dtype, plus `ulps`.

    An ulp is taken at the size of the element, or at the tensor's mean size where that is larger. The
    interpreter truncates to bf16 where a GPU rounds, which costs one ulp more.
    """
    for index, (ours, theirs, exact) in enumerate(zip(kernel, torch_results, truth, strict=True)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape == exact.shape
        assert exact.dtype == torch.float64
        if exact.numel() == 0:
            continue
        allowed = ulps + (1 if interpreting() and ours.dtype == torch.bfloat16 else 0)
        size = exact.abs().clamp(min=float(exact.abs().mean()))
        torch_error, error = (theirs.double() - exact).abs().max(), (ours.double() - exact).abs()
        bound = torch_error + allowed * torch.finfo(ours.dtype).eps * size
        assert bool((error <= bound).all()), (  # also false where ours is NaN
            f"tensor {index} {ours.dtype}: errors up to {float(error.max()):.3g}, torch's own up to "
            f"{float(torch_error):.3g}; {int((error > bound).sum())} of {error.numel()} beyond the bound"
        )


def assert_compiles(
    run: Callable[[Any], Sequence[Tensor]], function: Any, reference: Any, *, tolerance: float = 1e-5
) -> None:
    """torch.compile takes the function as one graph, and `run` makes of it what it makes of the reference."""
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(run(compiled), run(reference), strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def double_leaf(tensor: Tensor) -> Tensor:
    """The same values in fp64, for the truth."""
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Tensor]:
    """The outputs and the inputs' gradients in one list, detached; `incoming` takes the outputs' dtypes."""
    incoming = [grad.to(output.dtype) for grad, output in zip(incoming, outputs, strict=True)]
    return [t.detach() for t in (*outputs, *torch.autograd.grad(list(outputs), list(inputs), incoming))]
