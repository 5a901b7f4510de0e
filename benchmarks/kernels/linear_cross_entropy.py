"""Output head and loss, forward and backward: 8,192 rows of width 4,096 over a vocabulary of 151,936.

Beside each time stand the bare products that the work cannot do without (two for a frozen head, three for a
trainable one), the stock head (full logits, fp32 cross-entropy), Liger's, and the GiB that each allocates at
its peak. Then the frozen heads of all models at every number of tokens.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlm.kernels.softmax_rows as module
from benchmarks.kernels import cases
from benchmarks.peers import liger_head
from benchmarks.timing import DEVICE, Timing, measure, median_ms, peak_gib, report, require_gpu
from fastlm.kernels.linear_cross_entropy import linear_cross_entropy

ROWS, WIDTH, VOCABULARY = 8192, 4096, 151_936
LONGEST_COMPARED = 16_384  # rows; beyond, the full logits do not fit, and Liger takes seconds a call
PRODUCT_ROWS = 8192  # the bare products of more rows are timed in pieces of this many


@dataclass(frozen=True)
class HeadTiming(Timing):
    """Milliseconds of the bare products, and ours as a multiple of them; GiB at the peak, inputs apart."""

    products_ms: float
    times_products: float
    peak_gib: float
    torch_peak_gib: float | None
    liger_peak_gib: float | None

    def __str__(self) -> str:
        products = f"products {self.products_ms:.1f} ms (ours {self.times_products:.2f}x)"
        rivals = {"torch": self.torch_peak_gib, "liger": self.liger_peak_gib}
        peaks = "".join(f", {name} {gib:.2f}" for name, gib in rivals.items() if gib is not None)
        return f"{super().__str__()}  {products}, peak {self.peak_gib:.2f} GiB{peaks}"


@dataclass(frozen=True, eq=False)
class _Head:
    """Inputs, and the contenders: each returns the gradients of the mean loss."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]
    softcap: float | None = None

    @classmethod
    def random(cls, rows: int, width: int, vocabulary: int, softcap: float | None = None) -> "_Head":
        hidden = torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device=DEVICE) * 0.02
        return cls(hidden, weight, torch.randint(vocabulary, (rows,), device=DEVICE), softcap)

    def _gradients(self, loss: Tensor) -> Any:
        leaves = [leaf for leaf in (self.hidden, self.weight) if leaf.requires_grad]
        return torch.autograd.grad(loss, leaves)

    def early(self, statistics: bool = False) -> Any:
        """Row weights given: a trainable head's gradient is formed in forward."""
        rows = self.hidden.shape[0]
        row_weight = torch.full((rows,), 1 / rows, device=DEVICE)
        output = linear_cross_entropy(
            self.hidden, self.weight, self.targets, softcap=self.softcap, row_weight=row_weight, statistics=statistics
        )
        return self._gradients(output.loss)

    def counted(self) -> Any:
        """As SFTTrainer asks: entropy and top-1 too."""
        return self.early(statistics=True)

    def late(self) -> Any:
        """A loss per row: what each counts is known in backward only."""
        output = linear_cross_entropy(self.hidden, self.weight, self.targets, softcap=self.softcap)
        return self._gradients(output.loss.mean())

    def stock(self) -> Any:
        logits = F.linear(self.hidden, self.weight)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return self._gradients(F.cross_entropy(logits.float(), self.targets))

    def liger(self) -> Any:
        return self._gradients(liger_head(self.hidden, self.weight, self.targets, self.softcap))

    def liger_late(self) -> Any:
        """A loss per row from Liger too."""
        return self._gradients(liger_head(self.hidden, self.weight, self.targets, self.softcap, "none").mean())

    def products_ms(self, least: int) -> float:
        """The products alone, over one full [N, V] buffer: the median of so many calls."""
        hidden, weight = self.hidden.detach()[:PRODUCT_ROWS], self.weight.detach()
        logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=DEVICE)
        torch.mm(hidden, weight.t(), out=logits)  # ordinary numbers in it from the start
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.empty_like(weight) if self.weight.requires_grad else None

        def products() -> None:
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=d_hidden)
            if d_weight is not None:
                torch.mm(logits.t(), hidden, out=d_weight)

        with torch.no_grad():
            return median_ms(products, least=least) * self.hidden.shape[0] / hidden.shape[0]


def run(rows: int = ROWS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> list[Timing]:
    """Frozen and trainable heads: row weights given, statistics too, and row gradients known in backward only."""
    timings: list[Timing] = []
    for trainable in (False, True):
        head = _Head.random(rows, width, vocabulary)
        head.weight.requires_grad_(trainable)
        variants = (
            ("row weights", head.early, head.liger), ("statistics", head.counted, head.liger),
            ("per row", head.late, head.liger_late),
        )  # fmt: skip
        for name, function, liger in variants:
            case = f"{'trainable' if trainable else 'frozen'}, {name}"
            timings.append(_one(case, head, function, liger, rivals=True))
        del head
    for model, tokens in cases():
        head = _Head.random(tokens, model.hidden, model.vocabulary, model.softcap)
        compared = tokens <= LONGEST_COMPARED
        timings.append(_one(model.name, head, head.early, head.liger, rivals=compared))
        del head
    return timings


def _one(case: str, head: _Head, function: Callable[[], Any], liger: Callable[[], Any], *, rivals: bool) -> HeadTiming:
    least = 9 if rivals else 3  # single calls are up to a fifth late
    products = 3 if head.weight.requires_grad else 2
    counted = products * head.weight.nbytes + 4 * head.hidden.nbytes
    base = measure(
        "linear_cross_entropy", case, head.hidden.shape[0], counted, function, head.stock if rivals else None,
        liger=liger if rivals else None, module=module, least=least,
    )  # fmt: skip
    floor = head.products_ms(least)  # next to ours, at the clock of the same moment
    return HeadTiming(
        **asdict(base),
        products_ms=floor,
        times_products=base.ms / floor,
        peak_gib=peak_gib(function),
        torch_peak_gib=peak_gib(head.stock) if base.torch_ms is not None else None,
        liger_peak_gib=peak_gib(liger) if base.liger_ms is not None else None,
    )


if __name__ == "__main__":
    require_gpu()
    report(run())
