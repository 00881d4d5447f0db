"""A ledger and a store on Redis that take the same steps, and what both reply, compared: see `differential`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from random_history import NAMES

from dataplane_core.backends import writes_of
from dataplane_core.errors import AlreadyDoneError, DataPlaneError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.ledger.clients import ClientRegister
from dataplane_core.spec import (
    AckRequest,
    AnnounceRequest,
    ClaimRequest,
    ClearRequest,
    ClientInfo,
    ConsumptionRequest,
    DescribeRequest,
    ExportRequest,
    FieldSpec,
    FieldsRequest,
    GetRequest,
    InspectRequest,
    ListClientsRequest,
    ListPartitionsRequest,
    ListRequest,
    NackRequest,
    PutRequest,
    RegisterRequest,
    RenewRequest,
    SetCursorRequest,
    SharedRows,
)
from dataplane_redis import RedisBackend, _puts
from dataplane_redis._scripts import pack_parts, pack_tags

__all__ = ["GRACE_S", "BothSides", "Clock", "Difference"]

#: Seconds that each step takes, so that no two claims are made at the same time; and the ends of puts that do not
#: commit: a put's deadline comes so much before.
TICK_S, GRACE_S = 1 / 64, 3.0
#: What is left of a store without partitions. Ids of requests are kept for a minute after their deadline.
LEFT = ("instance", "parts", "pending", "marks", "clients", "announced", "waiters", "done", "freed")


class Difference(AssertionError):
    """Redis and the ledger differ."""


class Clock:
    """The time of a history, for the modules of the backend. Far ahead of the machine's, so that no deadline comes."""

    def __init__(self) -> None:
        self.now = float(int(time.monotonic()) + 500_000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# --- both sides -------------------------------------------------------------------------------------------------------


@dataclass
class _Begun:
    """A put as each side knows it."""

    command: commands.BeginPut
    put: Any
    write: bytes
    commit: dict[str, Any] = field(default_factory=dict)


class BothSides:
    """A ledger and a store on Redis that take the same steps."""

    def __init__(self, backend: RedisBackend, clock: Clock, capacity_bytes: int | None) -> None:
        self.backend, self.clock = backend, clock
        self.ledger = Ledger(capacity_bytes=capacity_bytes)
        self.capacity_bytes = capacity_bytes or 0
        self.clients = ClientRegister()
        self.count = 0
        self.begun: list[_Begun] = []  # the last one last
        self.waiting: list[_Begun] = []
        self.claims: list[tuple[str, str, list[str], str]] = []
        self.done: list[tuple[float, Callable[[], Any]]] = []  # when, and how to repeat it
        self.versions: dict[str, str | None] = {}  # of claims that wait
        self.is_last_put_done = False

    @property
    def now(self) -> float:
        return self.clock.now

    def session(self) -> Any:
        return self.backend._session

    def step(self, name: str, arguments: dict[str, Any]) -> None:
        self.count += 1
        self.clock.now += TICK_S
        getattr(self, name)(**arguments)

    def told(self, act: Callable[[], Any]) -> Any:
        """A reply, or what a refusal says besides its words."""
        try:
            return act()
        except AlreadyDoneError:
            return None
        except DataPlaneError as error:
            return _Refusal(type(error).__name__, dict(_facts(error)))

    def both(
        self,
        command: commands.Command[Any],
        redis: Callable[[], Any],
        of_ledger: Callable[[Any], Any] = lambda reply: reply,
        of_redis: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        """Runs a command on both. Returns what both say, or None if they refuse."""
        expected = self.told(lambda: of_ledger(self.ledger.apply(command, self.now)))
        found = self.told(lambda: of_redis(redis()))
        self.same(command, found, expected)
        return None if isinstance(expected, _Refusal) else expected

    def same(self, what: Any, found: Any, expected: Any) -> None:
        if found != expected:
            raise Difference(f"{what}: Redis says {found}. The ledger says {expected}.")

    def asked(self, **asked: Any) -> dict[str, Any]:
        return asked | {"deadline": self.now + 30.0}

    # --- registrations ------------------------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        fields: list[str],
        tasks: list[str],
        total: int | None,
        group: int | None,
        enums: dict[str, list[str]],
        keep: bool,
    ) -> None:
        how, epoch = "keep" if keep else "replace", f"e{self.count}"
        command = commands.RegisterRequest(name, fields, total, tasks, group, enums, epoch, if_exists=how)
        request = RegisterRequest(
            **self.asked(partition_id=name, fields=fields, num_samples=total, consumer_tasks=tasks),
            grpo_group_size=group,
            enums=enums,
            if_exists=how,
            epoch=epoch,
        )
        self.both(command, lambda: self.backend.register_partition(request), of_ledger=lambda reply: reply[0])

    def finish(self, name: str, total: int) -> None:
        known = self.ledger._partitions.get(name)
        if known is not None:
            self.register(name, [], [], total, known.info.grpo_group_size, {}, keep=True)

    def describe(self, name: str) -> None:
        request = DescribeRequest(**self.asked(partition_id=name))
        self.both(commands.DescribeRequest(name), lambda: self.backend.describe_partition(request))

    def list_partitions(self) -> None:
        request = ListPartitionsRequest(**self.asked())
        listed = lambda reply: sorted(reply.partition_ids)  # noqa: E731
        self.both(commands.ListPartitionsRequest(), lambda: self.backend.list_partitions(request), listed, listed)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def new_put(
        self,
        name: str,
        ids: list[str],
        shared: list[int] | None,
        sizes: list[int],
        specs: dict[str, FieldSpec],
        tags: Any,
        ttl_s: float,
        epoch: str | None,
        ticket: str | None = None,
    ) -> _Begun:
        known = self.ledger._partitions.get(name)
        epoch = {None: None, "now": known and known.info.epoch, "old": "e-1"}[epoch]
        write_id, request_id = self.count * 100, f"r{self.count}"
        fields = list(specs)
        together = fields if shared is None else fields[:-1]
        columns: dict[str, Any] = {
            each: [_cell(write_id, each, row, size) for row, size in enumerate(sizes)] for each in together
        }
        if shared is not None:
            first = write_id + (len(ids) if together else 0)
            rows = [_cell(first, fields[-1], row, 8) for row in range(max(shared) + 1)]
            columns[fields[-1]] = SharedRows(rows, shared)
        command = commands.BeginPut(
            *(name, ids, specs, writes_of(columns, len(ids), None), tags, epoch),
            write_id=write_id,
            ticket=ticket,
            ttl_s=ttl_s,
            request_id=request_id,
        )
        put = self.new_redis_put(command, columns, waits=ticket is not None)
        return _Begun(command, put, self.backend._payload.placing.new_write())

    def new_redis_put(self, command: Any, columns: dict[str, Any], waits: bool = False, left_s: float = 0.0) -> Any:
        specs = getattr(command, "specs", {})
        request = PutRequest(
            deadline=self.now + getattr(command, "ttl_s", left_s + GRACE_S) - GRACE_S,
            partition_id=command.partition_id,
            sample_ids=command.sample_ids,
            columns=columns,
            specs=specs,
            tags=command.tags,
            epoch=command.epoch,
            request_id=command.request_id,
        )
        writes = writes_of(columns, len(command.sample_ids), None)
        return _puts._Put(
            what="put",
            request=request,
            writes=writes,
            size_bytes=sum(sum(write.row_bytes) for write in writes),
            parts=pack_parts(writes, specs),
            tags=[pack_tags(row) for row in command.tags or ()],
            capacity_bytes=self.capacity_bytes,
            waits=waits,
        )

    def put(self, at_once: bool, **drawn: Any) -> None:
        begun = self.new_put(**drawn)
        if not at_once:
            if self.begin_both(begun):
                self.commit_both(begun)
        else:
            self.put_at_once(begun)
            self.done = [*self.done[-6:], (self.now, lambda: self.put_at_once(begun))]

    def put_at_once(self, begun: _Begun) -> None:
        """In one script. May be repeated."""

        def both_steps() -> None:
            self.ledger.apply(begun.command, self.now)
            self.ledger.apply(commands.CommitPut(begun.command.write_id), self.now)

        expected, found = self.told(both_steps), self.told(lambda: self.backend._put_inline(begun.put))
        self.same(begun.command, found, expected)

    def put_tags(self, name: str, ids: list[str], tags: Any) -> None:
        command = commands.PutTags(name, ids, tags, None, request_id=f"r{self.count}", left_s=30.0)
        put = self.new_redis_put(command, {}, left_s=30.0)

        def act() -> None:
            self.both(command, lambda: self.backend._put_inline(put))

        act()
        self.done = [*self.done[-6:], (self.now, act)]

    def begin(self, **drawn: Any) -> None:
        begun = self.new_put(**drawn)
        if self.begin_both(begun):
            self.begun.append(begun)

    def begin_both(self, begun: _Begun) -> bool:
        """Whether both have begun it."""

        def on_redis() -> bool:
            reply = self.session().run("put", self.now + 30.0, "put", **begun.put.asked("begin", begun.write))
            if reply[0] == b"full":
                raise self.session().instance.full_error("put", begun.put.size_bytes, reply[1], reply[2])
            if reply[0] != b"ok":
                _puts._raise_refused(begun.put, reply)
            begun.commit = begun.put.asked("commit", begun.write, reply[1], reply[2])
            return True

        return self.both(begun.command, on_redis, of_ledger=lambda reply: True) is not None

    def commit(self, ago: int) -> None:
        if ago < len(self.begun):
            self.commit_both(self.begun.pop(-1 - ago))

    def commit_both(self, begun: _Begun) -> None:
        self.both(
            commands.CommitPut(begun.command.write_id),
            lambda: self.backend._write(begun.put, begun.write, begun.commit),
            of_ledger=lambda reply: None,
        )

    def abort(self, ago: int) -> None:
        if ago < len(self.begun):
            self.abort_both(self.begun.pop(-1 - ago))

    def abort_both(self, begun: _Begun) -> None:
        self.both(
            commands.AbortPut(begun.command.write_id),
            lambda: self.session().run("abort", self.now + 30.0, "abort", write=begun.write),
            of_ledger=lambda reply: None,
            of_redis=lambda reply: None,
        )

    # --- room ---------------------------------------------------------------------------------------------------------

    def wait_for_room(self, **drawn: Any) -> None:
        self.ask_both(self.new_put(**(drawn | {"ttl_s": 33.0}), ticket=f"w{self.count}"))

    def ask_for_room(self, ago: int) -> None:
        if ago < len(self.waiting):
            self.ask_both(self.waiting.pop(ago))

    def ask_both(self, begun: _Begun) -> None:
        """A put that waits asks again. Without room, it goes on waiting, in its place."""
        if self.begin_both(begun):
            self.commit_both(begun)
            return
        refusal = self.told(lambda: self.ledger.apply(commands.CheckPut(begun.command, self.capacity_bytes), self.now))
        if isinstance(refusal, _Refusal) and refusal.name == "CapacityExceededError" and refusal.facts["retryable"]:
            left_s = max(0.0, begun.put.request.deadline - self.now)
            self.ledger.apply(commands.WaitForRoom(begun.command.ticket, begun.put.size_bytes, left_s), self.now)
            if left_s > 0:
                self.waiting = sorted([*self.waiting, begun], key=lambda each: each.command.write_id)
                return
        self.leave_both(begun)

    def give_up_waiting(self, ago: int) -> None:
        if ago < len(self.waiting):
            self.leave_both(self.waiting.pop(ago))

    def leave_both(self, begun: _Begun) -> None:
        self.ledger.apply(commands.WaitForRoom(begun.command.ticket, begun.put.size_bytes, 0.0), self.now)
        self.abort_both(begun)

    def repeat(self, ago: int) -> None:
        """A request whose reply was lost comes again, while its id is kept."""
        if ago < len(self.done):
            at, act = self.done[-1 - ago]
            if self.now - at < 50.0:
                act()

    # --- reads --------------------------------------------------------------------------------------------------------

    def locate(self, name: str, ids: list[str], fields: list[str]) -> None:
        def cells(located: commands.Located) -> Any:
            found: dict[str, list[Any]] = {each: [None] * len(ids) for each in fields}
            for part in located.parts:
                for each in part.fields:
                    for row, position in zip(part.rows, part.positions, strict=True):
                        found[each][row] = b"%d:%b:%d" % (part.write_id, each.encode(), position)
            return found, located.specs

        def read(batch: Any) -> Any:
            found = {}
            for each, column in batch.columns.items():
                is_shared = isinstance(column, SharedRows)
                rows = [column.rows[row] for row in column.index] if is_shared else column
                found[each] = [bytes(cell).rstrip(b".") for cell in rows]
            return found, batch.specs

        request = GetRequest(**self.asked(partition_id=name, sample_ids=ids, fields=fields))
        self.both(commands.Locate(name, ids, fields), lambda: self.backend.get_samples(request), cells, read)

    def list_samples(self, name: str, tag_filter: Any, ids: list[str] | None) -> None:
        request = ListRequest(**self.asked(partition_id=name, tag_filter=tag_filter, sample_ids=ids))
        listed = lambda reply: (list(reply.sample_ids), [_exact(each) for each in reply.tags])  # noqa: E731
        command = commands.ListRequest(name, tag_filter, ids)
        self.both(command, lambda: self.backend.list_samples(request), listed, listed)

    def list_fields(self, name: str, ids: list[str]) -> None:
        request = FieldsRequest(**self.asked(partition_id=name, sample_ids=ids))
        listed = lambda reply: [sorted(reply.patterns[each]) for each in reply.index]  # noqa: E731
        self.both(commands.FieldsRequest(name, ids), lambda: self.backend.list_fields(request), listed, listed)

    def inspect(self, name: str) -> None:
        def counts(told: Any) -> Any:
            tasks = {
                task: (one.num_ready, one.num_leased, one.num_consumed, self.checked(name, task, one.oldest_lease))
                for task, one in told.tasks.items()
            }
            age = None if told.oldest_s is None else round(told.oldest_s, 4)
            held = told.num_samples, told.num_cleared, told.held_bytes, age, dict(told.num_rows)
            return told.info, told.specs, *held, tasks

        request = InspectRequest(**self.asked(partition_id=name))
        self.both(commands.InspectRequest(name), lambda: self.backend.inspect_partition(request), counts, counts)

    def checked(self, name: str, task: str, lease: Any) -> Any:
        """What a description says of a lease. Of several that are alike, either side may name any."""
        if lease is None:
            return None
        hold = self.ledger._partitions[name].rows[lease.sample_id].holds[task]
        if (hold.holder, round(hold.expires_at - self.now, 4)) != (lease.holder, round(lease.left_s, 4)):
            raise Difference(f"the lease of {lease.sample_id} is {hold}: {lease}")
        return None if lease.held_s is None else round(lease.held_s, 4)

    def export(self, name: str) -> None:
        request = ExportRequest(**self.asked(partition_id=name))
        self.both(commands.ExportRequest(name), lambda: self.backend.export_partition(request))

    # --- claims -------------------------------------------------------------------------------------------------------

    def set_cursor(self, name: str, task: str, ids: list[str], create: bool) -> None:
        request = SetCursorRequest(**self.asked(partition_id=name, task_name=task, sample_ids=ids, create=create))
        command = commands.SetCursorRequest(name, task, ids, create)
        self.both(command, lambda: self.backend.set_cursor(request), of_redis=lambda reply: reply.num_samples)

    def claim(self, name: str, task: str, fields: list[str], size: int, explain: bool, **asked: Any) -> None:
        token, holder = f"k{self.count}", f"h{self.count % 3}"
        question = repr((name, task, sorted(fields), size, asked["tag_filter"]))
        since = self.versions.pop(question, None) if asked["all_or_nothing"] else None
        request = ClaimRequest(
            **self.asked(partition_id=name, task_name=task, required_fields=fields, batch_size=size, **asked),
            explain=explain,
            token=token,
            holder=holder,
            since=since,
        )

        def given(claim: Any) -> Any:
            told = [list(claim.sample_ids), [_exact(each) for each in claim.tags], claim.exhausted]
            if claim.sample_ids:
                told += [claim.lease_tokens]
            elif explain and not claim.answered:
                told += [claim.num_ready, self.lacking(name, task, claim.shortfall)]
            self.versions[question] = claim.version or self.versions.get(question)
            return told

        command = commands.ClaimRequest(name, task, fields, size, token=token, holder=holder, explain=explain, **asked)
        told = self.both(command, lambda: self.backend.claim(request), given, given)
        if told and told[0] and asked["lease_s"] is not None:
            self.claims = [*self.claims[-8:], (name, task, told[0], token)]
        if explain:  # Redis keeps it a moment for others who ask the same
            keys = self.redis("KEYS", f"{self.session().base.decode()}:why:*".replace("{", "\\{"))
            if keys:
                self.redis("DEL", *keys)

    def lacking(self, name: str, task: str, shortfall: Any) -> Any:
        leased = [self.checked(name, task, each) or round(each.left_s, 4) for each in shortfall.leased]
        rest = (
            shortfall.num_not_matching,
            shortfall.not_matching,
            shortfall.num_incomplete,
            list(shortfall.incomplete_groups.items()),
        )
        return leased, shortfall.num_leased, *rest, shortfall.num_lacking, list(shortfall.missing_cells.items())

    def settle(self, op: str, ago: int, part: int, more: int, lease_s: float, wrong: bool) -> None:
        if ago >= len(self.claims):
            return
        name, task, ids, token = self.claims[-1 - ago]
        ids = ids[part and len(ids) // 2 :] if part < 2 else ids[: max(1, len(ids) // 2)]
        tokens = [token] * len(ids)
        older = self.claims[: len(self.claims) - 1 - ago][-more:] if more else []
        for other_name, other_task, other_ids, other_token in older:
            rest = [each for each in other_ids if each not in ids]
            if (other_name, other_task) == (name, task):
                ids, tokens = [*ids, *rest], [*tokens, *[other_token] * len(rest)]
        if wrong:
            tokens = ["nobody's", *tokens[1:]]
        request_id = f"s{self.count}"
        asked = self.asked(
            partition_id=name, task_name=task, sample_ids=ids, lease_tokens=tokens, request_id=request_id
        )
        told: dict[str, Any] = {"request_id": request_id, "left_s": 30.0}
        if op == "renew":
            command: Any = commands.RenewRequest(name, task, ids, tokens, lease_s, **told)
            call: Any = lambda: self.backend.renew(RenewRequest(**asked, lease_s=lease_s))  # noqa: E731
        elif op == "ack":
            command, call = (
                commands.AckRequest(name, task, ids, tokens, **told),
                lambda: self.backend.ack(AckRequest(**asked)),
            )
        else:
            command = commands.NackRequest(name, task, ids, tokens, **told)
            call = lambda: self.backend.nack(NackRequest(**asked))  # noqa: E731

        def act() -> None:
            self.both(command, call, of_redis=lambda reply: None)

        act()
        self.done = [*self.done[-6:], (self.now, act)]

    def consumed(self, name: str, tasks: list[str]) -> None:
        request = ConsumptionRequest(**self.asked(partition_id=name, task_names=tasks))
        command = commands.ConsumptionRequest(name, tasks)
        self.both(command, lambda: self.backend.check_consumption(request), of_redis=lambda reply: reply.consumed)

    # --- clearing, clients, time --------------------------------------------------------------------------------------

    def clear(self, name: str, ids: list[str] | None) -> None:
        request = ClearRequest(**self.asked(partition_id=name, sample_ids=ids))
        self.both(
            commands.ClearRequest(name, ids),
            lambda: self.backend.clear_samples(request),
            of_ledger=lambda reply: reply[0],
            of_redis=lambda reply: reply.num_samples,
        )
        held = self.redis("HGET", self.session().base + b":instance", "held")  # now both have given up what they may
        self.same("bytes held", int(held or 0), self.ledger.held_bytes)

    def clear_all(self, name: str) -> None:
        self.clear(name, None)

    def announce(self, client: str, ttl_s: float) -> None:
        info = ClientInfo(client_id=client, host="here", pid=self.count, role="", open_s=0.0, num_calls=0, calls=[])
        expected = self.clients.announce(info, ttl_s, self.now)
        found = self.backend.announce(AnnounceRequest(**self.asked(client=info, ttl_s=ttl_s)))
        self.same("announced", found.num_clients, expected)

    def list_clients(self) -> None:
        def told(clients: Any) -> Any:
            return sorted((each.client_id, each.pid, each.state, round(each.heard_s, 4)) for each in clients)

        for ended in (False, True):
            found = self.backend.list_clients(ListClientsRequest(**self.asked(ended=ended))).clients
            self.same("clients", told(found), told(self.clients.listed(self.now, ended)))

    def wait(self, seconds: float) -> None:
        """Puts that wait for room ask more often than the seconds for which either side keeps their place."""
        if seconds > 4.0:
            while self.waiting:
                self.leave_both(self.waiting.pop())
        else:
            for each in range(len(self.waiting)):
                self.ask_for_room(each)
        self.clock.now += seconds

    # --- the end ------------------------------------------------------------------------------------------------------

    def redis(self, *words: Any) -> Any:
        return self.session().command(
            "test", self.now + 30.0, *(each if isinstance(each, bytes) else str(each).encode() for each in words)
        )

    def end(self) -> None:
        """Compares what is there, drops it, and looks at what is left."""
        for name in NAMES:
            self.list_samples(name, None, None)
            self.inspect(name)
            self.export(name)
            self.list_fields(name, [])
        for name in NAMES:
            self.clear_all(name)
        self.wait(100.0)
        self.clear_all("nobody")
        self.same("bytes held", self.ledger.held_bytes, 0)
        base = self.session().base
        for _ in range(200):
            if not self.session().run("collect", self.now + 30.0, "collect", limit=100, deleted=[])[1]:
                break
        keys = [each[len(base) + 1 :] for each in self.redis("KEYS", base.replace(b"{", b"\\{") + b"*")]
        keys = [each for each in keys if each.decode().split(":")[0] not in LEFT]
        left = [each for each in keys if self.redis("PTTL", base + b":" + each) == -1]  # others end by themselves
        self.same("keys left", left, [])


@dataclass(frozen=True)
class _Refusal:
    name: str
    facts: dict[str, Any] = field(default_factory=dict)


def _facts(error: DataPlaneError) -> Iterator[tuple[str, Any]]:
    """What an error says besides its words. How full a store is, only the words say."""
    for name, each in vars(error).items():
        if name not in ("message", "hint", "backend", "outcome", "ask_again_s", "tried") and not name.startswith("_"):
            yield name, each


def _exact(tags: Any) -> list[tuple[str, str, Any]]:
    """So that 1, 1.0 and True differ."""
    return sorted((name, type(value).__name__, value) for name, value in tags.items())


def _cell(write_id: int, name: str, row: int, size: int) -> bytes:
    return (b"%d:%b:%d" % (write_id, name.encode(), row)).ljust(size, b".")
