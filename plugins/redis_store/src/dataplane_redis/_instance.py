"""The server that an instance lives on, and the instance's marker in its namespace."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    CapacityExceededError,
    ConfigError,
    DataPlaneError,
)
from dataplane_redis._link import Link
from dataplane_redis._scripts import STORE_VERSION
from dataplane_redis.config import RedisConfig

__all__ = [
    "Durability",
    "Instance",
    "check_server",
    "durability_of",
    "refuse_policy",
    "refuse_version",
    "version_of",
]

#: The oldest server that the scripts run on.
_LEAST_VERSION = (7, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """How the server keeps data, as it is set now.

    Attributes:
        appendonly: Whether there is an append-only file.
        appendfsync: When that file is synced: ``always``, ``everysec`` or ``no``; ``unknown`` where the server does not
            tell (its ACL may forbid CONFIG).
        snapshots: The ``save`` setting; empty: none.
        maxmemory_policy: What the server does when it is full.
        private: Whether the server is a private one, which nobody starts again on its data.
        survives_kill: Whether no committed put is lost when the server is killed: ``appendfsync always``, on a server
            that is not private.
    """

    appendonly: bool
    appendfsync: str
    snapshots: str
    maxmemory_policy: str
    private: bool
    survives_kill: bool

    def describe(self) -> str:
        """One line for people."""
        if self.private:
            kept = "private: its data live as long as the server, at most as long as the client that started it"
        elif self.survives_kill:
            kept = "durable: every put is synced to the append-only file before it returns"
        elif self.appendonly:
            kept = f"append-only file with appendfsync {self.appendfsync}: a crash may lose the last writes"
        elif self.snapshots:
            kept = f"snapshots only (save {self.snapshots}): a crash loses what came after the last one"
        else:
            kept = "no persistence: everything is lost with the server"
        return f"{kept}; maxmemory-policy {self.maxmemory_policy}"


def _info(link: Link, deadline: float, section: bytes) -> dict[str, str]:
    text = link.command("connect", deadline, b"INFO", section).decode("utf-8", "replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _setting(link: Link, deadline: float, name: str) -> str | None:
    """A setting, or None where the server does not tell."""
    try:
        reply = link.command("connect", deadline, b"CONFIG", b"GET", name.encode())
    except DataPlaneError as error:
        if isinstance(error, BackendUnavailableError) and not error.retryable:
            return None  # the ACL forbids it
        if "unknown command" in str(error):
            return None  # managed servers have it removed
        raise
    return str(reply[1].decode()) if len(reply) >= 2 else None


def durability_of(link: Link, config: RedisConfig, deadline: float) -> Durability:
    """Asks the server."""
    persistence = _info(link, deadline, b"persistence")
    appendonly = persistence.get("aof_enabled") == "1"
    appendfsync = _setting(link, deadline, "appendfsync") or "unknown"
    private = config.url is None
    return Durability(
        appendonly=appendonly,
        appendfsync=appendfsync,
        snapshots=_setting(link, deadline, "save") or "",
        maxmemory_policy=_info(link, deadline, b"memory").get("maxmemory_policy", "unknown"),
        private=private,
        survives_kill=appendonly and appendfsync == "always" and not private,
    )


def check_server(link: Link, config: RedisConfig, deadline: float) -> Durability:
    """Refuses a server that this backend must not use.

    Raises:
        BackendUnavailableError: It cannot be reached, or lets nobody in.
        ConfigError: Older than 7.0, or it may evict.
    """
    _refuse(refuse_version(link.label, version_of(link, deadline)))
    durability = durability_of(link, config, deadline)
    _refuse(refuse_policy(link.label, config, durability))
    return durability


def _refuse(reason: ConfigError | None) -> None:
    if reason is not None:
        raise ConfigError(f"connect refused: {reason.message}", hint=reason.hint)


def version_of(link: Link, deadline: float) -> str:
    """The server's version, such as ``7.0.15``."""
    return _info(link, deadline, b"server").get("redis_version", "0")


def refuse_version(who: str, version: str) -> ConfigError | None:
    """What is wrong with a server's version, if anything."""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= _LEAST_VERSION:
        return None
    return ConfigError(f"{who} is Redis {version}. Expected 7.0 or newer.", hint="Upgrade it.")


