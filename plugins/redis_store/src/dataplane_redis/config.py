"""The options of the ``redis_store`` backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from dataplane_core.ledger_backend import CapacityOptions

__all__ = ["RedisConfig"]

_SCHEMES = ("redis://", "rediss://", "unix://")


class RedisConfig(CapacityOptions):
    """Which server, and which part of it: a ``url``, or else a private server.

    ``capacity_bytes`` and ``on_full`` shape the instance: an attaching client reads them from the server.
    """

    url: SecretStr | None = None
    """``redis://[user:password@]host:port/db``, ``rediss://...`` (TLS; ``?ssl_ca_certs=...``) or
    ``unix:///path?db=0&username=...&password=...``. The server is its operator's: this backend neither starts nor ends
    it. Kept as a secret: never printed or logged."""

    server: Literal["private"] | None = None
    """``private``, the default without a ``url``: the bootstrapping client starts a ``redis-server`` of its own on a
    unix socket in a temporary folder and ends it on close. Clients of the same user on the same host attach with the
    same options."""

    namespace: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Prefix of all keys. Instances of different namespaces on one server share nothing."""

    allow_eviction: bool = False
    """Accept a server whose ``maxmemory-policy`` may evict keys, and so lose samples that nobody has consumed."""

    appendonly: bool = False
    """Of a private server: keep an append-only file."""

    appendfsync: Literal["always", "everysec", "no"] = "always"
    """Of a private server with ``appendonly``: when the file is synced. ``always``: before a put returns."""

    @field_validator("url")
    @classmethod
    def _is_a_redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(_SCHEMES):
            raise ValueError(f"expected a URL that starts with {', '.join(_SCHEMES)}")
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
        if self.server is None and self.appendonly:
            raise ValueError("'appendonly' is of a private server; the persistence of a 'url' is set on that server")
        return self
