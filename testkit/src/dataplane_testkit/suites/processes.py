"""Several processes on one store, attached with ``bootstrap=False``; some are killed."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from typing import Any, Final
from unittest import mock

import pytest
import torch

from dataplane_core.spec import Capability
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, ids, items_of, jagged
from dataplane_testkit._profiles import by_profile, new_seed
from dataplane_testkit._store import Deployment, Store
from dataplane_testkit.chaos.checker import check, shrunk
from dataplane_testkit.chaos.history import OK, History
from dataplane_testkit.chaos.page import table
from dataplane_testkit.chaos.rules import Finding
from dataplane_testkit.chaos.run import HEIR, Settings, history_of
from dataplane_testkit.rules import lasts

#: How many processes are killed. The environment variable sets another number.
_KILLS: Final = int(os.environ.get("DATAPLANE_CONFORMANCE_KILLS") or by_profile(5, 20, 200))
#: Time limit in seconds. The first of the tests with kills does them all.
_LIMIT_S: Final = 900.0


def _aftermath(deployment: Deployment) -> tuple[History, list[Finding], str]:
    """Kills processes while they put and claim, at random moments: the history, what it breaks, how it was made."""
    seed = new_seed()
    timeout_s = deployment.case.op_timeout_s
    settings = Settings(seed=seed, schedule_s=_LIMIT_S, kills=_KILLS, pause_s=0.01, lease_s=0.3, op_timeout_s=timeout_s)
    state = f"(seed {seed})"
    try:
        history = history_of(deployment, settings)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} {state}") from error
    return history, check(history), state


def _holds(store: Store, *rules: str) -> None:
    """Asserts that the history of the kills breaks none of these rules of the checker. The first says most."""
    history, findings, state = store.deployment.once(_aftermath)
    broken = sorted((each for each in findings if each.rule in rules), key=lambda each: rules.index(each.rule))
    if broken:
        names = ", ".join(dict.fromkeys(each.rule for each in broken))
        proof = "\n".join(table(broken[0], shrunk(history, broken[0])))
        pytest.fail(f"{names}: {broken[0].text}\n\n{proof}\n\n{state}", pytrace=False)


class ProcessSuite(Suite, chapter="processes"):
    """What holds within one client must also hold across processes, also if these are killed."""

    def test_a_put_is_visible_in_other_processes(self, store: Store) -> None:
        (worker,), partition = store.deployment.workers(1), store.register("x")
        for value in range(20):
            store.put(partition, [f"s{value}"], [{"n": value}], x=torch.tensor([value]))
            assert worker.run(_workers.read_items, partition, [f"s{value}"], "x") == [value]
        worker.run(methodcaller("register_partition", partition, ["x"], None, ["train"]))
        assert not store.has(partition, "s0")
        store.put(partition, ids(3), x=torch.arange(3) / 2)  # of another type than before
        assert worker.run(_workers.read_items, partition, ids(3), "x") == [0, 0.5, 1]
        theirs = batch(2, x=torch.tensor([7.0, 8.0]), o=as_objects({"a": 1}, None))
        worker.run(methodcaller("put_samples", ["w0", "w1"], partition, theirs))
        found = store.get(partition, ["w1", "w0"], "x", "o")
        assert (found["x"].tolist(), items_of(found["o"])) == ([8, 7], [None, {"a": 1}])
        store.client.clear_samples(["s1", "w0"], partition)
        for gone in ("s1", "w0"):
            with store.refusal(KeyError, f"'{gone}'"):
                worker.run(_workers.read_items, partition, ["s0", gone], "x")
        worker.run(methodcaller("clear_samples", None, partition))
        with store.refusal(KeyError, partition):
            store.get(partition, ["s0"])

    def test_a_lease_may_be_settled_elsewhere(self, store: Store) -> None:
        (worker,), partition = store.deployment.workers(1), store.filled(2)
        meta = worker.run(methodcaller("claim_meta", partition, "train", ["x"], 2, lease_s=600.0))
        assert not store.client.check_consumption_status(partition, ["train"])
        store.client.ack(meta)
        assert worker.run(methodcaller("check_consumption_status", partition, ["train"]))

    # --- processes killed while they put and claim --------------------------------------------------------------------

    @lasts(_LIMIT_S)
    def test_the_store_serves_others_after_every_kill(self, store: Store) -> None:
        _holds(store, "deadline", "error", "puts", "registered", "waiting")

    @lasts(_LIMIT_S)
    def test_killed_producers_leave_no_half_rows(self, store: Store) -> None:
        _holds(store, "half", "bits", "written", "mixed")

    @lasts(_LIMIT_S)
    def test_killed_producers_lose_no_committed_sample(self, store: Store) -> None:
        _holds(store, "committed", "lost", "latest", "cleared", "save")

    @lasts(_LIMIT_S)
    def test_what_a_killed_producer_was_putting_can_be_put_again(self, store: Store) -> None:
        history, _, state = store.deployment.once(_aftermath)
        failed = [call.error for call in history.calls if call.process == HEIR and call.outcome != OK]
        assert not failed, f"a put of the samples that a killed process was putting failed: {failed[0]} {state}"

    @lasts(_LIMIT_S)
    def test_killed_consumers_get_no_sample_twice(self, store: Store) -> None:
        _holds(store, "given once", "at most one claim", "ready", "order")

    @lasts(_LIMIT_S)
    def test_killed_consumers_lose_no_leased_sample(self, store: Store) -> None:
        _holds(store, "handed out again", "two holders", "lease", "refused ack", "token", "consumed")

    # --- guarantees of the store --------------------------------------------------------------------------------------

    def test_committed_puts_survive_a_crash(self, store: Store) -> None:
        partition = store.register("x", "o")
        store.put(partition, ids(50), [{"n": n} for n in range(50)], x=torch.arange(50), o=as_objects(*range(50)))
        given = store.claim(partition, 10).sample_ids if store.declares(Capability.CLAIMS) else []
        store.deployment.end_workers()  # a restart may replace files that the workers have open
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

    instead: dict[int, Any] = {id(each): staticmethod(reporting(each)) for each in (pickle.load, pickle.loads)}
    instead[id(pickle.Unpickler)] = Unpickler
    with ExitStack() as patched:
        for owner in [*sys.modules.values(), ForkingPickler]:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if id(value) in instead:
                    patched.enter_context(mock.patch.object(owner, name, instead[id(value)]))
        yield places
