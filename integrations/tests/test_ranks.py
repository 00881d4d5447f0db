"""Two real ranks that share rows: one fetches and writes for both. All layouts are in `engines/`."""

import torch
from bits import bits
from layouts import calls, told, worker_of_rank

from dataplane_core.batch import stack_or_nest


def test_one_rank_fetches_and_writes_for_its_replica_group_and_its_failure_reaches_all(ranks):
    columns = {"input_ids": stack_or_nest([torch.tensor([1, 2, 3]), torch.tensor([4])]), "note": ["a", "é"]}

    def run(rank):
        worker, metrics, meta = worker_of_rank((1, 1, 2), columns, [3, 1])

        fetched = worker._fetch(meta)
        worker.get_logprobs_presharded(meta)
        counted = calls(metrics, "get_samples"), calls(metrics, "put_samples")
        alone = worker._fetch(meta, fetch_policy="independent")
        counted += (calls(metrics, "get_samples") - counted[0],)
        assert bits(alone) == bits(fetched)
        failure = told(lambda: worker._fetch(meta.with_fields(["nobody_wrote_this"])))
        return worker._is_replica_leader(), *counted, bits(fetched), failure

    (*leader, batch, failure), (*sibling, its_batch, its_failure) = ranks(2, run)
    assert batch == its_batch
    assert dict(batch)["input_ids"] == bits(torch.tensor([[1, 2, 3], [4, 0, 0]]))
    assert leader == [True, 2, 2, 1], "the first put is the test's own"
    assert sibling == [False, 0, 1, 1]
    assert failure[0] == "MissingDataError"
    assert its_failure[:2] == ("ReplicaLeaderError", "MissingDataError")
    assert all("nobody_wrote_this" in said for *_, said in (failure, its_failure))
