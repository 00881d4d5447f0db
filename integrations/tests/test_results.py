"""Results of all ranks become one; replica twins count once."""

import pickle

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.errors import ReplayTimeoutError, ReplicaLeaderError, WorkerFailedError, WorkerTimeoutError
from dataplane_integrations.trainer.groups import InProcessWorkerGroup, check_dp_ranks
from dataplane_integrations.trainer.results import aggregate_training_results, theoretical_tflops


def _result(dp, leader, **more):
    metrics = {"kl": [dp + 0.25, dp + 0.5]}
    return {"global_loss": 0.5, "grad_norm": 1.5, "all_mb_metrics": metrics, "is_replica_leader": leader, **more}


def test_twins_are_counted_once_in_the_order_of_the_data_parallel_ranks():
    results = [_result(1, False), _result(1, True), _result(0, True, global_tokens=7), _result(0, False)]
    merged = aggregate_training_results(results, [1, 1, 0, 0])
    kl = [0.25, 0.5, 1.25, 1.5]
    assert merged == {"loss": 0.5, "grad_norm": 1.5, "all_mb_metrics": {"kl": kl}, "global_tokens": 7}
    results = [_result(0, True, global_tokens=7), _result(1, True, global_tokens=8)]
    assert aggregate_training_results(results, [0, 1])["global_tokens"] == 7, "further keys are the first rank's"


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ([_result(0, True), _result(0, True)], "rank 0 has 2 replica leaders among 2 workers"),
        ([_result(0, False), _result(0, False)], "rank 0 has 0 replica leaders among 2 workers"),
        ([{"is_replica_leader": True}], "Expected 'global_loss'"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(results, named):
    with pytest.raises(InvalidRequestError, match=named):
        aggregate_training_results(results, [0] * len(results))


@pytest.mark.parametrize("dp_ranks", [[], [0, 2], [0, 0, 1], [1, 2]])
def test_data_parallel_ranks_must_be_complete_and_even(dp_ranks):
    with pytest.raises(InvalidRequestError, match="worker group refused"):
        check_dp_ranks(len(dp_ranks), dp_ranks)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["H200", "H200"], 1979.0), (["GB200"], 2450.0), (["H20"], 148.0), (["H200", "toaster"], None)],
)
def test_peaks_add_up_over_known_devices(names, expected):
    devices = [{"gpu_name": f"NVIDIA {name}", "model_dtype": "torch.bfloat16"} for name in names]
    assert theoretical_tflops(devices) == expected


class Tracker:
    total_flops = -1.0

    def reset(self):
        self.total_flops = 0.0
        self.shards = []

    def track_batch(self, sequence_lengths):
        self.shards.append(sequence_lengths)
        self.total_flops += sum(sequence_lengths)


def test_a_flops_tracker_sees_the_lengths_of_every_shard(toy_worker, client, write_rows):
    tracker = Tracker()
    fields = ["input_ids", "input_lengths"]
    workers = InProcessWorkerGroup([toy_worker(dp, tp) for dp in (0, 1) for tp in (0, 1)], dp_ranks=[0, 0, 1, 1])
    policy = DataPlanePolicy(workers, client, train_fields=fields, flops_tracker=tracker)
    for _ in range(2):
        result = policy.train_from_meta(write_rows([3, 1, 4, 2]), 1.0)
    assert tracker.shards == [[3, 1], [4, 2]]
    assert (result["total_flops"], result["num_ranks"], result["theoretical_tflops"]) == (10.0, 4, None)
    assert result["all_mb_metrics"]["rows"] == [2, 2]


def test_errors_survive_pickling():
    for cls in (WorkerFailedError, WorkerTimeoutError, ReplicaLeaderError, ReplayTimeoutError):
        read = pickle.loads(pickle.dumps(cls("a sentence.")))
        assert (type(read), str(read)) == (cls, "a sentence.")
