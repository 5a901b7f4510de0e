"""fastlm/training/memory.py: activations are kept where they fit, and no number changes whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fastlm
from benchmarks.step import ARCHITECTURES
from fastlm.models.checkpointing import policy_of
from fastlm.models.patch import decoder_layers, patched_core
from fastlm.planner import twin_of
from fastlm.training import memory
from fastlm.training.costs import ladder, step_costs
from fastlm.training.say import Voice
from fastlm.training.step import State, state_of

from ..tiny import add_lora, tiny_model
from . import runs
from .runs import LENGTHS

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that this many bytes of a GPU are free: free(n)."""

    def set_free(count: int) -> None:
        gauge = memory._Gauge(allocated=100, peak=12_100, free=count)
        monkeypatch.setattr(memory, "_gauge", lambda *args, **kwargs: gauge)

    return set_free


def run(tmp_path: Any, setting: Any = "fastlm", layers: int = 2, **config: Any) -> tuple[Any, list[dict[str, Any]]]:
    model = runs.model("llama", num_hidden_layers=layers)
    model.get_base_model()._fastlm_checkpointing = setting
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "seed": 3, **config}
    return runs.train(model, runs.rows(runs.LENGTHS), runs.config(tmp_path, **options))


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


def needed(trainer: Any, level: tuple[str, ...]) -> int:
    """Bytes that have to be free for these policies, from what the first step of a run like this one counted."""
    activations, layers = state_of(trainer).activations, decoder_layers(patched_core(trainer.model))
    largest = sum(sorted(runs.LENGTHS)[-trainer.args.per_device_train_batch_size :])
    longer = min(largest / activations.tokens, memory._LONGER)
    keeps = [layer._fastlm.kept for layer in layers]
    hidden = patched_core(trainer.model).config.hidden_size
    norms, products = (n * activations.tokens * 4 for n in (2 * hidden, 2 * 96))  # intermediate_size 96, fp32
    left_out = {K: 0, "light": norms, L: norms + products}
    held = sum(kept - left_out[policy] for policy, kept in zip(level, keeps, strict=True) if policy != R)
    held += norms // 2 * (level[-1] in ("light", L))  # one is there again when the last layer's backward runs
    aside = sum(p.nbytes for p in activations.trained) * (trainer.args.gradient_accumulation_steps > 1)
    return int(longer * memory.MARGIN * (12_000 + held - keeps[-1] + products)) + memory.RESERVE + aside


def policies(trainer: Any) -> list[str]:
    return [policy_of(layer, False) for layer in decoder_layers(patched_core(trainer.model))]


R, L, K = "recompute", "lean", "keep"
LEAN = "kept but for norms, gate and up products"
ABLE = [("light", "lean")] * 3


@pytest.mark.parametrize(
    ("level", "below", "name", "words"),
    [
        ((R, R, L), (R, R, R), "mixed", f"{LEAN} in 1 of 3 layers, recomputed in 2: keeping"),
        ((L, L, L), (R, L, L), "lean", f"{LEAN}: keeping"),
        ((L, L, "light"), (L, L, L), "mixed", f"kept but for norms in 1 of 3 layers, {LEAN} in 2: keeping"),
        (("light",) * 3, (L, "light", "light"), "light", "kept but for norms: keeping"),
        (("light", K, K), ("light", "light", K), "mixed", "kept in 2 of 3 layers, kept but for norms in 1: keeping"),
        ((K, K, K), ("light", K, K), "keep", "kept: keeping"),
    ],
)
def test_as_many_layers_keep_more_as_fit(tmp_path, free, capsys, level, below, name, words):
    free(1000)
    other, expected = run(tmp_path, layers=3)
    enough, least = needed(other, level), needed(other, (L, L, L)) / 2**30
    assert policies(other) == [R, R, R] and state_of(other).activations.policy == R
    for bytes_free, chosen in ((enough, below), (enough + 1, level)):
        free(bytes_free)
        capsys.readouterr()
        trainer, gradients = run(tmp_path, layers=3)
        assert policies(trainer) == list(chosen)
        assert same(gradients, expected) and runs.logged(trainer) == runs.logged(other)
    activations, said = state_of(trainer).activations, capsys.readouterr().out
    assert activations.policy == name and activations.mix == (level if name == "mixed" else ())
    assert f"fastlm: activations are {words} them takes up to {needed(other, (K, K, K)) / 2**30:.1f} GiB" in said
    assert (f" GiB, {LEAN} {least:.1f}, and" in said) == (name != K)
    trainer.args.max_steps = 5
    trainer.train()  # Trainer switches recomputation on again
    assert policies(trainer) == list(level)


