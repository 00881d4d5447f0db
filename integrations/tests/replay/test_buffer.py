"""The life of a group in a replay buffer: reserved, committed, selected, consumed; or given up on the way.

One long file, since all its tests are about one class and begin with the same few calls.
"""

import dataclasses
import pickle
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from replaying import WAIT_S, answers, prompts_of, write

from dataplane_core.errors import BackendUnavailableError, InvalidRequestError, LostSamplesError, MissingDataError
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.errors import (
    CollectorFailedError,
    ReplayClosedError,
    ReplayTimeoutError,
    ReservationLostError,
    WorkerFailedError,
)
from dataplane_integrations.replay import (
    Collector,
    InOrderPolicy,
    PromptSource,
    ReadyFirstPolicy,
    StalenessPolicy,
    TargetStepPolicy,
    WindowedPolicy,
    group_of,
    parse_sample_id,
)
from dataplane_integrations.trainer.groups import InProcessWorkerGroup

# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_and_tags_say_version_and_prompt(make_buffer, client, fill):
    buffer = make_buffer(weight_version=7)
    first, second = fill(buffer, 2)
    assert first.sample_ids == ("v7_p0_g0", "v7_p0_g1")
    assert second.sample_ids == ("v7_p1_g0", "v7_p1_g1")
    assert parse_sample_id("v7_p1_g0") == {
        "group": "v7_p1",
        "weight_version": 7,
        "prompt": 1,
        "attempt": 0,
        "index": 0,
    }
    assert parse_sample_id("v7_p1r2_g0")["attempt"] == 2
    listed = client.list_samples("replay", tag_filter={"weight_version": (">=", 7), "prompt": 1})
    assert listed.sample_ids == ["v7_p1_g0", "v7_p1_g1"]
    with pytest.raises(InvalidRequestError, match="not a versioned sample id"):
        parse_sample_id("p1_g0")


# --- the way through --------------------------------------------------------------------------------------------------


def test_groups_come_back_whole_with_their_tags_and_are_cleared_when_consumed(make_buffer, client, held):
    buffer = make_buffer()
    reservations = buffer.reserve(2)
    meta = write(client, reservations)
    meta.stamp_tags({"reward": [0.0, 1.0, 2.0, 3.0]})
    buffer.commit(reservations, meta.subset([3, 0, 2, 1]))
    selected = buffer.select(2)
    assert selected.sample_ids == ["v0_p0_g0", "v0_p0_g1", "v0_p1_g0", "v0_p1_g1"]
    assert selected.sequence_lengths == [1, 2, 1, 2]
    assert [tags["reward"] for tags in selected.tags or []] == [0.0, 1.0, 2.0, 3.0]
    assert client.get_data(selected, ["input_ids"])["input_ids"].offsets().diff().tolist() == [1, 2, 1, 2]
    assert len(pickle.dumps(selected)) < 2000
    buffer.consume(selected)
    assert held() == []
    assert not buffer.view().groups
    assert dataclasses.asdict(buffer.counts) == {
        "committed": 2,
        "trained": 2,
        "discarded": 0,
        "evicted": 0,
        "lost": 0,
        "given_up": 0,
    }


