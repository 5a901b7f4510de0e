"""fastlm/kernels/attention.py against dense fp64 attention, transformers' eager functions, itself alone."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlm.kernels import attention as module
from fastlm.kernels.attention import BACKENDS, attention, backend_refusal, choose_backend
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


def stock(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], backend: str | None, **options: Any
) -> Tensor:
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
    monkeypatch.setattr(module, "_QUERY_BLOCK", 4)
    masks = []
    visible = module._visible
    monkeypatch.setattr(module, "_visible", lambda *args: masks.append(visible(*args)) or masks[-1])
    three_way(leaves(), LENGTHS, backend, window=3)
    assert masks and max(mask.numel() for mask in masks) <= 4 * (4 + 3 - 1)
    three_way(leaves(), LENGTHS, backend)


def seen(tokens: int, lengths: tuple[int, ...], backend: str, window: int | None) -> list[list[int]]:
    """For each token, the tokens whose value reaches its output."""
    q, k, v = leaves(lengths, heads=1, key_heads=1)
    output = attention(q, k, v, boundaries(lengths), max(lengths), window=window, backend=backend)
    rows = [
        torch.autograd.grad(output[i].sum(), v, retain_graph=True)[0].abs().sum((1, 2)) for i in range(tokens)
    ]
    return [row.nonzero().flatten().tolist() for row in rows]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_window_lost(backend: str) -> None:
    """Window 4: token i sees i-3..i, cut at its sample's start; 0 and None are ordinary causal."""
    assert seen(10, (10,), backend, 4) == [list(range(max(0, i - 3), i + 1)) for i in range(10)]
    packed = seen(10, (5, 5), backend, 4)
    assert packed == [list(range(max(5 * (i // 5), i - 3), i + 1)) for i in range(10)]
    assert packed[9] == [6, 7, 8, 9]
    for none in (0, None, 10, 99):
        assert seen(10, (10,), backend, none) == [list(range(i + 1)) for i in range(10)]
    assert seen(10, (5, 5), backend, 0)[9] == [5, 6, 7, 8, 9]


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
        eager = modeling_gemma2.eager_attention_forward(
            layer, *qkv, mask[None, None], scaling=0.3, softcap=2.0
        )
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


@pytest.fixture
def _flash4_installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_flash4_function", lambda: print)
    choose_backend.cache_clear()
    yield
    choose_backend.cache_clear()


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_flash4_function", lambda: None)
    choose_backend.cache_clear()
    assert choice() == choice((8, 0)) == choice(window=4) == choice(long_samples=True) == "varlen"
    assert choice(dtype=torch.float16) == choice(head_dim=256) == choice((12, 0)) == "varlen"
    assert choice((7, 5)) == choice(None) == choice(dtype=torch.float32) == "sdpa"
    assert choice(head_dim=512) == choice(head_dim=68) == "sdpa"
    assert choice(softcap=50.0) == choice(sinks=True) == choice(None, softcap=50.0) == "eager"
    assert choice(backend="sdpa") == "sdpa" and choice(backend="eager") == "eager"
    choice(backend="eager")
    assert choose_backend.cache_info().hits == 1
    choose_backend.cache_clear()


@pytest.mark.usefixtures("_flash4_installed")
def test_choice_with_flash4() -> None:
    assert choice(long_samples=True) == choice((10, 0), long_samples=True, window=4096) == "flash4"
    assert choice() == choice((8, 0), long_samples=True) == choice((12, 0), long_samples=True) == "varlen"
    assert choice(backend="flash4") == "flash4"
    assert choice(long_samples=True, softcap=30.0) == "eager"


@pytest.mark.parametrize(
    ("backend", "case", "reason"),
    [
        ("varlen", dict(softcap=30.0), "'varlen' takes no softcap; use one of eager"),
        ("sdpa", dict(sinks=True), "'sdpa' takes no attention sinks; use one of eager"),
        ("flash4", dict(softcap=30.0), "takes no softcap"),
        ("varlen", dict(capability=None), "needs a CUDA GPU, the tensors are on cpu; use one of sdpa, eager"),
        ("varlen", dict(capability=(7, 5)), "needs compute capability 8.0, this GPU has 7.5"),
        ("varlen", dict(dtype=torch.float32), "needs bf16 or fp16, not torch.float32"),
        ("varlen", dict(head_dim=512), "at most 256, not 512"),
        ("flash4", dict(capability=(8, 0)), "needs Hopper or data-centre Blackwell"),
        ("flash3", {}, "unknown attention backend 'flash3'; there are flash4, varlen, sdpa, eager"),
    ],
)
def test_a_forced_backend_that_cannot_raises(backend: str, case: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choice(backend=backend, **case)


def test_flash4_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_flash4_function", lambda: None)
    reason = backend_refusal("flash4", "cuda", (9, 0), torch.bfloat16, 128)
    assert reason == "is not installed (pip install flash-attn-4)"
    assert all(backend_refusal(name, "cuda", (9, 0), torch.bfloat16, 128) is None for name in BACKENDS[1:])


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
    module._varlen_function.cache_clear()
    inputs = leaves()
    inputs[1] = torch.randn(32, 8, 2).transpose(1, 2)  # head vectors that are not contiguous
    output = attention(*inputs, boundaries(LENGTHS), 12, window=window, scale=0.7)
    module._varlen_function.cache_clear()
    assert torch.equal(output, dense(*inputs, LENGTHS, window=window, scale=0.7))


@pytest.mark.parametrize("returns_lse", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_how_flash4_is_called(window: int | None, returns_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        cu_q, cu_k = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
        assert torch.equal(cu_q, boundaries(LENGTHS)) and cu_k is cu_q
        expected = (None, None) if window is None else (3, 0)
        assert options == dict(max_seqlen_q=12, max_seqlen_k=12, causal=True, softmax_scale=8**-0.5,
                               window_size=expected, deterministic=False)  # fmt: skip
        out = dense(q, k, v, LENGTHS, window=window)
        return (out, None) if returns_lse else out

    monkeypatch.setattr(module, "_flash4_function", lambda: flash_attn_varlen_func)
    monkeypatch.setattr(module, "choose_backend", lambda *args, **options: "flash4")
    inputs = leaves()
    output = attention(*inputs, boundaries(LENGTHS), 12, window=window)
    assert torch.equal(output, dense(*inputs, LENGTHS, window=window))


def test_the_installed_torch_takes_our_keywords() -> None:
    module._varlen_function.cache_clear()
    _, keywords = module._varlen_function()
    assert {"scale", "window_size"} <= keywords


# on a GPU

GPU_LENGTHS = (130, 1, 257, 64, 130)


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # eager's products ask for it
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gpu_backends() -> list[str]:
    return [
        name
        for name in BACKENDS
        if backend_refusal(name, "cuda", torch.cuda.get_device_capability(), torch.bfloat16, 128) is None
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("key_heads", [2, 8])
def test_gpu_three_way(head_dim: int, key_heads: int, window: int | None) -> None:
    for backend in gpu_backends():
        inputs = leaves(GPU_LENGTHS, 8, key_heads, head_dim, torch.bfloat16, "cuda")
        three_way(inputs, GPU_LENGTHS, backend, window=window)
    inputs = leaves(GPU_LENGTHS, 8, key_heads, head_dim, torch.float16, "cuda")
    three_way(inputs, GPU_LENGTHS, None, window=window, scale=0.11)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_fp32_and_large_heads_go_sample_by_sample(window: int | None) -> None:
    three_way(leaves(GPU_LENGTHS, 4, 2, 64, torch.float32, "cuda"), GPU_LENGTHS, None, window=window)
    three_way(leaves(GPU_LENGTHS, 4, 2, 512, torch.bfloat16, "cuda"), GPU_LENGTHS, None, window=window)


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_no_leak_and_the_same_bits_twice(window: int | None) -> None:
    for backend in gpu_backends():
        inputs = leaves(GPU_LENGTHS, 8, 2, 128, torch.bfloat16, "cuda")
        cu, others = boundaries(GPU_LENGTHS, "cuda"), torch.ones(sum(GPU_LENGTHS), dtype=torch.bool)
        others[131:388] = False
        above = torch.randn(inputs[0].shape, device="cuda") * others[:, None, None].cuda()
        output = attention(*inputs, cu, 257, window=window, backend=backend)
        base = with_gradients(output, inputs, above)
        again = attention(*inputs, cu, 257, window=window, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(again, inputs, above), base, strict=True))
        changed = [x.detach().clone() for x in inputs]
        for x in changed:
            x[131:388] = torch.randn_like(x[131:388])
            x.requires_grad_()
        output = attention(*changed, cu, 257, window=window, backend=backend)
        for a, b in zip(with_gradients(output, changed, above), base, strict=True):
            assert torch.equal(a[others], b[others])


@pytest.mark.gpu
def test_gpu_views_and_no_sync() -> None:
    tokens = sum(GPU_LENGTHS)
    packed = torch.randn(1, tokens, 12 * 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cu = boundaries(GPU_LENGTHS, "cuda")

    def run(copy: bool) -> list[Tensor]:
        heads = packed.view(1, tokens, 12, 128).transpose(1, 2)[0]  # [12, T, D]
        views = [x.transpose(0, 1) for x in (heads[:8], heads[8:10], heads[10:])]
        views = [x.contiguous() for x in views] if copy else views
        return with_gradients(attention(*views, cu, 257), [packed], torch.ones(tokens, 8, 128, device="cuda"))

    expected = run(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        views = run(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(views[0], expected[0]) and relative_error(views[1], expected[1]) < 1e-3
