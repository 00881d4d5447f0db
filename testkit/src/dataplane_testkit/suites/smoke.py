"""The simplest uses of a store. These tests run first, so that a basic fault is reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from pydantic import BaseModel

from dataplane_core.errors import ConfigError
from dataplane_core.spec import Capability, Scope, WireFormat
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, jagged
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._store import Store
from dataplane_testkit._timing import PROMPT_S

#: Rows of the larger tests. With so many rows, a store that loses one in a hundred is nearly always caught.
_ROWS: Final = 400
#: Rows of one put.
_STEP: Final = 100
#: Capability -> the others of which it needs one.
_NEEDS: Final[dict[Capability, set[Capability]]] = {
    **{each: {Capability.CLAIMS} for each in (Capability.GROUPS, Capability.LEASES, Capability.CURSORS)},
    Capability.SAMPLERS: {Capability.CLAIMS},
    Capability.TAG_FILTERS: {Capability.CLAIMS, Capability.LISTING},
    Capability.ATOMIC_OVERWRITE: {Capability.OVERWRITE},
}


@contextmanager
def _other_defaults() -> Iterator[None]:
    """Every global state of torch is another one than usual."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
        torch.use_deterministic_algorithms(before[2])


def _rows(values: list[int]) -> list[torch.Tensor]:
    return [torch.full((value % 5,), value) for value in values]


def _check(store: Store, partition: str, values: list[int]) -> None:
    """Asserts that these rows are there. Fails long before the client's own deadline."""
    names = [f"s{value}" for value in values]
    Hooks(store.backend, PROMPT_S).ask("get_samples", partition, sample_ids=names, fields=["x", "y"])
    found = store.get(partition, names, "x", "y")
    assert found["x"].tolist() == values
    check_column(found["y"], _rows(values))


class SmokeSuite(Suite, chapter="smoke"):
    """What every other test of the kit relies on."""

    def test_declarations_are_consistent(self, store: Store) -> None:
        cls = store.deployment.backend_class
        declared = cls.capabilities
        assert isinstance(cls.wire, WireFormat)
        assert isinstance(declared, frozenset)
        assert all(isinstance(each, Capability) for each in declared)
        assert isinstance(cls.scope, Scope)
        assert issubclass(cls.Config, BaseModel)
        with pytest.raises(ConfigError, match="no_such_option_of_the_kit"):
            store.deployment.connect({**store.deployment.options, "no_such_option_of_the_kit": 1})
        assert (store.client.capabilities, store.client.scope) == (declared, cls.scope)
        assert store.client.backend_name == store.name
        wrong = set(map(str, cls.why_not_declared)) - {str(each) for each in {*Capability} - declared} - {"scope"}
        assert not wrong, f"why_not_declared has the keys {sorted(wrong)}, which are declared or are not capabilities"
        assert all(why.strip() for why in cls.why_not_declared.values())
        for capability in declared & _NEEDS.keys():
            needed = _NEEDS[capability]
            assert declared & needed, f"'{capability}' needs {' or '.join(map(repr, sorted(needed)))}"
        has_options = {"capacity_bytes", "on_full"} <= cls.Config.model_fields.keys()
        assert has_options == (Capability.CAPACITY in declared), "'capacity' goes with capacity_bytes and on_full"

    def test_smoke_a_few_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(3), [{"n": 0}, {"n": 1}, {"n": 2}], x=torch.arange(3), y=jagged(_rows([0, 1, 2])))
        _check(store, partition, [2, 0, 1])

    def test_smoke_hundreds_of_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        for start in range(0, _ROWS, _STEP):
            values = list(range(start, start + _STEP))
            store.put(partition, [f"s{n}" for n in values], x=torch.tensor(values), y=jagged(_rows(values)))
        _check(store, partition, list(range(_ROWS))[::-1])

    @pytest.mark.parametrize("state", ["defaults", "no_grad", "compile"])
    def test_smoke_torchs_defaults_change_nothing(self, store: Store, state: str) -> None:
        partition = store.register("x", "y", "f", "o")
        floats = [[0.5], [1.5, 2.5], []]
        columns = {"x": torch.arange(3), "y": jagged(_rows([7, 8, 9])), "f": floats, "o": as_objects(1, "a", {})}

        def put_and_get() -> Any:
            store.client.put_samples(ids(3), partition, columns, tags=[{"n": 0}, {"n": 1}, {"n": 2}])
            return store.client.get_samples(ids(3), partition, list(columns))

        if state == "compile":
            inside = torch.compile(put_and_get, backend="eager")()
        else:
            with _other_defaults() if state == "defaults" else torch.no_grad():
                inside = put_and_get()
        for found in (inside, store.get(partition, ids(3), *columns)):
            assert found["x"].tolist() == [0, 1, 2]
            check_column(found["y"], _rows([7, 8, 9]))
            check_column(found.get("f"), [torch.tensor(row, dtype=torch.float32) for row in floats])
            assert items_of(found.get("o")) == [1, "a", {}]
