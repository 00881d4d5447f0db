"""The options of the ``redis_store`` backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, IPvAnyAddress, SecretStr, field_validator, model_validator
from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from dataplane_core.backends import RowStoreOptions
from dataplane_redis._sentinel import SENTINEL_SCHEMES, Service

_SCHEMES = ("redis://", "rediss://", "unix://", *(f"{scheme}://" for scheme in SENTINEL_SCHEMES))


def log_key(namespace: str) -> bytes:
    """The key of the ledger's log of a namespace."""
    return b"dp:%s:log" % namespace.encode()


def rows_key(namespace: str, group: int) -> bytes:
    """The key of a group of rows. In a cluster, groups spread over the nodes."""
    return b"dp:%s:r:%x" % (namespace.encode(), group)


def _is_parsed_as_intended(url: str) -> bool:
    """Whether redis-py accepts the URL and finds its parts where the user put them.

    A reserved character ends the password early; redis-py then takes the rest of it for host, port or path.
    """
    try:
        parts = urlsplit(url)
        service = Service.of(url)
        pool = ConnectionPool.from_url(url if service is None else service.server_url)
        pool.connection_class(**pool.connection_kwargs)  # connects only when told to
        if parts.scheme != "unix" and service is None and not re.fullmatch(r"/?\d*", parts.path, re.ASCII):
            return False  # redis-py would use database 0
    except (RedisError, TypeError, ValueError):  # not chained: their messages quote the url
        return False
    at_sign_is_late = "@" in parts.path + parts.query and (parts.scheme != "unix" or parts.netloc != "")
    return not at_sign_is_late and "#" not in url


class RedisConfig(RowStoreOptions):
    """Which Redis server to use, the one at ``url`` or a private one, and which namespace on it.

    The bootstrapping client sets ``capacity_bytes`` and ``on_full``. An attaching client reads them from the server.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: SecretStr | None = None
    """``redis://[user:password@]host:port/db``, ``rediss://...`` (TLS; ``?ssl_ca_certs=...``) or
    ``unix:///path?db=0&username=...&password=...``. Or a service of Redis Sentinel:
    ``redis+sentinel://[user:password@]host:port,host:port,host:port/service[/db]``, where the places are those of the
    sentinels, and user, password and db those of the servers. ``?sentinel_username=...&sentinel_password=...`` is for
    sentinels that ask for a login. ``rediss+sentinel://`` uses TLS to both.

    Percent-encode ``#``, ``/``, ``?`` and ``@`` in user and password. This backend neither starts nor ends that server.
    The URL is a secret: it is never printed or logged."""

    server: Literal["private"] | None = None
    """``private``, the default without a ``url``: the bootstrapping client starts a ``redis-server`` of its own on a
    unix socket in a temporary folder and ends it on close. Clients of the same user on the same host attach with the
    same options."""

    namespace: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Prefix of all keys. Instances of different namespaces on one server share nothing."""

    ledger_ip: IPvAnyAddress | None = None
    """The address at which clients reach this host, should the process of the ledger be started here. None: that from
    which this host's connections to the server come."""

    allow_eviction: bool = False
    """Accept a server whose ``maxmemory-policy`` may evict keys. Samples that nobody has consumed may then be lost."""

    wait_replicas: int = Field(default=0, ge=0)
    """How many replicas of the server must have a change before the call that makes it returns. With as many as the
    server has replicas, a failover loses nothing that was acknowledged. Too few replicas until the deadline:
    `OperationTimeoutError`, and the change is on the server only."""

    wait_fsync: bool = False
    """These calls also wait until the server, and that many replicas, have synced the change to their append-only
    files. Needs Redis 7.2 or Valkey, and ``appendonly yes``."""

    appendonly: bool = False
    """Only for a private server: write an append-only file, for example to measure its cost. The file is deleted with
    the server's folder. Data that must outlive the server needs a server with a ``url``."""

    appendfsync: Literal["always", "everysec", "no"] = "always"
    """Only for a private server with ``appendonly``: when the file is synced. ``always``: before a put returns."""

    @field_validator("url")
    @classmethod
    def _is_a_redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(_SCHEMES):
            raise ValueError(f"expected a URL that starts with {', '.join(_SCHEMES)}")
        if value is not None and not _is_parsed_as_intended(value.get_secret_value()):
            raise ValueError(
                "expected redis://user:password@host:port/db, unix:///path or "
                "redis+sentinel://user:password@host:port,host:port/service/db, where db is a number, with parameters "
                "that redis-py knows; in user and password, write '#' as %23, '/' as %2F, '?' as %3F and '@' as %40"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _is_private_without_a_url(cls, options: Any) -> Any:
        if isinstance(options, Mapping) and options.get("url") is None and options.get("server") is None:
            return {**options, "server": "private"}
        return options

    @model_validator(mode="after")
    def _names_one_server(self) -> RedisConfig:
        if self.url is not None and self.server is not None:
            raise ValueError("expected one of 'url' (attach to a server) and 'server: private' (start one), got both")
        if self.url is None and (self.wait_replicas or self.wait_fsync):
            raise ValueError(
                "'wait_replicas' and 'wait_fsync' are for a server with a 'url'. A private one has no replicas"
            )
        if self.server is None and self.appendonly:
            raise ValueError("'appendonly' is for a private server. With 'url', set the persistence on that server")
        return self
