"""What a stream does in its threads, or in a task of an event loop: it claims, reads ahead, renews and gives back."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, Literal, TypeAlias, get_args

from tensordict import TensorDict

from dataplane_core.arguments import Index, PositiveSeconds, Seconds, checked_as
from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.claims import checked_claim, claim_until
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.held import HeldMetas
from dataplane_core.client.waiting import Waiters
from dataplane_core.codec import empty_columns
from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, Claim, ClaimRequest

#: The batches of a rank in turn: those that the client was not given yet.
_IN_TURN: Final = repeat(None)

#: Which arguments of `DataPlaneClient.claim_meta` a stream passes on.
_CLAIM_ARGUMENTS: Final = {"dp_rank", "tag_filter", "sampler", "dp_size"}

#: A lease is renewed after this share of it.
RENEWED_AFTER: Final = 1 / 3

#: How long a loop waits for a batch if the store cannot say who lives, in seconds.
_UNKNOWN_S: Final = 60.0

#: How long a stream that nobody refers to keeps its last user waiting, until what it holds is given back.
_COLLECTED_WITHIN_S: Final = 1.0

Collate = Callable[[KVBatchMeta, TensorDict], Any]
#: What a stream does with samples at the end that are too few for every rank to get one.
Uneven: TypeAlias = Literal["equal", "drop", "error"]


def longest_wait_s(client: DataPlaneClient, timeout_s: float | None) -> float:
    """How long a loop waits for a batch. Infinite: as long as those live who may put samples, as `why` knows."""
    if timeout_s is not None:
        return timeout_s
    is_known = {Capability.LISTING, Capability.CLIENTS} <= client.capabilities
    return math.inf if is_known and client.config.announce_s is not None else _UNKNOWN_S


@dataclass(frozen=True, slots=True)
class Terms:
    """The arguments of `stream`; those of all kinds of streams. ``claim`` are the further ones of ``claim_meta``."""

    partition_id: str
    task_name: str
    fields: list[str]
    batch_size: int
    lease_s: float
    prefetch: int
    collate: Collate
    timeout_s: float | None
    uneven: Uneven | None
    claim: Mapping[str, Any]
    most_held_s: float = math.inf  # after which a batch that is not acked is given back

    def __post_init__(self) -> None:
        checked_as("stream: lease_s", PositiveSeconds, self.lease_s)
        if self.timeout_s is not None:
            checked_as("stream: timeout_s", Seconds, self.timeout_s)
        if self.most_held_s != math.inf:
            checked_as("stream: most_held_s", PositiveSeconds, self.most_held_s)
        checked_as("stream: prefetch", Index, self.prefetch)
        if not self.claim.keys() <= _CLAIM_ARGUMENTS:
            raise InvalidRequestError(
                f"of claim_meta only {sorted(_CLAIM_ARGUMENTS)} can be given here, got {sorted(self.claim)}."
            )
        if self.uneven is not None and self.uneven not in get_args(Uneven):
            raise InvalidRequestError(f"uneven must be one of {', '.join(get_args(Uneven))}, got {self.uneven!r}.")
        if self.uneven is not None and self.dp_size is None:
            raise InvalidRequestError(
                "uneven says what ranks do that get no samples: it needs a dp_rank and a dp_size."
            )

    @property
    def dp_size(self) -> int | None:
        return self.claim.get("dp_size")

    @property
    def renewed_after_s(self) -> float:
        return min(self.lease_s * RENEWED_AFTER, threading.TIMEOUT_MAX)

    def request(self, client: DataPlaneClient, batch_index: int | None = None) -> ClaimRequest:
        """The request of the next claim.

        Raises:
            DataPlaneError: The arguments are refused.
        """
        claim = {"tag_filter": None, **self.claim}
        return checked_claim(
            client._connection,
            0.0,
            batch_index,
            partition_id=self.partition_id,
            task_name=self.task_name,
            required_fields=self.fields,
            batch_size=self.batch_size,
            all_or_nothing=True,
            lease_s=self.lease_s,
            **claim,
        )

    def is_given(self, claim: Claim) -> bool:
        """Whether the loop gets a batch. All ranks decide the same.

        Raises:
            InvalidRequestError: Some ranks get no samples, and ``uneven`` is "error".
        """
        if self.uneven in (None, "equal") or claim.num_ranks in (None, self.dp_size):
            return True
        if self.uneven == "error":
            raise InvalidRequestError(
                f"stream('{self.partition_id}', '{self.task_name}') ended: the samples that are left give a batch to "
                f"{claim.num_ranks} of {self.dp_size} ranks. They were given back.",
                hint="With uneven='equal' the other ranks get an empty batch; with 'drop' none gets these samples.",
            )
        return False


@dataclass(frozen=True, slots=True)
class Item:
    """A batch as the stream gives it, and its samples."""

    meta: KVBatchMeta
    batch: Any


class _AnyFeed:
    """What `Feed` and `AsyncFeed` share. Feeds do not refer to their streams, so that these can be collected."""

    def __init__(self, client: DataPlaneClient, terms: Terms, batch_indexes: Iterable[int | None] = _IN_TURN) -> None:
        self._sync = client
        self._terms = terms
        self._wait_s = longest_wait_s(client, terms.timeout_s)
        self._held = HeldMetas(client, terms.lease_s, terms.most_held_s)
        self._waiters = Waiters("the stream or its client was closed while the next batch was waited for.")
        self._asked_at = math.inf  # since when `next` waits; infinity: it does not
        self._ended = False
        self._batch_indexes = iter(batch_indexes)

    @contextmanager
    def _claiming(self) -> Iterator[ClaimRequest]:
        """The request of the next claim, which waits while the ``with`` lasts."""
        client, terms = self._sync, self._terms
        with (
            client._connection.operation("claim_meta", terms.partition_id),
            client._connection.waiters.waiting(self._waiters.close),
        ):
            yield terms.request(client, next(self._batch_indexes))

    def _check_process(self) -> None:
        """Refuses a forked process, which has neither the threads nor the leases of its parent."""
        if self._sync._connection.pid != os.getpid():
            with self._sync._connection.operation():  # raises
                pass

    def _since(self) -> float:
        """When the wait began that `longest_wait_s` limits: that of `next`, not that of a claim that is ahead."""
        return self._asked_at

    def _read(self, meta: KVBatchMeta) -> Item:
        """Reads what was claimed. Blocks.

        Raises:
            ClientClosedError: The stream was closed meanwhile.
        """
        self._waiters.check()
        if meta.sample_ids:
            columns = self._sync.get_data(meta, self._terms.fields)
        else:
            columns = empty_columns(self._sync.describe(meta.partition_id).specs, self._terms.fields)
        batch = self._terms.collate(meta, columns)
        self._waiters.check()
        return Item(meta, batch)

    def _given(self, found: Item | BaseException | None) -> Item | None:
        """What `next` returns, or raises. None: there are no more, or the stream was closed."""
        self._ended = not isinstance(found, Item)
        if isinstance(found, BaseException):
            raise found
        if found is None:
            self._waiters.check()
        return found


class Feed(_AnyFeed):
    """The batches of a `Stream`, or of an iteration of a `StreamingDataset`.

    Args:
        client: Claims and reads.
        terms: What it claims and reads.
        batch_indexes: Which batches of a rank it claims. Default: those that the client was not given yet.
        closes: Whether the client ends with the feed.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        terms: Terms,
        *,
        batch_indexes: Iterable[int | None] = _IN_TURN,
        closes: bool = False,
    ) -> None:
        super().__init__(client, terms, batch_indexes)
        self._closes = closes
        self._told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether to end now
        self._ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        # one token per batch that may be read ahead; not a semaphore, whose lock a signal handler could find taken
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(terms.prefetch):
            self._free.put(None)
        self._threads: list[threading.Thread] = []

    def next(self) -> Item | None:
        """The next batch. None: there are no more."""
        self._check_process()
        if self._ended or self._waiters.closed:
            return None
        if not self._threads:
            self._begin(self._renew)
            atexit.register(self.close)
            if self._terms.prefetch:
                self._begin(self._read_ahead)
        self._asked_at = time.monotonic()
        if not self._terms.prefetch:
            return self._given(self._fetch())
        if self._ready.empty():
            self._waiters.wake()  # the claim that is ahead has to end in time from now on
        found = self._ready.get()
        self._asked_at = math.inf
        self._free.put(None)
        return self._given(found)

    def batches(self) -> Iterator[Any]:
        """The batches, for a user who acks them by himself.

        They are renewed until that is done, also after the last one. If the loop is left earlier, they are given back.
        """
        try:
            while (item := self.next()) is not None:
                yield item.batch
        except GeneratorExit:
            self.collected()
            raise
        finally:
            self._ended = True
            atexit.unregister(self.close)
            self._told.put(False)  # to look now what is left

    def ack(self, item: Item) -> None:
        self._sync.ack(item.meta)
        self._held.discard(item.meta)

    def close(self) -> None:
        """Ends the feed, and gives back what is not acked. Idempotent."""
        if self._sync._connection.pid != os.getpid():
            return  # a forked child must not end what its parent uses
        self._waiters.close()
        self._end_threads(self._sync.config.op_timeout_s)

    def collected(self) -> None:
        """Ends the feed when nobody refers to its stream. Waits a little until what it holds is given back.

        The garbage collector may call it while its thread has a lock that the threads need. So it takes none (`put` of
        this queue may interrupt itself), and does not wait until they have ended.
        """
        self._end_threads(_COLLECTED_WITHIN_S)

    def _end_threads(self, timeout_s: float) -> None:
        self._told.put(True)
        if self._threads and threading.current_thread() not in self._threads:
            self._threads[0].join(timeout_s)  # which waits for the other one

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="dataplane-stream", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _fetch(self) -> Item | None:
        while True:
            with self._claiming() as request:
                meta, claim = claim_until(self._sync._connection, request, self._wait_s, self._waiters, self._since)
            if not meta.sample_ids and not claim.num_ranks:
                return None
            self._held.add(meta)
            try:
                if self._terms.is_given(claim):
                    return self._read(meta)
                self._sync.ack(meta)
            except BaseException:
                self._held.give_back(meta)
                raise
            self._held.discard(meta)

    def _read_ahead(self) -> None:
        found: Item | BaseException | None
        while True:
            self._free.get()
            try:
                found = None if self._waiters.closed else self._fetch()
            except BaseException as error:  # the next `next` raises it
                found = error
            self._ready.put(found)
            if not isinstance(found, Item):
                return

    def _renew(self) -> None:
        try:
            while self._held.renew() or not self._ended:
                with contextlib.suppress(queue.Empty):
                    if self._told.get(timeout=self._terms.renewed_after_s):
                        return
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._waiters.close()
        self._free.put(None)
        for thread in self._threads[1:]:
            thread.join(self._sync.config.op_timeout_s)
        self._held.give_back()
        atexit.unregister(self.close)
        if self._closes:
            self._sync.close()