@pytest.mark.parametrize("level", [(R, R, L), (R, L, L), (L, K, K)])
def test_a_batch_that_does_not_fit_a_mix_is_done_again(tmp_path, free, monkeypatch, capsys, level):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "layers": 3}
    free(1000)
    other, expected = run(tmp_path, **options)
    free(needed(other, level) + 1)
    # step 1: 2 micro-batches of 3 layers, twice each; a micro-batch of the mix; the last layer of the one after
    TooMuch(monkeypatch, 12 + (3 + level.count(R)) + 3, True)
    trainer, gradients = run(tmp_path, **options)
    assert same(gradients, expected)
    assert "keeping activations was too much for a batch of" in capsys.readouterr().out
    activations = state_of(trainer).activations
    assert policies(trainer) == [R, R, R] and (activations.policy, activations.mix) == (R, ())
    for fact in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert runs.logged(trainer, fact) == runs.logged(other, fact), fact


def test_what_is_too_much_goes_a_tenth_lower(tmp_path, free, monkeypatch, capsys):
    """Until all layers are recomputed; a real model's level takes little more than the one below."""
    monkeypatch.setattr(memory, "RESERVE", 0)
    free(1000)
    other, expected = run(tmp_path, layers=3)
    free(needed(other, (K, K, K)) + 1)
    TooMuch(monkeypatch, 6 + 2, False)  # the last layer of step 2
    trainer, gradients = run(tmp_path, layers=3)
    activations = state_of(trainer).activations
    sizes = [size for size, _ in activations.levels]
    assert sizes[0] == 0 and sizes == sorted(sizes) and [level for _, level in activations.levels] == ladder(ABLE)
    below = max(level for level in range(10) if sizes[level] < 0.9 * sizes[-1])
    assert 0 < below < 9 and policies(trainer) == list(ladder(ABLE)[below]) == list(activations.mix)
    assert same(gradients, expected)
    assert "tokens: from here on kept in" in capsys.readouterr().out
    for _ in range(10):
        activations.policy, activations.mix = "mixed", memory._lower(activations, 3)
    assert activations.mix == (R, R, R)


def test_earlier_gradients_need_room_where_a_layer_keeps(tmp_path, free):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "layers": 3}
    free(1000)
    other, _ = run(tmp_path, **options)
    trained = sum(p.nbytes for p in other.model.parameters() if p.requires_grad)
    at_once = needed(other, (R, R, L)) - trained
    for count, expected in ((at_once + 1, R), (at_once + trained + 1, L)):
        free(count)
        trainer, _ = run(tmp_path, **options)
        assert policies(trainer) == [R, R, expected]


@pytest.mark.parametrize(("setting", "expected"), [(False, K), ("recompute", R)])
def test_what_an_earlier_trainer_chose_is_not_the_next_ones(tmp_path, free, monkeypatch, setting, expected):
    free(8 * GIB)
    monkeypatch.setattr(memory, "ladder", lambda spared: ladder(spared)[:-1])
    first, _ = run(tmp_path, layers=3)
    core = patched_core(first.model)
    assert policies(first) == ["light", K, K]
    core._fastlm_checkpointing, core._fastlm_model.offload.on = setting, True
    trainer, _ = runs.train(first.model, runs.rows(), runs.config(tmp_path))
    assert policies(trainer) == [expected] * 3 and not core._fastlm_model.offload.on
    assert all(layer.mlp._fastlm.products_kept and layer._fastlm.norms_kept for layer in decoder_layers(core))


def test_what_an_earlier_trainer_chose_is_not_that_of_transformers_own(tmp_path, free, monkeypatch):
    free(8 * GIB)
    monkeypatch.setattr(memory, "ladder", lambda spared: ladder(spared)[:-1])
    first, _ = run(tmp_path, layers=3)
    ids = [{"input_ids": list(range(5, 14)), "labels": list(range(5, 14))} for _ in range(4)]
    options = {"max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=False, **options)
    Trainer(first.model, arguments, train_dataset=ids).train()
    assert policies(first) == [K, K, K]


def test_ranks_take_the_least_of_what_fits(tmp_path, free, monkeypatch):
    free(8 * GIB)
    trainer, _ = run(tmp_path, layers=3)
    seen: list[int] = []

    def gather(votes: torch.Tensor) -> torch.Tensor:
        seen.extend(votes.tolist())
        return torch.tensor([9, 5, 2])  # of 9 levels above the first

    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda self: 3))
    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    state = state_of(trainer)
    layers = memory._layers(trainer)
    memory.set_policy(layers, R)
    memory._choose(trainer, layers, state, state.activations)
    assert seen[1:] == [9] and policies(trainer) == [R, L, L] and state.activations.mix == (R, L, L)


