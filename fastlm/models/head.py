"""The causal-LM forward with head and loss in one: no logits tensor where only the loss is asked for.

Bound to the causal LM as its ``forward``. It answers three kinds of call:

* ``fused_lm_head=True``: TRL's ``FusedCausalLMOutput`` with per-token log-probabilities, entropy and top-1. This is how
  TRL's trainers ask for the loss, so that one forward serves them and their subclasses.
* ``labels=`` while training with gradients: the loss, and logits that are computed only if somebody reads them.
* anything else: the class's own forward, with real logits.
"""

from __future__ import annotations

import functools
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
from .padding import PaddedLayout, call_layout, flatten_call, stay_padded

__all__ = ["LossOutput", "boundaries_from", "boundaries_on", "head_forward_for", "head_obstacle", "weighted_sum"]


_TOLD = {"temperature", "cast_lm_head_to_fp32", "outputs"}  # arguments of TRL's add_fused_lm_head
_CLOSURE = _TOLD | {"backbone_attr", "final_logit_softcapping", "logit_scale", "original_forward", "text_config"}


class LossOutput(CausalLMOutputWithPast):
    """``CausalLMOutputWithPast`` whose ``logits`` are computed when they are first read, by name or by index.

    The tensor read is the real one, connected to the graph; computing the loss did not need it. Iterating does not
    compute it: wrappers walk every output, and build it anew from its items (accelerate, DDP). The item is the
    function that computes it, until then.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "logits" and callable(value):
            value = self["logits"] = value()
        return value

    def __getitem__(self, key: Any) -> Any:
        if key not in ("loss", 0):
            self.logits  # noqa: B018  # computes it
        return super().__getitem__(key)

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
        if kwargs.pop("weights", None) is not None:
            raise ValueError(
                "the batch has 'weights' of its tokens' losses, and this call would not apply them: leave the loss to "
                "SFTTrainer, use padding-free batches, or take them out of the batch and weight the loss yourself"
            )
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
            args, kwargs = (args, kwargs) if trains else stay_padded(args, kwargs)
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


def _lm_head(model: Any) -> nn.Linear:
    """The Linear of a model whose head has no obstacle; over several GPUs it is not always where the last layer is."""
    linear = _linear_of(model.get_output_embeddings())
    assert linear is not None
    return linear


def _score(
    model: Any, hidden: Tensor, targets: Tensor, *, row_weight: Tensor | None = None, **options: Any
) -> LinearCrossEntropyOutput:
    """hidden [N, H] and targets [N] through the model's own head, its scale and softcap included."""
    linear = _lm_head(model)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return linear_cross_entropy(
        hidden, linear.weight, targets, bias=linear.bias, softcap=softcap, logit_scale=_logit_scale(model),
        row_weight=row_weight, **options,
    )  # fmt: skip


def _logit_scale(model: Any) -> float:
    """What cohere multiplies its logits with."""
    return getattr(model, "logit_scale", 1.0)


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


def _run_backbone(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Tensor | None, shift_labels: Tensor | None
) -> tuple[Any, SequenceBoundaries | None, PaddedLayout | None]:
    """The backbone's output, the boundaries of its samples, and the layout of the padding that was taken out."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("return_dict", "logits_to_keep")}
    # transformers reads packing from position_ids only where there is no cache: there its default decides
    if kwargs.get("use_cache") is None and kwargs.get("position_ids") is None:
        kwargs["use_cache"] = False
    layout = None if labels is None or shift_labels is not None else _padded_layout(model, args, kwargs, labels)
    args, kwargs = stay_padded(args, kwargs) if layout is None else ((), flatten_call(layout, args, kwargs))
    boundaries = boundaries_from(kwargs)
    return model.base_model(*args, **kwargs), boundaries, layout


def _padded_layout(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Tensor) -> PaddedLayout | None:
    """The layout of a padded call whose every target [B, S] it knows, or None where the call has to stay padded."""
    layout = call_layout(model.base_model, args, kwargs, labels)
    if layout is not None and labels.device.type != "cpu":
        torch._assert_async(
            layout.missed(labels) == 0,
            "the labels have targets that the data collator's labels or completion_mask had not: let the collator "
            "return the labels that the loss reads",
        )
    return layout


def _rows(
    hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, boundaries: SequenceBoundaries | None,
    layout: PaddedLayout | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """hidden [B, T, H] -> the rows that go through the head [N, H], their targets [N], and their positions [N] or None.

    With label positions from the collator only those rows; else every position, with target -100 where nothing is to
    be predicted: finding them on a GPU would stop it. With a layout hidden is [1, T, H] and labels are [B, S].
    """
    if layout is not None and labels is not None:
        layout = layout.on(hidden.device)
        return hidden.squeeze(0).index_select(0, layout.predictors), *layout.shifted_targets(labels.to(hidden.device))
    if shift_labels is not None:
        return hidden.reshape(-1, hidden.shape[-1]), shift_labels.reshape(-1).to(hidden.device), None
    if boundaries is not None:
        boundaries = boundaries_on(boundaries, hidden.device)
    if boundaries is not None and boundaries.label_positions is not None and boundaries.targets is not None:
        positions = boundaries.label_positions
        return hidden.squeeze(0).index_select(0, positions), boundaries.targets, positions
    if labels is None:
        raise ValueError("fused_lm_head=True needs labels, shift_labels, or boundaries with label positions")
    if boundaries is not None:  # a sample's first token is never a target, whatever the foreign collator left there
        labels = labels.to(hidden.device).masked_fill(boundaries.position_ids == 0, -100)
    return hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].reshape(-1).to(hidden.device), None


def _spread(values: Tensor | None, positions: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Per-row values back to [B, T-1] (or [B, T] with shift_labels), zero where there is no label."""
    assert values is not None  # scored with statistics=True
    if positions is None:
        return values.view(shape)
    return values.new_zeros(shape[0] * shape[1]).index_copy(0, positions, values).view(shape)


