"""fastlm/models/graphs.py: losses and gradients are those without graphs, and whatever has changed runs without.

On a CPU a capture is stood in for by running the work again, in the same buffers; all else is as on a GPU.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from transformers import BitsAndBytesConfig

import fastlm
from fastlm.kernels import lora
from fastlm.models import capture, graphs
from fastlm.models import layers as layers_module
from fastlm.models.checkpointing import policy_of, set_policies
from fastlm.models.graphs import LayerGraphs, Size, largest_size, size_of
from fastlm.models.offload import Offload
from fastlm.packing.collators import PaddingFreeCollator
from tests.models.batches import LAYOUTS, alone, flattened, loss_and_gradients, samples, target_count
from tests.models.captures import run_again
from tests.tiny import FAMILIES, add_lora, enable_checkpointing, relative_error, tiny_model

ROWS = samples()
COUNT = target_count(ROWS)


@pytest.fixture(autouse=True)
def _runs_again(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.keywords:
        run_again(monkeypatch)


def core_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def bound(model: Any, limit: int = 512, said: list[str] | None = None) -> LayerGraphs:
    made = LayerGraphs(core_of(model).base_model, limit, print if said is None else said.append)
    assert made.obstacle is None
    made.bind(core_of(model).base_model)
    return made


def pair(family: str = "llama", **facts: Any) -> tuple[Any, Any, LayerGraphs]:
    stock = add_lora(tiny_model(family, **facts))
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    return stock, fast, bound(fast)


def assert_close(found: tuple[float, dict[str, Tensor]], truth: tuple[float, dict[str, Tensor]], to: float) -> None:
    assert abs(found[0] - truth[0]) <= to * abs(truth[0])
    assert found[1].keys() == truth[1].keys() and len(truth[1]) >= 10
    worst = max((relative_error(found[1][name], truth[1][name]), name) for name in truth[1])
    assert worst[0] <= to, worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused_head", [False, True], ids=["labels", "trl"])
def test_loss_and_every_gradient_of_all_layouts(family: str, fused_head: bool) -> None:
    stock, fast, made = pair(family)
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    extra = {"fused_lm_head": True} if fused_head else {}
    for seen in range(2):  # captured when a size comes a second time
        for layout in LAYOUTS.values():
            assert_close(loss_and_gradients(fast, layout(ROWS), COUNT, **extra), truth, 1e-5)
        assert made.replays == (3, 7)[seen], "four layouts of one size: all but the first run as graphs"


@pytest.mark.parametrize("policy", ["recompute", "offload", "mixed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_recomputed_layers_are_captured_too(policy: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit what they give without; inputs that would be in host memory stay where they are."""
    _, fast, made = pair("gemma2" if policy == "mixed" else "llama", num_hidden_layers=3)
    enable_checkpointing(fast)
    layers, offload = core_of(fast).base_model.layers, core_of(fast)._fastlm_model.offload
    offload.on = policy == "offload"
    if policy == "mixed":
        layers[-1].gradient_checkpointing = False
    rows = samples((30, 34))  # 64 tokens: no tail
    truth = loss_and_gradients(fast, flattened(rows), 60, autocast=autocast)
    held = offload.nbytes()
    assert made.replays == 0 and (held > 0) == (policy == "offload")
    seen: list[bool] = []
    split = lora._split

    def watched(projections: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.bfloat16 if autocast else torch.float32
        seen.extend(p.casts is not None and p.casts[0].dtype == dtype for p in projections)
        return split(projections, *args, **kwargs)

    monkeypatch.setattr(lora, "_split", watched)
    monkeypatch.setattr(Offload, "inputs", lambda *args: pytest.fail("an input is copied within what is captured"))
    for _ in range(2):
        found = loss_and_gradients(fast, flattened(rows), 60, autocast=autocast)
        assert found[0] == truth[0]
        assert all(torch.equal(found[1][name], truth[1][name]) for name in truth[1])
    passes = {"mixed": 2 + 3}.get(policy, 3 + 3)  # of a layer, with its second run
    assert len(seen) == 3 * 7 * passes and all(seen), "captured, and run again twice"
    monkeypatch.undo()
    run_again(monkeypatch)
    assert made.replays == 2 and not offload.paused and offload.nbytes() == held
    assert not any("_fastlm_casts" in module.__dict__ for module in fast.modules())
    layers[0].gradient_checkpointing = policy == "mixed"  # what was captured is of no use now
    layers[-1].gradient_checkpointing = True
    found = loss_and_gradients(fast, flattened(rows), 60, autocast=autocast)
    assert found[0] == truth[0] and made.replays == 2


@pytest.mark.parametrize("policy", ["keep", "lean", "recompute"])
def test_graphs_may_recompute_what_other_steps_keep(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[bool] = []
    forward = layers_module._mlp_forward
    monkeypatch.setattr(layers_module, "_mlp_forward", lambda *a, **k: (again.append(bool(k)), forward(*a, **k))[1])
    _, fast, made = pair(num_hidden_layers=3)
    enable_checkpointing(fast)
    layers = core_of(fast).base_model.layers
    set_policies(layers, [policy] * 3)
    core_of(fast)._fastlm_model.offload.on = policy == "recompute"
    kept: list[bool] = []
    mlp = layers_module.lora_mlp
    monkeypatch.setattr(layers_module, "lora_mlp", lambda *a, **k: (kept.append(k["products_kept"]), mlp(*a, **k))[1])
    rows, made.recomputed = samples((30, 34)), True
    results = [loss_and_gradients(fast, flattened(rows), 60, autocast=True) for _ in range(3)]
    assert made.replays == 2 and [policy_of(layer, False) for layer in layers] == [policy] * 3
    assert again.count(True) == 3 * (3 + (policy == "recompute")), "captured, replayed twice, and once before"
    assert kept.count(False) == 3 * (policy == "lean"), "what is recomputed makes products once"
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradients[name], results[0][1][name]) for name in results[0][1])


