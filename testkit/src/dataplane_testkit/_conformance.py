"""The suites in one class each: `BackendConformance` has all, `EngineConformance` those that an engine decides."""

from __future__ import annotations

from dataplane_testkit.suites.arguments import ArgumentSuite
from dataplane_testkit.suites.bounds import BoundSuite
from dataplane_testkit.suites.capabilities import CapabilitySuite
from dataplane_testkit.suites.capacity import CapacitySuite
from dataplane_testkit.suites.claims import ClaimSuite
from dataplane_testkit.suites.clear import ClearSuite
from dataplane_testkit.suites.clients import ClientSuite
from dataplane_testkit.suites.consumption import ConsumptionSuite
from dataplane_testkit.suites.costs import CostSuite
from dataplane_testkit.suites.cursors import CursorSuite
from dataplane_testkit.suites.engine import EngineSuite
from dataplane_testkit.suites.equal_cells import EqualCellsSuite
from dataplane_testkit.suites.faults import FaultSuite
from dataplane_testkit.suites.get import GetSuite
from dataplane_testkit.suites.groups import GroupSuite
from dataplane_testkit.suites.leases import LeaseSuite
from dataplane_testkit.suites.lifecycle import LifecycleSuite
from dataplane_testkit.suites.listing import ListingSuite
from dataplane_testkit.suites.machine import MachineSuite
from dataplane_testkit.suites.matrix import MatrixSuite
from dataplane_testkit.suites.narrow import NarrowSuite
from dataplane_testkit.suites.overwrite import OverwriteSuite
from dataplane_testkit.suites.processes import ProcessSuite
from dataplane_testkit.suites.put import PutSuite
from dataplane_testkit.suites.races import RaceSuite
from dataplane_testkit.suites.registration import RegistrationSuite
from dataplane_testkit.suites.repeats import RepeatSuite
from dataplane_testkit.suites.room import RoomSuite
from dataplane_testkit.suites.samplers import SamplerSuite
from dataplane_testkit.suites.smoke import SmokeSuite
from dataplane_testkit.suites.tag_filters import TagFilterSuite
from dataplane_testkit.suites.units import UnitSuite
from dataplane_testkit.suites.wakes import WakeSuite


class BackendConformance(
    # pytest runs the tests of the last base first: smoke tests first, slow tests last
    MachineSuite,
    ProcessSuite,
    RaceSuite,
    LifecycleSuite,
    CostSuite,
    BoundSuite,
    FaultSuite,
    ArgumentSuite,
    CapacitySuite,
    ConsumptionSuite,
    RoomSuite,
    ClearSuite,
    OverwriteSuite,
    CursorSuite,
    ListingSuite,
    SamplerSuite,
    ClientSuite,
    UnitSuite,
    WakeSuite,
    RepeatSuite,
    TagFilterSuite,
    LeaseSuite,
    GroupSuite,
    ClaimSuite,
    NarrowSuite,
    EqualCellsSuite,
    MatrixSuite,
    GetSuite,
    PutSuite,
    RegistrationSuite,
    CapabilitySuite,
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
    RoomSuite,
    ClearSuite,
    NarrowSuite,
    EqualCellsSuite,
    MatrixSuite,
    GetSuite,
    PutSuite,
    EngineSuite,
    SmokeSuite,
    chapter="",
):
    """What a backend on core's ledger (`LedgerBackend`, `BlobStore`) can get wrong by itself: for the quick run.

    Core's ledger decides the rest of `BackendConformance`, which such a backend must pass too.
    """
