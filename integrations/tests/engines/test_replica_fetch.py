"""One fetch per replica group and one writer per key, counted at the store."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import worker_of_rank

from dataplane_core import KVBatchMeta
from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_core.ledger import commands
from dataplane_core.middleware import Metrics
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.worker import HELD_ROWS
from dataplane_testkit import backend_of

SHAPES = [(2, 1, 2), (1, 2, 2), (2, 2, 1)]


class Worker(FSDP2DataPlaneMixin):
    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, Any]:
        return {"logprobs": -data["input_ids"].float()}


def _prepared(shape: tuple[int, int, int]) -> tuple[Any, Metrics, KVBatchMeta]:
    return worker_of_rank(shape, {"input_ids": torch.tensor([[1, 2], [3, 4]])}, [2, 2], Worker)


def _calls(metrics: Metrics) -> dict[str, int]:
    return {op: total["calls"] for op, total in metrics.snapshot()["operations"].items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_leader_alone_fetches_and_writes(ranks: Any, shape: tuple[int, int, int]) -> None:
    def run(rank: int) -> tuple[Any, ...]:
        worker, metrics, meta = _prepared(shape)
        fetched = worker._fetch(meta)["input_ids"].tolist()
        worker.get_logprobs_presharded(meta)
        calls = _calls(metrics)
        return worker._is_replica_leader(), fetched, calls.get("get_samples", 0), calls["put_samples"]

    outcomes = ranks(4, run)
    assert [fetched for _, fetched, _, _ in outcomes] == [[[1, 2], [3, 4]]] * 4
    for leads, _, gets, puts in outcomes:
        assert gets == (2 if leads else 0)
        assert puts == (2 if leads else 1), "the first put is the test's own"
    assert sum(leads for leads, *_ in outcomes) == shape[0]


def test_rows_that_are_read_before_the_call_are_read_once_and_all_ranks_hear_of_lost_ones(ranks: Any) -> None:
    def run(rank: int) -> tuple[Any, ...]:
        worker, metrics, meta = _prepared((2, 1, 2))
        meta.extra_info[HELD_ROWS] = "first"
        found = [worker.hold_presharded(meta)]
        worker.get_logprobs_presharded(meta)
        reads = _calls(metrics).get("get_samples", 0)
        if worker._is_replica_leader() and worker._local_coords()["data_parallel"] == 1:
            backend, deadline = backend_of(worker._dp_client), time.monotonic() + 60
            lost = backend.call_ledger(deadline, commands.Locate("train", ["p1_g0"], ["input_ids"]))
            backend.delete_refs(lost.refs, deadline)
        found.append(worker.hold_presharded(meta))
        return worker._local_coords()["data_parallel"], worker._is_replica_leader(), found, reads

    for dp_rank, leads, found, reads in ranks(4, run):
        assert found == [[], ["p1_g0"] if dp_rank == 1 else []]
        assert reads == int(leads)


def test_independent_fetches_are_one_per_rank(ranks: Any) -> None:
    def run(rank: int) -> int:
        worker, metrics, meta = _prepared((1, 2, 2))
        worker._fetch(meta, fetch_policy="independent")
        return _calls(metrics)["get_samples"]

    assert ranks(4, run) == [1] * 4


def test_every_rank_preprocesses_what_the_leader_read(ranks: Any) -> None:
    def run(rank: int) -> tuple[Any, ...]:
        worker, metrics, meta = _prepared((1, 1, 2))
        runs = []

        def preprocess(of: Any, batch: BatchedDataDict) -> BatchedDataDict:
            runs.append((of is worker, of._local_coords()["tensor_parallel"]))
            batch["doubled"] = batch["input_ids"] * 2
            batch.micro_batch_indices = [[[0, 2]]]
            return batch

        batch = worker._fetch(meta, preprocess=preprocess)
        return runs, batch["doubled"].tolist(), batch.micro_batch_indices, _calls(metrics).get("get_samples", 0)

    first, second = ranks(2, run)
    assert first == ([(True, 0)], [[2, 4], [6, 8]], [[[0, 2]]], 1)
    assert second == ([(True, 1)], [[2, 4], [6, 8]], [[[0, 2]]], 0)


def test_ranks_that_would_plan_unequal_microbatches_all_refuse(ranks: Any) -> None:
    def run(rank: int) -> str:
        worker, _, meta = _prepared((2, 1, 1))
        worker.cfg = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4}}
        lengths = torch.tensor([1, 1] if rank == 0 else [3, 4])
        data = BatchedDataDict({"input_ids": torch.ones(2, 4, dtype=torch.int64), "input_lengths": lengths})
        try:
            worker._attach_or_repack_pack_metadata(data, meta)
        except ValueError as error:
            return str(error)
        return ""

    for rank, message in enumerate(ranks(2, run)):
        assert f"this rank planned {rank + 1} microbatches, the data-parallel ranks planned 1 to 2" in message


def test_ranks_whose_peer_cannot_plan_refuse_with_it(ranks: Any) -> None:
    def run(rank: int) -> str:
        worker, _, meta = _prepared((2, 1, 1))
        worker.cfg = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4}}
        lengths = torch.tensor([1, 1] if rank == 0 else [3, 5])
        data = BatchedDataDict({"input_ids": torch.ones(2, 5, dtype=torch.int64), "input_lengths": lengths})
        try:
            worker._attach_or_repack_pack_metadata(data, meta)
        except InvalidRequestError as error:
            return str(error)
        return ""

    able, unable = ranks(2, run)
    assert "this rank planned 1 microbatches, another data-parallel rank could not plan its rows" in able
    assert "row 1 has 5 tokens" in unable


def test_a_group_in_another_order_than_the_axes_is_refused_on_every_rank(ranks: Any) -> None:
    def run(rank: int) -> tuple[Any, str]:
        worker, _, meta = _prepared((1, 2, 2))
        worker._is_replica_leader = lambda: rank == 3
        assert dist.get_world_size() == 4
        try:
            worker._fetch(meta)
        except DataPlaneError as error:
            return type(error), str(error)
        return None, ""

    first, *others = ranks(4, run)
    assert first[0] is InvalidRequestError
    assert [kind for kind, _ in others] == [ReplicaLeaderError] * 3
    for _, message in (first, *others):
        assert "to be the group's first" in message


def test_a_rank_that_takes_itself_for_a_second_leader_refuses_without_stranding_the_others(ranks: Any) -> None:
    def run(rank: int) -> str:
        worker, _, meta = _prepared((1, 2, 2))
        worker._is_replica_leader = lambda: rank in (0, 1)
        try:
            return str(worker._fetch(meta)["input_ids"].tolist())
        except InvalidRequestError as error:
            return str(error)

    first, second, *others = ranks(4, run)
    assert [first, *others] == ["[[1, 2], [3, 4]]"] * 3
    assert "to be the group's first" in second