def test_a_group_knows_with_which_weights_its_generation_began_and_ended(make_buffer, client):
    buffer = make_buffer(ReadyFirstPolicy(max_staleness=3, groups_per_version=1))
    first, second, third, bad = [buffer.reserve()[0] for _ in range(4)]
    buffer.set_weight_version(2)  # meanwhile the rollout side got new weights
    told = write(client, [second])
    buffer.commit([first], write(client, [first]))
    told.stamp_tags({"end_weight_version": [0, 1]})  # the engine knows it row by row
    buffer.commit([second], told)
    for wrong in (-1, "2", None, 0.5):
        meta = write(client, [bad])
        meta.stamp_tags({"end_weight_version": [2, wrong]})
        with pytest.raises(InvalidRequestError, match=r"end_weight_version of 'v0_p3_g1' is .*at least 0"):
            buffer.commit([bad], meta)
    buffer.abandon([bad], requeue=False)
    assert [(each.end_weight_version, each.committed) for each in buffer.view().groups] == [(2, 0), (1, 1), (None,) * 2]
    other = make_buffer(ReadyFirstPolicy(max_staleness=3, groups_per_version=1), resume=True)
    assert [each.end_weight_version for each in other.view().groups] == [2, 1, None]
    tags = other.select(2).tags or []
    assert [each["end_weight_version"] for each in tags] == [0, 1, 2, 2]
    assert {each["weight_version"] for each in tags} == {0}
    buffer.abandon([third])
    with Collector(buffer, answers, client=client):
        buffer.select(4, min_groups=3)
    stored = client.list_samples("replay", tag_filter={"prompt": 2}).tags or []
    assert [each["end_weight_version"] for each in stored] == [2, 2]


def test_a_read_that_fails_puts_the_groups_back(make_buffer, held, fill):
    buffer = make_buffer()
    fill(buffer, 2)
    with pytest.raises(MissingDataError, match="advantages"):
        buffer.take(2, ["advantages"])
    assert len(held()) == 4
    assert buffer.take(2)[0].size == 4


def test_a_step_whose_rows_a_policy_has_cleared_is_generated_again(make_buffer, client, fill, toy_worker):
    worker = toy_worker()
    buffer = make_buffer()
    first, second = fill(buffer, 2)
    meta = buffer.select(2)
    with DataPlanePolicy(InProcessWorkerGroup([worker]), client, train_fields=["input_ids", "input_lengths"]) as policy:
        worker.fail_in = "train"
        with pytest.raises(WorkerFailedError, match="broke in train"):
            policy.train_from_meta(meta, 0.5)
        assert client.list_samples("replay").size == 0
        buffer.discard(meta, requeue=True)
        with pytest.raises(ReplayTimeoutError, match="4 prompts wait for a collector"):
            buffer.select(1, timeout_s=0)
        worker.fail_in = None
        assert [each.prompt for each in fill(buffer, 4)] == [2, 3, first.prompt, second.prompt]
        meta = buffer.select(2, timeout_s=0)
        policy.train_from_meta(meta, 0.5)
    buffer.consume(meta)
    assert (buffer.counts.trained, buffer.counts.discarded) == (2, 2)


def test_a_selection_that_groups_have_left_means_what_is_left_of_it_until_it_ends(make_buffer, fill):
    buffer = make_buffer()
    first, second, _ = fill(buffer, 3)
    meta = buffer.select(3)
    buffer.leave_out(meta, first.sample_ids)
    left = buffer.leave_out(meta, second.sample_ids)
    buffer.put_back(meta)
    assert buffer.select(1, timeout_s=0).sample_ids == left.sample_ids
    buffer.consume(left)
    for gone in (meta, meta.slice(0, 2), meta.slice(2, 4)):
        with pytest.raises(InvalidRequestError, match="not in training"):
            buffer.consume(gone)
    assert (buffer.counts.trained, buffer.counts.lost) == (1, 2)


