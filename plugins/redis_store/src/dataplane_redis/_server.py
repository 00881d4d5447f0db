"""The server: a private one, how a server keeps data, what it must be like, and what `dataplane doctor` says of it.

A private `redis-server` is started on a unix socket in a `PrivateFolder`, and ended by its process id. If its owner is
killed, the owner's watcher process removes the folder and the lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError

from dataplane_core.backends import Finding
from dataplane_core.errors import BackendUnavailableError, ConfigError, DataPlaneError, OperationTimeoutError
from dataplane_core.ownership import OwnedProcess, PrivateFolder, last_words
from dataplane_redis._link import Link
from dataplane_redis._sentinel import Service
from dataplane_redis.config import RedisConfig, log_key

#: The hint if redis-server is not installed.
_INSTALL_HINT: Final = (
    "Install it: apt-get install redis-server (Debian, Ubuntu), dnf install redis, brew install redis. Or set the "
    "option url to a server that runs."
)
_BINARY: Final = "redis-server"
_POLL_S: Final = 0.01
#: Seconds that the server may take to end after SIGTERM; then it is killed.
_END_S: Final = 5.0
#: Seconds in which a server that was killed stops to listen.
_ENDING_S: Final = 0.05
#: The oldest server that the scripts run on.
_MIN_VERSION: Final = (7, 0)
#: The oldest server that has WAITAOF. Valkey's scripts and clients see it as Redis 7.2.
_WAITAOF_VERSION: Final = (7, 2)

# --- a private server -------------------------------------------------------------------------------------------------


def _folder(namespace: str) -> PrivateFolder:
    return PrivateFolder("redis", namespace, "redis.sock")


def private_url(namespace: str) -> str:
    """The URL of the private server of a namespace."""
    return f"unix://{quote(str(_folder(namespace).socket))}"


def greeting(namespace: str) -> str | None:
    """What the private server of this namespace says first: nothing, unless it refuses connections. None: none runs."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(_folder(namespace).socket))
            # a server that was just killed may listen for a moment longer: it then resets what it has not accepted
            probe.settimeout(_ENDING_S)
            return probe.recv(256).decode("utf-8", "replace").strip().removeprefix("-ERR ")
    except (ConnectionRefusedError, ConnectionResetError, FileNotFoundError):
        return None
    except OSError:  # it is silent, as it should be, or too many wait; a busy or stopped one still takes connections
        return ""


class PrivateServer:
    """A `redis-server` that belongs to this process."""

    def __init__(self, config: RedisConfig) -> None:
        path = shutil.which(_BINARY)
        if path is None:
            raise BackendUnavailableError(
                "connect failed: server is 'private', but there is no redis-server on the PATH.",
                retryable=False,
                hint=_INSTALL_HINT,
            )
        self._config = config
        self._binary = path
        self._folder = _folder(config.namespace)
        self._process: OwnedProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, deadline: float) -> None:
        """Starts the server and waits until it answers. Raises if another process runs that of the namespace."""
        self._folder.claim(deadline)
        self.launch(deadline)

    def launch(self, deadline: float) -> None:
        """Starts the server process on the folder as it is, like after a crash. Raises what `start` raises."""
        self._end_process()
        self._folder.socket.unlink(missing_ok=True)
        log = self._folder.path / "redis.log"
        settings = {
            "port": "0",
            "unixsocket": str(self._folder.socket),
            "unixsocketperm": "700",
            "logfile": str(log),
            "dir": str(self._folder.path),
            "daemonize": "no",
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self._config.appendonly else "no",
            "appendfsync": self._config.appendfsync,
        }
        words = [self._binary, *(word for name, value in settings.items() for word in (f"--{name}", value))]
        self._process = OwnedProcess(words, end_s=_END_S, folder=self._folder.path, lock=self._folder.lock)
        link = Link(private_url(self._config.namespace), "the private server")
        with contextlib.closing(link):
            self._wait(link, self._process, log, deadline)

    def stop(self, until: float = math.inf) -> None:
        """Ends the server by its process id, which is killed then at the latest, and removes the folder. May be called
        again."""
        if self._folder.is_claimed:
            self._end_process(until)
            self._folder.release()

    def _wait(self, link: Link, process: OwnedProcess, log: Path, deadline: float) -> None:
        while True:
            if self._folder.socket.exists():
                with contextlib.suppress(DataPlaneError):
                    link.command("connect", deadline, b"", b"PING")
                    return
            if process.ended:
                raise BackendUnavailableError(
                    f"connect failed: the private redis-server ended at its start: {last_words(log)}", retryable=False
                )
            if time.monotonic() + _POLL_S >= deadline:
                raise OperationTimeoutError("connect timed out: the private redis-server does not answer.")
            time.sleep(_POLL_S)

    def _end_process(self, until: float = math.inf) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(until)


