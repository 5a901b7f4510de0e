"""fastlm/kernels/rope.py against fp64 mathematics, torch in the same dtype, and transformers."""

from collections.abc import Callable, Sequence
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlm.kernels.rope import LAYOUTS, rope, rope_bwd, rope_fwd, rope_reference

from .interpreter import (
    DEVICE,
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

SHAPES = [  # B, T, query heads, key heads, D, R
    (1, 1, 4, 1, 64, 64),  # one token
    (2, 3, 3, 2, 80, 80),  # half a head is no power of two; odd head counts
    (1, 2, 6, 2, 96, 96),
    (2, 2, 4, 4, 128, 32),  # partial
    (1, 2, 2, 1, 80, 20),  # partial, with 10 pairs
    (1, 2, 3, 3, 192, 192),
    (1, 2, 20, 1, 256, 256),  # more query heads than one block takes
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def tables(angles: Tensor, layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin [.., T, R] of angles [.., T, R/2], laid out as the layout has it; scaled, as yarn does."""
    if layout == "interleaved":
        angles = angles.repeat_interleave(2, dim=-1)
    elif layout != "half_once":
        angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * 1.25).to(dtype), (angles.sin() * 1.25).to(dtype)


def random_tables(batch: int, tokens: int, rotated: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tables(torch.rand(batch, tokens, rotated // 2, device=DEVICE) * 50, layout, dtype)


def both_ways(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor],
    **kwargs: object,
) -> list[Tensor]:
    """Both outputs and the gradients of q and k, the first two inputs."""
    return gradients(function(*inputs, **kwargs), inputs[:2], incoming)


def truth(inputs: Sequence[Tensor], incoming: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Pair by pair as complex numbers."""
    q, k, cos, sin = (double_leaf(tensor) for tensor in inputs)
    step = 2 if layout == "interleaved" else 1
    pairs = cos.shape[-1] if layout == "half_once" else cos.shape[-1] // 2
    turn = torch.complex(cos[..., : step * pairs : step], sin[..., : step * pairs : step])[:, :, None]

    def rotate(x: Tensor) -> Tensor:
        if layout.startswith("interleaved"):
            first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = torch.complex(first, second) * turn
        dim = -1 if layout.startswith("interleaved") else -2
        return torch.cat((torch.stack((turned.real, turned.imag), dim=dim).flatten(-2), x[..., 2 * pairs :]), dim=-1)

    return gradients([rotate(q), rotate(k)], [q, k], incoming)


@kernel_test
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_place_writes_the_same(shape: tuple[int, ...], layout: str) -> None:
    batch, tokens, query_heads, key_heads, size, rotated = shape
    q, k = (torch.randn(batch, tokens, heads, size, device=DEVICE) for heads in (query_heads, key_heads))
    angles = random_tables(batch, tokens, rotated, layout, torch.float32)
    expected = rope_fwd(q, k, *angles, layout)
    rope_fwd(q, k, *angles, layout, in_place=True)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


@kernel_test
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        *((layout, torch.bfloat16) for layout in ("half", "interleaved")),  # the tables' order is no new code
        ("half", torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_way(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    batch, tokens, q_heads, k_heads, head_dim, rotated = shape
    inputs = [
        leaf(batch, tokens, q_heads, head_dim, dtype=dtype),
        leaf(batch, tokens, k_heads, head_dim, dtype=dtype),
        *random_tables(batch, tokens, rotated, layout, dtype),
    ]
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    assert_three_way(
        both_ways(rope, inputs, incoming, layout=layout),
        both_ways(rope_reference, inputs, incoming, layout=layout),
        truth(inputs, incoming, layout),
        ulps=0.5,  # two products and a sum in fp32; torch may have more luck with its roundings
    )


@kernel_test
def test_fp32_tables_for_bf16_heads() -> None:
    inputs = [leaf(2, 3, 4, 64, dtype=torch.bfloat16), leaf(2, 3, 2, 64, dtype=torch.bfloat16)]
    inputs += random_tables(2, 3, 64, "half", torch.float32)
    incoming = [torch.randn_like(tensor) for tensor in inputs[:2]]
    results = both_ways(rope, inputs, incoming)
    assert {tensor.dtype for tensor in results} == {torch.bfloat16}
    assert_three_way(results, both_ways(rope_reference, inputs, incoming), truth(inputs, incoming, "half"), ulps=0.5)


@kernel_test
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_any_strides_and_nothing_is_written_but_the_outputs(layout: str) -> None:
    packed = torch.randn(2, 3, 8, 64, device=DEVICE)  # [B, T, heads of q, k and v, D]
    heads_first = torch.randn(2, 4, 3, 64, device=DEVICE).transpose(1, 2)
    across = torch.randn(2, 3, 64, 4, device=DEVICE).mT
    expanded = torch.randn(1, 1, 4, 1, device=DEVICE).expand(2, 3, 4, 64)
    wide = torch.rand(2, 3, 70, device=DEVICE) * 50
    cos, sin = (table[..., :64] for table in (wide.cos(), wide.sin()))  # rows longer than R
    cos, sin = (torch.cat((t[..., :32], t[..., :32]), -1) if layout == "half" else t for t in (cos, sin))
    if layout == "interleaved":
        cos, sin = (table[..., ::2].repeat_interleave(2, -1) for table in (cos, sin))
    k = dk = packed[:, :, 4:6]
    views = [packed[:, :, :4], heads_first, across, expanded]
    for q, dq in zip(views, [*views[1:], packed[:, :, 2:6]], strict=True):
        tensors = [q, k, cos, sin, dq, dk]
        before = [tensor.clone() for tensor in tensors]
        inputs = [q.detach().requires_grad_(), k.detach().requires_grad_(), cos, sin]
        strided = both_ways(rope, inputs, [dq, dk], layout=layout)
        plain = [q.contiguous().requires_grad_(), k.contiguous().requires_grad_(), cos.clone(), sin.clone()]
        contiguous = both_ways(rope, plain, [dq.contiguous(), dk.contiguous()], layout=layout)
        for ours, expected in zip(strided, contiguous, strict=True):
            # one product of two is fused with the sum, and which one is the compiler's choice for each set of strides
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
            assert ours.is_contiguous()
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor, was)


@kernel_test
def test_one_table_for_the_whole_batch_and_strided_tables() -> None:
    q, k = leaf(2, 3, 2, 64), leaf(2, 3, 1, 64)
    cos, sin = random_tables(1, 3, 64, "half", torch.float32)
    expected = rope(q, k, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))
    strided = cos.mT.contiguous().mT, sin.mT.contiguous().mT
    for c, s in ((cos, sin), (cos.expand(2, 3, 64), sin.expand(2, 3, 64)), strided):
        assert all(torch.equal(a, b) for a, b in zip(rope(q, k, c, s), expected, strict=True))


@kernel_test
def test_backward_is_the_transpose() -> None:
    """<dy, R x> = <R^T dy, x>, to fp32."""
    q, k = leaf(1, 5, 3, 64).detach(), leaf(1, 5, 2, 64).detach()
    cos, sin = random_tables(1, 5, 64, "half", torch.float32)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    for out, x, grad, dx in zip(rope(q, k, cos, sin), (q, k), (dq, dk), rope_bwd(dq, dk, cos, sin), strict=True):
        left, right = (out.double() * grad).sum(), (dx.double() * x).sum()
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)


@kernel_test
@pytest.mark.parametrize("shape", [(1, 0), (0, 3)], ids=str)
def test_empty(shape: tuple[int, int]) -> None:
    q, k = leaf(*shape, 4, 64), leaf(*shape, 2, 64)
    cos = torch.ones(*shape, 64, device=DEVICE)
    results = both_ways(rope, [q, k, cos, cos], [q.detach(), k.detach()])
    assert [tuple(t.shape) for t in results] == [(*shape, 4, 64), (*shape, 2, 64)] * 2


@kernel_test
@pytest.mark.parametrize("checkpointed", [False, True])
def test_c_inplace_saved_tensors(checkpointed: bool) -> None:
    """q and k come from an op that saves its output and feed a second loss too: they must not change."""

    def loss(function: Callable[..., Sequence[Tensor]], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = x[..., :4, :].exp(), x[..., 4:, :].tanh()  # both save their outputs
        q_out, k_out = function(q, k, cos, sin)
        return (q_out * q).sum() + (k_out.square() * k).sum() + q.square().sum(), q, k

    cos, sin = random_tables(1, 3, 64, "half", torch.float32)
    x = leaf(1, 3, 6, 64)

    def run(function: Callable[..., Sequence[Tensor]]) -> Tensor:
        return loss(function, x)[0]

    ours = checkpoint(run, rope, use_reentrant=False) if checkpointed else run(rope)
    expected = torch.autograd.grad(run(rope_reference), x)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], expected, rtol=1e-5, atol=1e-5)
    _, q, k = loss(rope, x)
    assert torch.equal(q, x[..., :4, :].exp()) and torch.equal(k, x[..., 4:, :].tanh())


@kernel_test
@pytest.mark.parametrize(("head_dim", "rotated"), [(128, 32), (80, 20)])
def test_c_partial_rotary(head_dim: int, rotated: int) -> None:
    """phi3 rotates the first dimensions; the rest passes through bit by bit, NaN payloads included."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    q, k = leaf(1, 3, 4, head_dim), leaf(1, 3, 2, head_dim)
    cos, sin = random_tables(1, 3, rotated, "half", torch.float32)
    incoming = [torch.randn_like(q), torch.randn_like(k)]
    ours = both_ways(rope, [q, k, cos, sin], incoming)
    stock = gradients(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), [q, k], incoming)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(a[..., rotated:], b[..., rotated:])
    odd = q.detach().clone()
    odd[..., rotated:] = torch.tensor([0x7FC12345], dtype=torch.int32, device=DEVICE).view(torch.float32)
    passed = rope(odd, k.detach(), cos, sin)[0][..., rotated:]
    assert torch.equal(passed.contiguous().view(torch.int32), odd[..., rotated:].contiguous().view(torch.int32))


@kernel_test
def test_c_partial_rotary_across_the_whole_head() -> None:
    """Zero-padded frequencies: R = D, pairs (i, i + D/2); pairs that turn by nothing do not change."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.rand(1, 3, 64, device=DEVICE) * 50
    angles[..., 16:] = 0
    cos, sin = (table / 1.25 for table in tables(angles, "half"))
    q, k = leaf(1, 3, 4, 128), leaf(1, 3, 2, 128)
    incoming = [torch.randn_like(q), torch.randn_like(k)]
    ours = both_ways(rope, [q, k, cos, sin], incoming)
    stock = gradients(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), [q, k], incoming)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[0][..., 16:64], q.detach()[..., 16:64])
    assert torch.equal(ours[0][..., 80:], q.detach()[..., 80:])