@pytest.mark.parametrize(("num_lost", "num_trained"), [(1, 2), (3, 0)])
def test_further_groups_are_left_out_until_all_ranks_get_as_many_rows(
    make_buffer, client, fill, toy_worker, lose, num_lost, num_trained
):
    buffer = make_buffer()
    groups = fill(buffer, 4)
    meta = buffer.select(4)
    for group in groups[:num_lost]:
        lose("replay", group.sample_ids[0], "input_ids")
    workers = [toy_worker(rank) for rank in range(4)]
    fields = ["input_ids", "input_lengths"]
    with DataPlanePolicy(
        InProcessWorkerGroup(workers), client, train_fields=fields, replace_lost=buffer.leave_out
    ) as policy:
        if num_trained:
            policy.train_from_meta(meta, 0.5)
        else:
            with pytest.raises(LostSamplesError, match="no rows of 'replay' are left") as caught:
                policy.train_from_meta(meta, 0.5)
            assert list(caught.value.missing_samples) == [each.sample_ids[0] for each in groups[:num_lost]]
        assert policy.num_lost == num_lost
    trained = [int(data["input_ids"][0, 0]) for worker in workers for _, data in worker.seen]
    assert trained == [each.prompt for each in groups[num_lost : num_lost + num_trained] for _ in range(2)]
    buffer.consume(meta)  # what is left of it
    assert (buffer.counts.committed, buffer.counts.trained) == (4, num_trained)
    assert client.list_samples("replay").size == 0
    with pytest.raises(InvalidRequestError, match="not in training"):
        buffer.consume(meta)
    assert not buffer.view().groups
    again = [each.prompt for each in buffer.reserve(4 - num_trained, timeout_s=0)]
    assert sorted(again) == [each.prompt for each in groups if each.prompt not in trained]


def test_take_gives_other_groups_even_if_the_store_fails_at_the_clear_of_the_lost_ones(
    make_buffer, held, fill, no_clears, lose
):
    buffer = make_buffer(ReadyFirstPolicy(max_staleness=1, groups_per_version=2))
    groups = fill(buffer, 3)
    lose("replay", groups[0].sample_ids[0], "input_ids")
    with no_clears():
        meta, columns = buffer.take(2, timeout_s=0)
    assert meta.sample_ids == [*groups[1].sample_ids, *groups[2].sample_ids]
    assert columns["input_ids"][:, 0].tolist() == [1, 1, 2, 2]
    assert (buffer.counts.trained, buffer.counts.lost, len(held())) == (2, 1, 6)
    with pytest.raises(ReplayTimeoutError, match="4 prompts wait for a collector"):
        buffer.take(1, timeout_s=0)
    buffer.set_weight_version(1)
    assert held() == []


def test_discarded_groups_are_cleared_and_do_not_count_as_trained(make_buffer, held, fill):
    buffer = make_buffer()
    fill(buffer, 4)
    meta = buffer.select(2)
    buffer.discard(meta.subset([1]))  # any row of a group names it
    assert held() == ["v0_p1_g0", "v0_p1_g1", "v0_p2_g0", "v0_p2_g1", "v0_p3_g0", "v0_p3_g1"]
    assert (buffer.counts.trained, buffer.counts.discarded, buffer.view().trained_since) == (0, 1, 0)
    assert buffer.counts.committed == 4
    assert len(buffer.reserve(1, timeout_s=0)) == 1


@pytest.mark.parametrize("operation", ["consume", "discard", "put_back"])
def test_only_groups_in_training_can_be_settled(make_buffer, client, held, fill, operation):
    buffer = make_buffer()
    fill(buffer, 2)
    meta = buffer.select(1)
    other = client.list_samples("replay").subset([0, 2])  # of a group in training, and of one that is not
    with pytest.raises(InvalidRequestError, match="not in training: 'v0_p1'"):
        getattr(buffer, operation)(other)
    assert len(held()) == 4
    buffer.consume(meta)
    with pytest.raises(InvalidRequestError, match="not in training: 'v0_p0'"):
        getattr(buffer, operation)(meta)


def test_a_commit_must_be_of_exactly_the_rows_reserved(make_buffer, client):
    buffer = make_buffer()
    reservations = buffer.reserve(2)
    meta = write(client, reservations)
    for wrong in (meta.slice(0, 3), meta.subset([0, 1, 2, 3, 3])):
        with pytest.raises(InvalidRequestError, match="Expected exactly the rows reserved"):
            buffer.commit(reservations, wrong)
    with pytest.raises(InvalidRequestError, match="only in one of both: 'v0_p1_g0', 'v0_p1_g1'"):
        buffer.commit(reservations[:1], meta)
    with pytest.raises(InvalidRequestError, match="without fields"):  # a save would not know what to read
        buffer.commit(reservations, dataclasses.replace(meta, fields=None))
    buffer.commit(reservations, meta)
    with pytest.raises(ReservationLostError, match="no longer reserved: 'v0_p0', 'v0_p1'"):
        buffer.commit(reservations, meta)


