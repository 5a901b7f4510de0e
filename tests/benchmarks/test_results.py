"""Every record that is kept has the keys that its README promises, and can be shown."""

import json
from pathlib import Path

import pytest

from benchmarks.results.__main__ import draw, markdown

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = sorted(FOLDER.glob("*.json"))
KEYS = {"script", "command", "commit", "date", "device", "versions", "work", "results", "floor", "notes"}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_is_complete_and_readable(path):
    record = json.loads(path.read_text())
    assert set(record) == KEYS and record["results"]
    assert path.name.startswith(f"{record['date']}-{record['script']}-")
    assert len(record["commit"].removesuffix("-dirty")) == 40
    shown = markdown(record)
    assert record["date"] in shown and len(shown.splitlines()) > len(record["results"])


def test_no_gradient_failed_in_a_recorded_comparison():
    rows = [row for path in RECORDS if "-equality-" in path.name for row in json.loads(path.read_text())["results"]]
    assert rows and all(row["failing"] == 0 for row in rows)


def test_steps_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"case": "kept", "tokens_per_second": 18_000, "peak_gib": 71.0, "floor_tokens_per_second": 21_100},
        {"case": "recomputed", "tokens_per_second": 13_400, "peak_gib": 21.5},
    ]
    draw([{"results": rows}, {"results": rows[1:]}], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
