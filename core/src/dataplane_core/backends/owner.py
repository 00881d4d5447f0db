"""The owner of a store: the process that hosts its ledger. How it is elected, what it writes down, and how its clients
reach it, by the newest record of its log.

The first client starts it, and it ends when no client is left. If it is killed, stopped, or cut off from the engine,
any client starts another one, which goes on where the log ends.

The engine keeps records under the numbers 1, 2, 3, ... It appends one only if its number follows the newest. So of two
processes that append the same number, one notices that it is not the owner any more. An owner appends a record at least
each second. Where the newest record stays the same for `LEASE_S`, its owner is dead, or may answer nobody until it has
appended again. No clock is compared with another.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any, Final, TypeAlias, TypeVar

import msgspec

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClientClosedError,
    CorruptDataError,
    OperationTimeoutError,
)
from dataplane_core.hosting.messages import Messages, decode_about
from dataplane_core.hosting.server import Client, LedgerHost, Server, listen_on, new_tls, new_token
from dataplane_core.hosting.session import HostGoneError, LedgerLink, Session, TcpAddress, failure_of
from dataplane_core.ledger import commands
from dataplane_core.log import EXIT_STATUS, Log, LoggedLedger, TakenError
from dataplane_core.spec import new_id

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: A `RowStoreBackend` that keeps a log. Its module imports this one.
Store: TypeAlias = Any
#: Where an owner is reached: address, port, token, and certificate if it uses TLS.
Place: TypeAlias = tuple[str, int, bytes, str]

_MESSAGES: Final = Messages()
_VERSION: Final = 1
#: Seconds in which the newest record stays the same if its owner is dead.
LEASE_S: Final = 5.0
#: Seconds after which an owner with nothing to say appends a record all the same.
_BEAT_S: Final = 1.0
#: Seconds after its newest record in which an owner may answer.
_SURE_S: Final = 2.5
#: Seconds for which a process that is to be the owner waits for an engine that does not answer.
_START_S: Final = 30.0
#: Seconds that the engine may take for a call, and until it is tried again.
_ENGINE_S: Final = 10.0
_AGAIN_S: Final = 0.1
#: Seconds after which an engine that refuses what it is asked is believed.
_REFUSED_S: Final = 1.0
#: A generation is greater than the one before by a number of at most this many bits, drawn at random.
_GENERATION_BITS: Final = 14
#: Write ids of an owner begin with its generation, and go on with this many bits.
_WRITE_BITS: Final = 32
#: Seconds between two looks of an owner at its log and its clients, and of a client for an owner.
_LOOK_S: Final = 0.3
_SEEK_S: Final = 0.02
#: Seconds that an owner waits for its first client, and that a client waits for a connection to an owner.
_FIRST_S: Final = 30.0
_REACH_S: Final = 2.0


# --- the log ----------------------------------------------------------------------------------------------------------


class LogRecord(msgspec.Struct, array_like=True):
    """What the owner did since the record before, and where it is reached."""

    version: int  # of this format
    owner: str  # random bits
    address: Place | None  # None: it has ended
    generation: int  # greater than that of each owner before; most likely another one if the engine lost their records
    at: float  # the time, on the log's clock
    commands: list[tuple[float, bytes]]  # what it did, each with its time
    state: bytes | None = None  # after all before this record; then there are no commands
    limits: dict[str, Any] = {}  # options that hold for all clients, and for the owner that one of them starts


_decode: Final = msgspec.msgpack.Decoder(LogRecord).decode


def newest_record(engine: Store, deadline: float) -> tuple[int, LogRecord | None]:
    """The newest record of a log and its number; 0 and None if it is empty."""
    records = [*engine.read_log(None, deadline)]
    return (records[-1][0], _record(*records[-1])) if records else (0, None)


def _record(number: int, data: bytes) -> LogRecord:
    try:
        record = _decode(data)
    except (msgspec.MsgspecError, ValueError) as error:  # some of its text is no text
        raise CorruptDataError(f"record {number} of the log cannot be read: {error}.") from error
    if record.version != _VERSION:
        raise CorruptDataError(
            f"record {number} of the log is of version {record.version}. Expected {_VERSION}.",
            hint="Another dataplane-core wrote it: use that one, or begin a new store.",
        )
    return record


class Lease:
    """Watches whether the newest record changes. Only what is looked at again and again counts as the same."""

    def __init__(self) -> None:
        self._number, self._since, self._looked_at = -1, 0.0, 0.0

    def is_over(self, number: int) -> bool:
        """Whether the newest record, whose number this is, has stayed the same for `LEASE_S`."""
        now = time.monotonic()
        if number != self._number or now - self._looked_at > _SURE_S:
            self._number, self._since = number, now
        self._looked_at = now
        return now - self._since >= LEASE_S


class EngineLog(Log):
    """The log of an owner. Creating it waits until there is no other owner, and reads the log. Thread-safe.

    It is the owner only after `begin`. Then call `beat` at least twice a second. ``dead`` is the number of the newest
    record, if it is known that its owner is dead.

    Raises:
        TakenError: There is an owner.
        CorruptDataError: A record is damaged or missing.
    """

    def __init__(
        self, engine: Store, owner: str, address: Place, limits: dict[str, Any] | None = None, *, dead: int = -1
    ) -> None:
        super().__init__()
        self._engine = engine
        self._owner = owner
        self._address: Place | None = address
        self._limits = limits or {}
        self._lock = threading.RLock()
        self._pending: list[tuple[float, bytes]] = []
        self._is_dirty = False  # whether `commit` has to wait for the engine
        self._sure_at = -_SURE_S
        give_up_at = time.monotonic() + _START_S
        #: Called when the engine has lost records, and so rows: no put may rely on these.
        self.forget_content: Callable[[], object] = lambda: None
        #: Whether somebody waits for this owner while the engine does not answer.
        self.is_needed: Callable[[], bool] = lambda: time.monotonic() < give_up_at  # until the owner has clients
        lease = Lease()
        first, newest = self._newest()
        number = first
        while newest is not None and newest.address is not None and number != dead and not lease.is_over(number):
            time.sleep(_AGAIN_S)
            number, newest = self._newest()
            if number != first:
                raise TakenError("another process owns the store.")
        # the newest record that is not ours, and the newest one: each its number and owner
        self._before = self._last = number, "" if newest is None else newest.owner
        self.generation = (0 if newest is None else newest.generation) + 1 + secrets.randbits(_GENERATION_BITS)
        self._ahead_s = (0.0 if newest is None else newest.at) - time.monotonic()
        self._read()

    def _newest(self) -> tuple[int, LogRecord | None]:
        return self._until_done(lambda deadline: newest_record(self._engine, deadline))

    def _read(self) -> None:
        expected = 0
        for number, data in self._until_done(lambda deadline: [*self._engine.read_log(0, deadline)]):
            record = _record(number, data)
            if record.state is not None:
                self.state, self.records, expected = record.state, [], number
            elif number != expected:
                raise CorruptDataError(f"record {expected or 1} of the log is missing, and {number} is there.")
            self.records += record.commands
            expected += 1
        if expected > self._last[0] + 1:
            raise TakenError("another process has taken the store.")
        if expected and expected <= self._last[0]:
            raise CorruptDataError(f"record {expected} of the log is missing.")

    def _until_done(self, call: Callable[[float], _T]) -> _T:
        """Calls the engine until it answers: it may be started again, or be replaced by its replica. Gives up if it
        refuses, as one whose disk is full, or nobody waits for this owner any more."""
        since = math.inf
        while True:
            try:
                return call(time.monotonic() + _ENGINE_S)
            except CorruptDataError:
                raise
            except (BackendUnavailableError, OperationTimeoutError) as error:
                if since == math.inf:
                    _log.warning("the engine does not do what it is asked, and is asked again: %s", error)
                since = min(since, time.monotonic())
                is_refused = isinstance(error, BackendUnavailableError) and error.outcome == "not_done"
                is_believed = is_refused and time.monotonic() - since > _REFUSED_S
                if is_believed or not error.retryable or not self.is_needed():
                    raise
                time.sleep(_AGAIN_S)

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """As `Log.begin`. The process is the owner then."""
        with self._lock:
            self.state, self.records = b"", []
            at, number = self.now(), self._last[0] + 1
            state = self.make_state()
            if not self._append(at, state):
                self._refuse_if_taken()
                return  # a later state was appended
            self._began(0, len(state))
            self._append(self.now())  # a short one is the newest, which clients read
        try:
            self._engine.trim(number, time.monotonic() + _ENGINE_S)
        except (BackendUnavailableError, OperationTimeoutError) as error:
            _log.warning("the log could not be trimmed, and is with the next state: %s", error)

    def append(self, record: bytes, at: float, *, is_lazy: bool = False, frees: bool = False) -> None:
        """As `Log.append`. The engine has a record that is lazy within a second."""
        with self._lock:
            self._pending.append((at, record))
            self._is_dirty |= not is_lazy

    def commit(self) -> None:
        """As `Log.commit`. This process is still the owner then."""
        with self._lock:
            if (self._is_dirty or time.monotonic() - self._sure_at > _SURE_S) and not self._append(self.now()):
                self._refuse_if_taken()

    def beat(self) -> None:
        """Appends a record if none was appended for a second, or ends the process, as `commit_or_end`. Nothing may
        change the ledger meanwhile."""
        with self._lock:
            self._is_dirty |= time.monotonic() - self._sure_at > _BEAT_S
        self.commit_or_end()
        self.shorten_if_long()  # also of such records

    def end(self) -> None:
        """Says that this owner ends: the next one need not wait."""
        with self._lock:
            self._address, self._is_dirty = None, True
            self.commit()

    def _append(self, at: float, state: bytes | None = None) -> bool:
        """Appends a record of all that is pending, or of the state. False: the engine has other records than expected.

        What is sent twice, since the answer was lost, is refused the second time, and found to be there.
        """
        pending = self._pending if state is None else []
        record = LogRecord(_VERSION, self._owner, self._address, self.generation, at, pending, state, self._limits)
        data, begun, next_one = msgspec.msgpack.encode(record), time.monotonic(), self._last[0] + 1

        def once(deadline: float) -> bool:
            if time.monotonic() - self._sure_at > _SURE_S:
                # another process may own the store, and have come to the same number: the engine may have lost some
                number, newest = newest_record(self._engine, deadline)
                if (number, "" if newest is None else newest.owner) != self._last:
                    return False
            done: bool = self._engine.append(next_one, data, deadline)
            return done

        if not self._until_done(once):
            number, newest = self._newest()
            if newest is None or (number, newest.owner, newest.at) != (next_one, self._owner, at):
                return False
        self._last, self._sure_at, self._pending, self._is_dirty = (next_one, self._owner), begun, [], False
        self._size += len(data)
        return True

    def _refuse_if_taken(self) -> None:
        """If the engine lost its newest records, as when a replica replaces it, appends the state, which has them all.

        Raises:
            TakenError: It has records of another owner, or none.
        """
        number, newest = self._newest()
        if newest is None:  # and all rows are gone: what is there now is another store
            raise TakenError("the store was emptied.")
        was_before = number <= self._before[0] and newest.owner == self._before[1]
        if number > self._last[0] or not (newest.owner == self._owner or was_before):
            raise TakenError("another process has taken the store.")
        _log.warning("the engine lost the records of the log from %d on: the state is written anew", number + 1)
        self._last = number, newest.owner
        self.forget_content()
        self.begin()


# --- clients ----------------------------------------------------------------------------------------------------------


class OwnerLink(LedgerLink):
    """A client's way to the owner, wherever that is. The begin of a put may be known to one owner alone.

    The engine of the backend is open. The owner's options that hold for all clients replace its own.
    """

    host_knows = (commands.BeginPut, commands.CommitPut)

    def __init__(self, backend: Store, *, bootstrap: bool, deadline: float) -> None:
        super().__init__()
        self._backend = backend
        self._lease = Lease()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None  # what the process wrote
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
            limits: dict[str, Any] = decode_about(self.session(deadline).welcome, dict[str, Any])["limits"]
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

    def pid(self, deadline: float) -> int:
        """The owner's process id, on its host."""
        self.call(deadline, commands.ListPartitionsRequest(deadline=deadline))  # there is one, and it is alive
        pid: int = decode_about(self.session(deadline).welcome, dict[str, Any])["pid"]
        return pid

    def close(self) -> None:
        """Leaves the owner, which ends if this was its last client."""
        super().close()
        self._forget()

    def connect(self, deadline: float) -> Session:
        """As `LedgerLink.connect`. Starts an owner where there is none."""
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
                try:
                    session = self._reach(TcpAddress(*newest.address), min(deadline, time.monotonic() + _REACH_S))
                    self._forget()  # that process has its owner: itself, or one that was faster
                    return session
                except (HostGoneError, OperationTimeoutError) as error:
                    why = error.message
            code = None if self._process is None else self._process.poll()
            if code is not None and code > 0 and code != EXIT_STATUS:
                raise self._not_started()
            # also once more if the one that was started was killed, or too late
            if newest is None or newest.address is None or self._lease.is_over(number):
                self._start(number)
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"the store has no owner that can be reached: {why}")
            time.sleep(_SEEK_S)
        raise ClientClosedError("this client is closed.")

    def _reach(self, address: TcpAddress, deadline: float) -> Session:
        failure = failure_of(f"the owner of the store at {address.ip}:{address.port}")
        return Session(address, _MESSAGES, deadline, failure, lambda: partial(self._check, address))

    def _check(self, address: TcpAddress) -> str:
        """Whether an owner that does not answer is still the owner."""
        try:
            number, newest = newest_record(self._backend, time.monotonic() + _REACH_S)
        except (BackendUnavailableError, OperationTimeoutError) as error:
            if not error.retryable:
                raise
            return "It waits for the engine, as this process does."
        if newest is None or newest.address is None or TcpAddress(*newest.address) != address:
            raise HostGoneError("another process owns the store.")
        if self._lease.is_over(number):
            raise HostGoneError("the owner of the store is dead.")
        return "It is alive, and writes its log."

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
    backend.open_engine(bootstrap=False, deadline=time.monotonic() + _START_S)
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
    log.forget_content = ledger.ledger.forget_all_content

    def beat() -> None:
        while time.monotonic() - host.alone_since < _LOOK_S:
            time.sleep(_LOOK_S)
            with ledger.lock:
                log.beat()
        server.close()

    threading.Thread(target=beat, name="dataplane-beat", daemon=True).start()
    server.run()
    log.end()
