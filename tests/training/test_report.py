"""Operations are those of the model's products, counted against torch's own counter; the report's numbers are right."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PhiConfig

import fastlm
from fastlm.models.adapters import adapter_ranks
from fastlm.models.checkpointing import recompute
from fastlm.models.patch import patched_core
from fastlm.models.twin import twin_of
from fastlm.training import report
from fastlm.training.costs import OPTIMISERS, step_costs
from fastlm.training.profile import StepProfiler
from fastlm.training.report import TrainingReport, attended_pairs, count_operations
from fastlm.training.room import optimiser_as_asked

from ..tiny import add_lora, tiny_model
from . import runs

FACTS = {"valid_tokens_per_second", "padding_avoided", "tflops_per_second", "tflops_per_second_spent"}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attended_pairs_are_those_of_the_mask(window: int | None) -> None:
    lengths = (1, 3, 7, 20)
    total = 0
    for length in lengths:
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        total += int(((j <= i) & (i - j < (window or length))).sum())
    assert attended_pairs(lengths, window) == total


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_useful_operations_are_those_that_torch_counts(family: str, lora: bool) -> None:
    """The stock model on one sample, in eager attention, which multiplies all pairs, the masked ones too."""
    model = tiny_model(family, attention="eager")
    model = add_lora(model, r=8) if lora else model
    tokens = 24
    ids = torch.randint(4, 260, (1, tokens))
    if lora:
        model.enable_input_require_grads()  # else the first layer's input needs no gradient
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    fastlm.patch(model)
    operations = count_operations(patched_core(model))
    assert operations is not None
    pairs = Counter({window: tokens**2 for window in {one.window for one in operations.layers}})
    with FlopCounterMode(display=False) as angles:  # positions x frequencies, a product in some versions
        patched_core(model).base_model.rotary_emb(torch.zeros(1), torch.arange(tokens)[None])
    expected = counter.get_total_flops() - angles.get_total_flops()
    assert operations.useful(tokens, tokens, pairs) == expected
    fewer = operations.useful(tokens, tokens - 10, pairs)  # the head is needed for labelled positions only
    assert expected - fewer == 10 * 2 * (2 if lora else 3) * 64 * 300


def test_recomputed_layers_are_spent_but_not_useful() -> None:
    core = patched_core(runs.model(num_hidden_layers=3))
    operations = count_operations(core)
    assert operations is not None
    one, pairs = operations.layers[0], Counter({None: 50})
    assert (one.width, one.window) == (64, None)
    qkvo, mlp, rank = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 96, 4
    adapters = rank * (2 * 128 + 2 * 96 + 3 * 160)
    assert one.forward == qkvo + mlp + adapters and one.backward == one.forward + adapters
    assert one.again == one.forward - 64 * 96 - rank * 64  # down, and its B, are not run again
    kept = operations.repeated(10, pairs, ["keep"] * 3)
    assert kept == 3 * 2 * 64 * 50  # attention's scores
    recomputed = operations.repeated(10, pairs, ["recompute", "keep", "keep"])
    assert recomputed - kept == 2 * (10 * one.again + 2 * 64 * 50)
    assert operations.repeated(10, pairs, ["offload", "keep", "keep"]) == recomputed
    gate_and_up = 2 * (64 * 96 + rank * 96)  # what their A made is kept
    assert operations.repeated(10, pairs, ["keep", "lean", "keep"]) - kept == 2 * 10 * gate_and_up


def test_windows_are_each_layers_own() -> None:
    operations = count_operations(patched_core(runs.model("gemma3_text")))
    assert operations is not None and [one.window for one in operations.layers] == [6, None]


def test_weights_outside_linear_layers_are_not_guessed() -> None:
    model = runs.model()
    core = patched_core(model)
    core.model.layers[1].mlp.experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    assert count_operations(core) is None


def test_layers_built_otherwise_are_not_guessed(tmp_path: Any) -> None:
    facts = PhiConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(facts)
    fastlm.patch(model)
    metrics = runs.trainer(model, runs.rows(), runs.config(tmp_path, max_steps=2)).train().metrics
    assert count_operations(patched_core(model)) is None and "tflops_per_second" not in metrics


def test_policies_are_told_apart() -> None:
    core = patched_core(runs.model(num_hidden_layers=3))
    assert report._policies(core) == ["keep"] * 3
    core.model.layers[1].mlp._fastlm.products_kept = False
    assert report._policies(core) == ["keep", "lean", "keep"]
    core.model.layers[1].mlp._fastlm.products_kept = True
    enable = getattr(core, "activation_checkpointing_enable", core.gradient_checkpointing_enable)
    for offload, policy in ((False, "recompute"), (True, "offload")):
        enable(offload=offload)
        core.model.layers[1].gradient_checkpointing = False
        assert report._policies(core) == [policy, "keep", policy]
    enable()
    core.train()(input_ids=torch.arange(4, 9)[None])  # ours takes transformers' place
    assert core.model.layers[0]._gradient_checkpointing_func.func is recompute
    assert report._policies(core) == ["recompute"] * 3


def test_peaks_by_name() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "Tesla T4", "NVIDIA B200")
    assert [report._peak_tflops(name) for name in names] == [989, 989, 312, 121, 65, 2250]
    assert report._peak_tflops("NVIDIA L40S") is None is report._peak_tflops("NVIDIA GeForce RTX 4090")


class Clock:
    """Every reading is a second later; evaluation and checkpoints take a thousand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


