"""`dataplane inspect --stacks`: whose stacks it reads. Real ones are in `engines`."""

import json
import socket

from dataplane_core.cli import main
from dataplane_core.client import DataPlaneClient
from dataplane_core.spec import ClientInfo
from dataplane_tools import _inspect


def test_stacks_are_read_of_open_clients_on_this_host(store, config, capsys, monkeypatch):
    here = socket.gethostname()
    clients = [
        ClientInfo(client_id=str(pid), host=host, pid=pid, role="", open_s=1.0, state=state)
        for pid, (host, state) in enumerate([(here, "open"), (here, "silent"), ("elsewhere", "open")])
    ]
    monkeypatch.setattr(DataPlaneClient, "list_clients", lambda self, ended=False: clients)
    monkeypatch.setattr(_inspect, "_stacks_of", str)
    assert main(["inspect", config, "--interval", "0", "--stacks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stacks"] == {"0": "0"}
