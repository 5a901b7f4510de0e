"""Two ranks with 10 and 90 targets: gradient, loss and metrics of one batch of 100."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import finish_rank

from . import runs

ROOT = Path(__file__).parents[2]


def main(out: str) -> None:
    """One rank's part; started with RANK and WORLD_SIZE set."""
    args = runs.config(out, per_device_train_batch_size=1, use_cpu=True, ddp_backend="gloo")
    trainer, gradients = runs.train(runs.model(), runs.rows((11, 91)), args)
    torch.save((trainer.state.log_history[0], gradients[0]), f"{out}/rank{args.process_index}.pt")
    finish_rank()


def test_b_unequal_microbatches_on_two_ranks(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = f"from tests.training.test_ranks import main; main({str(tmp_path)!r})"
    ranks = []
    for rank in ("0", "1"):
        environment = {
            **os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE))
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-3000:]
    whole, truth = runs.train(runs.model(), runs.rows((11, 91)), runs.config(tmp_path, per_device_train_batch_size=2))
    expected = whole.state.log_history[0]
    for rank in (0, 1):
        log, gradients = torch.load(tmp_path / f"rank{rank}.pt")
        gradients = {name.removeprefix("module."): tensor for name, tensor in gradients.items()}
        assert runs.worst_error(gradients, truth[0]) < 1e-5
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
            assert log[name] == pytest.approx(expected[name], rel=1e-5), name
