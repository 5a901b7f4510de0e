"""What an optimiser step costs the host: bitsandbytes' optimisers without a stop for every parameter, and a model whose
modules are not walked several times a step.

Both act on one trainer's objects: the optimiser's ``step`` is replaced on the instance (its states, their names and
``state_dict`` stay), and the model answers ``parameters()`` and ``train()`` from lists while ``Trainer.train`` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, is_, methodcaller
from traceback import walk_tb
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..models.patch import unwrap_peft
from .step import one_process, state_of

__all__ = ["create_optimizer", "set_embedding_rate", "shorten_walks", "train", "without_stops"]

_TOGETHER = 2**20  # elements: smaller parameters are updated many in a launch, larger ones fill a GPU alone
_BUCKET = 2**24  # elements of one launch: bounds what the copies of its parameters and gradients take
_BLOCK = 256  # elements that share an absmax in bitsandbytes' 8-bit states
_FLAT = {"state1", "state2", "absmax1", "absmax2"}
_WALK = "_fastlm_walk"

_Placed = tuple[Tensor, tuple[int, int]]  # a parameter; the indices of its group and in it


def create_optimizer(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.create_optimizer; during training what it is made of is final, so that the model is walked here."""
    state, there = state_of(trainer), trainer.optimizer is not None
    optimizer = original(trainer, *args, **kwargs)
    if state is None:
        return optimizer
    rate = getattr(trainer.args, "embedding_learning_rate", None)
    if rate is not None and not there:
        set_embedding_rate(optimizer, state.model, rate)
        state.rate_set = True
    elif rate is not None and not state.rate_set:
        raise ValueError("embedding_learning_rate needs the trainer's own optimizer: set the rate in yours instead")
    if not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled:
        without_stops(optimizer)
        if trainer.is_in_train and one_process(trainer):
            shorten_walks(trainer.model)
    return optimizer


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.train; however it ends, the model has its class's methods again."""
    try:
        return original(trainer, *args, **kwargs)
    except torch.OutOfMemoryError as error:
        if state_of(trainer) is not None and _in_a_step(error):
            error.add_note(
                'fastlm: the optimiser\'s step was too much. optim="adamw_8bit" has smaller states, "paged_adamw_8bit" '
                "holds large ones in host memory where they do not fit; a smaller r and 4 bits take less; "
                "`fastlm plan` says how much."
            )
        raise
    finally:
        for name in (_WALK, *_WALKERS) if _WALK in trainer.model.__dict__ else ():
            trainer.model.__dict__.pop(name, None)


def _in_a_step(error: BaseException) -> bool:
    """Whether an optimiser's step raised it, and nobody has said so: one that steps in backward is the batch's."""
    holders = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return not hasattr(error, "__notes__") and any(isinstance(one, torch.optim.Optimizer) for one in holders)


# --- the optimiser


