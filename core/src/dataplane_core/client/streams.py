"""`stream`: claims the batches of a task, reads them ahead, and acks each when the next is asked for."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.feeds import AsyncFeed, Collate, Feed, Item, Terms, Uneven
from dataplane_core.meta import KVBatchMeta


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
    timeout_s: float | None = ...,
    uneven: Uneven | None = ...,
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
    timeout_s: float | None = ...,
    uneven: Uneven | None = ...,
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
    timeout_s: float | None = None,
    uneven: Uneven | None = None,
    **claim: Any,
) -> Stream | AsyncStream:
    """The batches of a task, until the partition can give it no more.

    Each batch is claimed with a lease, and acked when the next one is asked for, that is, when the loop's body is done
    with it. The leases of the batches that are read ahead, or that the body works on, are renewed. What was not acked
    when the stream ends (a ``break``, an error, the end of the program) is given back at once. Batches of a killed
    process are handed out again when their leases end. So each sample is worked on at least once, and acked once.

    The stream ends only if ``num_samples`` was given when the partition was registered, or once somebody calls
    `DataPlaneClient.finish_partition`. Until then it waits for further samples, as long as those that put them live.

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
        timeout_s: How long the loop waits for a batch, in seconds. None: until `DataPlaneClient.why` finds that those
            that it waits for have ended (``is_over``). It looks after ``warn_after_s`` of the config, and again, at
            least once in five times as long. On a backend that does not declare ``listing`` and ``clients``: 60.
        uneven: With ``dp_rank`` and ``dp_size``, all ranks get the same number of batches. This is what becomes of
            samples at the end that are fewer than the ranks. ``equal`` (the default): each of them goes to another
            rank, and the others get an empty batch, whose columns have no rows. ``drop``: they are acked, and no rank
            gets them. ``error``: they are given back, and all ranks raise.
        claim: Further arguments of `DataPlaneClient.claim_meta`: ``dp_rank``, ``tag_filter``, ``sampler``, ``dp_size``.

    Returns:
        An iterator, which is a context manager too.

    Raises:
        LeaseExpiredError: At the next batch: the lease of the one before had ended, because this process was suspended
            for longer than the lease. Others may have been given its samples.
        ClaimTimeoutError: No batch was ready within ``timeout_s``, or none will come. Its ``verdict`` says why. The
            stream has ended then, as after any error.
        InvalidRequestError: ``uneven`` is "error", and the samples at the end were fewer than the ranks.
        UnsupportedOperationError: The backend does not declare leases; or ``dp_rank`` is given, and not samplers.

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
    batch = collate or StreamBatch
    terms = Terms(partition_id, task_name, list(fields), batch_size, lease_s, prefetch, batch, timeout_s, uneven, claim)
    kind = AsyncStream if isinstance(client, AsyncDataPlaneClient) else Stream
    return kind(client, terms)  # type: ignore[arg-type]


class Stream(Iterator[Any]):
    """The batches of a task, for ``for``. `stream` makes it. One thread iterates."""

    def __init__(self, client: DataPlaneClient, terms: Terms) -> None:
        terms.request(client)  # to refuse it now
        self._feed = Feed(client, terms)
        self._current: Item | None = None
        client._connection.streams.add(self)
        weakref.finalize(self, self._feed.collected).atexit = False  # at the end of the program: `Feed.close`

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
        if self._current is not None:
            self._feed.ack(self._current)
            self._current = None

    def close(self) -> None:
        """Ends the stream, and gives back what is not acked. Idempotent.

        Any thread may call it. A ``next`` that waits raises `ClientClosedError`.
        """
        self._current = None
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStream:
    """The batches of a task, for ``async for``. `stream` makes it. One task of the event loop iterates.

    Use ``async with stream(...) as batches`` where the loop may be left early: what is not acked is then given back
    before the program goes on. Otherwise it is given back soon after the stream is collected.
    """

    def __init__(self, client: AsyncDataPlaneClient, terms: Terms) -> None:
        terms.request(client._client)  # to refuse it now
        self._feed = AsyncFeed(client, terms)
        self._current: Item | None = None
        client._connection.streams.add(self)
        weakref.finalize(self, self._feed.collected).atexit = False  # the event loop has ended then

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            await self.ack()
            self._current = await self._feed.next()
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
        if self._current is not None:
            await self._feed.ack(self._current)
            self._current = None

    async def close(self) -> None:
        """Ends the stream, and gives back what is not acked. Idempotent.

        Any task of the event loop may call it. An ``anext`` that waits raises `ClientClosedError`.
        """
        self._current = None
        await self._feed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
