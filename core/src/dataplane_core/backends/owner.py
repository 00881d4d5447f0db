"""The owner of a store: the process that hosts its ledger, and how its clients reach it.

It is a process of its own, which the first client starts. It keeps the ledger in a log in the store's engine
(`EngineLog`), and ends when no client is left. If it is killed, or stopped, or cut off from the engine, any client
starts another one, which goes on where the log ends. Clients find it by the newest record.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any, Final, TypeAlias

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    LostReplyError,
    OperationTimeoutError,
)
from dataplane_core.hosting.messages import Messages, decode_about
from dataplane_core.hosting.server import Client, LedgerHost, Server, listen_on, new_tls, new_token
from dataplane_core.hosting.session import Session, TcpAddress
from dataplane_core.ledger import Command, Reply, commands
from dataplane_core.log.engine import EngineLog, Lease, newest_record
from dataplane_core.log.ledger import EXIT_STATUS, LoggedLedger, TakenError
from dataplane_core.spec import new_id

_MESSAGES: Final = Messages()
#: Seconds in which the engine answers an owner that starts.
_OPEN_S: Final = 30.0
#: Seconds between two looks of an owner at its log and its clients, and of a client for an owner.
_BEAT_S: Final = 0.3
_LOOK_S: Final = 0.02
#: Seconds that an owner waits for its first client, and that a client waits for a connection to an owner.
_FIRST_S: Final = 30.0
_REACH_S: Final = 2.0
#: Write ids of an owner begin with its generation, and go on with this many bits.
_WRITE_BITS: Final = 32


#: A `RowStoreBackend` that keeps a log. Its module imports this one.
Store: TypeAlias = Any


# --- clients ----------------------------------------------------------------------------------------------------------


class _GoneError(BackendUnavailableError):
    """The owner is gone, or another one has taken its place. The call may be repeated there."""


def _failure(address: TcpAddress, what: str, error: Exception, connecting: bool) -> DataPlaneError:
    where = f"{what}: the owner of the store at {address.ip}:{address.port}"
    if isinstance(error, TimeoutError):
        return OperationTimeoutError(f"{where} did not answer in time.")
    return _GoneError(f"{where} cannot be reached: {error}.")


class _Watch:
    """Whether an owner that does not answer is still the owner."""

    def __init__(self, engine: Store, lease: Lease, address: TcpAddress) -> None:
        self._engine, self._lease, self._address = engine, lease, address

    def check(self) -> None:
        try:
            number, newest = newest_record(self._engine, time.monotonic() + _REACH_S)
        except (BackendUnavailableError, OperationTimeoutError) as error:
            if not error.retryable:
                raise
            return  # the owner waits for the engine, too
        if newest is None or newest.address is None or TcpAddress(*newest.address) != self._address:
            raise _GoneError("another process owns the store.")
        if self._lease.is_over(number):
            raise _GoneError("the owner of the store is dead.")

    def describe(self) -> str:
        return "it is alive, and writes its log"


class OwnerClient:
    """A client's way to the owner, wherever that is. Thread-safe.

    Args:
        backend: The backend, whose engine is open. The owner's options that hold for all clients replace its own.
        bootstrap, deadline: As for `Backend.start`.

    Attributes:
        num_sessions: How often it connected to an owner.

    Raises:
        As `Backend.start`.
    """

    def __init__(self, backend: Store, *, bootstrap: bool, deadline: float) -> None:
        self._backend = backend
        self._lock = threading.RLock()  # which only the thread that holds it can release
        self._lease = Lease()
        self._session: Session | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None  # what the process wrote
        self._closed = False
        self.num_sessions = 0
        number, newest = newest_record(backend, deadline)
        owner = ""
        if newest is None:
            if not bootstrap:
                raise BackendUnavailableError("there is no store.", hint="Bootstrap it first.")
            owner = self._start(number)
        elif bootstrap and backend.exclusive:
            raise AlreadyRunningError("there is a store already.", retryable=True)
        elif not bootstrap:  # an owner that this client starts has the same
            backend.config = backend.config.model_copy(update=newest.limits)
        try:
            self._session = self._connect(deadline)
            limits: dict[str, Any] = decode_about(self._session.welcome, dict[str, Any])["limits"]
            mine = {name: getattr(backend.config, name) for name in limits}
            if bootstrap and mine != limits:
                raise AlreadyRunningError(f"the store runs with the options {limits}, not {mine}.")
            backend.config = backend.config.model_copy(update=limits)
            if owner and backend.exclusive:
                _, now = newest_record(backend, deadline)
                if now is None or now.owner != owner:
                    raise AlreadyRunningError("another process has started the store.", retryable=True)
        except BaseException:
            self.close()
            raise

    def call(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Sends a command to the owner. Where that is gone, to the next one: the ledger does nothing twice.

        Raises:
            LostReplyError: The owner is gone in the middle of a put, which is repeated as a whole.
        """
        while True:
            session = self._session_now(deadline)
            try:
                if wake is None:
                    return session.call(command.op, deadline, command)
                return session.call_waiting(command.op, deadline, command, wake)
            except _GoneError as error:
                # without the lock, which another thread may hold for long; to connect once too often does no harm
                if self._session is session:
                    self._session = None
                session.finish()  # other calls over it notice by themselves
                if isinstance(command, (commands.BeginPut, commands.CommitPut)):  # the next one may come late
                    raise LostReplyError(error.message) from error

    def pid(self, deadline: float) -> int:
        """The owner's process id, on its host."""
        self.call(deadline, commands.ListPartitionsRequest(deadline=deadline))  # there is one, and it is alive
        pid: int = decode_about(self._session_now(deadline).welcome, dict[str, Any])["pid"]
        return pid

    def stop_waiting(self, token: str) -> None:
        """As `LedgerBackend.stop_waiting`."""
        if (session := self._session) is not None:
            session.end_waiting(token, tell=True)

    def close(self) -> None:
        """Leaves the owner, which ends if this was its last client."""
        self._closed = True
        if (session := self._session) is not None:
            session.close()
        self._forget()

    def _session_now(self, deadline: float) -> Session:
        if (session := self._session) is not None:
            return session
        try:
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise OperationTimeoutError(
                    "the deadline passed while another thread looked for the owner of the store."
                )
            if self._session is None:
                self._session = self._connect(deadline)
                if self._closed:  # meanwhile
                    self._session.close()
            return self._session
        finally:
            try:  # noqa: SIM105  (also if an interrupt came right after `acquire`; one may come in a call of `suppress`)
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass

    def _connect(self, deadline: float) -> Session:
        """A session with the owner. Starts one where there is none."""
        why = "none has started yet"
        while not self._closed:
            number, newest = newest_record(self._backend, deadline)
            if newest is None and self._process is None:
                raise BackendUnavailableError(
                    "the store is gone: it was emptied, or another one is in its place.",
                    retryable=False,
                    hint="Close this client, connect again, register the partitions and produce their samples again.",
                )
            if newest is not None and newest.address is not None:
                address = TcpAddress(*newest.address)
                try:
                    until = min(deadline, time.monotonic() + _REACH_S)
                    watch = partial(_Watch, self._backend, self._lease, address)
                    session = Session(address, _MESSAGES, until, partial(_failure, address), watch)
                    self.num_sessions += 1
                    self._forget()  # that process has its owner: itself, or one that was faster
                    return session
                except (_GoneError, OperationTimeoutError) as error:
                    why = error.message
            code = None if self._process is None else self._process.poll()
            if code is not None and code > 0 and code != EXIT_STATUS:
                raise self._not_started()
            # also once more if the one that was started was killed, or too late
            if newest is None or newest.address is None or self._lease.is_over(number):
                self._start(number)
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"the store has no owner that can be reached: {why}")
            time.sleep(_LOOK_S)
        raise ClientClosedError("this client is closed.")

    # --- the process --------------------------------------------------------------------------------------------------

    def _start(self, dead: int) -> str:
        """Starts an owner, unless one that was started is still trying. Returns its id."""
        if self._process is not None and self._process.poll() is None:
            return ""
        cls, owner = type(self._backend), new_id()
        words = {
            "path": sys.path,
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "options": self._backend.owner_options(),
            "owner": owner,
            "dead": dead,
        }
        self._forget()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (it is read if the process fails, and has no name)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from dataplane_core.backends.owner import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            start_new_session=True,  # an interrupt of the trainer does not end it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(words).encode())
        self._process = process  # not before: if this is interrupted, it would count as one that is still trying
        threading.Thread(target=process.wait, name="dataplane-owner", daemon=True).start()  # it leaves no zombie
        return owner

    def _forget(self) -> None:
        """Forgets the process that was started, which goes on."""
        if self._words is not None:
            self._words.close()
        self._words = self._process = None

    def _not_started(self) -> BackendUnavailableError:
        assert self._words is not None
        self._words.seek(0)
        last = self._words.read().decode(errors="replace").strip().splitlines()[-3:]
        self._forget()
        return BackendUnavailableError(
            f"the process of the ledger could not be started: {' / '.join(last) or 'it said nothing'}",
            hint="It imports the backend's class by its name, and opens the engine with the same options.",
        )


