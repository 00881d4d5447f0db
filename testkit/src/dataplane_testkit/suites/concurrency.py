"""Threads of one client, and processes, that call at the same time; some are killed."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from typing import Any, Final
from unittest import mock

import pytest
import torch

from dataplane_core.errors import DataPlaneError
from dataplane_core.spec import Capability, Scope, new_id
from dataplane_testkit import _workers
from dataplane_testkit._columns import as_objects, batch, ids, items_of, jagged
from dataplane_testkit._profiles import by_profile, new_seed
from dataplane_testkit._store import Store, Suite
from dataplane_testkit._timing import Background, in_threads
from dataplane_testkit._workers import claim_all
from dataplane_testkit.chaos.checker import Finding, check, shrunk
from dataplane_testkit.chaos.history import OK, History
from dataplane_testkit.chaos.run import HEIR, run_on, table
from dataplane_testkit.chaos.worker import ROLLOUTS, Settings

_FACTOR: Final = by_profile(1, 1, 10)
#: Of the test of claims: how many groups of three, processes besides this one, and the seconds of each claim.
_GROUPS, _PROCESSES, _CLAIM_S = by_profile((80, 2, 60.0), (80, 2, 60.0), (33_000, 7, 600.0))
#: Elements of a row: few, and so many that an engine stores them on another way.
_SIZES: Final = {"small": 2, "large": 64 * 1024}
_MIXED: Final = [torch.arange(1), torch.zeros(1), torch.zeros(1, 3), as_objects(1)]
#: Why puts exclude each other -> what is registered, the columns of four puts, and how many of them are accepted.
_EXCLUSIVE: Final[dict[str, tuple[dict[str, Any], list[Any], int]]] = {
    "schema": ({}, _MIXED, 1),
    "declared": ({"fields": {"x": "int64"}}, _MIXED, 1),
    "enum": ({"enums": {"x": ["0"]}}, [as_objects(str(number)) for number in range(4)], 1),
    "group": ({"grpo_group_size": 2}, _MIXED[:1] * 4, 2),
}
#: How many processes are killed. The environment variable sets another number.
_KILLS: Final = int(os.environ.get("DATAPLANE_CONFORMANCE_KILLS") or by_profile(5, 20, 200))
#: Threads of one client, and the steps that each of them takes.
_THREADS, _STEPS = 6, by_profile(40, 80, 800)
#: Time limit in seconds. The first of the tests that look at a history makes it.
_LIMIT_S: Final = 900.0


def _history_of(store: Store, who: str) -> tuple[History, list[Finding], str]:
    """Random steps of threads of one client, or of processes that are killed: their history, what it breaks, the seed.

    All tests look at one history of a store.
    """

    def make() -> tuple[History, list[Finding], str]:
        seed = new_seed()
        how: dict[str, Any] = {"pause_s": 0.01, "lease_s": 0.3, "kills": _KILLS}
        if who == "threads":
            how = {"pause_s": 0.0005, "lease_s": 0.05, "workers": _THREADS, "num_steps": _STEPS}
        settings = Settings(seed=seed, schedule_s=_LIMIT_S, op_timeout_s=store.case.op_timeout_s, **how)
        try:
            with run_on(store, settings) as run:
                history = run.history()
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} (seed {seed})") from error
        return history, check(history), f"(seed {seed})"

    if who not in store.histories:
        store.histories[who] = Background(make)
    made: tuple[History, list[Finding], str] = store.histories[who].result(_LIMIT_S, f"the history of {who}")
    return made


def _holds(store: Store, who: str, *rules: str) -> None:
    """Asserts that a history breaks none of these rules of the checker. The first says most."""
    history, findings, state = _history_of(store, who)
    broken = [finding for rule in rules for finding in findings if finding.rule == rule]
    if broken:
        names = ", ".join(dict.fromkeys(finding.rule for finding in broken))
        proof = "\n".join(table(broken[0], shrunk(history, broken[0])))
        pytest.fail(f"{names}: {broken[0].text}\n\n{proof}\n\n{state}", pytrace=False)


class RaceSuite(Suite, chapter="races"):
    @pytest.mark.parametrize("group_size", [None, 3], ids=["alone", "groups"])
    @pytest.mark.timeout(900)
    def test_many_claimers_get_each_sample_once(self, store: Store, group_size: int | None) -> None:
        store.require(Capability.GROUPS if group_size else None)
        partition = store.register("x", grpo_group_size=group_size, num_samples=3 * _GROUPS)
        workers = [] if store.scope is Scope.PROCESS else store.workers(_PROCESSES)
        for worker in workers:
            worker.start(claim_all, partition, 6, _CLAIM_S)

        def produce(member: int) -> list[list[str]]:
            for part in torch.arange(_GROUPS).chunk(7):
                store.put(partition, [f"q{group}_g{member}" for group in part.tolist()], x=part)
            return []

        consume = partial(claim_all, store.client, partition, 6, _CLAIM_S)
        parts = in_threads(*[partial(produce, m) for m in range(3)], *[consume] * 4, within_s=_CLAIM_S + 120)
        parts += [worker.result(_CLAIM_S + 30) for worker in workers]
        claims = [claim for part in parts for claim in part]
        given = [name for claim in claims for name in claim]
        assert len(given) == len(set(given)), "a sample was given to two claimers"
        assert len(given) == 3 * _GROUPS, "samples were lost"
        assert store.client.check_consumption_status(partition, ["train"])
        for claim in claims if group_size else []:
            whole = {name.partition("_")[0] for name in claim}
            assert len(claim) == 3 * len(whole), f"a claim holds a part of a group: {claim}"

    @pytest.mark.timeout(_LIMIT_S)
    def test_many_holders_ack_each_sample_once(self, store: Store) -> None:
        _holds(store, "threads", "two holders", "given once", "lease", "refused ack", "handed out again")

    @pytest.mark.parametrize("what", _EXCLUSIVE)
    def test_of_racing_puts_that_exclude_each_other_one_is_accepted(self, store: Store, what: str) -> None:
        store.require(Capability.GROUPS if what == "group" else None)
        about, columns, num_accepted = _EXCLUSIVE[what]

        def put(partition: str, name: str, column: Any) -> bool:
            try:
                store.put(partition, [name], x=column)
            except ValueError:
                return False
            return True

        for _ in range(10 * _FACTOR):
            partition, names = store.register("x", **about), ids(4, "q_g")
            accepted = in_threads(*[partial(put, partition, *row) for row in zip(names, columns, strict=True)])
            assert sum(accepted) == num_accepted, f"{sum(accepted)} of 4 puts that exclude each other were accepted"
            assert accepted[0] or what not in ("declared", "enum"), "a put that fits was refused"
            assert [store.has(partition, name) for name in names] == accepted

    def test_keep_from_many_clients_at_once(self, store: Store) -> None:
        clients = [client for _ in range(3) for client in (store.same_store_client(), store.client)]

        def register(partition: str, place: int) -> None:
            client = clients[place]
            store.register("x", tasks=[f"t{place}"], client=client, partition_id=partition, if_exists="keep")
            client.put_samples([f"s{place}"], partition, {"x": torch.tensor([place])})

        for _ in range(3):
            partition = store.new_id()
            in_threads(*(partial(register, partition, place) for place in range(6)))
            assert store.get(partition, ids(6))["x"].tolist() == list(range(6))
            for place in range(6):
                assert store.claim(partition, 6, task=f"t{place}").size == 6

    @pytest.mark.parametrize("size", _SIZES)
    def test_puts_with_the_same_id_at_the_same_time_are_carried_out_once(self, store: Store, size: str) -> None:
        store.require(Capability.OVERWRITE)
        for number in range(10):
            partition = store.register("x")
            rows = [batch(3, x=torch.full((3, _SIZES[size]), value, dtype=torch.int32)) for value in range(3)]
            put = partial(store.hooks.put, partition, ids(3), rows[1], request_id=new_id())

            def put_and_change(put: Any = put, partition: str = partition, rows: Any = rows) -> Any:
                reply = put()
                store.client.put_samples(ids(3), partition, rows[2])
                return reply

            replies = in_threads(put_and_change, put, put)
            assert replies == [3, 3, 3]
            cells = store.get(partition, ids(3))["x"]
            assert cells.unique().tolist() == [2], f"round {number}: a put was carried out twice"

    @pytest.mark.timeout(_LIMIT_S)
    def test_first_writes_are_seen_whole_with_their_tags(self, store: Store) -> None:
        _holds(store, "threads", "half", "ready", "order", "waiting")

    @pytest.mark.timeout(_LIMIT_S)
    def test_reads_that_overlap_clears_are_whole_or_keyerrors(self, store: Store) -> None:
        _holds(store, "threads", "cleared", "committed", "lost", "error", "registered", "deadline")

    @pytest.mark.parametrize("what", ["clear", "registration"])
    def test_puts_that_overlap_clears_are_whole_or_nothing(self, store: Store, what: str) -> None:
        names, rounds, put_s = ids(16), by_profile(10, 40, 200), 0.0

        def put(partition: str) -> float:
            start = time.monotonic()
            with suppress(DataPlaneError):  # a put that overlaps a clear may fail
                store.put(partition, names, [{"new": 1}] * 16, y=torch.full((16, 64), 7))
            return time.monotonic() - start

        def drop(partition: str, delay_s: float) -> None:
            time.sleep(delay_s)
            if what == "clear":
                store.client.clear_samples(names, partition)
            else:
                store.client.register_partition(partition, ["x", "y"], None, ["train"])

        for number in range(rounds):
            partition = store.filled(16, "x", "y", tags=[{"old": 1}] * 16)
            delay_s = put_s * number / rounds  # another moment of the put each time
            took_s, _ = in_threads(partial(put, partition), partial(drop, partition, delay_s))
            put_s = max(put_s, min(took_s, 0.1))
            there = [name for name in names if store.has(partition, name, "y")]
            assert there in ([], names), f"{len(there)} of 16 rows of a put that overlapped a clear are there"
            assert not any(store.has(partition, name, "x") for name in names), "cleared cells can be read again"
            if there and store.declares(Capability.LISTING):
                meta = store.client.list_samples(partition)
                assert meta.tags == [{"new": 1}] * 16, "a sample that was cleared has its old tags"

    @pytest.mark.timeout(_LIMIT_S)
    def test_racing_overwrites_leave_whole_cells(self, store: Store) -> None:
        _holds(store, "threads", "bits", "written", "latest")

    @pytest.mark.timeout(_LIMIT_S)
    def test_reads_see_all_old_or_all_new_cells(self, store: Store) -> None:
        _holds(store, "threads", "mixed")

    def test_racing_puts_of_different_fields_all_stay(self, store: Store) -> None:
        partition, names = store.filled(10), ids(10)

        def put(writer: int) -> None:
            for turn in range(5):
                tags = [{f"t{writer}-{turn}": index} for index in range(10)]
                store.put(partition, names, tags, {f"f{writer}-{turn}": torch.arange(10) + writer})

        in_threads(*[partial(put, writer) for writer in range(5)])
        keys = [f"{writer}-{turn}" for writer in range(5) for turn in range(5)]
        columns = store.get(partition, names, *(f"f{key}" for key in keys))
        for key in keys:
            assert columns[f"f{key}"].tolist() == [index + int(key[0]) for index in range(10)]
        if store.declares(Capability.LISTING):
            tags = store.client.list_samples(partition).tags
            assert tags == [{f"t{key}": n for key in keys} for n in range(10)], "tags of a concurrent put were lost"


class ProcessSuite(Suite, chapter="processes"):
    def test_a_put_is_visible_in_other_processes(self, store: Store) -> None:
        (worker,), partition = store.workers(1), store.register("x")
        for value in range(20):
            store.put(partition, [f"s{value}"], [{"n": value}], x=torch.tensor([value]))
            assert worker.run(_workers.read_items, partition, [f"s{value}"], "x") == [value]
        worker.run(methodcaller("register_partition", partition, ["x"], None, ["train"]))
        assert not store.has(partition, "s0")
        store.put(partition, ids(3), x=torch.arange(3) / 2)  # of another type than before
        assert worker.run(_workers.read_items, partition, ids(3), "x") == [0, 0.5, 1]
        theirs = batch(2, x=torch.tensor([7.0, 8.0]), o=as_objects({"a": 1}, None))
        worker.run(methodcaller("put_samples", ["w0", "w1"], partition, theirs))
        columns = store.get(partition, ["w1", "w0"], "x", "o")
        assert (columns["x"].tolist(), items_of(columns["o"])) == ([8, 7], [None, {"a": 1}])
        store.client.clear_samples(["s1", "w0"], partition)
        for gone in ("s1", "w0"):
            with store.refusal(KeyError, f"'{gone}'"):
                worker.run(_workers.read_items, partition, ["s0", gone], "x")
        worker.run(methodcaller("clear_samples", None, partition))
        with store.refusal(KeyError, partition):
            store.get(partition, ["s0"])

    def test_a_lease_may_be_settled_elsewhere(self, store: Store) -> None:
        (worker,), partition = store.workers(1), store.filled(2)
        meta = worker.run(methodcaller("claim_meta", partition, "train", ["x"], 2, lease_s=600.0))
        assert not store.client.check_consumption_status(partition, ["train"])
        store.client.ack(meta)
        assert worker.run(methodcaller("check_consumption_status", partition, ["train"]))

    @pytest.mark.timeout(_LIMIT_S)
    def test_the_store_serves_others_after_every_kill(self, store: Store) -> None:
        _holds(store, "processes", "deadline", "error", "puts", "registered", "waiting")

    @pytest.mark.timeout(_LIMIT_S)
    def test_killed_producers_leave_no_half_rows(self, store: Store) -> None:
        _holds(store, "processes", "half", "bits", "written", "mixed")

    @pytest.mark.timeout(_LIMIT_S)
    def test_killed_producers_lose_no_committed_sample(self, store: Store) -> None:
        _holds(store, "processes", "committed", "lost", "latest", "cleared", "save")

    @pytest.mark.timeout(_LIMIT_S)
    def test_what_a_killed_producer_was_putting_can_be_put_again(self, store: Store) -> None:
        history, _, state = _history_of(store, "processes")
        # of a group of rollouts nothing may be left, and then nothing is put again
        calls = [call for call in history.calls if call.process == HEIR and call.partition != ROLLOUTS]
        failed = [call.error for call in calls if call.outcome != OK]
        assert not failed, f"a put of the samples that a killed process was putting failed: {failed[0]} {state}"

    @pytest.mark.timeout(_LIMIT_S)
    def test_killed_consumers_get_no_sample_twice(self, store: Store) -> None:
        _holds(store, "processes", "given once", "at most one claim", "ready", "order")

    @pytest.mark.timeout(_LIMIT_S)
    def test_killed_consumers_lose_no_leased_sample(self, store: Store) -> None:
        _holds(store, "processes", "handed out again", "two holders", "lease", "refused ack", "token", "consumed")

    def test_committed_puts_survive_a_crash(self, store: Store) -> None:
        partition = store.register("x", "o")
        store.put(partition, ids(50), [{"n": n} for n in range(50)], x=torch.arange(50), o=as_objects(*range(50)))
        given = store.claim(partition, 10).sample_ids if store.declares(Capability.CLAIMS) else []
        store.end_workers()  # a restart may replace files that the workers have open
        store.ask_author("restart")
        assert store.get(partition, ids(50))["x"].tolist() == list(range(50))
        if given:
            assert store.claim(partition, 50).sample_ids == ids(50)[10:], (
                "after the crash, claimed samples are given again, or others are lost"
            )

    def test_nothing_is_unpickled(self, store: Store) -> None:
        partition = store.register("x", "o")
        columns = {"x": jagged([torch.arange(2), torch.arange(5)]), "o": as_objects({"a": [1]}, torch.arange(3))}
        with _unpickling_is_reported() as places:
            store.put(partition, ids(2), [{"n": 1}, {"n": 2}], columns)
            store.get(partition, ids(2), "x", "o")
            if store.declares(Capability.CLAIMS):
                store.claim(partition, 2)
                store.client.check_consumption_status(partition, ["train"])
            if store.declares(Capability.LISTING):
                store.client.list_samples(partition)
            store.client.clear_samples(["s0"], partition)
        assert not places, f"data was unpickled in {places[0]}"


@contextmanager
def _unpickling_is_reported() -> Iterator[list[str]]:
    """Yields a list of the places that unpickle data in the block.

    It finds the functions of pickle in all modules, and in the class that multiprocessing's connections and queues use.
    """
    places: list[str] = []

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            places.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            return original(*arguments, **options)

        return call

    class Unpickler(pickle.Unpickler):
        __init__ = reporting(pickle.Unpickler.__init__)

    instead: dict[int, Any] = {id(load): staticmethod(reporting(load)) for load in (pickle.load, pickle.loads)}
    instead[id(pickle.Unpickler)] = Unpickler
    with ExitStack() as patched:
        for owner in [*sys.modules.values(), ForkingPickler]:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if id(value) in instead:
                    patched.enter_context(mock.patch.object(owner, name, instead[id(value)]))
        yield places
