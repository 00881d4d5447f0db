"""A buffer in a Ray actor; collectors in others, one of which is killed with -9."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiers import in_long

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_integrations.errors import CollectorFailedError, ReplayTimeoutError
from dataplane_integrations.ray import ActorRequest, start_actors
from dataplane_integrations.replay import (
    Collector,
    InOrderPolicy,
    RemoteReplayBuffer,
    ReplayBuffer,
    parse_sample_id,
    restore_replay,
    save_replay,
)
from dataplane_integrations.rollout import DataPlaneRolloutMixin

PROMPTS = 24
WAIT_S = 120.0


class RolloutSide(DataPlaneRolloutMixin):
    """A process with a collector of its own; dies in the middle of a group if told to."""

    def __init__(self, config, buffer, kill_at):
        self.setup_data_plane(config)
        self.kill_at = kill_at
        self.collector = Collector(
            RemoteReplayBuffer(buffer, "replay", WAIT_S), self.rollout, name="rollouts", num_threads=2
        )

    def start(self):
        self.collector.start()

    def finish(self):
        self.collector.wait(WAIT_S)
        return self.collector.counts.groups

    def rollout(self, reservations):
        (each,) = reservations
        batch: Any = {"input_ids": torch.full((2, 1), each.prompt), "input_lengths": torch.ones(2, dtype=torch.int64)}
        if each.prompt == self.kill_at:
            half = {name: column[:1] for name, column in batch.items()}
            self._first_write(half, sample_ids=each.sample_ids[:1], partition_id="replay", tags=[each.tags])
            os.kill(os.getpid(), signal.SIGKILL)
        return self._first_write(batch, sample_ids=each.sample_ids, partition_id="replay", tags=[each.tags] * 2)


@pytest.fixture(params=["redis_store", *in_long("tq_simple")])
def store(request, local_ray):
    """A store that the actors attach to."""
    name = f"replay-{os.getpid()}"
    options = {"namespace": name} if request.param == "redis_store" else {"instance": name}
    with connect({"backend": request.param, "options": options}) as client:
        client.register_partition("replay", ["input_ids"], None, ["train"], grpo_group_size=2)
        yield client


def book(store):
    """The buffer's actor: in order, 4 groups a version, staleness 2."""
    return ActorRequest(
        name="book",
        cls=ReplayBuffer,
        args=(store.config, "replay", InOrderPolicy(max_staleness=2, groups_per_version=4)),
        kwargs={"group_size": 2, "num_prompts": PROMPTS},
        num_cpus=0.1,
        max_concurrency=8,
    )


def train_on_all(store, buffer):
    """Trains to the end; the prompt of every row, as the row itself says."""
    tokens: list[int] = []
    while (meta := buffer.select(4, timeout_s=WAIT_S)).size:
        tokens += store.get_data(meta, ["input_ids"])["input_ids"].flatten().tolist()
        assert tokens[-meta.size :] == [parse_sample_id(sample_id)["prompt"] for sample_id in meta.sample_ids]
        buffer.consume(meta)
        buffer.wait_until_reserved(timeout_s=WAIT_S)
        buffer.set_weight_version(buffer.view().weight_version + 1)
    return tokens


@pytest.mark.timeout(400)
def test_a_buffer_in_an_actor_does_what_one_in_the_driver_does(store):
    def rollout(reservations):
        prompts = [each.prompt for each in reservations for _ in each.sample_ids]
        return {"input_ids": torch.tensor(prompts).unsqueeze(1), "input_lengths": torch.ones(len(prompts)).long()}

    with start_actors([book(store)]) as books:
        buffer = RemoteReplayBuffer(books.actors["book"], "replay", WAIT_S)
        with pytest.raises(ReplayTimeoutError, match="of 0 groups"):
            buffer.select(1, timeout_s=0)
        with pytest.raises(InvalidRequestError, match="admits 12 to an empty buffer"):
            buffer.reserve(13)
        reserved = buffer.reserve(1)
        assert buffer.to_abort(reserved) == []
        buffer.abort(reserved)  # not in vain: its prompt is generated again
        assert buffer.to_abort(reserved) == reserved
        with Collector(buffer, rollout, client=store, groups_per_call=2, num_threads=2):
            prompts = train_on_all(store, buffer)
    assert sorted(prompts) == sorted(2 * list(range(PROMPTS)))
    assert store.list_samples("replay").size == 0


