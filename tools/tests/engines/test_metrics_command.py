"""`dataplane metrics`: the metrics of several processes on one page, also while one is stopped or killed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request

import pytest

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.spec import AnnounceRequest, CallInfo, ClientInfo
from dataplane_testkit import backend_of
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import _metrics
from dataplane_tools._metrics import Federation, _url_of

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
    path = tmp_path / "config.yaml"
    path.write_text(
        "{backend: shm_store, announce_s: 1, options: {capacity_bytes: 50000000}, middleware: [prometheus]}"
    )
    return str(path)


def read(url):
    """Name and labels -> value."""
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(dataplane\S+) (\S+)$", text, re.M)}


def labels(process, role, **more):
    own = {**more, "host": socket.gethostname(), "pid": process.pid, "role": role}
    return "{" + ",".join(f'{name}="{own[name]}"' for name in sorted(own)) + "}"


def test_all_processes_on_one_page(config, python):
    put = {"backend": "shm_store", "operation": "put_samples"}
    with connect(config) as client:
        client.register_partition("step-1", ["x"], None, ["t"])
        workers = {name: python.start("-c", WORKER, config, name) for name in ("a", "b")}
        env = {**os.environ, "http_proxy": "http://127.0.0.1:1"}
        page = python.start("-m", "dataplane_core", "metrics", config, stdout=subprocess.PIPE, env=env)
        try:
            eventually(
                lambda: {"a", "b"} <= {each.role for each in client.list_clients() if each.metrics_address},
                within_s=STARTS_S,
                what="the workers' announcements",
            )
            url = page.stdout.readline().decode().strip()

            def page_with(**up):
                """The page, once it says which workers answer: one that does not within seconds is left out."""

                def look():
                    found = read(url)
                    told = {name: found[f"dataplane_process_up{labels(workers[name], name)}"] for name in up}
                    return found if told == up else None

                return eventually(look, within_s=STARTS_S, what=f"workers that are up: {up}")

            found = page_with(a=1, b=1)
            for name, worker in workers.items():
                assert found[f"dataplane_bytes_total{labels(worker, name, **put)}"] == 100
                assert found[f"dataplane_client_longest_call_seconds{labels(worker, name)}"] == 0
            os.kill(workers["a"].pid, signal.SIGSTOP)
            found = page_with(a=0, b=1)
            assert f"dataplane_bytes_total{labels(workers['a'], 'a', **put)}" not in found
            assert found[f"dataplane_bytes_total{labels(workers['b'], 'b', **put)}"] == 100
            workers["b"].kill()
            eventually(
                lambda: not any('role="b"' in name for name in read(url)),
                within_s=STARTS_S,
                what="the end of a killed process",
            )
            client.close()
            assert read(url) == {"dataplane_store_up": 0}
            with connect(config):
                assert read(url)["dataplane_store_up"] == 1
            page.send_signal(signal.SIGINT)
            assert page.wait(60) == 0
        finally:
            for process in (*workers.values(), page):
                process.kill()
                process.wait()
            page.stdout.close()


def test_what_is_an_error(tmp_path, capsys, monkeypatch):
    """A port that cannot be had, and a backend whose clients do not announce themselves."""
    path = tmp_path / "config.yaml"
    path.write_text("{backend: shm_store, options: {capacity_bytes: 50000000}}")
    with connect(str(path)), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 99999):
            assert main(["metrics", str(path), "--port", str(port)]) == 1
            assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    with connect({"backend": "noop"}) as client:
        client._connection.capabilities -= {"clients"}
        monkeypatch.setattr("dataplane_tools._metrics.attach", lambda path: client)
        assert main(["metrics", str(path)]) == 1
    assert "does not declare 'clients'" in capsys.readouterr().err


def test_clients_of_one_process_are_one_line_each_metric():
    """Prometheus refuses a page with two values of one label set."""
    with connect(QUIET) as client:
        for name, running_s in (("one", 5.0), ("two", 7.0), ("three", 6.0)):
            calls = [CallInfo(operation="claim_meta", partition_id="p", running_s=running_s)]
            told = ClientInfo(client_id=name, host="h", pid=1, role="r", open_s=0.0, calls=calls)
            backend_of(client).announce(AnnounceRequest(client=told, ttl_s=60.0, deadline=float("inf")))
        for metric in Federation(client, lambda: client).collect():
            assert len({tuple(each.labels.items()) for each in metric.samples}) == len(metric.samples), metric.name
            if metric.name == "dataplane_client_longest_call_seconds":
                assert [int(each.value) for each in metric.samples] == [7]


def test_the_backlog_of_tasks_and_who_is_starved(federation):
    def values(name):
        found = {each.name: each for each in federation.collect()}[name]
        return {tuple(each.labels.values()): each.value for each in found.samples}

    eventually(lambda: values("dataplane_starved_seconds"), STARTS_S, "a task that is starved")
    ((labels, waited_s),) = values("dataplane_starved_seconds").items()
    assert labels == ("train", "unwritten")
    assert waited_s >= 0.5
    assert values("dataplane_task_backlog") == {("score",): 5, ("train",): 6}
    assert values("dataplane_task_ready") == {("score",): 2, ("train",): 0}


def endpoint_of(answer, **told):
    """What the federation says of an endpoint that gives this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, connect(QUIET) as client:
        told = {"host": "h", "role": "r", "metrics_address": f"127.0.0.1:{listener.getsockname()[1]}", **told}

        def serve():
            channel, _ = listener.accept()
            with channel, contextlib.suppress(OSError):
                channel.recv(65536)
                for part in answer:
                    channel.sendall(part)

        threading.Thread(target=serve, daemon=True).start()
        info = ClientInfo(client_id="c", pid=1, open_s=0.0, **told)
        backend_of(client).announce(AnnounceRequest(client=info, ttl_s=60.0, deadline=float("inf")))
        return {metric.name: metric for metric in Federation(client, lambda: client).collect()}


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


