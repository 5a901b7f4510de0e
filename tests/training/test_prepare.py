"""From the user's data to rows: formatting functions of every age, padding, targets, clear errors."""

import contextlib
import warnings
from typing import Any

import pytest
from datasets import Dataset

import fastlm
from fastlm.training.formatting import format_rows
from fastlm.training.tables import cut_rows

from ..tiny import tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

QUESTIONS = Dataset.from_dict({"q": ["ab", "cd", "ef"], "a": ["x", "yy", "zzz"]})


def of_a_batch(batch: dict[str, list[str]]) -> list[str]:
    return [f"{q}:{a}" for q, a in zip(batch["q"], batch["a"], strict=True)]


def of_a_batch_by_index(batch: dict[str, list[str]]) -> list[str]:
    texts = []
    for i in range(len(batch["q"])):
        texts.append(f"{batch['q'][i]}:{batch['a'][i]}")
    return texts


def one_in_a_list(example: dict[str, str]) -> list[str]:
    return [f"{example['q']}:{example['a']}"]


def two_in_a_list(example: dict[str, str]) -> list[str]:
    return [f"{example['q']}:{example['a']}", example["a"]]


def a_string(example: dict[str, str]) -> str:
    return f"{example['q']}:{example['a']}"


JOINED = ["ab:x", "cd:yy", "ef:zzz"]


@pytest.mark.parametrize(
    "function, texts",
    [
        (a_string, JOINED), (of_a_batch, JOINED), (of_a_batch_by_index, JOINED), (one_in_a_list, JOINED),
        (two_in_a_list, ["ab:x", "x", "cd:yy", "yy", "ef:zzz", "zzz"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 3])
def test_formatting_functions_of_every_age(function: Any, texts: list[str], count: int, tmp_path: Any) -> None:
    data = QUESTIONS.select(range(count))
    trainer = runs.trainer(runs.model(), data, runs.config(tmp_path), formatting_func=function)
    tokenizer = tiny_tokenizer()
    expected = texts[: count * len(texts) // 3]
    assert [tokenizer.decode(ids) for ids in trainer.train_dataset["input_ids"]] == [text + "</s>" for text in expected]


def test_formatting_function_that_returns_something_else() -> None:
    with pytest.raises(ValueError, match=r"must return a string, or a list of strings.* it returned 3"):
        format_rows(QUESTIONS, lambda example: 3, "text")
    with pytest.raises(ValueError, match=r"it raised KeyError\('nope'\)") as caught:
        format_rows(QUESTIONS, lambda example: example["nope"], "text")
    assert isinstance(caught.value.__cause__, KeyError)  # with the line of the user's that raised it


def prompts(count: int, prompt: int, answer: int) -> list[dict[str, str]]:
    return [{"prompt": "p" * prompt, "completion": "a" * (answer - 1)} for _ in range(count)]  # and eos


def test_f_truncation_eats_answer(tmp_path: Any) -> None:
    """Prompt 20 and answer 3 at max_length 16, beside one good row: seven rows go, counted once."""
    data = [{"prompt": "q" * 6, "completion": "aa"}, *prompts(7, 20, 3)]
    with pytest.warns(UserWarning, match="fastlm") as record:
        trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, max_length=16))
    said = [str(w.message) for w in record if "no token to learn" in str(w.message)]
    assert len(said) == 1 and "7 of 8 train rows" in said[0] and "7 of them because max_length=16" in said[0]
    assert len(trainer.train_dataset) == 1
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 1
    with pytest.raises(ValueError, match="max_length=16 cuts every answer off; raise it"):
        runs.trainer(runs.model(), prompts(7, 20, 3), runs.config(tmp_path, max_length=16))


@pytest.mark.parametrize("packing", [False, True])
def test_rows_without_targets_are_dropped_before_training(packing: bool, tmp_path: Any) -> None:
    data = runs.rows((5, 6, 1, 4))
    data[1]["labels"] = [-100] * 6
    data[3]["labels"] = [7] + [-100] * 3  # the first token is never a target
    with pytest.warns(UserWarning, match="3 of 4 train rows had no token to learn and were dropped$"):
        trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, packing=packing, max_length=8))
    assert trainer.train_dataset["input_ids"][:] == [data[0]["input_ids"]]
    for row in data:
        row["labels"] = [-100] * len(row["labels"])
    with pytest.raises(ValueError, match="no row of the train data set has a token to learn: every label is -100"):
        runs.trainer(runs.model(), data, runs.config(tmp_path, packing=packing))