@pytest.mark.parametrize(("arch", "tokens"), [
    ("llama8b", 2048), ("llama8b", 16_384), ("llama8b", 32_768), ("qwen3_8b", 8192), ("qwen3_8b", 131_072),
])  # fmt: skip
def test_what_a_mix_takes_is_what_the_planner_counts(arch, tokens):
    """Never less than its worst moment, but for what the head's takes above a layer's; little more."""
    family, facts = ARCHITECTURES[arch]
    model = twin_of(AutoConfig.for_model(family, **facts), torch.bfloat16)
    costs = step_costs(model, {name: 16 for name, _ in model.named_modules() if name.endswith("_proj")})
    levels = ladder([layer.spared() for layer in costs.layers])
    counted = [sum(costs.worst_moment(level, tokens).values()) for level in levels]
    kept = [layer.kept * tokens + layer.copies for layer in costs.layers]
    norms, products = ([one * tokens for one in each] for each in zip(*(
        (sum(layer.norms), layer.remade) for layer in costs.layers), strict=True))  # fmt: skip
    made = memory._worst_moments(levels[1:], kept, norms, products, counted[0])
    rest = [one - other for one, other in zip(made, counted[1:], strict=True)]
    assert min(rest) > -memory.RESERVE / 4 and max(rest) < 0.01 * counted[-1]
    if tokens > 4096:  # a layer's moment is the worst
        assert min(rest) > -0.001 * counted[-1]


def gauge(monkeypatch: pytest.MonkeyPatch, taken: int, free: int) -> None:
    """The first step took so many bytes, and so many are free."""
    monkeypatch.setattr(memory, "_gauge", lambda *args, **kwargs: memory._Gauge(100, 100 + taken, free))


@pytest.mark.parametrize(("missing", "expected"), [(0, R), (1, "offload"), (100, "offload"), (101, R)])
def test_what_fits_only_offloaded_is_offloaded_ahead(tmp_path, monkeypatch, capsys, missing, expected):
    """100 per cent are what the inputs of 4 layers but two take in a batch like the measured one, all of a length."""
    monkeypatch.setattr(runs, "LENGTHS", (9,) * 8)
    leaves = 2 * 2 * 9 * 64 * 4  # layers, rows, tokens, hidden_size, fp32
    lacking = missing * leaves // 100
    gauge(monkeypatch, GIB, GIB - lacking)
    trainer, gradients = run(tmp_path, layers=4)
    _, kept = run(tmp_path, setting=False, layers=4)
    assert state_of(trainer).activations.policy == expected and policies(trainer) == [R] * 4
    assert same(gradients, kept)
    offload = patched_core(trainer.model)._fastlm_model.offload
    assert offload.on == (expected == "offload") == (offload.nbytes() > 0)
    said = f"activations are recomputed from inputs in host memory: with these on the GPU {lacking / GIB:.2g} GiB would"
    assert (said in capsys.readouterr().out) == (expected == "offload")


@pytest.mark.parametrize(("ranks", "accumulate", "others", "longest", "expected"), [
    (1, 1, 0, 19, R), (1, 2, 0, 19, "offload"), (2, 1, 0, 18, R), (2, 1, 0, 19, "offload"), (2, 1, 1, 18, "offload"),
    (2, 1, 0, 40, R),
])  # fmt: skip
def test_who_cannot_do_a_step_again_looks_ahead_to_the_longest_batch(
    tmp_path, monkeypatch, ranks, accumulate, others, longest, expected
):
    """A step of 18 tokens took all that is free; gradients do not grow with tokens. 40 do not fit either."""
    monkeypatch.setattr(runs, "LENGTHS", (9,) * 8)
    trainer, _ = run(tmp_path, layers=4, max_steps=1)
    state, layers = state_of(trainer), memory._layers(trainer)
    trained = sum(parameter.nbytes for parameter in state.activations.trained)
    state.activations.before, state.activations.peak = 100, 100 + trained + 20_000
    assert state.activations.tokens == 18
    gauge(monkeypatch, 0, trained + 20_000)
    trainer.args.gradient_accumulation_steps = accumulate
    monkeypatch.setattr(memory, "largest_batch", lambda *args: longest)
    monkeypatch.setattr(memory, "one_process", lambda trainer: ranks == 1)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda self: ranks))
    gather = lambda votes: torch.cat([votes, torch.tensor([-others])])  # noqa: E731 (bytes that another rank lacks)
    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    memory._choose(trainer, layers, state, state.activations)
    assert state.activations.policy == expected


