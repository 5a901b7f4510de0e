"""Output head and loss, forward and backward: 8,192 rows of width 4,096 over a vocabulary of 151,936.

Beside each time stand the bare products that the work cannot do without (two for a frozen head, three for a
trainable one), the stock head (full logits, fp32 cross-entropy) and the memory allocated at the peak.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Timing, measure, median_ms, report, require_gpu
from fastlm.kernels.linear_cross_entropy import linear_cross_entropy

ROWS, WIDTH, VOCABULARY = 8192, 4096, 151_936


@dataclass(frozen=True)
class HeadTiming(Timing):
    """Milliseconds of the bare products; GiB at the peak beyond what was allocated before the call."""

    products_ms: float
    peak_gib: float

    def __str__(self) -> str:
        products = f"products {self.products_ms:.1f} ms ({self.products_ms / self.ms:.0%})"
        return f"{super().__str__()}  {products}, peak {self.peak_gib:.2f} GiB"


def peak_gib(function: Callable[[], Any]) -> float:
    """GiB that one call allocates at its peak."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def products_ms(hidden: Tensor, weight: Tensor, *, trainable: bool) -> float:
    """The products alone, over one full [N, V] buffer."""
    logits = torch.empty(ROWS, VOCABULARY, dtype=hidden.dtype, device=hidden.device)
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.empty_like(weight) if trainable else None

    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        if d_weight is not None:
            torch.mm(logits.t(), hidden, out=d_weight)

    with torch.no_grad():
        return median_ms(products)


def run() -> list[Timing]:
    """Frozen and trainable heads with row weights, and both with the row gradients known only in backward."""
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, device="cuda") * 0.02
    targets = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    row_weight = torch.full((ROWS,), 1 / ROWS, device="cuda")
    timings: list[Timing] = []
    for trainable in (False, True):
        weight.requires_grad_(trainable)
        leaves = [hidden, weight] if trainable else [hidden]

        def stock(leaves: list[Tensor] = leaves) -> Any:
            return torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), targets), leaves)

        def early(leaves: list[Tensor] = leaves) -> Any:
            loss = linear_cross_entropy(hidden, weight, targets, row_weight=row_weight).loss
            return torch.autograd.grad(loss, leaves)

        def late(leaves: list[Tensor] = leaves) -> Any:
            return torch.autograd.grad(linear_cross_entropy(hidden, weight, targets).loss.mean(), leaves)

        floor = products_ms(hidden.detach(), weight.detach(), trainable=trainable)
        counted = (2 + len(leaves) - 1) * weight.nbytes + 4 * hidden.nbytes
        for name, function in (("row weights", early), ("per row", late)):
            case = f"{'trainable' if trainable else 'frozen'}, {name}"
            base = measure("linear_cross_entropy", case, ROWS, counted, function, stock)
            timings.append(HeadTiming(**asdict(base), products_ms=floor, peak_gib=peak_gib(function)))
    return timings


if __name__ == "__main__":
    require_gpu()
    report(run())
