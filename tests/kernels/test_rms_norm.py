"""fastlm/kernels/rms_norm.py against fp64 mathematics, torch in the same dtype, and transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlm.kernels.rms_norm import (
    RMSNormOptions,
    add_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_beside,
    rms_norm_bwd,
    rms_norm_fwd,
    rms_norm_reference,
)

from .interpreter import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_three_way,
    cpu_path_test,
    double_leaf,
    far_apart,
    gradients,
    interpreting,
    kernel_test,
    leaf,
    run_interpreted,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FLAVOURS = {
    "llama": dict(offset=0.0, cast_before_scale=True),
    "gemma": dict(offset=1.0, cast_before_scale=False),
    "olmo2": dict(offset=0.0, cast_before_scale=False),
}
ULPS = 1.0  # the row's mean of squares is summed in another order than torch's
SHAPES = [
    (1, 1, 64),  # one token
    (3, 5, 96),  # a width that is no power of two
    (2, 7, 3, 80),  # query and key norms: several short rows share a program
    (1, 37, 1, 128),  # more rows than a program takes, and a partly filled last program
    (19, 4100),  # longer than a block of 4096; more rows than programs, so that weight partials loop
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def truth(x: Tensor, weight: Tensor, dy: Tensor, offset: float = 0.0) -> list[Tensor]:
    x, weight = double_leaf(x), double_leaf(weight)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + weight)
    return gradients([y], [x, weight], [dy])


def both_ways(function: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor, **kwargs: object) -> list[Tensor]:
    return gradients([function(x, weight, **kwargs)], [x, weight], [dy])


@kernel_test
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_way(shape: tuple[int, ...], dtype: torch.dtype, flavour: str) -> None:
    options = FLAVOURS[flavour]
    x, weight, dy = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype), leaf(*shape, dtype=dtype)
    assert_three_way(
        both_ways(rms_norm, x, weight, dy, **options),
        both_ways(rms_norm_reference, x, weight, dy, **options),
        truth(x, weight, dy, options["offset"]),
        ulps=ULPS + (1 if options["cast_before_scale"] else 0),  # a rounding in the middle may fall the other way
    )


@kernel_test
def test_fp32_weight_promotes_like_torch() -> None:
    x, weight, dy = leaf(3, 5, 96, dtype=torch.bfloat16), leaf(96), leaf(3, 5, 96)
    results = both_ways(rms_norm, x, weight, dy)
    assert [t.dtype for t in results] == [torch.float32, torch.bfloat16, torch.float32]
    assert_three_way(
        results,
        both_ways(rms_norm_reference, x, weight, dy),
        truth(x, weight, dy, 0.0),
        ulps=2 * 2**16,  # fp32 results of a value cast to bf16 in the middle: two ulps of bf16
    )
    gemma = rms_norm(x, weight, offset=1.0, cast_before_scale=False)
    assert gemma.dtype == torch.bfloat16


@kernel_test
@pytest.mark.parametrize("view", ["packed heads", "every other row", "expanded rows", "transposed", "expanded all"])
def test_any_strides_of_input_and_gradient(view: str) -> None:
    views: dict[str, Callable[[], Tensor]] = {
        "packed heads": lambda: leaf(2, 5, 8, 32)[:, :, 2:5],
        "every other row": lambda: leaf(10, 3, 64)[::2],
        "expanded rows": lambda: leaf(1, 3, 64).expand(4, 3, 64),
        "transposed": lambda: leaf(4, 64, 3).mT,
        "expanded all": lambda: leaf(1, 1, 1).expand(4, 3, 64),  # what .sum().backward() sends
    }
    x, dy = views[view](), views[view]().detach()
    before = dy.clone()
    weight = leaf(x.shape[-1])
    strided = both_ways(rms_norm, x, weight, dy)
    plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    contiguous = both_ways(rms_norm, plain, weight, dy.contiguous())
    for ours, expected in zip(strided, contiguous, strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(dy, before) and torch.equal(x, plain)


@kernel_test
def test_frozen_weight_gets_no_gradient_and_the_same_dx() -> None:
    x, weight, dy = leaf(19, 96), leaf(96), leaf(19, 96).detach()
    trained = both_ways(rms_norm, x, weight, dy)
    frozen = gradients([rms_norm(x, weight.detach())], [x], [dy])
    assert torch.equal(trained[0], frozen[0])
    torch.testing.assert_close(trained[1], frozen[1], rtol=1e-6, atol=1e-6)  # other blocks: sums fuse otherwise
    options = RMSNormOptions(1e-6, 0.0, True)
    _, normalised, statistics = rms_norm_fwd(x.detach(), weight.detach(), options)
    assert rms_norm_bwd(dy, normalised, weight.detach(), statistics, options, weight_gradient=False)[1] is None
    only_weight = torch.autograd.grad(rms_norm(x.detach(), weight), weight, dy)[0]
    assert torch.equal(only_weight, trained[2])


@kernel_test
def test_weight_gradient_is_deterministic() -> None:
    x, weight, dy = leaf(67, 96, dtype=torch.bfloat16), leaf(96, dtype=torch.bfloat16), leaf(67, 96)
    first, second = (both_ways(rms_norm, x, weight, dy)[2] for _ in range(2))
    assert torch.equal(first, second)


@kernel_test
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 3, 64), (4, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    y, dx, dw = both_ways(rms_norm, leaf(*shape), leaf(shape[-1]), torch.zeros(shape, device=DEVICE))
    assert y.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros(shape[-1], device=DEVICE))


@kernel_test
def test_nan_and_infinity_stay_in_their_row() -> None:
    x = torch.randn(3, 96, device=DEVICE)
    clean = rms_norm(x, torch.ones(96, device=DEVICE))
    x[0, 5], x[2, 7] = float("nan"), float("inf")
    y = rms_norm(x, torch.ones(96, device=DEVICE))
    assert y[0].isnan().all() and y[2, 7].isnan() and torch.equal(y[1], clean[1])


@kernel_test
@pytest.mark.parametrize("shape", [(2, 96), (1, 2, 1, 96)], ids=str)
def test_c_norm_plus_one_fp32(shape: tuple[int, ...]) -> None:
    """(1 + weight) in fp32: 15.8125 gives 16.8125, where bf16 would round to 16.75."""
    x = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((96,), 15.8125, dtype=torch.bfloat16, device=DEVICE)
    y32 = rms_norm(x.float(), weight, eps=0.0, offset=1.0, cast_before_scale=False)
    assert torch.equal(y32, torch.full(shape, 16.8125, device=DEVICE))

    x = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
    x[..., 3] *= 1000
    x[..., 77] *= 1000
    x, weight = x.requires_grad_(), weight.requires_grad_()
    dy = torch.randn(shape, device=DEVICE)
    options = FLAVOURS["gemma"]
    assert_three_way(
        both_ways(rms_norm, x, weight, dy, **options),
        both_ways(rms_norm_reference, x, weight, dy, **options),
        truth(x, weight, dy.bfloat16(), 1.0),
        ulps=ULPS,
    )


@kernel_test
def test_checkpoint_and_autocast_change_nothing() -> None:
    x, weight, dy = leaf(5, 96, dtype=torch.bfloat16), leaf(96, dtype=torch.bfloat16), leaf(5, 96)
    plain = both_ways(rms_norm, x, weight, dy)
    again = both_ways(lambda x, w: checkpoint(rms_norm, x, w, use_reentrant=False), x, weight, dy)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = both_ways(rms_norm, x, weight, dy)
    for a, b, c in zip(plain, again, cast, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@kernel_test
def test_c_int32_offset() -> None:
    x, dy = far_apart(2, 64)
    weight = leaf(64, dtype=torch.bfloat16)
    far = both_ways(rms_norm, x.requires_grad_(), weight, dy)
    near = both_ways(rms_norm, x.detach().contiguous().requires_grad_(), weight, dy.contiguous())
    for ours, expected in zip(far, near, strict=True):
        assert torch.equal(ours, expected)


def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """What `add_rms_norm` replaces."""
    return rms_norm_reference(x + residual, weight, **options), x + residual


def norm_then_add(x: Tensor, residual: Tensor, weight: Tensor, **options: object) -> Tensor:
    """What `rms_norm_add` replaces."""
    return residual + rms_norm_reference(x, weight, **options)


FORMS = {"before": (add_rms_norm, add_then_norm), "after": (rms_norm_add, norm_then_add)}


def residual_ways(
    function: Callable[..., object], inputs: list[Tensor], incoming: list[Tensor], **kwargs: object
) -> list[Tensor]:
    """Results (y and the sum, or y + residual) and gradients of x, residual and weight."""
    outputs = function(*inputs, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return gradients(outputs, inputs, incoming[: len(outputs)])


def residual_truth(inputs: list[Tensor], incoming: list[Tensor], form: str, offset: float = 0.0) -> list[Tensor]:
    doubles = [double_leaf(tensor) for tensor in inputs]
    x, residual, weight = doubles
    normalised = x + residual if form == "before" else x
    y = normalised / (normalised.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + weight)
    outputs = [y, normalised] if form == "before" else [residual + y]
    return gradients(outputs, doubles, incoming[: len(outputs)])


@kernel_test
@pytest.mark.parametrize("flavour", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 7, 3, 80), (9, 1, 2100)], ids=str)  # rows share a program; one a program
def test_residual_three_way(shape: tuple[int, ...], form: str, dtype: torch.dtype, flavour: str) -> None:
    options, (function, reference) = FLAVOURS[flavour], FORMS[form]
    inputs = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype)]
    incoming = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2)]
    ours = residual_ways(function, inputs, incoming, **options)
    if form == "before" and not (interpreting() and dtype == torch.bfloat16):
        assert torch.equal(ours[1], inputs[0].detach() + inputs[1].detach())  # rounded as torch rounds
    assert_three_way(
        ours,
        residual_ways(reference, inputs, incoming, **options),
        residual_truth(inputs, incoming, form, options["offset"]),
        ulps=ULPS + 1,  # a rounding in the middle (of the sum, or the norm) may fall the other way
    )


@kernel_test
def test_the_norm_is_rounded_before_the_residual_is_added() -> None:
    """1 + 2^-12 is 1 in fp16, so that nothing is left when 1 is taken away."""
    x, weight = torch.ones(3, 96, device=DEVICE).half(), torch.full((96,), 2.0**-12, device=DEVICE).half()
    assert torch.equal(rms_norm_add(x, -x, weight, 0.0, **FLAVOURS["gemma"]), torch.zeros_like(x))


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_residual_of_another_dtype_promotes_like_torch(form: str) -> None:
    shape = (3, 5, 96)
    inputs = [leaf(*shape, dtype=torch.bfloat16), leaf(*shape), leaf(96, dtype=torch.bfloat16)]
    incoming = [torch.randn(shape, device=DEVICE) for _ in range(2)]
    function, reference = FORMS[form]
    for options in FLAVOURS.values():
        assert_three_way(
            residual_ways(function, inputs, incoming, **options),
            residual_ways(reference, inputs, incoming, **options),
            residual_truth(inputs, incoming, form, options["offset"]),
            ulps=2 * 2**16 if form == "after" else ULPS,  # the norm is rounded to bf16 before the fp32 sum
        )


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_residual_of_any_strides(form: str) -> None:
    packed = torch.randn(2, 5, 8, 32, device=DEVICE)
    views = [packed[:, :, 2:5], packed[..., :3, :], torch.randn(1, 1, 3, 1, device=DEVICE).expand(2, 5, 3, 32)]
    views.append(torch.randn(2, 5, 32, 3, device=DEVICE).mT)
    weight = leaf(32)
    for turn in range(4):  # every view in every place
        x, residual, dy, dsummed = views[turn:] + views[:turn]
        results = [
            residual_ways(
                FORMS[form][0], [place(x).requires_grad_(), place(residual).requires_grad_(), weight], [dy, dsummed]
            )
            for place in (Tensor.detach, lambda t: t.clone(memory_format=torch.contiguous_format))
        ]
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def norm_beside(x: Tensor, weight: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """What `rms_norm_beside` replaces."""
    return rms_norm_reference(x, weight, **options), x


@kernel_test
@pytest.mark.parametrize("flavour", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("used", ["both", "y", "x"])
def test_beside_three_way(used: str, dtype: torch.dtype, flavour: str) -> None:
    """Gradients of the norm, of x itself, and of both, strided and expanded."""
    options, shape = FLAVOURS[flavour], (3, 5, 96)
    x, weight = leaf(*shape, dtype=dtype), leaf(96, dtype=dtype)
    incoming = [torch.randn(5, 3, 96, device=DEVICE).to(dtype).transpose(0, 1), torch.randn(5, 1, device=DEVICE)]
    incoming[1] = incoming[1].to(dtype).expand(shape)
    which = {"both": slice(0, 2), "y": slice(0, 1), "x": slice(1, 2)}[used]

    def ways(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, weight: Tensor) -> list[Tensor]:
        outputs = function(x * 1, weight, **options)[which]  # no leaf: autograd adds, and may write to, gradients
        grads = torch.autograd.grad(outputs, (x, weight), [g.to(x.dtype) for g in incoming[which]], allow_unused=True)
        return [*(y.detach() for y in outputs), *(torch.zeros_like(weight) if g is None else g for g in grads)]

    before = [gradient.clone() for gradient in incoming]
    ours = ways(rms_norm_beside, x, weight)

    def exactly(x: Tensor, weight: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (options["offset"] + weight), x

    exact = ways(exactly, *(double_leaf(t) for t in (x, weight)))
    assert_three_way(ours, ways(norm_beside, x, weight), exact, ulps=ULPS + 1)
    assert all(torch.equal(a, b) for a, b in zip(before, incoming, strict=True))


@kernel_test
@pytest.mark.parametrize("used", ["y", "summed"])
def test_only_one_result_used(used: str) -> None:
    inputs = [leaf(3, 5, 96), leaf(3, 5, 96), leaf(96)]
    grad = torch.randn(3, 5, 96, device=DEVICE)
    ours, stock = (
        torch.autograd.grad(function(*inputs)[used == "summed"], inputs, grad, allow_unused=True)
        for function in FORMS["before"]
    )
    for a, b in zip(ours, stock, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_shared_gradient_is_never_written_for_the_other_input(form: str) -> None:
    """x and residual get one gradient tensor. It must survive all that autograd adds to either of them."""

    def accumulated(function: Callable[..., object], *, leaves: bool, x_first: bool) -> list[Tensor]:
        x, residual = (t.detach().clone().requires_grad_() for t in sources)
        for step in range(3):  # .grad is kept, and added to
            a, b = (x, residual) if leaves else (x * 1, residual * 1)
            more = (a.sin().sum(), b.cos().sum()) if x_first else (b.cos().sum(), a.sin().sum())
            outputs = function(a, b, weight.detach())
            loss = sum((output * grad).sum() for output, grad in zip(
                outputs if isinstance(outputs, tuple) else (outputs,), incoming, strict=False))  # fmt: skip
            (loss + sum(more) * (step + 1)).backward()
            assert x.grad.data_ptr() != residual.grad.data_ptr()
            x.grad.mul_(2)  # as a clipper would
        return [x.grad, residual.grad]

    sources, weight = [leaf(4, 96), leaf(4, 96)], leaf(96)
    incoming = [torch.randn(4, 96, device=DEVICE) for _ in range(2)]
    for leaves in (True, False):
        for x_first in (True, False):
            ours, stock = (accumulated(f, leaves=leaves, x_first=x_first) for f in FORMS[form])
            for a, b in zip(ours, stock, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_residual_frozen_weight_checkpoint_and_autocast_change_nothing(form: str) -> None:
    function = FORMS[form][0]
    inputs = [leaf(5, 96, dtype=torch.bfloat16), leaf(5, 96, dtype=torch.bfloat16), leaf(96, dtype=torch.bfloat16)]
    incoming = [torch.randn(5, 96, device=DEVICE) for _ in range(2)]
    plain = residual_ways(function, inputs, incoming)
    again = residual_ways(lambda *t: checkpoint(function, *t, use_reentrant=False), inputs, incoming)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = residual_ways(function, inputs, incoming)
    outputs = function(*inputs[:2], inputs[2].detach())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    frozen = gradients(outputs, inputs[:2], incoming[: len(outputs)])
    for a, b, c in zip(plain, again, cast, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip(plain, frozen, strict=False):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)  # a bf16 ulp: other blocks, sums fuse otherwise


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_residual_empty(form: str) -> None:
    inputs = [leaf(2, 0, 64), leaf(2, 0, 64), leaf(64)]
    results = residual_ways(FORMS[form][0], inputs, [torch.zeros(2, 0, 64, device=DEVICE)] * 2)
    assert all(t.shape == (2, 0, 64) for t in results[:-1])
    assert torch.equal(results[-1], torch.zeros(64, device=DEVICE))


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_c_int32_offset_of_residuals(form: str) -> None:
    far = far_apart(4, 64)
    weight = leaf(64, dtype=torch.bfloat16)
    results = []
    for x, residual, *incoming in (far, [tensor.contiguous() for tensor in far]):
        inputs = [x.detach().requires_grad_(), residual.detach().requires_grad_(), weight]
        results.append(residual_ways(FORMS[form][0], inputs, incoming))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 14336])
def test_c_int32_offset_full_size(width: int) -> None:
    """Past 2^31 elements: the last rows equal the same rows computed alone."""
    rows = 2**31 // width + 3
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = leaf(width, dtype=torch.bfloat16).detach()
    dy = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    y, dx = gradients([rms_norm(x, weight)], [x], [dy])
    tail = x.detach()[-3:].clone().requires_grad_()
    expected = gradients([rms_norm(tail, weight)], [tail], [dy[-3:]])
    assert torch.equal(y[-3:], expected[0]) and torch.equal(dx[-3:], expected[1])


@cpu_path_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma", "gemma3", "olmo2", "gpt_oss"])
def test_cpu_path_equals_transformers_bit_by_bit(family: str, dtype: torch.dtype) -> None:
    from importlib import import_module

    name = {"llama": "Llama", "qwen3": "Qwen3", "phi3": "Phi3", "gemma": "Gemma", "gemma3": "Gemma3",
            "olmo2": "Olmo2", "gpt_oss": "GptOss"}[family]  # fmt: skip
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name + "RMSNorm")(96, eps=1e-5)
    module.weight.data.normal_()
    module.to(dtype)
    flavour = "gemma" if "gemma" in family else "olmo2" if family in ("olmo2", "gpt_oss") else "llama"
    x, dy = torch.randn(2, 5, 96).to(dtype).requires_grad_(), torch.randn(2, 5, 96)
    weight = module.weight
    stock = gradients([module(x)], [x, weight], [dy])
    ours = both_ways(lambda x, w: rms_norm(x, w, 1e-5, **FLAVOURS[flavour]), x, weight, dy)
    for a, b in zip(ours, stock, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@cpu_path_test
@pytest.mark.parametrize("form", FORMS)
def test_cpu_path_of_residuals_is_torch_bit_by_bit(form: str) -> None:
    inputs = [leaf(2, 5, 96, dtype=torch.bfloat16), leaf(2, 5, 96, dtype=torch.bfloat16), leaf(96)]
    incoming = [torch.randn(2, 5, 96, device=DEVICE) for _ in range(2)]
    ours, stock = (residual_ways(function, inputs, incoming, **FLAVOURS["gemma"]) for function in FORMS[form])
    for a, b in zip(ours, stock, strict=True):
        if DEVICE == "cpu":
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_compiles_without_a_graph_break() -> None:
    x, weight, dy = leaf(5, 96), leaf(96), leaf(5, 96)
    assert_compiles(lambda f: both_ways(f, x, weight, dy), rms_norm, rms_norm_reference)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), expected the last size of x \(2, 8\)"):
        rms_norm(torch.ones(2, 8), torch.ones(4))
    with pytest.raises(ValueError, match="pass cast_before_scale=False"):
        rms_norm(torch.ones(2, 8), torch.ones(8), offset=1.0)
    with pytest.raises(ValueError, match=r"add_rms_norm: residual has shape \(8,\), expected x's \(2, 8\)"):
        add_rms_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8))
    with pytest.raises(ValueError, match=r"rms_norm_add: offset=1\.0 is added"):
        rms_norm_add(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), offset=1.0)
