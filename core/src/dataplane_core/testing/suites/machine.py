"""Random histories, checked against `dataplane_core.ledger.Ledger` and a dict of values."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dataplane_core.capabilities import Capability
from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.fields import FieldSpec
from dataplane_core.ledger import Ledger
from dataplane_core.meta import KVBatchMeta
from dataplane_core.tags import check_tag_filter
from dataplane_core.testing._base import Suite
from dataplane_core.testing._columns import as_objects, check_column, items_of, jagged, same_items
from dataplane_core.testing._profiles import kit_settings
from dataplane_core.testing._store import Store

__all__ = ["MachineSuite", "StoreMachine"]

_IDS = [f"q{group}_g{member}" for group in range(4) for member in range(3)]
_FIELDS = ["x", "y", "o"]
_SPECS = {
    "x": FieldSpec("tensor", "int64", 1),
    "y": FieldSpec("tensor", "float32", 0),
    "o": FieldSpec.of_objects(),
}
_TASKS = ["train", "eval"]
_FILTERS = [None, {"v": (">=", 2)}, {"v": 1}, {"late": True}]
_LONG_S = 3600.0
_SHORT_S = 0.02

_some_ids = st.lists(st.sampled_from(_IDS), min_size=1, max_size=6, unique=True)
_some_fields = st.lists(st.sampled_from(_FIELDS), min_size=1, max_size=3, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """One partition of a real store next to a ledger that is told the same.

    The ledger's clock is virtual: leases are far longer than any run, but for those that a rule waits out.
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

    # --- registration -------------------------------------------------------------------------------------------------

    @initialize(grouped=st.booleans(), num_samples=st.sampled_from([None, 6, 12]))
    def open(self, grouped: bool, num_samples: int | None) -> None:
        """The first registration."""
        self.register(grouped, num_samples)

    def register(self, grouped: bool, num_samples: int | None) -> None:
        """Registers with store and model; what was known is void."""
        self.group_size = 2 if grouped and self.store.declares(Capability.GROUPS) else None
        self.client.register_partition(self.partition, _FIELDS, num_samples, _TASKS, self.group_size)
        self.model.register(self.partition, _FIELDS, num_samples, _TASKS, self.group_size, {})
        self.values.clear()

    @rule(
        grouped=st.booleans(),
        num_samples=st.sampled_from([None, 6, 12]),
        cleared=st.booleans(),
        rarely=st.integers(0, 3),
    )
    def start_afresh(self, grouped: bool, num_samples: int | None, cleared: bool, rarely: int) -> None:
        """Clears the partition or not, and registers it again."""
        if rarely:
            return
        if cleared:
            self.client.clear_samples(None, self.partition)
            self.model.clear(self.partition, None)
        self.register(grouped, num_samples)

    # --- writes -------------------------------------------------------------------------------------------------------

    def cells(self, field: str, count: int) -> tuple[Any, list[Any]]:
        """A column of values that were never used before."""
        start = self.count
        self.count += count
        numbers = range(start, start + count)
        if field == "x":
            rows = [torch.full((number % 4,), number) for number in numbers]
            return jagged(rows), rows
        if field == "y":
            return torch.tensor([float(number) for number in numbers]), [torch.tensor(float(n)) for n in numbers]
        items = [{"n": number} if number % 3 else None for number in numbers]
        return as_objects(*items), items

    @rule(
        ids=_some_ids, fields=_some_fields, tagged=st.booleans(), foreign=st.sampled_from([None, None, None, "x", "y"])
    )
    def put(self, ids: list[str], fields: list[str], tagged: bool, foreign: str | None) -> None:
        """New cells, overwrites, or a column of another dtype; perhaps with tags."""
        made = {field: self.cells(field, len(ids)) for field in fields}
        specs = {field: _SPECS[field] for field in fields}
        columns = {field: column for field, (column, _) in made.items()}
        if foreign in columns and any(key[1] == foreign for key in self.values):
            columns[foreign] = torch.zeros(len(ids), 2, dtype=torch.int16)
            specs[foreign] = FieldSpec("tensor", "int16", 1)
        tags = [{"v": self.count + place & 3, "late": False} for place in range(len(ids))] if tagged else None
        if self.write(ids, columns, specs, tags):
            for field, (_, rows) in made.items():
                self.values.update({(sample_id, field): row for sample_id, row in zip(ids, rows, strict=True)})

    @rule(ids=_some_ids, value=st.integers(0, 3))
    def put_tags(self, ids: list[str], value: int) -> None:
        """Tags alone."""
        self.write(ids, {}, {}, [{"v": value, "late": True}] * len(ids))

    def write(self, ids: list[str], columns: dict[str, Any], specs: dict[str, FieldSpec], tags: Any) -> bool:
        """Puts to the model, then to the store; both succeed or fail alike."""
        model, sizes = self.model, [0] * len(ids)
        expected = _error_of(
            lambda: model.commit_put(
                model.begin_put(self.partition, ids, specs, sizes, tags, None, now=self.now, ttl_s=1e9)
            )
        )
        _agree(expected, _error_of(lambda: self.store.put(self.partition, ids, tags, columns)), "put_samples")
        return expected is None

    @rule(ids=_some_ids)
    def clear(self, ids: list[str]) -> None:
        """Some samples, there or not."""
        self.client.clear_samples(ids, self.partition)
        self.model.clear(self.partition, ids)
        for key in [key for key in self.values if key[0] in ids]:
            del self.values[key]

    # --- reads --------------------------------------------------------------------------------------------------------

    @rule(ids=st.lists(st.sampled_from(_IDS), min_size=1, max_size=6), fields=_some_fields)
    def get(self, ids: list[str], fields: list[str]) -> None:
        """Repeats included; a missing cell refuses the whole read."""
        known = all((sample_id, field) in self.values for sample_id in ids for field in fields)
        try:
            found = self.store.get(self.partition, ids, *fields)
        except KeyError:
            assert not known, f"cells of {ids} are missing"
            return
        assert known, f"a read of missing cells of {ids} succeeded"
        self.compare(found, ids, fields)

    def compare(self, found: Any, ids: list[str], fields: list[str]) -> None:
        """Every cell against its last write."""
        for field in fields:
            expected = [self.values[sample_id, field] for sample_id in ids]
            if field == "o":
                items = items_of(found[field])
                assert all(map(same_items, items, expected)), f"objects {items}, expected {expected}"
            else:
                check_column(found[field], expected)

    @precondition(lambda self: self.store.declares(Capability.LISTING))
    @rule(index=st.integers(0, len(_FILTERS) - 1))
    def listing(self, index: int) -> None:
        """Ids in order, and tags."""
        tag_filter = _FILTERS[index] if self.store.declares(Capability.TAG_FILTERS) else None
        expected = self.model.list_samples(self.partition, check_tag_filter(tag_filter))
        meta = self.client.list_samples(self.partition, tag_filter)
        assert meta.sample_ids == list(expected.sample_ids)
        assert meta.tags == list(expected.tags)

    @precondition(lambda self: self.store.declares(Capability.CLAIMS))
    @rule(tasks=st.lists(st.sampled_from([*_TASKS, "nobody"]), min_size=1, max_size=2, unique=True))
    def consumption(self, tasks: list[str]) -> None:
        """True or False, as the model says."""
        self.model.claim(  # lets leases that ran out go, as a store does when it is asked
            self.partition,
            "train",
            ["x"],
            self.group_size or 1,
            all_or_nothing=True,
            lease_s=None,
            tag_filter={"nobody": ("==", 1)},
            explain=False,
            now=self.now,
        )
        expected = self.model.consumed(self.partition, tasks)
        assert self.client.check_consumption_status(self.partition, tasks) == expected

    # --- claims -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.store.declares(Capability.CLAIMS))
    @rule(
        task=st.sampled_from(_TASKS),
        fields=_some_fields,
        units=st.integers(1, 4),
        blocking=st.booleans(),
        lease=st.sampled_from([None, _LONG_S, _SHORT_S]),
        index=st.integers(0, len(_FILTERS) - 1),
    )
    def claim(self, task: str, fields: list[str], units: int, blocking: bool, lease: float | None, index: int) -> None:
        """All or nothing, or what is there; leased for long, or until the lease has run out, or for good."""
        lease_s = lease if self.store.declares(Capability.LEASES) else None
        tag_filter = _FILTERS[index] if self.store.declares(Capability.TAG_FILTERS) else None
        batch_size = units * (self.group_size or 1)
        expected = self.model.claim(
            self.partition,
            task,
            fields,
            batch_size,
            all_or_nothing=blocking,
            lease_s=lease_s,
            tag_filter=check_tag_filter(tag_filter),
            explain=True,
            now=self.now,
        )
        try:
            meta = self.client.claim_meta(
                self.partition,
                task,
                fields,
                batch_size,
                blocking=blocking,
                timeout_s=0,
                lease_s=lease_s,
                tag_filter=tag_filter,
            )
        except TimeoutError:
            assert blocking, "a claim that does not block timed out"
            assert not expected.sample_ids, f"no claim, expected {expected.sample_ids}"
            assert not expected.exhausted, "a claim of an exhausted partition timed out"
            return
        assert meta.sample_ids == list(expected.sample_ids)
        assert meta.tags == list(expected.tags)
        assert not blocking or meta.size or expected.exhausted, "an empty claim of a partition that can give more"
        if lease_s is None:
            assert meta.lease_tokens is None
        elif meta.size:
            assert expected.lease_tokens is not None
            self.claims.append((meta, list(expected.lease_tokens)))
        if lease_s == _SHORT_S:
            time.sleep(1.5 * _SHORT_S)  # until it has run out
            self.now += 2 * _SHORT_S
        self.compare(self.client.get_data(meta, fields), meta.sample_ids, fields) if meta.size else None

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), action=st.sampled_from(["ack", "ack", "nack", "renew"]))
    def settle(self, data: st.DataObject, action: str) -> None:
        """A claim, or part of one, whose leases may be held, settled, run out or cleared."""
        meta, tokens = data.draw(st.sampled_from(self.claims), "claim")
        places = list(range(meta.size))
        if self.group_size is None:
            places = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True), "part")
        part, tokens = meta.subset(places), [tokens[place] for place in places]
        extra = (_LONG_S,) if action == "renew" else ()
        settle = getattr(self.model, action)
        expected = _error_of(
            lambda: settle(self.partition, part.task_name, part.sample_ids, tokens, *extra, now=self.now)
        )
        _agree(expected, _error_of(lambda: getattr(self.client, action)(part, *extra)), action)

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Every cell once more; then the partition goes."""
        if self.values:
            for field in _FIELDS:
                ids = [sample_id for sample_id in _IDS if (sample_id, field) in self.values]
                if ids:
                    self.compare(self.store.get(self.partition, ids, field), ids, [field])
            if self.store.declares(Capability.LISTING):
                self.listing(0)
        self.client.clear_samples(None, self.partition)


def _error_of(call: Callable[[], Any]) -> DataPlaneError | None:
    try:
        call()
    except DataPlaneError as error:
        return error
    return None


def _agree(expected: DataPlaneError | None, found: DataPlaneError | None, operation: str) -> None:
    """Both succeeded, or both refused with what a user would catch alike."""
    if expected is None:
        assert found is None, f"{operation} should have succeeded: {found}"
        return
    assert found is not None, f"{operation} should have been refused: {expected}"
    assert _builtin(found) is _builtin(expected), f"{operation} was refused with {found!r}, expected {expected!r}"
    if isinstance(expected, LeaseExpiredError):
        assert isinstance(found, LeaseExpiredError), f"{operation} was refused with {found!r}, expected {expected!r}"
        assert sorted(found.sample_ids) == sorted(expected.sample_ids)


def _builtin(error: BaseException) -> type:
    """The builtin that a user would catch."""
    kinds = [cls for cls in type(error).__mro__ if cls.__module__ == "builtins"]
    return kinds[0]


class MachineSuite(Suite, chapter="machine"):
    """The contract as a whole, by example histories that Hypothesis finds."""

    def test_random_histories_agree_with_the_ledger(self, store: Store) -> None:
        """Contract: "What every client promises, on every backend; the conformance kit tests it word for word."

        Check first: the shortest history that Hypothesis prints: replay it by hand against
        dataplane_core.ledger.Ledger.
        """
        machine: Any = functools.partial(StoreMachine, store)  # any callable that makes a machine will do
        run_state_machine_as_test(machine, settings=kit_settings(50, stateful_step_count=30))
