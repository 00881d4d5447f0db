"""Coordinates, replica groups and pad multiples, from a DeviceMesh and from `megatron.core.parallel_state`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_megatron import megatron_on_cpu
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import KVBatchMeta, connect, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import DataPlaneError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PAD_TO_MULTIPLE
from dataplane_integrations.trainer.batching import Batching, SequencePacking
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.megatron import MegatronDataPlaneMixin, megatron_pad_multiple

#: What a worker is told, a mesh's shape and names or Megatron's sizes, and the groups that share rows. Megatron gives
#: ranks in the order tensor, context, data, pipeline.
LAYOUTS: dict[str, tuple[Any, list[list[int]]]] = {
    "pure data parallel": (((4,), ("dp",)), [[0], [1], [2], [3]]),
    "all axes, all data": (((4, 1, 1), ("dp", "cp", "tp")), [[0], [1], [2], [3]]),
    "tensor parallel": (((2, 1, 2), ("dp", "cp", "tp")), [[0, 1], [2, 3]]),
    "context and tensor parallel": (((1, 2, 2), ("dp", "cp", "tp")), [[0, 1, 2, 3]]),
    "context parallel": (((2, 2, 1), ("dp", "cp", "tp")), [[0, 1], [2, 3]]),
    "split data axis": (((2, 1, 2), ("dp_replicate", "dp_shard", "tp")), [[0, 1], [2, 3]]),
    "long names": (((1, 4), ("data_parallel", "tensor_parallel")), [[0, 1, 2, 3]]),
    "Megatron's data": ({}, [[0], [1], [2], [3]]),
    "Megatron's tensor, data": ({"tensor": 2}, [[0, 1], [2, 3]]),
    "Megatron's data, pipeline": ({"pipeline": 2}, [[0, 2], [1, 3]]),
    "Megatron's tensor, pipeline": ({"tensor": 2, "pipeline": 2}, [[0, 1, 2, 3]]),
    "Megatron's context, data": ({"context": 2}, [[0, 1], [2, 3]]),
    "Megatron's context, pipeline": ({"context": 2, "pipeline": 2}, [[0, 1, 2, 3]]),
}


class MeshWorker(FSDP2DataPlaneMixin):
    def __init__(self, shape, names):
        self.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)


def _stand(layout):
    """What a worker of this layout says of its place."""

    def members(of):
        return [dist.get_rank()] if of is None else dist.get_process_group_ranks(of)

    is_megatron = isinstance(layout, dict)
    with megatron_on_cpu(layout) if is_megatron else nullcontext():
        worker: Any = MegatronDataPlaneMixin() if is_megatron else MeshWorker(*layout)
        group = worker._get_replica_group()
        again = MegatronDataPlaneMixin() if is_megatron else worker
        assert again._get_replica_group() is group, "made once"
        across = worker._get_data_parallel_group()
        return (
            worker._local_coords(),
            worker._is_replica_leader(),
            members(group),
            members(across),
            worker._pad_multiple() if is_megatron else None,
        )


def test_ranks_that_share_rows_form_one_group_with_the_leader_first(ranks):
    described = ranks(4, lambda rank: {name: _stand(layout) for name, (layout, _) in LAYOUTS.items()}, timeout_s=150)
    for name, (layout, groups) in LAYOUTS.items():
        for rank, (coords, leads, group, across, multiple) in enumerate(seen[name] for seen in described):
            assert group in groups, name
            assert rank in group, name
            assert coords["data_parallel"] == groups.index(group), name
            assert leads == (rank == group[0]), name
            place = group.index(rank)
            assert across == [of[place] for of in groups], name
            if isinstance(layout, dict):
                assert multiple == megatron_pad_multiple(
                    tensor_parallel=layout.get("tensor", 1),
                    context_parallel=layout.get("context", 1),
                    sequence_parallel=True,  # what is taken where there is no model to ask
                )


@pytest.mark.parametrize(
    ("tensor", "context", "sequence_parallel", "expected"),
    [
        (1, 1, True, 1),
        (4, 1, False, 1),
        (4, 1, True, 4),
        (1, 2, True, 4),
        (8, 2, False, 4),
        (2, 2, True, 4),
        (3, 2, True, 12),
        (8, 2, True, 16),
    ],
)
def test_a_multiple_divides_into_whole_parts_for_every_rank(tensor, context, sequence_parallel, expected):
    multiple = megatron_pad_multiple(
        tensor_parallel=tensor, context_parallel=context, sequence_parallel=sequence_parallel
    )
    assert multiple == expected
    of_one_rank = multiple // context
    assert multiple % context == 0
    assert context == 1 or of_one_rank % 2 == 0
    assert not sequence_parallel or of_one_rank % tensor == 0


def _lengths(rank):
    with megatron_on_cpu({"context": 2}):
        worker = MegatronDataPlaneMixin()
        meta = KVBatchMeta("train", "train", ["a_g0", "a_g1"], sequence_lengths=[3, 5])
        seen: dict[str, Any] = {"alone": worker._forward_pad_seqlen(meta)}
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 10
        seen["stamped"] = worker._forward_pad_seqlen(meta)
        meta.extra_info |= {GLOBAL_FORWARD_PAD_SEQLEN: 13, PAD_TO_MULTIPLE: 6}
        seen["beside the meta's own multiple"] = worker._forward_pad_seqlen(meta)
        data = BatchedDataDict({"input_ids": torch.zeros(2, 12, dtype=torch.long)})
        for length in (6, 8):
            meta.extra_info |= {"micro_batch_indices": [[[0, 2]]], "micro_batch_lengths": [[length]]}
            seen[f"plan of {length}"] = _try_plan(worker, data, meta)
        # rows of 2 tokens in bins of 4: every one needs a multiple of 4 for itself
        for pad_multiple in (2, 4):
            packing = SequencePacking(train_mb_tokens=4, sequence_length_pad_multiple=pad_multiple)
            meta = KVBatchMeta("train", "train", list("abcd"), sequence_lengths=[2, 2, 2, 2])
            [shard], _ = shard_meta_for_dp(
                meta, dp_world=1, batch_size=2, **Batching(packing=packing).shard_args("train")
            )
            seen[f"bins of sequences padded to {pad_multiple}"] = _try_plan(worker, data, shard)
    return seen


def _try_plan(worker, data, meta):
    try:
        worker._attach_or_repack_pack_metadata(data, meta)
    except DataPlaneError as error:
        return str(error)
    return "taken"


def test_a_forward_gets_a_length_that_its_layout_can_divide(ranks):
    for seen in ranks(2, _lengths, timeout_s=150):
        assert seen["alone"] == 8
        assert seen["stamped"] == 12
        assert seen["beside the meta's own multiple"] == 24
        assert "a microbatch of 6 tokens. Expected multiples of 4" in seen["plan of 6"]
        assert "Batching(pad_multiple=4" in seen["plan of 6"]
        assert seen["plan of 8"] == "taken"
        refused = seen["bins of sequences padded to 2"]
        assert "a microbatch of 4 tokens for sequences that take 8, each padded to a multiple" in refused
        assert "with 4 as dynamic batching's sequence_length_round or packing's" in refused
        assert seen["bins of sequences padded to 4"] == "taken"


def _before_megatron_starts(rank):
    try:
        MegatronDataPlaneMixin()._local_coords()
    except DataPlaneError as error:
        return str(error)
    return "taken"


def test_a_worker_before_megatron_is_initialized_says_so(ranks):
    [said] = ranks(1, _before_megatron_starts, timeout_s=150)
    assert "initialize_model_parallel" in said


def test_a_rank_that_cannot_attach_keeps_no_other_waiting(ranks):
    def attach(rank):
        worker = MeshWorker((2, 2), ("dp", "tp"))
        missing = {"backend": "shm_store", "attach_wait_s": 0, "options": {"namespace": f"nowhere-{rank}"}}
        try:
            worker.setup_data_plane(missing if rank == 0 else connect({"backend": "noop"}))
        except DataPlaneError as error:
            return type(error).__name__
        return "attached"

    assert ranks(4, attach) == ["BackendUnavailableError", "attached", "attached", "attached"]


def test_one_rank_alone_has_no_group(ranks):
    def groups(rank):
        worker = MeshWorker((1, 1), ("dp", "tp"))
        return [worker._get_replica_group(), worker._get_data_parallel_group(), worker._local_coords()]

    assert ranks(1, groups) == [[None, None, {"data_parallel": 0, "tensor_parallel": 0}]]


def test_a_mesh_that_does_not_say_who_shares_rows_is_refused(ranks):
    def refusals(rank):
        said = []
        for names in (None, ("dp", "ep")):
            try:
                MeshWorker((1, 1), names)._local_coords()
            except DataPlaneError as error:
                said.append(str(error))
        return said

    [[unnamed, unknown]] = ranks(1, refusals)
    assert "its dims have no names" in unnamed
    assert "'ep' of ('dp', 'ep')" in unknown


def test_a_worker_without_a_mesh_says_what_it_lacks():
    with pytest.raises(DataPlaneError, match=r"has no DeviceMesh.*'device_mesh' or 'mesh'"):
        FSDP2DataPlaneMixin()._local_coords()
