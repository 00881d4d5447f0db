"""`BackendConformance`: all suites in one class."""

from __future__ import annotations

from dataplane_testkit.suites.blobs import BlobSuite
from dataplane_testkit.suites.capacity import CapacitySuite
from dataplane_testkit.suites.claims import ClaimSuite
from dataplane_testkit.suites.clients import ClientSuite
from dataplane_testkit.suites.columns import ColumnSuite
from dataplane_testkit.suites.consumption import ConsumptionSuite
from dataplane_testkit.suites.costs import CostSuite
from dataplane_testkit.suites.crashes import CrashSuite
from dataplane_testkit.suites.cursors import CursorSuite
from dataplane_testkit.suites.faults import FaultSuite
from dataplane_testkit.suites.groups import GroupSuite
from dataplane_testkit.suites.guarantees import GuaranteeSuite
from dataplane_testkit.suites.journal import JournalSuite
from dataplane_testkit.suites.leases import LeaseSuite
from dataplane_testkit.suites.lifecycle import LifecycleSuite
from dataplane_testkit.suites.listing import ListingSuite
from dataplane_testkit.suites.machine import MachineSuite
from dataplane_testkit.suites.partitions import PartitionSuite
from dataplane_testkit.suites.processes import ProcessSuite
from dataplane_testkit.suites.races import RaceSuite
from dataplane_testkit.suites.refusals import RefusalSuite
from dataplane_testkit.suites.repeats import RepeatSuite
from dataplane_testkit.suites.rows import RowSuite
from dataplane_testkit.suites.samplers import SamplerSuite
from dataplane_testkit.suites.smoke import SmokeSuite
from dataplane_testkit.suites.tags import TagSuite
from dataplane_testkit.suites.units import UnitSuite
from dataplane_testkit.suites.wakes import WakeSuite


class BackendConformance(
    # pytest runs the tests of the last base first: smoke tests first, slow tests last
    MachineSuite,
    CrashSuite,
    ProcessSuite,
    RaceSuite,
    GuaranteeSuite,
    LifecycleSuite,
    CostSuite,
    FaultSuite,
    RefusalSuite,
    CapacitySuite,
    ConsumptionSuite,
    CursorSuite,
    ListingSuite,
    SamplerSuite,
    ClientSuite,
    UnitSuite,
    WakeSuite,
    RepeatSuite,
    TagSuite,
    LeaseSuite,
    GroupSuite,
    ClaimSuite,
    ColumnSuite,
    PartitionSuite,
    RowSuite,
    JournalSuite,
    BlobSuite,
    SmokeSuite,
    chapter="",
):
    """Every test of the contract. Subclass it, name the backend, and override the fixture ``options``.

    `AuthorsClass` documents what a subclass may define. It may add its own tests, but must not override anything else
    of the kit.
    """
