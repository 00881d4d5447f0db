"""Prompts that are given up: what takes their place, what their step does, and what a later start knows of it."""

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from replaying import WAIT_S, answers, prompts_of

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import ReplayTimeoutError, StepTooSmallError
from dataplane_integrations.replay import Collector, InOrderPolicy, TargetStepPolicy


def steps_of(groups=2, **options):
    return TargetStepPolicy(**{"max_staleness": 1, "groups_per_version": groups, **options})


#: The limit, whether each of several rollouts failed or was ended for another reason, and the prompts that come then.
ATTEMPTS = {
    "too often": (2, [True, False, True], [1, 2]),
    "not too often": (2, [True, False], [0]),
    "without a limit": (None, [True] * 20, [0, 1]),
}


@pytest.mark.parametrize(("max_attempts", "failed", "then"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_prompt_that_fails_too_often_is_given_up_and_the_next_one_takes_its_place(
    make_buffer, caplog, max_attempts, failed, then
):
    buffer = make_buffer(max_attempts=max_attempts, num_prompts=3)
    for attempt, fails in enumerate(failed):
        (reservation,) = buffer.reserve()
        assert (reservation.prompt, reservation.attempt) == (0, attempt)
        buffer.abandon([reservation], failed=fails)
    assert buffer.counts.given_up == (0 not in then)
    assert ("prompt 0 is given up after 2 failures" in caplog.text) == (0 not in then)
    assert [reservation.prompt for reservation in buffer.reserve(2, timeout_s=0)] == then


def test_a_prompt_that_has_failed_is_generated_alone_so_that_it_fails_no_other(make_buffer, commit):
    buffer = make_buffer(InOrderPolicy(max_staleness=3, groups_per_version=4), max_attempts=2)
    several = buffer.reserve(3)
    buffer.abandon(several[:1])
    buffer.abandon(several[1:], failed=True)
    calls = []
    for _ in range(4):
        calls.append(buffer.reserve(3, timeout_s=0))
        if calls[-1][0].prompt == 1:
            buffer.abandon(calls[-1], failed=True)
        else:
            commit(buffer, calls[-1])
    assert [[each.prompt for each in call] for call in calls] == [[1], [2], [0, 3, 4], [5, 6, 7]]
    assert buffer.counts.given_up == 1


def test_a_call_of_several_that_was_ended_gives_up_no_prompt_for_its_earlier_failure(make_buffer):
    buffer = make_buffer(max_attempts=1)
    buffer.abandon(buffer.reserve(2), failed=True)
    buffer.abandon(buffer.reserve(2, timeout_s=0))  # not its fault
    assert buffer.counts.given_up == 0


def test_a_run_that_has_drawn_more_prompts_than_its_next_start_has_still_ends(make_buffer, fill, commit):
    buffer = make_buffer(num_prompts=3, spare_prompts=2)
    for _ in range(2):
        buffer.abandon(buffer.reserve(1), requeue=False)
    fill(buffer, 2)
    buffer.abandon(buffer.reserve(1))
    other = make_buffer(num_prompts=3, resume=True)
    commit(other, other.reserve(1, timeout_s=0))
    assert other.reserve(1, timeout_s=0) == []
    other.wait_until_reserved(timeout_s=0)
    meta = other.select(3, timeout_s=0)
    assert prompts_of(meta) == [2, 3, 4]
    other.consume(meta)
    assert other.select(3, timeout_s=0).size == 0
    assert other.finished


def test_spare_prompts_are_drawn_only_in_place_of_those_that_were_given_up(make_buffer, fill):
    buffer = make_buffer(num_prompts=3, spare_prompts=2)
    buffer.abandon(buffer.reserve(1), requeue=False)
    fill(buffer, 3)
    assert prompts_of(buffer.select(3)) == [1, 2, 3]
    assert buffer.reserve(timeout_s=0) == [], "prompt 4 is a spare that nobody needs"
    other = make_buffer(num_prompts=3, spare_prompts=1)
    for _ in range(2):
        other.abandon(other.reserve(1), requeue=False)
    fill(other, 2)
    assert prompts_of(other.select(3)) == [2, 3], "there are no more spares: the last step is smaller"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spare_prompts": -1, "num_prompts": 4}, "spare_prompts must be at least 0"),
        ({"spare_prompts": 2}, "Expected num_prompts too"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make_buffer, options, said):
    with pytest.raises(InvalidRequestError, match=said):
        make_buffer(**options)


def test_a_ready_group_of_a_later_step_fills_the_hole_and_the_next_prompt_is_for_the_lender(make_buffer, commit):
    buffer = make_buffer(steps_of(borrow=True))
    reserved = buffer.reserve(4)
    commit(buffer, reserved[:1])
    buffer.abandon([reserved[1]], requeue=False)
    with pytest.raises(ReplayTimeoutError):
        buffer.select(2, timeout_s=0)  # none of step 1 is ready: a group that is being made is no help
    commit(buffer, reserved[2:3])
    meta = buffer.select(2, timeout_s=0)
    assert prompts_of(meta) == [0, 2]
    (new,) = buffer.reserve(timeout_s=0)
    assert (new.prompt, new.target_step) == (4, 1)
    commit(buffer, [reserved[3], new])
    buffer.consume(meta)
    buffer.set_weight_version(1)
    assert prompts_of(buffer.select(2, timeout_s=0)) == [3, 4]


def test_a_step_waits_for_its_own_groups_that_are_being_made_and_lends_no_more_than_is_lacking(make_buffer, commit):
    buffer = make_buffer(steps_of(borrow=True))
    reserved = buffer.reserve(4)
    commit(buffer, [reserved[0], *reserved[2:]])
    with pytest.raises(ReplayTimeoutError):
        buffer.select(2, timeout_s=0)
    commit(buffer, [reserved[1]])
    assert prompts_of(buffer.select(2, timeout_s=0)) == [0, 1]


#: The rule, the prompts in all, those of the first step that are given up, and the prompts of each step; a number: the
#: step was refused, since it has so many groups.
LAST_STEPS = {
    "loans leave the hole to the last step": ({"borrow": True}, 6, [0], [[1, 2], [3, 4], [5]]),
    "a step for which no prompts are left ends": ({"replacements": 1, "min_groups": 1}, 4, [0], [[1], [2, 3]]),
    "a step without groups is not the end": ({"replacements": 1, "min_groups": 1}, 4, [0, 1], [0, [2, 3]]),
    "the floor holds": ({"replacements": 1, "min_groups": 2}, 4, [0], [1, [2, 3]]),
    "a later step lends": ({"replacements": 1, "min_groups": 2, "borrow": True}, 4, [0], [[1, 2], [3]]),
    "of the last step nothing was given up": ({"replacements": 1}, 3, [], [[0, 1], [2]]),
}


@pytest.mark.parametrize(("rule", "num_prompts", "given_up", "steps"), LAST_STEPS.values(), ids=LAST_STEPS)
def test_steps_when_the_prompts_are_used_up(make_buffer, commit, rule, num_prompts, given_up, steps):
    buffer = make_buffer(steps_of(**rule), num_prompts=num_prompts)
    reserved = buffer.reserve(4)
    buffer.abandon(reserved[: len(given_up)], requeue=False)
    commit(buffer, reserved[len(given_up) :])
    trained = []
    while not buffer.finished:
        with suppress(ReplayTimeoutError):
            if more := buffer.reserve(4, at_least=1, timeout_s=0):
                commit(buffer, more)
        prompts = []
        try:
            while (meta := buffer.select(2, timeout_s=0)).size:
                prompts += prompts_of(meta)
                buffer.consume(meta)
                if len(prompts) == 2:
                    break
            trained.append(prompts)
        except StepTooSmallError as error:
            trained.append(error.num_groups)
        buffer.set_weight_version(buffer.weight_version + 1)
    assert trained == steps


def test_a_step_shrinks_by_what_was_given_up_and_waits_for_no_more(make_buffer, commit):
    buffer = make_buffer(steps_of(4, replacements=0, min_groups=2))
    reserved = buffer.reserve(8)
    buffer.abandon(reserved[:1], requeue=False)
    buffer.abandon(reserved[4:5], requeue=False)
    with pytest.raises(ReplayTimeoutError):
        buffer.reserve(timeout_s=0)
    commit(buffer, reserved[2:4])
    with pytest.raises(ReplayTimeoutError):
        buffer.select(4, timeout_s=0)
    commit(buffer, reserved[1:2])
    meta = buffer.select(4, timeout_s=0)
    assert prompts_of(meta) == [1, 2, 3]
    buffer.consume(meta)
    assert buffer.select(4, timeout_s=0).size == 0, "the step has all its groups"
    buffer.set_weight_version(1)
    commit(buffer, reserved[5:])
    assert [prompts_of(buffer.select(2, timeout_s=0)) for _ in range(3)] == [[5, 6], [7], []]
    assert {each.target_step for each in buffer.reserve(1, timeout_s=0)} == {2}, "later steps have their full size"


@pytest.mark.parametrize("borrow", [False, True])
def test_groups_that_are_consumed_after_the_next_version_is_set_do_not_count_for_it(make_buffer, commit, borrow):
    buffer = make_buffer(steps_of(2, replacements=0, min_groups=1, borrow=borrow))
    reserved = buffer.reserve(4)
    commit(buffer, reserved)
    meta = buffer.select(2, timeout_s=0)
    buffer.set_weight_version(1)
    buffer.consume(meta)
    assert buffer.view().trained_since == 0
    assert prompts_of(buffer.select(2, timeout_s=0)) == [2, 3]


def test_a_loan_that_is_in_training_is_no_group_of_the_next_step(make_buffer, commit):
    buffer = make_buffer(steps_of(2, replacements=1, min_groups=1, borrow=True))
    reserved = buffer.reserve(4)
    buffer.abandon(reserved[:1], requeue=False)
    commit(buffer, reserved[1:])
    meta = buffer.select(2, timeout_s=0)
    assert prompts_of(meta) == [1, 2]
    (new,) = buffer.reserve(1, timeout_s=0)
    commit(buffer, [new])
    buffer.set_weight_version(1)
    assert prompts_of(buffer.select(2, timeout_s=0)) == [3, 4], "2 still trains, in step 0"
    buffer.put_back(meta.slice(2, 4))
    back = next(each for each in buffer.view().groups if each.group == reserved[2].group)
    assert (back.selected_version, back.ready) == (None, True)


def test_a_step_below_the_floor_is_refused_and_says_how_small_it_is(make_buffer, commit):
    buffer = make_buffer(steps_of(4, replacements=1, min_groups=3))
    reserved = buffer.reserve(4)
    buffer.abandon(reserved[:2], requeue=False)
    (replaced,) = buffer.reserve(timeout_s=0)
    assert replaced.target_step == 0, "the first is replaced, the second is not"
    commit(buffer, [*reserved[2:], replaced])
    assert prompts_of(buffer.select(4, timeout_s=0)) == [2, 3, 4]
    other = make_buffer(steps_of(4, replacements=0, min_groups=3))
    other.abandon(other.reserve(4)[:2], requeue=False)
    with pytest.raises(StepTooSmallError, match=r"step 0 refused: 2 of its prompts.* at least 3") as refused:
        other.select(4, timeout_s=0)
    assert (refused.value.step, refused.value.num_groups) == (0, 2)
    other.set_weight_version(1)
    with pytest.raises(ReplayTimeoutError):  # of this step nothing was given up
        other.select(4, timeout_s=0)


def test_a_later_start_knows_failures_what_was_given_up_and_the_spares(make_buffer, commit):
    options: dict[str, Any] = {"max_attempts": 2, "num_prompts": 4, "spare_prompts": 1}
    buffer = make_buffer(steps_of(2, replacements=0, min_groups=1), **options)
    reserved = buffer.reserve(4)
    commit(buffer, [reserved[0]])
    buffer.abandon([reserved[1]], requeue=False)
    buffer.abandon([reserved[2]], failed=True)
    buffer.close()
    other = make_buffer(steps_of(2, replacements=0, min_groups=1), resume=True, **options)
    assert other.counts.given_up == 1
    assert prompts_of(other.select(2, timeout_s=0)) == [0], "the step is still one short"
    (failed,) = other.reserve(2, timeout_s=0, at_least=1)
    (alone,) = other.reserve(2, timeout_s=0, at_least=1)[:1]
    assert (alone.prompt, failed.prompt) == (3, 2)
    other.abandon([failed], failed=True)
    assert other.counts.given_up == 2, "one failure before the save, one after it"


@pytest.mark.parametrize("borrow", [False, True])
def test_several_collectors_and_trainers_skip_no_prompt_and_take_none_twice(make_buffer, client, borrow):
    bad = {each for each in range(80) if each % 7 == 3}
    rule = steps_of(8, borrow=borrow, replacements=1, min_groups=1)
    buffer = make_buffer(rule, num_prompts=60, spare_prompts=20, max_attempts=2)

    def rollout(reservations):
        if any(each.prompt in bad for each in reservations):
            raise RuntimeError("no answer")
        return answers(reservations)

    trained: Counter[int] = Counter()
    sizes: list[int] = []
    lock, step = threading.Lock(), threading.Barrier(2)

    def train():
        """Two of these share each step, two groups at a time, until a step has none."""
        while True:
            step.wait(WAIT_S)
            before = sum(trained.values())
            step.wait(WAIT_S)
            while (meta := buffer.select(2, min_groups=1, timeout_s=WAIT_S)).size:
                with lock:
                    trained.update(map(int, prompts_of(meta)))
                buffer.consume(meta)
            if step.wait(WAIT_S) == 0:
                sizes.append(sum(trained.values()) - before)
                buffer.set_weight_version(buffer.weight_version + 1)
            step.wait(WAIT_S)
            if sizes[-1] == 0:
                return

    collectors = [
        Collector(buffer, rollout, client=client, name=f"c{n}", groups_per_call=2, num_threads=2, max_failures=10**6)
        for n in range(2)
    ]
    for each in collectors:
        each.start()
    trainers = [threading.Thread(target=train) for _ in range(2)]
    for thread in trainers:
        thread.start()
    for thread in trainers:
        thread.join(WAIT_S)
    for each in collectors:
        each.stop()
    assert trained, "the trainers ran"
    assert set(trained.values()) == {1}
    given_up = buffer.counts.given_up
    drawn = range(60 + min(20, given_up))
    assert sorted(trained) == [prompt for prompt in drawn if prompt not in bad]
    assert given_up == len(bad.intersection(drawn))
    assert client.list_samples("replay").size == 0
    assert not buffer.view().groups