def test_layers_are_recomputed_where_it_does_not_fit(tmp_path, free, capsys):
    free(1000)
    trainer, _ = run(tmp_path)
    assert recomputing(trainer) == [True, True]
    assert "fastlm: activations are recomputed: keeping them takes up to" in capsys.readouterr().out


def test_a_cpu_recomputes_without_a_word(tmp_path, capsys):
    trainer, _ = run(tmp_path)
    assert recomputing(trainer) == [True, True] and "activations are" not in capsys.readouterr().out


@pytest.mark.parametrize("lora", [{}, {"lora_dropout": 0.5}, None])
@pytest.mark.parametrize("padding_free", [True, False])
def test_kept_bytes_are_those_of_a_step_that_keeps_them(tmp_path, padding_free, lora):
    def made(layers: int) -> Any:
        model = tiny_model("llama", num_hidden_layers=layers)
        model = add_lora(model, **lora) if lora is not None else model
        fastlm.patch(model)
        return model

    fastlm.patch(tiny_model("llama"))  # a config may say bf16 on a CPU from then on
    config = runs.config(tmp_path, per_device_train_batch_size=len(LENGTHS), padding_free=padding_free)
    counts: dict[int, int] = {}
    for layers in (1, 4):
        model = made(layers)
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, known: set[int] = known, seen: dict[int, int] = seen) -> torch.Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in known:
                seen[place] = tensor.untyped_storage().nbytes()
            return tensor

        trainer = runs.trainer(model, runs.rows(), config)
        batch = next(iter(trainer.get_train_dataloader()))
        model.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**batch, use_cache=False).loss
        counts[layers] = sum(seen.values())
        del loss
    a_layer_and_its_input = (counts[4] - counts[1]) // 3
    trainer, _ = runs.train(model := made(4), runs.rows(), config)
    kept = [layer._fastlm.kept for layer in memory._layers(trainer)]
    hidden = sum(LENGTHS) * 64 * 4  # hidden_size 64, fp32
    assert kept[0] == kept[3] == a_layer_and_its_input - hidden
    fused = lora != {"lora_dropout": 0.5}  # else dropout's outputs are read
    assert [layer._fastlm.norms for layer in memory._layers(trainer)] == [2 * hidden * fused] * 4


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


@pytest.mark.parametrize(("accumulate", "step", "micro"), [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 0, 1), (2, 1, 1)])
def test_inputs_go_to_host_memory_where_recomputing_is_too_much(tmp_path, monkeypatch, capsys, accumulate, step, micro):
    options = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 1, "layers": 3}
    monkeypatch.setattr(runs, "LENGTHS", (100,) * 8)  # longer than an adapter's gradients are large
    _, expected = run(tmp_path, setting="recompute", **options)
    # each micro-batch runs 3 layers twice; the last layer's second run
    TooMuch(monkeypatch, 6 * (accumulate * step + micro) + 4, False)
    trainer, gradients = run(tmp_path, **options)
    assert same(gradients, expected) and state_of(trainer).activations.policy == "offload"
    assert "keeping layer inputs was too much for a batch of" in capsys.readouterr().out
    offload = trainer.model.get_base_model()._fastlm_model.offload
    assert offload.on and offload.nbytes() == 2**21  # of 3 layers' inputs: not the first, a leaf, nor the last
    runs.train(trainer.model, runs.rows(), runs.config(tmp_path))
    assert not offload.on  # another run finds out for itself


def test_whole_gradients_are_not_set_aside_for_what_offloading_frees(tmp_path, monkeypatch):
    model = tiny_model("llama")
    fastlm.patch(model)
    model._fastlm_checkpointing = "fastlm"
    config = runs.config(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_steps=2)
    TooMuch(monkeypatch, 8 + 4 + 3, False)  # second micro-batch of the second step
    with pytest.raises(torch.OutOfMemoryError, match="a test"):
        runs.train(model, runs.rows((2,) * 8), config)


