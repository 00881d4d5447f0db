"""The middleware `prometheus`: what a scrape of its endpoint says, and how processes find it."""

import json
import os
import re
import sys
import urllib.request

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import ClaimTimeoutError, MissingDataError, PluginImportError
from dataplane_observe import prometheus
from dataplane_testkit import backend_of
from dataplane_testkit._timing import Background, eventually


def scrape(address):
    """Name and labels -> value."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(dataplane\S+) (\S+)$", text, re.M)}


def config(**options):
    return {"backend": "noop", "middleware": [{"prometheus": options}]}


def operations(operation, status="ok", error=""):
    labels = f'backend="noop",error="{error}",operation="{operation}",status="{status}"'
    return f"dataplane_operations_total{{{labels}}}"


def test_a_scrape_says_what_the_clients_of_the_process_did():
    with connect(config()) as one, connect(config()) as two:
        address = one.middleware[0].metrics_address
        assert two.middleware[0].metrics_address == address
        assert address.startswith("127.0.0.1:")
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


def test_claims_however_they_end_are_one_operation_and_wait_no_longer():
    with connect(config()) as client:
        client.register_partition("p", ["x"], None, ["t"])
        address = client.middleware[0].metrics_address

        def num_claims(status="ok", error=""):
            found = scrape(address)
            assert found["dataplane_waiting_claims"] == 0
            return found[operations("claim", status, error)]

        def claim_that_waits():
            claim = Background(lambda: client.claim_meta("p", "t", ["x"], 1))
            eventually(lambda: scrape(address)["dataplane_waiting_claims"] == 1, what="a claim that waits")
            return claim

        client.claim_meta("p", "t", ["x"], 1, blocking=False)
        assert num_claims() == 1
        with pytest.raises(ClaimTimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.05)
        assert num_claims("timeout", "ClaimTimeoutError") == 1
        served = claim_that_waits()
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        served.result()
        assert num_claims() == 2
        refused = claim_that_waits()
        client.clear_samples(None, "p")
        with pytest.raises(KeyError):
            refused.result()
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


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, prometheus.__name__)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(PluginImportError) as caught:
        connect(config())
    assert "pip install 'dataplane-observe[prometheus]'" in f"{caught.value} {caught.value.hint}"
