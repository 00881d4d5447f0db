"""Random histories of requests to a real store, each answer compared with the ledger's: see `histories`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, Final

import torch
from msgspec.structs import replace

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    BackendUnavailableError,
    DataPlaneError,
    LeaseExpiredError,
    LostSamplesError,
    MissingDataError,
    SchemaMismatchError,
    UnsupportedOperationError,
)
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import OPERATIONS, Capability, Claim, this_process
from dataplane_testkit._columns import as_objects, check_column, items_of, jagged, same_items
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._profiles import by_profile, fewest, is_long, new_seed
from dataplane_testkit._store import BOUNDED_BYTES, Store, Suite, check_error, no_polls
from dataplane_testkit._timing import PROMPT_S, Background, bounded, eventually
from dataplane_testkit.faults import Faults
from dataplane_testkit.histories import (
    LARGE,
    PARTITIONS,
    ROOM_FOR,
    SHORT_S,
    TASKS,
    Faulty,
    History,
    Put,
    Stay,
    Step,
    reply_of,
)
from dataplane_testkit.rules import sentences_of

#: How many histories, and how many steps each has. The short ones come first: what they find is easy to read.
_HISTORIES: Final = {8: 32, 25: 48, 60: 44}
_BOUNDED: Final = {25: 16}
#: How often a history that failed is run again at most, and for how many seconds, to find the steps that matter.
_MOST_RUNS, _MOST_S = 150, 30.0
#: Bytes of a cell that fits into a store without others, and into none with what a few refused puts leaked.
_BRIM: Final = 19 * BOUNDED_BYTES // 20
#: The most seconds that a call may take that can be answered. Only a hang takes as long.
_ANSWER_S: Final = 6 * PROMPT_S
#: The type of a step -> the hook that it is for.
_HOOKS: Final[Mapping[type, str]] = {
    **{operation.request: hook for hook, operation in OPERATIONS.items()},
    Put: "put_samples",
    commands.Locate: "get_samples",
}
#: Hook -> the rule that its answer proves. Parts of some answers prove others, see `facts`.
_RULES: Final = {
    "describe_partition": "register",
    "claim": "claim",
    **dict.fromkeys(("ack", "nack", "renew"), "settle"),
    "check_consumption": "consumed",
    "clear_samples": "clear",
    "list_samples": "list",
    "list_partitions": "list_partitions",
    "inspect_partition": "describe",
    "list_fields": "list_fields",
    "export_partition": "list_consumed",
    "set_cursor": "reset",
}
#: What a comparison proves -> the sentence of docs/contract.md, and what to check first.
RULES: Final = sentences_of("machine")
#: A rule, what is compared, and its value.
Fact = tuple[str, str, Any]


class Broken(AssertionError):
    def __init__(self, rule: str, text: str) -> None:
        sentence, hint = RULES[rule]
        super().__init__(f'{text}\nThe last step breaks the contract: "{sentence}"\nCheck first: {hint}')


def same(rule: str, answer: Any, expected: Any, what: str) -> None:
    if answer != expected:
        raise Broken(rule, f"{what}: {answer!r}, expected {expected!r}")


@contextmanager
def proving(rule: str) -> Iterator[None]:
    """Names the rule that an assertion of the block proves."""
    try:
        yield
    except Broken:
        raise
    except AssertionError as error:
        raise Broken(rule, str(error)) from error


def _column(kind: str, rows: list[Any]) -> Any:
    if kind in ("ragged", "short"):
        return jagged(rows)
    if kind == "objects":
        return as_objects(*rows)
    return rows if isinstance(rows[0], list) else torch.stack(rows)


def _plain(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return [row.tolist() for row in column.unbind()]
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in items_of(column)]


def _scribble(thing: Any) -> None:
    """The caller uses its memory for something else."""
    if isinstance(thing, torch.Tensor):
        (thing.values() if thing.is_nested else thing).zero_()
    elif isinstance(thing, (list, dict)):
        for item in thing.values() if isinstance(thing, dict) else thing:
            _scribble(item)
        thing.clear()
    elif thing is not None and not isinstance(thing, (int, float, str)):
        _scribble(items_of(thing))


def _exact(tags: Iterable[Mapping[str, Any]]) -> list[list[tuple[str, str, str]]]:
    """So that 1, 1.0 and True differ, and NaN is NaN."""
    return [sorted((name, type(value).__name__, repr(value)) for name, value in row.items()) for row in tags]


def facts(hook: str, rule: str, reply: Any, base: str) -> Iterator[Fact]:
    """What is compared of a reply whose names may begin with ``base``: in that of the ledger they do not."""
    match hook:
        case "register_partition" | "describe_partition":
            yield "identity", "the epoch of the registration", reply.epoch.removeprefix(base)
            yield rule, "the registration", reply.registration()
        case "claim":
            yield rule, "the ids claimed", list(reply.sample_ids)
            yield "tags", "the tags claimed", _exact(reply.tags)
            tokens = reply.lease_tokens
            yield "identity", "the lease tokens", tokens and [token.removeprefix(base) for token in tokens]
        case "list_samples":
            yield "order", "the ids listed", list(reply.sample_ids)
            yield "tags", "the tags listed", _exact(reply.tags)
        case "list_fields":
            yield rule, "the fields", [sorted(reply.patterns[place]) for place in reply.index]
        case "export_partition":
            yield rule, "what tasks have consumed", {task: list(ids) for task, ids in reply.consumed.items()}
            yield "clear", "the ids that were cleared", sorted(reply.cleared_ids)
            yield "clear", "the groups that lost a member", sorted(reply.broken_groups)
        case "inspect_partition":
            yield from facts("describe_partition", "keep", reply.info, base)
            yield rule, "the schema", dict(reply.specs)
            yield rule, "the samples, and those that were cleared", (reply.num_samples, reply.num_cleared)
            yield rule, "whether there is no oldest sample", reply.oldest_s is None
            yield "describe tasks", "the tasks", sorted(reply.tasks)
            yield "describe rows", "the samples that have a field", dict(reply.num_rows)
            for name, task in reply.tasks.items():
                counts = (task.num_ready, task.num_leased, task.num_consumed)
                yield "describe tasks", f"what is ready, leased and consumed of {name}", counts
                yield "oldest", f"whether {name} has a lease", task.oldest_lease is not None
        case "list_partitions":
            yield rule, "the names", sorted(name.removeprefix(base) for name in reply if name.startswith(base))
        case _:
            yield rule, "the reply", reply


class StoreMachine:
    """Two partitions of a real store, and a ledger that takes the same steps. The clients take turns.

    ``bounded``: the clients are those of another store, with a capacity.
    """

    def __init__(self, store: Store, clients: Sequence[DataPlaneClient], *, bounded: bool = False) -> None:
        self.store = store
        self.clients = clients
        self.client = clients[0]  # takes the step
        self.bounded = bounded
        self.wakes = store.declares(Capability.WAKES)  # then claims that wait do not ask by themselves
        self.owns_reads = "test_what_comes_back_is_owned_by_the_caller" not in store.case.all_deviations()
        capacity_bytes = ROOM_FOR * LARGE if bounded else None
        self.ledger = Ledger(overwrite=store.declares(Capability.OVERWRITE), capacity_bytes=capacity_bytes)
        self.now = 0.0  # by the clock of the ledger, which only steps move
        self.base = store.new_id()  # begins all names and ids that the store is given
        self.steps: list[Step] = []
        self.cells: dict[tuple[str, str, str], Any] = {}
        self.leased_at: dict[tuple[str, str, str], float] = {}  # a leased sample -> when, by the clock of the ledger
        self.short: set[str] = set()  # tokens of leases that end soon
        self.ends_soon = False  # the step under way settles one of these
        self.staying: tuple[Stay, Background] | None = None
        self.stay_token: str | None = None  # of the claim that waits, or waited last
        self.is_over = False
        self.fault: str | None = None  # of the step that is taken
        self.reply: Any = None  # of the ledger to the last step

    def partition(self, name: str) -> str:
        return f"{self.base}{name}"

    def drawn(self, seed: int, num_steps: int) -> Iterator[Step]:
        """The steps of a history. Each depends on what the ledger replied to those before."""
        about = self.store.backend_class
        narrows = self.store.backend.narrow and (about.wire.bytes or about.wire.narrow)
        options: dict[str, Any] = {"bounded": self.bounded, "narrows": narrows}
        options |= {"shares": about.wire.shared_rows, "by_content": about.wire.by_content}
        history = History(random.Random(seed), about.capabilities, real=True, **options)
        while len(self.steps) < num_steps:
            step = history.step(self.ledger, self.now)
            yield step
            history.heard(step, self.reply)

    def run(self, steps: Iterable[Step]) -> Failure | None:
        try:
            with self.ending():
                for step in steps:
                    if self.is_over:
                        break
                    self.reply = self.take(step)
        except Exception as error:  # also what a store must not raise
            return Failure(self.steps, error)
        return None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Compares once more what is there at the end, drops it, and looks at what is left in the engine."""
        audits = self.clients[0] is self.store.client and self.store.can_say_held
        grown: Callable[[], int] = self.store.held() if audits else lambda: 0
        with no_polls(*self.clients) if self.wakes else nullcontext(), ExitStack() as naming:
            for faults in {Faults.of(client) for client in self.clients}:
                naming.enter_context(faults.before("claim", self.name_token))
            try:
                yield
                self.end()
                with proving("payload"):
                    eventually(lambda: grown() <= 0, what="that the engine deletes what was cleared or refused")
            finally:
                for name in PARTITIONS:
                    with suppress(DataPlaneError):
                        self.clients[0].clear_samples(None, self.partition(name))

    def end(self) -> None:
        """Reads every cell, lists and counts what there is, and clears it."""
        for name in PARTITIONS if not self.is_over else ():
            for field in sorted({key[2] for key in self.cells if key[0] == name}):
                ids = [key[1] for key in self.cells if (key[0], key[2]) == (name, field)]
                self.take(commands.Locate(name, ids, [field]))
            if self.store.declares(Capability.LISTING):
                self.take(commands.ListRequest(name))
                self.take(commands.InspectRequest(name))
            for task in TASKS if self.store.declares(Capability.CLAIMS) else ():
                self.take(commands.ConsumptionRequest(name, [task]))
        for name in PARTITIONS:
            self.clients[0].clear_samples(None, self.partition(name))
        if self.staying is not None:
            with suppress(KeyError):
                self.staying[1].result(_ANSWER_S, "a claim whose partition was cleared")
        if self.bounded and not self.is_over:
            self.fill()

    def fill(self) -> None:
        """All of the room can be used again."""
        partition, client = self.partition(PARTITIONS[0]), self.clients[0]
        client.register_partition(partition, ["x"], None, [])
        try:
            client.put_samples(["brim"], partition, {"x": torch.zeros(1, _BRIM, dtype=torch.uint8)})
        except DataPlaneError as error:
            raise Broken("room", f"a store that was emptied does not take what it took before: {error}") from error

    # --- a step -------------------------------------------------------------------------------------------------------

    def take(self, step: Step) -> Any:
        """Takes a step on the store and on the ledger, and compares the answers. Returns that of the ledger."""
        self.ends_soon = isinstance(step, commands.SettleRequest) and bool(self.short.intersection(step.lease_tokens))
        if not self.ends_soon:
            self.await_short_leases()
        again = any(step is earlier for earlier in self.steps)
        self.steps.append(step)
        self.client = self.clients[len(self.steps) % len(self.clients)]
        if isinstance(step, Faulty):
            self.fault, step = step.fault, step.step
        match step:
            case Put():
                reply = self.put(step, again)
            case commands.Locate():
                reply = self.read(step)
            case Stay():
                reply = self.stay(step)
            case _:
                reply = self.answer(step, *self.expected(step), again)
        self.fault = None  # a step that makes no call has none
        self.look_at_who_stays()
        return reply

    def expected(self, step: Any) -> tuple[Any, DataPlaneError | None]:
        """The reply of the ledger to a step, or its error."""
        self.now += 2**-20  # no two claims at the same time, and no lease ends unless time is said to pass
        if isinstance(step, Put):
            return _attempt(lambda: step.take(self.ledger, self.now))
        reply, error = _attempt(lambda: self.ledger.apply(step, self.now))
        return reply[0] if isinstance(reply, tuple) else reply, error  # behind it are refs to delete

    def agree(self, rule: str, what: str, expected: DataPlaneError | None, hook: str, call: Callable[[], Any]) -> Any:
        """Makes a call of the store, which must succeed or be refused as the ledger says. Returns its result.

        With the fault of a step there may be neither a result nor an error.
        """
        fault, self.fault = self.fault, None
        faults, answer = Faults.of(self.client), partial(_attempt, partial(bounded, call, _ANSWER_S, what))
        if fault == "late":
            with faults.late(hook):
                _, late = answer()
            if not isinstance(late, (TimeoutError, KeyError, ValueError, NoneType)):
                raise Broken("deadline", f"{what}, after its deadline, raised {late!r}, expected a TimeoutError")
        if fault == "lost":
            lost = BackendUnavailableError("the reply was lost.")

            def lose(request: Any, reply: Any) -> Any:
                if getattr(request, "token", "") == self.stay_token:  # one that waits asks meanwhile
                    return reply
                raise lost

            with faults.after(hook, lose):
                _, error = answer()
            if error is None:
                raise Broken("lost", f"{what} succeeded, though its reply was lost")
            self.judge(rule, what, expected, None if error is lost else error)
            return None
        result, error = answer()
        self.judge(rule, what, expected, error)
        return result

    def judge(self, rule: str, what: str, expected: DataPlaneError | None, error: DataPlaneError | None) -> None:
        """A call must have succeeded or have been refused as the ledger says."""
        if error is not None:
            with proving("errors"):
                check_error(error, self.store.name)
        if self.ends_soon and isinstance(error, LeaseExpiredError):  # the ledger's clock stood still meanwhile
            self.is_over = self.is_over or expected is None  # it cannot take back that they were settled
            return
        if expected is None:
            if error is not None:
                raise Broken(rule, f"{what} should have succeeded: {type(error).__name__}: {error}") from error
            return
        if error is None:
            raise Broken(rule, f"{what} succeeded, but should have raised: {expected!r}")
        if _builtin(error) is not _builtin(expected):
            raise Broken(rule, f"{what} raised {error!r}, expected {expected!r}") from error
        if isinstance(expected, LeaseExpiredError):
            same("settle", sorted(getattr(error, "sample_ids", ())), sorted(expected.sample_ids), "the ids named")
        if isinstance(expected, MissingDataError) and not isinstance(error, LostSamplesError):
            for name in ("missing_samples", "missing_cells"):
                missing, named = getattr(expected, name), getattr(error, name, ())
                if not set(named) <= set(missing) or bool(named) != bool(missing):
                    raise Broken("missing", f"{what} named {named}, expected some of {missing}")

    def named(self, request: Any) -> Any:
        """The request as the store gets it: with names and ids that no other history has."""
        ids: dict[str, Any] = {
            name: f"{self.base}{value}"
            for name in ("partition_id", "request_id", "token", "epoch")
            if (value := getattr(request, name, None)) is not None
        }
        if isinstance(request, commands.SettleRequest):
            ids["lease_tokens"] = [f"{self.base}{token}" for token in request.lease_tokens]
        return replace(request, **ids)

    # --- requests that are sent as they are ---------------------------------------------------------------------------

    def answer(self, step: Any, expected: Any, error: DataPlaneError | None, again: bool = False) -> Any:
        """Sends the request of a step, and compares the reply with that of the ledger, which it returns."""
        hook, request, hooks = _HOOKS[type(step)], self.named(step), Hooks(self.client)
        rule = "repeat" if again else self.rule_of(hook, step, expected)
        send = partial(hooks.call, request)
        reply = self.agree(rule, hook, error, hook, send)
        if error is None and reply is not None:
            explains = getattr(step, "questions", ()) or (getattr(step, "explain", False) and not expected.answered)
            until_it_agrees(partial(self.compare, hook, rule, step, expected), reply, send if explains else None)
        if error is None:
            self.happened(step, hook, expected)
        return expected

    def rule_of(self, hook: str, step: Any, expected: Any) -> str:
        """What the answer to a request proves."""
        if hook == "register_partition":
            return "keep" if step.if_exists == "keep" else "register"
        if isinstance(expected, Claim):
            if expected.counts_groups:
                return "rollouts"
            if step.all_or_nothing and expected.answered and len(expected.sample_ids) < step.batch_size:
                return "tail"
            return "ranks" if step.dp_rank is not None else "claim"
        return _RULES[hook]

    def compare(self, hook: str, rule: str, step: Any, expected: Any, reply: Any) -> None:
        """Compares the reply of the store with that of the ledger."""
        for (about, what, value), (_, _, right) in zip(
            facts(hook, rule, reply, self.base), facts(hook, rule, expected, ""), strict=True
        ):
            same(about, value, right, what)
        if hook == "claim" and step.all_or_nothing:
            same(rule, reply.answered, expected.answered, "whether the claim is answered")
            if step.explain and not expected.answered:
                same("shortfall", reply.num_ready, expected.num_ready, "how many samples were ready")
                check_shortfall("shortfall", reply.shortfall, expected.shortfall)
        if hook == "inspect_partition":
            if not any(key[0] == step.partition_id for key in self.cells):
                same("payload", reply.held_bytes, 0, "the bytes that it holds")
            for task, of in expected.tasks.items():
                self.check_oldest(step.partition_id, task, reply.tasks[task].oldest_lease, of.oldest_lease)
            for answer, right in zip(reply.answers, expected.answers, strict=True):
                same("questions", answer is None, right is None, "whether there is no such task")
                if right is not None:
                    same("questions", answer.num_ready, right.num_ready, "the samples that are ready")
                    check_shortfall("questions", answer.shortfall, right.shortfall)

    def check_oldest(self, name: str, task: str, lease: Any, expected: Any) -> None:
        """Of leases that were given together, a description may name any. A renewed lease keeps its place."""
        if lease is not None:
            same("oldest", lease.holder, this_process(), "the holder of the oldest lease")
            at, oldest = (self.leased_at.get((name, task, of.sample_id)) for of in (lease, expected))
            if at is not None and oldest is not None:
                same("oldest", at, oldest, f"when '{lease.sample_id}' was leased, of the oldest lease")

    def happened(self, step: Any, hook: str, expected: Any) -> None:
        """Looks at what the store holds after a request that was carried out."""
        if hook == "claim":
            self.was_given(step, expected)
        elif hook == "clear_samples":
            self.forget(step.partition_id, step.sample_ids)
        elif hook == "register_partition":
            if step.if_exists == "replace":
                self.forget(step.partition_id, None)
            described = commands.DescribeRequest(step.partition_id)
            self.answer(described, *self.expected(described))

    def forget(self, name: str, ids: Sequence[str] | None) -> None:
        for key in [key for key in self.cells if key[0] == name and (ids is None or key[1] in ids)]:
            del self.cells[key]

    # --- claims -------------------------------------------------------------------------------------------------------

    def was_given(self, claim: commands.ClaimRequest, reply: Claim) -> None:
        """Reads what a claim gave, and keeps its leases."""
        ids = list(reply.sample_ids)
        if reply.lease_tokens:
            if claim.dp_rank is not None:  # those of the other ranks are leased too, and may be the oldest
                about = (claim.partition_id, claim.task_name)
                self.leased_at = {key: at for key, at in self.leased_at.items() if key[:2] != about}
            for sample_id, token in zip(ids, reply.lease_tokens, strict=True):
                if token == claim.token:
                    self.leased_at[claim.partition_id, claim.task_name, sample_id] = self.now
            if claim.lease_s == SHORT_S:
                self.short.add(claim.token)
        if ids and claim.required_fields and claim.dp_rank is None:  # the first claim of a batch chose its fields
            self.read_cells("read", claim.partition_id, ids, claim.required_fields)

    def await_short_leases(self) -> None:
        """Waits until leases have ended that were given for a moment. The ledger's clock jumps."""
        if not self.short or self.is_over:
            return
        self.short.clear()
        time.sleep(2 * SHORT_S)
        self.now += 2 * SHORT_S
        for name in PARTITIONS if self.store.declares(Capability.LISTING) else ():
            described = reply_of(self.ledger, commands.InspectRequest(name), self.now)
            with proving("lease"):
                eventually(partial(self.have_ended, name, described), what="the end of a lease")

    def have_ended(self, name: str, described: Any) -> bool:
        """Whether no task has more leases than the ledger says."""
        if described is None:
            return True
        tasks = self.clients[0].describe(self.partition(name)).tasks
        return all(tasks[task].num_leased <= of.num_leased for task, of in described.tasks.items())

    def name_token(self, request: Any) -> None:
        """Names the claim that waits: the client draws its token."""
        if request.partition_id.startswith(self.base) and not request.token.startswith(self.base):
            request.token = self.stay_token

    def stay(self, step: Stay) -> Any:
        """A claim of a client, which waits until `look_at_who_stays` finds that it can be answered."""
        if self.staying is not None:
            return None
        claim = step.claim
        expected, error = self.expected(claim)
        if error is not None or expected.answered:
            return self.answer(claim, expected, error)
        self.stay_token = f"{self.base}{claim.token}"
        options = {name: getattr(claim, name) for name in ("lease_s", "sampler", "tag_filter")}
        options |= {"client": self.client, "timeout_s": 600.0}
        partition, fields = self.partition(claim.partition_id), claim.required_fields
        self.staying = step, self.store.waiting_claim(partition, claim.batch_size, *fields, **options)
        return None

    def look_at_who_stays(self) -> None:
        """A claim that waits gets its answer if the last step let it be answered."""
        if self.staying is None or self.is_over:
            return
        stay, waiting = self.staying
        expected, error = self.expected(stay.claim)
        if error is None and not expected.answered:
            return
        self.staying = None
        rule, what = "wake" if self.wakes else "wait", "a claim that waited"
        meta = self.agree(rule, what, error, "claim", partial(waiting.result, _ANSWER_S, what))
        if error is None:
            reply = Claim(meta.sample_ids, meta.tags or (), meta.lease_tokens, exhausted=not meta.size)
            self.compare("claim", rule, stay.claim, expected, reply)
            self.was_given(stay.claim, expected)

    # --- puts and reads, which clients encode and decode --------------------------------------------------------------

    def put(self, step: Put, again: bool) -> Any:
        """Puts, and uses the memory of what was put for something else. Returns whether it was carried out."""
        columns = {name: _column(kind, step.rows(name)) for name, kind in step.columns.items()}
        tags = None if step.tags is None else [dict(row) for row in step.tags]

        def call() -> None:
            self.client.put_samples(step.sample_ids, self.partition(step.partition_id), columns or None, tags)
            _scribble([*columns.values(), *(tags or ())])

        def change(request: Any) -> None:
            request.request_id = f"{self.base}r{step.number}"
            request.columns = dict(reversed(request.columns.items()))  # as middleware may that adds one

        with Faults.of(self.client).before("put_samples", change):
            if self.fault == "late":
                return self.put_late(step, call)
            carried_out, error = self.expected(step)
            self.agree("repeat" if again else _rule_of_put(error), "the put", error, "put_samples", call)
        if carried_out:
            self.was_put(step)
        return carried_out

    def was_put(self, step: Put) -> None:
        for name in step.columns:
            for sample_id, row in zip(step.sample_ids, step.rows(name), strict=True):
                self.cells[step.partition_id, sample_id, name] = row

    def put_late(self, step: Put, call: Callable[[], Any]) -> None:
        """A put that the store gets after its deadline: what the error says of it must be true."""
        with Faults.of(self.client).late("put_samples"):
            _, error = _attempt(call)
        would_be = reply_of(self.ledger, step.commands(self.ledger, self.now)[0], self.now)
        outcome = "done" if error is None else getattr(error, "outcome", "unknown")
        if would_be is None:  # refused; the ledger has not changed
            if error is None:
                raise Broken("put refused", "a put after its deadline succeeded, but should have been refused")
            return
        self.ledger.apply(commands.AbortPut(would_be), self.now)
        if not (error is None or isinstance(error, TimeoutError)):
            raise Broken("deadline", f"a put after its deadline raised {error!r}, expected a TimeoutError") from error
        self.was_put(step)
        sample_id, name = step.sample_ids[0], next(iter(step.columns))
        rows, _ = _attempt(lambda: self.client.get_samples([sample_id], self.partition(step.partition_id), [name]))
        is_there = rows is not None and torch.equal(rows[name][0], step.rows(name)[0])
        if outcome == ("not_done" if is_there else "done"):
            raise Broken("outcome", f"the put is {'' if is_there else 'not '}there, but was said to be {outcome}")
        self.is_over = True  # the ledger cannot know what becomes of it

    def read(self, step: commands.Locate) -> Any:
        _, error = self.expected(replace(step, sample_ids=list(dict.fromkeys(step.sample_ids))))
        if error is not None and not isinstance(error, KeyError):
            error = None  # cells of lists whose field has been open: the client reads them in parts
        rule = "missing" if error else "evicted" if self.bounded else "read"
        return self.read_cells(rule, step.partition_id, step.sample_ids, step.fields, error)

    def read_cells(
        self, rule: str, name: str, ids: Sequence[str], fields: Sequence[str], error: DataPlaneError | None = None
    ) -> Any:
        """Reads, compares every cell with what was put, and uses the memory for something else."""
        get = partial(self.client.get_samples, ids, self.partition(name), list(fields))
        rows = self.agree(rule, "the read", error, "get_samples", get)
        for field in fields if rows is not None else ():
            expected, column = [self.cells[name, sample_id, field] for sample_id in ids], rows[field]
            with proving("bits"):
                if field == "l":
                    same("lists", _plain(column), expected, "the lists")
                elif isinstance(expected[0], torch.Tensor):
                    check_column(column, expected)
                else:
                    items = items_of(column)
                    assert len(items) == len(expected), f"{len(items)} objects, expected {len(expected)}"
                    assert all(map(same_items, items, expected)), f"objects {items}, expected {expected}"
            if self.owns_reads:
                _scribble(column)
        return rows


