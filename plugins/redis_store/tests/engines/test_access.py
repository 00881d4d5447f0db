"""Who may connect, and how: TLS with certificates of both sides, and users with the least rights."""

import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import torch
from redis_servers import Ended, free_port, wait_until

from dataplane_core.backends import Level
from dataplane_core.errors import BackendUnavailableError
from dataplane_redis import RedisBackend, RedisConfig
from dataplane_testkit import backend_of

_PASSWORD = "s3cret-of-the-test"
#: What a message says of a certificate that we do not trust.
_REFUSED = r"certificate that was shown for .* is refused: .* connecting to .*CERTIFICATE_VERIFY_FAILED"
_README = Path(__file__).parents[2] / "README.md"


def documented_user(namespace):
    """The words of the command in the README that makes the user, for this namespace."""
    (found,) = re.findall(r"ACL SETUSER dataplane [^`]*", _README.read_text(encoding="utf-8"))
    return found.replace("\\\n", " ").replace("PASSWORD", _PASSWORD).replace("NAMESPACE", namespace).split()


def check_wake(client):
    """A claim waits and is woken."""
    client.register_partition("woken", ["x"], None, ["train"])
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(client.claim_meta, "woken", "train", ["x"], 1, timeout_s=300.0)
        waiting = backend_of(client)._wakes._waiting
        wait_until(lambda: any(each.promised for each in list(waiting.values())))
        client.put_samples(["a"], "woken", {"x": torch.ones(1)})
        assert claim.result(60).sample_ids == ["a"]


def test_the_documented_user_of_a_cluster_can_do_everything(cluster, connect, every_operation):
    (more,) = re.findall(r"In a Redis Cluster, [^`]*`([^`]*)` besides", _README.read_text(encoding="utf-8"))
    for node in cluster:
        node.admin(*documented_user("mine"), *more.replace("NAMESPACE", "mine").split())
        node.admin("ACL", "LOG", "RESET")
    url = f"redis://dataplane:{_PASSWORD}@127.0.0.1:{cluster[0].port}/0"
    every_operation(connect(url=url, namespace="mine"))
    for node in cluster:
        assert not [each for each in map(str, node.admin("ACL", "LOG")) if "client|setinfo" not in each]


def test_the_documented_user_can_do_everything_and_nothing_else(start_server, connect, every_operation, hardly_waits):
    server = start_server()
    words = documented_user("mine")
    server.admin(*words)
    server.admin("ACL", "LOG", "RESET")
    url = f"redis://dataplane:{_PASSWORD}@127.0.0.1:{server.port}/1"
    client = connect(url=url, namespace="mine", capacity_bytes=12_000_000)
    every_operation(client)
    check_wake(client)
    client.register_partition("full", ["x"], None, ["train"])
    large = {"x": torch.ones(1, 2_000_000)}
    client.put_samples(["a"], "full", large)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.put_samples, ["b"], "full", large)
        wait_until(lambda: server.info("commandstats").get("cmdstat_zrank"))
        client.clear_samples(["a"], "full")
        waits.result(60)
    waiting = connect(url=url, namespace="mine", bootstrap=False, wait_replicas=1)
    with hardly_waits(), pytest.raises(TimeoutError, match="0 of 1 replicas"):
        waiting.clear_samples(None, "full")
    findings = RedisBackend.diagnose(RedisConfig(url=url, namespace="mine"), deadline=time.monotonic() + 20)
    assert Level.ERROR not in [each.level for each in findings]
    refused = {str(each) for each in server.admin("ACL", "LOG") if "client|setinfo" not in str(each)}
    assert not refused  # redis-py also names itself, where it may
    used = {name.removeprefix("cmdstat_") for name in server.info("commandstats")}
    unused = {word[1:] for word in words if word.startswith("+")} - used
    assert unused <= {"hexists"}, "granted, and not used"  # that one belongs to a claim with a filter that others share

    with redis.Redis(port=server.port, username="dataplane", password=_PASSWORD) as user:
        for command in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "SET", "appendonly", "no"),
            ("GET", "dp:{theirs}:held"),
            ("EVAL", "return redis.call('GET', KEYS[1])", 1, "dp:{theirs}:held"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)
    with pytest.raises(BackendUnavailableError, match="refused") as caught:
        connect(url=url, namespace="theirs")
    assert not caught.value.retryable


@pytest.fixture
def url_without(plain):
    """The url of a user who may do everything but this."""

    def make(*refused):
        plain.admin("SCRIPT", "FLUSH")  # so that the user has to load them
        rights = ("~*", "&*", "+@all", *(f"-{command}" for command in refused))
        plain.admin("ACL", "SETUSER", f"no-{refused[0]}", "on", f">{_PASSWORD}", *rights)
        return f"redis://no-{refused[0]}:{_PASSWORD}@127.0.0.1:{plain.port}/1"

    return make


_NOT_NEEDED = ("config", "client", "cluster", "module", "hello", "command", "ping", "wait", "spublish", "ssubscribe")


def test_a_server_may_refuse_what_is_only_good_to_know(url_without, connect, every_operation):
    url = url_without(*_NOT_NEEDED)
    client = connect(url=url)
    every_operation(client)
    client.close()
    findings = RedisBackend.diagnose(RedisConfig(url=url, namespace="mine"), deadline=time.monotonic() + 20)
    assert Level.ERROR not in [each.level for each in findings]


