"""`RowStoreBackend`: a whole backend over an engine that stores rows of bytes by integer handle.

With only `put_rows`, `get_rows` and `delete_rows`, the store serves one process. With `append`, `read_log` and `trim`
it serves many: a process of its own hosts the ledger, and keeps it in a log in the engine (`backends.owner`).

In many engines each stored value has a cost, so the frames that one put writes of one sample are joined in one row.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from dataplane_core.backends.ledger_backend import (
    LEDGER_CAPABILITIES,
    CapacityOptions,
    LedgerBackend,
    columns_of,
)
from dataplane_core.backends.owner import OwnerLink
from dataplane_core.errors import (
    BackendError,
    ConfigError,
    FrameError,
    LostReplyError,
    PluginSignatureError,
    StalePartitionError,
    UnsupportedOperationError,
)
from dataplane_core.hosting.extents import RefsGoneError
from dataplane_core.ledger import Command, LedgerThread, Located, Ref, Reply, commands
from dataplane_core.spec import Capability, PutRequest, Scope, SharedRows, WireColumn, WireFormat

_LOG: Final = ("append", "read_log", "trim")
_CAPABILITIES: Final = LEDGER_CAPABILITIES | {Capability.CLIENTS, Capability.NO_PICKLE, Capability.WAKES}


class RowStoreOptions(CapacityOptions):
    """Options of every `RowStoreBackend`.

    Attributes:
        ledger: Where the ledger lives: in the client's process (``here``), which then is the only client, or in a
            process of its own that all clients reach (``owner``). None: the second, if the engine keeps a log.
    """

    ledger: Literal["here", "owner"] | None = None


class RowStoreBackend(LedgerBackend):
    """All operations, on a ledger and rows of bytes.

    A row's handle is an integer from 1 to 2**63 - 1 that is never used again. No row is empty.

    A subclass connects in `open_engine` and disconnects in `close_engine`, and overrides `put_rows`, `get_rows` and
    `delete_rows`; to serve several processes, also `append`, `read_log` and `trim`. These methods may be called from
    several threads at once, and must end by their deadlines, on `time.monotonic`'s clock in seconds. An exception other
    than a `DataPlaneError` reaches the user as a `BackendError`. Its module is also imported by the ledger's process,
    which needs no torch: import that where it is used.
    """

    wire = WireFormat(bytes=True, shared_rows=True, by_content=True)
    capabilities = _CAPABILITIES
    row_cost_bytes = 6144
    Config: ClassVar[type[CapacityOptions]] = RowStoreOptions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._service: LedgerThread | None = None
        self._owner: OwnerLink | None = None
        self._tries: dict[str | None, range] = {}  # id of a put whose owner is gone -> the handles of its last try

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        lacking = [name for name in _LOG if getattr(cls, name) is getattr(RowStoreBackend, name)]
        if lacking and len(lacking) < len(_LOG):
            raise PluginSignatureError(
                f"{cls.__name__} does not override {', '.join(lacking)}. Expected all of {', '.join(_LOG)}, which keep "
                "a log, or none."
            )
        if not lacking and cls.capabilities == _CAPABILITIES:
            cls.capabilities = _CAPABILITIES | {Capability.DURABLE}
        if not lacking and cls.scope is Scope.PROCESS:
            cls.scope = Scope.HOST

    # --- what a storage author supplies -------------------------------------------------------------------------------

    def open_engine(self, *, bootstrap: bool, deadline: float) -> None:
        """Connects to the engine. ``bootstrap``: makes what the store needs, where that is not there yet.

        Raises:
            BackendUnavailableError: The engine cannot be reached, or there is no store.
        """

    def close_engine(self) -> None:
        """Disconnects. Called once, also after a failed `open_engine`."""

    @abstractmethod
    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """Stores rows. Returns when every client can read them.

        Args:
            handles: N consecutive integers, ascending.
            buffer: The rows end to end. If the engine keeps a part of it, it keeps all of it.
            offsets: (N + 1,) int64: row i is ``buffer[offsets[i]:offsets[i + 1]]``.
            deadline: On `time.monotonic`'s clock, in seconds.
        """

    @abstractmethod
    def get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes | bytearray | memoryview]:
        """Reads rows, in the order of ``handles``, which has no repeats.

        Raises:
            RefsGoneError: A row does not exist. Its ``handles`` are the missing ones, if the engine says which.
        """

    @abstractmethod
    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows. Ignores handles that do not exist."""

    def append(self, number: int, record: bytes, deadline: float) -> bool:
        """Adds a record to the log, if ``number`` is the newest record's number and one; 1 if there is none.

        Returns when no crash can lose it. Each change of the ledger waits for it, so its cost must not grow with the
        log. Of several processes that append the same number, one gets True. The number of the newest record counts
        also if `trim` was called since.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no log.")

    def read_log(self, first: int | None, deadline: float) -> Iterable[tuple[int, bytes]]:
        """The records from number ``first`` on, with their numbers, in order. None: only the newest one, if any.

        No record is left out that was appended before the call, unless it was trimmed, also if another process trims
        the log meanwhile.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no log.")

    def trim(self, before: int, deadline: float) -> None:
        """Drops the records whose numbers are smaller."""
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no log.")

    def owner_pid(self, deadline: float) -> int:
        """The process id of the ledger's owner, on its host."""
        if self._owner is None:
            raise UnsupportedOperationError(f"the ledger of this {type(self).__name__} has no process of its own.")
        return self._owner.pid(deadline)

    def owner_ip(self) -> str:
        """The address of this host at which the ledger's process listens. Default: for clients of this host only."""
        return "127.0.0.1"

    def owner_uses_tls(self) -> bool:
        """Whether what goes to and from the ledger's process is encrypted. It needs the package cryptography."""
        return False

    def owner_options(self) -> dict[str, Any]:
        """The options with which the ledger's process makes an object of this class. They are passed on in a pipe.

        Override it if an option is a `SecretStr`, of which pydantic gives only asterisks.
        """
        options: dict[str, Any] = self.config.model_dump(mode="json")
        return options

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Connects to the engine and to the ledger."""
        self.open_engine(bootstrap=bootstrap, deadline=deadline)
        keeps_log = type(self).append is not RowStoreBackend.append
        place = getattr(self.config, "ledger", None) or ("owner" if keeps_log else "here")
        if place == "owner" and not keeps_log:
            raise ConfigError(
                f"ledger: owner is refused: {type(self).__name__} keeps no log, which the owner of a ledger writes.",
                hint="Leave the option out: the ledger is then in the client's process.",
            )
        if place == "here":
            self._service = LedgerThread(self.config.capacity_bytes)
            self._service.start()
        else:
            self._owner = OwnerLink(self, bootstrap=bootstrap, deadline=deadline)

    def stop(self) -> None:
        """Disconnects."""
        if self._service is not None:
            self._service.stop()
        if self._owner is not None:
            self._owner.close()
        self.close_engine()

    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        if self._owner is None:
            assert self._service is not None
            return self._service.call(command, wake)
        return self._owner.call(deadline, command, wake)

    def stop_waiting(self, token: str) -> None:
        ledger = self._owner or self._service
        assert ledger is not None
        ledger.stop_waiting(token)

    def put_once(self, request: PutRequest, writes: Sequence[commands.Write], ticket: Any) -> Sequence[Ref]:
        """A put that an owner began, and the next one does not know, is repeated."""
        before = None if self._owner is None else self._owner.num_sessions
        is_lost = False
        try:
            return super().put_once(request, writes, ticket)
        except LostReplyError:
            is_lost = True
            raise
        except StalePartitionError as error:
            is_lost = self._owner is not None and self._owner.num_sessions != before
            if is_lost:
                raise LostReplyError(error.message) from error
            raise
        finally:
            if not is_lost:
                self._tries.pop(request.request_id, None)

    def begin_put(
        self, begin: commands.BeginPut, columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> int:
        """Once it has begun again, no try before was committed. No ledger may know the rows that such a try wrote."""
        write_id = super().begin_put(begin, columns, deadline)
        if self._owner is not None:
            before = self._tries.get(begin.request_id)
            self._tries[begin.request_id] = handles = range(write_id, write_id + begin.num_ids)
            if before is not None and before != handles:
                self.delete_rows(before, deadline)
        return write_id

    def new_write_id(self, num_ids: int) -> int | None:
        """The ledger numbers the writes."""
        return None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def store_writes(
        self,
        writes: Mapping[int, commands.Write],
        columns: Mapping[str, WireColumn | SharedRows],
        deadline: float,
    ) -> None:
        from dataplane_core.codec.cells import join_rows  # it imports torch

        buffer, offsets = join_rows([framed_columns(columns_of(write, columns)) for write in writes.values()])
        first = min(writes)
        self.put_rows(range(first, first + len(offsets) - 1), buffer, offsets, deadline)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        from dataplane_core.codec.cells import split_rows  # it imports torch

        refs = located.refs
        try:
            found = self.get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError as error:
            gone = set(error.handles)
            raise RefsGoneError(error.message, refs=[ref for ref in refs if sum(ref) in gone]) from error
        try:
            rows = split_rows(found)
        except FrameError as error:
            places = [(part.fields, row) for part in located.parts for row in part.rows]
            error.add_place(*places[error.row or 0])
            raise
        columns: dict[str, list[Any]] = {name: [None] * num_samples for name in located.specs}
        start = 0
        for part in located.parts:
            mine = rows[start : start + len(part.rows)]
            start += len(part.rows)
            for name, slot in zip(part.fields, part.slots, strict=True):
                column = columns[name]
                for position, frames in zip(part.rows, mine, strict=True):
                    if slot >= len(frames):
                        short = FrameError(f"its row holds {len(frames)} cells. Expected more than {slot}.")
                        short.add_place([name], position)
                        raise short
                    column[position] = frames[slot]
        return dict(columns)

    def find_gone(self, refs: Sequence[Ref], deadline: float) -> Sequence[Ref]:
        """Reads halves of the refs, recursively. Refs that there is no time to read count as gone."""
        refs = list(dict.fromkeys(refs))
        if time.monotonic() >= deadline:
            return refs
        try:
            self.get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError:
            middle = len(refs) // 2
            if not middle:
                return refs
            return [*self.find_gone(refs[:middle], deadline), *self.find_gone(refs[middle:], deadline)]
        return []

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        self.delete_rows([write_id + position for write_id, position in refs], deadline)


def framed_columns(columns: Mapping[str, WireColumn]) -> list[list[Any]]:
    """Checks that the columns of a put are lists of frames. Returns them in order.

    Raises:
        BackendError: A column is not a list.
    """
    framed: list[list[Any]] = []
    for name, column in columns.items():
        if not isinstance(column, list):
            raise BackendError(
                f"put_samples refused: column '{name}' is a {type(column).__name__}. Expected a list of framed cells, "
                "as the backend's wire format says. Nothing was written.",
                hint="Middleware that adds or changes a column encodes it to the wire format that it was given.",
            )
        framed.append(column)
    return framed
