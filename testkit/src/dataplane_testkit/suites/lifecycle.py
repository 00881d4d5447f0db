"""Connecting, closing, pickling, forking."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, ClientClosedError, ConfigError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Scope
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids, naming
from dataplane_testkit._store import Store, check_error, not_run
from dataplane_testkit._timing import PROMPT_S, STARTS_S, Background, bounded
from dataplane_testkit._workers import call, read_items
from dataplane_testkit.suites.costs import OPERATIONS

#: Seconds that the owner of a store starts later than the client that attaches.
_LATE_S: Final = 0.3
#: Processes that connect at the same time.
_AT_ONCE: Final = 3


class LifecycleSuite(Suite, chapter="lifecycle"):
    """From connect to close."""

    def test_close_is_idempotent(self, store: Store) -> None:
        with store.another_client() as client:
            partition = store.register("x", client=client)
        client.close()  # the with block has closed it
        with store.refusal(ClientClosedError):
            client.get_samples(["a"], partition, ["x"])

    def test_a_closed_client_refuses(self, store: Store) -> None:
        client, held = store.deployment.closed_client(), KVBatchMeta("p", "train", ["s0"], lease_tokens=["token"])
        for operation, (ask, _, capability) in OPERATIONS.items():
            if capability is None or store.declares(capability):
                with naming(operation), store.refusal(ClientClosedError):
                    ask(client, "p", held)

    def test_close_ends_waiting_claims(self, store: Store) -> None:
        client = store.another_client()
        partition = store.register("x", client=client)
        waiting = store.waiting_claim(partition, 1, client=client)
        bounded(client.close, what="close while a claim waits")
        with store.refusal(ClientClosedError):
            waiting.result(what="a claim on a client that was closed")

    def test_two_clients_live_side_by_side(self, store: Store) -> None:
        partition = store.filled(2)
        other = store.another_client()
        theirs = store.register("x", client=other)
        other.put_samples(ids(2), theirs, batch(2, x=torch.arange(2) + 5))
        assert other.get_samples(ids(2), theirs, ["x"])["x"].tolist() == [5, 6]
        other.close()
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1]
        store.put(partition, ["s2"], x=torch.tensor([2]))

    def test_pickling_a_client_is_refused(self, store: Store) -> None:
        with store.refusal(TypeError, "pickle"):
            pickle.dumps(store.client)

    def test_a_fork_cannot_use_the_client(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([1]))

        def in_child() -> str:
            try:
                store.get(partition, ["a"])
            except ClientClosedError as error:
                reply = f"refused: {error}"
            else:
                reply = "worked"
            store.client.close()  # this must not stop what the parent started
            return reply

        assert "refused" in _forked(in_child)
        assert store.get(partition, ["a"])["x"].tolist() == [1], (
            "close in the fork stopped or changed the parent's store"
        )

    def test_a_fork_opens_a_client_of_its_own(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([7]))
        options = store.deployment.attach_options()

        def in_child() -> str:
            torch.set_num_threads(1)  # a fork does not have the parent's threads
            try:
                client = store.deployment.connect(options, bootstrap=False)
            except BackendUnavailableError as error:
                return f"refused: {error}"
            return f"read {client.get_samples(['a'], partition, ['x'])['x'].tolist()}"

        said = _forked(in_child)
        if store.deployment.backend_class.opens_in_forks:
            assert said == "read [7]"
        else:
            assert said.startswith("refused"), said
            assert "spawn" in said

    def test_unknown_options_are_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="no_such_option_of_the_kit"):
            store.deployment.connect({**store.deployment.options, "no_such_option_of_the_kit": 1})

    # --- attaching ----------------------------------------------------------------------------------------------------

    def test_attaching_within_one_process_is_refused(self, store: Store) -> None:
        if store.scope is not Scope.PROCESS or store.deployment.backend_class.opens_anywhere:
            store.attached_client().close()
            return
        with pytest.raises(BackendUnavailableError) as caught:
            store.deployment.connect(store.deployment.options, bootstrap=False)
        check_error(caught.value, store.name)

    def test_attaching_to_nothing_fails_clearly(self, store: Store) -> None:
        absent = store.case.absent_options(dict(store.deployment.options)) or not_run(
            "the author's class supplies no absent_options"
        )
        for timeout_s in (3.0, 15.0):
            attach = partial(
                store.deployment.connect, absent, bootstrap=False, op_timeout_s=timeout_s, attach_wait_s=0.1
            )
            start = time.monotonic()
            with pytest.raises((ConnectionError, TimeoutError)) as caught:
                bounded(attach, timeout_s + 2 * PROMPT_S, "attaching to nothing")
            assert time.monotonic() - start < timeout_s + PROMPT_S
            if isinstance(caught.value, ConnectionError):
                break  # else it was not known in time, as on a machine that stands still
        assert isinstance(caught.value, ConnectionError)
        check_error(caught.value, store.name)

    def test_an_attach_waits_for_an_owner_that_is_late(self, store: Store) -> None:
        fresh = store.case.isolated_options(store.deployment.attach_options(), "late")
        waiting = Background(lambda: store.deployment.connect(fresh, bootstrap=False, attach_wait_s=STARTS_S))
        time.sleep(_LATE_S)
        with store.deployment.connect(fresh) as owner, waiting.result(STARTS_S, "an early attach") as attached:
            partition = store.register("x", client=owner)
            owner.put_samples(["a"], partition, batch(1, x=torch.tensor([7])))
            assert attached.get_samples(["a"], partition, ["x"])["x"].tolist() == [7]
            owner.clear_samples(None, partition)

    def test_auto_attaches_where_something_runs(self, store: Store) -> None:
        if store.scope is Scope.PROCESS:
            with store.deployment.connect(store.deployment.separate_options("auto"), bootstrap="auto") as client:
                assert client.bootstrapped
            return
        partition = store.register("x")
        with store.deployment.connect(store.deployment.attach_options(), bootstrap="auto") as client:
            assert not client.bootstrapped
            client.put_samples(["a"], partition, batch(1, x=torch.tensor([7])))
        assert store.get(partition, ["a"])["x"].tolist() == [7]

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
            workers[0].run(call, "register_partition", "p", ["x"], None, ["train"])
            for number, worker in enumerate(workers):
                worker.run(call, "put_samples", [f"s{number}"], "p", {"x": torch.tensor([number])})
            assert workers[-1].run(read_items, "p", ids(_AT_ONCE), "x") == list(range(_AT_ONCE))

    def test_bootstrapping_over_other_options_is_refused(self, store: Store) -> None:
        conflicting = store.case.conflicting_options(dict(store.deployment.options)) or not_run(
            "the author's class supplies no conflicting_options"
        )
        with pytest.raises(AlreadyRunningError) as caught:
            store.deployment.connect(conflicting).close()
        check_error(caught.value, store.name)
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.zeros(1))


def _forked(call: Callable[[], str]) -> str:
    """Runs a function in a fork of this process and returns its reply."""
    if not hasattr(os, "fork"):
        not_run("this platform has no fork")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks with threads; the child calls very little
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, call().encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], PROMPT_S)
        assert ready, "a fork that used the client hangs"
        return os.read(reader, 65536).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
