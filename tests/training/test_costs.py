"""fastlm/training/costs.py against what training really keeps: every storage, counted on tiny models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fastlm
from benchmarks.step import quantise
from fastlm.kernels import lora
from fastlm.kernels.flash import FlashSettings, flash_attention
from fastlm.models import layers
from fastlm.models.checkpointing import leave_out
from fastlm.models.patch import patched_core
from fastlm.models.remaking import NormAgain
from fastlm.packing.collators import PaddingFreeCollator
from fastlm.planner import twin_of
from fastlm.training import costs as costs_module
from fastlm.training.costs import _LIBRARIES, Samples, StepCosts, _nf4_bytes, optimiser_bytes, per_layer, step_costs

from ..kernels.interpreter import kernel_test, run_interpreted
from ..tiny import add_lora, enable_checkpointing, tiny_model

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LENGTHS = (3, 1, 2)


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that keeps what a GPU's backends keep: q, k, v, the output and a number for each head."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *args: Any, **options: Any) -> Tensor:
        features = {name: options[name] for name in ("scale", "window", "softcap")}
        return flash_attention(q, k, v, cu_seqlens, FlashSettings(**features))

    monkeypatch.setattr(layers, "attention", attention)


def build(
    family: str, targets: tuple[str, ...], policy: str | tuple[str, ...], quantised: bool = False, **facts: Any
) -> tuple[Any, StepCosts, dict[str, Any]]:
    """A model ready to train (no targets: every weight), its costs from a twin without weights, and a batch."""
    dtype = torch.bfloat16 if quantised else torch.float32
    model = tiny_model(family, dtype=dtype, **{"intermediate_size": 224, "vocab_size": 40, **facts})
    twin = twin_of(model.config, dtype)
    ranks = {name: 4 for name, _ in twin.named_modules() if name.rpartition(".")[2] in targets}
    if quantised:
        quantise(model)
    if targets:
        model = add_lora(model, target_modules=list(targets), dtype=torch.bfloat16 if quantised else None)
        model.enable_input_require_grads()  # as for a layer in the middle
    fastlm.patch(model)
    enable_checkpointing(model)
    all_layers = patched_core(model).model.layers
    for layer, own in zip(all_layers, per_layer(policy, len(all_layers)), strict=True):
        layer.gradient_checkpointing = own in ("recompute", "offload")
        leave_out(layer, own)
    patched_core(model)._fastlm_model.offload.on = policy == "offload"
    rows = [{"input_ids": torch.randint(3, 40, (length,)).tolist()} for length in LENGTHS]
    costs = step_costs(twin, ranks, full=not targets, quantised=quantised)
    return model.train(), costs, dict(PaddingFreeCollator()(rows))


def given(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    states = [state for p in model.parameters() if (state := getattr(p, "quant_state", None)) is not None]
    scales = [t for one in states for t in (one.absmax, one.code, one.offset, one.state2.absmax, one.state2.code)]
    inputs = [value for value in batch.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *model.buffers(), *scales, *inputs]


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts ``bytes`` of the distinct storages that autograd saves, those of ``known`` tensors apart."""

    def __init__(self, known: list[Tensor]) -> None:
        self.bytes, self.storages = 0, {tensor.untyped_storage()._cdata: None for tensor in known}

        def pack(tensor: Tensor) -> Tensor:
            self.count(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages and tensor.is_floating_point():
            self.storages[storage._cdata] = storage  # held, so that nobody gets its address
            self.bytes += storage.nbytes()

    def within(self, again: type[NormAgain]) -> type[NormAgain]:
        """The hooks of `NormAgain`, which of two that are on alone are called, with what they keep counted."""
        saved = self

        class Counted(again):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                pack = self.pack_hook

                def counting(tensor: Tensor) -> Any:
                    packed = pack(tensor)
                    if isinstance(packed[0], Tensor):
                        saved.count(packed[0])
                    return packed

                self.pack_hook = counting

        return Counted


class Live(TorchDispatchMode):
    """Follows the bytes of all storages made while it is on, to their ``peak``."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gc.collect()  # the interpreter leaves cycles that hold a kernel's arguments
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:  # that is host memory, of offloaded inputs
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_: Any) -> None:
            del self.storages[key]
            self.now -= size

        self.storages[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.fixture
def quick_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


SAVED = [
    ("llama", SEVEN), ("llama", ("q_proj", "v_proj")), ("llama", ("o_proj",)), ("llama", ("down_proj",)), ("llama", ()),
    ("mistral", SEVEN), ("qwen2", SEVEN), ("qwen3", SEVEN),  # q and k before their norms too
    ("gemma2", SEVEN), ("gemma2", ()), ("gemma3_text", SEVEN),  # four norms, two rotations
    ("olmo2", SEVEN), ("olmo2", ("o_proj",)),  # no norm in front
    ("phi3", PACKED), ("phi3", ("qkv_proj",)), ("phi3", ()),  # v is a view of the packed product
]  # fmt: skip


LEAN = [("llama", SEVEN), ("llama", ("down_proj",)), ("gemma2", SEVEN), ("olmo2", SEVEN), ("phi3", PACKED)]
LIGHT = [*LEAN, ("llama", ("q_proj", "v_proj")), ("llama", ()), ("gemma2", ()), ("qwen3", SEVEN)]


@kernel_test
@pytest.mark.parametrize(
    "family, targets, policy",
    [(*case, policy) for policy, cases in (("keep", SAVED), ("light", LIGHT), ("lean", LEAN)) for case in cases],
)
def test_what_is_kept_is_what_is_predicted(monkeypatch, family, targets, policy):
    model, costs, batch = build(family, targets, policy)
    saved = Saved(given(model, batch))
    monkeypatch.setattr(layers, "NormAgain", saved.within(NormAgain))
    core = model.get_base_model() if targets else model
    with saved:
        output = core.base_model(input_ids=batch["input_ids"], boundaries=batch["boundaries"], use_cache=False)
    layers_keep = sum(layer.stored(policy) for layer in costs.layers)
    a_token = layers_keep + costs.hidden + 4 + costs.tables  # the last norm: x, statistics
    assert saved.bytes == sum(LENGTHS) * a_token + sum(layer.copies for layer in costs.layers)
    del output


@kernel_test
@pytest.mark.parametrize("targets", [SEVEN, ()])
def test_a_recomputed_layer_keeps_its_input(targets):
    model, costs, batch = build("llama", targets, "recompute")
    saved = Saved(given(model, batch))
    core = model.get_base_model() if targets else model
    with saved:
        output = core.base_model(input_ids=batch["input_ids"], boundaries=batch["boundaries"], use_cache=False)
    assert saved.bytes == sum(LENGTHS) * (sum(layer.stored("recompute") for layer in costs.layers) + costs.hidden + 4)
    del output


@kernel_test
@pytest.mark.parametrize(
    "family, targets, policy",
    [
        ("llama", SEVEN, "keep"), ("llama", ("q_proj", "v_proj"), "recompute"), ("llama", SEVEN, "offload"),
        ("llama", (), "recompute"), ("gemma2", SEVEN, "keep"), ("phi3", PACKED, "recompute"),
        ("llama", SEVEN, "light"), ("gemma2", (), "light"), ("llama", SEVEN, "lean"), ("gemma2", SEVEN, "lean"),
        ("llama", SEVEN, ("light", "keep")), ("phi3", PACKED, ("lean", "light")),
        ("llama", SEVEN, ("recompute", "lean")), ("llama", SEVEN, ("recompute", "keep")),
        ("llama", SEVEN, ("lean", "keep")), ("llama", (), ("recompute", "keep")), ("gemma2", SEVEN, ("lean", "keep")),
        ("phi3", PACKED, ("recompute", "keep")),
    ],
)  # fmt: skip
def test_the_worst_moment_of_a_step(quick_collection, family, targets, policy):
    measured, predicted = worst_moment(family, targets, policy)
    assert predicted == pytest.approx(measured, rel=0.04)


@kernel_test
@pytest.mark.parametrize("policy", ["keep", "offload", ("recompute", "lean")])
def test_the_worst_moment_of_a_step_in_tiles(quick_collection, tiles, policy):
    """The inner size makes the MLP's the worst of all."""
    untiled, _ = worst_moment("llama", SEVEN, policy)
    tiles(2)
    measured, predicted = worst_moment("llama", SEVEN, policy)
    assert predicted == pytest.approx(measured, rel=0.04) and measured < untiled


@kernel_test
@pytest.mark.parametrize("policy", ["recompute", ("lean", "keep")])
@pytest.mark.parametrize("tile", [2, 6])
def test_weights_made_dense_at_the_worst_moment(quick_collection, tiles, tile, policy):
    """Two of them, in tiles the MLP's three."""
    tiles(tile)
    measured, predicted = worst_moment("llama", SEVEN, policy, quantised=True)
    assert predicted == pytest.approx(measured, rel=0.04)
    assert measured > (3 if tile == 2 else 2) * 2 * 64 * 224


@kernel_test
@pytest.mark.parametrize("family, targets", [("llama", SEVEN), ("phi3", PACKED)])
def test_the_attention_of_a_recomputed_layer_as_the_worst_moment(quick_collection, tiles, family, targets):
    """Whoever runs the layer again holds the gradient that came in, and what that run ends in, to the end."""
    tiles(2)
    measured, predicted = worst_moment(family, targets, "recompute", intermediate_size=32, num_key_value_heads=4)
    assert predicted == pytest.approx(measured, rel=0.04)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiles(n): an MLP takes n tokens at once."""

    def set_tile(tokens: int) -> None:
        for module in (lora, layers, costs_module):
            monkeypatch.setattr(module, "TILE", tokens)

    return set_tile


def worst_moment(
    family: str, targets: tuple[str, ...], policy: str | tuple[str, ...], **how: Any
) -> tuple[int, int]:  # fmt: skip
    """Bytes measured and predicted; how: as ``build`` takes it."""
    model, costs, batch = build(family, targets, policy, **how)
    live = Live(given(model, batch))
    with live:
        model(**batch, use_cache=False).loss.backward()
    parts = of_this_kernel(costs, model).worst_moment(policy, sum(LENGTHS))
    return live.peak, sum(parts.values()) - sum(costs.standing().values()) - _LIBRARIES


def of_this_kernel(costs: StepCosts, model: Any) -> StepCosts:
    """Without what a GPU's attention backward makes besides: dQ in fp32, dK and dV of every query head."""
    attention = patched_core(model).model.layers[0].self_attn
    config, size = attention.config, model.dtype.itemsize
    queries, shared = config.num_attention_heads * attention.head_dim, attention.num_key_value_groups > 1
    besides = 0 if attention._fastlm.form.softcap else (4 + 2 * size * shared) * queries

    def less(moments: tuple[tuple[int, ...], ...]) -> Any:
        kept, absent, workspace, *rest = moments[-1]
        return (*moments[:-1], (kept, absent, workspace - besides, *rest))

    every = (replace(layer, moments=less(layer.moments), tiled=less(layer.tiled)) for layer in costs.layers)
    return replace(costs, layers=tuple(every))


def test_8bit_states_are_bitsandbytes_own():
    from bitsandbytes.optim import AdamW8bit

    sizes = [4096, 4095, 70_001]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimiser = AdamW8bit(parameters, lr=1e-3)
    optimiser.step()
    states = sum(
        value.nbytes for state in optimiser.state.values() for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")
    )  # fmt: skip
    assert optimiser_bytes("adamw_8bit", [(size, 4, False) for size in sizes]) == (states, 0)
    assert optimiser_bytes("adamw_8bit", [(70_001, 2, True)]) == (8 * 70_001, 0)  # Trainer keeps embeddings in fp32
    assert optimiser_bytes("paged_adamw_8bit", [(2**20, 2, False)])[0] == 8 * 2**12


def test_torch_states_have_the_tensors_dtype():
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimiser = torch.optim.AdamW([parameter])
    optimiser.step()
    states = sum(optimiser.state[parameter][name].nbytes for name in ("exp_avg", "exp_avg_sq"))
    assert optimiser_bytes("adamw_torch_fused", [(1000, 2, False)]) == (states, 0)
    assert optimiser_bytes("adamw_torch", [(1000, 2, False)]) == (states, 2000)
    assert optimiser_bytes("sgd", [(1000, 2, False)]) == (0, 0)


def test_nf4_bytes_are_bitsandbytes_own():
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(224, 192)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert _nf4_bytes(weight.numel()) == packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes


def test_accumulation_sets_earlier_gradients_aside():
    model, once, _ = build("llama", (), "keep")
    several = step_costs(model, {}, full=True, accumulates=True)
    tokens = sum(LENGTHS)
    assert once.worst_moment("keep", tokens)["gradients"] <= once.gradients
    assert several.worst_moment("keep", tokens)["gradients"] == 2 * several.gradients
    assert several.gradients < sum(several.worst_moment("recompute", tokens).values()) - several.weights


def test_stock_layers_are_refused():
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="runs stock code"):
        twin_of(config, torch.float32)
    with pytest.raises(ValueError, match="adamw_8bit"):
        optimiser_bytes("adam_mini", [])


