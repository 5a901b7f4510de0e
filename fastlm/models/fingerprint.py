"""Recognises the stock forward that a layer runs, so that only code we know is ever replaced.

A fingerprint is a hash of the forward's source with annotations, docstrings and decorators stripped, together with
every module-level function and every method of ``self`` that it names, transitively, as they resolve at binding time
(glm and ernie4_5 share llama's attention forward and differ in ``rotate_half``). A hash that is not in the table means
unknown code, and unknown code stays stock. ``python -m fastlm.models.fingerprint llama qwen3`` prints the hashes of
the installed transformers, for adding a release or a family.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import FunctionType
from typing import Any

__all__ = ["fingerprint", "stock_function"]


def stock_function(module_class: type) -> FunctionType | None:
    """The undecorated ``forward`` of a module class, or None where it is not a plain Python function."""
    function = inspect.unwrap(module_class.forward)  # type: ignore[attr-defined]
    return function if isinstance(function, FunctionType) else None


@functools.cache
def fingerprint(module_class: type[Any], transitive: bool = True) -> str | None:
    """Hash of what ``module_class.forward`` computes, 16 hex digits; None where its source cannot be read.

    transitive: include the functions and methods that the forward names. Off for whole decoder layers, backbones and
    heads, whose callees (mask building, submodules) are recognised or bypassed on their own.
    """
    function = stock_function(module_class)
    if function is None:
        return None
    texts: dict[str, str] = {}
    try:
        _collect(function, module_class, texts, transitive)
    except (OSError, TypeError, SyntaxError):
        return None  # no source: built-in, generated or compiled
    joined = "\n".join(f"{name}:{text}" for name, text in sorted(texts.items()))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _collect(function: FunctionType, owner: type, texts: dict[str, str], transitive: bool) -> None:
    if function.__name__ in texts:
        return
    tree = _Strip().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    texts[function.__name__] = ast.unparse(tree)
    if not transitive:
        return
    for node in ast.walk(tree):
        callee = None
        if isinstance(node, ast.Name):
            callee = function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            callee = inspect.getattr_static(owner, node.attr, None)
        if callable(callee):
            callee = inspect.unwrap(callee)
        if isinstance(callee, FunctionType):
            _collect(callee, owner, texts, transitive)


class _Strip(ast.NodeTransformer):
    """Drops what does not compute: annotations, docstrings, decorators."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list, node.returns = [], None
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value is not None else None


def _print_table(families: list[str]) -> None:
    from importlib import import_module

    for family in families:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name, value in sorted(vars(module).items()):
            if not (inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "forward")):
                continue
            shallow = name.endswith(("Model", "ForCausalLM", "DecoderLayer"))
            hashed = fingerprint(value, not shallow)  # type: ignore[arg-type]  # mypy sees type[object]
            print(f"{hashed}  {family}.{name}")


if __name__ == "__main__":
    import sys

    _print_table(sys.argv[1:])