@pytest.mark.parametrize("why", ["stepped in backward", "trained since"])
def test_gradients_that_cannot_be_taken_back_are_not_made_twice(tmp_path, monkeypatch, why):
    model = runs.model("llama", num_hidden_layers=3)
    model.get_base_model()._fastlm_checkpointing = "fastlm"
    norm = model.get_base_model().model.norm.weight
    if why == "stepped in backward":
        norm.requires_grad_().register_post_accumulate_grad_hook(lambda parameter: None)

    class Unfreeze(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            norm.requires_grad_()

    TooMuch(monkeypatch, 6 + 4, False)  # second step, in backward
    config = runs.config(tmp_path, per_device_train_batch_size=2, max_steps=2)
    with pytest.raises(torch.OutOfMemoryError, match="a test"):
        runs.trainer(model, runs.rows(), config, callbacks=[Unfreeze()]).train()


def test_an_error_under_offload_is_raised(tmp_path, monkeypatch):
    TooMuch(monkeypatch, 3, False)
    TooMuch(monkeypatch, 3 + 2, False)
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
    memory.settle_checkpointing(config, model.get_base_model(), frozenset(), state := State(Voice()))
    names = [name for name in ("gradient", "activation") if hasattr(config, f"{name}_checkpointing")]
    assert all(getattr(config, f"{name}_checkpointing_kwargs")["offload"] is True for name in names)
    assert state.activations is None


def test_training_again_keeps_the_choice(tmp_path, free):
    free(8 * GIB)
    trainer, _ = run(tmp_path)
    trainer.args.max_steps = 5
    trainer.train()
    assert recomputing(trainer) == [False, False]


class Meter:
    """A GPU's memory as _gauge reads it: what was loaded once took `loading`, a step takes `step` for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, loading: int = 0, step: int = GIB) -> None:
        self.allocated, self.peak, self.step, self.free = 5 * GIB, loading, step, free
        monkeypatch.setattr(memory, "_gauge", self)

    def __call__(self, trainer: Any, begin: bool = False) -> memory._Gauge:
        if begin:
            self.peak = self.allocated
        elif trainer.state.global_step == 0:
            self.peak = self.allocated + self.step
        else:
            self.allocated = 7 * GIB  # the optimiser's states have come since
        return memory._Gauge(self.allocated, max(self.peak, self.allocated), self.free)


@pytest.mark.parametrize(("free", "kept"), [(1.65, True), (1.55, False)])
def test_what_a_step_takes_is_told_from_what_comes_and_went_before(tmp_path, monkeypatch, free, kept):
    """1 GiB a step, a tenth and the reserve: 1.6 GiB, whatever loading took and the optimiser allocates."""
    Meter(monkeypatch, int(free * GIB), loading=100 * GIB)
    model = runs.model("llama")
    model.get_base_model()._fastlm_checkpointing = "fastlm"
    data = runs.rows((9, 9, 9, 9))
    trainer, _ = runs.train(model, data, runs.config(tmp_path, per_device_train_batch_size=2, max_steps=2))
    assert recomputing(trainer) == [not kept] * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 20 + 16),
        ({"padding_free": False}, 2 * 20),
        ({"packing": True, "max_length": 24}, 24 + 23),
        ({"tokens_per_step": 40}, 40),
        ({"tokens_per_step": 100, "gradient_accumulation_steps": 2}, 70 * 1.001),
    ],
)
def test_the_largest_batch_there_can_be(tmp_path, config, expected):
    model, budget = runs.model("llama"), config.pop("tokens_per_step", None)
    trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path, per_device_train_batch_size=2, **config))
    trainer.args.tokens_per_step = budget
    assert memory.largest_batch(trainer, state_of(trainer), 7) == pytest.approx(expected)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert memory.largest_batch(trainer, state_of(trainer), 7) == 2 * trainer.args.max_length


def test_a_model_of_another_family_trains(tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    fastlm.patch(model)
    model._fastlm_checkpointing = "fastlm"
    trainer, _ = runs.train(model, runs.rows(), runs.config(tmp_path, max_steps=3, per_device_train_batch_size=2))
    assert len(runs.logged(trainer)) == 3


def test_training_goes_on_after_unpatch(tmp_path, free):
    free(8 * GIB)
    trainer, _ = run(tmp_path, padding_free=False)
    fastlm.unpatch(trainer.model)
    trainer.train()
    assert recomputing(trainer) == [True, True]  # as the arguments say


def test_layers_that_the_user_does_not_recompute_stay_so(tmp_path, free):
    free(8 * GIB)
    trainer, _ = run(tmp_path, layers=4, gradient_checkpointing_kwargs={"every_n_layers": 2})
    assert recomputing(trainer) == [True, False, True, False]


def test_a_failure_of_the_last_policy_is_raised_and_leaves_the_earlier_gradients(tmp_path, free, monkeypatch):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    free(8 * GIB)
    TooMuch(monkeypatch, 8 + 2 + 1, True)  # as above, in backward
    TooMuch(monkeypatch, 8 + 2 + 4 + 1, True)  # and in the second run of its last layer
    TooMuch(monkeypatch, 8 + 2 + 4 + 3 + 1, True)  # and there again with inputs in host memory
    held: list[dict[str, Any]] = []
    model = runs.model("llama")
    model.get_base_model()._fastlm_checkpointing = "fastlm"

    class Hold(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            held.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path, max_steps=4, **options), callbacks=[Hold()])
    with pytest.raises(torch.OutOfMemoryError, match="in backward"):
        trainer.train()
    left = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(held) == 2 and same([left], held[1:])


@pytest.mark.parametrize("place", ["on_pre_optimizer_step", "on_prediction_step"])
def test_failures_outside_a_step_pass(tmp_path, free, place):
    """In evaluation, or the optimiser: keeping less would not help."""
    free(8 * GIB)

    class Fail(TrainerCallback):
        pass

    def fail(self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise torch.OutOfMemoryError("elsewhere")

    setattr(Fail, place, fail)
    model = runs.model("llama")
    model.get_base_model()._fastlm_checkpointing = "fastlm"
    config = runs.config(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1)
    data = Dataset.from_list(runs.rows())
    trainer = runs.trainer(model, data, config, eval_dataset=data, callbacks=[Fail()])
    with pytest.raises(torch.OutOfMemoryError, match="elsewhere"):
        trainer.train()
    assert state_of(trainer).activations.policy == "keep"


@pytest.mark.parametrize("own_loss", [True, False])
def test_a_step_done_again_draws_the_same_numbers_and_is_counted_once(tmp_path, free, monkeypatch, own_loss):
    def made() -> Any:
        model = add_lora(tiny_model("llama"), lora_dropout=0.5)
        fastlm.patch(model)
        return model

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.float().pow(2).mean()

    given = {"compute_loss_func": loss} if own_loss else {}
    results = []
    for policy in ("recompute", "fastlm"):
        (model := made()).get_base_model()._fastlm_checkpointing = policy
        if policy == "fastlm":
            free(8 * GIB)
            TooMuch(monkeypatch, 6 + 2 if own_loss else 4 + 2, True)  # second step; TRL asks the model for metrics too
        config = runs.config(tmp_path, per_device_train_batch_size=2, max_steps=3, seed=3)
        results.append(runs.train(model, runs.rows(), config, **given))
    (expected, gradients), (trainer, again) = results
    assert state_of(trainer).activations.policy == "recompute"
    assert same(again, gradients)
    assert runs.logged(trainer, "num_tokens") == runs.logged(expected, "num_tokens")
    assert runs.logged(trainer, "entropy") == runs.logged(expected, "entropy")


def test_what_is_compared_is_of_one_batch(tmp_path, free):
    """Micro-batches of other sizes follow before the choice: products are those of the batch whose rest was counted."""
    free(8 * GIB)
    trainer, _ = run(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=2)
    activations = state_of(trainer).activations
    for layer in decoder_layers(patched_core(trainer.model)):
        assert layer._fastlm.products == 2 * activations.tokens * 96 * 4 < layer._fastlm.kept


def test_a_batch_of_embeddings_that_does_not_fit_is_done_again(tmp_path, monkeypatch, capsys):
    model = runs.model("llama", num_hidden_layers=3)
    model.get_base_model()._fastlm_checkpointing = "fastlm"
    generator = torch.Generator().manual_seed(1)

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        labels = torch.tensor([example["labels"] for example in examples])
        embeddings = torch.randn(*labels.shape, 64, generator=generator)
        return {"inputs_embeds": embeddings, "attention_mask": torch.ones_like(labels), "labels": labels}

    TooMuch(monkeypatch, 4, False)
    config = runs.config(tmp_path, per_device_train_batch_size=2, remove_unused_columns=False)
    runs.trainer(model, runs.rows((100,) * 4), config, data_collator=collate).train()
    assert "keeping layer inputs was too much for a batch of 200 tokens" in capsys.readouterr().out
