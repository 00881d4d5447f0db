"""Asynchronous training: rollouts run ahead of the trainer. A staleness rule limits by how many weight versions.

A *group* is the answers to one prompt, generated with one *weight version*. Its samples are
``v{weight_version}_p{prompt}_g{i}``. The tensors are in the data plane. This package holds only metas: which groups are
being generated, which are ready, and which are in training.

The parts, and where each runs:

- `ReplayBuffer`: records the state of every group. It runs in the driver, or in a Ray actor, which other processes call
  through `RemoteReplayBuffer`. The rollout side calls `reserve`, `commit`, `abandon`; the trainer `select` (or `take`),
  then `consume`, `discard` or `put_back`, and `set_weight_version` after each update.
- The staleness rule, a `StalenessPolicy`, decides how many groups may be started (admit), which are trained next
  (select) and which are dropped (evict): `WindowedPolicy`, `ReadyFirstPolicy`, `InOrderPolicy`, `TargetStepPolicy`,
  or your own.
- `Collector`: threads that reserve, call your rollout function, write its rows and commit them. If a step fails, the
  rows are cleared and the prompt is generated again.
- `AsyncCollector`: the same for a rollout that is a coroutine, in your event loop.
- `StreamingConsumer`: feeds a trainer without a buffer, with the store's claims and leases, in any process.
- `claim_versions`: claims from partitions that hold one weight version each.
- `save_replay` and `restore_replay`: save buffer, rows, tags and cursors in a folder, and restore them.

A driver::

    client.register_partition("replay", DP_TRAIN_FIELDS, None, ["train"], grpo_group_size=8)
    rule = InOrderPolicy(max_staleness=1, groups_per_version=32)
    buffer = ReplayBuffer(client, "replay", rule, group_size=8)

    def rollout(reservations):  # in a thread of the collector; returns columns, or the meta of written rows
        prompts = [dataset[each.prompt] for each in reservations]
        ids = [sample_id for each in reservations for sample_id in each.sample_ids]
        tags = [each.tags for each in reservations for _ in each.sample_ids]
        return ray.get(actor.generate.remote(prompts, ids, tags)).meta

    with Collector(buffer, rollout, groups_per_call=32):
        for step in range(num_steps):
            meta = buffer.select(32)  # waits; a KVBatchMeta of 32 whole groups
            train(meta)
            buffer.consume(meta)  # clears the rows
            buffer.set_weight_version(step + 1)  # after the rollout side has got the weights of this version
"""

from dataplane_core.ledger import group_of
from dataplane_integrations.replay._async_collector import AsyncCollector, AsyncRollout
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._collector import Collector, CollectorCounts, Rollout
from dataplane_integrations.replay._consumer import ClaimedBatch, StreamingConsumer
from dataplane_integrations.replay._ids import Reservation, parse_sample_id
from dataplane_integrations.replay._policies import (
    BufferView,
    GroupView,
    InOrderPolicy,
    ReadyFirstPolicy,
    StalenessPolicy,
    TargetStepPolicy,
    WindowedPolicy,
)
from dataplane_integrations.replay._remote import RemoteReplayBuffer
from dataplane_integrations.replay._saving import RestoredReplay, restore_replay, save_replay
from dataplane_integrations.replay._state import BufferCounts
from dataplane_integrations.replay._versions import claim_versions

__all__ = [
    "AsyncCollector",
    "AsyncRollout",
    "BufferCounts",
    "BufferView",
    "ClaimedBatch",
    "Collector",
    "CollectorCounts",
    "GroupView",
    "InOrderPolicy",
    "ReadyFirstPolicy",
    "RemoteReplayBuffer",
    "ReplayBuffer",
    "Reservation",
    "RestoredReplay",
    "Rollout",
    "StalenessPolicy",
    "StreamingConsumer",
    "TargetStepPolicy",
    "WindowedPolicy",
    "claim_versions",
    "group_of",
    "parse_sample_id",
    "restore_replay",
    "save_replay",
]
