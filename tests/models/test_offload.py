"""fastlm/models/offload.py: layer inputs wait in host memory, no gradient changes by a bit, and slots come back."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fastlm
from fastlm.models import checkpointing, layers, offload
from fastlm.models.offload import Offload
from fastlm.packing.collators import PaddingFreeCollator
from tests.models.batches import LAYOUTS, loss_and_gradients, samples, target_count
from tests.tiny import add_lora, enable_checkpointing, tiny_model
from tests.training.test_gpu import WAITS

ROWS = samples()
COUNT = target_count(ROWS)
SLOT = 2**21  # what a tiny layer's input is rounded up to


def made(family: str = "llama", lora: bool = True, **facts: Any) -> Any:
    """A patched model whose layers are recomputed from inputs in host memory."""
    model: Any = tiny_model(family, **facts)
    model._fastlm_checkpointing = "offload"
    model = add_lora(model) if lora else model
    fastlm.patch(model)
    enable_checkpointing(model)
    return model


def core_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def offload_of(model: Any) -> Offload:
    return core_of(model)._fastlm_model.offload


def slab_of(model: Any) -> Any:
    (slab,) = offload_of(model)._slabs.values()
    return slab


def all_free(model: Any) -> bool:
    gc.collect()
    slab = slab_of(model)
    return len(slab.free) == slab.slots and len({slot.data_ptr() for slot in slab.free}) == slab.slots


def loss_of(model: Any, rows: list[Any] = ROWS) -> Tensor:
    model.train()
    return model(**LAYOUTS["flattened"](rows)[0], use_cache=False).loss


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Taken from the model, which has none then."""
    taken = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every layer left behind, in order: weak references to the tensors."""
    seen: list[Any] = []
    original = offload._Slab.hold

    def hold(self: Any, tensor: Tensor) -> Any:
        seen.append(StorageWeakRef(tensor.untyped_storage()))
        return original(self, tensor)

    monkeypatch.setattr(offload._Slab, "hold", hold)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
@pytest.mark.parametrize(("lora", "layout"), [(True, "flattened"), (False, "padded")])
def test_gradients_are_the_bits_of_recompute_and_of_keeping_all(family: str, lora: bool, layout: str) -> None:
    model = made(family, lora, num_hidden_layers=3)
    results = []
    for policy in ("offload", "recompute", "keep"):
        offload_of(model).on = policy == "offload"
        for layer in core_of(model).model.layers:
            layer.gradient_checkpointing = policy != "keep"
        results.append(loss_and_gradients(model, LAYOUTS[layout](ROWS), COUNT))
    assert offload_of(model).nbytes() == (SLOT if lora else 2 * SLOT) and all_free(model)
    assert all(loss == results[0][0] and same(gradients, results[0][1]) for loss, gradients in results)


@pytest.mark.parametrize("lora", [True, False])
def test_every_input_but_the_last_leaves_the_device(lora: bool, held: list[Any]) -> None:
    """With frozen embeddings the first one is a leaf, which autograd holds whoever else does."""
    model = made(lora=lora, num_hidden_layers=5)
    loss = loss_of(model)
    assert [reference.expired() for reference in held] == [not lora, True, True, True, False]
    slots = 3 if lora else 4
    assert offload_of(model).nbytes() == slots * SLOT and slab_of(model).free == []
    loss.backward()
    assert held[4].expired() and all_free(model)  # while the loss is still there
    assert len({slot.untyped_storage().data_ptr() for slot in slab_of(model).free}) == 1  # one allocation
    loss_of(model).backward()
    assert offload_of(model).nbytes() == slots * SLOT


def test_one_layer_needs_no_host_memory() -> None:
    model = made(num_hidden_layers=1)
    loss_of(model).backward()
    assert offload_of(model).nbytes() == 0


def test_the_input_of_the_layer_below_is_on_its_way_while_a_layer_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(num_hidden_layers=4)
    events: list[str] = []
    fetched: list[StorageWeakRef] = []
    fetch, add = offload._Held.fetch, layers.add_rms_norm

    def noted_fetch(self: Any) -> None:
        before = self.fetched
        fetch(self)
        if self.fetched is not before:
            events.append("fetch")
            fetched.append(StorageWeakRef(self.fetched.untyped_storage()))

    def noted_add(*args: Any, **kwargs: Any) -> Any:
        events.append(f"run {sum(not reference.expired() for reference in fetched)}")
        return add(*args, **kwargs)

    loss = loss_of(model)
    monkeypatch.setattr(offload._Held, "fetch", noted_fetch)
    monkeypatch.setattr(layers, "add_rms_norm", noted_add)
    loss.backward(retain_graph=True)
    # the last layer has its own input still; then two are there: this layer's, and the next one's
    assert events == ["fetch", "run 1", "fetch", "run 2", "run 1", "run 0"]
    assert all(reference.expired() for reference in fetched)


def test_copies_that_come_as_late_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that copies, by address, only when somebody waits: what is freed or used too early shows."""
    queue: list[tuple[int, int, int]] = []
    done = [0]

    class Compute:
        def wait_event(self, event: int) -> None:
            while done[0] < event:
                ctypes.memmove(*queue[done[0]])
                done[0] += 1

    def copy_later(self: Any, to: Tensor, source: Tensor, after: Any) -> int:
        queue.append((to.data_ptr(), source.data_ptr(), source.nbytes))
        to.fill_(float("nan"))
        return len(queue)

    model = made(num_hidden_layers=6)
    loss_of(model).backward()
    expected = gradients_of(model)
    monkeypatch.setattr(offload._Slab, "copy", copy_later)
    monkeypatch.setattr(offload._Slab, "now", lambda self: (Compute(), 0))
    monkeypatch.setattr(offload._Slab, "wait", lambda self, event: Compute().wait_event(event))
    for _ in range(3):
        loss_of(model).backward()
        assert same(gradients_of(model), expected)
        loss = loss_of(model)
        with pytest.raises(RuntimeError, match="stop"), monkeypatch.context() as failing:
            failing.setattr(layers, "add_rms_norm", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("stop")))
            loss.backward()
        del loss
        model.zero_grad()
    assert done[0] == len(queue) and all_free(model)  # what nobody asked for was waited for too


