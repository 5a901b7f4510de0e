"""bitsandbytes' 8-bit steps without a stop per parameter, the same bits; the model's modules walked once."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim import AdamW, AdamW8bit, Lion8bit, PagedAdamW8bit, PagedAdamW32bit
from peft import LoraConfig
from torch import nn

import fastlm
from fastlm.training import optimizers
from fastlm.training.optimizers import shorten_walks, without_stops

from ..tiny import add_lora, tiny_model
from . import runs

# whole blocks of 256; a broken last block; below min_8bit_size, so with float32 states; transposed; large: paged
SHAPES = ((16, 64), (64, 16), (100, 256), (7, 64), (64,), (300,), (4096, 2), (8, 1024), (33, 128), (400, 256))
QUANTISED = "__bnb_optimizer_quant_state__"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    made[1] = made[1].t().contiguous().t()
    return [nn.Parameter(one) for one in made]


def optimiser(made: list[nn.Parameter], ours: bool, kind: Any = AdamW8bit) -> Any:
    groups = [{"params": made[:5], "weight_decay": 0.1}, {"params": made[5:], "weight_decay": 0.0, "lr": 3e-3}]
    result = kind(groups, lr=1e-2, min_8bit_size=512)
    if ours:
        without_stops(result)
        assert "step" in vars(result)
    return result


def give_gradients(both: tuple[list[nn.Parameter], ...], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, pair in enumerate(zip(*both, strict=True)):
        gradient = torch.randn(pair[0].shape, generator=generator)
        gradient *= 0 if (i, step) == (2, 0) else 1  # as A's in LoRA's first step: an absmax of 0
        for parameter in pair:
            left_out = i in (0, 3) and step == 4  # from then on these are a step behind the others
            parameter.grad = None if left_out else gradient.to(parameter.device, parameter.dtype)


def assert_same(first: Any, second: Any) -> None:
    """Parameters and states, bit for bit; names and shapes of the states."""
    expected, given = first.state_dict(), second.state_dict()
    assert expected["param_groups"] == given["param_groups"]
    count = sum(len(group["params"]) for group in first.param_groups)
    assert expected["state"].keys() == given["state"].keys() and len(given["state"]) == count
    for index, states in expected["state"].items():
        others = given["state"][index]
        assert states.keys() == others.keys() and states["step"] == others["step"]
        for name, tensor in states[QUANTISED].items():
            assert tensor.shape == others[QUANTISED][name].shape and torch.equal(tensor, others[QUANTISED][name]), name
    pairs = zip(*([p for g in o.param_groups for p in g["params"]] for o in (first, second)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def compare_runs(dtype: torch.dtype, device: str, kind: Any) -> Any:
    both = parameters(dtype, device), parameters(dtype, device)
    stock, ours = optimiser(both[0], False, kind), optimiser(both[1], True, kind)
    together = []
    for step in range(8):
        give_gradients(both, step)
        stock.step()
        ours.step()
        assert_same(stock, ours)
        together.append([[SHAPES[j + 5 * i] for i, j in places(ours, bucket)] for bucket in ours._fastlm_buckets])
        if step == 5:  # as resuming does, each from the other's states
            saved = [copy.deepcopy(one.state_dict()) for one in (ours, stock)]
            stock, ours = optimiser(both[0], False, kind), optimiser(both[1], True, kind)
            for one, state in zip((stock, ours), saved, strict=True):
                one.load_state_dict(state)
    return together


def places(ours: Any, bucket: Any) -> list[tuple[int, int]]:
    known = {p: (i, j) for i, group in enumerate(ours.param_groups) for j, p in enumerate(group["params"])}
    return [known[parameter] for parameter in bucket.parameters]


@pytest.mark.parametrize("kind", [AdamW8bit, Lion8bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_bitsandbytes_own_to_the_bit(dtype: torch.dtype, kind: Any) -> None:
    together = compare_runs(dtype, "cpu", kind)
    large = [(4096, 2), (8, 1024), (400, 256)]
    assert together[0] == together[5] == [[(16, 64), (100, 256)], [(7, 64), (64,)], large]
    assert together[7] == [large]  # after loading: what is in step


@pytest.fixture
def paging(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has bitsandbytes page states on a CPU too, and notes what it would ask of a GPU."""
    done: list[Any] = []
    functional, theirs = bitsandbytes.functional, bitsandbytes.optim.optimizer

    def buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros_like(p, dtype=dtype)
        made.is_paged = self.is_paged and p.numel() >= 1e5
        return made

    def noted(name: str, update: Any) -> Any:
        def run(optimizer_name: str, g: Any, p: torch.Tensor, state1: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            done.append(("update", p.numel()))
            return update(optimizer_name, g, p, state1, *args, **kwargs)

        return run

    monkeypatch.setattr(theirs.Optimizer8bit, "get_state_buffer", buffer)
    monkeypatch.setattr(functional, "prefetch_tensor", lambda tensor: done.append(("fetch", tensor.numel())))
    monkeypatch.setattr(theirs, "sync_gpu", lambda parameter: done.append("wait"))
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        monkeypatch.setattr(functional, name, noted(name, getattr(functional, name)))
    return done


@pytest.mark.parametrize("kind", [PagedAdamW8bit, PagedAdamW32bit])
def test_paged_steps_are_bitsandbytes_own_to_the_bit(kind: Any, paging: list[Any]) -> None:
    together = compare_runs(torch.bfloat16, "cpu", kind)
    assert not any((400, 256) in bucket for step in together for bucket in step) and len(together[0]) > 1


def test_paged_states_are_fetched_and_waited_for_once(paging: list[Any]) -> None:
    made = [nn.Parameter(torch.zeros(64, 64)) for _ in range(3)] + [
        nn.Parameter(torch.zeros(400, 256 + i)) for i in (0, 1)
    ]
    for ours in (False, True):
        one = PagedAdamW8bit(made)
        if ours:
            without_stops(one)
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        paging.clear()
        one.step()
        large = [("fetch", 102_400)] * 2 + [("update", 102_400)], [("fetch", 102_800)] * 2 + [("update", 102_800)]
        if ours:
            assert paging == [("update", 3 * 4096), *large[0], *large[1], "wait"]
            for parameter in made[3:]:
                parameter.grad = None
            paging.clear()
            one.step()
            assert paging == [("update", 3 * 4096)]  # nothing that the host could read
        else:
            small = [("update", 4096), "wait"] * 3
            assert paging == [*small, *large[0], "wait", *large[1], "wait", "wait"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW8bit, PagedAdamW32bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_bitsandbytes_own_to_the_bit_on_a_gpu(dtype: torch.dtype, kind: Any) -> None:
    compare_runs(dtype, "cuda", kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, waits", [(AdamW8bit, 0), (PagedAdamW8bit, 1)])
def test_a_step_makes_the_gpu_wait_for_nothing(kind: Any, waits: int) -> None:
    counts = []
    for ours in (False, True):
        made = parameters(torch.bfloat16, "cuda")
        one = optimiser(made, ours, kind)
        for step in range(3):
            give_gradients((made,), step)
            if step < 2:
                one.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            one.step()
        counts.append(sum(event.name == "cudaDeviceSynchronize" for event in profile.events()))
    assert counts[0] >= len(SHAPES) and counts[1] <= waits + 1  # the profiler's own, when it stops


@pytest.mark.gpu
def test_steps_on_a_stream_of_the_users() -> None:
    """bitsandbytes launches on the default stream."""
    both = parameters(torch.float32, "cuda"), parameters(torch.float32, "cuda")
    stock, ours = optimiser(both[0], False), optimiser(both[1], True)
    for step in range(4):
        give_gradients(both, step)
        stock.step()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            for parameter in both[1]:
                parameter.grad = parameter.grad * 1 if parameter.grad is not None else None
            ours.step()
            torch.cuda.current_stream().synchronize()
        assert_same(stock, ours)


def test_calls_are_few_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    calls: list[int] = []
    monkeypatch.setattr(bitsandbytes.optim.optimizer, "sync_gpu", waits.append)
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        monkeypatch.setattr(bitsandbytes.functional, name, lambda name, g, p, *a, **k: calls.append(p.numel()))
    for ours in (False, True):
        made = [nn.Parameter(torch.zeros(64, 64)) for _ in range(20)] + [nn.Parameter(torch.zeros(2048, 1024))]
        one = AdamW8bit(made)
        if ours:
            without_stops(one)
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        calls.clear()
        waits.clear()
        one.step()
        assert sum(calls) == sum(parameter.numel() for parameter in made)
        assert (len(calls), len(waits)) == ((2, 0) if ours else (21, 21))


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_BUCKET", 10_000)
    made = [nn.Parameter(torch.zeros(64, 64)) for _ in range(5)]
    one = AdamW8bit(made)
    without_stops(one)
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    one.step()
    assert [len(bucket.parameters) for bucket in one._fastlm_buckets] == [2, 2]


def test_gradients_that_lie_end_to_end_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    update = bitsandbytes.functional.optimizer_update_8bit_blockwise

    def noted(name: str, g: torch.Tensor, p: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(g.data_ptr())
        return update(name, g, p, *args, **kwargs)

    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", noted)
    both = [[nn.Parameter(drawn(7, 64, 128)) for _ in range(3)] for _ in range(2)]
    stock, ours = AdamW8bit(both[0], lr=0.1), AdamW8bit(both[1], lr=0.1)
    without_stops(ours)
    size = 64 * 128
    for step, begins in enumerate([(0, 1, 2), (0, 2, 1), (0, 1, 3), (1, 2, 3)]):
        flat = drawn(step, 4 * size)
        whole = flat.clone()
        for made in both:
            for parameter, begin in zip(made, begins, strict=True):
                parameter.grad = flat[begin * size : (begin + 1) * size].view(64, 128)
        stock.step()
        seen.clear()
        ours.step()
        assert_same(stock, ours)
        in_place = [(pointer - flat.data_ptr()) / flat.element_size() / size for pointer in seen]
        assert len(seen) == 1 and (in_place == [begins[0]]) == (step in (0, 3)) and torch.equal(flat, whole)


def test_neighbours_in_memory_of_another_storage_are_copied() -> None:
    memory = torch.arange(8, dtype=torch.float32)
    first = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4)
    second = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=16)
    assert second.data_ptr() == first.data_ptr() + 16
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    joined = optimizers._end_to_end([first, second])
    assert joined.data_ptr() != first.data_ptr() and torch.equal(joined, memory)


def move_memory(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][1]
    parameter.data = parameter.data.clone()


def transpose(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][1]
    parameter.data = parameter.data.t()


def retype(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][1]
    parameter.data = parameter.data.view(torch.float16)
    parameter.grad = parameter.grad.to(torch.float16)


def move_to_other_group(optimizer: Any) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def drop_group(optimizer: Any) -> None:
    del optimizer.param_groups[0]


def reverse_groups(optimizer: Any) -> None:
    optimizer.param_groups.reverse()


CHANGES = [move_memory, transpose, retype, move_to_other_group, drop_group, reverse_groups]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_are_updated_as_they_are_now(change: Any) -> None:
    dtype = torch.bfloat16 if change is retype else torch.float32
    both = [[nn.Parameter(drawn(7, 64, 64).to(dtype)) for _ in range(6)] for _ in range(2)]
    stock, ours = (AdamW8bit([{"params": one[:3], "lr": 0.1}, {"params": one[3:], "lr": 0.01}]) for one in both)
    without_stops(ours)
    for step in range(4):
        for made, optimizer in zip(both, (stock, ours), strict=True):
            for i, parameter in enumerate(made):
                parameter.grad = drawn(6 * step + i, 64, 64).to(parameter.dtype)
            if step == 2:
                change(optimizer)
            optimizer.step()
        for first, second in zip(*both, strict=True):
            assert torch.equal(first, second), step


def test_settings_of_one_parameter_are_kept() -> None:
    both = parameters(torch.float32), parameters(torch.float32)
    stock, ours = optimiser(both[0], False), optimiser(both[1], True)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    changed = [both[0][2], both[1][2]]
    manager.override_config(changed, key="optim_bits", value=32)
    try:
        for step in range(3):
            give_gradients(both, step)
            stock.step()
            ours.step()
            assert_same(stock, ours)
        assert ours.state[both[1][2]]["state1"].dtype == torch.float32
    finally:
        for parameter in changed:
            del manager.pid2config[id(parameter)]


def test_only_this_instance_and_only_bitsandbytes() -> None:
    made = parameters(torch.float32)
    optimiser(made, False)  # torch wraps the step of a class when its first instance is made
    before = AdamW8bit.step
    ours = optimiser(made, True)
    assert AdamW8bit.step is before and "step" not in vars(optimiser(made, False))
    other = torch.optim.AdamW(made)
    without_stops(other)
    assert "step" not in vars(other)

    class Mine(AdamW):
        pass

    mine = Mine(made)
    without_stops(mine)
    assert "step" not in vars(mine)
    seen = []
    ours.register_step_post_hook(lambda *args: seen.append("hook"))
    give_gradients((made,), 0)
    assert ours.step(lambda: 3.5) == 3.5 and seen == ["hook"]


# --- in a trainer


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_out_of_memory_in_a_step_says_what_takes_less(tmp_path: Any, monkeypatch: Any, optim: str) -> None:
    def too_much(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    model = runs.model()
    one = runs.trainer(model, runs.rows(), runs.config(tmp_path, optim=optim))
    where = bitsandbytes.optim.optimizer.Optimizer2State if optim == "adamw_8bit" else torch.optim.AdamW
    monkeypatch.setattr(where, "update_step" if optim == "adamw_8bit" else "_init_group", too_much)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        one.train()
    (note,) = caught.value.__notes__
    assert note.startswith("fastlm: the optimiser's step was too much") and "paged_adamw_8bit" in note


def test_out_of_memory_elsewhere_is_not_the_optimisers(tmp_path: Any, monkeypatch: Any) -> None:
    class Full(runs.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path), callbacks=[Full()]).train()
    assert not hasattr(caught.value, "__notes__")


def trained(tmp_path: Any, **given: Any) -> Any:
    model = add_lora(tiny_model(), r=64)  # 64 x 64: 8-bit states
    runs.fastlm.patch(model)
    config = dict(optim="adamw_8bit", max_steps=6, per_device_train_batch_size=4, max_grad_norm=1.0, logging_steps=1)
    resume = given.pop("resume", None)
    trainer = runs.trainer(model, runs.rows() * 4, runs.config(tmp_path, **config | given))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def logged(trainer: Any) -> list[dict[str, float]]:
    times = ("runtime", "per_second", "tflops")
    return [{n: v for n, v in one.items() if not any(t in n for t in times)} for one in trainer.state.log_history]


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_torch"])
def test_a_run_stays_the_same_to_the_bit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, optim: str) -> None:
    ours = trained(tmp_path / "ours", optim=optim)
    inner = ours.optimizer.optimizer
    assert (getattr(inner, "_fastlm_buckets", None) is not None) == (optim == "adamw_8bit")
    monkeypatch.setattr(optimizers, "without_stops", lambda optimizer: None)
    monkeypatch.setattr(optimizers, "shorten_walks", lambda model: None)
    stock = trained(tmp_path / "stock", optim=optim)
    assert logged(ours) == logged(stock) and len(runs.logged(ours, "grad_norm")) == 6
    expected = weights(stock)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(ours).items())


