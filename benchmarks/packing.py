"""Packing and padding: what they cost on the host, and what they give in training. Four parts.

host: lengths are lognormal (median 200, sigma 0.6, cut at 2,048). For every row length ``pack`` (which sample
    goes where), ``pack_dataset`` (the packed data set, tokens moved), and TRL's ``pack_dataset`` with strategy
    "bfd", which does the same work as the latter, with its default batches of 1,000 samples and with the whole
    data set as one batch; best of ``--repeats`` runs. ``pack_stream``, once. The collators, on one batch of
    packed rows of about 16,384 tokens held as Python lists. The peak memory of a process that plans the
    packing of ten million samples of a data set on disk, and ``pack`` alone on as many.
training: valid tokens a second through SFTTrainer, for every batch size (see benchmarks/packing_training.py).
curves: the quick start's model and data, padded, padding-free and packed (there, too).
draw: the figure of a saved record of the last two, as a PNG beside it.

The last line is one JSON object.

    python -m benchmarks.packing host --samples 100000 --row-lengths 2048 4096
    python -m benchmarks.packing training --arch qwen3_1b7 --save benchmarks/results
    python -m benchmarks.packing curves --steps 300 --save benchmarks/results
    python -m benchmarks.packing draw benchmarks/results/*-packing-training-*.json
    python -m benchmarks.packing training --smoke
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset
from trl.data_utils import pack_dataset as trl_pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks import packing_training
from benchmarks.timing import record, save
from fastlm.packing import PaddingFreeCollator, pack, pack_dataset, pack_stream


def synthetic(samples: int, seed: int = 0) -> tuple[np.ndarray, Dataset]:
    """Lengths int64 [N] and the tokenised data set that has them (input_ids int32, labels int64)."""
    rng = np.random.default_rng(seed)
    lengths = packing_training.lognormal_lengths(rng, samples, 2048)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = rng.integers(0, 32_000, offsets[-1])
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, tokens.astype(np.int32)),
        "labels": pa.ListArray.from_arrays(offsets, tokens),
    }
    return lengths, Dataset(pa.table(columns))


def best_seconds(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The shortest of the runs, and the last result."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def planning(samples: int, row_length: int, repeats: int) -> dict[str, Any]:
    lengths = packing_training.lognormal_lengths(np.random.default_rng(0), samples, 2048)
    seconds, packed = best_seconds(lambda: pack(lengths, row_length), repeats)
    return {"name": "fastlm pack", "row_length": row_length, "samples": samples, "ms": seconds * 1e3,
            "samples_per_second": samples / seconds, "rows": packed.rows, "fill": packed.fill}  # fmt: skip


def packing(samples: int, row_length: int, repeats: int) -> list[dict[str, Any]]:
    lengths, dataset = synthetic(samples)
    tokens = int(lengths.sum())
    trl_kwargs = {"keep_in_memory": True, "load_from_cache_file": False}
    contenders: dict[str, Callable[[], int]] = {
        "fastlm pack": lambda: pack(lengths, row_length).rows,
        "fastlm pack_dataset": lambda: len(pack_dataset(dataset, row_length)),
        "trl bfd, batches of 1,000": lambda: len(trl_pack_dataset(dataset, row_length, "bfd", dict(trl_kwargs))),
        "trl bfd, one batch": lambda: len(
            trl_pack_dataset(dataset, row_length, "bfd", {**trl_kwargs, "batch_size": samples})
        ),
    }
    rows = []
    for name, work in contenders.items():
        seconds, row_count = best_seconds(work, repeats)
        rows.append(
            {
                "name": name,
                "row_length": row_length,
                "samples": samples,
                "ms": seconds * 1e3,
                "samples_per_second": samples / seconds,
                "rows": row_count,
                "fill": tokens / (row_count * row_length),
            }
        )
    return rows


def streaming(samples: int, row_length: int) -> dict[str, Any]:
    lengths, dataset = synthetic(samples)
    stream = dataset.to_iterable_dataset()
    seconds, row_count = best_seconds(lambda: sum(1 for _ in pack_stream(stream, row_length)), 1)
    fill = int(lengths.sum()) / (row_count * row_length)
    return {"name": "fastlm pack_stream", "row_length": row_length, "samples": samples, "ms": seconds * 1e3,
            "samples_per_second": samples / seconds, "rows": row_count, "fill": fill}  # fmt: skip


def collation(row_length: int, repeats: int) -> list[dict[str, Any]]:
    _, dataset = synthetic(4_000)
    packed = pack_dataset(dataset, row_length)
    examples = [packed[i] for i in range(16_384 // row_length)]
    collators = {
        "fastlm PaddingFreeCollator": PaddingFreeCollator(),
        "trl padding_free": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    }
    rows = []
    for name, collate in collators.items():
        seconds, batch = best_seconds(lambda collate=collate: collate(examples), 10 * repeats)
        rows.append({"name": name, "tokens": batch["input_ids"].numel(), "ms": seconds * 1e3})
    return rows


PLAN = """
import json, re, sys, time
from datasets import Dataset
from fastlm.packing import lengths_of, pack
# not getrusage, whose maximum counts from before exec
peak = lambda: int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20
imported, begin = peak(), time.perf_counter()
lengths = lengths_of(Dataset.from_file(sys.argv[1]))
packed = pack(lengths, 2048)
seconds = time.perf_counter() - begin
assert len(packed.indices) == len(lengths)
print(json.dumps({"samples": len(lengths), "row_length": 2048, "rows": packed.rows, "fill": packed.fill,
                  "ms": seconds * 1e3, "imported_gib": imported, "peak_gib": peak()}))
