"""LayerNorm without bias (Ba, Kiros and Hinton, 2016), as cohere has it: y = (x - mean) / sqrt(var + eps) * w.

Replaces CohereLayerNorm of transformers, which reads and writes x about eight times in fp32, by the kernels of
`rms_norm` with the mean subtracted: two fp32 numbers a row are kept, and dx and dw formed in one pass.
"""

import torch
from torch import Tensor

from .launch import use_triton
from .rms_norm import RMSNormFunction, RMSNormOptions

__all__ = ["layer_norm", "layer_norm_reference"]


def layer_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """``(weight.float() * xhat).to(x.dtype)`` with xhat = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) in fp32.

    Args:
        x: [..., H], or [..., heads, D]; bf16, fp16 or fp32 (fp64 only on the torch path); any strides.
        weight: [H], or [heads, D] with a row for each head (cohere's query and key norms).
        eps: added to the variance.
    Returns:
        x's shape and dtype, contiguous; differentiable in x and weight.
    Raises:
        ValueError: weight is neither.
    """
    if x.dim() == 0 or weight.dim() not in (1, 2) or weight.shape != x.shape[-weight.dim() :]:
        raise ValueError(
            f"layer_norm: weight has shape {tuple(weight.shape)}, expected the last size or two of x {tuple(x.shape)}"
        )
    if not use_triton(x, weight):
        return layer_norm_reference(x, weight, eps)
    options = RMSNormOptions(eps, offset=0.0, cast_before_scale=False, centred=True)
    return RMSNormFunction.apply(x, weight, options, None)


def layer_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """`layer_norm` in plain torch, operation by operation as CohereLayerNorm does it."""
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((x32 - mean) * torch.rsqrt(variance + eps))).to(x.dtype)
