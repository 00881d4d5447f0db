"""The server of an instance, and the record of the instance in its namespace."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ConfigError,
    DataPlaneError,
)
from dataplane_core.spec import new_id
from dataplane_redis._link import Link
from dataplane_redis._scripts import SCRIPTS, STORE_VERSION
from dataplane_redis._wire import pack_request
from dataplane_redis.config import RedisConfig

__all__ = [
    "Durability",
    "Instance",
    "check_server",
    "durability_of",
    "fsync_error",
    "num_replicas",
    "policy_error",
    "setting_of",
    "store_error",
    "store_version_of",
    "version_error",
    "version_of",
]

#: The oldest server that the scripts run on.
_MIN_VERSION = (7, 0)
#: The oldest server that has WAITAOF. Valkey's scripts and clients see it as Redis 7.2.
_WAITAOF_VERSION = (7, 2)

#: A time in seconds.
_TIME = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """How the server keeps data, by its current settings.

    Attributes:
        appendonly: Whether there is an append-only file.
        appendfsync: When that file is synced: ``always``, ``everysec`` or ``no``; ``unknown`` if the server does not
            say (its ACL may forbid CONFIG).
        snapshots: The ``save`` setting; empty: none.
        maxmemory_policy: What the server does when it is full.
        private: Whether the server is a private one. Nobody starts it again on its data.
        survives_kill: Whether no committed put is lost when the server is killed: ``appendfsync always``, or the
            option ``wait_fsync``, on a server that is not private.
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


def setting_of(link: Link, what: str, deadline: float, name: str) -> str | None:
    """A setting, or None if the server does not say."""
    try:
        reply = link.command(what, deadline, b"CONFIG", b"GET", name.encode())
    except DataPlaneError as error:
        if isinstance(error, BackendUnavailableError) and not error.retryable:
            return None  # the ACL forbids it
        if "unknown command" in str(error):
            return None  # managed servers remove the command
        raise
    return str(reply[1].decode()) if len(reply) >= 2 else None


def durability_of(link: Link, config: RedisConfig, deadline: float) -> Durability:
    """Reads the server's settings."""
    persistence = _info(link, deadline, b"persistence")
    appendonly = persistence.get("aof_enabled") == "1"
    appendfsync = setting_of(link, "connect", deadline, "appendfsync") or "unknown"
    private = config.url is None
    return Durability(
        appendonly=appendonly,
        appendfsync=appendfsync,
        snapshots=setting_of(link, "connect", deadline, "save") or "",
        maxmemory_policy=_info(link, deadline, b"memory").get("maxmemory_policy", "unknown"),
        private=private,
        survives_kill=appendonly and (appendfsync == "always" or config.wait_fsync) and not private,
    )


def check_server(link: Link, config: RedisConfig, deadline: float) -> Durability:
    """Checks that this backend may use the server.

    Raises:
        BackendUnavailableError: The server cannot be reached, or refuses the user.
        ConfigError: It is older than 7.0, it may evict keys, or it cannot do what ``wait_fsync`` asks.
    """
    version = version_of(link, deadline)
    _raise_if(version_error(link.label, version))
    durability = durability_of(link, config, deadline)
    _raise_if(fsync_error(link.label, config, version, durability))
    _raise_if(policy_error(link.label, config, durability))
    return durability


def _raise_if(reason: ConfigError | None) -> None:
    if reason is not None:
        raise ConfigError(f"connect refused: {reason.message}", hint=reason.hint)


def version_of(link: Link, deadline: float) -> str:
    """The server's version, such as ``7.0.15``."""
    return _info(link, deadline, b"server").get("redis_version", "0")


def version_error(who: str, version: str) -> ConfigError | None:
    """The error if the server is too old, else None."""
    if _is_at_least(version, _MIN_VERSION):
        return None
    return ConfigError(f"{who} is Redis {version}. Expected 7.0 or newer.", hint="Upgrade it.")


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= least


def fsync_error(who: str, config: RedisConfig, version: str, durability: Durability) -> ConfigError | None:
    """The error if the server cannot do what ``wait_fsync`` asks, else None."""
    if not config.wait_fsync:
        return None
    if not _is_at_least(version, _WAITAOF_VERSION):
        return ConfigError(
            f"{who} is Redis {version}. wait_fsync needs Redis 7.2, or Valkey.",
            hint="Upgrade it; or leave wait_fsync off and run: redis-cli CONFIG SET appendfsync always",
        )
    if not durability.appendonly:
        return ConfigError(
            f"{who} has no append-only file, which wait_fsync waits for.",
            hint="Run: redis-cli CONFIG SET appendonly yes; redis-cli CONFIG REWRITE. The replicas need it too.",
        )
    return None


def policy_error(who: str, config: RedisConfig, durability: Durability) -> ConfigError | None:
    """The error if the server may evict keys, else None."""
    if durability.maxmemory_policy == "noeviction" or config.allow_eviction:
        return None
    return ConfigError(
        f"{who} has maxmemory-policy '{durability.maxmemory_policy}', so it may drop samples that nobody has consumed. "
        "Expected 'noeviction'.",
        hint="Run: redis-cli CONFIG SET maxmemory-policy noeviction. Or set the option allow_eviction: true.",
    )


def store_error(who: str, version: str | None) -> ConfigError | None:
    """The error if the namespace holds an instance of another version, else None."""
    if version in (None, str(STORE_VERSION)):
        return None
    return ConfigError(
        f"{who} holds an instance of version {version}. Expected {STORE_VERSION}.",
        hint="Use the dataplane-redis that wrote it, or another namespace.",
    )


