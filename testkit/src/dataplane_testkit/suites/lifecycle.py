"""Connecting, closing, pickling, forking."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Final

import torch

from dataplane_core.connecting import Bootstrap
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, ClientClosedError
from dataplane_core.spec import Scope
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import PROMPT_S, STARTS_S, Background, bounded
from dataplane_testkit._workers import read_items

#: Seconds that the owner of a store starts later than the client that attaches.
_LATE_S: Final = 0.3
#: Processes that connect at the same time.
_AT_ONCE: Final = 3


class LifecycleSuite(Suite, chapter="lifecycle"):
    """From connect to close."""

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
        partition, options = store.filled(2), store.deployment.attach_options()

        def use() -> str:
            torch.set_num_threads(1)  # a fork does not have the parent's threads
            try:
                client = store.deployment.connect(options, bootstrap=False)
            except BackendUnavailableError as error:
                return str(error)
            return str(client.get_samples(ids(2), partition, ["x"])["x"].tolist())

        assert ("[0, 1]" if store.deployment.backend_class.opens_in_forks else "spawn") in _forked(use)

    # --- attaching ----------------------------------------------------------------------------------------------------

    def test_attaching_to_nothing_fails_clearly(self, store: Store) -> None:
        absent = store.case.absent_options(dict(store.deployment.options)) or not_run(
            "the author's class supplies no absent_options"
        )
        attach = partial(store.deployment.connect, absent, bootstrap=False, op_timeout_s=30.0, attach_wait_s=0.1)
        with store.refusal(ConnectionError):
            bounded(attach, 30 + 2 * PROMPT_S, "attaching to nothing")

    def test_an_attach_waits_for_an_owner_that_is_late(self, store: Store) -> None:
        fresh = store.case.isolated_options(store.deployment.attach_options(), "late")
        waiting = Background(lambda: store.deployment.connect(fresh, bootstrap=False, attach_wait_s=STARTS_S))
        time.sleep(_LATE_S)
        with store.deployment.connect(fresh) as owner, waiting.result(STARTS_S, "an early attach") as attached:
            partition = store.register("x", client=owner)
            owner.put_samples(["a"], partition, batch(1, x=torch.tensor([7])))
            assert attached.get_samples(["a"], partition, ["x"])["x"].tolist() == [7]
            owner.clear_samples(None, partition)

    def test_a_client_attaches_where_something_runs(self, store: Store) -> None:
        deployment = store.deployment
        if store.scope is Scope.PROCESS:
            if deployment.backend_class.opens_anywhere:
                store.attached_client().close()
            else:
                with store.refusal(BackendUnavailableError):
                    deployment.connect(deployment.options, bootstrap=False)
            with deployment.connect(deployment.separate_options("auto"), bootstrap="auto") as client:
                assert client.bootstrapped
            return
        partition = store.register("x")
        choices: list[Bootstrap] = [False, "auto"]
        for number, choice in enumerate(choices):
            with deployment.connect(deployment.attach_options(), bootstrap=choice) as client:
                assert not client.bootstrapped
                client.put_samples([f"s{number}"], partition, batch(1, x=torch.tensor([number])))
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1]

    def test_of_processes_that_connect_with_auto_one_bootstraps(self, store: Store) -> None:
        fresh = store.case.isolated_options(store.deployment.attach_options(), "auto")
        with contextlib.ExitStack() as ended:
            workers = [store.deployment.new_worker(fresh, bootstrap="auto") for _ in range(_AT_ONCE)]
            for worker in workers:
                worker.connect()
            for worker in workers:
                worker.wait_ready()
            owners = [worker for worker in workers if worker.run(getattr, "bootstrapped")]
            for worker in sorted(workers, key=lambda each: each not in owners):
                ended.callback(worker.close)  # the owner is closed last
            assert len(owners) == 1, f"{len(owners)} of {_AT_ONCE} processes bootstrapped"
            workers[0].run(methodcaller("register_partition", "p", ["x"], None, ["train"]))
            for number, worker in enumerate(workers):
                worker.run(methodcaller("put_samples", [f"s{number}"], "p", {"x": torch.tensor([number])}))
            assert workers[-1].run(read_items, "p", ids(_AT_ONCE), "x") == list(range(_AT_ONCE))

    def test_bootstrapping_over_other_options_is_refused(self, store: Store) -> None:
        conflicting = store.case.conflicting_options(dict(store.deployment.options)) or not_run(
            "the author's class supplies no conflicting_options"
        )
        with store.refusal(AlreadyRunningError):
            store.deployment.connect(conflicting).close()
        store.filled(1)


def _forked(call: Callable[[], str]) -> str:
    """Calls a function in a fork of this process. Returns its result."""
    if not hasattr(os, "fork"):
        not_run("this platform has no fork")
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
