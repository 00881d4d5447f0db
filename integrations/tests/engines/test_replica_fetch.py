"""One fetch per replica group and one writer per key, counted at the store."""

import threading

import pytest
import torch
from layouts import calls, lose_payload, told, worker_of_rank

from dataplane_core.batch import BatchedDataDict, stack_or_nest
from dataplane_integrations.trainer.worker import HELD_ROWS

TOKENS = [[1, 2], [3, 4]]


def _prepared(shape):
    return worker_of_rank(shape, {"input_ids": torch.tensor(TOKENS)}, [2, 2])


def test_rows_that_are_read_before_the_call_are_read_once_and_all_ranks_hear_of_lost_ones(ranks):
    def run(rank):
        worker, metrics, meta = _prepared((2, 1, 2))
        meta.extra_info[HELD_ROWS] = "first"
        found = [worker.hold_presharded(meta)]
        worker.get_logprobs_presharded(meta)
        reads = calls(metrics, "get_samples")
        if worker._is_replica_leader() and worker._local_coords()["data_parallel"] == 1:
            lose_payload(worker._dp_client, "train", "p1_g0", "input_ids")
        found.append(worker.hold_presharded(meta))
        return worker._local_coords()["data_parallel"], worker._is_replica_leader(), found, reads

    for dp_rank, leads, found, reads in ranks(4, run):
        assert found == [[], ["p1_g0"] if dp_rank == 1 else []]
        assert reads == int(leads)


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
        return runs, batch["doubled"].tolist(), batch.micro_batch_indices, calls(metrics, "get_samples")

    assert ranks(2, run) == [([(True, rank)], [[2, 4], [6, 8]], [[[0, 2]]], 1 - rank) for rank in range(2)]


def test_ranks_plan_for_themselves_only_if_all_have_the_same_rows(ranks):
    def run(rank, shape):
        worker, _, meta = _prepared(shape)
        worker.cfg = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4}}
        data = BatchedDataDict({"input_ids": torch.tensor(TOKENS), "input_lengths": torch.tensor([2, 2])})
        return told(lambda: worker._attach_or_repack_pack_metadata(data, meta))

    assert [kind for kind, *_ in ranks(2, run, (1, 1, 2))] == ["", ""]
    for kind, _, said in ranks(2, run, (2, 1, 1)):
        assert kind == "InvalidRequestError"
        assert "of 2 ranks, 1 work on these rows" in said


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
        return told(lambda: worker._fetch(meta))

    outcomes = ranks(4, run)
    assert [kind for kind, *_ in outcomes] == kinds
    assert all("to be the group's first" in said for kind, _, said in outcomes if kind)


def test_the_leader_reads_ahead_and_its_siblings_get_each_portion_and_its_error(ranks):
    def train(rank, depth):
        lengths = [1, 3, 2, 2, 4, 1, 2, 3]
        rows = stack_or_nest([torch.full((length,), row) for row, length in enumerate(lengths)])
        worker, _, meta = worker_of_rank((1, 1, 2), {"input_ids": rows}, lengths)
        worker._require_dp_client().clear_samples(["p6_g0"], "train")
        worker.begin_train_step_presharded(None)
        portions = [meta.slice(row, row + 2) for row in (0, 2, 4, 6)]
        error = told(lambda: worker.train_microbatches_presharded(portions, read_ahead=depth))
        seen = [data["input_ids"].tolist() for _, data in worker.seen]
        return seen, error[:2], [each for each in threading.enumerate() if each.name.startswith("read-ahead")]

    seen = [[[0, 0, 0], [1, 1, 1]], [[2, 2], [3, 3]], [[4, 4, 4, 4], [5, 0, 0, 0]]]
    for depth in (0, 1, 2):
        leader, sibling = ranks(2, train, depth)
        assert leader == (seen, ("MissingDataError", "NoneType"), [])
        assert sibling == (seen, ("ReplicaLeaderError", "MissingDataError"), [])
