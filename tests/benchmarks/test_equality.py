"""The comparison with stock runs on a CPU, passes there, and sees what loss and gradient norm do not."""

import json

import pytest

from benchmarks import equality
from fastlm.kernels import lora

pytestmark = pytest.mark.skipif(equality.DEVICE.type != "cpu", reason="a dry run at tiny widths")
TINY = dict(layers=2, tokens=150, longest=60, tiny=True)


@pytest.mark.parametrize("mode", equality.MODES)
def test_every_policy_passes(mode):
    rows = equality.compare("qwen3_1b7", mode, **TINY)
    assert [row["case"].rpartition(", ")[2] for row in rows] == [
        "keep",
        "light",
        "lean",
        "recompute",
        "offload",
        "mixed",
    ]
    assert [row["failing"] for row in rows] == [0] * 6 == [row["other_bits_than_keep"] for row in rows]
    assert {row["tensors"] for row in rows} == {24 if mode == "full" else 28}
    assert all(0 < row["worst_error"] < (1e-5 if mode == "fp32" else 0.05) for row in rows)


def test_without_rotary_embedding_it_fails(monkeypatch):
    monkeypatch.setattr(lora, "rope_reference", lambda q, k, *tables, **options: (q, k))
    rows = equality.compare("llama8b", "fp32", **TINY)
    assert all(row["failing"] > 10 for row in rows)


def test_the_record(capsys, tmp_path, monkeypatch):
    sizes = ["--tiny", "--tokens", "100", "--longest", "40", "--layers", "1"]
    monkeypatch.setattr("sys.argv", ["equality", "llama8b", *sizes, "--mode", "fp32", "--save", str(tmp_path)])
    equality.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7 and "14 tensors, 0 fail" in printed[0]
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record == json.loads(printed[-1]) and record["script"] == "equality" and len(record["results"]) == 6
    monkeypatch.setattr("sys.argv", ["equality", "llama9b"])
    with pytest.raises(SystemExit):
        equality.main()
    assert "unknown shape llama9b; there are llama8b" in capsys.readouterr().err
