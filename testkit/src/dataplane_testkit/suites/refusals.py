"""What is refused, and that no call hangs: wrong arguments, what is not declared, deadlines, declarations."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tensordict import TensorDict

from dataplane_core.errors import UnsupportedOperationError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import OPERATIONS, Capability, Scope, WireFormat
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_object_array, batch, ids, naming
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import PROMPT_S, Background, bounded

_X: Final = batch(2, x=torch.arange(2))
#: Objects that the closed set does not hold, and tags that are no tags.
_OUTSIDE: Final[list[Any]] = [
    *((1, 2), {1}, 1j, object(), len, {1: "a"}, {"a": [{"b": (1,)}]}, bytearray(b"x"), 2**63),
    *(np.int64(1), np.zeros(2), datetime.datetime(2024, 1, 1)),
]
_NO_TAGS: Final[list[Any]] = [{"a": [1]}, {"a": torch.tensor(1)}, {"a": np.float32(1)}, {1: 1}, {"a": 2**63}, "a"]
_NO_FILTERS: Final[list[Any]] = [["v"], *({"v": each} for each in (("~", 1), (">",), ("in", 3), (">", [1])))]
#: Strings that are no names.
_NO_NAMES: Final = ("", "\ud800")
_LEASED: Final = KVBatchMeta("p", "train", ["a"], lease_tokens=["token"])

#: Operation -> its arguments, but for the partition.
_USUAL: Final[dict[str, dict[str, Any]]] = {
    "register_partition": {"fields": ["x"], "num_samples": None, "consumer_tasks": ["train"]},
    "put_samples": {"sample_ids": ["a", "b"], "fields": _X},
    "get_samples": {"sample_ids": ["a"], "select_fields": ["x"]},
    "claim_meta": {"task_name": "train", "required_fields": ["x"], "batch_size": 1, "blocking": False},
    "check_consumption_status": {"task_names": ["train"]},
    "is_finished": {"task_names": ["train"]},
    "list_consumed": {"task_name": "train"},
    "reset_consumption": {"task_name": "train"},
    **{operation: {} for operation in ("list_samples", "list_sample_ids", "describe")},
}

_Arguments: TypeAlias = dict[str, Any]

#: What a call needs -> the operation, the error, what its message must name, and arguments that are wrong.
_WRONG: Final[dict[Capability | None, list[tuple[str, type[Exception], str, list[_Arguments]]]]] = {
    None: [
        ("register_partition", ValueError, "", [{"partition_id": ""}, {"num_samples": 0}, {"fields": [""]}]),
        ("register_partition", ValueError, "grpo_group_size", [{"grpo_group_size": 0}]),
        ("register_partition", ValueError, "copy", [{"followers": ["copy"]}]),
        ("register_partition", ValueError, "if_exists", [{"if_exists": "keeep"}]),
        ("register_partition", TypeError, "", [{"partition_id": 7}, {"consumer_tasks": "train"}]),
        ("put_samples", ValueError, "", [{"fields": None}, {"fields": TensorDict({}, batch_size=[2])}]),
        ("put_samples", ValueError, "", [{"fields": batch(rows, x=torch.arange(rows))} for rows in (1, 3)]),
        ("put_samples", ValueError, "", [{"fields": {name: torch.zeros(2)}} for name in _NO_NAMES]),
        ("put_samples", ValueError, "", [{"sample_ids": ["a", name]} for name in _NO_NAMES]),
        ("put_samples", ValueError, "", [{"partition_id": name} for name in _NO_NAMES]),
        ("put_samples", ValueError, "'b'", [{"sample_ids": ["b", "b"]}]),
        ("put_samples", ValueError, "align 1:1", [{"tags": [{}]}, {"tags": [{}] * 3}]),
        ("put_samples", ValueError, "'o'", [{"fields": {"o": as_object_array(1, 2, 3)}}]),
        ("put_samples", ValueError, "~", [{"fields": {name: torch.zeros(2)}} for name in ("~", "~sum")]),
        ("put_samples", TypeError, "non-tensor", [{"fields": _X.clone().set("bad", _X)}]),
        ("put_samples", TypeError, "non-tensor", [{"fields": _X.clone().set_non_tensor("bad", "for all rows")}]),
        ("put_samples", TypeError, "meta", [{"fields": {"x": torch.zeros(2, device="meta")}}]),
        ("put_samples", TypeError, "'o'", [{"fields": {"o": as_object_array(1, item)}} for item in _OUTSIDE]),
        ("put_samples", TypeError, "", [{"tags": [row, row]} for row in _NO_TAGS]),
        ("get_samples", ValueError, "", [{"sample_ids": [name]} for name in _NO_NAMES]),
        ("get_samples", ValueError, "select_fields", [{"select_fields": []}]),
    ],
    Capability.CLAIMS: [("claim_meta", ValueError, "batch_size", [{"batch_size": 0}, {"batch_size": -1}])],
    Capability.LEASES: [
        ("claim_meta", ValueError, "lease_s", [{"lease_s": 0}, {"lease_s": -1.0}]),
        ("renew", ValueError, "lease_s", [{"meta": _LEASED, "lease_s": time_s} for time_s in (0, math.nan, math.inf)]),
        ("ack", ValueError, "token", [{"meta": KVBatchMeta("p", "train", ["a"])}]),
    ],
    Capability.TAG_FILTERS: [
        ("claim_meta", ValueError, "tag_filter", [{"tag_filter": each} for each in _NO_FILTERS]),
    ],
    Capability.SAMPLERS: [
        ("claim_meta", ValueError, "sampler", [{"sampler": "random"}]),
        ("claim_meta", ValueError, "", [{"sampler": "balanced"}, {"sampler": "balanced", "dp_rank": 0}]),
        ("claim_meta", ValueError, "dp_rank", [{"dp_rank": 2, "dp_size": 2}, {"dp_rank": -1}, {"dp_rank": True}]),
        ("claim_meta", ValueError, "dp_rank", [{"dp_size": 2}, {"batch_index": 0}]),
        ("claim_meta", ValueError, "batch_index", [{"dp_rank": 0, "batch_index": -1}]),
    ],
}

#: Operation -> calls that are refused where it is not declared, on a partition with samples s0 and s1.
_UNDECLARED: Final[dict[Capability, list[tuple[str, _Arguments]]]] = {
    Capability.CLAIMS: [("claim_meta", {}), ("check_consumption_status", {}), ("is_finished", {})],
    Capability.GROUPS: [("register_partition", {"partition_id": "kit-groups", "grpo_group_size": 2})],
    Capability.LEASES: [
        ("claim_meta", {"lease_s": 1.0}),
        *(("ack", {"meta": _LEASED}), ("nack", {"meta": _LEASED}), ("renew", {"meta": _LEASED, "lease_s": 60.0})),
    ],
    Capability.TAG_FILTERS: [("claim_meta", {"tag_filter": {"n": 1}}), ("list_samples", {"tag_filter": {"n": 1}})],
    Capability.LISTING: [
        *(("list_samples", {}), ("list_sample_ids", {}), ("describe", {}), ("list_partitions", {}), ("ping", {})),
        ("get_samples", {"sample_ids": ["s0"], "select_fields": None}),
    ],
    Capability.CURSORS: [("list_consumed", {}), ("reset_consumption", {})],
    Capability.SAMPLERS: [("claim_meta", {"dp_rank": 0}), ("claim_meta", {"sampler": "freshest"})],
    Capability.CLIENTS: [("list_clients", {})],
    Capability.UNITS: [("list_units", {}), ("add_units", {"count": 1}), ("remove_unit", {"name": "a unit"})],
    Capability.OVERWRITE: [("put_samples", {"sample_ids": ["s0", "s2"], "fields": batch(2, x=torch.arange(2) + 7)})],
    Capability.CAPACITY: [],  # its options must not be there
}


def _call(store: Store, partition: str, operation: str, arguments: _Arguments) -> None:
    """Calls the client with the usual arguments but for these."""
    usual = {"partition_id": partition, **_USUAL[operation]} if operation in _USUAL else {}
    getattr(store.client, operation)(**{**usual, **arguments})


class RefusalSuite(Suite, chapter="refusals"):
    """Calls that are refused, and calls that must end."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One case per operation that is not declared."""
        if "undeclared" in metafunc.fixturenames:
            names = sorted(OPERATIONS - self.under_test().capabilities)
            metafunc.parametrize("undeclared", names or [None], ids=[str(name) for name in names] or ["none"])

    def test_declarations_are_consistent(self, store: Store) -> None:
        cls = store.deployment.backend_class
        declared, options = cls.capabilities, cls.Config.model_fields
        assert isinstance(cls.wire, WireFormat)
        assert isinstance(declared, frozenset)
        assert all(isinstance(each, Capability) for each in declared)
        assert isinstance(cls.scope, Scope)
        assert issubclass(cls.Config, BaseModel)
        assert (store.client.capabilities, store.client.scope) == (declared, cls.scope)
        assert store.client.backend_name == store.name
        wrong = set(map(str, cls.why_not_declared)) - {str(each) for each in {*Capability} - declared} - {"scope"}
        assert not wrong, f"why_not_declared has the keys {sorted(wrong)}, which are declared or are not capabilities"
        assert all(why.strip() for why in cls.why_not_declared.values())
        for capability in {Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS} & declared:
            assert Capability.CLAIMS in declared, f"'{capability}' needs 'claims'"
        if Capability.TAG_FILTERS in declared:
            assert declared & {Capability.CLAIMS, Capability.LISTING}, "'tag_filters' needs 'claims' or 'listing'"
        if Capability.ATOMIC_OVERWRITE in declared:
            assert Capability.OVERWRITE in declared, "'atomic_overwrite' needs 'overwrite'"
        if Capability.CAPACITY in declared:
            assert {"capacity_bytes", "on_full"} <= options.keys(), (
                "'capacity' needs the options capacity_bytes and on_full"
            )
        else:
            assert "capacity_bytes" not in options, "the option 'capacity_bytes' needs 'capacity'"

    def test_undeclared_operations_are_refused(self, store: Store, undeclared: Capability | None) -> None:
        if undeclared is None:
            not_run("the backend declares all operations")
        partition = store.filled(2, tags=[{"n": 1}, {"n": 2}])
        for operation, arguments in _UNDECLARED[undeclared]:
            with naming(operation), store.refusal(UnsupportedOperationError) as caught:
                _call(store, partition, operation, arguments)
            assert isinstance(caught.value, NotImplementedError)
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1], "a refused operation changed data"
        assert not store.has(partition, "s2"), "a refused operation wrote a row"

    @pytest.mark.parametrize("need", _WRONG, ids=lambda need: need or "core")
    def test_wrong_arguments_reach_no_hook(self, store: Store, need: Capability | None) -> None:
        store.require(need)
        partition = store.register("x")
        for operation, error_type, word, cases in _WRONG[need]:
            if operation == "claim_meta" and not store.declares(Capability.CLAIMS):
                operation = "list_samples"  # which has filters too
            for arguments in cases:
                with store.faults.counting() as calls, naming(f"{operation} {arguments}"):
                    with store.refusal(error_type, word):
                        _call(store, partition, operation, arguments)
                    assert calls == [], "a hook was called"

    # --- no call hangs ------------------------------------------------------------------------------------------------

    def test_deadlines_follow_the_config(self, store: Store) -> None:
        partition, limit_s = store.register("x"), store.client.config.op_timeout_s
        left: list[float] = []
        with store.faults.before("get_samples", lambda request: left.append(request.deadline - time.monotonic())):
            store.has(partition, "a")
        assert 0.5 * limit_s < left[0] <= limit_s

    def test_a_waiting_claim_holds_nobody_up(self, store: Store) -> None:
        partition = store.register("x", tasks=["train", "eval"])
        waiting = [store.waiting_claim(partition, 9) for _ in range(4)]

        def work() -> None:
            for number in range(8):
                store.put(partition, [f"s{number}"], x=torch.tensor([number]))
                assert store.get(partition, [f"s{number}"])["x"].tolist() == [number]
                store.claim(partition, 1, task="eval")

        bounded(work, 2 * PROMPT_S, "work next to waiting claims")
        assert all(each.running for each in waiting)
        store.client.clear_samples(None, partition)
        for each in waiting:
            with store.refusal(KeyError):
                each.result(what="a claim of a partition that was cleared")

    def test_one_bad_request_holds_nobody_up(self, store: Store) -> None:
        partition = store.filled(2)
        bad: list[tuple[type[Exception], Callable[[], Any]]] = [
            (KeyError, lambda: store.get(partition, ["nobody"])),
            (KeyError, lambda: store.get(partition, ids(2), "x", "y")),
            (KeyError, lambda: store.get(store.new_id(), ["a"])),
            (ValueError, lambda: store.put(partition, ["late"], x=torch.zeros(1))),
        ]
        for number in range(10):
            failing = [(error_type, Background(call)) for error_type, call in bad]
            assert bounded(lambda: store.get(partition, ids(2)), what="a read next to bad requests")["x"].tolist() == [
                0,
                1,
            ]
            for error_type, each in failing:
                with store.refusal(error_type):
                    each.result(what="a bad request")
            store.put(partition, [f"after{number}"], x=torch.tensor([number]))
        store.put(partition, ["late"], x=torch.tensor([7]))
        assert store.get(partition, ["late", *ids(10, "after")])["x"].tolist() == [7, *range(10)]
