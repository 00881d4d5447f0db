"""From facts to a verdict: each cause, and what is not called starved. With processes: engines/test_why.py of tools."""

from dataclasses import replace

import pytest

from dataplane_core.client import verdict as verdicts
from dataplane_core.client.verdict import Facts, judge, question_of
from dataplane_core.errors import LeaseHolder, Shortfall
from dataplane_core.spec import (
    Answer,
    CallInfo,
    ClientInfo,
    FieldSpec,
    PartitionDescription,
    PartitionInfo,
    PhaseInfo,
    TaskDescription,
    WorkInfo,
)


def client(role, *work, state="open", heard_s=0.5, pid=6, calls=()):
    told = ClientInfo(client_id=role, host="h", pid=pid, role=role, open_s=900.0, heard_s=heard_s, calls=calls)
    return replace(told, work=work, state=state, num_calls=len(calls))


def puts(*fields, ended_s=1.0, gap_s=2.0, partition="p", count=8):
    work = WorkInfo(operation="put_samples", partition_id=partition, fields=fields, num_samples=count)
    return replace(work, ended_s=ended_s, longest_gap_s=gap_s)


def claims(task="train", fields=("x",), waits_s=30.0, **more):
    work = WorkInfo(operation="claim_meta", partition_id="p", task_name=task, fields=fields, batch_size=4)
    return replace(work, waits_s=waits_s, **more)


def call(operation, running_s):
    return CallInfo(operation=operation, partition_id="p", running_s=running_s)


def generates(client, *groups, running_s=13.5, partition="p"):
    phase = PhaseInfo(name="generate", running_s=running_s, partition_id=partition, groups=groups)
    return replace(client, phases=[phase])


def partition(
    held=4,
    cleared=0,
    num_samples=None,
    fields=("x", "y"),
    group=None,
    oldest_s=500.0,
    tasks=("train",),
    followers=(),
):
    info = PartitionInfo(
        epoch="e",
        fields=fields,
        num_samples=num_samples,
        consumer_tasks=tasks,
        grpo_group_size=group,
        enums={},
        followers=followers,
    )
    return PartitionDescription(
        info=info,
        specs={"x": FieldSpec("tensor", "int64", 1, ())},
        num_samples=held,
        num_cleared=cleared,
        held_bytes=80,
        oldest_s=oldest_s,
        tasks={name: TaskDescription(num_ready=0, num_leased=0, num_consumed=0) for name in tasks},
        num_rows={"x": held},
    )


def verdict(found, *clients, task="train", ready=0, short=None, others=None, **facts):
    answers = {("p", name): Answer(num_ready=0, shortfall=each) for name, each in (others or {}).items()}
    answers["p", task] = Answer(num_ready=ready, shortfall=short or Shortfall())
    return judge(Facts(partitions={"p": found}, clients=clients, answers=answers, **facts), [("p", task)])[0]


TRAINER = client("trainer", claims())
ROLLOUT = client("rollout", puts("x"), pid=7)
ENDED = replace(ROLLOUT, state="closed", heard_s=90.0)
LACKING = {"short": Shortfall(num_lacking=4, missing_cells={"a": ("y",)})}
LEASED = {"short": Shortfall(num_leased=4, leased=(LeaseHolder(sample_id="a", holder="process 8 on h", left_s=9.0),))}
PASSED = {"short": Shortfall(num_not_matching=4, not_matching=("d",)), "tags": {("p", "d"): {"v": 6}}}
GROUPS = {
    "short": Shortfall(num_incomplete=3, incomplete_groups={"q17": 3}),
    "members": {("p", "q17"): ["q17_g0", "q17_g1", "q17_g2"]},
}
FULL = {"capacity_bytes": 100, "held_bytes": 90}


def writer(**more):
    """Who writes the field ``y``."""
    return client("reward", puts("y"), pid=9, **more)


