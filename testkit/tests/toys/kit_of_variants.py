"""The kit on backends that are right, and declare as little, or carry as little, as can be."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

import torch

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.errors import AlreadyRunningError
from dataplane_core.spec import Capability, WireFormat, new_id
from dataplane_noop import NoopBackend
from dataplane_testkit import BackendConformance
from dataplane_testkit.suites.clients import ClientSuite
from dataplane_testkit.suites.leases import LeaseSuite
from dataplane_testkit.suites.lifecycle import LifecycleSuite


class DeclaresNothing(NoopBackend):
    """Puts, reads and clears; all else is refused."""

    capabilities = frozenset()
    Config = NoOptions

    def __init__(self, config):
        super().__init__(CapacityOptions())
        self._service._ledger._overwrite = False


class DeclaresClaims(DeclaresNothing):
    """Claims, and no other way to see tags."""

    capabilities = frozenset({Capability.CLAIMS})


class CarriesRows(NoopBackend):
    """An engine with two dtypes, no scalars, no empty rows, no jagged tensors and no objects."""

    wire = WireFormat(
        ragged="rows",
        promote_1d=True,
        objects="encoded",
        dtypes=frozenset({torch.uint8, torch.float32}),
        zero_length_rows=False,
    )


class CarriesBytes(NoopBackend):
    """An engine of bytes."""

    wire = WireFormat(bytes=True)

    def store_write(self, write_id, columns, num_samples, deadline):
        copies = {name: [bytes(frame) for frame in column] for name, column in columns.items()}
        super().store_write(write_id, copies, num_samples, deadline)


class StandsStill(NoopBackend):
    """On a machine that stands still for a while: its first ack and its first renewal come late."""

    def _late(self, operation):
        late = self.__dict__.setdefault("late", set())
        if operation not in late:
            late.add(operation)
            time.sleep(1.6)

    def ack(self, request):
        self._late("ack")
        return super().ack(request)

    def renew(self, request):
        self._late("renew")
        return super().renew(request)


class OthersCome(NoopBackend):
    """Another client announces itself between two announcements of the test."""

    def announce(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        if self.count == 5:
            another = replace(request.client, client_id=new_id())
            super().announce(replace(request, client=another, ttl_s=600.0))
        return super().announce(request)


class NamedOptions(CapacityOptions):
    name: str = "main"


class OpensOnce(NoopBackend):
    """A store of one process, such as a file, that refuses to be opened twice."""

    Config = NamedOptions
    opened: ClassVar = set()

    @classmethod
    def isolated_options(cls, options, tag):
        return {**options, "name": tag}

    def start(self, *, bootstrap, deadline):
        if self.config.name in self.opened:
            raise AlreadyRunningError(f"'{self.config.name}' is open.")
        self.opened.add(self.config.name)

    def stop(self):
        self.opened.discard(self.config.name)
        super().stop()


class TestDeclaresNothing(BackendConformance):
    backend_class = DeclaresNothing


class TestDeclaresClaims(BackendConformance):
    backend_class = DeclaresClaims


class TestCarriesRows(BackendConformance):
    backend_class = CarriesRows


class TestCarriesBytes(BackendConformance):
    backend_class = CarriesBytes


class TestStandsStill(LeaseSuite):
    backend_class = StandsStill


class TestOthersCome(ClientSuite):
    backend_class = OthersCome


class TestOpensOnce(LifecycleSuite):
    backend_class = OpensOnce
