"""The suites in one class each: `BackendConformance` has all, `EngineConformance` those that an engine decides."""

from __future__ import annotations

from dataplane_testkit.suites.capacity import CapacitySuite
from dataplane_testkit.suites.claims import ClaimSuite
from dataplane_testkit.suites.columns import ColumnSuite
from dataplane_testkit.suites.engine import EngineSuite
from dataplane_testkit.suites.lifecycle import LifecycleSuite
from dataplane_testkit.suites.listing import ListingSuite
from dataplane_testkit.suites.machine import MachineSuite
from dataplane_testkit.suites.processes import ProcessSuite
from dataplane_testkit.suites.races import RaceSuite
from dataplane_testkit.suites.rows import RowSuite
from dataplane_testkit.suites.smoke import SmokeSuite


class BackendConformance(
    # pytest runs the tests of the last base first: smoke tests first, slow tests last
    MachineSuite,
    ProcessSuite,
    RaceSuite,
    LifecycleSuite,
    CapacitySuite,
    ListingSuite,
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
