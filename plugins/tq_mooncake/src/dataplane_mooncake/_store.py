"""Mooncake's engine in this process: rows of bytes under keys.

A process has one engine per master and settings. Its clients share the engine; the last one to release it closes it.
Over TCP, rows are sent from the memory where they lie, which is registered with the engine for that time. Over RDMA,
where registering is slow, they are copied through one buffer, which is registered once. If a put is given up but its
thread still stores rows, that thread deletes them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import queue
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane_core.errors import BackendUnavailableError, ClientClosedError, OperationTimeoutError
from dataplane_core.host_memory import recycled_bytes
from dataplane_mooncake._calls import POLL_S, Call, Endpoint, add_peers, bounded, end_connections
from dataplane_mooncake.machine import check_library
from dataplane_tq_simple.addresses import host_and_port

_Bytes = npt.NDArray[np.uint8]

#: Codes that the engine returns: no segment has room; no such row; the master does not answer.
FULL: Final = -200
NOT_FOUND: Final = -704
UNREACHABLE: Final = -900
#: The transfer of a row failed. On a loaded machine this happened to 204 of 1,500 small rows although nothing was
#: broken, so a transfer is tried again.
TRANSFER_FAILED: Final = -800
#: The transfers of a batch took longer than the master's lease on a row, 5 s unless the master is told otherwise.
LEASE_EXPIRED: Final = -707
_NOT_READY: Final = -703

#: The variable that holds the lowest severity that glog writes; 3 is fatal.
_LOG_THRESHOLD: Final = "_ZN3fLI17FLAGS_minloglevelE"

#: A transfer is tried again so often at most. The engine kept up to four connections to a storage unit.
_MOST_TRIES: Final = 8
#: Over RDMA, transfers that can use the buffer at the same time. Each gets an equal slot of it.
_NUM_SLOTS: Final = 4
#: Keys in one request to the master.
_KEYS_PER_REQUEST: Final = 4096
#: Rows in one transfer. Over TCP the engine opens a connection for each row, all at once. 2,000 worked; with 3,000 it
#: hung for a minute and failed from then on. Several processes may read from one storage unit at the same time.
_ROWS_PER_TRANSFER: Final = 256
#: Bytes in one transfer over TCP: between two, a call that was given up ends.
_BYTES_PER_TRANSFER: Final = 256 << 20


class StoreSettings(NamedTuple):
    """The settings of an engine of this process."""

    master: str  # host:port
    address: str  # that this process announces
    protocol: str  # tcp or rdma
    devices: tuple[str, ...]  # for RDMA; empty: all
    local_buffer_size_bytes: int  # of the registered buffer; over TCP 0


class EngineError(Exception):
    """Mooncake refused some keys of a call, or failed for them."""

    def __init__(self, call: str, codes: Sequence[int]) -> None:
        counts = collections.Counter(codes).most_common()
        super().__init__(f"{call} returned " + ", ".join(f"{code} for {count} keys" for code, count in counts))
        self.code = counts[0][0]  # the most frequent one


class RowsMissing(Exception):
    """The store does not hold some of the keys, or no longer."""


def open_engine(settings: StoreSettings, *, segment_size_bytes: int) -> Any:
    """Sets up an engine, with memory to hold rows in if a size is named."""
    # the engine reads them now, and a Ray actor inherits those of its driver, which may run on another node
    os.environ["MC_TCP_BIND_ADDRESS"] = settings.address
    os.environ["MC_STORE_MEMCPY"] = "0"  # over TCP it is unsafe in some wheels
    os.environ.pop("MC_TCP_ENABLE_CONNECTION_POOL", None)  # in 0.3.11 a pool gives rows the bytes of others
    if settings.protocol == "rdma":
        os.environ.pop("MC_FORCE_TCP", None)
    library = check_library()
    _silence_log(library)
    engine = library.MooncakeDistributedStore()
    host = f"[{settings.address}]" if ":" in settings.address else settings.address
    code = engine.setup(
        host,
        "P2PHANDSHAKE",
        segment_size_bytes,
        0,  # nothing uses the engine's own buffer
        settings.protocol,
        ",".join(settings.devices),
        settings.master,
    )
    if code != 0:
        raise BackendUnavailableError(
            f"Mooncake's engine could not be set up (code {code}) at {settings.address} over {settings.protocol} with "
            f"the master at {settings.master}, segment of {segment_size_bytes} bytes.",
            hint="Check that the master is reachable from here. Set MC_LOG_LEVEL=INFO to see Mooncake's own log.",
        )
    return engine


def _silence_log(library: Any) -> None:
    """Silences the library's log, unless ``MC_LOG_LEVEL`` is set: at every start it tells of an error that is none."""
    if "MC_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(ValueError, OSError):  # another build of the library may not export it
            ctypes.c_int.in_dll(ctypes.CDLL(library.__file__), _LOG_THRESHOLD).value = 3


