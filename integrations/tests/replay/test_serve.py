"""Collectors outside the trainer: `serve`, and what a trainer that is elsewhere sees of them."""

import threading
from contextlib import closing

import pytest
import torch
from replaying import WAIT_S, answers, away_once, prompts_of, write

from dataplane_core.errors import BackendUnavailableError
from dataplane_integrations.errors import CollectorFailedError, ReplayTimeoutError, RolloutAbortedError
from dataplane_integrations.replay import Collector, InOrderPolicy, PromptSource, ReplayBuffer, serve
from dataplane_testkit._timing import Background


@pytest.fixture
def source(make_buffer, client):
    """For a collector outside the trainer."""
    with closing(PromptSource(client, "replay")) as opened:
        yield opened


def test_processes_that_come_before_the_trainer_make_all_prompts_together(make_buffer, client):
    processes = [Background(lambda name=name: serve(client, "replay", answers, name=name)) for name in "ab"]
    buffer = make_buffer(InOrderPolicy(max_staleness=1, groups_per_version=4), num_prompts=30)
    trained: list[int] = []
    for step, meta in enumerate(buffer.batches(4, timeout_s=WAIT_S)):
        assert {step - tags["weight_version"] for tags in meta.tags or []} <= {0, 1}
        trained += prompts_of(meta)
        buffer.set_weight_version(step + 1)
    assert trained == list(range(30))
    assert buffer.finished
    for process in processes:
        process.result(WAIT_S)
    assert client.list_samples("replay").size == 0


def test_a_loop_that_is_left_puts_its_groups_back(make_buffer, fill):
    buffer = make_buffer()
    fill(buffer, 4)
    for number, _ in enumerate(buffer.batches(2)):
        if number == 1:
            break
    assert buffer.counts.trained == 2
    assert len(buffer.view().groups) == 2
    assert buffer.select(2, timeout_s=0).size == 4


def test_a_process_ends_when_the_trainer_drops_the_prompts(make_buffer, client):
    buffer = make_buffer()
    process = Background(lambda: serve(client, "replay", answers))
    buffer.select(4, timeout_s=WAIT_S)
    client.clear_samples(None, buffer.prompts_id)
    process.result(WAIT_S)


def test_a_trainer_learns_why_a_process_gave_up_once_no_other_runs(make_buffer, client):
    buffer: ReplayBuffer = make_buffer()

    def in_vain(reservations):
        raise RolloutAbortedError("not needed")

    def rollout(reservations):
        raise OSError("no GPU")

    with Collector(buffer, in_vain, name="stopped", num_threads=2):
        pass
    process = Background(lambda: serve(client, "replay", rollout, max_failures=3))
    with pytest.raises(CollectorFailedError, match=r"gave up after 3 failures .* OSError: no GPU"):
        buffer.select(1, timeout_s=WAIT_S)
    with pytest.raises(CollectorFailedError, match=r"gave up after 3 failures .* OSError: no GPU") as info:
        process.result(WAIT_S)
    assert isinstance(info.value.__cause__, OSError)
    assert not buffer.view().groups


@pytest.mark.parametrize("max_attempts", [None, 3])
def test_a_note_that_comes_after_its_prompt_was_removed_is_no_prompt(make_buffer, source, client, max_attempts):
    buffer = make_buffer(InOrderPolicy(max_staleness=0, groups_per_version=1), max_attempts=max_attempts)
    client.put_samples(["p99"], buffer.prompts_id, tags=[{"ended": "given up", "failures": 1}])
    assert [reservation.prompt for reservation in source.reserve(1, timeout_s=0)] == [0]
    with pytest.raises(ReplayTimeoutError):
        source.reserve(1, timeout_s=0)


