"""fastlm/kernels/attention.py against dense fp64 attention, transformers' eager functions, itself alone."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlm.kernels import attention as module
from fastlm.kernels import attention_backends
from fastlm.kernels.attention import BACKENDS, attention, backend_refusal, choose_backend, oversized
from tests.tiny import relative_error

CPU_BACKENDS = ("sdpa", "eager")
LENGTHS = (5, 1, 12, 5, 9)  # a one-token sample, two of equal length


def boundaries(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def leaves(
    lengths: tuple[int, ...] = LENGTHS, heads: int = 4, key_heads: int = 2, head_dim: int = 8,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> list[Tensor]:  # fmt: skip
    shapes = [(sum(lengths), h, head_dim) for h in (heads, key_heads, key_heads)]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def visibility(lengths: tuple[int, ...], window: int | None, device: torch.device) -> Tensor:
    """[T, T] bool: which tokens each token sees."""
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    token = torch.arange(len(sample), device=device)
    distance = token[:, None] - token
    visible = (sample[:, None] == sample) & (distance >= 0)
    return visible & (distance < window) if window else visible


def dense(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The formula over one T x T mask, in the inputs' dtype."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visibility(lengths, window, q.device), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, len(q), 1).to(q.dtype)], -1)
    p = torch.softmax(logits, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("hij,jhd->ihd", p[..., : len(q)], v)


def stock(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], backend: str | None, **options: Any) -> Tensor:
    """What torch makes of the same over one T x T mask: its attention function, or the formula for eager."""
    if backend == "eager" or options.get("softcap") or options.get("sinks") is not None:
        return dense(q, k, v, lengths, **options)
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, *(x.repeat_interleave(groups, 1) for x in (k, v))))
    mask = visibility(lengths, options.get("window"), q.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.get("scale"))
    return out[0].transpose(0, 1)


def with_gradients(output: Tensor, inputs: list[Tensor], above: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, above.to(output.dtype))]


def assert_no_worse(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    """Relative errors against fp64 at most a quarter above torch's in that dtype, plus a tenth of an ulp."""
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = 1.25 * relative_error(b, exact) + 0.1 * torch.finfo(b.dtype).eps
        assert relative_error(a, exact) <= max(bound, torch.finfo(torch.float32).eps)


def three_way(inputs: list[Tensor], lengths: tuple[int, ...], backend: str | None, **options: Any) -> None:
    q, k, v = inputs[:3]
    above = torch.randn(q.shape, device=q.device)
    cu, longest = boundaries(lengths, q.device.type), max(lengths)
    output = attention(q, k, v, cu, longest, backend=backend, **options)
    ours = with_gradients(output, inputs, above)
    theirs = with_gradients(stock(q, k, v, lengths, backend, **options), inputs, above)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if "sinks" in options:
        options["sinks"] = exact[3]
    truth = with_gradients(dense(*exact[:3], lengths, **options), exact, above.to(q.dtype))
    assert_no_worse(ours, theirs, truth)