NONSENSE = {
    "no HTTP": [b"what is this\r\n\r\n"],
    "cut short": [OK, b"Content-Length: 999\r\n\r\ndataplane_x 1"],
    "other text": [OK, b"Content-Length: 11\r\n\r\n{not metrics"],
    "nothing": [],
    "HTML": [OK.replace(b"text/plain", b"text/html"), b"\r\ndataplane_x 1\n"],
    "more than 16 MB": [OK, b"\r\n", *[b"dataplane_x 1\n" * 100_000] * 12],
    "another address": [
        OK.replace(b"200 OK", b"302 Found"),
        b"Location: http://127.0.0.1:1/metrics\r\n\r\ndataplane_x 1\n",
    ],
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_an_endpoint_that_answers_nonsense_is_left_out(answer):
    found = endpoint_of(answer)
    (up,) = found["dataplane_process_up"].samples
    assert (up.labels["pid"], up.value) == ("1", 0.0)
    assert "dataplane_x" not in found


def test_names_with_control_characters_are_labels_with_their_escapes(monkeypatch):
    monkeypatch.setattr(_metrics, "_TIMEOUT_S", STARTS_S)
    found = endpoint_of([OK, b"\r\ndataplane_x 1\n"], host="h\n\x1b[1m", role="\u202er")
    (up,) = found["dataplane_process_up"].samples
    assert (up.labels, up.value) == ({"host": "h\\n\\x1b[1m", "pid": "1", "role": "\\u202er"}, 1.0)
    (sample,) = found["dataplane_x"].samples
    assert sample.labels == up.labels


@pytest.mark.parametrize(
    ("address", "host", "is_asked"),
    [
        ("127.0.0.1:80", "elsewhere.invalid", True),
        ("[::1]:80", "elsewhere.invalid", True),
        ("192.0.2.7:80", "192.0.2.7", True),
        ("192.0.2.7:80", "192.0.2.8", False),
        ("169.254.169.254:80", "127.0.0.1", False),
        ("127.0.0.1:80@192.0.2.7:80", "127.0.0.1", False),
        ("127.0.0.1:80/x?", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
    ],
)
def test_only_the_hosts_of_clients_are_asked(address, host, is_asked):
    if is_asked:
        assert _url_of(address, host) == f"http://{address}/metrics"
    else:
        with pytest.raises(ValueError, match=r"host|port"):
            _url_of(address, host)