"""


def planning_memory(samples: int) -> dict[str, Any]:
    """Peak resident memory of a process that reads the lengths of a data set on disk and packs them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.arrow"
        _write(file, samples)
        done = subprocess.run([sys.executable, "-c", PLAN, str(file)], capture_output=True, text=True, check=True)
    planned: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"name": "fastlm lengths_of and pack, a process"} | planned


def _write(file: Path, samples: int, at_once: int = 500_000) -> None:
    schema = pa.schema({"input_ids": pa.list_(pa.int8())})  # one byte a token: the tokens are not looked at
    rng = np.random.default_rng(0)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for begin in range(0, samples, at_once):
            lengths = packing_training.lognormal_lengths(rng, min(at_once, samples - begin), 2048)
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            ids = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
            writer.write_batch(pa.record_batch([ids], schema=schema))


def host(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for row_length in given.row_lengths:
        rows += packing(given.samples, row_length, given.repeats)
        rows.append(streaming(given.samples, row_length))
        rows.append(planning(given.planned_samples, row_length, given.repeats))
    for row in rows:
        print(
            f"{row['name']:28} {row['samples']:12,} into rows of {row['row_length']:6,}: {row['ms']:10,.1f} ms "
            f"{row['samples_per_second']:14,.0f} samples/s  {row['rows']:8,} rows  fill {row['fill']:.5f}"
        )
    collated = collation(given.row_lengths[0], given.repeats)
    for row in collated:
        print(f"{row['name']:28} {row['tokens']:,} tokens: {row['ms']:.2f} ms")
    plan = planning_memory(given.planned_samples)
    print(
        f"{plan['name']}: {plan['samples']:,} samples, {plan['ms']:,.0f} ms, {plan['peak_gib']:.2f} GiB at the peak, "
        f"{plan['imported_gib']:.2f} of them before"
    )
    return [*rows, *collated, plan]


def arguments_from(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.packing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("host")
    one.add_argument("--samples", type=int, default=100_000)
    one.add_argument("--row-lengths", type=int, nargs="+", default=[2048, 4096])
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--planned-samples", type=int, default=10_000_000, help="they take 2.4 GB on disk for a while")
    packing_training.add_arguments(parts)
    for part in (parts.choices[name] for name in ("host", *packing_training.PARTS)):
        part.add_argument("--save", metavar="FOLDER", help="keep the JSON object there")
        part.add_argument("--commit", help="what is running, where git cannot say it")
    return parser.parse_args(command)


def main(command: list[str] | None = None) -> None:
    """Runs a part, prints, keeps."""
    given = arguments_from(command)
    if given.part == "draw":
        for file in given.files:
            packing_training.draw(file)
        return
    datasets.disable_progress_bars()
    if given.part == "host":
        results, work = host(given), "lognormal samples (median 200, sigma 0.6, cut at 2,048), random token ids"
        notes = f"best of {given.repeats} runs on the host's clock; peak_gib is the process's resident memory"
    else:
        results, work, notes = packing_training.PARTS[given.part](given)
    kept = record(results, script=f"packing-{given.part}", work=work, notes=notes, floor={}, commit=given.commit)
    if given.part == "host":
        kept["versions"] |= {name: version(name) for name in ("datasets", "pyarrow", "numpy")}
        kept["device"] |= {"name": platform.processor() or platform.machine(), "count": os.cpu_count()}
    if given.save is not None:
        save(kept, given.save)
    print(json.dumps(kept))
    if given.part == "curves":
        packing_training.require_equal(results)


if __name__ == "__main__":
    main()
