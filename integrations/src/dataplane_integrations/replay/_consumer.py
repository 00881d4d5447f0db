"""`StreamingConsumer`: feeds a trainer with the store's claims, while rollouts continue to write."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal

from dataplane_core.batch import BatchedDataDict, pad_columns, read_columns
from dataplane_core.client import RENEWED_AFTER, DataPlaneClient, longest_wait_s
from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, InvalidRequestError, LeaseExpiredError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import WEIGHT_VERSION_TAG
from dataplane_core.spec import TagFilter
from dataplane_integrations.ahead import check_depth, read_ahead
from dataplane_integrations.errors import noted_on

#: At the end of a partition: seconds between two checks whether a dead consumer's leases have expired.
_END_POLL_S: Final = 0.1
#: Seconds between two looks whether those live that a consumer without a timeout waits for; and for which it waits for
#: rows that nobody can give back.
_LOOK_S: Final = 60.0
#: Seconds after which a claim ahead of its turn looks whether it is still wanted.
_AHEAD_CLAIM_S: Final = 0.2


class ClaimedBatch:
    """Rows that this process holds on lease; a context manager around training on them.

    Inside the block, a thread renews the lease. A normal exit acks the rows, then clears them. An exception gives them
    back to the pool at once. If the process dies, they go back when the lease ends.

    Attributes:
        meta: The rows, with tags and lease tokens.
    """

    def __init__(self, client: DataPlaneClient, meta: KVBatchMeta, lease_s: float, *, clear: bool) -> None:
        self.meta = meta
        self._client = client
        self._lease_s = lease_s
        self._clear = clear
        self._done = threading.Event()
        self._renewed_at = time.monotonic()  # the claim, then the newest renewal that succeeded
        self._lost: LeaseExpiredError | None = None
        self._broken: Exception | None = None  # the error of the newest renewal
        self._thread: threading.Thread | None = None
        self._ahead = BatchedDataDict()  # read ahead, unpadded

    def read(
        self,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["padded", "jagged"] = "padded",
        message_logs: bool = False,
        **options: Any,
    ) -> BatchedDataDict:
        """Reads the rows' columns, padded. Arguments as for `dataplane_core.read_columns`."""
        names = list((self.meta.fields or []) if select_fields is None else select_fields)
        held = names and len(set(names)) == len(names) and set(names) <= self._ahead.keys()
        if not held or message_logs or layout not in ("padded", "jagged"):
            return read_columns(
                self._client, self.meta, select_fields, layout=layout, message_logs=message_logs, **options
            )
        columns = BatchedDataDict({name: self._ahead.pop(name) for name in names})
        return pad_columns(columns, self.meta, **options) if layout == "padded" else columns

    def check(self) -> None:
        """Checks that the lease still holds. Call it before an optimizer step.

        Raises:
            LeaseExpiredError: The lease has ended, or may have ended because no renewal has succeeded for so long (the
                cause is the error of the newest one). Another consumer may have been given the rows.
        """
        if self._lost is not None:
            raise self._lost
        since_s = time.monotonic() - self._renewed_at
        if since_s >= self._lease_s:
            raise LeaseExpiredError(
                f"the lease on {self.meta.size} rows of '{self.meta.partition_id}' was last renewed {since_s:.1f} s "
                f"ago. Expected less than lease_s, {self._lease_s:g} s.",
                sample_ids=self.meta.sample_ids,
            ) from self._broken

    def _give_back(self) -> None:
        """Gives the rows back to the pool. If that fails, they go back when the lease ends."""
        self._stop_renewing()
        with contextlib.suppress(DataPlaneError):
            self._client.nack(self.meta)

    def _read_ahead(self, read: bool) -> None:
        """Renews the lease from now on, and reads the columns. Runs in the thread that reads ahead."""
        self._start_renewing()
        if read:
            with contextlib.suppress(Exception):  # then `read` reads, and raises if the error is still there
                self._ahead = read_columns(self._client, self.meta, layout="jagged")

    def _stop_renewing(self) -> None:
        """Ends the thread that renews the lease, if there is one."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> ClaimedBatch:
        self._start_renewing()
        return self

    def _start_renewing(self) -> None:
        self._done.clear()
        self._thread = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_renewing()
        if error is not None:
            with noted_on(error, "the rows could not be given back"):  # then they go back when the lease ends
                self._client.nack(self.meta)
            return
        self._client.ack(self.meta)
        if self._clear:
            self._client.clear_samples(self.meta.sample_ids, self.meta.partition_id)

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s * RENEWED_AFTER):
            asked_at = time.monotonic()
            try:
                self._client.renew(self.meta, self._lease_s)
            except LeaseExpiredError as error:
                self._lost = error
                return
            except Exception as error:  # the next renewal may succeed; if not, `check` and the ack raise
                self._broken = error
            else:
                self._renewed_at, self._broken = asked_at, None


@dataclass
class _Turn:
    """Whether the trainer waits for a claim that was made ahead, and whether it still wants any."""

    asked_at: float | None = None
    over: threading.Event = field(default_factory=threading.Event)


class StreamingConsumer:
    """Claims batches as they become ready, until the end of the partition.

    Each row is trained on once: it is acked after its step, and an acked row is never handed out again. If a consumer
    is killed, its rows are handed out again when its lease ends. If it is killed between its ack and its clear, the
    rows of one batch stay in the store: nobody gets them, but they take up room until the end of the partition, when
    they are cleared.

    Example::

        consumer = StreamingConsumer(client, "replay", "train", DP_TRAIN_FIELDS, 64, lease_s=120, max_staleness=2)
        for batch in consumer:
            with batch:
                train_on(batch.read())
                batch.check()
                optimizer.step()
            consumer.weight_version += 1

    Args:
        client: A client whose backend has claims and leases.
        partition_id: A registered partition.
        task_name: One of its tasks.
        fields: The columns that a row must have.
        batch_size: Rows at a time; a multiple of the group size where the partition has one.
        lease_s: Lease time in seconds. The lease is renewed while its consumer lives.
        max_staleness: Only claim rows whose tag ``weight_version`` is at most this far behind `weight_version`, and
            drop the others (needs tag filters). A group is as old as its oldest row: it is claimed or dropped as a
            whole. Rows without the tag are never claimed. None: no limit.
        weight_version: The trainer's version at the start.
        clear: Clear rows after the ack, and rows that are too stale. Pass False if other tasks read them.
        timeout_s: How long to wait for a batch, in seconds. None: as for `dataplane_core.stream`.
        read_ahead: So many batches are claimed, and their ``fields`` read, while the trainer works on another; their
            leases are renewed meanwhile. 0: none. When the iteration ends, also by an error or a ``break``, those that
            were not yielded are given back.

    Attributes:
        weight_version: The trainer's version; the trainer sets it.
        num_stale: Rows dropped as too stale so far.

    Raises:
        InvalidRequestError: A negative staleness or ``read_ahead``, or a lease of 0 s or less.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        batch_size: int,
        *,
        lease_s: float = 60.0,
        max_staleness: int | None = None,
        weight_version: int = 0,
        clear: bool = True,
        timeout_s: float | None = None,
        read_ahead: int = 0,
    ) -> None:
        if lease_s <= 0 or (max_staleness is not None and max_staleness < 0):
            raise InvalidRequestError(
                f"StreamingConsumer('{partition_id}', '{task_name}') refused: lease_s is {lease_s}, max_staleness is "
                f"{max_staleness}. Expected more than 0, and at least 0 or None."
            )
        self.weight_version = weight_version
        self.num_stale = 0
        self._client = client
        self._partition_id = partition_id
        self._task_name = task_name
        self._fields = list(fields)
        self._batch_size = batch_size
        self._lease_s = lease_s
        self._max_staleness = max_staleness
        self._clear = clear
        wait_s = longest_wait_s(client, timeout_s)
        self._is_endless = wait_s == math.inf
        self._timeout_s = _LOOK_S if self._is_endless else wait_s
        self._read_ahead = check_depth(f"StreamingConsumer('{partition_id}', '{task_name}')", read_ahead)

    def __iter__(self) -> Iterator[ClaimedBatch]:
        """Yields batches until this task has acked every row of the partition.

        Ends only if the partition was registered with ``num_samples``. The last batches may be smaller.

        Raises:
            ClaimTimeoutError: No batch within ``timeout_s``, or none will come, though not every row has been acked.
        """
        give_up: float | None = None
        num_alone = 0  # claims that found nothing, one after another, while nobody held rows
        while True:
            turn = _Turn()
            claims = read_ahead(self._claims(turn), self._read_ahead, _give_back)
            try:
                for claim in claims:
                    self.drop_stale()
                    turn.asked_at = time.monotonic()
                    batch = claim()
                    turn.asked_at = None
                    if batch is None:
                        if self._is_over():
                            return
                        # the other rows are on lease to other consumers; a dead one's come back when its lease ends
                        give_up = time.monotonic() + self._timeout_s if give_up is None else give_up
                        if time.monotonic() > give_up:
                            num_alone = 0 if self._is_endless and self._others_hold() else num_alone + 1
                            # those ahead were made before the last rows came back
                            if not self._is_endless or num_alone > self._read_ahead + 1:
                                raise self._nothing_comes_back()
                        time.sleep(_END_POLL_S)
                    elif not self._read_ahead or self._is_current(batch):
                        give_up, num_alone = None, 0
                        batch._stop_renewing()
                        yield batch
                    else:  # begin anew, so that no row is handed out that would not have been claimed only now
                        batch._give_back()
                        break
            finally:
                turn.over.set()
                claims.close()

    def drop_stale(self) -> int:
        """Acks the rows that are too stale, and clears them unless ``clear`` is False. Returns their number.

        It claims them first, so no row is taken from a consumer that trains on it.
        """
        dropped = 0
        while self._max_staleness is not None:
            stale = self._client.claim_meta(
                self._partition_id,
                self._task_name,
                self._fields,
                self._batch_size,
                blocking=False,
                lease_s=self._lease_s,
                tag_filter={WEIGHT_VERSION_TAG: ("any <", self._oldest())},
            )
            if not stale.size:
                break
            self._client.ack(stale)
            if self._clear:
                self._client.clear_samples(stale.sample_ids, self._partition_id)
            dropped += stale.size
        self.num_stale += dropped
        return dropped

    # --- inside -------------------------------------------------------------------------------------------------------

    def _oldest(self) -> int:
        assert self._max_staleness is not None
        return self.weight_version - self._max_staleness

    def _claims(self, turn: _Turn) -> Iterator[Callable[[], ClaimedBatch | None]]:
        """Claims without end; each returns None if no row was left to hand out."""
        return itertools.repeat(functools.partial(self._claim_ahead, turn) if self._read_ahead else self._claim_batch)

    def _claim_batch(self) -> ClaimedBatch | None:
        while True:
            try:
                meta = self._claim(self._timeout_s)
                break
            except ClaimTimeoutError:
                if self._waits_in_vain():
                    raise
        return ClaimedBatch(self._client, meta, self._lease_s, clear=self._clear) if meta.size else None

    def _claim_ahead(self, turn: _Turn) -> ClaimedBatch | None:
        """Runs in the thread that reads ahead. The time to wait for a batch begins when the trainer asks for it."""
        looked_at = -math.inf
        while not turn.over.is_set():
            try:
                meta = self._claim(_AHEAD_CLAIM_S)
            except ClaimTimeoutError as error:
                asked_at = turn.asked_at
                if asked_at is None or time.monotonic() - max(asked_at, looked_at) < self._timeout_s:
                    continue
                looked_at = time.monotonic()
                if not self._waits_in_vain():
                    continue
                raise ClaimTimeoutError(
                    f"StreamingConsumer('{self._partition_id}', '{self._task_name}'): no batch within "
                    f"{self._timeout_s:g} s. The newest claim: {error.message}",
                    num_ready=error.num_ready,
                    shortfall=error.shortfall,
                ) from error
            if not meta.size:
                return None
            batch = ClaimedBatch(self._client, meta, self._lease_s, clear=self._clear)
            batch._read_ahead(not turn.over.is_set())
            return batch
        return None

    def _is_current(self, batch: ClaimedBatch) -> bool:
        """Whether a batch that was claimed ahead is still on lease, and none of its rows has become too stale."""
        try:
            batch.check()
        except LeaseExpiredError:
            return False
        return self._max_staleness is None or all(
            row[WEIGHT_VERSION_TAG] >= self._oldest() for row in batch.meta.tags or []
        )

    def _claim(self, timeout_s: float) -> KVBatchMeta:
        fresh: TagFilter | None = None
        if self._max_staleness is not None:
            fresh = {WEIGHT_VERSION_TAG: (">=", self._oldest())}
        return self._client.claim_meta(
            self._partition_id,
            self._task_name,
            self._fields,
            self._batch_size,
            timeout_s=timeout_s,
            lease_s=self._lease_s,
            tag_filter=fresh,
        )

    def _waits_in_vain(self) -> bool:
        """Whether a wait of ``_timeout_s`` was the last one. If not, drops what came meanwhile and is too stale."""
        if not self._is_endless:
            return True
        self.drop_stale()  # so that a store that is full of it takes other rows
        with contextlib.suppress(DataPlaneError):  # the next claim says what is wrong
            return any(each.is_over for each in self._client.why(self._partition_id, self._task_name))
        return False

    def _others_hold(self) -> bool:
        return self._client.describe(self._partition_id, count_rows=False).tasks[self._task_name].num_leased > 0

    def _nothing_comes_back(self) -> ClaimTimeoutError:
        listed = self._client.list_samples(self._partition_id)
        tags = listed.tags or [{}] * listed.size
        text = (
            f"StreamingConsumer('{self._partition_id}', '{self._task_name}'): of the {listed.size} rows held, such as "
            f"{preview(listed.sample_ids)}, some are not acked, and none could be claimed within {self._timeout_s:g} s."
        )
        untagged = [
            each for each, row in zip(listed.sample_ids, tags, strict=True) if row.get(WEIGHT_VERSION_TAG) is None
        ]
        if self._max_staleness is not None and untagged:
            text += f" Without the tag '{WEIGHT_VERSION_TAG}', so never given under max_staleness: {preview(untagged)}."
        return ClaimTimeoutError(text, hint="Other rows may be on lease to other consumers.")

    def _is_over(self) -> bool:
        """Whether this task has acked all rows. If so, clears rows that a killed consumer acked but did not clear."""
        held = self._client.list_samples(self._partition_id).sample_ids
        if held and not self._client.check_consumption_status(self._partition_id, [self._task_name]):
            return False
        if held and self._clear:
            self._client.clear_samples(held, self._partition_id)
        return True


def _give_back(batch: ClaimedBatch | None) -> None:
    if batch is not None:
        batch._give_back()
