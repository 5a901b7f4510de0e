"""The packing benchmark runs on a CPU, and its systems train on the same samples to the same losses."""

import argparse
import json

import pytest

from benchmarks import packing, packing_training
from benchmarks.packing_training import SYSTEMS
from benchmarks.results.__main__ import markdown
from benchmarks.timing import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a dry run for machines without a GPU")


def record_of(capsys, *command):
    packing.main(list(command))
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(markdown(record).splitlines()) > len(record["results"])
    return record


def test_host(capsys, tmp_path):
    record = record_of(
        capsys, "host", "--samples", "2000", "--row-lengths", "2048", "--repeats", "1", "--planned-samples", "30000",
        "--save", str(tmp_path),
    )  # fmt: skip
    assert json.loads(next(tmp_path.iterdir()).read_text()) == record
    assert record["versions"].keys() >= {"datasets", "pyarrow", "numpy"}
    rows = {row["name"]: row for row in record["results"]}
    whole, stream = rows["fastlm pack_dataset"], rows["fastlm pack_stream"]
    assert rows["fastlm pack"]["samples"] == 30_000  # the last of that name
    assert whole["rows"] == stream["rows"] <= rows["trl bfd, batches of 1,000"]["rows"]
    plan = rows["fastlm lengths_of and pack, a process"]
    assert plan["samples"] == 30_000 and plan["fill"] > 0.99
    assert 0 < plan["imported_gib"] <= plan["peak_gib"] < 2


def test_every_layer_is_recomputed_as_the_record_says():
    """True would leave it to memory: fastlm would keep what the stock model computes again."""
    model = packing_training._model(argparse.Namespace(arch="tiny"), stock=False)
    assert model.get_base_model()._fastlm_checkpointing == "recompute"
    assert all(layer.gradient_checkpointing for layer in model.get_base_model().model.layers)


def test_training(capsys, tmp_path):
    record = record_of(capsys, "training", "--smoke", "--save", str(tmp_path))
    (file,) = tmp_path.iterdir()
    packing.main(["draw", str(file)])
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    rows = {(row["system"], row["batch_size"]): row for row in record["results"]}
    assert rows.keys() == {(system, size) for system in SYSTEMS for size in (1, 4)}
    padded, free, packed = (rows[system, 4] for system in SYSTEMS)
    assert padded["formula"] == free["formula"] > 1.3
    assert padded["valid_token_share"] < 0.9 < free["valid_token_share"] == packed["valid_token_share"] == 1.0
    assert len(padded["losses"]) == 4
    assert free["largest_loss_difference"] < 1e-3  # bf16 products of a loss near log 320
    assert padded["speedup"] == 1.0 and packed["valid_tokens_per_second"] > 0
