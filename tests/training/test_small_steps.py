"""fastlm/training/small_steps.py: which runs go as CUDA graphs, what is captured ahead, and what a run then gives.

On a CPU captures are stood in for (tests/models/captures.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fastlm
from fastlm.models.graphs import Size
from fastlm.training import memory, small_steps
from fastlm.training.room import costs_of
from fastlm.training.step import state_of

from ..models.captures import run_again
from . import runs

ROWS = runs.rows(tuple(int(n) for n in np.random.default_rng(0).integers(4, 40, 64)))


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" in request.keywords:
        return
    run_again(monkeypatch)
    monkeypatch.setattr(small_steps, "_worthwhile", lambda core: 512)
    leave(monkeypatch, 2**40)


def leave(monkeypatch: pytest.MonkeyPatch, free: int, for_graphs: int | None = None) -> None:
    """So many bytes are free when policies are chosen, and as many, or others, when graphs are."""
    gauge = memory._Gauge(allocated=100, peak=300, free=free)
    monkeypatch.setattr(memory, "_gauge", lambda *args, **kwargs: gauge)
    monkeypatch.setattr(small_steps, "free_bytes", lambda device: free if for_graphs is None else for_graphs)


class Noted(runs.Recorder):
    """And what was replayed by the end."""

    replays = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        graphs = state_of(self.trainer).graphs  # type: ignore[attr-defined, union-attr]
        if graphs:
            self.replays = graphs.replays


def run(out: Any, model: Any, **given: Any) -> tuple[Any, Noted]:
    noted = Noted()
    args = {"per_device_train_batch_size": 2, "max_steps": 12, **given}
    made = runs.trainer(model, ROWS, runs.config(out, **args), callbacks=[noted])
    noted.trainer = made  # type: ignore[attr-defined]
    made.train()
    return made, noted


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_gives_what_it_gives_without(accumulation: int, tmp_path: Any, capsys: Any) -> None:
    without = runs.model()
    without.get_base_model()._fastlm_cuda_graphs = False
    given = dict(gradient_accumulation_steps=accumulation, max_grad_norm=1.0)
    truth, expected = run(tmp_path, without, **given)
    assert expected.replays == 0
    capsys.readouterr()
    model = runs.model()
    found, noted = run(tmp_path, model, **given)
    assert noted.replays >= 10 * accumulation - 1, "all but two steps or so, and a size that came only once"
    assert "steps of up to 128 tokens run as CUDA graphs: 2 sizes captured" in capsys.readouterr().out
    for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
        np.testing.assert_allclose(runs.logged(found, name), runs.logged(truth, name), rtol=1e-5, err_msg=name)
    for ours, theirs in zip(noted.gradients, expected.gradients, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)
    backbone = model.get_base_model().base_model
    assert "forward" not in backbone.__dict__ and "_fastlm_graphs" not in backbone.__dict__, "gone after training"


def test_a_second_run_and_evaluation_between(tmp_path: Any) -> None:
    model = runs.model()
    made, noted = run(tmp_path, model, max_steps=5)
    first = noted.replays
    assert first >= 2
    made.evaluate(made.train_dataset)
    made.train()
    assert noted.replays >= first  # of the second run


@pytest.mark.parametrize("asked", ["recompute", "offload", False])
def test_policies_that_are_asked_for(asked: Any, tmp_path: Any, capsys: Any) -> None:
    """What they take is counted ahead (costs.py), since nobody does a step of theirs again."""
    model, without = runs.model(), runs.model()
    for one in (model, without):
        one.get_base_model()._fastlm_checkpointing = asked
    without.get_base_model()._fastlm_cuda_graphs = False
    truth, _ = run(tmp_path, without)
    capsys.readouterr()
    made, noted = run(tmp_path, model)
    out = capsys.readouterr().out
    assert noted.replays >= 9 and "steps of up to 128 tokens run as CUDA graphs: 2 sizes" in out
    assert f"activations: {asked or 'keep'} x 2" in out
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(runs.logged(made, name), runs.logged(truth, name), rtol=1e-5, err_msg=name)


def test_a_run_that_goes_on_captures_after_its_own_first_step(tmp_path: Any, monkeypatch: Any) -> None:
    """What a capture needs, kernels, libraries and gradients, is there only then."""

    def forced() -> Any:
        model = runs.model()
        model.get_base_model()._fastlm_checkpointing = "recompute"
        return model

    run(tmp_path, forced(), max_steps=4, save_strategy="steps", save_steps=4)
    made = runs.trainer(forced(), ROWS, runs.config(tmp_path, max_steps=8, per_device_train_batch_size=2))
    steps: list[int] = []
    graphs = small_steps._graphs
    monkeypatch.setattr(small_steps, "_graphs", lambda *args: (steps.append(args[1].steps), graphs(*args))[1])
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert steps == [1] and made.state.global_step == 8


@pytest.mark.parametrize("short", ["kept", "tokens", "both"])
def test_graphs_take_less_where_memory_is_short(short: str, tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """They recompute, or are for most steps; what steps without graphs keep stays as it was chosen."""
    truth, _ = run(tmp_path, runs.model(), max_steps=12)
    asked: list[tuple[int, str]] = []

    def too_large(
        trainer: Any, core: Any, state: Any, costs: Any, limit: int, inside: Any, policies: Any
    ) -> str | None:
        assert set(policies) == {"keep"}
        asked.append((limit, inside[0]))
        fits = (short == "tokens" or inside[0] == "recompute") and (short == "kept" or limit == 64)
        return None if fits else "too little"

    monkeypatch.setattr(small_steps, "_too_large", too_large)
    capsys.readouterr()
    made, noted = run(tmp_path, runs.model(), max_steps=12)
    out = capsys.readouterr().out
    ways = [(128, "keep"), (64, "keep"), (128, "recompute"), (64, "recompute")]
    assert asked == ways[: {"tokens": 2, "kept": 3, "both": 4}[short]]
    assert ("steps of up to 128 tokens run as" in out) == (short == "kept")
    assert ("CUDA graphs, in which activations are recomputed: " in out) == (short != "tokens")
    assert noted.replays >= 6 and "activations: keep x 2" in out
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(runs.logged(made, name), runs.logged(truth, name), rtol=1e-5, err_msg=name)


def test_sizes_of_99_steps_of_100_are_tried_before_those_of_nine_of_ten(tmp_path: Any, monkeypatch: Any) -> None:
    asked: list[tuple[int, str]] = []

    def too_large(*args: Any) -> str:
        asked.append((args[4], args[5][0]))
        return "too little"

    monkeypatch.setattr(small_steps, "_too_large", too_large)
    rows = runs.rows((60,) * 400 + (150,) * 12 + (300,))  # of pairs 94% have 120 tokens, 5.5% 210, 0.5% 360
    runs.trainer(runs.model(), rows, runs.config(tmp_path, max_steps=3, per_device_train_batch_size=2)).train()
    assert asked[:3] == [(512, "keep"), (256, "keep"), (128, "keep")]
    assert {inside for _, inside in asked[3:]} == {"recompute"}


def test_graphs_recompute_where_only_some_layers_do(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """Memory is shortest there: of the room that is left for graphs, those that keep what layers keep take too much."""
    truth, _ = run(tmp_path, runs.model(), max_steps=12)
    before, _ = run(tmp_path, runs.model(), max_steps=3)
    state = state_of(before)
    assert state is not None
    free = state.activations.levels[1][0] + 1 + state.graph_rooms[0]
    leave(monkeypatch, free, for_graphs=2**40)
    asked: list[tuple[str, ...]] = []

    def too_large(
        trainer: Any, core: Any, state: Any, costs: Any, limit: int, inside: Any, policies: Any
    ) -> str | None:
        asked.append(tuple(inside))
        return None if set(inside) == {"recompute"} else "too little"

    monkeypatch.setattr(small_steps, "_too_large", too_large)
    capsys.readouterr()
    made, noted = run(tmp_path, runs.model(), max_steps=12)
    assert asked == [("recompute", "lean")] * 2 + [("recompute", "recompute")]
    assert "CUDA graphs, in which activations are recomputed: " in capsys.readouterr().out and noted.replays >= 6
    assert state_of(made).activations.mix == ("recompute", "lean")  # type: ignore[union-attr]
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(runs.logged(made, name), runs.logged(truth, name), rtol=1e-5, err_msg=name)


def test_policies_leave_room_for_graphs(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """Where most steps are small; graphs that recompute take little, and save a small step most of its time."""
    made = runs.trainer(runs.model(), ROWS, runs.config(tmp_path, max_steps=4, per_device_train_batch_size=2))
    state = state_of(made)
    assert state is not None
    costs = costs_of(made, made.model.get_base_model())
    assert costs is not None
    free = int(memory.MARGIN * costs.graphs(128, "recompute")) + memory.RESERVE + 10_000_000
    leave(monkeypatch, free)
    made.train()
    assert state.graph_rooms == tuple(int(memory.MARGIN * costs.graphs(size, "recompute")) for size in (128, 64))
    out = capsys.readouterr().out
    assert "and 0.5 GiB are free beside CUDA graphs" in out and "tokens run as CUDA graphs" in out
    large = runs.rows((300,) * 20 + (20,) * 4)  # most steps are past the limit
    other = runs.trainer(runs.model(), large, runs.config(tmp_path, max_steps=4, per_device_train_batch_size=2))
    other.train()
    assert state_of(other).graph_rooms == () and "free beside" not in capsys.readouterr().out  # type: ignore[union-attr]


def test_the_room_is_for_99_of_100_steps(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """Steps without graphs take several times as long: one of ten was half of a run's time."""
    rows = runs.rows((60,) * 50 + (200,) * 2)  # one pair in 13 has a long one
    made = runs.trainer(runs.model(), rows, runs.config(tmp_path, max_steps=50, per_device_train_batch_size=2))
    costs, state = costs_of(made, made.model.get_base_model()), state_of(made)
    assert costs is not None and state is not None
    room = int(memory.MARGIN * costs.graphs(320, "recompute"))
    assert room > int(memory.MARGIN * costs.graphs(128, "recompute"))  # of nine steps of ten
    free = room + memory.RESERVE + 10_000_000
    leave(monkeypatch, free)
    made.train()
    assert state.graph_rooms[0] == room
    assert "steps of up to 320 tokens run as CUDA graphs" in capsys.readouterr().out


