"""AsyncGRPOTrainer on a store: the names of TRL that the adapter touches, its two classes, and trainings with them."""

import asyncio
import dataclasses
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import time
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from async_trainings import ANSWERS, CASES, GROUPS, STALE
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import (
    RolloutGroup,
    RolloutSample,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from dataplane_core import connect
from dataplane_core.errors import (
    ClaimTimeoutError,
    InvalidRequestError,
    LeaseExpiredError,
    SchemaMismatchError,
    UnknownPartitionError,
)
from dataplane_integrations.trl_async import SAMPLE_FIELDS, StoreRolloutWorker, StoreWeightTransfer, put_rollouts
from dataplane_integrations.weights import WeightReader

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 60.0


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as client:
        client.register_partition("answers", SAMPLE_FIELDS, None, ["train"], grpo_group_size=2)
        yield client


@pytest.fixture
def worker(client):
    worker = StoreRolloutWorker(client, "answers", "train", claim_size=2, lease_s=5)
    yield worker
    worker.stop()


def write(client, *groups, **tags):
    for group in groups:
        columns = {
            "input_ids": [[group, 2, 3], [group, 4]],
            "token_mask": [[0, 1, 1], [0, 1]],
            "generation_logprobs": [[0.0, -0.5, -0.25], [0.0, -1.0]],
            "advantage": [1.0, -1.0],
            "metrics": [{"reward": 1.0, "rewards/exact": 0.5}, {"reward": 0.0}],
        }
        tags = {"weight_version": 1} | tags
        client.put_samples([f"p{group}_g0", f"p{group}_g1"], "answers", columns, tags=[tags] * 2)


def take(worker, count):
    return [worker.rollout_buffer.get(timeout=WITHIN_S) for _ in range(count)]


def eventually(holds):
    give_up = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def counts(client):
    """How many samples are ready, and leased."""
    task = client.describe("answers").tasks["train"]
    return task.num_ready, task.num_leased


# --- the names of TRL -------------------------------------------------------------------------------------------------


def methods_of(protocol):
    found = inspect.getmembers(protocol, inspect.isfunction)
    return {name: list(inspect.signature(each).parameters) for name, each in found if not name.startswith("_")}


def test_what_the_adapter_and_the_example_touch_of_trl_is_there():
    protocols = async_grpo_trainer.RolloutWorkerProtocol, async_grpo_trainer.WeightTransferProtocol
    for protocol, ours in zip(protocols, (StoreRolloutWorker, StoreWeightTransfer), strict=True):
        assert methods_of(protocol)
        assert methods_of(protocol).items() <= methods_of(ours).items()
    assert list(inspect.get_annotations(protocols[0])) == ["rollout_buffer", "metrics_queue"]
    assert [each.name for each in dataclasses.fields(RolloutSample)] == [
        *("prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version"),
        *("group_id", "metrics", "enqueued_at"),
    ]
    assert "heartbeat_stale_after_s" in {each.name for each in dataclasses.fields(AsyncGRPOConfig)}
    assert callable(packing._flash_attn)
    assert callable(async_grpo_trainer.get_peak_flops_per_device)


# --- the rollout worker -----------------------------------------------------------------------------------------------


def test_samples_reach_the_trainer_with_version_group_and_metrics(client, worker):
    worker.start()
    write(client, 7, 8, weight_version=3)
    first, second, other, _ = take(worker, 4)
    assert (first.input_ids.tolist(), first.completion_mask.tolist()) == ([7, 2, 3], [0, 1, 1])
    assert first.input_ids.dtype == first.completion_mask.dtype == np.int64
    assert (second.old_log_probs.tolist(), second.old_log_probs.dtype) == ([0.0, -1.0], np.float32)
    assert (first.advantage, second.advantage) == (1.0, -1.0)
    assert first.metrics == {"reward": 1.0, "rewards/exact": 0.5}
    assert first.model_version == 3
    assert first.group_id == second.group_id != other.group_id
    assert worker.metrics_queue.get(timeout=WITHIN_S)["rollout/samples_total"] == 2.0


def test_what_is_not_acked_is_given_back_when_the_worker_stops_and_comes_again(client, worker):
    write(client, *range(6))
    worker.stop()  # nothing has begun
    for _ in range(2):
        worker.start()
        worker.start()  # it runs
        worker.update_model_version(1)
        assert [sample.input_ids[0] for sample in take(worker, 12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert counts(client) == (0, 12)
        worker.stop()
        worker.stop()
        assert counts(client) == (12, 0)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get_nowait()


def test_a_claim_is_acked_a_call_after_the_trainer_took_it_and_one_sample_more(client, worker):
    write(client, *range(4))
    worker.start()
    worker.update_model_version(1)
    eventually(lambda: worker.rollout_buffer.qsize() == 8)
    for taken, acked in ((4, 0), (1, 2), (3, 4), (0, 6)):
        take(worker, taken)
        worker.update_model_version(2)
        assert worker.acked == acked
    assert client.list_sample_ids("answers") == ["p3_g0", "p3_g1"]


def test_a_full_buffer_keeps_samples_in_the_store_and_does_not_hold_up_the_end(client):
    write(client, *range(10))
    worker = StoreRolloutWorker(client, "answers", "train", claim_size=2, buffer_size=4)
    worker.start()
    eventually(lambda: worker.rollout_buffer.qsize() == 4)
    assert counts(client) == (16, 4)
    take(worker, 2)
    eventually(lambda: worker.rollout_buffer.qsize() == 4)
    worker.stop()
    assert counts(client) == (20, 0)


def test_errors_of_the_thread_reach_the_trainer_and_a_sample_without_its_version_is_given_back(client):
    def refused(error, named):
        worker = StoreRolloutWorker(client, "answers", "train", claim_size=2)
        worker.start()
        eventually(lambda: not worker._thread.is_alive())
        for call in (worker.check_health, worker.update_model_version):
            with pytest.raises(error, match=named):
                call(1)
        worker.stop()

    write(client, 0, weight_version=None)
    refused(InvalidRequestError, r"sample 'p0_g0' of 'answers' has no tag 'weight_version'")
    assert counts(client) == (2, 0)
    client.clear_samples(None, "answers")
    refused(UnknownPartitionError, "answers")


def test_the_end_of_the_partition_is_said(client, worker):
    with pytest.raises(ClaimTimeoutError, match="not started"):
        worker.check_health(60)
    write(client, 0)
    worker.start()
    client.finish_partition("answers")
    take(worker, 2)
    worker.update_model_version(1)
    worker.update_model_version(2)
    client.ack(worker._claims[0][1])  # the rest of a run, so that nothing comes back
    eventually(lambda: not worker._thread.is_alive())
    with pytest.raises(ClaimTimeoutError, match="'answers' is finished"):
        worker.check_health(60)


def test_a_lease_that_ended_is_an_error_in_the_trainer(client, worker):
    """As if this process had been suspended for longer."""
    write(client, 0, 1)
    worker.start()
    take(worker, 4)
    worker.update_model_version(1)
    client.nack(worker._claims[0][1])
    with pytest.raises(LeaseExpiredError):
        worker.update_model_version(2)


PROGRAM = """
import sys, time
sys.path[:0] = {paths}
from dataplane_core import connect
from test_trl_async import take, write
from dataplane_integrations.trl_async import StoreRolloutWorker
with connect({config}, bootstrap=False) as client:
    if client.config.role == "rollout 7":
        write(client, 0, 1, 2)
    else:
        worker = StoreRolloutWorker(client, "answers", "train", claim_size=2, lease_s=1)
        worker.start()
        worker.update_model_version(1)
        take(worker, 4)
        worker.update_model_version(2)
        worker.update_model_version(3)
    while not any(each.role == client.config.role for each in client.list_clients()):
        time.sleep(0.05)  # it announces itself after a second
    print("ready", flush=True)
    time.sleep(600)
"""


def kill_when_ready(config):
    here = Path(__file__).parent
    program = PROGRAM.format(paths=[str(here), str(here.parent)], config=config)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        finally:
            process.send_signal(signal.SIGKILL)


def test_killed_processes_are_named_and_what_they_held_comes_back():
    config = {
        "backend": "shm_store",
        "options": {"namespace": f"async-{os.getpid()}"},
        "announce_s": 0.2,
        "attach_wait_s": 60,
    }
    with connect(config) as client:
        client.register_partition("answers", SAMPLE_FIELDS, None, ["train"], grpo_group_size=2)
        kill_when_ready(config | {"role": "rollout 7"})
        kill_when_ready(config | {"role": "trainer"})
        assert client.list_sample_ids("answers") == [f"p{group}_g{answer}" for group in (1, 2) for answer in (0, 1)]
        worker = StoreRolloutWorker(client, "answers", "train", claim_size=2)
        worker.start()
        assert [sample.input_ids[0] for sample in take(worker, 4)] == [1, 1, 2, 2]
        worker.check_health(WITHIN_S)

        def said():
            with pytest.raises(ClaimTimeoutError, match="no samples of 'answers' for") as caught:
                worker.check_health(0)
            return str(caught.value)

        eventually(lambda: "rollout 7" in said())
        worker.stop()


# --- rollouts of several rows -----------------------------------------------------------------------------------------


def scored(*conversations):
    """The samples of a group, by conversation, as TRL's loop makes them of its turns."""
    sequences = [
        _chain_to_sequences([TurnRecord(*turn) for turn in turns], f"c{number}", 1)[0]
        for number, turns in enumerate(conversations)
    ]
    count = len(sequences)
    group = RolloutGroup(
        [[]] * count, {}, [[]] * count, [[]] * count, sequences, [0] * count, [0] * count, 3, 0, [], []
    )
    PartialState()  # for the loop's log
    loop = _AsyncRolloutLoop.__new__(_AsyncRolloutLoop)
    loop.reward_funcs, loop.reward_func_names = [lambda prompts, **_: list(range(len(prompts)))], ["place"]
    loop._env_reward_types = []
    samples = iter(asyncio.run(loop._score_group(group)))
    return [list(islice(samples, len(rows))) for rows in sequences]


def test_conversations_of_one_to_three_samples_reach_the_trainer_with_the_advantage_of_each(client):
    client.register_partition("answers", SAMPLE_FIELDS, None, ["train"], grpo_group_size=4, rollouts=True)
    appended = [([1], [2], [-0.5]), ([1, 2, 3], [4], [-0.25])]
    compacted = [([1], [2, 3], [-0.5, -0.5]), ([5], [6], [-1.0]), ([7], [8], [-2.0])]
    rollouts = scored(appended, compacted, [([1], [2], [-0.5])], [([1], [])])
    assert list(map(len, rollouts)) == [1, 3, 1, 0]
    meta = put_rollouts(client, "answers", "p7", rollouts)
    assert meta.sample_ids == ["p7_g0/0", "p7_g1/0", "p7_g1/1", "p7_g1/2", "p7_g2/0"]
    assert put_rollouts(client, "answers", "p8", [[]]).size == 0
    put_rollouts(client, "answers", "p9", rollouts[:1])
    worker = StoreRolloutWorker(client, "answers", "train", claim_size=1)
    worker.start()
    samples = take(worker, 6)
    for wanted, taken in zip([*chain(*rollouts), rollouts[0][0]], samples, strict=True):
        for one, other in zip(dataclasses.astuple(wanted)[2:7], dataclasses.astuple(taken)[2:7], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert taken.metrics == wanted.metrics
    assert [sample.group_id == samples[0].group_id for sample in samples] == [True] * 5 + [False]
    assert len({sample.advantage for sample in samples[1:4]}) == 1
    worker.update_model_version(1)
    worker.update_model_version(2)
    assert worker.acked == 5
    worker.stop()


# --- the weight transfer ----------------------------------------------------------------------------------------------


def test_a_trainer_that_begins_again_counts_on_and_old_samples_keep_their_age(client):
    reader = WeightReader(client, "rollout 0")

    def train(steps):
        weights = StoreWeightTransfer(client)
        worker = StoreRolloutWorker(client, "answers", "train", claim_size=2, weights=weights)
        weights.init_weight_transfer()
        for model_version in range(1, steps + 1):
            weights.pause()
            weights.send_weights(iter({"w": torch.tensor([float(weights.version)])}.items()))
            weights.resume()
            worker.update_model_version(model_version)
        worker.start()
        return weights, worker

    weights, killed = train(steps=5)
    assert (weights.version, reader.wait(WITHIN_S)["w"].item(), reader.version) == (5, 4.0, 5)
    killed.stop()
    write(client, 0, weight_version=4)
    weights, worker = train(steps=1)
    assert weights.version == 6
    assert (reader.wait(WITHIN_S)["w"].item(), reader.version) == (5.0, 6)
    assert {sample.model_version for sample in take(worker, 2)} == {-1}  # two before the trainer's 1
    worker.stop()
    weights.destroy()
    with pytest.raises(SchemaMismatchError, match="lack 'w' and add 'v'"):
        weights.send_weights(iter({"v": torch.zeros(1)}.items()))
    assert weights.version == 6


# --- trainings --------------------------------------------------------------------------------------------------------


def test_samples_are_acked_when_the_trainer_was_trained_on_them_and_never_before(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("async_trainings.py")), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert list(found) == list(CASES)
    stale = {group * ANSWERS + answer for group in STALE for answer in range(ANSWERS)}
    for name, training in found.items():
        assert training["early"] == [], name
        assert not stale & {*training["trained"]}
        assert {*training["acked"]} > stale
        assert training["acked"] == list(range(len(training["acked"])))
        assert training["leased"] == 0
        assert training["ready"] == GROUPS * ANSWERS - len(training["acked"])
        assert training["versions"][0] == training["versions"][1]
        steps = [line for line in training["logged"] if "reward" in line]
        assert len(steps) == 6
        assert {"rollout/samples_total", "sample/staleness_max"} <= set().union(*steps)
    assert [len(training["late"]) for training in found.values()] == [4, 2, 8, 20]
