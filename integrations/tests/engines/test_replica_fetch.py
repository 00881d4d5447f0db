"""One fetch per replica group and one writer per key, counted at the store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from layouts import worker_of_rank

from dataplane_core.batch import BatchedDataDict, stack_or_nest
from dataplane_core.errors import DataPlaneError, MissingDataError
from dataplane_core.ledger import commands
from dataplane_integrations.errors import ReplicaLeaderError
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.worker import HELD_ROWS
from dataplane_testkit import backend_of

SHAPES = [(2, 1, 2), (1, 2, 2), (2, 2, 1)]


class Worker(FSDP2DataPlaneMixin):
    def get_logprobs(self, data, micro_batch_size=None):
        return {"logprobs": -data["input_ids"].float()}


def _prepared(shape):
    return worker_of_rank(shape, {"input_ids": torch.tensor([[1, 2], [3, 4]])}, [2, 2], Worker)


def _calls(metrics):
    return {op: total["calls"] for op, total in metrics.snapshot()["operations"].items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_leader_alone_fetches_and_writes(ranks, shape):
    def run(rank):
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


def test_rows_that_are_read_before_the_call_are_read_once_and_all_ranks_hear_of_lost_ones(ranks):
    def run(rank):
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


def test_independent_fetches_are_one_per_rank(ranks):
    def run(rank):
        worker, metrics, meta = _prepared((1, 2, 2))
        worker._fetch(meta, fetch_policy="independent")
        return _calls(metrics)["get_samples"]

    assert ranks(4, run) == [1] * 4


def test_every_rank_preprocesses_what_the_leader_read(ranks):
    def run(rank):
        worker, metrics, meta = _prepared((1, 1, 2))
        runs = []

        def preprocess(of, batch):
            runs.append((of is worker, of._local_coords()["tensor_parallel"]))
            batch["doubled"] = batch["input_ids"] * 2
            batch.micro_batch_indices = [[[0, 2]]]
            return batch

        batch = worker._fetch(meta, preprocess=preprocess)
        return runs, batch["doubled"].tolist(), batch.micro_batch_indices, _calls(metrics).get("get_samples", 0)

    first, second = ranks(2, run)
    assert first == ([(True, 0)], [[2, 4], [6, 8]], [[[0, 2]]], 1)
    assert second == ([(True, 1)], [[2, 4], [6, 8]], [[[0, 2]]], 0)


def _refusal(call):
    try:
        return "", str(call()["input_ids"].tolist())
    except DataPlaneError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            [3, 4],
            [
                "this rank planned 1 microbatches, the data-parallel ranks planned 1 to 2",
                "this rank planned 2 microbatches, the data-parallel ranks planned 1 to 2",
            ],
        ),
        ([3, 5], ["planned 1 microbatches, another data-parallel rank could not plan", "row 1 has 5 tokens"]),
    ],
    ids=["unequal plans", "a rank that cannot plan"],
)
def test_ranks_that_cannot_train_alike_all_refuse(ranks, lengths, said):
    def run(rank):
        worker, _, meta = _prepared((2, 1, 1))
        worker.cfg = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4}}
        mine = torch.tensor(lengths if rank else [1, 1])
        data = BatchedDataDict({"input_ids": torch.ones(2, 5, dtype=torch.int64), "input_lengths": mine})
        return _refusal(lambda: worker._attach_or_repack_pack_metadata(data, meta))

    for (kind, found), part in zip(ranks(2, run), said, strict=True):
        assert kind == "InvalidRequestError"
        assert part in found


@pytest.mark.parametrize(
    ("leaders", "kinds"),
    [
        ([3], ["InvalidRequestError", *["ReplicaLeaderError"] * 3]),  # a group in another order than the axes
        ([0, 1], ["", "InvalidRequestError", "", ""]),  # a rank too many
    ],
)
def test_a_group_whose_first_is_not_its_one_leader_is_refused_and_strands_nobody(ranks, leaders, kinds):
    def run(rank):
        worker, _, meta = _prepared((1, 2, 2))
        worker._is_replica_leader = lambda: rank in leaders
        return _refusal(lambda: worker._fetch(meta))

    outcomes = ranks(4, run)
    assert [kind for kind, _ in outcomes] == kinds
    for kind, said in outcomes:
        assert ("to be the group's first" in said) if kind else (said == "[[1, 2], [3, 4]]")


def test_the_leader_reads_ahead_and_its_siblings_get_each_portion_and_its_error(ranks):
    def train(rank, depth):
        class Trainer(FSDP2DataPlaneMixin):
            def __init__(self):
                self.seen: list[Any] = []

            def begin_train_step(self, loss_fn, gbs=None, mbs=None): ...

            def train_microbatch(self, data):
                self.seen.append(data["input_ids"].tolist())

            def finish_train_step(self):
                return {}

            def abort_train_step(self): ...

        lengths = [1, 3, 2, 2, 4, 1, 2, 3]
        rows = stack_or_nest([torch.full((length,), row) for row, length in enumerate(lengths)])
        worker, _, meta = worker_of_rank((1, 1, 2), {"input_ids": rows}, lengths, Trainer)
        worker._require_dp_client().clear_samples(["p6_g0"], "train")
        worker.begin_train_step_presharded(None)
        try:
            worker.train_microbatches_presharded([meta.slice(row, row + 2) for row in (0, 2, 4, 6)], read_ahead=depth)
        except Exception as error:
            readers = [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
            return worker.seen, type(error), type(error.__cause__), len(readers)

    for depth in (0, 1, 2):
        leader, sibling = ranks(2, train, depth)
        assert leader[0] == sibling[0] == [[[0, 0, 0], [1, 1, 1]], [[2, 2], [3, 3]], [[4, 4, 4, 4], [5, 0, 0, 0]]]
        assert leader[1] is MissingDataError
        assert sibling[1:3] == (ReplicaLeaderError, MissingDataError)
        assert leader[3] == sibling[3] == 0
