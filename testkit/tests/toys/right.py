"""Right backends of rare sorts, which the kit must let pass; see `table`."""
# ruff: noqa: F401 - the rows use what is imported

from __future__ import annotations

import time

from broken_stores import FolderStore, processes
from msgspec.structs import replace
from table import Run, Table

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.spec import Capability, WireFormat, new_id
from dataplane_core.spec.capabilities import GUARANTEES
from dataplane_noop import NoopBackend


class NamedOptions(CapacityOptions):
    name: str = "main"


opened: set[str] = set()
noop, folder = Table(NoopBackend, __name__, {}), Table(FolderStore, __name__, {}, **processes.members)
noop.rows("""
DeclaresNothing.capabilities: frozenset()
DeclaresClaims.capabilities: frozenset({Capability.CLAIMS})
Promotes.wire: WireFormat(promote_1d=True)
CarriesBytes.wire: WireFormat(bytes=True)
CarriesBytes.store_write: columns = {name: list(map(bytes, column)) for name, column in columns.items()}
StandsStill.ack: time.sleep(0 if seen["asked"] else 1.6); seen["asked"].append(request)  # the first one comes late
StandsStill.renew: time.sleep(0 if seen["renewed"] else 1.6); seen["renewed"].append(request)
OthersCome.announce: seen["announced"].append(request)  # another client, between two announcements of the test
    another = replace(request, client=replace(request.client, client_id=new_id()), ttl_s=600.0)
    if len(seen["announced"]) == 5: right(another)
OpensOnce.Config: NamedOptions
OpensOnce.start: if self.config.name in opened: raise AlreadyRunningError(f"'{self.config.name}' is open.")
    opened.add(self.config.name)
OpensOnce.stop: opened.discard(self.config.name)
""")
noop.toy("OpensOnce", isolated_options=staticmethod(lambda options, tag: {**options, "name": tag}))
folder.toy("Plain")
_ENGINE = "smoke or many or log or append or deleted or handles or engine or row_comes or rows_from or rows_are"
_PROCESSES = "process or attach or bootstrap or fork or elsewhere or holder or kill"
#: Name -> the tests that must pass, and how many at least.
_TESTS = {
    "DeclaresNothing": ("", 40),
    "DeclaresClaims": ("order or histories or claim", 4),
    **dict.fromkeys(("Promotes", "CarriesBytes"), ("columns_come_back or objects_come_back or hook or narrow", 23)),
    "StandsStill": ("history or histories", 1),
    "OthersCome": ("listed or number_of_clients or announces", 2),
    "OpensOnce": ("close or attach or fork or bootstrap or auto or side_by_side or declarations", 4),
    "Plain": (f"{_ENGINE} or {_PROCESSES}", 35),
}
#: Each declares all operations but one, and what builds on it.
_ON_CLAIMS = {Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS, Capability.WAKES}
_BUILDS_ON = {Capability.CLAIMS: _ON_CLAIMS, Capability.OVERWRITE: {Capability.ATOMIC_OVERWRITE}}
for _operation in sorted(NoopBackend.capabilities - GUARANTEES):
    _without = {_operation} | _BUILDS_ON.get(_operation, set())
    noop.toy(f"AllBut_{_operation}", capabilities=NoopBackend.capabilities - _without)
    _TESTS[f"AllBut_{_operation}"] = ("not compile", 50)
for _run in noop.values():
    if Capability.OVERWRITE not in _run.backend.capabilities:
        noop.rows(f"{_run.backend.__name__}.start: self._service.ledger._overwrite = False")
    if Capability.CAPACITY not in _run.backend.capabilities:
        _init = {"__init__": lambda self, init, config: init(CapacityOptions())}
        noop.toy(_run.backend.__name__, Config=NoOptions, **_init)
RUNS = {
    name: ({**noop, **folder})[name]._replace(selection=selection, least=least)
    for name, (selection, least) in _TESTS.items()
}
