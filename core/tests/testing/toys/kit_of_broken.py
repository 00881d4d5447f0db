"""For each broken backend the suite of the kit that holds the test it must fail; and the whole kit for the backend that
they all derive from."""

from __future__ import annotations

import broken_under_faults  # noqa: F401 - registers its backends
from broken import BROKEN

from dataplane_core.testing import BackendConformance
from dataplane_core.testing._conformance import SUITES
from dataplane_noop import NoopBackend


class TestNoopBackend(BackendConformance):
    backend_class = NoopBackend


for _backend, _test in BROKEN.items():
    _name = f"Test{_backend.__name__}"
    (_suite,) = (suite for suite in SUITES if _test.partition("[")[0] in vars(suite))
    globals()[_name] = type(_name, (_suite,), {"backend_class": _backend, "__module__": __name__})
