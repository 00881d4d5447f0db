"""Random sequences of calls. The results are compared with a model: a `Ledger` and a dict of values."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.ledger import Command, Ledger, Reply, commands
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, FieldSpec, check_tag_filter, new_id
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, items_of, jagged, same_items
from dataplane_testkit._profiles import is_long, kit_settings
from dataplane_testkit._store import Store

_T = TypeVar("_T")

#: Groups of two, and one surplus member.
_IDS = [*(f"q{group}_g{member}" for group in range(6) for member in range(2)), "q0_g2"]
_FIELDS = ["x", "y", "o"]
_SPECS = {
    "x": FieldSpec("tensor", "int64", 1),
    "y": FieldSpec("tensor", "float32", 0),
    "o": FieldSpec.of_objects(),
}
_FOREIGN = FieldSpec("tensor", "int16", 1)
_TASKS = ["train", "eval"]
_FILTERS = [None, None, None, None, {"v": (">=", 2)}, {"v": 1}, {"late": True}]
_LONG_S = 3600.0
_SHORT_S = 0.02

#: The operations, each as often as its weight.
_ACTIONS: dict[str, int] = {
    "put": 6,
    "get": 3,
    "claim": 5,
    "settle": 3,
    "listing": 2,
    "consumption": 2,
    "clear": 2,
    "put_tags": 1,
    "start_afresh": 1,
    "finish": 1,
}
_NEEDS = {
    "claim": Capability.CLAIMS,
    "consumption": Capability.CLAIMS,
    "settle": Capability.LEASES,
    "listing": Capability.LISTING,
}

_rarely = st.sampled_from([False, False, False, True])
_some_ids = st.lists(st.sampled_from(_IDS), min_size=1, max_size=8, unique=True)
_few_ids = st.lists(st.sampled_from(_IDS), min_size=1, max_size=2, unique=True)
_some_fields = st.sampled_from([["x", "y", "o"], ["y", "x", "o"], ["x"], ["y"], ["o", "x"]])
_sizes = st.sampled_from([None, 6, 12])


class StoreMachine(RuleBasedStateMachine):
    """One partition of a real store, and a ledger that gets the same calls.

    The ledger's clock is virtual. Leases are far longer than any run, except those whose end the machine waits for.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.client = store.client
        self.partition = store.new_id()
        self.model = Ledger(overwrite=store.declares(Capability.OVERWRITE))
        self.now = 0.0
        self.count = 0
        self.values: dict[tuple[str, str], Any] = {}
        self.claims: list[tuple[KVBatchMeta, list[str]]] = []
        self.group_size: int | None = None
        able = [each for each in _ACTIONS if each not in _NEEDS or store.declares(_NEEDS[each])]
        self.actions = st.sampled_from([each for each in able for _ in range(_ACTIONS[each])])

    @initialize(grouped=_rarely, num_samples=_sizes)
    def begin(self, grouped: bool, num_samples: int | None) -> None:
        """The first registration."""
        self.register(grouped, num_samples)

    # One rule draws the action. With one rule per action, Hypothesis would leave most actions out of most sequences.
    # Such a sequence finds little, because every claim needs puts before it.
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One operation on the store and the model."""
        getattr(self, data.draw(self.actions, "action"))(data)

    # --- registration -------------------------------------------------------------------------------------------------

    def register(self, grouped: bool, num_samples: int | None) -> None:
        """Registers the partition in the store and the model. Forgets everything about the earlier registration."""
        self.group_size = 2 if grouped and self.store.declares(Capability.GROUPS) else None
        self.client.register_partition(self.partition, _FIELDS, num_samples, _TASKS, self.group_size)
        self.call_model(commands.Register(self.partition, _FIELDS, num_samples, _TASKS, self.group_size, {}, new_id()))
        self.values.clear()

    def call_model(self, command: Command[Reply]) -> Reply:
        """Makes the call on the model, and returns its reply."""
        return self.model.apply(command, self.now)

    def start_afresh(self, data: st.DataObject) -> None:
        """Registers the partition again, sometimes after a clear."""
        if not data.draw(_rarely, "now"):
            return
        if data.draw(st.booleans(), "cleared first"):
            self.client.clear_samples(None, self.partition)
            self.call_model(commands.Clear(self.partition, None))
        self.register(data.draw(_rarely, "grouped"), data.draw(_sizes, "num_samples"))

    def finish(self, data: st.DataObject) -> None:
        """Says that no more samples come."""
        if not data.draw(_rarely, "now"):
            return
        self.client.finish_partition(self.partition)
        self.call_model(commands.Register(self.partition, [], 0, [], self.group_size, {}, new_id(), "keep"))

    # --- writes -------------------------------------------------------------------------------------------------------

    def put(self, data: st.DataObject) -> None:
        """Puts new cells, overwrites, or a column of another dtype, sometimes with tags."""
        ids, fields = data.draw(_some_ids, "ids"), data.draw(_some_fields, "fields")
        made = {field: self.cells(field, len(ids)) for field in fields}
        specs = {field: _SPECS[field] for field in fields}
        columns = {field: column for field, (column, _) in made.items()}
        foreign = data.draw(st.sampled_from([None] * 6 + ["x", "y"]), "of another dtype")
        if foreign in columns and any(key[1] == foreign for key in self.values):
            columns[foreign], specs[foreign] = torch.zeros(len(ids), 2, dtype=torch.int16), _FOREIGN
        tags = None
        if data.draw(st.booleans(), "tagged"):
            tags = [{"v": (self.count + place) % 4, "late": False} for place in range(len(ids))]
        if self.write(ids, columns, specs, tags):
            for field, (_, rows) in made.items():
                self.values.update({(sample_id, field): row for sample_id, row in zip(ids, rows, strict=True)})

    def cells(self, field: str, count: int) -> tuple[Any, list[Any]]:
        """A column of values that were never used before, and its rows."""
        start = self.count
        self.count += count
        numbers = range(start, start + count)
        if field == "x":
            rows = [torch.full((number % 4,), number) for number in numbers]
            return jagged(rows), rows
        if field == "y":
            return torch.tensor([float(n) for n in numbers]), [torch.tensor(float(n)) for n in numbers]
        items = [{"n": number} if number % 3 else None for number in numbers]
        return as_objects(*items), items

    def put_tags(self, data: st.DataObject) -> None:
        """Puts tags without fields."""
        ids = data.draw(_some_ids, "ids")
        self.write(ids, {}, {}, [{"v": data.draw(st.integers(0, 3), "v"), "late": True}] * len(ids))

    def write(self, ids: list[str], columns: dict[str, Any], specs: dict[str, FieldSpec], tags: Any) -> bool:
        """Puts to the model and to the store. Returns whether both accepted the put."""
        writes = [commands.Write(list(specs), [0] * len(ids))] if specs else []
        begin = commands.BeginPut(self.partition, ids, specs, writes, tags, ttl_s=1e9)
        _, expected = _attempt(lambda: self.call_model(commands.CommitPut(self.call_model(begin))))
        _, found = _attempt(lambda: self.store.put(self.partition, ids, tags, columns))
        _agree(expected, found, "put_samples")
        return expected is None

    def clear(self, data: st.DataObject) -> None:
        """Clears some samples, which may not exist."""
        ids = data.draw(_few_ids, "ids")
        self.client.clear_samples(ids, self.partition)
        self.call_model(commands.Clear(self.partition, ids))
        for key in [key for key in self.values if key[0] in ids]:
            del self.values[key]

    # --- reads --------------------------------------------------------------------------------------------------------

    def get(self, data: st.DataObject) -> None:
        """Reads samples, some of them twice. If a cell is missing, the whole read must fail."""
        fields = data.draw(_some_fields, "fields")
        ready = [each for each in _IDS if all((each, field) in self.values for field in fields)]
        choice = _IDS if data.draw(_rarely, "any") or not ready else ready
        ids = data.draw(st.lists(st.sampled_from(choice), min_size=1, max_size=6), "ids")
        found, error = _attempt(lambda: self.store.get(self.partition, ids, *fields))
        if set(ids) <= set(ready):
            assert error is None, f"a read of existing cells raised an error: {error}"
            self.compare(found, ids, fields)
        else:
            assert isinstance(error, KeyError), f"a read of missing cells of {ids} did not raise KeyError: {error!r}"

    def compare(self, found: Any, ids: list[str], fields: list[str]) -> None:
        """Compares every cell with its last write."""
        for field in fields:
            expected = [self.values[sample_id, field] for sample_id in ids]
            if field == "o":
                items = items_of(found[field])
                assert len(items) == len(expected)
                assert all(map(same_items, items, expected)), f"objects {items}, expected {expected}"
            else:
                check_column(found[field], expected)

    def draw_filter(self, data: st.DataObject) -> Any:
        """A tag filter, or in most cases None."""
        return data.draw(st.sampled_from(_FILTERS), "filter") if self.store.declares(Capability.TAG_FILTERS) else None

    def listing(self, data: st.DataObject) -> None:
        """Compares the listed ids, their order and their tags with the model."""
        tag_filter = self.draw_filter(data)
        expected = self.call_model(commands.ListSamples(self.partition, check_tag_filter(tag_filter)))
        meta = self.client.list_samples(self.partition, tag_filter)
        assert meta.sample_ids == list(expected.sample_ids)
        assert meta.tags == list(expected.tags)

    def consumption(self, data: st.DataObject) -> None:
        """Compares the consumption status with the model."""
        tasks = data.draw(st.lists(st.sampled_from([*_TASKS, "nobody"]), min_size=1, max_size=2, unique=True), "tasks")
        expected = self.call_model(commands.Consumed(self.partition, tasks))
        assert self.client.check_consumption_status(self.partition, tasks) == expected

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, data: st.DataObject) -> None:
        """Claims with or without all_or_nothing; without a lease, with a long one or with a short one that expires."""
        task, fields = data.draw(st.sampled_from(_TASKS), "task"), data.draw(_some_fields, "fields")
        batch_size = data.draw(st.integers(1, 4), "units") * (self.group_size or 1)
        blocking, tag_filter = data.draw(_rarely, "blocking"), self.draw_filter(data)
        leases = [None, _LONG_S, _LONG_S, _SHORT_S] if self.store.declares(Capability.LEASES) else [None]
        lease_s = data.draw(st.sampled_from(leases), "lease_s")
        asked: dict[str, Any] = {
            "all_or_nothing": blocking,
            "lease_s": lease_s,
            "tag_filter": check_tag_filter(tag_filter),
        }
        claim = commands.ClaimSamples(self.partition, task, fields, batch_size, token=new_id(), explain=True, **asked)
        expected = self.call_model(claim)
        note(f"the ledger gives {list(expected.sample_ids)}, exhausted: {expected.exhausted}")
        meta, error = _attempt(
            lambda: self.client.claim_meta(
                self.partition,
                task,
                fields,
                batch_size,
                blocking=blocking,
                timeout_s=0,
                lease_s=lease_s,
                tag_filter=tag_filter,
            )
        )
        if blocking and not expected.sample_ids and not expected.exhausted:
            assert isinstance(error, TimeoutError), f"a claim that should time out did not: {meta or error!r}"
            return
        assert error is None, f"a claim raised an error: {error}"
        assert meta is not None
        assert meta.sample_ids == list(expected.sample_ids)
        assert meta.tags == list(expected.tags)
        if not meta.size:
            return
        if lease_s is not None:
            assert expected.lease_tokens is not None
            self.claims.append((meta, list(expected.lease_tokens)))
        self.compare(self.client.get_data(meta), meta.sample_ids, fields)
        if lease_s == _SHORT_S:
            time.sleep(1.5 * _SHORT_S)  # until the lease has expired
            self.now += 2 * _SHORT_S

    def settle(self, data: st.DataObject) -> None:
        """Settles a claim or a part of it. Its leases may be valid, settled, expired or cleared."""
        if not self.claims:
            return
        meta, tokens = self.claims[-1 - data.draw(st.integers(0, min(3, len(self.claims) - 1)), "claims ago")]
        places = list(range(meta.size))
        if self.group_size is None and data.draw(st.booleans(), "in part"):
            places = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True), "part")
        part, tokens = meta.subset(places), [tokens[place] for place in places]
        settle = data.draw(st.sampled_from([commands.Ack, commands.Ack, commands.Nack, commands.Renew]), "settle by")
        extra = (_LONG_S,) if settle is commands.Renew else ()
        command: commands.Settle = settle(self.partition, part.task_name, part.sample_ids, tokens, *extra)
        _, expected = _attempt(lambda: self.call_model(command))
        _, found = _attempt(lambda: getattr(self.client, command.op)(part, *extra))
        _agree(expected, found, command.op)

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Compares every cell once more, then clears the partition."""
        for field in _FIELDS:
            ids = [sample_id for sample_id in _IDS if (sample_id, field) in self.values]
            if ids:
                self.compare(self.store.get(self.partition, ids, field), ids, [field])
        self.client.clear_samples(None, self.partition)


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """The result of a call, or the error that it raised."""
    try:
        return call(), None
    except DataPlaneError as error:
        return None, error


