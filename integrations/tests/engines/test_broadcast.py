"""The leader's batch arrives on its siblings bit for bit, whatever its columns are, and so does its failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bits import bits, random_bits

from dataplane_core.batch import BatchedDataDict, SlicedDataDict
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import MissingDataError
from dataplane_integrations.trainer.broadcast import broadcast_from_leader, group_device


def _send(rank, make):
    return broadcast_from_leader(make, group=dist.group.WORLD)


def _odd_tensors():
    return BatchedDataDict(
        {
            "none": torch.zeros(4, 0),
            "one": torch.arange(4),
            "transposed": torch.arange(12).reshape(3, 4).T,
            "expanded": torch.ones(4, 1).expand(4, 9),
            "strided": torch.arange(24, dtype=torch.float32).reshape(4, 6)[:, ::2],
            "conjugated": torch.tensor([1 + 2j, 3 - 1j, 0j, 5j]).conj(),
            "graph": (torch.ones(4, 2, requires_grad=True) * 3),
        }
    )


def _objects():
    objects = np.empty(2, dtype=object)
    objects[0] = {"pixels": torch.full((2, 3), 0.5, dtype=torch.bfloat16), "name": "a"}
    objects[1] = [torch.tensor(True), None, ("x", torch.arange(3, dtype=torch.int8))]
    return BatchedDataDict({"text": ["é", "ß"], "rows": [torch.ones(1), torch.zeros(2)], "objects": objects})


def _planned():
    batch = SlicedDataDict({"input_ids": torch.zeros(4, 3)})
    batch.micro_batch_indices = [[[0, 3], [3, 4]]]
    batch.micro_batch_lengths = [[2, 3]]
    batch.elem_counts_per_gb = [4]
    return batch


#: Ragged and object columns as a fetch has them are in `test_fetched_batches.py`.
BATCHES: dict[str, Callable[[], BatchedDataDict]] = {
    "every dtype": lambda: BatchedDataDict(
        {str(each): random_bits(each, 3, 5) for each in sorted(ALL_DTYPES, key=str)}
    ),
    "odd tensors": _odd_tensors,
    "objects": _objects,
    "no rows": lambda: BatchedDataDict({"input_ids": torch.zeros(0, 7, dtype=torch.int64), "names": []}),
    "no columns": BatchedDataDict,
    "a class and a plan": _planned,
}


def _described(batch):
    """As bits: pickle does not carry every dtype."""
    flags = [(each.requires_grad, each.is_contiguous()) for each in batch.values() if isinstance(each, torch.Tensor)]
    return type(batch), _attributes(batch), _deep_bits(dict(batch)), flags


def _attributes(batch):
    return {name: value for name, value in vars(batch).items() if name != "data"}


def _deep_bits(value):
    if isinstance(value, dict):
        return {key: _deep_bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return type(value), [_deep_bits(item) for item in value]
    return bits(value.detach().resolve_conj() if isinstance(value, torch.Tensor) else value)


def test_a_batch_arrives_bit_for_bit(ranks):
    def send(rank):
        return {name: _described(_send(rank, make)) for name, make in BATCHES.items()}

    for number, found in enumerate(ranks(3, send)):
        for name, make in BATCHES.items():
            kind, attributes, values, flags = found[name]
            sent = make()
            assert (kind, attributes, values) == (type(sent), _attributes(sent), _deep_bits(dict(sent))), name
            if number:  # the leader keeps its own
                assert set(flags) <= {(False, True)}, name


def test_integers_are_sent_narrow_and_arrive_as_they_were(ranks):
    def make():
        columns: dict[str, Any] = {}
        for most in (127, -1, 60_000, 1 << 20, 1 << 40):
            values = torch.arange(30_000).reshape(3, -1) % 100
            values[1, 2] = most
            columns[f"dense {most}"] = values.T
            columns[f"jagged {most}"] = torch.nested.as_nested_tensor(list(values.unbind()), layout=torch.jagged)
        return BatchedDataDict(columns)

    def send(rank):
        sizes, broadcast = [], dist.broadcast
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                dist, "broadcast", lambda message, **to: (sizes.append(len(message)), broadcast(message, **to))
            )
            batch = broadcast_from_leader(make, group=dist.group.WORLD)
        dtypes = {column.dtype for column in batch.values()}
        return [row.tolist() for column in batch.values() for row in column.unbind()] + [*map(str, dtypes)], sum(sizes)

    leader, sibling = ranks(2, send)
    expected = [row.tolist() for column in make().values() for row in column.unbind()]
    assert leader == sibling
    assert leader[0] == [*expected, "torch.int64"]
    assert 2 * 30_000 * (1 + 1 + 2 + 4 + 8) <= leader[1] < 2 * 30_000 * (1 + 1 + 2 + 4 + 8) + 10_000


def test_only_the_ranks_of_a_subgroup_take_part(ranks):
    def send(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return broadcast_from_leader(lambda: [rank] * 3, group=groups[rank // 2])

    assert ranks(4, send) == [[0] * 3, [0] * 3, [2] * 3, [2] * 3]


def test_gloo_communicates_on_the_cpu(ranks):
    def device(rank):
        assert dist.group.WORLD is not None
        return str(group_device(dist.group.WORLD, preferred="cuda"))

    assert ranks(1, device) == ["cpu"]


class LocalError(Exception):
    """Cannot be read back from a pickle."""

    def __init__(self, code, why):
        super().__init__(f"{why} ({code})")


def _raise(error):
    raise error


#: What the leader does, what it raises, the cause that its siblings raise, and what both say.
FAILURES: dict[str, tuple[Callable[[], BatchedDataDict], str, str, str]] = {
    "it cannot read": (
        lambda: _raise(MissingDataError("'a_g0' lacks 'advantages'.", backend="noop", partition_id="train")),
        "MissingDataError",
        "MissingDataError",
        "'a_g0' lacks 'advantages'",
    ),
    "an error that cannot be pickled": (
        lambda: _raise(LocalError(3, "the socket is gone")),
        "LocalError",
        "DataPlaneError",
        "the socket is gone (3)",
    ),
    "a column that cannot be pickled": (lambda: BatchedDataDict({"bad": [lambda: None]}), "", "", "pickle"),
    "a tensor without bytes": (
        lambda: BatchedDataDict({"bad": torch.zeros(3, device="meta")}),
        "InvalidTypeError",
        "InvalidTypeError",
        "layout",
    ),
    "a sparse tensor": (
        lambda: BatchedDataDict({"bad": torch.eye(3).to_sparse()}),
        "InvalidTypeError",
        "InvalidTypeError",
        "layout",
    ),
}


def _failures(rank, produce):
    try:
        broadcast_from_leader(produce, group=dist.group.WORLD)
    except Exception as error:
        return type(error).__name__, type(error.__cause__).__name__, f"{error}\n{error.__cause__}"
    return "", "", ""


def test_siblings_raise_with_the_leaders_error_as_cause_and_the_group_works_on(ranks):
    def send(rank):
        seen = []
        for produce, *_ in FAILURES.values():
            seen.append(_failures(rank, produce))
            assert broadcast_from_leader(lambda: BatchedDataDict({"a": [1, 2]}), group=dist.group.WORLD).size == 2
        return seen

    leader, *siblings = ranks(3, send)
    for number, (name, (_, error, cause, said)) in enumerate(FAILURES.items()):
        assert leader[number][0] == error or not error, name
        assert said in leader[number][2], name
        for sibling in siblings:
            kind, cause_found, text = sibling[number]
            assert kind == "ReplicaLeaderError", name
            assert cause_found == cause or not cause, name
            assert "rank 0" in text, name
            assert said in text, name


def test_siblings_of_a_leader_that_dies_raise_instead_of_hanging(ranks):
    leader, sibling = ranks.outcomes(2, _failures, lambda: os._exit(1))
    assert isinstance(leader, (EOFError, ConnectionResetError))
    assert sibling[0] == "ReplicaLeaderError"
    assert "its replica group broke" in sibling[2]