@pytest.mark.parametrize("started", [1, 2])
@pytest.mark.parametrize("comes", ["before the first row", "before the commit", "after the commit"])
def test_a_late_note_of_a_collector_that_stood_still_costs_no_answers_of_another(
    make_buffer, source, client, started, comes
):
    buffer = make_buffer(InOrderPolicy(max_staleness=1, groups_per_version=2), num_prompts=1)
    for _ in range(started - 1):
        source.abandon(source.reserve())
    buffer.set_weight_version(1)
    (reservation,) = source.reserve()

    def note(point):  # of one that had claimed the prompt before, with the weights of then
        if point == comes:
            client.put_samples([reservation.row], buffer.prompts_id, tags=[{"attempt": 1, "weight_version": 0}])
        buffer.view()

    note("before the first row")
    meta = write(client, [reservation])
    note("before the commit")
    assert source.to_abort([reservation]) == []
    source.commit([reservation], meta)
    note("after the commit")
    selected, columns = buffer.take(1, timeout_s=0)
    assert selected.sample_ids == list(reservation.sample_ids)
    assert columns["input_ids"][:, 0].tolist() == [0, 0]
    assert client.list_samples("replay").size == 0


def test_a_prompt_that_could_not_be_given_back_stays_claimed_until_the_store_answers(
    make_buffer, source, client, monkeypatch
):
    make_buffer(num_prompts=1)
    reservations = source.reserve()
    away_once(monkeypatch, client, "list_samples")
    with pytest.raises(BackendUnavailableError):
        source.abandon(reservations, failed=True)
    with pytest.raises(ReplayTimeoutError):
        source.reserve(timeout_s=0)
    source.abandon(reservations, failed=True)
    assert [reservation.group for reservation in source.reserve(timeout_s=0)] == ["v0_p0r1"]


def test_a_prompt_is_put_once_even_if_the_answer_is_lost(make_buffer, source, client, commit, fill, monkeypatch):
    buffer, put = make_buffer(requeue_evicted=True), client.put_samples
    fill(buffer, 2)

    def put_unheard(ids, *args, **options):
        put(ids, *args, **options)
        if ids[0].startswith("p"):
            raise BackendUnavailableError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(client, "put_samples", put_unheard)
        with pytest.raises(BackendUnavailableError):
            buffer.set_weight_version(2)
    started = source.reserve(4, at_least=1, timeout_s=0)
    buffer.view()
    commit(source, started)
    groups = {group.group: group.ready for group in buffer.view().groups}
    assert all(groups[reservation.group] for reservation in started)


def test_leases_are_renewed_while_a_rollout_runs(make_buffer, source, client, commit, monkeypatch):
    monkeypatch.setattr("dataplane_integrations.replay._prompts.RENEWED_AFTER", 0.001)
    buffer = make_buffer()
    renewed, renew = threading.Semaphore(0), client.renew

    def counted(*args):
        renew(*args)
        renewed.release()

    (reservation,) = source.reserve()
    monkeypatch.setattr(client, "renew", counted)
    for _ in range(6):
        assert renewed.acquire(timeout=WAIT_S)
    commit(source, [reservation])
    assert buffer.select(1, timeout_s=0).sample_ids == list(reservation.sample_ids)


def test_without_a_trainer_one_waits_as_long_as_one_says(source, client):
    with pytest.raises(ReplayTimeoutError, match="no trainer has begun a run on 'replay'"):
        source.wait_for_trainer(0)
    client.register_partition(source.prompts_id, [], None, ["rollout"])  # one begins just now
    with pytest.raises(ReplayTimeoutError, match="no trainer has begun a run on 'replay' yet"):
        source.reserve(timeout_s=0)


def test_rows_of_a_failed_call_are_cleared_while_a_trainer_begins_anew(make_buffer, source, client):
    buffer = make_buffer()
    (reservation,) = source.reserve(1)
    client.put_samples(reservation.sample_ids[:1], "replay", {"x": torch.zeros(1)})
    client.clear_samples(["run"], buffer.prompts_id)
    source.abandon([reservation], failed=True)
    assert client.list_samples("replay").size == 0
