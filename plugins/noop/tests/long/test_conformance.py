from __future__ import annotations

from noop_case import NoopCase

from dataplane_testkit import BackendConformance


class TestNoopThroughAsyncio(NoopCase, BackendConformance):
    """The contract through `AsyncDataPlaneClient`."""

    through_asyncio = True
