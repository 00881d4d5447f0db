"""The leader's batch arrives on its siblings bit for bit, whatever its columns are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bits import bits, random_bits

from dataplane_core.batch import BatchedDataDict, SlicedDataDict
from dataplane_core.codec import ALL_DTYPES
from dataplane_integrations.trainer.broadcast import broadcast_from_leader, group_device


def _send(rank: int, make: Any) -> BatchedDataDict:
    return broadcast_from_leader(make, group=dist.group.WORLD)


def test_every_dtype_of_the_contract_arrives_bit_for_bit(ranks: Any) -> None:
    def make() -> BatchedDataDict:
        return BatchedDataDict({str(dtype): random_bits(dtype, 3, 5) for dtype in sorted(ALL_DTYPES, key=str)})

    # as bits: pickle does not carry every dtype
    assert ranks(3, lambda rank: bits(_send(rank, make))) == [bits(make())] * 3


def test_empty_scalar_strided_and_conjugated_tensors_arrive(ranks: Any) -> None:
    def make() -> BatchedDataDict:
        base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        return BatchedDataDict(
            {
                "none": torch.zeros(4, 0),
                "one": torch.arange(4),
                "transposed": torch.arange(12).reshape(3, 4).T,
                "expanded": torch.ones(4, 1).expand(4, 9),
                "strided": base[:, ::2],
                "conjugated": torch.tensor([1 + 2j, 3 - 1j, 0j, 5j]).conj(),
                "graph": torch.ones(4, 2, requires_grad=True) * 3,
            }
        )

    sibling = ranks(2, _send, make)[1]
    for name, column in make().items():
        assert torch.equal(sibling[name], column), name
        assert sibling[name].is_contiguous()
        assert not sibling[name].requires_grad


def test_integers_are_sent_narrow_and_arrive_as_they_were(ranks: Any) -> None:
    def make() -> BatchedDataDict:
        columns: dict[str, Any] = {}
        for most in (127, -1, 60_000, 1 << 20, 1 << 40):
            values = torch.arange(30_000).reshape(3, -1) % 100
            values[1, 2] = most
            columns[f"dense {most}"] = values.T
            columns[f"jagged {most}"] = torch.nested.as_nested_tensor(list(values.unbind()), layout=torch.jagged)
        return BatchedDataDict(columns)

    def send(rank: int) -> tuple[list[Any], int]:
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


def test_a_batch_without_rows_or_without_columns_arrives(ranks: Any) -> None:
    def no_rows() -> BatchedDataDict:
        return BatchedDataDict({"input_ids": torch.zeros(0, 7, dtype=torch.int64), "names": []})

    sibling = ranks(2, _send, no_rows)[1]
    assert sibling["input_ids"].shape == (0, 7)
    assert sibling["names"] == []
    assert ranks(2, _send, BatchedDataDict)[1] == {}


def test_jagged_columns_stay_jagged_with_their_lengths_known(ranks: Any) -> None:
    def send(rank: int) -> tuple[Any, ...]:
        rows = [torch.arange(n, dtype=torch.bfloat16) for n in (3, 0, 5)]
        wide = [torch.ones(n, 2) * n for n in (3, 0, 5)]
        batch = BatchedDataDict(
            {
                "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
                "wide": torch.nested.as_nested_tensor(wide, layout=torch.jagged),
            }
        )
        received = broadcast_from_leader(lambda: batch, group=dist.group.WORLD)
        column = received["jagged"]
        padded = torch.nested.to_padded_tensor(column, -1)
        parts = [row.tolist() for row in column.unbind()]
        return column.layout, column.dtype, parts, padded.shape, received["wide"].values().tolist()

    leader, sibling = ranks(2, send)
    assert leader == sibling
    assert sibling[0] is torch.jagged
    assert sibling[2] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    assert tuple(sibling[3]) == (3, 5)


def test_lists_and_object_columns_arrive_with_the_tensors_inside_them(ranks: Any) -> None:
    def make() -> BatchedDataDict:
        objects = np.empty(2, dtype=object)
        objects[0] = {"pixels": torch.full((2, 3), 0.5, dtype=torch.bfloat16), "name": "a"}
        objects[1] = [torch.tensor(True), None, ("x", torch.arange(3, dtype=torch.int8))]
        return BatchedDataDict({"text": ["é", "ß"], "rows": [torch.ones(1), torch.zeros(2)], "objects": objects})

    sibling = ranks(2, _send, make)[1]
    assert sibling["text"] == ["é", "ß"]
    assert [row.tolist() for row in sibling["rows"]] == [[1.0], [0.0, 0.0]]
    objects = sibling["objects"]
    assert objects.dtype == object
    assert objects.shape == (2,)
    assert objects[0]["name"] == "a"
    assert torch.equal(objects[0]["pixels"], torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    assert objects[1][0].item() is True
    assert objects[1][2][1].dtype == torch.int8


def test_class_and_microbatch_plan_travel_with_the_columns(ranks: Any) -> None:
    def make() -> BatchedDataDict:
        batch = SlicedDataDict({"input_ids": torch.zeros(4, 3)})
        batch.micro_batch_indices = [[[0, 3], [3, 4]]]
        batch.micro_batch_lengths = [[2, 3]]
        batch.elem_counts_per_gb = [4]
        return batch

    sibling = ranks(2, _send, make)[1]
    assert type(sibling) is SlicedDataDict
    assert sibling.micro_batch_indices == [[[0, 3], [3, 4]]]
    assert sibling.micro_batch_lengths == [[2, 3]]
    assert sibling.elem_counts_per_gb == [4]


def test_only_the_ranks_of_a_subgroup_take_part(ranks: Any) -> None:
    def send(rank: int) -> list[int]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return broadcast_from_leader(lambda: [rank] * 3, group=groups[rank // 2])

    assert ranks(4, send) == [[0] * 3, [0] * 3, [2] * 3, [2] * 3]


def test_gloo_communicates_on_the_cpu(ranks: Any) -> None:
    def device(rank: int) -> str:
        assert dist.group.WORLD is not None
        return str(group_device(dist.group.WORLD, preferred="cuda"))

    assert ranks(1, device) == ["cpu"]


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_a_tensor_without_bytes_to_send_fails_both_sides(ranks: Any, kind: str) -> None:
    def make() -> BatchedDataDict:
        return BatchedDataDict({"bad": torch.zeros(3, device="meta") if kind == "meta" else torch.eye(3).to_sparse()})

    leader, sibling = ranks.outcomes(2, _send, make)
    assert type(leader).__name__ == "InvalidTypeError"
    assert type(sibling).__name__ == "ReplicaLeaderError"
    assert "layout" in str(sibling)
