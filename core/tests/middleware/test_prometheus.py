"""The middleware `prometheus`: what a scrape of its endpoint says, and how processes find it."""

import contextlib
import json
import os
import re
import threading
import time
import urllib.request

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import ClaimTimeoutError, MissingDataError, PluginImportError
from dataplane_core.middleware import prometheus
from dataplane_testkit import backend_of


def scrape(address):
    """Name and labels -> value."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(dataplane\S+) (\S+)$", text, re.M)}


def suppressed(error, call, *arguments):
    with contextlib.suppress(error):
        call(*arguments)


def config(**options):
    return {"backend": "noop", "middleware": [{"prometheus": options}]}


def operations(operation, status="ok", error=""):
    labels = f'backend="noop",error="{error}",operation="{operation}",status="{status}"'
    return f"dataplane_operations_total{{{labels}}}"


def test_a_scrape_says_what_the_clients_of_the_process_did():
    with connect(config()) as one, connect(config()) as two:
        address = one.middleware[0].metrics_address
        assert two.middleware[0].metrics_address == address
        for client in (one, two):
            client.register_partition("p", ["x"], None, ["t"])
            client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 4)})
        one.get_samples(["a"], "p", ["x"])
        with pytest.raises(MissingDataError):
            one.get_samples(["absent"], "p", ["x"])
        one.claim_meta("p", "t", ["x"], 2)
        found = scrape(address)
        put = '{backend="noop",operation="put_samples"'
        get = '{backend="noop",operation="get_samples"'
        assert found[operations("put_samples")] == 2
        assert found[operations("get_samples", "error", "MissingDataError")] == 1
        assert found[f"dataplane_samples_total{put}}}"] == 4
        assert found[f"dataplane_bytes_total{put}}}"] == 64
        assert found[f"dataplane_bytes_total{get}}}"] == 16
        assert found[f"dataplane_operation_seconds_count{put}}}"] == 2
        assert found["dataplane_live_bytes"] == 64
        assert found['dataplane_moved_rows{path="wire"}'] == 0
        backend_of(one).moved_rows["wire"] = 7  # as a backend counts that has paths
        assert scrape(address)['dataplane_moved_rows{path="wire"}'] == 7
        assert found[f"dataplane_operations_in_flight{put}}}"] == 0
        two.clear_samples(["a"], "p")
        assert scrape(address)["dataplane_live_bytes"] == 48
    with pytest.raises(OSError):
        scrape(address)


def test_a_claim_that_waits_is_one_operation():
    with connect(config()) as client:
        client.register_partition("p", ["x"], None, ["t"])
        address = client.middleware[0].metrics_address
        waiting = threading.Thread(target=client.claim_meta, args=("p", "t", ["x"], 1))
        waiting.start()
        while scrape(address)["dataplane_waiting_claims"] != 1:
            time.sleep(0.01)
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        waiting.join()
        found = scrape(address)
        assert found["dataplane_waiting_claims"] == 0
        assert found[operations("claim")] == 1


def test_claims_that_never_ended_are_forgotten(monkeypatch):
    monkeypatch.setattr(prometheus, "_MOST_WAITING", 2)
    with connect(config()) as client:
        client.register_partition("p", ["x"], None, ["t"])
        (middleware,) = client.middleware
        middleware._waiting.update(dict.fromkeys("abc", 0.0))  # as of claims that were cancelled long ago
        client.claim_meta("p", "t", ["x"], 1, blocking=False)
        assert not middleware._waiting


def test_claims_that_end_without_samples_are_counted_and_wait_no_longer():
    with connect(config()) as client:
        client.register_partition("p", ["x"], None, ["t"])
        address = client.middleware[0].metrics_address

        def num_claims(status="ok", error=""):
            found = scrape(address)
            assert found["dataplane_waiting_claims"] == 0
            return found[operations("claim", status, error)]

        client.claim_meta("p", "t", ["x"], 1, blocking=False)
        assert num_claims() == 1
        with pytest.raises(ClaimTimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.05)
        assert num_claims() == 2
        waiting = threading.Thread(target=suppressed, args=(KeyError, client.claim_meta, "p", "t", ["x"], 1))
        waiting.start()
        while scrape(address)["dataplane_waiting_claims"] != 1:
            time.sleep(0.01)
        client.clear_samples(None, "p")
        waiting.join()
        assert num_claims("error", "UnknownPartitionError") == 1
        client.register_partition("p", ["x"], 1, ["t"])
        client.put_samples(["a"], "p", {"y": torch.zeros(1)})
        client.clear_samples(["a"], "p")
        client.claim_meta("p", "t", ["x"], 1)
        assert num_claims() == 3


def test_prometheus_finds_the_endpoints_in_files(tmp_path):
    folder = tmp_path / "targets"
    with connect(config(targets_folder=str(folder))) as client:
        (file,) = folder.iterdir()
        assert file.name.endswith(f"-{os.getpid()}.json")
        expected = [{"targets": [client.middleware[0].metrics_address], "labels": {"pid": str(os.getpid())}}]
        assert json.loads(file.read_text()) == expected
    assert not list(folder.iterdir())


def test_without_prometheus_client_the_error_says_what_to_install(python):
    program = (
        "import sys\nsys.modules['prometheus_client'] = None\n"
        "from dataplane_core import connect\n"
        "connect({'backend': 'noop', 'middleware': ['prometheus']})\n"
    )
    run = python.run("-c", program, check=False)
    assert run.returncode == 1
    assert PluginImportError.__name__ in run.stderr
    assert "pip install 'dataplane-core[prometheus]'" in run.stderr
