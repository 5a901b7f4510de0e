"""fastlm/kernels/nf4.py against bitsandbytes, bit for bit."""

import bitsandbytes.functional as bnb
import pytest
import torch

from fastlm.kernels import nf4
from fastlm.kernels.launch import long_indexing

from .interpreter import DEVICE, interpreting, kernel_test, run_interpreted

pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [
    (64, 64),
    # rows that end inside a block of scales; on a CPU bitsandbytes 0.50 misplaces the scales of such rows
    (33, 96) if DEVICE == "cuda" else (33, 128),
    (7, 2),  # less than one block
    (300, 257 * 2),  # several programs, the last one partly filled
]


def test_interpreted() -> None:
    run_interpreted(__file__)


def quantised(*shape: int, dtype: torch.dtype, quant_type: str = "nf4", nested: bool = True):
    weight = torch.randn(shape, device=DEVICE) * torch.rand(shape[0], 1, device=DEVICE)
    return bnb.quantize_4bit(weight.to(dtype), quant_type=quant_type, compress_statistics=nested)


@kernel_test
@pytest.mark.parametrize("nested", [True, False], ids=["double", "plain"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CASES)
def test_equals_bitsandbytes_bit_by_bit(shape, dtype, quant_type, nested):
    packed, state = quantised(*shape, dtype=dtype, quant_type=quant_type, nested=nested)
    expected = bnb.dequantize_4bit(packed, state)
    dense = nf4.dequantize(packed, state, dtype)
    assert dense.dtype == dtype and dense.shape == expected.shape
    if interpreting() and dtype == torch.bfloat16:  # it truncates where a GPU rounds
        torch.testing.assert_close(dense, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(dense, expected)


@kernel_test
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_storage_of_another_dtype_is_read_as_bytes(storage):
    weight = torch.randn(64, 128, device=DEVICE)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, quant_storage=storage)
    assert packed.dtype == storage
    assert torch.equal(nf4.dequantize(packed, state, torch.float32), bnb.dequantize_4bit(packed, state))


def test_another_dtype_than_the_weight_was_quantised_from():
    packed, state = quantised(16, 64, dtype=torch.float32)
    expected = bnb.dequantize_4bit(packed, state).to(torch.bfloat16)
    assert torch.equal(nf4.NF4Weight(packed, state).dense(torch.bfloat16), expected)


@pytest.mark.gpu
def test_c_int32_offset():
    """A weight of more than 2^31 bytes made dense: its last rows equal the same rows alone."""
    rows, columns = 2**15 + 64, 2**15
    packed, state = quantised(rows, columns, dtype=torch.bfloat16)
    dense = nf4.dequantize(packed, state, torch.bfloat16)
    assert long_indexing(dense)
    assert torch.equal(dense[-256:], bnb.dequantize_4bit(packed, state)[-256:])
    assert torch.equal(dense[:256], bnb.dequantize_4bit(packed, state)[:256])
