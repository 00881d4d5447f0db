"""The contract through `AsyncDataPlaneClient`."""

import pytest
from through_asyncio import ThroughAsyncio

from dataplane_core.connecting import connect_backend
from dataplane_testkit import BackendConformance, _store


class TestNoopThroughAsyncio(BackendConformance):
    backend = "noop"
    # the kit counts the tensors of one thread, and the hooks run in others
    most_copies = dict.fromkeys(("put_samples", "get_samples"), (99.0, "not counted"))

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def clients(cls):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_store, "connect_backend", lambda *args, **how: ThroughAsyncio(connect_backend(*args, **how)))
            yield