def _agree(expected: Exception | None, found: Exception | None, operation: str) -> None:
    """Asserts that both succeeded, or that both raised errors of the same builtin type."""
    if expected is None:
        assert found is None, f"{operation} should have succeeded: {found}"
        return
    assert found is not None, f"{operation} succeeded, but should have raised: {expected}"
    assert _builtin(found) is _builtin(expected), f"{operation} raised {found!r}, expected {expected!r}"
    if isinstance(expected, LeaseExpiredError):
        assert isinstance(found, LeaseExpiredError), f"{operation} raised {found!r}, expected {expected!r}"
        assert sorted(found.sample_ids) == sorted(expected.sample_ids)


def _builtin(error: BaseException) -> type:
    """The builtin exception that a user would catch."""
    return next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")


class MachineSuite(Suite, chapter="machine"):
    """The contract as a whole, tested by sequences of calls that Hypothesis draws."""

    def test_random_histories_agree_with_the_ledger(self, store: Store) -> None:
        """Contract: "Every client promises what this page says, on every backend."

        Check first: the sequence of calls that Hypothesis prints. Repeat it by hand on your store and on a
        dataplane_core.ledger.ledger.Ledger, and look for the first call after which they differ.
        """
        machine: Any = functools.partial(StoreMachine, store)  # Hypothesis accepts any callable that makes a machine
        # short sequences first, instead of shrinking, which takes minutes on a real store
        for steps, examples in ((5, 40), (15, 30), (40, 30)):
            run_state_machine_as_test(
                machine, settings=kit_settings(examples, stateful_step_count=steps, shrink=is_long())
            )
