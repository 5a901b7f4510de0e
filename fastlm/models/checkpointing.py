"""Decoder layers that keep only their input for backward and run again there (Chen et al., 2016, "Training Deep Nets
with Sublinear Memory Cost"), in place of torch's checkpoint: a gated MLP with adapters leaves its down product, a
quarter of a Llama-3-8B layer's multiplications, out of the second run, because nothing reads it.

transformers decides when (``gradient_checkpointing_enable``, the Trainer's flag) and calls a function kept on each
layer; ``choose`` puts ours there before each forward. A user's own function stays as it is, and torch's still runs a
layer that is not ours, that has a hook, or whose mask takes a gradient. Gradients are bit-identical to those without
recomputation. Inputs may wait in host memory (offload.py), where the model's ``Offload`` is on or transformers was
asked for its own way of it, whose copies the GPU waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from transformers.modeling_layers import GradientCheckpointingLayer

from .adapters import global_hooks, runs_hooks
from .offload import Offload

__all__ = ["CALL_CHECKPOINTS", "KEEPING", "choose", "leave_out", "policy_of", "recompute", "restore", "set_policies"]

KEEPING = ("keep", "light", "lean")  # policies of layers that are not recomputed
# until transformers 5.24 a layer's __call__ checkpoints, from then on the class's forward, which ours replaces
CALL_CHECKPOINTS = "__call__" in vars(GradientCheckpointingLayer)
# transformers' function where it was told to offload: torch's checkpoint, with copies on the stream that computes
_OFFLOADED = "checkpointing_enable.<locals>.checkpoint_func"


def choose(layers: Sequence[nn.Module], offload: Offload) -> None:
    """Make the patched layers among these recompute by our function, where transformers' were to do it."""
    devices = []
    for layer in layers:
        current: Any = layer.__dict__.get("_gradient_checkpointing_func")
        stock = _stock(current)
        func = getattr(stock, "func", None)
        theirs = func is checkpoint or _offloads(func)
        if not (theirs and stock.keywords.keys() <= {"use_reentrant"} and "_fastlm" in layer.__dict__):
            restore(layer)
            continue
        if current is stock or current.args[1] is not offload:  # that of a copy, or of an earlier patch, is another
            layer._gradient_checkpointing_func = functools.partial(recompute, stock, offload)  # type: ignore[assignment]
        if layer.gradient_checkpointing and (offload.on or func is not checkpoint):
            devices.append(next(layer.parameters()).device)
    offload.expect(devices)


def restore(layer: nn.Module) -> None:
    """Undo ``choose``; what inputs had of host memory is freed with the last layer's function."""
    current: Any = layer.__dict__.get("_gradient_checkpointing_func")
    if (stock := _stock(current)) is not current:
        layer._gradient_checkpointing_func = stock


def _stock(current: Any) -> Any:
    """What transformers put on the layer, which ours is around; None where nothing is there."""
    return current.args[0] if getattr(current, "func", None) is recompute else current


def _offloads(func: Any) -> bool:
    return getattr(func, "__qualname__", "").endswith(_OFFLOADED)


def policy_of(layer: Any, offloads: bool) -> str:
    """What becomes of a decoder layer's activations: "keep"; "light", all but norms; "lean", all but these and gate and
    up products; "recompute"; or "offload". offloads: whether the model's ``Offload`` is on.
    """
    if not getattr(layer, "gradient_checkpointing", False):
        mlp, own = (getattr(part, "_fastlm", None) for part in (getattr(layer, "mlp", None), layer))
        if mlp is not None and not mlp.products_kept:
            return "lean"
        return "keep" if own is None or own.norms_kept else "light"
    stock = _stock(getattr(layer, "_gradient_checkpointing_func", None))
    return "offload" if offloads or _offloads(getattr(stock, "func", None)) else "recompute"


def set_policies(layers: Sequence[Any], policies: Sequence[str]) -> None:
    """Give each layer the policy that ``policy_of`` is to say; where recomputed inputs stay is the ``Offload``'s."""
    for layer, policy in zip(layers, policies, strict=True):
        layer.gradient_checkpointing = policy not in KEEPING
        leave_out(layer, policy)


def leave_out(layer: Any, policy: str) -> None:
    """What a patched layer that keeps its activations does not keep of them under this policy."""
    if (patch := layer.__dict__.get("_fastlm")) is not None:
        patch.norms_kept = policy not in ("light", "lean")
        if (mlp := layer.mlp.__dict__.get("_fastlm")) is not None:
            mlp.products_kept = policy != "lean"


