"""What a backbone that was captured (graphs.py) depends on, and whether that still is as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .adapters import global_hooks, has_hooks, runs_hooks
from .checkpointing import policy_of

__all__ = ["MOST_TRAINED", "Watched", "usual"]

MOST_TRAINED = 2**30  # bytes of parameters, whose gradients a graph holds twice


def usual(backbone: Any) -> bool:
    """Whether what is quickly told of a call here and now is as it was captured."""
    config = backbone.config
    return (
        backbone.training
        and torch.is_grad_enabled()
        and not global_hooks()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch.compiler.is_compiling()
        and not (getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False))
        and getattr(config, "return_dict", True)
    )


class Watched:
    """What a captured backbone depends on and a user may change, in lists that are read at every call."""

    def __init__(self, backbone: Any) -> None:
        outside = {id(module) for module in backbone.get_input_embeddings().modules()} | {id(backbone)}
        modules = [module for module in backbone.modules() if id(module) not in outside]
        self._layers = list(backbone.layers)
        # those that do something when they are called: containers have no forward
        self._modules = [module for module in modules if type(module).forward is not nn.Module.forward]
        self._tree = [module._modules.values() for module in backbone.modules() if module._modules]
        self._children, self._forwards = self._now()
        self._tables = [t for module in modules for t in (module._parameters, module._buffers) if t]
        self._hooks = [
            table for module in self._modules
            for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
                          module._backward_pre_hooks)
        ]  # fmt: skip
        self._adapted: list[Any] = [module for module in modules if hasattr(module, "_disable_adapters")]
        self.obstacle = self._why_not(backbone, modules)

    def _why_not(self, backbone: Any, modules: Sequence[nn.Module]) -> str | None:
        trained = self.trained()
        if "forward" in backbone.__dict__ and "_fastlm_graphs" not in backbone.__dict__:
            return "the backbone's forward was replaced by something else"
        if any(has_hooks(module, idle=False) for module in modules):
            return "there are hooks inside its layers"
        if any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules):
            return "there is dropout inside its layers"
        if len({tensor.device for tensor in self._tensors()}) != 1:
            return "it is on several devices"
        if any(map(is_traceable_wrapper_subclass, self._tensors())):
            return "some of its weights are tensor subclasses, whose addresses cannot be compared"
        if not trained:
            return "none of its layers is trained"
        if sum(tensor.nbytes for tensor in trained) > MOST_TRAINED:
            return "its layers train more than 1 GiB of parameters, whose gradients a graph would hold twice"
        return None

    def _tensors(self) -> list[Tensor]:
        return [tensor for table in self._tables for tensor in table.values() if tensor is not None]

    def _now(self) -> tuple[list[Any], list[Any]]:
        children = [child for view in self._tree for child in view]
        return children, [module.__dict__.get("forward") for module in self._modules]

    def trained(self) -> list[Tensor]:
        """Each once, however many modules share it."""
        return list({id(tensor): tensor for tensor in self._tensors() if tensor.requires_grad}.values())

    def unchanged(self, trained: list[Tensor]) -> bool:
        """Whether modules and hooks are what they were; trained: what ``trained`` says of now."""
        return (
            not (any(self._hooks) and any(runs_hooks(module, idle=False) for module in self._modules))
            and self._now() == (self._children, self._forwards)
            and bool(trained)
            and not any(tensor._backward_hooks for tensor in trained)
        )

    def storages(self) -> dict[int, StorageWeakRef]:
        """The memory of all that is read, by its handle."""
        tensors = self._tensors()
        states = [getattr(tensor, "quant_state", None) for tensor in tensors]  # of 4 bits
        states += [getattr(state, "state2", None) for state in states]
        states += [getattr(module, "state", None) for module in self._modules]  # of 8
        for state in filter(None, states):
            tensors += [value for value in getattr(state, "__dict__", {}).values() if isinstance(value, Tensor)]
        return {ref.cdata: ref for ref in (StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)}

    def offloads(self, backbone: Any) -> bool:
        """Whether layer inputs are in host memory where steps run without graphs."""
        return any(policy_of(layer, backbone._fastlm_backbone.offload.on) == "offload" for layer in self._layers)

    def facts(self) -> tuple[Any, ...]:
        tensors = self._tensors()
        return (
            [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors],
            [policy_of(layer, False) for layer in self._layers],
            [(id(state), state.absmax.data_ptr()) for t in tensors if (state := getattr(t, "quant_state", None))],
            [
                (
                    m._disable_adapters,
                    list(getattr(m, "merged_adapters", ())),
                    m.active_adapter,
                    list(getattr(m, "scaling", {}).values()),
                )
                for m in self._adapted
            ],
        )