@pytest.mark.parametrize("options", [{}, dict(window=4), dict(scale=0.5), dict(window=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_three_way(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    three_way(leaves(dtype=dtype), LENGTHS, backend, **options)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_and_sinks_three_way(dtype: torch.dtype, window: int | None) -> None:
    inputs = leaves(dtype=dtype)
    three_way(inputs, LENGTHS, None, window=window, softcap=2.0)
    sinks = torch.randn(4).to(dtype).requires_grad_()
    three_way([*inputs, sinks], LENGTHS, None, window=window, sinks=sinks)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_grouped_heads(backend: str, key_heads: int) -> None:
    three_way(leaves(key_heads=key_heads), LENGTHS, backend, window=3)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_blocks_of_queries(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long samples go in blocks, so that no mask is larger than a block times block plus window."""
    monkeypatch.setattr(attention_backends, "_QUERY_BLOCK", 4)
    masks = []
    visible = attention_backends._visible
    monkeypatch.setattr(attention_backends, "_visible", lambda *args: masks.append(visible(*args)) or masks[-1])
    three_way(leaves(), LENGTHS, backend, window=3)
    assert masks and max(mask.numel() for mask in masks) <= 4 * (4 + 3 - 1)
    three_way(leaves(), LENGTHS, backend)


def seen(tokens: int, lengths: tuple[int, ...], backend: str, window: int | None, **kind: Any) -> list[list[int]]:
    """For each token, the tokens whose value reaches its output."""
    q, k, v = leaves(lengths, heads=1, key_heads=1, **kind)
    cu = boundaries(lengths, q.device.type)
    output = attention(q, k, v, cu, max(lengths), window=window, backend=backend)
    rows = [torch.autograd.grad(output[i].sum(), v, retain_graph=True)[0].abs().sum((1, 2)) for i in range(tokens)]
    return [row.nonzero().flatten().tolist() for row in rows]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_window_lost(backend: str) -> None:
    """Window 4: token i sees i-3..i, cut at its sample's start; 0 and None are ordinary causal."""
    assert_window(backend)


def assert_window(backend: str, **kind: Any) -> None:
    assert seen(10, (10,), backend, 4, **kind) == [list(range(max(0, i - 3), i + 1)) for i in range(10)]
    packed = seen(10, (5, 5), backend, 4, **kind)
    assert packed == [list(range(max(5 * (i // 5), i - 3), i + 1)) for i in range(10)]
    assert packed[9] == [6, 7, 8, 9]
    for none in (0, None, 10, 99):
        assert seen(10, (10,), backend, none, **kind) == [list(range(i + 1)) for i in range(10)]
    assert seen(10, (5, 5), backend, 0, **kind)[9] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_leak(backend: str, window: int | None) -> None:
    """Change every token of one sample, to infinity and NaN too: the others change by exactly 0."""
    inputs = leaves()
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[6:18] = False  # the sample of 12
    above = torch.randn(sum(LENGTHS), 4, 8) * others[:, None, None]

    def run(values: list[Tensor]) -> list[Tensor]:
        values = [x.detach().requires_grad_() for x in values]
        output = attention(*values, boundaries(LENGTHS), 12, window=window, backend=backend)
        return [x[others] for x in with_gradients(output, values, above)]

    base = run(inputs)
    for filler in (
        torch.randn(12, 1, 8),
        torch.full((12, 1, 8), torch.inf),
        torch.full((12, 1, 8), torch.nan),
    ):
        changed = [x.detach().clone() for x in inputs]
        for x in changed:
            x[6:18] = filler
        assert all(torch.equal(a, b) for a, b in zip(run(changed), base, strict=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_packed_equals_alone(backend: str) -> None:
    inputs, above = leaves(), torch.randn(sum(LENGTHS), 4, 8)
    options: dict[str, Any] = dict(window=4, backend=backend)
    packed = with_gradients(attention(*inputs, boundaries(LENGTHS), 12, **options), inputs, above)
    pieces = [x.detach().split(LENGTHS) for x in (*inputs, above)]
    for sample, length in enumerate(LENGTHS):
        *alone, grad = [piece[sample].clone().requires_grad_() for piece in pieces]
        result = with_gradients(attention(*alone, boundaries((length,)), length, **options), alone, grad)
        start = sum(LENGTHS[:sample])
        for a, b in zip(packed, result, strict=True):
            torch.testing.assert_close(a[start : start + length], b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_views_need_no_copy(backend: str) -> None:
    """[B, H, S, D] tensors transposed, as models make them, and heads cut from one projection."""
    tokens = sum(LENGTHS)
    q = torch.randn(1, 4, tokens, 8).requires_grad_()
    kv = torch.randn(tokens, 4, 16).requires_grad_()
    above = torch.randn(tokens, 4, 8)

    def run(copy: bool) -> list[Tensor]:
        views = [q[0].transpose(0, 1), kv[:, 1:3, :8], kv[:, 1:3, 8:]]
        views = [x.contiguous() for x in views] if copy else views
        return with_gradients(attention(*views, boundaries(LENGTHS), 12, backend=backend), [q, kv], above)

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_tokens_and_unused_boundaries(backend: str) -> None:
    sinks = torch.zeros(4, requires_grad=True) if backend == "eager" else None
    inputs = leaves((0,))
    output = attention(*inputs, boundaries(()), 0, sinks=sinks, backend=backend)
    assert output.shape == (0, 4, 8)
    assert [g.shape for g in torch.autograd.grad(output.sum(), inputs)] == [x.shape for x in inputs]

    inputs = leaves()
    expected = attention(*inputs, boundaries(LENGTHS), 12, backend=backend)
    padded = attention(*inputs, boundaries((*LENGTHS, 0, 0)), 12, backend=backend)
    assert torch.equal(padded, expected)
    given = attention(*inputs, boundaries(LENGTHS), 12, lengths=LENGTHS, backend=backend)
    assert torch.equal(given, expected)


def test_autocast_decides_the_dtype() -> None:
    inputs = leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(*inputs, boundaries(LENGTHS), 12)
    expected = attention(*(x.bfloat16() for x in inputs), boundaries(LENGTHS), 12)
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_eager_equals_transformers(family: str, dtype: torch.dtype) -> None:
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    inputs = leaves((12,), dtype=dtype)
    sinks = torch.randn(4).to(dtype).requires_grad_()
    distance = torch.arange(12)[:, None] - torch.arange(12)
    mask = torch.zeros(12, 12).masked_fill((distance < 0) | (distance >= 5), torch.finfo(dtype).min).to(dtype)
    layer = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    qkv = [x.transpose(0, 1)[None] for x in inputs]
    options: dict[str, Any] = dict(window=5, scale=0.3)
    if family == "gemma2":
        eager = modeling_gemma2.eager_attention_forward(layer, *qkv, mask[None, None], scaling=0.3, softcap=2.0)
        options["softcap"] = 2.0
    else:
        eager = modeling_gpt_oss.eager_attention_forward(layer, *qkv, mask[None, None], scaling=0.3)
        inputs.append(sinks)
        options["sinks"] = sinks
    above = torch.randn(12, 4, 8)
    theirs = with_gradients(eager[0][0], inputs, above)
    ours = with_gradients(attention(*inputs[:3], boundaries((12,)), 12, **options), inputs, above)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if family == "gpt_oss":
        options["sinks"] = exact[3]
    truth = with_gradients(dense(*exact[:3], (12,), **options), exact, above.to(dtype))
    assert_no_worse(ours, theirs, truth)


# which backend


def choice(
    capability: tuple[int, int] | None = (9, 0),
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    **options: Any,
) -> str:
    device = "cpu" if capability is None else "cuda"
    return choose_backend(device, capability, dtype, head_dim, **options)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which packages are installed: triton alone, unless a test adds others to the set."""
    installed = {"triton"}
    monkeypatch.setattr(module, "package_function", lambda name: print if name in installed else None)
    choose_backend.cache_clear()
    yield installed
    choose_backend.cache_clear()


def test_choice() -> None:
    assert choice() == choice(window=4) == choice(dtype=torch.float16, head_dim=64, long_samples=True) == "triton"
    assert choice(head_dim=256) == choice(head_dim=80) == choice((8, 0)) == choice((10, 0)) == "varlen"
    assert choice((12, 0), dtype=torch.float16) == choice(backend="varlen") == "varlen"
    assert choice(softcap=50.0) == choice(sinks=True) == choice((8, 0), softcap=50.0, window=4) == "triton"
    assert choice(head_dim=68) == "triton" and choice(dtype=torch.float32, softcap=50.0) == "eager"
    assert choice((7, 5), torch.float16) == choice((7, 0), torch.float16, window=4) == "efficient"
    assert choice((7, 5), torch.float32, window=4) == choice((7, 5), torch.float16, head_dim=68) == "sdpa"
    assert choice(backend="efficient") == "efficient" and choice(dtype=torch.float32) == "sdpa"
    assert choice((7, 5)) == choice(None) == choice(head_dim=512) == choice(dtype=torch.float64) == "sdpa"
    assert choice((7, 5), torch.float16, softcap=50.0) == choice(None, softcap=50.0) == "eager"
    assert choice(backend="sdpa") == "sdpa" and choice(backend="eager") == "eager"
    choice(backend="eager")
    assert choose_backend.cache_info().hits > 0


def test_choice_with_packages(packages: set[str]) -> None:
    packages |= {"flash4", "flash3", "flash2", "xformers"}
    assert choice(long_samples=True) == choice((10, 0), long_samples=True, window=4096) == "flash4"
    assert choice() == "triton" and choice((10, 0)) == choice(head_dim=256) == "varlen"
    assert choice((8, 0), long_samples=True) == choice((12, 0), long_samples=True) == "varlen"
    assert choice(long_samples=True, softcap=30.0) == "triton"
    assert choice((9, 0), head_dim=192, long_samples=True) == "flash4"
    assert choice((10, 0), head_dim=192, long_samples=True) == "varlen"
    for name in packages:
        assert choice(backend=name) == name
    packages.remove("triton")  # on Windows
    choose_backend.cache_clear()
    assert choice(softcap=30.0) == choice((8, 0), softcap=30.0) == choice(sinks=True) == "eager"
    assert choice() == "varlen"
    assert choice(softcap=30.0, backend="flash3") == "flash3" and choice((7, 5), torch.float16) == "efficient"


@pytest.mark.parametrize(
    ("backend", "case", "reason"),
    [
        ("varlen", dict(softcap=30.0), "'varlen' takes no softcap; use one of triton, eager"),
        ("sdpa", dict(sinks=True), "'sdpa' takes no attention sinks; use one of triton, eager"),
        ("flash4", dict(softcap=30.0), "takes no softcap"),
        ("flash2", dict(sinks=True), "takes no attention sinks"),
        ("efficient", dict(softcap=30.0), "takes no softcap"),
        ("varlen", dict(capability=None), "needs a CUDA GPU, the tensors are on cpu; use one of sdpa, eager"),
        ("varlen", dict(capability=(7, 5)), "needs compute capability 8.0, this GPU has 7.5"),
        ("triton", dict(capability=(7, 5), dtype=torch.float16), "needs compute capability 8.0"),
        ("efficient", dict(capability=(7, 5)), "needs compute capability 8.0, this GPU has 7.5"),  # for bf16
        ("varlen", dict(dtype=torch.float32), "needs torch.bfloat16 or torch.float16, not torch.float32"),
        ("varlen", dict(head_dim=512), "multiple of 8 and at most 256, not 512"),
        ("triton", dict(head_dim=257), "at most 256, not 257"),
        ("flash4", dict(capability=(8, 0)), "needs compute capability 9 or 10, this GPU has 8.0"),
        ("flash4", dict(capability=(10, 0), head_dim=192), "no head size between 128 and 256 on .* 10.0, such as 192"),
        ("flash3", dict(capability=(10, 0)), "needs compute capability 9, this GPU has 10.0"),
        ("flash4", {}, r"is not installed \(pip install flash-attn-4\)"),
        ("xformers", {}, r"is not installed \(pip install xformers\)"),
        ("varlen", dict(too_large=("varlen",)), "would index past 2\\^31 - 1 with so many samples"),
        ("flash5", {}, "unknown attention backend 'flash5'; there are flash4, varlen, triton, efficient, "),
    ],
)
def test_a_forced_backend_that_cannot_raises(backend: str, case: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choice(backend=backend, **case)


def test_a_package_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = attention_backends.package_function
    function.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # flash-attn-4 alone makes this
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert function("flash2") is None and function("xformers") is None and function("flash4") is None
    function.cache_clear()


def test_many_short_samples_go_to_another_backend() -> None:
    """The flash backward pads dQ by 128 rows a sample and indexes (T + 128 S) Hq D elements with 32 bits."""
    flash = ("flash4", "varlen", "flash3", "flash2")
    assert oversized(16_384, 68, 1024, 32, 128) == ()  # 0.1e9 elements
    assert oversized(16_384, 16_384, 1, 32, 128) == flash  # (16,384 + 128 * 16,384) * 4,096 = 8.7e9
    assert oversized(4096, 4063, 34, 32, 128) == ()  # 524,160 rows, one sample short of 2^19
    assert oversized(4096, 4064, 33, 32, 128) == flash  # 2^19 rows of 4,096: 2^31 exactly
    assert oversized(4096, 4064, 33, 32, 96) == () and oversized(4096, 5500, 33, 32, 80) == flash  # 80 is 96
    assert oversized(20_000, 10_000, 10_000, 32, 64) == (*flash, "efficient")  # 3.2e9 statistics
    assert oversized(600_000, 600, 1000, 32, 128) == (*flash, "efficient")  # T Hq D itself
    assert choice(too_large=oversized(16_384, 16_384, 1, 32, 128)) == "triton"
    assert choice(too_large=flash, long_samples=True) == "triton"


def test_attention_raises_for_a_forced_backend_and_for_shapes() -> None:
    q, k, v = (x.detach() for x in leaves())
    cu = boundaries(LENGTHS)
    for match, call in {
        "'sdpa' takes no softcap": lambda: attention(q, k, v, cu, 12, softcap=3.0, backend="sdpa"),
        "needs a CUDA GPU": lambda: attention(q, k, v, cu, 12, backend="varlen"),
        r"q \[T, Hq, D\]": lambda: attention(q, k[1:], v[1:], cu, 12),
        "cannot share 3": lambda: attention(q, *(torch.ones(32, 3, 8),) * 2, cu, 12),
        "int32": lambda: attention(q, k, v, cu.long(), 12),
        "window must be positive": lambda: attention(q, k, v, cu, 12, window=-1),
        "softcap must be positive": lambda: attention(q, k, v, cu, 12, softcap=0.0),
        "samples of 9 tokens in all, but q has 32": lambda: attention(q, k, v, cu, 12, lengths=[4, 5]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_how_varlen_is_called(version: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keywords of both releases; window w is w - 1 keys to the left; the scale goes in as it is."""

    def answer(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        assert cu_q is cu_k and max_q == max_k == 12 and window_size[1] == 0
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return dense(q, k, v, LENGTHS, window=window_size[0] + 1, scale=scale)

    def newer(*args: Any, enable_gqa: bool = False, return_aux: Any = None, **options: Any) -> Tensor:
        assert enable_gqa
        return answer(*args, **options)

    fake = ModuleType("torch.nn.attention.varlen")
    fake.varlen_attn = answer if version == "2.11" else newer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", fake)
    monkeypatch.setattr(module, "choose_backend", lambda *args, **options: "varlen")
    attention_backends._varlen_function.cache_clear()
    inputs = leaves()
    inputs[1] = torch.randn(32, 8, 2).transpose(1, 2)  # head vectors that are not contiguous
    output = attention(*inputs, boundaries(LENGTHS), 12, window=window, scale=0.7)
    attention_backends._varlen_function.cache_clear()
    assert torch.equal(output, dense(*inputs, LENGTHS, window=window, scale=0.7))


@pytest.mark.parametrize("returns_lse", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["flash4", "flash3", "flash2"])
def test_how_the_flash_packages_are_called(
    name: str, window: int | None, returns_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    softcap, unlimited = (None, None) if name == "flash4" else (2.0, -1)

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        cu_q, cu_k = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
        assert torch.equal(cu_q, boundaries(LENGTHS)) and cu_k is cu_q
        assert options.pop("softcap", None) == softcap
        expected = (unlimited, unlimited) if window is None else (3, 0)
        assert options == dict(max_seqlen_q=12, max_seqlen_k=12, causal=True, softmax_scale=8**-0.5,
                               window_size=expected, deterministic=False)  # fmt: skip
        out = dense(q, k, v, LENGTHS, window=window, softcap=softcap)
        return (out, None) if returns_lse else out

    monkeypatch.setattr(attention_backends, "package_function", lambda _: flash_attn_varlen_func)
    monkeypatch.setattr(module, "choose_backend", lambda *args, **options: name)
    inputs = leaves()
    output = attention(*inputs, boundaries(LENGTHS), 12, window=window, softcap=softcap)
    assert torch.equal(output, dense(*inputs, LENGTHS, window=window, softcap=softcap))


@pytest.mark.parametrize("window", [None, 4])
def test_how_efficient_is_called(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names in the installed torch's schemas; key heads repeated, their gradients summed."""
    calls, aten = [], torch.ops.aten
    schemas = [getattr(aten, f"_efficient_attention_{way}").default._schema for way in ("forward", "backward")]

    def record(index: int, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        names = [argument.name for argument in schemas[index].arguments]
        assert set(options) <= {a.name for a in schemas[index].arguments if a.kwarg_only}
        calls.append({**dict(zip(names, args, strict=False)), **options})
        return calls[-1]

    def forward(*args: Any, **options: Any) -> Any:
        call = record(0, args, options)
        q, k, v = (call[name][0] for name in ("query", "key", "value"))
        out = dense(q, k, v, LENGTHS, window=window, scale=call["scale"])[None]
        return out, torch.ones(1), torch.ones(2), torch.ones(3), 12, 12

    def backward(*args: Any, **options: Any) -> Any:
        call = record(1, args, options)
        with torch.enable_grad():
            inputs = [call[name].detach().requires_grad_() for name in ("query", "key", "value")]
            out = dense(*(x[0] for x in inputs), LENGTHS, window=window, scale=call["scale"])
            return (*torch.autograd.grad(out, inputs, call["grad_out_"][0]), None)

    monkeypatch.setattr(aten, "_efficient_attention_forward", forward)
    monkeypatch.setattr(aten, "_efficient_attention_backward", backward)
    monkeypatch.setattr(module, "choose_backend", lambda *args, **options: "efficient")
    inputs, above = leaves(), torch.randn(32, 4, 8)
    output = attention(*inputs, boundaries(LENGTHS), 99, window=window, scale=0.7)
    truth = dense(*inputs, LENGTHS, window=window, scale=0.7)
    for a, b in zip(with_gradients(output, inputs, above), with_gradients(truth, inputs, above), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for call in calls:
        assert call["bias"] is None and call["dropout_p"] == 0.0 and call["custom_mask_type"] == 1
        assert call["cu_seqlens_q"] is call["cu_seqlens_k"] and call["window_size"] == window
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 32  # never more than the tokens
        assert call["key"].shape == call["value"].shape == (1, 32, 4, 8)
    assert calls[0]["compute_log_sumexp"] is True and calls[1]["bias_requires_grad"] is False
    saved = [calls[1][name].numel() for name in ("logsumexp", "philox_seed", "philox_offset")]
    assert saved == [1, 2, 3] and calls[1]["out"].shape == (1, 32, 4, 8)


@pytest.mark.parametrize("window", [None, 4])
def test_how_xformers_is_called(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class BlockDiagonalCausalMask:
        window: int | None = None

        @classmethod
        def from_seqlens(cls, lengths: list[int], *, device: torch.device) -> "BlockDiagonalCausalMask":
            assert lengths == [length for length in LENGTHS if length] and device.type == "cpu"
            return cls()

        def make_local_attention(self, window: int) -> "BlockDiagonalCausalMask":
            self.window = window
            return self

    def function(q: Tensor, k: Tensor, v: Tensor, *, attn_bias: Any, scale: float) -> Tensor:
        assert q.shape == k.shape == (1, 32, 4, 8)
        return dense(q[0], k[0], v[0], LENGTHS, window=attn_bias.window, scale=scale)[None]

    fake: Any = ModuleType("attn_bias")
    fake.BlockDiagonalCausalMask = BlockDiagonalCausalMask
    for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(attention_backends, "package_function", lambda _: function)
    monkeypatch.setattr(module, "choose_backend", lambda *args, **options: "xformers")
    inputs = leaves()
    output = attention(*inputs, boundaries((*LENGTHS, 0)), 12, window=window)
    assert torch.equal(output, dense(*inputs, LENGTHS, window=window))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="not deterministic"):
            attention(*inputs, boundaries(LENGTHS), 12)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_installed_torch_takes_our_keywords() -> None:
    attention_backends._varlen_function.cache_clear()
    _, keywords = attention_backends._varlen_function()
    assert {"scale", "window_size"} <= keywords


# on a GPU

GPU_LENGTHS = (130, 1, 257, 64, 130)


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # eager's products ask for it
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that serves bf16 heads of 128 here, if its package is really installed."""
    monkeypatch.setattr(module, "package_function", attention_backends.package_function)
    gpu = torch.cuda.get_device_capability()
    reason = backend_refusal(request.param, "cuda", gpu, torch.bfloat16, 128)
    if reason is not None:
        pytest.skip(f"{request.param} {reason}")
    return request.param


each_backend = pytest.mark.parametrize("gpu_backend", BACKENDS, indirect=True)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("window", [None, 50, 64])  # 64: what blocks are multiples of
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("key_heads", [2, 8])
def test_gpu_three_way(head_dim: int, key_heads: int, window: int | None, gpu_backend: str) -> None:
    reason = backend_refusal(gpu_backend, "cuda", torch.cuda.get_device_capability(), torch.bfloat16, head_dim)
    if reason is not None:  # flash4 on Blackwell
        pytest.skip(f"{gpu_backend} {reason}")
    inputs = leaves(GPU_LENGTHS, 8, key_heads, head_dim, torch.bfloat16, "cuda")
    three_way(inputs, GPU_LENGTHS, gpu_backend, window=window)
    if gpu_backend == "efficient":  # as on Turing
        inputs = leaves(GPU_LENGTHS, 8, key_heads, head_dim, torch.float16, "cuda")
        three_way(inputs, GPU_LENGTHS, gpu_backend, window=window, scale=0.11)


@pytest.mark.gpu
@each_backend
def test_gpu_fp16(gpu_backend: str) -> None:
    three_way(leaves(GPU_LENGTHS, 8, 2, 128, torch.float16, "cuda"), GPU_LENGTHS, gpu_backend, scale=0.11)


@pytest.mark.gpu
@each_backend
def test_gpu_a_window_lost(gpu_backend: str) -> None:
    assert_window(gpu_backend, head_dim=64, dtype=torch.bfloat16, device="cuda")
    if gpu_backend == "efficient":
        assert_window("efficient", head_dim=64, device="cuda")


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("window", [None, 1000])
def test_gpu_long_samples_and_unused_boundaries(window: int | None, gpu_backend: str) -> None:
    lengths = (2100, 1, 300)
    inputs = leaves(lengths, 4, 1, 128, torch.bfloat16, "cuda")
    three_way(inputs, lengths, gpu_backend, window=window)
    padded, plain = (
        attention(*inputs, boundaries(some, "cuda"), 2100, window=window, backend=gpu_backend)
        for some in ((*lengths, 0, 0), lengths)
    )
    assert torch.equal(padded, plain)


@pytest.mark.gpu
@each_backend
def test_gpu_more_than_256_samples(gpu_backend: str) -> None:
    """flash4 then searches for a program's sample in another way."""
    lengths = (3, 1, 40) * 90 + (0,) * 30
    three_way(leaves(lengths, 4, 1, 128, torch.bfloat16, "cuda"), lengths, gpu_backend)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_fp32_and_large_heads(window: int | None) -> None:
    three_way(leaves(GPU_LENGTHS, 4, 2, 64, torch.float32, "cuda"), GPU_LENGTHS, None, window=window)
    three_way(leaves(GPU_LENGTHS, 4, 2, 512, torch.bfloat16, "cuda"), GPU_LENGTHS, None, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_softcap_and_sinks(dtype: torch.dtype, window: int | None) -> None:
    """The choice, triton in 16 bits, agrees with eager."""
    inputs = [*leaves(GPU_LENGTHS, 8, 2, 128, dtype, "cuda"), torch.randn(8, device="cuda").to(dtype)]
    inputs[3].requires_grad_()
    above, cu = torch.randn(inputs[0].shape, device="cuda"), boundaries(GPU_LENGTHS, "cuda")
    results = []
    for backend in (None, "eager"):
        output = attention(*inputs[:3], cu, 257, window=window, softcap=20.0, sinks=inputs[3], backend=backend)
        results.append(with_gradients(output, inputs, above))
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
def test_gpu_many_one_token_samples() -> None:
    """Where varlen's backward would fault: outputs are the values, dV is dO summed over the group."""
    lengths = (1,) * 16_384
    inputs = leaves(lengths, 32, 8, 128, torch.bfloat16, "cuda")
    above = torch.randn(inputs[0].shape, device="cuda")
    output = attention(*inputs, boundaries(lengths, "cuda"), 1)
    out, dq, dk, dv = with_gradients(output, inputs, above)
    assert torch.equal(out, inputs[2].repeat_interleave(4, 1)) and float(dk.abs().max()) < 1e-2
    expected = above.bfloat16().float().unflatten(1, (8, 4)).sum(2)
    assert relative_error(dv, expected) < 3e-3 and float(dq.abs().max()) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic")
@each_backend
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_no_leak_and_the_same_bits_twice(window: int | None, gpu_backend: str) -> None:
    if gpu_backend == "xformers":
        pytest.skip("xformers is not deterministic")
    inputs = leaves(GPU_LENGTHS, 8, 2, 128, torch.bfloat16, "cuda")
    cu, others = boundaries(GPU_LENGTHS, "cuda"), torch.ones(sum(GPU_LENGTHS), dtype=torch.bool)
    others[131:388] = False
    above = torch.randn(inputs[0].shape, device="cuda") * others[:, None, None].cuda()
    output = attention(*inputs, cu, 257, window=window, backend=gpu_backend)
    base = with_gradients(output, inputs, above)
    again = attention(*inputs, cu, 257, window=window, backend=gpu_backend)
    assert all(torch.equal(a, b) for a, b in zip(with_gradients(again, inputs, above), base, strict=True))
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[131:388] = torch.randn_like(x[131:388])
        x.requires_grad_()
    output = attention(*changed, cu, 257, window=window, backend=gpu_backend)
    for a, b in zip(with_gradients(output, changed, above), base, strict=True):
        assert torch.equal(a[others], b[others])


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_backend", ["flash4", "varlen", "triton", "efficient"], indirect=True)
def test_gpu_views_and_no_sync(gpu_backend: str) -> None:
    tokens = sum(GPU_LENGTHS)
    packed = torch.randn(1, tokens, 12 * 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cu = boundaries(GPU_LENGTHS, "cuda")

    def run(copy: bool) -> list[Tensor]:
        heads = packed.view(1, tokens, 12, 128).transpose(1, 2)[0]  # [12, T, D]
        views = [x.transpose(0, 1) for x in (heads[:8], heads[8:10], heads[10:])]
        views = [x.contiguous() for x in views] if copy else views
        output = attention(*views, cu, 257, backend=gpu_backend)
        return with_gradients(output, [packed], torch.ones(tokens, 8, 128, device="cuda"))

    expected = run(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        views = run(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(views[0], expected[0]) and relative_error(views[1], expected[1]) < 1e-3
