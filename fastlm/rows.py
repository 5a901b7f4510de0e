"""The user's own training rows: one JSON object a line, checked before anything slow starts.

Three kinds, one kind per file::

    chat                {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content":
    "..."}]} chat (ShareGPT)     {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt",
    "value": "..."}]} prompt-completion   {"prompt": "...", "completion": "..."} text                {"text":
    "..."}

Every error names the file, the line and what was expected there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "answer_text", "prompt_part", "read_rows", "row_text", "training_columns"]

Row = dict[str, Any]

# The names that ShareGPT exports use -> the names that chat templates use.
_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool",
}  # fmt: skip


def read_rows(path: str | Path) -> list[Row]:
    """Read and check a .jsonl file; chats come back as {"messages": [...]}, others with their own keys only.

    Raises OSError where the file cannot be read, and ValueError, naming the line, where a row is not one of
    the three kinds, is not of the first row's kind, or has no text to train on.
    """
    path = Path(path)
    kind, first = "", 0
    rows: list[Row] = []
    for number, value in _json_lines(path):
        where = f"{path}, line {number}"
        row_kind, row = _check_row(value, where)
        if not rows:
            kind, first = row_kind, number
        if row_kind != kind:
            raise ValueError(f"{where}: a {row_kind} row, but line {first} is a {kind} row; give one kind")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: the file holds no rows; one JSON object per line was expected")
    return rows


def training_columns(rows: list[Row]) -> list[Row]:
    """The rows in the form that decides what the loss covers.

    Chats that have one answer each become prompt and completion, so that the loss covers the answers only.
    Chats of several answers stay whole (the loss covers every turn, unless the template marks the answers).
    The other kinds are returned as they are: completions only, and the whole text.
    """
    chats = [[message["role"] for message in row.get("messages", ())] for row in rows]
    if any(roles.count("assistant") != 1 for roles in chats):
        return rows
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]


def row_text(row: Row, tokenizer: Any) -> str:
    """The text that a row is trained on, chats rendered by the tokenizer's template; without an added eos."""
    if "text" in row:
        return row["text"]
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=False)
    if isinstance(row["prompt"], str):
        return row["prompt"] + row["completion"]
    return tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)


def prompt_part(row: Row) -> str | list[dict[str, str]]:
    """What the model is shown when asked to answer: messages, or plain text (a text row's first third)."""
    if "text" in row:
        words = row["text"].split(" ")
        return " ".join(words[: max(1, len(words) // 3)])
    if "messages" in row:
        return row["messages"][:-1]
    return row["prompt"]


def answer_text(row: Row) -> str:
    """The answer that the data gives to prompt_part(row)."""
    if "text" in row:
        return row["text"][len(prompt_part(row)) :].lstrip(" ")
    last = row["messages"] if "messages" in row else row["completion"]
    return last if isinstance(last, str) else last[-1]["content"]


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
            if not line:
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                hint = "; a JSON array is not read, write one object per line" if line[0] == "[" else ""
                raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}){hint}") from error


def _check_row(value: Any, where: str) -> tuple[str, Row]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a {type(value).__name__}; one JSON object per line was expected")
    if "messages" in value or "conversations" in value:
        return "chat", _check_chat(value, where)
    if "prompt" in value and "completion" in value:
        return "prompt-completion", _check_pair(value, where)
    if "text" in value:
        return "text", {"text": _check_text(value["text"], f'{where}: "text"')}
    keys = ", ".join(map(str, value)) or "no keys"
    raise ValueError(
        f'{where}: expected "messages" (or "conversations"), "prompt" and "completion", or "text"; the row has {keys}'
    )


def _check_chat(value: Row, where: str) -> Row:
    if value.get("tools"):
        raise ValueError(f'{where}: "tools" are not read here; use SFTTrainer in a script')
    name = "messages" if "messages" in value else "conversations"
    messages = _check_messages(value[name], f"{where}: {name}")
    turns = [message["role"] for message in messages if message["role"] != "system"]
    if not turns or turns[0] != "user":
        raise ValueError(f"{where}: {name} must start with a user message (after an optional system message)")
    if turns[-1] != "assistant":
        raise ValueError(f"{where}: {name} ends with a {turns[-1]} message; the last must be the assistant's")
    return {"messages": messages}


def _check_pair(value: Row, where: str) -> Row:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(f'{where}: "prompt" and "completion" must both be text or both be lists of messages')
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": _check_text(completion, f'{where}: "completion"')}
    return {
        "prompt": _check_messages(prompt, f"{where}: prompt"),
        "completion": _check_messages(completion, f"{where}: completion"),
    }


def _check_messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a list of at least one message")
    return [_check_message(message, f"{where}, message {place}") for place, message in enumerate(value, 1)]


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f'{where} is a {type(message).__name__}, not an object with "role" and "content"')
    role = message.get("role", message.get("from"))
    if role not in _ROLES:
        raise ValueError(f"{where} has the role {role!r}; expected one of {', '.join(_ROLES)}")
    if message.get("tool_calls"):
        raise ValueError(f"{where} has tool calls, which are not read here; use SFTTrainer in a script")
    return {"role": _ROLES[role], "content": _check_text(message.get("content", message.get("value")), where)}


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: text was expected, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where}: the text is empty")
    return value
