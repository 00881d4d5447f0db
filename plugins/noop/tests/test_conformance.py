from __future__ import annotations

from noop_case import NoopCase

from dataplane_testkit import BackendConformance


class TestNoop(NoopCase, BackendConformance):
    """The reference backend keeps the whole contract."""
