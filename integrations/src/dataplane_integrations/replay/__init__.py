"""Asynchronous training: rollouts run ahead of the trainer. A staleness rule limits by how many weight versions.

A *group* is the answers to one prompt, generated with one *weight version*. Its samples are
``v{weight_version}_p{prompt}_g{i}``. All state is in two partitions of the store: the answers, and the prompts.

- `ReplayBuffer`, in the trainer: puts prompts into the store, as far ahead as the rule admits, and gives the trainer
  the groups of their answers: `select` (or `take`, `batches`), then `consume`, `discard` or `put_back`, and
  `set_weight_version` after each update.
- The staleness rule, a `StalenessPolicy`, decides how many groups may be started (admit), which are trained next
  (select) and which are dropped (evict): `WindowedPolicy`, `ReadyFirstPolicy`, `InOrderPolicy`, `TargetStepPolicy`,
  or your own.
- `serve`, in each rollout process: claims prompts under a lease, calls your rollout function, writes its rows and
  commits them. If the process dies, its prompts are handed out again when the lease ends. If a rollout fails, its rows
  are cleared, and its prompt is generated again.
- `Collector`: the same in threads, also in the trainer's process; `AsyncCollector`: for a rollout that is a coroutine,
  in your event loop. Outside the trainer's process they take a `PromptSource`.
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