def recompute(stock: Any, offload: Offload, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``run(hidden)``, of which only hidden [B, T, hidden] is kept, in host memory if it is offloaded.

    run: a ``functools.partial`` over a bound method of the layer, or over a function whose first argument it is.
    stock: torch's checkpoint as transformers calls it; it runs what our function would lose a gradient of.
    """
    trained = None if torch.compiler.is_compiling() or len(args) != 1 or kwargs else _trained(run)
    if trained is None:
        return stock(run, *args, **kwargs)
    if offload.paused or (not offload.on and stock.func is checkpoint):
        return _Recompute.apply(run, *args, *trained)
    with offload.inputs(args[0].device):
        return _Recompute.apply(run, *args, *trained)


def _trained(run: Any) -> list[nn.Parameter] | None:
    """The layer's trained parameters; None where they and hidden are not all that takes a gradient, or may not be.

    A hook sees what is inside, in the first run without its graph; FSDP's parameters are not those of the layer.
    """
    layer = _layer(run)
    if "_fastlm" not in layer.__dict__ or "_is_fsdp_managed_module" in layer.__dict__ or global_hooks():
        return None
    if any(tensor.requires_grad for tensor in _shared(run)):
        return None
    trained: dict[nn.Parameter, None] = {}
    modules = [layer]
    while modules:  # a third faster than named_parameters, which every call would wait for
        module = modules.pop()
        if runs_hooks(module, idle=False):
            return None
        modules.extend(child for child in module._modules.values() if child is not None)
        trained.update((p, None) for p in module._parameters.values() if p is not None and p.requires_grad)
    return list(trained)


def _layer(run: Any) -> nn.Module:
    return getattr(run.func, "__self__", None) or run.args[0]


def _shared(run: Any) -> Iterator[Tensor]:
    """The tensors that layers get besides hidden: the mask, cos and sin."""
    for value in run.keywords.values():
        yield from (t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor))


class _Recompute(torch.autograd.Function):
    """See ``recompute``. Every trained parameter of the layer is an input, so that each gradient is given once."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], hidden: Tensor, *trained: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.autocast = {
            "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }  # fmt: skip
        ctx.run, ctx.trained, ctx.patch = run, trained, _layer(run)._fastlm
        ctx.random = None
        if not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):  # of what is captured nothing is random
            states = get_device_states(*{t.device: t for t in (hidden, *trained)}.values())
            ctx.random = (torch.get_rng_state(), *states)
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        patch, kind = ctx.patch, hidden.device.type
        count = _Kept(ctx.run, hidden) if patch.kept == 0 else nullcontext()
        with nullcontext() if ctx.random is None else _random_again(kind, *ctx.random), count:
            patch.recomputing = True
            try:
                with torch.enable_grad(), torch.autocast(kind, **ctx.autocast):
                    out = ctx.run(hidden)
            finally:
                patch.recomputing = False
        if isinstance(count, _Kept):
            mlp = _layer(ctx.run).mlp.__dict__.get("_fastlm")
            patch.products, unmade = (0, 0) if mlp is None else (mlp.products, mlp.unmade)  # of this batch
            patch.kept, patch.norms = count.bytes + unmade, count.norms
        wanted = [hidden, *ctx.trained] if hidden.requires_grad else ctx.trained
        summands = [part for part in (out if isinstance(out, tuple) else (out,)) if part.requires_grad]
        above = [dout.to(part.dtype) for part in summands]
        gradients = torch.autograd.grad(summands, wanted, above, allow_unused=True)
        return None, *(() if hidden.requires_grad else (None,)), *gradients


@contextmanager
def _random_again(kind: str, state: Tensor, devices: list[int], device_states: list[Tensor]) -> Iterator[None]:
    """Random numbers within it are those that came after these states."""
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(state)
        set_device_states(devices, device_states, device_type=kind)
        yield


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts ``bytes``, the memory of what only this layer saves for backward: not its input, weights or mask.

    norms: of these, what its norms put out.
    """

    def __init__(self, run: Any, hidden: Tensor) -> None:
        self.bytes = self.norms = 0
        layer: Any = _layer(run)
        known = (hidden, *_shared(run), *layer.parameters(), *layer.buffers())
        seen = {t.untyped_storage().data_ptr() for t in known if not is_traceable_wrapper_subclass(t)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not is_traceable_wrapper_subclass(tensor) and storage.data_ptr() not in seen:  # those have no memory
                seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
                self.norms += storage.nbytes() * (tensor.data_ptr() == layer._fastlm.reading)
            return tensor.detach() if tensor.grad_fn is not None else tensor  # else a graph that failed holds itself

        super().__init__(pack, lambda tensor: tensor)
