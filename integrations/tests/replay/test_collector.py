"""Collectors: rollouts ahead of training, failures rolled back."""

import os
import threading

import pytest
from replaying import WAIT_S, answers, away_once, train_on_all, write

from dataplane_core.errors import BackendUnavailableError, InvalidRequestError, InvalidTypeError, OperationTimeoutError
from dataplane_integrations.errors import CollectorFailedError, RolloutAbortedError
from dataplane_integrations.replay import Collector, InOrderPolicy
from dataplane_integrations.rollout import RolloutReceipt
from dataplane_testkit._timing import Background, eventually


@pytest.mark.parametrize("as_receipt", [False, True])
def test_rows_that_the_rollout_actor_has_written_are_taken_as_they_are(make_buffer, client, as_receipt):
    buffer = make_buffer(num_prompts=4)

    def rollout(reservations):
        meta = write(client, reservations)
        meta.stamp_tags({"reward": [1.0] * meta.size})
        return RolloutReceipt(meta=meta) if as_receipt else meta

    with Collector(buffer, rollout):
        meta = buffer.select(2, timeout_s=WAIT_S)
    assert [tags["reward"] for tags in meta.tags or []] == [1.0] * 4


@pytest.mark.parametrize("writes", [False, True], ids=["collector writes", "rollout writes"])
def test_a_group_that_is_short_of_a_sample_names_the_collector_that_makes_it(make_buffer, client, writes):
    leave = threading.Event()

    def rollout(reservations):
        first = reservations[0].sample_ids[:1]
        client.put_samples(first, "replay", {"input_ids": [[1]], "input_lengths": [1]})
        leave.wait(WAIT_S)
        return write(client, reservations) if writes else answers(reservations)

    with Collector(make_buffer(num_prompts=1), rollout, client=None if writes else client):
        waiting = Background(lambda: client.claim_meta("replay", "train", ["input_ids"], 2, timeout_s=600.0))
        said = f"'v0_p0_g1' was never put. It is made by process {os.getpid()} on "
        eventually(lambda: said in client.why("replay")[0].text, WAIT_S, "a verdict that names who makes the group")
        assert ") in generate for " in client.why("replay")[0].text
        leave.set()
        assert waiting.result().sample_ids == ["v0_p0_g0", "v0_p0_g1"]
    assert "in generate" not in client.why("replay")[0].text


def test_a_rollout_that_fails_half_way_leaves_no_rows_and_its_prompt_comes_again(make_buffer, client, held):
    buffer = make_buffer(num_prompts=6)
    failed: list[str] = []
    seen: list[list[str]] = []

    def rollout(reservations):
        (each,) = reservations
        if each.prompt in (1, 4) and not each.attempt:
            client.put_samples(each.sample_ids[:1], "replay", tags=[each.tags])  # the first answer is written
            failed.append(each.group)
            raise RuntimeError("out of memory")
        seen.append([sample_id for sample_id in held() if sample_id.rpartition("_g")[0] in failed])
        return write(client, reservations)

    with Collector(buffer, rollout) as collector:
        assert sorted(train_on_all(buffer)) == list(range(6))
    assert len(failed) == 2
    assert not any(seen)
    counts = collector.counts
    assert (counts.groups, counts.failures, str(counts.last_error)) == (6, 2, "out of memory")
    assert held() == []


@pytest.mark.parametrize(
    ("rollout", "options", "cause", "said"),
    [
        (lambda reservations: None, {"max_failures": 1}, InvalidTypeError, "the rollout returned NoneType"),
        (answers, {"groups_per_call": 5}, InvalidRequestError, "cannot go on: .* admits 4 to an empty buffer"),
    ],
)
def test_what_can_never_go_well_ends_the_collector(make_buffer, rollout, options, cause, said):
    collector = Collector(make_buffer(), rollout, **options)
    collector.start()
    with pytest.raises(CollectorFailedError, match=said) as info:
        collector.wait(WAIT_S)
    assert isinstance(info.value.__cause__, cause)


def test_a_last_smaller_call_fills_the_room(make_buffer, client):
    buffer = make_buffer(InOrderPolicy(max_staleness=0, groups_per_version=4), num_prompts=12)
    with Collector(buffer, answers, client=client, groups_per_call=3):
        assert train_on_all(buffer, 4) == list(range(12))


def test_numbers_that_make_no_sense_and_a_second_start_are_refused(make_buffer, client):
    buffer = make_buffer()
    with pytest.raises(InvalidRequestError, match="num_threads must be at least 1"):
        Collector(buffer, answers, num_threads=0)
    with Collector(buffer, answers, client=client) as collector, pytest.raises(InvalidRequestError, match="already"):
        collector.start()
    stopped = Collector(buffer, answers, client=client)
    stopped.stop()
    with pytest.raises(InvalidRequestError, match="stopped already"):
        stopped.start()


