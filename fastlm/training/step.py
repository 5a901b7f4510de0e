"""The training step of an SFTTrainer whose model is fastlm's: TRL's loss and metrics, without stopping the
GPU.

TRL turns three sums into Python numbers in every micro-step, which waits for the GPU each time. Here they
stay on the device until something is logged; the numbers logged are TRL's. An evaluation's loss is the mean
over all its targets, where transformers takes the mean of its batches' means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..models.head import weighted_sum
from ..models.patch import is_patched
from ..packing.boundaries import IGNORE_INDEX
from .say import Voice

__all__ = [
    "Counts",
    "State",
    "WeightedCollator",
    "compute_loss",
    "drain_metrics",
    "evaluation_loop",
    "floating_point_ops",
    "one_process",
    "state_of",
]

_STATE = "_fastlm"
_MERGE_EVERY = 256  # pending rows are joined then: a run that never logs holds few tensors


@dataclass
class Counts:
    """What became of one data set: rows in, cut to max_length, without a target; rows and tokens out."""

    samples: int = 0
    cut: int = 0
    dropped: int = 0
    rows: int = 0
    tokens: int = 0
    packed_to: int | None = None  # row length, if packed
    speedup: float = 1.0  # tokens of padded batches over tokens


@dataclass
class State:
    """What fastlm keeps on one trainer, as ``trainer._fastlm``. A trainer without it is left to TRL."""

    voice: Voice
    model: Any = None  # the trainer's, before it is wrapped for several ranks
    vocabulary: int | None = None  # rows of the embedding table
    padding_free: bool = False
    own_head: bool = False  # whether our head answers fused_lm_head, label smoothing included
    padded_collators: dict[str, Any] = field(default_factory=dict)  # "eval", "test": where logits are read row by row
    counts: dict[str, Counts] = field(default_factory=dict)
    # mode -> parts [n, 5]
    pending: dict[str, list[Tensor]] = field(default_factory=lambda: {"train": [], "eval": []})
    evaluated: list[float] = field(default_factory=lambda: [0.0, 0.0])  # targets and loss of this evaluation
    flops_per_token: float | None = None
    activations: Any = None  # memory.Activations, where a step decides what it keeps
    first_batch_checked: bool = False  # whether it has room (room.py)
    twin: Any = None  # of the model, without weights, once somebody has counted what a step takes
    rate_set: bool = False  # embedding_learning_rate, in the trainer's own optimizer
    steps: int = 0  # micro-steps since train() was called
    graph_rooms: tuple[int, ...] = ()  # bytes to leave for graphs where policies are chosen: of most, of fewer steps
    prospect: Any = None  # small_steps.Prospect, from when graphs are known to be of use until policies are chosen
    graphs: Any = None  # models.graphs.LayerGraphs where small steps run so, False where not, None until it is known


def state_of(trainer: Any) -> State | None:
    return trainer.__dict__.get(_STATE)


def compute_loss(
    original: Callable[..., Any], trainer: Any, model: Any, inputs: dict[str, Any],
    return_outputs: bool = False, num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    """TRL's SFTTrainer.compute_loss: loss = sum over targets of w x -log p (times p for "dft") /
    num_items_in_batch.

    w is the token's entry in the column ``weights``, 1 without one. The denominator counts labelled targets
    whatever their weight (halving all weights halves the loss), and the metrics are TRL's, unweighted.

    ``original`` computes what ours does not: a loss function of the user's, the auxiliary loss of experts,
    sequence and context parallelism, label smoothing where the model's head is not fastlm's, and a model that was
    unpatched since. It knows no weights: ValueError if there are some.
    """
    state = state_of(trainer)
    if state is None:
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    patched = is_patched(state.model)
    if "boundaries" in inputs and not patched:
        raise ValueError(
            "this trainer's batches are padding-free, but fastlm.unpatch was called on its model since; "
            "build the trainer after unpatching"
        )
    weights = inputs.pop("weights", None)  # [B, T], of a padded batch
    smooths = trainer.label_smoother is not None and trainer.args.loss_type == "nll"
    if (
        not patched
        or trainer.compute_loss_func is not None
        or trainer.aux_loss_enabled
        or _shards_sequences(trainer)
        or (smooths and not state.own_head)
    ):
        if weights is not None or getattr(inputs.get("boundaries"), "row_weight", None) is not None:
            raise ValueError("the column 'weights' weights fastlm's loss, and this run computes another: remove it")
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    mode = "train" if trainer.model.training else "eval"
    inputs["use_cache"] = False
    if mode == "eval":
        _ignore_repeated_rows(trainer, inputs)
    options = {"label_smoothing": trainer.args.label_smoothing_factor} if smooths else {}
    # a loss that weighs tokens by constants is the head's to form
    formed = state.own_head and trainer.args.loss_type == "nll"
    if formed:
        options |= {"mean_loss": True, "num_items_in_batch": num_items_in_batch, "token_weights": weights}
    outputs = model(**inputs, fused_lm_head=True, **options)
    count = outputs.label_mask.sum()
    denominator = (count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)).clamp(min=1)
    if formed:
        loss = outputs.loss
        total = loss.detach() * denominator
    else:
        per_token_loss = -outputs.log_probs  # [B, T - 1], zero where there is no target
        if trainer.args.loss_type == "dft":
            per_token_loss = per_token_loss * outputs.log_probs.exp().detach()
        total = weighted_sum(per_token_loss, inputs.get("boundaries"), weights)
        loss = total / denominator
    if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
        loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
    tokens = _token_count(inputs) if mode == "train" else 0
    _note(trainer, state, mode, count, outputs, tokens, total)
    if return_outputs:
        with torch.no_grad():
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    return (loss, outputs) if return_outputs else loss


def _ignore_repeated_rows(trainer: Any, inputs: dict[str, Any]) -> None:
    """accelerate fills the ranks' last padded batches with rows from the start: those count once, not twice.

    Flattened batches hold none (see ``streamed.fill_rows``).
    """
    loader = trainer.accelerator.gradient_state
    if trainer.accelerator.num_processes == 1 or not loader.end_of_dataloader or loader.remainder <= 0:
        return
    if "attention_mask" in inputs:
        own = max(loader.remainder - trainer.accelerator.process_index * len(inputs["labels"]), 0)
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][own:] = IGNORE_INDEX


@dataclass
class WeightedCollator:
    """TRL's collator ``inner``, and ``weights``, float32 [B, T], where rows have them (else 1)."""

    inner: Any

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.inner(examples)
        given = [example.get("weights") for example in examples]
        if any(row is not None for row in given):
            rows = []
            for i, (example, row) in enumerate(zip(examples, given, strict=True)):
                tokens = len(example["input_ids"])
                rows.append(torch.ones(tokens) if row is None else torch.as_tensor(row, dtype=torch.float32))
                if len(rows[-1]) != tokens:
                    raise ValueError(f"example {i}: weights has {len(rows[-1])} entries, but input_ids has {tokens}")
            batch["weights"] = torch.ones(batch["input_ids"].shape)
            rows = [torch.cat(rows)] if self.inner.padding_free else rows
            for place, row in zip(batch["weights"], rows, strict=True):
                place[: len(row)] = row
        return batch


