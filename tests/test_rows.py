"""Reading the user's rows: what is accepted, and what every error says."""

import json

import pytest

from fastlm.rows import answer_text, prompt_part, read_rows, row_text, training_columns
from tests.tiny import tiny_tokenizer

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHAT = {"messages": [USER, ANSWER]}


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


SHAREGPT = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
PAIR = {"prompt": [USER], "completion": [ANSWER]}


@pytest.mark.parametrize(
    "given, row",
    [
        (CHAT, CHAT),
        (SHAREGPT, CHAT),
        ({"conversations": [USER, ANSWER], "id": 7}, CHAT),
        ({"prompt": "2+2?", "completion": "4", "id": 7}, {"prompt": "2+2?", "completion": "4"}),
        (PAIR, PAIR),
        ({"text": "four", "id": 7}, {"text": "four"}),
    ],
)
def test_every_kind_is_read(tmp_path, given, row):
    assert read_rows(write(tmp_path, given)) == [row]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}\r\n')
    assert read_rows(path) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: not JSON"),
        ('[{"text": "a"}]', "line 2: a list; one JSON object per line"),
        ('[{"text":', "write one object per line"),
        ({"instruction": "a", "output": "b"}, "line 2: expected .* the row has instruction, output"),
        ({}, "line 2: .* the row has no keys"),
        ({"text": " "}, 'line 2: "text": the text is empty'),
        ({"text": 3}, 'line 2: "text": text was expected, not int'),
        ({"prompt": "a", "completion": ""}, 'line 2: "completion": the text is empty'),
        ({"prompt": "a", "completion": [ANSWER]}, "line 2: .* must both be text or both be lists"),
        ({"messages": []}, "line 2: messages must be a list of at least one message"),
        ({"messages": "hi"}, "line 2: messages must be a list"),
        (
            {"messages": [USER, {"role": "robot", "content": "4"}]},
            "line 2: messages, message 2 has the role 'robot'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "line 2: messages, message 2: text was expected",
        ),
        ({"messages": [USER]}, "line 2: messages ends with a user message"),
        ({"messages": [ANSWER]}, "line 2: messages must start with a user message"),
        (
            {"messages": [USER, ANSWER], "tools": [{"name": "f"}]},
            'line 2: "tools" are not read here',
        ),
    ],
)
def test_an_error_names_the_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_rows(write(tmp_path, {"text": "first"}, line))


def test_other_errors(tmp_path):
    with pytest.raises(ValueError, match="line 3: a text row, but line 1 is a chat row"):
        read_rows(write(tmp_path, CHAT, "", {"text": "a"}))
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(write(tmp_path, ""))
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_rows(path)
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "absent.jsonl")


def test_single_answer_chats_are_trained_on_the_answer_only():
    assert training_columns([CHAT]) == [{"prompt": [USER], "completion": [ANSWER]}]
    long = {"messages": [USER, ANSWER, USER, ANSWER]}
    assert training_columns([CHAT, long]) == [CHAT, long]


@pytest.mark.parametrize(
    "row, prompt, answer, text",
    [
        ({"prompt": [USER], "completion": [ANSWER]}, [USER], "4", "[user]2+2?</s>[assistant]4</s>"),
        (CHAT, [USER], "4", "[user]2+2?</s>[assistant]4</s>"),
        ({"prompt": "2+2? ", "completion": "4"}, "2+2? ", "4", "2+2? 4"),
        ({"text": "a b c d e f"}, "a b", "c d e f", "a b c d e f"),
    ],
)
def test_parts_of_a_row(row, prompt, answer, text):
    assert (prompt_part(row), answer_text(row), row_text(row, tiny_tokenizer())) == (prompt, answer, text)
