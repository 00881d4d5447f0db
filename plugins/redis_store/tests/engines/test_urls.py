"""Servers of an operator: TCP, unix sockets, ACL, TLS; what is refused, and that no secret is told."""

import time
import traceback
from urllib.parse import quote

import pytest

from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import BackendUnavailableError, ConfigError
from dataplane_redis import RedisConfig
from dataplane_redis._server import check_server

_SECRET = "s3cret-of-the-test"


def told(error):
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize(
    "where", ["redis://:{0}@127.0.0.1:{1}", "redis://nobody:{0}@127.0.0.1:{1}", "unix://{2}?password={0}"]
)
def test_a_wrong_password_is_refused_without_telling_it(start_server, connect, where, caplog):
    server = start_server("--requirepass", "the-right-one")
    caplog.set_level(0)
    with pytest.raises(BackendUnavailableError, match="password") as caught:
        connect(url=where.format(_SECRET, server.port, server.socket))
    assert not caught.value.retryable
    assert _SECRET not in told(caught.value)
    assert _SECRET not in caplog.text
    connect(url=f"redis://:the-right-one@127.0.0.1:{server.port}").ping()
    assert "the-right-one" not in caplog.text
    with pytest.raises(BackendUnavailableError) as caught:
        connect(url=server.url)
    assert "password" in str(caught.value)


def test_a_config_does_not_print_its_url():
    config = RedisConfig(url=f"redis://user:{_SECRET}@host:1/0")
    assert _SECRET not in repr(config) + str(config) + config.model_dump_json()
    assert _SECRET not in repr(DataPlaneConfig(backend="redis_store", options={"url": f"redis://:{_SECRET}@host"}))


#: URLs with a password, and with a character that ends the URL before its end.
EARLY = [
    *("redis://:{0}@host", "rediss://user:{0}@host:1/0", "redis://:12{1}{0}@host", "redis://:a@{0}@host"),
    *("redis://:a@1{1}{0}@host", "unix://:{0}@/redis.sock", "redis://user{1}:{0}@host:1"),
]
SERVICES = ["h:1", "h:1/", "h:port/plane", "/plane", "h:1,/plane", "h/plane/db", "h/plane?sentinel_x=1"]
UNREAD = ["redis://h:port", f"redis://:{_SECRET}@h/0?no_such_parameter=1", "redis://h?db=x", "redis://h/zero"]
#: Options, and what is said of them.
REFUSED = [
    *(({"url": url.format(f"s3cret{mark}of-the-test", mark)}, "write '#' as %23") for url in EARLY for mark in "#/?"),
    *(
        ({"url": f"redis+sentinel://user:s3cret@{place}"}, r"redis\+sentinel://user:password@host:port")
        for place in SERVICES
    ),
    *(({"url": url}, "redis://user:password@host:port/db") for url in UNREAD),
    *(({"server": "private", "url": "redis://h"}, "url"), ({"url": "http://h"}, "url")),
    *(({"url": "redis://h", "appendonly": True}, "appendonly"), ({"wait_replicas": 1}, "wait_replicas")),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
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
