"""Decoder layers as CUDA graphs, for steps of so few tokens that the GPU waits for the host.

An 8B model with adapters makes some hundred launches a layer and step, 0.2 s on the host however few the tokens are. A
graph is one launch. Forward and backward of the whole backbone, from the embeddings to the last norm, are captured for
a few sizes: tokens rounded up by an eighth at most, samples to a power of two; a size that comes seldom goes as a
larger one. The tail is one more sample, of zeros, which nothing reads and whose gradient is zero; entries of cu_seqlens
that are not used repeat its end. Boundaries are data on the device, so one graph serves all batches of its size.
Products of other shapes round otherwise: losses are those without graphs to a tolerance, and to the bit where neither
tokens nor entries are added.

What is captured holds for the addresses, adapters, hooks and modes of that moment. They are compared at every call,
and a call that differs in anything runs as it would without graphs. Looking at an 8B model takes the host 2 ms, so the
GPU is sent ahead where nothing that a graph reads has been freed: what it writes is its own, and an output that should
not be is thrown away. All graphs share one pool of memory: one pass of one graph, forward and backward, is in flight
at a time, and a second one runs without.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..packing.boundaries import SequenceBoundaries
from .capture import Buffers, Graph, Size, run_stock
from .watched import Watched, usual

__all__ = ["LayerGraphs", "Size", "largest_size", "size_of"]

_STEP = 64  # tokens: sizes are multiples of it, or of an eighth of the power of two below
_LONGEST = (1024, 2047, 8192, 2**15, 2**17)  # bounds of the longest sample; at 2,048 other attention kernels begin
_NEAR = 1.25  # a graph of at most so many times the tokens serves a size as well as one of its own
_ENOUGH = 10  # times that another serves, before capturing takes less than its tail does
_CHANGES = 4  # of what a graph depends on, the first capture among them: from then on it runs without
_NEEDED = {"input_ids", "boundaries", "position_ids", "attention_mask", "use_cache"}


def size_of(tokens: int, samples: int, longest: int) -> Size | None:
    """The size that serves so many tokens and samples; None where there is none.

    >>> size_of(450, 2, 300), size_of(3700, 16, 1024)
    (Size(tokens=512, entries=4, longest=1024), Size(tokens=3840, entries=32, longest=1024))
    """
    step = _step(tokens)
    bound = next((bound for bound in _LONGEST if bound >= max(longest, step - 1)), None)  # the tail is a sample too
    return None if bound is None else Size(-(-tokens // step) * step, 1 << (samples + 1).bit_length(), bound)


def largest_size(tokens: int) -> int:
    """Tokens of the largest size that has no more than these."""
    return tokens // _step(tokens) * _step(tokens)


def _step(tokens: int) -> int:
    return max(_STEP, 1 << max(tokens.bit_length() - 4, 0))


class LayerGraphs:
    """The graphs of one model's backbone; ``bind`` makes it run them.

    limit: tokens of the largest step that may. say: told what was captured, and why it could not be.
    recomputed: whether every layer is run again in a graph's backward, whatever steps without graphs keep.
    replays: forwards that ran as a graph.
    """

    def __init__(self, backbone: Any, limit: int, say: Callable[[str], None]) -> None:
        self.limit, self.say, self.recomputed = limit, say, False
        self.replays = 0
        self._watched = Watched(backbone)
        self._facts: Any = None
        self._read: dict[int, StorageWeakRef] = {}  # memory that captured graphs read, by its handle
        self._ahead = False  # whether the last call was like those that are captured
        self._changes = 0
        self._graphs: dict[Any, Graph] = {}
        self._seen: Counter[Any] = Counter()
        self._planned: list[Size] = []
        self._buffers: Buffers | None = None
        self._pass: Callable[[], Any] = _nothing  # a weak reference to the forward whose backward is to come

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copied or loaded model has none

    @property
    def holds(self) -> bool:
        """Whether there is memory that ``release`` would free."""
        return self._buffers is not None

    @property
    def obstacle(self) -> str | None:
        """Why this backbone cannot be captured; None where it can."""
        return self._watched.obstacle

    def bind(self, backbone: Any) -> None:
        """Run this model's small steps as graphs from now on."""
        backbone._fastlm_graphs = self
        backbone.__dict__["forward"] = MethodType(_forward_for(type(backbone)), backbone)  # type: ignore[arg-type]

    @staticmethod
    def unbind(backbone: Any) -> None:
        """Put the class's forward back, and free what the graphs hold."""
        if "_fastlm_graphs" in backbone.__dict__:  # None in a copy
            backbone.__dict__.pop("forward", None)
        graphs: LayerGraphs | None = backbone.__dict__.pop("_fastlm_graphs", None)
        if graphs is not None:
            graphs.release()

    def plan(self, sizes: Iterable[Size]) -> None:
        """Sizes to capture at the next call, the largest first: the others then live in its memory."""
        self._planned = sorted(sizes, reverse=True)

    def release(self) -> bool:
        """Free all graphs and their memory; whether there was something to free."""
        held = self.holds
        self._graphs.clear()
        self._seen.clear()
        self._planned, self._buffers, self._pass, self._read = [], None, _nothing, {}
        if held:
            torch.cuda.empty_cache()
        return held

    def stop(self) -> None:
        """From here on no step runs as a graph; frees them as ``release`` does."""
        self.limit = 0
        self.release()

    def run(self, backbone: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Last hidden states [1, T, hidden] of a call that prepare_backbone made; None where no graph serves it."""
        boundaries: SequenceBoundaries = kwargs["boundaries"]
        if boundaries.token_count > self.limit or self._pass() is not None or not usual(backbone):
            return None
        size = size_of(boundaries.token_count, boundaries.sample_count, boundaries.max_length)
        if size is None:
            return None
        embedded = backbone.get_input_embeddings()(kwargs["input_ids"])
        kind = embedded.device.type
        mode = (
            embedded.dtype, embedded.requires_grad, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        out, begun = self._begin(size, mode, embedded, boundaries)
        trained = self._watched.trained()
        self._ahead = self._watched.unchanged(trained) and self._same(out)
        graph = self._captured(backbone, size, mode, embedded, trained) if self._ahead else None
        if graph is None:
            return run_stock(backbone, embedded, kwargs)
        if out is None or graph is not begun():
            out = graph.forward(embedded, boundaries)
        current = _Pass(out)
        self._pass = weakref.ref(current)
        self.replays += 1
        found: Tensor = _Replay.apply(self, graph, current, embedded, *trained)
        return found

    def _begin(
        self, size: Size, mode: tuple[Any, ...], embedded: Tensor, boundaries: SequenceBoundaries
    ) -> tuple[Tensor | None, Callable[[], Graph | None]]:
        """What comes out of the graph that serves such a call if nothing has changed, and a weak reference to it, which
        may be released yet; None where there is none, or where memory that it reads was freed.
        """
        graph = self._graphs.get((self._serving(size, mode, embedded.shape[1]), mode)) if self._ahead else None
        # StorageWeakRef.expired of all, in a seventh of the time
        if graph is None or any(map(torch.UntypedStorage._expired, self._read)):
            return None, _nothing
        return graph.forward(embedded, boundaries), weakref.ref(graph)

    def _same(self, coming: Tensor | None) -> bool:
        """Whether graphs may serve; those of other adapters or addresses are freed. coming: of one that may yet run."""
        facts = self._watched.facts()
        if facts == self._facts:
            return True
        if coming is not None and coming.is_cuda:
            torch.cuda.synchronize(coming.device)
        planned, self._changes = self._planned, self._changes + 1
        self.release()
        self._facts, self._planned = facts, planned
        if self._changes <= _CHANGES:
            return True
        self.stop()
        self.say("steps run without CUDA graphs: adapters, addresses or policies change all the time")
        return False

    def _captured(
        self, backbone: Any, size: Size, mode: tuple[Any, ...], embedded: Tensor, trained: list[Tensor]
    ) -> Graph | None:
        """``_graph``; None, and no graphs from then on, where capturing fails."""
        try:
            return self._graph(backbone, size, mode, embedded, trained)
        except (RuntimeError, ValueError) as error:  # what CUDA and torch refuse to capture; memory, too
            self.stop()
            self.say(f"steps run without CUDA graphs, since capturing failed: {type(error).__name__}: {error}")
            return None

    def backward(self, graph: Graph, current: _Pass, dout: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        if self._pass() is not current:
            raise RuntimeError(
                "backward a second time through a step that ran as a CUDA graph, whose activations are gone; for "
                "backward with retain_graph=True load the model with cuda_graphs=False"
            )
        self._pass = _nothing
        return graph.backward(dout)

    def _graph(
        self, backbone: Any, size: Size, mode: tuple[Any, ...], embedded: Tensor, trained: list[Tensor]
    ) -> Graph | None:
        """The graph for this size, captured where it was planned or comes often enough; else that of a larger one."""
        planned, self._planned = self._planned, []
        tokens = embedded.shape[1]
        serving = self._serving(size, mode, tokens)
        near = serving is not None and serving.tokens <= _NEAR * size.tokens
        again = not near and self._seen[size, mode] >= (_ENOUGH if serving else 1)
        self._seen[size, mode] += 1
        began, held = perf_counter(), _reserved(embedded.device) if planned else 0  # asking walks all its statistics
        for one in planned or ([size] if again else []):
            if self._buffers is None:
                self._buffers = Buffers(embedded, max(self.limit, one.tokens), trained)
                self._read = self._watched.storages()
            if (one, mode) not in self._graphs and one.tokens <= self._buffers.hidden.shape[1]:
                self._graphs[one, mode] = Graph(
                    backbone, one, self._buffers, embedded.requires_grad, trained, self.recomputed
                )
        if planned:
            seconds, gib = perf_counter() - began, (_reserved(embedded.device) - held) / 2**30
            inputs = ", their layer inputs among it" * self._watched.offloads(backbone)
            twice = ", in which activations are recomputed" * self.recomputed
            self.say(
                f"steps of up to {planned[0].tokens} tokens run as CUDA graphs{twice}: {len(planned)} "
                f"size{'s' * (len(planned) > 1)} captured in {seconds:.1f} s, {gib:.1f} GiB held for them{inputs}"
            )
        return self._graphs.get((self._serving(size, mode, tokens), mode))

    def _serving(self, size: Size, mode: tuple[Any, ...], tokens: int) -> Size | None:
        """The smallest captured size that serves this one; the tail after so many tokens is a sample too."""
        found = (one for one, of in self._graphs if of == mode and size.fits_in(one))
        return min((one for one in found if one.tokens - tokens <= one.longest), default=None)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


class _Pass:
    """A forward whose backward is to come; the graph of autograd holds it. out: until autograd has it."""

    def __init__(self, out: Tensor) -> None:
        self.out: Tensor | None = out


def _nothing() -> None:
    return None


class _Replay(torch.autograd.Function):
    """One pass of a graph; every trained tensor is an input, so that each gradient is given once."""

    @staticmethod
    def forward(
        ctx: Any, graphs: LayerGraphs, graph: Graph, current: _Pass, embedded: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.graphs, ctx.graph, ctx.current = graphs, graph, current
        ctx.save_for_backward(embedded.new_empty(0))
        out, current.out = current.out, None
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # a second time this is torch's own error
        dembedded, gradients = ctx.graphs.backward(ctx.graph, ctx.current, dout)
        return None, None, None, dembedded, *gradients


@functools.cache
def _forward_for(backbone_class: type) -> Any:
    """The backbone's forward with graphs, under the name and signature of the class's own."""

    @functools.wraps(backbone_class.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs: LayerGraphs | None = self.__dict__.get("_fastlm_graphs")
        given = {name: value for name, value in kwargs.items() if value is not None}
        if graphs is not None and not args and given.keys() == _NEEDED:
            hidden: Any = graphs.run(self, given)  # releases declare what the output holds in different ways
            if hidden is not None:
                return BaseModelOutputWithPast(last_hidden_state=hidden)
        return type(self).forward(self, *args, **kwargs)

    return forward
