"""Data-parallel ranks with real collectives: all get the same number of batches, whatever is left at the end."""

import json
import subprocess
import uuid

import pytest
import torch

from dataplane_core import connect

_RANK = """
import asyncio, json, sys
import torch
import torch.distributed as dist
from dataplane_core import connect, connect_async, stream

CLAIM = ("p", "t", ["x", "text"], 2)


def step(batch):
    assert batch.columns["x"].dtype == torch.float64 and len(batch.columns["x"]) == batch.meta.size
    assert len(batch.columns["text"]) == batch.meta.size
    total = batch.columns["x"].sum()
    dist.all_reduce(total)
    return batch.meta.size, total.item()


async def run_async(config, terms):
    async with await connect_async(config, bootstrap=False) as client:
        return [step(batch) async for batch in stream(client, *CLAIM, **terms)]


def run(config, kind, terms):
    if kind == "async":
        return asyncio.run(run_async(config, terms))
    with connect(config, bootstrap=False) as client:
        return [step(batch) for batch in stream(client, *CLAIM, **terms)]


for line in sys.stdin:
    config, kind, rank, size, address, terms = json.loads(line)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    try:
        done = run(config, kind, dict(terms, dp_rank=rank, dp_size=size, timeout_s=60))
    except ValueError as error:
        done = str(error)
    dist.destroy_process_group()
    print(json.dumps(done), flush=True)
"""


@pytest.fixture(scope="module")
def processes(python):
    """Three of them, each of which is a rank of one task after the other."""
    pipe = subprocess.PIPE
    started = [python.start("-c", _RANK, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    yield started
    for each in started:
        each.stdin.close()  # it ends, unless it hangs
        try:
            assert each.wait(100) == 0
        finally:
            each.kill()
            each.stdout.close()


@pytest.fixture
def ranks(tmp_path, processes):
    """Runs the ranks of a task over some rows: ``ranks(kind, size, rows, **terms)`` gives what each of them did."""
    config = {"backend": "shm_store", "options": {"namespace": f"ranks-{uuid.uuid4().hex[:8]}"}}

    def run(kind, size, num_rows, **terms):
        with connect(config) as client:
            client.register_partition("p", ["x", "text"], num_rows, ["t"])
            x = torch.arange(num_rows, dtype=torch.float64)[:, None].expand(-1, 3)
            rows = {"x": x, "text": ["a"] * num_rows}
            client.put_samples([f"s{each}" for each in range(num_rows)], "p", rows)
            for rank, process in enumerate(processes[:size]):
                task = [config, kind, rank, size, f"file://{tmp_path}/address", terms]
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
            done = [json.loads(process.stdout.readline()) for process in processes[:size]]
            return done, client.check_consumption_status("p", ["t"])

    return run


@pytest.mark.parametrize(
    ("kind", "size", "num_rows", "sampler"),
    [("stream", 2, 5, "balanced"), ("async", 3, 7, "first_write"), ("stream", 2, 13, "freshest")],
)
def test_a_step_with_collectives_never_waits_for_a_rank_that_has_ended(ranks, kind, size, num_rows, sampler):
    done, consumed = ranks(kind, size, num_rows, sampler=sampler)
    assert len({len(each) for each in done}) == 1
    assert consumed
    sizes = [batch_size for each in done for batch_size, _ in each]
    assert sum(sizes) == num_rows
    assert 0 in sizes
    # every row was summed once, over all ranks and steps
    assert sum(total for _, total in done[0]) == 3 * sum(range(num_rows))


@pytest.mark.parametrize("uneven", ["drop", "error"])
def test_samples_that_are_fewer_than_the_ranks_are_dropped_or_refused_by_all(ranks, uneven):
    done, consumed = ranks("stream", 2, 5, uneven=uneven)
    if uneven == "drop":
        assert [[batch_size for batch_size, _ in each] for each in done] == [[2], [2]]
        assert consumed
    else:
        assert all("give a batch to 1 of 2 ranks" in each for each in done)
        assert not consumed
