"""Doubly quantised NF4 weights of a Llama-3-8B layer made dense in bf16, against bitsandbytes' function."""

from dataclasses import asdict, dataclass

import torch

import fastlm.kernels.nf4 as module
from benchmarks.timing import DEVICE, SETTINGS, Timing, measure, median_ms, report, require_gpu, rival_ms
from fastlm.kernels.nf4 import dequantize

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))  # [out, in] of query and output, down, gate and up


@dataclass(frozen=True)
class NF4Timing(Timing):
    """Milliseconds of bitsandbytes on the same bytes, and of a copy of as many: small ones never reach 1 GiB's rate."""

    bitsandbytes_ms: float | None
    same_size_copy_ms: float

    def __str__(self) -> str:
        ratio = f"{self.bitsandbytes_ms / self.ms:.2f}x" if self.bitsandbytes_ms is not None else "-"
        return f"{super().__str__()}  bitsandbytes {ratio}  same-size copy {self.same_size_copy_ms / self.ms:.2f}x"


def run(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Timing]:
    """Bytes: half a one a value, scales (1 for 64 values, 4 for 16,384), the tables, and 2 a value out."""
    return [_one(*shape) for shape in shapes]


def _one(rows: int, columns: int) -> Timing:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) * 0.02
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    second = state.state2
    parts = packed, state.absmax, state.code, second.absmax, second.code, state.offset
    read = sum(part.nbytes for part in parts)
    case, tokens = f"{rows}x{columns}", SETTINGS.compared_at  # no tokens in it: compared in every run
    base = measure(
        "nf4 dequantize", case, tokens, read + weight.nbytes,
        lambda: dequantize(packed, state, torch.bfloat16), module=module,
    )  # fmt: skip
    theirs = rival_ms(f"nf4, {case}: bitsandbytes", lambda: dequantize_4bit(packed, state))
    half = torch.empty((read + weight.nbytes) // 2, dtype=torch.uint8, device=DEVICE)
    copied = median_ms(lambda: half.clone())
    return NF4Timing(**{**asdict(base), "tokens": 0}, bitsandbytes_ms=theirs, same_size_copy_ms=copied)


if __name__ == "__main__":
    require_gpu()
    report(run())