def refuse_policy(who: str, config: RedisConfig, durability: Durability) -> ConfigError | None:
    """What is wrong with a server's eviction policy, if anything."""
    if durability.maxmemory_policy == "noeviction" or config.allow_eviction:
        return None
    return ConfigError(
        f"{who} has maxmemory-policy '{durability.maxmemory_policy}', so it may drop samples that nobody has consumed. "
        "Expected 'noeviction'.",
        hint="Run: redis-cli CONFIG SET maxmemory-policy noeviction. Or set the option allow_eviction: true.",
    )


@dataclass(frozen=True, slots=True)
class Instance:
    """What the marker says: the options that shape the store, and who bootstrapped it last."""

    capacity_bytes: int | None
    on_full: str
    owner: str

    @classmethod
    def bootstrap(cls, link: Link, base: bytes, config: RedisConfig, deadline: float) -> Instance:
        """Writes the marker, or takes it over from an earlier client of equal options.

        Raises:
            AlreadyRunningError: An instance of other options is there.
        """
        mine = cls(config.capacity_bytes, config.on_full, uuid.uuid4().hex)
        key = _key(base)
        if link.command("connect", deadline, b"SET", key, mine._to_json(), b"NX") is not None:
            return mine
        theirs = cls._read(link, base, deadline)
        if theirs is not None and (theirs.capacity_bytes, theirs.on_full) != (mine.capacity_bytes, mine.on_full):
            raise AlreadyRunningError(
                f"connect(bootstrap=True) refused: namespace '{config.namespace}' on {link.label} holds a running "
                f"instance with capacity_bytes {theirs.capacity_bytes}, on_full '{theirs.on_full}'. Expected "
                f"capacity_bytes {mine.capacity_bytes}, on_full '{mine.on_full}'.",
                hint="Attach with bootstrap=False, choose another namespace, or, if its owner died, delete the key "
                f"'{key.decode()}'.",
            )
        link.command("connect", deadline, b"SET", key, mine._to_json())
        return mine

    @classmethod
    def attach(cls, link: Link, base: bytes, config: RedisConfig, deadline: float) -> Instance:
        """Reads the marker.

        Raises:
            BackendUnavailableError: There is none.
        """
        found = cls._read(link, base, deadline)
        if found is None:
            raise BackendUnavailableError(
                f"connect(bootstrap=False) failed: namespace '{config.namespace}' on {link.label} holds no instance.",
                hint="Bootstrap it first: connect(config, bootstrap=True).",
            )
        return found

    def end(self, link: Link, base: bytes, deadline: float) -> None:
        """Removes the marker, if no later client took it over. The data stays."""
        if self._read(link, base, deadline) == self:
            link.command("close", deadline, b"DEL", _key(base))

    @classmethod
    def _read(cls, link: Link, base: bytes, deadline: float) -> Instance | None:
        data = link.command("connect", deadline, b"GET", _key(base))
        if data is None:
            return None
        values: dict[str, Any] = json.loads(data)
        if values.get("version") != STORE_VERSION:
            raise ConfigError(
                f"connect refused: {link.label} holds an instance of version {values.get('version')}. Expected "
                f"{STORE_VERSION}.",
                hint="Use the dataplane-redis that wrote it, or another namespace.",
            )
        return cls(values["capacity_bytes"], values["on_full"], values["owner"])

    def _to_json(self) -> bytes:
        return json.dumps(
            {
                "version": STORE_VERSION,
                "capacity_bytes": self.capacity_bytes,
                "on_full": self.on_full,
                "owner": self.owner,
            }
        ).encode()

    def refuse_full(self, what: str, size_bytes: int, held_bytes: int) -> CapacityExceededError:
        """The error of a put that does not fit."""
        assert self.capacity_bytes is not None
        never = size_bytes > self.capacity_bytes
        return CapacityExceededError(
            f"{what} refused: {size_bytes} bytes do not fit, {held_bytes} of {self.capacity_bytes} bytes are held.",
            retryable=not never,
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )


def _key(base: bytes) -> bytes:
    return base + b":instance"
