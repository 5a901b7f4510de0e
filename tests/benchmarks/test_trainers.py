"""The trainers' benchmark runs on a CPU, and its systems train on the same tokens to the same losses and gradients."""

import json

import pytest

from benchmarks import trainers
from benchmarks.results.__main__ import markdown
from benchmarks.timing import DEVICE
from benchmarks.trainers import FASTLM, KEEPING, STOCK, WORKS

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a dry run for machines without a GPU")


def test_every_trainer_in_every_system(capsys, tmp_path):
    trainers.main(["--smoke", "--save", str(tmp_path)])
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert json.loads(next(tmp_path.iterdir()).read_text()) == record
    rows = record["results"]
    assert [(row["trainer"], row["system"]) for row in rows] == [(n, s) for n in WORKS for s in WORKS[n].systems]
    assert len(markdown(record).splitlines()) > len(rows)
    assert len([line for line in table if "valid tokens/s (" in line]) == len(rows)
    stocks = {row["trainer"]: row for row in rows if row["system"] == STOCK}
    for row in rows:
        stock = stocks[row["trainer"]]
        counts = [r["valid_tokens_per_second"] * r["seconds_per_step"] for r in (row, stock)]
        assert counts[0] == pytest.approx(counts[1]) and counts[0] > 50, row
        assert row["speedup"] == stock["seconds_per_step"] / row["seconds_per_step"]
        assert row["valid_token_share"] < 0.8 or row is not stock
        assert len(row["losses"]) == 4 and len(row["gradient_norms"]) == 2 and min(row["gradient_norms"]) > 1e-3
        # bf16 products
        assert row["largest_loss_difference"] < 2e-3 and row["largest_gradient_norm_difference"] < 2e-2, row


def test_differences_are_stocks_scale():
    rows = [
        {"seconds_per_step": 2.0, "losses": [8.0, -10.0], "gradient_norms": [0.1, 0.2]},
        {"seconds_per_step": 0.5, "losses": [8.5, -10.1], "gradient_norms": [0.1, 0.21]},
    ]
    trainers.compare(rows)
    assert [row["speedup"] for row in rows] == [1.0, 4.0]
    assert rows[1]["largest_loss_difference"] == pytest.approx(0.05)
    assert rows[1]["largest_gradient_norm_difference"] == pytest.approx(0.05)
    rows[0]["losses"], rows[1]["losses"] = [0.001, 0.0], [0.003, 0.0]
    trainers.compare(rows)
    assert rows[1]["largest_loss_difference"] == pytest.approx(0.002)


def test_a_trainer_that_fails_costs_nothing_else(capsys, monkeypatch, tmp_path):
    measured = trainers.measured

    def broken(given, name, system):
        if name == "kto" or system == KEEPING:
            raise RuntimeError("out of memory")
        return measured(given, name, system)

    monkeypatch.setattr(trainers, "measured", broken)
    with pytest.raises(SystemExit, match="failed: full, kto"):
        trainers.main(["--smoke", "--only", "full", "kto", "reward", "--save", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    kept = [(row["trainer"], row["system"]) for row in json.loads(file.read_text())["results"]]
    assert kept == [(name, system) for name in ("full", "reward") for system in (STOCK, FASTLM)]
    assert "RuntimeError: out of memory" in capsys.readouterr().err
