"""Bytes that one training step takes at its worst moment, part by part, from a model's shapes alone.

What a decoder layer leaves for backward is read off the code that runs it (models/layers.py and the kernels under it):
a change there is a change here, and the tests compare the two, storage by storage. Tokens are those of one micro-batch
without padding, every one a target. What torch's allocator counts is counted: no CUDA context, no fragmentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels.attention import LONG_SAMPLE, choose_backend
from ..kernels.linear_cross_entropy import chunk_rows
from ..kernels.lora import TILE
from ..models.layers import attention_features

__all__ = ["OPTIMISERS", "PARTS", "POLICIES", "LayerCosts", "Samples", "StepCosts", "in_words", "ladder",
           "layer_costs", "left_out", "optimiser_bytes", "overall", "per_layer", "spared", "step_costs",
           "weight_bytes"]  # fmt: skip

POLICIES = ("keep", "light", "lean", "recompute", "offload")  # of activations, the fastest first
PARTS = ("weights", "adapters", "optimiser", "gradients", "activations", "loss", "workspace")
OPTIMISERS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch", "adamw_torch_fused", "sgd")

_LIBRARIES = 2**26  # bytes: cuBLAS's workspaces on Hopper, from torch's allocator, of forward's and backward's threads
_GRAPHS = 2**27  # bytes that a pool of CUDA graphs holds besides what `graphs` counts, to be at what was measured
_STATISTICS = 32  # bytes of loss, entropy and the like that a target leaves in fp32
_WORDS = {
    "keep": "kept", "light": "kept but for norms", "lean": "kept but for norms, gate and up products",
    "recompute": "recomputed", "offload": "recomputed from inputs in host memory",
}  # fmt: skip


def ladder(spared: Sequence[Collection[str]]) -> list[tuple[str, ...]]:
    """Policies of every layer, from all recomputed to all kept, each with one layer more that computes less again.

    The last layer comes first: what it keeps is gone when backward runs the layers below it again, so that their own
    working memory is never on top of it. spared: what between "keep" and "recompute" spares a layer memory: "light"
    its norms' outputs, "lean" gate and up products too.

    >>> ladder([["light", "lean"], []])
    [('recompute', 'recompute'), ('recompute', 'keep'), ('lean', 'keep'), ('light', 'keep'), ('keep', 'keep')]
    """
    level = ["recompute"] * len(spared)
    levels = [tuple(level)]
    for most in (("lean", "light"), ("light",), ()):
        for index, own in reversed(list(enumerate(spared))):
            policy = next((name for name in most if name in own), "keep")
            if level[index] != policy:
                level[index] = policy
                levels.append(tuple(level))
    return levels


def spared(norms: int, products: int) -> list[str]:
    """Which policies between "keep" and "recompute" make a difference to a layer, by what `left_out` counts."""
    return ["light"] * bool(norms) + ["lean"] * bool(products)


def left_out(policy: str, norms: int, products: int) -> int:
    """Bytes that a layer which is not recomputed leaves for its backward to make again: of so many of its norms'
    outputs, and of its gate and up products.
    """
    return norms * (policy in ("light", "lean")) + products * (policy == "lean")


def per_layer(policy: str | Sequence[str], count: int) -> Sequence[str]:
    """The policy of each of so many layers; a name holds for all."""
    return [policy] * count if isinstance(policy, str) else policy


def overall(policies: Sequence[str]) -> str:
    """The policy of all layers, or "mixed"."""
    return policies[0] if len(set(policies)) == 1 else "mixed"


def in_words(policies: Sequence[str]) -> str:
    """What becomes of a model's activations, by the policies of its layers.

    >>> in_words(["keep", "keep"]), in_words(["recompute", "light", "keep"])
    ('kept', 'kept in 1 of 3 layers, kept but for norms in 1, recomputed in 1')
    """
    if overall(policies) != "mixed":
        return _WORDS[policies[0]]
    counts = Counter(policies)
    first, *others = [f"{words} in {counts[policy]}" for policy, words in _WORDS.items() if policy in counts]
    return ", ".join([f"{first} of {len(policies)} layers", *others])


@dataclass(frozen=True)
class Samples:
    """What chooses attention's backend besides the layer: a GPU's compute capability, the tokens of the longest sample.
    Micro-batches past 2^31 elements, where our kernel goes before, are counted as others: they take less.
    """

    capability: tuple[int, int]
    length: int

    def backend(self, attention: Any, form: Any, size: int) -> str:
        """For activations of so many bytes an element; before Ampere two are fp16."""
        dtype = torch.float32 if size == 4 else torch.bfloat16 if self.capability >= (8, 0) else torch.float16
        features = attention_features(attention, form)
        if features["window"] and features["window"] >= self.length:
            features["window"] = None
        return choose_backend(
            "cuda", self.capability, dtype, attention.head_dim, long_samples=self.length >= LONG_SAMPLE, **features
        )


@dataclass(frozen=True)
class LayerCosts:
    """One decoder layer; bytes a token, where nothing else is said.

    entering: the residual stream that it reads. leaving: what its second forward ends in, if it is recomputed.
    kept: what it leaves for backward, without these.
    keeps_entering: whether backward needs that too, be the layer recomputed or not.
    moments: in its backward, the part of ``kept`` that is still there, how much less that is in a recomputed layer,
        workspace, that of a tile's tokens, and, whatever the tokens, bytes of gradients and weights made dense.
    tiled: the same where there are more tokens than one tile takes.
    remade: the gate and up products, where the MLP's own backward can make them again.
    norms: of what is kept, the output of the norm before attention, and of that before the MLP.
    copies: bytes of adapters side by side and in the activations' dtype, which it keeps too, whatever the tokens.
    gradients: bytes of its trained tensors, whatever the tokens.
    backend: of its attention.
    """

    entering: int
    leaving: int
    kept: int
    keeps_entering: bool
    moments: tuple[tuple[int, int, int, int, int], ...]
    tiled: tuple[tuple[int, int, int, int, int], ...]
    remade: int
    norms: tuple[int, int]
    copies: int
    gradients: int
    backend: str

    def stored(self, policy: str) -> int:
        """Between forward and backward."""
        if policy in ("recompute", "offload"):
            return self.entering * (policy == "recompute")
        return self.kept + self.entering * self.keeps_entering - left_out(policy, sum(self.norms), self.remade)

    def spared(self) -> list[str]:
        """As `ladder` takes it."""
        return spared(sum(self.norms), self.remade)


def layer_costs(
    layer: Any, ranks: Mapping[str, int], full: bool, quantised: bool, size: int, adapter_size: int,
    samples: Samples | None,
) -> LayerCosts:  # fmt: skip
    """Costs of a patched decoder layer whose projections, by name, have adapters of these ranks.

    full: its weights are trained, and ranks is empty. quantised: its weights are made dense where they are needed.
    size, adapter_size: bytes of an element of its activations, and of an adapter. samples: None where nobody knows.
    """
    attention, mlp = layer.self_attn, layer.mlp
    form, attention_form, mlp_form = (module._fastlm.form for module in (layer, attention, mlp))
    weights = {
        name.rpartition(".")[2]: module.weight.shape
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    hidden, queries = weights["o_proj"]
    heads, inner = queries // attention.head_dim, weights["down_proj"][1]
    qkv = ("qkv_proj",) if attention_form.packed else ("q_proj", "k_proj", "v_proj")
    keys = (weights["qkv_proj"][0] - queries) // 2 if attention_form.packed else weights["k_proj"][0]
    gate_up = ("gate_up_proj",) if mlp_form.packed else ("gate_proj", "up_proj")

    def reads(*names: str) -> bool:
        """Whether backward needs what these projections read."""
        return full or any(name in ranks for name in names)

    def low(*names: str) -> int:
        return sum(ranks.get(name, 0) for name in names)

    def gradients(*names: str) -> int:
        if full:
            return sum(weights[name].numel() for name in names) * size
        return sum(ranks.get(name, 0) * sum(weights[name]) for name in names) * adapter_size

    casts, copies = adapter_size != size, 0
    for together in (qkv, ("o_proj",), gate_up, ("down_proj",)):
        adapted = [name for name in together if name in ranks]
        copies += size * (casts or len(adapted) > 1) * sum(ranks[name] * weights[name][1] for name in adapted)
        copies += size * casts * sum(ranks[name] * weights[name][0] for name in adapted)

    # elements a token; what attention's backward needs, and what is gone by then
    takes_most = "triton" if attention_form.softcap else "varlen"  # from Ampere on
    backend = samples.backend(attention, attention_form, size) if samples is not None else takes_most
    each = keys if backend in ("flash4", "varlen", "triton") else queries  # k's and v's: others hold one a query head
    attended = 2 * queries + each + (queries + 2 * keys if attention_form.packed else each)  # q, k rotated, output, v
    attended += hidden * (form.norm_in and reads(*qkv)) + low(*qkv)
    attended += (queries + keys) * bool(attention_form.head_norm)
    fused = not full and not mlp_form.packed and reads(*gate_up, "down_proj")
    product = inner * (not fused and reads("down_proj"))
    gated = 2 * inner + product + low(*gate_up, "down_proj", "o_proj") + hidden * (form.norm_in and reads(*gate_up))
    # the stream between the halves; where norms follow them, what these read
    gated += hidden * (2 + (form.norm_in or reads(*gate_up)) if form.norm_out else 1)
    kept = (attended + gated) * size + 4 * heads + 8 * (form.norm_in + form.norm_out)

    read = kept - (product + hidden * form.norm_out) * size  # before the activation's backward
    incoming = hidden * (1 + form.norm_out)  # the gradient, and what a norm made of it
    lean = fused and not form.norm_out  # recomputed without its output, once: dgate and dup take gate's and up's place
    reused = 2 * inner * size * lean
    dense = 2 * hidden * inner * size * quantised  # one goes when the next has come
    # of the fused MLP: the gradients of what A makes
    low_down, low_all = fused * low("down_proj") * size, fused * low(*gate_up, "down_proj") * size
    turning = hidden + 2 * queries + 2 * keys
    # all but our kernel sum dQ in fp32; dK and dV of a group's heads too, or they are made for every query head first
    of_groups = 2 * (4 * keys if backend == "flash4" else size * queries) * (keys < queries)
    besides = (4 * queries + of_groups) * (backend != "triton")
    above = gradients(*gate_up, "down_proj")
    # whoever runs a layer again holds to the end the gradient that came in, and the stream between the halves where
    # that is one of two summands that the second run ends in
    until_the_end = hidden * (1 + lean) * size
    moments = (
        (read, reused, (incoming + 3 * inner) * size + low_down, 0, gradients("down_proj")),
        (read - 2 * inner * size * (not fused), reused,
         (incoming + (1 + (not fused)) * hidden + 2 * inner) * size + low_all, 0, above + dense),
        (attended * size + 4 * heads, -until_the_end, turning * size + besides + 8 * heads, 0,
         above + gradients("o_proj")),
    )  # fmt: skip
    norms = (hidden * size * (form.norm_in and reads(*qkv)), hidden * size * (form.norm_in and reads(*gate_up)))
    # fp32 sums of the tiles, B of gate and up and A of down; dB of down; dA of gate and up comes after the last one
    sums = 4 * inner * low(*gate_up, "down_proj") + adapter_size * hidden * low("down_proj")
    unread = hidden * size * (form.norm_in and not reads(*gate_up))  # what gate and up are made of again is there
    tile = 3 * inner * size
    whole = (read, (reused - unread) * lean, (incoming + hidden) * size + low_all, tile, sums + dense * 3 // 2)
    trained = sum(p.numel() for p in layer.parameters()) * size if full else gradients(*weights)
    tiled = (whole, moments[-1]) if fused else moments
    return LayerCosts(
        hidden * size, hidden * size * (not lean), kept, form.norm_in or reads(*qkv), moments, tiled,
        2 * inner * size * fused, norms, copies, trained, backend,
    )  # fmt: skip


@dataclass(frozen=True)
class StepCosts:
    """A whole model, in bytes; hidden, the residual stream, and tables, cos and sin, are a token's.

    gradients: of all trained tensors. stepping: what the optimiser's step takes besides its states. size: of an
    element of activations. tied: whether the head's weight is the embedding's. accumulates: several micro-batches a
    step.
    """

    layers: tuple[LayerCosts, ...]
    weights: int
    adapters: int
    gradients: int
    optimiser: int
    stepping: int
    hidden: int
    tables: int
    vocabulary: int
    size: int
    trained_head: bool
    tied: bool
    accumulates: bool = False

    def standing(self) -> dict[str, int]:
        """Parts that are there all the time."""
        return {"weights": self.weights, "adapters": self.adapters, "optimiser": self.optimiser}

    def worst_moment(self, policy: str | Sequence[str], tokens: int) -> dict[str, int]:
        """Bytes of every part when their sum is largest; policy: of all layers, or of each ("offload": of all)."""
        policies = per_layer(policy, len(self.layers))
        stored = [layer.stored(own) for layer, own in zip(self.layers, policies, strict=True)]
        below, again = sum(stored), [own in ("recompute", "offload") for own in policies]
        # kept activations mean that a step can be taken again: earlier gradients are set aside until it is done
        sets_aside = not all(again)
        # of the inputs in host memory the last stays, then the next is fetched; one that is a leaf never leaves
        here = self.hidden * (1 + (not self.trained_head)) if policies[0] == "offload" else 0
        table = self.vocabulary * self.hidden * self.trained_head  # bytes of the head's weight, and of its gradient
        earlier = self.gradients if self.accumulates else 0
        copies = sum(layer.copies for layer, runs_again in zip(self.layers, again, strict=True) if not runs_again)
        activations = tokens * (below + here + 2 * self.hidden + self.tables) + copies
        moments = [self._moment(earlier, activations, self._loss(tokens), 0)]
        gradients = table
        for index in reversed(range(len(self.layers))):
            layer, runs_again = self.layers[index], again[index]
            below -= stored[index]
            here = here if index else 0  # nothing is below that could be fetched
            # what enters it, and what its second forward makes of that
            both_ends = self.hidden * (1 if runs_again else layer.keeps_entering) + layer.leaving * runs_again
            of_layer = layer.tiled if tokens > TILE else layer.moments
            new, own = gradients if sets_aside or not self.accumulates else 0, policies[index]
            for moment, (kept, absent, workspace, of_tile, fixed) in enumerate(of_layer, 1 - len(of_layer)):
                if not runs_again:  # the MLP's moments come first: what is before attention is made again after them
                    absent = left_out(own, layer.norms[0], layer.remade) * (moment < 0)
                kept += below + here + both_ends + self.tables - absent
                activations = tokens * kept + copies + layer.copies * runs_again
                workspace = tokens * workspace + min(tokens, TILE) * of_tile + fixed
                moments.append(self._moment(earlier + new, activations, 0, workspace))
            gradients += layer.gradients
            copies -= layer.copies * (not runs_again)
        moments.append(self._moment(self.gradients + earlier * sets_aside, 0, 0, table * self.tied))
        moments.append(self._moment(self.gradients, 0, 0, self.stepping))
        return max(moments, key=lambda parts: sum(parts.values()))

    def graphs(self, tokens: int, policy: str | Sequence[str] = "keep") -> int:
        """Bytes that CUDA graphs, the largest of so many tokens, hold between steps: all activations, layer inputs that
        are offloaded too, a layer's backward, adapters in one dtype, embeddings, gradients as made and as shared.
        """
        each = ["recompute" if own == "offload" else own for own in per_layer(policy, len(self.layers))]
        kept = sum(tokens * one.stored(own) + one.copies for one, own in zip(self.layers, each, strict=True))
        again, leaving, moments = each[-1] == "recompute", self.layers[-1].leaving, self.layers[-1].moments
        last = max(tokens * (space + again * (left + leaving)) + fixed for left, _, space, _, fixed in moments)
        return kept + last + 2 * tokens * self.hidden + 2 * self.gradients + _GRAPHS

    def _moment(self, gradients: int, activations: int, loss: int, workspace: int) -> dict[str, int]:
        return self.standing() | {
            "gradients": gradients, "activations": activations, "loss": loss, "workspace": workspace + _LIBRARIES,
        }  # fmt: skip

    def _loss(self, targets: int) -> int:
        """The rows that the head reads, their gradient, a chunk of logits, and the gradient of a trained head."""
        chunk = min(targets, chunk_rows(self.vocabulary, self.size, "cuda", trainable=self.trained_head))
        table = self.vocabulary * self.hidden * self.trained_head
        sums = table // self.size * 4
        return targets * (2 * self.hidden + _STATISTICS) + sums + max(chunk * self.vocabulary * self.size, table)


def optimiser_bytes(name: str, tensors: Iterable[tuple[int, int, bool]]) -> tuple[int, int]:
    """(bytes of states, bytes that a step takes besides) for trained tensors (elements, bytes of each, embedding?).

    The 8-bit optimisers hold tensors of fewer than 4,096 elements in fp32, and transformers' Trainer has them hold
    embeddings so; paged states of 100,000 elements and more are not the GPU's. Raises ValueError for an unknown name.
    """
    if name not in OPTIMISERS:
        raise ValueError(f"plan does not know the optimiser {name!r}; it knows {', '.join(OPTIMISERS)}")
    states = step = 0
    for elements, size, embedding in tensors:
        if "8bit" in name:
            in_fp32 = embedding or elements < 4096
            paged = name.startswith("paged") and elements >= 100_000
            states += 0 if paged else (8 if in_fp32 else 2) * elements
            states += 0 if in_fp32 else 8 * -(-elements // 256)  # scales of blocks
        elif name.startswith("adamw"):
            states += 2 * elements * size
            step += elements * size * (name == "adamw_torch")  # its square roots, of all tensors at once
    return states, step


def step_costs(
    model: Any, ranks: Mapping[str, int], *, full: bool = False, quantised: bool = False, optimiser: str = "adamw_8bit",
    accumulates: bool = False, samples: Samples | None = None,
) -> StepCosts:  # fmt: skip
    """Costs of training a causal LM, all its layers fused, on any device; its dtype is that of activations too.

    ranks: of the adapters to be, by module name; empty with full. quantised: to NF4, all projections but the head.
    accumulates: several micro-batches a step. samples: None where nobody knows them.
    """
    size, backbone, head = model.dtype.itemsize, model.base_model, model.get_output_embeddings()
    adapter_size = 2 if quantised else 4  # as the loader and TRL hold them
    modules = dict(model.named_modules())
    embedding = model.get_input_embeddings().weight
    trained: list[tuple[int, int, bool]] = []
    for name, rank in ranks.items():
        trained += [(rank * side, adapter_size, False) for side in modules[name].weight.shape]
    adapters = sum(elements * each for elements, each, _ in trained)
    if full:
        trained = [(p.numel(), size, p is embedding) for p in model.parameters()]
    path = next(name for name, module in modules.items() if module is backbone.layers)
    layers = []
    for index, layer in enumerate(backbone.layers):
        inside = f"{path}.{index}."
        own = {name.rpartition(".")[2]: rank for name, rank in ranks.items() if name.startswith(inside)}
        layers.append(layer_costs(layer, own, full, quantised, size, adapter_size, samples))
    states, stepping = optimiser_bytes(optimiser, trained)
    vocabulary, hidden = head.weight.shape
    rotations = getattr(model.config, "rope_parameters", None) or {}  # gemma3 and olmo3 have two kinds of layers
    tables = 2 * backbone.layers[0].self_attn.head_dim * max(1, sum(isinstance(r, dict) for r in rotations.values()))
    return StepCosts(
        tuple(layers), weight_bytes(model, quantised), adapters,
        sum(elements * each for elements, each, _ in trained), states, stepping,
        hidden * size, tables * size, vocabulary, size, full, head.weight is embedding, accumulates,
    )  # fmt: skip


def weight_bytes(model: Any, quantised: bool) -> int:
    """Of a causal LM's parameters; quantised: all projections but the head to NF4."""
    size, head = model.dtype.itemsize, model.get_output_embeddings()
    total: int = sum(parameter.numel() for parameter in model.parameters()) * size
    linear = (m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    return total + sum(_nf4_bytes(count) - count * size for count in linear) if quantised else total


def _nf4_bytes(elements: int) -> int:
    """A weight in doubly quantised NF4: half a byte an element, a byte a block of 64, 4 bytes for 256 of these."""
    blocks = -(-elements // 64)
    return -(-elements // 2) + blocks + 4 * -(-blocks // 256)
