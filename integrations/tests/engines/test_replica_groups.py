"""Coordinates, replica groups and pad multiples, from a DeviceMesh and from `megatron.core.parallel_state`."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import told
from tiny_megatron import megatron_on_cpu
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import KVBatchMeta, connect, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PAD_TO_MULTIPLE
from dataplane_integrations.trainer.batching import Batching, SequencePacking
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.megatron import MegatronDataPlaneMixin, megatron_pad_multiple

#: What a worker is told, a mesh's shape and names or Megatron's sizes, and the groups that share rows. Megatron gives
#: ranks in the order tensor, context, data, pipeline.
LAYOUTS = {
    "pure data parallel": (((4,), ("dp",)), [[0], [1], [2], [3]]),
    "all axes, all data": (((4, 1, 1), ("dp", "cp", "tp")), [[0], [1], [2], [3]]),
    "tensor parallel": (((2, 1, 2), ("dp", "cp", "tp")), [[0, 1], [2, 3]]),
    "context and tensor parallel": (((1, 2, 2), ("dp", "cp", "tp")), [[0, 1, 2, 3]]),
    "context parallel": (((2, 2, 1), ("dp", "cp", "tp")), [[0, 1], [2, 3]]),
    "split data axis": (((2, 1, 2), ("dp_replicate", "dp_shard", "tp")), [[0, 1], [2, 3]]),
    "two data axes": (((2, 2, 1), ("dp_replicate", "dp_shard", "tp")), [[0], [1], [2], [3]]),
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
        worker = MegatronDataPlaneMixin() if is_megatron else MeshWorker(*layout)
        group = worker._get_replica_group()
        again = MegatronDataPlaneMixin() if is_megatron else worker
        assert again._get_replica_group() is group, "made once"
        return (
            worker._local_coords(),
            worker._is_replica_leader(),
            members(group),
            worker._pad_multiple() if is_megatron else None,
        )


def test_ranks_that_share_rows_form_one_group_with_the_leader_first(ranks):
    described = ranks(4, lambda rank: {name: _stand(layout) for name, (layout, _) in LAYOUTS.items()}, timeout_s=150)
    for name, (layout, groups) in LAYOUTS.items():
        for rank, (coords, leads, group, multiple) in enumerate(seen[name] for seen in described):
            assert group in groups, name
            assert rank in group, name
            assert coords["data_parallel"] == groups.index(group), name
            assert leads == (rank == group[0]), name
            if isinstance(layout, dict):
                assert multiple == megatron_pad_multiple(
                    tensor_parallel=layout.get("tensor", 1),
                    context_parallel=layout.get("context", 1),
                    sequence_parallel=True,  # what is taken where there is no model to ask
                )


#: (tensor parallel, context parallel, sequence parallel) -> multiple.
MULTIPLES = {(1, 1, True): 1, (4, 1, False): 1, (4, 1, True): 4, (1, 2, True): 4}
MULTIPLES |= {(8, 2, False): 4, (2, 2, True): 4, (3, 2, True): 12, (8, 2, True): 16}


@pytest.mark.parametrize(("layout", "expected"), MULTIPLES.items())
def test_a_multiple_divides_into_whole_parts_for_every_rank(layout, expected):
    names = ("tensor_parallel", "context_parallel", "sequence_parallel")
    assert megatron_pad_multiple(**dict(zip(names, layout, strict=True))) == expected


#: What is stamped on rows of 3 and 5 tokens, and how long a forward is where their multiple is 4.
STAMPS = [({}, 8), ({GLOBAL_FORWARD_PAD_SEQLEN: 10}, 12), ({GLOBAL_FORWARD_PAD_SEQLEN: 13, PAD_TO_MULTIPLE: 6}, 24)]
REFUSED_PLANS = {
    "of 6 tokens": ["a microbatch of 6 tokens. Expected multiples of 4", "Batching(pad_multiple=4"],
    "of sequences padded to 2": ["a microbatch of 4 tokens for sequences that take 8", "with 4 as dynamic batching's"],
}


def test_a_forward_gets_a_length_that_its_layout_can_divide(ranks):
    def run(rank):
        said = {}
        with megatron_on_cpu({"context": 2}):
            worker = MegatronDataPlaneMixin()

            def try_plan(name, meta):
                data = BatchedDataDict({"input_ids": torch.zeros(meta.size, 12, dtype=torch.long)})
                said[name] = told(lambda: worker._attach_or_repack_pack_metadata(data, meta))[2]

            meta = KVBatchMeta("train", "train", ["a_g0", "a_g1"], sequence_lengths=[3, 5])
            lengths = [worker._forward_pad_seqlen(replace(meta, extra_info=dict(stamp))) for stamp, _ in STAMPS]
            for length in (6, 8):
                plan = {"micro_batch_indices": [[[0, 2]]], "micro_batch_lengths": [[length]]}
                try_plan(f"of {length} tokens", replace(meta, extra_info=plan))
            # rows of 2 tokens in bins of 4: every one needs a multiple of 4 for itself
            rows = KVBatchMeta("train", "train", list("abcd"), sequence_lengths=[2, 2, 2, 2])
            for multiple in (2, 4):
                packing = SequencePacking(train_mb_tokens=4, sequence_length_pad_multiple=multiple)
                arguments = Batching(packing=packing).shard_args("train")
                [shard], _ = shard_meta_for_dp(rows, dp_world=1, batch_size=2, **arguments)
                try_plan(f"of sequences padded to {multiple}", shard)
        return lengths, said

    for lengths, said in ranks(2, run, timeout_s=150):
        assert lengths == [expected for _, expected in STAMPS]
        assert {name for name, text in said.items() if text} == REFUSED_PLANS.keys()
        assert all(part in said[name] for name, parts in REFUSED_PLANS.items() for part in parts)


def test_a_rank_that_cannot_attach_keeps_no_other_waiting(ranks):
    def attach(rank):
        missing = {"backend": "shm_store", "attach_wait_s": 0, "options": {"namespace": f"nowhere-{rank}"}}
        with megatron_on_cpu({"context": 2, "pipeline": 2}):
            workers = [MeshWorker((2, 2), ("dp", "tp")), MegatronDataPlaneMixin()]
            cfg = missing if rank == 0 else connect({"backend": "noop"})
            errors = [told(lambda worker=worker: worker.setup_data_plane(cfg))[0] for worker in workers]
            return errors, [dist.get_world_size(worker._get_replica_group()) for worker in workers if rank]

    assert ranks(4, attach) == [(["BackendUnavailableError"] * 2, []), *[(["", ""], [2, 4])] * 3]


def test_one_rank_alone_has_no_group_and_one_that_does_not_know_where_it_stands_is_refused(ranks):
    def run(rank):
        alone = MeshWorker((1, 1), ("dp", "tp"))
        asked = [lambda names=names: MeshWorker((1, 1), names)._local_coords() for names in (None, ("dp", "ep"))]
        asked += [FSDP2DataPlaneMixin()._local_coords, MegatronDataPlaneMixin()._local_coords]
        groups = alone._get_replica_group(), alone._local_coords()
        return groups, [told(call)[2] for call in asked]

    [(groups, said)] = ranks(1, run, timeout_s=150)
    assert groups == (None, {"data_parallel": 0, "tensor_parallel": 0})
    for text, part in zip(
        said,
        ("dims have no names", "'ep' of ('dp', 'ep')", "'device_mesh' or 'mesh'", "initialize_model_parallel"),
        strict=True,
    ):
        assert part in text
