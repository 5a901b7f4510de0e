"""Every kernel compiles for T4, RTX 30, Hopper and Blackwell, within the shared memory that those have."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastlm.kernels
from fastlm.kernels.launch import HAS_TRITON

SHARED = {75: 64 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program may use


def kernel_names() -> set[str]:
    modules = [
        importlib.import_module(f"fastlm.kernels.{m.name}") for m in pkgutil.iter_modules(fastlm.kernels.__path__)
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def compile_for(capability: int, *tokens: int) -> list[dict[str, Any]]:
    arguments = map(str, (capability, *tokens))
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled", *arguments]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile(capability: int) -> None:
    compiled = compile_for(capability)
    attention = {"_forward_kernel", "_dq_kernel", "_dkv_kernel"} if capability < 80 else set()  # needs 8.0
    assert {facts["kernel"] for facts in compiled} == kernel_names() - attention
    too_large = [facts for facts in compiled if facts["shared"] > SHARED[capability]]
    assert not too_large


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_another_number_of_tokens_compiles_nothing() -> None:
    """Every step has another; a compilation is a third of a second."""
    assert len(compile_for(90, 400, 417, 480)) == len(compile_for(90, 400, 417))
