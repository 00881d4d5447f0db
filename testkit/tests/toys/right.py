"""Right backends of rare sorts, which the kit must let pass."""

from __future__ import annotations

import time

import torch
from broken_stores import FolderStore, toy as stores
from msgspec.structs import replace
from table import Run, Table

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.errors import AlreadyRunningError
from dataplane_core.spec import GUARANTEES, Capability, WireFormat, new_id
from dataplane_noop import NoopBackend

noop, folder = Table(NoopBackend, __name__), Table(FolderStore, __name__, **stores.members)


def _overwrites_nothing(self, start, **how):
    self._service.ledger._overwrite = False
    start(**how)


def _late_at_first(self, right, request):
    requests = self.seen[type(request)]
    requests.append(request)
    time.sleep(1.6 if len(requests) == 1 else 0)
    return right(request)


class _NamedOptions(CapacityOptions):
    name: str = "main"


_opened = set()
_NO_OVERWRITE = {"start": _overwrites_nothing}
_NO_CAPACITY = {"Config": NoOptions, "__init__": lambda self, init, config: init(CapacityOptions())}
_ROWS = WireFormat(
    ragged="rows",
    promote_1d=True,
    objects="encoded",
    dtypes=frozenset({torch.uint8, torch.float32}),
    zero_length_rows=False,
)

# fmt: off
noop.row("DeclaresNothing", "Puts, reads and clears; all else is refused.", capabilities=frozenset(),
         **_NO_OVERWRITE, **_NO_CAPACITY)
noop.row("DeclaresClaims", "Claims, and no other way to see tags.", capabilities=frozenset({Capability.CLAIMS}),
         **_NO_OVERWRITE, **_NO_CAPACITY)
noop.row("CarriesRows", "Two dtypes, no scalars, no empty rows, no jagged tensors and no objects.", wire=_ROWS)
noop.row("StandsStill", "On a machine that stands still for a while: its first ack and renewal come late.",
         ack=_late_at_first, renew=_late_at_first)

@noop("An engine of bytes.", wire=WireFormat(bytes=True))
def carries_bytes(self, store_write, write_id, columns, *rest):
    store_write(write_id, {name: list(map(bytes, column)) for name, column in columns.items()}, *rest)

@noop("A store of one process, such as a file, that refuses to be opened twice.", Config=_NamedOptions,
      isolated_options=staticmethod(lambda options, tag: {**options, "name": tag}))
def opens_once(self, start, **how):
    if self.config.name in _opened:
        raise AlreadyRunningError(f"'{self.config.name}' is open.")
    _opened.add(self.config.name)
    start(**how)

@noop.also("OpensOnce")
def _closes(self, stop):
    _opened.discard(self.config.name)
    stop()

@noop("Another client announces itself between two announcements of the test.")
def others_come(self, announce, request):
    self.seen["announced"].append(request)
    if len(self.seen["announced"]) == 5:
        announce(replace(request, client=replace(request.client, client_id=new_id()), ttl_s=600.0))
    return announce(request)
# fmt: on

folder.row("Plain", "What `dataplane new-plugin --log` writes.")

_COLUMNS = "columns_come_back or objects_come_back or hook or narrow"
_ENGINE = "smoke or many or log or append or deleted or handles or engine or row_comes or rows_from or rows_are"
_PROCESSES = "process or attach or bootstrap or fork or elsewhere or holder or kill"
#: Name -> the tests that run, how many must pass at least, and outcomes of some.
_TESTS = {
    "DeclaresNothing": ("", 40, {}),
    "DeclaresClaims": ("order or histories or claim", 4, {}),
    "CarriesRows": (_COLUMNS, 24, {"test_narrow_integers_take_less_room": "not declared"}),
    "CarriesBytes": (_COLUMNS, 24, {}),
    "StandsStill": ("history or histories", 1, {}),
    "OthersCome": ("listed or number_of_clients or announces", 2, {}),
    "OpensOnce": ("close or attach or fork or bootstrap or auto or side_by_side or declarations", 4, {}),
    "Plain": (f"{_ENGINE} or {_PROCESSES}", 35, {}),
}
RIGHT = {
    name: ({**noop, **folder})[name]._replace(selection=selection, least=least, tests=tests)
    for name, (selection, least, tests) in _TESTS.items()
}

_ON_CLAIMS = {Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS, Capability.WAKES}
_BUILDS_ON = {Capability.CLAIMS: _ON_CLAIMS, Capability.OVERWRITE: {Capability.ATOMIC_OVERWRITE}}
_LACKS = {Capability.OVERWRITE: _NO_OVERWRITE, Capability.CAPACITY: _NO_CAPACITY}
#: Each declares all operations but one, and what builds on it.
ALL_BUT_ONE: dict[str, Run] = {}
for _operation in sorted(NoopBackend.capabilities - GUARANTEES):
    _declared = NoopBackend.capabilities - {_operation} - _BUILDS_ON.get(_operation, set())
    _name = f"AllBut_{_operation}"
    noop.row(_name, "Declares less.", capabilities=_declared, **_LACKS.get(_operation, {}))
    ALL_BUT_ONE[_name] = noop[_name]._replace(tests={}, selection="not compile", least=50)
