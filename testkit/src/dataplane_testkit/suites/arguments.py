"""What core refuses on every backend before it calls a hook: arguments that are wrong."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_object_array, batch, naming
from dataplane_testkit._store import Store

#: The error, what its message must contain, and the call on a partition that is registered.
_Case = tuple[type[Exception], str, Callable[[Store, str], Any]]


def _put(columns: Any = None, ids: tuple[str, ...] = ("a", "b"), tags: Any = None) -> Callable[[Store, str], Any]:
    return lambda s, p: s.client.put_samples(list(ids), p, columns() if callable(columns) else columns, tags)


def _put_into(partition_id: str) -> Callable[[Store, str], Any]:
    return lambda s, p: s.put(partition_id, ["a"], x=torch.zeros(1))


def _get(sample_id: str) -> Callable[[Store, str], Any]:
    return lambda s, p: s.get(p, [sample_id])


def _x(rows: int = 2) -> TensorDict:
    return batch(rows, x=torch.arange(rows))


def _leaf(value: Any) -> Callable[[], TensorDict]:
    return lambda: _x().set_non_tensor("bad", value)


def _register(**arguments: Any) -> Callable[[Store, str], Any]:
    usual = {"partition_id": "p", "fields": ["x"], "num_samples": None, "consumer_tasks": ["train"]}
    return lambda s, p: s.client.register_partition(**{**usual, **arguments})


def _claim(size: int = 1, **arguments: Any) -> Callable[[Store, str], Any]:
    return lambda s, p: s.claim(p, size, **arguments)


def _filter(tag_filter: Any) -> Callable[[Store, str], Any]:
    def ask(store: Store, partition: str) -> None:
        if store.declares(Capability.CLAIMS):
            store.claim(partition, 1, tag_filter=tag_filter)
        else:
            store.client.list_samples(partition, tag_filter)

    return ask


def _renew(lease_s: float) -> Callable[[Store, str], Any]:
    return lambda s, p: s.client.renew(KVBatchMeta(p, "train", ["a"], lease_tokens=["token"]), lease_s)


#: Objects that the closed set does not hold.
_OUTSIDE: Final[dict[str, Any]] = {
    "tuple": (1, 2),
    "set": {1},
    "object": object(),
    "numpy_scalar": np.int64(1),
    "numpy_array": np.zeros(2),
    "int_of_65_bits": 2**63,
    "dict_with_int_keys": {1: "a"},
    "datetime": datetime.datetime(2024, 1, 1),
    "complex": 1j,
    "bytearray": bytearray(b"x"),
    "tuple_inside": {"a": [{"b": (1,)}]},
    "function": len,
}
_BAD_TAGS: Final[dict[str, Any]] = {
    "list": {"a": [1]},
    "tensor": {"a": torch.tensor(1)},
    "numpy": {"a": np.float32(1)},
    "int_key": {1: 1},
    "int_of_65_bits": {"a": 2**63},
    "no_dict": "a",
}
_NO_NAMES: Final = {"empty": "", "surrogate": "\ud800"}

_CASES: Final[dict[Capability | None, dict[str, _Case]]] = {
    None: {
        "register_no_id": (ValueError, "", _register(partition_id="")),
        "register_id_not_str": (TypeError, "", _register(partition_id=7)),
        "register_no_samples": (ValueError, "", _register(num_samples=0)),
        "register_empty_groups": (ValueError, "", _register(grpo_group_size=0)),
        "register_tasks_no_list": (TypeError, "", _register(consumer_tasks="train")),
        "register_other_follower": (ValueError, "copy", _register(followers=["copy"])),
        "register_empty_field": (ValueError, "", _register(fields=[""])),
        "register_if_exists": (ValueError, "if_exists", _register(if_exists="keeep")),
        "put_nothing": (ValueError, "", _put(ids=("a",))),
        "put_no_columns": (ValueError, "", _put(TensorDict({}, batch_size=[1]), ids=("a",))),
        "put_repeated_ids": (ValueError, "'b'", _put(lambda: _x(3), ids=("a", "b", "b"))),
        "put_too_few_rows": (ValueError, "", _put(lambda: _x(1))),
        "put_too_many_rows": (ValueError, "", _put(lambda: _x(3))),
        "put_too_few_tags": (ValueError, "align 1:1", _put(_x, tags=[{}])),
        "put_too_many_tags": (ValueError, "align 1:1", _put(_x, tags=[{}] * 3)),
        "put_too_many_items": (ValueError, "o", _put(lambda: {"o": as_object_array(1, 2, 3)})),
        "put_string": (TypeError, "non-tensor", _put(_leaf("text"))),
        "put_object_for_all_rows": (TypeError, "non-tensor", _put(_leaf({"for": "all"}))),
        "put_nested_dict": (TypeError, "non-tensor", _put(lambda: _x().set("bad", _x()))),
        "put_meta_tensor": (TypeError, "meta", _put(lambda: {"x": torch.zeros(2, device="meta")})),
        "put_reserved": (ValueError, "~", _put(lambda: {"~": torch.zeros(2)})),
        "put_reserved_name": (ValueError, "~sum", _put(lambda: {"~sum": torch.zeros(2)})),
        **{
            f"put_item_{kind}": (TypeError, "o", _put(partial(dict, o=as_object_array(1, item))))
            for kind, item in _OUTSIDE.items()
        },
        **{f"put_tag_{kind}": (TypeError, "", _put(_x, tags=[row, row])) for kind, row in _BAD_TAGS.items()},
        **{f"put_id_{kind}": (ValueError, "", _put(_x, ids=("a", name))) for kind, name in _NO_NAMES.items()},
        **{
            f"put_field_{kind}": (ValueError, "", _put(partial(dict, {name: torch.zeros(2)})))
            for kind, name in _NO_NAMES.items()
        },
        **{f"put_partition_{kind}": (ValueError, "", _put_into(name)) for kind, name in _NO_NAMES.items()},
        **{f"get_id_{kind}": (ValueError, "", _get(name)) for kind, name in _NO_NAMES.items()},
        "get_no_fields": (ValueError, "select_fields", lambda s, p: s.client.get_samples(["a"], p, [])),
    },
    Capability.CLAIMS: {
        "claim_of_0": (ValueError, "batch_size", _claim(0)),
        "claim_of_-1": (ValueError, "batch_size", _claim(-1)),
    },
    Capability.LEASES: {
        **{f"claim_lease_{lease_s}": (ValueError, "lease_s", _claim(lease_s=lease_s)) for lease_s in (0, -1.0)},
        **{f"renew_{lease_s}": (ValueError, "lease_s", _renew(float(lease_s))) for lease_s in ("0", "nan", "inf")},
        "ack_without_token": (ValueError, "token", lambda s, p: s.client.ack(KVBatchMeta(p, "train", ["a"]))),
    },
    Capability.TAG_FILTERS: {
        "filter_operator": (ValueError, "tag_filter", _filter({"v": ("~", 1)})),
        "filter_no_operand": (ValueError, "tag_filter", _filter({"v": (">",)})),
        "filter_in_a_number": (ValueError, "tag_filter", _filter({"v": ("in", 3)})),
        "filter_list": (ValueError, "tag_filter", _filter({"v": (">", [1])})),
        "filter_no_dict": (ValueError, "tag_filter", _filter(["v"])),
    },
    Capability.SAMPLERS: {
        "sampler": (ValueError, "", _claim(sampler="random")),
        "balanced_without_rank": (ValueError, "", _claim(sampler="balanced")),
        "balanced_without_size": (ValueError, "", _claim(sampler="balanced", dp_rank=0)),
        "rank_too_high": (ValueError, "", _claim(dp_rank=2, dp_size=2)),
        "rank_below_0": (ValueError, "", _claim(dp_rank=-1)),
        "rank_bool": (ValueError, "", _claim(dp_rank=True)),
        "size_without_rank": (ValueError, "", _claim(dp_size=2)),
        "batch_without_rank": (ValueError, "", _claim(batch_index=0)),
        "batch_below_0": (ValueError, "", _claim(dp_rank=0, batch_index=-1)),
    },
}


class ArgumentSuite(Suite, chapter="arguments"):
    """Calls that no backend ever sees."""

    @pytest.mark.parametrize("capability", _CASES, ids=lambda each: each or "core")
    def test_wrong_arguments_reach_no_hook(self, store: Store, capability: Capability | None) -> None:
        store.require(capability)
        partition = store.register("x")
        for case, (error_type, word, call) in _CASES[capability].items():
            with store.faults.counting() as calls, naming(case), store.refusal(error_type, word):
                call(store, partition)
            assert calls == [], case
