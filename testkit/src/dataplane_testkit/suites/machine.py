"""Random histories of calls on a real store, each compared with the ledger: see `dataplane_testkit.histories`.

One long file, since the call of each step stands beside the comparison of its answer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
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
from dataplane_core.ledger import commands
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, Claim, this_process
from dataplane_testkit._columns import as_objects, check_column, items_of, jagged, same_items
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._profiles import by_profile, fewest, is_long, new_seed
from dataplane_testkit._rows import stores_rows
from dataplane_testkit._store import BOUNDED_BYTES, Store, Suite, check_error, no_polls
from dataplane_testkit._timing import PROMPT_S, Background, bounded, eventually
from dataplane_testkit.faults import Faults
from dataplane_testkit.histories import (
    LARGE,
    LONG_S,
    PARTITIONS,
    ROOM_FOR,
    SHORT_S,
    TASKS,
    Faulty,
    History,
    Model,
    Put,
    Repeat,
    Stay,
    Step,
    told,
)
from dataplane_testkit.rules import sentences

#: How many histories, and how many steps each has. The short ones come first: what they find is easy to read.
_HISTORIES: Final = {8: 32, 25: 48, 60: 44}
_BOUNDED: Final = {25: 16}
#: How often a history that failed is run again at most, and for how many seconds, to find the calls that matter.
_MOST_RUNS, _MOST_S = 150, 30.0
#: Bytes of a cell that fits into a store without others, and into none with what a few refused puts leaked.
_BRIM: Final = 19 * BOUNDED_BYTES // 20
#: The most seconds that a call may take that can be answered. Only a hang takes as long.
_ANSWER_S: Final = 6 * PROMPT_S

#: Steps whose hooks have another name.
_HOOKS: Final = {
    "register": "register_partition",
    "put": "put_samples",
    "clear": "clear_samples",
    "locate": "get_samples",
}


#: What a comparison proves -> the sentence of docs/contract.md, and what to check first.
RULES: Final = sentences("machine")


class Broken(AssertionError):
    def __init__(self, rule: str, text: str) -> None:
        sentence, hint = RULES[rule]
        super().__init__(f'{text}\nThe last call breaks the contract: "{sentence}"\nCheck first: {hint}')


def same(rule: str, found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise Broken(rule, f"{what}: {found!r}, expected {expected!r}")


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
        for each in thing.values() if isinstance(thing, dict) else thing:
            _scribble(each)
        thing.clear()
    elif thing is not None and not isinstance(thing, (int, float, str)):
        _scribble(items_of(thing))


def _exact(tags: Any) -> list[tuple[str, str, str]]:
    """So that 1, 1.0 and True differ, and NaN is NaN."""
    return sorted((name, type(value).__name__, repr(value)) for name, value in tags.items())


class StoreMachine:
    """Two partitions of a real store, and a model that takes the same steps.

    Args:
        store: The store under test.
        clients: Clients of the store or of one with a capacity, which take turns.
        bounded: Whether they have a capacity.
    """

    def __init__(self, store: Store, clients: Sequence[DataPlaneClient], *, bounded: bool = False) -> None:
        self.store = store
        self.clients = clients
        self.client = clients[0]  # takes the step
        self.bounded = bounded
        self.wakes = store.declares(Capability.WAKES)  # then claims that wait do not ask by themselves
        self.owns_reads = "test_what_comes_back_is_owned_by_the_caller" not in store.case.all_deviations()
        capacity_bytes = ROOM_FOR * LARGE if bounded else None
        self.model = Model(overwrite=store.declares(Capability.OVERWRITE), capacity_bytes=capacity_bytes)
        self.base = store.owned_id(clients[0])
        self.steps: list[Step] = []
        self.cells: dict[tuple[str, str, str], Any] = {}
        self.tokens: dict[str, str] = {}  # of the model -> of the store
        self.epochs: dict[str, str] = {}
        self.given: dict[tuple[str, str, str], float] = {}  # a leased sample -> when, by the clock of the model
        self.sent: dict[str, tuple[str, Any]] = {}  # id of a request -> its hook, and what the store got
        self.short: set[str] = set()  # tokens of leases that end soon
        self.staying: tuple[Stay, Background] | None = None
        self.stays: set[str] = set()  # the store's tokens of claims that wait
        self.is_over = False
        self.fault: tuple[str, str] | None = None  # of the step that is taken: a hook and what is wrong
        self.reply: Any = None  # of the model to the last step

    def partition(self, name: str) -> str:
        return f"{self.base}{name}"

    @property
    def hooks(self) -> Hooks:
        return Hooks(backend_of(self.client))

    def drawn(self, seed: int, num_steps: int) -> Iterator[Step]:
        """The steps of a history. Each depends on what the ledger replied to those before."""
        about = self.store.backend_class
        narrows = self.store.backend.narrow and (about.wire.bytes or about.wire.narrow)
        options: dict[str, Any] = {"bounded": self.bounded, "narrows": narrows, "shares": about.wire.shared_rows}
        history = History(random.Random(seed), about.capabilities, real=True, **options)
        while len(self.steps) < num_steps:
            step = history.step(self.model.ledger, self.model.now)
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
        audits = self.clients[0] is self.store.client and (
            stores_rows(self.store.backend) or self.store.case.supplies("held_bytes")
        )
        with (
            no_polls(*self.clients) if self.wakes else nullcontext(),
            self.store.held() if audits else nullcontext(lambda: 0) as grown,
        ):
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
        for name in PARTITIONS:
            for field in sorted({key[2] for key in self.cells if key[0] == name and not self.is_over}):
                ids = [key[1] for key in self.cells if (key[0], key[2]) == (name, field)]
                self.take(commands.Locate(name, ids, [field]))
            if self.store.declares(Capability.LISTING) and not self.is_over:
                self.take(commands.ListRequest(name))
                self.take(commands.InspectRequest(name))
            if self.store.declares(Capability.CLAIMS) and not self.is_over:
                for task in TASKS:
                    self.take(commands.ConsumptionRequest(name, [task]))
        for name in PARTITIONS:
            self.take(commands.ClearRequest(name, None))
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

    def take(self, step: Step) -> Any:
        """Takes a step on the store and on the model, and compares the answers. Returns that of the model."""
        if not (isinstance(step, commands.SettleRequest) and self.short.intersection(step.lease_tokens)):
            self.await_short_leases()
        self.steps.append(step)
        self.client = self.clients[len(self.steps) % len(self.clients)]
        reply = getattr(self, f"take_{step.op}")(step)
        self.look_at_who_stays()
        return reply

    def expected(self, step: Step) -> tuple[Any, DataPlaneError | None]:
        return _attempt(lambda: self.model.answer(step))

    def both(self, rule: str, what: str, step: Any, call: Any, *args: Any) -> tuple[Any, Any]:
        """The reply of the model to a step, and what a call of the store returns. Both succeed or are refused."""
        reply, error = self.expected(step)
        return reply, self.agree(rule, what, error, call, *args)

    def agree(
        self, rule: str, what: str, expected: DataPlaneError | None, call: Any, *args: Any, waits: bool = False
    ) -> Any:
        """Makes a call of the store, which must succeed or be refused as the model says. Returns its result.

        One that ``waits`` might hang.
        """
        found, error = self.attempt(partial(call, *args), what, waits=waits)
        self.judge(rule, what, expected, error)
        return found

    def attempt(self, call: Callable[[], Any], what: str, *, waits: bool = False) -> tuple[Any, Any]:
        """The result of a call of the store, or its error. With the fault of a step there may be neither."""
        (hook, fault), self.fault = self.fault or ("", ""), None
        faults = Faults.of(self.client)
        if fault == "late":
            with faults.late(hook):
                _, late = bounded(lambda: _attempt(call), _ANSWER_S, f"{what}, after its deadline,")
            if not isinstance(late, (TimeoutError, KeyError, ValueError, NoneType)):
                raise Broken("deadline", f"{what}, after its deadline, raised {late!r}, expected a TimeoutError")
        if fault == "lost":
            lost = BackendUnavailableError("the reply was lost.")

            def lose(request: Any, reply: Any) -> Any:
                if getattr(request, "token", None) in self.stays:  # one that waits asks meanwhile
                    return reply
                raise lost

            with faults.after(hook, lose):
                _, error = _attempt(call)
            if error is None:
                raise Broken("lost", f"{what} succeeded, though its reply was lost")
            return None, None if error is lost else error
        return _attempt(lambda: bounded(call, _ANSWER_S, what) if waits else call())

    def judge(self, rule: str, what: str, expected: DataPlaneError | None, error: DataPlaneError | None) -> None:
        """A call must have succeeded or have been refused as the model says."""
        if error is not None and rule != "repeat":  # a hook that is called directly does not name the backend
            with proving("errors"):
                check_error(error, self.store.name)
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
                known, named = getattr(expected, name), getattr(error, name, ())
                if not set(named) <= set(known) or bool(named) != bool(known):
                    raise Broken("missing", f"{what} named {named}, expected some of {known}")

    def await_short_leases(self) -> None:
        """Waits until leases have ended that were given for a moment. The model's clock jumps."""
        if not self.short or self.is_over:
            return
        self.short.clear()
        time.sleep(2 * SHORT_S)
        self.model.now += 2 * SHORT_S
        if self.store.declares(Capability.LISTING):
            for name in PARTITIONS:
                described = told(self.model.ledger, commands.InspectRequest(name), self.model.now)
                counts = {} if described is None else {each: of.num_leased for each, of in described.tasks.items()}

                def have_ended(name: str = name, counts: Mapping[str, int] = counts) -> bool:
                    found = self.clients[0].describe(self.partition(name)).tasks
                    return all(found[task].num_leased <= count for task, count in counts.items())

                if counts:
                    with proving("lease"):
                        eventually(have_ended, what="the end of a lease")

    def look_at_who_stays(self) -> None:
        """A claim that waits gets its answer if the last step let it be answered."""
        if self.staying is None or self.is_over:
            return
        stay, waiting = self.staying
        expected, error = self.expected(stay)
        if error is None and not expected.answered:
            return
        self.staying = None
        rule, what = "wake" if self.wakes else "wait", "a claim that waited"
        meta = self.agree(rule, what, error, waiting.result, _ANSWER_S, what)
        if error is None:
            self.was_given(stay.claim, expected, meta, rule)

    @contextmanager
    def noting(self, hook: str, request_id: str | None = None) -> Iterator[list[Any]]:
        """Yields a list of the requests that the store gets, and keeps the last one under an id."""
        sent: list[Any] = []

        def note(request: Any) -> None:
            kept = copy(request)
            if hook == "put_samples":
                kept.columns, kept.specs = dict(request.columns), dict(request.specs)
            sent.append(kept)
            if request_id is not None:
                self.sent[request_id] = hook, kept

        with Faults.of(self.client).before(hook, note):
            yield sent

    def take_register(self, step: commands.RegisterRequest) -> Any:
        """Registers a partition anew or keeps it, or finishes it. Its epoch is that which the client drew."""
        finishes = step.if_exists == "keep" and not step.consumer_tasks
        partition, rule = self.partition(step.partition_id), "keep" if step.if_exists == "keep" else "register"
        is_new = told(self.model.ledger, commands.DescribeRequest(step.partition_id), 0.0) is None
        if finishes and is_new:
            return None
        reply, error = self.expected(step)

        def call() -> None:
            if finishes:
                self.client.finish_partition(partition)
            else:
                about = (step.fields, step.num_samples, step.consumer_tasks, step.grpo_group_size, step.enums)
                self.client.register_partition(partition, *about, if_exists=step.if_exists)

        with self.noting("register_partition") as sent:
            self.agree(rule, "the registration", error, call)
        if error is not None:
            return None
        if is_new or step.if_exists == "replace":
            self.epochs[step.partition_id] = sent[-1].epoch
            self.forget(step.partition_id, None)
        info = self.hooks.ask("describe_partition", partition)
        same("identity", info.epoch, self.epochs[step.partition_id], "the epoch of the registration")
        same(rule, info.registration(), reply[0].registration(), "the registration")
        return reply

    def forget(self, name: str, ids: Sequence[str] | None) -> None:
        for key in [key for key in self.cells if key[0] == name and (ids is None or key[1] in ids)]:
            del self.cells[key]

    def take_put(self, step: Put) -> Any:
        """Puts, and uses the memory of what was put for something else."""
        columns = {name: _column(kind, step.rows(name)) for name, kind in step.columns.items()}
        partition = self.partition(step.partition_id)

        tags = None if step.tags is None else [dict(row) for row in step.tags]

        def call() -> Any:
            meta = self.client.put_samples(step.sample_ids, partition, columns or None, tags)
            for column in columns.values():
                _scribble(column)
            for row in tags or ():
                row.clear()
            return meta

        def arrange(request: Any) -> None:
            request.columns = dict(reversed(request.columns.items()))  # as middleware may that adds one

        if self.fault == ("put_samples", "late"):
            self.fault = None
            return self.put_late(step, call)
        carried_out, error = self.expected(step)
        faults = Faults.of(self.client)
        with faults.before("put_samples", arrange), self.noting("put_samples", f"r{step.number}"):
            self.agree(_rule_of_put(error), "the put", error, call)
        if carried_out:
            self.was_put(step)
        return carried_out

    def take_faulty(self, faulty: Faulty) -> Any:
        step = faulty.step
        self.fault = _HOOKS.get(step.op, step.op), faulty.fault
        reply = getattr(self, f"take_{step.op}")(step)
        self.fault = None  # a step that makes no call has none
        return reply

    def was_put(self, step: Put) -> None:
        for name in step.columns:
            for sample_id, row in zip(step.sample_ids, step.rows(name), strict=True):
                self.cells[step.partition_id, sample_id, name] = row

    def put_late(self, step: Put, call: Callable[[], Any]) -> Any:
        """A put that the store gets after its deadline: what the error says of it must be true."""
        with Faults.of(self.client).late("put_samples"):
            _, error = _attempt(call)
        would_be = told(self.model.ledger, step.commands(self.model.ledger, self.model.now)[0], self.model.now)
        outcome = "done" if error is None else getattr(error, "outcome", "unknown")
        is_late = isinstance(error, TimeoutError) or error is None
        if would_be is None:  # refused; the model has not changed
            if error is None:
                raise Broken("put refused", "a put after its deadline succeeded, but should have been refused")
            return None
        self.model.ledger.apply(commands.AbortPut(would_be), self.model.now)
        if not is_late:
            raise Broken("deadline", f"a put after its deadline raised {error!r}, expected a TimeoutError") from error
        self.was_put(step)
        sample_id, name = step.sample_ids[0], next(iter(step.columns))
        found, _ = _attempt(lambda: self.client.get_samples([sample_id], self.partition(step.partition_id), [name]))
        is_there = found is not None and torch.equal(found[name][0], step.rows(name)[0])
        if outcome == ("not_done" if is_there else "done"):
            raise Broken("outcome", f"the put is {'' if is_there else 'not '}there, but was said to be {outcome}")
        self.is_over = True  # the model cannot know what becomes of it
        return None

    def take_repeat(self, step: Repeat) -> Any:
        if step.request_id not in self.sent:
            return None
        hook, request = self.sent[step.request_id]
        put = self.model.done(step.request_id)
        if isinstance(put, Put) and "lists of ints" in put.columns.values():  # what they become may be another by now
            return None
        reply, error = self.expected(step)
        again = replace(request, deadline=time.monotonic() + _ANSWER_S)
        self.agree("repeat", "the repeated request", error, getattr(backend_of(self.client), hook), again)
        if isinstance(put, Put) and reply:
            self.was_put(put)
        return reply

    def take_clear(self, step: commands.ClearRequest) -> Any:
        partition = self.partition(step.partition_id)
        reply, _ = self.both("clear", "the clear", step, self.client.clear_samples, step.sample_ids, partition)
        self.forget(step.partition_id, step.sample_ids)
        return reply

    def take_locate(self, step: commands.Locate) -> Any:
        unique = list(dict.fromkeys(step.sample_ids))
        _, error = self.expected(replace(step, sample_ids=unique))
        if error is not None and not isinstance(error, KeyError):
            error = None  # cells of lists whose field has been open: the client reads them in parts
        partition, fields = self.partition(step.partition_id), list(step.fields)
        rule, call = "missing" if error else "evicted" if self.bounded else "read", self.client.get_samples
        found = self.agree(rule, "the read", error, call, step.sample_ids, partition, fields, waits=error is not None)
        if found is not None:
            self.compare(found, step.partition_id, step.sample_ids, fields)
        return found

    def compare(self, found: Any, name: str, ids: Sequence[str], fields: Sequence[str]) -> None:
        for field in fields:
            expected = [self.cells[name, sample_id, field] for sample_id in ids]
            column = found[field]
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

    def take_list_samples(self, step: commands.ListRequest) -> Any:
        about = (self.partition(step.partition_id), _short(step.tag_filter), step.sample_ids)
        reply, meta = self.both("list", "the listing", step, self.client.list_samples, *about)
        if meta is not None:
            same("order", meta.sample_ids, list(reply.sample_ids), "the ids listed")
            same("tags", [*map(_exact, meta.tags)], [*map(_exact, reply.tags)], "the tags listed")
            for tags in meta.tags:
                tags.clear()  # they belong to the caller
        return reply

    def take_list_partitions(self, step: commands.ListPartitionsRequest) -> Any:
        reply, partitions = self.both("list_partitions", "the list", step, self.client.list_partitions)
        mine = [partition for partition in partitions if partition.startswith(self.base)]
        same("list_partitions", mine, sorted(map(self.partition, reply)), "the partitions")
        return reply

    def take_list_fields(self, step: commands.FieldsRequest) -> Any:
        about = (step.sample_ids, self.partition(step.partition_id))
        reply, fields = self.both("list_fields", "the list of fields", step, self.client.list_fields, *about)
        if fields is not None:
            same(
                "list_fields", [*map(sorted, fields)], [sorted(reply.patterns[at]) for at in reply.index], "the fields"
            )
        return reply

    def take_inspect(self, step: commands.InspectRequest) -> Any:
        partition, name = self.partition(step.partition_id), step.partition_id
        reply, found = self.both("describe", "the description", step, self.client.describe, partition)
        if found is None:
            return None
        same("identity", found.info.epoch, self.epochs[name], "the epoch")
        same("keep", found.info.registration(), reply.info.registration(), "the registration")
        same("describe", dict(found.specs), dict(reply.specs), "the schema")
        for count in ("num_samples", "num_cleared"):
            same("describe", getattr(found, count), getattr(reply, count), count)
        same("describe", found.oldest_s is None, reply.oldest_s is None, "whether there is an oldest sample")
        same("describe rows", dict(found.num_rows), dict(reply.num_rows), "the samples that have a field")
        if not any(key[0] == name for key in self.cells):
            same("payload", found.held_bytes, 0, "the bytes that it holds")
        for task, expected in reply.tasks.items():
            of = found.tasks[task]
            counted, right = [(each.num_ready, each.num_leased, each.num_consumed) for each in (of, expected)]
            same("describe tasks", counted, right, f"what is ready, leased and consumed of {task}")
            self.check_oldest(name, task, of.oldest_lease, expected.oldest_lease)
        if step.questions:
            until_it_agrees(lambda: self.check_answers(partition, step.questions, reply.answers))
        return reply

    def check_answers(self, partition: str, questions: Sequence[Any], expected: Sequence[Any]) -> None:
        found = self.hooks.ask("inspect_partition", partition, questions=list(questions)).answers
        for answer, right in zip(found, expected, strict=True):
            same("questions", answer is None, right is None, "whether there is such a task")
            if right is not None:
                same("questions", answer.num_ready, right.num_ready, "the samples that are ready")
                check_shortfall("questions", answer.shortfall, right.shortfall)

    def check_oldest(self, name: str, task: str, found: Any, expected: Any) -> None:
        """Of leases that were given together, a description may name any. A renewed lease keeps its place."""
        same("oldest", found is None, expected is None, f"whether {task} has a lease")
        if found is None:
            return
        same("oldest", found.holder, this_process(), "the holder of the oldest lease")
        given, oldest = (self.given.get((name, task, each.sample_id)) for each in (found, expected))
        if given is not None and oldest is not None:
            same("oldest", given, oldest, f"when '{found.sample_id}' was leased, of the oldest lease")

    def take_claim(self, step: commands.ClaimRequest) -> Any:
        if step.lease_s == SHORT_S and self.staying is not None:
            step = replace(step, lease_s=LONG_S)
        reply, error = self.expected(step)
        rule = "claim" if step.dp_rank is None else "ranks"
        call = self.claiming(step, blocking=step.all_or_nothing, timeout_s=0)
        with self.noting("claim") as sent:
            if error is None and step.all_or_nothing and not reply.answered:
                until_it_agrees(lambda: self.check_timeout(rule, call, reply))
                return reply
            meta = self.agree(rule, "the claim", error, call, waits=not (reply and reply.sample_ids))
        if error is None:
            asked = [each.token for each in sent if each.token not in self.stays]  # one that waits may ask meanwhile
            self.tokens.setdefault(step.token, asked[-1])
        if meta is not None:
            self.was_given(step, reply, meta, rule)
        return reply

    def check_timeout(self, rule: str, call: Callable[[], Any], reply: Claim) -> None:
        """A claim that cannot be answered times out, and the error says why."""
        _, late = _attempt(call)
        if not isinstance(late, TimeoutError):
            raise Broken(rule, f"a claim that should time out did not: {late!r}")
        with proving("errors"):
            check_error(late, self.store.name)
        same("shortfall", getattr(late, "num_ready", None), reply.num_ready, "how many samples were ready")
        check_shortfall("shortfall", getattr(late, "shortfall", None), reply.shortfall)

    def claiming(self, claim: commands.ClaimRequest, **more: Any) -> Callable[[], KVBatchMeta]:
        about = (self.partition(claim.partition_id), claim.task_name, claim.required_fields, claim.batch_size)
        call: Any = self.client.claim_meta
        return partial(call, *about, **_options(claim), **more)

    def was_given(self, step: commands.ClaimRequest, reply: Claim, meta: KVBatchMeta, rule: str) -> None:
        """Compares what a claim gave, reads it, and keeps its leases."""
        if step.all_or_nothing and len(reply.sample_ids) < step.batch_size:
            rule = "tail"
        same(rule, meta.sample_ids, list(reply.sample_ids), "the ids claimed")
        same("tags", [*map(_exact, meta.tags or [])], [*map(_exact, reply.tags)], "the tags claimed")
        if reply.lease_tokens is not None and meta.size:
            real = list(meta.lease_tokens or [])
            tokens = [self.tokens.setdefault(token, real[0]) for token in reply.lease_tokens]
            same("identity", real, tokens, "the lease tokens")
            if step.dp_rank is not None:  # those of the other ranks are leased too, and may be the oldest
                self.given = {
                    key: given for key, given in self.given.items() if key[:2] != (step.partition_id, step.task_name)
                }
            for sample_id, token in zip(meta.sample_ids, reply.lease_tokens, strict=True):
                if token == step.token:
                    self.given[step.partition_id, step.task_name, sample_id] = self.model.now
            if step.lease_s == SHORT_S:
                self.short.add(step.token)
        if meta.size and step.required_fields and step.dp_rank is None:  # the first claim of a batch chose its fields
            found = self.agree("read", "the read of what was claimed", None, self.clients[0].get_data, meta)
            self.compare(found, step.partition_id, meta.sample_ids, step.required_fields)

    def take_stay(self, step: Stay) -> Any:
        if self.staying is not None:
            return None
        reply, error = self.expected(step)
        claim = step.claim
        if error is not None or reply.answered:
            meta = self.agree("wait", "the claim", error, self.claiming(claim, timeout_s=_ANSWER_S))
            if meta is not None:
                self.was_given(claim, reply, meta, "wait")
            return reply
        about, options = (self.partition(claim.partition_id), claim.batch_size), _options(claim)
        with self.noting("claim") as sent:
            waiting = self.store.waiting_claim(
                *about, *claim.required_fields, client=self.client, timeout_s=600.0, **options
            )
        self.stays.update(each.token for each in sent)
        self.staying = step, waiting
        return None

    def settle(self, step: Any) -> Any:
        """Acks, gives back or renews. A lease that ends soon may have ended already."""
        reply, error = self.expected(step)
        tokens = [self.tokens.get(token, token) for token in step.lease_tokens]
        about = (self.partition(step.partition_id), step.task_name, list(step.sample_ids))
        meta = KVBatchMeta(*about, lease_tokens=tokens)
        extra = (step.lease_s,) if isinstance(step, commands.RenewRequest) else ()
        call = partial(getattr(self.client, step.op), meta, *extra)
        with self.noting(step.op, step.request_id):
            _, found = self.attempt(call, step.op)
        if not (self.short.intersection(step.lease_tokens) and isinstance(found, LeaseExpiredError)):
            self.judge("settle", step.op, error, found)
        elif error is None:
            self.is_over = True  # the model cannot take back that they were settled
        return None if error is not None else (reply,)

    take_ack = take_nack = take_renew = settle

    def take_consumed(self, step: commands.ConsumptionRequest) -> Any:
        reply, _ = self.expected(step)
        partition = self.partition(step.partition_id)
        found = self.client.check_consumption_status(partition, step.task_names)
        same("consumed", found, reply, "the consumption status")
        info = told(self.model.ledger, commands.DescribeRequest(step.partition_id), self.model.now)
        finished, error = _attempt(lambda: self.client.is_finished(partition, step.task_names))
        if info is None or not set(step.task_names) <= set(info.consumer_tasks):
            same("consumed", isinstance(error, KeyError), True, f"whether is_finished raised a KeyError ({error!r})")
        else:
            same("consumed", finished, reply and info.num_samples is not None, "whether the tasks are finished")
        return reply

    def take_export(self, step: commands.ExportRequest) -> Any:
        reply, error = self.expected(step)
        partition = self.partition(step.partition_id)
        for task in TASKS if error else reply.consumed:
            found = self.agree("list_consumed", "list_consumed", error, self.client.list_consumed, partition, task)
            if error is None:
                same("list_consumed", found, list(reply.consumed[task]), f"what {task} has consumed")
        if error is None:
            request = commands.ExportRequest(partition, deadline=time.monotonic() + _ANSWER_S)
            state = backend_of(self.client).export_partition(request)
            same("clear", sorted(state.cleared_ids), list(reply.cleared_ids), "the ids that were cleared")
            same("clear", sorted(state.broken_groups), list(reply.broken_groups), "the groups that lost a member")
        return reply

    def take_set_cursor(self, step: commands.SetCursorRequest) -> Any:
        about = (self.partition(step.partition_id), step.task_name, step.sample_ids)
        return self.both("reset", "reset_consumption", step, self.client.reset_consumption, *about)[0]