def test_a_rollout_that_hangs_is_not_waited_for_without_end(make_buffer, client):
    buffer = make_buffer()
    begun, go_on = threading.Event(), threading.Event()

    def rollout(reservations):
        begun.set()
        go_on.wait(WAIT_S)
        raise RuntimeError("interrupted")

    collector = Collector(buffer, rollout)
    collector.start()
    assert begun.wait(WAIT_S)
    with pytest.raises(OperationTimeoutError, match="1 threads still generate"), collector.quiet(timeout_s=0.05):
        pass
    with pytest.raises(OperationTimeoutError, match="did not stop"):
        collector.stop(timeout_s=0.05)
    go_on.set()
    collector.stop()


def test_a_store_that_is_away_for_a_while_costs_a_retry_only(make_buffer, client, monkeypatch):
    buffer = make_buffer(num_prompts=4)
    put, calls = client.put_samples, []

    def lossy(*args, **kwargs):
        meta = put(*args, **kwargs)
        calls.extend([meta] if args[1] == "replay" else [])
        if len(calls) == 2 and args[1] == "replay":
            raise BackendUnavailableError("the reply was lost")  # the write has happened
        return meta

    monkeypatch.setattr(client, "put_samples", lossy)
    with Collector(buffer, lambda reservations: write(client, reservations)):
        assert sorted(train_on_all(buffer)) == [0, 1, 2, 3]
    assert client.list_samples("replay").sample_ids == []


@pytest.mark.parametrize(("of", "call"), [("buffer", "reserve"), ("client", "clear_samples")])
def test_a_store_that_is_away_when_prompts_are_reserved_or_a_rollout_is_ended_costs_a_retry_only(
    make_buffer, client, held, monkeypatch, of, call
):
    buffer = make_buffer(num_prompts=4)

    def rollout(reservations):
        if reservations[0].group == "v0_p0":
            write(client, reservations)
            raise RolloutAbortedError("nobody wants it")
        return answers(reservations)

    monkeypatch.setattr("dataplane_integrations.replay._collector._LONGEST_PAUSE_S", 0.05)
    away_once(monkeypatch, {"buffer": buffer, "client": client}[of], call)
    with Collector(buffer, rollout, client=client) as collector:
        assert sorted(train_on_all(buffer)) == [0, 1, 2, 3]
    assert (collector.counts.groups, collector.counts.failures) == (4, 1)
    assert held() == []


def test_a_write_that_happens_after_it_was_given_up_leaves_no_rows(make_buffer, client, held, monkeypatch):
    buffer = make_buffer(num_prompts=4)
    put, late = client.put_samples, []

    def slow(*args, **kwargs):
        if args[1] != "replay":
            return put(*args, **kwargs)
        if not late:
            late.append((args, kwargs))
            raise OperationTimeoutError("no answer")
        if len(late) == 1:
            late.append(put(*late[0][0], **late[0][1]).sample_ids)
        return put(*args, **kwargs)

    monkeypatch.setattr(client, "put_samples", slow)
    with Collector(buffer, lambda reservations: write(client, reservations)):
        assert sorted(train_on_all(buffer)) == [0, 1, 2, 3]
    assert late[1] == ["v0_p0_g0", "v0_p0_g1"]
    assert held() == []


def test_rollouts_of_several_rows_are_trained_on_once_and_those_that_failed_left_out(make_buffer, client, held):
    client.register_partition("replay", ["x"], None, ["train"], 2, rollouts=True)
    buffer = make_buffer(num_prompts=9)

    def rollout(reservations):
        metas = []
        for each in reservations:
            rows = [f"{answer}/{number}" for answer in each.sample_ids for number in range(2)]
            fails, tags = rows[3:] if each.prompt % 2 else [], {**each.tags, "rollout_rows": 2}
            written = client.put_samples(rows[: 4 - len(fails)], "replay", {"x": [each.prompt] * (4 - len(fails))})
            if each.prompt == 4 and not each.attempt:
                raise RuntimeError("its engine is gone")
            if each.prompt == 7 and not each.attempt:
                continue  # a commit without any answer of a group is refused
            whole = written.slice(0, 2 if fails else 4)
            whole.stamp_tags({name: [value] * whole.size for name, value in tags.items()})
            client.seal(dict.fromkeys(each.sample_ids[: whole.size // 2], 2), "replay", ends_groups=True)
            metas.append(whole)
        return metas[0].concat(*metas[1:])

    prompts, rows = [], []
    with Collector(buffer, rollout, groups_per_call=2) as collector:
        while (meta := buffer.select(2, timeout_s=WAIT_S)).size:
            xs = client.get_data(meta, ["x"])["x"].tolist()
            prompts += dict.fromkeys(xs)
            rows += [(x, sample_id[-4:]) for x, sample_id in zip(xs, meta.sample_ids, strict=True)]
            buffer.consume(meta)
            buffer.set_weight_version(buffer.weight_version + 1)
        collector.wait()
    assert sorted(prompts) == list(range(9))
    both = ["g0/0", "g0/1", "g1/0", "g1/1"]
    assert sorted(rows) == [(prompt, name) for prompt in range(9) for name in (both[:2] if prompt % 2 else both)]
    assert held() == []