@pytest.mark.parametrize(
    ("cause", "said", "who", "facts"),
    [
        ("silent", "(reward) was last heard of 20 s ago: it is dead", [writer(state="silent", heard_s=20.0)], LACKING),
        ("gone", "process 9 on h (reward) is gone", [writer(state="gone")], LACKING),
        ("stopped", "(reward) is stopped", [writer(state="stopped")], LACKING),
        ("closed", "Nobody writes 'y' now: process 9", [writer(state="closed", heard_s=90.0)], LACKING),
        ("stuck", "has been in get_samples for 90 s", [writer(calls=[call("get_samples", 89.5)])], LACKING),
        ("gone", "of 'step-1'", [], LACKING),
        ("leased", "'a' to process 8 on h (old)", [client("old", pid=8, state="silent")], LEASED),
        ("filter", "(v >= 7). The newest of them, 'd', has v 6.", [ENDED], PASSED),
        ("group", "'q17' has 3 of 4. 'q17_g3' was never put. Nobody puts new samples now", [ENDED], GROUPS),
        ("short", "510 of 512 samples came, and no more will.", [ENDED], {"num_samples": 512, "held": 510}),
        ("short", "It did not call finish_partition.", [ENDED], {}),
        ("full", "All tasks have consumed all samples", [], {}),
    ],
)
def test_a_fault_names_its_culprit(cause, said, who, facts):
    trainer, facts = TRAINER, dict(facts)
    found = partition(**{name: facts.pop(name) for name in ("num_samples", "held") if name in facts})
    if cause == "filter":
        trainer = client("trainer", claims(tag_filter={"v": (">=", 7)}))
    elif cause == "group":
        found = replace(found, info=replace(found.info, grpo_group_size=4))
    elif said == "of 'step-1'":  # it wrote the field in the partition of the step before
        who, said = [client("reward", puts("y", partition="step-1"), state="silent")], "(reward) was last heard of"
        cause = "silent"
    elif cause == "full":
        who = [client("rollout", puts("x"), calls=[call("put_samples", 9.0)])]
        facts = {**FULL, "patience_s": 5.0}
        counts = replace(found.tasks["train"], num_consumed=4)
        found = replace(found, tasks={"train": counts})
    told = verdict(found, trainer, *who, **facts)
    assert (told.state, told.cause) == ("starved", cause), told
    assert said in told.text
    assert told.waited_s == 30.5


def test_the_cause_is_that_of_the_stage_before():
    """The trainer waits for rewards, whose process waits for samples, whose process is gone."""
    found = partition(tasks=("train", "score"))
    reward = client("reward", puts("y"), claims("score"), pid=9)
    told = verdict(found, TRAINER, reward, ENDED, others={"score": Shortfall()}, **LACKING)
    assert (told.state, told.cause) == ("starved", "short")
    assert "(reward) writes 'y', and waits for samples of its task 'score' itself." in told.text
    assert told.culprit == "process 7 on h (rollout)"


def test_a_field_that_nobody_has_written_yet_because_of_another_stage():
    found = partition(tasks=("train", "score"))
    reward = client("reward", claims("score"), pid=9, state="silent")
    told = verdict(found, TRAINER, reward, **LACKING)
    assert (told.state, told.cause, told.culprit) == ("starved", "silent", "process 9 on h (reward)")
    assert "The task 'score' is starved" in told.text


def test_a_full_store_names_the_task_that_does_not_consume():
    found = partition(tasks=("train", "judge"))
    judged = client("judge", claims("judge"), pid=9, state="silent")
    blocked = client("rollout", puts("x"), calls=[call("put_samples", 9.0)])
    told = verdict(found, TRAINER, judged, blocked, **FULL)
    assert (told.state, told.cause, told.culprit) == ("starved", "full", "process 9 on h (judge)")
    assert "The store is full (90 of 100 bytes). process 6 on h (rollout) puts new samples, and waits" in told.text


def test_samples_that_are_evicted():
    evicting = client("buffer", puts("x"), replace(puts(), operation="clear_samples"), pid=9)
    found = partition(held=1, cleared=40)
    trainer = client("trainer", claims(num_samples=8, ended_s=400.0, waits_s=400.0))
    assert verdict(found, client("trainer", claims(num_samples=8, waits_s=90.0)), evicting).state == "waits"
    longer_ago = (
        client("trainer", claims(waits_s=400.0)),
        client("r", replace(puts(ended_s=500.0), operation="clear_samples")),
    )
    assert verdict(found, *longer_ago).cause != "evicted"  # an earlier trainer may have been given them
    told = verdict(found, trainer, evicting)
    assert (told.state, told.cause) == ("starved", "evicted")
    assert "32 samples of 41 were cleared by process 9 on h (buffer) before they were given to it" in told.text


