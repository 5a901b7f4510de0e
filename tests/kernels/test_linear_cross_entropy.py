"""fastlm/kernels/linear_cross_entropy.py and softmax_rows.py against fp64, torch, transformers and TRL."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastlm.kernels import linear_cross_entropy as module
from fastlm.kernels.launch import interpreting
from fastlm.kernels.linear_cross_entropy import linear_cross_entropy
from fastlm.kernels.softmax_rows import (
    RowLoss,
    RowStatistics,
    cross_entropy_rows,
    cross_entropy_rows_reference,
)
from tests.tiny import relative_error, tiny_model

from .interpreter import (
    DEVICE,
    assert_three_way,
    cpu_path_test,
    double_leaf,
    gradients,
    kernel_test,
    run_interpreted,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ALL_AT_ONCE = dict(softcap=5.0, logit_scale=2.0, temperature=1.3, label_smoothing=0.2, z_loss=1e-3)
CASES: dict[str, dict[str, float]] = {
    "plain": {},
    "softcap": dict(softcap=4.0),
    "scale": dict(logit_scale=0.25),
    "temperature": dict(temperature=0.7),
    "smoothing": dict(label_smoothing=0.1),
    "z": dict(z_loss=1e-2),
    "all": ALL_AT_ONCE,
}
COMBINATIONS = [
    *((torch.float32, case) for case in CASES),
    *((dtype, case) for dtype in (torch.bfloat16, torch.float16) for case in ("plain", "all")),
]
# two products of the same numbers may differ by more on a GPU, where their shapes pick the algorithm
FP32 = 1e-6 if DEVICE == "cpu" else 1e-5
ULPS = 4.0  # sums over the vocabulary run in another order, and entropy is a difference of two of them


def test_interpreted() -> None:
    run_interpreted(__file__)


def row_losses(
    logits: Tensor, targets: Tensor, *, softcap: float | None = None, logit_scale: float = 1.0,
    temperature: float = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """What a stock model computes from its head's product, in fp32 (fp64 stays)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    loss = F.cross_entropy(z, targets, reduction="none", label_smoothing=label_smoothing)
    return loss + z_loss * (targets != -100) * torch.logsumexp(z, -1).square()


def stock(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **case: float) -> Tensor:
    return row_losses(F.linear(hidden, weight, bias), targets, **case)


