"""fastlm/kernels/flash.py against dense fp64 attention, per-sample eager attention, and itself alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlm.kernels import flash, flash_launch
from fastlm.kernels.attention import attention
from fastlm.kernels.flash import FlashSettings, flash_attention
from fastlm.kernels.flash_launch import Blocks, blocks_for
from tests.tiny import relative_error

from .interpreter import (
    DEVICE,
    double_leaf,
    far_apart,
    gradients,
    kernel_test,
    run_interpreted,
)
from .test_attention import boundaries, dense

# The backward passes form p = 2^(logit - lse) again, where torch keeps p: rounding a logit and an lse of 4 to
# 8 costs 1.4 ulps of p each. In half dtypes both round p itself; half an ulp more for the few sums of sinks.
# attention() refuses fp32 on a GPU, where exp2 is approximate; in the interpreter fp32 shows the algorithm best
EXACT = torch.float16 if DEVICE == "cuda" else torch.float32
ULPS = {torch.float32: 2.8, torch.float16: 0.5, torch.bfloat16: 0.5}
LENGTHS = (5, 1, 37, 0)  # shorter and longer than a block, one token, none; 43 tokens: no multiple of a block
FEATURES = [
    {},
    dict(window=6),  # shorter than a block
    dict(window=18),  # longer than a block, and no multiple of it
    dict(softcap=2.0),
    dict(sinks=True),
    dict(window=10, softcap=5.0, sinks=True),
]

# the interpreter's numpy, about unused rows, overflow of hidden keys and the NaN of other samples
pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small ones, so that small samples have several."""
    own, step = getattr(request, "param", (16, 16))
    monkeypatch.setattr(flash_launch, "_blocks", lambda *_: (Blocks(own, step, 4, 2),) * 3)


def leaves(
    lengths: Sequence[int] = LENGTHS, heads: int = 4, key_heads: int = 2, head_dim: int = 16,
    dtype: torch.dtype = EXACT, sinks: bool = False,
) -> list[Tensor]:  # fmt: skip
    """q, k, v and, where asked for, sinks."""
    shapes = [(sum(lengths), h, head_dim) for h in (heads, key_heads, key_heads)] + [(heads,)] * sinks
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


def both_ways(
    inputs: list[Tensor], lengths: Sequence[int], dout: Tensor, *, scale: float | None = None, **options: Any
) -> list[Tensor]:
    """The kernels' output and gradients."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    settings, cu_seqlens = FlashSettings(scale, **options), boundaries(tuple(lengths), DEVICE)
    return gradients([flash_attention(*inputs[:3], cu_seqlens, settings, *inputs[3:])], inputs, [dout])


def references(
    inputs: list[Tensor], lengths: Sequence[int], dout: Tensor, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The same from per-sample eager attention in the inputs' dtype, and from dense attention in fp64."""
    sinks, exact = dict(zip(["sinks"], inputs[3:], strict=False)), [double_leaf(x) for x in inputs]
    cu_seqlens, longest = boundaries(tuple(lengths), DEVICE), max(lengths)
    eager = attention(*inputs[:3], cu_seqlens, longest, backend="eager", lengths=lengths, **sinks, **options)
    sinks = dict(zip(["sinks"], exact[3:], strict=False))
    truth = dense(*exact[:3], tuple(lengths), **sinks, **options)
    return gradients([eager], inputs, [dout]), gradients([truth], exact, [dout.double()])