@kernel_test
@pytest.mark.parametrize("apart", ["tokens", "heads"])
def test_c_int32_offset(apart: str) -> None:
    far = far_apart(4, 3, 64)  # [4, 3, 64] each
    far = [tensor[None] if apart == "tokens" else tensor.transpose(0, 1)[None] for tensor in far]
    tables = random_tables(1, far[0].shape[1], 64, "half", torch.bfloat16)
    near = [tensor.contiguous() for tensor in far]
    results, expected = (
        both_ways(rope, [q.detach().requires_grad_(), k.detach().requires_grad_(), *tables], [dq, dk])
        for q, k, dq, dk in (far, near)
    )
    for ours, wanted in zip(results, expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_c_int32_offset_full_size(layout: str) -> None:
    """Past 2^31 elements: the last tokens equal the same tokens computed alone."""
    tokens = 2**31 // (32 * 128) + 3
    q = torch.randn(1, tokens, 32, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    k = torch.randn(1, tokens, 8, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    cos, sin = random_tables(1, tokens, 128, layout, torch.bfloat16)
    incoming = [torch.randn_like(q), torch.randn_like(k)]
    results = both_ways(rope, [q, k, cos, sin], incoming, layout=layout)
    tail = [t.detach()[:, -3:].clone().requires_grad_() for t in (q, k)]
    expected = both_ways(rope, [*tail, cos[:, -3:], sin[:, -3:]], [t[:, -3:] for t in incoming], layout=layout)
    for ours, wanted in zip(results, expected, strict=True):
        assert torch.equal(ours[:, -3:], wanted)


STOCK = [  # family, layout, R of D = 64
    ("llama", "half", 64),
    ("qwen3", "half", 64),
    ("gemma2", "half", 64),
    ("phi3", "half", 48),
    ("gpt_oss", "half_once", 64),
    ("cohere", "interleaved", 64),
    ("cohere2", "interleaved", 64),
    ("glm", "interleaved_halves", 32),
    ("glm4", "interleaved_halves", 32),
    ("helium", "interleaved_halves", 64),
    ("ernie4_5", "interleaved_halves", 64),
]


@cpu_path_test
@pytest.mark.parametrize(("family", "layout", "rotated"), STOCK)
def test_cpu_path_equals_transformers_bit_by_bit(family: str, layout: str, rotated: int) -> None:
    stock_function = import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    q, k = leaf(2, 5, 4, 64), leaf(2, 5, 2, 64)
    cos, sin = random_tables(2, 5, rotated, layout, torch.float32)
    incoming = [torch.randn(2, 5, 4, 64, device=DEVICE), torch.randn(2, 5, 2, 64, device=DEVICE)]
    stock = [t.transpose(1, 2) for t in stock_function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)]
    ours = both_ways(rope, [q, k, cos, sin], incoming, layout=layout)
    for a, b in zip(ours, gradients(stock, [q, k], incoming), strict=True):
        if DEVICE == "cpu":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_tables_that_require_grad_get_it() -> None:
    q, k = leaf(1, 3, 2, 16), leaf(1, 3, 1, 16)
    cos, sin = (t.requires_grad_() for t in random_tables(1, 3, 16, "half", torch.float32))
    (dcos,) = torch.autograd.grad(rope(q, k, cos, sin)[0].sum(), cos)
    torch.testing.assert_close(dcos, q.detach().sum(2))


@cpu_path_test
def test_compiles_without_a_graph_break() -> None:
    q, k = leaf(1, 3, 2, 16), leaf(1, 3, 1, 16)
    inputs = [q, k, *random_tables(1, 3, 16, "half", torch.float32)]
    incoming = [torch.randn_like(q), torch.randn_like(k)]
    assert_compiles(lambda f: both_ways(f, inputs, incoming), rope, rope_reference, tolerance=1e-6)


def test_errors_say_what_to_do() -> None:
    q, k, table = torch.ones(1, 3, 2, 16), torch.ones(1, 3, 1, 16), torch.ones(1, 3, 16)
    with pytest.raises(ValueError, match="unknown layout 'neox', expected one of half, half_once"):
        rope(q, k, table, table, layout="neox")
    with pytest.raises(ValueError, match=r"expected q \[B, T, Hq, D\]"):
        rope(q, k.transpose(1, 2), table, table)
    with pytest.raises(ValueError, match=r"expected cos and sin \[1 or 1, 3, R\]"):
        rope(q, k, table[:, :2], table[:, :2])
    with pytest.raises(ValueError, match="to rotate 32 dimensions"):
        rope(q, k, table, table, layout="half_once")
    with pytest.raises(ValueError, match="to rotate 15 dimensions"):
        rope(q, k, table[..., :15], table[..., :15])
