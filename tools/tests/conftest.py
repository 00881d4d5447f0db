"""Stores that commands look at, and what tests do to them."""

import pytest
import torch
from contents import config_in

from dataplane_core import connect
from dataplane_testkit._timing import Background
from dataplane_tools._metrics import Gauges


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The path of the config of a store that other processes of the host can attach to."""
    options = {"capacity_bytes": "50MB", "namespace": "of-commands"}
    return config_in(tmp_path_factory.mktemp("store"), announce_s=None, options=options, middleware=["metrics"])


@pytest.fixture(scope="module")
def opened(config):
    with connect(config) as client:
        yield client


@pytest.fixture
def store(opened):
    """The client of the store, which is empty."""
    yield opened
    for partition in opened.list_partitions():
        opened.clear_samples(None, partition)


@pytest.fixture
def nowhere(tmp_path):
    """The path of the config of a store that is not there, unless the test starts it."""
    return config_in(tmp_path, attach_wait_s=0, options={"capacity_bytes": "50MB", "namespace": "nowhere"})


@pytest.fixture
def client():
    """A store of this process."""
    with connect({"backend": "noop"}) as client:
        yield client


@pytest.fixture
def other():
    """A second store."""
    with connect({"backend": "noop"}) as client:
        yield client


@pytest.fixture
def written(client):
    """A store with ``p``: 4 of 5 rows are finished."""
    client.register_partition("p", ["tokens", "reward"], 5, ["train"])
    columns = {"tokens": [[1, 2, 3], [4], [], [5, 6], [7]], "reward": torch.tensor([0.0, 0.25, 0.5, 0.75])}
    ids = ["a", "b", "c", "d", "e"]
    tags = [{"weight_version": 7 + number, "reward": "good", "kind": number or "odd"} for number in range(5)]
    client.put_samples(ids, "p", {"tokens": columns["tokens"]}, tags=tags)
    client.put_samples(ids[:4], "p", {"reward": columns["reward"].bfloat16()})
    return client


@pytest.fixture
def before(monkeypatch):
    """Does something before a call of a method: ``before(client, "ack", 2, act)`` before the second one.

    ``act`` may return what the call returns instead.
    """

    def patch(of, name, number, act):
        real, calls = getattr(of, name), []

        def call(*arguments, **options):
            calls.append(arguments)
            instead = act() if len(calls) == number else None
            return real(*arguments, **options) if instead is None else instead

        monkeypatch.setattr(of, name, call)
        return calls

    return patch


@pytest.fixture
def gauges():
    """A store of two partitions with 3 samples each: one task claimed one of them, and another one is starved."""
    config = {"backend": "noop", "middleware": ["prometheus"], "announce_s": 0.2, "warn_after_s": 0.5}
    with connect(config) as client:
        for name in ("step-1", "step-2"):
            client.register_partition(name, ["x", "y"], None, ["score", "train"])
            client.put_samples(["a", "b", "c"], name, {"x": torch.zeros(3)})
        client.claim_meta("step-1", "score", ["x"], 1)
        waiting = Background(lambda: client.claim_meta("step-1", "train", ["x", "y"], 3, timeout_s=600.0))
        yield Gauges(client, lambda: client)
        client.clear_samples(None, "step-1")
        with pytest.raises(KeyError):
            waiting.result()