def test_resuming_is_exact(tmp_path: Any) -> None:
    given = dict(save_strategy="steps", save_steps=3)
    whole = trained(tmp_path / "run", **given)
    again = trained(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"), **given)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())
    assert [entry.get("loss") for entry in logged(again)] == [entry.get("loss") for entry in logged(whole)]


def test_the_model_has_its_own_methods_again(tmp_path: Any) -> None:
    during = []

    class Stop(Exception):
        pass

    class Watch(runs.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            during.append("parameters" in vars(model) and "train" in vars(model))
            if state.global_step == 2:
                raise Stop

    trainer = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, max_steps=3), callbacks=[Watch()])
    with pytest.raises(Stop):
        trainer.train()
    assert during == [True, True]
    assert not {"parameters", "train", "_fastlm_walk"} & vars(trainer.model).keys()


# --- the walks


def test_walks_answer_as_the_class_does() -> None:
    model = add_lora(tiny_model(tie_word_embeddings=True))
    kind = type(model)
    shorten_walks(model)

    def check() -> None:
        expected, given = list(kind.parameters(model)), list(model.parameters())
        assert len(given) == len(expected) and all(a is b for a, b in zip(given, expected, strict=True))

    check()
    assert list(model.parameters(recurse=False)) == []
    model.base_model.model.model.layers[0].mlp.extra = nn.Linear(3, 3)
    check()
    activation = model.base_model.model.model.layers[0].mlp.act_fn  # holds nothing yet
    activation.slope = nn.Parameter(torch.ones(1))
    check()
    activation.slope = None
    check()
    activation.inner = nn.Linear(3, 3)
    check()
    del activation.inner, activation.slope
    check()
    layer = model.base_model.model.model.norm
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # another object in its place
    check()
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=2, target_modules=["q_proj"]))  # as many modules as before or others
    check()
    layers = model.base_model.model.model.layers
    layers[0].mlp, layers[1].mlp = copy.deepcopy(layers[1].mlp), copy.deepcopy(layers[0].mlp)
    check()
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    layer.eval()  # left so by the user: Trainer's step sets it back
    assert model.train() is model and layer.training
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in kind.parameters(model))


