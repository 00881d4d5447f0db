"""`LedgerService`: a ledger with a clock, as a host serves it. It tells waiters when to ask again, or wakes them.

`LedgerThread`: the same for the threads of the client's own process.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, cast

from dataplane_core.errors import (
    CapacityExceededError,
    ClientClosedError,
    DataPlaneError,
    Shortfall,
    UnsupportedOperationError,
)
from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.pacing import LEAST_ROOM_PAUSE_S, LONGEST_PAUSE_S, Pacer
from dataplane_core.ledger.queues import WaitingClaims
from dataplane_core.ledger.rows import Ref
from dataplane_core.spec import (
    AnnounceReply,
    Answer,
    Claim,
    ClientInfo,
    ClientList,
    Command,
    PartitionDescription,
    Question,
)

#: Seconds between two questions of the first put in the queue for room.
_FIRST_IN_QUEUE_S: Final = 0.06
#: How many puts at the head of the queue are woken, and ask more often than the others, each half as often as the one
#: before it.
_NUM_HEAD: Final = 4
#: The least pause of a claim that is woken. It asks again by itself when a lease may have ended.
_LEAST_LEASE_PAUSE_S: Final = 0.001
#: The share of a service's time that it may take to find the shortfalls of one question.
_EXPLAINING_SHARE: Final = 0.01
#: A shortfall is found again after this many seconds, even if that takes more than the share.
_STALE_AFTER_S: Final = 2.0
_MOST_EXPLAINED: Final = 256

#: What the thread of a ledger is to call, and where its result goes, or what it raises.
_Work: TypeAlias = tuple[Callable[[], Any], SimpleQueue[Any]]


@dataclass(frozen=True, slots=True)
class _Explained:
    """The shortfall of a claim, which other claims that ask the same also get until it is stale."""

    shortfall: Shortfall
    stale_at: float


class LedgerService:
    """A `Ledger` with a clock, as a host serves it. One thread calls it at a time, in which no signal handler raises.

    Args:
        capacity_bytes: As for `Ledger`.
        clock: Gives the time in seconds.
        ledger: An existing ledger to serve. ``capacity_bytes`` is then ignored.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = Ledger(capacity_bytes=capacity_bytes) if ledger is None else ledger
        self._clock = clock
        self._pacer = Pacer()  # of all who wait, for samples or for room
        self._explained: dict[tuple[Any, ...], _Explained] = {}
        self._waiting = WaitingClaims()
        self._clients = ClientRegister()
        self._room_wakes: dict[str, Callable[[], bool]] = {}  # ticket of a put that waits for room -> how to wake it

    @property
    def ledger(self) -> Ledger:
        """The ledger. A host that uses it must keep other threads out."""
        return self._ledger

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Runs a command now. All callers use this method.

        Args:
            command: The command.
            wake: For a claim that waits, or a put that says that it waits for room (`commands.WaitForRoom`): is called
                when it may go on, until it has done so or `stop_waiting`. It must not block, nor call the service.
                False: nobody waits any longer.
        """
        changes = self._changed_by(command) if self._waiting else None
        held_bytes = self._ledger.held_bytes
        try:
            return self._run(command, wake)
        finally:
            self._wake_others(command, changes, held_bytes)

    def _wake_others(self, command: Command[Any], changes: str | None, held_bytes: int) -> None:
        if changes is not None:
            self._wake_claims(changes)
        if self._waiting and isinstance(command, (commands.ClaimRequest, commands.RenewRequest)):
            self._tell_of_leases(command.partition_id)
        if self._room_wakes and (self._ledger.held_bytes < held_bytes or isinstance(command, commands.WaitForRoom)):
            self._wake_for_room()

    def stop_waiting(self, token: str) -> None:
        """What waits with this token, or ticket, no longer waits. Others may be woken in its place."""
        self._room_wakes.pop(token, None)
        partition_id = self._waiting.drop(token)
        self._pacer.leave(token)
        if partition_id is not None:
            self._wake_claims(partition_id)
            self._tell_of_leases(partition_id)

    def _run(self, command: Command[Reply], wake: Callable[[], bool] | None) -> Reply:
        match command:
            case commands.ClaimRequest():
                return cast("Reply", self._claim(command, wake))
            case commands.AnnounceRequest():
                num_clients = self._clients.announce(command.client, command.ttl_s, self._clock())
                return cast("Reply", AnnounceReply(num_clients=num_clients))
            case commands.InspectRequest():
                return cast("Reply", self._inspect(command))
            case commands.ListClientsRequest():
                return cast("Reply", ClientList(clients=self._clients.listed(self._clock(), command.ended)))
            # other commands may leave a known shortfall slightly outdated; these make it wrong
            case commands.RegisterRequest() | commands.SetCursorRequest() | commands.ClearRequest(sample_ids=None):
                for question in [each for each in self._explained if each[0] == command.partition_id]:
                    del self._explained[question]
            case commands.BeginPut():
                return cast("Reply", self._put(command, command))
            case commands.CheckPut():
                return cast("Reply", self._put(command, command.put))
            case commands.WaitForRoom() if command.wait_s <= 0:
                self._pacer.leave(command.ticket)
                self._room_wakes.pop(command.ticket, None)
            case commands.WaitForRoom() if wake is not None:
                queue = self._ledger.room.first(sys.maxsize)  # clients of others are gone
                self._room_wakes = {each: self._room_wakes[each] for each in queue if each in self._room_wakes}
                self._room_wakes[command.ticket] = wake
        return self._ledger.apply(command, self._clock())

    def _changed_by(self, command: Command[Any]) -> str | None:
        """The partition in which a command may make samples ready, or a claim that waits fail."""
        match command:
            case commands.CommitPut():
                return self._ledger.partition_of_put(command.write_id)
            case (
                commands.PutTags()
                | commands.NackRequest()
                | commands.ClearRequest()
                | commands.SetCursorRequest()
                | commands.RegisterRequest()
            ):
                return command.partition_id
        return None

    def _num_ready(self, claim: commands.ClaimRequest) -> float:
        try:
            return self._ledger.num_ready(claim, self._clock())
        except DataPlaneError:  # the claim raises it when it asks again
            return math.inf

    def _wake_claims(self, partition_id: str) -> None:
        self._waiting.wake(partition_id, self._num_ready, self._clock())

    def _wake_for_room(self) -> None:
        for ticket in self._ledger.room.first(_NUM_HEAD):
            wake = self._room_wakes.get(ticket)
            if wake is not None and not wake():
                del self._room_wakes[ticket]

    def garbage(self) -> list[Ref]:
        """`Ledger.garbage` now."""
        return self._ledger.garbage(self._clock())

    def _put(self, command: Command[Reply], put: commands.BeginPut) -> Reply:
        """Tells a put that waits for room when to ask again: soon at the queue's head, else at the pacer's rate."""
        ticket = put.ticket
        try:
            reply = self._ledger.apply(command, self._clock())
        except CapacityExceededError as error:
            if ticket is not None and error.retryable:
                place = self._ledger.room.place(ticket)
                pause_s = _FIRST_IN_QUEUE_S * 2**place if place < _NUM_HEAD else self._pacer.pause_s(ticket)
                error.ask_again_s = max(pause_s, LEAST_ROOM_PAUSE_S)
            raise
        if ticket is not None and command is put:
            self._pacer.leave(ticket)
            if self._room_wakes.pop(ticket, None) is not None:
                self._wake_for_room()
        return reply

    def _claim(self, command: commands.ClaimRequest, wake: Callable[[], bool] | None) -> Claim:
        try:
            claim = self._answer(command)
        except DataPlaneError:
            if self._waiting.drop(command.token) is not None:  # others may end for the same reason
                self._wake_claims(command.partition_id)
            raise
        waits = command.all_or_nothing and not command.explain and not claim.answered
        if not waits or wake is None:
            waited = self._waiting.drop(command.token) is not None
            # others may have to wait no longer, since less is left, or end for the same reason
            if self._waiting and (claim.sample_ids or claim.num_ranks or (waited and claim.answered)):
                self._wake_claims(command.partition_id)
            return claim
        lease_ends_at, now = self._ledger.next_lease_check(command.partition_id), self._clock()
        self._waiting.add(command, wake, lease_ends_at, now)
        pause_s = max(min(lease_ends_at - now, LONGEST_PAUSE_S), _LEAST_LEASE_PAUSE_S, claim.ask_again_s)
        return replace(claim, ask_again_s=pause_s)

    def _tell_of_leases(self, partition_id: str) -> None:
        """Wakes claims of a partition that would ask too late, since a lease may end sooner than they know."""
        lease_ends_at, now = self._ledger.next_lease_check(partition_id), self._clock()
        if lease_ends_at - now < LONGEST_PAUSE_S:
            self._waiting.tell(partition_id, lease_ends_at, now)

    def _answer(self, command: commands.ClaimRequest) -> Claim:
        question = _key_of(command.partition_id, command)
        told = self._explained.get(question) if command.explain else None
        start = time.thread_time()
        self._pacer.leave(command.token)
        explain = command.explain and (told is None or told.stale_at <= time.monotonic())
        question_now = command if explain == command.explain else replace(command, explain=explain)
        claim = self._ledger.apply(question_now, self._clock())
        if claim.answered:
            return claim
        if claim.shortfall is not None:
            self._note_shortfall(question, claim.shortfall, time.thread_time() - start)
        elif told is not None:
            claim = replace(claim, shortfall=told.shortfall)
        if not command.all_or_nothing or command.explain:
            return claim  # the client does not wait, or not much longer, so it gets no slot for another question
        return replace(claim, ask_again_s=self._pacer.pause_s(command.token))

    def _inspect(self, command: commands.InspectRequest) -> PartitionDescription:
        """Finds the shortfalls that are not known from another claim or question."""
        start = time.thread_time()
        keys = [_key_of(command.partition_id, each) if each.explain else None for each in command.questions]
        told = [None if key is None else self._explained.get(key) for key in keys]
        known = [each if each is not None and each.stale_at > time.monotonic() else None for each in told]
        pairs = zip(command.questions, known, strict=True)
        asked = [replace(each, explain=each.explain and old is None) for each, old in pairs]
        found = self._ledger.apply(replace(command, questions=asked), self._clock())
        cost_s = (time.thread_time() - start) / max(1, sum(each.explain for each in asked))
        answers: list[Answer | None] = []
        for key, old, answer in zip(keys, known, found.answers, strict=True):
            if answer is not None and old is not None:
                answer = replace(answer, shortfall=old.shortfall)
            elif answer is not None and key is not None and answer.shortfall is not None:
                self._note_shortfall(key, answer.shortfall, cost_s)
            answers.append(answer)
        return replace(found, answers=answers)

    def _note_shortfall(self, key: tuple[Any, ...], shortfall: Shortfall, cost_s: float) -> None:
        if len(self._explained) >= _MOST_EXPLAINED:
            self._explained.clear()
        stale_at = time.monotonic() + min(cost_s / _EXPLAINING_SHARE, _STALE_AFTER_S)
        self._explained[key] = _Explained(shortfall, stale_at)


class LedgerThread(LedgerService):
    """A `LedgerService` whose commands run in a thread of its own, for any thread of this process.

    Python runs signal handlers in the main thread. So Ctrl-C, or what another thread raises in a caller, ends the wait
    for a reply, and never cuts off a command.

    Args:
        capacity_bytes: As for `Ledger`.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._works.put, None)
        self._end.atexit = False  # what runs then may still call it
        self._thread = threading.Thread(target=_do_all, args=(self._works,), name="dataplane-ledger", daemon=True)

    def start(self) -> None:
        """Starts the thread. Call it before all else."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread when it has done what it was given. It also ends when nothing refers to this object."""
        self._end()

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`. Waits for the thread. If it is interrupted meanwhile, the command runs all the same.

        Raises:
            ClientClosedError: It was stopped, or the program ends. The command may have run or not.
            UnsupportedOperationError: A ``__del__`` that came in the middle of a command calls it.
        """
        assert self._thread.ident is not None, "it was not started"
        if threading.get_ident() == self._thread.ident:
            raise UnsupportedOperationError(
                f"{command.op} refused: it was called in the middle of a command of the same ledger, which a '__del__' "
                "has interrupted. Nothing was done.",
                hint="Let the '__del__' note what it wants, and do it later.",
            )
        results: SimpleQueue[Any] = SimpleQueue()
        self._works.put((partial(super().call, command, wake), results))
        # looked at after that: the thread does all that came before its end
        if not self._end.alive or sys.is_finalizing():
            raise ClientClosedError(f"{command.op}: the client was closed meanwhile.")
        result = results.get()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # whose traceback has this frame
        return cast("Reply", result)

    def stop_waiting(self, token: str) -> None:
        """As `LedgerService.stop_waiting`, but does not wait for it."""
        self._works.put((partial(super().stop_waiting, token), SimpleQueue()))


def _do_all(works: SimpleQueue[_Work | None]) -> None:
    """Does what comes, until None comes."""
    for work, results in iter(works.get, None):
        try:
            results.put(work())
        except BaseException as error:  # the caller raises it
            results.put(error)
        del work, results  # so that nothing keeps them while it waits


def _key_of(partition_id: str, asked: commands.ClaimRequest | Question) -> tuple[Any, ...]:
    """Claims and questions with equal keys have the same shortfall."""
    return partition_id, asked.task_name, tuple(asked.required_fields), repr(asked.tag_filter)


# --- clients ----------------------------------------------------------------------------------------------------------

#: Seconds for which a client that ended is still known, and of how many.
ENDED_KEPT_S: Final = 600.0
MOST_ENDED: Final = 1000


class ClientRegister:
    """Lists clients until their time is over, and a while longer as ended. Pure, like the ledger."""

    def __init__(self) -> None:
        # id -> announcement, its time, its end; the latter are those that ended, in the order in which that was noticed
        self._clients: dict[str, tuple[ClientInfo, float, float]] = {}
        self._ended: dict[str, tuple[ClientInfo, float, float]] = {}

    def announce(self, client: ClientInfo, ttl_s: float, now: float) -> int:
        """Lists a client for ``ttl_s`` seconds, or no longer if that is 0. Returns how many are listed."""
        self._clients.pop(client.client_id, None)
        self._ended.pop(client.client_id, None)
        if ttl_s > 0:
            self._clients[client.client_id] = client, now, now + ttl_s
        else:
            self._ended[client.client_id] = replace(client, state="closed"), now, now
        # the others follow one another by the time of their announcement, so those whose time is over come first
        for client_id, (_, _, ends_at) in list(islice(self._clients.items(), 2)):
            if ends_at <= now:
                self._ended[client_id] = self._clients.pop(client_id)
        for client_id, (_, _, ends_at) in list(islice(self._ended.items(), 3)):
            if ends_at + ENDED_KEPT_S <= now or len(self._ended) > MOST_ENDED:
                del self._ended[client_id]
        return len(self._clients)

    def listed(self, now: float, ended: bool = False) -> list[ClientInfo]:
        """The clients whose time is not over, and those that ended not long ago if they are asked for."""
        known = [*self._clients.values(), *(self._ended.values() if ended else ())]
        return [
            replace(
                client,
                heard_s=max(0.0, now - heard_at),
                state=client.state if client.state == "closed" or ends_at > now else "silent",
            )
            for client, heard_at, ends_at in known
            if ends_at > now or (ended and ends_at + ENDED_KEPT_S > now)
        ]
