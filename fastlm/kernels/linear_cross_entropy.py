"""Output head and cross-entropy in one, without the [N, V] logits: two products for a frozen head, not three.

Rows go through in chunks: logits = h W^T, one row kernel (`softmax_rows`) that leaves G = dloss/dlogits in
their place, and at once dh = G W. So forward keeps the unit gradient dloss/dh [N, H] of each row, and
backward only scales it by what comes from above. A trainable head forms dW = G^T h (fp32 sums) in forward too
when `row_weight` says what each row counts; otherwise backward has to recompute the logits. Extra memory is
one chunk of logits (256 to 512 MiB on a GPU, by the shapes alone; twice that where dW is formed), dh, and V H
fp32 numbers for dW.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .low_rank import summed
from .softmax_rows import RowLoss, RowStatistics, cross_entropy_rows

__all__ = ["LinearCrossEntropyFunction", "LinearCrossEntropyOutput", "linear_cross_entropy"]

_GPU_CHUNK_BYTES = 2**29  # 1,024 rows at V = 151,936 or 256,000, bf16: fewer leave multiprocessors idle in dh
_CPU_CHUNK_BYTES = 2**26
_ROW_ALIGNMENT = 64  # rows of logits start at multiples of this many columns, for full vectors at odd V


@dataclass(frozen=True, eq=False)
class LinearCrossEntropyOutput:
    """Results of N rows; one whose target is -100 has loss, log-probability and entropy 0 and is_top1 False.

    loss: [N] fp32, or its `row_weight`-weighted sum [] fp32; differentiable in hidden, weight and bias.
    log_probs: [N] fp32; ``-loss``, and differentiable, when `row_weight`, smoothing and z-loss are off, else
    detached. entropy: [N] fp32, nats, detached. is_top1: [N] bool, whether the target is the (first) largest
    logit. Entropy and is_top1 are of the distribution after softcap and temperature; None without
    `statistics`.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None


@dataclass(frozen=True)
class _Settings:
    row_loss: RowLoss
    compute_dtype: torch.dtype
    statistics: bool
    differentiate: bool  # grad mode at the call: inside a Function it is always off


