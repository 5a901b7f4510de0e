"""What the commands share on the terminal: one-line errors, a table, a sparkline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Interrupted", "UserError", "sparkline", "table", "user_mistakes"]

_BARS = "▁▂▃▄▅▆▇█"


class UserError(Exception):
    """A mistake of the caller's: shown as one line, without a traceback."""


class Interrupted(Exception):
    """Ctrl-C during training, after what there was has been saved; the message says where."""


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Around steps that only check and load what the user named: their errors are the user's to mend."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UserError(" ".join(str(error).split()) or type(error).__name__) from error


def table(rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns, two spaces apart; the first row is underlined as the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, the lowest and the highest value taking the lowest and the highest bar."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
