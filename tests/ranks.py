"""How a rank of a two-process test ends."""

import gc
import os
import sys

import torch.distributed as dist


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