def until_it_agrees(check: Callable[[Any], None], reply: Any, ask_again: Callable[[], Any] | None) -> None:
    """Asks again for a while, if that is possible: a store may tell what it found a moment ago for another claim."""
    give_up = time.monotonic() + PROMPT_S
    while True:
        try:
            return check(reply)
        except Broken:
            if ask_again is None or time.monotonic() > give_up:
                raise
        time.sleep(0.005)
        reply = ask_again()


def check_shortfall(rule: str, shortfall: Any, expected: Any) -> None:
    """Compares why a claim gets no more. Of the leases that end first, it may name any that end together."""
    same(rule, shortfall is None, expected is None, "whether it does not say what is lacking")
    if shortfall is None:
        return
    for name in expected.__struct_fields__:
        if name != "leased":
            same(rule, getattr(shortfall, name), getattr(expected, name), name)
    same(rule, len(shortfall.leased), len(expected.leased), "how many leases it names")
    for lease in shortfall.leased:
        same(rule, lease.holder, this_process(), f"the holder of '{lease.sample_id}'")
        same(rule, 0.0 <= lease.left_s < math.inf, True, "whether it says when the lease ends")


def _attempt(call: Callable[[], Any]) -> tuple[Any, Any]:
    try:
        return call(), None
    except DataPlaneError as error:
        return None, error


