"""Layer inputs that wait for backward in host memory, copied there and back while the GPU computes.

A layer's input stays where it is until the next layer has been launched, so that the last one's, which backward needs
at once, never leaves. Then it is copied to a slot of pinned memory on a stream of its own. Backward of a layer starts
the copy back of the layer below, into memory of the compute stream. Streams wait for one another by events, the host
for neither; what is freed goes back to the compute stream after that has waited for the copy. On a CPU the same code
runs with ordinary memory.

Costs: tokens x hidden x layers bytes of host memory, twice over the bus in a step; on the GPU two inputs, not all.
"""

from __future__ import annotations

import mmap
import sys
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Offload"]

_ROUND = 2**21  # bytes; batches that differ by a few tokens have slots of one size, and pages are that large


class Offload:
    """Where the layers of one model leave their inputs.

    on: whether they do. paused: they stay all the same, in what is captured as a CUDA graph now. A copy of a model has
    memory of its own; a pickle holds none.
    """

    def __init__(self, on: bool = False) -> None:
        self.on, self.paused = on, False
        self._slabs: dict[torch.device, _Slab] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Offload, (self.on,)

    def expect(self, devices: Iterable[torch.device]) -> None:
        """The model is about to run, and these are the devices of its layers."""
        for slab in self._slabs.values():
            slab.expected = 0
        for device in devices:
            self._slab(device).expected += 1

    def _slab(self, device: torch.device) -> _Slab:
        if device not in self._slabs:
            self._slabs[device] = _Slab(device)
        return self._slabs[device]

    def inputs(self, device: torch.device) -> saved_tensors_hooks:
        """Within it, what a function on this device saves for backward is a layer's input."""
        return saved_tensors_hooks(self._slab(device).hold, _get)

    def nbytes(self) -> int:
        """Host memory held now, in bytes."""
        return sum(slab.slots * slab.slot_bytes for slab in self._slabs.values())


class _Slab:
    """Host memory for the inputs of one device's layers: equal slots, cut from one allocation where it was foreseen.

    All copies go through one stream, so a slot that is free for the host is free for the next copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.expected = self.slots = self.slot_bytes = 0
        self.free: list[Tensor] = []
        self.newest: weakref.ref[_Held] | None = None

    def hold(self, tensor: Tensor) -> _Held | Tensor:
        """Takes the place of a layer's input until backward asks for it; the input before this one leaves the device.

        A tensor with gaps stays, for its copy would have other strides, a subclass, which a slot would not bring back,
        and what autograd holds in any case: frozen embeddings that were made to take a gradient.
        """
        plain = type(tensor) is Tensor and tensor.is_contiguous()
        if not plain or (tensor.is_leaf and tensor.requires_grad) or tensor.numel() == 0:
            self.expected -= 1
            return tensor
        before = None if self.newest is None else self.newest()
        held = _Held(self, tensor.detach(), self.newest)
        self.newest = weakref.ref(held)
        if before is not None:
            before.leave()
        return held

    def take(self, size: int) -> Tensor:
        """A slot of at least ``size`` bytes, uint8; larger ones than ever replace all that are free."""
        if size > self.slot_bytes:
            self.free.clear()  # before there is more
            count = max(self.expected - 1, self.slots, 1)  # the last input stays
            self.slots, self.slot_bytes = 0, -(-size // _ROUND) * _ROUND
            self._grow(count)
        elif not self.free:  # another forward before this one's backward
            self._grow(1)
        return self.free.pop()

    def _grow(self, count: int) -> None:
        memory = _host_memory(count * self.slot_bytes, self.stream)
        self.free.extend(memory.split(self.slot_bytes))
        self.slots += count

    def now(self) -> tuple[torch.cuda.Stream | None, torch.cuda.Event | None]:
        """The stream that computes, and an event at its end; None and None on a CPU."""
        if self.stream is None:
            return None, None
        compute = torch.cuda.current_stream(self.device)
        return compute, compute.record_event()

    def copy(self, to: Tensor, source: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy once ``after`` has happened; returns the event of its end. On a CPU at once, and None."""
        if self.stream is None or after is None:
            to.copy_(source)
            return None
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What is computed from here on comes after the event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def give(self, slot: Tensor) -> None:
        if slot.nbytes == self.slot_bytes:
            self.free.append(slot)


