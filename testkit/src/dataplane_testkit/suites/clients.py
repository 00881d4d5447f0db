"""What a client is given, waits for, is told and leaves behind. What a full store refuses is in "machine"."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from msgspec.structs import replace

from dataplane_core.client import DataPlaneClient
from dataplane_core.connecting import Bootstrap
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClaimTimeoutError,
    ClientClosedError,
    OperationTimeoutError,
    RoomTimeoutError,
)
from dataplane_core.spec import CallInfo, Capability, ClientInfo, PhaseInfo, Scope, WorkInfo
from dataplane_testkit import _workers
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._store import BOUNDED_BYTES, Store, Suite, no_polls, not_run
from dataplane_testkit._timing import PROMPT_S, STARTS_S, Background, bounded, eventually
from dataplane_testkit._workers import read_items

#: Seconds of a lease that does not end during a test, of one that a test waits for, and of a timeout.
_LONG_S, _SHORT_S, _TIMEOUT_S = 600.0, 0.1, 0.05


def _gives(waiting: Background, *sample_ids: str) -> None:
    assert waiting.result(what="a claim that can be answered").sample_ids == list(sample_ids)


class ClaimSuite(Suite, chapter="claims"):
    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.filled(1)
        for all_or_nothing in (True, False):
            about = {"task_name": "train", "required_fields": ["y"], "batch_size": 2, "all_or_nothing": all_or_nothing}
            ask = partial(Hooks(store.client, 600.0).ask, "claim", partition, **about)
            assert list(bounded(ask, what="a claim hook with nothing to give").sample_ids) == []

    def test_the_end_is_the_same_for_all_ranks(self, store: Store) -> None:
        partition = store.filled(2, num_samples=2)
        claim = partial(store.claim, partition, 1, lease_s=_LONG_S, dp_size=2, blocking=True, timeout_s=30.0)
        first = [claim(dp_rank=rank, batch_index=0) for rank in (0, 1)]
        assert [meta.sample_ids for meta in first] == [["s0"], ["s1"]]
        assert claim(dp_rank=0, batch_index=1).size == 0
        store.client.nack(first[0])
        assert claim(dp_rank=1, batch_index=1).size == claim(dp_rank=0, batch_index=1).size == 0
        assert [claim(dp_rank=rank, batch_index=2).sample_ids for rank in (1, 0)] == [[], ["s0"]]

    def test_incomplete_groups_are_not_given(self, store: Store) -> None:
        partition = store.filled(["z_g1", "a_g0", "k_g0", "k_g1"], "x", "y", grpo_group_size=2)
        store.put(partition, ["z_g1", "a_g0", "k_g0"], y=torch.zeros(3))
        assert store.claim(partition, 8, "x", "y").sample_ids == []
        store.put(partition, ["z_g0"], x=torch.arange(1), y=torch.zeros(1))
        assert sorted(store.claim(partition, 8, "x", "y").sample_ids) == ["z_g0", "z_g1"]
        assert store.claim(partition, 8).sample_ids == ["k_g0", "k_g1"]

    def test_claims_end_at_their_limits(self, store: Store) -> None:
        tags = [{"input_lengths": length} for length in (5, 4, 3, 9, 1)]
        partition = store.filled(5, tags=tags)
        assert store.claim(partition, 9, blocking=True, max_tokens=9).sample_ids == ["s0", "s1"]
        assert store.claim(partition, 9, blocking=True, max_tokens=11, max_rows=1).sample_ids == ["s2"]
        assert store.claim(partition, 9, max_tokens=8).sample_ids == ["s3"], "one is more than the limit"
        waiting = store.waiting_claim(partition, 9, max_rows=2)
        store.put(partition, ["s5"], x=torch.arange(1))
        _gives(waiting, "s4", "s5")
        store.put(partition, ["a", "b", "c"], [{"input_lengths": 1}, {}, {"input_lengths": 1}], x=torch.arange(3))
        given = [store.claim(partition, 9, max_tokens=9).sample_ids for _ in range(3)]
        assert given == [["a"], ["b"], ["c"]], "a sample of unknown length may have any"

    def test_samples_match_the_filter(self, store: Store) -> None:
        tag_filter = {"version": (">=", 7), "split": "a"}
        tags: list[dict[str, Any]] = [{"version": 7, "split": "a"}, {"version": 6, "split": "a"}, {}, {"version": 8}]
        partition = store.filled(4, tags=tags)
        if store.declares(Capability.LISTING):
            assert store.client.list_samples(partition, tag_filter).sample_ids == ["s0"]
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 9, tag_filter=tag_filter).sample_ids == ["s0"]
            assert store.claim(partition, 9).sample_ids == ["s1", "s2", "s3"], "samples that did not match are gone"

    def test_a_claim_that_waits_hears_when_leases_end(self, store: Store) -> None:
        with no_polls(store.client, but_for_leases=True):
            for lease_s in (_SHORT_S, _LONG_S):
                partition = store.filled(1)
                waiting = store.waiting_claim(partition, 2)
                held = store.claim(partition, 1, lease_s=lease_s)
                if lease_s == _LONG_S:
                    store.client.renew(held, _SHORT_S)
                store.put(partition, ["s1"], x=torch.arange(1))
                _gives(waiting, "s0", "s1")

    def test_claims_with_many_filters_are_woken_when_they_need_not_wait(self, store: Store) -> None:
        partition = store.filled(["a"], "x", "y", num_samples=1, tags=[{"version": -1}])
        filters = [{"version": ("!=", number)} for number in range(24)]
        with no_polls(store.client):
            claims = [store.waiting_claim(partition, 1, "y", tag_filter=tag_filter) for tag_filter in filters]
            store.client.clear_samples(["a"], partition)
            for claim in claims:
                _gives(claim)

    def test_only_as_many_are_woken_as_there_are_samples_for(self, store: Store) -> None:
        partition = store.register("x")
        with no_polls(store.client) as asked:
            with store.refusal(ClaimTimeoutError):  # this claim is to be woken no more
                store.claim(partition, 1, blocking=True, timeout_s=_TIMEOUT_S)
            asked.clear()
            claims = [store.waiting_claim(partition, 1) for _ in range(8)]
            for number, sample_id in enumerate(ids(8), start=1):
                store.put(partition, [sample_id], x=torch.zeros(1))
                has_ended = partial(lambda left: sum(claim.running for claim in claims) == left, 8 - number)
                eventually(has_ended, what="the end of one claim")
            assert len(asked) == 8 + 8, f"8 claims that 8 puts could answer one by one asked {len(asked)} times"
        assert sorted(claim.result().sample_ids[0] for claim in claims) == ids(8)

    def test_a_claim_of_a_killed_process_does_not_stop_the_next(self, store: Store, tmp_path: Path) -> None:
        partition = store.register("x")
        with no_polls(store.client):
            worker = store.new_worker()
            try:
                worker.wait_ready()
                worker.start(_workers.claim_and_tell, partition, tmp_path / "asked")
                # in a process that has just started, on a loaded machine
                asked = (tmp_path / "asked").exists
                eventually(asked, STARTS_S, "the first question of a claim in another process")
                claim = store.waiting_claim(partition, 1)
                worker.kill()
            finally:
                worker.close()
            # a store may notice the end only after the calls that come with it
            store.client.check_consumption_status(partition, ["train"])
            store.put(partition, ["a"], x=torch.zeros(1))
            _gives(claim, "a")


class RolloutSuite(Suite, chapter="rollouts"):
    def test_groups_of_rollouts_are_given_whole(self, store: Store) -> None:
        about: dict[str, Any] = {"grpo_group_size": 2, "rollouts": True, "tasks": ("train", "eval")}
        partition = store.filled(["a_g0/0", "b_g0/0", "a_g1/0"], **about)
        a, b = ["a_g0/0", "a_g0/1", "a_g1/0"], ["b_g0/0", "b_g1/0", "b_g1/1"]
        store.client.seal({"a_g0": 2, "a_g1": 1}, partition)
        assert store.claim(partition, 9).size == 0, "a row that was sealed has no cells yet"
        waiting = store.waiting_claim(partition, 2)
        store.put(partition, ["a_g0/1", *b[1:]], [{}, {}, {"rollout_rows": 2}], x=torch.arange(3))
        assert store.claim(partition, 9, task="eval").sample_ids == a
        store.client.seal({"b_g0": 1}, partition)
        _gives(waiting, *a, *b)
        assert store.claim(partition, 9, task="eval").sample_ids == b

    def test_a_dead_rollout_costs_no_sibling(self, store: Store) -> None:
        names = ["q0_g0/0", "q0_g1/0", "q0_g2/0", "q0_g1/1"]
        partition = store.filled(names, grpo_group_size=4, rollouts=True)
        store.client.seal({"q0_g0": 1}, partition)
        waiting = store.waiting_claim(partition, 1)
        store.client.seal({"q0_g0": 1, "q0_g1": 2}, partition, ends_groups=True)
        _gives(waiting, "q0_g0/0", "q0_g1/0", "q0_g1/1")
        store.client.clear_samples(["q0_g2/0"], partition)
        with store.refusal(ValueError):
            store.put(partition, ["q0_g2/0"], [{"rollout_rows": 1}], x=torch.arange(1))
        store.put(partition, ["q0_g2/0"], x=torch.arange(1))
        assert store.claim(partition, 9).size == 0

    def test_what_is_sealed_stays_as_it_is(self, store: Store) -> None:
        partition = store.filled(["q0_g0/0", "q0_g1/0"], grpo_group_size=2, rollouts=True)
        store.client.seal({"q0_g0": 2}, partition)
        for name, tags in (
            ("q0_g0/2", {}),
            ("q0_g0/0", {"rollout_rows": 3}),
            ("q0_g0/0", {"rollout_rows": 1}),
            ("q0_g1/0", {"rollout_rows": "1"}),
            ("q0_g1/0", {"group_rollouts": 3}),
            ("q0_g1", {}),
            ("q0_g1/x", {}),
            ("q0_g1/" + "1" * 5000, {}),
        ):
            with store.refusal(ValueError):
                store.put(partition, [name], [tags], x=torch.arange(1))
            with store.refusal(ValueError):
                store.client.put_samples([name], partition, tags=[{**tags, "late": True}])
        store.client.seal({"q0_g0": 2}, partition)
        store.put(partition, ["q0_g0/1"], x=torch.arange(1))
        store.put(partition, ["q0_g1/0"], [{"rollout_rows": 1}])
        with store.refusal(ValueError):
            store.put(partition, ["q0_g2/0"], [{"rollout_rows": 1}], x=torch.arange(1))
        meta = store.claim(partition, 1)
        assert meta.sample_ids == ["q0_g0/0", "q0_g0/1", "q0_g1/0"]
        assert not any("late" in tags for tags in meta.tags or ()), "a put that was refused left its tags"

    def test_a_rollout_that_is_not_whole_may_begin_anew(self, store: Store) -> None:
        partition = store.filled(["a_g0/0", "a_g0/1", "b_g0/0", "b_g0/1"], grpo_group_size=1, rollouts=True)
        store.client.seal({"a_g0": 4, "b_g0": 2}, partition)
        store.client.clear_samples(["a_g0/3", "a_g0/0", "b_g0/1"], partition)
        store.put(partition, ["a_g0/0", "b_g0/1"], [{}, {"rollout_rows": 2}], x=torch.arange(2))
        store.client.seal({"a_g0": 2}, partition)
        assert store.claim(partition, 9).sample_ids == ["a_g0/1", "a_g0/0"]


#: The bounded store has room for eight rows of this size and some overhead of the engine, but not for twelve.
_ROW: Final = BOUNDED_BYTES // 10
_ROWS: Final = 8


def _columns(names: list[str]) -> dict[str, torch.Tensor]:
    """Rows that differ from all others: equal ones may be stored once."""
    return {"x": torch.randint(256, (len(names), _ROW), dtype=torch.uint8)}


def _put(client: DataPlaneClient, partition: str, names: list[str]) -> None:
    client.put_samples(names, partition, _columns(names))


def _full(store: Store) -> tuple[DataPlaneClient, str]:
    client = store.bounded("block")
    partition = store.register("x", client=client)
    _put(client, partition, ids(_ROWS))
    return client, partition


class CapacitySuite(Suite, chapter="capacity"):
    def test_what_is_dropped_leaves_the_engine(self, store: Store) -> None:
        partition, names, all_bytes = store.register("x"), ids(32), 32 * _ROW
        slack_bytes = 3 * all_bytes // 8  # what an engine may keep besides; less than half
        held = store.held()
        _put(store.client, partition, names)
        assert held() >= all_bytes - slack_bytes, f"it holds {held()} bytes more after a put of {all_bytes}"
        for dropped, left in ((names[::2], all_bytes // 2), (None, 0)):
            store.client.clear_samples(dropped, partition)
            # the engine may delete in the background
            is_dropped = partial(lambda most: held() <= most, left + slack_bytes)
            eventually(is_dropped, what=f"that the engine drops all but {left} bytes")

    def test_a_blocked_put_ends_by_its_deadline(self, store: Store) -> None:
        client, partition = _full(store)
        for timeout_s in (0.3, 2.0, 10.0):
            names = ids(4, f"n{timeout_s:g}-")  # a put that was not answered in time may yet be done
            put = partial(Hooks(client, timeout_s).put, partition, names, _columns(names))
            with pytest.raises(OperationTimeoutError) as caught:
                bounded(put, timeout_s + PROMPT_S, "a put that waits for room")
            if isinstance(caught.value, RoomTimeoutError):
                break  # else the store did not say in time that it is full, as on a machine that stands still
        assert isinstance(caught.value, RoomTimeoutError)
        assert caught.value.outcome == "not_done"
        client.clear_samples(ids(4), partition)
        with pytest.raises(KeyError):
            client.get_samples(names[:1], partition, ["x"])
        _put(client, partition, names)

    def test_a_large_put_is_not_starved_by_small_ones(self, store: Store) -> None:
        client, partition = _full(store)
        large = Background(lambda: _put(client, partition, ids(6, "large")))
        small: dict[str, Background] = {}
        held = ids(_ROWS)
        try:
            # each row that is cleared would make room for a small put. On a machine that stands still for a second some
            # of them may go first, but together they hold no more than the store
            while large.running and held and len(small) < 4 * _ROWS:
                client.clear_samples([held.pop(0)], partition)
                name = f"small{len(small)}"
                small[name] = Background(partial(_put, client, partition, [name]))
                with contextlib.suppress(AssertionError):  # the small put must wait
                    small[name].result(0.5)
                    held.append(name)
            large.result(what="a large put among small ones")
        finally:
            give_up = time.monotonic() + PROMPT_S
            while any(put.running for put in [large, *small.values()]) and time.monotonic() < give_up:
                client.clear_samples([*small, *ids(_ROWS), *ids(6, "large")], partition)
                time.sleep(0.01)
        for put in small.values():
            put.result(what="a small put")


def _client(**about: Any) -> ClientInfo:
    made = ClientInfo(client_id=uuid.uuid4().hex, host="a host", pid=7, role="a role", open_s=1.5)
    return replace(made, metrics_address="a host:8000", **about)


def _announce(store: Store, *clients: ClientInfo, ttl_s: float = _LONG_S) -> Any:
    """Announces clients. With a ``ttl_s`` of 0 they are closed: otherwise other tests count them for minutes."""
    return [store.hooks.ask("announce", client=client, ttl_s=ttl_s) for client in clients][-1]


class ListingSuite(Suite, chapter="listing"):
    def test_describe_counts_the_bytes_that_are_held(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ids(64), x=torch.zeros(64, 100, dtype=torch.float64))
        held_bytes = store.client.describe(partition).held_bytes
        assert 64 * 800 <= held_bytes <= 2 * 64 * 800
        for cleared in (48, 64):
            store.client.clear_samples(ids(cleared), partition)
            assert store.client.describe(partition).held_bytes == held_bytes * (64 - cleared) // 64

    def test_announced_clients_are_listed(self, store: Store) -> None:
        calls = [CallInfo(operation="claim_meta", partition_id="schritt 1 \u2192 \u2713", running_s=3.25)]
        phases = [PhaseInfo(name="generate \u2713", running_s=2.5, partition_id="p", groups=("q1", "q\u00e9"))]
        mine, other = _client(role="rollout: 1 \u00e9\n\x00", calls=calls, num_calls=1, phases=phases), _client()
        num_clients = _announce(store, replace(mine, calls=[], num_calls=0), other, mine)
        assert num_clients >= 2, "announce does not say how many clients there are"
        for hooks in (store.hooks, Hooks(store.same_store_client())):
            listed = {client.client_id: client for client in hooks.ask("list_clients", ended=False)}
            assert other.client_id in listed
            client = listed[mine.client_id]
            assert 0.0 <= client.heard_s < _LONG_S
            assert list(client.calls) == calls
            assert [replace(phase, groups=tuple(phase.groups)) for phase in client.phases] == phases
            assert replace(client, heard_s=0.0, calls=calls, work=(), phases=phases) == mine
        _announce(store, mine, other, ttl_s=0.0)

    def test_clients_that_ended_are_listed_if_asked_for(self, store: Store) -> None:
        claim = WorkInfo(operation="claim_meta", partition_id="p", fields=("x",), tag_filter={"v": (">=", 7)})
        closed, silent, back, other = _client(), _client(work=[claim]), _client(), _client()
        _announce(store, closed, back, other)
        _announce(store, closed, closed, back, _client(), ttl_s=0.0)
        _announce(store, silent, ttl_s=0.3)
        _announce(store, back)
        made = {client.client_id for client in (closed, silent, back, other)}

        def listed(ended: bool) -> Any:
            return store.hooks.ask("list_clients", ended=ended)

        def states(ended: bool) -> dict[str, str]:
            return {client.client_id: client.state for client in listed(ended) if client.client_id in made}

        is_open = {back.client_id: "open", other.client_id: "open"}
        eventually(lambda: states(False) == is_open, what="that a silent client is not listed, and others are")
        assert states(True) == {closed.client_id: "closed", silent.client_id: "silent", **is_open}
        (client,) = (client for client in listed(True) if client.client_id == silent.client_id)
        assert [replace(work, fields=tuple(work.fields)) for work in client.work] == [claim]
        _announce(store, back, other, ttl_s=0.0)

    def test_units_are_listed_with_the_rows_that_they_hold(self, store: Store) -> None:
        partition = store.register("x")

        def held(client: Any) -> tuple[int, int]:
            units = client.list_units()
            assert {unit.state for unit in units} == {"serving"}
            assert len({unit.name for unit in units}) == len(units)
            return sum(unit.num_rows for unit in units), sum(unit.size_bytes for unit in units)

        before = held(store.client)
        store.put(partition, ids(64), x=torch.zeros(64, 100, dtype=torch.float64))
        rows, size_bytes = held(store.client)
        assert (rows - before[0], size_bytes - before[1]) == (64, 64 * 800)
        assert held(store.same_store_client()) == (rows, size_bytes)
        store.client.clear_samples(None, partition)
        assert held(store.client) == before


#: Seconds that the owner of a store starts later than the client that attaches.
_LATE_S: Final = 0.3
#: Processes that connect at the same time.
_AT_ONCE: Final = 3


class LifecycleSuite(Suite, chapter="lifecycle"):
    def test_close_ends_waiting_claims(self, store: Store) -> None:
        client = store.another_client()
        waiting = store.waiting_claim(store.register("x", client=client), 1, client=client)
        bounded(client.close, what="close while a claim waits")
        with store.refusal(ClientClosedError):
            waiting.result(what="a claim on a client that was closed")

    def test_two_clients_live_side_by_side(self, store: Store) -> None:
        partition, other = store.filled(2), store.another_client()
        theirs = store.register("x", client=other)
        other.put_samples(ids(2), theirs, batch(2, x=torch.arange(2) + 5))
        assert other.get_samples(ids(2), theirs, ["x"])["x"].tolist() == [5, 6]
        other.close()
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1]
        store.put(partition, ["s2"], x=torch.tensor([2]))

    def test_a_fork_opens_a_client_of_its_own(self, store: Store) -> None:
        partition, options = store.filled(2), store.attach_options()

        def use() -> str:
            torch.set_num_threads(1)  # a fork does not have the parent's threads
            try:
                client = store.connect(options, bootstrap=False)
            except BackendUnavailableError as error:
                return str(error)
            return str(client.get_samples(ids(2), partition, ["x"])["x"].tolist())

        assert ("[0, 1]" if store.backend_class.opens_in_forks else "spawn") in _forked(use)

    def test_attaching_to_nothing_fails_clearly(self, store: Store) -> None:
        absent = store.case.absent_options(dict(store.options)) or not_run(
            "the author's class supplies no absent_options"
        )
        attach = partial(store.connect, absent, bootstrap=False, op_timeout_s=30.0, attach_wait_s=0.1)
        with store.refusal(ConnectionError):
            bounded(attach, 30 + 2 * PROMPT_S, "attaching to nothing")

    def test_an_attach_waits_for_an_owner_that_is_late(self, store: Store) -> None:
        fresh = store.case.isolated_options(store.attach_options(), "late")
        waiting = Background(lambda: store.connect(fresh, bootstrap=False, attach_wait_s=STARTS_S))
        time.sleep(_LATE_S)
        with store.connect(fresh) as owner, waiting.result(STARTS_S, "an early attach") as attached:
            partition = store.register("x", client=owner)
            owner.put_samples(["a"], partition, batch(1, x=torch.tensor([7])))
            assert attached.get_samples(["a"], partition, ["x"])["x"].tolist() == [7]
            owner.clear_samples(None, partition)

    def test_a_client_attaches_where_something_runs(self, store: Store) -> None:
        if store.scope is Scope.PROCESS:
            if store.backend_class.opens_anywhere:
                store.attached_client().close()
            else:
                with store.refusal(BackendUnavailableError):
                    store.connect(store.options, bootstrap=False)
            with store.connect(store.separate_options("auto"), bootstrap="auto") as client:
                assert client.bootstrapped
            return
        partition = store.register("x")
        choices: list[Bootstrap] = [False, "auto"]
        for number, choice in enumerate(choices):
            with store.connect(store.attach_options(), bootstrap=choice) as client:
                assert not client.bootstrapped
                client.put_samples([f"s{number}"], partition, batch(1, x=torch.tensor([number])))
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1]

    def test_of_processes_that_connect_with_auto_one_bootstraps(self, store: Store) -> None:
        fresh = store.case.isolated_options(store.attach_options(), "auto")
        with contextlib.ExitStack() as ended:
            workers = [store.new_worker(fresh, bootstrap="auto") for _ in range(_AT_ONCE)]
            for worker in workers:
                worker.connect()
            for worker in workers:
                worker.wait_ready()
            owners = [worker for worker in workers if worker.run(getattr, "bootstrapped")]
            for worker in sorted(workers, key=lambda one: one not in owners):
                ended.callback(worker.close)  # the owner is closed last
            assert len(owners) == 1, f"{len(owners)} of {_AT_ONCE} processes bootstrapped"
            workers[0].run(methodcaller("register_partition", "p", ["x"], None, ["train"]))
            for number, worker in enumerate(workers):
                worker.run(methodcaller("put_samples", [f"s{number}"], "p", {"x": torch.tensor([number])}))
            assert workers[-1].run(read_items, "p", ids(_AT_ONCE), "x") == list(range(_AT_ONCE))

    def test_bootstrapping_over_other_options_is_refused(self, store: Store) -> None:
        conflicting = store.case.conflicting_options(dict(store.options)) or not_run(
            "the author's class supplies no conflicting_options"
        )
        with store.refusal(AlreadyRunningError):
            store.connect(conflicting).close()
        store.filled(1)


def _forked(call: Callable[[], str]) -> str:
    """Calls a function in a fork of this process. Returns its result."""
    mine, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(call()), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks with threads; the child calls very little
        fork.start()
    theirs.close()
    try:
        assert mine.poll(PROMPT_S), "a fork that used the client hangs"
        return str(mine.recv())  # EOFError: it raised an error, which it has printed
    finally:
        fork.kill()
        fork.join()
        mine.close()
