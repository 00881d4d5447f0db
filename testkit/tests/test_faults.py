"""The fault wrappers. What the kit's own tests ask of them, the kit shows on every backend."""

from __future__ import annotations

import time

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.connecting import connect
from dataplane_core.errors import BackendError, BackendUnavailableError
from dataplane_testkit import Faults


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def client(faults):
    with connect({"backend": "noop", "middleware": [faults]}) as client:
        client.register_partition("p", ["x", "y"], None, ["train"])
        yield client


def _put(client, *names):
    fields = {"x": torch.arange(len(names)), "y": torch.ones(len(names), 2)}
    client.put_samples(names, "p", TensorDict(fields, batch_size=[len(names)]))


def _get(client, *names):
    return client.get_samples(names, "p", ["x", "y"])["x"].tolist()


def test_an_error_before_reaches_no_backend(client, faults):
    with faults.error_before("put_samples", BackendUnavailableError("gone")), pytest.raises(BackendUnavailableError):
        _put(client, "a")
    with pytest.raises(KeyError):
        _get(client, "a")


def test_an_error_after_loses_only_the_reply(client, faults):
    with faults.error_after("put_samples", BackendUnavailableError("gone")), pytest.raises(BackendUnavailableError):
        _put(client, "a")
    assert _get(client, "a") == [0]


def test_faults_of_one_operation_may_be_nested(client, faults):
    seen = []

    def after(name):
        def act(request, reply):
            seen.append(name)
            return reply

        return faults.after("put_samples", act)

    with faults.before("put_samples", lambda request: seen.append("before")), after("outer"):
        with faults.before("put_samples", lambda request: seen.append("inner before")), after("inner"):
            _put(client, "a")
        assert seen == ["before", "inner before", "outer", "inner"]
        seen.clear()
        _put(client, "b")
        assert seen == ["before", "outer"]
    _put(client, "c")
    assert seen == ["before", "outer"]


def test_a_delay_holds_requests_back(client, faults):
    start = time.monotonic()
    with faults.delay("put_samples", 0.05):
        _put(client, "a")
    assert time.monotonic() - start >= 0.05


def test_a_late_request_reaches_the_backend_after_its_deadline(client, faults):
    late_by_s = []

    def seen(request, reply):
        late_by_s.append(time.monotonic() - request.deadline)
        return reply

    with faults.late("put_samples"), faults.after("put_samples", seen):
        _put(client, "a")
    assert late_by_s[0] > 0


def test_truncation_cuts_jagged_and_object_columns_too(client, faults):
    rows = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    client.put_samples(["a", "b"], "p", TensorDict({"z": rows}, batch_size=[2]))
    with faults.truncation(), pytest.raises(BackendError, match="1 rows"):
        client.get_samples(["a", "b"], "p", ["z"])
    assert len(client.get_samples(["a", "b"], "p", ["z"])["z"].unbind()) == 2