def test_a_size_that_comes_once_runs_as_a_larger_one() -> None:
    stock, fast, made = pair()
    made.plan([Size(512, 8, 1024), Size(128, 8, 1024), Size(64, 4, 1024)])

    def ran(*lengths: int) -> int:
        rows, before = samples(lengths), made.replays
        truth = loss_and_gradients(stock, alone(rows), target_count(rows))
        assert_close(loss_and_gradients(fast, flattened(rows), target_count(rows)), truth, 1e-5)
        return made.replays - before

    assert ran(60, 30) == ran(20, 30, 9) == 1, "of 128 tokens; the second for its entries"
    assert len(made._graphs) == 3
    for _ in range(10):
        assert ran(70, 60) == 1 and len(made._graphs) == 3, "192 tokens, of 512"
    assert ran(70, 60) == 1 and len(made._graphs) == 4, "so often that it gets its own"
    for _ in range(11):
        assert ran(120) == 1 and len(made._graphs) == 4, "of 128 tokens, though it has more entries"
    assert ran(*[4] * 20) == 0, "no graph has so many entries"


def test_a_tail_is_no_longer_than_the_bound_of_a_larger_size_either() -> None:
    """Attention's kernels write no row past the longest sample, and the tail is a sample too."""
    _, fast, made = pair()
    made.limit = 4096
    made.plan([Size(2304, 16, 1024)])
    for lengths, replays in (((620,), 0), ((900, 300), 0), ((900, 379), 0), ((900, 380), 1)):
        rows, before = samples(lengths), made.replays
        loss_and_gradients(fast, flattened(rows), target_count(rows))
        assert made.replays - before == replays, lengths
        made._seen.clear()


def test_the_tail_and_unused_entries_leave_nothing_behind() -> None:
    """Batches of one size, large and small in turn: what a larger one left is past a smaller one's end."""
    stock, fast, made = pair("mistral")
    for lengths in ((60,), (3,), (20, 30, 9), (1,), (1, 1), (64,)):
        rows = samples(lengths, seed=sum(lengths))
        count = max(target_count(rows), 1)
        if target_count(rows):
            truth = loss_and_gradients(stock, alone(rows), count)
            assert_close(loss_and_gradients(fast, flattened(rows), count), truth, 1e-5)
            assert_close(loss_and_gradients(fast, flattened(rows), count), truth, 1e-5)
    assert made.replays >= 6


def test_a_batch_without_targets_gives_zero() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    loss_and_gradients(fast, flattened(ROWS), COUNT)
    fast.zero_grad()
    batch = dict(PaddingFreeCollator()([{**row, "labels": [-100] * len(row["labels"])} for row in ROWS]))
    loss = fast(**batch).loss
    loss.backward()
    assert loss.item() == 0.0 and made.replays == 2
    assert all(not p.grad.any() for p in fast.parameters() if p.requires_grad)


