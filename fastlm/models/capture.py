"""One pass of a backbone, forward and backward, captured as two CUDA graphs for one size; see graphs.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from ..packing.boundaries import SequenceBoundaries
from .adapters import CASTS, factors
from .checkpointing import policy_of, set_policies

__all__ = ["Buffers", "Graph", "Size", "run_stock"]


@dataclass(frozen=True, order=True)
class Size:
    """What one graph serves: tokens, entries of cu_seqlens, a bound of the longest sample's tokens."""

    tokens: int
    entries: int
    longest: int

    def fits_in(self, other: Size) -> bool:
        """Whether the other serves whatever this one does."""
        return self.tokens <= other.tokens and self.entries <= other.entries and self.longest <= other.longest


class Buffers:
    """What all graphs of a model read and write, for at most so many tokens, and the pool that they live in.

    gradients: of every trained tensor, those of one dtype end to end in one of ``flat``.
    """

    def __init__(self, embedded: Tensor, tokens: int, trained: Sequence[Tensor]) -> None:
        device = embedded.device
        self.hidden = torch.zeros(1, tokens, embedded.shape[-1], dtype=embedded.dtype, device=device)
        self.dout = torch.zeros_like(self.hidden)
        self.position_ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        self.mask = torch.empty(1, 1, 0, 0, device=device)
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(trained):
            groups.setdefault(tensor.dtype, []).append(index)
        self.groups = [(group, [trained[i] for i in group]) for group in groups.values()]
        self.flat = [one[0].new_empty(sum(t.numel() for t in one)) for _, one in self.groups]
        self.gradients = self.gradients_in(self.flat)
        self.record = recorder(device)

    def gradients_in(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Views of these, one for every trained tensor."""
        views: dict[int, Tensor] = {}
        for (group, tensors), whole in zip(self.groups, flat, strict=True):
            views.update(zip(group, _unflatten_dense_tensors(whole, tensors), strict=True))
        return [views[index] for index in range(len(views))]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """For all captures on a GPU: each stream gets a workspace of 48 MiB from cuBLAS (Hopper), which it keeps."""
    return torch.cuda.Stream(device)


def recorder(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that captures what another launches, and returns what launches it again."""
    stream, pool = _stream(device), torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="relaxed")  # Triton may have a kernel to load yet
            done = False
            try:
                work()
                done = True
            finally:
                with nullcontext() if done else suppress(RuntimeError):  # that a capture which failed is of no use
                    graph.capture_end()
        current.wait_stream(stream)
        return graph.replay

    return record


