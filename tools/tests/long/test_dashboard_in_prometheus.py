"""Each panel of the dashboard of examples/grafana has data in a real Prometheus."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server
from test_dashboard import FOLDER, questions

from dataplane_core.errors import MissingDataError


# the Debian package starts a server of its own, so make does not install it
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
