"""`dataplane doctor tq_simple`: every fault here is a real one."""

import socket
import sys
from functools import partial

import pytest
from doctors import findings as findings_of

from dataplane_core import connect
from dataplane_core.backends import Level
from dataplane_core.cli import _examination
from dataplane_tq_simple import TQSimpleBackend, _diagnosis

findings = partial(findings_of, TQSimpleBackend)


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_cluster_that_is_not_there_is_an_error():
    """Before this process is connected to one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{free.getsockname()[1]}", "nonsense"):
            ((what, _),) = findings(Level.ERROR, ray_address=address)
            assert f"cannot connect to Ray at '{address}'" in what


def test_a_local_ray_of_too_few_cpus_is_an_error_with_the_numbers():
    ((what, hint),) = findings(Level.ERROR, ray_num_cpus=2, controller_num_cpus=1, unit_num_cpus=2)
    assert "needs 3 CPUs (controller 1, 1 storage units of 2), but a local Ray has 2" in what
    assert "Set controller_num_cpus and unit_num_cpus to 0" in hint
    assert findings(Level.ERROR, ray_num_cpus=0) == []


def test_it_says_whether_the_controller_keeps_a_journal(tmp_path):
    def said(level, **options):
        return " ".join(f"{what} {hint}" for what, hint in findings(level, ray_num_cpus=2, **options))

    assert "keeps no journal: if it dies, the instance is lost" in said(Level.OK)
    assert f"keeps a journal in {tmp_path}, and answers when the disk has it" in said(Level.OK, journal=str(tmp_path))
    assert "before the disk has it" in said(Level.OK, journal=str(tmp_path), journal_sync=False)
    assert f"There is no folder {tmp_path}/nowhere" in said(Level.ERROR, journal=f"{tmp_path}/nowhere")


def test_a_running_cluster_of_too_few_cpus_is_an_error_with_the_numbers(ray_address, monkeypatch):
    options = {"ray_address": ray_address}
    ((what, _),) = findings(Level.ERROR, **options, unit_num_cpus=9)
    assert "needs 9 CPUs (controller 0, 1 storage units of 9), but the Ray cluster has 8" in what
    assert findings(Level.ERROR, **options) == []
    own = ray_address.rpartition(":")[0]
    assert f"Ray announces this host as {own}." in dict(findings(Level.OK, **options))
    assert f"The Ray cluster at {ray_address} has 8 logical CPUs on 1 node." in dict(findings(Level.OK, **options))
    monkeypatch.setattr(_diagnosis, "this_nodes_addresses", lambda: ["203.0.113.7"])
    ((what, _),) = findings(Level.ERROR, **options)
    assert what == f"Ray announces this host as {own}: no interface of this machine has it."


def test_it_says_by_which_path_rows_of_a_running_instance_come(ray_address):
    options = {"ray_address": ray_address, "instance": "paths"}
    assert not [what for what, _ in findings(Level.OK, **options) if "unit-0" in what], "none runs"
    with connect({"backend": "tq_simple", "options": options}):
        assert "This process shares the memory of 'unit-0'." in dict(findings(Level.OK, **options))
        ((what, hint),) = findings(Level.WARNING, **options, share_memory=False)
    assert what == "'unit-0' runs on this node, but rows come over the wire."
    assert "in the same network namespace" in hint


def test_a_ray_that_cannot_be_imported_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    pickles, ray = _examination.diagnose("tq_simple", None)
    assert (pickles["level"], ray["level"]) == ("warning", "error")
    assert "unpickles what reaches its sockets" in pickles["what"]
    assert ray["what"].startswith("ray cannot be imported: ModuleNotFoundError")
    assert ray["hint"] == "Run: pip install --force-reinstall dataplane-tq-simple"
