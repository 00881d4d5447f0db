"""The kit on right backends: each declares all operations but one, and what builds on it."""

from __future__ import annotations

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.spec import OPERATIONS, Capability
from dataplane_noop import NoopBackend
from dataplane_testkit import BackendConformance

_CLAIMS = {Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS, Capability.WAKES}
_BUILD_ON = {Capability.CLAIMS: _CLAIMS, Capability.OVERWRITE: {Capability.ATOMIC_OVERWRITE}}


class DoesNotOverwrite(NoopBackend):
    def __init__(self, config):
        super().__init__(config)
        self._service._ledger._overwrite = False


class HasNoCapacity(NoopBackend):
    Config = NoOptions

    def __init__(self, config):
        super().__init__(CapacityOptions())


_BASES = {Capability.OVERWRITE: DoesNotOverwrite, Capability.CAPACITY: HasNoCapacity}

for _operation in sorted(OPERATIONS & NoopBackend.capabilities):
    _name = f"AllBut_{_operation}"
    _capabilities = NoopBackend.capabilities - {_operation} - _BUILD_ON.get(_operation, set())
    _backend = type(_name, (_BASES.get(_operation, NoopBackend),), {"capabilities": _capabilities})
    globals()[f"Test{_name}"] = type(f"Test{_name}", (BackendConformance,), {"backend_class": _backend})
