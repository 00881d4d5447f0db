"""A rank whose memory does not hold what its leader broadcasts."""

import resource
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import told

from dataplane_core.batch import BatchedDataDict
from dataplane_integrations.trainer.broadcast import broadcast_from_leader


def _said(produce):
    return told(lambda: broadcast_from_leader(produce, group=dist.group.WORLD))


def test_a_sibling_that_runs_out_of_memory_says_so_and_does_not_blame_the_leader(ranks):
    def run(rank):
        if rank == 0:
            return _said(lambda: BatchedDataDict({"large": torch.ones(1 << 28, dtype=torch.uint8)}))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        room = 3 << 26  # too little for the column, enough for threads that start meanwhile
        resource.setrlimit(resource.RLIMIT_AS, (mapped + room, before[1]))
        try:
            return _said(None)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    _, sibling = ranks(2, run, timeout_s=10)  # on a busy machine the sibling takes seconds
    assert sibling[0] == "RuntimeError"
    assert "allocate memory" in sibling[2]