class Seen(runs.TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.clock.time += 1000

    on_save = on_evaluate


def watched(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[Any, Seen]:
    clock = Clock()
    monkeypatch.setattr(report, "perf_counter", clock)
    config = {"max_steps": 4, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", **given}
    seen = Seen(clock)
    trainer = runs.trainer(
        runs.model(), runs.rows(), runs.config(tmp_path, **config), callbacks=[seen], eval_dataset=runs_data()
    )
    return trainer, seen


def runs_data() -> Any:
    return runs.Dataset.from_list(runs.rows((4, 5)))


EVALUATES: dict[str, Any] = dict(eval_strategy="steps", eval_steps=1)
SAVES: dict[str, Any] = dict(save_strategy="steps", save_steps=1)


@pytest.mark.parametrize("options", [{}, EVALUATES, SAVES, EVALUATES | SAVES])
def test_what_is_reported(tmp_path: Any, monkeypatch: Any, capsys: Any, options: dict[str, Any]) -> None:
    trainer, seen = watched(tmp_path, monkeypatch, gradient_checkpointing=False, **options)
    result = trainer.train()
    facts, lengths = seen.logs[-1], [runs.LENGTHS[i : i + 2] for i in (2, 4, 6)]  # the first step is not counted
    assert facts.keys() > FACTS and facts["layers_keep"] == 2 and "mfu" not in facts
    tokens, padded = sum(map(sum, lengths)), sum(2 * max(pair) for pair in lengths)
    assert facts["valid_tokens_per_second"] == tokens / 3
    assert facts["padding_avoided"] == 1 - tokens / padded
    operations = count_operations(patched_core(trainer.model))
    pairs = Counter({None: attended_pairs(runs.LENGTHS[2:])})
    useful = operations.useful(tokens, tokens - 6, pairs)
    assert facts["tflops_per_second"] == useful / 3 / 1e12
    assert facts["tflops_per_second_spent"] == (useful + operations.repeated(0, pairs, ["keep"] * 2)) / 3 / 1e12
    assert trainer.state.log_history[-1].items() >= {name: facts[name] for name in FACTS}.items()
    assert result.metrics.items() >= {name: facts[name] for name in FACTS}.items()
    assert not any(FACTS & entry.keys() for entry in seen.logs[:-1])
    printed = capsys.readouterr().out
    assert f"fastlm: 3 steps counted: {tokens / 3:,.0f} valid tokens/s, {1 - tokens / padded:.0%} padding" in printed
    assert "fastlm: activations: keep x 2" in printed


def test_accumulated_recomputed_and_trained_again(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    given = dict(gradient_accumulation_steps=2, max_steps=2, gradient_checkpointing=True)
    trainer, seen = watched(tmp_path, monkeypatch, **given)
    for _ in range(2):
        trainer.train()
        facts = seen.logs[-1]
        assert facts["layers_recompute"] == 2 and "layers_keep" not in facts
        assert facts["valid_tokens_per_second"] == sum(runs.LENGTHS[4:])  # one step, one second, two micro-batches
        assert facts["tflops_per_second_spent"] > 1.2 * facts["tflops_per_second"]
    assert "activations: recompute x 2" in capsys.readouterr().out


def test_one_step_is_counted(tmp_path: Any, monkeypatch: Any) -> None:
    trainer, seen = watched(tmp_path, monkeypatch, max_steps=1)
    trainer.train()
    assert seen.logs[-1]["valid_tokens_per_second"] == sum(runs.LENGTHS[:2])


def test_it_is_there_once_and_can_be_removed(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    trainer, seen = watched(tmp_path, monkeypatch, max_steps=2)
    assert sum(isinstance(one, TrainingReport) for one in trainer.callback_handler.callbacks) == 1
    trainer.remove_callback(TrainingReport)
    trainer.train()
    assert not FACTS & seen.logs[-1].keys() and "steps counted" not in capsys.readouterr().out


def test_padded_batches_are_not_guessed(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    trainer, seen = watched(tmp_path, monkeypatch, max_steps=2, padding_free=False)
    trainer.train()
    assert not FACTS & seen.logs[-1].keys() and "steps counted" not in capsys.readouterr().out


def profiled(tmp_path: Any, monkeypatch: Any, **given: Any) -> tuple[Any, Seen]:
    """As watched, with a profiler whose export takes a thousand seconds, and whose steps take ten."""
    trainer, seen = watched(tmp_path, monkeypatch, **given)

    class Slow(StepProfiler):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.clock.time += 10 * self.slows_next

        def _keep(self, profiler: Any) -> None:
            super()._keep(profiler)
            seen.clock.time += 1000

    trainer.add_callback(Slow(tmp_path / "trace"))
    return trainer, seen


@pytest.mark.parametrize("options", [{}, EVALUATES | SAVES])
def test_profiled_steps_are_not_counted(tmp_path: Any, monkeypatch: Any, options: dict[str, Any]) -> None:
    """Of ten, the fourth warms up, three are profiled; the first compiles."""
    trainer, seen = profiled(tmp_path, monkeypatch, max_steps=10, per_device_train_batch_size=1, **options)
    trainer.train()
    lengths = [runs.LENGTHS[(step - 1) % 8] for step in (2, 3, 8, 9, 10)]
    assert seen.logs[-1]["valid_tokens_per_second"] == sum(lengths) / 5
    assert (tmp_path / "trace" / "trace.json").exists()


def test_a_run_that_is_profiled_throughout_tells_no_speed(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    trainer, seen = profiled(tmp_path, monkeypatch, max_steps=3)
    trainer.train()
    assert not FACTS & seen.logs[-1].keys() and "steps counted" not in capsys.readouterr().out


def counts_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "counted", lambda trainer, devices: True)


def full_model() -> Any:
    """Which trains all weights, as the loader leaves it."""
    model = runs.model(lora=False)
    patched_core(model)._fastlm_full_finetuning = True
    return model


@pytest.mark.parametrize("optim, full", [*((name, False) for name in OPTIMISERS), ("adamw_8bit", True)])
def test_the_peak_is_what_costs_count(tmp_path: Any, monkeypatch: Any, optim: str, full: bool) -> None:
    counts_on_a_cpu(monkeypatch)
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)  # the embedding's settings stay there
    model = full_model() if full else runs.model()
    core = patched_core(model)
    args = runs.config(tmp_path, max_steps=4, per_device_train_batch_size=2, optim=optim,
                       gradient_accumulation_steps=2, gradient_checkpointing=False, bf16=False)  # fmt: skip

    class Lean(runs.TrainerCallback):
        """From the third step on, which has the largest micro-batch, but not the largest of bytes."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for layer in core.model.layers:
                layer.mlp._fastlm.products_kept = state.global_step < 2

    trainer = runs.trainer(model, runs.rows(), args, callbacks=[Lean()])
    lengths = iter([(5, 12), (3, 9), (60, 7), (588, 2), (600, 4), (1, 2), (5, 5), (5, 5)])
    trainer._get_train_sampler = lambda *given: None
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(runs.rows(next(lengths, (2, 2))))
    metrics = trainer.train().metrics
    costs = step_costs(
        twin_of(core.config, core.dtype), adapter_ranks(core), full=full, optimiser=optim, accumulates=True
    )
    kept, lean = (sum(costs.worst_moment(*met).values()) for met in (("keep", 590), ("lean", 604)))
    assert metrics["predicted_peak_gib"] == kept / 2**30 and kept > lean


@pytest.mark.parametrize("case", [
    "a CPU", "optimiser", "the user's optimiser", "loss", "stock layer", "graphs", "dropout", "more trained", "padded",
    "padded and profiled",
])  # fmt: skip
def test_what_is_not_counted_is_not_guessed(tmp_path: Any, monkeypatch: Any, case: str) -> None:
    if case != "a CPU":
        counts_on_a_cpu(monkeypatch)
    made = tiny_model()
    kwargs = {"dropout": {"lora_dropout": 0.1}, "more trained": {"modules_to_save": ["lm_head"]}}.get(case, {})
    model = add_lora(made, **kwargs)
    fastlm.patch(model)
    given: dict[str, Any] = {"the user's optimiser": {"optimizers": (torch.optim.SGD(model.parameters()), None)}}.get(
        case, {}
    )
    if case == "loss":
        given["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()
    config = {"optimiser": {"optim": "adafactor"}, "padded": {"padding_free": False}}.get(case.split(" and ")[0], {})
    trainer = runs.trainer(model, runs.rows(), runs.config(tmp_path, max_steps=2, **config), **given)
    if case == "padded and profiled":
        trainer.add_callback(StepProfiler(tmp_path))
    if case == "stock layer":
        patched_core(model)._fastlm_model.report.stock["model.layers.1.mlp"] = "a test"
    if case == "graphs":
        monkeypatch.setattr(report, "state_of", lambda trainer: SimpleNamespace(own_head=True, graphs=object()))
    metrics = trainer.train().metrics
    assert "train_runtime" in metrics and "predicted_peak_gib" not in metrics


def test_the_lines() -> None:
    facts = {"peak_memory_gib": 71.25, "layers_keep": 3, "layers_recompute": 5}
    assert report._lines(facts, 5) == ["peak memory 71.2 GiB; activations: keep x 3, recompute x 5"]
    facts = {"peak_memory_gib": 71.0, "predicted_peak_gib": 70.57, "layers_keep": 3}
    assert report._lines(facts, 5) == ["peak memory 71.0 GiB (counted 70.6); activations: keep x 3"]
    facts = {"valid_tokens_per_second": 1234.0, "padding_avoided": 0.25}
    assert report._lines(facts, 5, 2) == ["5 steps counted: 1,234 valid tokens/s a GPU, 25% padding avoided"]
    rates = {"tflops_per_second": 601.23, "tflops_per_second_spent": 640.0, "mfu": 0.608, "floor_share": 0.911}
    line = "601.2 useful TFLOP/s, 640 with what is computed twice; MFU 60.8%; 0.91 of the floor"
    assert report._lines(rates, 5) == [line]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Any) -> None:
    model = tiny_model(dtype=torch.bfloat16, hidden_size=128, head_dim=32).cuda()
    fastlm.patch(model)
    args = runs.config(tmp_path, max_steps=6, per_device_train_batch_size=2, bf16=True)
    trainer = runs.trainer(add_lora(model), runs.rows() * 2, args)
    facts = trainer.train().metrics
    assert facts["valid_tokens_per_second"] > 0 and 0 < facts["peak_memory_gib"] < 4
    assert 0 < facts["floor_share"] < 1
    peak = report._peak_tflops(torch.cuda.get_device_name())
    assert facts.get("mfu") == (None if peak is None else pytest.approx(facts["tflops_per_second"] / peak))
    before = torch.cuda.get_rng_state()
    bare = report._bare_tflops(patched_core(trainer.model), 512, torch.bfloat16)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert bare is not None and bare > facts["tflops_per_second"]


def test_an_optimiser_that_is_named_but_not_installed(tmp_path: Any) -> None:
    """Nobody needs it beside one of the user's own."""
    model = runs.model()
    own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    args = runs.config(tmp_path, optim="apollo_adamw", optim_target_modules=["q_proj"])
    trainer = runs.trainer(model, runs.rows(), args, optimizers=(own, None))
    assert not optimiser_as_asked(trainer)
    assert "train_runtime" in trainer.train().metrics


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"])
def test_the_peak_on_a_gpu(tmp_path: Any, capsys: Any, optim: str) -> None:
    """Of a model that is large enough for what is constant to be little."""
    size = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, max_position_embeddings=8192)
    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    model = add_lora(tiny_model(dtype=torch.bfloat16, **size, **heads), dtype=torch.float32, r=64).cuda()
    fastlm.patch(model)
    patched_core(model)._fastlm_cuda_graphs = False
    args = runs.config(tmp_path, max_steps=4, bf16=True, optim=optim, max_length=None)
    facts = runs.trainer(model, runs.rows((6000, 5000, 7000, 8000)), args).train().metrics
    assert facts["predicted_peak_gib"] == pytest.approx(facts["peak_memory_gib"], rel=0.1)
    assert f"(counted {facts['predicted_peak_gib']:.1f})" in capsys.readouterr().out
