"""What `dataplane doctor redis_store` checks: the installed `redis-server`, or the server of the ``url``."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError

from dataplane_core.backends import Finding
from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_redis._instance import (
    durability_of,
    fsync_error,
    num_replicas,
    policy_error,
    store_error,
    store_version_of,
    version_error,
    version_of,
)
from dataplane_redis._link import Link
from dataplane_redis._placing import base_of
from dataplane_redis._refusals import label_of
from dataplane_redis._sentinel import Service
from dataplane_redis._server import INSTALL_HINT
from dataplane_redis.config import RedisConfig

__all__ = ["diagnose"]

_BINARY: Final = "redis-server"


def diagnose(config: RedisConfig, deadline: float) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`."""
    if config.url is None:
        yield from _private(deadline)
    else:
        yield from _running(config, config.url.get_secret_value(), deadline)


def _private(deadline: float) -> Iterator[Finding]:
    path = shutil.which(_BINARY)
    if path is None:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        found = [str(file) for folder in folders if (file := Path(folder, _BINARY)).is_file()]
        if found:
            yield Finding.error(f"{found[0]} is not executable.", f"Run: chmod +x {found[0]}")
        else:
            yield Finding.error("There is no redis-server on the PATH.", INSTALL_HINT)
        return
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=max(0.1, deadline - time.monotonic()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding.error(f"{path} does not run: {error}", "Install redis-server again.")
        return
    # Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=...
    version = next((word.removeprefix("v=") for word in done.stdout.split() if word.startswith("v=")), "unknown")
    refused = version_error(path, version)
    yield Finding.ok(f"{path} is Redis {version}.") if refused is None else _error(refused)
    yield Finding.warning(
        "A private server's data live as long as the server, at most as long as the client that started it.",
        "For data that must outlive it, run a server with appendonly yes and appendfsync always, and name it in the "
        "option url.",
    )


def _running(config: RedisConfig, url: str, deadline: float) -> Iterator[Finding]:
    service = Service.of(url)
    if service is not None:
        try:
            answering = service.num_answering(deadline)
        except (AuthenticationError, NoPermissionError) as error:
            yield Finding.error(
                f"A sentinel of the Redis service '{service.name}' refuses this user: {error}",
                "Add ?sentinel_username=USER&sentinel_password=PASSWORD to the url. The user needs +sentinel|masters.",
            )
            return
        yield _sentinels(service, answering)
    link = Link(url, label_of(url))
    try:
        base = base_of(config.namespace)
        link.follow("doctor", deadline, base)
        version = version_of(link, deadline)
        durability = durability_of(link, config, deadline)
        store_version = store_version_of(link, base, deadline)
        replicas = num_replicas(link, deadline)
        mute = _wake_error(link, base, deadline)
    except DataPlaneError as error:
        yield _error(error)
        return
    finally:
        link.close()
    who = link.label[0].upper() + link.label[1:]
    refused = version_error(who, version)
    yield Finding.ok(f"{who} answers and is Redis {version}.") if refused is None else _error(refused)
    refused = store_error(who, store_version)
    if refused is not None:
        yield _error(refused)
    refused = policy_error(who, config, durability)
    if refused is not None:
        yield _error(refused)
    elif durability.maxmemory_policy != "noeviction":
        yield Finding.warning(
            f"{who} has maxmemory-policy '{durability.maxmemory_policy}', which allow_eviction accepts: it may drop "
            "samples that nobody has consumed.",
            "Run: redis-cli CONFIG SET maxmemory-policy noeviction",
        )
    said = f"{who}: {durability.describe()}."
    if durability.survives_kill:
        yield Finding.ok(said)
    else:
        yield Finding.warning(
            said,
            "To keep every committed sample, run: redis-cli CONFIG SET appendonly yes; redis-cli CONFIG SET "
            "appendfsync always; redis-cli CONFIG REWRITE",
        )
    refused = fsync_error(who, config, version, durability)
    if refused is not None:
        yield _error(refused)
    yield from _replication(who, config, replicas)
    if mute is not None:
        yield Finding.warning(
            f"Claims that wait are not woken, but ask now and then: {mute.message}",
            f"Let the user send and receive messages: ACL SETUSER NAME '&dp:{{{config.namespace}}}*' +spublish "
            "+ssubscribe.",
        )
    parts = urlsplit(url if service is None else service.server_url)
    hosts = {parts.hostname} if service is None else {host for host, _ in service.sentinels}
    if parts.scheme == "redis" and not hosts <= {"localhost", "127.0.0.1", "::1"}:
        if not parts.password:
            yield Finding.warning(
                f"{who} accepts every client that can reach it: the url has no password.",
                "Set requirepass or an ACL user on the server, and put the password in the url.",
            )
        yield Finding.warning(
            f"The connection to {link.label} is not encrypted.", "If others use this network, use rediss:// (TLS)."
        )


def _wake_error(link: Link, base: bytes, deadline: float) -> DataPlaneError | None:
    """Why the server refuses this user the messages that wake claims."""
    try:
        link.command("doctor", deadline, b"SPUBLISH", base + b":wake:doctor", b"")
    except BackendUnavailableError as error:
        if error.retryable:
            raise
        return error
    return None


def _sentinels(service: Service, answering: int) -> Finding:
    count = len(service.sentinels)
    said = f"{answering} of {count} sentinels answer and watch '{service.name}'"
    if answering == count >= 3:
        return Finding.ok(f"{said}.")
    if count < 3:
        return Finding.warning(
            f"{said}. With fewer than 3, the failure of one host may prevent a failover.",
            "Run three sentinels on three hosts, and name all of them in the url.",
        )
    return Finding.warning(f"{said}.", "Start the others, or correct the url.")


def _replication(who: str, config: RedisConfig, replicas: int) -> Iterator[Finding]:
    count = f"{replicas} {'replica' if replicas == 1 else 'replicas'}"
    if replicas < config.wait_replicas:
        yield Finding.error(
            f"{who} has {count}. wait_replicas is {config.wait_replicas}: every put would wait until its deadline.",
            "Start the replicas, or lower wait_replicas.",
        )
    elif config.wait_replicas:
        yield Finding.ok(f"{who} has {count}, and {config.wait_replicas} must have a change before a call returns.")
    elif replicas:
        yield Finding.warning(
            f"{who} has {count}, and replicates without waiting: a failover loses the newest writes. Clients notice "
            "it, and say which calls were lost.",
            "To lose nothing that was acknowledged, set the option wait_replicas.",
        )


def _error(error: DataPlaneError) -> Finding:
    return Finding.error(error.message, error.hint)