@pytest.mark.parametrize(
    ("said", "who", "facts"),
    [
        ("(reward) writes 'y'. It is alive, and last did so 2 s ago.", [writer()], LACKING),
        ("has not done so yet", [client("r", puts("y", ended_s=None))], LACKING),
        ("last did so 540 s ago", [client("r", puts("y", ended_s=539.5, gap_s=0.0))], LACKING),
        ("last did so 540 s ago", [client("r", puts("y", ended_s=539.5, gap_s=200.0))], LACKING),
        ("is alive", [writer(), client("r2", puts("y"), state="silent")], LACKING),
        ("is alive", [writer(state="closed"), client("r2", puts("y"))], LACKING),
        ("process 8 on h (new) is alive", [client("new", pid=8)], LEASED),
        ("process 8 on h for another 9 s", [], LEASED),
        ("No client that is known has written it.", [], LACKING),
        ("4 samples do not pass its filter", [ROLLOUT], PASSED),
        ("'q17_g3' was never put. process 7", [ROLLOUT], GROUPS),
        ("4 samples came. process 7 on h (rollout) puts new samples.", [ROLLOUT], {}),
        ("No client that is known has put any", [], {}),
    ],
)
def test_what_may_be_merely_slow_is_not_called_starved(said, who, facts):
    found = partition(group=4) if facts is GROUPS else partition()
    told = verdict(found, TRAINER, *who, **facts)
    assert told.state == "waits", told
    assert said in told.text


@pytest.mark.parametrize("facts", [PASSED, GROUPS, LACKING], ids=["filter", "group", "unwritten"])
def test_what_might_be_slow_is_a_fault_after_a_while(facts):
    found = partition(group=4) if facts is GROUPS else partition()
    trainer = client("trainer", claims(waits_s=400.0))
    assert verdict(found, trainer, ROLLOUT, **facts).state == "starved"
    given = client("trainer", claims(waits_s=400.0, ended_s=5.0))  # another thread of it was given samples
    assert verdict(found, given, ROLLOUT, **facts).state == "waits"
    assert verdict(found, trainer, ROLLOUT, **facts, patience_s=90.0).state == "waits"


def test_tasks_that_move():
    assert verdict(partition(), TRAINER, ready=4, short=Shortfall()).state == "moves"
    works = client("trainer", claims(waits_s=None, ended_s=20.0), heard_s=0.0)
    told = verdict(partition(), works)
    assert told.state == "moves"
    assert told.text == "process 6 on h (trainer) works on it, and was last given samples 20 s ago."
    reads = client("trainer", claims(waits_s=None), calls=[call("get_samples", 90.0)])
    assert verdict(partition(), reads).cause == "stuck"


def test_tasks_for_which_nobody_claims():
    found = partition(tasks=("train", "trian", "train-1"), oldest_s=500.0)
    assert verdict(found, ROLLOUT).state == "idle"
    told = verdict(found, TRAINER, task="trian")
    assert (told.state, told.cause, told.backlog) == ("starved", "name", 4)
    assert verdict(found, TRAINER, task="train-1").state == "starved"
    numbered = client("trainer", claims("train-2"))
    assert verdict(found, numbered, task="train-1").state == "idle"
    young = partition(tasks=("train", "trian"), oldest_s=90.0)
    assert verdict(young, TRAINER, task="trian").state == "idle"
    assert verdict(found, TRAINER, client("new"), task="trian").state == "idle"  # it may be the one
    lettered = partition(tasks=("train_a", "train_b"))
    assert verdict(lettered, client("trainer", claims("train_a")), task="train_b").state == "idle"
    gone = verdict(found, replace(TRAINER, state="silent"))
    assert (gone.state, gone.cause) == ("starved", "silent")
    assert gone.text.startswith("4 samples of it are left, and nobody claims them: process 6 on h (trainer) was last")


def test_a_partition_that_is_done():
    found = partition(held=0, cleared=8, num_samples=8)
    assert verdict(found).state == "done"
    closed = client("trainer", claims(waits_s=None), state="closed")
    assert verdict(partition(held=0, cleared=8), closed).state == "idle"


