"""fastlm/training/room.py: a first batch that cannot fit is refused before it is computed, and nothing else is."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlm
from fastlm.training import room
from fastlm.training.room import refusal
from fastlm.training.step import state_of

from ..tiny import add_lora, tiny_model
from . import runs

MIB = 2**20
LONG: dict[str, Any] = dict(max_position_embeddings=8192, intermediate_size=512, num_hidden_layers=8)


def trainer(tmp_path: Any, setting: Any = "fastlm", model: Any = None, **config: Any) -> Any:
    model = model or add_lora(tiny_model("llama", **LONG))
    fastlm.patch(model)
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    core._fastlm_checkpointing = setting
    return runs.trainer(model, runs.rows(runs.LENGTHS), runs.config(tmp_path, **config))


def why(made: Any, tokens: int = 8000, free: int = 0) -> str | None:
    costs = room.costs_of(made, room.patched_core(made.model))
    there = 0 if costs is None else free + costs.weights + costs.adapters
    return None if costs is None else refusal(made, state_of(made), costs, tokens, there)


def least(made: Any, tokens: int = 8000) -> int:
    """The fewest MiB free that are not refused."""
    return next(free for free in range(2000) if why(made, tokens, free * MIB) is None)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path):
    made = trainer(tmp_path)
    reason = r"a micro-batch of 8,000 tokens takes \d\.\d GiB even with layer inputs .* enough for about [\d,]+ tokens"
    assert re.match(reason, why(made)) and why(made, free=2**33) is None


def test_a_forced_policy_needs_more_and_longer_batches_do(tmp_path):
    needs = []
    for setting, tokens in (("fastlm", 8000), ("recompute", 8000), (False, 8000), ("fastlm", 16_000)):
        config = {} if setting else {"gradient_checkpointing": False}
        made = trainer(tmp_path, setting, **config)
        needs.append(least(made, tokens))
        assert setting == "fastlm" or f" GiB with use_gradient_checkpointing={setting!r}; " in why(made)
    fits, recomputed, kept, twice = needs
    assert fits < recomputed < kept and fits < twice


def test_asking_changes_nothing(tmp_path):
    """No random number is drawn, or a resumed run would go on with others; the model keeps its patch and dtype."""
    made = trainer(tmp_path)
    core, random = room.patched_core(made.model), torch.get_rng_state()
    before = [(name, p.data_ptr(), p.dtype) for name, p in core.named_parameters()]
    assert why(made) and torch.equal(torch.get_rng_state(), random) and torch.get_default_dtype() == torch.float32
    assert before == [(name, p.data_ptr(), p.dtype) for name, p in core.named_parameters()]
    assert not any(parameter.is_meta for parameter in core.parameters())


def test_what_fits_is_named(tmp_path):
    made = trainer(tmp_path)
    free = 2 * least(made, 1000) * MIB
    most = int(re.search(r"about ([\d,]+) tokens", why(made, 10**6, free))[1].replace(",", ""))
    assert 1000 < most < 10**6 and why(made, most, free) is None and why(made, most + 1, free)


@pytest.mark.parametrize("case", ["no adapters", "8 bits", "a layer of stock code"])
def test_what_cannot_be_counted_passes(tmp_path, case):
    model = tiny_model("llama", **LONG) if case == "no adapters" else None
    made = trainer(tmp_path, model=model)
    core = room.patched_core(made.model)
    if case == "8 bits":
        core.is_quantized = True
    if case == "a layer of stock code":
        core.config.hidden_act = "relu"
    assert why(made) is None


@pytest.mark.parametrize("kind", ["bf16", "frozen"])
def test_adapters_that_take_less_than_is_counted_pass(tmp_path, kind):
    model = add_lora(tiny_model("llama", dtype=torch.bfloat16, **LONG), r=512)
    for name, parameter in model.named_parameters():
        if kind == "frozen" and ".0." in name and "lora_" in name:
            parameter.requires_grad = False
    made = trainer(tmp_path, model=model)
    assert why(made) is None


def trained_whole(tmp_path: Any, **given: Any) -> Any:
    """Of 1,086,016 weights in fp32."""
    model = tiny_model("llama", **LONG)
    model._fastlm_full_finetuning = True
    config = {name: given.pop(name) for name in ("optim", "gradient_accumulation_steps") if name in given}
    fastlm.patch(model)
    model._fastlm_checkpointing = "fastlm"
    return runs.trainer(model, runs.rows(), runs.config(tmp_path, **config), **given)


@pytest.mark.parametrize(
    ("optim", "each"),  # bytes of weights, gradients and what the optimiser's step takes besides, over the weights'
    [("adamw_torch_fused", 4), ("adamw_torch", 5)],
)
def test_a_step_of_the_optimiser_that_cannot_fit_is_refused(tmp_path, optim, each):
    made = trained_whole(tmp_path, optim=optim)
    made.create_optimizer()
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    costs = room.costs_of(made, made.model)
    enough = each * weights / 1.03  # _SLACK
    reason = refusal(made, state_of(made), costs, 1, int(enough) - 1)
    assert reason.startswith("the optimiser's step takes 0.0 GiB, whatever the batch: weights, gradients and the st")
    assert f"the states of optim={optim!r}; " in reason
    assert "optimiser" not in (refusal(made, state_of(made), costs, 1, int(enough) + 1) or "")
    assert refusal(made, state_of(made), costs, 1, 5 * weights + 100 * MIB) is None


def test_states_that_are_to_come_do_not_stop_the_first_batch_of_a_step_that_fits(tmp_path):
    """Before them there is room for a longer one."""
    least_without = least(trained_whole(tmp_path, optim="sgd"))
    made = trained_whole(tmp_path, optim="adamw_torch")
    made.create_optimizer()
    assert least(made) == least_without


@pytest.mark.parametrize("case", ["none yet", "sgd", "adafactor", "the user's own", "states are there"])
def test_states_that_are_not_known_or_there_already_are_not_counted(tmp_path, case):
    own: Any = {"optim": case if case in ("sgd", "adafactor") else "adamw_torch_fused"}
    if case == "the user's own":
        own["optimizers"] = (torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]), None)
    made = trained_whole(tmp_path, **own)
    optimizer = None if case == "none yet" else made.create_optimizer()
    if case == "states are there":
        made.model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
        optimizer.step()
    assert room.costs_of(made, made.model).optimiser == 0


def test_the_optimiser_inside_accelerates_is_known(tmp_path):
    made = trained_whole(tmp_path, optim="adamw_torch_fused")
    made.optimizer = made.accelerator.prepare(made.create_optimizer())
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    assert room.costs_of(made, made.model).optimiser == 2 * weights


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer of which check_batch believes that its model is on a GPU with no room at all."""
    monkeypatch.setattr(room, "free_bytes", lambda device: 0)
    monkeypatch.setattr(room, "costs_of", lambda trainer, core: SimpleNamespace(weights=4, adapters=3))
    monkeypatch.setattr(room, "refusal", lambda trainer, state, costs, tokens, there: f"{there} for {tokens} tokens")
    monkeypatch.setattr(room, "patched_core", lambda model: model)
    monkeypatch.setattr(room, "decoder_layers", lambda core: core.layers)

    def made(model: dict[str, Any] | None = None, args: dict[str, Any] | None = None, **facts: Any) -> Any:
        each = SimpleNamespace(device=torch.device("cuda"), requires_grad=True)
        layer = SimpleNamespace(parameters=lambda: iter([each]))
        core = {"parameters": lambda: iter([each]), "layers": [layer] * 2, "dtype": torch.bfloat16, **(model or {})}
        said = dict(auto_find_batch_size=False, n_gpu=1, bf16=True, fp16=False, activation_offloading=False)
        rest = {"ranks": "NO", **facts}
        return SimpleNamespace(
            model=SimpleNamespace(**core), _fastlm=SimpleNamespace(first_batch_checked=False, activations=None),
            args=SimpleNamespace(**said | (args or {})),
            accelerator=SimpleNamespace(distributed_type=rest.pop("ranks")), **rest,
        )  # fmt: skip

    return made