def test_a_copy_walks_its_own_modules() -> None:
    model = add_lora(tiny_model())
    shorten_walks(model)
    other = copy.deepcopy(model)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert len(list(other.parameters())) == len(list(model.parameters()))
    other.eval()
    assert all(module.training for module in model.train().modules()) and not other.training


def test_modules_that_do_more_in_train_are_asked() -> None:
    model = add_lora(tiny_model(), use_dora=True)  # DoRA empties a cache there
    shorten_walks(model)
    assert "parameters" in vars(model) and "train" not in vars(model)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [True, False])
def test_embedding_and_head_have_a_rate_of_their_own(lora: bool, tied: bool, optim: str, tmp_path: Any) -> None:
    made = tiny_model(tie_word_embeddings=tied)
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    model = add_lora(made, modules_to_save=saved, ensure_weight_tying=tied) if lora else made
    fastlm.patch(model)
    args = runs.config(tmp_path, learning_rate=1e-3, embedding_learning_rate=1e-4, optim=optim, max_steps=2,
                       lr_scheduler_type="constant", weight_decay=0.1)  # fmt: skip
    one = runs.trainer(model, runs.rows(), args)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    one.create_optimizer()
    one.train()
    rates = {p: group["lr"] for group in one.optimizer.param_groups for p in group["params"]}
    decays = {p: group["weight_decay"] for group in one.optimizer.param_groups for p in group["params"]}
    tables = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            table = "embed_tokens" in name or "lm_head" in name
            tables += table
            assert rates[parameter] == (1e-4 if table else 1e-3), name
            assert decays[parameter] == (0.0 if "norm" in name else 0.1), name
            moved = (parameter - before[name]).abs().max().item()
            if table:  # Adam moves by about the rate, twice; the other rate would move it by 2e-3
                assert 0 < moved <= 4e-4, name
    assert tables == (1 if tied else 2) and len(rates) == len(before)
    if optim == "adamw_torch":
        one.train()  # a second time, with the optimizer that is there


def test_an_embedding_rate_that_cannot_be_meant(tmp_path: Any) -> None:
    for wrong in (-1.0, "1e-5", True, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="embedding_learning_rate is"):
            runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, embedding_learning_rate=wrong))
    one = runs.trainer(runs.model(), runs.rows(), runs.config(tmp_path, embedding_learning_rate=1e-5))
    with pytest.raises(ValueError, match="trains neither embedding nor head"):
        one.train()
    with pytest.raises(TypeError, match="unexpected keyword argument 'embedding_learning_rate'"):
        runs.trainer(runs.model(patched=False), runs.rows(), runs.config(tmp_path, embedding_learning_rate=1e-5))
    theirs = runs.model()
    chosen = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.1)
    args = runs.config(tmp_path, embedding_learning_rate=1e-5)
    with pytest.raises(ValueError, match="set the rate in yours"):
        runs.trainer(theirs, runs.rows(), args, optimizers=(chosen, None)).train()
