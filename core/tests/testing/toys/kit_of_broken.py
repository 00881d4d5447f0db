"""One class of the kit per broken backend, and one for the backend that they all derive from."""

from __future__ import annotations

from broken import BROKEN

from dataplane_core.testing import BackendConformance
from dataplane_noop import NoopBackend

for _backend in [NoopBackend, *BROKEN]:
    _name = f"Test{_backend.__name__}"
    globals()[_name] = type(_name, (BackendConformance,), {"backend_class": _backend, "__module__": __name__})
