"""`stream`: claims the batches of a task, reads them ahead, and acks each when the next is asked for."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, overload

from dataplane_core.arguments import Index, PositiveSeconds, Seconds, checked_as
from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.claims import checked_claim, claim_now
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.connection import Waiters
from dataplane_core.client.leases import HeldMetas
from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, InvalidRequestError, Verdict
from dataplane_core.ledger import group_of, rollout_of
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, Claim, ClaimRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

#: Which arguments of `DataPlaneClient.claim_meta` a stream passes on.
_CLAIM_ARGUMENTS: Final = {"dp_rank", "tag_filter", "sampler", "dp_size", "balance", "max_rows", "max_tokens"}
#: A lease is renewed after this share of it.
RENEWED_AFTER: Final = 1 / 3
#: How long a loop waits for a batch if the store cannot say who lives, in seconds.
_UNKNOWN_S: Final = 60.0
#: How long a stream waits before it drops what came meanwhile and is too old, and before it looks again whether others
#: still hold leases, in seconds.
_PAUSE_S: Final = 0.5
#: How long a stream that nobody refers to keeps its last user waiting, until what it holds is given back.
_COLLECTED_WITHIN_S: Final = 1.0

Collate: TypeAlias = "Callable[[KVBatchMeta, TensorDict], Any]"
#: Says which samples are new enough now, such as ``lambda: {"weight_version": (">=", trainer.version - 2)}``.
Fresh: TypeAlias = Callable[[], Mapping[str, tuple[Literal[">="], float]]]
#: What a stream does with samples at the end that are too few for every rank to get one.
Uneven: TypeAlias = Literal["equal", "drop", "error"]


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch of a stream.

    Attributes:
        meta: The samples, with tags and lease tokens.
        columns: Their columns, as `DataPlaneClient.get_samples` returns them. The caller owns them.
    """

    meta: KVBatchMeta
    columns: Any
    _held: HeldMetas | None = field(default=None, repr=False, compare=False)

    def check(self) -> None:
        """Checks that the lease still holds. Call it before an optimizer's step.

        Raises:
            LeaseExpiredError: The lease has ended, or may have ended because no renewal has succeeded for so long.
                Others may have been given the samples.
        """
        if self._held is not None and self.meta.sample_ids:
            self._held.check(self.meta)

    def __reduce__(self) -> tuple[type[Self], tuple[KVBatchMeta, Any]]:
        return type(self), (self.meta, self.columns)  # whoever gets it does not renew the lease


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
    clear: bool = ...,
    fresh: Fresh | None = ...,
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
    clear: bool = ...,
    fresh: Fresh | None = ...,
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
    clear: bool = False,
    fresh: Fresh | None = None,
    **claim: Any,
) -> Stream | AsyncStream:
    """The batches of a task, until the partition can give it no more.

    Each batch is claimed with a lease, and acked when the next one is asked for, that is, when the loop's body is done
    with it. The leases of the batches that are read ahead, or that the body works on, are renewed. What was not acked
    when the stream ends (a ``break``, an error, the end of the program) is given back at once. Batches of a killed
    process are handed out again when their leases end. So each sample is worked on at least once, and acked once.

    The stream ends only if ``num_samples`` was given when the partition was registered, or once somebody calls
    `DataPlaneClient.finish_partition`. Until then it waits for further samples, as long as those that put them live.
    Then it waits until no other stream or process holds samples of the task, to take them over if that one dies. It
    does not wait so with ``dp_rank``, nor on a backend without ``listing``.

    Args:
        client: With an `AsyncDataPlaneClient`, the stream is for ``async for``.
        partition_id: A registered partition.
        task_name: A task of it.
        fields: The fields that a sample must have, and that are read.
        batch_size: How many samples, or of a partition of rollouts, groups; the last batch may be smaller.
        lease_s: Seconds after which samples of a process that died are handed out again. The lease is renewed while the
            process lives.
        prefetch: How many batches are claimed and read ahead, in a thread of the stream. 0: none.
        collate: Called with the meta and the columns of each batch, where it is read; its result is what the stream
            gives. Default: a `StreamBatch`.
        timeout_s: How long the loop waits for a batch, in seconds. None: until `DataPlaneClient.why` finds that those
            that it waits for have ended (``is_over``). It looks after ``warn_after_s`` of the config, and again, at
            least once in five times as long. On a backend that does not declare ``listing`` and ``clients``: 60.
        uneven: With ``dp_rank`` and ``dp_size``, all ranks get the same number of batches. This is what becomes of
            samples at the end that are fewer than the ranks. ``equal`` (the default): each of them goes to another
            rank, and the others get an empty batch, whose columns have no rows. ``drop``: they are acked, and no rank
            gets them. ``error``: they are given back, and all ranks raise.
        clear: Clear samples once they are acked, with what rollouts of their groups left that died. Those of a process
            that was killed between the two are cleared when the partition can give no more.
        fresh: Called before each claim; returns a tag filter with a lower bound, which may rise. The samples below it
            are acked, and cleared with ``clear``, but never given. A group is as old as its oldest sample. Samples
            without the tag are never given. Not with ``dp_rank``.
        claim: Further arguments of `DataPlaneClient.claim_meta`: ``dp_rank``, ``tag_filter``, ``sampler``, ``dp_size``,
            ``balance``, ``max_rows``, ``max_tokens``.

    Returns:
        An iterator, which is a context manager too.

    Raises:
        LeaseExpiredError: At the next batch: the lease of the one before had ended, because this process was suspended
            for longer than the lease. Others may have been given its samples.
        ClaimTimeoutError: No batch was ready within ``timeout_s``, or none will come. Its ``verdict`` says why. The
            stream has ended then, as after any error.
        InvalidRequestError: ``uneven`` is "error", and the samples at the end were fewer than the ranks; or ``fresh``
            returned no lower bound.
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
    terms = Terms(
        partition_id,
        task_name,
        list(fields),
        batch_size,
        lease_s,
        prefetch,
        collate or StreamBatch,
        timeout_s,
        uneven,
        claim,
        clear=clear,
        fresh=fresh,
    )
    return AsyncStream(client, terms) if isinstance(client, AsyncDataPlaneClient) else Stream(client, terms)


# --- what a user iterates ---------------------------------------------------------------------------------------------


class Stream(Iterator[Any]):
    """The batches of a task, for ``for``. `stream` makes it. One thread iterates."""

    def __init__(self, client: DataPlaneClient, terms: Terms) -> None:
        self._feed = Feed(client, terms)
        self._current: Item | None = None
        client._connection.streams.add(self)
        weakref.finalize(self, self._feed.collected).atexit = False  # at the end of the program: `Feed.close`

    @property
    def num_stale(self) -> int:
        """Samples that were dropped since they were too old for ``fresh``."""
        return self._feed.num_stale

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
        self._client = client
        self._ready = _OnLoop()
        self._feed = Feed(client._client, terms, on_loop=self._ready)
        self._current: Item | None = None
        client._connection.streams.add(self)
        weakref.finalize(self, self._feed.collected, within_s=0.0).atexit = False  # the loop must not wait

    @property
    def num_stale(self) -> int:
        """As of `Stream`."""
        return self._feed.num_stale

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            await self.ack()
            self._ready.loop = asyncio.get_running_loop()
            while self._feed.ask():
                item = self._feed.taken(await self._ready.get())
                if item is None:
                    await asyncio.to_thread(self._feed.clear_rest)
                if item is None or self._feed.is_fresh(item):
                    self._current = item
                    break
                await asyncio.to_thread(self._feed.held.give_back, item.meta)
        except asyncio.CancelledError:
            self._feed.leave()
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
            current, self._current = self._current, None
            await self._client._run("ack", partial(self._feed.ack, current), several=True)

    async def close(self) -> None:
        """Ends the stream, and gives back what is not acked. Idempotent.

        Any task of the event loop may call it. An ``anext`` that waits raises `ClientClosedError`.
        """
        self._current = None
        await asyncio.to_thread(self._feed.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _OnLoop(asyncio.Queue["Item | BaseException | None"]):
    """What a feed has read, for a task of an event loop. Other threads use only `hand_over`."""

    loop: asyncio.AbstractEventLoop | None = None  # that of the task which waits

    def hand_over(self, item: Item | BaseException | None) -> None:
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.put_nowait, item)


# --- what is behind it ------------------------------------------------------------------------------------------------


def _longest_wait_s(client: DataPlaneClient, timeout_s: float | None) -> float:
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
    clear: bool = False
    fresh: Fresh | None = None

    def __post_init__(self) -> None:
        checked_as("stream: clear", bool, self.clear)
        if self.fresh is not None and {"dp_rank", "tag_filter"} & self.claim.keys():
            raise InvalidRequestError("fresh says which samples a claim gives: leave out dp_rank and tag_filter.")
        checked_as("stream: lease_s", PositiveSeconds, self.lease_s)
        checked_as("stream: timeout_s", Seconds | None, self.timeout_s)
        checked_as("stream: prefetch", Index, self.prefetch)
        if not self.claim.keys() <= _CLAIM_ARGUMENTS:
            raise InvalidRequestError(
                f"of claim_meta only {sorted(_CLAIM_ARGUMENTS)} can be given here, got {sorted(self.claim)}."
            )
        checked_as("stream: uneven", Uneven | None, self.uneven)
        if self.uneven is not None and self.claim.get("dp_size") is None:
            raise InvalidRequestError(
                "uneven says what ranks do that get no samples: it needs a dp_rank and a dp_size."
            )

    def bounds(self) -> Mapping[str, float]:
        """Tag -> its least value, as ``fresh`` says now."""
        bounds = {} if self.fresh is None else self.fresh()
        if any(not isinstance(bound, tuple) or len(bound) != 2 or bound[0] != ">=" for bound in bounds.values()):
            raise InvalidRequestError(
                f"fresh returned {bounds!r}. Expected lower bounds of tags, such as {{'weight_version': ('>=', 7)}}."
            )
        return {tag: bound for tag, (_, bound) in bounds.items()}

    def request(self, client: DataPlaneClient) -> ClaimRequest:
        """The request of the next claim, checked."""
        claim = {"tag_filter": {tag: (">=", bound) for tag, bound in self.bounds().items()} or None, **self.claim}
        return checked_claim(
            client._connection,
            partition_id=self.partition_id,
            task_name=self.task_name,
            required_fields=self.fields,
            batch_size=self.batch_size,
            all_or_nothing=True,
            lease_s=self.lease_s,
            **claim,
        )

    def is_given(self, claim: Claim) -> bool:
        """Whether the loop gets a batch. All ranks decide the same, and all raise if ``uneven`` is "error"."""
        dp_size = self.claim.get("dp_size")
        if self.uneven in (None, "equal") or claim.num_ranks in (None, dp_size):
            return True
        if self.uneven == "error":
            raise InvalidRequestError(
                f"stream('{self.partition_id}', '{self.task_name}') ended: the samples that are left give a batch to "
                f"{claim.num_ranks} of {dp_size} ranks. They were given back.",
                hint="With uneven='equal' the other ranks get an empty batch; with 'drop' none gets these samples.",
            )
        return False


@dataclass(frozen=True, slots=True)
class Item:
    """A batch as the stream gives it, and its samples."""

    meta: KVBatchMeta
    batch: Any


class Feed:
    """Claims and reads the batches of a stream, renews their leases, and gives back what is not acked.

    One thread renews, another one reads ahead. It does not refer to its stream, so that that can be collected.
    ``on_loop`` takes what was read, for a stream of an event loop, whose task must not claim or read itself.
    """

    def __init__(self, client: DataPlaneClient, terms: Terms, *, on_loop: _OnLoop | None = None) -> None:
        terms.request(client)  # to refuse it now
        self._client = client
        self._connection = client._connection
        self.terms = terms
        self.num_stale = 0  # samples that were dropped since they were too old
        self._wait_s = _longest_wait_s(client, terms.timeout_s)
        self.held = HeldMetas(client, terms.lease_s)  # the batches that are not acked
        self._waiters = Waiters("the stream or its client was closed while the next batch was waited for.")
        self._wanted = False
        self._looked_s = 0.0  # how long the loop had waited when it was last asked who lives
        self._asked_at = math.inf  # since when the loop waits; infinity: it does not
        self._ended = False
        self._told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether to end now
        self._reads_ahead = terms.prefetch > 0 or on_loop is not None
        self._read_now: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._ready = on_loop or self._read_now
        self._hand_over = self._read_now.put if on_loop is None else on_loop.hand_over
        # one token per batch that may be read; not a semaphore, whose lock a signal handler could find taken
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(terms.prefetch):
            self._free.put(None)
        self._threads: list[threading.Thread] = []

    def next(self) -> Item | None:
        """The next batch. None: there are no more."""
        while self.ask():
            item = self.taken(self._read_now.get() if self._reads_ahead else self._fetch())
            if item is None:
                self.clear_rest()
            if item is None or self.is_fresh(item):
                return item
            self.held.give_back(item.meta)  # the next claim drops what is too old of it
        return None

    def ask(self) -> bool:
        """The loop waits for the next batch from now on. False: there are no more."""
        self._connection.check_process()  # a fork has neither the threads nor the leases of its parent
        if self._ended or self._waiters.closed:
            return False
        if not self._threads:
            self._begin(self._renew)
            atexit.register(self.close)
            if self._reads_ahead:
                self._begin(self._read_ahead)
        self._asked_at = time.monotonic()
        if self._reads_ahead and not self._wanted:
            self._wanted = True
            self._free.put(None)  # the batch that is asked for is not ahead
        if self._ready.empty():
            self._waiters.wake()  # the claim that is ahead has to end in time from now on
        return True

    def leave(self) -> None:
        """The loop waits no longer. What it asked for is kept until it asks again."""
        self._asked_at = math.inf

    def taken(self, item: Item | BaseException | None) -> Item | None:
        """What the loop gets, or is raised in it. None: there are no more."""
        self._wanted, self._asked_at, self._looked_s = False, math.inf, 0.0
        self._ended = not isinstance(item, Item)
        if isinstance(item, BaseException):
            raise item
        if item is None:
            self._waiters.check()  # there may be more, but it was closed
        return item

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
        self._client.ack(item.meta)
        self.held.discard(item.meta)
        if self.terms.clear:
            self._clear(item.meta)

    def close(self) -> None:
        """Ends the feed, and gives back what is not acked. Idempotent."""
        if self._connection.is_forked:
            return  # a forked child must not end what its parent uses
        self._waiters.close()
        self._end_threads(self._connection.config.op_timeout_s)

    def collected(self, within_s: float = _COLLECTED_WITHIN_S) -> None:
        """Ends the feed when nobody refers to its stream. Waits a little until what it holds is given back.

        The garbage collector may call it while its thread has a lock that the threads need. So it takes none (`put` of
        this queue may interrupt itself), and does not wait until they have ended.
        """
        self._end_threads(within_s)

    def _end_threads(self, timeout_s: float) -> None:
        self._told.put(True)
        if self._threads and threading.current_thread() not in self._threads:
            self._threads[0].join(timeout_s)  # which waits for the other one

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="dataplane-stream", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _fetch(self) -> Item | None:
        connection, terms = self._connection, self.terms
        is_last = False
        while True:
            self._drop_stale()
            with (
                connection.operation("claim_meta", terms.partition_id),
                connection.waiters.waiting(self._waiters.close),
            ):
                request = terms.request(self._client)
                answer = self._claim(request)
            if answer is None:
                continue
            meta, claim = answer
            if not meta.sample_ids and not claim.num_ranks:
                if is_last or terms.claim.get("dp_rank") is not None:
                    return None
                is_last = not self._others_hold()  # then it claims once more: a lease may have ended since this claim
                if not is_last:
                    self._wait_on(ClaimTimeoutError("The samples that are left are leased to others."))
                    time.sleep(_PAUSE_S)
                continue
            self.held.add(meta)
            try:
                if terms.is_given(claim):
                    return Item(meta, self._read(meta))
                self._client.ack(meta)
            except BaseException:
                self.held.give_back(meta)
                raise
            self.held.discard(meta)

    def _claim(self, request: ClaimRequest) -> tuple[KVBatchMeta, Claim] | None:
        """Waits for a batch. None: look again what is too old, which may hold the store full."""
        # not since this claim began: it may be ahead of the loop
        wait_s = self._wait_s if self.terms.fresh is None else min(self._wait_s, _PAUSE_S)
        try:
            meta, claim = claim_now(self._connection, request, wait_s, self._waiters, lambda: self._asked_at)
        except ClaimTimeoutError as error:
            if wait_s == self._wait_s:
                raise
            self._wait_on(error)
            return None
        if meta.sample_ids or self.terms.fresh is None or self._is_consumed():
            return meta, claim
        self._wait_on(ClaimTimeoutError("The samples that are left are too old, or lack the tag."))
        time.sleep(_PAUSE_S)
        return None

    def _others_hold(self) -> bool:
        """Whether other streams or processes hold leases. If they die, their samples come back."""
        if Capability.LISTING not in self._connection.capabilities:
            return False
        tasks = self._client.describe(self.terms.partition_id, count_rows=False).tasks
        num_leased = tasks[self.terms.task_name].num_leased if self.terms.task_name in tasks else 0
        if num_leased:
            self.held.renew()  # only now: what was acked since then must not count as held here
        return num_leased > self.held.num_samples

    def _wait_on(self, error: ClaimTimeoutError) -> None:
        """Raises if the loop has waited long enough, or none of those lives that it waits for."""
        waited_s = time.monotonic() - self._asked_at
        if self._wait_s == math.inf:
            if waited_s - self._looked_s < _UNKNOWN_S:
                return
            self._looked_s = waited_s
            verdicts: list[Verdict] = []
            with contextlib.suppress(DataPlaneError):  # the next claim says what is wrong
                verdicts = self._client.why(self.terms.partition_id, self.terms.task_name)
            if not any(verdict.is_over for verdict in verdicts):
                return
        elif waited_s < self._wait_s:
            return
        raise ClaimTimeoutError(
            f"stream('{self.terms.partition_id}', '{self.terms.task_name}'): no batch within {waited_s:.1f} s. "
            f"{error.message}",
            num_ready=error.num_ready,
            shortfall=error.shortfall,
        ) from error

    def _drop_stale(self) -> None:
        """Acks the samples that are below a bound of ``fresh``. It claims them first: others may work on them."""
        terms = self.terms
        for tag, bound in terms.bounds().items():
            while True:
                stale = self._client.claim_meta(
                    terms.partition_id,
                    terms.task_name,
                    terms.fields,
                    terms.batch_size,
                    blocking=False,
                    lease_s=terms.lease_s,
                    tag_filter={tag: ("any <", bound)},
                )
                if not stale.size:
                    break
                self._client.ack(stale)
                self.num_stale += stale.size
                if terms.clear:
                    self._clear(stale)

    def _clear(self, meta: KVBatchMeta) -> None:
        """Clears samples that were acked, and of their groups the rows of rollouts that died, which nobody is given."""
        ids, groups = meta.sample_ids, {group_of(name) for name in meta.sample_ids if rollout_of(name) != name}
        can_list = Capability.LISTING in self._connection.capabilities
        if groups and can_list and self._connection.describe(meta.partition_id).rollouts:
            ids = [name for name in self._client.list_sample_ids(meta.partition_id) if group_of(name) in groups]
        self._client.clear_samples(ids, meta.partition_id)

    def is_fresh(self, item: Item) -> bool:
        """Whether no sample of a batch that was claimed ahead has become too old."""
        bounds = self.terms.bounds()
        return all(row[tag] >= bound for row in item.meta.tags or () for tag, bound in bounds.items())

    def clear_rest(self) -> None:
        """Clears what killed processes have acked and not cleared, once the loop has acked its last batch."""
        partition_id = self.terms.partition_id
        if self.terms.clear and self._is_consumed():
            self._client.clear_samples(self._client.list_sample_ids(partition_id), partition_id)

    def _is_consumed(self) -> bool:
        return self._client.check_consumption_status(self.terms.partition_id, [self.terms.task_name])

    def _read(self, meta: KVBatchMeta) -> Any:
        self._waiters.check()
        if meta.sample_ids:
            columns = self._client.get_data(meta, self.terms.fields)
        else:
            from dataplane_core.codec.rows import empty_columns  # it imports torch

            columns = empty_columns(self._client.describe(meta.partition_id).specs, self.terms.fields)
        if self.terms.collate is StreamBatch:
            batch: Any = StreamBatch(meta, columns, self.held)
        else:
            batch = self.terms.collate(meta, columns)
        self._waiters.check()
        return batch

    def _read_ahead(self) -> None:
        item: Item | BaseException | None
        while True:
            self._free.get()
            try:
                item = None if self._waiters.closed else self._fetch()
            except BaseException as error:  # the loop gets it
                item = error
            self._hand_over(item)
            if not isinstance(item, Item):
                return

    def _renew(self) -> None:
        pause_s = min(self.terms.lease_s * RENEWED_AFTER, threading.TIMEOUT_MAX)
        try:
            while self.held.renew() or not self._ended:
                with contextlib.suppress(queue.Empty):
                    if self._told.get(timeout=pause_s):
                        return
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._waiters.close()
        self._free.put(None)
        for thread in self._threads[1:]:
            thread.join(self._connection.config.op_timeout_s)
        self.held.give_back()
        atexit.unregister(self.close)