def three_way(inputs: list[Tensor], lengths: Sequence[int] = LENGTHS, **options: Any) -> None:
    """Relative errors at most a quarter above eager attention's in the same dtype, plus the ulps above."""
    dout = torch.randn_like(inputs[0])
    ours = both_ways(inputs, lengths, dout, **options)
    for a, b, exact in zip(ours, *references(inputs, lengths, dout, **options), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
        bound = 1.25 * relative_error(b, exact) + ULPS[a.dtype] * torch.finfo(a.dtype).eps
        assert relative_error(a, exact) <= bound  # false where ours is NaN


@kernel_test
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", sorted({EXACT, torch.float16}, key=str), ids=str)  # bf16 products: on a GPU only
def test_three_way(dtype: torch.dtype, features: dict[str, Any]) -> None:
    options = {name: value for name, value in features.items() if name != "sinks"}
    three_way(leaves(dtype=dtype, sinks=features.get("sinks", False)), **options)


@kernel_test
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32), (64, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("window", [None, 21])
def test_blocks_of_all_shapes(blocks: None, window: int | None) -> None:
    three_way(leaves(heads=2, key_heads=1), window=window)


@kernel_test
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("key_heads", [1, 4])  # all share one, each has its own
def test_grouped_heads(key_heads: int) -> None:
    three_way(leaves((5, 20), key_heads=key_heads), (5, 20), scale=0.7)


@kernel_test
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("features", [{}, dict(window=6), dict(softcap=2.0)], ids=str)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_few_programs(monkeypatch: pytest.MonkeyPatch, key_heads: int, features: dict[str, Any]) -> None:
    """Each query head's dK and dV apart, then their sum: the same terms in another order."""
    inputs, dout = leaves(key_heads=key_heads), torch.randn(43, 4, 16, device=DEVICE).to(EXACT)
    results = []
    for few in (0, 10**6):
        monkeypatch.setattr(flash, "_FEW_PROGRAMS", few)
        results.append(both_ways(inputs, LENGTHS, dout, **features))
        three_way(inputs, **features)
    for together, apart in zip(*results, strict=True):
        assert apart.is_contiguous() and relative_error(apart, together) <= 2 * torch.finfo(EXACT).eps
    assert torch.equal(results[0][1], results[1][1])  # dQ


@kernel_test
@pytest.mark.parametrize("head_dim", [8, 20, 80, 96, 192])  # padded to a power of two, 16 at least
def test_head_sizes(head_dim: int) -> None:
    three_way(leaves((5, 20), 2, 1, head_dim), (5, 20))


@kernel_test
@pytest.mark.usefixtures("blocks")
def test_large_logits_give_no_nan() -> None:
    """Up to 1e4: the largest takes all, and 2^(logit - lse) of hidden keys overflows."""
    inputs = [(x.detach() * 50).requires_grad_() for x in leaves((37,), 1, 1)]
    dout = torch.randn_like(inputs[0])
    for options in ({}, dict(window=3), dict(softcap=50.0)):
        results = both_ways(inputs, (37,), dout, **options)
        assert all(bool(tensor.isfinite().all()) for tensor in results)
        rounding = torch.finfo(results[0].dtype).eps
        assert relative_error(results[0], references(inputs, (37,), dout, **options)[1][0]) < max(1e-4, rounding)


@kernel_test
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("lengths", "window"), [((1,) * 4 + (0,) * 130 + (1,) * 4, None), ((5, 20), 1)])
def test_a_single_key_is_copied(lengths: tuple[int, ...], window: int | None) -> None:
    """Softmax over one key is 1: out = v exactly, dq = dk = 0. 138 samples: a search of two steps."""
    inputs = leaves(lengths, 1, 1)
    dout = torch.randn_like(inputs[0])
    out, dq, dk, dv = both_ways(inputs, lengths, dout, window=window)
    assert torch.equal(out, inputs[2])
    torch.testing.assert_close(dv, dout, rtol=1e-6, atol=0.0)  # a compiler may fuse p's product and difference
    assert float(dq.abs().max()) < 1e-5 and float(dk.abs().max()) < 1e-5


@kernel_test
@pytest.mark.usefixtures("blocks")
def test_views_of_one_projection_and_a_strided_gradient() -> None:
    lengths, settings = (5, 20), FlashSettings(0.25, window=9)
    packed = torch.randn(25, 4 * 16, device=DEVICE).requires_grad_()
    before = packed.detach().clone()
    dout = torch.randn(2, 25, 16, device=DEVICE).transpose(0, 1)
    views = packed.view(25, 4, 16).split([2, 1, 1], dim=1)
    plain = [x.detach().contiguous().requires_grad_() for x in views]
    expected = both_ways(plain, lengths, dout.contiguous(), window=9)
    out = flash_attention(*views, boundaries(lengths, DEVICE), settings)
    out, gradient = gradients([out], [packed], [dout])
    assert torch.equal(out, expected[0]) and torch.equal(packed, before)
    assert torch.equal(gradient.view(25, 4, 16), torch.cat(expected[1:], dim=1))
    crossed = [x.detach().mT.contiguous().mT.requires_grad_() for x in views]  # head vectors strided
    ones = torch.ones(1, 1, 1, device=DEVICE).expand(25, 2, 16)
    expected = both_ways(plain, lengths, ones.contiguous(), window=9)
    assert all(map(torch.equal, both_ways(crossed, lengths, ones, window=9), expected))


