"""Processes of one user on one host find an instance by its name."""

import os
import signal
import socket
import subprocess
import tempfile
import time

import pytest

from dataplane_core.errors import BackendUnavailableError, ConfigError
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig, _owners

_OWNER = """
import sys, time
from dataplane_tq_simple import _owners
kept = _owners.leave("tq-default", sys.argv[1], time.monotonic() + 30)
print("left", flush=True)
sys.stdin.read()
"""

_AUTO = """
import sys, torch
from dataplane_core import connect
config = {"backend": "tq_simple", "options": {"ray_num_cpus": 1}, "attach_wait_s": 240, "op_timeout_s": 240}
with connect(config, bootstrap="auto") as client:
    if client.bootstrapped:
        client.register_partition("p", ["x"], 1, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
    print(client.bootstrapped, flush=True)
    sys.stdin.read()
"""

_ATTACHES = """
from dataplane_core import connect
with connect({"backend": "tq_simple", "attach_wait_s": 240, "op_timeout_s": 240}, bootstrap=False) as client:
    print(client.get_samples(["a"], "p", ["x"])["x"].tolist())
"""


@pytest.fixture
def start(tmp_path, python):
    """Starts programs in a temporary folder of their own, which no other test sees."""
    started = []
    others = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}

    def run(source, *args, **env):
        process = python.start(
            "-c",
            source,
            *args,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**others, "TMPDIR": str(tmp_path), "RAY_TMPDIR": tempfile.gettempdir(), **env},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.communicate(timeout=60)  # ends its standard input, and so the process


@pytest.fixture
def find(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: _owners.find(TQSimpleConfig(), "tq-default")


@pytest.fixture
def doctor(find, monkeypatch):
    """What `dataplane doctor tq_simple` says: level and text of each finding."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def ask():
        found = TQSimpleBackend.diagnose(TQSimpleConfig(), deadline=time.monotonic() + 60)
        return "\n".join(f"{each.level}: {each.what} {each.hint}" for each in found)

    return ask


def test_the_owner_that_runs_is_found_and_no_other(start, find, doctor, tmp_path):
    with pytest.raises(BackendUnavailableError, match="Bootstrap it first") as nothing:
        find()
    assert nothing.value.retryable
    assert "ok: No process of this user runs instance 'default' on this host." in doctor()
    with socket.create_server(("127.0.0.1", 0)) as ray:
        address = f"127.0.0.1:{ray.getsockname()[1]}"
        killed, owner = start(_OWNER, "127.0.0.1:1"), start(_OWNER, address)
        assert killed.stdout.readline() == owner.stdout.readline() == "left\n"
        with pytest.raises(ConfigError, match=r"2 of that name run on this host, on the Rays at 127\.0\.0\.1:1, 127"):
            find()
        said = doctor()
        assert f"ok: A process of this user runs instance 'default' on this host, on the Ray at {address}." in said
        assert "on the Ray at 127.0.0.1:1, but nothing listens there. Its Ray has died." in said
        assert "error: 2 processes of this user run an instance 'default'" in said
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert find() == address
        assert "error" not in doctor()
    (home,) = tmp_path.iterdir()
    assert [each.name for each in home.iterdir() if not each.name.startswith(".")] == [f"tq-default@{address}"]
    home.chmod(0o755)
    with pytest.raises(BackendUnavailableError, match="other users can access") as refused:
        find()
    assert not refused.value.retryable
    assert "error: connect refused: other users can access" in doctor()


def test_a_name_is_not_the_beginning_of_another(find):
    left = _owners.leave("tq-default.2", "127.0.0.1:1", time.monotonic() + 30)
    with pytest.raises(BackendUnavailableError, match="no process of this user runs one"):
        find()
    left.release()


def test_an_older_ray_is_not_told_to_use_a_token(find, monkeypatch):
    setup = "ray._private.authentication.authentication_token_setup"
    monkeypatch.delattr(f"{setup}.maybe_enable_token_auth_if_token_available", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    left = _owners.leave("tq-default", "127.0.0.1:1", time.monotonic() + 30)
    assert find() == "127.0.0.1:1"
    left.release()


def test_processes_with_the_name_alone_share_an_instance(start):
    attaches = start(_ATTACHES)  # before there is an owner
    autos = [start(_AUTO), start(_AUTO)]
    # Ray logs to the same place
    answers = [next(line for line in iter(each.stdout.readline, "") if line in ("False\n", "True\n")) for each in autos]
    assert sorted(answers) == ["False\n", "True\n"]
    assert attaches.communicate(timeout=240)[0].endswith("[1.0]\n")
