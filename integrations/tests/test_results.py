"""Results of all ranks become one; replica twins count once."""

from __future__ import annotations

import pickle

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.errors import ReplayTimeoutError, ReplicaLeaderError, WorkerFailedError, WorkerTimeoutError
from dataplane_integrations.trainer.groups import InProcessWorkerGroup, check_dp_ranks
from dataplane_integrations.trainer.results import aggregate_training_results, theoretical_tflops


def _result(dp, leader, **more):
    return {
        "global_loss": 0.5,
        "grad_norm": 1.5,
        "all_mb_metrics": {"kl": [dp + 0.25, dp + 0.5]},
        "is_replica_leader": leader,
        **more,
    }


def test_twins_are_counted_once_in_the_order_of_the_data_parallel_ranks():
    results = [_result(1, False), _result(1, True), _result(0, True), _result(0, False)]
    merged = aggregate_training_results(results, [1, 1, 0, 0])
    assert merged == {"loss": 0.5, "grad_norm": 1.5, "all_mb_metrics": {"kl": [0.25, 0.5, 1.25, 1.5]}}


def test_further_keys_are_the_first_ranks():
    merged = aggregate_training_results([_result(0, True, global_tokens=7), _result(1, True, global_tokens=8)], [0, 1])
    assert merged["global_tokens"] == 7


@pytest.mark.parametrize(("leaders", "found"), [([True, True], 2), ([False, False], 0)])
def test_a_rank_must_have_one_leader(leaders, found):
    with pytest.raises(InvalidRequestError, match=f"rank 0 has {found} replica leaders among 2 workers"):
        aggregate_training_results([_result(0, leader) for leader in leaders], [0, 0])


def test_a_result_without_a_loss_is_refused():
    with pytest.raises(InvalidRequestError, match="Expected 'global_loss'"):
        aggregate_training_results([{"is_replica_leader": True}], [0])


@pytest.mark.parametrize("dp_ranks", [[], [0, 2], [0, 0, 1], [1, 2]])
def test_data_parallel_ranks_must_be_complete_and_even(dp_ranks):
    with pytest.raises(InvalidRequestError, match="worker group refused"):
        check_dp_ranks(len(dp_ranks), dp_ranks)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["NVIDIA H200", "NVIDIA H200"], 1979.0),
        (["NVIDIA GB200"], 2450.0),
        (["NVIDIA H20"], 148.0),
        (["NVIDIA H200", "a toaster"], None),
    ],
)
def test_peaks_add_up_over_known_devices(names, expected):
    assert theoretical_tflops([{"gpu_name": name, "model_dtype": "torch.bfloat16"} for name in names]) == expected


def test_a_flops_tracker_sees_the_lengths_of_every_shard(toy_worker, client, write_rows):
    class Tracker:
        total_flops = -1.0

        def reset(self):
            self.total_flops = 0.0
            self.shards: list[list[int]] = []

        def track_batch(self, sequence_lengths):
            self.shards.append(sequence_lengths)
            self.total_flops += sum(sequence_lengths)

    tracker = Tracker()
    fields = ["input_ids", "input_lengths"]
    workers = InProcessWorkerGroup([toy_worker(dp, tp) for dp in (0, 1) for tp in (0, 1)], dp_ranks=[0, 0, 1, 1])
    policy = DataPlanePolicy(workers, client, train_fields=fields, flops_tracker=tracker)
    for _ in range(2):
        result = policy.train_from_meta(write_rows([3, 1, 4, 2]), 1.0)
    assert tracker.shards == [[3, 1], [4, 2]]
    assert result["total_flops"] == 10.0
    assert result["num_ranks"] == 4
    assert result["theoretical_tflops"] is None
    assert result["all_mb_metrics"]["rows"] == [2, 2]


def test_errors_survive_pickling():
    for cls in (WorkerFailedError, WorkerTimeoutError, ReplicaLeaderError, ReplayTimeoutError):
        read = pickle.loads(pickle.dumps(cls("a sentence.")))
        assert (type(read), str(read)) == (cls, "a sentence.")
