"""The causal-LM forward with head and loss in one: no logits tensor where only the loss is asked for.

Bound to the causal LM as its ``forward``. It answers three kinds of call:

* ``fused_lm_head=True``: TRL's ``FusedCausalLMOutput`` with per-token log-probabilities, entropy and top-1. This is how
  TRL's trainers ask for the loss, so that one forward serves them and their subclasses.
* ``labels=`` while training with gradients: the loss, and logits that are computed only if somebody reads them.
* anything else: the class's own forward, with real logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..kernels.linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy
from ..packing.boundaries import SequenceBoundaries
from .adapters import global_hooks, has_hooks
from .layers import layer_patch

__all__ = ["LossOutput", "boundaries_from", "boundaries_on", "head_forward_for", "head_obstacle"]


class LossOutput(CausalLMOutputWithPast):
    """``CausalLMOutputWithPast`` whose ``logits`` are computed when they are first read, by name or by index.

    The tensor read is the real one, connected to the graph; computing the loss did not need it. Iterating does not
    compute it: wrappers (accelerate, DDP) walk every output. What computes it travels on the loss tensor, because
    accelerate builds the output anew from its items.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "logits" and value is None:
            loss = super().__getattribute__("loss")
            compute: Callable[[], Tensor] | None = getattr(loss, "_fastlm_logits", None)
            if compute is not None:
                value = compute()
                del loss._fastlm_logits
                self["logits"] = value
                for later in [key for key in self.keys() if key not in ("loss", "logits")]:
                    self.move_to_end(later)  # the tuple's order is the fields'
        return value

    def __getitem__(self, key: Any) -> Any:
        if key not in ("loss", 0):
            self.logits  # noqa: B018  # computes it
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (key == "logits" and hasattr(self.loss, "_fastlm_logits"))

    def get(self, key: Any, default: Any = None) -> Any:
        if key == "logits":
            self.logits  # noqa: B018
        return super().get(key, default)

    def to_tuple(self) -> tuple[Any, ...]:
        self.logits  # noqa: B018
        return super().to_tuple()

    def __reduce__(self) -> Any:
        self.logits  # noqa: B018
        return super().__reduce__()


@functools.cache
def head_forward_for(model_class: type) -> Any:
    """The forward below, with the name and signature of the class's own (generate and Trainer read it)."""

    @functools.wraps(model_class.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if layer_patch(self) is None:
            extra = {"fused_lm_head": True} if fused_lm_head else {}  # not ours to answer: let it be refused
            return type(self).forward(self, *args, **extra, **kwargs)
        if fused_lm_head:
            return _trl_output(self, *args, **kwargs)
        trains = self.training and torch.is_grad_enabled()
        # only ours knows the weights of a boundary object
        weighted = getattr(kwargs.get("boundaries"), "row_weight", None) is not None
        wants_loss = kwargs.get("labels") is not None and (trains or weighted)
        keeps_all = isinstance(kwargs.get("logits_to_keep", 0), int) and kwargs.get("logits_to_keep", 0) == 0
        as_tuple = kwargs.get("return_dict") is False  # PEFT passes None for "as configured"
        other_loss = self.loss_function is not ForCausalLMLoss or "ignore_index" in kwargs
        unfit = not keeps_all or as_tuple or other_loss or global_hooks()
        if not wants_loss or unfit or head_obstacle(self):
            return type(self).forward(self, *args, **kwargs)
        output = _loss_output(self, *args, **kwargs)
        if not trains:
            output.logits  # noqa: B018  # evaluation reads them by iterating
        return output

    return forward


def head_obstacle(model: Any) -> str | None:
    """Why head and loss cannot be fused for this model, or None where they can."""
    head = model.get_output_embeddings()
    if head is None:
        return "no output embeddings"
    linear = _linear_of(head)
    if linear is None:
        return f"lm_head is a {type(head).__name__}, not a plain Linear"
    if has_hooks(head) or has_hooks(linear):
        return "a hook on lm_head would be skipped"
    if linear.weight.device.type == "meta":
        return "lm_head is offloaded"
    return None


def _linear_of(head: nn.Module) -> nn.Linear | None:
    """The Linear that the head runs: itself, or PEFT's trained copy of it (modules_to_save)."""
    if type(head).__name__ == "ModulesToSaveWrapper":
        wrapper: Any = head
        active = wrapper.active_adapters  # empty where the active adapter has no copy of it
        off = wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active)
        head = wrapper.original_module if off else wrapper.modules_to_save[active[0]]
    # FSDP2 replaces the class by a subclass that only adds sharding
    plain = type(head) is nn.Linear or (isinstance(head, nn.Linear) and type(head).__name__ == "FSDPLinear")
    return head if plain and isinstance(head, nn.Linear) else None


def _score(
    model: Any, hidden: Tensor, targets: Tensor, *, row_weight: Tensor | None = None, **options: Any
) -> LinearCrossEntropyOutput:
    """hidden [N, H] and targets [N] through the model's own head, its softcap included."""
    linear = _linear_of(model.get_output_embeddings())
    assert linear is not None
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return linear_cross_entropy(
        hidden, linear.weight, targets, bias=linear.bias, softcap=softcap, row_weight=row_weight, **options
    )


