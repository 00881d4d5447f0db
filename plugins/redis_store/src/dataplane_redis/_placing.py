"""Where payload lies. On one server, with the ledger. In a cluster, rows are spread over buckets.

A bucket is a hash tag. The slots of the buckets are spread evenly over all slots, so each node serves as large a share
of the buckets as of the slots. Neighbouring buckets lie far apart, usually on different nodes.

A write says where its rows are, in its id, so the ledger's rows need nothing else:

    byte 0        the bucket of its first group of rows; the next group lies in the next bucket
    byte 1        how many bits of a row's position count within a group: a group has ``1 << bits`` rows
    bytes 2, 3    the number of its groups. 0: its rows lie with the ledger
    bytes 4 to 15 random bits
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
from collections.abc import Iterator
from typing import Final

from redis.crc import key_slot

__all__ = ["NUM_BUCKETS", "NUM_SLOTS", "Placing", "base_of"]

#: Slots of a cluster, and buckets of a store in one.
NUM_SLOTS: Final = 16384
NUM_BUCKETS: Final = 256
#: A group of rows has about this size, or is one row.
_GROUP_BYTES: Final = 128 * 1024
#: A put of at most so many bytes per row lies with the ledger, whose own entry of a sample is larger.
_SMALL_ROW_BYTES: Final = 64
_HEAD: Final = struct.Struct("<BBH")
_RANDOM_BYTES: Final = 12


def base_of(namespace: str) -> bytes:
    """The prefix of the ledger's keys."""
    return b"dp:{%s}" % namespace.encode()


class Placing:
    """The keys of the rows of a store.

    Args:
        namespace: The namespace.
        num_buckets: How many buckets; 1: all rows lie with the ledger.

    Attributes:
        num_buckets: How many buckets.
        is_spread: Whether rows lie in slots other than the ledger's.
    """

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
        """The id of a write whose rows lie with the ledger: random bits, so that it is unique even if the server loses
        its data."""
        if not self.is_spread:
            return os.urandom(16)
        return _HEAD.pack(0, 0, 0) + os.urandom(_RANDOM_BYTES)

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
    width = NUM_SLOTS // count
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