def set_embedding_rate(optimizer: Any, model: Any, rate: float) -> None:
    """Move the embedding's and the head's trained parameters into groups of their own, with this learning rate.

    Before the first step and before a scheduler is made. ValueError where the optimiser has none of them.
    """
    core = unwrap_peft(model)
    tables = [module for module in (core.get_input_embeddings(), core.get_output_embeddings()) if module is not None]
    theirs = {parameter for module in tables for parameter in module.parameters() if parameter.requires_grad}
    if not any(parameter in theirs for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"embedding_learning_rate={rate}, but the optimiser trains neither embedding nor head: pass "
            "modules_to_save=['embed_tokens', 'lm_head'] to get_peft_model, with FSDP1 use_orig_params=True, or leave "
            "the rate out"
        )
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if parameter in theirs]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if parameter not in theirs]
            optimizer.add_param_group({**group, "params": moved, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def without_stops(optimizer: Any) -> None:
    """Replace the ``step`` of a bitsandbytes optimiser; leave any other as it is.

    Its own waits for the GPU after every parameter. Ours makes the same calls without that, small parameters laid end
    to end and updated in one call: the same bits. Paged states, which the host can read, are waited for once, at the
    end: they are fetched and updated on one stream, in order.
    """
    if "bitsandbytes" not in sys.modules:
        return
    from bitsandbytes.optim.optimizer import Optimizer8bit

    known = isinstance(optimizer, Optimizer8bit) and type(optimizer).__module__.startswith("bitsandbytes.optim.")
    if known and "step" not in optimizer.__dict__:
        optimizer._fastlm_buckets, optimizer._fastlm_groups = [], []
        optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(_step), optimizer)


@dataclass(eq=False)
class _Bucket:
    """Parameters whose states are views of ``flat``'s, in order.

    place: the first one's indices, of its group and in it. held: each parameter's ``state1``, to notice a new one.
    rows: each parameter's memory, as one row; that of one which is moved elsewhere is held until the next step.
    """

    place: tuple[int, int]
    parameters: list[Tensor]
    held: list[Tensor]
    rows: list[Tensor]
    flat: dict[str, Any]

    def is_stale(self, states: dict[int, dict[str, Any]]) -> bool:
        """Whether states were replaced, as load_state_dict does, or parameters lie elsewhere. states: as for update."""
        own = self._own(states)
        return (
            _addresses(self.parameters) != _addresses(self.rows)
            or not all(map(Tensor.is_contiguous, self.parameters))
            or {parameter.dtype for parameter in self.parameters} != {self.rows[0].dtype}
            or (len(own) == len(self.held) and not all(map(is_, map(methodcaller("get", "state1"), own), self.held)))
        )

    def _own(self, states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        return [states[one] for one in map(id, self.parameters) if one in states]

    def update(self, optimizer: Any, states: dict[int, dict[str, Any]]) -> bool:
        """One step of all, by the optimiser's own update_step; False, and nothing done, where they are not in step.

        states: of all parameters that have a gradient, by id.
        """
        own = self._own(states)
        steps = {state["step"] for state in own}
        if len(steps) > 1 or len(own) < len(self.parameters):
            return False
        weight = torch.cat(self.rows)
        weight.grad = _end_to_end([p.grad for p in self.parameters if p.grad is not None])
        self.flat["step"] = steps.pop()
        optimizer.state[weight] = self.flat
        try:
            optimizer.update_step(optimizer.param_groups[self.place[0]], weight, *self.place)
        finally:
            del optimizer.state[weight]
        for state in own:
            state["step"] = self.flat["step"]
        torch._foreach_copy_(self.rows, weight.split([row.numel() for row in self.rows]))
        return True


def _end_to_end(tensors: list[Tensor]) -> Tensor:
    """Tensors as one [n]: their own memory where they lie end to end, as a CUDA graph's gradients do, else a copy."""
    first, held = tensors[0], tensors[0].untyped_storage()
    begins = list(accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr()))
    end = begins.pop()
    if (
        _addresses(tensors) == begins
        and end <= held.data_ptr() + held.nbytes()
        and all(map(Tensor.is_contiguous, tensors))
        and len({tensor.dtype for tensor in tensors}) == 1
    ):
        return first.as_strided(((end - begins[0]) // first.element_size(),), (1,))
    return _flatten_dense_tensors(tensors)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


@torch.no_grad()
def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Optimizer8bit.step; see ``without_stops``."""
    from bitsandbytes.optim.optimizer import sync_gpu

    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not optimizer.initialized:
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    places: list[_Placed] = [
        (parameter, (i, j))
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if parameter.grad is not None
    ]
    states = {id(parameter): optimizer.state[parameter] for parameter, _ in places}  # tensors are slow to look up
    new = [(parameter, place) for parameter, place in places if not states[id(parameter)]]
    for parameter, (i, j) in new:
        optimizer.init_state(optimizer.param_groups[i], parameter, i, j)
        states[id(parameter)] = optimizer.state[parameter]
    groups = [(id(group), len(group["params"])) for group in optimizer.param_groups]
    buckets: list[_Bucket] = optimizer._fastlm_buckets
    if new or groups != optimizer._fastlm_groups or any(bucket.is_stale(states) for bucket in buckets):
        buckets = optimizer._fastlm_buckets = list(_buckets(optimizer, places))
        optimizer._fastlm_groups = groups
    with _on_the_default_stream(parameter for parameter, _ in places):
        done = {id(one) for bucket in buckets if bucket.update(optimizer, states) for one in bucket.parameters}
        alone = [(parameter, place) for parameter, place in places if id(parameter) not in done]
        for parameter, (i, j) in alone:
            optimizer.prefetch_state(parameter)
            optimizer.update_step(optimizer.param_groups[i], parameter, i, j)
    for parameter in {p.device: p for p, _ in alone if _is_paged(states[id(p)])}.values():
        with torch.cuda.device_of(parameter):
            sync_gpu(parameter)
    return loss


def _is_paged(state: dict[str, Any]) -> bool:
    """Whether the host can read these states where they lie; to torch they are on the CPU."""
    return getattr(state["state1"], "is_paged", False)


@contextmanager
def _on_the_default_stream(parameters: Iterable[Tensor]) -> Iterator[None]:
    """bitsandbytes launches there, which nothing orders with a stream of the user's: both wait, if there is one."""
    streams = [
        torch.cuda.default_stream(d) for d in {parameter.device for parameter in parameters if parameter.is_cuda}
    ]
    if all(torch.cuda.current_stream(stream.device) == stream for stream in streams):
        yield
        return
    torch.cuda.synchronize()
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
        torch.cuda.synchronize()


def _buckets(optimizer: Any, places: list[_Placed]) -> Iterator[_Bucket]:
    alike: dict[tuple[Any, ...], list[_Placed]] = {}
    manager = optimizer.mng  # per-parameter settings, for all optimisers of the process
    for parameter, place in places:
        state = optimizer.state[parameter]
        whole = state["state1"].dtype != torch.uint8 or parameter.numel() % _BLOCK == 0
        settings = id(parameter) in manager.pid2config or place in manager.index2config
        known = state.keys() <= _FLAT | {"step", "qmap1", "qmap2"} and state["state1"].shape == parameter.shape
        known &= parameter.is_contiguous() and state["state1"].is_contiguous()  # kernels read memory as it lies
        if whole and known and not settings and not _is_paged(state) and parameter.numel() <= _TOGETHER:
            kind = (place[0], parameter.device, parameter.dtype, state["state1"].dtype, state["step"])
            alike.setdefault(kind, []).append((parameter, place))
    for group in alike.values():
        some: list[_Placed] = []
        for i, one in enumerate(group):
            some.append(one)
            if i + 1 == len(group) or sum(p.numel() for p, _ in some) + group[i + 1][0].numel() > _BUCKET:
                if len(some) > 1:
                    yield _lay_out(optimizer, some[0][1], [parameter for parameter, _ in some])
                some = []


def _lay_out(optimizer: Any, place: tuple[int, int], parameters: list[Tensor]) -> _Bucket:
    """Moves the states into one tensor of each kind; what the parameters' states hold from then on are views."""
    states = [optimizer.state[parameter] for parameter in parameters]
    flat = dict(states[0])
    for name in _FLAT & flat.keys():
        parts = [state[name] for state in states]
        flat[name] = _flatten_dense_tensors(parts)
        for state, view in zip(states, _unflatten_dense_tensors(flat[name], parts), strict=True):
            state[name] = view
    rows = [parameter.detach().view(-1) for parameter in parameters]
    return _Bucket(place, parameters, [state["state1"] for state in states], rows, flat)


# --- the model


def shorten_walks(model: nn.Module) -> None:
    """Let this model answer ``parameters()`` and ``train()`` from lists of its modules, made anew when they change.

    zero_grad and gradient clipping call the one, Trainer's every step the other: 14 ms a step, together, in an 8B
    model with adapters.
    """
    if any(name in model.__dict__ for name in _WALKERS):
        return
    model.__dict__[_WALK] = _Walk(model)
    model.__dict__["parameters"] = MethodType(_WALKERS["parameters"], model)
    if model.__dict__[_WALK].plain:
        model.__dict__["train"] = MethodType(_WALKERS["train"], model)


class _Walk:
    """All modules of a model, and their own tables of children and parameters, which say whether it has changed.

    Most tables are empty in a model with adapters: whether they still are is one look at all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import PreTrainedModel

        self.modules = list(model.modules())
        children, holders = ([vars(module)[name] for module in self.modules] for name in ("_modules", "_parameters"))
        self.empty = [table for table in (*children, *holders) if not table]
        self.tables, self.holders = [table for table in children if table], [table for table in holders if table]
        self.children = self._children()
        self.found, self.unique = list[Any](), list[nn.Parameter]()
        stock = (nn.Module.train, PreTrainedModel.train)  # the latter adds something only where the mode changes
        self.plain = all(kind.train in stock for kind in {type(module) for module in self.modules})

    def _children(self) -> list[nn.Module | None]:
        return [child for table in self.tables for child in table.values()]

    def has_changed(self) -> bool:
        return any(self.empty) or self._children() != self.children

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once; who they are is worked out where one is another than before."""
        found = [parameter for table in self.holders for parameter in table.values()]
        if len(found) != len(self.found) or not all(map(is_, found, self.found)):
            self.found = found
            self.unique = list(dict.fromkeys(parameter for parameter in found if parameter is not None))
        return iter(self.unique)


def _walk_of(model: nn.Module) -> _Walk:
    if model.__dict__[_WALK].has_changed():
        model.__dict__[_WALK] = _Walk(model)
    return model.__dict__[_WALK]


def _walkers() -> dict[str, Callable[..., Any]]:
    """The methods under their classes' names: a pickled model then comes back with its class's own."""

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        if not recurse:
            return type(self).parameters(self, recurse)
        return _walk_of(self).parameters()

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if mode and all(map(attrgetter("training"), _walk_of(self).modules)) and self.__dict__[_WALK].plain:
            return self
        return type(self).train(self, mode)

    return {"parameters": parameters, "train": train}


_WALKERS = _walkers()
