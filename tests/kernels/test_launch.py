"""fastlm/kernels/launch.py: offsets, devices, row views, and whether kernels may run."""

import subprocess
import sys

import pytest
import torch

from fastlm.kernels import launch

from .interpreter import cpu_path_test


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "expected"),
    [
        ((3, 4), (4, 1), torch.float32, False),
        ((2, 1), (2**30 - 2, 1), torch.bfloat16, False),  # ends at byte 2^31 - 2
        ((2, 1), (2**30, 1), torch.bfloat16, True),  # few elements, far apart
        ((2, 1), (2**29, 1), torch.float32, True),  # bytes count, not elements
        ((2**20, 2**12), (0, 1), torch.float32, False),  # expanded: many elements, small extent
        ((0, 2**40), (2**40, 1), torch.float32, True),  # an empty tensor may say either; it is never launched
    ],
)
def test_long_indexing_counts_byte_extent(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, expected: bool
) -> None:
    tensor = torch.empty(2**41, dtype=dtype, device="meta").as_strided(size, stride)
    assert launch.long_indexing(tensor) is expected
    assert launch.long_indexing(torch.ones(2), tensor) is expected
    assert not launch.long_indexing(torch.ones(2)[:, None].expand(2, 2**40))


@pytest.mark.parametrize(
    ("view", "outer_stride", "inner_stride"),
    [
        (
            lambda t: t[:, :, :5],
            4 * 6 * 8,
            6 * 8,
        ),  # [2, 4, 5, 8] of [2, 4, 6, 8]: heads inside a packed projection
        (lambda t: t[0, 1], 6 * 8, 8),
        (lambda t: t[1, 2, 3], 8, 8),
    ],
)
def test_as_rows_is_a_view(view: object, outer_stride: int, inner_stride: int) -> None:
    tensor = view(torch.arange(2 * 4 * 6 * 8.0).view(2, 4, 6, 8))  # type: ignore[operator]
    (rows,) = launch.as_rows(tensor)
    assert rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(rows.flatten(0, 1), tensor.reshape(-1, 8))
    assert rows.stride(2) == 1


def test_as_rows_copies_what_does_not_fit() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(launch.as_rows(tensor.mT)[0].flatten(0, 1), tensor.mT.reshape(-1, 3))
    scattered = torch.arange(2 * 3 * 4 * 5 * 2.0).view(2, 3, 4, 5, 2)[:, :2, :, :3].transpose(0, 1)
    assert torch.equal(launch.as_rows(scattered)[0].flatten(0, 1), scattered.reshape(-1, 2))


@cpu_path_test
def test_plain_cpu_tensors_take_the_torch_path() -> None:
    assert not launch.interpreting()
    assert not launch.use_triton(torch.ones(2))
    with launch.device_guard(torch.ones(2)) as nothing:
        assert nothing is None


def test_use_triton_declines_what_kernels_do_not_handle() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = torch.ones(2, device=device)
    assert not launch.use_triton(plain.double())
    assert not launch.use_triton(plain, plain.double())
    assert not launch.use_triton(plain, torch.ones(2, device="meta"))

    class Sharded(torch.Tensor):
        """Stands for a DTensor: its memory is not its value."""

    assert not launch.use_triton(plain.as_subclass(Sharded))


def test_next_power_of_2() -> None:
    assert [launch.next_power_of_2(n) for n in (1, 2, 3, 64, 65, 14336)] == [1, 2, 4, 64, 128, 16384]


def test_kernels_import_and_run_without_triton() -> None:
    """A machine without Triton imports every kernel file and takes the torch path."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fastlm.kernels import glu, launch, rms_norm, rope\n"
        "x = torch.ones(1, 2, 1, 4)\n"
        "assert not launch.HAS_TRITON and not launch.interpreting()\n"
        "assert rms_norm.rms_norm(x, torch.ones(4)).shape == x.shape\n"
        "assert glu.glu(x, x, 'silu').shape == x.shape\n"
        "assert rope.rope(x, x, x[:, :, 0], x[:, :, 0])[0].shape == x.shape\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
