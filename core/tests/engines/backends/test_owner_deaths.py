"""Owners of a ledger that are killed and stopped while three processes use their store."""

import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from dataplane_sqlite_example import SQLiteStore
from tiers import in_long

from dataplane_testkit import AuthorsClass, Disturbance, Settings, run_chaos

#: Seconds from one disturbance to the next: a dead owner is replaced after five.
_EVERY_S = 7.0


def pid_of(backend):
    return backend.owner_pid(time.monotonic() + 60)


def kill(backend):
    """Kills the owner, which may be one that has just begun."""

    @contextmanager
    def act():
        with suppress(ProcessLookupError):
            os.kill(pid_of(backend), signal.SIGKILL)
        yield

    return Disturbance(act, lasts=False)


def stop(backend):
    """Stops the owner, for less or for more than its lease."""

    @contextmanager
    def act():
        pid = pid_of(backend)
        os.kill(pid, signal.SIGSTOP)
        yield
        os.kill(pid, signal.SIGCONT)

    return Disturbance(act)


class SQLite(AuthorsClass):
    backend = "sqlite_example"
    backend_class = SQLiteStore

    def disturbances(self, backend):
        return {"the owner is killed": kill(backend), "the owner is stopped": stop(backend)}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("fault", "times"),
    [("the owner is killed", 4), ("the owner is stopped", 2), *in_long(("the owner is killed", 200))],
)
def test_a_history_keeps_the_contract_whatever_happens_to_the_owner(tmp_path, fault, times):
    settings = replace(
        Settings.brief(), schedule_s=times * _EVERY_S, every_s=_EVERY_S, lease_s=3.0, faults=frozenset({fault})
    )
    verdict = run_chaos(SQLite(), {"path": str(tmp_path / "store.sqlite")}, settings, folder=tmp_path)
    print(verdict.facts, *verdict.table(), sep="\n")
    assert verdict.passed, verdict
    assert sum(each.kind == fault for each in verdict.history.events) >= times / 2
