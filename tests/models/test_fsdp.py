"""FSDP2 over a patched LoRA model: two gloo processes give one process's loss and gradient norm."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fastlm
from tests.models.batches import LAYOUTS, samples, target_count
from tests.ranks import finish_rank
from tests.tiny import add_lora, enable_checkpointing, tiny_model

ROWS = samples((9, 4, 14, 5))


def _step(model, rows, count):
    batch = LAYOUTS["flattened"](rows)[0]
    model.train()
    loss = model(**batch, num_items_in_batch=torch.tensor(count), use_cache=False).loss
    loss.backward()
    return loss.detach()


def _rank(rank: int, port: int, results) -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = add_lora(tiny_model("qwen3"))
    fastlm.patch(model)
    core = model.get_base_model()  # recomputes here, and not in the one process that this is compared with
    enable_checkpointing(core)
    for layer in core.model.layers:
        fully_shard(layer)
    fully_shard(model)
    try:
        fastlm.patch(model)
    except ValueError as error:
        refused = "before wrapping" in str(error)
    mine = ROWS[:2] if rank == 0 else ROWS[2:]
    loss = _step(model, mine, target_count(ROWS))
    dist.all_reduce(loss)
    square = torch.zeros(())
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.full_tensor() * 2  # FSDP averages over ranks; the loss is a sum
            square += gradient.double().pow(2).sum().float()
    if rank == 0:
        results.put((loss.item(), square.sqrt().item(), refused))
        results.close()
        results.join_thread()  # the queue is written by a thread that the exit would not wait for
    finish_rank()


@pytest.mark.slow
def test_two_ranks_equal_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    loss, norm, refused = results.get(timeout=240)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    single = add_lora(tiny_model("qwen3"))
    fastlm.patch(single)
    expected = _step(single, ROWS, target_count(ROWS))
    square = sum(p.grad.double().pow(2).sum() for p in single.parameters() if p.grad is not None)
    assert refused
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(square.sqrt().item(), rel=1e-5)
