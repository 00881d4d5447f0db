"""The kit on a store of several processes, one that is right and one that is wrong."""

from __future__ import annotations

import struct
import time

import pytest
from host_store import (
    BootstrapsOverWhatRuns,
    DiesBadly,
    GivesUpAtOnce,
    HangsInForks,
    HostStore,
    KeepsCursorsInTheClient,
    LocksTheStore,
    WakesTheDead,
)

from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance
from dataplane_testkit.suites.lifecycle import LifecycleSuite
from dataplane_testkit.suites.processes import ProcessSuite
from dataplane_testkit.suites.wakes import WakeSuite


def _at(name):
    """The options of a store whose socket has this name."""

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"address": str(tmp_path_factory.getbasetemp() / name)}

    return options


class TestHostStore(BackendConformance):
    backend_class = HostStore
    options = _at("host")

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1}

    def raw_get(self, backend, partition_id, sample_id, field):
        forever = time.monotonic() + 60
        (part,) = backend.call_ledger(forever, commands.Locate(partition_id, [sample_id], [field])).parts
        (row,) = backend.get_rows([part.write_id + part.positions[0]], forever)
        # a row: 8 bytes of header with the number of its cells, their lengths, the cells
        (count,) = struct.unpack_from("<I", row, 4)
        lengths = struct.unpack_from(f"<{count}q", row, 8)
        start = 8 + 8 * count + sum(lengths[: part.slots[0]])
        return row[start : start + lengths[part.slots[0]]]


class TestKeepsCursorsInTheClient(BackendConformance):
    backend_class = KeepsCursorsInTheClient
    options = _at("cursors")


class TestDiesBadly(ProcessSuite):
    backend_class = DiesBadly
    options = _at("dies")


class TestLocksTheStore(ProcessSuite):
    backend_class = LocksTheStore
    options = _at("locks")


class TestWakesTheDead(WakeSuite):
    backend_class = WakesTheDead
    options = _at("wakes")


class TestGivesUpAtOnce(LifecycleSuite):
    backend_class = GivesUpAtOnce
    options = _at("gives_up")


class TestBootstrapsOverWhatRuns(LifecycleSuite):
    backend_class = BootstrapsOverWhatRuns
    options = _at("twice")


class TestHangsInForks(LifecycleSuite):
    backend_class = HangsInForks
    options = _at("hangs")
