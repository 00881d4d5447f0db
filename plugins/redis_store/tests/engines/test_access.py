"""Who may connect, and how: URLs, passwords, users with the least rights, TLS. No error tells a secret."""

import re
import shutil
import subprocess
import time
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import torch
from doctors import findings
from redis_servers import every_operation, wait_until

from dataplane_core.backends import Level
from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import BackendUnavailableError, ConfigError
from dataplane_redis import RedisBackend, RedisConfig
from dataplane_redis._server import check_server

_PASSWORD = "s3cret-of-the-test"
#: What a message says of a certificate that we do not trust.
_UNTRUSTED = r"certificate that was shown for .* is refused: .* connecting to .*CERTIFICATE_VERIFY_FAILED"
_README = Path(__file__).parents[2] / "README.md"


def told(error):
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize(
    "where", ["redis://:{0}@127.0.0.1:{1}", "redis://nobody:{0}@127.0.0.1:{1}", "unix://{2}?password={0}"]
)
def test_a_wrong_password_is_refused_without_telling_it(start_server, connect, where, caplog):
    server = start_server("--requirepass", "the-right-one")
    caplog.set_level(0)
    with pytest.raises(BackendUnavailableError, match="password") as caught:
        connect(url=where.format(_PASSWORD, server.port, server.socket))
    assert not caught.value.retryable
    assert _PASSWORD not in told(caught.value)
    assert _PASSWORD not in caplog.text
    connect(url=f"redis://:the-right-one@127.0.0.1:{server.port}").ping()
    assert "the-right-one" not in caplog.text
    with pytest.raises(BackendUnavailableError) as caught:
        connect(url=server.url)
    assert "password" in str(caught.value)


def test_a_config_does_not_print_its_url():
    config = RedisConfig(url=f"redis://user:{_PASSWORD}@host:1/0")
    assert _PASSWORD not in repr(config) + str(config) + config.model_dump_json()
    assert _PASSWORD not in repr(DataPlaneConfig(backend="redis_store", options={"url": f"redis://:{_PASSWORD}@host"}))


#: URLs with a password, and with a character that ends the URL before its end.
EARLY = [
    *("redis://:{0}@host", "rediss://user:{0}@host:1/0", "redis://:12{1}{0}@host", "redis://:a@{0}@host"),
    *("redis://:a@1{1}{0}@host", "unix://:{0}@/redis.sock", "redis://user{1}:{0}@host:1"),
]
SERVICES = ["h:1", "h:1/", "h:port/plane", "/plane", "h:1,/plane", "h/plane/db", "h/plane?sentinel_x=1"]
UNREAD = ["redis://h:port", f"redis://:{_PASSWORD}@h/0?no_such_parameter=1", "redis://h?db=x", "redis://h/zero"]
#: Options, and what is said of them.
WRONG_OPTIONS = [
    *(({"url": url.format(f"s3cret{mark}of-the-test", mark)}, "write '#' as %23") for url in EARLY for mark in "#/?"),
    *(
        ({"url": f"redis+sentinel://user:s3cret@{place}"}, r"redis\+sentinel://user:password@host:port")
        for place in SERVICES
    ),
    *(({"url": url}, "redis://user:password@host:port/db") for url in UNREAD),
    *(({"server": "private", "url": "redis://h"}, "url"), ({"url": "http://h"}, "url")),
    *(({"url": "redis://h", "appendonly": True}, "appendonly"), ({"wait_replicas": 1}, "wait_replicas")),
]


@pytest.mark.parametrize(("options", "said"), WRONG_OPTIONS, ids=str)
def test_options_that_cannot_be_are_refused_without_telling_a_password(connect, options, said):
    with pytest.raises(ConfigError, match=said) as caught:
        connect(**options)
    with pytest.raises(ValueError, match=said) as direct:
        RedisConfig(**options)
    for error in (caught.value, direct.value):
        assert not {word for word in ("s3cret", "of-the-test") if word in told(error)}


def test_reserved_characters_in_a_password_are_percent_encoded(start_server, connect):
    password = "a#b/c?d@e%f:g"
    server = start_server("--requirepass", password)
    connect(url=f"redis://:{quote(password, safe='')}@127.0.0.1:{server.port}/0").ping()
    connect(url=f"unix://{server.socket}?password={quote(password, safe='')}").ping()


def test_a_server_that_is_too_old_is_refused():
    class Old:
        label = "the Redis server at old:6379"

        def command(self, what, deadline, key, *words):
            return b"# Server\r\nredis_version:6.2.14\r\n"

    with pytest.raises(ConfigError, match=r"6\.2\.14.*7\.0"):
        check_server(Old(), RedisConfig(url="redis://old"), time.monotonic() + 1)


def test_nothing_listens(connect):
    with pytest.raises(BackendUnavailableError, match="cannot be reached") as caught:
        connect(url="redis://127.0.0.1:1", op_timeout_s=30)  # it is refused at once
    assert caught.value.retryable
    assert caught.value.__cause__ is not None


# --- users ------------------------------------------------------------------------------------------------------------


def documented_user():
    """The words of the command in the README that makes the user, for the namespace "mine"."""
    (found,) = re.findall(r"ACL SETUSER dataplane [^`]*", _README.read_text(encoding="utf-8"))
    return found.replace("\\\n", " ").replace("PASSWORD", _PASSWORD).replace("NAMESPACE", "mine").split()


def refused(server):
    """What the server refused the user. redis-py also names itself, where it may."""
    return [each for each in map(str, server.admin("ACL", "LOG")) if "client|setinfo" not in each]


