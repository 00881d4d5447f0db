"""Payload: where rows lie, how they are written, read and deleted, on one server or on the nodes of a cluster.

On one server, rows lie with the ledger, and the put writes them there. In a cluster, rows are spread over buckets. A
bucket is a hash tag. The slots of the buckets are spread evenly over all slots, so each node serves as large a share of
the buckets as of the slots. Neighbouring buckets lie far apart, usually on different nodes.

A write says where its rows are, in its id, so the ledger's rows need nothing else:

    byte 0        the bucket of its first group of rows; the next group lies in the next bucket
    byte 1        how many bits of a row's position count within a group: a group has ``1 << bits`` rows
    bytes 2, 3    the number of its groups. 0: its rows lie with the ledger
    bytes 4 to 15 random bits

In a cluster, rows are written with an expiry, which is removed before the commit, once all of them are there. So the
rows of a client that died before expire by themselves; those of one that died afterwards are known to the ledger as a
put that was not committed.

On one server, dropped registrations leave payload, which is deleted in parts. In a cluster, scripts cannot reach it, so
the ledger lists what clients must delete: rows that were overwritten or cleared, and rows of puts that were not
committed. The client whose call listed something deletes it. If it dies before, another client does: each looks
after its puts and clears, and when it announces itself. After a failover the ledger may lack puts that had been
committed. A client that meets another history of the ledger's server then compares all payload with the ledger. One
client per history does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from redis.crc import key_slot

from dataplane_core.errors import DataPlaneError
from dataplane_redis._link import Read
from dataplane_redis._nodes import Job, LostNodeError, Nodes
from dataplane_redis._protocol import PACKED_REPLIES, pack, pack_rows
from dataplane_redis._scripts import text_of
from dataplane_redis._session import Session
from dataplane_redis.config import base_of

#: The frames of a write by column, and the sizes of its rows.
Table: TypeAlias = tuple[list[list[Any]], Sequence[int]]

_log = logging.getLogger("dataplane_redis")

#: Slots of a cluster, and buckets of a store in one.
_NUM_SLOTS: Final = 16384
NUM_BUCKETS: Final = 256
#: A group of rows has about this size, or is one row.
_GROUP_BYTES: Final = 128 * 1024
#: A put of at most so many bytes per row lies with the ledger, whose own entry of a sample is larger.
_SMALL_ROW_BYTES: Final = 64
_HEAD: Final = struct.Struct("<BBH")
_RANDOM_BYTES: Final = 12
#: Rows are sent in commands of at most about this size, and so many rows.
_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1000
#: Size of the replies that rows are read in: the server copies one while the client receives another.
_READ_BYTES: Final = 512 * 1024
#: An entry of base:gone that is a write, see common.lua. Longer ones end with the position of a row.
_WRITE_BYTES: Final = 16
#: Writes of dropped registrations that one script deletes; in a cluster, entries that a client gets at a time.
_COLLECT_WRITES: Final = 10_000
_COLLECT_ENTRIES: Final = 1000
#: Seconds that deleting may take at most within another call.
_DELETE_S: Final = 5.0
#: Writes that one script looks up.
_LOOK_WRITES: Final = 500


class Placing:
    """The keys of the rows of a store with so many buckets. With one, all rows lie with the ledger."""

    def __init__(self, namespace: str, num_buckets: int) -> None:
        self._base = base_of(namespace)
        self.num_buckets = num_buckets
        self.is_spread = num_buckets > 1
        self._bases, self._slots = _buckets(namespace, num_buckets) if self.is_spread else ([], [])
        self._ledger_slot = key_slot(self._base)
        self._next = itertools.count(os.urandom(1)[0])  # of this client

    def stays(self, num_rows: int, size_bytes: int) -> bool:
        """Whether the rows of a put that fits into a script lie with the ledger."""
        return not self.is_spread or size_bytes <= _SMALL_ROW_BYTES * num_rows

    def new_write(self) -> bytes:
        """The id of a write whose rows lie with the ledger: random, so that it is unique even if the server loses its
        data."""
        return _HEAD.pack(0, 0, 0) + os.urandom(_RANDOM_BYTES) if self.is_spread else os.urandom(16)

    def new_spread_write(self, num_rows: int, size_bytes: int) -> bytes:
        """The id of a write whose rows are spread over the buckets. A client takes the buckets in turn."""
        bits = 0
        while num_rows >> bits > 1 and size_bytes << (bits + 1) <= _GROUP_BYTES * num_rows:
            bits += 1
        num_groups = min(self.num_buckets, -(-num_rows >> bits))
        first = next(self._next) % self.num_buckets
        for _ in range(num_groups - 1):
            next(self._next)
        return _HEAD.pack(first, bits, num_groups) + os.urandom(_RANDOM_BYTES)

    def group_rows(self, write: bytes) -> int:
        """How many rows, one after the other, lie in one bucket."""
        return 1 << write[1] if self.is_spread else sys.maxsize

    def bucket_of(self, write: bytes, position: int) -> int:
        """The bucket of a row. -1: it lies with the ledger."""
        if not self.is_spread:
            return -1
        first, bits, num_groups = _HEAD.unpack_from(write)
        return (first + (position >> bits)) % self.num_buckets if num_groups else -1

    def buckets_of(self, write: bytes) -> Iterator[int]:
        """The buckets of all rows of a write."""
        first, _, num_groups = _HEAD.unpack_from(write)
        return ((first + group) % self.num_buckets for group in range(num_groups))

    def key_of(self, write: bytes, bucket: int = -1) -> bytes:
        """The key of the hash that holds the rows of a write in a bucket."""
        return b"%s:w:%s" % (self._base if bucket < 0 else self._bases[bucket], write.hex().encode())

    def slot_of(self, bucket: int) -> int:
        """The slot of a bucket."""
        return self._ledger_slot if bucket < 0 else self._slots[bucket]

    def pattern(self) -> bytes:
        """Matches the keys of all rows that are spread."""
        return self._base[:-1] + b"/*}:w:*"

    @staticmethod
    def write_of(key: bytes) -> bytes | None:
        """The write of a key that `key_of` gave. None for another key."""
        try:
            write = bytes.fromhex(key.rpartition(b":")[2].decode())
        except ValueError:
            return None
        return write if len(write) == _HEAD.size + _RANDOM_BYTES else None


def _buckets(namespace: str, count: int) -> tuple[list[bytes], list[int]]:
    """The key prefixes of the buckets, and their slots.

    All slots are cut into as many windows as there are buckets. The tag of a window is the first number that falls into
    it. The windows follow one another in the order of their reversed bits: each halves the largest gap.
    """
    width = _NUM_SLOTS // count
    bits = count.bit_length() - 1
    found: dict[int, tuple[bytes, int]] = {}
    for number in itertools.count():
        base = base_of(f"{namespace}/{number}")
        slot = key_slot(base)
        found.setdefault(slot // width, (base, slot))
        if len(found) == count:
            break
    order = [int(format(each, f"0{bits}b")[::-1], 2) for each in range(count)]
    return [found[each][0] for each in order], [found[each][1] for each in order]


class Payload:
    """The rows of one client's store. Only if they are spread over them, it has the nodes of the cluster."""

    def __init__(self, session: Session, namespace: str) -> None:
        self._session = session
        self._namespace = namespace
        self._swept = ""  # the history in which payload was compared with the ledger
        self.placing = Placing(namespace, 1)
        self.nodes: Nodes | None = None

    def open(self, slots: Sequence[Any]) -> None:
        """Called when the session is connected, with the reply to CLUSTER SLOTS."""
        link, instance = self._session.connected()
        self.placing = Placing(self._namespace, instance.num_buckets)
        if self.placing.is_spread:
            self.nodes = Nodes(link)
            self.nodes.learn(slots)

    def _nodes(self) -> Nodes:
        assert self.nodes is not None
        return self.nodes

    # --- writes -------------------------------------------------------------------------------------------------------

    def write(self, what: str, write: bytes, tables: Sequence[Table], deadline: float, keep_s: float) -> None:
        """Writes all rows of a put to the nodes. They then stay until they are deleted. Raises as `Nodes.exchange`.

        The nodes give the put up so many seconds after the deadline, as the ledger does.

        Raises:
            LostNodeError: A node was lost, so some rows may be. They must be written under another id: what is still
                on its way to the lost node would give the rows an expiry again.
            OperationTimeoutError: Too few replicas of a node have the rows.
        """
        nodes, placing, label = self._nodes(), self.placing, self._session.connected()[0].label
        jobs, counts = [], Counter[int]()
        for bucket, first, frames in self.chunks(write, tables):
            key = placing.key_of(write, bucket)
            counts[bucket] += len(frames[0])
            packed = pack_rows(key, first, frames, max(0.0, deadline - time.monotonic()) + keep_s)
            jobs.append(Job(placing.slot_of(bucket), packed, PACKED_REPLIES))
        nodes.exchange(what, deadline, jobs, again=False)
        self._check(what, jobs)

        jobs = []
        for bucket in counts:
            key = placing.key_of(write, bucket)
            keep = (b"PEXPIRE", key, b"%d" % int(1000 * keep_s))  # if it runs again, it is still a change: see WAIT
            commands = ((b"MULTI",), keep, (b"PERSIST", key), (b"HLEN", key), (b"EXEC",))
            jobs.append(Job(placing.slot_of(bucket), [part for each in commands for part in pack(each)], 5))
        told = self._session.acknowledgements
        if told is None or not told.wait(deadline):
            nodes.exchange(what, deadline, jobs, again=True)
        else:
            waits = nodes.exchange(what, deadline, jobs, again=True, last=lambda: told.wait(deadline))
            told.check_wait(what, label, waits)
        self._check(what, jobs)
        for count, job in zip(counts.values(), jobs, strict=True):
            if job.replies[-1] != [1, 1, count]:
                raise LostNodeError(
                    f"{what} failed: a node of {label} no longer holds all rows of the put. Nothing was written."
                )

    def _check(self, what: str, jobs: Sequence[Job]) -> None:
        for job in jobs:
            refusal = job.refusal()
            if refusal is not None:
                self._session.connected()[0].raise_error(what, refusal)

    def chunks(self, write: bytes, tables: Sequence[Table]) -> Iterator[tuple[int, int, list[Any]]]:
        """The rows of a put in parts: bucket, position of the first row, and the frames by column."""
        placing = self.placing
        first = 0  # row of the table
        for frames, sizes in tables:
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
        """Reads rows (write, position, size in bytes), in a cluster from all nodes at the same time. Returns places
        (write, position) in the order in which rows came, and the rows; None for one that is gone."""
        placing = self.placing
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

    # --- deletions ----------------------------------------------------------------------------------------------------

    def collect(self, left: int, deadline: float) -> None:
        """If the last script said that something is left, deletes it, in parts. What fails, a later call deletes."""
        until = min(deadline, time.monotonic() + _DELETE_S)
        count = _COLLECT_ENTRIES if self.placing.is_spread else _COLLECT_WRITES
        deleted: list[bytes] = []
        with contextlib.suppress(DataPlaneError), self._session.quietly():  # the call that left it has done its work
            while left or deleted:
                _, left, given, swept = self._session.run("collect", until, "collect", limit=count, deleted=deleted)
                self._swept = text_of(swept)
                deleted = self._delete(given, until) if given else []

    def look(self, deadline: float) -> None:
        """Collects what others left, in a cluster.

        After a failover, or if the list of what to delete was lost, also looks for payload that the ledger lacks.
        """
        if not self.placing.is_spread:
            return
        self.collect(1, deadline)
        told = self._session.acknowledgements
        history = "" if told is None else told.history
        if history and history != self._swept:
            with contextlib.suppress(DataPlaneError), self._session.quietly():
                self._sweep(history, deadline)

    def _sweep(self, history: str, deadline: float) -> None:
        """Has payload deleted that the ledger does not know. If this fails, or while another client does it, the next
        call asks again."""

        def ask(action: str, writes: Sequence[bytes] = ()) -> Any:
            return self._session.run("sweep", deadline, "sweep", action=action, history=history, writes=writes)[1]

        state = ask("begin")
        if state == b"later":
            return
        if state == b"look":
            count = 0
            for writes in self._find("sweep", deadline):
                found = sorted(writes)
                for first in range(0, len(found), _LOOK_WRITES):
                    count += ask("look", found[first : first + _LOOK_WRITES])
            if count:
                _log.warning("the ledger does not know %d writes that nodes hold: they are deleted soon", count)
            ask("end")
        self._swept = history

    def _delete(self, entries: Sequence[bytes], deadline: float) -> list[bytes]:
        """Deletes entries of base:gone from the nodes that can be reached, and returns those that are deleted."""
        placing = self.placing
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

    def _find(self, what: str, deadline: float) -> Iterator[set[bytes]]:
        """The writes that nodes hold, node by node."""
        nodes = self._nodes()
        for address in nodes.primaries():
            keys = nodes.scan(what, deadline, address, self.placing.pattern())
            yield {write for write in map(self.placing.write_of, keys) if write is not None}
