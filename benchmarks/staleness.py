"""How each staleness rule changes the mix of prompts in training, and how long the trainer waits.

Rollouts of different length through a real `ReplayBuffer` over the in-process store; only time is simulated, so a run
takes seconds and repeats exactly. A group takes as long as its longest answer, one unit of time per 1,000 tokens; every
group that the rule admits is generated at once, as an engine with continuous batching does. Lengths are log-normal:
prompts have medians of their own (spread 0.6), and their 8 answers vary around them (spread 0.4).

Per rule: groups trained on per unit of time; the share of time that the trainer waits; the groups evicted; the mean
answer length of what was trained on, over that of all prompts drawn; the share that the longest tenth of the prompts
has of what was trained on (10 % is fair); and the mean staleness of the shortest and of the longest quarter. The last
groups, which are unfinished when the run ends, count neither as drawn nor as trained.

Run it with ``python benchmarks/staleness.py``.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
        unfinished = {each.prompt for _, _, each in events}
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


def main() -> None:
    """Prints a table for each allowed staleness."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=32, help="groups that a step trains on")
    parser.add_argument("--step-time", type=float, default=1.0, help="what a training step takes")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    lengths = draw_lengths(options.steps * options.groups * 8)
    print(
        f"{options.steps} steps of {options.groups} groups; a step takes {options.step_time:g}, the median group "
        f"{np.median(lengths.max(axis=1)) / TOKENS_PER_TIME:.2f}, one in a hundred more than "
        f"{np.quantile(lengths.max(axis=1), 0.99) / TOKENS_PER_TIME:.2f}"
    )
    heads = ("groups/time", "waits", "evicted", "length", "longest 10 %", "stale: short", "long")
    for max_staleness in options.staleness:
        print(f"\nmax_staleness {max_staleness}\n{'':24}" + "".join(f"{head:>14}" for head in heads))
        settings = {"max_staleness": max_staleness, "groups_per_version": options.groups}
        rows: dict[str, tuple[StalenessPolicy, bool]] = {
            "in order": (InOrderPolicy(**settings), False),
            "windowed": (WindowedPolicy(**settings), False),
            "ready first": (ReadyFirstPolicy(**settings), False),
            "ready first, requeued": (ReadyFirstPolicy(**settings), True),
        }
        for name, (policy, requeue) in rows.items():
            found = simulate(policy, lengths, options.steps, options.step_time, requeue)
            cells = [
                f"{found.groups_per_time:.1f}",
                f"{found.waits:.1%}",
                f"{found.evicted:.1%}",
                f"{found.length_ratio:.3f}",
                f"{found.longest_tenth:.1%}",
                f"{found.staleness_short:.2f}",
                f"{found.staleness_long:.2f}",
            ]
            print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
