"""`stream`: claims the batches of a task, reads them ahead, and acks each when the next is asked for."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, overload

from tensordict import TensorDict

from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.checks import check_count, check_seconds
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.waiting import Waiters
from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import ClaimRequest

__all__ = ["AsyncStream", "Collate", "Stream", "StreamBatch", "Terms", "stream", "terms_of"]

#: A lease is renewed after this share of it.
RENEWED_AFTER: Final = 1 / 3

#: How long a stream that nobody refers to keeps its last user waiting, until what it holds is given back.
_COLLECTED_WITHIN_S: Final = 1.0

Collate = Callable[[KVBatchMeta, TensorDict], Any]


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch of a stream.

    Attributes:
        meta: The samples, with tags and lease tokens.
        columns: Their columns, as `DataPlaneClient.get_samples` returns them. The caller owns them. In a
            `StreamingDataset` with ``collate``: its result.
    """

    meta: KVBatchMeta
    columns: Any


@dataclass(frozen=True, slots=True)
class Terms:
    """What a stream claims and reads, and how; the same for both kinds of streams."""

    claim: dict[str, Any]  # the arguments of claim_meta, but for its timeout
    fields: list[str]
    prefetch: int
    timeout_s: float
    collate: Collate

    @property
    def lease_s(self) -> float:
        return float(self.claim["lease_s"])

    def request(self, client: DataPlaneClient) -> ClaimRequest:
        """The request of the next claim.

        Raises:
            DataPlaneError: The arguments are refused.
        """
        return client._claim_request(**self.claim, blocking=True, timeout_s=self.timeout_s, batch_index=None)


@dataclass(slots=True, eq=False)
class _Item:
    meta: KVBatchMeta
    batch: Any


def terms_of(
    partition_id: str,
    task_name: str,
    fields: Sequence[str],
    batch_size: int,
    *,
    lease_s: float,
    prefetch: int,
    collate: Collate,
    timeout_s: float,
    claim: Mapping[str, Any],
) -> Terms:
    """Checks the arguments of `stream`, as far as that needs no client."""
    check_seconds("lease_s", lease_s)
    check_seconds("timeout_s", timeout_s, at_least_zero=True)
    if prefetch != 0:
        check_count("prefetch", prefetch)
    defaults = {"dp_rank": None, "tag_filter": None, "sampler": "first_write", "dp_size": None}
    if not claim.keys() <= defaults.keys():
        raise InvalidRequestError(f"of claim_meta only {sorted(defaults)} can be given here, got {sorted(claim)}.")
    names = list(fields)
    arguments = {
        "partition_id": partition_id,
        "task_name": task_name,
        "required_fields": names,
        "batch_size": batch_size,
        "lease_s": lease_s,
        **defaults,
        **claim,
    }
    return Terms(arguments, names, prefetch, timeout_s, collate)


@overload
def stream(
    client: DataPlaneClient,
    partition_id: str,
    task_name: str,
    fields: Sequence[str],
    batch_size: int,
    *,
    lease_s: float = ...,
    prefetch: int = ...,
    collate: Collate | None = ...,
    timeout_s: float = ...,
    **claim: Any,
) -> Stream: ...


@overload
def stream(
    client: AsyncDataPlaneClient,
    partition_id: str,
    task_name: str,
    fields: Sequence[str],
    batch_size: int,
    *,
    lease_s: float = ...,
    prefetch: int = ...,
    collate: Collate | None = ...,
    timeout_s: float = ...,
    **claim: Any,
) -> AsyncStream: ...