def test_the_documented_user_of_a_cluster_can_do_everything(cluster, connect):
    (more,) = re.findall(r"In a Redis Cluster, [^`]*`([^`]*)`", _README.read_text(encoding="utf-8"))
    for node in cluster:
        node.admin(*documented_user(), *more.split())
        node.admin("ACL", "LOG", "RESET")
    every_operation(connect(url=f"redis://dataplane:{_PASSWORD}@127.0.0.1:{cluster[0].port}/0", namespace="mine"))
    assert not [each for node in cluster for each in refused(node)]


def test_the_documented_user_can_do_everything_and_nothing_else(start_server, connect, hurries):
    server = start_server()
    words = documented_user()
    server.admin(*words)
    server.admin("ACL", "LOG", "RESET")
    url = f"redis://dataplane:{_PASSWORD}@127.0.0.1:{server.port}/1"
    client = connect(url=url, namespace="mine")
    every_operation(client)
    client.register_partition("p", ["x"], None, ["train"])
    waiting = connect(url=url, namespace="mine", bootstrap=False, wait_replicas=1)
    with hurries(1.0), pytest.raises(TimeoutError, match="0 replicas"):
        waiting.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert findings(RedisBackend, Level.ERROR, url=url, namespace="mine") == []
    assert not refused(server)
    used = {name.removeprefix("cmdstat_") for name in server.info("commandstats")}
    assert {word[1:] for word in words if word.startswith("+")} <= used, "granted, and not used"

    with redis.Redis(port=server.port, username="dataplane", password=_PASSWORD) as user:
        for command in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "SET", "appendonly", "no"),
            ("HMGET", "dp:theirs:r:1", "1"),
            ("EVAL", "return redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)", 1, "dp:theirs:log"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)
    with pytest.raises(BackendUnavailableError, match="refused") as caught:
        connect(url=url, namespace="theirs")
    assert not caught.value.retryable


@pytest.mark.parametrize("name", ["info", "eval", "select", "xadd", "xrange", "xrevrange"])
def test_what_a_server_must_not_refuse_is_named(plain, connect, name):
    plain.admin("ACL", "SETUSER", f"no-{name}", "on", f">{_PASSWORD}", "~*", "+@all", f"-{name}")
    with pytest.raises(BackendUnavailableError, match=r"no permissions|can't run this") as caught:
        connect(url=f"redis://no-{name}:{_PASSWORD}@127.0.0.1:{plain.port}/1")
    assert "what the ACL grants" in str(caught.value)


# --- TLS --------------------------------------------------------------------------------------------------------------


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


def parameters(folder, authority="ca"):
    """Of a url: the authority that we trust, and our own certificate."""
    return f"ssl_ca_certs={folder}/{authority}.pem&ssl_certfile={folder}/client.pem&ssl_keyfile={folder}/client.key"


def test_tls_with_certificates_and_a_user(start_server, connect, certificates):
    server = start_server(tls=certificates / "server")
    server.admin(*documented_user())
    user, place, asked = f"dataplane:{_PASSWORD}", f"localhost:{server.tls_port}", parameters(certificates)
    client = connect(url=f"rediss://{user}@{place}?{asked}", namespace="mine")
    every_operation(client)
    server.admin("ACL", "SETUSER", "default", "resetpass", ">another")
    for url, reason in (
        (f"rediss://dataplane:wrong@{place}?{asked}", "password"),
        (f"rediss://{place}?{asked}", "Authentication"),
        (f"rediss://{user}@{place}?ssl_ca_certs={certificates}/ca.pem", "cannot be reached"),  # no certificate of ours
        (f"rediss://{user}@127.0.0.1:{server.tls_port}?{asked}", _UNTRUSTED),  # made for another name
        (f"rediss://{user}@{place}?{parameters(certificates, 'other')}", _UNTRUSTED),
        (f"redis://{user}@{place}", "cannot be reached|timed out"),  # no TLS
    ):
        with pytest.raises((BackendUnavailableError, TimeoutError), match=reason) as caught:
            connect(url=url, namespace="mine", op_timeout_s=5)
        assert _PASSWORD not in str(caught.value)
        assert caught.value.retryable != (reason in (_UNTRUSTED, "password", "Authentication"))


def test_a_service_with_tls_and_users(start_server, connect, certificates):
    server = start_server(tls=certificates / "host")
    server.admin(*documented_user())
    sentinel = start_server("--tls-replication", "yes", tls=certificates / "host", sentinel=True)
    sentinel.admin("ACL", "SETUSER", "asker", "on", ">asked", "-@all", "+sentinel|masters")
    sentinel.admin("SENTINEL MONITOR", "plane", "127.0.0.1", server.tls_port, 1)
    wait_until(lambda: sentinel.admin("SENTINEL MASTER", "plane")["flags"] == "master")
    other = start_server(tls=certificates / "server")  # its certificate is made for another name
    sentinel.admin("SENTINEL MONITOR", "other", "127.0.0.1", other.tls_port, 1)
    user, place = f"dataplane:{_PASSWORD}", f"127.0.0.1:{sentinel.tls_port}/plane"
    url = f"rediss+sentinel://{user}@{place}?{parameters(certificates)}"
    client = connect(url=f"{url}&sentinel_username=asker&sentinel_password=asked", namespace="mine", partition="p")
    assert client.list_partitions() == ["p"]
    for wrong, reason in (
        (f"{url}&sentinel_username=asker&sentinel_password=wrong", "password"),
        (url.replace("ca.pem", "other.pem"), _UNTRUSTED),
        (url.replace("/plane?", "/other?"), f"{_UNTRUSTED}.* mismatch"),
    ):
        with pytest.raises(BackendUnavailableError, match=reason) as caught:
            connect(url=wrong, namespace="mine")
        assert not caught.value.retryable
