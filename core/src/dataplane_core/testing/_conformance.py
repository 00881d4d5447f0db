"""`BackendConformance`: all suites in one class."""

from __future__ import annotations

from typing import Final

from dataplane_core.testing._base import Suite
from dataplane_core.testing.suites.blobs import BlobSuite
from dataplane_core.testing.suites.bounds import BoundSuite
from dataplane_core.testing.suites.capabilities import CapabilitySuite
from dataplane_core.testing.suites.capacity import CapacitySuite
from dataplane_core.testing.suites.claims import ClaimSuite
from dataplane_core.testing.suites.clear import ClearSuite
from dataplane_core.testing.suites.clients import ClientSuite
from dataplane_core.testing.suites.consumption import ConsumptionSuite
from dataplane_core.testing.suites.costs import CostSuite
from dataplane_core.testing.suites.crashes import CrashSuite
from dataplane_core.testing.suites.cursors import CursorSuite
from dataplane_core.testing.suites.equal_cells import EqualCellsSuite
from dataplane_core.testing.suites.errors import ErrorSuite
from dataplane_core.testing.suites.faults import FaultSuite
from dataplane_core.testing.suites.get import GetSuite
from dataplane_core.testing.suites.groups import GroupSuite
from dataplane_core.testing.suites.guarantees import GuaranteeSuite
from dataplane_core.testing.suites.journal import JournalSuite
from dataplane_core.testing.suites.keeping import KeepingSuite
from dataplane_core.testing.suites.leases import LeaseSuite
from dataplane_core.testing.suites.lifecycle import LifecycleSuite
from dataplane_core.testing.suites.listing import ListingSuite
from dataplane_core.testing.suites.machine import MachineSuite
from dataplane_core.testing.suites.matrix import MatrixSuite
from dataplane_core.testing.suites.multimodal import MultimodalSuite
from dataplane_core.testing.suites.overview import OverviewSuite
from dataplane_core.testing.suites.overwrite import OverwriteSuite
from dataplane_core.testing.suites.processes import ProcessSuite
from dataplane_core.testing.suites.put import PutSuite
from dataplane_core.testing.suites.put_refusals import PutRefusalSuite
from dataplane_core.testing.suites.races import RaceSuite
from dataplane_core.testing.suites.registration import RegistrationSuite
from dataplane_core.testing.suites.repeats import RepeatSuite
from dataplane_core.testing.suites.room import RoomSuite
from dataplane_core.testing.suites.samplers import SamplerSuite
from dataplane_core.testing.suites.smoke import SmokeSuite
from dataplane_core.testing.suites.tag_filters import TagFilterSuite
from dataplane_core.testing.suites.units import UnitSuite
from dataplane_core.testing.suites.wakes import WakeSuite

__all__ = ["SUITES", "BackendConformance"]


class BackendConformance(
    # pytest runs the tests of the last base first: smoke tests first, slow tests last
    MachineSuite,
    CrashSuite,
    ProcessSuite,
    RaceSuite,
    GuaranteeSuite,
    LifecycleSuite,
    CostSuite,
    BoundSuite,
    FaultSuite,
    ErrorSuite,
    CapacitySuite,
    ConsumptionSuite,
    RoomSuite,
    ClearSuite,
    OverwriteSuite,
    CursorSuite,
    OverviewSuite,
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
    EqualCellsSuite,
    MultimodalSuite,
    MatrixSuite,
    GetSuite,
    PutRefusalSuite,
    PutSuite,
    KeepingSuite,
    RegistrationSuite,
    CapabilitySuite,
    JournalSuite,
    BlobSuite,
    SmokeSuite,
    chapter="",
):
    """Every test of the contract. Subclass it, name the backend, and override the fixture ``options``.

    `AuthorsClass` documents what a subclass may define. It may add its own tests, but must not override anything else
    of the kit.
    """


#: The suites, in the order in which they run.
SUITES: Final[tuple[type[Suite], ...]] = tuple(reversed(BackendConformance.__bases__))