@kernel_test
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("window", [None, 7])
def test_no_leak_and_the_same_bits_twice(window: int | None) -> None:
    """Change every token of one sample, to infinity and NaN too: the others change by exactly 0."""
    lengths = (3, 20, 17)
    inputs, others = leaves(lengths, 2, 1), torch.ones(40, dtype=torch.bool, device=DEVICE)
    others[3:23] = False  # the sample of 20
    dout = torch.randn(40, 2, 16, device=DEVICE) * others[:, None, None]
    base = both_ways(inputs, lengths, dout, window=window)
    assert all(map(torch.equal, both_ways(inputs, lengths, dout, window=window), base))
    for filler in (torch.randn(20, 1, 16, device=DEVICE), torch.inf, torch.nan):
        changed = [x.detach().clone() for x in inputs]
        for x in changed:
            x[3:23] = filler
            x.requires_grad_()
        for a, b in zip(both_ways(changed, lengths, dout, window=window), base, strict=True):
            assert torch.equal(a[others], b[others])


@kernel_test
@pytest.mark.usefixtures("blocks")
def test_packed_equals_alone_bit_by_bit() -> None:
    inputs, dout = leaves(heads=2), torch.randn(43, 2, 16, device=DEVICE)
    packed = both_ways(inputs, LENGTHS, dout, window=18)
    alone = [x.detach()[6:43].clone().requires_grad_() for x in inputs]
    for a, b in zip(packed, both_ways(alone, (37,), dout[6:43], window=18), strict=True):
        assert torch.equal(a[6:43], b)


# Descriptors take 16-bit tensors. Shorter than a block, a last block that is not full, only full ones.
DESCRIBED_LENGTHS = (5, 70, 0, 32)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    """Small blocks that take descriptors; the shapes of those made."""
    own, step = getattr(request, "param", (16, 16))
    monkeypatch.setattr(flash_launch, "_blocks", lambda *_: (Blocks(own, step, 4, 2, described=True),) * 3)
    shapes, make = [], flash_launch._described
    monkeypatch.setattr(flash_launch, "_described", lambda x, step: shapes.append(tuple(x.shape)) or make(x, step))
    return shapes