class Store:
    """This process's engine for one master, without a segment of its own. Thread-safe. Each `acquire` needs a
    `release`."""

    _shared: ClassVar[dict[tuple[int, StoreSettings], Store]] = {}
    _setting_up: ClassVar[dict[tuple[int, StoreSettings], threading.Lock]] = {}  # held by who sets an engine up
    _shared_lock = threading.RLock()  # a signal handler may use another client of the process

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self._engine = open_engine(settings, segment_size_bytes=0)
        # over TCP, memory is registered within microseconds: rows are moved from and to where they lie
        size = settings.local_buffer_size_bytes
        self._slot_size = size // _NUM_SLOTS
        self._slots: queue.Queue[_Bytes] = queue.Queue()  # a SimpleQueue with several readers may ignore timeouts
        if size:
            self._buffer: _Bytes = np.empty(size, dtype=np.uint8)
            self._register(self._buffer)
            for start in range(0, _NUM_SLOTS * self._slot_size, self._slot_size):
                self._slots.put(self._buffer[start : start + self._slot_size])
        # targets of transfers that failed: bytes that come late must not get into memory of somebody else
        self._late: collections.deque[_Bytes] = collections.deque(maxlen=_NUM_SLOTS)
        self._turns = itertools.count()  # of the segments, where puts name one
        self._num_users = 1
        self._calls: set[Call] = set()
        self._units: set[Endpoint] = set()
        self._ending = False  # whether a thread is ending calls that were given up
        self._num_ended = 0  # connections that were shut down, and that the engine may still use
        self._closed = False
        self._lock = threading.RLock()  # as above
        self._idle = threading.Condition(self._lock)

    # --- sharing -----------------------------------------------------------------------------------------------------

    @classmethod
    def acquire(cls, settings: StoreSettings, units: Collection[Endpoint], *, deadline: float) -> Store:
        """This process's engine for these settings, set up by the first caller. For ``units`` see `add_units`."""
        key = (os.getpid(), settings)
        what = f"connecting to the mooncake_master at {settings.master}"
        with cls._shared_lock:
            setting_up = cls._setting_up.setdefault(key, threading.Lock())
        if not setting_up.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OperationTimeoutError(f"{what}: another client of this process did not end it in time.")
        try:
            with cls._shared_lock:
                store = cls._shared.get(key)
                if store is not None:
                    store._num_users += 1
            if store is None:
                add_peers(master=host_and_port(settings.master))
                store = bounded(what, lambda call: cls(settings), deadline, undo=_close_late)
                with cls._shared_lock:
                    cls._shared[key] = store
        finally:
            setting_up.release()
        store.add_units(units)
        return store

    def add_units(self, units: Collection[Endpoint]) -> None:
        """Adds addresses on which storage units listen."""
        add_peers(units=units)
        self._units.update(units)

    def release(self) -> None:
        """Releases the engine. The last release closes it in the background, which takes about a second."""
        with self._shared_lock:
            self._num_users -= 1
            if self._num_users:
                return
            del self._shared[os.getpid(), self.settings]
        Call().start(self._close)

    def _close(self, call: Call) -> None:
        self._end_given_up(call)
        with self._lock:
            self._idle.wait_for(lambda: not self._calls)
            self._closed = True
        self._engine.close()

    @contextlib.contextmanager
    def in_call(self, call: Call) -> Iterator[None]:
        """Keeps the engine open while a call, or its undo, uses it."""
        with self._lock:
            if self._closed:
                raise ClientClosedError("this client is closed.")
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)
                self._idle.notify_all()

    def end_given_up(self) -> None:
        """Ends calls that were given up, by shutting down their connections, once no other call uses these. Otherwise a
        transfer to a suspended process would keep a core busy, and its slot of the buffer, for a minute."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        Call().start(self._end_given_up)

    def _end_given_up(self, call: Call) -> None:
        """Runs in a thread, and repeats: a transfer keeps opening connections."""
        while True:
            with self._lock:
                stuck = [each for each in self._calls if each.is_stuck]
                if not stuck:
                    self._ending = False
                    return
                if len(stuck) == len(self._calls):  # no other call begins meanwhile
                    with contextlib.suppress(Exception):  # then the calls end later by themselves
                        self._num_ended += end_connections(self._units)
                self._idle.wait(POLL_S)

    # --- rows: called in the threads of `bounded`, within `in_call` --------------------------------------------------

    def put(
        self,
        call: Call,
        keys: Sequence[str],
        buffer: Any,
        offsets: npt.NDArray[np.int64],
        *,
        segments: Sequence[str] = (),
    ) -> None:
        """Stores rows under keys that were never used, in one of these segments, by default in any.

        Row i is ``buffer[offsets[i]:offsets[i + 1]]``, which is not empty. If some rows are refused, others may be
        stored.
        """
        source = np.frombuffer(buffer, dtype=np.uint8)
        for first, stop in self._parts(np.diff(offsets)):
            with self._registered(source[offsets[first] : offsets[stop]], call, puts=True) as region:
                starts = (offsets[first:stop] - offsets[first] + region.ctypes.data).tolist()
                sizes = np.diff(offsets[first : stop + 1]).tolist()
                part = list(keys[first:stop])
                config = pinned_in(segments[next(self._turns) % len(segments)] if segments else None)
                codes = self._engine.batch_put_from(part, starts, sizes, config)
                for _ in self._tries(call):
                    again = [row for row, code in enumerate(codes) if code]
                    if not again or any(codes[row] != TRANSFER_FAILED for row in again):
                        break
                    part, starts, sizes = ([column[row] for row in again] for column in (part, starts, sizes))
                    codes = self._engine.batch_put_from(part, starts, sizes, config)
            if any(codes):
                raise EngineError("batch_put_from", [code for code in codes if code])

    def get(self, call: Call, keys: Sequence[str], *, dead: Collection[str] = ()) -> list[memoryview]:
        """Reads rows into one new buffer. Raises `RowsMissing` also if one was deleted meanwhile.

        ``dead`` are endpoints of segments of dead units: rows there fail without a try, which would take a second.
        """
        sizes = self._sizes(keys, dead)
        offsets = np.zeros(len(keys) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        target = recycled_bytes(int(offsets[-1]))
        for first, stop in self._parts(sizes):
            with self._registered(target[offsets[first] : offsets[stop]], call, puts=False) as region:
                starts = (offsets[first:stop] - offsets[first] + region.ctypes.data).tolist()
                expected = sizes[first:stop].tolist()
                codes = self._engine.batch_get_into(list(keys[first:stop]), starts, expected)
                for _ in self._tries(call):
                    if TRANSFER_FAILED not in codes:
                        break
                    codes = self._engine.batch_get_into(list(keys[first:stop]), starts, expected)
                for at, code in enumerate(codes):
                    if code == LEASE_EXPIRED:  # alone, a row has a lease of its own
                        call.check()
                        (codes[at],) = self._engine.batch_get_into([keys[first + at]], [starts[at]], [expected[at]])
                if codes != expected:
                    failed = [code for code, size in zip(codes, expected, strict=True) if code != size]
                    if set(failed) == {NOT_FOUND}:
                        raise RowsMissing
                    self._late.append(target)
                    raise EngineError("batch_get_into", failed)
        # The memory of a deleted row is reused at once, so the bytes may belong to another row. But keys are used
        # only once: a row that still exists has existed all the time.
        self._check_there(keys)
        view = memoryview(target)  # type: ignore[arg-type]  # numpy's arrays have the buffer protocol
        cuts = offsets.tolist()
        return [view[start:stop] for start, stop in itertools.pairwise(cuts)]

    def delete(self, call: Call, keys: Sequence[str]) -> None:
        """Deletes rows that exist. Those that a given-up put is still writing, its thread deletes, or the master drops
        them some minutes after its process has ended."""
        for part in _requests(keys):
            call.check()
            codes = self._engine.batch_remove(part, True)  # forced: does not wait for readers, see `get`
            failed = [code for code in codes if code not in (0, NOT_FOUND, _NOT_READY)]
            if failed:
                raise EngineError("batch_remove", failed)

    def placed_in(self, keys: Sequence[str], endpoints: Collection[str]) -> list[str]:
        """The keys of rows in these segments."""
        found = self._described(keys)
        return [key for key in keys if key in found and endpoint_of(found[key]) in endpoints]

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _tries(self, call: Call) -> Iterator[None]:
        """How often a transfer that failed is tried again: once, and once for each connection that was shut down. The
        engine keeps these for later transfers, which fail."""
        for _ in range(_MOST_TRIES):
            call.check()
            yield
            with self._lock:
                if not self._num_ended:
                    return
                self._num_ended -= 1

    def _parts(self, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Cuts rows of these sizes into transfers: as many rows as fit, or one larger row."""
        ends = np.cumsum(sizes)
        most_bytes = self._slot_size or _BYTES_PER_TRANSFER
        first = 0
        while first < len(sizes):
            begin = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, begin + most_bytes, side="right"))
            stop = max(first + 1, min(stop, first + _ROWS_PER_TRANSFER))
            yield first, stop
            first = stop

    @contextlib.contextmanager
    def _registered(self, rows: _Bytes, call: Call, *, puts: bool) -> Iterator[_Bytes]:
        """Registered memory for one transfer of rows: their own; or a slot, from and to which they are copied."""
        call.check()
        if len(rows) > self._slot_size:
            self._register(rows)
            try:
                yield rows
            finally:
                self._engine.unregister_buffer(rows.ctypes.data)
            return
        while True:
            with contextlib.suppress(queue.Empty):
                slot = self._slots.get(timeout=POLL_S)
                break
            call.check()
        try:
            region = slot[: len(rows)]
            if puts:
                region[:] = rows
            yield region
            if not puts:
                rows[:] = region
        finally:
            self._slots.put(slot)

    def _register(self, memory: _Bytes) -> None:
        code = self._engine.register_buffer(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise EngineError(f"register_buffer of {memory.nbytes} bytes", [code])

    def _described(self, keys: Sequence[str]) -> dict[str, Any]:
        return {
            key: each for part in _requests(keys) for key, each in self._engine.batch_get_replica_desc(part).items()
        }

    def _sizes(self, keys: Sequence[str], dead: Collection[str]) -> npt.NDArray[np.int64]:
        found = self._described(keys)
        if len(found) != len(keys):
            self._check_there([key for key in keys if key not in found])
            raise RowsMissing  # they exist now, but did not at the first question
        if dead and any(endpoint_of(replicas) in dead for replicas in found.values()):
            raise EngineError("batch_get_replica_desc, for rows in segments of dead units,", [TRANSFER_FAILED])
        descriptors = (found[key][0].get_memory_descriptor().buffer_descriptor for key in keys)
        return np.fromiter((each.size for each in descriptors), dtype=np.int64, count=len(keys))

    def _check_there(self, keys: Sequence[str]) -> None:
        for part in _requests(keys):
            codes = self._engine.batch_is_exist(part)
            failed = [code for code in codes if code not in (0, 1)]
            if failed:
                raise EngineError("batch_is_exist", failed)
            if not all(codes):
                raise RowsMissing


def pinned_in(segment: str | None) -> Any:
    """Mooncake's settings for rows that are never evicted, preferably in this segment."""
    config = check_library().ReplicateConfig()
    config.with_hard_pin = True
    if segment is not None:
        config.preferred_segments = [segment]
    return config


def endpoint_of(replicas: Any) -> str:
    """The endpoint of the segment that holds a row, from Mooncake's description of the row."""
    endpoint: str = replicas[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
    return endpoint


def _close_late(store: Store | None) -> None:
    if store is not None:
        store._close(Call())


def _requests(keys: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _KEYS_PER_REQUEST):
        yield list(keys[start : start + _KEYS_PER_REQUEST])
