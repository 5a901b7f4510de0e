"""formatting_func as older TRL called it, on a batch or returning a list; today it makes one string."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["format_rows"]


def format_rows(dataset: Any, formatting_func: Callable[..., Any], text_field: str) -> Any | None:
    """The data set with one text column, if ``formatting_func`` returns lists; None if it returns strings.

    Three kinds are told apart on the first two examples: a function of one example that returns a string
    (TRL's own kind), one that returns a list of strings (each becomes a row), and one of a batch, ``{column:
    list of values}``, that returns the strings of all its examples.

    ValueError if the function returns anything else.
    """
    first = _take(dataset, 2)
    result = _attempt(formatting_func, first[0])
    if isinstance(result, str):
        return None
    given = {"function": formatting_func, "text_field": text_field}
    columns = list(first[0])
    if _takes_batches(formatting_func, first):
        return dataset.map(_batch, batched=True, remove_columns=columns, fn_kwargs=given)
    if not _is_strings(result):
        raise ValueError(
            "formatting_func must return a string, or a list of strings, for an example; "
            f"for the first one it {'raised' if isinstance(result, Exception) else 'returned'} {result!r:.200}"
        ) from (result if isinstance(result, Exception) else None)
    return dataset.map(_rows, batched=True, remove_columns=columns, fn_kwargs=given)


def _batch(batch: Mapping[str, list[Any]], function: Callable[..., Any], text_field: str) -> dict[str, list[str]]:
    return {text_field: function(dict(batch))}


def _rows(batch: Mapping[str, list[Any]], function: Callable[..., Any], text_field: str) -> dict[str, list[str]]:
    examples = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    return {text_field: [text for example in examples for text in function(example)]}


def _take(dataset: Any, count: int) -> list[dict[str, Any]]:
    return [example for _, example in zip(range(count), dataset, strict=False)]


def _attempt(function: Callable[..., Any], argument: Any) -> Any:
    """The result, or the exception of a function that was not written for this kind of argument."""
    try:
        return function(argument)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        return error


def _takes_batches(function: Callable[..., Any], first: list[dict[str, Any]]) -> bool:
    """Whether a batch of two examples gives as many strings as each example as a batch of its own."""
    first = first if len(first) > 1 else first * 2

    def run(examples: list[dict[str, Any]]) -> Any:
        return _attempt(function, {name: [example[name] for example in examples] for name in examples[0]})

    together, alone = run(first), [run([example]) for example in first]
    if not all(_is_strings(result) for result in (together, *alone)):
        return False
    return len(together) == sum(len(result) for result in alone)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
