"""fastlm/kernels/glu.py against fp64 mathematics, torch in the same dtype, and transformers."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlm.kernels.glu import ACTIVATIONS, glu, glu_packed, glu_packed_reference, glu_reference

from .interpreter import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_three_way,
    cpu_path_test,
    double_leaf,
    far_apart,
    gradients,
    kernel_test,
    run_interpreted,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ULPS = 1.0  # one rounding; exp, erf and tanh of the GPU's fast mathematics are a few fp32 ulps from torch's
SHAPES = [
    (1, 1),
    (1, 3, 96),
    (2, 3, 130),  # two leading dimensions, a width that is no power of two
    (3, 2100),  # more than one block a row, the last one nearly empty
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, dtype=torch.float32, device=DEVICE) * 2).to(dtype).requires_grad_()


def both_ways(function: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor, activation: str) -> list[Tensor]:
    return gradients([function(*inputs, activation)], inputs, [dout])


def truth(inputs: Sequence[Tensor], dout: Tensor, activation: str) -> list[Tensor]:
    """Formulas, not torch's functions; inputs are gate and up, or both in one."""
    leaves = [double_leaf(tensor) for tensor in inputs]
    gate, up = leaves if len(leaves) == 2 else leaves[0].chunk(2, dim=-1)
    if activation == "silu":
        share = 1 / (1 + torch.exp(-gate))
    elif activation == "gelu_tanh":
        share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        share = 0.5 * torch.erfc(-gate / math.sqrt(2))
    return gradients([gate * share * up], leaves, [dout])


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_way(shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    inputs, dout = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype)], leaf(*shape, dtype=dtype)
    assert_three_way(
        both_ways(glu, inputs, dout, activation),
        both_ways(glu_reference, inputs, dout, activation),
        truth(inputs, dout, activation),
        ulps=ULPS,
    )


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_three_way_and_equal_to_unpacked(dtype: torch.dtype) -> None:
    packed, dout = leaf(2, 3, 2 * 130, dtype=dtype), leaf(2, 3, 130, dtype=dtype)
    results = both_ways(glu_packed, [packed], dout, "silu")
    assert_three_way(
        results,
        both_ways(glu_packed_reference, [packed], dout, "silu"),
        truth([packed], dout, "silu"),
        ulps=ULPS,
    )
    gate, up = (half.detach().requires_grad_() for half in packed.chunk(2, dim=-1))
    out, dgate, dup = both_ways(glu, [gate, up], dout, "silu")
    assert torch.equal(results[0], out) and torch.equal(results[1], torch.cat((dgate, dup), dim=-1))
    assert results[1].is_contiguous()


@kernel_test
def test_mixed_dtypes_promote_like_torch() -> None:
    inputs, dout = [leaf(3, 96, dtype=torch.bfloat16), leaf(3, 96)], leaf(3, 96)
    results = both_ways(glu, inputs, dout, "silu")
    assert [tensor.dtype for tensor in results] == [torch.float32, torch.bfloat16, torch.float32]
    assert_three_way(results, both_ways(glu_reference, inputs, dout, "silu"), truth(inputs, dout, "silu"), ulps=ULPS)


@kernel_test
@pytest.mark.parametrize("view", ["half of a packed", "every other row", "expanded rows", "transposed", "expanded all"])
def test_any_strides_of_input_and_gradient(view: str) -> None:
    views: dict[str, Callable[[], Tensor]] = {
        "half of a packed": lambda: leaf(4, 3, 128)[..., 64:],
        "every other row": lambda: leaf(8, 3, 64)[::2],
        "expanded rows": lambda: leaf(1, 3, 64).expand(4, 3, 64),
        "transposed": lambda: leaf(4, 64, 3).mT,
        "expanded all": lambda: leaf(1, 1, 1).expand(4, 3, 64),
    }
    gate, up, dout = views[view](), leaf(4, 3, 64), views[view]().detach()
    before = dout.clone()
    strided = both_ways(glu, [gate, up], dout, "gelu") + both_ways(glu, [up, gate], dout, "gelu")
    plain = gate.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    dense = dout.contiguous()
    expected = both_ways(glu, [plain, up], dense, "gelu") + both_ways(glu, [up, plain], dense, "gelu")
    for ours, wanted in zip(strided, expected, strict=True):
        assert torch.equal(ours, wanted)
    assert torch.equal(dout, before) and torch.equal(gate, plain)


@kernel_test
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape, device=DEVICE)
    for tensor in both_ways(glu, [leaf(*shape), leaf(*shape)], zeros, "silu"):
        assert tensor.shape == shape
    assert glu_packed(leaf(*shape[:-1], 2 * shape[-1]), "silu").shape == shape