class _Held:
    """One layer's input [B, T, hidden] between forward and backward. Autograd owns it, and frees it after its use."""

    def __init__(self, slab: _Slab, source: Tensor, before: weakref.ref[_Held] | None) -> None:
        self.slab, self.before = slab, before
        self.source: Tensor | None = source  # on its device, until it has left
        self.slot: Tensor | None = None
        self.fetched: Tensor | None = None  # on its device again, or on its way there
        self.shape, self.dtype = source.shape, source.dtype
        self.compute, self.event = slab.now()  # from here on there is something to copy

    def leave(self) -> None:
        """Start the copy to host memory; its device's memory is free for what the compute stream does after that."""
        if self.source is None:
            return
        if self.slot is None:
            self.slot = self.slab.take(self.source.nbytes)
        self.slab.wait(self.slab.copy(self._stored(), self.source, self.event))
        self.source = None

    def fetch(self) -> None:
        """Start the copy back, unless it is there or on its way."""
        if self.source is not None or self.fetched is not None:
            return
        fetched = torch.empty(self.shape, dtype=self.dtype, device=self.slab.device)
        self.compute, free = self.slab.now()  # whoever had this memory before is done with it
        self.event = self.slab.copy(fetched, self._stored(), free)
        self.fetched = fetched

    def get(self) -> Tensor:
        """The input, on its device."""
        self.fetch()
        if self.source is not None:
            return self.source
        result, self.fetched = self.fetched, None
        assert result is not None
        self.slab.wait(self.event)
        return result

    def _stored(self) -> Tensor:
        assert self.slot is not None
        return self.slot[: self.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shape)

    def __del__(self) -> None:
        if self.fetched is not None and self.compute is not None and self.event is not None:
            self.compute.wait_event(self.event)  # nobody asked for it, and it is still being written
        if self.slot is not None:
            self.slab.give(self.slot)


def _get(held: _Held | Tensor) -> Tensor:
    """What a layer's backward needs; the input of the layer below is on its way then."""
    if isinstance(held, Tensor):
        return held
    result = held.get()
    below = None if held.before is None else held.before()
    if below is not None:
        below.fetch()
    return result


def _host_memory(size: int, stream: torch.cuda.Stream | None) -> Tensor:
    """uint8 [size], pinned for the GPU of this stream where that can be had.

    torch's own pinned memory is rounded up to a power of two, which for 85 GiB would be 128.
    """
    if stream is None:
        return torch.empty(size, dtype=torch.uint8)
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with torch.cuda.device(stream.device):
        if pages.pin(memory.data_ptr(), stream):
            return memory
        with suppress(RuntimeError):  # the next launch would be blamed for the error that pinning left
            torch.ones((), device=stream.device)
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            warnings.warn(
                f"fastlm: {size / 2**30:.1f} GiB of host memory cannot be pinned, so that offloading layer inputs "
                "holds up every step; raise the limit on locked memory, or use a smaller batch",
                UserWarning, stacklevel=2,
            )  # fmt: skip
            return memory


class _Pages(mmap.mmap):
    """Anonymous memory, unpinned before it is freed, which is when no tensor shows it any more."""

    _pinned: tuple[int, torch.cuda.Stream] | None = None

    def pin(self, address: int, stream: torch.cuda.Stream) -> bool:
        """Page-lock it; False where the driver refuses."""
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # a forked data loader would copy pinned pages
            with suppress(OSError):  # this kernel does not know it
                self.madvise(advice)
        cudart: Any = torch.cuda.cudart()
        if cudart.cudaHostRegister(address, len(self), 0) != cudart.cudaError.success:
            return False
        self._pinned = address, stream
        return True

    def __del__(self) -> None:
        if self._pinned is not None and not sys.is_finalizing():
            address, stream = self._pinned
            with torch.cuda.device(stream.device):
                stream.synchronize()  # only here: a larger batch than ever, or the model is gone
                torch.cuda.cudart().cudaHostUnregister(address)
