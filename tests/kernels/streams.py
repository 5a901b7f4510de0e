"""Two streams simulated on a CPU: what one reads that the other has not finished, or whose memory is free already."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VIEWS = ("view", "_unsafe_view", "t", "alias", "detach", "expand", "split", "split_with_sizes")


class Streams(TorchDispatchMode):
    """faults: accesses that nothing orders. work, time: multiplications in all, and one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.clock, self.known = 0, [0, 0], [[0, 0], [0, 0]]  # known: the other's launches waited for
        self.accesses: dict[int, tuple[Any, int, list[tuple[int, int, bool, str]]]] = {}
        self.faults: list[str] = []
        self.work, self.time = 0, [0, 0]

    def wait(self, waiting: int, other: int) -> None:
        self.known[waiting][other] = self.clock[other]
        self.time[waiting] = max(self.time)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        read = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        out = function(*args, **(kwargs or {}))
        if (name := function.name().split(":")[-1]).split(".")[0] in _VIEWS:
            return out
        now, stream = self.clock[self.current] + 1, self.current
        self.clock[stream] = now
        if name.startswith(("mm", "addmm")):
            a, b = [tensor for tensor in args if isinstance(tensor, torch.Tensor)][-2:]
            self.work += a.numel() * b.shape[1]
            self.time[stream] += a.numel() * b.shape[1]
        before = {tensor.untyped_storage()._cdata for tensor in read}
        results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        written = {tensor.untyped_storage()._cdata for tensor in results}
        storages = [tensor.untyped_storage() for tensor in read + results]
        for storage in {storage._cdata: storage for storage in storages}.values():
            made_by = 0 if storage._cdata in before else stream
            _, _, others = self.accesses.setdefault(storage._cdata, (StorageWeakRef(storage), made_by, []))
            writes = storage._cdata in written
            for other, when, wrote, what in others:
                if other != stream and (wrote or writes) and self.known[stream][other] < when:
                    self.faults.append(f"{what} and {name} at once")
            others.append((stream, now, writes, name))
        return out

    def sweep(self) -> None:
        """What is freed goes to the next who allocates on its stream; the side stream waits before it does."""
        for key, (storage, made_by, accesses) in list(self.accesses.items()):
            if storage.expired():
                late = [what for stream, when, _, what in accesses if stream == 1 and self.known[0][1] < when]
                self.faults += [f"freed under {what}" for what in late if made_by == 0]
                del self.accesses[key]

    def branch(self, device: torch.device) -> _Branch:
        return _Branch(self)


class _Branch:
    """kernels/launch.py's Branch, as while a graph is captured."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._held = streams, list[Any]()

    def __enter__(self) -> None:
        assert self._streams.current == 0
        self._streams.wait(1, 0)
        self._streams.current = 1

    def __exit__(self, *_: object) -> None:
        self._streams.current = 0

    def hold(self, *tensors: Any) -> None:
        self._held += tensors

    def join(self) -> None:
        self._streams.wait(0, 1)
        self._held.clear()
