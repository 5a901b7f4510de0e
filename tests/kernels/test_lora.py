"""fastlm/kernels/lora.py against fp64 mathematics and autograd in the same dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlm.kernels import lora
from fastlm.kernels.launch import interpreting
from fastlm.kernels.lora import Projection, Rotation, lora_linear, lora_linear_reference, lora_mlp, lora_mlp_reference
from fastlm.kernels.rope import rope
from tests.tiny import relative_error

from .interpreter import DEVICE, DTYPES, run_interpreted

pytestmark = pytest.mark.usefixtures("poisoned_empty", "_poisoned_new_empty")
torch_alone = pytest.mark.skipif(interpreting(), reason="no Triton kernel is what it is about")


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture
def _poisoned_new_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tensor's own new_empty allocates is full of NaN, too."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return new_empty(self, *args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def when_interpreting(values: Sequence[Any], chosen: Sequence[Any]) -> Sequence[Any]:
    """All values, or the chosen ones in the interpreter, where a launch takes milliseconds: each kernel's path once."""
    return chosen if interpreting() else values


def assert_as_exact(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor], floor: float) -> None:
    """Each of ours errs at most 1.1 times as much as torch's, and 1e-6 in fp32, an ulp in fp16, the floor in bf16.

    The interpreter truncates to bf16 where a GPU rounds, which costs an ulp more.
    """
    floors = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: floor + (2**-7 if interpreting() else 0)}
    for got, stock, exact in zip(ours, theirs, truth, strict=True):
        assert got.dtype == stock.dtype and got.shape == stock.shape
        assert relative_error(got, exact) <= 1.1 * relative_error(stock, exact) + floors[got.dtype] or got.numel() == 0


def projection(
    inputs: int, outputs: int, dtype: torch.dtype, *, rank: int | None = 4, bias: bool = False
) -> Projection:
    weight = (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype)
    a = b = None
    if rank is not None:
        a = (torch.randn(rank, inputs, device=DEVICE) * 0.3).to(dtype).requires_grad_()
        b = (torch.randn(outputs, rank, device=DEVICE) * 0.3).to(dtype).requires_grad_()
    return Projection(weight, torch.randn(outputs, device=DEVICE).to(dtype) if bias else None, a, b, 1.7)


def in_double(p: Projection) -> Projection:
    double = [None if t is None else t.detach().double() for t in (p.weight, p.bias, p.a, p.b)]
    a, b = (None if t is None else t.requires_grad_() for t in double[2:])
    return Projection(double[0], double[1], a, b, p.scale)