def test_what_attention_takes_on_each_gpu():
    """Backend, and bytes a token more than torch's varlen, held and in backward: dQ in fp32, dK and dV of every query
    head. Before Ampere k and v are held of every query head too.
    """
    twin = twin_of(tiny_model("llama", dtype=torch.bfloat16, head_dim=128).config, torch.bfloat16)
    attention = twin.model.layers[0].self_attn
    queries = attention.config.num_attention_heads * attention.head_dim
    keys = attention.config.num_key_value_heads * attention.head_dim
    unknown = step_costs(twin, {}, full=True)

    def against(capability: tuple[int, int], length: int) -> tuple[str, int, int]:
        costs = step_costs(twin, {}, full=True, samples=Samples(capability, length))
        layer, other = costs.layers[0], unknown.layers[0]
        return layer.backend, layer.kept - other.kept, layer.moments[-1][2] - other.moments[-1][2]

    assert unknown.layers[0].backend == "varlen" and keys < queries
    assert against((8, 0), 100) == ("varlen", 0, 0)
    assert against((9, 0), 100) == ("triton", 0, -(4 + 2 * 2) * queries)
    assert against((7, 5), 100) == ("efficient", 2 * 2 * (queries - keys), 0)
    gemma = twin_of(tiny_model("gemma2", dtype=torch.bfloat16).config, torch.bfloat16)
    assert {layer.backend for layer in step_costs(gemma, {}, full=True).layers} == {"triton"}
