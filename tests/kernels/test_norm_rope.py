"""fastlm/kernels/norm_rope.py against fp64 mathematics, torch in the same dtype, and transformers."""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlm.kernels.norm_rope import _Launch, norm_rope, norm_rope_fwd_bwd, norm_rope_reference
from fastlm.kernels.rms_norm import RMSNormOptions
from fastlm.kernels.rope import rope_reference

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
    leaf,
    run_interpreted,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FLAVOURS = {
    "qwen3": dict(offset=0.0, cast_before_scale=True),
    "gemma3": dict(offset=1.0, cast_before_scale=False),
}
SHAPES = [  # B, T, query heads, key heads, D, R
    (1, 1, 4, 1, 64, 64),  # one token
    (2, 3, 3, 2, 80, 80),  # half a head is no power of two; odd head counts
    (2, 2, 4, 4, 128, 32),  # partial
    (1, 2, 2, 1, 80, 20),  # partial, with 10 pairs of 40
    (1, 9, 20, 1, 256, 256),  # more query heads than one block takes; programs loop over tokens
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def random_tables(
    batch: int, tokens: int, rotated: int, layout: str = "half", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, R], laid out as the layout has it; scaled, as yarn does."""
    angles = torch.rand(batch, tokens, rotated // 2, device=DEVICE) * 50
    if layout == "interleaved":
        angles = angles.repeat_interleave(2, dim=-1)
    elif layout != "half_once":
        angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * 1.25).to(dtype), (angles.sin() * 1.25).to(dtype)


def random_inputs(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "half", together: bool = False
) -> list[Tensor]:
    """q, k, both weights, cos and sin; together: one norm over all heads."""
    batch, tokens, q_heads, k_heads, head_dim, rotated = shape
    heads = [leaf(batch, tokens, n, head_dim, dtype=dtype) for n in (q_heads, k_heads)]
    weights = [leaf(n * head_dim if together else head_dim, dtype=dtype) for n in (q_heads, k_heads)]
    return [*heads, *weights, *random_tables(batch, tokens, rotated, layout, dtype)]


def both_ways(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], incoming: Sequence[Tensor], **kwargs: object
) -> list[Tensor]:
    """Both outputs and the gradients of q, k and the weights, the first four inputs."""
    return gradients(function(*inputs, **kwargs), inputs[:4], incoming)


def truth(
    inputs: Sequence[Tensor], incoming: Sequence[Tensor], offset: float = 0.0, layout: str = "half"
) -> list[Tensor]:
    doubles = [double_leaf(tensor) for tensor in inputs]
    q, k, q_weight, k_weight, cos, sin = doubles
    rows = [x.flatten(2) if weight.shape[0] != x.shape[-1] else x for x, weight in ((q, q_weight), (k, k_weight))]
    q, k = (
        (row / (row.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + weight)).view(x.shape)
        for row, x, weight in zip(rows, (q, k), (q_weight, k_weight), strict=True)
    )
    return gradients(rope_reference(q, k, cos, sin, layout=layout), doubles[:4], incoming)


@kernel_test
@pytest.mark.parametrize(
    ("layout", "dtype", "flavour"),
    [
        *(("half", dtype, flavour) for dtype in DTYPES[:2] for flavour in FLAVOURS),
        ("half", torch.float16, "qwen3"),
        ("interleaved", torch.float32, "qwen3"),
        ("interleaved_halves", torch.bfloat16, "gemma3"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_way(shape: tuple[int, ...], layout: str, dtype: torch.dtype, flavour: str) -> None:
    inputs, options = random_inputs(shape, dtype, layout), FLAVOURS[flavour]
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    assert_three_way(
        both_ways(norm_rope, inputs, incoming, layout=layout, **options),
        both_ways(norm_rope_reference, inputs, incoming, layout=layout, **options),
        truth(inputs, incoming, options["offset"], layout),
        # sums in another order than torch's; a rounding in the middle may fall the other way
        ulps=1.0 + options["cast_before_scale"],
    )


@kernel_test
@pytest.mark.parametrize("cast_before_scale", [True, False])  # olmo2: False
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 9, 4, 2, 64, 64), (1, 5, 5, 3, 80, 40), (1, 3, 3, 1, 96, 96), (1, 2, 40, 8, 128, 128)],  # 40: 64 in a block
    ids=str,
)
def test_three_way_with_one_norm_of_all_heads(
    shape: tuple[int, ...], dtype: torch.dtype, cast_before_scale: bool
) -> None:
    inputs, options = random_inputs(shape, dtype, together=True), {"cast_before_scale": cast_before_scale}
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    results = both_ways(norm_rope, inputs, incoming, **options)
    assert_three_way(
        results,
        both_ways(norm_rope_reference, inputs, incoming, **options),
        truth(inputs, incoming),
        ulps=1.0 + cast_before_scale,
    )
    q, k, q_weight, k_weight, *tables = inputs
    frozen = gradients(norm_rope(q, k, q_weight.detach(), k_weight.detach(), *tables, **options), [q, k], incoming)
    for a, b in zip(results, frozen, strict=False):
        torch.testing.assert_close(a, b, rtol=2**-7 if dtype != torch.float32 else 1e-6, atol=1e-6)


@kernel_test
def test_one_norm_of_all_heads_takes_any_strides() -> None:
    packed = torch.randn(2, 3, 8, 64, device=DEVICE)  # [B, T, heads of q, k and v, D]
    q, k = packed[:, :, :4].requires_grad_(), packed[:, :, 4:6].requires_grad_()
    _, _, *rest = random_inputs((2, 3, 4, 2, 64, 64), together=True)
    incoming = [torch.randn(2, 4, 3, 64, device=DEVICE).transpose(1, 2), torch.randn_like(k)]
    strided = both_ways(norm_rope, [q, k, *rest], incoming)
    copies = [x.detach().contiguous().requires_grad_() for x in (q, k)]
    for ours, expected in zip(strided, both_ways(norm_rope, [*copies, *rest], incoming), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)


@kernel_test
def test_a_row_too_wide_for_one_block_takes_the_torch_path() -> None:
    inputs = random_inputs((1, 2, 72, 8, 128, 128), together=True)
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    wide, reference = (both_ways(f, inputs, incoming) for f in (norm_rope, norm_rope_reference))
    assert all(torch.equal(a, b) for a, b in zip(wide, reference, strict=True))


@kernel_test
def test_fp32_weights_and_tables_promote_like_torch() -> None:
    inputs = random_inputs((2, 3, 4, 2, 64, 64))
    inputs[:2] = [leaf(*tensor.shape, dtype=torch.bfloat16) for tensor in inputs[:2]]
    incoming = [torch.randn(tensor.shape, device=DEVICE) for tensor in inputs[:2]]
    for options in FLAVOURS.values():
        results = both_ways(norm_rope, inputs, incoming, **options)
        promoted = torch.float32 if options["cast_before_scale"] else torch.bfloat16
        assert [t.dtype for t in results] == [promoted] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2
        assert_three_way(
            results,
            both_ways(norm_rope_reference, inputs, incoming, **options),
            truth(inputs, [tensor.to(promoted) for tensor in incoming], options["offset"]),
            ulps=2 * 2**16,  # fp32 results of a value cast to bf16 in the middle: two ulps of bf16
        )


@kernel_test
@pytest.mark.parametrize(("layout", "rotated"), [("half", 64), ("half", 32), ("interleaved", 64)])
def test_any_strides_and_nothing_is_written_but_the_outputs(layout: str, rotated: int) -> None:
    packed = torch.randn(2, 2, 8, 64, device=DEVICE)  # [B, T, heads of q, k and v, D]
    heads_first = torch.randn(2, 4, 2, 64, device=DEVICE).transpose(1, 2)
    across = torch.randn(2, 2, 64, 4, device=DEVICE).mT
    expanded = torch.randn(1, 1, 4, 1, device=DEVICE).expand(2, 2, 4, 64)
    k = dk = packed[:, :, 4:6]
    views = [packed[:, :, :4], heads_first, across, expanded]
    strided_weight = torch.randn(64, 2, device=DEVICE)[:, 0]
    tables = random_tables(2, 2, rotated, layout)
    for q, dq in zip(views, [*views[1:], packed[:, :, 2:6]], strict=True):
        tensors = [q, k, strided_weight, torch.randn(64, device=DEVICE), *tables, dq, dk]
        before = [tensor.clone() for tensor in tensors]
        strided, contiguous = (
            both_ways(norm_rope, [*(t.requires_grad_() for t in copies[:4]), *copies[4:6]], copies[6:], layout=layout)
            for copies in ([t.detach() for t in tensors], [t.detach().clone().contiguous() for t in tensors])
        )
        for ours, expected in zip(strided, contiguous, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)  # products and sums fuse as they like
            assert ours.is_contiguous()
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor, was)


@kernel_test
def test_one_table_for_the_whole_batch_and_strided_tables() -> None:
    *inputs, cos, sin = random_inputs((2, 3, 2, 1, 64, 64))
    cos, sin = cos[:1], sin[:1]
    expected = norm_rope(*inputs, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))
    strided = cos.mT.contiguous().mT, sin.mT.contiguous().mT
    for c, s in ((cos, sin), (cos.expand(2, 3, 64), sin.expand(2, 3, 64)), strided):
        assert all(torch.equal(a, b) for a, b in zip(norm_rope(*inputs, c, s), expected, strict=True))


@kernel_test
def test_frozen_weights_get_no_gradient() -> None:
    inputs = random_inputs((1, 9, 4, 2, 64, 64))
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    trained = both_ways(norm_rope, inputs, incoming)
    q, k, q_weight, k_weight, *tables = inputs
    frozen = gradients(norm_rope(q, k, q_weight.detach(), k_weight.detach(), *tables), [q, k], incoming)
    for a, b in zip(trained, frozen, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    detached = [tensor.detach() for tensor in inputs]
    assert len(norm_rope_fwd_bwd(detached, incoming, RMSNormOptions(1e-6, 0.0, True))) == 2
    outputs = norm_rope(q, k, q_weight.detach(), k_weight, *tables)
    (dk_weight,) = torch.autograd.grad(list(outputs), [k_weight], incoming)
    assert torch.equal(dk_weight, trained[5])


@kernel_test
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("way", ["forward", "backward", "weight gradients"])
def test_every_launch_gives_the_same(way: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one turn, and loops with one, two and three tokens in flight; heads in one block and in several."""
    inputs = [tensor.detach() for tensor in random_inputs((2, 5, 4, 2, 64, 64), together=together)]
    incoming = None if way == "forward" else [torch.randn_like(tensor) for tensor in inputs[:2]]
    blocks = [(4, 2)] if together else [(4, 2), (2, 2), (1, 1)]
    results = []
    for (q_block, k_block), (programs, stages) in product(blocks, [(10, 0), (10, 1), (4, 1), (3, 2), (1, 3)]):
        launch = _Launch(q_block, k_block, 4, programs, stages)
        monkeypatch.setattr(_Launch, "of", lambda *_, launch=launch: launch)
        results.append(
            norm_rope_fwd_bwd(inputs, incoming, RMSNormOptions(1e-6, 0.0, False), "half", way == "weight gradients")
        )
    for result in results:
        assert len(result) == (4 if way == "weight gradients" else 2)
        for ours, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)  # sums and products fuse as they like