def run(function, x: Tensor, projections: list[Projection], douts: list[Tensor]) -> list[Tensor]:
    x = x.detach().requires_grad_()
    outputs = function(x, projections)
    leaves = [x, *(t for p in projections for t in (p.a, p.b) if t is not None)]
    grads = torch.autograd.grad(outputs, leaves, [d.to(o.dtype) for d, o in zip(douts, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *grads]


def mlp(function, activation: str):
    return lambda x, projections: (function(x, *projections, activation),)


RANKS = [(4, 4, 4), (None, 4, None), (None, None, 4), (3, None, 5)]  # of the MLP's; down's A wants the product again
CASES = {
    "one": ((7, 24, 40),),
    "qkv": ((7, 24, 40), (7, 24, 16), (7, 24, 16)),
    "plain_among_adapters": ((7, 24, 40), (None, 24, 16), (5, 24, 16)),
}


@torch_alone
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1, 3, 24), (2, 5, 24), (0, 24), (1, 24)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_linear_three_way(case, shape, bias, dtype):
    projections = [projection(i, o, dtype, rank=r, bias=bias) for r, i, o in CASES[case]]
    x = torch.randn(shape, device=DEVICE).to(dtype)
    douts = [torch.randn(*shape[:-1], o, device=DEVICE).to(dtype) for _, _, o in CASES[case]]
    ours = run(lora_linear, x, projections, douts)
    theirs = run(lora_linear_reference, x, projections, douts)
    truth = run(lora_linear_reference, x.double(), [in_double(p) for p in projections], [d.double() for d in douts])
    assert_as_exact(ours, theirs, truth, 2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_mlp_three_way(ranks, activation, dtype):
    sizes = ((24, 40), (24, 40), (40, 24))
    projections = [projection(i, o, dtype, rank=r) for r, (i, o) in zip(ranks, sizes, strict=True)]
    x, dout = (torch.randn(2, 9, 24, device=DEVICE).to(dtype) for _ in range(2))
    ours = run(mlp(lora_mlp, activation), x, projections, [dout])
    theirs = run(mlp(lora_mlp_reference, activation), x, projections, [dout])
    truth = run(mlp(lora_mlp_reference, activation), x.double(), [in_double(p) for p in projections], [dout.double()])
    assert_as_exact(ours, theirs, truth, 3e-3)


@torch_alone
@torch.no_grad()
@pytest.mark.parametrize("rank", [3, 4])
def test_what_lies_beside_a_skinny_product_is_not_read(rank):
    """As a CPU with AMX does, of odd counts of columns: zero times what is there."""
    p, x = projection(24, 64, torch.bfloat16, rank=rank), torch.randn(32, 24, device=DEVICE).bfloat16()
    low = torch.full((32, rank + 5), float("nan"), dtype=torch.bfloat16, device=DEVICE)[:, :rank]
    low.copy_(x @ p.a.t())
    y = lora._project(x, low, p.weight, None, p.b, p.scale)
    torch.testing.assert_close(y, lora._project(x, low.contiguous(), p.weight, None, p.b, p.scale))
    assert not y.isnan().any()


@torch_alone
def test_strided_and_expanded_inputs_and_gradients():
    p = projection(24, 40, torch.float32)
    x = torch.randn(6, 2, 24, device=DEVICE).transpose(0, 1)[:, ::2]
    dout = torch.randn(1, 1, 40, device=DEVICE).expand(2, 3, 40)
    for got, wanted in zip(run(lora_linear, x, [p], [dout]), run(lora_linear_reference, x, [p], [dout]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [(4, 4, 4), (3, None, 5), (None, 4, None)], ids=str)
def test_adapters_in_fp32_over_weights_in_16_bits(ranks, half):
    """Cast together in forward; a GPU writes their gradients in fp32, whatever the memory held before."""
    sizes = ((24, 40), (24, 40), (40, 24))
    made = [projection(i, o, torch.float32, rank=r) for r, (i, o) in zip(ranks, sizes, strict=True)]
    projections = [replace(p, weight=p.weight.to(half)) for p in made]
    x, dout, *douts = (torch.randn(2, 9, n, device=DEVICE).to(half) for n in (24, 24, 40, 40))
    for function, reference, count, above in (
        (mlp(lora_mlp, "silu"), mlp(lora_mlp_reference, "silu"), 3, [dout]),
        (lora_linear, lora_linear_reference, 2, douts),
    ):
        given = projections[:count]
        ours, theirs = run(function, x, given, above), run(reference, x, given, above)
        truth = run(reference, x.double(), [in_double(p) for p in given], [d.double() for d in above])
        for got, stock, exact in zip(ours, theirs, truth, strict=True):
            assert got.dtype == stock.dtype
            assert relative_error(got, exact) <= 1.1 * relative_error(stock, exact) + 4 * torch.finfo(half).eps


@torch_alone
def test_adapters_of_two_dtypes():
    first, second = projection(24, 40, torch.float32), projection(24, 16, torch.bfloat16)
    projections = [replace(first, weight=first.weight.bfloat16()), second]
    x, *douts = (torch.randn(5, n, device=DEVICE).bfloat16() for n in (24, 40, 16))
    ours, theirs = run(lora_linear, x, projections, douts), run(lora_linear_reference, x, projections, douts)
    for got, stock in zip(ours, theirs, strict=True):
        assert got.dtype == stock.dtype and relative_error(got, stock) <= 2e-2


@pytest.mark.parametrize("made", ["lora_linear", "lora_mlp"])
def test_casts_that_were_made_before(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with casts of its own; A that lie side by side are read where they are."""
    sizes = [(24, 40), (24, 40), (40, 24)] if made == "lora_mlp" else [(24, 40), (24, 16), (24, 16)]
    half = [projection(i, o, torch.bfloat16) for i, o in sizes]
    plain = [replace(p, a=p.a.detach().float().requires_grad_(), b=p.b.detach().float().requires_grad_()) for p in half]
    a = torch.cat([p.a.detach().flatten() for p in half])
    views = [v.view(4, -1) for v in a.split([p.a.numel() for p in half])]
    cast = [replace(p, casts=(v, h.b.detach())) for p, v, h in zip(plain, views, half, strict=True)]
    x = torch.randn(1, 9, 24, device=DEVICE).bfloat16()
    function = lora_linear if made == "lora_linear" else mlp(lora_mlp, "silu")
    douts = [torch.randn(1, 9, o, device=DEVICE).bfloat16() for _, o in (sizes[2:] if made == "lora_mlp" else sizes)]
    truth = run(function, x, plain, douts)
    written = []
    copy_ = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda to, *args: (written.append(to.shape), copy_(to, *args))[1])
    found = run(function, x, cast, douts)
    assert not written or interpreting()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, truth, strict=True))
    elsewhere = [replace(p, casts=(v.clone(), h.b.detach())) for p, v, h in zip(plain, views, half, strict=True)]
    found = run(function, x, elsewhere, douts)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, truth, strict=True))
    turned = [replace(p, casts=(p.casts[0].t().contiguous().t(), p.casts[1])) for p in cast]
    found = run(function, x, turned, douts)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, truth, strict=True))
    other = [replace(p, casts=(p.casts[0].double(), p.casts[1].double())) for p in cast]  # of another mode: not used
    found = run(function, x, other, douts)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, truth, strict=True))


def test_under_autocast_parameters_keep_their_own_dtype():
    p = projection(24, 40, torch.float32)
    x = torch.randn(3, 24, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        (y,) = lora_linear(x, [p])
        out = lora_mlp(x, p, p, projection(40, 24, torch.float32), "silu")
    assert y.dtype == out.dtype == torch.bfloat16
    dx, da, db = torch.autograd.grad(y.float().square().sum() + out.float().square().sum(), [x, p.a, p.b])
    assert dx.dtype == da.dtype == db.dtype == torch.float32
    exact = in_double(p)
    (truth,) = lora_linear_reference(x.double(), [exact])
    assert relative_error(y, truth) < 1e-2


def test_saved_tensors_are_not_written_and_a_second_backward_is_torchs_error():
    projections = [
        projection(24, 40, torch.float32),
        projection(24, 40, torch.float32),
        projection(40, 24, torch.float32),
    ]
    x = torch.randn(3, 24, device=DEVICE, requires_grad=True)
    kept = x.detach().clone()
    out = lora_mlp(x, *projections, "silu")
    first = torch.autograd.grad(out.sum(), [x, projections[0].a], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [x, projections[0].a])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(x, kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), [x])


@torch_alone
def test_frozen_input_needs_no_gradient():
    p = projection(24, 40, torch.float32)
    (y,) = lora_linear(torch.randn(3, 24, device=DEVICE), [p])
    y.sum().backward()
    assert p.a.grad is not None and p.b.grad is not None


def test_what_cannot_be_fused_is_refused():
    p = projection(24, 40, torch.float32)
    with pytest.raises(ValueError, match="must be frozen"):
        lora_linear(torch.randn(3, 24), [Projection(p.weight.requires_grad_())])
    with pytest.raises(ValueError, match="one half of an adapter"):
        lora_linear(torch.randn(3, 24), [Projection(p.weight.detach(), None, p.a)])
    with pytest.raises(ValueError, match="unknown activation"):
        lora_mlp(torch.randn(3, 24), p, p, p, "relu")


def made_mlp(
    ranks: tuple, inner: int, dtype: torch.dtype = torch.bfloat16, *, tokens: int = 9, width: int = 24,
    bias: bool = False,
) -> tuple[Tensor, list[Projection], list[Tensor], Tensor]:  # fmt: skip
    """x [tokens, width], gate, up and down of that inner size, all that takes a gradient, and one for the output."""
    sizes = ((width, inner), (width, inner), (inner, width))
    projections = [projection(i, o, dtype, rank=r, bias=bias) for r, (i, o) in zip(ranks, sizes, strict=True)]
    x = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    leaves = [x, *(t for p in projections for t in (p.a, p.b) if t is not None)]
    return x, projections, leaves, torch.randn(tokens, width, device=DEVICE).to(dtype)


@pytest.mark.parametrize("ranks", [(4, 4, 4), (None, 4, None)], ids=str)
def test_a_run_for_its_backward_alone(ranks):
    """Its gradients are the full call's bits; a kernel takes its products' memory, and says so to a second one."""
    x, projections, leaves, dout = made_mlp(ranks, 40)
    expected = torch.autograd.grad(lora_mlp(x, *projections, "silu"), leaves, dout)
    out = lora_mlp(x, *projections, "silu", output_needed=False)
    assert not out.any()
    for got, wanted in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), expected, strict=True):
        assert torch.equal(got, wanted)
    if DEVICE == "cuda" or interpreting():
        with pytest.raises(RuntimeError, match="inplace operation"):
            torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("ranks", [(4, 4, 4), (None, 4, None), (None, None, 3)], ids=str)
def test_products_made_again_in_backward(ranks):
    """The same bits, from less than half of what is kept, and as often as the graph is there."""
    x, projections, leaves, dout = made_mlp(ranks, 200)
    kept, expected = [], None
    for products_kept in (True, False):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
        ):  # fmt: skip
            out = lora_mlp(x, *projections, "silu", products_kept=products_kept)
        kept.append(sum(t.nbytes for t in saved.values() if t.shape[0] == 9))
        for _ in range(2):
            found = [out, *torch.autograd.grad(out, leaves, dout, retain_graph=True)]
            expected = expected or found
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept[0] - kept[1] >= 2 * 9 * 200 * 2 - x.nbytes and kept[1] < kept[0] / 2


WAYS: list[dict[str, bool]] = [  # the first keeps most
    {}, {"products_kept": False}, {"output_needed": False}, {"output_needed": False, "products_kept": False}
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", when_interpreting([False, True], [False]), ids=lambda bias: "bias" if bias else "")
@pytest.mark.parametrize("tile", when_interpreting([2, 4, 9], [4]))  # tokens: the last tile of one, and all in one
@pytest.mark.parametrize("width, inner", when_interpreting([(23, 41), (64, 128)], [(23, 41)]))
@pytest.mark.parametrize("ranks", when_interpreting(RANKS, RANKS[:2]), ids=str)
def test_tiles_three_way(monkeypatch, ranks, width, inner, tile, bias, dtype):
    """Whatever is kept: within torch's own error, and of the same bits, as tiles of real ones lie in memory."""
    monkeypatch.setattr(lora, "TILE", tile)
    x, projections, leaves, dout = made_mlp(ranks, inner, dtype, width=width, bias=bias)
    theirs = run(mlp(lora_mlp_reference, "silu"), x, projections, [dout])
    truth = run(mlp(lora_mlp_reference, "silu"), x.double(), [in_double(p) for p in projections], [dout.double()])
    expected = run(mlp(lora_mlp, "silu"), x, projections, [dout])
    assert_as_exact(expected, theirs, truth, 3e-3)
    if DEVICE == "cuda" and width % 64:  # cuBLAS chooses its kernel by where a tile begins, too
        return
    for way in WAYS[1:]:
        out = lora_mlp(x, *projections, "silu", **way)
        assert torch.equal(out, expected[0] if way.get("output_needed", True) else torch.zeros_like(out))
        found = torch.autograd.grad(out, leaves, dout)
        assert all(torch.equal(a, b) for a, b in zip(found, expected[1:], strict=True))
    with torch.no_grad():
        assert torch.equal(lora_mlp(x, *projections, "silu"), expected[0])


@torch_alone
def test_sums_over_many_tiles_are_as_exact_as_over_one(monkeypatch):
    """1,000 of them in bf16, each addition rounded, would err by per cents."""
    x, projections, leaves, dout = made_mlp((4, 4, 4), 40, tokens=1000)
    doubles = [in_double(p) for p in projections]
    truth = run(mlp(lora_mlp_reference, "silu"), x.double(), doubles, [dout.double()])[1:]
    errors = []
    for tile in (1000, 1):
        monkeypatch.setattr(lora, "TILE", tile)
        found = torch.autograd.grad(lora_mlp(x, *projections, "silu", output_needed=False), leaves, dout)
        errors.append([relative_error(got, exact) for got, exact in zip(found, truth, strict=True)])
    assert all(in_tiles <= 1.1 * at_once + 1e-4 for at_once, in_tiles in zip(*errors, strict=True))


class Counted:
    """A weight that is made dense, and counts how often."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.count = weight, 0

    def dense(self, dtype: torch.dtype) -> Tensor:
        self.count += 1
        return self.weight.to(dtype, copy=True)


def test_quantised_weights_are_made_dense_once_a_direction(monkeypatch):
    monkeypatch.setattr(lora, "TILE", 2)
    x, projections, leaves, dout = made_mlp((4, 4, 4), 128, width=64)
    expected = torch.autograd.grad(lora_mlp(x, *projections, "silu"), leaves, dout)
    weights = [Counted(p.weight) for p in projections]
    quantised = [replace(p, weight=weight) for p, weight in zip(projections, weights, strict=True)]
    for counts, way in (([1, 1, 1], {"output_needed": False}), ([2, 2, 2], {"products_kept": False})):
        for weight in weights:
            weight.count = 0
        found = torch.autograd.grad(lora_mlp(x, *quantised, "silu", **way), leaves, dout)
        assert [weight.count for weight in weights] == counts
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_tiles_keep(monkeypatch, way):
    """Of each token x and the skinny products, and gate and up where an output is wanted with them."""
    monkeypatch.setattr(lora, "TILE", 4)
    x, projections, leaves, dout = made_mlp((4, 4, 4), 40)
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        out = lora_mlp(x, *projections, "silu", **way)
    elements = 24 + 8 + 4 * way.get("output_needed", True) + 2 * 40 * (not way)
    assert sum(t.nbytes for t in saved.values() if t.shape[0] == 9) == 9 * 2 * elements
    torch.autograd.grad(out, leaves, dout)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_products():
    """16 tiles: besides what is returned, one tile's three products, and what is skinny."""
    tokens, width, inner, rank = 16 * lora.TILE, 512, 2048, 8
    projections = [
        projection(i, o, torch.bfloat16, rank=rank) for i, o in ((width, inner), (width, inner), (inner, width))
    ]
    leaves = [t for p in projections for t in (p.a, p.b) if t is not None]
    x, dout = (torch.randn(tokens, width, device=DEVICE).bfloat16() for _ in range(2))
    x.requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return lora_mlp(x, *projections, "silu")

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(lora_mlp(x, *projections, "silu", output_needed=False), [x, *leaves], dout)

    for function in (forward, backward):
        function()  # cuBLAS takes its workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        taken = torch.cuda.max_memory_allocated() - before
        assert taken < x.nbytes + 2 * lora.TILE * 3 * inner + 2 * tokens * 6 * rank + 2**24 < 2 * tokens * inner


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [8, 4])
def test_queries_and_keys_are_turned_where_they_are(rotated: int, dtype: torch.dtype) -> None:
    """To the bits of rope on what the projections give, whose memory it takes; cos and sin differ from row to row."""
    projections = [projection(24, outputs, dtype, rank=rank) for outputs, rank in ((32, 4), (16, None), (16, 3))]
    angles = torch.rand(2, 5, rotated // 2, device=DEVICE).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn(2, 5, 24, device=DEVICE).to(dtype).requires_grad_()
    leaves = [x, *(t for p in projections for t in (p.a, p.b) if t is not None)]
    douts = [torch.randn(2, 5, width, device=DEVICE).to(dtype) for width in (32, 16, 16)]
    q, k, v = lora_linear(x, projections)
    q, k = (y.flatten(2) for y in rope(q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)), cos, sin))
    expected = [q, k, v, *torch.autograd.grad((q, k, v), leaves, douts)]
    kept = [dout.clone() for dout in douts]
    outputs = lora_linear(x, projections, Rotation(cos, sin, 8))
    found = [*outputs, *torch.autograd.grad(outputs, leaves, douts)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert all(torch.equal(dout, before) for dout, before in zip(douts, kept, strict=True))