class Graph:
    """Forward and backward of a backbone for one size, captured; recomputed: with every layer run again in backward."""

    def __init__(
        self, backbone: Any, size: Size, buffers: Buffers, needs_gradient: bool, trained: Sequence[Tensor],
        recomputed: bool,
    ) -> None:  # fmt: skip
        self._hidden, self._dout = buffers.hidden[:, : size.tokens], buffers.dout[:, : size.tokens]
        self._position_ids = buffers.position_ids[:, : size.tokens]
        self._cu_seqlens = torch.full((size.entries,), size.tokens, dtype=torch.int32, device=self._hidden.device)
        self._cu_seqlens[0] = 0
        self._trained, self._needs_gradient, self._end = list(trained), needs_gradient, size.tokens
        self._buffers, self._recomputed = buffers, recomputed
        self._embedded = self._hidden.detach().requires_grad_(needs_gradient)
        self._out: Tensor
        self._dembedded: Tensor | None
        self._used: list[bool]  # whether a trained tensor has a gradient
        self._casts: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        boundaries = SequenceBoundaries(
            self._cu_seqlens, self._position_ids, None, None, None, size.longest, None, None
        )  # fmt: skip
        kwargs = dict(boundaries=boundaries, position_ids=self._position_ids, attention_mask=buffers.mask,
                      use_cache=False)  # fmt: skip
        self._launch_forward = buffers.record(functools.partial(self._run_forward, backbone, kwargs))
        if self._out.dtype != self._dout.dtype:  # of a last norm in float32
            self._dout = torch.zeros_like(self._out)
        self._launch_backward = buffers.record(functools.partial(self._run_backward, backbone))
        self._out = self._out.detach()  # lets go of the activations, whose memory the next graph may have
        self._casts.clear()

    def _run_forward(self, backbone: Any, kwargs: dict[str, Any]) -> None:
        kind = self._hidden.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # a cast that autocast has kept would be captured as it is
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            self._casts = _cast_adapters(backbone, dtype if enabled else self._embedded.dtype, enabled)
            with self._as_captured(backbone):
                self._out = run_stock(backbone, self._embedded, kwargs)

    @contextmanager
    def _as_captured(self, backbone: Any) -> Iterator[None]:
        """Adapters as cast, and recomputed layers' inputs where they are: steps this small have small ones."""
        offload, own = backbone._fastlm_backbone.offload, [policy_of(layer, False) for layer in backbone.layers]
        offload.paused = True
        if self._recomputed:
            set_policies(backbone.layers, ["recompute"] * len(own))
        for module, casts in self._casts.items():
            module.__dict__[CASTS] = casts
        try:
            yield
        finally:
            offload.paused = False
            if self._recomputed:
                set_policies(backbone.layers, own)
            for module in self._casts:
                module.__dict__.pop(CASTS, None)

    def _run_backward(self, backbone: Any) -> None:
        wanted = [*([self._embedded] if self._needs_gradient else ()), *self._trained]
        # as backward is called by trainers; layers may be recomputed in it
        with torch.autocast(self._hidden.device.type, enabled=False), self._as_captured(backbone):
            found = torch.autograd.grad(self._out, wanted, self._dout, allow_unused=True)
        self._dembedded, gradients = (found[0], found[1:]) if self._needs_gradient else (None, found)
        self._used = [gradient is not None for gradient in gradients]
        rooms = [room for room, used in zip(self._buffers.gradients, self._used, strict=True) if used]
        torch._foreach_copy_(rooms, [gradient for gradient in gradients if gradient is not None])

    @torch.no_grad()
    def forward(self, embedded: Tensor, boundaries: SequenceBoundaries) -> Tensor:
        tokens, entries = embedded.shape[1], boundaries.sample_count + 1
        self._hidden[:, :tokens].copy_(embedded)
        self._hidden[:, tokens:].zero_()
        self._position_ids[:, :tokens].copy_(boundaries.position_ids)
        self._position_ids[:, tokens:].zero_()
        self._cu_seqlens[:entries].copy_(boundaries.cu_seqlens)
        self._cu_seqlens[entries:].fill_(self._end)
        self._launch_forward()
        return self._out[:, :tokens].clone()

    def backward(self, dout: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        tokens = dout.shape[1]
        self._dout[:, :tokens].copy_(dout)
        self._dout[:, tokens:].zero_()
        self._launch_backward()
        found = self._buffers.gradients_in([flat.clone() for flat in self._buffers.flat])
        gradients = [view if used else None for view, used in zip(found, self._used, strict=True)]
        return None if self._dembedded is None else self._dembedded[:, :tokens].clone(), gradients


def _cast_adapters(backbone: Any, dtype: torch.dtype, autocast: bool) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """A and B of every adapter that is fused, in this dtype, all made in a few launches: one a tensor takes 1 ms of a
    step of 8 billion parameters. The A come first, in the order of their modules, so that those of projections which
    read the same input lie side by side.
    """
    found = {module: pair for module in backbone.modules() if (pair := factors(module, dtype, autocast)) is not None}
    tensors = [pair[index].detach() for index in (0, 1) for pair in found.values()]
    if not tensors:
        return {}
    made = _unflatten_dense_tensors(tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype), tensors)
    torch._foreach_copy_(list(made), tensors)
    return dict(zip(found, zip(made[: len(found)], made[len(found) :], strict=True), strict=True))


def run_stock(backbone: Any, embedded: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The class's own forward on embeddings [1, T, hidden]: last hidden states of that shape."""
    kwargs = {name: value for name, value in kwargs.items() if name != "input_ids"}
    out: Tensor = type(backbone).forward(backbone, inputs_embeds=embedded, **kwargs).last_hidden_state
    return out
