"""Random histories of a replay buffer on a real store, against sets of group names."""

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dataplane_core import KVBatchMeta, connect
from dataplane_integrations.errors import ReplayTimeoutError, ReservationLostError
from dataplane_integrations.replay import (
    InOrderPolicy,
    PromptSource,
    ReadyFirstPolicy,
    ReplayBuffer,
    Reservation,
    WindowedPolicy,
    group_of,
)
from dataplane_testkit._profiles import by_profile, is_long

POLICIES = [WindowedPolicy, ReadyFirstPolicy, InOrderPolicy]


class BufferMachine(RuleBasedStateMachine):
    """Model: which groups are being made, ready, in training, gone; the rows in the store follow from it."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        max_staleness=st.integers(0, 2),
        groups_per_version=st.integers(1, 3),
        requeue_evicted=st.booleans(),
        num_prompts=st.none() | st.integers(1, 12),
    )
    def start(self, policy, max_staleness, groups_per_version, **options):
        self.client = connect({"backend": "noop"})
        self.client.register_partition("replay", ["x"], None, ["train"], grpo_group_size=2)
        self.policy = policy(max_staleness=max_staleness, groups_per_version=groups_per_version)
        self.buffer = ReplayBuffer(self.client, "replay", self.policy, group_size=2, **options)
        self.bound = (max_staleness + 1) * groups_per_version
        self.options = options
        self.rollouts = PromptSource(self.client, "replay")
        self.made: dict[str, Reservation] = {}
        self.left: dict[str, Reservation] = {}  # of collectors that have ended, until others make them
        self.written: set[str] = set()  # of those being made
        self.lost: list[Reservation] = []
        self.ready: set[str] = set()
        self.training: list[KVBatchMeta] = []
        self.gone: set[str] = set()

    def teardown(self):
        if hasattr(self, "client"):
            self.client.close()

    def write(self, reservation, rows=2):
        return self.client.put_samples(
            reservation.sample_ids[:rows], "replay", {"x": torch.zeros(rows)}, tags=[reservation.tags] * rows
        )

    @rule(count=st.integers(1, 3))
    def reserve(self, count):
        held = len(self.buffer.view().groups)
        if count > self.bound:
            return
        try:
            got = self.rollouts.reserve(count, timeout_s=0)
        except ReplayTimeoutError:
            assert held + count > self.bound - self.buffer.view().trained_since or self.options["num_prompts"]
            return
        for each in got:
            assert each.group not in self.made
            assert each.group not in self.ready | self.gone
            for group in [group for group, other in self.left.items() if other.prompt == each.prompt]:
                del self.left[group]
                self.written.discard(group)
                self.gone.add(group)
            self.made[each.group] = each

    @precondition(lambda self: self.made)
    @rule(data=st.data(), rows=st.integers(1, 2))
    def write_and_perhaps_die(self, data, rows):
        name = data.draw(st.sampled_from(sorted(self.made)))
        if name not in self.written:
            self.write(self.made[name], rows)
            self.written.add(name)

    @precondition(lambda self: set(self.made) - self.written)
    @rule(data=st.data())
    def commit(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(set(self.made) - self.written)), min_size=1, unique=True))
        reservations = [self.made.pop(name) for name in names]
        metas = [self.write(each) for each in reservations]
        self.rollouts.commit(reservations, metas[0].concat(*metas[1:]))
        self.ready.update(names)
        self.notice_evictions()

    @precondition(lambda self: self.made)
    @rule(data=st.data(), requeue=st.booleans())
    def abandon(self, data, requeue):
        name = data.draw(st.sampled_from(sorted(self.made)))
        self.written.discard(name)
        self.lost.append(self.made.pop(name))
        self.gone.add(name)
        self.rollouts.abandon([self.lost[-1]], requeue=requeue)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def commit_what_was_given_up(self, data):
        reservation = data.draw(st.sampled_from(self.lost))
        with pytest.raises(ReservationLostError):
            self.rollouts.commit([reservation], self.write(reservation))
        self.rollouts.abandon([reservation])
        self.written.discard(reservation.group)

    @precondition(lambda self: self.made)
    @rule()
    def end_rollouts_in_vain(self):
        oldest = self.buffer.weight_version - self.policy.max_staleness
        in_vain = self.rollouts.to_abort(list(self.made.values()))
        assert in_vain == [each for each in self.made.values() if each.weight_version < oldest]
        self.rollouts.abort(in_vain)
        for each in in_vain:
            self.lost.append(self.made.pop(each.group))
            self.written.discard(each.group)
            self.gone.add(each.group)

    @rule(count=st.integers(1, 3), fewest=st.integers(1, 3))
    def select(self, count, fewest):
        try:
            meta = self.buffer.select(count, min_groups=min(count, fewest), timeout_s=0)
        except ReplayTimeoutError:
            return
        if not meta.size:
            assert self.options["num_prompts"]
            return
        names = {group_of(each) for each in meta.sample_ids}
        assert names <= self.ready, "selected twice, or never committed"
        assert meta.size == 2 * len(names)
        oldest = self.buffer.weight_version - self.policy.max_staleness
        assert all(tags["weight_version"] >= oldest for tags in meta.tags or [])
        self.ready -= names
        self.training.append(meta)

    @precondition(lambda self: self.training)
    @rule(data=st.data(), how=st.sampled_from(["consume", "discard", "put_back"]))
    def settle(self, data, how):
        meta = self.training.pop(data.draw(st.integers(0, len(self.training) - 1)))
        self.client.get_samples(meta.sample_ids, "replay", ["x"])  # whatever happened meanwhile, the rows are there
        getattr(self.buffer, how)(meta)
        names = {group_of(each) for each in meta.sample_ids}
        if how == "put_back":
            self.ready |= names
            self.notice_evictions()
        else:
            self.gone |= names

    @rule(step=st.integers(0, 2))
    def new_weights(self, step):
        evicted = set(self.buffer.set_weight_version(self.buffer.weight_version + step))
        assert evicted <= self.ready, "evicted while in training or being made"
        self.notice_evictions()
        assert not evicted & self.ready

    @rule()
    def restart_the_trainer(self):
        self.buffer.close()
        self.buffer = ReplayBuffer(self.client, "replay", self.policy, group_size=2, resume=True, **self.options)
        self.ready.update(group_of(each) for meta in self.training for each in meta.sample_ids)
        self.training.clear()
        self.notice_evictions()

    @rule()
    def restart_the_collector(self):
        self.rollouts.close()
        self.rollouts = PromptSource(self.client, "replay")
        self.lost.extend(self.made.values())
        self.left.update(self.made)
        self.made.clear()

    def notice_evictions(self):
        oldest = self.buffer.weight_version - self.policy.max_staleness
        stale = {name for name in self.ready if int(name[1:].partition("_")[0]) < oldest}
        self.ready -= stale
        self.gone |= stale

    @invariant()
    def the_bound_holds_and_the_store_holds_what_the_book_says(self):
        if not hasattr(self, "client"):
            return
        view = self.buffer.view()
        assert len(view.groups) <= self.bound
        training = {group_of(each) for meta in self.training for each in meta.sample_ids}
        assert {each.group for each in view.groups if each.committed is None} == {*self.made, *self.left}
        assert {each.group for each in view.groups if each.ready} == self.ready
        assert {each.group for each in view.groups if each.selected} == training
        stored = {group_of(each) for each in self.client.list_samples("replay").sample_ids}
        assert stored == self.ready | training | self.written
        counts = self.buffer.counts
        settled = counts.trained + counts.discarded + counts.evicted
        assert counts.committed == settled + len(self.ready | training)


def test_any_history_of_a_buffer():
    drawn = settings(
        max_examples=by_profile(15, 60, 1500),
        stateful_step_count=40,
        derandomize=not is_long(),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(BufferMachine, settings=drawn)
