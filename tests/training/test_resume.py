"""Stopped anywhere and resumed with everything built anew: the same rows, losses and weights, bit for bit."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fastlm
from fastlm.training import resume

from ..tiny import add_lora, tiny_model, tiny_tokenizer
from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

ROOT = Path(__file__).parents[2]


class Stop(TrainerCallback):
    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.after


class Watched(trl.SFTTrainer):
    """Keeps the tokens of every micro-batch."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.rows = [*getattr(self, "rows", ()), inputs["input_ids"].flatten().tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


def model(*, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """A fresh one, with dropout: its random numbers have to be restored as well."""
    made = add_lora(tiny_model(dtype=dtype), dtype=dtype, **{"lora_dropout": 0.2, **lora})
    fastlm.patch(made)
    return made


def data(kind: str) -> Any:
    made = Dataset.from_list(runs.rows())
    if kind == "rows":
        return made
    stream = made.to_iterable_dataset(num_shards=2)
    return stream.shuffle(seed=3, buffer_size=4) if kind == "shuffled_stream" else stream


def run(out: Any, *, stop: int | None = None, again: Any = None, kind: str = "rows", dtype: torch.dtype = torch.float32,
        dropout: float = 0.2, **given: Any) -> dict[str, Any]:  # fmt: skip
    """Rows, log and final weights of a run."""
    size = {} if "tokens_per_step" in given else {"per_device_train_batch_size": 2}
    given = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "max_length": 24, "seed": 5, **size, **given}
    trainer = Watched(
        model=model(dtype=dtype, lora_dropout=dropout), train_dataset=data(kind), args=runs.config(out, **given),
        callbacks=[Stop(stop)], processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=again)
    names = ("step", "epoch", "loss", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
    log = [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {"rows": trainer.rows, "log": log, "weights": weights}


def same(resumed: dict[str, Any], straight: dict[str, Any]) -> None:
    count = len(resumed["rows"])
    assert 0 < count < len(straight["rows"]) and resumed["rows"] == straight["rows"][-count:]
    assert resumed["log"] == straight["log"]
    assert resumed["weights"].keys() == straight["weights"].keys()
    for name, tensor in straight["weights"].items():
        assert resumed["weights"][name].dtype == tensor.dtype and torch.equal(resumed["weights"][name], tensor), name


# 8 rows: an epoch ends after 4 steps of 2, or after 2 of 3 x 2, the last one smaller
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding_free": ({}, (1, 4, 6)),
    "padded": (dict(padding_free=False), (3,)),
    "packed": (dict(packing=True, per_device_train_batch_size=1), (3, 6)),
    "workers": (dict(dataloader_num_workers=2), (3,)),
    "workers_that_stay": (dict(dataloader_num_workers=2, dataloader_persistent_workers=True), (3,)),
    "accumulated": (dict(gradient_accumulation_steps=3), (2, 5)),
    "tokens_per_step": (dict(tokens_per_step=40), (5,)),
    "by_length": (dict(train_sampling_strategy="group_by_length"), (6,)),
    "epochs": (dict(max_steps=-1, num_train_epochs=2), (5,)),
    "bfloat16": (dict(dtype=torch.bfloat16), (3,)),
    "logging_seldom": (dict(logging_steps=3), (2, 4)),
    "stream": (dict(kind="stream"), (4, 6)),
    "shuffled_stream_workers": (dict(kind="shuffled_stream", dataloader_num_workers=2), (6,)),
    "packed_stream": (dict(kind="stream", packing=True, per_device_train_batch_size=1), (6,)),
    "accumulated_stream": (dict(kind="stream", gradient_accumulation_steps=3, max_steps=5), (1, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_straight_one(case: str, tmp_path: Path) -> None:
    given, stops = CASES[case]
    straight = run(tmp_path / "straight", **given)
    for stop in stops:
        out = tmp_path / f"stopped{stop}"
        run(out, stop=stop, **given)
        same(run(out, again=True, **given), straight)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])  # fused, and not
@pytest.mark.parametrize("case", ["padding_free", "packed", "accumulated", "workers", "stream"])
def test_gpu_a_resumed_run_is_the_straight_one(
    case: str, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    given, stops = CASES[case]
    given = {**given, "dtype": torch.bfloat16, "dropout": dropout}
    torch.use_deterministic_algorithms(True)
    try:
        straight = run(tmp_path / "straight", **given)
        run(tmp_path / "stopped", stop=stops[0], **given)
        same(run(tmp_path / "stopped", again=True, **given), straight)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_streams_incomplete_step_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """4 batches a pass, 3 a step: transformers would add the fourth's own mean to the next pass's first step."""
    found = run(tmp_path, kind="stream", gradient_accumulation_steps=3, max_steps=2, save_strategy="no")
    assert len(found["rows"]) == 6 and found["rows"][:3] == found["rows"][3:]
    assert capsys.readouterr().out.count("the last 1 of each pass are left out") == 1


def test_a_stream_that_fills_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 4 batches, and gradient_accumulation_steps=5 of them make a step"):
        run(tmp_path, kind="stream", gradient_accumulation_steps=5, max_steps=2, save_strategy="no")


# --- d-resume-groups


def test_d_resume_groups(tmp_path: Path) -> None:
    """LoRA and a trained embedding: 6 steps are 3 and 3; another set of parameters is named before anything loads."""

    def steps(out: Path, stop: int | None = None, again: Any = None, **lora: Any) -> list[float]:
        lora = {"modules_to_save": ["embed_tokens"], **lora}
        args = runs.config(out, max_steps=6, save_strategy="steps", save_steps=1, train_sampling_strategy="sequential")
        trainer = runs.trainer(model(**lora), runs.rows(), args, callbacks=[Stop(stop)])
        trainer.train(resume_from_checkpoint=again)
        return runs.logged(trainer)

    straight = steps(tmp_path / "straight")
    steps(tmp_path / "stopped", stop=3)
    assert steps(tmp_path / "stopped", again=True) == straight and len(straight) == 6
    last = tmp_path / "stopped" / "checkpoint-3"
    for lora, message in (
        (dict(target_modules=["q_proj"]), r"only in the checkpoint: .*layers\.0\.self_attn\.k_proj\.lora_A.* more"),
        (dict(modules_to_save=["embed_tokens", "lm_head"]), r"trained only now: .*lm_head\.modules_to_save"),
        (dict(modules_to_save=None), r"trained only in the checkpoint: .*embed_tokens\.modules_to_save\S*\. Nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            steps(tmp_path / "stopped", again=str(last), **lora)


def test_the_order_of_the_parameters_counts_and_old_checkpoints_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, stop=2)
    record = tmp_path / "checkpoint-2" / "fastlm_state.json"
    kept = json.loads(record.read_text())
    names = kept["trainable"]
    record.write_text(json.dumps({**kept, "trainable": [names[1], names[0], *names[2:]]}))
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda *args, **kwargs: pytest.fail("something was loaded"))
    with pytest.raises(ValueError, match="the same parameters in another order, from"):
        run(tmp_path, again=True)
    monkeypatch.undo()
    record.unlink()
    straight = run(tmp_path / "straight", logging_steps=2)
    assert run(tmp_path, again=True, logging_steps=2)["weights"].keys() == straight["weights"].keys()


# --- saves


def whole(folder: Path) -> bool:
    names = {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    return names | {"fastlm_state.json"} <= {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("method", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_an_error_during_a_save_leaves_the_older_checkpoint(method: str, tmp_path: Path) -> None:
    args = runs.config(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer = runs.trainer(model(), runs.rows(), args)
    original = getattr(trainer, method)

    def failing(folder: str, *rest: Any, **given: Any) -> None:
        original(folder, *rest, **given)
        if trainer.state.global_step == 2:
            raise OSError("disk full")

    setattr(trainer, method, failing)
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1") and whole(tmp_path / "checkpoint-1")


def killed(out: str) -> None:
    """A run that ends by SIGKILL while checkpoint-3 is being written."""
    save = Trainer._save_rng_state

    def fatal(trainer: Any, folder: str) -> None:
        if trainer.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        save(trainer, folder)

    Trainer._save_rng_state = fatal
    run(out)


def test_killed_during_a_save(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    code = f"from tests.training.test_resume import killed; killed({str(out)!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-3000:]
    assert (out / "_checkpoint.partial" / "checkpoint-3" / "optimizer.pt").exists()
    assert resume._STAGING.startswith("_")  # Trainer pushes the folder of a run without _* and checkpoint-*
    assert get_last_checkpoint(str(out)) == str(out / "checkpoint-2") and whole(out / "checkpoint-2")
    same(run(out, again=True), run(tmp_path / "straight"))
    assert not (out / "_checkpoint.partial").exists() and whole(out / "checkpoint-3")


def test_rotation_best_model_and_pushes_see_the_finished_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, whole(Path(folder))))
    )
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    small = Dataset.from_list(runs.rows())
    args = runs.config(
        tmp_path, max_steps=5, save_strategy="steps", save_steps=1, save_total_limit=2, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, push_to_hub=True, metric_for_best_model="eval_loss",
        per_device_train_batch_size=1,
    )  # fmt: skip
    losses = itertools.chain((3.0, 1.0), itertools.repeat(2.0))
    trainer = runs.trainer(model(), small, args, eval_dataset=small)
    monkeypatch.setattr(trainer, "evaluate", lambda **given: {"eval_loss": next(losses)})
    trainer.train()
    folders = [str(tmp_path / f"checkpoint-{step}") for step in range(1, 6)]
    assert pushed == [(folder, True) for folder in folders]
    assert sorted(entry.name for entry in tmp_path.iterdir() if "checkpoint" in entry.name) == [
        "checkpoint-2",
        "checkpoint-5",
    ]
    assert trainer.state.best_model_checkpoint == folders[1]
    for step in (2, 5):
        assert (
            json.loads(Path(folders[step - 1], "trainer_state.json").read_text())["best_model_checkpoint"] == folders[1]
        )


def test_the_best_model_is_loaded_in_its_own_dtype(tmp_path: Path) -> None:
    small = Dataset.from_list(runs.rows())
    args = runs.config(
        tmp_path, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True
    )
    trainer = runs.trainer(model(dtype=torch.bfloat16), small, args, eval_dataset=small)
    held = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert {name: parameter.dtype for name, parameter in trainer.model.named_parameters()} == held


def test_a_checkpoint_of_the_same_step_is_replaced_and_a_plain_trainer_saves_so_too(tmp_path: Path) -> None:
    def train(**given: Any) -> None:
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, **{**runs.quiet(), "save_strategy": "steps", "save_steps": 1, **given}
        )
        Trainer(
            model=model(), args=args, train_dataset=Dataset.from_list(runs.rows()),
            data_collator=fastlm.PaddingFreeCollator(),
        ).train()  # fmt: skip

    train(learning_rate=0.0)
    before = (tmp_path / "checkpoint-1" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "checkpoint-1" / "left-over").touch()
    train(learning_rate=0.1)
    assert whole(tmp_path / "checkpoint-1") and not (tmp_path / "checkpoint-1" / "left-over").exists()
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir() if "checkpoint" in entry.name] == ["checkpoint-1"]


def test_files_of_a_subclass_stay(tmp_path: Path) -> None:
    """Put into the checkpoint's folder before and after transformers' part, and of a name that both write."""

    class Mine(trl.SFTTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            (folder / "notes").mkdir(parents=True)
            for name in ("notes/before.txt", "optimizer.pt"):
                (folder / name).write_text("mine")
            super()._save_checkpoint(model, trial)
            (folder / "after.txt").write_text("mine")

    args = runs.config(tmp_path, save_strategy="steps", save_steps=1)
    Mine(
        model=model(), args=args, train_dataset=Dataset.from_list(runs.rows()), processing_class=tiny_tokenizer()
    ).train()
    folder = tmp_path / "checkpoint-1"
    assert whole(folder) and (folder / "optimizer.pt").read_bytes() != b"mine"
    assert (folder / "notes" / "before.txt").read_text() == (folder / "after.txt").read_text() == "mine"


def test_a_model_that_is_not_fastlms_saves_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_move", lambda *args: pytest.fail("not ours"))
    args = runs.config(tmp_path, save_strategy="steps", save_steps=1, bf16=False)
    runs.train(runs.model(patched=False), runs.rows(), args)
    assert "fastlm_state.json" not in os.listdir(tmp_path / "checkpoint-1")