class Inputs:
    """A head of 131 tokens (odd: rows of logits do not align) over hidden states of width 24."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = 21, vocabulary: int = 131) -> None:
        self.hidden = torch.randn(rows, 24, device=DEVICE).to(dtype).requires_grad_()
        self.weight = (torch.randn(vocabulary, 24, device=DEVICE) * 0.5).to(dtype).requires_grad_()
        self.bias = torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_()
        self.targets = torch.randint(vocabulary, (rows,), device=DEVICE)
        self.targets[::5] = -100
        self.row_weight = torch.rand(rows, device=DEVICE) / rows

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]

    def ours(self, **options: Any) -> Any:
        return linear_cross_entropy(self.hidden, self.weight, self.targets, bias=self.bias, **options)

    def stock(self, **case: float) -> Tensor:
        return stock(self.hidden, self.weight, self.targets, self.bias, **case)

    def truth(self, **case: float) -> tuple[Tensor, list[Tensor]]:
        hidden, weight, bias = leaves = [double_leaf(x) for x in self.leaves]
        return stock(hidden, weight, self.targets, bias, **case), leaves


def one() -> Tensor:
    return torch.ones((), device=DEVICE)


# rows of logits


def rows_both_ways(
    function: Callable[..., None],
    logits: Tensor,
    targets: Tensor,
    factor: Tensor | None,
    case: dict[str, float],
) -> tuple[list[Tensor], Tensor]:
    stride = logits.shape[1] + 5  # rows further apart than they are long
    buffer = torch.full((logits.shape[0], stride), 7.0, dtype=logits.dtype, device=logits.device)
    buffer[:, : logits.shape[1]] = logits
    results = RowStatistics.empty(logits.shape[0], torch.float32, logits.device, statistics=True)
    view = buffer[:, : logits.shape[1]]
    function(view, targets, results, RowLoss(**case), gradient=True, factor=factor)  # type: ignore[arg-type]
    assert torch.equal(buffer[:, logits.shape[1] :], torch.full_like(buffer[:, logits.shape[1] :], 7.0))
    assert results.entropy is not None and results.is_top1 is not None
    return [results.loss, results.log_probs, results.entropy, view], results.is_top1


def rows_truth(
    logits: Tensor, targets: Tensor, factor: Tensor | None, case: dict[str, float]
) -> tuple[list[Tensor], Tensor]:
    x = logits.double().requires_grad_()
    loss = row_losses(x, targets, **case)
    (gradient,) = torch.autograd.grad(loss, x, torch.ones_like(loss) if factor is None else factor.double())
    with torch.no_grad():
        z = x * case.get("logit_scale", 1.0)
        cap = case.get("softcap")
        z = (z if cap is None else cap * torch.tanh(z / cap)) / case.get("temperature", 1.0)
        log_p = torch.log_softmax(z, -1)
        valid = targets != -100
        log_probs = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) * valid
        entropy = -(log_p.exp() * log_p).sum(-1) * valid
        top1 = (z.argmax(-1) == targets) & valid
    return [loss.detach(), log_probs, entropy, gradient], top1


@kernel_test
@pytest.mark.parametrize("vocabulary", [1, 257, 4099])  # nothing to choose; within a block; three past one
@pytest.mark.parametrize(("dtype", "case"), COMBINATIONS, ids=str)
def test_rows_three_way(dtype: torch.dtype, case: str, vocabulary: int) -> None:
    logits = (torch.randn(5, vocabulary, device=DEVICE) * 4).to(dtype)
    targets = torch.tensor([0, vocabulary - 1, -100, vocabulary // 2, 0], device=DEVICE)
    targets[4] = logits[4].argmax()
    factor = torch.randn(5, device=DEVICE) if case in ("plain", "all") else None
    ours, top1 = rows_both_ways(cross_entropy_rows, logits, targets, factor, CASES[case])
    theirs, reference_top1 = rows_both_ways(cross_entropy_rows_reference, logits, targets, factor, CASES[case])
    truth, true_top1 = rows_truth(logits, targets, factor, CASES[case])
    assert_three_way(ours, theirs, truth, ulps=ULPS)
    assert torch.equal(top1, true_top1) and torch.equal(reference_top1, true_top1)
    assert not any(x[2].any() for x in ours), "an ignored row"


@kernel_test
def test_rows_without_gradient_leave_the_logits_alone() -> None:
    logits, targets = torch.randn(3, 50, device=DEVICE), torch.tensor([1, -100, 2], device=DEVICE)
    before = logits.clone()
    results = RowStatistics.empty(3, torch.float32, logits.device, statistics=False)
    cross_entropy_rows(logits, targets, results, RowLoss())
    assert torch.equal(logits, before)
    torch.testing.assert_close(results.loss, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=0)


@kernel_test
def test_rows_confident_and_extreme() -> None:
    """A loss of 5e-5 under logits of 30 keeps its digits, logits of 1e4 overflow nothing, the first wins."""
    logits = torch.zeros(4, 5000, device=DEVICE)
    logits[0] = -1e4
    logits[0, 4500] = 1e4
    logits[1, 7], logits[1, 8] = 30.0, 20.0
    logits[2, 10] = logits[2, 4200] = logits[3, 10] = logits[3, 4200] = 2.0
    targets = torch.tensor([4500, 7, 10, 4200], device=DEVICE)
    (loss, _, entropy, gradient), top1 = rows_both_ways(cross_entropy_rows, logits, targets, None, {})
    true_loss, _, true_entropy, true_gradient = rows_truth(logits, targets, None, {})[0]
    assert 4e-5 < true_loss[1] < 5e-5 and abs(loss[1] / true_loss[1] - 1) < 2e-3
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=1e-7)
    assert top1.tolist() == [True, True, True, False]


@kernel_test
def test_rows_target_outside_the_vocabulary_shows() -> None:
    results = RowStatistics.empty(3, torch.float32, torch.device(DEVICE), statistics=False)
    targets = torch.tensor([50, 1, -1], device=DEVICE)
    cross_entropy_rows(torch.randn(3, 50, device=DEVICE), targets, results, RowLoss())
    assert results.loss.isnan().tolist() == [True, False, True]


@kernel_test
def test_c_int32_offset() -> None:
    """Two rows more than 2^31 elements apart (pages that nobody touches cost nothing on a CPU)."""
    near = torch.randn(2, 300, device=DEVICE).bfloat16()
    far = torch.empty_strided((2, 300), (2**31 + 64, 1), dtype=torch.bfloat16, device=DEVICE)
    far.copy_(near)
    targets = torch.tensor([5, 299], device=DEVICE)
    losses = []
    for logits in (near, far):
        results = RowStatistics.empty(2, torch.float32, logits.device, statistics=False)
        cross_entropy_rows(logits, targets, results, RowLoss(), gradient=True)
        losses.append(results.loss)
    assert torch.equal(near, far) and torch.equal(*losses)


@pytest.mark.gpu
def test_c_int32_offset_full_size() -> None:
    """V = 151,936: row 14,135 is the first past 2^31; the last rows equal the same rows alone."""
    rows, vocabulary = 14_138, 151_936
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device="cuda").normal_()
    tail = logits[-4:].clone()
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    results = RowStatistics.empty(rows, torch.float32, logits.device, statistics=True)
    alone = RowStatistics.empty(4, torch.float32, logits.device, statistics=True)
    cross_entropy_rows(logits, targets, results, RowLoss(), gradient=True)
    cross_entropy_rows(tail, targets[-4:], alone, RowLoss(), gradient=True)
    assert torch.equal(logits[-4:], tail)
    assert torch.equal(results.loss[-4:], alone.loss) and torch.equal(results.entropy[-4:], alone.entropy)


# the whole head


def assert_no_worse(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor], roundings: float) -> None:
    """Relative errors against fp64 at most the stock head's, in which `roundings` more to its dtype add up.

    A rounding errs by 0.3 ulp (root mean square), the interpreter's truncation by 0.6. The products
    sum in another order: a quarter more, and for the one number that is the loss 0.02 ulp of its logits.
    """
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        eps = torch.finfo(theirs[1].dtype).eps
        extra = roundings + (4 if interpreting() and a.dtype == torch.bfloat16 else 0)
        bound = 1.25 * (relative_error(b, exact) ** 2 + extra * (0.3 * eps) ** 2) ** 0.5
        assert relative_error(a, exact) <= bound + max(0.02 * eps, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("weighted", [True, False], ids=["row_weight", "per row"])
@pytest.mark.parametrize(("dtype", "case"), COMBINATIONS, ids=str)
def test_three_way(dtype: torch.dtype, case: str, weighted: bool) -> None:
    inputs, settings = Inputs(dtype), CASES[case]
    if weighted:
        loss = inputs.ours(row_weight=inputs.row_weight, **settings).loss
    else:
        loss = (inputs.ours(**settings).loss * inputs.row_weight).sum()
    ours = gradients([loss], inputs.leaves, [one()])
    theirs = gradients([(inputs.stock(**settings) * inputs.row_weight).sum()], inputs.leaves, [one()])
    exact, leaves = inputs.truth(**settings)
    truth = gradients([(exact * inputs.row_weight.double()).sum()], leaves, [one()])
    assert_no_worse(ours, theirs, truth, roundings=0 if weighted else 1)


@cpu_path_test
@pytest.mark.parametrize("weighted", [True, False], ids=["row_weight", "per row"])
@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden weight", "hidden bias", "hidden weight bias"])
def test_any_input_may_be_frozen(trained: str, weighted: bool) -> None:
    inputs = Inputs()
    every = dict(zip(("hidden", "weight", "bias"), inputs.leaves, strict=True))
    (expected,) = inputs.stock().unsqueeze(0)
    wanted = [every[name] for name in trained.split()]
    expected_gradients = torch.autograd.grad((expected * inputs.row_weight).sum(), wanted)
    for name, leaf in every.items():
        leaf.requires_grad_(name in trained.split())
    if weighted:
        loss = inputs.ours(row_weight=inputs.row_weight).loss
    else:
        loss = (inputs.ours().loss * inputs.row_weight).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, wanted), expected_gradients, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_equals_full_logits_to_1e_6() -> None:
    inputs = Inputs()
    output = inputs.ours(statistics=True)
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias).detach()
    torch.testing.assert_close(
        output.loss, F.cross_entropy(logits, inputs.targets, reduction="none"), rtol=FP32, atol=0
    )
    assert torch.equal(output.log_probs, -output.loss) and output.log_probs.requires_grad
    p = torch.distributions.Categorical(logits=logits.double())
    valid = inputs.targets != -100
    torch.testing.assert_close(output.entropy.double(), p.entropy() * valid, rtol=FP32, atol=0)
    assert torch.equal(output.is_top1, (logits.argmax(-1) == inputs.targets) & valid)
    assert not output.entropy.requires_grad and inputs.ours().entropy is None
    gradient = torch.autograd.grad(output.log_probs.sum(), inputs.hidden)[0]
    assert torch.equal(gradient, -torch.autograd.grad(inputs.ours().loss.sum(), inputs.hidden)[0])


@cpu_path_test
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(rows=300)
    (whole,) = [inputs.ours(row_weight=inputs.row_weight, statistics=True)]
    expected = gradients([whole.loss], inputs.leaves, [one()])
    late = gradients([(inputs.ours().loss * inputs.row_weight).sum()], inputs.leaves, [one()])
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "_GPU_CHUNK_BYTES", 1)
    assert module.chunk_rows(131, 4, DEVICE, trainable=True) == 128  # three chunks, the last of 44 rows
    chunked = inputs.ours(row_weight=inputs.row_weight, statistics=True)
    torch.testing.assert_close(chunked.log_probs, whole.log_probs, rtol=FP32, atol=FP32)
    torch.testing.assert_close(chunked.entropy, whole.entropy, rtol=FP32, atol=FP32)
    assert torch.equal(chunked.is_top1, whole.is_top1)
    for results, reference in (
        (gradients([chunked.loss], inputs.leaves, [one()]), expected),
        (gradients([(inputs.ours().loss * inputs.row_weight).sum()], inputs.leaves, [one()]), late),
    ):
        for ours, theirs in zip(results, reference, strict=True):
            assert relative_error(ours, theirs) < FP32


@cpu_path_test
def test_chunk_rows_follow_from_shapes() -> None:
    shapes = [(151_936, 2), (128_256, 2), (262_144, 2), (32_000, 2), (151_936, 4), (10**7, 4)]
    rows = {(v, size): module.chunk_rows(v, size, "cuda", trainable=False) for v, size in shapes}
    assert list(rows.values()) == [1024, 2048, 1024, 8192, 512, 128]
    assert all(2**28 < v * size * count <= 2**29 for (v, size), count in rows.items() if v < 10**6)
    assert module.chunk_rows(151_936, 2, "cuda", trainable=True) == 2048


@cpu_path_test
def test_gradients_scale_with_what_comes_from_above() -> None:
    """DPO and the like weight rows late, with either sign; a second backward over a kept graph agrees."""
    inputs, above = Inputs(), torch.randn(21, device=DEVICE)
    loss = inputs.ours().loss
    ours = torch.autograd.grad(loss, inputs.leaves, above, retain_graph=True)
    again = torch.autograd.grad(loss, inputs.leaves, above)
    theirs = torch.autograd.grad(inputs.stock(), inputs.leaves, above)
    for a, b, c in zip(ours, again, theirs, strict=True):
        assert torch.equal(a, b) and relative_error(a, c) < 1e-5
    weighted = inputs.ours(row_weight=above).loss
    for a, b in zip(torch.autograd.grad(weighted, inputs.leaves, -3 * one()), theirs, strict=True):
        assert relative_error(a, -3 * b) < 1e-5


@cpu_path_test
def test_second_backward_raises_torch_s_own_error() -> None:
    inputs = Inputs()
    for options in ({}, dict(row_weight=inputs.row_weight)):
        loss = inputs.ours(**options).loss.sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@cpu_path_test
def test_gradcheck() -> None:
    inputs = Inputs(torch.float64, rows=4, vocabulary=7)
    inputs.row_weight = inputs.row_weight.double()
    if DEVICE == "cpu":
        assert torch.autograd.gradcheck(
            lambda h, w, b: linear_cross_entropy(h, w, inputs.targets, bias=b, **ALL_AT_ONCE).loss,
            inputs.leaves,
        )


def test_c_softcap_missing() -> None:
    """c * tanh(x / c), not x * tanh(x / c): with cap 30 the logits 5, 20, 60, 124 become these."""
    logits = torch.tensor([0.0, 5.0, 20.0, 60.0, 124.0], device=DEVICE)
    hidden, weight = torch.ones(5, 1, device=DEVICE).requires_grad_(), logits.reshape(5, 1)
    targets = torch.arange(5, device=DEVICE)
    log_probs = linear_cross_entropy(hidden, weight, targets, softcap=30.0).log_probs
    capped = log_probs - log_probs[0]
    expected = torch.tensor([0.0, 4.954, 17.483, 28.921, 29.985], device=DEVICE)
    torch.testing.assert_close(capped, expected, rtol=0, atol=6e-4)
    (gradient,) = torch.autograd.grad(-log_probs.sum(), hidden)
    hidden64 = double_leaf(hidden)
    loss = stock(hidden64, weight.double(), targets, None, softcap=30.0).sum()
    assert relative_error(gradient, torch.autograd.grad(loss, hidden64)[0]) < FP32


@cpu_path_test
def test_c_softcap_of_gemma2_equals_its_own_loss() -> None:
    model = tiny_model("gemma2").to(DEVICE)
    model.lm_head.weight.data.mul_(20)  # logits past the cap
    ids = torch.randint(3, 300, (1, 12), device=DEVICE)
    hidden = model.model(ids).last_hidden_state[0, :-1].detach().requires_grad_()
    weight = model.lm_head.weight
    cap = model.config.final_logit_softcapping
    ours = linear_cross_entropy(hidden, weight, ids[0, 1:], softcap=cap).loss.mean()
    theirs = model(ids, labels=ids).loss
    assert F.linear(hidden, weight).abs().max() > 2 * cap
    torch.testing.assert_close(ours, theirs, rtol=FP32, atol=0)


@cpu_path_test
def test_c_inplace_saved_tensors() -> None:
    """Hidden states that their producer saved, a head with two losses: inputs unchanged, gradients right."""
    inputs = Inputs()

    def loss(head: Callable[..., Tensor]) -> Tensor:
        hidden = torch.tanh(inputs.hidden)  # saves its output
        first = head(hidden, inputs.weight, inputs.targets, inputs.bias).sum()
        second = head(hidden, inputs.weight, inputs.targets.flip(0), inputs.bias).sum()
        return first + second + hidden.square().sum()

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        before = [x.detach().clone() for x in (hidden, weight, targets, bias)]
        result = linear_cross_entropy(hidden, weight, targets, bias=bias).loss
        assert all(torch.equal(x, y) for x, y in zip((hidden, weight, targets, bias), before, strict=True))
        return result

    for a, b in zip(
        torch.autograd.grad(loss(ours), inputs.leaves),
        torch.autograd.grad(loss(stock), inputs.leaves),
        strict=True,
    ):
        assert relative_error(a, b) < 1e-5


@cpu_path_test
def test_tied_embedding_gets_both_gradients() -> None:
    ids = torch.tensor([1, 7, 7, 30], device=DEVICE)
    inputs = Inputs(rows=3)

    def both(head: Callable[..., Tensor]) -> Tensor:
        hidden = F.embedding(ids, inputs.weight)[:-1].tanh()
        return torch.autograd.grad(head(hidden, inputs.weight, ids[1:], inputs.bias).sum(), inputs.weight)[0]

    ours = both(lambda h, w, y, b: linear_cross_entropy(h, w, y, bias=b).loss)
    assert relative_error(ours, both(stock)) < FP32


@cpu_path_test
@pytest.mark.parametrize("padded", [True, False], ids=["ignored rows", "no ignored row"])
def test_label_smoothing_equals_transformers(padded: bool) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    inputs = Inputs()
    if not padded:
        inputs.targets.clamp_(min=0)
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias)
    theirs = LabelSmoother(epsilon=0.1)({"logits": logits[None]}, inputs.targets[None])
    count = (inputs.targets != -100).sum()
    ours = inputs.ours(label_smoothing=0.1, row_weight=(1 / count).expand(21).float()).loss
    torch.testing.assert_close(ours, theirs, rtol=FP32, atol=0)
    for a, b in zip(torch.autograd.grad(ours, inputs.leaves), torch.autograd.grad(theirs, inputs.leaves), strict=True):
        assert relative_error(a, b) < 1e-5


@cpu_path_test
def test_statistics_equal_trl() -> None:
    from trl.kernels import ChunkedLogProbFunction

    inputs = Inputs(rows=40)
    inputs.targets = F.linear(inputs.hidden, inputs.weight, inputs.bias).argmax(-1)
    inputs.targets[::2] = torch.randint(131, (20,), device=DEVICE)
    outputs = ("entropy", "is_top1")
    theirs = ChunkedLogProbFunction.apply(
        inputs.hidden, inputs.weight, inputs.bias, inputs.targets, 0.8, 64, 6.0, 1.5, outputs
    )
    ours = inputs.ours(temperature=0.8, softcap=6.0, logit_scale=1.5, statistics=True)
    torch.testing.assert_close(ours.log_probs, theirs[0], rtol=FP32, atol=2 * FP32)
    torch.testing.assert_close(ours.entropy, theirs[1], rtol=FP32, atol=2 * FP32)
    assert torch.equal(ours.is_top1, theirs[4]) and ours.is_top1.sum() >= 20


@cpu_path_test
def test_autocast_decides_the_compute_dtype() -> None:
    inputs, cast = Inputs(), Inputs()
    for a, b in zip(cast.leaves, inputs.leaves, strict=True):
        a.data = b.data.bfloat16()
    cast.targets = inputs.targets
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        output = inputs.ours(row_weight=inputs.row_weight)
    expected = cast.ours(row_weight=inputs.row_weight)
    assert output.loss.dtype == torch.float32 and torch.equal(output.loss, expected.loss)
    ours = torch.autograd.grad(output.loss, inputs.leaves)
    for a, b in zip(ours, torch.autograd.grad(expected.loss, cast.leaves), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a.bfloat16(), b)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        late = torch.autograd.grad((inputs.ours().loss * inputs.row_weight).sum(), inputs.leaves)
    for a, b in zip(late, ours, strict=True):
        assert a.dtype == torch.float32 and relative_error(a, b) < 6e-3


@cpu_path_test
def test_hidden_in_fp32_with_a_bf16_head_computes_in_the_head_s_dtype() -> None:
    inputs = Inputs(torch.bfloat16)
    hidden = inputs.hidden.detach().float().requires_grad_()
    loss = linear_cross_entropy(hidden, inputs.weight, inputs.targets, bias=inputs.bias).loss
    assert torch.equal(loss, inputs.ours().loss)
    assert torch.autograd.grad(loss.sum(), hidden)[0].dtype == torch.float32


@cpu_path_test
def test_fp16_gradients_survive_a_large_denominator() -> None:
    """Row weights of 2^-20, loss scale 2^20: fp16 would lose everything below 6e-8 if weighted early."""
    inputs = Inputs(torch.float16)
    inputs.row_weight = torch.full((21,), 2.0**-20, device=DEVICE)
    scaled = torch.autograd.grad(inputs.ours(row_weight=inputs.row_weight).loss * 2**20, inputs.leaves)
    unscaled = torch.autograd.grad(inputs.ours(row_weight=torch.ones_like(inputs.row_weight)).loss, inputs.leaves)
    late = torch.autograd.grad((inputs.ours().loss * 2**-20).sum() * 2**20, inputs.leaves)
    for a, b, c in zip(scaled, unscaled, late, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and a.abs().max() > 0


class Count(TorchDispatchMode):
    """Operations by name while active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(name in ("aten::mm", "aten::addmm", "aten::addmm_") for name in self.calls)