def test_sizes() -> None:
    assert size_of(450, 2, 300) == Size(512, 4, 1024)
    assert size_of(512, 2, 1025) == Size(512, 4, 2047)
    assert size_of(513, 6, 2047) == Size(576, 8, 2047)
    assert size_of(1, 1, 1) == Size(64, 4, 1024) and size_of(5, 1, 2**20) is None
    for tokens in range(1, 9000, 7):
        for samples_ in (1, 5, 200):
            size = size_of(tokens, samples_, 1)
            assert size is not None and tokens <= size.tokens <= max(64 + tokens, tokens * 9 / 8)
            assert size.entries >= samples_ + 2 and size.tokens % 64 == 0
            assert size_of(size.tokens, samples_, 1) == size, "a size is its own"
        assert largest_size(tokens) <= tokens and largest_size(size.tokens) == size.tokens


def test_micro_batches_add_up_and_a_gradient_is_nobody_elses() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    once = loss_and_gradients(fast, flattened(ROWS), COUNT)
    held = {name: p.grad for name, p in fast.named_parameters() if p.grad is not None}
    kept = {name: gradient.clone() for name, gradient in held.items()}
    twice = loss_and_gradients(fast, flattened(ROWS) * 2, COUNT)
    for name, gradient in once[1].items():
        torch.testing.assert_close(twice[1][name], 2 * gradient, rtol=1e-5, atol=1e-8)
        assert torch.equal(held[name], kept[name]), "a later backward wrote into it"
    assert made.replays == 3


def test_outputs_outlive_the_next_pass() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    backbone, (batch,) = core_of(fast).base_model, flattened(ROWS)
    fast.train()
    first = backbone(input_ids=batch["input_ids"], boundaries=batch["boundaries"]).last_hidden_state
    kept = first.detach().clone()
    first.sum().backward()
    other = torch.flip(batch["input_ids"], (1,))
    second = backbone(input_ids=other, boundaries=batch["boundaries"]).last_hidden_state
    assert made.replays == 2 and torch.equal(first, kept) and not torch.equal(first, second)


def test_two_forwards_before_a_backward() -> None:
    """Graphs share memory: the second forward runs without, and both gradients are right."""
    stock, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    others = samples(seed=5)
    fast.train()
    loss_and_gradients(fast, flattened(ROWS), 1)
    fast.zero_grad()
    losses = [fast(**flattened(rows)[0], num_items_in_batch=torch.tensor(COUNT)).loss for rows in (ROWS, others)]
    sum(losses).backward()
    assert made.replays == 2
    found = {name: p.grad for name, p in fast.named_parameters() if p.grad is not None}
    truth = loss_and_gradients(stock, alone(ROWS) + alone(others), COUNT)
    assert_close((sum(losses).item(), found), truth, 1e-5)
    del losses[:]
    gc.collect()
    loss_and_gradients(fast, flattened(ROWS), COUNT)
    assert made.replays == 3, "and the next pass is a graph again"


def test_a_forward_that_nobody_wants_to_differentiate_lets_the_next_one_pass() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    fast.train()
    for expected in (1, 2, 3):
        fast(**flattened(ROWS)[0])
        gc.collect()
        assert made.replays == expected


def test_a_second_backward_is_an_error() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    fast.train()
    loss = fast(**flattened(ROWS)[0]).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = fast(**flattened(ROWS)[0]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs=False"):
        loss.backward()
    assert made.replays == 2


def test_updates_of_the_adapters_are_seen() -> None:
    stock, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    for step in range(3):
        truth = loss_and_gradients(stock, alone(ROWS), COUNT)
        assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
        for model in (stock, fast):
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1 + step).step()
    assert made.replays == 3


@contextmanager
def hooked(model: Any) -> Iterator[None]:
    seen: list[Any] = []
    module = core_of(model).base_model.layers[0].mlp
    with module.register_forward_hook(lambda *a: seen.append(1)):
        yield
    assert seen


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    enable_checkpointing(model)
    yield
    for layer in core_of(model).base_model.layers:
        layer.gradient_checkpointing = False


@contextmanager
def other_scale(model: Any) -> Iterator[None]:
    layers = [m for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]
    for layer in layers:
        layer.scaling["default"] *= 2
    yield
    for layer in layers:
        layer.scaling["default"] /= 2


