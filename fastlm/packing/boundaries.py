"""The one object that says which tokens of a flattened batch belong to which sample.

It is built once, on the CPU, from the lengths that the collator knows. Positions, attention boundaries,
what goes through the head and the number of targets all derive from it, so that no two layers can disagree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

__all__ = ["IGNORE_INDEX", "SequenceBoundaries"]

IGNORE_INDEX = -100  # a label that is no target, as in torch.nn.functional.cross_entropy
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class SequenceBoundaries:
    """S samples that lie one after the other in one row of T tokens, with N targets.

    Attributes:
        cu_seqlens: int32 [S + 1], where each sample starts, then T.
        position_ids: int64 [1, T], each token's position within its sample.
        label_positions: int64 [N], rising; the output at ``label_positions[i]`` predicts ``targets[i]``. A
            sample's first token is never a target. None for a batch from a foreign collator.
        targets: int64 [N], ``labels[label_positions + 1]``. None where label_positions is.
        row_weight: float32 [N], the weight of each target's loss, or None for equal weights.
        max_length: tokens of the longest sample.
        label_count: N, on the host. None where label_positions is.
        lengths: the S lengths, on the host. None where only a GPU knows them.

    Raises:
        ValueError: the parts contradict each other (checked on host values only, never with a device sync).
    """

    cu_seqlens: Tensor
    position_ids: Tensor
    label_positions: Tensor | None
    targets: Tensor | None
    row_weight: Tensor | None
    max_length: int
    label_count: int | None
    lengths: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if self.cu_seqlens.dim() != 1 or self.cu_seqlens.numel() < 2:
            raise ValueError(f"cu_seqlens must be [S + 1], S >= 1, got shape {list(self.cu_seqlens.shape)}")
        if self.position_ids.dim() != 2 or self.position_ids.shape[0] != 1:
            raise ValueError(
                f"position_ids must be [1, T], one flattened row, got shape {list(self.position_ids.shape)}"
            )
        if self.cu_seqlens.device.type == "cpu" and int(self.cu_seqlens[-1]) != self.token_count:
            raise ValueError(f"cu_seqlens ends at {int(self.cu_seqlens[-1])}, but there are {self.token_count} tokens")
        if self.lengths is not None:
            if len(self.lengths) != self.sample_count:
                raise ValueError(
                    f"there are {len(self.lengths)} lengths, but cu_seqlens holds {self.sample_count} samples"
                )
            if sum(self.lengths) != self.token_count:
                raise ValueError(f"lengths sum to {sum(self.lengths)}, but there are {self.token_count} tokens")
            if max(self.lengths) > self.max_length:
                raise ValueError(
                    f"max_length is {self.max_length}, but the longest sample has {max(self.lengths)} tokens"
                )

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | np.ndarray | Tensor,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> "SequenceBoundaries":
        """Build the boundaries of samples with the given lengths, on the CPU.

        Args:
            lengths: S positive integers, in the order in which the samples lie in the row.
            labels: int64 [T] on the CPU, -100 where there is no target; a sample's first label is ignored
                whatever it is. None: no targets are recorded.
            weights: float [T] on the CPU; ``weights[p + 1]`` is the weight of the target ``labels[p + 1]``.

        Raises:
            ValueError: no lengths, a length below 1, labels or weights of another size than ``sum(lengths)``.
            TypeError: lengths or labels that are not integers.
        """
        host = np.asarray(lengths)
        if host.ndim != 1 or host.size == 0:
            raise ValueError(f"lengths must be a non-empty list of integers, got an array of shape {host.shape}")
        if host.dtype.kind not in "iu":
            raise TypeError(f"lengths must be integers, got {host.dtype}")
        if int(host.min()) < 1:
            first = int(np.argmax(host < 1))
            raise ValueError(f"lengths[{first}] is {int(host[first])}: a sample has at least one token")
        ends = np.cumsum(host, dtype=np.int64)
        total = int(ends[-1])
        if total > _INT32_MAX:
            raise ValueError(f"{total} tokens in one row: cu_seqlens is int32, so at most {_INT32_MAX} fit")
        starts = ends - host
        positions = np.arange(total, dtype=np.int64)
        positions -= np.repeat(starts, host)
        label_positions = targets = row_weight = None
        if labels is not None:
            _check_per_token("labels", labels, total)
            if labels.is_floating_point() or labels.dtype == torch.bool:
                raise TypeError(f"labels must be integers, got {labels.dtype}")
            is_target = labels.numpy() != IGNORE_INDEX  # [T], a new array
            is_target[starts] = False
            target_index = torch.from_numpy(np.flatnonzero(is_target))  # [N]
            targets = labels[target_index].long()
            label_positions = target_index - 1
            if weights is not None:
                _check_per_token("weights", weights, total)
                row_weight = weights[target_index].float()
        elif weights is not None:
            raise ValueError("weights were given without labels: they weight targets, so give labels as well")
        return cls(
            cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            position_ids=torch.from_numpy(positions)[None],
            label_positions=label_positions,
            targets=targets,
            row_weight=row_weight,
            max_length=int(host.max()),
            label_count=None if targets is None else targets.numel(),
            lengths=tuple(host.tolist()),
        )

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, max_length: int, position_ids: Tensor | None = None
    ) -> "SequenceBoundaries":
        """Take over a foreign collator's boundaries (TRL's cu_seq_lens_q, max_length_q, position_ids).

        Nothing is known of labels then, and ``lengths`` only if cu_seqlens is on the CPU; samples without
        tokens are dropped there. Never syncs.

        Args:
            cu_seqlens: integer [S + 1], from 0 to T.
            max_length: at least the longest sample's tokens.
            position_ids: int64 [1, T]; may be left out only if cu_seqlens is on the CPU.

        Raises:
            ValueError: cu_seqlens does not go from 0 to T without stepping back, max_length is too small, or
                position_ids is missing for boundaries on a GPU.
        """
        if cu_seqlens.device.type != "cpu":
            if position_ids is None:
                raise ValueError(
                    f"cu_seqlens is on {cu_seqlens.device}: pass position_ids, computing them needs a sync"
                )
            return cls(cu_seqlens.int(), position_ids, None, None, None, int(max_length), None, None)
        host = cu_seqlens.numpy()
        if host.ndim != 1 or host.size < 2 or host[0] != 0 or (np.diff(host) < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0 to the token count, got {cu_seqlens.tolist()}")
        lengths = np.diff(host)
        made = cls.from_lengths(lengths[lengths > 0])
        return replace(
            made,
            position_ids=made.position_ids if position_ids is None else position_ids,
            max_length=int(max_length),
        )

    @property
    def token_count(self) -> int:
        """T."""
        return self.position_ids.shape[-1]

    @property
    def sample_count(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "SequenceBoundaries":
        """The same boundaries with every tensor on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "SequenceBoundaries":
        """The same boundaries with every tensor in page-locked memory (needs a GPU)."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> "SequenceBoundaries":
        return replace(
            self,
            cu_seqlens=move(self.cu_seqlens),
            position_ids=move(self.position_ids),
            label_positions=None if self.label_positions is None else move(self.label_positions),
            targets=None if self.targets is None else move(self.targets),
            row_weight=None if self.row_weight is None else move(self.row_weight),
        )


def _check_per_token(name: str, values: Tensor, token_count: int) -> None:
    if values.device.type != "cpu":
        raise ValueError(f"{name} are on {values.device}: boundaries are built on the CPU and moved later")
    if tuple(values.shape) != (token_count,):
        raise ValueError(f"{name} must be [{token_count}], the sum of the lengths; got {list(values.shape)}")