@kernel_test
def test_one_output_used() -> None:
    inputs = random_inputs((1, 3, 4, 2, 64, 64))
    for index in range(2):
        ours, stock = (
            torch.autograd.grad(function(*inputs)[index].sum(), inputs[:4], allow_unused=True)
            for function in (norm_rope, norm_rope_reference)
        )
        for a, b in zip(ours, stock, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-5, atol=1e-5)


@kernel_test
def test_weight_gradients_are_deterministic_and_their_own() -> None:
    """The same bits twice; and gradients cut from one sum can be changed in place one by one."""
    inputs = random_inputs((1, 9, 4, 2, 64, 64), torch.bfloat16)
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    first, second = (both_ways(norm_rope, inputs, incoming)[4:] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for weight in inputs[2:4]:
        weight.grad = None
    for _ in range(2):
        torch.autograd.backward(norm_rope(*inputs), incoming)
    inputs[2].grad.mul_(0)
    assert torch.equal(inputs[3].grad, first[1] * 2)


@kernel_test
@pytest.mark.parametrize("shape", [(1, 0), (0, 3)], ids=str)
def test_empty(shape: tuple[int, int]) -> None:
    inputs = random_inputs((*shape, 4, 2, 64, 64))
    results = both_ways(norm_rope, inputs, [tensor.detach() for tensor in inputs[:2]])
    assert [tuple(t.shape) for t in results[:4]] == [(*shape, 4, 64), (*shape, 2, 64)] * 2
    assert all(torch.equal(dweight, torch.zeros(64, device=DEVICE)) for dweight in results[4:])


@kernel_test
def test_c_inplace_saved_tensors_checkpoint_and_autocast() -> None:
    """q and k come from an op that saves its output and feed a second loss too: they must not change."""

    def run(function: Callable[..., Sequence[Tensor]]) -> Tensor:
        q, k = x[..., :4, :].exp(), x[..., 4:, :].tanh()  # both save their outputs
        q_out, k_out = function(q, k, *rest)
        return (q_out * q).sum() + (k_out.square() * k).sum() + q.square().sum()

    _, _, *rest = random_inputs((1, 3, 4, 2, 64, 64))
    x = leaf(1, 3, 6, 64)
    expected = torch.autograd.grad(run(norm_rope_reference), x)[0]
    losses = [run(norm_rope), checkpoint(run, norm_rope, use_reentrant=False)]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        losses.append(run(norm_rope))
    for loss in losses:
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected, rtol=1e-4, atol=1e-4)