def test_the_question_of_a_task_is_what_it_waits_for_or_claimed_last():
    old, new = claims(fields=("x",), waits_s=None, began_s=9.0), claims(fields=("x", "y"), waits_s=None, began_s=1.0)
    drops = claims(fields=(), waits_s=None, began_s=0.5)
    assert question_of([client("t", old, drops, new)], "p", "train") == new
    waiting = replace(old, waits_s=3.0)
    assert question_of([client("t", waiting, drops, new)], "p", "train") == waiting
    assert question_of([client("t", old)], "p", "score") is None
    assert question_of([client("t", old)], "other", "train") is None


@pytest.mark.parametrize(("waits_s", "state"), [(90.0, "waits"), (400.0, "starved")])
def test_a_full_store_may_be_cleared_when_a_step_ends(waits_s, state):
    found = partition(held=4)
    found = replace(found, tasks={"train": replace(found.tasks["train"], num_consumed=4)})
    blocked = client("rollout", puts("x"), calls=[call("put_samples", 9.0)])
    waiting = client("trainer", claims(waits_s=waits_s))
    assert verdict(found, waiting, blocked, **FULL).state == state
    clears = client("other", claims("eval", waits_s=None, ended_s=80.0))  # it works on what it was given
    assert verdict(found, waiting, blocked, clears, **FULL).state == "waits"


@pytest.mark.parametrize("is_full", [False, True], ids=["unwritten", "full"])
def test_each_task_is_judged_a_few_times_however_many_wait_for_the_same(monkeypatch, is_full):
    judged = []
    real = verdicts._Judge._judged
    monkeypatch.setattr(verdicts._Judge, "_judged", lambda self, *task: judged.append(task) or real(self, *task))
    names = [f"task-{place}" for place in range(12)]
    waiting = [client(name, claims(name, waits_s=400.0), puts("x"), pid=place) for place, name in enumerate(names)]
    blocked = client("rollout", puts("x"), calls=[call("put_samples", 9.0)])
    short = Shortfall() if is_full else LACKING["short"]
    facts = Facts(
        partitions={"p": partition(tasks=names)},
        clients=[*waiting, blocked if is_full else ROLLOUT],
        answers={("p", name): Answer(num_ready=0, shortfall=short) for name in names},
        **(FULL if is_full else {}),
    )
    assert [each.state for each in judge(facts, [("p", name) for name in names])] == ["starved"] * len(names)
    assert len(judged) <= 3 * len(names)


def test_two_tasks_that_wait_for_each_other():
    first = client("first", claims("one"), puts("y"), pid=1)
    second = client("second", claims("two"), puts("z"), pid=2)
    found = partition(tasks=("one", "two"))
    lacks = Shortfall(num_lacking=4, missing_cells={"a": ("z",)})
    told = verdict(found, first, second, task="two", others={"one": lacks}, **LACKING)
    assert told.state == "waits"
    assert "writes 'y', and waits for samples of its task 'one' itself." in told.text


@pytest.mark.parametrize("fate", ["gone", "closed", "silent"])
def test_a_task_that_follows_and_ended_is_not_starved(fate):
    for followers, state in ((("copy",), "idle"), ((), "starved")):
        ended = client("dataplane", claims("copy"), state=fate, heard_s=90.0)
        told = verdict(partition(tasks=("copy", "export"), followers=followers), ended, task="copy")
        assert (told.state, told.cause) == (state, fate)


def test_who_closed_a_moment_ago_may_be_followed_by_another():
    just = replace(ENDED, heard_s=0.2)
    for facts in ({}, LACKING, PASSED, LEASED):
        holder = client("old", pid=8, state="closed", heard_s=0.2)
        told = verdict(partition(), TRAINER, just, holder, writer(state="closed", heard_s=0.2), **facts)
        assert told.state == "waits", told
    again = client("rollout", pid=70)
    assert verdict(partition(), TRAINER, ENDED, again).state == "waits"
    told = verdict(partition(), replace(TRAINER, role="rollout"), ENDED)  # the trainer itself is not another one
    assert (told.state, told.cause) == ("starved", "short")
    closed = client("trainer", claims(waits_s=None), state="closed", heard_s=0.2)
    assert verdict(partition(), closed).state == "idle"
    assert verdict(partition(), replace(closed, heard_s=90.0)).state == "starved"
    assert verdict(partition(), replace(closed, heard_s=90.0), client("trainer", pid=70)).state == "idle"