@contextmanager
def moved(model: Any) -> Iterator[None]:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.5
    yield
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() / 1.5


@contextmanager
def half_frozen(model: Any) -> Iterator[None]:
    frozen = [p for n, p in model.named_parameters() if "lora_A" in n and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    yield
    for parameter in frozen:
        parameter.requires_grad_(True)


CHANGES = {"hook": hooked, "recompute": recomputing, "scale": other_scale, "moved": moved, "frozen": half_frozen}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_runs_as_it_is_now(change: str) -> None:
    stock, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    before = loss_and_gradients(fast, flattened(ROWS), COUNT)
    with CHANGES[change](fast), CHANGES[change](stock) if change != "recompute" else nullcontext():
        truth = loss_and_gradients(stock, alone(ROWS), COUNT)
        for _ in range(3):
            found = loss_and_gradients(fast, flattened(ROWS), COUNT)
            assert abs(found[0] - truth[0]) <= 1e-5 * abs(truth[0]) and found[1].keys() == truth[1].keys()
            assert max(relative_error(found[1][name], truth[1][name]) for name in truth[1]) <= 1e-5
        assert made.replays == (1 if change == "hook" else 3)
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), before, 1e-5)


def test_the_gpu_begins_before_the_host_looks_at_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again until a call is as those that were captured; what came of one that is not is thrown away."""
    stock, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    events: list[str] = []
    look, forward = made._watched.trained, capture.Graph.forward
    monkeypatch.setattr(made._watched, "trained", lambda: events.append("look") or look())
    monkeypatch.setattr(capture.Graph, "forward", lambda *a: events.append("begin") or forward(*a))

    def happened() -> list[str]:
        events.clear()
        truth = loss_and_gradients(stock, alone(ROWS), COUNT)
        assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
        return list(events)

    assert happened() == ["look", "begin"], "captured here"
    assert happened() == ["begin", "look"]
    with hooked(fast):
        assert happened() == ["begin", "look"]
        assert happened() == ["look"]
    assert happened() == ["look", "begin"]
    assert happened() == ["begin", "look"] and made.replays == 4
    with other_scale(fast), other_scale(stock):
        assert happened() == ["begin", "look"] and made.replays == 4
        assert happened() == ["look", "begin"] and made.replays == 5, "captured again, for the other scale"
    with moved(fast), moved(stock):
        assert happened() == ["look"], "nor where what the graph reads was freed"


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "nf4"])
def test_a_graph_whose_memory_was_freed_does_not_begin(quantised: bool, tmp_path: Any) -> None:
    """All that it reads is known, so nothing is read that the allocator may have given back; and nothing is held."""
    model = tiny_model(hidden_size=64)
    if quantised:
        model.save_pretrained(tmp_path)
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        model = type(model).from_pretrained(tmp_path, quantization_config=nf4)
    fast = add_lora(model)
    fastlm.patch(fast)
    made = bound(fast)
    made.plan([size_of(31, 5, 14)])
    loss_and_gradients(fast, flattened(ROWS), COUNT)
    backbone = core_of(fast).base_model
    read = [*backbone.layers.parameters(), *backbone.rotary_emb.buffers(), backbone.norm.weight]
    assert len(read) > 30
    if quantised:
        state = backbone.layers[0].mlp.up_proj.base_layer.weight.quant_state
        read += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in read} <= made._read.keys()
    assert StorageWeakRef(backbone.embed_tokens.weight.untyped_storage()).cdata not in made._read
    assert not any(ref.expired() for ref in made._read.values())
    if quantised:
        state.state2.absmax = state.state2.absmax.clone()
    else:
        backbone.norm.weight.data = backbone.norm.weight.data.clone()
    del read
    assert sum(ref.expired() for ref in made._read.values()) == 1
    made.release()
    assert not made._read


@pytest.mark.parametrize("why", ["changed", "failed"])
def test_a_graph_that_is_released_in_a_call_is_gone_in_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is what the step without it needs, above all where capturing another one ran out of it."""
    stock, fast, _ = pair()
    made = bound(fast, said=[])
    made.plan([Size(512, 8, 1024)])
    rows = samples((70, 60))
    for _ in range(10):
        loss_and_gradients(fast, flattened(rows), target_count(rows))
    graph, alive = weakref.ref(next(iter(made._graphs.values()))), []
    run = graphs.run_stock

    def run_stock(*args: Any) -> Tensor:
        gc.collect()  # what stands in for a capture refers to the graph, and it to that
        alive.append(graph() is not None)
        return run(*args)

    monkeypatch.setattr(graphs, "run_stock", run_stock)

    def fails(work: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert made._buffers is not None
    made._buffers.record = fails  # of the size's own graph, which comes with the eleventh call
    with other_scale(fast) if why == "changed" else nullcontext():
        loss_and_gradients(fast, flattened(rows), target_count(rows))
    assert alive == [False] and made.replays == 10
    truth = loss_and_gradients(stock, alone(rows), target_count(rows))
    assert_close(loss_and_gradients(fast, flattened(rows), target_count(rows)), truth, 1e-5)


def test_weights_without_addresses_are_an_obstacle() -> None:
    fast = pair()[1]
    backbone = core_of(fast).base_model
    backbone.norm.weight = torch.nn.Parameter(TwoTensor(*[torch.ones_like(backbone.norm.weight)] * 2), False)
    assert "addresses cannot be compared" in str(LayerGraphs(backbone, 64, print).obstacle)


def test_a_backbone_that_answers_with_a_tuple_runs_without() -> None:
    _, fast, made = pair()
    backbone, (batch,) = core_of(fast).base_model, flattened(ROWS)
    backbone.config.return_dict = False
    fast.train()
    for _ in range(3):
        out = backbone(input_ids=batch["input_ids"], boundaries=batch["boundaries"])
        assert isinstance(out, tuple)
    assert made.replays == 0


def test_a_call_that_asks_for_hidden_states_is_the_only_one_without() -> None:
    """transformers leaves its hooks on the layers, where they do nothing in calls that do not ask."""
    stock, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    batch = alone(ROWS)[0]
    theirs, ours = (model(**batch, output_hidden_states=True).hidden_states for model in (stock, fast))
    assert len(ours) == len(theirs) == 3 and made.replays == 1
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert core_of(fast).base_model.layers[0]._forward_hooks
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    assert made.replays == 2 and bound(fast).obstacle is None
    with hooked(fast):
        loss_and_gradients(fast, flattened(ROWS), COUNT)
    assert made.replays == 2, "what acts still counts"


def test_evaluation_generation_and_long_rows_run_without() -> None:
    stock, fast, _ = pair()
    made = bound(fast, limit=64)
    for _ in range(2):
        long = samples((40, 50))
        truth = loss_and_gradients(stock, alone(long), 80)
        assert_close(loss_and_gradients(fast, flattened(long), 80), truth, 1e-5)
    fast.eval()
    (batch,) = flattened(ROWS)
    for _ in range(3):
        fast(**batch)
    ids = torch.tensor([ROWS[0]["input_ids"]])
    expected = stock.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(fast.generate(input_ids=ids, max_new_tokens=5, do_sample=False), expected)
    assert made.replays == 0


def test_an_embedding_that_takes_a_gradient() -> None:
    stock = add_lora(tiny_model(), modules_to_save=["embed_tokens"])
    fast = copy.deepcopy(stock)
    fastlm.patch(fast)
    made = bound(fast)
    made.plan([size_of(31, 5, 14)])
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    assert made.replays == 1 and any("embed_tokens" in name for name in truth[1])


def test_under_autocast() -> None:
    """To the bit what the same size gives without graphs: float32 adapters, bf16 products, backward without it."""
    _, fast, made = pair()
    rows = samples((30, 34))  # 64 tokens: no tail
    results = [loss_and_gradients(fast, flattened(rows), 60, autocast=True) for _ in range(3)]
    assert made.replays == 2
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradients[name], results[0][1][name]) for name in results[0][1])