@kernel_test
def test_c_gelu_flavour() -> None:
    """Exact and tanh GELU differ by up to 4.7e-4 near +-2.70: values and derivatives follow the flavour."""
    gate = torch.linspace(-4, 4, 161, device=DEVICE)
    gate = torch.cat((gate, torch.tensor([-2.699, 2.699], device=DEVICE))).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    results = {name: both_ways(glu, [gate, up], torch.ones_like(gate), name) for name in ("gelu", "gelu_tanh")}
    for name, values in results.items():
        for ours, exact in zip(values, truth([gate, up], torch.ones_like(gate), name), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    apart = (results["gelu"][0] - results["gelu_tanh"][0]).abs()
    assert 4.6e-4 < float(apart.max()) < 4.8e-4 and float(apart[-1]) > 4.6e-4
    assert float((results["gelu"][1] - results["gelu_tanh"][1]).abs().max()) > 1e-4


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_c_fp16_gated_overflow(activation: str) -> None:
    """260 * 260 = 67,600 > 65,504: finite, and so are the gradients, whose intermediates overflow too."""
    gate = torch.tensor([[260.0, 260.0, -260.0, 300.0, 1.5]], dtype=torch.float16, device=DEVICE).requires_grad_()
    up = torch.tensor([[260.0, -260.0, 260.0, 200.0, 2.0]], dtype=torch.float16, device=DEVICE).requires_grad_()
    dout = torch.tensor([[0.5, 0.5, 0.5, 200.0, 1.0]], dtype=torch.float16, device=DEVICE)
    ours, reference = (both_ways(f, [gate, up], dout, activation) for f in (glu, glu_reference))
    assert ours[0][0, :2].tolist() == [65504.0, -65504.0]
    for a, b in zip(ours, reference, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    assert ours[1][0, :2].tolist() == ours[2][0, :2].tolist() == [0.0, 0.0]  # flat where the product was cut
    assert ours[1][0, 3] == 40000 and ours[2][0, 3] == 60000  # 200 * 200 and 200 * 300 fit


@kernel_test
def test_infinity_and_nan_are_not_hidden_in_fp16() -> None:
    gate = torch.tensor([float("inf"), float("nan"), 1.0], dtype=torch.float16, device=DEVICE)
    up = torch.tensor([1.0, 1.0, float("-inf")], dtype=torch.float16, device=DEVICE)
    for function in (glu, glu_reference):
        out = function(gate, up, "silu")
        assert out[0] == float("inf") and out[1].isnan() and out[2] == float("-inf")


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_give_no_nan(activation: str) -> None:
    gate = torch.tensor([-3e4, -200.0, -90.0, 0.0, 90.0, 200.0, 3e4], device=DEVICE).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    out, dgate, dup = both_ways(glu, [gate, up], torch.ones_like(gate), activation)
    expected = [0.0, 0.0, 0.0, 0.0, 90.0, 200.0, 3e4]
    torch.testing.assert_close(out, torch.tensor(expected, device=DEVICE), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dup, out)
    slopes = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], device=DEVICE)
    torch.testing.assert_close(dgate, slopes, rtol=1e-6, atol=1e-6)


@kernel_test
def test_checkpoint_and_autocast_change_nothing() -> None:
    inputs, dout = [leaf(5, 96, dtype=torch.bfloat16), leaf(5, 96, dtype=torch.bfloat16)], leaf(5, 96)
    plain = both_ways(glu, inputs, dout, "silu")
    again = both_ways(lambda *args: checkpoint(glu, *args, use_reentrant=False), inputs, dout, "silu")
    with torch.autocast(DEVICE, dtype=torch.float16):
        cast = both_ways(glu, inputs, dout, "silu")
    for a, b, c in zip(plain, again, cast, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and a.dtype == torch.bfloat16


@kernel_test
def test_c_int32_offset() -> None:
    *inputs, dout = far_apart(3, 64)
    near = [tensor.contiguous().requires_grad_() for tensor in inputs]
    expected = both_ways(glu, near, dout.contiguous(), "silu")
    results = both_ways(glu, [tensor.requires_grad_() for tensor in inputs], dout, "silu")
    for ours, wanted in zip(results, expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_c_int32_offset_full_size(packed: bool) -> None:
    """Past 2^31 elements: the last rows equal the same rows computed alone."""
    width = 14336
    rows = 2**31 // width + 3
    sizes = [2 * width] if packed else [width, width]
    inputs = [torch.randn(rows, n, dtype=torch.bfloat16, device="cuda").requires_grad_() for n in sizes]
    dout = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    function = glu_packed if packed else glu
    results = both_ways(function, inputs, dout, "silu")
    tail = [tensor.detach()[-3:].clone().requires_grad_() for tensor in inputs]
    for ours, wanted in zip(results, both_ways(function, tail, dout[-3:], "silu"), strict=True):
        assert torch.equal(ours[-3:], wanted)


@cpu_path_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("stock", "activation"),
    [("silu", "silu"), ("swish", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")],
)
def test_cpu_path_equals_transformers_bit_by_bit(stock: str, activation: str, dtype: torch.dtype) -> None:
    from transformers.activations import ACT2FN

    gate, up, dout = (torch.randn(2, 3, 96).to(dtype).requires_grad_() for _ in range(3))
    expected = gradients([ACT2FN[stock](gate) * up], [gate, up], [dout])
    for ours, wanted in zip(both_ways(glu, [gate, up], dout, activation), expected, strict=True):
        assert ours.dtype == wanted.dtype
        if dtype == torch.float16:  # gradients are rounded less often than in the stock expression
            torch.testing.assert_close(ours, wanted, rtol=2e-3, atol=1e-4)
        else:
            assert torch.equal(ours, wanted)
    packed = torch.cat((gate, up), dim=-1).detach()
    gate, up = packed.chunk(2, dim=-1)
    assert torch.equal(glu_packed(packed, activation), up * ACT2FN[stock](gate))  # as Phi3MLP


@cpu_path_test
def test_compiles_without_a_graph_break() -> None:
    inputs, dout = [leaf(5, 96), leaf(5, 96)], leaf(5, 96)
    assert_compiles(lambda f: both_ways(f, inputs, dout, "silu"), glu, glu_reference, tolerance=1e-6)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="unknown activation 'relu', expected one of silu, gelu_tanh, gelu"):
        glu(torch.ones(2, 4), torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match=r"one shape \[..., I\], got \(2, 4\), \(2, 3\)"):
        glu(torch.ones(2, 4), torch.ones(2, 3), "silu")
    with pytest.raises(ValueError, match=r"even last size, got \(2, 5\)"):
        glu_packed(torch.ones(2, 5), "silu")