def test_a_producer_that_is_quiet():
    """It is silent if it is so for much longer than ever, whatever it put, and the task is late."""
    late = client("trainer", claims(waits_s=400.0))
    told = verdict(partition(), late, client("r", puts("y", ended_s=400.0), heard_s=0.0), **LACKING)
    assert (told.state, told.cause, told.culprit) == ("starved", "silent", "process 6 on h (r)")
    assert "It is alive, but last put samples 400 s ago; its longest pause was 2 s." in told.text
    straggler = client("r", puts("y", ended_s=90.0))
    assert verdict(partition(), client("trainer", claims(waits_s=90.0)), straggler, **LACKING).state == "waits"
    step_before = puts("y", ended_s=500.0, gap_s=90.0, partition="step-1")
    assert verdict(partition(), late, client("r", puts("y", ended_s=400.0), step_before), **LACKING).state == "waits"
    elsewhere = puts("y", ended_s=1.0, partition="step-1")
    assert verdict(partition(), late, client("r", puts("y", ended_s=400.0), elsewhere), **LACKING).state == "waits"


def test_a_start_may_take_any_time():
    """Who has put nothing yet may still do so, and so may who is not listed."""
    late = client("trainer", claims(waits_s=4000.0))
    none, some = partition(held=0), partition(held=31)
    loading = client("new", pid=8)
    for facts in ({}, LACKING):
        assert verdict(none, late, loading, **facts).state == "waits"
        assert verdict(some, late, loading, ROLLOUT, **facts).state == "waits"
        told = verdict(some, late, replace(loading, state="silent"), **facts)
        assert (told.state, told.cause) == ("starved", "unwritten")
        told = verdict(some, late, replace(late, client_id="rank 1"), **facts)  # all wait for the same
        assert (told.state, told.cause) == ("starved", "unwritten")
        assert verdict(some, replace(late, client_id=""), **facts).state == "waits"  # nobody announces itself


def test_a_field_whose_name_is_almost_the_same():
    found = partition()
    found = replace(found, specs={"log_probs": found.specs["x"]}, info=replace(found.info, fields=("ref_log_probs",)))
    short = Shortfall(num_lacking=4, missing_cells={"a": ("ref_log_prob",)})
    late = client("trainer", claims(waits_s=400.0))
    told = verdict(found, late, ROLLOUT, short=short)
    assert (told.state, told.cause) == ("starved", "name")
    assert "Nobody writes it, but 'log_probs' is written" in told.text  # not one that is only registered
    for clients in ((TRAINER, ROLLOUT), (late, ROLLOUT, client("ref"))):
        told = verdict(found, *clients, short=short)
        assert (told.state, told.cause) == ("waits", "unwritten")


@pytest.mark.parametrize(
    ("held_bytes", "blocked", "is_full"),
    [
        (90, call("put_samples", 9.0), True),
        (60, call("put_samples", 9.0), False),
        (60, call("put_samples", 90.0), True),  # of a large sample
        (40, call("put_samples", 90.0), False),
        (90, call("put_samples", 0.1), False),  # under way when it announced itself 9 s ago
    ],
)
def test_a_put_that_waits_for_room(held_bytes, blocked, is_full):
    rollout = client("rollout", puts("x"), calls=[blocked], heard_s=9.0)
    told = verdict(partition(), TRAINER, rollout, capacity_bytes=100, held_bytes=held_bytes)
    assert (told.cause == "full") is is_full, told
    assert verdicts.room_is_wanted([rollout]) is (blocked.running_s > 1)


@pytest.mark.parametrize("waits_s", [1.0, None], ids=["in a loop", "polled"])
def test_a_task_that_is_claimed_again_and_again(waits_s):
    """It has waited since the first of the claims that got nothing."""
    dead = writer(state="gone")
    told = verdict(partition(), client("trainer", claims(waits_s=waits_s, unserved_s=200.0)), dead, **LACKING)
    assert (told.state, told.cause, told.waited_s) == ("starved", "gone", 200.5)
    late = claims(waits_s=waits_s, unserved_s=400.0, tag_filter={"v": (">", 6)})
    told = verdict(partition(), client("trainer", late), ROLLOUT, **PASSED)
    assert (told.state, told.cause) == ("starved", "filter")
    served = claims(waits_s=None, unserved_s=None)
    assert verdict(partition(), client("trainer", served), dead, **LACKING).state == "moves"
    asked_before = claims(waits_s=None, unserved_s=400.0, began_s=90.0)
    assert verdict(partition(), client("trainer", asked_before), dead, **LACKING).state == "moves"