def test_a_failure_is_said_and_the_step_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, fast, _ = pair()
    said: list[str] = []
    made = bound(fast, said=said)
    made.plan([size_of(31, 5, 14)])

    def fails(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capture, "recorder", lambda device: fails)
    for _ in range(3):
        truth = loss_and_gradients(stock, alone(ROWS), COUNT)
        assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    assert made.replays == 0
    assert said == [
        "steps run without CUDA graphs, since capturing failed: RuntimeError: operation not permitted when stream is "
        "capturing"
    ]


@pytest.mark.parametrize(
    ("facts", "lora", "reason"),
    [
        ({}, False, None),
        ({}, {"lora_dropout": 0.1}, "there is dropout inside its layers"),
        ({}, {"modules_to_save": ["lm_head"], "target_modules": ["lm_head"]}, "none of its layers is trained"),
    ],
)
def test_obstacles(facts: dict[str, Any], lora: Any, reason: str | None) -> None:
    if isinstance(lora, dict) and "modules_to_save" in lora:
        model: Any = tiny_model(**facts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("lm_head"))
    else:
        model = tiny_model(**facts) if lora is False else add_lora(tiny_model(**facts), **lora)
    fastlm.patch(model)
    assert LayerGraphs(core_of(model).base_model, 64, print).obstacle == reason
    with core_of(model).base_model.layers[1].register_forward_pre_hook(lambda *a: None):
        found = LayerGraphs(core_of(model).base_model, 64, print).obstacle
        assert found == "there are hooks inside its layers"


