"""The server that an instance lives on, and what the namespace says of the instance."""

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
    "num_replicas",
    "refuse_policy",
    "refuse_store",
    "refuse_version",
    "store_version_of",
    "version_of",
]

#: The oldest server that the scripts run on.
_LEAST_VERSION = (7, 0)

#: A time in seconds.
_TIME = struct.Struct("<d")


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


def refuse_store(who: str, version: str | None) -> ConfigError | None:
    """What is wrong with the version of the instance that a namespace holds, if it holds one."""
    if version in (None, str(STORE_VERSION)):
        return None
    return ConfigError(
        f"{who} holds an instance of version {version}. Expected {STORE_VERSION}.",
        hint="Use the dataplane-redis that wrote it, or another namespace.",
    )


def store_version_of(link: Link, base: bytes, deadline: float) -> str | None:
    """The version of the instance that a namespace holds, or None."""
    try:
        version = link.command("doctor", deadline, b"HGET", base + b":instance", b"version")
    except BackendError as error:
        if "WRONGTYPE" in str(error):
            return "1"  # which was a string
        raise
    return None if version is None else str(version.decode())


def num_replicas(link: Link, deadline: float) -> int:
    """How many servers replicate this one."""
    return int(_info(link, deadline, b"replication").get("connected_slaves", "0"))


@dataclass(frozen=True, slots=True)
class Instance:
    """What the namespace says of itself: the options that shape the store, and which store it is.

    Attributes:
        id: Random bits, drawn when the namespace was empty, and kept as long as its data. A namespace without it, or
            with another, is not the store that this client connected to: it was emptied, or another server took over
            the address.
        owner: Random bits of the client that bootstrapped it last, where this is that client.
        ahead_s: The time of the store less this process' monotonic clock, in seconds.
    """

    capacity_bytes: int | None
    on_full: str
    id: bytes
    owner: bytes
    ahead_s: float

    @classmethod
    def bootstrap(
        cls, link: Link, base: bytes, config: RedisConfig, deadline: float, *, exclusive: bool = False
    ) -> Instance:
        """Makes the instance, or takes it over from an earlier client of equal options.

        Raises:
            AlreadyRunningError: An instance of other options is there; or any, where ``exclusive``.
        """
        owner = new_id().encode()
        reply = _ask(link, base, config, deadline, "bootstrap alone" if exclusive else "bootstrap", owner)
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
        return cls(_capacity_of(reply[2]), reply[3].decode(), reply[1], owner, _ahead_s(reply[4]))

    @classmethod
    def attach(cls, link: Link, base: bytes, config: RedisConfig, deadline: float) -> Instance:
        """Finds the instance.

        Raises:
            BackendUnavailableError: There is none, or its owner closed it.
        """
        reply = _ask(link, base, config, deadline, "attach", b"")
        if reply[0] == b"none":
            raise BackendUnavailableError(
                f"connect(bootstrap=False) failed: namespace '{config.namespace}' on {link.label} holds no instance.",
                hint="Bootstrap it first: connect(config, bootstrap=True).",
            )
        return cls(_capacity_of(reply[2]), reply[3].decode(), reply[1], b"", _ahead_s(reply[4]))

    def end(self, link: Link, base: bytes, config: RedisConfig, deadline: float) -> None:
        """Nobody attaches any more, unless a later client took over. The data stays, and its clients go on."""
        _ask(link, base, config, deadline, "end", self.owner)

    def asker(self) -> bytes:
        """The last argument of a script."""
        return self.id + os.urandom(16) + _TIME.pack(self.ahead_s + time.monotonic())

    def full_error(self, what: str, size_bytes: int, held_bytes: int, num_before: int) -> CapacityExceededError:
        """The error of a put that does not fit, or has to wait for those that came before it."""
        assert self.capacity_bytes is not None
        never = size_bytes > self.capacity_bytes
        line = f", and {num_before} {'put waits' if num_before == 1 else 'puts wait'} for room before it"
        return CapacityExceededError(
            f"{what} refused: {size_bytes} bytes do not fit, {held_bytes} of {self.capacity_bytes} bytes are held"
            f"{line if num_before else ''}.",
            retryable=not never,
            hint="Write smaller batches or raise capacity_bytes." if never else "Clear samples that are consumed.",
        )


def _ask(link: Link, base: bytes, config: RedisConfig, deadline: float, action: str, owner: bytes) -> Any:
    """Runs the script about the instance; its reply."""
    capacity = "" if config.capacity_bytes is None else str(config.capacity_bytes)
    request = pack_request(action, str(STORE_VERSION), new_id(), owner, capacity, config.on_full)
    reply = link.script("close" if action == "end" else "connect", deadline, SCRIPTS["instance"], base, request)
    if reply[0] == b"version":
        _refuse(refuse_store(link.label, reply[1].decode()))
    return reply


def _ahead_s(clock: bytes) -> float:
    """By how much the store is ahead of this process' clock; rather too little than too much, by the reply's way."""
    (store_s,) = _TIME.unpack_from(clock)
    return float(store_s) - time.monotonic()


def _capacity_of(text: bytes) -> int | None:
    return int(text) if text else None