def stream(
    client: DataPlaneClient | AsyncDataPlaneClient,
    partition_id: str,
    task_name: str,
    fields: Sequence[str],
    batch_size: int,
    *,
    lease_s: float = 60.0,
    prefetch: int = 1,
    collate: Collate | None = None,
    timeout_s: float = 60.0,
    **claim: Any,
) -> Stream | AsyncStream:
    """The batches of a task, until the partition can give it no more.

    Each batch is claimed with a lease, and acked when the next one is asked for, that is, when the loop's body is done
    with it. The leases of the batches that are read ahead, or that the body works on, are renewed. What was not acked
    when the stream ends (a ``break``, an error, the end of the program) is given back at once. Batches of a killed
    process are handed out again when their leases end. So each sample is worked on at least once, and acked once.

    The stream ends only if ``num_samples`` was given when the partition was registered. Otherwise it waits for further
    samples, up to ``timeout_s``.

    Args:
        client: With an `AsyncDataPlaneClient`, the stream is for ``async for``.
        partition_id: A registered partition.
        task_name: A task of it.
        fields: The fields that a sample must have, and that are read.
        batch_size: How many samples; the last batch may be smaller.
        lease_s: Seconds after which samples of a process that died are handed out again. The lease is renewed while the
            process lives.
        prefetch: How many batches are claimed and read ahead, in a thread or task of the stream. 0: none.
        collate: Called with the meta and the columns of each batch, where it is read; its result is what the stream
            gives. Default: a `StreamBatch`.
        timeout_s: How long to wait for a batch, in seconds.
        claim: Further arguments of `DataPlaneClient.claim_meta`: ``dp_rank``, ``tag_filter``, ``sampler``, ``dp_size``.

    Returns:
        An iterator, which is a context manager too.

    Raises:
        LeaseExpiredError: At the next batch: the lease of the one before had ended, because this process was suspended
            for longer than the lease. Others may have been given its samples.
        ClaimTimeoutError: No batch was ready within ``timeout_s``. The stream has ended then, as after any error.
        UnsupportedOperationError: The backend does not declare leases.

    Examples:
        >>> import torch
        >>> from dataplane_core import connect, stream
        >>> client = connect({"backend": "noop"})
        >>> client.register_partition("step-1", ["reward"], 3, ["trainer"])
        >>> meta = client.put_samples(["a", "b", "c"], "step-1", {"reward": torch.tensor([1.0, 2.0, 3.0])})
        >>> for batch in stream(client, "step-1", "trainer", ["reward"], 2):
        ...     print(batch.meta.sample_ids, batch.columns["reward"].tolist())
        ['a', 'b'] [1.0, 2.0]
        ['c'] [3.0]
        >>> client.check_consumption_status("step-1", ["trainer"])
        True
        >>> client.close()
    """
    terms = terms_of(
        partition_id,
        task_name,
        fields,
        batch_size,
        lease_s=lease_s,
        prefetch=prefetch,
        collate=collate or StreamBatch,
        timeout_s=timeout_s,
        claim=claim,
    )
    kind = AsyncStream if isinstance(client, AsyncDataPlaneClient) else Stream
    return kind(client, terms)  # type: ignore[arg-type]


