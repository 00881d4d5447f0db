"""`put_samples`: what it refuses, and that a refused put writes nothing."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_object_array, as_objects, batch, ids, items_of, jagged
from dataplane_testkit._store import Store

__all__ = ["PutRefusalSuite"]

_FIRST: dict[str, Callable[[], Any]] = {
    "scalars": lambda: torch.zeros(2, dtype=torch.int64),
    "vectors": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "matrices": lambda: torch.zeros(2, 3, 4, dtype=torch.int64),
    "objects": lambda: as_objects(1, 2),
}

#: (first write, later write, why it does not fit)
_MISMATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("scalars", lambda: torch.zeros(2, dtype=torch.float32), "dtype"),
    ("scalars", lambda: torch.zeros(2, dtype=torch.int32), "narrower_dtype"),
    ("scalars", lambda: torch.zeros(2, dtype=torch.uint64), "signedness"),
    ("scalars", lambda: torch.zeros(2, 1, dtype=torch.int64), "n_to_n1"),
    ("scalars", lambda: as_objects(1, 2), "tensor_to_object"),
    ("vectors", lambda: torch.zeros(2, dtype=torch.int64), "lower_rank"),
    ("vectors", lambda: torch.zeros(2, 3, 1, dtype=torch.int64), "higher_rank"),
    ("vectors", lambda: torch.zeros(2, 3, dtype=torch.float64), "dtype_of_vectors"),
    ("vectors", lambda: jagged([torch.zeros(1), torch.zeros(2)]), "dtype_of_jagged"),
    ("matrices", lambda: torch.zeros(2, 3, 5, dtype=torch.int64), "trailing_shape"),
    ("objects", lambda: torch.zeros(2, dtype=torch.int64), "object_to_tensor"),
]

_OUTSIDE: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (1, 2),
    "set": lambda: {1},
    "object": object,
    "numpy_scalar": lambda: np.int64(1),
    "numpy_array": lambda: np.zeros(2),
    "int_of_65_bits": lambda: 2**63,
    "dict_with_int_keys": lambda: {1: "a"},
    "datetime": lambda: datetime.datetime(2024, 1, 1),
    "complex": lambda: 1j,
    "bytearray": lambda: bytearray(b"x"),
    "tuple_inside": lambda: {"a": [{"b": (1,)}]},
    "function": lambda: len,
}


class PutRefusalSuite(Suite, chapter="put refusals"):
    """Puts that must fail and write nothing."""

    # --- the schema ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("first", "later"), [case[:2] for case in _MISMATCHES], ids=[c[2] for c in _MISMATCHES])
    def test_a_field_keeps_its_schema(self, store: Store, first: str, later: Callable[[], Any]) -> None:
        """Contract: "Within a registration a field keeps one kind (tensor, object), dtype, rank and trailing shape,
        fixed by its first write. A put that differs raises ValueError, and nothing is written."

        Check first: compare request.specs with the field specs of the first write before anything is stored.
        """
        partition = store.register("x", "y")
        before = _FIRST[first]()
        store.put(partition, ["a", "b"], x=before)
        with store.refusal(ValueError, "x"):
            store.put(partition, ["c", "d"], [{"n": 1}, {"n": 2}], y=torch.ones(2), x=later())
        for sample_id in ("c", "d"):
            for field in ("x", "y"):
                assert not store.has(partition, sample_id, field), f"the refused put wrote '{field}' of '{sample_id}'"
        if store.declares(Capability.LISTING):
            assert store.client.list_samples(partition).sample_ids == ["a", "b"], "the refused put created rows"
        found = store.get(partition, ["a", "b"])["x"]
        if first == "objects":
            assert items_of(found) == [1, 2]
        else:
            assert torch.equal(found, before)

    def test_the_schema_outlives_the_rows(self, store: Store) -> None:
        """Contract: "Within a registration a field keeps one kind (tensor, object), dtype, rank and trailing shape".

        Check first: field specs belong to the registration. A clear of all samples by id must not delete them.
        """
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([1]))
        store.client.clear_samples(["a"], partition)
        with store.refusal(ValueError, "x"):
            store.put(partition, ["a"], x=torch.tensor([1.0]))
        store.put(partition, ["a"], x=torch.tensor([2]))

    def test_a_refused_put_fixes_no_schema(self, store: Store) -> None:
        """Contract: "A put that differs raises ValueError, and nothing is written."

        Check first: the commit, not the check before it, must record the field specs of new fields.
        """
        partition = store.register("x", "y")
        store.put(partition, ["a"], x=torch.tensor([1]))
        with store.refusal(ValueError, "x"):
            store.put(partition, ["b"], x=torch.tensor([1.0]), y=torch.tensor([1.0]))
        store.put(partition, ["b"], x=torch.tensor([2]), y=torch.tensor([3]))
        assert store.get(partition, ["b"], "y")["y"].dtype == torch.int64

    def test_the_first_dim_may_differ_per_row(self, store: Store) -> None:
        """Contract: "The first dim after the batch may differ per row."

        Check first: compare only the rank and the trailing shape of FieldSpec. The length of a row belongs to its cell.
        """
        partition = store.register("x")
        store.put(partition, ids(2), x=torch.zeros(2, 3, 2))
        store.put(partition, ["c"], x=torch.ones(1, 7, 2))
        store.put(partition, ["d"], x=torch.ones(1, 0, 2))
        store.put(partition, ["e", "f"], x=jagged([torch.ones(2, 2), torch.ones(5, 2)]))
        rows = store.get(partition, ["d", "s0", "c", "f"])["x"].unbind()
        assert [tuple(row.shape) for row in rows] == [(0, 2), (3, 2), (7, 2), (5, 2)]

    # --- arguments ----------------------------------------------------------------------------------------------------

    def test_put_of_nothing_is_refused(self, store: Store) -> None:
        """Contract: "A ValueError is raised if there are neither fields nor tags, if ids repeat, or if sizes differ."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.faults.counting() as calls:
            with store.refusal(ValueError):
                store.client.put_samples(["a"], partition)
            with store.refusal(ValueError):
                store.client.put_samples(["a"], partition, TensorDict({}, batch_size=[1]))
        assert calls == []

    def test_repeated_ids_are_refused(self, store: Store) -> None:
        """Contract: "A ValueError is raised if there are neither fields nor tags, if ids repeat, or if sizes differ."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(ValueError, "'b'"):
            store.put(partition, ["a", "b", "b"], x=torch.arange(3))
        assert not store.has(partition, "a")

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_sizes_that_differ_are_refused(self, store: Store, num_rows: int) -> None:
        """Contract: "A ValueError is raised if there are neither fields nor tags, if ids repeat, or if sizes differ."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(ValueError):
            store.client.put_samples(["a", "b"], partition, batch(num_rows, x=torch.arange(num_rows)))
        with store.refusal(ValueError, "align 1:1"):
            store.client.put_samples(["a", "b"], partition, batch(2, x=torch.arange(2)), [{}] * num_rows)
        assert not store.has(partition, "a")

    def test_an_unknown_partition_is_refused(self, store: Store) -> None:
        """Contract: "An unknown partition raises KeyError."

        Check first: put_samples must raise UnknownPartitionError. It must not create the partition.
        """
        unknown = store.new_id()
        with store.refusal(KeyError, unknown):
            store.put(unknown, ["a"], x=torch.zeros(1))
        with store.refusal(KeyError, unknown):
            store.put(unknown, ["a"], [{"n": 1}])
        with store.refusal(KeyError, unknown):
            store.get(unknown, ["a"])

    @pytest.mark.parametrize("name", ["", "\ud800"], ids=["empty", "surrogate"])
    def test_names_are_valid_unicode(self, store: Store, name: str) -> None:
        """Contract: "Names: partition ids, sample ids, fields and tasks are non-empty, valid Unicode".

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.faults.counting() as calls:
            for wrong in (
                lambda: store.put(partition, ["a", name], x=torch.zeros(2)),
                lambda: store.put(partition, ["a"], columns={name: torch.zeros(1)}),
                lambda: store.put(name, ["a"], x=torch.zeros(1)),
                lambda: store.get(partition, [name]),
            ):
                with pytest.raises(ValueError, match=r"empty|Unicode"):
                    wrong()
        assert calls == []

    @pytest.mark.parametrize("name", ["~", "~checksum"])
    def test_reserved_field_names_are_refused(self, store: Store, name: str) -> None:
        """Contract: "field names that begin with ~ belong to middleware."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(ValueError, name):
            store.put(partition, ["a"], columns={name: torch.zeros(1)})

    @pytest.mark.parametrize(
        "tags",
        [[{"a": [1]}], [{"a": torch.tensor(1)}], [{"a": np.float32(1)}], [{1: 1}], [{"a": 2**63}], ["a"]],
        ids=["list", "tensor", "numpy", "int_key", "int_of_65_bits", "not_a_dict"],
    )
    def test_tags_are_primitives(self, store: Store, tags: Any) -> None:
        """Contract: "Tag: a small named value of a sample (number, string, bool or None)".

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(TypeError):
            store.put(partition, ["a"], tags, x=torch.zeros(1))
        assert not store.has(partition, "a")

    # --- leaves -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("leaf", ["string", "nested_dict", "object_for_all_rows"])
    def test_other_leaves_are_refused(self, store: Store, leaf: str) -> None:
        """Contract: "A leaf that is neither a tensor nor a row-aligned object column (NonTensorStack or
        np.ndarray(dtype=object) of length N) raises a TypeError that says "non-tensor"."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        fields = TensorDict({}, batch_size=[2])
        if leaf == "nested_dict":
            fields["bad"] = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
        else:
            fields.set_non_tensor("bad", "text" if leaf == "string" else {"for": "all"})
        fields["x"] = torch.arange(2)
        with store.refusal(TypeError, "non-tensor", "bad"):
            store.client.put_samples(["a", "b"], partition, fields)
        assert not store.has(partition, "a")

    def test_object_columns_have_one_item_per_row(self, store: Store) -> None:
        """Contract: "A ValueError is raised if there are neither fields nor tags, if ids repeat, or if sizes differ."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(ValueError, "o"):
            store.put(partition, ["a", "b"], x=torch.arange(2), o=as_object_array(1, 2, 3))
        assert not store.has(partition, "a")

    def test_meta_tensors_are_refused(self, store: Store) -> None:
        """Contract: "Meta-device tensors raise TypeError."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("x")
        with store.refusal(TypeError, "meta"):
            store.client.put_samples(["a", "b"], partition, {"x": torch.zeros(2, device="meta")})
        assert not store.has(partition, "a")

    @pytest.mark.parametrize("kind", list(_OUTSIDE))
    def test_objects_outside_the_closed_set_are_refused(self, store: Store, kind: str) -> None:
        """Contract: "Object items come from a closed set: None, bool, int (64 bit), float, str, bytes, list, dict with
        str keys, tensors. Any other item raises TypeError, on every backend."

        Check first: core, not the backend: core must refuse this call before it calls the hook.
        """
        partition = store.register("o")
        with store.refusal(TypeError, "o"):
            store.put(partition, ["a", "b"], o=as_object_array(1, _OUTSIDE[kind]()))
        assert not store.has(partition, "a", "o")

    def test_allow_pickle_opens_the_set(self, store: Store) -> None:
        """Contract: "allow_pickle: true in the config opens the set."

        Check first: encoded items must be stored unchanged. Native items must be copied, whatever their type.
        """
        client = store.another_client(allow_pickle=True)
        partition = store.register("o", client=client)
        items = [(1, 2), {3, 4}, 1j, {"inside": datetime.date(2024, 1, 1)}]
        client.put_samples(ids(4), partition, batch(4, o=as_objects(*items)))
        found = items_of(client.get_samples(ids(4), partition, ["o"])["o"])
        assert found == items

    # --- the hook -----------------------------------------------------------------------------------------------------