def boundaries_from(kwargs: dict[str, Any]) -> SequenceBoundaries | None:
    """The boundary object of a call: ours, or one made of the keywords that TRL's collator emits."""
    boundaries = kwargs.get("boundaries")
    if boundaries is None and kwargs.get("cu_seq_lens_q") is not None:
        cu_seqlens = kwargs["cu_seq_lens_q"]
        longest = kwargs.get("max_length_q")
        if longest is None:
            raise ValueError("cu_seq_lens_q came without max_length_q; pass the longest sample's length as an int")
        boundaries = SequenceBoundaries.from_cu_seqlens(cu_seqlens, int(longest), kwargs.get("position_ids"))
    return boundaries


def boundaries_on(boundaries: SequenceBoundaries, device: torch.device) -> SequenceBoundaries:
    """The boundaries on this device: a loader that does not know the object leaves it on the CPU."""
    same = boundaries.cu_seqlens.device == device
    return boundaries if same else boundaries.to(device, non_blocking=True)


def _run_backbone(model: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("return_dict", None)
    # transformers reads packing from position_ids only where there is no cache: there its default decides
    if kwargs.get("use_cache") is None and kwargs.get("position_ids") is None:
        kwargs["use_cache"] = False
    return model.base_model(*args, **kwargs)


def _rows(
    hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, boundaries: SequenceBoundaries | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden [B, T, H] -> the rows that go through the head [N, H], their targets [N], and their positions [N] or None.

    With label positions from the collator only those rows; else every position, with target -100 where nothing is to
    be predicted: finding them on a GPU would stop it.
    """
    if shift_labels is not None:
        return hidden.reshape(-1, hidden.shape[-1]), shift_labels.reshape(-1), None
    if boundaries is not None:
        boundaries = boundaries_on(boundaries, hidden.device)
    if boundaries is not None and boundaries.label_positions is not None and boundaries.targets is not None:
        positions = boundaries.label_positions
        return hidden[0].index_select(0, positions), boundaries.targets, positions
    if labels is None:
        raise ValueError("fused_lm_head=True needs labels, shift_labels, or boundaries with label positions")
    if boundaries is not None:  # a sample's first token is never a target, whatever the foreign collator left there
        labels = labels.masked_fill(boundaries.position_ids == 0, -100)
    return hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].reshape(-1), None


def _spread(values: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Per-row values back to [B, T-1] (or [B, T] with shift_labels), zero where there is no label."""
    assert values is not None  # scored with statistics=True
    if positions is None:
        return values.view(shape)
    return values.new_zeros(shape[1]).index_copy(0, positions, values)[None]


def _denominator(label_mask: Tensor, num_items_in_batch: Any) -> Tensor:
    """What the sum of token losses is divided by, fp32; 1 for a batch without labels, whose loss is 0."""
    count = label_mask.sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=label_mask.device).float()
    return count + (count == 0)


def _trl_output(
    model: Any, *args: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None, label_smoothing: float = 0.0, **kwargs: Any,
) -> Any:  # fmt: skip
    from trl.trainer.utils import FusedCausalLMOutput

    obstacle = head_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"head and loss cannot be fused here ({obstacle}); train lm_head through modules_to_save")
    kwargs.pop("logits_to_keep", None)
    boundaries = boundaries_from(kwargs)
    hidden = _run_backbone(model, *args, **kwargs).last_hidden_state
    rows, targets, positions = _rows(hidden, labels, shift_labels, boundaries)
    scored = _score(model, rows, targets, statistics=True, label_smoothing=label_smoothing)
    batch, length = hidden.shape[:2]
    shape = (batch, length if shift_labels is not None else length - 1)
    log_probs = _spread(-scored.loss if label_smoothing else scored.log_probs, positions, shape)
    label_mask = _spread(targets != -100, positions, shape)
    denominator = _denominator(label_mask, num_items_in_batch)
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / denominator,
        log_probs=log_probs,
        entropy=_spread(scored.entropy, positions, shape),
        is_top1=_spread(scored.is_top1, positions, shape),
        label_mask=label_mask,
    )


def _loss_output(
    model: Any, *args: Any, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None,
    logits_to_keep: int = 0, **kwargs: Any,
) -> LossOutput:  # fmt: skip
    boundaries = boundaries_from(kwargs)
    outputs = _run_backbone(model, *args, **kwargs)
    hidden = outputs.last_hidden_state
    rows, targets, _ = _rows(hidden, labels, shift_labels, boundaries)
    weight = (1.0 / _denominator(targets != -100, num_items_in_batch)).expand(targets.shape)
    if boundaries is not None and boundaries.row_weight is not None:
        weight = weight * boundaries.row_weight.to(rows.device, non_blocking=True)
    loss: Any = _score(model, rows, targets, row_weight=weight).loss
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    loss._fastlm_logits = functools.partial(_logits, model, hidden, autocast)
    names = {field.name for field in fields(LossOutput)}  # 5.24 says cache where 5.17 says past_key_values
    return LossOutput(loss=loss, **{name: value for name, value in outputs.items() if name in names})


def _logits(model: Any, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
    """As they would have been in the forward, which may have run under autocast."""
    with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
        logits = model.get_output_embeddings()(hidden)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
