"""`ShmBackend`: payload in shared memory, the ledger in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import msgspec
import numpy as np

from dataplane_core.backends import (
    LEDGER_CAPABILITIES,
    ExtentPlan,
    ExtentRead,
    Finding,
    LedgerBackend,
    OwnedProcess,
    RefsGoneError,
    SharedMemory,
    columns_of,
    last_words,
    read_stored,
)
from dataplane_core.errors import BackendUnavailableError, ConfigError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity, copy_arrays, extent_bytes, memory_limit
from dataplane_core.hosting import Pin, Place, digest_of
from dataplane_core.ledger import Command, Located, Ref, Reply, commands
from dataplane_core.spec import Capability, Scope, SharedRows, WireColumn, WireFormat
from dataplane_shm._diagnosis import diagnose
from dataplane_shm._messages import (
    FAILURE,
    Begin,
    CommitSynced,
    Drop,
    Find,
    Options,
    PutWhole,
    Statistics,
    Status,
    raise_failure,
)
from dataplane_shm._opening import open_store
from dataplane_shm.config import ShmConfig, store_folder

_POLL_S: Final = 0.005
#: Seconds in which a durable store may finish the digests of its rows at its end.
_DIGESTS_S: Final = 60.0
#: A put of at most this many bytes is one request: the copy into it costs less than a second request.
_FEW_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class _PlacedCells(Located):
    """Located cells, and where their payload lies.

    Attributes:
        places: Write id -> its place.
        gone: Refs whose payload does not exist.
        pin: Keeps the payload where it is, as long as it lives.
    """

    places: dict[int, Place]
    gone: list[Ref]
    pin: Pin


class ShmBackend(LedgerBackend):
    """Payload lies in shared memory, which every client maps. The ledger runs in a process of its own, which the
    bootstrapping client starts and ends. Linux only.
    """

    wire = WireFormat(ragged="jagged", objects="encoded", shared_rows=True, narrow=True)
    capabilities = LEDGER_CAPABILITIES | {Capability.CLIENTS, Capability.NO_PICKLE, Capability.WAKES}
    scope = Scope.HOST
    why_not_declared: ClassVar[Mapping[str, str]] = {
        Capability.UNITS: "one piece of shared memory holds the payload",
        "scope": "memory is shared by the processes of one host only",
        Capability.DURABLE: "a store is memory, which ends with its processes, unless the option `durable` is set",
    }
    Config = ShmConfig

    def __init__(self, config: ShmConfig) -> None:
        super().__init__(config)
        self.narrow = not config.views  # a view has the dtype in which the cells lie in memory
        self._folder = store_folder(config.namespace)
        self._process: OwnedProcess | None = None
        self._memory: SharedMemory | None = None
        self._begun: dict[int, list[int]] = {}  # puts that are begun and not committed -> their writes
        self._placed: dict[int, tuple[int, ExtentPlan]] = {}  # write id -> where its extent begins, until it is written
        self._digests: dict[int, bytes] = {}  # write id -> the digest of its extent, with ``sync: commit``
        self._ids_lock = threading.Lock()
        self._next_id = 1

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with that of ``options``."""
        name = options.get("namespace", ShmConfig.model_fields["namespace"].default)
        apart = {**options, "namespace": f"{name}-{tag}"[:64]}
        if options.get("durable") is not None:
            apart["durable"] = f"{options['durable']}-{tag}"
        return apart

    @classmethod
    def outlives_owner(cls, config: ShmConfig) -> bool:
        """With ``durable``."""
        return config.durable is not None

    @classmethod
    def diagnose(cls, config: ShmConfig, *, deadline: float) -> Iterable[Finding]:
        """Checks the system, the memory that may be used, and the running store."""
        return diagnose(config, deadline)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts the ledger's process if needed, connects to it, and maps the memory."""
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailableError("connect refused: shm_store needs Linux.", retryable=False)
        if bootstrap:
            self._folder.claim(deadline)
            self._launch(deadline)
        self._memory, about = open_store(self._folder, deadline, views=self.config.views)
        named = None if self.config.durable is None else os.path.realpath(self.config.durable)
        if named not in (None, about.folder):
            where = "in memory" if about.folder is None else f"in {about.folder}"
            raise ConfigError(
                f"connect refused: the store of namespace '{self.config.namespace}' keeps its rows {where}, not in "
                f"{named}.",
                hint="Give each store a `namespace` of its own.",
            )
        shared = {"capacity_bytes": about.capacity_bytes, "on_full": about.on_full, "sync": about.sync}
        self.config = self.config.model_copy(update=shared)
        self._memory.touch_in_background(about.touched_bytes)

    def stop(self) -> None:
        """Disconnects. The bootstrapping client also ends the store. Views stay valid."""
        memory, self._memory = self._memory, None
        if memory is not None and not self._begun:  # else a thread may still write: the session ends after it
            memory.session.finish()
        if self._process is not None:
            self._process.end()
            self._process = None
        self._folder.release()

    def statistics(self, deadline: float) -> Statistics:
        """How much memory the store uses, and for what."""
        return self._connected().session.call("statistics", deadline, Status())

    def _launch(self, deadline: float) -> None:
        """Starts the ledger's process and waits until it listens."""
        config: ShmConfig = self.config
        capacity_bytes = config.capacity_bytes
        check_capacity(capacity_bytes)
        if capacity_bytes is None:
            limit = memory_limit()
            capacity_bytes = limit.available_bytes // 2
            if not capacity_bytes:
                raise BackendUnavailableError(
                    f"connect refused: no memory is available for a store, limited by {limit.source}.",
                    retryable=False,
                    hint="Free memory, raise the limit, or set capacity_bytes.",
                )
        log = self._folder.path / "ledger.log"
        options = Options(
            folder=str(self._folder.path),
            capacity_bytes=capacity_bytes,
            on_full=config.on_full,
            touch_ahead_bytes=config.touch_ahead_bytes,
            durable=None if config.durable is None else str(config.durable.absolute()),
            sync=config.sync,
        )
        command = [sys.executable, "-P", "-m", "dataplane_shm", msgspec.json.encode(options).decode()]
        end_s = 0.0 if config.durable is None else _DIGESTS_S
        folder, lock = self._folder.path, self._folder.lock
        self._process = OwnedProcess(command, log=log, folder=folder, lock=lock, end_s=end_s)
        while not self._folder.socket.exists():
            if self._process.ended:
                with suppress(FileNotFoundError):
                    raise_failure((self._folder.path / FAILURE).read_bytes())
                raise BackendUnavailableError(
                    f"connect failed: the ledger's process ended at its start: {last_words(log)}", retryable=False
                )
            if time.monotonic() + _POLL_S >= deadline:
                raise OperationTimeoutError("connect timed out: the ledger's process does not start.")
            time.sleep(_POLL_S)

    def _connected(self) -> SharedMemory:
        if self._memory is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self._memory

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def call_ledger(self, deadline: float, command: Command[Reply]) -> Reply:
        session = self._connected().session
        if isinstance(command, commands.Locate):
            pin = session.new_pin()
            try:
                found = session.call(command.op, deadline, Find(command, pin.number))
            except BaseException:
                pin.release()  # the traceback refers to it
                raise
            parts, specs = found.located.parts, found.located.specs
            return cast("Reply", _PlacedCells(parts, specs, found.places, found.gone, pin))
        if isinstance(command, commands.AbortPut):
            for write_id in self._begun.pop(command.write_id, ()):
                self._placed.pop(write_id, None)
                self._digests.pop(write_id, None)
        if isinstance(command, commands.CommitPut):
            writes = self._begun.pop(command.write_id, None)
            if writes is None:
                return cast("Reply", [])  # it was committed by the request that began it
            if self.config.sync == "commit":
                digests = [self._digests.pop(each) for each in writes]
                return cast("Reply", session.call(command.op, deadline, CommitSynced(command, digests)))
        return session.call(command.op, deadline, command)

    def call_ledger_waking(self, deadline: float, command: Command[Reply], wake: Callable[[], bool]) -> Reply:
        return self._connected().session.call_waiting(command.op, deadline, command, wake)

    def stop_waiting(self, token: str) -> None:
        if self._memory is not None:
            self._memory.session.end_waiting(token, tell=True)

    def begin_put(
        self, begin: commands.BeginPut, columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> int:
        plans = [ExtentPlan(list(columns_of(write, columns).values()), len(write.row_bytes)) for write in begin.writes]
        synced = self.config.sync == "commit"  # then two requests, which share their syncs with those of others
        if len(plans) == 1 and plans[0].layout.size_bytes <= _FEW_BYTES and not synced:
            assert begin.write_id is not None
            data = np.zeros(plans[0].layout.size_bytes, dtype=np.uint8)
            copy_arrays(plans[0].copies_into(data))
            self._connected().session.call(begin.op, deadline, PutWhole(begin, plans[0].layout, data.tobytes()))
            return begin.write_id  # it is committed
        begun = self._connected().session.call(begin.op, deadline, Begin(begin, [plan.layout for plan in plans]))
        self._begun[begun.write_id] = list(begin.by_id(begun.write_id))
        places = zip(begun.offsets, plans, strict=True)
        self._placed.update(zip(self._begun[begun.write_id], places, strict=True))
        return begun.write_id

    def new_write_id(self, num_ids: int) -> int:
        """The number of the session and of the id: unique as long as the ledger lives."""
        with self._ids_lock:
            first = self._next_id
            self._next_id += num_ids
        return self._connected().session.welcome.session << 40 | first

    # --- payload ------------------------------------------------------------------------------------------------------

    def store_write(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        if write_id not in self._placed:
            return  # it went with the request that began the put
        offset, plan = self._placed.pop(write_id)
        memory = self._connected()  # held until the copy ends: the extent is free when the session ends
        end = offset + extent_bytes(plan.layout.size_bytes)
        synced = self.config.sync == "commit"
        with memory.writing([(offset, end)]):
            # the disk works while this process copies the rest and makes the digest, and this process waits for it, so
            # that the ledger's need not
            arena = memory.arena
            copied = arena.begin_sync if synced else None
            copy_arrays(plan.copies_into(arena.bytes[offset:]), self.config.copy_threads, copied=copied)
            if synced:
                self._digests[write_id] = digest_of(arena.bytes[offset:end])
                arena.sync(offset, end)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        assert isinstance(located, _PlacedCells)
        if located.gone:
            raise RefsGoneError(f"{len(located.gone)} rows are gone", refs=located.gone)
        memory = self._connected()
        reads = [
            ExtentRead(part.write_id, dict(zip(part.fields, part.slots, strict=True)), part.positions, part.rows)
            for part in located.parts
        ]
        parts = memory.rows(reads, located.places, located.specs, located.pin)
        try:
            return read_stored(located.specs, parts, num_samples, self.config.copy_threads)
        finally:
            memory.check("get_samples")

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        # the store frees payload by itself; only the conformance kit, which loses payload on purpose, comes here
        self._connected().session.call("delete", deadline, Drop(list(refs)))