@cpu_path_test
def test_products_are_counted_and_nothing_syncs() -> None:
    """Frozen head: 2 products. Trainable: 3 with row weights, 4 without. No gradient: 1. Never a sync."""
    inputs = Inputs()

    def products(weighted: bool) -> tuple[int, int]:
        row_weight = inputs.row_weight if weighted else None
        with Count() as forward:
            loss = inputs.ours(row_weight=row_weight, statistics=True).loss.sum()
        with Count() as backward:
            if loss.requires_grad:
                loss.backward()
        banned = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::item"}
        assert not banned & {*forward.calls, *backward.calls}
        return forward.products, backward.products

    assert products(True) == (3, 0) and products(False) == (2, 2)
    inputs.weight.requires_grad_(False), inputs.bias.requires_grad_(False)
    assert products(True) == (2, 0) and products(False) == (2, 0)
    with torch.no_grad():
        assert products(True) == (1, 0) and products(False) == (1, 0)
    inputs.hidden.requires_grad_(False)
    assert products(True) == (1, 0) and products(False) == (1, 0)


@cpu_path_test
def test_no_rows_and_no_targets() -> None:
    for rows in (0, 3):
        inputs = Inputs(rows=rows)
        inputs.targets.fill_(-100)
        for options in (dict(row_weight=inputs.row_weight), {}):
            loss = inputs.ours(statistics=True, **options).loss.sum()
            assert loss == 0 and loss.dtype == torch.float32
            for gradient, leaf in zip(torch.autograd.grad(loss, inputs.leaves), inputs.leaves, strict=True):
                assert gradient.shape == leaf.shape and not gradient.any()


