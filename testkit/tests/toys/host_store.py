"""A toy of scope host: a server process that holds a ledger and rows of bytes, reached through a local socket.

It unpickles what clients send, so it does not declare ``no_pickle``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Client, Listener

from dataplane_core.backends import CapacityOptions, RefsGoneError, RowStoreBackend
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    OperationTimeoutError,
    StalePartitionError,
)
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import Capability, Claim, PutReply, Scope, SettleReply, new_id

_KEY = b"a toy"
_FAMILY = "AF_UNIX"


class Server:
    """What runs in the server process: one thread per connection."""

    def __init__(self, options):
        self._options = options
        self._ledger = LedgerService(options["capacity_bytes"])
        self._rows = {}
        self._reserved = set()
        self._mutex = threading.Lock()
        self._woken = set()

    def run(self):
        with Listener(self._options["address"], _FAMILY, backlog=64, authkey=_KEY) as listener:
            while True:
                with contextlib.suppress(OSError, EOFError):  # a client that went away while it connected
                    threading.Thread(target=self.answer, args=(listener.accept(),), daemon=True).start()

    def answer(self, connection):
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                method, args, kwargs = connection.recv()
                try:
                    reply = True, getattr(self, f"do_{method}")(*args, **kwargs)
                except Exception as error:
                    reply = False, error
                connection.send(reply)

    def do_options(self):
        return self._options

    def do_ledger(self, command):
        return self._ledger.call(command)

    def do_put_rows(self, handles, rows):
        self._rows.update(zip(handles, rows, strict=True))

    def do_get_rows(self, handles):
        return [self._rows.get(handle) for handle in handles]

    def do_delete_rows(self, handles):
        for handle in handles:
            self._rows.pop(handle, None)

    # for the broken ones only

    def do_reserve(self, names):
        self._reserved.update(names)

    def do_release(self, names):
        self._reserved.difference_update(names)

    def do_reserved(self):
        return self._reserved

    def do_lock(self, wait_s):
        return self._mutex.acquire(timeout=wait_s)

    def do_unlock(self):
        self._mutex.release()

    def do_wait(self, command):
        def wake():
            self._woken.add(command.token)
            return True

        return self._ledger.call(command, wake)

    def do_is_woken(self, token):
        return token in self._woken


def fork_server(options):
    """Starts a server in a fork of this process, which spares it the imports; it ends with this process.

    Returns:
        Its process id, and the end of a pipe that this process holds open.
    """
    ended, ours = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        pid = os.fork()
    if pid:
        os.close(ended)
        return pid, ours
    try:
        os.close(ours)
        threading.Thread(target=Server(options).run, daemon=True).start()
        os.read(ended, 1)
    finally:
        os._exit(0)


class HostOptions(CapacityOptions):
    address: str


class HostStore(RowStoreBackend):
    """Starts its server with bootstrap, attaches to it without."""

    capabilities = frozenset(Capability) - {
        Capability.DURABLE,
        Capability.NO_PICKLE,
        Capability.UNITS,
        Capability.WAKES,
    }
    scope = Scope.HOST
    Config = HostOptions

    def __init__(self, config):
        super().__init__(config)
        self._process = None
        self._local = threading.local()
        self._connections = []

    @classmethod
    def isolated_options(cls, options, tag):
        return {**options, "address": f"{options['address']}-{tag}"}

    def start(self, *, bootstrap, deadline):
        address, mine = self.config.address, self.config.model_dump()
        if bootstrap and self._is_first(f"{address}.owner"):
            self._process, self._pipe = fork_server(mine)
            self._wait_for_server(deadline)
        elif bootstrap and self.exclusive:
            raise AlreadyRunningError(f"a server runs at {address}.", retryable=True)
        if bootstrap and self._ask(deadline, "options") != mine:
            raise AlreadyRunningError(f"a server of other options runs at {address}.")
        self._ask(deadline, "options")

    def stop(self):
        for connection in self._connections:
            connection.close()
        if self._process is not None:
            os.close(self._pipe)
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            os.unlink(self.config.address)
            os.unlink(f"{self.config.address}.owner")

    def _wait_for_server(self, deadline):
        """Its socket exists a moment before it listens."""
        while True:
            try:
                return self._ask(deadline, "options")
            except BackendUnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _is_first(self, path):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            return True
        return False

    def _ask(self, deadline, method, *args, **kwargs):
        try:
            if not hasattr(self._local, "connection"):
                self._local.connection = Client(self.config.address, _FAMILY, authkey=_KEY)
                self._connections.append(self._local.connection)
            connection = self._local.connection
            connection.send((method, args, kwargs))
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                del self._local.connection  # its reply is still to come
                raise OperationTimeoutError(f"the server at {self.config.address} did not answer in time.")
            succeeded, reply = connection.recv()
        except (OSError, EOFError) as error:
            if isinstance(error, OperationTimeoutError):
                raise
            raise BackendUnavailableError(f"the server at {self.config.address} does not answer.") from error
        if not succeeded:
            raise reply
        return reply

    def call_ledger(self, deadline, command):
        return self._ask(deadline, "ledger", command)

    def put_rows(self, handles, buffer, offsets, deadline):
        rows = [bytes(buffer[start:stop]) for start, stop in pairwise(map(int, offsets))]
        self._ask(deadline, "put_rows", list(handles), rows)

    def get_rows(self, handles, deadline):
        rows = self._ask(deadline, "get_rows", list(handles))
        if None in rows:
            raise RefsGoneError("a row is gone")
        return rows

    def delete_rows(self, handles, deadline):
        self._ask(deadline, "delete_rows", list(handles))


class KeepsCursorsInTheClient(HostStore):
    """Every process remembers for itself what it gave: right in one process, wrong in two."""

    def claim(self, request):
        given = self.__dict__.setdefault("given", {}).setdefault((request.partition_id, request.task_name), set())
        listed = self.call_ledger(request.deadline, commands.ListRequest(request.partition_id, None))
        info = self.call_ledger(request.deadline, commands.DescribeRequest(request.partition_id))
        ready = [each for each in listed.sample_ids if each not in given][: request.batch_size]
        whole = info.num_samples is not None and len(listed.sample_ids) >= info.num_samples
        if request.all_or_nothing and len(ready) < request.batch_size and not whole:
            return Claim()
        given.update(ready)
        return Claim(sample_ids=ready, tags=[{} for _ in ready], exhausted=whole and not ready)


class DiesBadly(HostStore):
    """What an attached client does is right unless it is killed meanwhile.

    It writes a put column by column; its every second put is written after it has returned, when later ones have; ids
    that it is writing are reserved; a claim without a lease is confirmed a moment later; and what it holds on a lease
    stays its.
    """

    def put_samples(self, request):
        attached = self._process is None
        if not attached:
            busy = self._ask(request.deadline, "reserved") & set(request.sample_ids)
            if busy:
                raise StalePartitionError(f"another client writes {sorted(busy)}.")
            return super().put_samples(request)
        self._ask(request.deadline, "reserve", request.sample_ids)
        self.turn = self.__dict__.get("turn", 0) + 1
        if self.turn % 2:
            self._write(request)
        else:
            late = self.__dict__.setdefault("late", [])
            late.append(replace(request, columns={name: list(column) for name, column in request.columns.items()}))
            if len(late) > 2:
                self._write(late.pop(0))
        return PutReply(num_samples=len(request.sample_ids))

    def _write(self, request):
        for name, column in request.columns.items():
            one = replace(request, columns={name: column}, specs={name: request.specs[name]}, request_id=new_id())
            super().put_samples(one)
            time.sleep(0.02)
        self._ask(request.deadline, "release", request.sample_ids)

    def claim(self, request):
        if self._process is not None:
            return super().claim(request)
        lease_s, request.lease_s = request.lease_s, 0.05 if request.lease_s is None else None
        claim = super().claim(request)
        request.lease_s = lease_s
        if lease_s is None:
            return replace(claim, lease_tokens=None)
        return replace(claim, lease_tokens=["mine"] * len(claim.sample_ids))

    def ack(self, request):
        if request.lease_tokens[0] == "mine":
            return SettleReply(num_samples=len(request.sample_ids))
        return super().ack(request)


class LocksTheStore(HostStore):
    """One lock for all, which a client takes before a put and gives back after it."""

    def put_samples(self, request):
        if not self._ask(request.deadline, "lock", 2.0):
            raise OperationTimeoutError("the store is locked.")
        try:
            time.sleep(0.005)
            return super().put_samples(request)
        finally:
            self._ask(request.deadline, "unlock")


class WakesTheDead(HostStore):
    """Wakes the claim that has waited longest, also if its client was killed. An attached client is slow to ask."""

    capabilities = HostStore.capabilities | {Capability.WAKES}

    def call_ledger_waking(self, deadline, command, wake):
        if not isinstance(command, commands.ClaimRequest):
            return self.call_ledger(deadline, command)
        if self._process is None:
            time.sleep(1.0)
        threading.Thread(target=self._listen, args=(command.token, wake), daemon=True).start()
        return self._ask(deadline, "wait", command)

    def _listen(self, token, wake):
        with contextlib.suppress(BackendUnavailableError):  # the store has ended
            while not wake._ended and not self._ask(time.monotonic() + 60, "is_woken", token):
                time.sleep(0.01)
            wake()


class GivesUpAtOnce(HostStore):
    """Says of a server that is not there that it never will be."""

    def start(self, *, bootstrap, deadline):
        try:
            super().start(bootstrap=bootstrap, deadline=deadline)
        except BackendUnavailableError as error:
            error.retryable = False
            raise


class BootstrapsOverWhatRuns(HostStore):
    """Bootstraps over a server of equal options, also where it was told to be the only one."""

    def start(self, *, bootstrap, deadline):
        self.exclusive = False
        if bootstrap:
            time.sleep(2.0)  # its server starts slowly: all who look meanwhile find nothing
        while True:
            try:
                return super().start(bootstrap=bootstrap, deadline=deadline)
            except BackendUnavailableError:
                if not bootstrap or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


class HangsInForks(HostStore):
    """Waits for a thread that a fork does not have."""

    opened_by = None

    def start(self, *, bootstrap, deadline):
        if HangsInForks.opened_by not in (None, os.getpid()):
            threading.Event().wait(max(0.0, deadline - time.monotonic()))
        HangsInForks.opened_by = os.getpid()
        super().start(bootstrap=bootstrap, deadline=deadline)
