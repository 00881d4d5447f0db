"""Processes killed while they put and claim, at random moments, over and over: what must hold afterwards.

The processes are killed once for all tests of the class, in a chaos run on the store under test. Each test looks at
some of the rules to which the checker holds its history. For scopes wider than one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import pytest

from dataplane_testkit._base import Suite
from dataplane_testkit._blobs import journal_state
from dataplane_testkit._hooks import backend_of
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
#: Time limit in seconds. The first of these tests does all the kills.
_LIMIT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class _Aftermath:
    seed: int
    history: History
    findings: list[Finding]
    state: str


def _aftermath(deployment: Deployment) -> _Aftermath:
    """Kills the processes, and checks their history."""
    seed = new_seed()
    timeout_s = deployment.case.op_timeout_s
    settings = Settings(seed=seed, schedule_s=_LIMIT_S, kills=_KILLS, pause_s=0.01, lease_s=0.3, op_timeout_s=timeout_s)
    backend = backend_of(deployment.client)
    try:
        history = history_of(deployment, settings)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} (seed {seed}){journal_state(backend)}") from error
    return _Aftermath(seed, history, check(history), journal_state(backend))


def _holds(store: Store, *rules: str) -> _Aftermath:
    """Asserts that the history breaks none of these rules. Those that say most come first."""
    found = store.deployment.once(_aftermath)
    broken = sorted((each for each in found.findings if each.rule in rules), key=lambda each: rules.index(each.rule))
    if broken:
        names = ", ".join(dict.fromkeys(each.rule for each in broken))
        proof = "\n".join(table(broken[0], shrunk(found.history, broken[0])))
        pytest.fail(f"{names}: {broken[0].text} (seed {found.seed})\n\n{proof}{found.state}", pytrace=False)
    return found


class CrashSuite(Suite, chapter="crashes"):
    """kill -9 in the middle of calls: 20 times, 200 times under the profile ``long``."""

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
        found = _holds(store)
        failed = [call for call in found.history.calls if call.process == HEIR and call.outcome != OK]
        assert not failed, (
            f"a new put of the samples that a killed process was putting failed: {failed[0].error} (seed {found.seed})"
        )

    @lasts(_LIMIT_S)
    def test_killed_consumers_get_no_sample_twice(self, store: Store) -> None:
        _holds(store, "given once", "at most one claim", "ready", "order")

    @lasts(_LIMIT_S)
    def test_killed_consumers_lose_no_leased_sample(self, store: Store) -> None:
        _holds(store, "handed out again", "two holders", "lease", "refused ack", "token", "consumed")