# --- the process ------------------------------------------------------------------------------------------------------


class _OwnerHost(LedgerHost):
    def __init__(self, ledger: LoggedLedger, log: EngineLog, limits: dict[str, Any]) -> None:
        super().__init__(ledger, log.commit_or_end)
        self._limits = limits
        self.alone_since = time.monotonic() + _FIRST_S  # infinite while there are clients

    def begin_session(self) -> Client:
        self.alone_since = math.inf
        return super().begin_session()

    def end_session(self, client: Client) -> None:
        super().end_session(client)
        if not self._clients:
            self.alone_since = time.monotonic()

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "limits": self._limits}


def main() -> None:
    """Runs an owner, which is told on standard input what it owns. Returns when it has no client, or is not needed."""
    words = json.loads(sys.stdin.read())
    sys.path[:] = words["path"]
    module, _, name = words["class"].partition(":")
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    backend: Store = cls(cls.Config.model_validate(words["options"]))
    backend.open_engine(bootstrap=False, deadline=time.monotonic() + _OPEN_S)
    try:
        _serve(backend, words["owner"], words["dead"])
    except TakenError:
        pass  # another owner was faster
    finally:
        backend.close_engine()


def _serve(backend: Store, owner: str, dead: int) -> None:
    token, listener = new_token(), listen_on(backend.owner_ip())
    ip, port = listener.getsockname()[:2]
    tls, certificate = new_tls(ip) if backend.owner_uses_tls() else (None, "")
    limits = {"capacity_bytes": backend.config.capacity_bytes, "on_full": backend.config.on_full}
    log = EngineLog(backend, owner, (ip, port, token, certificate), limits, dead=dead)
    # of ids that an owner before gave out, the log may have no record; a put whose begin is not known is repeated
    first_write = log.generation << _WRITE_BITS
    ledger = LoggedLedger(
        log, backend.config.capacity_bytes, lazy=(commands.BeginPut, commands.Collected), first_write=first_write
    )
    host = _OwnerHost(ledger, log, limits)
    server = Server(host, listener, token=token, tls=tls)
    log.is_needed = server.has_clients

    def beat() -> None:
        while time.monotonic() - host.alone_since < _BEAT_S:
            time.sleep(_BEAT_S)
            with ledger.lock:
                log.beat()
        server.close()

    threading.Thread(target=beat, name="dataplane-beat", daemon=True).start()
    server.run()
    log.end()
