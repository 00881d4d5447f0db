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


@pytest.mark.parametrize("character", ["#", "/", "?"])
@pytest.mark.parametrize(
    "where",
    [
        *("redis://:{0}@host", "rediss://user:{0}@host:1/0", "redis://:12{1}{0}@host", "redis://:a@{0}@host"),
        *("redis://:a@1{1}{0}@host", "unix://:{0}@/redis.sock", "redis://user{1}:{0}@host:1"),
    ],
)
def test_a_password_that_ends_the_url_early_is_refused_without_telling_it(connect, where, character):
    url = where.format(f"s3cret{character}of-the-test", character)
    with pytest.raises(ConfigError, match="write '#' as %23") as caught:
        connect(url=url)
    with pytest.raises(ValueError, match="write '#' as %23") as direct:
        RedisConfig(url=url)
    for text in (told(caught.value), told(direct.value)):
        assert "s3cret" not in text
        assert "of-the-test" not in text


def test_reserved_characters_in_a_password_are_percent_encoded(start_server, connect):
    password = "a#b/c?d@e%f:g"
    server = start_server("--requirepass", password)
    connect(url=f"redis://:{quote(password, safe='')}@127.0.0.1:{server.port}/0").ping()
    connect(url=f"unix://{server.socket}?password={quote(password, safe='')}").ping()


@pytest.mark.parametrize(
    "url", ["redis://h:port", f"redis://:{_SECRET}@h/0?no_such_parameter=1", "redis://h?db=x", "redis://h/zero"]
)
def test_a_url_that_redis_does_not_read_is_refused(connect, url):
    with pytest.raises(ConfigError, match="redis://user:password@host:port/db") as caught:
        connect(url=url)
    assert _SECRET not in told(caught.value)


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
