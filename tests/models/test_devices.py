"""A model that is not on the current GPU, or not on one: the same bits as on the first. Needs two GPUs of one kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlm
from fastlm.models.patch import patched_core

from ..ranks import run_on_two_ranks
from ..tiny import add_lora, tiny_model
from .batches import LAYOUTS, samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LENGTHS = (130, 7, 61, 58)


def step(model: Any, device: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a padding-free batch that lies on this GPU, on the CPU."""
    (batch,) = LAYOUTS["flattened"](samples(LENGTHS))
    batch = {name: value.to(device) for name, value in batch.items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach().cpu(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def pair() -> tuple[Any, Any]:
    """The same model twice, in bf16 on the CPU; plain."""
    model = add_lora(tiny_model("llama", num_hidden_layers=4)).to(torch.bfloat16).train()
    return model, copy.deepcopy(model)


def assert_same(found: Any, expected: Any) -> None:
    (loss, gradients), (truth, true_gradients) = found, expected
    assert torch.equal(loss, truth) and gradients.keys() == true_gradients.keys() and len(gradients) > 20
    assert all(torch.equal(gradients[name], true_gradients[name]) for name in true_gradients)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_h_wrong_device() -> None:
    """All of it on the second GPU, while the first is the current one."""
    first, second = pair()
    fastlm.patch(first.to(0))
    fastlm.patch(second.to(1))
    assert torch.cuda.current_device() == 0
    assert_same(step(second, 1), step(first, 0))


@pytest.mark.parametrize("checkpointing", [False, "recompute", "offload"])
def test_h_wrong_device_layers_split(checkpointing: bool | str) -> None:
    from accelerate import dispatch_model

    first, second = pair()
    fastlm.patch(first.to(0))
    core = second.get_base_model()
    if checkpointing:
        core._fastlm_checkpointing = checkpointing
        core.gradient_checkpointing_enable()
        second.enable_input_require_grads()
    fastlm.patch(second)
    layers = {f"model.layers.{i}": i // 2 for i in range(4)}
    dispatch_model(core, {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1, **layers})
    fastlm.patch(second)
    assert patched_core(second) is core and fastlm.report(second).stock == {}
    assert_same(step(second, 0), step(first, 0))


def on_the_rank_s_own(out: str) -> None:
    import os

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo")
    model, _ = pair()
    fastlm.patch(model.to(rank))
    torch.save(step(model, rank), Path(out) / f"{rank}.pt")
    assert all(torch.cuda.memory_allocated(other) == 0 for other in range(2) if other != rank)


def test_h_wrong_device_two_processes(tmp_path: Path) -> None:
    run_on_two_ranks(on_the_rank_s_own, tmp_path)
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    losses = [zero[0].item(), one[0].item()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
