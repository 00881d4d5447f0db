"""The suites of the kit: `BackendConformance` has all of them, `EngineConformance` those that an engine decides."""

from dataplane_testkit.suites.clients import CapacitySuite, ClaimSuite, LifecycleSuite, ListingSuite, RolloutSuite
from dataplane_testkit.suites.concurrency import ProcessSuite, RaceSuite
from dataplane_testkit.suites.engine import EngineSuite
from dataplane_testkit.suites.machine import MachineSuite
from dataplane_testkit.suites.values import ColumnSuite, RowSuite, SmokeSuite

__all__ = ["BackendConformance", "EngineConformance"]


class BackendConformance(
    # pytest runs the tests of the last base first: smoke tests first, slow tests last
    MachineSuite,
    ProcessSuite,
    RaceSuite,
    LifecycleSuite,
    CapacitySuite,
    ListingSuite,
    RolloutSuite,
    ClaimSuite,
    ColumnSuite,
    RowSuite,
    EngineSuite,
    SmokeSuite,
    chapter="",
):
    """Every test of the contract. Subclass it, name the backend, and override the fixture ``options``.

    `AuthorsClass` documents what a subclass may define. It may add its own tests, but must not override anything else
    of the kit.
    """


class EngineConformance(
    MachineSuite,
    LifecycleSuite,
    CapacitySuite,
    ColumnSuite,
    RowSuite,
    EngineSuite,
    SmokeSuite,
    chapter="",
):
    """What a backend on core's ledger (`LedgerBackend`, `RowStoreBackend`) can get wrong by itself: for the quick run.

    Core's ledger decides the rest of `BackendConformance`, which such a backend must pass too.
    """
