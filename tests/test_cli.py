"""The command line: exit codes, one-line errors, and that it answers fast."""

import json
import subprocess
import sys

import pytest

from fastlm import cli, doctor, quickstart
from fastlm.console import Interrupted, UserError, sparkline, table, user_mistakes
from tests.tiny import tiny_model, tiny_tokenizer


def failure(capsys, *arguments):
    """(exit code, the one line on stderr) of a command that must not get far."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert error.startswith("fastlm: ") and error.count("\n") == 1, error
    return code, error


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["plan"], "required: model"),
        (["quickstart", "--steps", "0"], "--steps: a whole number of at least 1 was expected, not '0'"),
        (["quickstart", "--batch-size", "-2"], "--batch-size"),
        (["quickstart", "--stepz", "3"], "--stepz"),
        (["train", "--model", "m"], "required: --dataset"),
        (["train", "--model", "m", "--dataset", "d", "--max-seq-length", "0"], "--max-seq-length"),
        (["train", "--model", "m", "--dataset", "d", "--r", "0"], "--r: a whole number of at least 1"),
        (
            ["train", "--model", "m", "--dataset", "d", "--lr", "nan"],
            "--lr: a number above 0 was expected, not 'nan'",
        ),
        (
            ["train", "--model", "m", "--dataset", "d", "--epochs", "1", "--max-steps", "2"],
            "not allowed with",
        ),
    ],
)
def test_bad_options_are_one_line(capsys, arguments, message):
    code, error = failure(capsys, *arguments)
    assert code == 2 and message in error


def test_bad_input_is_one_line(capsys, tmp_path):
    out = ["--output-dir", str(tmp_path / "out")]
    rows = write(tmp_path / "rows.jsonl", '{"text": "a"}\n{"txt": "b"}\n')
    for arguments, message in (
        (["quickstart", "--dataset", rows, *out], "rows.jsonl, line 2: expected"),
        (["quickstart", "--dataset", str(tmp_path / "absent"), *out], "No such file"),
        (["quickstart", "--output-dir", rows], "cannot write to the output folder"),
        (["train", "--model", "m", "--dataset", rows, *out], "rows.jsonl, line 2: expected"),
        (["train", "--model", "m", "--dataset", write(tmp_path / "empty", ""), *out], "holds no rows"),
    ):
        code, error = failure(capsys, *arguments)
        assert code == 2 and message in error


def test_a_missing_model_is_one_line(capsys, tmp_path):
    rows = write(tmp_path / "rows.jsonl", '{"text": "a"}\n')
    arguments = [
        "train",
        "--model",
        str(tmp_path / "no-model"),
        "--dataset",
        rows,
        "--output-dir",
        str(tmp_path / "out"),
    ]
    code, error = failure(capsys, *arguments)
    assert code == 2 and "no-model" in error


def test_a_mistake_is_not_a_bug(capsys, monkeypatch):
    def raising(error):
        def run(**options):
            raise error

        return run

    monkeypatch.setattr(quickstart, "run", raising(UserError("mend this")))
    assert failure(capsys, "quickstart") == (2, "fastlm: mend this\n")
    monkeypatch.setattr(quickstart, "run", raising(Interrupted("saved")))
    assert failure(capsys, "quickstart") == (130, "fastlm: saved\n")
    monkeypatch.setattr(quickstart, "run", raising(KeyboardInterrupt()))
    assert failure(capsys, "quickstart")[0] == 130
    monkeypatch.setattr(quickstart, "run", raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["quickstart"])


def test_user_mistakes_become_one_line():
    with pytest.raises(UserError, match=r"^first second$"), user_mistakes():
        raise ValueError("first\n  second")
    with pytest.raises(KeyError), user_mistakes():
        raise KeyError("a bug stays a bug")


@pytest.mark.parametrize("kind", ["chat of one answer", "chat of several answers", "text"])
def test_train(capsys, tmp_path, kind):
    tiny_model("qwen2").save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    row = {"text": {"text": "hello"}, "chat of one answer": {"messages": turn}}.get(kind, {"messages": turn * 2})
    rows = write(tmp_path / "rows.jsonl", (json.dumps(row) + "\n") * 6)
    arguments = ["--model", str(tmp_path / "tiny"), "--dataset", rows, "--output-dir", str(tmp_path / "out")]
    options = ["--max-steps", "3", "--batch-size", "2", "--r", "4", "--lr", "1e-3", "--max-seq-length", "64"]
    assert cli.main(["train", *arguments, *options, "--no-load-in-4bit", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 3 and result["fused"]["attention"] == 2
    assert result["loss_last"] < result["loss_first"]
    assert result["padding_avoided"] == 0  # all rows have one length
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()


def test_doctor_passes_here(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["ok"] and {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes"} <= set(
        result["requirements"]
    )
    assert any(line.startswith("transformers") and ">=5.17" in line for line in lines)
    assert result["attention"]["eager"] is None


def test_doctor_fails_on_what_is_out_of_range(capsys, monkeypatch):
    lines = doctor.check_requirements(
        [
            "numpy>=1",
            "tqdm>=9999",
            "no-such-package-here>=1",
            'nothing>=1; extra == "x"',
            "nothing; sys_platform == 'x'",
        ]
    )
    assert [(line.name, line.ok) for line in lines] == [
        ("numpy", True),
        ("tqdm", False),
        ("no-such-package-here", False),
    ]
    monkeypatch.setattr(doctor, "check_requirements", lambda: lines)
    monkeypatch.setattr(doctor, "device_facts", dict)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "missing" in shown and shown.count("out of range") == 2


def test_help_names_only_what_works_and_loads_nothing_heavy():
    probe = (
        "import sys; from fastlm import cli; "
        "help = cli.make_parser().format_help(); "
        "assert all(name in help for name in ('quickstart', 'train', 'plan', 'doctor')), help; "
        "assert not any(name in help for name in ('verify', 'export')), help; "
        "assert not {'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)


def test_table_and_sparkline():
    assert table([("a", "bb"), (10, None)]) == "a   bb\n--  ----\n10  None"
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3, 3]) == "▁▁"
