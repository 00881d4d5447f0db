"""The module over three backends, one connection per test file."""

import pytest
from tiers import in_long

import dataplane_compat.transfer_queue as module


@pytest.fixture(scope="module", params=["noop", *in_long("shm_store", "redis_store")])
def session(request):
    module.init({"backend": request.param, "op_timeout_s": 120, "controller": {"polling_mode": True}})
    yield module
    module.close()


@pytest.fixture
def tq(session):
    """The module, with an empty store."""
    for name in session.get_client().get_partition_list():
        session.get_client().clear_partition(name)
    return session
