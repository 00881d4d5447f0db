"""A buffer in a Ray actor; collectors in others, one of which is killed with -9."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import ReplayTimeoutError
from dataplane_integrations.ray_actors import ActorRequest, start_actors
from dataplane_integrations.replay import (
    Collector,
    InOrderPolicy,
    RemoteReplayBuffer,
    ReplayBuffer,
    Reservation,
    parse_sample_id,
)
from dataplane_integrations.rollout import DataPlaneRolloutMixin, RolloutReceipt

PROMPTS = 24
WAIT_S = 90.0


class RolloutSide(DataPlaneRolloutMixin):
    """A process with a collector of its own; dies in the middle of a group if told to."""

    def __init__(self, config: Any, buffer: Any, kill_at: int | None) -> None:
        self.setup_data_plane(config)
        self.kill_at = kill_at
        self.collector = Collector(
            RemoteReplayBuffer(buffer, "replay", WAIT_S), self.rollout, name="rollouts", num_threads=2
        )

    def start(self) -> None:
        self.collector.start()

    def finish(self) -> int:
        self.collector.wait(WAIT_S)
        return self.collector.counts.groups

    def rollout(self, reservations: Sequence[Reservation]) -> RolloutReceipt:
        (each,) = reservations
        batch: Any = {"input_ids": torch.full((2, 1), each.prompt), "input_lengths": torch.ones(2, dtype=torch.int64)}
        if each.prompt == self.kill_at:
            half = {name: column[:1] for name, column in batch.items()}
            self._first_write(half, sample_ids=each.sample_ids[:1], partition_id="replay", tags=[each.tags])
            os.kill(os.getpid(), signal.SIGKILL)
        return self._first_write(batch, sample_ids=each.sample_ids, partition_id="replay", tags=[each.tags] * 2)


@pytest.fixture(params=["redis_store", pytest.param("tq_simple", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, local_ray: Any) -> Iterator[DataPlaneClient]:
    """A store that the actors attach to."""
    name = f"replay-{os.getpid()}"
    options = {"namespace": name} if request.param == "redis_store" else {"instance": name}
    local_ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with connect({"backend": request.param, "options": options}) as client:
        client.register_partition("replay", ["input_ids"], None, ["train"], grpo_group_size=2)
        yield client
    local_ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_collector_killed_in_mid_group_leaks_no_rows_and_loses_no_prompt(
    store: DataPlaneClient, local_ray: Any
) -> None:
    policy = InOrderPolicy(max_staleness=2, groups_per_version=4)
    options = {"group_size": 2, "num_prompts": PROMPTS}
    book = ActorRequest(
        name="book",
        cls=ReplayBuffer,
        args=(store.config, "replay", policy),
        kwargs=options,
        num_cpus=0.1,
        max_concurrency=8,
    )
    with start_actors([book]) as books:
        actor = books.actors["book"]
        buffer = RemoteReplayBuffer(actor, "replay", WAIT_S)
        with pytest.raises(ReplayTimeoutError, match="of 0 groups"):
            buffer.select(1, timeout_s=0)
        with pytest.raises(InvalidRequestError, match="admits 12 to an empty buffer"):
            buffer.reserve(13)
        prompts: list[int] = []
        tokens: list[int] = []

        def train() -> None:
            while (meta := buffer.select(4, timeout_s=WAIT_S)).size:
                tokens.extend(store.get_data(meta, ["input_ids"])["input_ids"].flatten().tolist())
                prompts.extend(parse_sample_id(sample_id)["prompt"] for sample_id in meta.sample_ids)
                buffer.consume(meta)
                buffer.wait_until_reserved(timeout_s=WAIT_S)
                buffer.set_weight_version(buffer.view().weight_version + 1)

        trainer = threading.Thread(target=train)
        trainer.start()
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
        trainer.join(WAIT_S)
        assert not trainer.is_alive()
        assert tokens == prompts
        assert sorted(prompts) == sorted(2 * list(range(PROMPTS)))
        assert store.list_samples("replay").size == 0