def test_the_first_batch_of_a_run_on_one_gpu_is_checked(on_a_gpu):
    made, mask = on_a_gpu(), torch.tensor([[1, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match=r"^7 for 4 tokens$"):
        room.check_batch(made, {"input_ids": torch.zeros(2, 3), "attention_mask": mask})
    room.check_batch(made, {"input_ids": torch.zeros(2, 3)})  # once


def parameters(*facts: tuple[str, bool]) -> Any:
    made = [SimpleNamespace(device=torch.device(device), requires_grad=trains) for device, trains in facts]
    return lambda: iter(made)


@pytest.mark.parametrize("facts", [
    {"ranks": "MULTI_GPU"}, {"ranks": "FSDP"}, {"args": {"auto_find_batch_size": True}},
    {"args": {"n_gpu": 2}}, {"args": {"activation_offloading": True}}, {"model": {"dtype": torch.float32}},
    {"model": {"parameters": parameters(("cuda:0", True), ("cuda:1", True))}},
    {"model": {"parameters": parameters(("cpu", True))}},
    {"model": {"layers": [SimpleNamespace(parameters=parameters(("cuda", False)))]}},
    {"model": {"_fastlm_full_finetuning": True, "parameters": parameters(("cuda", True), ("cuda", False))}},
])  # fmt: skip
def test_other_runs_are_not(on_a_gpu, facts):
    room.check_batch(on_a_gpu(**facts), {"input_ids": torch.zeros(1, 3)})


def test_nor_is_a_batch_without_ids(on_a_gpu):
    room.check_batch(on_a_gpu(), {"inputs_embeds": torch.zeros(1, 3, 4)})


def test_a_run_asks_before_it_computes(tmp_path, monkeypatch):
    """The real trainer, whose model is said to be on a GPU."""
    made = trainer(tmp_path, max_steps=1, per_device_train_batch_size=len(runs.LENGTHS))
    monkeypatch.setattr(room, "_alike", lambda trainer, devices: True)
    monkeypatch.setattr(room, "free_bytes", lambda device: 16 * MIB)
    monkeypatch.setattr(type(made), "compute_loss", lambda *args, **kwargs: pytest.fail("computed"))
    with pytest.raises(ValueError, match=rf"^a micro-batch of {sum(runs.LENGTHS)} tokens takes "):
        made.train()


@pytest.mark.parametrize("setting", ["fastlm", "recompute"])
def test_out_of_memory_says_what_takes_less(tmp_path, monkeypatch, setting):
    made = trainer(tmp_path, setting, max_steps=1)

    def too_much(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    monkeypatch.setattr(type(made), "compute_loss", too_much)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.train()
    (note,) = caught.value.__notes__
    assert note.startswith("fastlm: this micro-batch was too much") and "per_device_train_batch_size" in note


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that a GPU has so many bytes more than the first batch takes with inputs offloaded: short(made, more);
    returns how many more it takes with inputs kept.
    """
    monkeypatch.setattr(runs, "LENGTHS", (50,) * 8)

    def set_free(made: Any, more: int) -> int:
        costs, tokens = room.costs_of(made, room.patched_core(made.model)), sum(runs.LENGTHS)
        offloaded, recomputed = (room._needed(costs, policy, tokens) for policy in ("offload", "recompute"))
        free = offloaded - costs.weights - costs.adapters + more
        monkeypatch.setattr(room, "_SLACK", 1.0)
        monkeypatch.setattr(room, "_alike", lambda trainer, devices: True)
        monkeypatch.setattr(room, "free_bytes", lambda device: free)
        return recomputed - offloaded

    return set_free


@pytest.mark.parametrize("enough", [True, False])
def test_a_first_batch_that_fits_only_offloaded_begins_so(tmp_path, short, capsys, enough):
    size = {"per_device_train_batch_size": len(runs.LENGTHS), "max_steps": 2, "seed": 3}
    rows = runs.rows(runs.LENGTHS)
    _, expected = runs.train(trainer(tmp_path, "recompute").model, rows, runs.config(tmp_path, **size))
    made = trainer(tmp_path, **size)
    saved = short(made, 0)
    assert saved > 0
    short(made, saved if enough else saved - 1)
    capsys.readouterr()
    made.add_callback(recorder := runs.Recorder())
    made.train()
    said = "activations are recomputed from inputs in host memory: with these on the GPU"
    assert (said in capsys.readouterr().out) == (not enough)
    assert (state_of(made).activations.policy == "offload") == (not enough)
    assert room.patched_core(made.model)._fastlm_model.offload.on == (not enough)
    for one, other in zip(recorder.gradients, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_what_one_rank_has_no_room_for_all_offload(tmp_path, short, monkeypatch):
    """And none is refused alone."""
    made = trainer(tmp_path)
    short(made, 2**30)
    batch = {"input_ids": torch.zeros(1, sum(runs.LENGTHS), dtype=torch.long)}
    monkeypatch.setattr(type(made.accelerator), "num_processes", property(lambda self: 2))
    monkeypatch.setattr(made.accelerator, "gather", lambda votes: torch.cat([votes, torch.tensor([-(2**30)])]))
    monkeypatch.setattr(room, "one_process", lambda trainer: False)
    monkeypatch.setattr(room, "refusal", lambda *args: pytest.fail("refused"))
    room.check_batch(made, batch)
    assert state_of(made).activations.policy == "offload"


def test_layers_that_are_not_ours_do_not_begin_offloaded(tmp_path, short):
    made = trainer(tmp_path)
    short(made, 0)
    for layer in room.decoder_layers(room.patched_core(made.model)):
        layer.__dict__.pop("_fastlm")
    room.check_batch(made, {"input_ids": torch.zeros(1, sum(runs.LENGTHS), dtype=torch.long)})
    assert state_of(made).activations.policy == "first"


@pytest.mark.parametrize("inputs", [
    {"input_ids": torch.zeros(2, 3)}, {"inputs_embeds": torch.zeros(2, 3, 8)},
    {"inputs_embeds": torch.zeros(2, 4, 8), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])},
])  # fmt: skip
def test_tokens_of_ids_and_of_embeddings(inputs):
    assert room.tokens_of(inputs) == 6
