"""fastlm/training/memory.py: activations are kept where they fit, and no number changes whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlm
from fastlm.training import memory
from fastlm.training.say import Voice
from fastlm.training.sft import _settle_checkpointing
from fastlm.training.step import State, state_of

from . import runs
from .runs import LENGTHS

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that this many bytes of a GPU are free: free(n)."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(memory, "_gauge", lambda device: memory._Gauge(allocated=100, peak=300, free=count))

    return set_free


def run(tmp_path: Any, setting: Any = "fastlm", layers: int = 2, **config: Any) -> tuple[Any, list[dict[str, Any]]]:
    model = runs.model("llama", num_hidden_layers=layers)
    model.get_base_model()._fastlm_checkpointing = setting
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "seed": 3, **config}
    return runs.train(model, runs.rows(), runs.config(tmp_path, **options))


def recomputing(trainer: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in trainer.model.get_base_model().model.layers]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in y)


def test_all_is_kept_where_it_fits(tmp_path, free, capsys):
    free(8 * GIB)
    trainer, gradients = run(tmp_path)
    assert recomputing(trainer) == [False, False]
    assert "fastlm: activations are kept: keeping them takes up to" in capsys.readouterr().out
    other, expected = run(tmp_path, setting="recompute")
    assert recomputing(other) == [True, True] and same(gradients, expected)
    assert runs.logged(trainer) == runs.logged(other)


def test_layers_are_recomputed_where_it_does_not_fit(tmp_path, free, capsys):
    free(1000)
    trainer, _ = run(tmp_path)
    assert recomputing(trainer) == [True, True]
    assert "fastlm: activations are recomputed: keeping them takes up to" in capsys.readouterr().out


def test_a_cpu_recomputes_without_a_word(tmp_path, capsys):
    trainer, _ = run(tmp_path)
    assert recomputing(trainer) == [True, True] and "activations are" not in capsys.readouterr().out


def test_kept_bytes_are_those_of_a_step_that_keeps_them(tmp_path):
    counts: dict[int, int] = {}
    for layers in (1, 4):
        model = runs.model("llama", num_hidden_layers=layers)
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            if not (tensor.is_leaf and tensor.requires_grad):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = fastlm.PaddingFreeCollator()(runs.rows())
        model.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**batch, use_cache=False).loss
        counts[layers] = sum(seen.values())
        del loss
    tokens = sum(LENGTHS)
    a_layer_and_its_input = (counts[4] - counts[1]) // 3
    trainer, _ = run(tmp_path, layers=4, per_device_train_batch_size=len(LENGTHS), max_steps=1)
    kept = [layer._fastlm.kept for layer in trainer.model.get_base_model().model.layers]
    rotations = 2 * tokens * 16 * 4  # cos and sin [T, head_dim], fp32: counted in every layer, shared by all
    assert kept[0] == kept[3] == a_layer_and_its_input - tokens * 64 * 4 + rotations  # hidden_size 64


class TooMuch:
    """Raises OutOfMemoryError once, in the n-th call of the last layer's norm that does not recompute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: int, in_backward: bool) -> None:
        from fastlm.models import layers

        self.calls, original = 0, layers.add_rms_norm

        def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed, total = original(x, residual, *args, **kwargs)
            self.calls += 1
            if self.calls == call:
                if not in_backward:
                    raise torch.OutOfMemoryError("CUDA out of memory (a test)")
                normed.register_hook(lambda grad: (_ for _ in ()).throw(torch.OutOfMemoryError("in backward")))
            return normed, total

        monkeypatch.setattr(layers, "add_rms_norm", add_rms_norm)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_batch_that_does_not_fit_is_done_again(tmp_path, free, monkeypatch, capsys, in_backward):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    expected_trainer, expected = run(tmp_path, setting="recompute", **options)
    free(8 * GIB)
    # step 1 recomputes: 2 micro-batches of 2 layers, twice each; then each layer once: the second micro-batch of step 2
    TooMuch(monkeypatch, 8 + 2 + 1, in_backward)
    trainer, gradients = run(tmp_path, **options)
    assert same(gradients, expected)
    assert "from here on recomputed" in capsys.readouterr().out and recomputing(trainer) == [True, True]
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert runs.logged(trainer, name) == runs.logged(expected_trainer, name), name


def test_an_error_under_recompute_is_raised(tmp_path, monkeypatch):
    TooMuch(monkeypatch, 3, False)
    with pytest.raises(torch.OutOfMemoryError, match="a test"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("setting", "config", "expected"),
    [
        ("fastlm", {"gradient_checkpointing": True}, "auto"),
        ("fastlm", {"gradient_checkpointing": False}, "keep"),
        ("recompute", {}, "recompute"),
        ("recompute", {"gradient_checkpointing": True}, "recompute"),
        (True, {}, "auto"),
        (False, {}, "keep"),
        (False, {"gradient_checkpointing": True}, "auto"),
    ],
)
def test_precedence(tmp_path, setting, config, expected):
    model = runs.model("llama")
    model.get_base_model()._fastlm_checkpointing = setting
    trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path, **config))
    on = trainer.args.gradient_checkpointing
    assert (on, state_of(trainer).activations is not None) == {
        "auto": (True, True), "recompute": (True, False), "keep": (False, False),
    }[expected]  # fmt: skip


def test_offload_holds_inputs_in_host_memory(tmp_path, monkeypatch):
    """What transformers does with them is its own; on a CPU they are there already."""
    trainer, gradients = run(tmp_path, setting="offload")
    _, expected = run(tmp_path, setting="recompute")
    assert recomputing(trainer) == [True, True] and same(gradients, expected)
    model = runs.model("llama")
    model.get_base_model()._fastlm_checkpointing = "offload"
    config = runs.config(tmp_path)
    monkeypatch.setattr(type(config), "device", torch.device("cuda", 0))
    _settle_checkpointing(config, model.get_base_model(), frozenset(), state := State(Voice()))
    names = [name for name in ("gradient", "activation") if hasattr(config, f"{name}_checkpointing")]
    assert all(getattr(config, f"{name}_checkpointing_kwargs")["offload"] is True for name in names)
    assert state.activations is None


def test_training_again_keeps_the_choice(tmp_path, free):
    free(8 * GIB)
    trainer, _ = run(tmp_path)
    trainer.args.max_steps = 5
    trainer.train()
    assert recomputing(trainer) == [False, False]
