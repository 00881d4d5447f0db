"""The driver's side of a step, over the in-process store with workers that are plain objects."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from dataplane_core import KVBatchMeta, connect, kv_first_write
from dataplane_core.batch import rollouts_of
from dataplane_core.errors import ConfigError, InvalidRequestError, InvalidTypeError, LostSamplesError
from dataplane_core.middleware import Metrics
from dataplane_core.schema import DP_TRAIN_FIELDS, GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.errors import WorkerFailedError
from dataplane_integrations.trainer.batching import Batching, DynamicBatching
from dataplane_integrations.trainer.groups import InProcessWorkerGroup

BATCHING = Batching(dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=4))
LENGTHS = [4, 1, 3, 2, 6, 5, 2, 7]
COLUMNS = ("advantages", "prev_logprobs", "reference_policy_logprobs")


@pytest.fixture
def workers(toy_worker):
    return [toy_worker(dp_rank=0), toy_worker(dp_rank=1)]


@pytest.fixture
def make_policy(workers, client):
    """``make_policy(**options)``: of the workers and the client."""
    with ExitStack() as stack:
        group = InProcessWorkerGroup(workers)
        yield lambda **options: stack.enter_context(DataPlanePolicy(group, client, **options))


@pytest.fixture
def policy(make_policy):
    return make_policy(batching=BATCHING)


def test_a_step_from_logprobs_to_training(policy, workers, write_rows, client):
    meta = write_rows(LENGTHS)
    meta = policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 7)})
    meta = policy.get_logprobs_from_meta(meta)
    meta = policy.get_reference_policy_logprobs_from_meta(meta)
    result = policy.train_from_meta(meta, 0.5)

    assert meta.fields is not None
    assert {"advantages", "prev_logprobs", "reference_policy_logprobs"} <= set(meta.fields)
    assert result["loss"].tolist() == [0.5]
    assert result["grad_norm"].tolist() == [2.0]
    assert result["all_mb_metrics"] == {"rows": [4, 4], "rank": [0, 1]}
    assert result["arguments"] == (False, None, None)
    trained = [data for worker in workers for what, data in worker.seen if what == "train"]
    for data in trained:
        assert data["input_ids"].shape == (4, 8), "both ranks forward at the longest row, rounded up"
        inside = data["token_mask"].bool()
        assert torch.equal(data["prev_logprobs"], -data["input_ids"].float())
        assert torch.equal(data["reference_policy_logprobs"], -2.0 * data["input_ids"])
        assert torch.equal(data["advantages"], inside.float())
    assert trained[0].micro_batch_indices == trained[1].micro_batch_indices, "or the ranks would wait for each other"
    seen = sorted(int(row[0]) for data in trained for row in data["input_ids"])
    assert seen == list(range(1, 9))

    read = policy.read_from_dataplane(meta, ["prev_logprobs", "input_lengths"])
    assert read["prev_logprobs"][1].tolist() == [-2.0] + [0.0] * 7, "as wide as the workers' forward"
    policy.finish_step(meta)
    assert client.list_samples("train").size == 0


def test_rows_of_rollouts_get_what_their_rollout_got(policy, client):
    partition = policy.prepare_step(None, 2, fields=["x"], rollouts=True)
    client.put_samples(["q0_g0/0", "q0_g1/0", "q0_g0/1"], partition, {"x": torch.zeros(3)})
    client.seal({"q0_g0": 2, "q0_g1": 1}, partition)
    meta = client.claim_meta(partition, "train", ["x"], 1)
    rollouts, rollout_of_row = rollouts_of(meta.sample_ids)
    assert rollouts == ["q0_g0", "q0_g1"]
    policy.write_to_dataplane(meta, {"advantage": torch.tensor([0.5, -0.5])[rollout_of_row]})
    assert client.get_samples(["q0_g1/0", "q0_g0/1"], partition, ["advantage"])["advantage"].tolist() == [-0.5, 0.5]


def test_metrics_of_the_driver_and_of_workers_with_clients_of_their_own_are_joined(workers):
    config = {"backend": "redis_store", "options": {"namespace": "joined-metrics"}, "middleware": ["metrics"]}
    with DataPlanePolicy(InProcessWorkerGroup(workers), config) as policy:
        policy.client.register_partition("p", ["x"], None, ["t"])
        joined = policy.metrics(reset=True)
        assert joined["num_clients"] == 3
        assert joined["operations"]["register_partition"]["calls"] == 1
        assert "register_partition" not in policy.metrics()["operations"], "the next ones count from there on"


@pytest.mark.parametrize("middleware", [[Metrics()], []], ids=["with metrics", "without"])
def test_workers_that_share_the_drivers_client_count_once(workers, middleware):
    group = InProcessWorkerGroup(workers)
    with connect({"backend": "noop", "middleware": middleware}) as client, DataPlanePolicy(group, client) as sharing:
        client.register_partition("p", ["x"], None, ["t"])
        joined = sharing.metrics()
    assert joined["num_clients"] == len(middleware)
    calls = {name: each["calls"] for name, each in joined["operations"].items()}
    assert calls == ({"register_partition": 1} if middleware else {})


#: Lengths, the rows' own multiple, what was stamped before, and what is stamped then; batching rounds to 4.
STAMPS = {
    "batching's round": ([5, 2], 1, None, 8),
    "the rows' own multiple": ([5, 2], 16, None, 16),
    "a multiple of both": ([5, 2], 6, None, 12),
    "stamped once": ([5, 2], 1, 12, 12),
    "a stamp that rows outgrow": ([5, 2, 9, 1], 1, 8, 12),
}


@pytest.mark.parametrize(("lengths", "pad_to_multiple", "stamped", "expected"), STAMPS.values(), ids=STAMPS)
def test_the_common_length_is_stamped(policy, write_rows, lengths, pad_to_multiple, stamped, expected):
    meta = write_rows(lengths, pad_to_multiple=pad_to_multiple)
    if stamped:
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = stamped
    policy.get_logprobs_from_meta(meta)
    assert meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == expected


# --- rows that the store has lost -------------------------------------------------------------------------------------


class Rollouts:
    """Replaces lost rows by rows of 9 tokens, and keeps what it was asked for."""

    def __init__(self, client, make_batch):
        self.client = client
        self.make_batch = make_batch
        self.asked: list[list[str]] = []
        self.loses_again = 0
        self.lose = None

    def __call__(self, meta, lost):
        self.asked.append(list(lost))
        self.client.clear_samples(list(lost), meta.partition_id)
        batch = self.make_batch([9] * len(lost), first=100)
        columns = {name: torch.zeros(len(lost), 9) for name in COLUMNS}
        kv_first_write(
            {**batch, **columns}, sample_ids=list(lost), dp_client=self.client, partition_id=meta.partition_id
        )
        meta.sequence_lengths = [
            9 if name in lost else length
            for name, length in zip(meta.sample_ids, meta.sequence_lengths or [], strict=True)
        ]
        if self.loses_again:
            self.loses_again -= 1
            self.lose(meta.partition_id, lost[0], "input_ids")
        return meta


@pytest.fixture
def rollouts(client, make_batch, lose):
    made = Rollouts(client, make_batch)
    made.lose = lose
    return made


@pytest.fixture
def replacing(make_policy, rollouts):
    return make_policy(batching=BATCHING, replace_lost=rollouts)


def test_lost_rows_are_produced_again_before_anything_is_computed(
    replacing, workers, trainable_rows, rollouts, lose, client
):
    meta = trainable_rows(LENGTHS)
    lose("train", "p0_g1", "input_ids")
    lose("train", "p3_g1", "token_mask")
    rollouts.loses_again = 1
    meta = replacing.get_logprobs_from_meta(meta)
    first, again = rollouts.asked
    assert (sorted(first), again) == (["p0_g1", "p3_g1"], first[:1])
    assert replacing.num_lost == 3
    lose("train", "p1_g0", "prev_logprobs")
    replacing.train_from_meta(meta, 1.0)
    assert rollouts.asked[2:] == [["p1_g0"]]
    for what in ("get_logprobs", "train"):
        seen = [data for worker in workers for name, data in worker.seen if name == what]
        assert [data["input_ids"].shape for data in seen] == [(4, 12)] * 2, "the new length counts"
        assert sum(int((data["input_ids"][:, 8] >= 100).sum()) for data in seen) == 2 + (what == "train")
    reads = client.metrics.snapshot()["operations"]["get_samples"]["calls"]
    assert reads == 2 * 5, "two workers, and a read of each for every time that rows were looked at"


def test_rows_that_are_lost_again_and_again_end_the_call_with_their_names(
    replacing, workers, write_rows, rollouts, lose, client
):
    meta = write_rows(LENGTHS)
    lose("train", "p0_g1", "input_ids")
    rollouts.loses_again = 100
    with pytest.raises(LostSamplesError, match="'p0_g1'") as caught:
        replacing.get_logprobs_from_meta(meta)
    assert caught.value.missing_samples == ("p0_g1",)
    assert not any(worker.seen for worker in workers)
    assert client.list_samples("train").size == 8


def test_portions_of_a_step_are_replaced_too(replacing, workers, trainable_rows, rollouts, lose):
    meta = trainable_rows(LENGTHS)
    replacing.begin_train_step(1.0)
    for portion in (meta.slice(0, 4), meta.slice(4, 8)):
        lose("train", portion.sample_ids[0], "input_ids")
        replacing.train_microbatch_from_meta(portion)
    replacing.finish_train_step()
    assert rollouts.asked == [["p0_g0"], ["p2_g0"]]
    assert [data.size for worker in workers for _, data in worker.seen] == [2] * 4


def _without_lost_groups(meta, lost):
    groups = {sample_id[:2] for sample_id in lost}
    return meta.subset([row for row, sample_id in enumerate(meta.sample_ids) if sample_id[:2] not in groups])


@pytest.mark.parametrize("lost_in", ["logprobs", "training"])
@pytest.mark.parametrize(
    ("num_rows", "gbs", "num_trained", "gbs_then"), [(8, 8, 6, 6), (8, 4, 4, 4), (12, 6, 8, 4), (8, None, 6, None)]
)
def test_global_batches_have_fewer_rows_when_rows_were_left_out(
    make_policy, trainable_rows, lose, lost_in, num_rows, gbs, num_trained, gbs_then
):
    policy = make_policy(batching=Batching(global_batch_size=gbs), replace_lost=_without_lost_groups)
    meta = trainable_rows([3] * num_rows)
    if lost_in == "logprobs":
        lose("train", "p1_g0", "input_ids")
    meta = policy.get_logprobs_from_meta(meta)
    if lost_in == "training":
        lose("train", "p1_g0", "input_ids")
    result = policy.train_from_meta(meta, 1.0)
    assert policy.num_lost == 1
    assert sum(result["all_mb_metrics"]["rows"]) == num_trained
    assert result["arguments"] == (False, gbs_then, None)


def test_rows_that_are_no_whole_global_batches_are_refused_if_none_was_left_out(make_policy, client, trainable_rows):
    with pytest.raises(InvalidRequestError, match="not a multiple of batch_size 6"):
        make_policy(replace_lost=_without_lost_groups).train_from_meta(trainable_rows(LENGTHS), 1.0, gbs=6)
    assert client.list_samples("train").size == 8


def test_rows_that_were_read_for_a_call_that_failed_are_never_trained_on(
    make_policy, replacing, workers, client, trainable_rows, make_batch
):
    meta = trainable_rows(LENGTHS)
    workers[0].fail_in = "train"
    with pytest.raises(WorkerFailedError, match="broke in train"):
        replacing.train_from_meta(meta, 1.0)  # worker 1 has read its rows and is not called
    workers[0].fail_in = None
    rows = {**make_batch(LENGTHS, first=100), **{name: torch.zeros(8, 7) for name in COLUMNS}}
    kv_first_write(rows, sample_ids=meta.sample_ids, dp_client=client, partition_id="train")
    make_policy(batching=BATCHING).train_from_meta(meta, 1.0)
    seen = sorted(int(row[0]) for worker in workers for _, data in worker.seen for row in data["input_ids"])
    assert seen == list(range(100, 108))


@pytest.mark.parametrize("num_portions", [1, 2])
def test_workers_have_the_timeout_for_each_portion(make_policy, trainable_rows, monkeypatch, num_portions):
    timeouts, call = {}, InProcessWorkerGroup.call

    def noted(group, method, *args, timeout_s, **kwargs):
        timeouts[method] = timeout_s
        return call(group, method, *args, timeout_s=timeout_s, **kwargs)

    policy, meta = make_policy(timeout_s=30.0), trainable_rows(LENGTHS)
    monkeypatch.setattr(InProcessWorkerGroup, "call", noted)
    policy.begin_train_step(1.0)
    policy.train_microbatches_from_metas([meta.slice(0, 4), meta.slice(4, 8)][:num_portions])
    policy.finish_train_step()
    assert timeouts["train_microbatches_presharded"] == 30.0 * num_portions
    assert timeouts["finish_train_step_presharded"] == 30.0


# --- calls as a trainer of NeMo RL makes them -------------------------------------------------------------------------


class Timer:
    """Notes what was measured, and whether a worker ran meanwhile."""

    def __init__(self, workers):
        self.workers = workers
        self.measured: dict[str, int] = {}

    @contextmanager
    def time(self, label):
        before = sum(len(worker.seen) for worker in self.workers)
        yield
        self.measured[label] = sum(len(worker.seen) for worker in self.workers) - before


def test_a_timer_measures_the_phases_of_each_call(policy, workers, trainable_rows):
    meta = trainable_rows(LENGTHS)
    timer = Timer(workers)
    policy.get_logprobs_from_meta(meta, timer=timer)
    policy.get_reference_policy_logprobs_from_meta(meta, timer=timer)
    policy.train_from_meta(meta, 1.0, timer=timer)
    calls = ("get_logprobs", "get_reference_policy_logprobs", "policy_training")
    assert timer.measured == {
        f"{call}/{phase}": n for call in calls for phase, n in (("shard_meta", 0), ("workers", 2))
    }
    portions = Timer(workers)
    policy.begin_train_step(1.0, None, 2)
    policy.train_microbatches_from_meta(meta, timer=portions)
    policy.finish_train_step()
    assert portions.measured == {"policy_training/shard_meta": 0, "policy_training/workers": 2}


def test_a_call_says_which_fields_it_trains_on(policy, workers, write_rows):
    meta = write_rows(LENGTHS)
    policy.train_from_meta(meta, 1.0, train_fields=("input_ids", "input_lengths"))
    assert [set(data) for worker in workers for _, data in worker.seen] == [{"input_ids", "input_lengths"}] * 2
    with pytest.raises(WorkerFailedError, match="advantages"):  # the next call reads all of them again
        policy.train_from_meta(meta, 1.0)


def test_sizes_of_batches_come_from_the_config_unless_the_call_says(make_policy, workers, write_rows):
    batching = Batching.from_config({"train_global_batch_size": 4, "train_micro_batch_size": 2})
    policy = make_policy(batching=batching, train_fields=["input_ids", "input_lengths"])
    meta = write_rows(LENGTHS)
    assert policy.train_from_meta(meta, 1.0)["arguments"] == (False, 4, 2)
    assert policy.train_from_meta(meta, 1.0, eval_mode=True, gbs=8, mbs=1)["arguments"] == (True, 8, 1)
    # rows of the first global batch come first on both ranks
    assert [data["input_lengths"].tolist() for _, data in workers[0].seen] == [[4, 1, 6, 5], [4, 1, 3, 2]]


def test_the_driver_reads_at_the_width_of_the_workers(policy, write_rows):
    meta = write_rows([5, 2], pad_to_multiple=6)
    assert policy.read_from_dataplane(meta, select_fields=["token_mask"])["token_mask"].shape == (2, 12)
    assert meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == 12
    bare = KVBatchMeta("train", None, meta.sample_ids)
    assert policy.read_from_dataplane(bare, ["token_mask"])["token_mask"].shape == (2, 5)


@pytest.mark.parametrize("told", [False, True])
def test_the_reference_policy_does_not_read_the_policys_routes_unless_told(make_policy, workers, write_rows, told):
    fields = ["input_ids", "input_lengths"]
    policy = make_policy(router_replay=True, reference_router_replay=told, train_fields=fields)
    meta = policy.write_to_dataplane(write_rows([2, 1]), {"routed_experts": torch.zeros(2, 2, 1, 1).short()})
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta)
    policy.train_from_meta(meta, 1.0)
    reads = {what: "routed_experts" in data for worker in workers for what, data in worker.seen}
    assert reads == {"get_logprobs": True, "get_reference_policy_logprobs": told, "train": True}


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("call", ["get_logprobs", "get_reference_policy_logprobs", "train"])
def test_rows_are_cleared_although_a_worker_raised_unless_they_are_to_stay(
    make_policy, workers, trainable_rows, client, call, clears
):
    policy = make_policy(batching=BATCHING, clear_on_failure=clears)
    meta = trainable_rows(LENGTHS)
    workers[1].fail_in = call
    with pytest.raises(WorkerFailedError, match="policy worker 1 failed while.*ing.*broke in " + call) as caught:
        getattr(policy, f"{call}_from_meta")(meta, *([1.0] if call == "train" else []))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert client.list_samples("train").size == (0 if clears else len(LENGTHS))


def test_rows_without_lengths_are_refused(policy):
    policy.prepare_step()
    with pytest.raises(InvalidRequestError, match="2 rows without sequence_lengths"):
        policy.get_logprobs_from_meta(KVBatchMeta("train", None, ["a_g0", "a_g1"]))
    with pytest.raises(InvalidRequestError, match="0 rows with sequence_lengths"):
        policy.get_logprobs_from_meta(KVBatchMeta("train", None, [], sequence_lengths=[]))


@pytest.mark.parametrize("call", ["get_logprobs_from_meta", "train_from_meta"])
@pytest.mark.parametrize("lengths", [[4, 17], [4, 1, 3]], ids=["a row over the limit", "rows that cannot be shared"])
def test_rows_stay_when_they_are_refused_before_a_worker_is_called(policy, workers, write_rows, client, call, lengths):
    meta = write_rows(lengths)
    with pytest.raises(InvalidRequestError, match="shard_meta_for_dp"):
        getattr(policy, call)(meta, *([1.0] if call == "train_from_meta" else []))
    assert client.list_samples("train").size == len(lengths)
    assert [worker.seen for worker in workers] == [[], []]


def test_partitions_have_their_tasks_and_are_opened_afresh_and_emptied(policy, client):
    def held(partition="train"):
        return client.list_samples(partition).sample_ids

    with pytest.raises(InvalidRequestError, match="no step is open"):
        policy.discard_samples(["a"])
    with pytest.raises(InvalidTypeError, match="sample_ids must be a list"):
        policy.discard_samples("a", "train")
    assert policy.prepare_step(num_samples=4, group_size=2) == "train"
    assert policy.prepare_val_partition(2) == "val"
    assert policy.prepare_val_partition(partition_id="validation") == "validation"
    ids = ["a_g0", "a_g1"]
    for partition, tasks in (("train", ["prev_lp", "ref_lp", "train"]), ("val", ["val"]), ("validation", [])):
        client.put_samples(ids, partition, {"x": torch.arange(2)})
        for task in tasks:
            assert client.claim_meta(partition, task, ["x"], 2, blocking=False).sample_ids == ids
    policy.discard_samples(["a_g0"])
    policy.discard_samples(sample_ids=["a_g1"], partition_id="val")
    assert (held(), held("val")) == (["a_g1"], ["a_g0"])
    policy.discard_samples(None, "validation")
    policy.prepare_step(num_samples=4, group_size=2)
    assert held() == ["a_g1"]
    policy.prepare_step(keep_rows=False)
    assert held() == []
    client.put_samples(["b_g0"], "train", {"x": torch.arange(1)})
    policy.finish_step()
    policy.prepare_step()
    assert held() == []


def test_workers_in_other_processes_need_a_backend_that_reaches_them(workers):
    class Elsewhere(InProcessWorkerGroup):
        in_process = False

    with pytest.raises(ConfigError, match="backend 'noop' lives in one process"):
        DataPlanePolicy(Elsewhere(workers), {"backend": "noop"})


def test_a_worker_that_cannot_attach_leaves_nothing_behind(workers, client, write_rows):
    def refuse(cfg):
        raise RuntimeError("no route to the store")

    group = InProcessWorkerGroup(workers)
    workers[1].setup_data_plane = refuse
    with pytest.raises(WorkerFailedError, match=r"policy worker 1 failed while attaching.*no route"):
        DataPlanePolicy(group, {"backend": "noop"})
    del workers[1].setup_data_plane
    own = DataPlanePolicy(group, {"backend": "noop"})
    own.close()
    assert workers[0]._dp_client is None
    policy = DataPlanePolicy(group, client)
    with pytest.raises(WorkerFailedError, match="with another config"):
        DataPlanePolicy(group, {"backend": "noop"})
    policy.get_logprobs_from_meta(write_rows(LENGTHS))  # its workers stayed attached
    policy.close()
    policy.close()
    client.register_partition("open", ["a"], None, [])  # a given client stays open


# --- the split step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "error"), [("policy", "broke in train_microbatch"), ("replacing", "p2_g0")])
def test_a_portion_that_fails_aborts_the_step_and_clears_all_its_rows(
    request, workers, trainable_rows, client, of, error
):
    policy = request.getfixturevalue(of)
    held_at_abort = []

    def abort(worker):
        held_at_abort.append(client.list_samples("train").size)
        worker.open = None

    for worker in workers:
        worker.abort_train_step = partial(abort, worker)
    meta = trainable_rows(LENGTHS)
    policy.begin_train_step(1.0)
    policy.train_microbatch_from_meta(meta.slice(0, 4))
    if of == "policy":
        workers[1].fail_in = "train_microbatch"
    else:  # one that replaces rows that are lost; these are cleared
        client.clear_samples(meta.sample_ids[4:5], "train")
    with pytest.raises(WorkerFailedError, match=error):
        policy.train_microbatch_from_meta(meta.slice(4, 8))
    assert client.list_samples("train").size == 0
    assert [worker.open for worker in workers] == [None, None]
    assert held_at_abort == [0, 0], "cleared before a worker is waited for"
    with pytest.raises(InvalidRequestError, match="no step is open"):
        policy.finish_train_step()


def test_an_open_step_refuses_another_and_keeps_its_rows_also_when_it_is_aborted(policy, trainable_rows, client):
    meta = trainable_rows(LENGTHS)
    policy.abort_train_step()  # nothing to abort
    for ends in (policy.abort_train_step, policy.finish_train_step):
        policy.begin_train_step(1.0)
        with pytest.raises(InvalidRequestError, match="a step is open"):
            policy.begin_train_step(1.0)
        with pytest.raises(InvalidRequestError, match="train_from_meta refused: a step is open"):
            policy.train_from_meta(meta, 1.0)
        assert client.list_samples("train").size == 8
        policy.train_microbatch_from_meta(meta)
        result = ends()
        assert client.list_samples("train").size == 8
    assert result is not None
    assert result["loss"].tolist() == [1.0]


def test_a_step_that_one_worker_could_not_begin_is_open_on_none(policy, workers, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no memory for gradients")

    monkeypatch.setattr(workers[1], "begin_train_step", refuse)
    with pytest.raises(WorkerFailedError, match="no memory for gradients"):
        policy.begin_train_step(1.0)
    monkeypatch.undo()
    policy.begin_train_step(0.5)
    assert policy.finish_train_step()["loss"].tolist() == [0.5]


def test_an_interrupt_while_rows_are_cleared_aborts_the_step_all_the_same(policy, workers, trainable_rows, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    policy.begin_train_step(1.0)
    workers[1].fail_in = "train_microbatch"
    monkeypatch.setattr(policy, "discard_samples", interrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.train_microbatch_from_meta(trainable_rows(LENGTHS))
    assert [worker.open for worker in workers] == [None, None]


def test_a_worker_that_cannot_train_in_portions_says_so(toy_worker, client, monkeypatch):
    monkeypatch.delattr(toy_worker, "train_microbatch")
    policy = DataPlanePolicy(InProcessWorkerGroup([toy_worker()]), client)
    with pytest.raises(WorkerFailedError, match="it lacks train_microbatch"):
        policy.begin_train_step(1.0)


def test_columns_of_images_are_read_and_what_is_left_out_is_said_once(policy, caplog):
    meta = KVBatchMeta("train", None, ["a"], fields=["input_ids", "pixel_values", "routed_experts", "text"])
    for _ in range(2):
        assert policy._fields(meta, "train") == [*DP_TRAIN_FIELDS, "pixel_values"]
    (told,) = caplog.messages
    assert told.startswith("the rows of 'train' have 'routed_experts', which the workers do not read")
