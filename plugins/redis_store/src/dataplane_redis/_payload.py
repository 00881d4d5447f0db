"""Rows: cut into parts and read, on one server or on the nodes of a cluster. In a cluster also written and deleted.

There, rows are written with an expiry, which is removed before the commit, once all of them are there. So the rows of a
client that died before expire by themselves; those of one that died afterwards are known to the ledger as a put that
was not committed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dataplane_core.backends import Bundle, framed_columns
from dataplane_redis._link import Read
from dataplane_redis._nodes import Job, LostNodeError, Nodes
from dataplane_redis._protocol import pack
from dataplane_redis._rows import PACKED_REPLIES, pack_rows
from dataplane_redis._session import Session

__all__ = ["Payload"]

#: Rows are sent in commands of at most about this size, and so many rows.
_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1000
#: Size of the replies that rows are read in: the server copies one while the client receives another.
_READ_BYTES: Final = 512 * 1024
#: An entry of base:gone that is a write, see common.lua. Longer ones end with the position of a row.
_WRITE_BYTES: Final = 16


class Payload:
    """Rows, for one client."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _nodes(self) -> Nodes:
        nodes = self._session.nodes
        assert nodes is not None
        return nodes

    # --- writes -------------------------------------------------------------------------------------------------------

    def write(self, what: str, write: bytes, bundles: Sequence[Bundle], deadline: float, keep_s: float) -> None:
        """Writes all rows of a put. They then stay until they are deleted.

        Args:
            what: The operation; messages start with it.
            write: The write.
            bundles: The rows.
            deadline: On `time.monotonic`'s clock, in seconds.
            keep_s: Seconds after the deadline when the ledger gives the put up. The nodes do, too.

        Raises:
            LostNodeError: A node was lost, so some rows may be. They must be written under another id: what is still
                on its way to the lost node would give the rows an expiry again.
            OperationTimeoutError: Too few replicas of a node have the rows.
            DataPlaneError: As `Nodes.exchange`.
        """
        nodes, session = self._nodes(), self._session
        jobs, counts = [], Counter[int]()
        for bucket, first, frames in self.chunks(write, bundles):
            key = session.placing.key_of(write, bucket)
            counts[bucket] += len(frames[0])
            packed = pack_rows(key, first, frames, max(0.0, deadline - time.monotonic()) + keep_s)
            jobs.append(Job(session.placing.slot_of(bucket), packed, PACKED_REPLIES))
        nodes.exchange(what, deadline, jobs, again=False)
        self._check(what, jobs)

        jobs = []
        for bucket in counts:
            key = session.placing.key_of(write, bucket)
            packed = [
                *pack((b"MULTI",)),
                *pack(
                    (b"PEXPIRE", key, b"%d" % int(1000 * keep_s))
                ),  # if it runs again, it is still a change: see WAIT
                *pack((b"PERSIST", key)),
                *pack((b"HLEN", key)),
                *pack((b"EXEC",)),
            ]
            jobs.append(Job(session.placing.slot_of(bucket), packed, 5))
        told = session.acknowledgements
        if told is None or told.wait(deadline) is None:
            nodes.exchange(what, deadline, jobs, again=True)
        else:
            waits: list[Any] = []
            nodes.exchange(what, deadline, jobs, again=True, last=lambda: told.wait(deadline) or [], last_replies=waits)
            told.check_wait(what, session.connected()[0], waits)
        self._check(what, jobs)
        for count, job in zip(counts.values(), jobs, strict=True):
            if job.replies[-1] != [1, 1, count]:
                raise LostNodeError(
                    f"{what} failed: a node of {session.connected()[0].label} no longer holds all rows of the put. "
                    "Nothing was written."
                )

    def _check(self, what: str, jobs: Sequence[Job]) -> None:
        for job in jobs:
            refusal = job.refusal()
            if refusal is not None:
                self._session.connected()[0].raise_error(what, refusal)

    def chunks(self, write: bytes, bundles: Sequence[Bundle]) -> Iterator[tuple[int, int, list[Any]]]:
        """The rows of a put in parts: bucket, position of the first row, and the frames by column."""
        placing = self._session.placing
        first = 0  # row of the bundle
        for bundle in bundles:
            frames, sizes = framed_columns(bundle.columns), bundle.row_bytes
            start = 0
            while start < len(sizes):
                group = placing.group_rows(write)
                stop = min(len(sizes), start + _CHUNK_ROWS, start + group - (first + start) % group)
                end, size = start, 0
                while end < stop and (end == start or size + sizes[end] <= _CHUNK_BYTES):
                    size += sizes[end]
                    end += 1
                bucket = placing.bucket_of(write, first + start)
                yield bucket, first + start, [column[start:end] for column in frames]
                start = end
            first += len(sizes)

    # --- reads --------------------------------------------------------------------------------------------------------

    def fetch(
        self, what: str, deadline: float, rows: Sequence[tuple[bytes, int, int]]
    ) -> tuple[list[tuple[bytes, int]], list[Any]]:
        """Reads rows, in a cluster from all nodes at the same time.

        Args:
            what: The operation; messages start with it.
            deadline: On `time.monotonic`'s clock, in seconds.
            rows: Write, position and size in bytes.

        Returns:
            The places (write, position) in the order in which the rows came, and the rows; None for one that is gone.
        """
        placing = self._session.placing
        by_key: dict[tuple[bytes, int], list[tuple[int, int]]] = defaultdict(list)
        for write, position, size in rows:
            by_key[write, placing.bucket_of(write, position)].append((position, size))
        reads: list[tuple[int, Read]] = []
        places: list[tuple[bytes, int]] = []
        for (write, bucket), some in by_key.items():
            slot, head = placing.slot_of(bucket), [b"HMGET", placing.key_of(write, bucket)]
            words, size_bytes = list(head), 0
            for position, size in some:
                if size_bytes and size_bytes + size > _READ_BYTES:
                    reads.append((slot, Read(b"".join(pack(words)), size_bytes)))
                    words, size_bytes = list(head), 0
                words.append(b"%d" % position)
                size_bytes += size
                places.append((write, position))
            reads.append((slot, Read(b"".join(pack(words)), size_bytes)))
        if placing.is_spread:
            parts = self._nodes().fetch(what, deadline, reads)
        else:
            parts = self._session.connected()[0].fetch(what, deadline, [read for _, read in reads])
        return places, [row for part in parts for row in part]

    def refresh(self, deadline: float) -> None:
        """Asks again who serves which slot: a node that was replaced may not know it yet."""
        self._nodes().refresh(deadline)

    # --- deletions ----------------------------------------------------------------------------------------------------

    def delete(self, entries: Sequence[bytes], deadline: float) -> list[bytes]:
        """Deletes what is no longer referred to, from the nodes that can be reached.

        Args:
            entries: Of base:gone, see common.lua.
            deadline: On `time.monotonic`'s clock, in seconds.

        Returns:
            The entries that are deleted.
        """
        placing = self._session.placing
        jobs: list[Job] = []
        jobs_of: dict[bytes, list[Job]] = {}
        rows: dict[tuple[bytes, int], list[bytes]] = defaultdict(list)
        for entry in entries:
            write = entry[:_WRITE_BYTES]
            if len(entry) > _WRITE_BYTES:
                rows[write, placing.bucket_of(write, int.from_bytes(entry[_WRITE_BYTES:], "little"))].append(entry)
                continue
            jobs_of[entry] = [
                Job(placing.slot_of(bucket), pack((b"UNLINK", placing.key_of(write, bucket))))
                for bucket in placing.buckets_of(write)
            ]
            jobs += jobs_of[entry]
        for (write, bucket), some in rows.items():
            positions = [b"%d" % int.from_bytes(entry[_WRITE_BYTES:], "little") for entry in some]
            job = Job(placing.slot_of(bucket), pack((b"HDEL", placing.key_of(write, bucket), *positions)))
            jobs.append(job)
            jobs_of.update({entry: [job] for entry in some})
        self._nodes().attempt(deadline, jobs)
        return [entry for entry, mine in jobs_of.items() if all(job.refusal() is None for job in mine)]

    def find(self, what: str, deadline: float) -> Iterator[set[bytes]]:
        """The writes that nodes hold, node by node."""
        nodes, placing = self._nodes(), self._session.placing
        for address in nodes.primaries():
            keys = nodes.scan(what, deadline, address, placing.pattern())
            yield {write for write in map(placing.write_of, keys) if write is not None}
