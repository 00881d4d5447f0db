"""`dataplane doctor redis_store`: every fault here is a real one."""

import json
import shutil
from functools import partial

import pytest
from doctors import findings as findings_of
from redis_servers import wait_until

from dataplane_core.backends import Level
from dataplane_core.cli import main
from dataplane_core.errors import ConfigError
from dataplane_redis import RedisBackend

_SECRET = "hunter2-of-the-doctor"
findings = partial(findings_of, RedisBackend)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The one folder on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_binary_is_an_error_with_the_command_that_installs_it(path):
    ((what, hint),) = findings(Level.ERROR)
    assert what == "There is no redis-server on the PATH."
    assert "apt-get install redis-server" in hint


@pytest.mark.parametrize(
    ("mode", "content", "said", "hint"),
    [
        (0o644, "\x7fELF", "is not executable.", "chmod +x"),
        (0o755, "\x7fELF cut off", "does not run: ", "Install redis-server again."),
        (
            0o755,
            "#!/bin/sh\necho 'Redis server v=6.2.14 sha=0:0 bits=64'\n",
            "is Redis 6.2.14. Expected 7.0",
            "Upgrade it.",
        ),
    ],
    ids=["not executable", "broken", "old"],
)
def test_a_binary_that_does_not_serve_is_an_error(path, mode, content, said, hint):
    binary = path / "redis-server"
    binary.write_text(content)
    binary.chmod(mode)
    ((what, told),) = findings(Level.ERROR)
    assert what.startswith(f"{binary} {said}")
    assert hint in told


def test_a_private_server_says_what_it_keeps_and_is_not_started():
    for options in ({}, {"appendonly": True}):
        ((what, hint),) = findings(Level.WARNING, namespace="doctor-keeps", **options)
        assert "data live as long as the server" in what
        assert "the option url" in hint
    ((what, _),) = findings(Level.OK, namespace="doctor-keeps")
    assert what.startswith(f"{shutil.which('redis-server')} is Redis ")


def test_a_server_that_may_evict_is_an_error_with_the_command_that_mends_it_as_for_connect(
    start_server, connect, caplog
):
    server = start_server("--maxmemory-policy", "allkeys-lru", "--appendonly", "yes", "--appendfsync", "always")
    ((what, hint),) = findings(Level.ERROR, url=server.url)
    assert f"The Redis server at 127.0.0.1:{server.port} has maxmemory-policy 'allkeys-lru'" in what
    assert "redis-cli CONFIG SET maxmemory-policy noeviction" in hint
    ((what, _),) = findings(Level.WARNING, url=server.url, allow_eviction=True)
    assert "which allow_eviction accepts" in what
    with pytest.raises(ConfigError, match=r"allkeys-lru.*noeviction"):
        connect(url=server.url)
    connect(url=server.url, allow_eviction=True).ping()
    server.admin("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert findings(Level.ERROR, url=server.url) == findings(Level.WARNING, url=server.url) == []
    answers, durable = findings(Level.OK, url=server.url)
    assert "answers and is Redis " in answers[0]
    assert "durable: every put is synced" in durable[0]
    caplog.set_level("INFO", logger="dataplane_redis")
    connect(url=server.url)
    assert "durable: every put is synced" in caplog.text
    server.admin("CONFIG", "SET", "appendfsync", "everysec")
    ((what, _),) = findings(Level.WARNING, url=server.url)
    assert "a crash may lose the last writes" in what


def test_a_server_without_persistence_is_a_warning_with_the_commands(plain):
    ((what, hint),) = findings(Level.WARNING, url=plain.url)
    assert "no persistence: everything is lost with the server" in what
    assert "CONFIG SET appendonly yes" in hint


def test_a_server_with_replicas_may_lose_its_newest_writes(start_server):
    server, replica = start_server(), start_server()
    assert "replicates" not in str(findings(Level.WARNING, url=server.url))
    replica.admin("REPLICAOF", "127.0.0.1", server.port)
    wait_until(lambda: server.info("replication")["connected_slaves"] == 1)
    _, (what, hint) = findings(Level.WARNING, url=server.url)
    assert "has 1 replica, and replicates without waiting" in what
    assert "wait_replicas" in hint


def test_a_server_that_is_not_there_is_an_error(tmp_path):
    ((what, hint),) = findings(Level.ERROR, url=f"unix://{tmp_path}/none.sock")
    assert "Check that it runs" in hint
    assert f"the Redis server at {tmp_path}/none.sock cannot be reached" in what


def test_the_command_tells_a_wrong_password_without_printing_it(start_server, tmp_path, capsys):
    server = start_server("--requirepass", "the-right-one")
    config = tmp_path / "config.json"
    options = {"url": f"redis://:{_SECRET}@127.0.0.1:{server.port}"}
    config.write_text(json.dumps({"backend": "redis_store", "options": options}))
    assert main(["doctor", "--config", str(config), "--json"]) == 1
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)
    (finding,) = report["findings"]
    assert finding["level"] == "error"
    assert f"refused by the Redis server at 127.0.0.1:{server.port}" in finding["what"]
    assert "Check user and password of the url" in finding["hint"]
    assert _SECRET not in printed.out + printed.err


def test_a_sentinel_that_wants_a_password_is_an_error_that_names_the_options(plain, start_server):
    sentinel = start_server(sentinel=True)
    sentinel.admin("SENTINEL", "MONITOR", "plane", "127.0.0.1", plain.port, 1)
    sentinel.admin("ACL", "SETUSER", "asker", "on", ">asked", "-@all")
    sentinel.admin("ACL", "SETUSER", "default", "resetpass", ">another")
    place = f"redis+sentinel://127.0.0.1:{sentinel.port}/plane"
    for query in ("", "?sentinel_username=asker&sentinel_password=asked", f"?sentinel_password={_SECRET}"):
        ((what, hint),) = findings(Level.ERROR, url=place + query)
        assert what.startswith("A sentinel of the Redis service 'plane' refuses this user: ")
        assert "sentinel_password" in hint
        assert _SECRET not in what + hint
    found = findings(Level.OK, url=f"{place}?sentinel_password=another")
    assert "answers and is Redis" in found[0][0]