# --- what a server must be like ---------------------------------------------------------------------------------------


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
    text = link.command("connect", deadline, b"", b"INFO", section).decode("utf-8", "replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _setting_of(link: Link, deadline: float, name: str) -> str | None:
    """A setting, or None if the server does not say."""
    try:
        reply = link.command("connect", deadline, b"", b"CONFIG", b"GET", name.encode())
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
    appendfsync = _setting_of(link, deadline, "appendfsync") or "unknown"
    private = config.url is None
    return Durability(
        appendonly=appendonly,
        appendfsync=appendfsync,
        snapshots=_setting_of(link, deadline, "save") or "",
        maxmemory_policy=_info(link, deadline, b"memory").get("maxmemory_policy", "unknown"),
        private=private,
        survives_kill=appendonly and (appendfsync == "always" or config.wait_fsync) and not private,
    )


def check_server(link: Link, config: RedisConfig, deadline: float) -> Durability:
    """Refuses a server that is older than 7.0, may evict keys, or cannot do what ``wait_fsync`` asks."""
    version = _version_of(link, deadline)
    refused = _version_error(link.label, version)
    if refused is None:
        durability = durability_of(link, config, deadline)
        refused = next(_setting_errors(link.label, config, version, durability), None)
    if refused is not None:
        raise ConfigError(f"connect refused: {refused.message}", hint=refused.hint)
    return durability


def _version_of(link: Link, deadline: float) -> str:
    return _info(link, deadline, b"server").get("redis_version", "0")


def _version_error(who: str, version: str) -> ConfigError | None:
    if _is_at_least(version, _MIN_VERSION):
        return None
    return ConfigError(f"{who} is Redis {version}. Expected 7.0 or newer.", hint="Upgrade it.")


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= least


def _setting_errors(who: str, config: RedisConfig, version: str, durability: Durability) -> Iterator[ConfigError]:
    if config.wait_fsync and not _is_at_least(version, _WAITAOF_VERSION):
        yield ConfigError(
            f"{who} is Redis {version}. wait_fsync needs Redis 7.2, or Valkey.",
            hint="Upgrade it; or leave wait_fsync off and run: redis-cli CONFIG SET appendfsync always",
        )
    elif config.wait_fsync and not durability.appendonly:
        yield ConfigError(
            f"{who} has no append-only file, which wait_fsync waits for.",
            hint="Run: redis-cli CONFIG SET appendonly yes; redis-cli CONFIG REWRITE. The replicas need it too.",
        )
    if durability.maxmemory_policy != "noeviction" and not config.allow_eviction:
        yield ConfigError(
            f"{who} has maxmemory-policy '{durability.maxmemory_policy}', so it may drop samples that nobody has "
            "consumed. Expected 'noeviction'.",
            hint="Run: redis-cli CONFIG SET maxmemory-policy noeviction. Or set the option allow_eviction: true.",
        )


# --- the doctor -------------------------------------------------------------------------------------------------------


def diagnose(config: RedisConfig, deadline: float) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`."""
    if config.url is None:
        return _private(deadline)
    return _running(config, config.url.get_secret_value(), deadline)


def _private(deadline: float) -> Iterator[Finding]:
    path = shutil.which(_BINARY)
    if path is None:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        found = [str(file) for folder in folders if (file := Path(folder, _BINARY)).is_file()]
        if found:
            yield Finding.error(f"{found[0]} is not executable.", f"Run: chmod +x {found[0]}")
        else:
            yield Finding.error("There is no redis-server on the PATH.", _INSTALL_HINT)
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
    refused = _version_error(path, version)
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
    link = Link(url)
    try:
        link.follow("doctor", deadline)
        version, durability = _version_of(link, deadline), durability_of(link, config, deadline)
        link.command("doctor", deadline, log_key(config.namespace), b"EXISTS", log_key(config.namespace))
        replicas = int(_info(link, deadline, b"replication").get("connected_slaves", "0"))
    except DataPlaneError as error:
        yield _error(error)
        return
    finally:
        link.close()
    who = link.label[0].upper() + link.label[1:]
    refused = _version_error(who, version)
    yield Finding.ok(f"{who} answers and is Redis {version}.") if refused is None else _error(refused)
    yield from map(_error, _setting_errors(who, config, version, durability))
    if durability.maxmemory_policy != "noeviction" and config.allow_eviction:
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
    yield from _replication(who, config, replicas)
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
            f"{who} has {count}, and replicates without waiting: a failover may lose the newest rows, and reads "
            "that need them say so. If the ledger's process dies with the primary, its newest changes are lost, too.",
            "To lose nothing that was acknowledged, set the option wait_replicas.",
        )


def _error(error: DataPlaneError) -> Finding:
    return Finding.error(error.message, error.hint)
