"""`dataplane metrics`: where processes serve their metrics, also once one is killed, and what the store says. The
dashboard of examples/grafana shows that, and nothing else.
"""

import json
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from contents import config_in
from prometheus_client.parser import text_string_to_metric_families

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.spec import AnnounceRequest, CallInfo, ClientInfo
from dataplane_testkit import backend_of
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools._metrics import Gauges, _is_of

WORKER = """
import sys, time, torch
from dataplane_core import connect
from dataplane_core.config import load_config
config = load_config(sys.argv[1]).model_copy(update={"role": sys.argv[2]})
with connect(config, bootstrap=False) as client:
    client.put_samples([sys.argv[2]], "step-1", {"x": torch.zeros(1, 25)})
    time.sleep(600)
"""

#: A client that does not announce itself while a test counts clients.
QUIET = {"backend": "noop", "announce_s": None}


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path, announce_s=1, options={"capacity_bytes": 50_000_000}, middleware=["prometheus"])


def read(url):
    """Name and labels -> value."""
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(dataplane\S+) (\S+)$", text, re.M)}


def test_prometheus_is_told_where_each_process_serves_its_metrics(config, python):
    with connect(config) as client:
        client.register_partition("step-1", ["x"], None, ["t"])
        workers = {name: python.start("-c", WORKER, config, name) for name in ("a", "b")}
        command = python.start("-m", "dataplane_core", "metrics", config, stdout=subprocess.PIPE)
        try:
            url = command.stdout.readline().decode().strip()
            assert url.endswith("/targets")
            page = url.replace("/targets", "/metrics")

            def targets():
                found = json.loads(urllib.request.urlopen(url, timeout=60).read())
                return {target["labels"]["role"]: target for target in found}

            eventually(lambda: {"a", "b"} <= targets().keys(), within_s=STARTS_S, what="the workers' announcements")
            for name, worker in workers.items():
                target = targets()[name]
                assert target["labels"] == {"host": socket.gethostname(), "pid": str(worker.pid), "role": name}
                (address,) = target["targets"]
                served = read(f"http://{address}/metrics")
                assert served['dataplane_bytes_total{backend="shm_store",operation="put_samples"}'] == 100
            assert any(name.startswith("dataplane_client_longest_call_seconds{") for name in read(page))
            workers["b"].kill()
            eventually(lambda: "b" not in targets(), within_s=STARTS_S, what="the end of a killed process")
            client.close()
            assert targets() == {}
            assert read(page) == {"dataplane_store_up": 0}
            with connect(config):
                assert read(page)["dataplane_store_up"] == 1
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 0
        finally:
            for process in (*workers.values(), command):
                process.kill()
                process.wait()
            command.stdout.close()


def test_what_is_an_error(tmp_path, capsys, monkeypatch):
    """A port that cannot be had, and a backend whose clients do not announce themselves."""
    path = config_in(tmp_path, options={"capacity_bytes": 50_000_000})
    with connect(path), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 99999):
            assert main(["metrics", path, "--port", str(port)]) == 1
            assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    with connect({"backend": "noop"}) as client:
        client._connection.capabilities -= {"clients"}
        monkeypatch.setattr("dataplane_tools._metrics.attach", lambda path: client)
        assert main(["metrics", path]) == 1
    assert "does not declare 'clients'" in capsys.readouterr().err


def test_clients_of_one_process_are_one_line_each_metric():
    """Prometheus refuses a page with two values of one label set."""
    with connect(QUIET) as client:
        for name, running_s in (("one", 5.0), ("two", 7.0), ("three", 6.0)):
            calls = [CallInfo(operation="claim_meta", partition_id="p", running_s=running_s)]
            told = ClientInfo(client_id=name, host="h", pid=1, role="r", open_s=0.0, calls=calls)
            backend_of(client).announce(AnnounceRequest(client=told, ttl_s=60.0, deadline=float("inf")))
        for metric in Gauges(client, lambda: client).collect():
            assert len({tuple(each.labels.items()) for each in metric.samples}) == len(metric.samples), metric.name
            if metric.name == "dataplane_client_longest_call_seconds":
                assert [int(each.value) for each in metric.samples] == [7]


def test_the_backlog_of_tasks_and_who_is_starved(gauges):
    def values(name):
        found = {each.name: each for each in gauges.collect()}[name]
        return {tuple(each.labels.values()): each.value for each in found.samples}

    eventually(lambda: values("dataplane_starved_seconds"), STARTS_S, "a task that is starved")
    ((labels, waited_s),) = values("dataplane_starved_seconds").items()
    assert labels == ("train", "unwritten")
    assert waited_s >= 0.5
    assert values("dataplane_task_backlog") == {("score",): 5, ("train",): 6}
    assert values("dataplane_task_ready") == {("score",): 2, ("train",): 0}


def test_the_dashboard_shows_every_metric_and_no_other(gauges):
    dashboard = json.loads((Path(__file__).parents[3] / "examples/grafana/dataplane.json").read_text())
    questions = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    shown = {name for question in questions for name in re.findall(r"dataplane_\w+", question)}
    assert 'up{job="dataplane"}' in questions  # Prometheus' own, for each process

    def served():
        pages = [metric.samples for metric in gauges.collect()]
        for target in gauges.targets():
            text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=60).read().decode()
            pages += [metric.samples for metric in text_string_to_metric_families(text)]
        names = {sample.name for page in pages for sample in page}
        return {name for name in names if not name.endswith(("_created", "_count", "_sum"))}

    def shows_all():
        found = served()
        return "dataplane_starved_seconds" in found and found == shown

    eventually(shows_all, STARTS_S, f"a task that is starved, and nothing served but {shown}")


@pytest.mark.parametrize(
    ("address", "host", "is_told"),
    [
        ("127.0.0.1:80", "elsewhere.invalid", True),
        ("[::1]:80", "elsewhere.invalid", True),
        ("192.0.2.7:80", "192.0.2.7", True),
        ("192.0.2.7:80", "192.0.2.8", False),
        ("169.254.169.254:80", "127.0.0.1", False),
        ("127.0.0.1:80@192.0.2.7:80", "127.0.0.1", False),
        ("127.0.0.1:80/x?", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("elsewhere.invalid:80", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_only_the_hosts_of_clients_are_told(address, host, is_told):
    assert _is_of(address, host) is is_told


def test_names_with_control_characters_are_labels_with_their_escapes():
    with connect(QUIET) as client:
        told = ClientInfo(
            client_id="c", host="h\n\x1b[1m", pid=1, role="\u202er", open_s=0.0, metrics_address="127.0.0.1:80"
        )
        backend_of(client).announce(AnnounceRequest(client=told, ttl_s=60.0, deadline=float("inf")))
        (target,) = Gauges(client, lambda: client).targets()
    assert target == {
        "targets": ["127.0.0.1:80"],
        "labels": {"host": "h\\n\\x1b[1m", "pid": "1", "role": "\\u202er"},
    }
