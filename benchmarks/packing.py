"""Host-side cost of packing and collation, beside TRL's on the same samples.

Lengths are lognormal (median 200, sigma 0.6, cut at 2,048). Three things are timed for every row length:
``pack`` (which sample goes where), ``pack_dataset`` (the packed data set, tokens moved), and TRL's
``pack_dataset`` with strategy "bfd", which does the same work as the latter, with its default batches of
1,000 samples and with the whole data set as one batch. Then the collators, on one batch of packed rows of
about 16,384 tokens held as Python lists. Best of ``--repeats`` runs. The last line is one JSON object.

    python benchmarks/packing.py --samples 100000 --row-lengths 2048 4096
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from trl.data_utils import pack_dataset as trl_pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastlm.packing import PaddingFreeCollator, pack, pack_dataset


def synthetic(samples: int, seed: int = 0) -> tuple[np.ndarray, Dataset]:
    """Lengths int64 [N] and the tokenised data set that has them (input_ids int32, labels int64)."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(200), 0.6, samples).astype(np.int64), 1, 2048)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--row-lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    packed = []
    for row_length in arguments.row_lengths:
        for row in packing(arguments.samples, row_length, arguments.repeats):
            packed.append(row)
            print(
                f"{row['name']:28} rows of {row_length:6,}: {row['ms']:10,.1f} ms "
                f"{row['samples_per_second']:14,.0f} samples/s  {row['rows']:8,} rows  fill {row['fill']:.5f}"
            )
    collated = collation(arguments.row_lengths[0], arguments.repeats)
    for row in collated:
        print(f"{row['name']:28} {row['tokens']:,} tokens: {row['ms']:.2f} ms")
    libraries = {name: version(name) for name in ("fastlm", "trl", "datasets", "pyarrow", "numpy", "torch")}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(
        json.dumps(
            {
                "benchmark": "packing",
                "packing": packed,
                "collation": collated,
                "versions": libraries,
                "machine": machine | {"torch_threads": torch.get_num_threads()},
            }
        )
    )


if __name__ == "__main__":
    main()
