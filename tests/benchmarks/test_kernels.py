"""The kernel benchmarks run from end to end at tiny sizes, and their record is as its README says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import timing
from benchmarks.results.__main__ import markdown
from fastlm.kernels.launch import HAS_TRITON

ROOT = Path(__file__).parents[2]
KEYS = {"script", "command", "commit", "date", "device", "versions", "work", "results", "floor", "notes"}


@pytest.fixture(scope="module")
def dry_run():
    """What the benchmarks print: table lines, then the record."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    child = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.dry_run"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    *table, record = child.stdout.splitlines()
    return table, json.loads(record)


def test_the_record_has_its_keys(dry_run):
    table, record = dry_run
    readme = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)) == KEYS
    assert set(record) == KEYS
    assert len(table) == len(record["results"])
    assert record["versions"]["torch"] and record["floor"]["copy_gb_per_s"] > 0


def test_every_operation_is_there_forward_and_backward(dry_run):
    operations = {row["operation"] for row in dry_run[1]["results"]}
    assert operations >= {
        "rms_norm fwd", "rms_norm bwd", "rms_norm bwd dw",
        "add_rms_norm fwd", "layer_norm bwd", "head norm fwd", "head norm bwd", "head norm bwd dw",
        "norm_rope fwd", "norm_rope together fwd", "norm_rope together bwd dw",
        "rope fwd", "rope bwd", "rope in place fwd", "rope in place bwd", "attention sdpa", "attention eager",
        "glu packed fwd", "glu packed bwd", "glu fwd", "glu bwd", "glu bwd rebuild",
        "nf4 dequantize", "lora qkv fwd", "lora qkv fwd+bwd", "lora mlp fwd", "lora mlp fwd+bwd",
        "linear_cross_entropy",
    }  # fmt: skip


def test_models_of_equal_shapes_are_measured_once(dry_run):
    cases = [row["case"] for row in dry_run[1]["results"] if row["operation"] == "rope fwd"]
    assert cases == ["Llama, Qwen", "Gemma"]


def test_counted_bytes(dry_run):
    rows = {(row["operation"], row["case"]): row["bytes"] for row in dry_run[1]["results"]}
    # 2 tokens of width 32 in bf16: x and y, and an fp32 number a row
    assert rows["rms_norm fwd", "Llama, Qwen"] == 2 * (2 * 32 * 2) + 2 * 4
    # 3 heads of 16 read and written, half of cos and of sin
    assert rows["rope fwd", "Llama, Qwen"] == 2 * (2 * 3 * 16 * 2) + 2 * 16 * 2
    assert rows["glu fwd", "Gemma"] == 3 * (2 * 40 * 2)
    # 4,096 values: half a byte each, 64 scales of a byte and one of those, two tables, an offset; out in bf16
    assert rows["nf4 dequantize", "64x64"] == 2048 + 64 + 4 + 16 * 4 + 256 * 4 + 4 + 8192


def test_forced_long_indexing_is_measured_beside_every_kernel(dry_run):
    for row in dry_run[1]["results"]:
        if not row["operation"].startswith(("lora", "attention")) and row["tokens"] in (0, 2):
            assert row["int64_ms"] > 0, row


def test_a_record_becomes_a_markdown_table(dry_run):
    record = dry_run[1]
    lines = markdown(record).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == len(record["results"]) + 2
    assert len({line.count("|") for line in rows}) == 1
    assert "two_launches_ms" in next(line for line in rows if line.startswith("| rope fwd"))


def test_a_record_is_saved_under_its_name(tmp_path):
    kept = {"date": "2026-01-02", "script": "kernels", "device": {"name": "NVIDIA H200"}}
    names = [timing.save(kept, tmp_path).name for _ in range(2)]
    assert names == ["2026-01-02-kernels-nvidia-h200.json", "2026-01-02-kernels-nvidia-h200-2.json"]
    assert json.loads((tmp_path / names[1]).read_text()) == kept


def test_another_library_that_fails_costs_its_column_only(capsys):
    def broken():
        raise RuntimeError("no kernel image")

    def absent():
        raise ModuleNotFoundError("liger_kernel")

    assert timing.rival_ms("rope: Liger", broken) is None
    assert timing.rival_ms("rope: Liger", absent) is None
    assert capsys.readouterr().err == "rope: Liger: RuntimeError: no kernel image\n"