def test_the_room_is_for_nine_of_ten_where_more_leaves_nothing_to_keep(tmp_path: Any, monkeypatch: Any) -> None:
    rows = runs.rows((60,) * 50 + (200,) * 2)
    made = runs.trainer(runs.model(), rows, runs.config(tmp_path, max_steps=20, per_device_train_batch_size=2))
    costs, state = costs_of(made, made.model.get_base_model()), state_of(made)
    assert costs is not None and state is not None
    free = int(memory.MARGIN * costs.graphs(320, "recompute")) + memory.RESERVE - 100_000
    leave(monkeypatch, free)
    made.train()
    assert state.activations.policy == "keep" and state.graphs.limit == 128 and state.graphs.recomputed


@pytest.mark.parametrize(("room", "kept"), [(0.5, False), (1.1, True)])
def test_policies_are_chosen_beside_that_room(room: float, kept: bool, tmp_path: Any, monkeypatch: Any) -> None:
    before, _ = run(tmp_path, runs.model(), max_steps=3)
    state = state_of(before)
    assert state is not None and state.activations.policy == "keep" and state.graph_rooms[0] > 2**27
    keeping = state.activations.levels[-1][0]
    leave(monkeypatch, keeping + int(room * state.graph_rooms[0]), for_graphs=2**40)
    made, _ = run(tmp_path, runs.model(), max_steps=3)
    found = state_of(made)
    assert found is not None and (found.activations.policy == "keep") == kept