def test_a_producer_is_in_a_phase():
    late = client("trainer", claims(waits_s=400.0))
    silent = generates(client("r", puts("y", ended_s=400.0), heard_s=0.5))
    told = verdict(partition(), late, silent, **LACKING)
    assert (told.state, told.cause) == ("starved", "silent")
    assert "It is alive, but silent in generate for 14 s: it last put samples 400 s ago; its longest" in told.text
    told = verdict(partition(), TRAINER, generates(writer()), **LACKING)
    assert (told.state, told.cause) == ("waits", "works")
    assert "It is alive in generate for 14 s, and last did so 2 s ago." in told.text
    told = verdict(partition(), TRAINER, generates(client("r", puts("y", ended_s=None))), **LACKING)
    assert "and has not done so yet: it is in generate for 14 s." in told.text
    told = verdict(partition(), TRAINER, generates(writer(state="gone", heard_s=20.0)), **LACKING)
    assert "(reward) is gone; it was last heard of 20 s ago, in generate." in told.text


def test_a_short_group_names_who_makes_it():
    found = partition(group=4)
    late = client("trainer", claims(waits_s=400.0))
    maker = generates(client("collector-2", puts("x"), pid=9), "q16", "q17")
    other = generates(client("collector-1", puts("x"), pid=8), "q18")
    told = verdict(found, late, ROLLOUT, other, maker, **GROUPS)
    assert (told.state, told.cause, told.culprit) == ("starved", "group", "process 9 on h (collector-2)")
    assert "'q17_g3' was never put. It is made by process 9 on h (collector-2) in generate for 14 s." in told.text
    gone = replace(maker, state="gone", heard_s=20.0)
    told = verdict(found, late, ROLLOUT, gone, **GROUPS)
    assert (told.cause, told.culprit) == ("group", "process 9 on h (collector-2)")
    assert "Its maker ended: process 9 on h (collector-2) is gone; it was last heard of 20 s ago, in gen" in told.text
    assert "process 7 on h (rollout) puts new samples. It is alive" in told.text
    told = verdict(found, TRAINER, gone, **GROUPS)
    assert told.state == "starved"
    assert "It was made by process 9 on h (collector-2). Nobody puts new samples now: process 9 on h" in told.text
    again = generates(client("collector-3", puts("x"), pid=10), "q17")
    assert verdict(found, late, ROLLOUT, gone, again, **GROUPS).culprit == "process 10 on h (collector-3)"
    for stranger in (other, generates(maker, "q17", partition="step-1")):
        told = verdict(found, late, ROLLOUT, stranger, **GROUPS)
        assert "made by" not in told.text
        assert told.culprit == "process 7 on h (rollout)"


def test_who_makes_a_group_may_still_put_it_though_all_others_ended():
    found, gone = partition(group=4), replace(ROLLOUT, state="gone")
    assert verdict(found, TRAINER, gone, **GROUPS).state == "starved"
    maker = generates(client("collector", pid=9), "q17")
    told = verdict(found, TRAINER, gone, maker, **GROUPS)
    assert (told.state, told.culprit) == ("waits", "process 9 on h (collector)")
    judged = client("judge", claims("judge"), pid=10, state="silent")
    blocked = replace(maker, calls=[call("put_samples", 9.0)])
    two = replace(partition(group=4, tasks=("train", "judge")))
    told = verdict(two, TRAINER, gone, judged, blocked, **GROUPS, **FULL)
    assert (told.state, told.culprit) == ("starved", "process 10 on h (judge)")


def test_who_holds_samples_and_waits_for_more_does_not_wait_for_these():
    held = Shortfall(num_leased=4, leased=(LeaseHolder(sample_id="a", holder="process 6 on h", left_s=9.0),))
    found = verdict(partition(), TRAINER, ENDED, short=held)
    assert found == verdict(partition(), TRAINER, ENDED)
    assert (found.state, found.cause) == ("starved", "short")
