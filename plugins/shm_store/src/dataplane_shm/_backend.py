"""`ShmBackend`: payload in shared memory, the ledger in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgspec

from dataplane_core.backends import (
    LEDGER_CAPABILITIES,
    NOT_BEGUN,
    ExtentClient,
    Finding,
    LedgerBackend,
    columns_of,
    read_stored,
)
from dataplane_core.errors import BackendUnavailableError, ConfigError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity, memory_limit
from dataplane_core.hosting import ExtentStatistics, Memory
from dataplane_core.ledger import Command, Located, Ref, Reply, commands
from dataplane_core.ownership import OwnedProcess, last_words
from dataplane_core.spec import Capability, FieldSpec, PutRequest, Scope, WireColumn, WireFormat
from dataplane_shm._diagnosis import diagnose
from dataplane_shm._messages import FAILURE, Options, raise_failure
from dataplane_shm._opening import open_store
from dataplane_shm.config import ShmConfig, store_folder

_POLL_S: Final = 0.005
#: Seconds in which a durable store may finish the digests of its rows at its end.
_DIGESTS_S: Final = 60.0


class ShmBackend(LedgerBackend):
    """Payload lies in shared memory, which every client maps. The ledger runs in a process of its own, which the
    bootstrapping client starts and ends. Linux only.
    """

    wire = WireFormat(ragged="jagged", objects="encoded", shared_rows=True, by_content=True, by_probe=True, narrow=True)
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
        self._extents: ExtentClient | None = None
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
        self.cache_bytes = 0
        self._extents, about = open_store(self._folder, deadline, views=self.config.views)
        named = None if self.config.durable is None else os.path.realpath(self.config.durable)
        if named not in (None, about.folder):
            where = "in memory" if about.folder is None else f"in {about.folder}"
            raise ConfigError(
                f"connect refused: the store of namespace '{self.config.namespace}' keeps its rows {where}, not in "
                f"{named}.",
                hint="Give each store a `namespace` of its own.",
            )
        shared = {"capacity_bytes": about.capacity_bytes, "on_full": about.on_full}
        self.config = self.config.model_copy(update=shared)

    def stop(self) -> None:
        """Disconnects. The bootstrapping client also ends the store. Views stay valid."""
        extents, self._extents = self._extents, None
        if extents is not None:
            extents.session.finish()  # after what a thread still writes
        if self._process is not None:
            self._process.end()
            self._process = None
        self._folder.release()

    def statistics(self, deadline: float) -> ExtentStatistics:
        """How much memory the store uses, and for what."""
        return self._connected().session.call("statistics", deadline, Memory())

    def held_bytes(self) -> int:
        """The bytes of all rows that exist. For the conformance kit."""
        return self.statistics(time.monotonic() + 60.0).held_bytes

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

    def _connected(self) -> ExtentClient:
        if self._extents is None:
            raise BackendUnavailableError("the backend is not started.", retryable=False)
        return self._extents

    # --- the ledger and the payload -----------------------------------------------------------------------------------

    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return self._connected().session.call(command.op, deadline, command, wake)

    def stop_waiting(self, token: str) -> None:
        if self._extents is not None:
            self._extents.session.stop_waiting(token)

    def new_write_id(self, num_ids: int) -> int:
        """The number of the session and of the id: unique as long as the ledger lives."""
        with self._ids_lock:
            first = self._next_id
            self._next_id += num_ids
        return self._connected().session.welcome.session << 40 | first

    def put_once(self, request: PutRequest, writes: Sequence[commands.Write], ticket: Any) -> Sequence[Ref]:
        """Puts as `LedgerBackend.put_once`, with fewer messages: one process has the ledger and the extents."""
        begin = self.begin_of(request, writes, ticket)
        assert begin.write_id is not None
        stored = {
            write_id: columns_of(write, request.columns).values()
            for write_id, write in begin.by_id(begin.write_id).items()
            if write.row_bytes
        }

        def commits() -> None:
            if ticket is not None:
                ticket.refusal = None

        try:
            self._connected().put(stored, request.deadline, self.config.copy_threads, begin=begin, commits=commits)
        except NOT_BEGUN:  # also if the memory had no room: the store has given the put up
            raise
        except BaseException:
            self.undo(begin.write_id, request.deadline)
            raise
        if ticket is not None:
            ticket.queued_at = None  # it left the queue
        return []  # the store frees what the put takes the place of

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        extents = self._connected()
        parts = extents.get(located.parts, located.specs, deadline)
        try:
            return read_stored(located.specs, parts, num_samples, self.config.copy_threads)
        finally:
            extents.check("get_samples")

    def kept_digests(self, parts: Sequence[commands.Part], spec: FieldSpec, deadline: float) -> list[bytes]:
        from dataplane_core.codec import column_digests  # it imports torch

        extents = self._connected()
        digests: list[bytes] = []
        for stored in extents.get(parts, dict.fromkeys(parts[0].fields, spec), deadline):
            (column,) = stored.columns.values()
            digests += column_digests(column, spec, stored.rows)
        extents.check("put_samples")
        return digests

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        # the store frees payload by itself; only the conformance kit, which loses payload on purpose, comes here
        self._connected().drop(refs, deadline)
