"""Every kernel compiles for T4, RTX 30, Hopper and Blackwell, within the shared memory that those have."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastlm.kernels
from fastlm.kernels.launch import HAS_TRITON

SHARED = {75: 64 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program may use


def kernel_names() -> set[str]:
    modules = [
        importlib.import_module(f"fastlm.kernels.{m.name}") for m in pkgutil.iter_modules(fastlm.kernels.__path__)
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled", str(capability)]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    compiled = [json.loads(line) for line in child.stdout.splitlines()]
    attention = {"_forward_kernel", "_dq_kernel", "_dkv_kernel"} if capability < 80 else set()  # needs 8.0
    assert {facts["kernel"] for facts in compiled} == kernel_names() - attention
    too_large = [facts for facts in compiled if facts["shared"] > SHARED[capability]]
    assert not too_large