class Stream(Iterator[Any]):
    """The batches of a task, for ``for``. `stream` makes it. One thread iterates."""

    def __init__(self, client: DataPlaneClient, terms: Terms) -> None:
        terms.request(client)  # to refuse it now
        self._feed = _Feed(client, terms)
        self._current: _Item | None = None
        weakref.finalize(self, self._feed.collected).atexit = False  # at the end of the program: `_Feed.close`

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            self.ack()
            self._current = self._feed.next()
        except BaseException:
            self.close()
            raise
        if self._current is None:
            self.close()
            raise StopIteration
        return self._current.batch

    def ack(self) -> None:
        """Acks the batch that was given last, if it is not acked yet. Asking for the next batch also acks it."""
        item, self._current = self._current, None
        if item is not None:
            self._feed.ack(item)

    def close(self) -> None:
        """Ends the stream, and gives back what is not acked. Idempotent."""
        self._current = None
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Feed:
    """What the threads of a `Stream` do. They do not refer to the stream, so that it can be collected."""

    def __init__(self, client: DataPlaneClient, terms: Terms) -> None:
        self._client = client
        self._terms = terms
        self._held: set[_Item] = set()
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._closed = threading.Event()
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._ready: queue.SimpleQueue[_Item | BaseException | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(terms.prefetch)
        self._threads: list[threading.Thread] = []

    def next(self) -> _Item | None:
        """The next batch. None: there are no more."""
        if self._ended or self._closed.is_set():
            return None
        if not self._threads:
            atexit.register(self.close)
            self._begin(self._renew)
            if self._terms.prefetch:
                self._begin(self._read_ahead)
        if not self._terms.prefetch:
            found: _Item | BaseException | None = self._fetch()
        else:
            found = self._ready.get()
            self._free.release()
        if isinstance(found, BaseException):
            raise found
        self._ended = found is None
        return found

    def ack(self, item: _Item) -> None:
        with self._lock:
            self._held.discard(item)
        self._client.ack(item.meta)

    def close(self) -> None:
        if self._client._pid != os.getpid():
            return  # a forked child must not end what its parent uses
        self._closed.set()
        self._end_threads(self._client.config.op_timeout_s)

    def collected(self) -> None:
        """Ends the stream when nobody refers to it. Waits a little until what it holds is given back.

        The garbage collector may call it while its thread has a lock that the threads need. So it takes none (`put` of
        this queue may interrupt itself), and does not wait until they have ended.
        """
        self._end_threads(_COLLECTED_WITHIN_S)

    def _end_threads(self, timeout_s: float) -> None:
        self._end.put(None)
        if self._threads and threading.current_thread() not in self._threads:
            self._threads[0].join(timeout_s)  # which waits for the other one

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="dataplane-stream", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fetch(self) -> _Item | None:
        client, terms = self._client, self._terms
        with client._operation(), client._waiters.waiting(self._waiters.close):
            meta = client._claim_until(terms.request(client), terms.timeout_s, self._waiters)
        if not meta.sample_ids:
            return None
        item = _Item(meta, None)
        with self._lock:
            self._held.add(item)
        item.batch = terms.collate(meta, client.get_data(meta, terms.fields))
        return item

    def _read_ahead(self) -> None:
        while True:
            self._free.acquire()
            if self._closed.is_set():
                return
            try:
                found: _Item | BaseException | None = self._fetch()
            except BaseException as error:  # the next `next` raises it
                found = error
            self._ready.put(found)
            if not isinstance(found, _Item):
                return

    def _renew(self) -> None:
        try:
            while not self._ends_within(min(self._terms.lease_s * RENEWED_AFTER, threading.TIMEOUT_MAX)):
                with self._lock:
                    held = list(self._held)
                for item in held:
                    with contextlib.suppress(DataPlaneError):  # its ack says what is wrong
                        self._client.renew(item.meta, self._terms.lease_s)
        finally:
            self._give_back()

    def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(queue.Empty):
            self._end.get(timeout=seconds)
            return True
        return False

    def _give_back(self) -> None:
        self._closed.set()
        self._waiters.close()
        self._free.release()
        for thread in self._threads[1:]:
            thread.join(self._client.config.op_timeout_s)
        with self._lock:
            held, self._held = self._held, set()
        for item in held:
            with contextlib.suppress(DataPlaneError):  # the lease or the client has ended
                self._client.nack(item.meta)
        atexit.unregister(self.close)


class AsyncStream:
    """The batches of a task, for ``async for``. `stream` makes it. One task of the event loop iterates.

    Use ``async with stream(...) as batches`` where the loop may be left early: that gives back at once what is not
    acked. Otherwise it is given back when the event loop ends, or the leases do.
    """

    def __init__(self, client: AsyncDataPlaneClient, terms: Terms) -> None:
        terms.request(client._client)  # to refuse it now
        self._client = client
        self._terms = terms
        self._held: set[_Item] = set()
        self._current: _Item | None = None
        self._ended = False
        self._ready: asyncio.Queue[_Item | BaseException | None] = asyncio.Queue()
        self._free = asyncio.Semaphore(terms.prefetch)
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            await self.ack()
            self._current = await self._next()
        except asyncio.CancelledError:
            raise  # the task that iterates may go on
        except BaseException:
            await self.close()
            raise
        if self._current is None:
            await self.close()
            raise StopAsyncIteration
        return self._current.batch

    async def ack(self) -> None:
        """Acks the batch that was given last, if it is not acked yet. Asking for the next batch also acks it."""
        item = self._current
        if item is not None:
            self._held.discard(item)
            await self._client.ack(item.meta)
            self._current = None

    async def close(self) -> None:
        """Ends the stream, and gives back what is not acked. Idempotent."""
        self._ended = True
        self._current = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _next(self) -> _Item | None:
        if self._ended:
            return None
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        if self._terms.prefetch:
            found = await self._ready.get()
            self._free.release()
        else:
            found = await self._fetch()
        if isinstance(found, BaseException):
            raise found
        self._ended = found is None
        return found

    async def _fetch(self) -> _Item | None:
        terms = self._terms
        meta = await self._client.claim_meta(**terms.claim, timeout_s=terms.timeout_s)
        if not meta.sample_ids:
            return None
        item = _Item(meta, None)
        self._held.add(item)
        try:
            columns = await self._client.get_data(meta, terms.fields)
        except asyncio.CancelledError:
            self._held.discard(item)
            with contextlib.suppress(DataPlaneError):
                await self._client.nack(meta)
            raise
        item.batch = terms.collate(meta, columns)
        return item

    async def _work(self) -> None:
        renewing = asyncio.create_task(self._renew())
        try:
            if self._terms.prefetch:
                await self._read_ahead()
            await renewing
        finally:
            renewing.cancel()
            await self._give_back()

    async def _read_ahead(self) -> None:
        while True:
            await self._free.acquire()
            try:
                found: _Item | BaseException | None = await self._fetch()
            except Exception as error:  # the next `anext` raises it
                found = error
            self._ready.put_nowait(found)
            if not isinstance(found, _Item):
                return

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._terms.lease_s * RENEWED_AFTER)
            for item in list(self._held):
                with contextlib.suppress(DataPlaneError):  # its ack says what is wrong
                    await self._client.renew(item.meta, self._terms.lease_s)

    async def _give_back(self) -> None:
        held, self._held = self._held, set()
        for item in held:
            with contextlib.suppress(DataPlaneError):  # the lease or the client has ended
                await self._client.nack(item.meta)
