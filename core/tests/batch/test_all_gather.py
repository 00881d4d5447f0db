"""`all_gather` over real gloo groups, one process per rank."""

import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataplane_core.batch import BatchedDataDict
from dataplane_testkit._workers import Worker

WORLD = 3
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]


def expect_refusal(columns, said):
    """Refused on this rank with ``said``, and the group still works."""
    with pytest.raises(ValueError) as caught:
        BatchedDataDict(columns).all_gather(None)
    assert said in str(caught.value)
    assert BatchedDataDict(x=torch.tensor([dist.get_rank()])).all_gather(None)["x"].tolist() == list(range(WORLD))


def unequal_sizes(rank):
    rows = 2 * rank + 1
    batch = BatchedDataDict(
        t=torch.full((rows, 2, 2), rank),
        names=[f"r{rank}i{i}" for i in range(rows)],
        objects=np.array([{"rank": rank}] * rows, dtype=object),
        scattered=torch.arange(rows * 6).reshape(rows, 6)[:, ::3],
        conjugate=torch.tensor([rank + 1j] * rows).conj(),
        negative=torch.tensor([rank + 1j] * rows).conj().imag,
    )
    joined = batch.all_gather(dist.group.WORLD)
    ranks = [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert joined["t"][:, 1, 1].tolist() == [item["rank"] for item in joined["objects"]] == ranks
    assert joined["names"] == [f"r{rank}i{row}" for rank in range(WORLD) for row in range(2 * rank + 1)]
    assert joined["scattered"].tolist() == [[6 * row, 6 * row + 3] for count in (1, 3, 5) for row in range(count)]
    assert joined["conjugate"].tolist() == [rank - 1j for rank in ranks]
    assert joined["negative"].tolist() == [-1.0] * 9


def every_dtype(rank):
    columns = {str(dtype): torch.tensor([rank, 1]).to(dtype) for dtype in DTYPES}
    joined = BatchedDataDict(columns).all_gather(None)
    for dtype in DTYPES:
        assert joined[str(dtype)].dtype == dtype
        expected = torch.tensor([0, 1, 1, 1, 2, 1]).to(dtype).to(torch.complex64)
        assert torch.equal(joined[str(dtype)].to(torch.complex64), expected), dtype


def empty_ranks(rank):
    rows = 0 if rank == 1 else 2
    joined = BatchedDataDict(t=torch.full((rows, 3), float(rank)), names=["a"] * rows).all_gather(None)
    assert joined["t"][:, 0].tolist() == [0, 0, 2, 2]
    assert joined["names"] == ["a"] * 4
    joined = BatchedDataDict({} if rank == 0 else {"t": torch.full((1, 3), rank), "names": ["b"]}).all_gather(None)
    assert (joined["t"].tolist(), joined["t"].dtype) == ([[1, 1, 1], [2, 2, 2]], torch.int64)
    assert joined["names"] == ["b", "b"]
    nothing = BatchedDataDict(t=torch.zeros(0, 4, dtype=torch.bool), names=[]).all_gather(None)
    assert (nothing["t"].shape, nothing["t"].dtype, nothing["names"]) == ((0, 4), torch.bool, [])
    assert BatchedDataDict(z=torch.zeros(rank, 0)).all_gather(None)["z"].shape == (3, 0)
    assert BatchedDataDict().all_gather(None) == {}


def part_of_the_ranks(rank):
    pair = dist.new_group([0, 2])
    if rank != 1:
        joined = BatchedDataDict(t=torch.tensor([rank])).all_gather(pair)
        assert joined["t"].tolist() == [0, 2]


def own_memory_and_another_order(rank):
    leaf = torch.full((2,), float(rank), requires_grad=True)
    columns = {"t": leaf * 2, "b": torch.tensor([rank, rank])}
    if rank == 1:
        columns = dict(reversed(columns.items()))
    joined = BatchedDataDict(columns).all_gather(None)
    assert not joined["t"].requires_grad
    assert joined["t"].tolist() == [2 * each for each in joined["b"].tolist()] == [0, 0, 2, 2, 4, 4]
    joined["t"].zero_()
    assert (leaf * 2).tolist() == [2 * rank] * 2


def disagreements(rank):
    odd = rank == 1
    expect_refusal({"x": torch.zeros(1, 3 if odd else 4)}, "column 'x'")
    expect_refusal({"x": torch.zeros(1, dtype=torch.float64 if odd else torch.float32)}, "torch.float64")
    expect_refusal({"x": [1] if odd else torch.zeros(1)}, "list on ranks [1]")
    expect_refusal({"y" if odd else "x": torch.zeros(1)}, "missing on ranks [1]")


def a_rank_that_cannot_send(rank):
    odd = rank == 2
    expect_refusal({"x": [1], "y": [1, 2] if odd else [1]}, "rank 2: columns differ in length")
    expect_refusal({"x": [lambda: None] if odd else [1]}, "rank 2: ")
    expect_refusal({"x": 5 if odd else [1]}, "rank 2: UnsupportedColumnError")
    nested = torch.nested.nested_tensor_from_jagged(torch.zeros(1, 2), torch.tensor([0, 1]))
    expect_refusal({"x": nested if odd else torch.zeros(1, 1, 2)}, "rank 2: columns 'x' are nested tensors")
    for unsent in (torch.zeros(1, device="meta"), torch.zeros(1).to_sparse()):
        expect_refusal({"x": unsent if odd else torch.zeros(1)}, "rank 2: columns 'x' are sparse")


@contextmanager
def member(rank, store):
    """This process as a rank of the group. It gives up soon on one that failed."""
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **rendezvous)
    yield rank
    dist.destroy_process_group()


def run(rank, check):
    """How a check went. A failure is told with its place, since no traceback leaves its process."""
    try:
        check(rank)
    except BaseException:
        return traceback.format_exc()
    return "passed"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    workers = [Worker(partial(member, rank, store)) for rank in range(WORLD)]
    for worker in workers:
        worker.wait_ready()
    yield workers
    for worker in workers:
        worker.close()


CHECKS = (unequal_sizes, every_dtype, empty_ranks, part_of_the_ranks, own_memory_and_another_order, disagreements)


@pytest.mark.parametrize("check", [*CHECKS, a_rank_that_cannot_send])
def test_over_gloo(ranks, check):
    for worker in ranks:
        worker.start(run, check)
    assert [worker.result(150) for worker in ranks] == ["passed"] * WORLD