# --- bounds and staleness ---------------------------------------------------------------------------------------------


def test_a_reservation_waits_for_room_and_says_what_fills_it(make_buffer, fill):
    buffer = make_buffer()
    fill(buffer, 3)
    with pytest.raises(
        ReplayTimeoutError, match=r"of 3 groups 0 are being made, 3 are ready, 0 are in training"
    ) as info:
        buffer.reserve(2, timeout_s=0)
    assert info.value.retryable
    assert len(buffer.reserve(2, at_least=1, timeout_s=0)) == 1
    with pytest.raises(ReplayTimeoutError):
        buffer.reserve(2, at_least=1, timeout_s=0)
    with pytest.raises(InvalidRequestError, match="admits 4 to an empty buffer"):
        buffer.reserve(5)


def test_room_appears_when_the_trainer_moves_on(make_buffer, fill):
    buffer = make_buffer()
    fill(buffer, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.reserve, 2, timeout_s=WAIT_S)
        buffer.consume(buffer.select(2))
        # trained, but with the old weights a further group would be one version too stale when its turn comes
        assert buffer.view().trained_since == 2
        assert not waiting.done()
        buffer.set_weight_version(1)
        assert [each.weight_version for each in waiting.result(WAIT_S)] == [1, 1]


def test_what_has_become_too_stale_is_evicted_and_cleared_but_not_what_is_in_training(make_buffer, held, fill, commit):
    buffer = make_buffer()
    fill(buffer, 3)
    (late,) = buffer.reserve(1)
    training = buffer.select(1)
    assert buffer.set_weight_version(1) == []
    assert buffer.set_weight_version(2) == ["v0_p1", "v0_p2"]
    assert held() == training.sample_ids
    commit(buffer, [late])  # ready only now, and too stale already
    assert held() == training.sample_ids
    assert buffer.counts.evicted == 3
    buffer.consume(training)
    with pytest.raises(InvalidRequestError, match="the version is 2"):
        buffer.set_weight_version(1)


def test_groups_that_come_too_late_are_said_once_per_version_with_the_reason(make_buffer, fill, commit, caplog):
    buffer = make_buffer(TargetStepPolicy(max_staleness=1, groups_per_version=3))
    late = buffer.reserve(1, timeout_s=0)
    fill(buffer, 2)
    buffer.set_weight_version(1)
    commit(buffer, late)
    fill(buffer, 3)
    assert len(caplog.messages) == 1
    assert "'replay': 2 groups were dropped" in caplog.text
    assert "At weight version 1 they are too old for TargetStepPolicy(max_staleness=1" in caplog.text
    assert "not generated again" in caplog.text
    buffer.set_weight_version(2)
    assert "'replay': 4 groups were dropped" in caplog.messages[1]
    buffer.set_weight_version(2)
    assert len(caplog.messages) == 2


def test_evicted_prompts_may_be_generated_again(make_buffer, fill):
    buffer = make_buffer(requeue_evicted=True)
    fill(buffer, 2)
    buffer.set_weight_version(2)
    assert [each.group for each in buffer.reserve(4)] == ["v2_p2", "v2_p3", "v2_p0r1", "v2_p1r1"]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("num_groups", [2, 4])