class _Wanted(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool


class _Gradients(NamedTuple):
    hidden: Tensor | None  # [N, H], compute dtype
    weight: Tensor | None  # [V, H], fp32
    bias: Tensor | None  # [V], fp32


def chunk_rows(vocabulary: int, element_size: int, device_type: str, *, trainable: bool) -> int:
    """Rows per chunk: the largest power of two whose logits fit the byte budget, at least 128.

    A trainable head takes twice as many: each chunk reads and writes the V x H fp32 sums.
    """
    budget = _CPU_CHUNK_BYTES if device_type == "cpu" else _GPU_CHUNK_BYTES * (2 if trainable else 1)
    return max(128, 2 ** math.floor(math.log2(budget / (vocabulary * element_size))))


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * scale with one rounding; scale is fp32 and not 0-d, which would be rounded to bf16 first."""
    if gradient is None:
        return None
    return torch.mul(gradient, scale, out=torch.empty(gradient.shape, dtype=dtype, device=gradient.device))


def _magnitude(values: Tensor) -> Tensor:
    """Largest power of two <= max|values|, [1]: dividing by it is exact and keeps fp16 gradients off zero."""
    if values.numel() == 0:
        return values.new_ones(1)
    largest = values.detach().abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny).reshape(1)
    return (largest.view(torch.int32) & 0x7F800000).view(torch.float32).to(values.dtype)


def _linear_cross_entropy_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factor: Tensor | None,
    settings: _Settings,
    wanted: _Wanted,
) -> tuple[RowStatistics, _Gradients]:
    """All rows, chunk by chunk, and the wanted gradients of ``sum_r factor[r] loss_r`` (factor None: 1)."""
    dtype, device = settings.compute_dtype, hidden.device
    sum_dtype = torch.promote_types(dtype, torch.float32)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    rows, (vocabulary, width) = hidden.shape[0], weight.shape
    chunk = chunk_rows(vocabulary, dtype.itemsize, device.type, trainable=wanted.weight)
    stride = -(-vocabulary // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    padded = torch.empty(min(chunk, rows), stride, dtype=dtype, device=device)
    if device.type == "cpu":  # with AMX it multiplies a column past an odd count by zero, and NaN stays NaN
        padded[:, vocabulary:].zero_()
    buffer = padded[:, :vocabulary]

    results = RowStatistics.empty(rows, sum_dtype, device, statistics=settings.statistics)
    gradients = _Gradients(
        torch.empty(rows, width, dtype=dtype, device=device) if wanted.hidden else None,
        torch.zeros(vocabulary, width, dtype=sum_dtype, device=device) if wanted.weight else None,
        torch.zeros(vocabulary, dtype=sum_dtype, device=device) if wanted.bias else None,
    )
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        h = hidden[start:stop]
        logits = buffer[: stop - start]
        if bias is None:
            torch.mm(h, weight.t(), out=logits)
        else:
            torch.addmm(bias, h, weight.t(), out=logits)
        cross_entropy_rows(
            logits,
            targets[start:stop],
            results.rows(start, stop),
            settings.row_loss,
            gradient=any(wanted),
            factor=None if factor is None else factor[start:stop],
        )
        if gradients.hidden is not None:
            torch.mm(logits, weight, out=gradients.hidden[start:stop])
        if gradients.weight is not None:
            summed(gradients.weight, logits.t(), h, several=True)
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(0, dtype=sum_dtype))
    return results, gradients


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Loss, log-probabilities, entropy and top-1 of `linear_cross_entropy`; only the loss has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_weight: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        wanted = _Wanted(*(settings.differentiate and needed for needed in ctx.needs_input_grad[:3]))
        formed, factor, scale = wanted, None, None
        if row_weight is None:
            formed = _Wanted(wanted.hidden, False, False)
        elif any(wanted):
            scale = _magnitude(row_weight)
            factor = row_weight / scale
        with torch.autocast(hidden.device.type, enabled=False):
            results, gradients = _linear_cross_entropy_rows(hidden, weight, bias, targets, factor, settings, formed)
        recompute = (wanted.weight or wanted.bias) and row_weight is None
        ctx.save_for_backward(*gradients, scale, *((hidden, weight, bias, targets) if recompute else ()))
        ctx.settings, ctx.wanted, ctx.recompute = settings, wanted, recompute
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        loss = results.loss if row_weight is None else (results.loss * row_weight).sum()
        ctx.mark_non_differentiable(
            *(x for x in (results.log_probs, results.entropy, results.is_top1) if x is not None)
        )
        return loss, results.log_probs, results.entropy, results.is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # first: a second backward gets torch's own error here
        if grad_loss is None:
            return (None,) * 6
        d_hidden, d_weight, d_bias, scale = saved[:4]
        dtypes = ctx.dtypes
        if scale is not None:  # a scalar loss; its gradients were formed in units of scale
            scale = grad_loss * scale  # [1]
            hidden_scale = scale.unsqueeze(-1)
        else:
            hidden_scale = grad_loss.unsqueeze(-1)  # [N, 1]
        if ctx.recompute:
            hidden, weight, bias, targets = saved[4:]
            scale = _magnitude(grad_loss)
            formed = ctx.wanted._replace(hidden=False)
            with torch.autocast(grad_loss.device.type, enabled=False):
                _results, gradients = _linear_cross_entropy_rows(
                    hidden, weight, bias, targets, grad_loss / scale, ctx.settings, formed
                )
            d_weight, d_bias = gradients.weight, gradients.bias
        return (
            _scaled(d_hidden, hidden_scale, dtypes[0]),
            None if d_weight is None else _scaled(d_weight, scale.unsqueeze(-1), dtypes[1]),
            None if d_bias is None else _scaled(d_bias, scale, dtypes[2]),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    statistics: bool = False,
) -> LinearCrossEntropyOutput:
    """Cross-entropy of a linear head, row by row, without ever holding the [N, V] logits.

    hidden [N, H]; weight [V, H]; bias [V] or None; targets [N] int64, -100 where a row has no loss;
    row_weight [N] fp32, a constant: what each row's loss is multiplied with (the denominator included) before
    all are summed.

        x    = hidden weight^T + bias                                  (compute dtype; what follows in fp32)
        z    = softcap * tanh(logit_scale x / softcap) / temperature,  p = softmax(z)
        loss = -(1 - label_smoothing) log p_y - label_smoothing mean_v(log p_v) + z_loss lse(z)^2

    Equivalent: ``F.cross_entropy(z.float(), targets, reduction="none", label_smoothing=...)``. The compute
    dtype is autocast's where autocast is on, else the weight's. Gradients come back in each input's dtype,
    for whichever of hidden, weight and bias require one; in bf16 the hidden gradient without `row_weight` has
    one rounding more than the stock head's (the unit gradient is kept in bf16). Under no_grad no gradient is
    formed. A DTensor weight or bias is gathered first. No device sync.

    Raises ValueError for shapes or dtypes that do not fit, a `row_weight` that requires a gradient, a softcap
    or temperature that is not positive, a label_smoothing outside [0, 1].
    """
    if hasattr(weight, "full_tensor"):  # a DTensor, met outside its FSDP module
        weight = weight.full_tensor()
    if bias is not None and hasattr(bias, "full_tensor"):
        bias = bias.full_tensor()
    _check(hidden, weight, targets, bias, row_weight)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie between 0 and 1; got {label_smoothing}")

    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    settings = _Settings(
        RowLoss(softcap, logit_scale, temperature, label_smoothing, z_loss),
        torch.get_autocast_dtype(device_type) if autocast else weight.dtype,
        statistics,
        torch.is_grad_enabled(),
    )
    loss, log_probs, entropy, is_top1 = LinearCrossEntropyFunction.apply(
        hidden, weight, bias, targets, row_weight, settings
    )
    if row_weight is None and label_smoothing == 0 and z_loss == 0:
        log_probs = -loss
    return LinearCrossEntropyOutput(loss, log_probs, entropy, is_top1)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, row_weight: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [N, H] and weight [V, H]; got {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"expected one target a row, [{hidden.shape[0]}] int64; got {list(targets.shape)} {targets.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [{weight.shape[0]}]; got {list(bias.shape)}")
    if row_weight is not None:
        if row_weight.shape != targets.shape or row_weight.dtype not in (torch.float32, torch.float64):
            found = f"{list(row_weight.shape)} {row_weight.dtype}"
            raise ValueError(f"expected row_weight {list(targets.shape)} fp32; got {found}")
        if row_weight.requires_grad:
            raise ValueError("row_weight is a constant; to train it, leave it out and weight the per-row loss")