@cpu_path_test
def test_ignored_rows_do_not_touch_the_others() -> None:
    inputs = Inputs()
    keep = inputs.targets != -100
    loss = inputs.ours(row_weight=inputs.row_weight).loss
    every = torch.autograd.grad(loss, inputs.leaves)
    compact = linear_cross_entropy(
        inputs.hidden[keep], inputs.weight, inputs.targets[keep], bias=inputs.bias,
        row_weight=inputs.row_weight[keep],
    )  # fmt: skip
    torch.testing.assert_close(loss, compact.loss, rtol=FP32, atol=0)
    for a, b in zip(every, torch.autograd.grad(compact.loss, inputs.leaves), strict=True):
        assert relative_error(a, b) < FP32
    assert not every[0][~keep].any()


@cpu_path_test
def test_same_bits_twice() -> None:
    inputs = Inputs(torch.bfloat16, rows=200)
    first, second = (
        gradients([inputs.ours(row_weight=inputs.row_weight).loss], inputs.leaves, [one()]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strided_inputs() -> None:
    inputs = Inputs()
    wide = torch.randn(42, 48, device=DEVICE)
    hidden = wide[::2, 12:36]
    weight = inputs.weight.detach().t().contiguous().t()
    ours = linear_cross_entropy(hidden.detach().requires_grad_(), weight, inputs.targets).loss
    assert relative_error(ours, stock(hidden, inputs.weight, inputs.targets, None)) < FP32


@cpu_path_test
def test_sharded_head_is_gathered() -> None:
    class Sharded(Tensor):
        def full_tensor(self) -> Tensor:
            return self.as_subclass(Tensor)

    inputs = Inputs()
    weight, bias = inputs.weight.as_subclass(Sharded), inputs.bias.as_subclass(Sharded)
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, bias=bias).loss
    assert type(loss) is Tensor and torch.equal(loss, inputs.ours().loss)


@cpu_path_test
def test_target_outside_the_vocabulary_raises_on_a_cpu() -> None:
    inputs = Inputs()
    for wrong in (131, -1):
        inputs.targets[3] = wrong
        if DEVICE == "cuda":  # raising would make the GPU wait
            assert inputs.ours().loss[3].isnan()
            continue
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            inputs.ours()


@cpu_path_test
def test_errors_say_what_was_wrong() -> None:
    inputs = Inputs()
    h, w, y = inputs.hidden, inputs.weight, inputs.targets
    for match, call in {
        r"hidden \[N, H\] and weight \[V, H\]": lambda: linear_cross_entropy(h, w[:, :3], y),
        "one target a row": lambda: linear_cross_entropy(h, w, y[:4]),
        "int64": lambda: linear_cross_entropy(h, w, y.int()),
        r"bias \[131\]": lambda: linear_cross_entropy(h, w, y, bias=w[0]),
        r"row_weight \[21\] fp32": lambda: linear_cross_entropy(h, w, y, row_weight=w[0]),
        "row_weight is a constant": lambda: linear_cross_entropy(h, w, y, row_weight=h[:, 0]),
        "softcap must be positive": lambda: linear_cross_entropy(h, w, y, softcap=0.0),
        "temperature must be positive": lambda: linear_cross_entropy(h, w, y, temperature=0.0),
        "between 0 and 1": lambda: linear_cross_entropy(h, w, y, label_smoothing=1.5),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.gpu
def test_no_sync_on_a_gpu() -> None:
    inputs = Inputs(torch.bfloat16)
    inputs.ours(row_weight=inputs.row_weight, statistics=True).loss.backward()  # compile first
    inputs.ours().loss.sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.ours(row_weight=inputs.row_weight, statistics=True).loss.backward()
        inputs.ours().loss.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_frozen_head_stays_within_a_gibibyte() -> None:
    """8,192 rows of width 4,096 and a vocabulary of 151,936, whose fp32 logits would be 4.6 GiB."""
    hidden = torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.randn(151_936, 4096, dtype=torch.bfloat16, device="cuda") * 0.02
    targets = torch.randint(151_936, (8192,), device="cuda")
    row_weight = torch.full((8192,), 1 / 8192, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, targets, row_weight=row_weight).loss
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30
    rows = slice(8000, 8192)
    logits = F.linear(hidden.detach()[rows], weight).float()
    expected = (torch.softmax(logits, -1) - F.one_hot(targets[rows], 151_936)) / 8192
    assert relative_error(hidden.grad[rows], expected.bfloat16() @ weight) < 1e-2