def test_windowed_loses_no_slow_group_however_wide_the_window_is(make_buffer, commit, max_staleness, num_groups):
    buffer = make_buffer(WindowedPolicy(max_staleness=max_staleness, groups_per_version=4))
    slow = deque(buffer.reserve(4 * (max_staleness + 1), timeout_s=0))  # the first 4 are fast
    fast = [slow.popleft() for _ in range(4)]
    trained: list[int] = []
    for version in range(3 * max_staleness):
        commit(buffer, fast)
        for _ in range(4 // num_groups):
            while True:
                try:
                    meta = buffer.select(num_groups, timeout_s=0)
                    break
                except ReplayTimeoutError:  # it waits for slow ones
                    late = [slow.popleft()]
                    commit(buffer, late)
            trained += prompts_of(meta)
            buffer.consume(meta)
        assert buffer.set_weight_version(version + 1) == []
        fast = buffer.reserve(4, timeout_s=0)
    assert not slow
    assert set(range(4 * (max_staleness + 1))) <= set(trained)
    assert buffer.counts.evicted == 0


def test_a_policy_that_breaks_the_rules_is_told_so(make_buffer, commit):
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Wrong(StalenessPolicy):
        evicts: bool = False

        def select(self, view, num_groups):
            return [view.groups[0].group] * num_groups

        def evict(self, view):
            return [each.group for each in view.groups] if self.evicts else []

    buffer = make_buffer(Wrong(max_staleness=1, groups_per_version=2))
    (made,) = buffer.reserve()
    with pytest.raises(InvalidRequestError, match=r"Wrong.select named 1 groups, .* not ready: 'v0_p0'"):
        buffer.select(1, timeout_s=0)
    commit(buffer, [made])
    with pytest.raises(InvalidRequestError, match=r"Wrong.select named 2 groups, 1 of them different"):
        buffer.select(2, timeout_s=0)
    taking = make_buffer(Wrong(max_staleness=1, groups_per_version=2, evicts=True))
    taking.reserve()
    with pytest.raises(InvalidRequestError, match=r"Wrong.evict named 1 groups, .* not ready: 'v0_p0'"):
        taking.set_weight_version(1)


# --- a range of groups, target steps, rollouts in vain ----------------------------------------------------------------


def test_a_step_takes_between_the_fewest_and_the_most_groups(make_buffer, fill):
    buffer = make_buffer(ReadyFirstPolicy(max_staleness=0, groups_per_version=8), num_prompts=8)
    fill(buffer, 1)
    with pytest.raises(ReplayTimeoutError):
        buffer.select(4, min_groups=2, timeout_s=0)
    fill(buffer, 2)
    assert buffer.select(4, min_groups=2, timeout_s=0).size == 2 * 3
    fill(buffer, 5)
    meta, _ = buffer.take(4, min_groups=2, timeout_s=0)
    assert meta.size == 2 * 4
    assert buffer.select(4, min_groups=2, timeout_s=0).size == 2, "no prompts are left"
    for fewest in (0, 5):
        with pytest.raises(InvalidRequestError, match=f"num_groups is 4, min_groups is {fewest}"):
            buffer.select(4, min_groups=fewest)


def test_a_rule_is_asked_only_a_few_times_for_as_many_groups_as_there_are(make_buffer, fill, monkeypatch):
    buffer = make_buffer(InOrderPolicy(max_staleness=1, groups_per_version=64))
    fill(buffer, 50)
    asked, select = [], InOrderPolicy.select
    monkeypatch.setattr(InOrderPolicy, "select", lambda *given: asked.append(given[-1]) or select(*given))
    assert buffer.select(128, min_groups=1, timeout_s=0).size == 2 * 50
    assert len(asked) <= 8
    fill(buffer, 3)
    assert buffer.select(3, min_groups=1, timeout_s=0).size == 2 * 3


def test_groups_are_trained_on_in_the_step_that_they_were_started_for(make_buffer, held, commit):
    buffer = make_buffer(TargetStepPolicy(max_staleness=1, groups_per_version=2), num_prompts=9)
    reserved = buffer.reserve(4, timeout_s=0)
    assert [each.target_step for each in reserved] == [0, 0, 1, 1]
    for each in (reserved[0], *reserved[2:]):
        commit(buffer, [each])
    with pytest.raises(ReplayTimeoutError):  # ready are one of step 0 and two of step 1
        buffer.select(2, timeout_s=0)
    buffer.abandon([reserved[1]])
    (again,) = buffer.reserve(1, timeout_s=0)
    assert (again.group, again.target_step) == ("v0_p1r1", 0)
    commit(buffer, [again])
    meta = buffer.select(2, timeout_s=0)
    assert {group_of(each) for each in meta.sample_ids} == {"v0_p0", "v0_p1r1"}
    buffer.consume(meta)
    buffer.set_weight_version(1)
    assert [each.target_step for each in buffer.reserve(2, timeout_s=0)] == [2, 2]
    other = make_buffer(TargetStepPolicy(max_staleness=1, groups_per_version=2), num_prompts=9, resume=True)
    assert [each.target_step for each in other.view().groups] == [1, 1, 2, 2]
    assert buffer.set_weight_version(2) == ["v0_p2", "v0_p3"]
    assert held() == []


@pytest.mark.parametrize("requeue", [False, True])
def test_rollouts_in_vain_are_named_and_given_up(make_buffer, requeue):
    buffer = make_buffer(num_prompts=4, requeue_evicted=requeue)
    stale, old = buffer.reserve(2), buffer.reserve(1)
    assert buffer.to_abort([*stale, *old]) == []
    buffer.set_weight_version(2)
    (new,) = buffer.reserve(1)
    assert buffer.to_abort([*stale, new]) == stale
    buffer.abort([*stale, new])
    assert buffer.to_abort([new, *old]) == [new, *old], "no longer reserved, and too stale"
    again = (
        [each.group for each in buffer.reserve(3, timeout_s=0)]
        if requeue
        else [each.group for each in buffer.reserve(1, timeout_s=0)]
    )
    assert sorted(again) == (["v2_p0r1", "v2_p1r1", "v2_p3r1"] if requeue else ["v2_p3r1"])


def test_rollouts_that_have_ended_can_be_given_up_again_if_the_store_failed_at_the_clear(
    make_buffer, client, held, no_clears
):
    buffer = make_buffer()
    in_vain = buffer.reserve(2)
    write(client, in_vain)
    buffer.set_weight_version(2)
    wanted = buffer.reserve(1)
    with no_clears(), pytest.raises(BackendUnavailableError):
        buffer.abort([*in_vain, *wanted])
    buffer.abort([*in_vain, *wanted])
    assert [each.group for each in buffer.reserve(1)] == ["v2_p2r1"]
    assert [each.group for each in buffer.view().groups] == ["v2_p2r1"]
    assert held() == []


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_last_groups_are_given_even_if_they_are_fewer(make_buffer, fill, commit):
    buffer = make_buffer(num_prompts=3)
    fill(buffer, 2)
    buffer.consume(buffer.select(2))
    buffer.set_weight_version(1)
    (last,) = buffer.reserve(2)
    with pytest.raises(ReplayTimeoutError, match="the first being made is 'v1_p2'"):
        buffer.select(2, timeout_s=0)
    with pytest.raises(ReplayTimeoutError):  # the last prompt may come back
        buffer.reserve(timeout_s=0)
    commit(buffer, [last])
    assert buffer.reserve(timeout_s=0) == []
    buffer.consume(buffer.select(2, timeout_s=0))
    assert buffer.select(2, timeout_s=0).size == 0


def test_closing_wakes_who_waits(make_buffer):
    buffer = make_buffer()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.select, 1, timeout_s=WAIT_S)
        buffer.close()
        with pytest.raises(ReplayClosedError):
            waiting.result(WAIT_S)
    with pytest.raises(ReplayClosedError):
        buffer.reserve()