def until_it_agrees(check: Callable[[], None]) -> None:
    """Asks again for a while: a store may tell a shortfall that it found a moment ago for another claim."""
    give_up = time.monotonic() + PROMPT_S
    while True:
        try:
            return check()
        except Broken:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.005)


def check_shortfall(rule: str, found: Any, expected: Any) -> None:
    """Compares why a claim gets no more. Of the leases that end first, it may name any that end together."""
    same(rule, found is None, expected is None, "whether it says what is lacking")
    if found is None:
        return
    counts = ("num_leased", "num_not_matching", "not_matching", "num_incomplete", "num_lacking")
    for name in (*counts, "incomplete_groups", "missing_cells"):
        same(rule, getattr(found, name), getattr(expected, name), name)
    same(rule, len(found.leased), len(expected.leased), "how many leases it names")
    for each in found.leased:
        same(rule, each.holder, this_process(), f"the holder of '{each.sample_id}'")
        same(rule, 0.0 <= each.left_s < math.inf, True, "whether it says when the lease ends")


def _short(tag_filter: Any) -> Any:
    """A filter as a user writes it."""
    return tag_filter and {name: value if op == "==" else (op, value) for name, (op, value) in tag_filter.items()}


def _options(claim: commands.ClaimRequest) -> dict[str, Any]:
    options = {"lease_s": claim.lease_s, "tag_filter": _short(claim.tag_filter), "sampler": claim.sampler}
    if claim.dp_rank is not None:
        options |= {"dp_rank": claim.dp_rank, "dp_size": claim.dp_size, "batch_index": claim.batch_index}
    return options


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
        calls = "\n".join(f"    {step}" for step in self.steps)
        return f"{type(self.error).__name__}: {self.error}\nThe calls, the least that still fail:\n{calls}"


def shrunk(failure: Failure, again: Callable[[Sequence[Step]], Failure | None]) -> Failure:
    """The failure of a history with as few steps as leaving out steps can reach within a bounded number of runs."""
    give_up, runs = time.monotonic() + _MOST_S, iter(range(_MOST_RUNS))

    def still(steps: list[Step]) -> list[Step] | None:
        nonlocal failure
        found = again(steps) if time.monotonic() < give_up and next(runs, None) is not None else None
        if found is None or len(found.steps) >= len(failure.steps):
            return None
        failure = found
        return found.steps

    fewest(failure.steps, still)
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