def test_what_a_step_without_a_graph_needs_stays_free(tmp_path: Any, monkeypatch: Any) -> None:
    """As measured where a step can be done again, else as counted for the largest batch."""
    made, _ = run(tmp_path, runs.model(), max_steps=3)
    state, core = state_of(made), made.model.get_base_model()
    assert state is not None
    costs, keep = costs_of(made, core), ["keep", "keep"]
    assert costs is not None
    monkeypatch.setattr(small_steps, "free_bytes", lambda device: 2**31)
    state.activations.levels = [(0, ("recompute",) * 2), (2**20, ("keep",) * 2)]
    assert small_steps._too_large(made, core, state, costs, 64, keep, keep) is None
    state.activations.levels = [(0, ("recompute",) * 2), (2**31, ("keep",) * 2)]
    refused = "2.1 GiB would have to be free for their activations, and 2.0 are"
    assert small_steps._too_large(made, core, state, costs, 64, keep, keep) == refused
    state.activations.levels, state.activations.peak = [], 100 + 2**31
    assert "2.3 GiB" in str(small_steps._too_large(made, core, state, costs, 64, keep, keep))
    state.activations.policy, offloaded = "offload", ["offload", "offload"]
    assert small_steps._too_large(made, core, state, costs, 64, offloaded, offloaded) is None
    monkeypatch.setattr(memory, "largest_batch", lambda trainer, state, tokens: 500_000)
    assert "GiB would have to be free" in str(
        small_steps._too_large(made, core, state, costs, 64, offloaded, offloaded)
    )


