"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from fastlm.export.atomic import atomic_directory

Usage = namedtuple("Usage", "total used free")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_appears_at_the_end_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "out"
    with atomic_directory(target, 10) as folder:
        (folder / "model.safetensors").write_text("x")
        assert not target.exists() and folder.parent == target.parent
    assert names(target) == ["model.safetensors"] and names(target.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(error), atomic_directory(target, 10) as folder:
        (folder / "model.safetensors").write_text("half")
        raise error
    assert names(tmp_path) == ["out"] and (target / "config.json").read_text() == "old"


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (target / name).write_text("old")
    with atomic_directory(target, 10) as folder:
        (folder / "model.safetensors").write_text("new")
    assert names(target) == ["model.safetensors"] and names(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["checkpoint-5", "adapter_model.safetensors", "train.py", "notes.txt"])
def test_nothing_else_is_deleted(tmp_path: Path, name: str) -> None:
    target = tmp_path / "out"
    (target / name).mkdir(parents=True)
    (target / "config.json").write_text("{}")
    with (
        pytest.raises(FileExistsError, match=f"holds {name}, which an export would delete"),
        atomic_directory(target, 10),
    ):
        raise AssertionError("not reached")
    assert names(tmp_path) == ["out"] and names(target) == sorted(["config.json", name])


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(FileExistsError, match="is a file"), atomic_directory(tmp_path / "out", 10):
        raise AssertionError("not reached")
    assert (tmp_path / "out").read_text() == "a file"


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Usage:
        asked.append(Path(path))
        return Usage(1000, 500, 500)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with (
        pytest.raises(OSError, match="1,234 bytes needed, 500 free") as caught,
        atomic_directory(tmp_path / "new" / "out", 1234),
    ):
        raise AssertionError("not reached")
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == [] and asked == [tmp_path]