def _denominator(label_mask: Tensor, num_items_in_batch: Any) -> Tensor:
    """What the sum of token losses is divided by, fp32; 1 for a batch without labels, whose loss is 0."""
    count = label_mask.sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=label_mask.device).float()
    return count + (count == 0)


class _WithoutGradient(torch.autograd.Function):
    """Entropy beside differentiable log-probabilities: TRL's has a gradient, ours says so when one is asked for."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, log_probs: Tensor) -> Tensor:
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        # DDP hands every output a gradient, of zeros
        torch._assert_async(
            (gradient == 0).all(),
            "fastlm's head gives the entropy no gradient: for GRPO's entropy bonus call fastlm.patch before building "
            "the trainer, for a loss of your own call fastlm.unpatch",
        )
        return None, None


def _trl_forward(model: Any) -> Any:
    """The forward of TRL's add_fused_lm_head in whose place ours is, or None."""
    layer = layer_patch(model)
    previous = None if layer is None else layer.previous
    code = getattr(previous, "__code__", None)  # a bound method has its function's
    return previous if code is not None and "fused_lm_head" in code.co_varnames else None


def _asked_of(trl_forward: Any) -> dict[str, Any]:
    """What add_fused_lm_head was told, which only its closure knows; empty where it knows more than this does."""
    told = dict(zip(trl_forward.__code__.co_freevars, trl_forward.__closure__ or (), strict=True))
    if not _TOLD <= told.keys() <= _CLOSURE:
        return {}
    return {name: told[name].cell_contents for name in _TOLD}