def test_memory_that_ran_out_before_a_capture_costs_no_graphs(tmp_path: Any, monkeypatch: Any) -> None:
    made = runs.trainer(runs.model(), ROWS, runs.config(tmp_path, max_steps=8, per_device_train_batch_size=2))
    state = state_of(made)
    assert state is not None
    calls, run_once = list[int](), memory.training_step

    def fails_once(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        def step(*a: Any, **k: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("out of memory")
            return original(*a, **k)

        return run_once(step, trainer, *args, **kwargs)

    monkeypatch.setattr(memory, "training_step", fails_once)
    noted = Noted()
    noted.trainer = made  # type: ignore[attr-defined]
    made.add_callback(noted)
    made.train()
    assert len(calls) == 9 and state.activations.policy != "keep" and noted.replays >= 4


def test_steps_past_the_limit_run_without(tmp_path: Any, capsys: Any) -> None:
    model = runs.model()
    model.get_base_model()._fastlm_checkpointing = "recompute"
    made, noted = run(tmp_path, model, max_steps=3, per_device_train_batch_size=64)
    assert noted.replays == 0 and state_of(made).graphs is False  # type: ignore[union-attr]
    assert "CUDA graphs" not in capsys.readouterr().out


def test_a_run_that_asks_for_none_says_nothing(tmp_path: Any, capsys: Any) -> None:
    model = runs.model()
    model.get_base_model()._fastlm_cuda_graphs = False
    _, noted = run(tmp_path, model, max_steps=3)
    assert noted.replays == 0 and "CUDA graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["memory", "forced", "uncounted", "dropout", "full", "deterministic"])
def test_what_stands_in_the_way_is_said(reason: str, tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    if reason == "full":
        model = runs.model(lora=False)
        monkeypatch.setattr("fastlm.models.watched.MOST_TRAINED", 1000)
    elif reason == "dropout":
        from tests.tiny import add_lora, tiny_model

        model = add_lora(tiny_model(), lora_dropout=0.1)
        fastlm.patch(model)
    else:
        model = runs.model()
    if reason in ("forced", "uncounted"):
        model.get_base_model()._fastlm_checkpointing = "offload"
    if reason == "uncounted":
        monkeypatch.setattr(small_steps, "costs_of", lambda trainer, core: None)
    if reason in ("memory", "forced"):
        monkeypatch.setattr(small_steps, "free_bytes", lambda device: 2**29)
    if reason == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    _, noted = run(tmp_path, model, max_steps=4)
    words = {
        "memory": "0.6 GiB would have to be free for their activations, and 0.5 are",
        "forced": "0.7 GiB would have to be free for their activations, and 0.5 are",
        "uncounted": "nobody could count what they take",
        "dropout": "there is dropout inside its layers",
        "full": "its layers train more than", "deterministic": "deterministic algorithms are asked for",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert noted.replays == 0
    assert out.count("steps of few tokens run without CUDA graphs: ") == 1 and words[reason] in out


def test_sizes_that_the_run_will_meet(tmp_path: Any) -> None:
    trainer = runs.trainer(runs.model(), runs.rows((60,) * 50 + (200,)), runs.config(tmp_path, max_steps=100,
                           per_device_train_batch_size=2))  # fmt: skip
    trainer.state.max_steps = 100
    met = small_steps._met(trainer)
    assert met is not None
    assert small_steps._expected(trainer, met, 512) == [Size(320, 4, 1024), Size(128, 4, 1024)]
    assert small_steps._usual(met, 512, 0.9) == 128 and small_steps._usual(met, 64, 0.9) == 64
    assert small_steps._usual(met, 512, 0.99) == 320, "one pair in 25"
    trainer.state.max_steps = 10  # one pair in 25 has the long one: 0.4 steps of these
    assert small_steps._expected(trainer, met, 512) == [Size(128, 4, 1024)]
    assert small_steps._expected(trainer, met, 64) == []
    trainer.args.tokens_per_step = 100
    assert small_steps._met(trainer) is None


def test_one_size_serves_several_rare_ones(tmp_path: Any) -> None:
    long = (100, 200, 260, 330, 400)
    trainer = runs.trainer(runs.model(), runs.rows((40,) * 95 + long), runs.config(tmp_path, max_steps=60,
                           per_device_train_batch_size=1))  # fmt: skip
    trainer.state.max_steps = 60  # 0.6 steps with each of the five
    met = small_steps._met(trainer)
    assert met is not None
    found = small_steps._expected(trainer, met, 512)
    assert found == [Size(448, 4, 1024), Size(320, 4, 1024), Size(64, 4, 1024)], "0.48 of the steps drawn have 128"
    trainer.state.max_steps = 20  # 0.2 with each: one size for all
    assert small_steps._expected(trainer, met, 512) == [Size(448, 4, 1024), Size(64, 4, 1024)]
    trainer.state.max_steps = 5
    assert small_steps._expected(trainer, met, 512) == [Size(64, 4, 1024)]


def test_more_than_fits_beside_the_graphs(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """A batch past the limit that does not fit: the graphs' memory is given up before activations are."""
    model = runs.model()
    made = runs.trainer(model, ROWS, runs.config(tmp_path, max_steps=8, per_device_train_batch_size=2))
    state = state_of(made)
    assert state is not None and state.activations is not None
    step = type(made).training_step.__wrapped__ if hasattr(type(made).training_step, "__wrapped__") else None
    assert step is not None
    calls: list[str] = []
    run_once = memory.training_step

    def keeps(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        def fails_once(*a: Any, **k: Any) -> Any:
            calls.append(state.activations.policy)
            if len(calls) == 6:
                raise torch.OutOfMemoryError("out of memory")
            return original(*a, **k)

        return run_once(fails_once, trainer, *args, **kwargs)

    monkeypatch.setattr(memory, "training_step", keeps)
    monkeypatch.setattr(
        memory, "_choose", lambda trainer, layers, state, activations: (
            setattr(activations, "policy", "keep"), memory.set_policy(layers, "keep"))
    )  # fmt: skip
    made.train()
    assert calls[5] == calls[6] == "keep" and calls[-1] == "keep"
    assert "needs the memory of the CUDA graphs: from here on without" in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_a_run_gives_what_it_gives_without(tmp_path: Any, capsys: Any) -> None:
    losses = []
    for wanted in (True, False):
        model = runs.model(dtype=torch.bfloat16, head_dim=64).cuda()
        fastlm.patch(model)
        model.get_base_model()._fastlm_cuda_graphs = wanted
        made, noted = run(tmp_path, model, max_grad_norm=1.0)
        assert noted.replays == (10 if wanted else 0) or wanted
        assert (noted.replays >= 9) == wanted
        losses.append((runs.logged(made), runs.logged(made, "grad_norm")))
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=2e-3)
    np.testing.assert_allclose(losses[0][1], losses[1][1], rtol=3e-2)
