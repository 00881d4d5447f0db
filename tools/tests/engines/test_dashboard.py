"""The dashboard of examples/grafana shows what `dataplane metrics` serves, and no other."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server

from dataplane_core import connect
from dataplane_core.errors import MissingDataError
from dataplane_testkit._timing import STARTS_S, Background, eventually
from dataplane_tools._metrics import Federation

FOLDER = Path(__file__).parents[3] / "examples/grafana"


@pytest.fixture
def federation():
    """A store in which one task moves, and another one is starved."""
    config = {"backend": "noop", "middleware": ["prometheus"], "announce_s": 0.2, "warn_after_s": 0.5}
    with connect(config) as client:
        client.register_partition("p", ["x", "y"], None, ["score", "train"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        waiting = Background(lambda: client.claim_meta("p", "train", ["x", "y"], 1, timeout_s=600.0))
        yield Federation(client, lambda: client)
        client.clear_samples(None, "p")
        with pytest.raises(KeyError):
            waiting.result()


def questions():
    dashboard = json.loads((FOLDER / "dataplane.json").read_text())
    return {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}


def test_it_shows_every_metric_and_no_other(federation):
    shown = {name for question in questions() for name in re.findall(r"dataplane_\w+", question)}

    def served():
        names = {sample.name for metric in federation.collect() for sample in metric.samples}
        return {name for name in names if not name.endswith(("_created", "_count", "_sum"))}

    def shows_all():
        found = served()
        return "dataplane_starved_seconds" in found and found == shown

    eventually(shows_all, STARTS_S, f"a task that is starved, and nothing served but {shown}")


# the Debian package starts a server of its own, so make does not install it
@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="not run: the Debian package prometheus is missing")
def test_each_panel_has_data_in_a_real_prometheus(federation, tmp_path):
    settings = (FOLDER / "prometheus.yml").read_text().replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(settings)
    registry = CollectorRegistry()
    registry.register(federation)
    page, thread = start_http_server(0, "127.0.0.1", registry)
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets/page.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{page.server_port}"]}]))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [
        "prometheus",
        "--config.file=prometheus.yml",
        f"--web.listen-address={address}",
        "--storage.tsdb.path=data",
    ]

    def has_data(question):
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': question})}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
            return any(each["value"][1] != "NaN" for each in json.load(reply)["data"]["result"])
        return False

    client = federation._client
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as server:
        try:
            give_up = time.monotonic() + 120
            while left := {each for each in questions() if not has_data(each)}:
                assert time.monotonic() < give_up, left
                client.put_samples(["a"], "p", {"x": torch.ones(1)})
                with contextlib.suppress(MissingDataError):
                    client.get_samples(["b"], "p", ["x"])
                time.sleep(0.2)
        finally:
            server.terminate()
            page.shutdown()
            page.server_close()
            thread.join()
