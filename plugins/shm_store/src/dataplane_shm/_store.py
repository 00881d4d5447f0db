"""`Store`: what the ledger's process serves: the ledger, and the extents that hold its payload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, StalePartitionError
from dataplane_core.hosting import Allocate, Client, ExtentHost, ExtentService, LedgerHost
from dataplane_core.ledger import Command, LedgerService, Ref, commands
from dataplane_shm._messages import About


class Store(LedgerHost, ExtentHost):
    """A ledger and its payload. A put that is begun ends with the session of its client, and what the ledger no longer
    needs is freed at once. ``capacity_bytes`` and ``on_full`` are told to clients."""

    messages = ExtentHost.messages
    folder: str | None = None

    def __init__(
        self,
        extents: ExtentService,
        service: LedgerService,
        capacity_bytes: int = 0,
        on_full: str = "block",
        settle: Callable[[], object] | None = None,
    ) -> None:
        LedgerHost.__init__(self, service, settle)
        ExtentHost.__init__(self, extents, settle)
        self._ledger = service
        self._limits = capacity_bytes, on_full
        self._begun: dict[int, tuple[Client, commands.BeginPut]] = {}  # puts that are begun and not committed

    def about(self) -> About:
        return About(self._extents.touch_until, self._extents.syncs, *self._limits, self.folder)

    def end_session(self, client: Client) -> None:
        """Also aborts the puts that the client had begun."""
        super().end_session(client)
        for write_id in [each for each, (owner, _) in self._begun.items() if owner is client]:
            self._abort(commands.AbortPut(write_id), client)

    def _begin_put(self, put: commands.BeginPut, client: Client) -> int:
        # the ledger begins it once it has its memory: one that gets none leaves nothing, and keeps its turn
        self._ledger.changes(put)  # raises what the ledger would
        self._sweep()  # the ledger gave up puts of before
        self._begun.setdefault(put.write_id or 0, (client, put))  # clients of a store draw it
        if not any(write.row_bytes for write in put.writes):  # the store has all of its cells by their content
            self._begin(put.write_id or 0)
        return put.write_id or 0

    def _begun_by(self, write_id: int, client: Client) -> commands.BeginPut:
        owner, put = self._begun.get(write_id, (None, None))
        if owner is not client or put is None:
            raise StalePartitionError("put_samples refused: the put is not begun, or was aborted.")
        return put

    def _allocate(self, request: Allocate, client: Client) -> list[int]:
        put = self._begun_by(request.put, client)
        try:
            return super()._allocate(request, client)
        except CapacityExceededError as error:
            del self._begun[request.put]
            error.message = f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused: {error.message}"
            raise

    def _begin(self, put: int) -> None:
        client, begin = self._begun[put]
        self._ledger.call(begin)
        client.tickets.discard(begin.ticket or "")

    def _commit(self, command: commands.CommitPut, client: Client) -> list[Ref]:
        self._begun_by(command.write_id, client)
        del self._begun[command.write_id]
        try:
            self._ledger.call(command)
        finally:
            self._sweep()
        return []

    def _abort(self, command: commands.AbortPut, client: Client) -> list[Ref]:
        self._begun.pop(command.write_id, None)
        if command.write_id in self._puts:
            self._end_put(self._puts[command.write_id])
        self._ledger.call(command)
        self._sweep()
        return []

    def _register_or_clear(self, command: Command[tuple[Any, list[Ref]]], client: Client) -> Any:
        found, _ = self._ledger.call(command)
        self._sweep()
        return found, []

    def _sweep(self) -> None:
        """Frees the payload of all refs that the ledger no longer needs. What cannot be recorded now, the next one
        does."""
        garbage = self._ledger.garbage()
        if garbage:
            with suppress(BackendUnavailableError):
                self._extents.drop(garbage)
                self._ledger.call(commands.Collected(garbage))


Store.handlers = {
    **LedgerHost.handlers,
    **ExtentHost.handlers,
    Allocate: Store._allocate,
    commands.BeginPut: Store._begin_put,
    commands.CommitPut: Store._commit,
    commands.AbortPut: Store._abort,
    commands.RegisterRequest: Store._register_or_clear,
    commands.ClearRequest: Store._register_or_clear,
}