@kernel_test
@pytest.mark.parametrize("apart", ["tokens", "heads"])
def test_c_int32_offset(apart: str) -> None:
    far = far_apart(4, 3, 64)  # [4, 3, 64] each
    far = [tensor[None] if apart == "tokens" else tensor.transpose(0, 1)[None] for tensor in far]
    _, _, *rest = random_inputs((1, far[0].shape[1], 1, 1, 64, 64), torch.bfloat16)
    results, expected = (
        both_ways(norm_rope, [q.detach().requires_grad_(), k.detach().requires_grad_(), *rest], [dq, dk])
        for q, k, dq, dk in (far, [tensor.contiguous() for tensor in far])
    )
    for ours, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2**-7, atol=1e-6)  # an ulp: sums fuse as they like


@pytest.mark.gpu
def test_c_int32_offset_full_size() -> None:
    """Past 2^31 elements: the last tokens equal the same tokens computed alone."""
    tokens = 2**31 // (32 * 128) + 3
    inputs = random_inputs((1, tokens, 32, 8, 128, 128), torch.bfloat16)
    inputs[2:4] = [weight.detach() for weight in inputs[2:4]]
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    tail = [t.detach()[:, -3:].clone().requires_grad_() for t in inputs[:2]]
    results, expected = (
        gradients(norm_rope(*arguments), arguments[:2], grads)
        for arguments, grads in (
            (inputs, incoming),
            ([*tail, *inputs[2:4], *(t[:, -3:] for t in inputs[4:])], [t[:, -3:] for t in incoming]),
        )
    )
    for ours, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(ours[:, -3:], wanted, rtol=2**-7, atol=1e-6)