def test_a_second_backward_is_refused_by_torch_and_a_retained_graph_gives_the_same_again() -> None:
    model = made(num_hidden_layers=3)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    first = gradients_of(model)
    other = loss_of(model)  # in between; its inputs have slots of their own
    loss.backward()
    assert same(gradients_of(model), first) and slab_of(model).slots == 1 + 2  # the first forward's last input left too
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    model.zero_grad()
    other.backward()
    assert same(gradients_of(model), first) and all_free(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("lengths", [((9, 4), (9, 4)), ((3, 2), (30, 7)), ((30, 7), (3, 2))])
def test_two_forwards_before_a_backward(lengths: Any, order: tuple[int, int]) -> None:
    model = made(num_hidden_layers=4)
    batches = [samples(length, seed) for seed, length in enumerate(lengths)]
    offload_of(model).on = False
    losses = [loss_of(model, rows) for rows in batches]
    for index in order:
        losses[index].backward()
    expected = gradients_of(model)
    offload_of(model).on = True
    for _ in range(3):
        losses = [loss_of(model, rows) for rows in batches]
        for index in order:
            losses[index].backward()
        assert same(gradients_of(model), expected)
        sum(loss_of(model, rows) for rows in batches).backward()
        model.zero_grad()
    assert slab_of(model).slots == 5 and all_free(model)  # 2, and 3: of two forwards' inputs one stays


def test_a_larger_batch_replaces_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_ROUND", 256)
    model = made(num_hidden_layers=3)
    for lengths, tokens in (((9, 4), 13), ((3, 2), 13), ((20, 20), 40), ((9, 4), 40)):
        loss_of(model, samples(lengths)).backward()
        assert offload_of(model).nbytes() == 1 * tokens * 64 * 4 and all_free(model)  # hidden_size, fp32
    small = loss_of(model, samples((9, 4)))
    large = loss_of(model, samples((30, 30)))  # the first one's are in use, and are dropped afterwards
    (small + large).backward()
    assert all_free(model)
    assert {slot.nbytes for slot in slab_of(model).free} == {60 * 64 * 4}
    (loss_of(model) + loss_of(model)).backward()
    (loss_of(model, samples((70,))) + loss_of(model)).backward()
    assert all_free(model) and slab_of(model).slots == 3
    assert len({slot.untyped_storage().data_ptr() for slot in slab_of(model).free}) == 1  # one allocation again


def test_nothing_is_taken_without_gradients(held: list[Any]) -> None:
    model = made()
    with torch.no_grad():
        loss_of(model)
    model.eval()
    model(**LAYOUTS["flattened"](ROWS)[0])
    assert held == []
    loss_of(model)  # dropped without a backward
    assert len(held) == 2 and slab_of(model).slots == 0


@pytest.mark.parametrize("call", [2, 6], ids=["forward", "backward"])
def test_an_error_on_the_way_leaves_the_slots_free(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    model = made(num_hidden_layers=4)
    loss_of(model).backward()
    expected = gradients_of(model)
    add, calls = layers.add_rms_norm, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("a test")
        return add(*args, **kwargs)

    monkeypatch.setattr(layers, "add_rms_norm", fails)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model).backward()
    assert all_free(model) and offload_of(model).nbytes() == 2 * SLOT
    model.zero_grad()
    loss_of(model).backward()
    assert same(gradients_of(model), expected)


def test_an_error_between_fetching_and_using_leaves_the_graph_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(num_hidden_layers=3)
    loss_of(model).backward()
    expected = gradients_of(model)
    loss = loss_of(model)
    with pytest.raises(MemoryError), monkeypatch.context() as failing:
        failing.setattr(torch, "empty", lambda *a, **k: (_ for _ in ()).throw(MemoryError()))
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert same(gradients_of(model), expected) and all_free(model)


def test_a_backward_inside_a_backward() -> None:
    model = made(num_hidden_layers=3)
    loss_of(model).backward()
    expected = gradients_of(model)
    inner: list[dict[str, Tensor]] = []

    class Another(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            named = {n: p for n, p in model.named_parameters() if p.requires_grad}
            with torch.enable_grad():
                found = torch.autograd.grad(loss_of(model), list(named.values()), allow_unused=True)
            inner.append({n: g for n, g in zip(named, found, strict=True) if g is not None})
            return grads[0]

    Another.apply(loss_of(model)).backward()
    assert same(gradients_of(model), expected) and same(inner[0], expected) and all_free(model)


def test_a_tensor_with_gaps_stays_where_it_is(held: list[Any]) -> None:
    slab = offload._Slab(torch.device("cpu"))
    gaps = torch.randn(1, 6, 8)[..., ::2]
    assert offload._get(slab.hold(gaps)) is gaps and slab.slots == 0


def test_a_tensor_of_another_class_stays_what_it_is() -> None:
    class Marked(Tensor):
        pass

    slab = offload._Slab(torch.device("cpu"))
    marked = torch.randn(1, 6, 8).as_subclass(Marked)
    assert offload._get(slab.hold(marked)) is marked and slab.newest is None


def test_dropout_and_autocast_are_those_of_the_first_run() -> None:
    model = add_lora(tiny_model("llama", num_hidden_layers=3), lora_dropout=0.5)
    fastlm.patch(model)
    enable_checkpointing(model)
    results = []
    for on in (False, True):
        offload_of(model).on = on
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        results.append(gradients_of(model))
    assert same(*results) and slab_of(model).slots == 1


def test_a_copy_has_memory_of_its_own_and_a_pickle_has_none() -> None:
    model = made(num_hidden_layers=3)
    loss_of(model).backward()
    expected = gradients_of(model)
    other = copy.deepcopy(model)
    assert offload_of(other).on and offload_of(other).nbytes() == 0
    loss_of(other).backward()
    assert same(gradients_of(other), expected) and offload_of(other).nbytes() == SLOT
    restored = pickle.loads(pickle.dumps(offload_of(model)))
    assert restored.on and restored.nbytes() == 0


def test_a_model_patched_again_offloads_still() -> None:
    model = made(num_hidden_layers=3)
    loss_of(model).backward()
    fastlm.patch(model)
    assert offload_of(model).nbytes() == SLOT  # the same memory
    fastlm.unpatch(model)
    fastlm.patch(model)
    assert offload_of(model).nbytes() == 0
    loss_of(model).backward()
    assert offload_of(model).nbytes() == SLOT and all_free(model)


def test_unpatching_puts_the_layers_functions_back_and_frees_the_memory() -> None:
    model = made(num_hidden_layers=3)
    stock = [layer._gradient_checkpointing_func for layer in core_of(model).model.layers]
    loss_of(model).backward()
    memory = weakref.ref(offload_of(model))
    fastlm.unpatch(model)
    gc.collect()
    assert [layer._gradient_checkpointing_func for layer in core_of(model).model.layers] == stock and memory() is None


def test_transformers_own_option_is_taken_over(held: list[Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    fastlm.patch(model)
    enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(every_n_layers=2, offload=True)
    theirs: Any = model.model.layers[0]._gradient_checkpointing_func
    loss_of(model).backward()
    assert len(held) == 2 and offload_of(model).nbytes() == SLOT  # of 2 layers that are recomputed
    ours: Any = model.model.layers[0]._gradient_checkpointing_func
    assert ours.func is checkpointing.recompute and ours.args[0] is theirs  # which unpatch falls back to
    enable()
    loss_of(model).backward()
    assert len(held) == 2


@pytest.mark.parametrize("full", [True, False])
def test_the_loader_sets_the_policy(full: bool, tmp_path: Any, held: list[Any]) -> None:
    from tests.training import runs

    base: Any = tiny_model("llama")
    base._fastlm_full_finetuning = full
    fastlm.patch(base)
    results = []
    for policy in ("offload", "recompute"):
        model = fastlm.FastLanguageModel.get_peft_model(copy.deepcopy(base), use_gradient_checkpointing=policy)
        assert offload_of(model).on == (policy == "offload")
        config = runs.config(tmp_path, max_steps=2, per_device_train_batch_size=2)
        results.append(runs.train(model, runs.rows(), config)[1])
    assert len(held) == 2 * 2 and all(same(a, b) for a, b in zip(*results, strict=True))


class FakeGPU:
    """Records what is asked of CUDA's runtime; ``refuses`` to pin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
        self.log: list[tuple[str, int]] = []
        self.device, self.cudaError = "cpu", type("cudaError", (), {"success": 0})
        self.refuses = refuses
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # CUDA's name
        self.log.append(("pin", size))
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unpin", ctypes.string_at(address, 1)[0]))  # it must still be there
        return 0

    def synchronize(self) -> None:
        self.log.append(("wait", 0))


def test_pages_are_pinned_as_they_are_and_unpinned_before_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGPU(monkeypatch, refuses=False)
    slots = list(offload._host_memory(3 * SLOT, gpu).split(SLOT))
    slots[1].fill_(7)
    last = slots.pop()
    last.fill_(5)
    slots.clear()
    assert gpu.log == [("pin", 3 * SLOT)] and last[0] == 5
    del last
    assert gpu.log[1:] == [("wait", 0), ("unpin", 0)]


def only_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot be pinned (a test)")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)


def test_where_nothing_can_be_pinned_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGPU(monkeypatch, refuses=True)
    only_pageable(monkeypatch)
    with pytest.warns(UserWarning, match=r"0.0 GiB of host memory cannot be pinned"):
        memory = offload._host_memory(SLOT, gpu)
    memory.fill_(1)
    assert memory.shape == (SLOT,) and gpu.log == [("pin", SLOT)]


# on a GPU


def on_gpu(layer_count: int, hidden: int, tokens: int) -> tuple[Any, dict[str, Any]]:
    model = made(
        dtype=torch.bfloat16, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layer_count,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64, max_position_embeddings=8192,
    ).cuda()  # fmt: skip
    batch: dict[str, Any] = dict(PaddingFreeCollator()(samples((tokens // 4,) * 4)))
    del batch["labels"]
    batch = {name: value.to("cuda") for name, value in batch.items()}
    fastlm.patch(model)  # attention's backend is the GPU's
    return model.train(), batch


def gpu_step(model: Any, batch: dict[str, Any]) -> None:
    core_of(model).model(**batch).last_hidden_state.float().pow(2).mean().backward()


def peak_of(model: Any, batch: dict[str, Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gpu_step(model, batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", ["registered", "torch's", "not at all"])
def test_gpu_g_offload_race(pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps while another stream is busy, each with the bits of recompute, however host memory was had."""
    pin = offload._Pages.pin

    def refuse(self: Any, address: int, stream: Any) -> bool:
        assert pin(self, address, stream)
        assert not pin(self, address, stream)  # twice: the driver refuses, and remembers an error
        torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned = None
        return False

    if pinned != "registered":
        monkeypatch.setattr(offload._Pages, "pin", refuse)
    if pinned == "not at all":
        only_pageable(monkeypatch)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would keep its atomics
    try:
        model, batch = on_gpu(8, 512, 4096)
        offload_of(model).on = False
        gpu_step(model, batch)
        expected = gradients_of(model)
        offload_of(model).on = True
        busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        for _ in range(20):
            with torch.cuda.stream(busy):
                noise = (noise @ noise).clamp(-1, 1)
                noise.cpu()
            gpu_step(model, batch)
            again = gradients_of(model)
            assert same(again, expected) and all(gradient.isfinite().all() for gradient in again.values())
        assert all_free(model)
        if pinned != "not at all":
            assert slab_of(model).free[0].is_pinned()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_gpu_memory_is_that_of_two_inputs_and_the_slab_is_as_large_as_the_rest() -> None:
    layer_count, hidden, tokens = 12, 1024, 4096
    model, batch = on_gpu(layer_count, hidden, tokens)
    one = tokens * hidden * 2
    peaks = {}
    for on in (False, True):
        offload_of(model).on = on
        for _ in range(2):
            model.zero_grad()
            peaks[on] = peak_of(model, batch)
    assert (layer_count - 4) * one <= peaks[False] - peaks[True] <= layer_count * one
    assert offload_of(model).nbytes() == (layer_count - 2) * one  # 8 MiB each; not the first one, nor the last
    assert slab_of(model).free[0].untyped_storage().nbytes() == (layer_count - 2) * one
    assert all_free(model)


@pytest.mark.gpu
def test_gpu_nothing_waits_for_the_copies() -> None:
    model, batch = on_gpu(8, 512, 4096)
    for _ in range(3):
        gpu_step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            gpu_step(model, batch)
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profile.events()]
    waits = [name for name in names if name in WAITS]
    assert waits.count("cudaDeviceSynchronize") <= 1  # the profiler's own, when it stops
    assert [name for name in waits if name != "cudaDeviceSynchronize"] == []
    assert sum("Memcpy DtoH" in name for name in names) >= 6 and sum("Memcpy HtoD" in name for name in names) >= 6
    assert not any("Pageable" in name for name in names if "Memcpy DtoH" in name)
