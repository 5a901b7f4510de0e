"""fastlm/training/room.py: a batch that cannot fit is refused before the first step, and nothing else is."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlm
from fastlm.training import memory, room
from fastlm.training.room import refusal
from fastlm.training.step import state_of

from ..tiny import add_lora, tiny_model
from . import runs

MIB = 2**20


def trainer(tmp_path: Any, setting: Any = "fastlm", model: Any = None, **config: Any) -> Any:
    model = model or add_lora(tiny_model("llama"))
    fastlm.patch(model)
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    core._fastlm_checkpointing = setting
    options = {"per_device_train_batch_size": 2, "optim": "adamw_torch", **config}
    return runs.trainer(model, runs.rows(runs.LENGTHS), runs.config(tmp_path, **options))


def least(trainer: Any) -> int:
    """The fewest MiB free that are not refused."""
    state = state_of(trainer)
    return next(free for free in range(2000) if refusal(trainer, state, free * MIB) is None)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path):
    made = trainer(tmp_path)
    reason = refusal(made, state_of(made), 8 * MIB)
    most = sum(sorted(runs.LENGTHS)[-2:])
    pattern = rf"a micro-batch of this run has up to {most} tokens and takes \d\.\d GiB even with .*\. (would|no) "
    assert re.match(pattern, reason)
    assert refusal(made, state_of(made), 2**33) is None


def test_a_forced_policy_needs_more_and_longer_batches_do(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LENGTHS", (4000,) * 8)
    facts = dict(max_position_embeddings=8192, intermediate_size=512, num_hidden_layers=8)
    needs = []
    for setting, size in (("fastlm", 1), ("recompute", 1), (False, 1), ("fastlm", 2)):
        model = add_lora(tiny_model("llama", **facts))
        config: dict[str, Any] = {} if setting else {"gradient_checkpointing": False}
        needs.append(
            least(trainer(tmp_path, setting, model, per_device_train_batch_size=size, max_length=4000, **config))
        )
    fits, recomputed, kept, twice = needs
    assert fits < recomputed < kept and fits < twice


def test_what_cannot_be_counted_passes(tmp_path):
    made = trainer(tmp_path, optim="adafactor")
    assert refusal(made, state_of(made), 0) is None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer of which check_batch believes that its model is on a GPU with no room at all."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)

    def made(**facts: Any) -> Any:
        parameter = SimpleNamespace(device=torch.device("cuda"), requires_grad=True)
        rest = {"optimizer": None, "args": SimpleNamespace(auto_find_batch_size=False), **facts}
        return SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: iter([parameter])), _fastlm=SimpleNamespace(),
            accelerator=SimpleNamespace(distributed_type=facts.get("ranks", "NO")), **rest,
        )  # fmt: skip

    monkeypatch.setattr(room, "patched_core", lambda model: model)
    monkeypatch.setattr(room, "refusal", lambda trainer, state, free: f"{free} bytes are too few")
    return made


def test_a_run_on_one_gpu_is_checked(on_a_gpu):
    with pytest.raises(ValueError, match=r"^0 bytes are too few$"):
        room.check_batch(on_a_gpu())


@pytest.mark.parametrize("facts", [
    {"optimizer": object()}, {"ranks": "MULTI_GPU"}, {"args": SimpleNamespace(auto_find_batch_size=True)},
])  # fmt: skip
def test_other_runs_are_not(on_a_gpu, facts):
    room.check_batch(on_a_gpu(**facts))


def test_nor_is_a_model_on_a_cpu_or_a_partly_frozen_one(tmp_path, on_a_gpu):
    room.check_batch(trainer(tmp_path))
    made = on_a_gpu()
    made.model._fastlm_full_finetuning = True
    next(made.model.parameters()).requires_grad = False
    room.check_batch(made)


def test_out_of_memory_says_what_takes_less(tmp_path, monkeypatch):
    made = trainer(tmp_path, setting="recompute", max_steps=1)

    def too_much(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    monkeypatch.setattr(type(made), "compute_loss", too_much)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.train()
    (note,) = caught.value.__notes__
    assert note.startswith("fastlm: a micro-batch of ") and "per_device_train_batch_size" in note