@cpu_path_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "name", "rotated"),
    [("qwen3", "Qwen3", 64), ("gemma3", "Gemma3", 64), ("qwen3_next", "Qwen3Next", 16), ("olmo2", "Olmo2", 64)],
)
def test_cpu_path_equals_transformers_bit_by_bit(family: str, name: str, rotated: int, dtype: torch.dtype) -> None:
    stock = import_module(f"transformers.models.{family}.modeling_{family}")
    q, k, *_, cos, sin = (x.detach().cpu() for x in random_inputs((2, 5, 4, 2, 64, rotated), dtype))
    q, k = q.requires_grad_(), k.requires_grad_()
    together = family == "olmo2"
    sizes = [x.shape[2] * 64 if together else 64 for x in (q, k)]
    norms = [getattr(stock, name + "RMSNorm")(size, eps=1e-6).to(dtype) for size in sizes]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    inputs = [q, k, *(norm.weight for norm in norms)]
    # heads stay where they are: transposed, the weights' gradients are summed in another order
    rows = [x.flatten(2) if together else x for x in (q, k)]
    normed = [norm(row).view(x.shape) for norm, row, x in zip(norms, rows, (q, k), strict=True)]
    outputs = stock.apply_rotary_pos_emb(*normed, cos, sin, unsqueeze_dim=2)
    incoming = [torch.randn(tensor.shape) for tensor in (q, k)]
    options = {"cast_before_scale": False} if together else FLAVOURS["qwen3" if family == "qwen3" else "gemma3"]
    ours = gradients(norm_rope(*inputs, cos, sin, **options), inputs, incoming)
    for a, b in zip(ours, gradients(outputs, inputs, incoming), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_tables_that_require_grad_get_it() -> None:
    *inputs, cos, sin = random_inputs((1, 3, 2, 1, 16, 16))
    (dcos,) = torch.autograd.grad(norm_rope(*inputs, cos.requires_grad_(), sin)[0].sum(), cos)
    assert bool((dcos != 0).all())


@cpu_path_test
def test_compiles_without_a_graph_break() -> None:
    inputs = random_inputs((1, 3, 2, 1, 16, 16))
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    assert_compiles(lambda f: both_ways(f, inputs, incoming), norm_rope, norm_rope_reference)


def test_errors_say_what_to_do() -> None:
    q, k, weight, table = torch.ones(1, 3, 2, 16), torch.ones(1, 3, 1, 16), torch.ones(16), torch.ones(1, 3, 16)
    with pytest.raises(ValueError, match=r"norm_rope: weight has shape \(8,\), expected the last size of x"):
        norm_rope(q, k, weight, weight[:8], table, table)
    with pytest.raises(ValueError, match=r"norm_rope: offset=1\.0 .* pass cast_before_scale=False"):
        norm_rope(q, k, weight, weight, table, table, offset=1.0)
    with pytest.raises(ValueError, match="unknown layout 'neox', expected one of half"):
        norm_rope(q, k, weight, weight, table, table, layout="neox")