class AsyncFeed(_AnyFeed):
    """The batches of an `AsyncStream`."""

    def __init__(self, client: AsyncDataPlaneClient, terms: Terms) -> None:
        super().__init__(client._client, terms)
        self._client = client
        self._ready: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        self._free = asyncio.Semaphore(terms.prefetch)
        self._task: asyncio.Task[None] | None = None

    async def next(self) -> Item | None:
        """The next batch. None: there are no more."""
        self._check_process()
        if self._ended or self._waiters.closed:
            return None
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        self._asked_at = time.monotonic()
        try:
            if not self._terms.prefetch:
                return self._given(await self._fetch())
            if self._ready.empty():
                self._waiters.wake()  # the claim that is ahead has to end in time from now on
            found = await self._ready.get()
        finally:
            self._asked_at = math.inf
        self._free.release()
        return self._given(found)

    async def ack(self, item: Item) -> None:
        await self._client.ack(item.meta)
        self._held.discard(item.meta)

    async def close(self) -> None:
        """Ends the feed, and gives back what is not acked. Idempotent."""
        self._waiters.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._give_back()

    def collected(self) -> None:
        """Ends the feed when nobody refers to its stream. Any thread may call it."""
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _fetch(self) -> Item | None:
        while True:
            with self._claiming() as request:
                meta, claim = await self._client._claim_until(request, self._wait_s, self._waiters, self._since)
            if not meta.sample_ids and not claim.num_ranks:
                return None
            self._held.add(meta)
            try:
                if self._terms.is_given(claim):
                    return await self._client._run("get_data", partial(self._read, meta))
                await self._client.ack(meta)
            except (Exception, asyncio.CancelledError):
                await self._give_back(meta)
                raise
            self._held.discard(meta)

    async def _work(self) -> None:
        renewing = asyncio.create_task(self._renew())
        try:
            if self._terms.prefetch:
                await self._read_ahead()
            await renewing
        finally:
            self._waiters.close()
            self._ready.put_nowait(None)  # `next` may wait
            renewing.cancel()
            await self._give_back()

    async def _read_ahead(self) -> None:
        found: Item | BaseException | None
        while True:
            await self._free.acquire()
            try:
                found = await self._fetch()
            except Exception as error:  # the next `next` raises it
                found = error
            self._ready.put_nowait(found)
            if not isinstance(found, Item):
                return

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._terms.renewed_after_s)
            with contextlib.suppress(DataPlaneError):
                await self._client._run("renew", self._held.renew, renews=True, several=True)

    async def _give_back(self, meta: KVBatchMeta | None = None) -> None:
        with contextlib.suppress(DataPlaneError):  # the client has ended, or its threads are busy
            await self._client._run("nack", partial(self._held.give_back, meta), renews=True, several=True)
