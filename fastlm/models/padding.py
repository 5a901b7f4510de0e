"""Padded batches without their padding: where the real tokens of a batch [B, S] lie, known without asking the GPU.

Most trainers send padded ids and a mask. A patched model takes the real tokens as one row of samples instead, where
somebody described the mask on the host and nobody reads what comes out at padding: that is zero then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..packing.boundaries import IGNORE_INDEX, SequenceBoundaries

__all__ = ["LAYOUT_SUFFIX", "PaddedLayout", "attach", "call_inputs", "call_layout", "flatten_call", "stay_padded"]

LAYOUT_SUFFIX = "_layout"  # a batch's "attention_mask" has its description beside it, as "attention_mask_layout"
_ATTRIBUTE = "_fastlm_layout"
_ON_DEVICE = ("indices", "predictors", "boundaries")  # parts of a layout; the others stay on the host


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """A batch [B, S] whose rows hold one run of real tokens each, T in all, of which N predict a target.

    Attributes:
        real: bool [B, S], always on the CPU.
        targets: bool [B, S], always on the CPU: the tokens that may be targets; None for every real one.
        indices: int64 [T], where in the B * S tokens the real ones are.
        predictors: int64 [N], those of the T whose next token is a target.
        boundaries: of the B samples in the flattened row.
    """

    real: Tensor
    targets: Tensor | None
    indices: Tensor
    predictors: Tensor
    boundaries: SequenceBoundaries

    @classmethod
    def from_mask(cls, mask: Tensor, targets: Tensor | None = None) -> PaddedLayout | None:
        """The layout of a mask [B, S] on the CPU, 1 where a token is real; targets as above, its column 0 unread.

        None where the batch cannot be flattened: a mask with other values, a row that is empty or has a hole, a
        target at padding, or one whose prediction comes from padding.
        """
        real = mask != 0
        if mask.dim() != 2 or mask.shape[1] == 0 or not torch.equal(real.to(mask.dtype), mask):
            return None
        runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
        if len(runs) == 0 or (runs != 1).any():
            return None
        predicts = torch.zeros_like(real)  # the next token is real
        predicts[:, :-1] = real[:, :-1] & real[:, 1:]
        if targets is not None:
            wanted = torch.zeros_like(real)
            wanted[:, :-1] = targets[:, 1:]
            if (wanted & ~predicts).any():
                return None
            predicts = wanted
        indices = real.flatten().nonzero()[:, 0]
        predictors = predicts[real].nonzero()[:, 0]
        return cls(real, targets, indices, predictors, SequenceBoundaries.from_lengths(real.sum(1)))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PaddedLayout:
        """The same layout with what the device needs on ``device``."""
        parts = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _ON_DEVICE}
        return replace(self, **parts)

    def pin_memory(self) -> PaddedLayout:
        """The same layout in page-locked memory (needs a GPU)."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _ON_DEVICE})

    def on(self, device: torch.device) -> PaddedLayout:
        """The layout on this device, copied without making anyone wait."""
        if self.indices.device == device:
            return self
        copied = self.pin_memory() if device.type == "cuda" and self.indices.device.type == "cpu" else self
        return copied.to(device, non_blocking=True)

    def rows(self, first: int, count: int) -> PaddedLayout | None:
        """The layout of ``count`` rows from row ``first``."""
        if count == len(self.real):
            return self
        part = slice(first, first + count)
        made = PaddedLayout.from_mask(self.real[part], None if self.targets is None else self.targets[part])
        return None if made is None else made.on(self.indices.device)

    def flatten(self, values: Tensor) -> Tensor:
        """values [B, S, ...] -> the real tokens' [1, T, ...]."""
        return values.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, values: Tensor) -> Tensor:
        """values [1, T, H], on any device -> [B, S, H], zero at padding."""
        rows, width = self.real.shape
        padded = values.new_zeros(rows * width, values.shape[-1])
        return padded.index_copy(0, self.on(values.device).indices, values.squeeze(0)).view(rows, width, -1)

    def shifted_targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """labels [B, S] -> the N targets, and the places of their predictors in [B, S - 1] flattened."""
        predictors = self.indices.index_select(0, self.predictors)
        return labels.flatten().index_select(0, predictors + 1), predictors - predictors // labels.shape[1]

    def missed(self, labels: Tensor) -> Tensor:
        """How many targets of these labels [B, S] the layout does not know of, on their device."""
        known, _ = self.on(labels.device).shifted_targets(labels)
        return (labels[:, 1:] != IGNORE_INDEX).sum() - (known != IGNORE_INDEX).sum()