@kernel_test
@pytest.mark.parametrize("described", [(32, 16), (16, 32), (16, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("features", [{}, dict(window=18), dict(window=40), FEATURES[-1]], ids=str)
def test_described_three_way(described: list[tuple[int, ...]], features: dict[str, Any]) -> None:
    options = {name: value for name, value in features.items() if name != "sinks"}
    inputs = leaves(DESCRIBED_LENGTHS, dtype=torch.float16, sinks=features.get("sinks", False))
    three_way(inputs, DESCRIBED_LENGTHS, **options)
    assert described == [(107, 2, 16)] * 4 + [(107, 4, 16)] * 2  # k and v twice, then q and dO


@kernel_test
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("few", [0, 10**6])  # a group of query heads, each head apart
def test_described_or_not(
    monkeypatch: pytest.MonkeyPatch, described: list[tuple[int, ...]], few: int, window: int | None
) -> None:  # fmt: skip
    """The same, but for the order of the sums of dK and dV, and with a window of all."""
    monkeypatch.setattr(flash, "_FEW_PROGRAMS", few)
    inputs = leaves(DESCRIBED_LENGTHS, 2, 1, dtype=torch.float16)
    dout = torch.randn(107, 2, 16, device=DEVICE).half()
    ours = both_ways(inputs, DESCRIBED_LENGTHS, dout, window=window)
    assert len(described) == 6
    described.clear()
    apart = [torch.stack([x, x], 2).detach()[:, :, 0].requires_grad_() for x in inputs]  # head vectors apart
    plain = both_ways(apart, DESCRIBED_LENGTHS, torch.stack([dout, dout], 2)[:, :, 0], window=window)
    assert not described
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(a, b) if index < 2 and not window else relative_error(a, b) < torch.finfo(a.dtype).eps


@kernel_test
@pytest.mark.parametrize("described", [(16, 32), (32, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("window", [None, 7, 50])
@pytest.mark.parametrize("filler", [torch.inf, torch.nan])
def test_described_no_leak(described: list[tuple[int, ...]], filler: float, window: int | None) -> None:
    """Infinity and NaN in all of one sample and of its gradient: the others change by exactly 0."""
    lengths = (70, 20, 3, 67)
    inputs, dout = leaves(lengths, 2, 1, dtype=torch.float16), torch.randn(160, 2, 16, device=DEVICE)
    base = both_ways(inputs, lengths, dout, window=window)
    others = torch.ones(160, dtype=torch.bool, device=DEVICE)
    others[70:90] = False
    for changed in (*inputs, dout):
        changed.data[~others] = filler
    for a, b in zip(both_ways(inputs, lengths, dout, window=window), base, strict=True):
        assert torch.equal(a[others], b[others])
    assert len(described) == 12


@kernel_test
def test_which_tensors_can_be_described() -> None:
    def describable(stride: tuple[int, int], offset: int = 0, dtype: torch.dtype = torch.float16) -> bool:
        storage = torch.zeros(8 * 128, dtype=dtype, device=DEVICE)
        return flash_launch._describable(storage.as_strided((6, 4, 16), (*stride, 1), offset))

    assert describable((64, 16)) and describable((64, 16), 8) and describable((96, 16), 16)  # parts of a projection
    assert describable((72, 16)) and not describable((68, 16))  # rows 136 bytes apart
    assert not describable((128, 32)) and not describable((16, 96))  # heads apart, heads outside
    assert not describable((64, 16), 4)  # begins at 8 bytes
    assert not describable((0, 16))  # an expanded row
    assert not describable((64, 16), dtype=torch.float32)


@kernel_test
def test_blocks_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by the mean length, and others than for short samples only where they were measured."""
    asked: list[int] = []
    monkeypatch.setattr(flash_launch, "_blocks", lambda *key: asked.append(key[-1]) or (Blocks(16, 16, 4, 2),) * 3)
    for lengths, length in (((40, 24), 32), ((40, 23), 16), ((1, 1), 1), ((), None)):
        inputs = leaves(lengths)
        both_ways(inputs, lengths, torch.ones_like(inputs[0]))
        assert asked == [length or 0] * 3
        asked.clear()
    short, middle, long = (blocks_for(9, torch.bfloat16, 128, length) for length in (512, 1024, 4096))
    assert [b.described for b in (*short, *middle, *long)] == [False] * 3 + [True] * 6
    assert [b.own for b in middle] == [64] * 3 and [b.own for b in long] == [128, 128, 64]
    assert blocks_for(9, torch.bfloat16, 64, 4096) == blocks_for(9, torch.bfloat16, 64, 1024)
    assert [b.described for b in blocks_for(9, torch.bfloat16, 256, 4096)] == [False, True, True]
    assert blocks_for(9, torch.bfloat16, 256, 1024) == blocks_for(9, torch.bfloat16, 256)
    for major, dtype, size in ((9, torch.float32, 128), (8, torch.bfloat16, 128), (8, torch.bfloat16, 256)):
        assert blocks_for(major, dtype, size, 4096) == blocks_for(major, dtype, size)


@kernel_test
def test_no_tokens() -> None:
    inputs = leaves((), sinks=True)
    out, *grads = both_ways(inputs, (), torch.zeros(0, 4, 16, device=DEVICE))
    assert out.shape == (0, 4, 16) and [g.shape for g in grads] == [x.shape for x in inputs]
    assert grads[3].tolist() == [0.0] * 4


@kernel_test
@pytest.mark.usefixtures("blocks")
def test_c_int32_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit offsets change nothing; rows 2^30 elements apart are found (bf16 products: on a GPU only)."""
    inputs, dout = leaves(heads=2, key_heads=1, sinks=True), torch.randn(43, 2, 16, device=DEVICE)
    base = both_ways(inputs, LENGTHS, dout, window=18)
    with monkeypatch.context() as context:
        context.setattr(flash, "long_indexing", lambda *_: True)
        assert all(map(torch.equal, both_ways(inputs, LENGTHS, dout, window=18), base))
    if DEVICE == "cuda":
        *far, dout = far_apart(4, 2, 64)
        near = [x.contiguous().requires_grad_() for x in far]
        expected = both_ways(near, (3, 1), dout.contiguous())
        ours = both_ways([x.requires_grad_() for x in far], (3, 1), dout)
        assert all(map(torch.equal, ours, expected))


# on a GPU

GPU_LENGTHS = (130, 1, 257, 64, 700, 130)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [*FEATURES[:1], dict(window=50), *FEATURES[3:]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_three_way(dtype: torch.dtype, head_dim: int, features: dict[str, Any]) -> None:
    """With the blocks of the table."""
    options = {name: value for name, value in features.items() if name != "sinks"}
    inputs = leaves(GPU_LENGTHS, 8, 2, head_dim, dtype, features.get("sinks", False))
    three_way(inputs, GPU_LENGTHS, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{}, dict(window=50, softcap=5.0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpu_fp32(head_dim: int, features: dict[str, Any]) -> None:
    three_way(leaves(GPU_LENGTHS, 4, 2, head_dim), GPU_LENGTHS, **features)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(77, 1900), (77, 4000), (77, 8200)], ids=str)  # blocks for each mean length
def test_gpu_long_sample(lengths: tuple[int, ...], head_dim: int) -> None:
    for options in ({}, dict(window=1000), dict(softcap=30.0, window=1000)):
        three_way(leaves(lengths, 2, 1, head_dim, torch.bfloat16), lengths, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1, 4])  # blocks for 1,024 tokens, for 4,096
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 700])
def test_gpu_long_samples_do_not_leak(window: int | None, head_dim: int, scale: int) -> None:
    """The same bits twice; NaN in the second sample and its gradient stays there."""
    first, second = 2081 * scale, 2112 * scale  # a last block that is not full, only full ones, shorter than one
    lengths = (first, second, 20)
    inputs = leaves(lengths, 8, 2, head_dim, torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    base = both_ways(inputs, lengths, dout, window=window)
    assert all(map(torch.equal, both_ways(inputs, lengths, dout, window=window), base))
    for changed in (*inputs, dout):
        changed.data[first : first + second] = torch.nan
    for a, b in zip(both_ways(inputs, lengths, dout, window=window), base, strict=True):
        assert torch.equal(a[:first], b[:first]) and torch.equal(a[first + second :], b[first + second :])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpu_no_leak_and_the_same_bits_twice(head_dim: int) -> None:
    inputs = leaves(GPU_LENGTHS, 8, 2, head_dim, torch.bfloat16, sinks=True)
    dout = torch.randn_like(inputs[0])
    dout[131:388] = 0
    base = both_ways(inputs, GPU_LENGTHS, dout, softcap=20.0)
    assert all(map(torch.equal, both_ways(inputs, GPU_LENGTHS, dout, softcap=20.0), base))
    changed = [x.detach().clone().requires_grad_() for x in inputs]
    for x in changed[:3]:
        x.data[131:388] = torch.nan
    ours = both_ways(changed, GPU_LENGTHS, dout, softcap=20.0)
    for a, b in zip(ours[:4], base[:4], strict=True):
        assert torch.equal(a[:131], b[:131]) and torch.equal(a[388:], b[388:])


@pytest.mark.gpu
def test_gpu_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of three steps, and idle tiles for most of the grid."""
    monkeypatch.setattr(flash, "_FEW_PROGRAMS", 0)  # else the last sample alone would sum in another order
    lengths = (1,) * 20_000 + (0,) * 1000 + (300,)
    inputs = leaves(lengths, 2, 1, 64, torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    out, dq, dk, dv = both_ways(inputs, lengths, dout)
    values = inputs[2].detach()[:20_000]
    assert torch.equal(out[:20_000], values.expand(-1, 2, -1))
    torch.testing.assert_close(dv[:20_000, 0].float(), dout[:20_000].float().sum(1), rtol=1e-2, atol=1e-2)
    tail = [x.detach()[20_000:].clone().requires_grad_() for x in inputs]
    for a, b in zip((out, dq, dk, dv), both_ways(tail, (300,), dout[20_000:]), strict=True):
        assert torch.equal(a[20_000:], b)


@pytest.mark.gpu
def test_gpu_c_int32_offset_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 2^31 elements: the last samples equal the same samples alone."""
    monkeypatch.setattr(flash, "_FEW_PROGRAMS", 0)
    lengths = (1000,) * (2**31 // (32 * 128 * 1000) + 2)
    inputs = leaves(lengths, 32, 2, 128, torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    results = both_ways(inputs, lengths, dout)
    tail = [x.detach()[-2000:].clone().requires_grad_() for x in inputs]
    for a, b in zip(results, both_ways(tail, (1000, 1000), dout[-2000:]), strict=True):
        assert torch.equal(a[-2000:], b)