def test_padding_that_the_data_brings_is_taken_out(tmp_path: Any) -> None:
    """A pad id that is also a real token's, on both sides: the mask decides, the genuine last token stays."""
    bare = [[9, 5, 6, 2], [7, 8, 2, 2]]
    data = [
        {
            "input_ids": [2, 2, *bare[0]],
            "attention_mask": [0, 0, 1, 1, 1, 1],
            "labels": [-100, -100, *bare[0]],
        },
        {
            "input_ids": [*bare[1], 2, 2],
            "attention_mask": [1, 1, 1, 1, 0, 0],
            "labels": [*bare[1], -100, -100],
        },
    ]
    trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, max_length=4))
    assert trainer.train_dataset["input_ids"][:] == bare == trainer.train_dataset["labels"][:]
    data[0]["attention_mask"] = [1, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="hides tokens in the middle"):
        runs.trainer(runs.model(), data, runs.config(tmp_path))


def test_rows_that_are_packed_already(tmp_path: Any) -> None:
    data = [{"input_ids": list(range(4, 13)), "labels": list(range(4, 13)), "seq_lengths": [5, 4]}]
    trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, packing=True, max_length=16))
    assert trainer.train_dataset["seq_lengths"][:] == [[5, 4]]
    with pytest.warns(UserWarning, match="1 of 1 train rows were longer"):
        trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, max_length=7))
    assert trainer.train_dataset["seq_lengths"][:] == [[5, 2]] and len(trainer.train_dataset["labels"][0]) == 7
    batch = {"input_ids": [[1, 2, 3, 4, 5]], "labels": [[1, 2, 3, 4, 5]], "seq_lengths": [[3, 2]]}
    assert cut_rows(batch, 4, True) == {
        "input_ids": [[2, 3, 4, 5]], "labels": [[2, 3, 4, 5]], "seq_lengths": [[2, 2]],
    }  # fmt: skip


def test_selected_and_shuffled_data_are_read_as_they_stand(tmp_path: Any) -> None:
    data = Dataset.from_list(runs.rows()).select([4, 0, 2])
    with pytest.warns(UserWarning, match="1 of 3 train rows were longer than max_length=8"):
        trainer = runs.trainer(runs.model(), data, runs.config(tmp_path, max_length=8))
    assert [len(row) for row in trainer.train_dataset["input_ids"]] == [8, 5, 3]


