"""`python -m benchmarks.results FILE ...` prints records of this folder as markdown; with --draw PNG those of steps
become one figure.

Ratios are the other's time over ours: above 1, ours is faster.
"""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["draw", "markdown"]

RATIOS = {
    "torch_ms": "torch",
    "compile_ms": "torch.compile",
    "liger_ms": "Liger",
    "int64_ms": "int64 offsets",
}
SHOWN = {"operation", "case", "tokens", "ms", "bytes", "gb_per_s", "share_of_copy", *RATIOS}


def markdown(kept: dict[str, Any]) -> str:
    """One record as a heading, a line of facts and a table."""
    versions = ", ".join(f"{name} {value}" for name, value in kept["versions"].items() if value is not None)
    floor = ", ".join(f"{name} {_number(value)}" for name, value in (kept["floor"] or {}).items())
    facts = [
        f"## {kept['script']}, {kept['device']['name']}, {kept['date']}",
        f"`{kept['command']}`",
        f"Commit {kept['commit']}; {versions}." + (f" Measured floor: {floor}." if floor else ""),
        f"Work: {kept['work']}. Notes: {kept['notes']}.",
    ]
    rows = kept["results"]
    if "operation" in rows[0]:
        tables = [_kernels(rows)]
    elif "kernels" in rows[0]:
        tables = [_step(row) for row in rows]
    else:
        tables = [_table(list(rows[0]), [[_number(row.get(name)) for name in rows[0]] for row in rows])]
    return "\n\n".join([*facts, *tables])


def _kernels(rows: list[dict[str, Any]]) -> str:
    header = ["operation", "case", "tokens", "ms", "MB", "GB/s", "of copy", *RATIOS.values(), "also"]
    lines = []
    for row in rows:
        rest = {name: value for name, value in row.items() if name not in SHOWN and value is not None}
        ratios = [f"{row[name] / row['ms']:.2f}" if row.get(name) is not None else "" for name in RATIOS]
        lines.append(
            [row["operation"], row["case"], f"{row['tokens']:,}" if row["tokens"] else "", f"{row['ms']:.4f}",
             f"{row['bytes'] / 1e6:,.1f}", f"{row['gb_per_s']:,.0f}", f"{row['share_of_copy']:.1%}", *ratios,
             _number(rest)]
        )  # fmt: skip
    return _table(header, lines)


def _step(row: dict[str, Any]) -> str:
    facts = [[name, _number(value)] for name, value in row.items() if name != "kernels"]
    kernels = [
        [f"`{kernel['name']}`", f"{kernel['ms']:.3f}", f"{kernel['share']:.1%}", f"{kernel['calls']:.1f}"]
        for kernel in row["kernels"]
    ]
    return _table(["", ""], facts) + "\n\n" + _table(["kernel", "ms a step", "share", "calls a step"], kernels)


def _table(header: list[str], lines: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_number(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    return "" if value is None else str(value)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """A PNG with a bar for every case of step records: tokens a second, and its memory.

    A case that several records have is shown as the last of them measured it.
    """
    from matplotlib.figure import Figure

    rows = list({row["case"]: row for kept in records for row in kept["results"]}.values())[::-1]  # the first on top
    figure = Figure(figsize=(10, 1 + 0.42 * len(rows)), dpi=110, layout="constrained")
    axes = figure.add_subplot(xlabel="valid tokens a second")
    bars = axes.barh([row["case"] for row in rows], [row["tokens_per_second"] for row in rows], color="tab:blue")
    axes.bar_label(bars, [f"{row['tokens_per_second']:,}, {row['peak_gib']:.1f} GiB" for row in rows], padding=3)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.results", description="Print records as markdown.")
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path)
    parser.add_argument("--draw", metavar="PNG", type=Path, help="draw these records of steps instead")
    arguments = parser.parse_args()
    records = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.files]
    if arguments.draw is not None:
        draw(records, arguments.draw)
        return
    for record in records:
        print(markdown(record) + "\n")


if __name__ == "__main__":
    main()
