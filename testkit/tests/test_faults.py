"""The fault wrappers. What the kit's own tests ask of them, the kit shows on every backend."""

from __future__ import annotations

import time

import pytest
import torch

from dataplane_core.connecting import connect
from dataplane_core.errors import BackendError, BackendUnavailableError
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


@pytest.mark.parametrize(("kind", "written"), [("error_before", []), ("error_after", ["a"])])
def test_an_error_before_reaches_no_backend_and_one_after_loses_only_the_reply(client, faults, kind, written):
    with getattr(faults, kind)("put_samples", BackendUnavailableError("gone")), pytest.raises(BackendUnavailableError):
        put(client, "a")
    assert client.list_sample_ids("p") == written


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


def test_a_late_request_reaches_the_backend_after_its_deadline(client, faults):
    late = []
    with (
        faults.late("put_samples"),
        faults.after("put_samples", lambda request, reply: late.append(time.monotonic() > request.deadline) or reply),
    ):
        put(client, "a")
    assert late == [True]


def test_truncation_cuts_jagged_columns_too(client, faults):
    client.register_partition("p", ["z"], None, ["train"])
    client.put_samples(["a", "b"], "p", {"z": [[1, 2], [1, 2, 3]]})
    with faults.truncation(), pytest.raises(BackendError, match="1 rows"):
        client.get_samples(["a", "b"], "p", ["z"])
    assert len(client.get_samples(["a", "b"], "p", ["z"])["z"].unbind()) == 2