def test_evaluation_data_get_the_same_treatment(tmp_path: Any) -> None:
    data, other = Dataset.from_list(runs.rows((6, 5))), Dataset.from_list(runs.rows((30, 4, 1)))
    args = runs.config(tmp_path, packing=True, max_length=12)
    with pytest.warns(UserWarning) as record:
        trainer = runs.trainer(runs.model(), data, args, eval_dataset={"mine": other})
    said = " ".join(str(w.message) for w in record)
    assert "1 of 3 mine rows were longer" in said and "1 of 3 mine rows had no token to learn" in said
    assert sorted(map(tuple, trainer.eval_dataset["mine"]["seq_lengths"])) == [(4,), (12,)]
    assert trainer.evaluate()["eval_mine_loss"] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert trainer.evaluate(other)["eval_loss"] > 0
    assert "boundaries" in next(iter(trainer.get_eval_dataloader(trainer.eval_dataset["mine"])))


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the train data set is empty"),
    ([{"query": "a", "reply": "b"}], {}, r"columns \['query', 'reply'\], and none of what can be trained on"),
    ([{"prompt": "a"}], {}, r"columns \['prompt'\]"),
    ([{"text": 3}], {}, "the column 'text' of the train data set must hold strings; the first row holds 3"),
    ([{"text": "a"}, {"text": None}], {}, "row 1 of the train data set has None for 'text'"),
    ([{"messages": []}], {}, r"columns \['messages'\], and none of what"),
    ([{"messages": [{"from": "human", "value": "a"}]}], {}, "'messages' of role/content turns"),
    ([{"input_ids": [4, 5]}, {"input_ids": [4, 300]}], {}, "the token 300, and the model's tokens go from 0 to 299"),
    ([{"input_ids": [-1, 5]}], {}, "the token -1"),
    ([{"text": "a"}], {"max_length": "64"}, "max_length is '64'"),
    ([{"input_ids": [4, 5, 6], "labels": [4, 5]}], {}, "row 0 of the train data set has input_ids"),
    ([{"input_ids": [4, 5, 6]}], {"packing": True, "max_length": None}, "max_length cannot be None"),
    ([{"input_ids": [4, 5, 6]}], {"max_length": 0}, "max_length is 0"),
    ([{"input_ids": [4, 5], "seq_lengths": [3]}], {}, "seq_lengths of the train data set do not sum"),
    ([{"input_ids": [4, 5]}], {"max_length": 1, "truncation_mode": "keep_middle"}, "truncation_mode must be"),
]  # fmt: skip


@pytest.mark.parametrize("data, given, message", BAD)
def test_bad_input_is_named(data: Any, given: dict[str, Any], message: str, tmp_path: Any) -> None:
    data = Dataset.from_list(data) if data else Dataset.from_dict({"text": []})
    with pytest.raises(ValueError, match=message):
        runs.trainer(runs.model(), data, runs.config(tmp_path, **given))


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_without_targets_is_refused(packing: bool, tmp_path: Any) -> None:
    masked = [{"input_ids": [4, 5, 6], "labels": [-100] * 3}]
    late = [*masked * 50, {"input_ids": [4, 5, 6], "labels": [-100, 5, 6]}]
    for rows, refused in ((masked * 8, True), (late, False)):
        stream = Dataset.from_list(rows).to_iterable_dataset()
        with pytest.raises(ValueError, match="none of the first 8 rows") if refused else contextlib.nullcontext():
            runs.trainer(runs.model(), stream, runs.config(tmp_path, packing=packing, max_length=8))


def test_summary_and_lines_are_said_once(tmp_path: Any, capsys: Any) -> None:
    with pytest.warns(UserWarning):
        runs.trainer(runs.model(), runs.rows((5, 12, 3, 1)), runs.config(tmp_path, packing=True, max_length=8))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fastlm: padding-free")] == [
        "fastlm: padding-free on; train: 2 packed rows of 8 from 3 samples, 100.0% full, 1 cut, 1 dropped; "
        "padded batches of 8 would be 33% padding: expect 1.50x their speed"  # 3 x 8 tokens for 5 + 8 + 3
    ]
    runs.trainer(runs.model(), runs.rows((5, 3)), runs.config(tmp_path, padding_free=False))
    assert "fastlm: padding-free off; train: 2 rows" in capsys.readouterr().out.splitlines()


def streamed(data: list[dict[str, Any]]) -> Any:
    return Dataset.from_list(data).to_iterable_dataset()


