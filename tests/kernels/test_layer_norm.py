"""fastlm/kernels/layer_norm.py against fp64 mathematics, torch in the same dtype, and transformers."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlm.kernels.layer_norm import layer_norm, layer_norm_reference

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

SHAPES = [  # x, weight
    ((1, 1, 64), (64,)),  # one token
    ((3, 5, 96), (96,)),  # a width that is no power of two
    ((19, 4100), (4100,)),  # longer than a block of 4096; more rows than programs, so that weight partials loop
    ((2, 7, 3, 80), (3, 80)),  # a weight for each head, whose number shares nothing with a program's rows
    ((9, 24, 128), (24, 128)),  # 24 heads and 16 rows a program: three programs meet them all
    ((2, 3, 1, 64), (1, 64)),  # one head
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values around 1: a mean that matters."""
    return (torch.randn(shape, dtype=torch.float32, device=DEVICE) + 1).to(dtype).requires_grad_()


def both_ways(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-5
) -> list[Tensor]:
    return gradients([function(x, weight, eps)], [x, weight], [dy])


def truth(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    x, weight = double_leaf(x), double_leaf(weight)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return gradients([(x - mean) / (variance + 1e-5).sqrt() * weight], [x, weight], [dy])


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "weight_shape"), SHAPES, ids=str)
def test_three_way(shape: tuple[int, ...], weight_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, dy = leaf(*shape, dtype=dtype), leaf(*weight_shape, dtype=dtype), leaf(*shape, dtype=dtype)
    assert_three_way(
        both_ways(layer_norm, x, weight, dy),
        both_ways(layer_norm_reference, x, weight, dy),
        truth(x, weight, dy),
        ulps=1.0,  # the row is summed in another order than torch's
    )


@kernel_test
def test_fp32_weight_and_frozen_weight() -> None:
    x, weight, dy = leaf(3, 5, 96, dtype=torch.bfloat16), leaf(96), leaf(3, 5, 96, dtype=torch.bfloat16)
    results = both_ways(layer_norm, x, weight, dy)
    assert [t.dtype for t in results] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_three_way(results, both_ways(layer_norm_reference, x, weight, dy), truth(x, weight, dy), ulps=1.0)
    frozen = gradients([layer_norm(x, weight.detach())], [x], [dy])
    assert torch.equal(results[0], frozen[0])
    torch.testing.assert_close(results[1], frozen[1], rtol=2**-7, atol=1e-6)


@kernel_test
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("view", ["packed heads", "heads first", "expanded", "transposed"])
def test_any_strides_of_input_and_gradient(view: str, per_head: bool) -> None:
    views: dict[str, Callable[[], Tensor]] = {
        "packed heads": lambda: leaf(2, 5, 8, 32)[:, :, 2:5],
        "heads first": lambda: leaf(2, 3, 5, 32).transpose(1, 2),
        "expanded": lambda: leaf(1, 1, 1, 1).expand(2, 5, 3, 32),
        "transposed": lambda: leaf(2, 5, 32, 3).mT,
    }
    x, dy = views[view](), views[view]().detach()
    weight = leaf(3, 64)[:, ::2] if per_head else leaf(64)[::2]
    before = [tensor.detach().clone() for tensor in (x, dy, weight)]
    strided = both_ways(layer_norm, x, weight, dy)
    plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    contiguous = both_ways(layer_norm, plain, weight.detach().contiguous().requires_grad_(), dy.contiguous())
    for ours, expected in zip(strided, contiguous, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, was) for tensor, was in zip((x, dy, weight), before, strict=True))


@kernel_test
def test_a_large_mean_costs_no_digits() -> None:
    """The variance is that of the differences, not mean(x^2) - mean(x)^2."""
    x = (torch.randn(4, 96, device=DEVICE) + 3000).requires_grad_()
    weight, dy = leaf(96), leaf(4, 96)
    assert_three_way(
        both_ways(layer_norm, x, weight, dy),
        both_ways(layer_norm_reference, x, weight, dy),
        truth(x, weight, dy),
        ulps=3000,  # of fp32: an ulp of the mean
    )


@kernel_test
def test_deterministic_checkpointed_and_under_autocast() -> None:
    x, weight, dy = leaf(67, 4, 96, dtype=torch.bfloat16), leaf(4, 96, dtype=torch.bfloat16), leaf(67, 4, 96)
    plain = both_ways(layer_norm, x, weight, dy)
    again = both_ways(lambda *args: checkpoint(layer_norm, *args, use_reentrant=False), x, weight, dy)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = both_ways(layer_norm, x, weight, dy)
    for a, b, c in zip(plain, again, cast, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@kernel_test
@pytest.mark.parametrize(("shape", "weight_shape"), [((0, 64), (64,)), ((2, 0, 3, 64), (3, 64))], ids=str)
def test_empty(shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    y, dx, dw = both_ways(layer_norm, leaf(*shape), leaf(*weight_shape), torch.zeros(shape, device=DEVICE))
    assert y.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros(weight_shape, device=DEVICE))


@kernel_test
def test_c_int32_offset() -> None:
    x, dy = far_apart(2, 3, 64)
    weight = leaf(3, 64, dtype=torch.bfloat16)
    far = both_ways(layer_norm, x.requires_grad_(), weight, dy)
    near = both_ways(layer_norm, x.detach().contiguous().requires_grad_(), weight, dy.contiguous())
    for ours, expected in zip(far, near, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_c_int32_offset_full_size() -> None:
    """Past 2^31 elements: the last rows equal the same rows computed alone."""
    rows = 2**31 // 8192 + 3
    x = torch.randn(rows, 8192, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = leaf(8192, dtype=torch.bfloat16).detach()
    dy = torch.randn(rows, 8192, dtype=torch.bfloat16, device="cuda")
    y, dx = gradients([layer_norm(x, weight)], [x], [dy])
    tail = x.detach()[-3:].clone().requires_grad_()
    expected = gradients([layer_norm(tail, weight)], [tail], [dy[-3:]])
    torch.testing.assert_close(y[-3:], expected[0], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(dx[-3:], expected[1], rtol=2**-7, atol=1e-6)


@cpu_path_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "name"), [("cohere", "Cohere"), ("cohere2", "Cohere2")])
@pytest.mark.parametrize("weight_shape", [(96,), (3, 96)], ids=str)
def test_cpu_path_equals_transformers_bit_by_bit(
    weight_shape: tuple[int, ...], family: str, name: str, dtype: torch.dtype
) -> None:
    stock = import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(stock, name + "LayerNorm")(weight_shape, eps=1e-4).to(dtype)
    torch.nn.init.normal_(module.weight)
    x, dy = torch.randn(2, 5, 3, 96).to(dtype).requires_grad_(), torch.randn(2, 5, 3, 96)
    expected = gradients([module(x)], [x, module.weight], [dy])
    for a, b in zip(both_ways(layer_norm, x, module.weight, dy, 1e-4), expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@cpu_path_test
def test_compiles_without_a_graph_break() -> None:
    x, weight, dy = leaf(5, 96), leaf(96), leaf(5, 96)
    assert_compiles(lambda f: both_ways(f, x, weight, dy), layer_norm, layer_norm_reference)


def test_errors_say_what_to_do() -> None:
    for shape in ((4,), (3, 8), (2, 2, 8), ()):
        with pytest.raises(ValueError, match=r"layer_norm: weight has shape .*, expected the last size or two of x"):
            layer_norm(torch.ones(2, 2, 8), torch.ones(shape))
