"""One step's loss and every gradient: fastlm against the stock model on each sample alone."""

import copy

import pytest
import torch

import fastlm
from tests.models.batches import LAYOUTS, alone, loss_and_gradients, samples, target_count
from tests.tiny import FAMILIES, add_lora, relative_error, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)


def pair(family: str, lora: bool, seed: int = 0, **model_options):
    """The same weights twice: stock, and patched."""
    stock = tiny_model(family, seed=seed, **model_options)
    stock = add_lora(stock, seed=1 + 1000 * seed) if lora else stock
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    return stock, fast


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused_head", [False, True], ids=["labels", "trl"])
def test_fp32_loss_and_every_gradient(family, lora, fused_head):
    stock, fast = pair(family, lora)
    truth_loss, truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    extra = {"fused_lm_head": True} if fused_head else {}
    for name, layout in LAYOUTS.items():
        loss, gradients = loss_and_gradients(fast, layout(ROWS), COUNT, **extra)
        assert abs(loss - truth_loss) <= 1e-5 * abs(truth_loss), name
        assert gradients.keys() == truth.keys(), name
        worst = max((relative_error(gradients[n], truth[n]), n) for n in truth)
        assert worst[0] <= 1e-5, (name, worst)
    assert len(truth) >= 15


def errors(run, seeds=range(6)):
    """Root mean square over seeds of each tensor's relative error, and of the loss's, for stock and for fastlm.

    One tiny tensor's rounding noise is a matter of luck, and fused products round elsewhere than stock ones; what
    may not be larger is the noise itself.
    """
    squares: dict[str, list[float]] = {}
    for seed in seeds:
        (truth_loss, truth), *others = run(seed)
        for side, (loss, gradients) in enumerate(others):
            assert gradients.keys() == truth.keys()
            found = {name: relative_error(gradients[name], truth[name]) for name in truth}
            found["loss"] = abs(loss - truth_loss) / abs(truth_loss)
            for name, error in found.items():
                squares.setdefault(name, [0.0, 0.0])[side] += error**2 / len(seeds)
    return {name: (stock**0.5, ours**0.5) for name, (stock, ours) in squares.items()}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded", "flattened"])
def test_autocast_errs_no_more_than_stock(family, lora, layout):
    def run(seed):
        stock, fast = pair(family, lora, seed=seed)
        rows = samples(seed=seed)
        yield loss_and_gradients(stock, alone(rows), COUNT)
        yield loss_and_gradients(stock, alone(rows), COUNT, autocast=True)
        yield loss_and_gradients(fast, LAYOUTS[layout](rows), COUNT, autocast=True)

    for name, (stock, ours) in errors(run).items():
        assert ours <= 1.25 * stock + 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_errs_no_more_than_stock(family):
    assert_bf16_errs_no_more(lambda seed: pair(family, True, seed=seed, dtype=torch.bfloat16))


def assert_bf16_errs_no_more(pair_of):
    """pair_of: seed -> stock and fastlm's, in bf16."""

    def run(seed):
        stock, fast = pair_of(seed)
        rows = samples(seed=seed)
        yield loss_and_gradients(copy.deepcopy(stock).float(), alone(rows), COUNT)
        yield loss_and_gradients(stock, alone(rows), COUNT)
        yield loss_and_gradients(fast, LAYOUTS["flattened"](rows), COUNT)

    for name, (stock, ours) in errors(run).items():
        assert ours <= 1.25 * stock + 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_sample_equal_the_sample_alone(family):
    stock, fast = pair(family, True)
    stock.eval(), fast.eval()
    with torch.no_grad():
        together = fast(**LAYOUTS["packed"](ROWS)[0]).logits[0]
        separate = torch.cat([stock(input_ids=batch["input_ids"]).logits[0] for batch in alone(ROWS)])
    torch.testing.assert_close(together, separate, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_leak_is_exactly_zero(family):
    """Every token of one sample changes: outputs of the others, and the gradient of their loss, do not at all."""
    assert_no_leak(pair(family, True)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_leak_is_exactly_zero_in_bf16(family, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fast = pair(family, True)[1].to("cuda", torch.bfloat16)
    fastlm.patch(fast)  # attention's backend is the GPU's
    torch.use_deterministic_algorithms(True)
    try:
        assert_no_leak(fast)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_no_leak(fast):
    changed = [dict(row) for row in ROWS]
    changed[2] = {**changed[2], "input_ids": [3 + (token + 11) % 290 for token in changed[2]["input_ids"]]}
    start = sum(len(row["input_ids"]) for row in ROWS[:2])
    others = torch.ones(sum(len(row["input_ids"]) for row in ROWS), dtype=torch.bool)
    others[start : start + len(ROWS[2]["input_ids"])] = False
    hidden, gradients = [], []
    for rows in (ROWS, changed):
        batch = LAYOUTS["flattened"](rows)[0]
        embeddings = fast.get_input_embeddings()(batch["input_ids"].to(fast.device)).detach().requires_grad_()
        output = fast.get_base_model().base_model(
            inputs_embeds=embeddings, boundaries=batch["boundaries"]
        ).last_hidden_state  # fmt: skip
        (output[:, others] ** 2).sum().backward()
        hidden.append(output.detach()[0, others])
        gradients.append(embeddings.grad[0, others])
    assert torch.equal(hidden[0], hidden[1])
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].abs().sum() > 0


def test_row_weights_reach_the_loss():
    _, fast = pair("llama", False)
    rows = [{**row, "weights": [0.5] * len(row["input_ids"])} for row in ROWS]
    plain, _ = loss_and_gradients(fast, LAYOUTS["flattened"](ROWS), COUNT)
    halved, _ = loss_and_gradients(fast, LAYOUTS["flattened"](rows), COUNT)
    assert halved == pytest.approx(plain / 2, rel=1e-6)
