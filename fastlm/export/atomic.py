"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["atomic_directory", "move_into_place"]

# what an export writes, and so may replace; adapters, checkpoints and anything unknown are never deleted
_REPLACEABLE = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json",
    "*.gguf", "Modelfile", "config.json", "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template*", "additional_chat_templates",
    "configuration_*.py", "modeling_*.py",
)  # fmt: skip
_KEPT = ("adapter_*",)


@contextmanager
def atomic_directory(path: str | os.PathLike[str], needed_bytes: int) -> Iterator[Path]:
    """Yields an empty folder beside ``path``, and moves it there when the block ends without an error.

    On any error, Ctrl-C included, the temporary folder is removed and ``path`` is as it was. A folder already
    at ``path`` is replaced in the end, if it holds nothing but earlier exports.

    Raises, before anything is written:
        OSError (ENOSPC): fewer than ``needed_bytes`` are free on that disk.
        FileExistsError: ``path`` is a file, or a folder with something in it that no export writes.
    """
    target = Path(path).expanduser().resolve()
    if target.exists():
        _check_replaceable(target)
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"not enough disk space for {target}: {needed_bytes:,} bytes needed, {free:,} free on the disk "
            f"of {existing}. Nothing was written. Free some space or choose another folder",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    temporary = target.with_name(f".{target.name}.{unique}.partial")
    temporary.mkdir()
    try:
        yield temporary
        move_into_place(temporary, target, target.with_name(f".{target.name}.{unique}.old"))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already where the move succeeded


def _check_replaceable(target: Path) -> None:
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; give the name of a folder")
    foreign = sorted(
        entry.name
        for entry in target.iterdir()
        if any(fnmatchcase(entry.name, kept) for kept in _KEPT)
        or not any(fnmatchcase(entry.name, pattern) for pattern in _REPLACEABLE)
    )
    if foreign:
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}, which an export "
            "would delete; choose a new or empty folder"
        )


def move_into_place(temporary: Path, target: Path, previous: Path) -> None:
    """Rename a finished folder to ``target``; one that is there waits as ``previous``, and comes back on an error."""
    if not target.exists():
        temporary.rename(target)
        return
    target.rename(previous)
    try:
        temporary.rename(target)
    finally:
        if not target.exists():
            previous.rename(target)
    shutil.rmtree(previous, ignore_errors=True)
