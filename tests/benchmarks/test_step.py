"""The step benchmark runs on a CPU, and both of its systems train the same model on the same samples."""

import json

import pytest

from benchmarks import step
from benchmarks.results.__main__ import markdown

pytestmark = pytest.mark.skipif(
    step.DEVICE.type != "cpu", reason="a GPU's atomics let equal runs differ in the last bits"
)

TINY = ["--arch", "tiny", "--rows", "4", "--steps", "2"]


def record_of(capsys, *options):
    step.main([*TINY, *options])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_lora_and_its_floor(capsys, tmp_path):
    record = record_of(capsys, "--floor", "--save", str(tmp_path))
    row = record["results"][0]
    assert (row["system"], row["training"], row["stock_layers"]) == ("fastlm", "lora", 0)
    assert row["fused"].items() >= {"head": 1, "attention": 2, "lora": 14, "mlp": 2, "norm": 5}.items()
    assert row["padded_tokens_per_step"] == row["tokens_per_step"] <= 4 * 64
    assert row["tokens_per_second"] > 0 and len(row["kernels"]) == 10
    assert set(record["floor"]) == {"products_ms", "attention_ms", "tokens_per_second"}
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == record
    assert "| tokens_per_second |" in markdown(record)


@pytest.mark.parametrize("training", [[], ["--full"], ["--qlora"]], ids=["lora", "full", "qlora"])
def test_stock_computes_the_same_losses(capsys, training):
    ours = record_of(capsys, *training)["results"][0]
    stock = record_of(capsys, *training, "--stock", "--micro-batch", "3")["results"][0]
    assert stock["padded_tokens_per_step"] > ours["padded_tokens_per_step"]
    assert stock["samples_per_step"] == ours["samples_per_step"]
    # bf16 products of a loss near log 320: the second step has seen the first one's gradients
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-3)


def test_recomputation_changes_nothing(capsys):
    losses = [record_of(capsys, *options)["results"][0]["losses"] for options in ([], ["--recompute"])]
    assert losses[0] == losses[1]


def test_samples_instead_of_rows(capsys):
    assert record_of(capsys, "--samples", "3")["results"][0]["samples_per_step"] == 3
