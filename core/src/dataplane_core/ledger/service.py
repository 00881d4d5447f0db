"""A ledger as a host serves it: it wakes what waits, and tells when to ask again."""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, cast

from msgspec.structs import replace

from dataplane_core.errors import ClientClosedError, DataPlaneError, Shortfall, UnsupportedOperationError
from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.queues import LONGEST_PAUSE_S, WaitingClaims
from dataplane_core.ledger.rows import Ref
from dataplane_core.spec import Claim, ClientInfo, PartitionDescription, Question
from dataplane_core.spec.requests import Command

#: How many puts at the head of the queue are woken.
_NUM_HEAD: Final = 4
#: The least pause of a claim that is woken. It asks again by itself when a lease may have ended.
_LEAST_LEASE_PAUSE_S: Final = 0.001
#: The share of a service's time that it may take to find the shortfalls of one question.
_EXPLAINING_SHARE: Final = 0.01
#: A shortfall is found again after this many seconds, even if that takes more than the share.
_STALE_AFTER_S: Final = 2.0
_MOST_SHORTFALLS: Final = 256

#: What the thread of a ledger is to call, and where its result goes, or what it raises.
_Work: TypeAlias = tuple[Callable[[], Any], SimpleQueue[Any]]


class LedgerService:
    """A `Ledger` with a clock, as a host serves it. One thread calls it at a time, in which no signal handler raises.

    ``ledger``: an existing one to serve; ``capacity_bytes`` is then ignored.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = Ledger(capacity_bytes=capacity_bytes) if ledger is None else ledger
        self._clock = clock
        # partition, task, fields and filter of a claim -> why it gets no more, and until when all who ask are told so
        self._shortfalls: dict[tuple[Any, ...], tuple[Shortfall, float]] = {}
        self._waiting = WaitingClaims()
        self._clients = ClientRegister()

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Runs a command now. All callers use this method.

        ``wake``: for a claim that waits, or a put that waits for room, is called when it may go on, until it has done
        so or `stop_waiting`. It must not block, nor call the service. False: nobody waits any longer.
        """
        if not (self._waiting.by_token or self.ledger.room.waiting or isinstance(command, commands.WaitForRoom)):
            return self._run(command, wake)  # nobody is to be woken
        changes, held_bytes = self._changed_by(command), self.ledger.held_bytes
        try:
            return self._run(command, wake)
        finally:
            if changes is not None:
                self._wake_claims(changes)
            if self._waiting.by_token and isinstance(command, (commands.ClaimRequest, commands.RenewRequest)):
                self._tell_of_leases(command.partition_id)
            if self.ledger.held_bytes < held_bytes or isinstance(command, commands.WaitForRoom):
                self._wake_for_room()

    def stop_waiting(self, token: str) -> None:
        """What waits with this token, or ticket, no longer waits. Others may be woken in its place."""
        if (put := self.ledger.room.waiting.get(token)) is not None:
            put.wake = None
        partition_id = self._waiting.drop(token)
        if partition_id is not None:
            self._wake_claims(partition_id)
            self._tell_of_leases(partition_id)

    def _run(self, command: Command[Reply], wake: Callable[[], bool] | None) -> Reply:
        match command:
            case commands.ClaimRequest():
                return cast("Reply", self._claim(command, wake))
            case commands.AnnounceRequest():
                num_clients = self._clients.announce(command.client, command.ttl_s, self._clock())
                return cast("Reply", num_clients)
            case commands.InspectRequest():
                return cast("Reply", self._inspect(command))
            case commands.ListClientsRequest():
                return cast("Reply", self._clients.listed(self._clock(), command.ended))
            # other commands may leave a shortfall slightly outdated; these make it wrong
            case commands.RegisterRequest() | commands.SetCursorRequest() | commands.ClearRequest(sample_ids=None):
                for key in [key for key in self._shortfalls if key[0] == command.partition_id]:
                    del self._shortfalls[key]
            case commands.BeginPut():
                waited = command.ticket in self.ledger.room.waiting
                write_id = self.ledger.apply(command, self._clock())
                if waited:  # the next in the queue may go on
                    self._wake_for_room()
                return cast("Reply", write_id)
            case commands.WaitForRoom():
                self.ledger.apply(command, self._clock())
                if (put := self.ledger.room.waiting.get(command.ticket)) is not None:
                    put.wake = wake
                return cast("Reply", None)
        return self.ledger.apply(command, self._clock())

    def changes(self, command: Command[Any]) -> bool:
        """Whether a command would change the ledger, so that a log needs a record of it. Raises as a put that would be
        refused: such puts come again and again."""
        match command:
            case commands.BeginPut():
                self.ledger.check_put(command, self._clock())
            case commands.ClaimRequest():
                return self.ledger.may_claim(command, self._clock())
            case commands.WaitForRoom():  # those who wait say so again
                return False
        return not command.reads

    def _changed_by(self, command: Command[Any]) -> str | None:
        """The partition in which a command may make samples ready, or a claim that waits fail."""
        match command:
            case commands.CommitPut():
                return self.ledger.partition_of_put(command.write_id)
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
            return self.ledger.partition(claim.partition_id).num_ready(claim, self._clock())
        except DataPlaneError:  # the claim raises it when it asks again
            return math.inf

    def _wake_claims(self, partition_id: str) -> None:
        self._waiting.wake(partition_id, self._num_ready, self._clock())

    def _wake_for_room(self) -> None:
        for put in islice(self.ledger.room.waiting.values(), _NUM_HEAD):
            if put.wake is not None and not put.wake():
                put.wake = None

    def garbage(self) -> list[Ref]:
        return self.ledger.garbage(self._clock())

    def _claim(self, command: commands.ClaimRequest, wake: Callable[[], bool] | None) -> Claim:
        try:
            # what keeps samples back is found apart from it, since those that ask the same share it
            plain = replace(command, explain=False) if command.explain else command
            claim = self.ledger.apply(plain, self._clock())
        except DataPlaneError:
            if self._waiting.drop(command.token) is not None:  # others may end for the same reason
                self._wake_claims(command.partition_id)
            raise
        if command.explain and not claim.answered:
            claim = replace(claim, shortfall=self._shortfall(command.partition_id, command))
        waits = command.all_or_nothing and not command.explain and not claim.answered
        if not waits or wake is None:
            waited = bool(self._waiting.by_token) and self._waiting.drop(command.token) is not None
            # others may have to wait no longer, since less is left, or end for the same reason
            if self._waiting.by_token and (claim.sample_ids or claim.num_ranks or (waited and claim.answered)):
                self._wake_claims(command.partition_id)
            return claim
        lease_ends_at, now = self.ledger.next_lease_check(command.partition_id), self._clock()
        self._waiting.add(command, wake, lease_ends_at, now)
        return replace(claim, ask_again_s=max(min(lease_ends_at - now, LONGEST_PAUSE_S), _LEAST_LEASE_PAUSE_S))

    def _tell_of_leases(self, partition_id: str) -> None:
        """Wakes claims of a partition that would ask too late, since a lease may end sooner than they know."""
        lease_ends_at, now = self.ledger.next_lease_check(partition_id), self._clock()
        if lease_ends_at - now < LONGEST_PAUSE_S:
            self._waiting.tell(partition_id, lease_ends_at, now)

    def _inspect(self, command: commands.InspectRequest) -> PartitionDescription:
        plain = [replace(question, explain=False) for question in command.questions]
        description = self.ledger.apply(replace(command, questions=plain), self._clock())
        answers = [
            replace(answer, shortfall=self._shortfall(command.partition_id, question))
            if answer is not None and question.explain
            else answer
            for question, answer in zip(command.questions, description.answers, strict=True)
        ]
        return replace(description, answers=answers)

    def _shortfall(self, partition_id: str, question: commands.ClaimRequest | Question) -> Shortfall:
        """Why a claim gets no more samples. It looks at all rows, so those that ask the same share it for a while."""
        key = (partition_id, question.task_name, tuple(question.required_fields), repr(question.tag_filter))
        shortfall, stale_at = self._shortfalls.get(key, (None, 0.0))
        if shortfall is None or stale_at <= time.monotonic():
            start = time.thread_time()
            shortfall = self.ledger.partition(partition_id).shortfall(question, self._clock())
            cost_s = time.thread_time() - start
            if len(self._shortfalls) >= _MOST_SHORTFALLS:
                self._shortfalls.clear()
            stale_at = time.monotonic() + min(cost_s / _EXPLAINING_SHARE, _STALE_AFTER_S)
            self._shortfalls[key] = shortfall, stale_at
        return shortfall


