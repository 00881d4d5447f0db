"""A client on the in-process backend with an open partition."""

import pytest

from dataplane_core.connecting import connect


@pytest.fixture
def client():
    """Partition ``train`` is registered."""
    with connect({"backend": "noop"}, bootstrap=True) as opened:
        opened.register_partition("train", [], None, ["policy"])
        yield opened