def _shards_sequences(trainer: Any) -> bool:
    parallelism = trainer.accelerator.parallelism_config
    return parallelism is not None and (parallelism.sp_enabled or parallelism.cp_enabled)


def _token_count(inputs: dict[str, Any]) -> Tensor | int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    if "position_ids" in inputs:
        return int(inputs["position_ids"].size(1))
    raise ValueError(
        "the batch has neither attention_mask nor position_ids, so its tokens cannot be told from padding; "
        "let the data collator return one of them"
    )


def _note(
    trainer: Any, state: State, mode: str, count: Tensor, outputs: Any, tokens: Tensor | int, loss: Tensor
) -> None:  # fmt: skip
    """Append this micro-step's row, float32 on the device: targets, entropies, targets predicted, tokens, loss."""
    tokens = tokens.float() if isinstance(tokens, Tensor) else torch.full_like(count, tokens, dtype=torch.float32)
    sums = (count, outputs.entropy.detach().sum(), outputs.is_top1.sum(), tokens, loss.detach())
    row = torch.stack([value.float() for value in sums])[None]  # [1, 5]
    if trainer.accelerator.num_processes > 1:  # here, not in log: a callback may log on one rank only
        # gather_for_metrics would take these rows for samples, and drop ranks of the last batch as repeated ones
        row = trainer.accelerator.gather(row).sum(0, keepdim=True)
    pending = state.pending[mode]
    pending.append(row)
    if len(pending) >= _MERGE_EVERY:
        pending[:] = [torch.cat(pending)]