def attach(mask: Tensor, layout: PaddedLayout) -> None:
    """Let a model that is called with this mask, or with rows of it, know the layout."""
    if not mask.is_inference():  # such a tensor does not count its changes
        setattr(mask, _ATTRIBUTE, (id(mask), mask._version, layout.on(mask.device)))


def _attached(mask: Tensor) -> PaddedLayout | None:
    for owner in (mask, mask if mask._base is None else mask._base):
        marked, version, layout = getattr(owner, _ATTRIBUTE, (None, None, None))
        if layout is None or (marked, version) != (id(owner), mask._version):  # copies are marked, views share versions
            continue
        width = layout.real.shape[1]
        first, column = divmod(mask.storage_offset() - owner.storage_offset(), width)
        if owner.is_contiguous() and mask.stride() == owner.stride() and mask.shape[1] == width and not column:
            return layout.rows(first, len(mask))
    return None


def stay_padded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call whose output at padding somebody may read: real logits are the stock model's."""

    def unmarked(value: Any) -> Any:
        marked = isinstance(value, Tensor) and value.dim() == 2 and _attached(value) is not None
        return value.clone() if marked else value

    return tuple(map(unmarked, args)), {name: unmarked(value) for name, value in kwargs.items()}


def call_layout(
    backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Tensor | None = None
) -> PaddedLayout | None:
    """The layout of a padded call of a patched backbone, or None where it has to stay padded.

    Known from the mask, where ``attach`` was called on it; on a CPU also from the labels [B, S], which say that
    nobody reads padding. Stays padded: what needs a cache, attention weights or hidden states, own positions, models
    that cannot take several samples in a row, NEFTune (its noise depends on S), RoPE types that depend on S.
    """
    patched = backbone.__dict__.get("_fastlm_backbone")
    mask = kwargs.get("attention_mask")
    kwargs.pop("attention_mask" + LAYOUT_SUFFIX, None)  # of a loop that hands over its whole batch, changed or not
    if patched is None or not patched.switch.on or not isinstance(mask, Tensor) or mask.dim() != 2 or len(args) > 1:
        return None
    layout = _attached(mask)
    if labels is not None:
        if labels.shape != mask.shape:
            return None
        if mask.device.type == "cpu" and (layout is None or layout.missed(labels)):
            layout = PaddedLayout.from_mask(mask, labels != IGNORE_INDEX)
    config, inputs = backbone.config, call_inputs(args, kwargs)
    if layout is None or inputs is None or inputs.shape[:2] != mask.shape or patched.report.obstacle is not None:
        return None
    if any(mask.shape[1] > limit for limit in patched.limits.values()):
        return None
    unfit = ("boundaries", "cu_seq_lens_q", "position_ids", "past_key_values", "cache", "cache_position")
    if any(kwargs.get(name) is not None for name in unfit):
        return None
    if any(kwargs.get(name, getattr(config, name, None)) for name in ("output_attentions", "output_hidden_states")):
        return None
    use_cache = kwargs.get("use_cache")
    if use_cache or (use_cache is None and config.use_cache and not backbone.training):
        return None
    return None if hasattr(backbone.get_input_embeddings(), "neftune_noise_alpha") else layout.on(inputs.device)


def call_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A backbone call's input_ids [B, S] or inputs_embeds [B, S, H]; None where there are neither."""
    given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next((value for value in given if value is not None), None)


def flatten_call(layout: PaddedLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the same call with the real tokens only, as one row of samples."""
    inputs = call_inputs(args, kwargs)
    assert inputs is not None  # call_layout saw it
    name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
    rest = {key: value for key, value in kwargs.items() if key not in ("input_ids", "inputs_embeds", "attention_mask")}
    return {**rest, name: layout.flatten(inputs), "boundaries": layout.boundaries, "use_cache": False}
