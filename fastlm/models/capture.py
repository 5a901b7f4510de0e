"""One pass of a backbone, forward and backward, captured as two CUDA graphs for one size; see graphs.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..packing.boundaries import SequenceBoundaries

__all__ = ["Buffers", "Graph", "Size", "run_stock"]


@dataclass(frozen=True, order=True)
class Size:
    """What one graph serves: tokens, entries of cu_seqlens, a bound of the longest sample's tokens."""

    tokens: int
    entries: int
    longest: int


class Buffers:
    """What all graphs of a model read and write, for at most so many tokens, and the pool that they live in."""

    def __init__(self, embedded: Tensor, tokens: int) -> None:
        device = embedded.device
        self.hidden = torch.zeros(1, tokens, embedded.shape[-1], dtype=embedded.dtype, device=device)
        self.dout = torch.zeros_like(self.hidden)
        self.position_ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        self.mask = torch.empty(1, 1, 0, 0, device=device)
        self.record = recorder(device)


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
    """Forward and backward of a backbone for one size, captured."""

    def __init__(
        self, backbone: Any, size: Size, buffers: Buffers, needs_gradient: bool, trained: Sequence[Tensor]
    ) -> None:
        self._hidden, self._dout = buffers.hidden[:, : size.tokens], buffers.dout[:, : size.tokens]
        self._position_ids = buffers.position_ids[:, : size.tokens]
        self._cu_seqlens = torch.full((size.entries,), size.tokens, dtype=torch.int32, device=self._hidden.device)
        self._cu_seqlens[0] = 0
        self._trained, self._needs_gradient, self._end = list(trained), needs_gradient, size.tokens
        self._embedded = self._hidden.detach().requires_grad_(needs_gradient)
        self._out: Tensor
        self._dembedded: Tensor | None
        self._groups: list[list[int]]  # indices of gradients of one dtype
        self._flat: list[Tensor]  # they, end to end
        boundaries = SequenceBoundaries(
            self._cu_seqlens, self._position_ids, None, None, None, size.longest, None, None
        )  # fmt: skip
        kwargs = dict(boundaries=boundaries, position_ids=self._position_ids, attention_mask=buffers.mask,
                      use_cache=False)  # fmt: skip
        self._launch_forward = buffers.record(functools.partial(self._run_forward, backbone, kwargs))
        if self._out.dtype != self._dout.dtype:  # of a last norm in float32
            self._dout = torch.zeros_like(self._out)
        self._launch_backward = buffers.record(self._run_backward)
        self._out = self._out.detach()  # lets go of the activations, whose memory the next graph may have

    def _run_forward(self, backbone: Any, kwargs: dict[str, Any]) -> None:
        kind = self._hidden.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # a cast that autocast has kept would be captured as it is
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            self._out = run_stock(backbone, self._embedded, kwargs)

    def _run_backward(self) -> None:
        wanted = [*([self._embedded] if self._needs_gradient else ()), *self._trained]
        with torch.autocast(self._hidden.device.type, enabled=False):  # as backward is called by trainers
            found = torch.autograd.grad(self._out, wanted, self._dout, allow_unused=True)
        self._dembedded, gradients = (found[0], found[1:]) if self._needs_gradient else (None, found)
        groups: dict[torch.dtype, list[int]] = {}
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                groups.setdefault(gradient.dtype, []).append(index)
        self._groups = list(groups.values())
        self._flat = [_flatten_dense_tensors([gradients[i] for i in group]) for group in self._groups]

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
        gradients: list[Tensor | None] = [None] * len(self._trained)
        for group, flat in zip(self._groups, self._flat, strict=True):
            views = _unflatten_dense_tensors(flat.clone(), [self._trained[i] for i in group])
            for index, view in zip(group, views, strict=True):
                gradients[index] = view
        return None if self._dembedded is None else self._dembedded[:, :tokens].clone(), gradients


def run_stock(backbone: Any, embedded: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The class's own forward on embeddings [1, T, hidden]: last hidden states of that shape."""
    kwargs = {name: value for name, value in kwargs.items() if name != "input_ids"}
    out: Tensor = type(backbone).forward(backbone, inputs_embeds=embedded, **kwargs).last_hidden_state
    return out