def drain_metrics(trainer: Any, state: State) -> None:
    """Turn what the steps left on the device into the numbers that TRL keeps: one sync, at logging."""
    for mode in ("train", "eval"):
        pending = state.pending[mode]
        if not pending:
            continue
        rows = torch.cat(pending).cpu()  # [steps, 5]
        pending.clear()
        if mode == "eval":
            state.evaluated[0] += float(rows[:, 0].double().sum())
            state.evaluated[1] += float(rows[:, 4].double().sum())
        ratios = rows[:, 1:3] / rows[:, :1]
        ratios[rows[:, 0] == 0] = 0.0
        metrics = trainer._metrics[mode]
        metrics["entropy"].extend(ratios[:, 0].tolist())
        metrics["mean_token_accuracy"].extend(ratios[:, 1].tolist())
        trainer._total_train_tokens += sum(int(tokens) // trainer._tp_size for tokens in rows[:, 3].tolist())
        metrics["num_tokens"] = [trainer._total_train_tokens]


def evaluation_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer's, for evaluate and predict: its loss is the sum of token losses over the count of targets.

    However the data are batched, packed or spread over ranks. Read once, at the end. A loss that a subclass makes of
    ours is not known here, and stays what transformers makes of it: the mean over the batches.
    """
    state = state_of(trainer)
    if state is None or any(_is_replaced(trainer, name) for name in ("compute_loss", "prediction_step")):
        return original(trainer, *args, **kwargs)
    drain_metrics(trainer, state)
    state.evaluated = [0.0, 0.0]
    output = original(trainer, *args, **kwargs)
    drain_metrics(trainer, state)
    count, loss = state.evaluated
    name = f"{args[4] if len(args) > 4 else kwargs.get('metric_key_prefix', 'eval')}_loss"
    if count and name in output.metrics:
        output.metrics[name] = loss / count
    return output


def one_process(trainer: Any) -> bool:
    """Whether the run has this process alone: no ranks beside it, and no DeepSpeed, which holds gradients."""
    return bool(trainer.accelerator.distributed_type == "NO")


def _is_replaced(trainer: Any, name: str) -> bool:
    """Whether the method is a subclass's, or was put on this trainer, and not SFTTrainer's."""
    from trl import SFTTrainer

    return getattr(getattr(trainer, name), "__func__", None) is not getattr(SFTTrainer, name)


def floating_point_ops(original: Callable[..., Any], trainer: Any, inputs: dict[str, Any]) -> Any:
    """transformers' 6 x tokens x parameters; counting those took 5 ms a step in a LoRA model of 8B."""
    state = state_of(trainer)
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if state is None or not isinstance(inputs.get(name), Tensor):
        return original(trainer, inputs)
    if state.flops_per_token is None:
        state.flops_per_token = original(trainer, {name: inputs[name].reshape(-1)[:1]})
    return state.flops_per_token * inputs[name].numel()