def store_version_of(link: Link, base: bytes, deadline: float) -> str | None:
    """The version of the instance in a namespace, or None if there is none."""
    try:
        version = link.command("doctor", deadline, b"HGET", base + b":instance", b"version")
    except BackendError as error:
        if "WRONGTYPE" in str(error):
            return "1"  # version 1 stored a string
        raise
    return None if version is None else str(version.decode())


def num_replicas(link: Link, deadline: float) -> int:
    """How many servers replicate this one."""
    return int(_info(link, deadline, b"replication").get("connected_slaves", "0"))


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance in its namespace: the options that all its clients share, and its identity.

    Attributes:
        capacity_bytes: Of payload; None: no limit.
        on_full: What a put does when there is no room: ``block`` or ``raise``.
        id: Random bits, drawn when the namespace was empty and kept as long as its data. If the namespace holds another
            id or none, it is no longer the store that this client connected to: it was emptied, or another server took
            over the address.
        owner: Random bits of the client that bootstrapped the instance last; empty if that was another client.
        clock_offset_s: The store's time minus this process's monotonic clock, in seconds.
        num_buckets: How many buckets the payload is spread over; see `Placing`. Fixed when the namespace was empty.
    """

    capacity_bytes: int | None
    on_full: str
    id: bytes
    owner: bytes
    clock_offset_s: float
    num_buckets: int

    @classmethod
    def bootstrap(
        cls,
        link: Link,
        base: bytes,
        config: RedisConfig,
        deadline: float,
        *,
        exclusive: bool = False,
        num_buckets: int = 1,
    ) -> Instance:
        """Creates the instance, or takes it over from an earlier client with equal options.

        Raises:
            AlreadyRunningError: The namespace holds an instance with other options; with ``exclusive``, any instance.
        """
        owner = new_id().encode()
        action = "bootstrap alone" if exclusive else "bootstrap"
        reply = _ask(link, base, config, deadline, action, owner, num_buckets)
        if reply[0] == b"other" and exclusive:
            raise AlreadyRunningError(
                f"namespace '{config.namespace}' on {link.label} holds an instance.", retryable=True
            )
        if reply[0] == b"other":
            raise AlreadyRunningError(
                f"connect(bootstrap=True) refused: namespace '{config.namespace}' on {link.label} holds a running "
                f"instance with capacity_bytes {_capacity_of(reply[1])}, on_full '{reply[2].decode()}'. Expected "
                f"capacity_bytes {config.capacity_bytes}, on_full '{config.on_full}'.",
                hint="Attach with bootstrap=False, choose another namespace, or, if its owner died, run: "
                f"redis-cli HDEL '{base.decode()}:instance' owner",
            )
        return cls._of(reply, owner)

    @classmethod
    def attach(cls, link: Link, base: bytes, config: RedisConfig, deadline: float) -> Instance:
        """Finds the instance.

        Raises:
            BackendUnavailableError: There is no instance, or its owner closed it.
        """
        reply = _ask(link, base, config, deadline, "attach", b"")
        if reply[0] == b"none":
            raise BackendUnavailableError(
                f"connect(bootstrap=False) failed: namespace '{config.namespace}' on {link.label} holds no instance.",
                hint="Bootstrap it first: connect(config, bootstrap=True).",
            )
        return cls._of(reply, b"")

    @classmethod
    def _of(cls, reply: list[Any], owner: bytes) -> Instance:
        _, number, capacity, on_full, clock, buckets = reply
        return cls(_capacity_of(capacity), on_full.decode(), number, owner, _clock_offset_s(clock), int(buckets))

    def end(self, link: Link, base: bytes, config: RedisConfig, deadline: float) -> None:
        """Removes the owner, unless a later client took over. Then no client can attach. Data and clients stay."""
        _ask(link, base, config, deadline, "end", self.owner)

    def call_context(self) -> bytes:
        """The last argument of every script: the instance's id, 16 random bytes, and the store's current time."""
        return self.id + os.urandom(16) + _TIME.pack(self.clock_offset_s + time.monotonic())

    def full_error(self, what: str, size_bytes: int, held_bytes: int, num_before: int) -> CapacityExceededError:
        """The error of a put that does not fit, or would have to wait for earlier puts."""
        assert self.capacity_bytes is not None
        never = size_bytes > self.capacity_bytes
        line = f", and {num_before} {'put waits' if num_before == 1 else 'puts wait'} for room before it"
        return CapacityExceededError(
            f"{what} refused: {size_bytes} bytes do not fit, {held_bytes} of {self.capacity_bytes} bytes are held"
            f"{line if num_before else ''}.",
            retryable=not never,
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )


def _ask(
    link: Link, base: bytes, config: RedisConfig, deadline: float, action: str, owner: bytes, num_buckets: int = 1
) -> Any:
    """Runs the ``instance`` script and returns its reply."""
    capacity = "" if config.capacity_bytes is None else str(config.capacity_bytes)
    request = pack_request(action, str(STORE_VERSION), new_id(), owner, capacity, config.on_full, str(num_buckets))
    reply = link.script("close" if action == "end" else "connect", deadline, SCRIPTS["instance"], base, request)
    if reply[0] == b"version":
        _raise_if(store_error(link.label, reply[1].decode()))
    return reply


def _clock_offset_s(clock: bytes) -> float:
    """The store's time minus this process's clock. Too low by the time that the reply took, never too high."""
    (store_s,) = _TIME.unpack_from(clock)
    return float(store_s) - time.monotonic()


def _capacity_of(text: bytes) -> int | None:
    return int(text) if text else None
