"""Random sequences of calls. The results are compared with a model: a `Ledger` and a dict of values."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from dataplane_core.errors import DataPlaneError, LeaseExpiredError
from dataplane_core.ledger import Command, Ledger, Reply, commands
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, FieldSpec, check_tag_filter, new_id
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, items_of, jagged, same_items
from dataplane_testkit._profiles import by_profile, is_long, new_seed
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

#: The operations, each with its weight, and what it needs.
_ACTIONS: dict[str, tuple[float, Capability | None]] = {
    "put": (6, None),
    "get": (3, None),
    "claim": (5, Capability.CLAIMS),
    "settle": (3, Capability.LEASES),
    "listing": (2, Capability.LISTING),
    "consumption": (2, Capability.CLAIMS),
    "clear": (2, None),
    "put_tags": (1, None),
    "start_afresh": (0.25, None),
    "finish": (0.25, None),
}
#: Steps of a sequence -> how many sequences. The short ones first: what they find is easy to read.
_SEQUENCES: Final = {5: 40, 15: 30, 40: 30}


class StoreMachine:
    """One partition of a real store, and a ledger that gets the same calls.

    The ledger's clock is virtual. Leases are far longer than any run, except those whose end the machine waits for.
    """

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        self.partition = store.new_id()
        self.model = Ledger(overwrite=store.declares(Capability.OVERWRITE))
        self.now = 0.0
        self.count = 0
        self.values: dict[tuple[str, str], Any] = {}
        self.claims: list[tuple[KVBatchMeta, list[str]]] = []
        self.group_size: int | None = None
        self.calls: list[str] = []

    def run(self, num_steps: int) -> None:
        """Registers the partition, takes so many steps, compares every cell once more and clears the partition."""
        able = {name: weight for name, (weight, need) in _ACTIONS.items() if need is None or self.store.declares(need)}
        try:
            self.register()
            for action in self.rng.choices(list(able), list(able.values()), k=num_steps):
                getattr(self, action)()
            for field in _FIELDS:
                ids = [sample_id for sample_id in _IDS if (sample_id, field) in self.values]
                if ids:
                    self.compare(self.store.get(self.partition, ids, field), ids, [field])
        except Exception as error:
            error.add_note("The calls:\n" + "\n".join(self.calls))
            raise
        self.ask("clear_samples", None, self.partition)

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Calls the client, and notes the call."""
        told = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.calls.append(f"  {operation}({', '.join(told)})")
        return getattr(self.store.client, operation)(*arguments, **options)

    def tell(self, command: Command[Reply]) -> Reply:
        """Makes the call on the model, and returns its reply."""
        return self.model.apply(command, self.now)

    def rarely(self) -> bool:
        """True in one of four calls."""
        return self.rng.random() < 0.25

    def some(self, values: Sequence[_T], most: int) -> list[_T]:
        """One or more different values."""
        return self.rng.sample(values, self.rng.randint(1, min(most, len(values))))

    def some_fields(self) -> list[str]:
        """Fields to write, read or require."""
        return self.rng.choice([["x", "y", "o"], ["y", "x", "o"], ["x"], ["y"], ["o", "x"]])

    # --- registration -------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Registers the partition in the store and the model. Forgets everything about the earlier registration."""
        self.group_size = 2 if self.rarely() and self.store.declares(Capability.GROUPS) else None
        about = (self.partition, _FIELDS, self.rng.choice([None, 6, 12]), _TASKS, self.group_size)
        self.ask("register_partition", *about)
        self.tell(commands.RegisterRequest(*about, {}, new_id()))
        self.values.clear()

    def start_afresh(self) -> None:
        """Registers the partition again, sometimes after a clear."""
        if self.rng.random() < 0.5:
            self.ask("clear_samples", None, self.partition)
            self.tell(commands.ClearRequest(self.partition, None))
        self.register()

    def finish(self) -> None:
        """Says that no more samples come."""
        self.ask("finish_partition", self.partition)
        self.tell(commands.RegisterRequest(self.partition, [], 0, [], self.group_size, {}, new_id(), "keep"))

    # --- writes -------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Puts new cells, overwrites, or a column of another dtype, sometimes with tags."""
        ids, fields = self.some(_IDS, 8), self.some_fields()
        made = {field: self.cells(field, len(ids)) for field in fields}
        specs = {field: _SPECS[field] for field in fields}
        columns = {field: column for field, (column, _) in made.items()}
        foreign = self.rng.choice([None] * 6 + ["x", "y"])
        if foreign in columns and any(key[1] == foreign for key in self.values):
            columns[foreign], specs[foreign] = torch.zeros(len(ids), 2, dtype=torch.int16), _FOREIGN
        tags = None
        if self.rng.random() < 0.5:
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

    def put_tags(self) -> None:
        """Puts tags without fields."""
        ids = self.some(_IDS, 8)
        self.write(ids, {}, {}, [{"v": self.rng.randint(0, 3), "late": True}] * len(ids))

    def write(self, ids: list[str], columns: dict[str, Any], specs: dict[str, FieldSpec], tags: Any) -> bool:
        """Puts to the model and to the store. Returns whether both accepted the put."""
        writes = [commands.Write(list(specs), [0] * len(ids))] if specs else []
        begin = commands.BeginPut(self.partition, ids, specs, writes, tags, ttl_s=1e9)
        _, expected = _attempt(lambda: self.tell(commands.CommitPut(self.tell(begin))))
        _, found = _attempt(lambda: self.ask("put_samples", ids, self.partition, columns or None, tags))
        _agree(expected, found, "put_samples")
        return expected is None

    def clear(self) -> None:
        """Clears some samples, which may not exist."""
        ids = self.some(_IDS, 2)
        self.ask("clear_samples", ids, self.partition)
        self.tell(commands.ClearRequest(self.partition, ids))
        for key in [key for key in self.values if key[0] in ids]:
            del self.values[key]

    # --- reads --------------------------------------------------------------------------------------------------------

    def get(self) -> None:
        """Reads samples, some of them twice. If a cell is missing, the whole read must fail."""
        fields = self.some_fields()
        ready = [each for each in _IDS if all((each, field) in self.values for field in fields)]
        ids = self.rng.choices(_IDS if self.rarely() or not ready else ready, k=self.rng.randint(1, 6))
        found, error = _attempt(lambda: self.ask("get_samples", ids, self.partition, fields))
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

    def some_filter(self) -> Any:
        """A tag filter, or in most cases None."""
        return self.rng.choice(_FILTERS) if self.store.declares(Capability.TAG_FILTERS) else None

    def listing(self) -> None:
        """Compares the listed ids, their order and their tags with the model."""
        tag_filter = self.some_filter()
        expected = self.tell(commands.ListRequest(self.partition, check_tag_filter(tag_filter)))
        meta = self.ask("list_samples", self.partition, tag_filter)
        assert meta.sample_ids == list(expected.sample_ids)
        assert meta.tags == list(expected.tags)

    def consumption(self) -> None:
        """Compares the consumption status with the model."""
        tasks = self.some([*_TASKS, "nobody"], 2)
        expected = self.tell(commands.ConsumptionRequest(self.partition, tasks))
        assert self.ask("check_consumption_status", self.partition, tasks) == expected

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Claims with or without all_or_nothing; without a lease, with a long one or with a short one that expires."""
        task, fields = self.rng.choice(_TASKS), self.some_fields()
        batch_size = self.rng.randint(1, 4) * (self.group_size or 1)
        blocking, tag_filter = self.rarely(), self.some_filter()
        leases = [None, _LONG_S, _LONG_S, _SHORT_S] if self.store.declares(Capability.LEASES) else [None]
        lease_s = self.rng.choice(leases)
        about = (self.partition, task, fields, batch_size)
        asked: dict[str, Any] = {"lease_s": lease_s, "tag_filter": check_tag_filter(tag_filter)}
        expected = self.tell(
            commands.ClaimRequest(*about, token=new_id(), explain=True, all_or_nothing=blocking, **asked)
        )
        options = {"blocking": blocking, "timeout_s": 0, "lease_s": lease_s, "tag_filter": tag_filter}
        meta, error = _attempt(lambda: self.ask("claim_meta", *about, **options))
        if blocking and not expected.sample_ids and not expected.exhausted:
            assert isinstance(error, TimeoutError), f"a claim that should time out did not: {meta or error!r}"
            return
        assert error is None, f"a claim raised an error: {error}"
        assert (meta.sample_ids, meta.tags) == (list(expected.sample_ids), list(expected.tags))
        if not meta.size:
            return
        if lease_s is not None:
            assert expected.lease_tokens is not None
            self.claims.append((meta, list(expected.lease_tokens)))
        self.compare(self.store.client.get_data(meta), meta.sample_ids, fields)
        if lease_s == _SHORT_S:
            time.sleep(1.5 * _SHORT_S)  # until the lease has expired
            self.now += 2 * _SHORT_S

    def settle(self) -> None:
        """Settles a claim or a part of it. Its leases may be valid, settled, expired or cleared."""
        if not self.claims:
            return
        meta, tokens = self.rng.choice(self.claims[-4:])
        places = list(range(meta.size))
        if self.group_size is None and self.rng.random() < 0.5:
            places = self.some(places, meta.size)
        part, tokens = meta.subset(places), [tokens[place] for place in places]
        settle: Any = self.rng.choice(
            [commands.AckRequest, commands.AckRequest, commands.NackRequest, commands.RenewRequest]
        )
        extra = (_LONG_S,) if settle is commands.RenewRequest else ()
        command: commands.SettleRequest = settle(self.partition, part.task_name, part.sample_ids, tokens, *extra)
        _, expected = _attempt(lambda: self.tell(command))
        _, found = _attempt(lambda: self.ask(command.op, part, *extra))
        _agree(expected, found, command.op)


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
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
    """The contract as a whole, tested by random sequences of calls."""

    def test_random_histories_agree_with_the_ledger(self, store: Store) -> None:
        rng = random.Random(new_seed() if is_long() else 1)
        for num_steps, count in _SEQUENCES.items():
            for _ in range(by_profile(count // 4, count, count * 25)):
                StoreMachine(store, rng).run(num_steps)
