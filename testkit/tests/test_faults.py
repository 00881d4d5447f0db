"""What authors may do with `Faults` and the kit does not. What the kit asks of it, each run of the kit shows."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.connecting import connect
from dataplane_core.errors import BackendError
from dataplane_testkit import Faults


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def client(faults):
    with connect({"backend": "noop", "middleware": [faults]}) as client:
        client.register_partition("p", ["x"], None, ["train"])
        yield client


def put(client, name):
    client.put_samples([name], "p", {"x": torch.zeros(1)})


def test_faults_of_one_operation_may_be_nested(client, faults):
    seen = []

    def before(name):
        return faults.before("put_samples", lambda request: seen.append(name))

    def after(name):
        return faults.after("put_samples", lambda request, reply: seen.append(name) or reply)

    with before("before"), after("outer"):
        with before("inner before"), after("inner"):
            put(client, "a")
        put(client, "b")
    put(client, "c")
    assert seen == ["before", "inner before", "outer", "inner", "before", "outer"]


def test_truncation_cuts_jagged_columns_too(client, faults):
    client.register_partition("p", ["z"], None, ["train"])
    client.put_samples(["a", "b"], "p", {"z": [[1, 2], [1, 2, 3]]})
    with faults.truncation(), pytest.raises(BackendError, match="1 rows"):
        client.get_samples(["a", "b"], "p", ["z"])
    assert len(client.get_samples(["a", "b"], "p", ["z"])["z"].unbind()) == 2
