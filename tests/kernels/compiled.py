"""Compile every kernel for GPUs that are not there: ``python -m tests.kernels.compiled CAPABILITY [TOKENS ...]``.

Triton needs a GPU to launch a kernel, not to compile it. Public functions run on CPU tensors; each launch is
compiled for the GPU named and not run, so what they return is arbitrary. One JSON line a kernel:
``{"kernel", "shared", "warps"}``, shared memory in bytes. With numbers of tokens: what a layer takes for each of them.
"""

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fastlm.kernels import flash_launch, launch
from fastlm.kernels.attention_backends import BACKENDS
from fastlm.kernels.flash import FlashSettings, flash_attention
from fastlm.kernels.glu import glu, glu_packed
from fastlm.kernels.layer_norm import layer_norm
from fastlm.kernels.linear_cross_entropy import linear_cross_entropy
from fastlm.kernels.nf4 import dequantize
from fastlm.kernels.norm_rope import norm_rope
from fastlm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from fastlm.kernels.rope import rope


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record_launches(capability: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    """From now on a launch compiles for that GPU instead; the kernels compiled are added to what is returned."""
    triton.runtime.driver.set_active(Driver(capability))
    launch.interpreting = lambda: True  # use_triton then says yes to CPU tensors
    blocks_for = flash_launch.blocks_for
    flash_launch._blocks = lambda device, dtype, block_d, length: blocks_for(capability // 10, dtype, block_d, length)
    compiled: dict[tuple[Any, ...], dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        facts = {"kernel": kernel.fn.__name__, "shared": made.metadata.shared, "warps": made.metadata.num_warps}
        compiled[facts["kernel"], made.hash] = facts
        return made

    JITFunction.run = compile_only
    return compiled


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def calls(dtype: torch.dtype, capability: int) -> Iterator[Callable[[], None]]:
    """Every kernel, forward and backward, at the shapes of Llama-3-8B, Qwen3-8B and Gemma-2-9B."""

    def tensor(*shape: int) -> Tensor:
        return leaf(*shape, dtype=dtype)

    def norms(width: int, options: dict[str, Any]) -> None:
        backward(rms_norm(tensor(8, width), tensor(width), **options))
        backward(*add_rms_norm(tensor(8, width), tensor(8, width), tensor(width), **options))
        backward(rms_norm_add(tensor(8, width), tensor(8, width), tensor(width), **options))

    def rotations(heads: int, kv_heads: int, size: int, rotated: int, layout: str) -> None:
        tables = torch.zeros(1, 8, rotated, dtype=dtype), torch.zeros(1, 8, rotated, dtype=dtype)
        backward(*rope(tensor(1, 8, heads, size), tensor(1, 8, kv_heads, size), *tables, layout=layout))

    def head_norms(size: int, options: dict[str, Any], together: bool = False) -> None:
        tables = torch.zeros(1, 8, size, dtype=dtype), torch.zeros(1, 8, size, dtype=dtype)
        weights = tensor(32 * size if together else size), tensor(8 * size if together else size)
        inputs = tensor(1, 8, 32, size), tensor(1, 8, 8, size), *weights
        backward(*norm_rope(*inputs, *tables, **options))

    def head(vocabulary: int, options: dict[str, Any]) -> None:
        targets = torch.zeros(4, dtype=torch.int64)
        for trained in (False, True):
            weight = tensor(vocabulary, 16).requires_grad_(trained)
            backward(linear_cross_entropy(tensor(4, 16), weight, targets, **options).loss)

    def attend(size: int, options: dict[str, Any], sinks: bool, tokens: int = 64) -> None:
        q, k, v = (tensor(tokens, heads, size) for heads in (8, 4, 4))
        settings = FlashSettings(scale=0.1, **options)
        cu_seqlens = torch.tensor([0, 40, 64] if tokens == 64 else [0, tokens], dtype=torch.int32)
        backward(flash_attention(q, k, v, cu_seqlens, settings, tensor(8) if sinks else None))

    def four_bit() -> None:
        codes = torch.zeros(16), torch.zeros(256)
        inner = SimpleNamespace(absmax=torch.zeros(1), code=codes[1], blocksize=256)
        state = SimpleNamespace(
            absmax=torch.zeros(64, dtype=torch.uint8), code=codes[0], blocksize=64, dtype=dtype, quant_type="nf4",
            shape=torch.Size((64, 64)), nested=True, offset=torch.zeros(()), state2=inner,
        )  # fmt: skip
        dequantize(torch.zeros(2048, 1, dtype=torch.uint8), state, dtype)

    gemma = {"offset": 1.0, "cast_before_scale": False}
    for width in (128, 3584, 4096):
        yield lambda width=width: norms(width, {})
    yield lambda: norms(3584, gemma)
    yield lambda: backward(layer_norm(tensor(8, 4096), tensor(4096)))
    yield lambda: rotations(32, 8, 128, 128, "half")
    yield lambda: rotations(16, 8, 256, 256, "half")
    yield lambda: rotations(32, 32, 96, 72, "half")
    yield lambda: rotations(32, 8, 128, 128, "interleaved")
    yield lambda: head_norms(128, {})
    yield lambda: head_norms(256, gemma)
    yield lambda: head_norms(128, {"cast_before_scale": False}, together=True)
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield lambda activation=activation: backward(glu(tensor(8, 14336), tensor(8, 14336), activation))
    yield lambda: backward(glu_packed(tensor(8, 2 * 8192), "silu"))
    yield lambda: head(128_256, {})
    yield lambda: head(256_000, {"softcap": 30.0, "statistics": True, "label_smoothing": 0.1, "z_loss": 1e-4})
    yield lambda: head(151_936, {"statistics": True, "row_weight": torch.ones(4)})
    if dtype != torch.float32:
        yield four_bit
    if BACKENDS["triton"].capability <= (capability // 10, capability % 10) and dtype in BACKENDS["triton"].dtypes:
        for size in (64, 128, 256):
            yield lambda size=size: attend(size, {}, False)
            yield lambda size=size: attend(size, {"softcap": 50.0, "window": 16}, True)
        for tokens in (1024, 4096):  # whose blocks are others
            for size in (64, 128, 256):
                yield lambda size=size, tokens=tokens: attend(size, {}, False, tokens)
            yield lambda tokens=tokens: attend(128, {"softcap": 50.0, "window": 16}, True, tokens)


def layer(tokens: int) -> None:
    """The kernels of a decoder layer of Qwen3-8B, trained in full."""

    def tensor(*shape: int) -> Tensor:
        return leaf(*shape, dtype=torch.bfloat16)

    backward(*add_rms_norm(tensor(tokens, 4096), tensor(tokens, 4096), tensor(4096)))
    tables = torch.zeros(1, tokens, 128, dtype=torch.bfloat16), torch.zeros(1, tokens, 128, dtype=torch.bfloat16)
    heads = tensor(1, tokens, 32, 128), tensor(1, tokens, 8, 128)
    backward(*norm_rope(*heads, tensor(128), tensor(128), *tables))
    backward(*rope(*heads, *tables))
    cu_seqlens = torch.tensor([0, 240, tokens], dtype=torch.int32)
    q, k, v = (tensor(tokens, heads, 128) for heads in (32, 8, 8))
    backward(flash_attention(q, k, v, cu_seqlens, FlashSettings(scale=0.1), None))
    backward(glu(tensor(tokens, 12_288), tensor(tokens, 12_288), "silu"))


def main(capability: int, *counts: int) -> None:
    compiled = record_launches(capability)
    for tokens in counts:
        layer(tokens)
    for dtype in (torch.float16,) if capability < 80 else (torch.bfloat16, torch.float32):
        for call in () if counts else calls(dtype, capability):
            call()
    for facts in compiled.values():
        print(json.dumps(facts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
