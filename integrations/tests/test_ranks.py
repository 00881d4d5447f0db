"""Two real ranks that share rows: one fetches and writes for both. All layouts are in `engines/`."""

from __future__ import annotations

import torch
from bits import bits
from layouts import worker_of_rank

from dataplane_core.batch import stack_or_nest
from dataplane_core.errors import DataPlaneError
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin


class Worker(FSDP2DataPlaneMixin):
    def get_logprobs(self, data, micro_batch_size=None):
        return {"logprobs": -data["input_ids"].float()}


def test_one_rank_fetches_and_writes_for_its_replica_group_and_its_failure_reaches_all(ranks):
    columns = {"input_ids": stack_or_nest([torch.tensor([1, 2, 3]), torch.tensor([4])]), "note": ["a", "é"]}

    def run(rank):
        worker, metrics, meta = worker_of_rank((1, 1, 2), columns, [3, 1], Worker)
        fetched = worker._fetch(meta)
        worker.get_logprobs_presharded(meta)
        operations = metrics.snapshot()["operations"]
        seen = {
            "leads": worker._is_replica_leader(),
            "batch": bits(fetched),
            "gets": operations.get("get_samples", {"calls": 0})["calls"],
            "puts": operations["put_samples"]["calls"],
        }
        try:
            worker._fetch(meta.with_fields(["nobody_wrote_this"]))
        except DataPlaneError as error:
            seen["failure"] = (type(error).__name__, type(error.__cause__).__name__, "nobody_wrote_this" in str(error))
        return seen

    leader, sibling = ranks(2, run)
    assert leader["batch"] == sibling["batch"]
    assert dict(leader["batch"])["input_ids"] == bits(torch.tensor([[1, 2, 3], [4, 0, 0]]))
    assert (leader["leads"], leader["gets"], leader["puts"]) == (True, 2, 2), "the first put is the test's own"
    assert (sibling["leads"], sibling["gets"], sibling["puts"]) == (False, 0, 1)
    assert leader["failure"][::2] == ("MissingDataError", True)
    assert sibling["failure"] == ("ReplicaLeaderError", "MissingDataError", True)
