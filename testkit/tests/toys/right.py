"""Right backends of rare sorts, which the kit must let pass."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from broken_stores import FolderStore, toy as stores
from table import Run

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.errors import AlreadyRunningError, ConfigError
from dataplane_core.spec import OPERATIONS, Capability, WireFormat, new_id
from dataplane_noop import NoopBackend


class DoesNotOverwrite(NoopBackend):
    def __init__(self, config):
        super().__init__(config)
        self._service._ledger._overwrite = False


class HasNoCapacity(NoopBackend):
    Config = NoOptions

    def __init__(self, config):
        super().__init__(CapacityOptions())


class DeclaresNothing(DoesNotOverwrite, HasNoCapacity):
    """Puts, reads and clears; all else is refused."""

    capabilities = frozenset()


class DeclaresClaims(DeclaresNothing):
    """Claims, and no other way to see tags."""

    capabilities = frozenset({Capability.CLAIMS})


class CarriesRows(NoopBackend):
    """An engine with two dtypes, no scalars, no empty rows, no jagged tensors and no objects."""

    _dtypes = frozenset({torch.uint8, torch.float32})
    wire = WireFormat(ragged="rows", promote_1d=True, objects="encoded", dtypes=_dtypes, zero_length_rows=False)


class CarriesBytes(NoopBackend):
    """An engine of bytes."""

    wire = WireFormat(bytes=True)

    def store_write(self, write_id, columns, num_samples, deadline):
        copies = {name: [bytes(frame) for frame in column] for name, column in columns.items()}
        super().store_write(write_id, copies, num_samples, deadline)


class StandsStill(NoopBackend):
    """On a machine that stands still for a while: its first ack and its first renewal come late."""

    acks, renews = 0, 0

    def ack(self, request):
        self.acks += 1
        time.sleep(1.6 if self.acks == 1 else 0)
        return super().ack(request)

    def renew(self, request):
        self.renews += 1
        time.sleep(1.6 if self.renews == 1 else 0)
        return super().renew(request)


class OthersCome(NoopBackend):
    """Another client announces itself between two announcements of the test."""

    count = 0

    def announce(self, request):
        self.count += 1
        if self.count == 5:
            another = replace(request.client, client_id=new_id())
            super().announce(replace(request, client=another, ttl_s=600.0))
        return super().announce(request)


_opened = []


class OpensOnce(NoopBackend):
    """A store of one process, such as a file, that refuses to be opened twice."""

    class Config(CapacityOptions):
        name: str = "main"

    @classmethod
    def isolated_options(cls, options, tag):
        return {**options, "name": tag}

    def start(self, *, bootstrap, deadline):
        if self.config.name in _opened:
            raise AlreadyRunningError(f"'{self.config.name}' is open.")
        _opened.append(self.config.name)

    def stop(self):
        _opened.remove(self.config.name)
        super().stop()


class OneCapacity(FolderStore):
    """All its clients have the capacity of the first one."""

    def start(self, *, bootstrap, deadline):
        super().start(bootstrap=bootstrap, deadline=deadline)
        path, mine = self.config.path / "capacity", str(self.config.capacity_bytes)
        if bootstrap:
            path.write_text(mine)
        elif path.read_text() != mine:
            raise ConfigError(f"the store at '{self.config.path}' has another capacity.")


_COLUMNS = "columns_come_back or objects_come_back or joins_across or hook or any_batch or count_once"
_BLOBS = "smoke or blob or many or journal or append or deleting or keys or engine"
_PROCESSES = "process or attach or bootstrap or fork or elsewhere or holder or kill"
_REFUSED = {f"test_undeclared_operations_are_refused[{each}]": "pass" for each in OPERATIONS}
RIGHT = {
    run.backend.__name__: run
    for run in (
        Run(DeclaresNothing, _REFUSED, "", 150),
        Run(DeclaresClaims, {}, "undeclared or tags or consumed or order or history", 20),
        Run(CarriesRows, {"test_equal_cells_count_once": "not declared"}, _COLUMNS, 40),
        Run(CarriesBytes, {}, _COLUMNS, 40),
        Run(StandsStill, {}, "acked_samples_never or renew_extends", 2),
        Run(OthersCome, {}, "listed or number_of_clients or announces", 5),
        Run(OpensOnce, {}, "close or attach or fork or bootstrap or auto or side_by_side or unknown_options", 8),
        Run(FolderStore, {}, f"{_BLOBS} or {_PROCESSES}", 50, stores.members),
        Run(
            OneCapacity,
            {"test_a_refused_put_leaves_later_ones_alone_for_clients_with_other_room": "not declared"},
            members=stores.members,
        ),
    )
}

#: Each declares all operations but one, and what builds on it.
ALL_BUT_ONE = {}
_ON_CLAIMS = {Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS, Capability.WAKES}
_BUILDS_ON = {Capability.CLAIMS: _ON_CLAIMS, Capability.OVERWRITE: {Capability.ATOMIC_OVERWRITE}}
_BASES = {Capability.OVERWRITE: DoesNotOverwrite, Capability.CAPACITY: HasNoCapacity}
for _operation in sorted(OPERATIONS & NoopBackend.capabilities):
    _declared = NoopBackend.capabilities - {_operation} - _BUILDS_ON.get(_operation, set())
    _backend = type(f"AllBut_{_operation}", (_BASES.get(_operation, NoopBackend),), {"capabilities": _declared})
    ALL_BUT_ONE[_backend.__name__] = Run(_backend, {}, "not compile", 150)
