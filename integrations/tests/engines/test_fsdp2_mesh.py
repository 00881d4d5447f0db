"""Coordinates and replica groups from a DeviceMesh, on real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin

LAYOUTS = {
    "pure data parallel": ((4,), ("dp",)),
    "all axes, all data": ((2, 1, 1), ("dp", "cp", "tp")),
    "tensor parallel": ((2, 1, 2), ("dp", "cp", "tp")),
    "context and tensor parallel": ((1, 2, 2), ("dp", "cp", "tp")),
    "context parallel": ((2, 2, 1), ("dp", "cp", "tp")),
    "split data axis": ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),
    "long names": ((1, 4), ("data_parallel", "tensor_parallel")),
}


class Worker(FSDP2DataPlaneMixin):
    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_rows_form_one_group_with_the_leader_first(ranks: Any, layout: str) -> None:
    shape, names = LAYOUTS[layout]

    def describe(rank: int) -> tuple[Any, ...]:
        worker = Worker(shape, names)
        group = worker._get_replica_group()
        assert worker._get_replica_group() is group, "built once"
        across = worker._get_data_parallel_group()

        def members(of: Any) -> list[int]:
            return [rank] if of is None else dist.get_process_group_ranks(of)

        return worker._local_coords(), worker._is_replica_leader(), members(group), members(across)

    world = math.prod(shape)
    described = ranks(world, describe)
    replicas = {"tp", "cp", "tensor_parallel"}
    size = math.prod(n for n, name in zip(shape, names, strict=True) if name in replicas)
    for rank, (coords, leads, group, across) in enumerate(described):
        assert coords["data_parallel"] == rank // size
        assert group == list(range(rank // size * size, rank // size * size + size))
        assert leads == (rank == group[0])
        assert across == list(range(rank % size, world, size))


def test_a_rank_that_cannot_attach_keeps_no_other_waiting(ranks: Any) -> None:
    def attach(rank: int) -> str:
        worker = Worker((2, 2), ("dp", "tp"))
        missing = {"backend": "shm_store", "attach_wait_s": 0, "options": {"namespace": f"nowhere-{rank}"}}
        try:
            worker.setup_data_plane(missing if rank == 0 else connect({"backend": "noop"}))
        except DataPlaneError as error:
            return type(error).__name__
        return "attached"

    assert ranks(4, attach) == ["BackendUnavailableError", "attached", "attached", "attached"]


def test_one_rank_alone_has_no_group(ranks: Any) -> None:
    def groups(rank: int) -> list[Any]:
        worker = Worker((1, 1), ("dp", "tp"))
        return [worker._get_replica_group(), worker._get_data_parallel_group(), worker._local_coords()]

    assert ranks(1, groups) == [[None, None, {"data_parallel": 0, "tensor_parallel": 0}]]


def test_a_mesh_that_does_not_say_who_shares_rows_is_refused(ranks: Any) -> None:
    def refusals(rank: int) -> list[str]:
        said = []
        for names in (None, ("dp", "ep")):
            try:
                Worker((1, 1), names)._local_coords()
            except DataPlaneError as error:
                said.append(str(error))
        return said

    [[unnamed, unknown]] = ranks(1, refusals)
    assert "its dims have no names" in unnamed
    assert "'ep' of ('dp', 'ep')" in unknown


def test_a_worker_without_a_mesh_says_what_it_lacks() -> None:
    with pytest.raises(DataPlaneError, match=r"has no DeviceMesh.*'device_mesh' or 'mesh'"):
        FSDP2DataPlaneMixin()._local_coords()
