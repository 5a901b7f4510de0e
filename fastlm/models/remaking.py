"""A norm's output that backward makes again from the norm's input, which is kept for the norm's own backward anyway.

Of a Llama layer's activations the two norms' outputs are 15%, and making both again takes 0.5% of its time. Where a
layer is to leave them out ("light", "lean": training/costs.py), what reads one runs inside `NormAgain`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.rms_norm import rms_norm

__all__ = ["NormAgain"]


class NormAgain(torch.autograd.graph.saved_tensors_hooks):
    """While it is on, whoever saves y or a view of all of it for backward keeps x and gets ``rms_norm(x)`` there.

    y: of any shape, ``rms_norm(x, weight, **options)``; made again by the same kernel, it has the same bits. All other
    tensors are kept as they are, and so is y once something has written to it. As without hooks, backward raises
    RuntimeError for what was written to meanwhile. Hooks of the user's around the model do not see what is kept here.
    """

    def __init__(self, y: Tensor, x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
        x, weight = x.detach(), weight.detach()
        # not y itself, which autograd would hold with these functions
        told, versions = (y.data_ptr(), y.numel(), y.dtype, y._version), (x._version, weight._version)

        def pack(tensor: Tensor) -> tuple[Tensor | torch.Size, Any]:
            plain = not is_traceable_wrapper_subclass(tensor) and tensor.is_contiguous()  # those have no address
            if plain and (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version) == told:
                return tensor.shape, versions
            return tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version

        def unpack(packed: tuple[Tensor | torch.Size, Any]) -> Tensor:
            kept, version = packed
            if (kept._version if isinstance(kept, Tensor) else (x._version, weight._version)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor {list(kept.shape if isinstance(kept, Tensor) else kept)} that a decoder layer keeps"
                )
            if isinstance(kept, Tensor):
                return kept
            with torch.no_grad():
                return rms_norm(x, weight, **options).view(kept)

        super().__init__(pack, unpack)