def test_unpatch_copies_and_pickles() -> None:
    _, fast, made = pair()
    made.plan([size_of(31, 5, 14)])
    truth = loss_and_gradients(fast, flattened(ROWS), COUNT)
    backbone = core_of(fast).base_model
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert core_of(other).base_model.__dict__["_fastlm_graphs"] is None
        fastlm.patch(other)
        assert_close(loss_and_gradients(other, flattened(ROWS), COUNT), truth, 1e-5)
    assert made.replays == 1
    assert made.release() and not made.release()
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    fastlm.unpatch(fast)
    assert "forward" not in backbone.__dict__ and "_fastlm_graphs" not in backbone.__dict__


def test_a_tail_is_no_longer_than_the_bound() -> None:
    for tokens in (9_000, 16_400, 33_000, 70_000):
        size = size_of(tokens, 64, 400)
        assert size is not None and size.tokens - tokens <= size.longest


def test_a_trained_parameter_that_nothing_uses() -> None:
    stock, fast, _ = pair()
    for model in (stock, fast):
        core_of(model).base_model.layers[0].unused = torch.nn.Parameter(torch.ones(3))
    made = bound(fast)
    made.plan([size_of(31, 5, 14)])
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    assert_close(loss_and_gradients(fast, flattened(ROWS), COUNT), truth, 1e-5)
    assert made.replays == 1 and core_of(fast).base_model.layers[0].unused.grad is None


@pytest.mark.parametrize("case", ["tensor_hook", "shared", "adapter", "saved_tensors"])
def test_what_a_graph_would_get_wrong_runs_without(case: str) -> None:
    stock, fast, made = pair()
    for model in (stock, fast):
        layers = core_of(model).base_model.layers
        if case == "tensor_hook":
            next(p for p in model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient * 2)
        if case == "shared":
            first, second = (layer.self_attn.q_proj.lora_A["default"] for layer in layers)
            second.weight = first.weight
    if case == "shared":
        made = bound(fast)
    made.plan([size_of(31, 5, 14)])
    if case == "adapter":
        loss_and_gradients(fast, flattened(ROWS), COUNT)
        for model in (stock, fast):
            model.add_adapter("other", model.peft_config["default"])
            model.set_adapter("other")
            for name, parameter in model.named_parameters():
                if "lora_B.other" in name:
                    parameter.data.fill_(0.01)
                if "lora_A.other" in name:
                    parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    truth = loss_and_gradients(stock, alone(ROWS), COUNT)
    before = made.replays
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks if case == "saved_tensors" else nullcontext():
        for _ in range(2):
            found = loss_and_gradients(fast, flattened(ROWS), COUNT)
    if case == "tensor_hook":
        hooked_name = next(n for n, p in fast.named_parameters() if p.requires_grad)
        for result in (found, truth):
            result[1].pop(hooked_name)  # the stock loss has a backward a sample, which is one hook each
    assert_close(found, truth, 1e-5)
    assert made.replays == before + (2 if case == "shared" else 0)


# --- on a GPU


def on_gpu(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **facts: Any) -> tuple[Any, LayerGraphs]:
    model = add_lora(tiny_model(family, dtype=dtype, head_dim=64, **facts), dtype=torch.float32).cuda()
    fastlm.patch(model)
    return model, bound(model)


