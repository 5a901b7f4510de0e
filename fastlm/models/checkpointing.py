"""Decoder layers that keep only their input for backward and run again there (Chen et al., 2016, "Training Deep Nets
with Sublinear Memory Cost"), in place of torch's checkpoint: a gated MLP with adapters leaves its down product, a
quarter of a Llama-3-8B layer's multiplications, out of the second run, because nothing reads it.

transformers decides when (``gradient_checkpointing_enable``, the Trainer's flag) and calls a function kept on each
layer; ``choose`` puts ours there before each forward. A layer that is not ours, or a user's own function, stays as it
is. Gradients are bit-identical to those without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = ["CALL_CHECKPOINTS", "choose", "recompute"]

# until transformers 5.24 a layer's __call__ checkpoints, from then on the class's forward, which ours replaces
CALL_CHECKPOINTS = "__call__" in vars(GradientCheckpointingLayer)


def choose(layers: Iterable[nn.Module]) -> None:
    """Make the patched layers among these recompute by our function, where torch's checkpoint was to do it."""
    for layer in layers:
        current: Any = layer.__dict__.get("_gradient_checkpointing_func")
        plain = getattr(current, "func", None) is checkpoint and current.keywords.keys() <= {"use_reentrant"}
        if plain and "_fastlm" in layer.__dict__:
            layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def recompute(run: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """``run(hidden)``, of which only hidden [B, T, hidden] is kept.

    run: a ``functools.partial`` over a bound method of the layer, or over a function whose first argument it is.
    """
    partial: Any = run
    layer: nn.Module = getattr(partial.func, "__self__", None) or partial.args[0]
    known = "_fastlm" in layer.__dict__ and not type(layer).__name__.startswith("FSDP")
    if torch.compiler.is_compiling() or not known:  # torch.compile and FSDP know torch's own
        return checkpoint(run, hidden, use_reentrant=False)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return _Recompute.apply(run, layer, hidden, *trained)


class _Recompute(torch.autograd.Function):
    """See ``recompute``. Every trained parameter of the layer is an input, so that each gradient is given once."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], layer: Any, hidden: Tensor, *trained: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        ctx.run, ctx.layer, ctx.trained, ctx.random = run, layer, trained, _random_state(hidden.device)
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[2])
        patch, device = ctx.layer._fastlm, hidden.device
        count = _Kept(hidden) if patch.kept == 0 else nullcontext()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), count:
            _set_random_state(device, ctx.random)
            patch.recomputing = True
            try:
                with torch.enable_grad(), torch.autocast(device.type, **ctx.autocast):
                    out = ctx.run(hidden)
            finally:
                patch.recomputing = False
        if isinstance(count, _Kept):
            patch.kept = count.bytes
        wanted = [hidden, *ctx.trained] if hidden.requires_grad else ctx.trained
        gradients = torch.autograd.grad(out, wanted, dout, allow_unused=True)
        return None, None, *(() if hidden.requires_grad else (None,)), *gradients


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts ``bytes``, the memory of what a layer saves for backward, its input and parameters aside."""

    def __init__(self, hidden: Tensor) -> None:
        self.bytes = 0
        seen = {hidden.untyped_storage().data_ptr()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and not (tensor.is_leaf and tensor.requires_grad):
                seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def _random_state(device: torch.device) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def _set_random_state(device: torch.device, state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