class LedgerThread(LedgerService):
    """A `LedgerService` whose commands run in a thread of its own, for any thread of this process.

    Python runs signal handlers in the main thread. So Ctrl-C, or what another thread raises in a caller, ends the wait
    for a reply, and never cuts off a command.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._works.put, None)
        self._end.atexit = False  # what runs then may still call it
        self._thread = threading.Thread(target=_do_all, args=(self._works,), name="dataplane-ledger", daemon=True)

    def start(self) -> None:
        """Call it before all else."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread when it has done what it was given. It also ends when nothing refers to this object."""
        self._end()

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`. If the wait is interrupted, the command runs all the same; if it is refused with
        `ClientClosedError`, it may have run or not."""
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


# --- clients ----------------------------------------------------------------------------------------------------------

#: Seconds for which a client that ended is still known, and of how many.
ENDED_KEPT_S: Final = 600.0
MOST_ENDED: Final = 1000


class ClientRegister:
    """Lists clients until their time is over, and a while longer as ended."""

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
        clients = [*self._clients.values(), *(self._ended.values() if ended else ())]
        return [
            replace(
                client,
                heard_s=max(0.0, now - heard_at),
                state=client.state if client.state == "closed" or ends_at > now else "silent",
            )
            for client, heard_at, ends_at in clients
            if ends_at > now or (ended and ends_at + ENDED_KEPT_S > now)
        ]
