"""Two-process tests: how the ranks start, and how a rank ends."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_on_two_ranks(part: Callable[[str], Any], out: Path) -> None:
    """Run a test module's function ``part(out)`` in two processes of one group and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    name, module = part.__name__, part.__module__
    code = f"from tests.ranks import finish_rank; from {module} import {name}; {name}({str(out)!r}); finish_rank()"
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


def finish_rank() -> None:
    """Leave together, successfully, and without C++ static destructors.

    gloo's worker threads outlive ``destroy_process_group`` while anything (an FSDP mesh, a DDP reducer) still
    refers to the group; the interpreter's exit then sometimes ends in ``std::terminate``, after the work is done
    (github.com/pytorch/pytorch/issues/190489). An exception before this call still ends the rank with its traceback
    and code 1.
    """
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