def _mean_logits(model: Any, rows: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[N] fp32, without the logits: the mean over the vocabulary goes through the product."""
    linear = _lm_head(model)
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        mean = rows.float() @ linear.weight.mean(0, dtype=torch.float32)
        if linear.bias is not None:
            mean = mean + linear.bias.float().mean()
        return (mean * _logit_scale(model) / temperature).masked_fill(targets == -100, 0)


def weighted_sum(per_token: Tensor, boundaries: SequenceBoundaries | None, weights: Tensor | None) -> Tensor:
    """Sum of weight x per_token [B, T - 1]; weights [B, T] or in the boundaries, 1 without."""
    if boundaries is not None and boundaries.row_weight is not None:
        boundaries = boundaries_on(boundaries, per_token.device)
        assert boundaries.label_positions is not None and boundaries.row_weight is not None  # moved, no more
        return (per_token[0].index_select(0, boundaries.label_positions) * boundaries.row_weight).sum()
    return (per_token if weights is None else per_token * weights[:, 1:]).sum()


def _row_weight(
    targets: Tensor, boundaries: SequenceBoundaries | None, num_items_in_batch: Any,
    token_weights: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What each row's loss [N] is multiplied with to sum to the batch's; token_weights [B, T], positions of `_rows`."""
    weight = (1.0 / _denominator(targets != -100, num_items_in_batch)).expand(targets.shape)
    if boundaries is not None and boundaries.row_weight is not None:
        return weight * boundaries.row_weight.to(targets.device, non_blocking=True)
    if token_weights is None:
        return weight
    given = token_weights[:, 1:].reshape(-1).to(targets.device)
    return weight * (given if positions is None else given.index_select(0, positions))


def _trl_output(
    model: Any, *args: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None, label_smoothing: float = 0.0, mean_loss: bool = False,
    token_weights: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """What TRL's head answers. mean_loss: only the loss is differentiated (a trained head then takes three products,
    not four), smoothed, and weighted by token_weights [B, T] or the boundaries'."""
    from trl.trainer.utils import FusedCausalLMOutput

    trl_forward = _trl_forward(model)
    asked = {} if trl_forward is None else _asked_of(trl_forward)
    fields_asked, temperature = asked.get("outputs", ()), asked.get("temperature", 1.0)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    ours = {"log_probs", "entropy", "is_top1", *(("mean_logits",) if softcap is None else ())}
    obstacle = head_obstacle(model)
    not_ours = not asked or obstacle or asked["cast_lm_head_to_fp32"] or not ours.issuperset(fields_asked)
    if trl_forward is not None and not_ours and not label_smoothing:
        output = trl_forward(
            *args, labels=labels, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch,
            fused_lm_head=True, **kwargs,
        )  # fmt: skip
        if mean_loss:
            total = weighted_sum(-output.log_probs, kwargs.get("boundaries"), token_weights)
            output.loss = total / _denominator(output.label_mask, num_items_in_batch)
        return output
    if obstacle is not None:
        raise ValueError(f"head and loss cannot be fused here ({obstacle}); train lm_head through modules_to_save")
    outputs, boundaries, layout = _run_backbone(model, args, kwargs, labels, shift_labels)
    hidden = outputs.last_hidden_state.to(_lm_head(model).weight.device)
    rows, targets, positions = _rows(hidden, labels, shift_labels, boundaries, layout)
    if token_weights is not None and labels is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"the column 'weights' is {tuple(token_weights.shape)}, the labels are {tuple(labels.shape)}: prompt "
            "learning adds tokens that have none; remove the column"
        )
    weight = _row_weight(targets, boundaries, num_items_in_batch, token_weights, positions) if mean_loss else None
    scored = _score(
        model, rows, targets, row_weight=weight, statistics=True, label_smoothing=label_smoothing,
        temperature=temperature,
    )  # fmt: skip
    batch, length = hidden.shape[:2] if layout is None else layout.real.shape
    shape = (batch, length if shift_labels is not None else length - 1)
    log_probs = _spread(-scored.loss if label_smoothing and not mean_loss else scored.log_probs, positions, shape)
    entropy = _spread(scored.entropy, positions, shape)
    label_mask = _spread(targets != -100, positions, shape)
    denominator = _denominator(label_mask, num_items_in_batch)
    extra = {}
    if "mean_logits" in fields_asked:
        extra["mean_logits"] = _spread(_mean_logits(model, rows, targets, temperature), positions, shape)
    return FusedCausalLMOutput(
        loss=scored.loss if mean_loss else -log_probs.sum() / denominator,
        log_probs=log_probs,
        entropy=_WithoutGradient.apply(entropy, log_probs),
        is_top1=_spread(scored.is_top1, positions, shape),
        label_mask=label_mask,
        **extra,
    )


def _loss_output(
    model: Any, *args: Any, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None,
    **kwargs: Any,
) -> LossOutput:  # fmt: skip
    outputs, boundaries, layout = _run_backbone(model, args, kwargs, labels, shift_labels)
    hidden = outputs.last_hidden_state.to(_lm_head(model).weight.device)
    rows, targets, _ = _rows(hidden, labels, shift_labels, boundaries, layout)
    loss: Any = _score(model, rows, targets, row_weight=_row_weight(targets, boundaries, num_items_in_batch)).loss
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    padded = None if layout is None else stay_padded(args, kwargs)
    # where accelerate's hook puts what this call returns: the logits that come later follow
    device = getattr(model.__dict__.get("_hf_hook"), "input_device", None) or hidden.device
    logits: Any = functools.partial(_logits, model, hidden, padded, autocast, device)
    names = {field.name for field in fields(LossOutput)}  # 5.24 says cache where 5.17 says past_key_values
    return LossOutput(loss=loss, logits=logits, **{name: value for name, value in outputs.items() if name in names})


def _logits(
    model: Any, hidden: Tensor, padded: tuple[Any, Any] | None, autocast: torch.dtype | None, device: torch.device
) -> Tensor:  # fmt: skip
    """As they would have been in the forward, which may have run under autocast; at padding too."""
    with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
        if padded is not None:  # hidden has the real tokens only: a second forward, of the padded call
            return type(model).forward(model, *padded[0], **padded[1]).logits.to(device)
        logits = model.get_output_embeddings()(hidden).to(device)
        logits = logits if _logit_scale(model) == 1 else logits * _logit_scale(model)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
