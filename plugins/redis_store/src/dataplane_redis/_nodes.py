"""The nodes of a cluster: commands go to the nodes that serve their slots, to several nodes at the same time.

A node that refuses a command because its slot has moved, or is moving, names another node, and the command goes there.
While no node serves a slot (its primary was killed and no replica is promoted yet), commands wait until the deadline.

redis-py makes the connections and parses replies and redirections. Its cluster client is not used: it has no deadline,
sends to one node after the other, and repeats a command that may have run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

import redis
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_redis._link import Address, Idle, Link, Read, Stream, fetch_arrays
from dataplane_redis._protocol import (
    Parts,
    is_moving,
    is_temporary_refusal,
    is_untrusted,
    left_s,
    pack,
    redirection_of,
)

#: Seconds between two tries while a node cannot be reached or refuses, and the most that connecting may take.
_POLL_S: Final = 0.05
_CONNECT_S: Final = 1.0
#: Redirections that a call follows at once. Later ones wait: the nodes do not agree yet who serves the slot.
_AT_ONCE: Final = 8
#: Parts of commands are joined until they reach this size.
_JOIN_BYTES: Final = 256 * 1024

#: The jobs or reads to be sent, by number: each with the node that it must ask once, or None.
_Asked: TypeAlias = dict[int, Address | None]


class LostNodeError(BackendUnavailableError):
    """The connection to a node was lost, so it is unknown whether it did what it was sent."""


@dataclass(slots=True)
class Job:
    """Commands for one slot, in parts. Keeps the replies: values and refusals, or the error that came instead."""

    slot: int
    packed: Parts
    num_replies: int = 1
    replies: list[Any] = field(default_factory=list)

    def refusal(self) -> Exception | None:
        """The first refusal."""
        return next((each for each in self.replies if isinstance(each, Exception)), None)


@dataclass(slots=True)
class _Try:
    """What is left of a call after a round."""

    asked: _Asked = field(default_factory=dict)  # what must be sent again
    error: Exception | None = None  # why, if it was no redirection
    was_sent: bool = False  # whether a connection was lost after something was sent on it


class Nodes:
    """The nodes of a cluster, with idle connections to them. The link to the ledger's node makes these. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._owners: dict[int, Address] = {}  # by slot
        self._known: list[Address] = []
        self._idle = Idle()

    # --- who serves a slot --------------------------------------------------------------------------------------------

    def learn(self, reply: Sequence[Any]) -> None:
        """Takes the reply to CLUSTER SLOTS."""
        owners: dict[int, Address] = {}
        known: list[Address] = []
        for first, last, *nodes in reply:
            addresses = [self._link.address_of(*node[:2]) for node in nodes]
            owners.update(dict.fromkeys(range(first, last + 1), addresses[0]))
            known += addresses
        self._owners = owners
        self._known = list(dict.fromkeys([*self.primaries(), *known, *self._known]))
        self._idle.drop(self.primaries())
        self._link.know(self._known)

    def refresh(self, deadline: float) -> None:
        """Asks the nodes, one after the other until one answers, who serves which slot."""
        for address in list(self._known):
            if time.monotonic() >= deadline:
                return
            try:
                reply = self._ask(address, min(deadline, time.monotonic() + _CONNECT_S), b"CLUSTER", b"SLOTS")
            except (RedisError, OSError):
                continue
            if reply:
                self.learn(reply)
                return

    def primaries(self) -> list[Address]:
        """The nodes that serve slots."""
        return list(dict.fromkeys(list(self._owners.values())))

    # --- connections --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes all connections. One in use is closed when its call ends."""
        self._idle.close()

    def _open(self, address: Address, deadline: float) -> Stream:
        """Raises what redis-py raises."""
        connection = self._idle.take(address)
        if connection is None:
            until = min(deadline, time.monotonic() + _CONNECT_S)
            connection = self._link.connect_to(address, left_s(until))
        return Stream(connection, deadline, _JOIN_BYTES)

    def _close(self, stream: Stream, complete: bool) -> None:
        self._idle.give(stream.connection, complete and stream.error is None)

    def _ask(self, address: Address, deadline: float, *words: bytes) -> Any:
        """What one node replies. Raises what redis-py raises, and a refusal."""
        stream, complete = self._open(address, deadline), False
        try:
            stream.send(pack(words))
            stream.flush()
            reply, complete = stream.read(), True
        finally:
            self._close(stream, complete)
        if isinstance(reply, Exception):
            raise reply
        return reply

    # --- calls --------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        what: str,
        deadline: float,
        jobs: Sequence[Job],
        *,
        again: bool,
        last: Callable[[], Parts] | None = None,
    ) -> list[Any]:
        """Sends each job to the node that serves its slot: first all of them, then it reads the replies, which the jobs
        keep. A refusal that is no reason to wait is one of them.

        With ``again``, a job is sent again if the connection was lost, and may run twice. ``last`` makes a command that
        is sent to each node after its jobs; their replies are returned.

        Raises:
            LostNodeError: A connection was lost, and the jobs may not run twice.
            BackendUnavailableError: No node served a slot until the deadline, or its certificate is refused.
            BackendError: A node's reply cannot be read.
            OperationTimeoutError: A node did not answer in time.
        """
        last_replies: list[Any] = []
        asked: _Asked = dict.fromkeys(range(len(jobs)))
        num_rounds = 0
        while asked:
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self._link.label}.")
            left = self._round(jobs, asked, deadline, last, last_replies)
            asked = left.asked
            num_rounds += 1
            if left.error is not None and (is_untrusted(left.error) or isinstance(left.error, InvalidResponse)):
                self._link.raise_error(what, left.error)  # it would be the same again
            if left.was_sent and not again:
                if _is_late(left.error):
                    self._raise_late(what, left.error)
                raise LostNodeError(
                    f"{what} failed: a node of {self._link.label} cannot be reached: {left.error}"
                ) from left.error
            if asked and (left.error is not None or num_rounds > _AT_ONCE):
                if time.monotonic() + _POLL_S >= deadline:
                    self._raise_late(what, left.error)
                time.sleep(_POLL_S)
                self.refresh(deadline)
        return last_replies

    def attempt(self, deadline: float, jobs: Sequence[Job]) -> None:
        """As `exchange`, but does not wait for nodes that cannot be reached: their jobs have the error as reply."""
        asked: _Asked = dict.fromkeys(range(len(jobs)))
        for _ in range(_AT_ONCE):
            left = self._round(jobs, asked, deadline)
            asked = left.asked
            if not asked or left.error is not None:
                break
        for index in asked:
            jobs[index].replies = [left.error or BackendUnavailableError("the slot is moving")]

    def fetch(self, what: str, deadline: float, reads: Sequence[tuple[int, Read]]) -> list[Any]:
        """The arrays that reads of slots reply with, see `fetch_arrays`. What has moved or was lost is read again by
        `exchange`. Raises as that, or if a read is refused."""
        found: list[Any] = [None] * len(reads)
        left, complete = _Try(), False
        streams, mine = self._streams([slot for slot, _ in reads], dict.fromkeys(range(len(reads))), deadline, left)
        try:
            indices = [mine[address] for address in streams]
            of_stream = [[reads[index][1] for index in some] for some in indices]
            for number, each, array in fetch_arrays(list(streams.values()), of_stream):
                index = indices[number][each]
                found[index] = array
                if isinstance(array, ResponseError):
                    self._sort(index, reads[index][0], [array], left)
                elif isinstance(array, Exception):
                    left.asked[index] = None
            complete = True
        finally:
            for stream in streams.values():
                self._close(stream, complete)
        again = {index: Job(reads[index][0], [reads[index][1].packed]) for index in left.asked}
        self.exchange(what, deadline, list(again.values()), again=True)
        for index, job in again.items():
            (found[index],) = job.replies
        for each in found:
            if isinstance(each, Exception):
                self._link.raise_error(what, each)
        return found

    def scan(self, what: str, deadline: float, address: Address, pattern: bytes) -> list[bytes]:
        """The keys of one node that match a pattern. A key may come twice."""
        keys: list[bytes] = []
        cursor = b"0"
        while True:
            try:
                cursor, some = self._ask(address, deadline, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            except (RedisError, OSError) as error:
                self._link.raise_error(what, error)
            keys += some
            if cursor == b"0":
                return keys

    def _raise_late(self, what: str, error: Exception | None) -> NoReturn:
        label = self._link.label
        if _is_late(error):
            raise OperationTimeoutError(f"{what} timed out: a node of {label} did not answer in time.") from error
        raise BackendUnavailableError(
            f"{what} failed: a part of {label}'s slots had no node that serves them until the deadline: "
            f"{error or 'they are moving'}.",
            hint="Call again. If it lasts, see what CLUSTER INFO and CLUSTER NODES say.",
        ) from error

    # --- one round ----------------------------------------------------------------------------------------------------

    def _streams(
        self, slots: Sequence[int], asked: _Asked, deadline: float, left: _Try
    ) -> tuple[dict[Address, Stream], dict[Address, list[int]]]:
        """Connections to the nodes of the jobs, and the jobs of each. A node that cannot be reached has none."""
        mine: dict[Address, list[int]] = defaultdict(list)
        for index, address in asked.items():
            mine[address or self._owners.get(slots[index], self._link.address)].append(index)
        streams: dict[Address, Stream] = {}
        for address, indices in mine.items():
            try:
                streams[address] = self._open(address, deadline)
            except (RedisError, OSError) as error:
                left.error = error
                left.asked.update(dict.fromkeys(indices))
        return streams, mine

    def _round(
        self,
        jobs: Sequence[Job],
        asked: _Asked,
        deadline: float,
        last: Callable[[], Parts] | None = None,
        last_replies: list[Any] | None = None,
    ) -> _Try:
        """Sends jobs, reads their replies, and says which must be sent again."""
        left = _Try()
        streams, mine = self._streams([job.slot for job in jobs], asked, deadline, left)
        done: set[Address] = set()
        try:
            node_of = {index: address for address, indices in mine.items() for index in indices}
            for index in asked:  # in their order, in which neighbours go to different nodes
                stream = streams.get(node_of[index])
                if stream is not None:
                    if asked[index] is not None:
                        stream.send(pack((b"ASKING",)))
                    stream.send(jobs[index].packed)
            for stream in streams.values():
                if last is not None:
                    stream.send(last())
                stream.flush()
            for address, stream in streams.items():
                try:
                    for index in mine[address]:
                        if asked[index] is not None:
                            stream.read()
                        jobs[index].replies = [stream.read() for _ in range(jobs[index].num_replies)]
                    if last is not None and last_replies is not None:
                        last_replies.append(stream.read())
                    done.add(address)
                except (RedisError, OSError) as error:
                    left.error, left.was_sent = error, True
                    left.asked.update(dict.fromkeys(mine[address]))
                    continue
                for index in mine[address]:
                    self._sort(index, jobs[index].slot, jobs[index].replies, left)
        finally:
            for address, stream in streams.items():
                self._close(stream, address in done)
        return left

    def _sort(self, index: int, slot: int, replies: Sequence[Any], left: _Try) -> None:
        """Notes whether, and where, a job must be sent again."""
        for reply in replies:
            if not isinstance(reply, Exception):
                continue
            named = redirection_of(reply)
            if named is not None:
                kind, host, port = named
                address = self._link.address_of(host, port)
                if kind == "ASK":
                    left.asked[index] = address
                    return
                self._owners[slot] = address
                self._known = list(dict.fromkeys([*self._known, address]))
                left.asked[index] = None
                return
            if is_moving(reply) or is_temporary_refusal(reply):
                left.asked[index] = None
                left.error = reply
                return


def _is_late(error: Exception | None) -> bool:
    return isinstance(error, (redis.TimeoutError, TimeoutError))