def test_streams_get_what_data_sets_get(tmp_path: Any) -> None:
    """Padding off, tails cut and counted once, rows without a target dropped; the rows of the map-style data set."""
    data = runs.rows((5, 12, 6, 9, 4))
    data[2]["labels"] = [-100] * 6
    data[3]["labels"] = [-100] * 8 + [7]  # its only target is cut off
    for row in data:
        row["attention_mask"] = [1] * len(row["input_ids"]) + [0, 0]
        row["input_ids"], row["labels"] = [*row["input_ids"], 0, 0], [*row["labels"], -100, -100]
    args = runs.config(tmp_path, max_length=8)
    with pytest.warns(UserWarning, match="fastlm") as record:
        trainer = runs.trainer(runs.model(), streamed(data), args)
        rows = [*trainer.train_dataset, *trainer.train_dataset]
    said = [str(w.message) for w in record if "of the first" in str(w.message)]
    assert said == [
        "fastlm: 2 of the first 5 train rows were longer than max_length=8 and were cut, as later ones will be",
        "fastlm: 2 of the first 5 train rows had no token to learn and were dropped, as later ones will be",
    ]
    with pytest.warns(UserWarning):
        expected = runs.trainer(runs.model(), Dataset.from_list(data), args).train_dataset
    assert rows == [*expected, *expected] and [len(row["input_ids"]) for row in expected] == [5, 8, 4]


def test_a_packed_stream_is_packed_whole_and_trains(tmp_path: Any) -> None:
    """fastlm's packing, not TRL's: every sample whole and once, cut beforehand."""
    args = runs.config(tmp_path, max_length=16, packing=True, max_steps=2, per_device_train_batch_size=8)
    with pytest.warns(UserWarning, match="1 of the first 8 train rows were longer than max_length=16 and were cut"):
        trainer, _ = runs.train(runs.model(), streamed(runs.rows()), args)
    lengths = sorted(int(n) for row in trainer.train_dataset for n in row["seq_lengths"])
    assert lengths == sorted(min(n, 16) for n in runs.LENGTHS)
    args = runs.config(tmp_path, max_length=16, max_steps=2, per_device_train_batch_size=8)
    with pytest.warns(UserWarning):
        unpacked, _ = runs.train(runs.model(), streamed(runs.rows()), args)
    assert runs.logged(trainer) == pytest.approx(runs.logged(unpacked), rel=1e-5)


def test_streams_that_are_packed_already_stay_so_and_splitting_is_trls(tmp_path: Any) -> None:
    data = [{"input_ids": list(range(4, 13)), "labels": list(range(4, 13)), "seq_lengths": [5, 4]}]
    for mask in ({}, {"attention_mask": [1] * 9}):
        args = runs.config(tmp_path, packing=True, max_length=16)
        trainer = runs.trainer(runs.model(), streamed([{**data[0], **mask}]), args)
        assert [row["seq_lengths"] for row in trainer.train_dataset] == [[5, 4]]
    args = runs.config(tmp_path, packing=True, max_length=6, packing_strategy="bfd_split")
    split = runs.trainer(runs.model(), streamed([{"input_ids": list(range(4, 14))}]), args).train_dataset
    assert sorted(len(row["input_ids"]) for row in split) == [4, 6]
    with pytest.raises(ValueError, match="packing_strategy='bfd_split' loses the column 'weights'"):
        runs.trainer(runs.model(), streamed([{"input_ids": [4, 5, 6], "weights": [1.0] * 3}]), args)


def test_a_bad_token_in_a_stream_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="the train data set has the token 300"):
        runs.trainer(runs.model(), streamed([{"input_ids": [4, 300, 5]}]), runs.config(tmp_path))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("columns", [["input_ids"], ["input_ids", "labels", "attention_mask"]])
def test_streams_of_tensors(kind: str, columns: list[str], tmp_path: Any) -> None:
    data = [{**row, "attention_mask": [0, *[1] * (len(row["input_ids"]) - 1)]} for row in runs.rows()]
    data = [{name: row[name] for name in columns} for row in data]
    args = runs.config(tmp_path, max_length=16)
    with pytest.warns(UserWarning, match="fastlm"):
        expected = [*runs.trainer(runs.model(), streamed(data), args).train_dataset]
        trainer, _ = runs.train(runs.model(), streamed(data).with_format(kind), args)
    assert [*trainer.train_dataset] == expected and len(expected) >= 7
