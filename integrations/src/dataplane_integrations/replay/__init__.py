"""Asynchronous training: rollouts run ahead of the trainer. A staleness rule limits by how many weight versions.

A *group* is the answers to one prompt, generated with one *weight version*. Its samples are
``v{weight_version}_p{prompt}_g{i}``. All state is in two partitions of the store: the answers, and the prompts.

The trainer has a `ReplayBuffer` with a staleness rule, a `StalenessPolicy`. Each rollout process calls `serve`, or runs
a `Collector` (threads) or an `AsyncCollector` (coroutines) over a `PromptSource`. In the trainer's process, they run
over the buffer itself.
"""

from dataplane_core.ledger import group_of
from dataplane_integrations.replay._buffer import BufferCounts, ReplayBuffer
from dataplane_integrations.replay._collector import (
    AsyncCollector,
    AsyncRollout,
    Collector,
    CollectorCounts,
    Rollout,
    serve,
)
from dataplane_integrations.replay._policies import (
    BufferView,
    GroupView,
    InOrderPolicy,
    ReadyFirstPolicy,
    StalenessPolicy,
    TargetStepPolicy,
    WindowedPolicy,
)
from dataplane_integrations.replay._prompts import PromptSource, Reservation, parse_sample_id

__all__ = [
    "AsyncCollector",
    "AsyncRollout",
    "BufferCounts",
    "BufferView",
    "Collector",
    "CollectorCounts",
    "GroupView",
    "InOrderPolicy",
    "PromptSource",
    "ReadyFirstPolicy",
    "ReplayBuffer",
    "Reservation",
    "Rollout",
    "StalenessPolicy",
    "TargetStepPolicy",
    "WindowedPolicy",
    "group_of",
    "parse_sample_id",
    "serve",
]