@pytest.mark.parametrize("wait", ["select", "wait_until_reserved"])
def test_the_trainer_learns_of_a_failure_once_no_collector_is_left(make_buffer, wait):
    buffer = make_buffer()

    def trainer(timeout_s):
        if wait == "select":
            buffer.select(1, timeout_s=timeout_s)
        else:
            buffer.wait_until_reserved(timeout_s=timeout_s)

    buffer.enlist("a")
    buffer.enlist("b")
    buffer.fail("a is gone", collector="a")
    with pytest.raises(ReplayTimeoutError, match="collectors that failed: 'a'"):
        trainer(0)
    buffer.enlist("c")
    buffer.fail("b is gone", collector="b")
    with pytest.raises(ReplayTimeoutError):
        trainer(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trainer, WAIT_S)
        buffer.fail("c is gone", OSError("no GPU"), collector="c")
        with pytest.raises(CollectorFailedError, match="c is gone") as info:
            waiting.result(WAIT_S)
    assert isinstance(info.value.__cause__, OSError)
    buffer.enlist("a")  # it is back
    with pytest.raises(ReplayTimeoutError, match="collectors that failed: 'b', 'c'"):
        trainer(0)
    buffer.withdraw("a")  # without a failure
    with pytest.raises(CollectorFailedError, match="c is gone"):
        trainer(0)


