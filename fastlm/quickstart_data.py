"""Training pairs that every machine has: Python's own standard library, read with ``ast`` at run time.

The user message is a function's signature with its docstring, the assistant's answer is the function's source
without that docstring. Nothing is shipped and nothing is downloaded; the pairs are those of the Python that
runs, in an order that depends on nothing but its files.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from .rows import Row

__all__ = ["REQUEST", "function_pairs", "standard_library_pairs"]

REQUEST = "Write this Python function.\n\n"

# Not the standard library, or not written to be read: installed packages, tests, demonstrations.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
}
_SHORTEST_DOCSTRING = 30  # characters; "Return self." asks for nothing
_FEWEST_LINES = 3  # of the answer, the signature included
_LONGEST_ANSWER = 12_000  # characters; about 3,800 tokens


def standard_library_pairs(root: Path | None = None) -> list[Row]:
    """Prompt-completion rows of messages from every module under ``root`` (default: this Python's library).

    Sorted by path and position, so equal from run to run; a function whose source occurs twice is taken once.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    seen: set[str] = set()
    pairs: list[Row] = []
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            for request, answer in function_pairs(_source(path)):
                if answer not in seen:
                    seen.add(answer)
                    pairs.append(
                        {
                            "prompt": [{"role": "user", "content": request}],
                            "completion": [{"role": "assistant", "content": answer}],
                        }
                    )
    return pairs


def function_pairs(source: str) -> Iterator[tuple[str, str]]:
    """(request, answer) for every documented function of a module's source; none if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # files that are broken on purpose, or hold a null byte
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= _SHORTEST_DOCSTRING:
                answer = _without_docstring(node, lines)
                if answer is not None:
                    yield REQUEST + _signature(node, docstring), answer


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> str:
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    quoted = textwrap.indent(f'"""{docstring}"""', "    ", lambda line: bool(line.strip()))
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}:\n{quoted}"


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """The function's own lines, dedented, its docstring's lines cut out; None where that is not sound."""
    first = node.body[0]
    if first.end_lineno is None or node.end_lineno is None:
        return None
    if first.lineno == node.lineno or node.body[1].lineno <= first.end_lineno:
        return None  # the docstring shares a line with code
    margin = " " * node.col_offset
    lines = [line.removeprefix(margin) for line in lines[: node.end_lineno]]
    head = "\n".join(lines[node.lineno - 1 : first.lineno - 1])
    answer = head.rstrip() + "\n" + "\n".join(lines[first.end_lineno :]).lstrip("\n")
    if len(answer) > _LONGEST_ANSWER or answer.count("\n") + 1 < _FEWEST_LINES or not answer.isascii():
        return None
    try:
        (again,) = ast.parse(answer).body
    except (SyntaxError, ValueError):
        return None
    unsound = not isinstance(again, type(node)) or ast.get_docstring(again) is not None
    return None if unsound else answer


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # other encodings are rare, and their files are tests of encodings
        return ""
