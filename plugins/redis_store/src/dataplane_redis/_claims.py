"""Claims and their settling. Many rows take several scripts, so that no script blocks the server for long.

A claim that waits is woken when it can be answered, see `_wakes`. Besides, it asks from time to time, with one command,
whether anything changed, and only then runs its script again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

from dataplane_core.backends import Backend
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    LeaseExpiredError,
    LeaseHolder,
    OperationTimeoutError,
    Shortfall,
    preview,
)
from dataplane_core.ledger import group_of
from dataplane_core.spec import (
    AckRequest,
    Claim,
    ClaimRequest,
    ConsumptionReply,
    ConsumptionRequest,
    NackRequest,
    RenewRequest,
    SettleReply,
)
from dataplane_redis._acknowledged import Acknowledged
from dataplane_redis._scripts import (
    pack_filter,
    pack_strings,
    pack_value,
    text_of,
    to_bytes,
    unpack_tags,
)
from dataplane_redis._session import KEPT_S, Session, unknown_reply
from dataplane_redis._wakes import Question, Turns, Wakes

#: Rows that one script scans, and rows that it hands out, settles or takes back.
_LOOK_ROWS: Final = 2500
_GIVE_ROWS: Final = 2000
#: Seconds between two tries of a claim while another claim of its task, of many rows, is in progress.
_BUSY_S: Final = 0.02
#: Seconds after which a waiting claim runs its script even if nothing changed: the server may have restarted from an
#: older state. The second is for a claim that will be woken, which such a restart wakes.
_LOOK_AGAIN_S: Final = 10.0
_LOOK_AGAIN_WOKEN_S: Final = 30.0
#: Questions per second that the waiting claims of all clients ask together.
_ASKS_PER_S: Final = 250.0
#: A client's claims are given turns at most so many seconds ahead.
_MAX_AHEAD_S: Final = 2.0
#: A client whose claim has waited so many seconds tells the server that it waits, and repeats that after so many.
_COUNT_AFTER_S: Final = 0.2
_COUNT_AGAIN_S: Final = 7.0
#: Seconds before its deadline at which a claim stops counting what its samples lack.
_COUNT_RESERVE_S: Final = 0.1


class Claims(Backend):
    """The claims of `RedisBackend`, and what becomes of them."""

    _session: Session
    _wakes: Wakes

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._count_at = 0.0
        self._interval_s = 0.0  # between two questions of this client
        self._turns = Turns()
        self._lock = threading.Lock()

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> Claim:
        """Hands out ready samples."""
        what = f"claim_meta('{request.partition_id}', '{request.task_name}')"
        now = time.monotonic()
        began = float(request.since.rpartition(":")[2]) if request.since else now
        counts = now >= max(began + _COUNT_AFTER_S, self._count_at)
        if not self._wakes.take_woken(request.token) and not counts and self._is_unchanged(what, request):
            return Claim(version=request.since, ask_again_s=self._pause_of(request, request.since))
        if counts:
            self._count_at = now + _COUNT_AGAIN_S
        question = question_of(request.partition_id, request, request.batch_size)
        asks = question._asdict() | {
            "all_or_nothing": int(request.all_or_nothing),
            "lease_s": -1 if request.lease_s is None else request.lease_s,
            "token": request.token,
            "holder": request.holder,
            "budget": _LOOK_ROWS,
            "most": _GIVE_ROWS,
            "client": self._wakes.client if counts else b"",
            "stops": int(request.explain),
        }
        confirms = functools.partial(_given, request) if request.lease_s is None else None  # an ack notices the others
        waiter = self._wakes.enter(request, question)
        ids: list[str] = []
        tags: list[Any] = []
        lease = b""
        while True:
            asked = time.monotonic()
            kind, *rest = self._session.run(
                what, request.deadline, "claim", confirms=confirms, number=lease, waiter=waiter, **asks
            )
            if kind in (b"part", b"ok"):
                first, some, some_tags = rest
                ids += map(text_of, some)
                tags += map(unpack_tags, some_tags)
                if kind == b"ok":
                    self._wakes.answer(request.token, waits=False)
                    return Claim(
                        sample_ids=ids,
                        tags=tags,
                        lease_tokens=None if request.lease_s is None else [request.token] * len(ids),
                        exhausted=bool(first),
                        num_ready=len(ids),
                    )
                lease = first
            elif kind == b"lost":
                ids, tags, lease = [], [], b""
            elif kind == b"busy":
                if request.all_or_nothing:
                    return self._wait(what, request, question, None, _BUSY_S)
                if time.monotonic() + _BUSY_S >= request.deadline:
                    raise OperationTimeoutError(f"{what} timed out: another claim of this task took many samples.")
                time.sleep(_BUSY_S)
            elif kind == b"wait":
                if not (waiter or request.explain or request.wake is None) and self._wakes.listens(request.deadline):
                    waiter = self._wakes.enter(request, question)
                    if waiter:
                        continue  # now the server will know it
                epoch, change, left_s, num_clients, promised = rest
                look_again_s = _LOOK_AGAIN_WOKEN_S if promised else _LOOK_AGAIN_S
                until = asked + min(look_again_s, float(left_s or look_again_s))
                self._set_interval(num_clients / _ASKS_PER_S)
                version = f"{epoch.decode()}:{change.hex()}:{until}:{began}"
                self._wakes.answer(request.token, waits=not request.explain, promised=bool(promised))
                return self._wait(what, request, question, version, self._pause_of(request, version))
            elif kind != b"again":
                _raise_claim(what, request, [kind, *rest])

    # Core's Pacer runs in one process, which sees all waiting claims, and has a fixed rate. Here each client sees only
    # its own claims, and its share of the rate depends on how many clients wait.
    def _set_interval(self, interval_s: float) -> None:
        with self._lock:
            if interval_s < self._interval_s:  # fewer clients wait now: forget the turns given out for more
                self._turns.next_at = 0.0
            self._interval_s = interval_s

    def _pause_s(self) -> float:
        """How long the claim that has just asked must pause: the claims of this client take turns."""
        with self._lock:
            return self._turns.take(self._interval_s, _MAX_AHEAD_S + self._interval_s)

    def _pause_of(self, request: ClaimRequest, version: str | None) -> float:
        """How long the claim must pause. Nobody wakes it when a lease ends, so it asks by itself then."""
        turn_s = self._pause_s()
        pause_s = self._wakes.pause_s(request.token, self._interval_s)
        if version is None or pause_s is None:
            return turn_s
        left_s = float(version.split(":")[2]) - time.monotonic()
        return max(turn_s, min(pause_s, left_s))

    def _is_unchanged(self, what: str, request: ClaimRequest) -> bool:
        """Whether the answer is still the same: since it was given, the partition did not change and no lease ended."""
        if request.since is None or request.explain:
            return False
        epoch, change, until, _ = request.since.split(":")
        if time.monotonic() >= float(until):
            return False
        key = self._session.base + b":p:" + to_bytes(request.partition_id)
        found = self._session.command(what, request.deadline, b"HMGET", key, b"epoch", b"change")
        return [each or b"" for each in found] == [epoch.encode(), bytes.fromhex(change)]

    def _wait(
        self, what: str, request: ClaimRequest, question: Question, version: str | None, ask_again_s: float
    ) -> Claim:
        """The answer to a claim that has to wait. With ``explain`` it says what the samples lack, or, if the deadline
        comes first, what was counted so far."""
        if not request.explain:
            return Claim(version=version, ask_again_s=ask_again_s)
        num_ready, shortfall = self._explain(what, request.deadline, question)
        num_ready = min(num_ready, request.batch_size)
        return Claim(num_ready=num_ready, shortfall=shortfall, version=version, ask_again_s=ask_again_s)

    def _explain(self, what: str, deadline: float, question: Question) -> tuple[int, Shortfall]:
        """How many samples are ready for a question, and why the others are not."""
        reply = self._shortfall(what, deadline, question)
        _, num_ready, num_leased, leased, num_passed, passed, num_incomplete, groups, num_lacking, cells = reply
        return int(num_ready), Shortfall(
            num_leased=int(num_leased),
            leased=tuple(holder_of(*each) for each in leased),
            num_not_matching=int(num_passed),
            not_matching=tuple(map(text_of, passed)),
            num_incomplete=int(num_incomplete),
            incomplete_groups={text_of(group): int(count) for group, count in groups},
            num_lacking=int(num_lacking),
            missing_cells={text_of(each[0]): tuple(map(text_of, each[1:])) for each in cells},
        )

    def _shortfall(self, what: str, deadline: float, question: Question, whose: bytes = b"") -> Any:
        """The reply of the script ``shortfall``, run until it has looked at all rows or the deadline comes."""
        asks = question._asdict() | {"budget": _LOOK_ROWS, "whose": whose}
        del asks["batch_size"]
        reply: Any = None
        while reply is None or (reply[0] == b"again" and time.monotonic() < deadline - _COUNT_RESERVE_S):
            try:
                reply = self._session.run(what, deadline, "shortfall", **asks)
            except OperationTimeoutError:
                if reply is None:
                    raise
                break
        return reply

    def _count(self, what: str, partition_id: str, task_name: str, required: bytes, deadline: float) -> tuple[int, int]:
        """How many samples with these fields are ready for a task now, and how many it has on lease."""
        reply = self._shortfall(what, deadline, Question(partition_id, task_name, 0, required, b""), os.urandom(16))
        return int(reply[1]), int(reply[2])

    def check_consumption(self, request: ConsumptionRequest) -> ConsumptionReply:
        """Whether the tasks have consumed the partition."""
        what = f"check_consumption_status('{request.partition_id}')"
        reply = self._session.run(
            what, request.deadline, "consumed", name=request.partition_id, tasks=request.task_names
        )
        return ConsumptionReply(consumed=bool(reply[1]))

    # --- settling -----------------------------------------------------------------------------------------------------

    def ack(self, request: AckRequest) -> SettleReply:
        """Settles leases."""
        return self._settle("ack", request, 0.0)

    def nack(self, request: NackRequest) -> SettleReply:
        """Gives leased samples back."""
        return self._settle("nack", request, 0.0)

    def renew(self, request: RenewRequest) -> SettleReply:
        """Extends leases."""
        return self._settle("renew", request, request.lease_s)

    def _settle(self, action: str, request: AckRequest | NackRequest | RenewRequest, lease_s: float) -> SettleReply:
        """Acks, nacks or renews all of the rows or none."""
        what = f"{action}('{request.partition_id}', '{request.task_name}', {len(request.sample_ids)} samples)"
        call = Acknowledged(action, request.partition_id, request.task_name, request.sample_ids)

        asked: dict[str, Any] = {"epoch": "", "ids": (), "tokens": (), "named": {}, "into": {}, "leases": ()}
        asked |= {"name": request.partition_id, "task_name": request.task_name}
        asked |= {"action": action, "lease_s": lease_s, "budget": _GIVE_ROWS}

        def run(mode: str, **given: Any) -> Any:
            return self._session.run(
                what,
                request.deadline,
                "settle",
                confirms=call if mode in ("all", "commit") else None,
                mode=mode,
                request="" if mode == "finish" else request.request_id,
                kept_s=max(0.0, request.deadline - time.monotonic()) + KEPT_S,
                **asked | given,
            )

        if len(request.sample_ids) <= _GIVE_ROWS:
            reply = run("all", ids=request.sample_ids, tokens=request.lease_tokens)
        else:
            reply = _settle_many(run, request.sample_ids, request.lease_tokens)
        if reply[0] == b"done":
            reply = run("commit")
        if reply[0] != b"ok":
            _raise_settle(what, request, reply)
        # it is settled; if this fails, the next claim takes back what is left
        with contextlib.suppress(DataPlaneError), self._session.quietly():
            while reply[0] == b"ok" and reply[1]:  # else the partition is gone, or has no such task now
                reply = run("finish")
        return SettleReply(num_samples=len(request.sample_ids))


def question_of(partition_id: str, asked: Any, batch_size: int = 0) -> Question:
    """The question of a claim, or of an object with the same attributes."""
    return Question(
        name=partition_id,
        task_name=asked.task_name,
        batch_size=batch_size,
        required=pack_strings(sorted(set(asked.required_fields))),
        filter=pack_value(sorted(pack_filter(asked.tag_filter))) if asked.tag_filter else b"",
    )


def holder_of(sample_id: bytes, holder: bytes, left_s: bytes, held_s: bytes | None = None) -> LeaseHolder:
    """Who holds a sample, as a script replies it."""
    held = None if held_s is None else float(held_s)
    return LeaseHolder(sample_id=text_of(sample_id), holder=text_of(holder), left_s=float(left_s), held_s=held)


def _given(request: ClaimRequest, reply: Any) -> Acknowledged | None:
    """What the reply to a claim without a lease acknowledges."""
    ids = [text_of(each) for each in reply[2]]
    return Acknowledged("claim_meta", request.partition_id, request.task_name, ids) if ids else None


def _settle_many(run: Callable[..., Any], ids: Sequence[str], tokens: Sequence[str]) -> Any:
    """Settles more rows than one script can: looks at all rows first, and then settles their leases in one script.

    A lease of which only some rows are named is split on the way. No client can see the split, so a client that dies
    before the last script has changed nothing. Returns the reply to the last script, or "done" if another request with
    the same id is carried out.
    """
    # rows never join a lease: one with as many rows as are named, here and at the commit, holds exactly these
    named = Counter(tokens)
    while True:
        reply = run("split")
        if reply[0] != b"ok":
            return reply
        _, epoch, group_size, _ = reply
        lost: set[bytes] = set()
        part = None
        into: dict[str, dict[bytes, bytes]] = defaultdict(dict)  # by token: lease -> the one that has its rows now
        rows: Counter[tuple[bytes, bytes]] = Counter()  # by lease and token
        for some, some_tokens in _chunks(ids, tokens, group_size):
            mine = set(some_tokens)
            known = {lease: to for token in mine for lease, to in into[token].items()}
            counts = {token: named[token] for token in mine}
            reply = run("split", epoch=epoch, ids=some, tokens=some_tokens, named=counts, into=known)
            if reply[0] == b"lost":
                lost.update(reply[1])
            elif reply[0] == b"part":
                part = part or reply
            elif reply[0] != b"ok":
                break
            else:
                for lease, to, token, count in reply[3]:
                    into[text_of(token)][lease] = to
                    rows[to, token] += count
        else:
            if lost:  # in the order of the request
                return [b"lost", [each for each in map(to_bytes, ids) if each in lost]]
            if part:
                return part
            leases = [each for (lease, token), count in rows.items() for each in (lease, token, count)]
            reply = run("commit", epoch=epoch, leases=leases)
        if reply[0] != b"changed":
            return reply
        named.clear()  # the rows that are named may be those of several leases with one token


def _chunks(ids: Sequence[str], tokens: Sequence[str], group_size: int) -> Iterator[tuple[list[str], list[str]]]:
    """Cuts rows into chunks for one script each. The members of a group stay together."""
    together: dict[str, list[int]] = {}
    for place, sample_id in enumerate(ids):
        together.setdefault(group_of(sample_id) if group_size else sample_id, []).append(place)
    places: list[int] = []
    for some in together.values():
        if places and len(places) + len(some) > _GIVE_ROWS:
            yield [ids[place] for place in places], [tokens[place] for place in places]
            places = []
        places += some
    yield [ids[place] for place in places], [tokens[place] for place in places]


def _raise_claim(what: str, request: ClaimRequest, reply: Sequence[Any]) -> NoReturn:
    """A claim was refused."""
    if reply[0] == b"batch":
        raise InvalidRequestError(
            f"{what} refused: batch_size {request.batch_size} is not a multiple of the group size {reply[1]}."
        )
    raise unknown_reply(reply)


def _raise_settle(what: str, request: AckRequest | NackRequest | RenewRequest, reply: Sequence[Any]) -> NoReturn:
    """An ack, nack or renew was refused. No row was changed."""
    if reply[0] == b"lost":
        lost = [text_of(each) for each in reply[1]]
        raise LeaseExpiredError(
            f"{what} refused: the lease on {preview(lost)} is no longer held. No row was changed.",
            sample_ids=lost,
            hint="The lease ran out, was settled, or the sample was cleared; another consumer may hold it now.",
        )
    if reply[0] == b"part":
        raise InvalidRequestError(
            f"{what} refused: it names {reply[2]} of the {reply[3]} samples held of group '{text_of(reply[1])}'. "
            "Groups are handed out, settled and renewed as a whole. No row was changed."
        )
    raise unknown_reply(reply)