@pytest.mark.timeout(400)
def test_a_buffer_in_an_actor_is_saved_and_restored(store, tmp_path):
    columns = {"input_ids": torch.tensor([[0], [1]]).repeat_interleave(2, 0)}
    with start_actors([book(store)]) as books:
        buffer = RemoteReplayBuffer(books.actors["book"], "replay", WAIT_S)
        reserved = buffer.reserve(2)
        ids = [sample_id for each in reserved for sample_id in each.sample_ids]
        tags = [each.tags for each in reserved for _ in each.sample_ids]
        buffer.commit(reserved, store.put_samples(ids, "replay", columns, tags=tags))
        with buffer.snapshot():
            buffer.consume(buffer.select(1))
            assert store.list_samples("replay").sample_ids == ids
        assert store.list_samples("replay").sample_ids == ids[2:]
        save_replay(tmp_path, store, buffer=buffer, extra={"step": 1})
        meta, taken = buffer.take(1)
        assert meta.sample_ids == ids[2:]
        assert taken["input_ids"].tolist() == [[1], [1]]
        assert (buffer.counts.trained, buffer.weight_version) == (2, 0)
    with start_actors([book(store)]) as books:
        buffer = RemoteReplayBuffer(books.actors["book"], "replay", WAIT_S)
        assert restore_replay(tmp_path, store, buffer=buffer).extra == {"step": 1}
        assert buffer.counts.trained == 1
        assert buffer.take(1)[0].sample_ids == ids[2:]


class EngineError(Exception):
    """Cannot be read back from a pickle, as many errors of libraries."""

    def __init__(self, text, *, response):
        super().__init__(text)


@pytest.mark.parametrize(
    ("error", "cause"), [(OSError("no GPU"), OSError), (EngineError("no GPU", response=503), DataPlaneError)]
)
def test_a_trainer_learns_from_an_actor_why_rollouts_have_stopped(store, error, cause):
    def rollout(reservations):
        raise error

    with start_actors([book(store)]) as books:
        buffer = RemoteReplayBuffer(books.actors["book"], "replay", WAIT_S)
        collector = Collector(buffer, rollout, client=store, max_failures=1)
        collector.start()
        with pytest.raises(CollectorFailedError, match=f"{type(error).__name__}: no GPU") as caught:
            buffer.select(1, timeout_s=30)
        with pytest.raises(CollectorFailedError):
            collector.stop()
    assert type(caught.value.__cause__) is cause
    assert "no GPU" in str(caught.value.__cause__)


@pytest.mark.timeout(600)
def test_a_collector_killed_in_mid_group_leaks_no_rows_and_loses_no_prompt(store, local_ray):
    with start_actors([book(store)]) as books, ThreadPoolExecutor(1) as trainer:
        actor = books.actors["book"]
        trained = trainer.submit(train_on_all, store, RemoteReplayBuffer(actor, "replay", WAIT_S))
        for kill_at in (10, None):
            request = ActorRequest(
                name="rollouts", cls=RolloutSide, args=(store.config, actor, kill_at), num_cpus=0.1, max_concurrency=4
            )
            with start_actors([request]) as sides:
                side = sides.actors["rollouts"]
                local_ray.get(side.start.remote(), timeout=WAIT_S)
                if kill_at is None:
                    local_ray.get(side.finish.remote(), timeout=WAIT_S)
                else:
                    with pytest.raises(local_ray.exceptions.RayActorError):
                        local_ray.get(side.finish.remote(), timeout=WAIT_S)
        assert sorted(trained.result(WAIT_S)) == sorted(2 * list(range(PROMPTS)))
    assert store.list_samples("replay").size == 0