def _builtin(error: BaseException) -> type:
    return next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")


def _rule_of_put(error: DataPlaneError | None) -> str:
    if error is None:
        return "put"
    for kind, rule in ((SchemaMismatchError, "schema"), (UnsupportedOperationError, "undeclared")):
        if isinstance(error, kind):
            return rule
    return "room" if isinstance(error, RuntimeError) else "put refused"


@dataclass(frozen=True)
class Failure:
    """A history that failed: the steps up to the failure, and the error."""

    steps: list[Step]
    error: Exception

    def __str__(self) -> str:
        steps = "\n".join(f"    {step}" for step in self.steps)
        return f"{type(self.error).__name__}: {self.error}\nThe steps, the least that still fail:\n{steps}"


def shrunk(failure: Failure, again: Callable[[Sequence[Step]], Failure | None]) -> Failure:
    """The failure of a history with as few steps as leaving out steps can reach within a bounded number of runs."""
    give_up = time.monotonic() + _MOST_S

    def still(steps: list[Step]) -> list[Step] | None:
        nonlocal failure
        shorter = again(steps) if time.monotonic() < give_up else None
        if shorter is None or len(shorter.steps) >= len(failure.steps):
            return None
        failure = shorter
        return shorter.steps

    fewest(failure.steps, still, _MOST_RUNS)
    return failure


class MachineSuite(Suite, chapter="machine"):
    def test_random_histories_agree_with_the_ledger(self, store: Store) -> None:
        self.run(store, [store.client, store.same_store_client()], _HISTORIES, bounded=False)
        if store.declares(Capability.CAPACITY) and store.case.num_ledgers == 1:  # each ledger has its own capacity
            self.run(store, [store.bounded("raise")], _BOUNDED, bounded=True)

    def run(
        self, store: Store, clients: Sequence[DataPlaneClient], histories: Mapping[int, int], *, bounded: bool
    ) -> None:
        """Runs histories. One that fails is shrunk first."""

        def new() -> StoreMachine:
            return StoreMachine(store, clients, bounded=bounded)

        seed = new_seed() if is_long() else 1
        for num_steps, count in histories.items():
            few = count // (2 if bounded else 4)  # there are few histories of a store with a capacity
            for _ in range(by_profile(few, count, count * 25)):
                seed += 1
                machine = new()
                failure = machine.run(machine.drawn(seed, num_steps))
                if failure is not None:
                    least = shrunk(failure, lambda steps: new().run(steps))
                    raise AssertionError(str(least)) from least.error
