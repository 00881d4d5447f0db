"""A simulation of rollouts and a trainer, for the bias of staleness rules."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.bench import Table, case
from dataplane_core import DataPlaneClient, connect
from dataplane_integrations.errors import ReplayTimeoutError
from dataplane_integrations.replay import (
    InOrderPolicy,
    ReadyFirstPolicy,
    ReplayBuffer,
    Reservation,
    StalenessPolicy,
    WindowedPolicy,
)

GROUP_SIZE = 8
TOKENS_PER_TIME = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run's figures; shares are of 1."""

    groups_per_time: float
    waits: float
    evicted: float
    length_ratio: float
    longest_tenth: float
    staleness_short: float
    staleness_long: float


def draw_lengths(num_prompts: int) -> np.ndarray:
    """Tokens of every answer: (prompts, GROUP_SIZE)."""
    random = np.random.RandomState(0)
    medians = random.lognormal(6.5, 0.6, (num_prompts, 1))
    return (medians * random.lognormal(0.0, 0.4, (num_prompts, GROUP_SIZE))).clip(16, 32768)


def simulate(policy: StalenessPolicy, lengths: np.ndarray, num_steps: int, step_time: float, requeue: bool) -> Result:
    """Simulates rollouts and a trainer on one clock, for ``num_steps`` steps."""
    num_groups = policy.groups_per_version
    with connect({"backend": "noop"}) as client:
        client.register_partition("replay", ["length"], None, ["train"], grpo_group_size=GROUP_SIZE)
        buffer = ReplayBuffer(client, "replay", policy, group_size=GROUP_SIZE, requeue_evicted=requeue)
        events: list[tuple[float, int, Reservation]] = []
        trained: list[tuple[int, int]] = []  # prompt, staleness
        now = waited = 0.0
        free_at = 0.0  # when the trainer ends its step
        in_training = None
        for step in range(num_steps):
            while True:
                for _ in range(policy.admit(buffer.view())):
                    (begun,) = buffer.reserve(timeout_s=0)
                    ends = now + lengths[begun.prompt].max() / TOKENS_PER_TIME
                    heapq.heappush(events, (ends, begun.order, begun))
                if in_training is None:
                    try:
                        in_training = buffer.select(num_groups, timeout_s=0)
                        waited += now - free_at
                        free_at = now + step_time
                        continue
                    except ReplayTimeoutError:
                        pass
                elif not events or free_at <= events[0][0]:
                    break
                now, _, done = heapq.heappop(events)
                write(client, buffer, done, lengths[done.prompt])
            now = free_at
            assert in_training.tags is not None
            trained += [(tags["prompt"], step - tags["weight_version"]) for tags in in_training.tags[::GROUP_SIZE]]
            buffer.consume(in_training)
            in_training = None
            buffer.set_weight_version(step + 1)
        counts = buffer.counts
        unfinished = {reservation.prompt for _, _, reservation in events}
    return figures(trained, unfinished, lengths, now, waited, counts.evicted / counts.committed)


def write(client: DataPlaneClient, buffer: ReplayBuffer, reservation: Reservation, lengths: np.ndarray) -> None:
    """The rows of a group that is done."""
    meta = client.put_samples(
        reservation.sample_ids,
        buffer.partition_id,
        {"length": torch.from_numpy(lengths)},
        tags=[reservation.tags] * GROUP_SIZE,
    )
    buffer.commit([reservation], meta)


def figures(
    trained: Sequence[tuple[int, int]],
    unfinished: set[int],
    lengths: np.ndarray,
    time: float,
    waited: float,
    evicted: float,
) -> Result:
    """The figures of a run, over the prompts that could have been trained on."""
    per_prompt = lengths.mean(axis=1)
    last = max(prompt for prompt, _ in trained)
    drawn = np.array([prompt for prompt in range(last + 1) if prompt not in unfinished])
    prompts = np.array([prompt for prompt, _ in trained])
    staleness = np.array([versions for _, versions in trained])
    short, long, longest = np.quantile(per_prompt[drawn], [0.25, 0.75, 0.9])
    return Result(
        groups_per_time=len(trained) / time,
        waits=waited / time,
        evicted=evicted,
        length_ratio=per_prompt[prompts].mean() / per_prompt[drawn].mean(),
        longest_tenth=(per_prompt[prompts] > longest).mean(),
        staleness_short=staleness[per_prompt[prompts] <= short].mean(),
        staleness_long=staleness[per_prompt[prompts] > long].mean() if (per_prompt[prompts] > long).any() else np.nan,
    )


@case
def staleness(
    steps: int = 200, groups: int = 32, step_time: float = 1.0, max_staleness: tuple[int, ...] = (1, 2, 4)
) -> Iterator[Table]:
    """How each staleness rule changes the mix of prompts in training, and how long the trainer waits.

    Rollouts of different length through a real `ReplayBuffer` over noop; only time is simulated, so a run repeats
    exactly. A group takes as long as its longest answer, one unit of time per 1,000 tokens; every group that the rule
    admits is generated at once, as with continuous batching. Lengths are log-normal: prompts have medians of their own
    (spread 0.6), and their 8 answers vary around them (spread 0.4). *Length* is the mean of the answers trained on over
    that of all prompts drawn; the last groups, unfinished at the end, count neither as drawn nor as trained.
    """
    lengths, rows = draw_lengths(steps * groups * 8), []
    for most in max_staleness:
        options = {"max_staleness": most, "groups_per_version": groups}
        rules: dict[str, tuple[StalenessPolicy, bool]] = {
            "in order": (InOrderPolicy(**options), False),
            "windowed": (WindowedPolicy(**options), False),
            "ready first": (ReadyFirstPolicy(**options), False),
            "ready first, requeued": (ReadyFirstPolicy(**options), True),
        }
        for name, (policy, requeue) in rules.items():
            figures = simulate(policy, lengths, steps, step_time, requeue)
            shares = [f"{share:.1%}" for share in (figures.waits, figures.evicted)]
            stale = (figures.staleness_short, figures.staleness_long)
            ratio, tenth = f"{figures.length_ratio:.3f}", f"{figures.longest_tenth:.1%}"
            rows.append([most, name, figures.groups_per_time, *shares, ratio, tenth, stale])
    heads = ["groups per 1,000 tokens of generation time", "trainer waits", "evicted", "length", "longest 10 %"]
    stale_head = "mean staleness, shortest / longest quarter of answers"
    yield Table("staleness", ["`max_staleness`", "rule", *heads, stale_head], rows)
