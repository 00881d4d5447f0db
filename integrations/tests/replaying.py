"""For the tests of replay: a partition, buffers on it, and rollouts whose tokens say which prompt they answer."""

from typing import Any

import pytest
import torch

from dataplane_core import kv_first_write
from dataplane_core.errors import BackendUnavailableError
from dataplane_integrations.replay import InOrderPolicy, ReplayBuffer, parse_sample_id

WAIT_S = 60.0

REGISTRATION: dict[str, Any] = {
    "fields": ["input_ids", "input_lengths"],
    "num_samples": None,
    "consumer_tasks": ["train"],
    "grpo_group_size": 2,
}


def answers(reservations):
    """Answer i of prompt p: the token p, i + 1 times."""
    rows = [(each.prompt, index) for each in reservations for index in range(len(each.sample_ids))]
    width = max(index for _, index in rows) + 1
    lengths = torch.tensor([index + 1 for _, index in rows])
    prompts = torch.tensor([prompt for prompt, _ in rows])
    inside = torch.arange(width) < lengths.unsqueeze(1)
    return {"input_ids": prompts.unsqueeze(1) * inside, "input_lengths": lengths}


def write(client, reservations):
    """Writes the answers, as a rollout actor does."""
    return kv_first_write(
        answers(reservations),
        sample_ids=[sample_id for each in reservations for sample_id in each.sample_ids],
        dp_client=client,
        partition_id="replay",
        tags=[each.tags for each in reservations for _ in each.sample_ids],
    )


def away_once(monkeypatch, target, name):
    """The store is away for the first call of this method."""
    method, calls = getattr(target, name), []

    def lossy(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise BackendUnavailableError("the store is away")
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, lossy)


def prompts_of(meta):
    """The prompts of groups of 2."""
    return [parse_sample_id(sample_id)["prompt"] for sample_id in meta.sample_ids[::2]]


def train_on_all(buffer, num_groups=2):
    """Trains to the end, on two groups per version; the prompts in the order of training."""
    prompts: list[int] = []
    while (meta := buffer.select(num_groups, timeout_s=WAIT_S)).size:
        prompts += prompts_of(meta)
        buffer.consume(meta)
        if len(prompts) % 2 == 0:
            buffer.set_weight_version(buffer.weight_version + 1)
    return prompts


@pytest.fixture
def held(client):
    """The ids that the store holds."""
    return lambda: client.list_samples("replay").sample_ids


@pytest.fixture
def make_buffer(client):
    """Buffers on one partition; groups of 2, by default in order, 2 groups a version, staleness 1."""
    client.register_partition("replay", **REGISTRATION)
    made: list[ReplayBuffer] = []

    def make(policy=None, **options):
        policy = InOrderPolicy(max_staleness=1, groups_per_version=2) if policy is None else policy
        made.append(ReplayBuffer(client, "replay", policy, **{"group_size": 2, **options}))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()


@pytest.fixture
def commit(client):
    """``commit(buffer, reservations)`` writes their rows and commits them."""
    return lambda buffer, reservations: buffer.commit(reservations, write(client, reservations))


@pytest.fixture
def fill(commit):
    """``fill(buffer, num_groups)`` reserves groups and commits them."""

    def reserve_and_commit(buffer, num_groups=1):
        reservations = buffer.reserve(num_groups, timeout_s=0)
        commit(buffer, reservations)
        return reservations

    return reserve_and_commit