@pytest.mark.parametrize("refused", ["info", "script", "evalsha", "exists", "select", "hmget", "time", "hget", "zadd"])
def test_what_a_server_must_not_refuse_is_named(url_without, connect, refused):
    with pytest.raises(BackendUnavailableError, match=r"refused by .* (no permissions|can't run this)") as caught:
        connect(url=url_without(refused)).register_partition("p", ["x"], None, ["train"])
    assert not caught.value.retryable
    assert "what the ACL grants" in caught.value.hint


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with two authorities, and certificates of the first for two servers and a client."""
    if shutil.which("openssl") is None:
        pytest.skip("not run: this machine has no openssl")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(*new_key, "-x509", "-days", "2", "-subj", f"/CN={name}", *files)
    for name, known_as in (("server", "DNS:localhost"), ("host", "IP:127.0.0.1"), ("client", "DNS:client")):
        (folder / "names").write_text(f"subjectAltName={known_as}\n")
        openssl(*new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-days", "2", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


def tls_settings(folder, port, name="server"):
    """Of a server, or a sentinel, with a port for TLS besides that of the tests' own commands."""
    files = {"cert-file": f"{name}.pem", "key-file": f"{name}.key", "ca-cert-file": "ca.pem"}
    words = [word for name, file in files.items() for word in (f"--tls-{name}", str(folder / file))]
    return ["--tls-port", str(port), *words, "--tls-auth-clients", "yes"]


def start_with_tls(start, folder, name="server", more=()):
    """A server, or a sentinel, and its port for TLS."""
    port = free_port()
    try:
        return start(*tls_settings(folder, port, name), *more), port
    except Ended:  # another process took the port meanwhile
        port = free_port()
        return start(*tls_settings(folder, port, name), *more), port


def parameters(folder, authority="ca"):
    """Of a url: the authority that we trust, and our own certificate."""
    return f"ssl_ca_certs={folder}/{authority}.pem&ssl_certfile={folder}/client.pem&ssl_keyfile={folder}/client.key"


def test_tls_with_certificates_and_a_user(start_server, connect, every_operation, certificates, only_woken):
    server, port = start_with_tls(start_server, certificates)
    server.admin(*documented_user("mine"))
    user, place, asked = f"dataplane:{_PASSWORD}", f"localhost:{port}", parameters(certificates)
    client = connect(url=f"rediss://{user}@{place}?{asked}", namespace="mine")
    every_operation(client)
    check_wake(client)
    server.admin("ACL", "SETUSER", "default", "resetpass", ">another")
    for url, reason in (
        (f"rediss://dataplane:wrong@{place}?{asked}", "password"),
        (f"rediss://{place}?{asked}", "Authentication"),
        (f"rediss://{user}@{place}?ssl_ca_certs={certificates}/ca.pem", "cannot be reached"),  # no certificate of ours
        (f"rediss://{user}@127.0.0.1:{port}?{asked}", _REFUSED),  # made for another name
        (f"rediss://{user}@{place}?{parameters(certificates, 'other')}", _REFUSED),
        (f"redis://{user}@{place}", "cannot be reached|timed out"),  # no TLS
    ):
        with pytest.raises((BackendUnavailableError, TimeoutError), match=reason) as caught:
            connect(url=url, namespace="mine", op_timeout_s=5)
        assert _PASSWORD not in str(caught.value)
        assert caught.value.retryable != (reason in (_REFUSED, "password", "Authentication"))


def test_a_service_with_tls_and_users(start_server, start_sentinel, connect, certificates):
    server, port = start_with_tls(start_server, certificates, "host")
    server.admin(*documented_user("mine"))
    more = ("--tls-replication", "yes")
    sentinel, sentinel_port = start_with_tls(start_sentinel, certificates, "host", more)
    sentinel.admin("ACL", "SETUSER", "asker", "on", ">asked", "-@all", "+sentinel|masters")
    sentinel.admin("SENTINEL MONITOR", "plane", "127.0.0.1", port, 1)
    wait_until(lambda: sentinel.admin("SENTINEL MASTER", "plane")["flags"] == "master")
    place = f"rediss+sentinel://dataplane:{_PASSWORD}@127.0.0.1:{sentinel_port}/plane?{parameters(certificates)}"
    client = connect(url=f"{place}&sentinel_username=asker&sentinel_password=asked", namespace="mine", partition="p")
    assert client.list_partitions() == ["p"]
    with pytest.raises(BackendUnavailableError, match="password") as caught:
        connect(url=f"{place}&sentinel_username=asker&sentinel_password=wrong", namespace="mine")
    assert not caught.value.retryable
    with pytest.raises(BackendUnavailableError, match=_REFUSED) as caught:
        connect(url=place.replace("ca.pem", "other.pem"), namespace="mine")
    assert not caught.value.retryable
    _, other_port = start_with_tls(start_server, certificates)  # its certificate is made for another name
    sentinel.admin("SENTINEL MONITOR", "other", "127.0.0.1", other_port, 1)
    with pytest.raises(BackendUnavailableError, match=f"{_REFUSED}.* mismatch") as caught:
        connect(url=place.replace("/plane?", "/other?"), namespace="mine")
    assert not caught.value.retryable