def step_of(model: Any, rows: Any, autocast: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    model.train()
    batch = {n: v.to("cuda") if hasattr(v, "to") else v for n, v in flattened(rows)[0].items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(**batch, fused_lm_head=True).log_probs.sum()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_to_the_bit_where_there_is_no_tail(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, made = on_gpu(family)
    rows = samples((30, 34, 61, 3))
    with deterministic():
        results = [step_of(model, rows) for _ in range(4)]
    assert made.replays == 3
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        for name, gradient in results[0][1].items():
            assert torch.equal(gradients[name], gradient), name


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_gpu_recomputed_layers(policy: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And steps of both kinds in turn: what a step without a graph has in host memory is its own."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, made = on_gpu("qwen3", num_hidden_layers=4)
    if not autocast:
        model.to(torch.bfloat16)
        made = bound(model)
    enable_checkpointing(model)
    core_of(model)._fastlm_model.offload.on = policy == "offload"
    rows, long = samples((30, 34, 61, 3)), samples((300, 290))
    made.limit = 256
    with deterministic():
        results = [step_of(model, rows, autocast) for _ in range(3)]
        longer = [step_of(model, long, autocast)]
        results.append(step_of(model, rows, autocast))
        longer.append(step_of(model, long, autocast))
    assert made.replays == 3
    for found in (results, longer):
        for loss, gradients in found[1:]:
            assert torch.equal(loss, found[0][0])
            for name, gradient in found[0][1].items():
                assert torch.equal(gradients[name], gradient), name


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_batches_of_all_sizes_in_turn(family: str) -> None:
    model, made = on_gpu(family)
    plain, without = on_gpu(family)
    without.limit = 0
    made.plan(size for n in (1, 2, 3) if (size := size_of(n * 64, 2, 64)))
    for turn, lengths in enumerate(((60, 4), (3, 1), (100, 60), (70, 70, 9), (20, 30), (128, 64), (60, 4))):
        rows = samples(lengths, seed=turn)
        (loss, gradients), (truth, expected) = step_of(model, rows), step_of(plain, rows)
        assert abs(loss - truth) <= 2e-3 * abs(truth)
        for name, gradient in expected.items():
            assert relative_error(gradients[name], gradient) <= 3e-2, (lengths, name)
    assert made.replays >= 6 and without.replays == 0


@pytest.mark.gpu
def test_gpu_weights_replaced_while_a_graph_may_read_them() -> None:
    facts = dict(hidden_size=512, intermediate_size=4096)
    (model, made), (plain, without) = on_gpu(**facts), on_gpu(**facts)
    without.limit = 0
    rows = samples((60, 64))
    for turn in range(4):
        for _ in range(2):
            (loss, gradients), (truth, expected) = step_of(model, rows), step_of(plain, rows)
            assert abs(loss - truth) <= 2e-3 * abs(truth)
            for name, gradient in expected.items():
                assert relative_error(gradients[name], gradient) <= 3e-2, (turn, name)
        for one in (model, plain):
            for parameter in core_of(one).base_model.layers.parameters():
                parameter.data = parameter.data.clone() * 1.1
        gc.collect()
        torch.cuda.empty_cache()
    assert made.replays == 4, "the second of each two"


@pytest.mark.gpu
def test_gpu_memory_is_that_of_the_largest_and_comes_back() -> None:
    model, _ = on_gpu(num_hidden_layers=8, hidden_size=512, intermediate_size=2048)
    made = bound(model, limit=1024)
    step_of(model, samples((500,)))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made.plan([size_of(1024, 2, 600)])
    step_of(model, samples((500, 500)))
    largest = torch.cuda.memory_reserved() - before
    made.plan(size for n in (960, 896, 832, 768, 512, 256) if (size := size_of(n, 2, 600)))
    step_of(model, samples((500, 460)))
    assert made.replays == 2
    assert torch.cuda.memory_reserved() - before <= 1.5 * largest
    left = []
    for _ in range(3):
        made.release()
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved() - before)
        made.plan([size_of(1024, 2, 600)])
        step_of(model, samples((500, 500)))
    assert max(left) <= 64 * 2**20, "what cuBLAS keeps for the stream"
    assert left[2] <= left[1]


@pytest.mark.gpu
def test_gpu_a_step_is_a_few_launches() -> None:
    model, made = on_gpu(num_hidden_layers=16)
    rows = samples((60, 60))
    counts = []
    for _ in range(3):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step_of(model, rows)
        names = [event.name for event in profile.events()]
        counts.append(sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")) for name in names))
    assert made.replays == 2
    assert counts[2] < counts[0] / 4, counts