# --- dead collectors --------------------------------------------------------------------------------------------------


def test_what_a_dead_collector_had_claimed_is_made_by_others_when_its_lease_ends(make_buffer, client, held, commit):
    buffer = make_buffer()
    dead = PromptSource(client, "replay", lease_s=0.5)
    committed, written, reserved = (dead.reserve()[0] for _ in range(3))
    (of_other,) = buffer.reserve()
    commit(dead, [committed])
    write(client, [written])  # killed before its commit
    client.put_samples(reserved.sample_ids[:1], "replay", tags=[reserved.tags])  # killed in the middle of the group
    write(client, [of_other])
    assert len(held()) == 7
    dead._closing.set()  # it renews no more
    again = buffer.reserve(2, timeout_s=WAIT_S)
    assert [each.group for each in again] == ["v0_p1r1", "v0_p2r1"]
    buffer.view()
    assert held() == [*committed.sample_ids, *of_other.sample_ids]
    with pytest.raises(ReservationLostError) as info:  # the dead one was only slow
        commit(dead, [written])
    assert info.value.groups == ("v0_p1",)
    dead.abandon([written])
    assert held() == [*committed.sample_ids, *of_other.sample_ids]
    commit(buffer, again)
    assert len(buffer.view().groups) == 4


# --- many threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ReadyFirstPolicy, InOrderPolicy])
def test_under_threads_every_group_is_trained_once_or_evicted_and_reads_never_meet_cleared_rows(
    make_buffer, client, held, commit, policy
):
    buffer = make_buffer(policy(max_staleness=1, groups_per_version=4), num_prompts=120)
    trained: list[str] = []
    lock = threading.Lock()

    def roll():
        while reservations := buffer.reserve(1, timeout_s=WAIT_S):
            ended = reservations if reservations[0].prompt % 9 + reservations[0].attempt == 0 else []
            given_up = pool.submit(buffer.abandon, ended)
            with suppress(ReservationLostError):
                commit(buffer, reservations)
            given_up.result(WAIT_S)
            buffer.abandon(reservations)  # one that is committed stays so
            assert len(buffer.view().groups) <= 8

    def train():
        while True:
            meta = buffer.select(2, timeout_s=WAIT_S)
            if not meta.size:
                return
            rows = client.get_data(meta, ["input_ids"])["input_ids"].unbind()
            assert [int(row[0]) for row in rows] == [parse_sample_id(each)["prompt"] for each in meta.sample_ids]
            with lock:
                trained.extend({group_of(each) for each in meta.sample_ids})
                buffer.consume(meta)
                buffer.set_weight_version(len(trained) // 4)

    with ThreadPoolExecutor(9) as pool:
        for done in [pool.submit(work) for work in (roll, roll, roll, train, train, train)]:
            done.result(WAIT_S)
    assert len(trained) == len(set(trained))
    counts = buffer.counts
    assert (counts.trained, counts.trained + counts.evicted, counts.committed) == (len(trained), 120, 120)
    assert held() == []
