"""The index of a row: TransferQueue numbers rows, a dataplane store names them.

- A row with a key has an index made from partition and key (a hash). Every process computes the same one, also after a
  restart, and asks nobody. It is at least ``2**62``.
- A row without a key has a number that was taken from the store: 0, 1, 2, ... Its sample id is made from the number.

Numbers are taken in blocks. A block is a row of a hidden partition, and taking it is a claim. So no number is given to
two processes, and none is given twice. New blocks follow the highest one, so a gap is never filled.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, UnknownPartitionError, preview

#: Partitions whose names begin with it are ours and are not listed.
HIDDEN_PARTITION: Final = "~tq:"
_NUMBERED: Final = "~index:"
#: Indexes of rows with keys begin here.
FIRST_OF_KEYS: Final = 1 << 62
_BLOCKS: Final = f"{HIDDEN_PARTITION}blocks"
_TASK: Final = "take"
#: Numbers per block.
_BLOCK: Final = 1024
#: More blocks than there are.
_ALL: Final = 2**31 - 1
#: Blocks that are added when none is left.
_MORE: Final = 64


def id_of_number(number: int) -> str:
    """The sample id of a row without a key."""
    return f"{_NUMBERED}{number}"


def number_of(sample_id: str) -> int | None:
    """The number of a row without a key, or None if the sample has a key."""
    return int(sample_id.removeprefix(_NUMBERED)) if sample_id.startswith(_NUMBERED) else None


def check_keys(keys: Iterable[str]) -> None:
    """Refuses keys that would be taken for ids of rows without keys."""
    wrong = [key for key in keys if str(key).startswith(_NUMBERED)]
    if wrong:
        raise InvalidRequestError(
            f"keys that begin with '{_NUMBERED}' are not allowed: {preview(wrong)}. Expected others: rows without keys "
            "are stored under such names."
        )


def is_number(index: int) -> bool:
    """Whether an index is that of a row without a key."""
    return index < FIRST_OF_KEYS


def index_of(partition_id: str, sample_id: str) -> int:
    """The index of a row."""
    number = number_of(sample_id)
    if number is not None:
        return number
    text = f"{len(partition_id)}:{partition_id}{sample_id}".encode("utf-8", "surrogatepass")
    return FIRST_OF_KEYS | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


class Numbers:
    """Takes numbers for rows without keys. Several threads may use it."""

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._left = range(0)

    def take(self, count: int) -> list[int]:
        """The next ``count`` numbers, one after the other without a gap."""
        with self._lock:
            while len(self._left) < count:
                self._left = self._joined(self._take_blocks(-(-(count - len(self._left)) // _BLOCK)))
            taken, self._left = self._left[:count], self._left[count:]
        return list(taken)

    def num_blocks(self) -> int:
        """How many blocks there are up to the highest one that the store has, taken or not."""
        try:
            return max(map(int, self._client.list_sample_ids(_BLOCKS)), default=-1) + 1
        except UnknownPartitionError:
            return 0

    def skip(self, num_blocks: int) -> None:
        """Gives out no number of the first blocks any more, nor of those that are left of the last one.

        A load brings back blocks that were taken after the save; other processes may still use their numbers.
        """
        with self._lock:
            self._left = range(0)
            if self.num_blocks() < num_blocks:
                self._add_blocks(range(num_blocks - 1, num_blocks))
            if num_blocks:
                free = self._client.claim_meta(_BLOCKS, _TASK, [], _ALL, blocking=False).sample_ids
                self._left = self._joined(block for block in map(int, free) if block >= num_blocks)

    def _joined(self, blocks: Iterable[int]) -> range:
        """What is left, followed by the blocks; from the last gap on if there are gaps."""
        left = self._left
        for block in sorted(blocks):
            numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
            left = range(left.start, numbers.stop) if len(left) and left.stop == numbers.start else numbers
        return left

    def _take_blocks(self, count: int) -> list[int]:
        blocks: list[int] = []
        while len(blocks) < count:
            wanted = count - len(blocks)
            try:
                claimed = self._client.claim_meta(_BLOCKS, _TASK, [], wanted, blocking=False).sample_ids
            except KeyError:
                claimed = []
            blocks.extend(map(int, claimed))
            if len(claimed) < wanted:
                known = self.num_blocks()
                self._add_blocks(range(known, known + _MORE))
        return blocks

    def _add_blocks(self, blocks: range) -> None:
        self._client.register_partition(_BLOCKS, [], None, [_TASK], if_exists="keep")
        # a block that another process added stays taken
        self._client.put_samples(list(map(str, blocks)), _BLOCKS, tags=[{}] * len(blocks))
