"""The leader's batch arrives on its siblings bit for bit, in small pieces, and so does its failure."""

import contextlib
import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bits import bits
from layouts import told, worker_of_rank
from torch.distributed import distributed_c10d

from dataplane_core.batch import BatchedDataDict, SlicedDataDict, stack_or_nest
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import MissingDataError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.trainer.broadcast import broadcast_from_leader, group_device
from dataplane_testkit._columns import random_cells


def send(make):
    return broadcast_from_leader(make, group=dist.group.WORLD)


@contextlib.contextmanager
def sizes_of_broadcasts():
    """Sizes in bytes of what this process gives to broadcast; the descriptor counts too."""
    sizes, broadcast = [], distributed_c10d.broadcast

    def count(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        for module in (dist, distributed_c10d):
            patched.setattr(module, "broadcast", count)
        yield sizes


# --- any batch --------------------------------------------------------------------------------------------------------


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


BATCHES = {
    "every dtype": lambda: BatchedDataDict(
        {str(each): random_cells(each, (3, 5)) for each in sorted(ALL_DTYPES, key=str)}
    ),
    "odd tensors": _odd_tensors,
    "objects": _objects,
    "no rows": lambda: BatchedDataDict({"input_ids": torch.zeros(0, 7, dtype=torch.int64), "names": []}),
    "no columns": BatchedDataDict,
    "a class and a plan": _planned,
}


def _described(batch):
    """As bits: pickle does not carry every dtype."""
    attributes = {name: value for name, value in vars(batch).items() if name != "data"}
    return type(batch), attributes, _deep_bits(dict(batch))


def _deep_bits(value):
    if isinstance(value, dict):
        return {key: _deep_bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return type(value), [_deep_bits(item) for item in value]
    return bits(value.detach().resolve_conj() if isinstance(value, torch.Tensor) else value)


def test_a_batch_arrives_bit_for_bit(ranks):
    def run(rank):
        found = {}
        for name, make in BATCHES.items():
            batch = send(make)
            tensors = [each for each in batch.values() if isinstance(each, torch.Tensor)]
            plain = all(each.is_contiguous() and not each.requires_grad for each in tensors)
            found[name] = _described(batch), plain or rank == 0  # the leader keeps its own
        return found

    expected = {name: (_described(make()), True) for name, make in BATCHES.items()}
    assert ranks(3, run) == [expected] * 3


def test_integers_are_sent_narrow_and_arrive_as_they_were(ranks):
    def make():
        columns = {}
        for most in (127, -1, 60_000, 1 << 20, 1 << 40):
            values = torch.arange(30_000).reshape(3, -1) % 100
            values[1, 2] = most
            columns[f"dense {most}"] = values.T
            columns[f"jagged {most}"] = torch.nested.as_nested_tensor(list(values.unbind()), layout=torch.jagged)
        return BatchedDataDict(columns)

    def run(rank):
        with sizes_of_broadcasts() as sizes:
            batch = send(make)
        return [(str(each.dtype), [row.tolist() for row in each.unbind()]) for each in batch.values()], sum(sizes)

    leader, sibling = ranks(2, run)
    assert leader == sibling
    assert leader[0] == [("torch.int64", [row.tolist() for row in column.unbind()]) for column in make().values()]
    narrow = 2 * 30_000 * (1 + 1 + 2 + 4 + 8)
    assert narrow <= leader[1] < narrow + 10_000


def test_only_the_ranks_of_a_subgroup_take_part_and_gloo_communicates_on_the_cpu(ranks):
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        found = broadcast_from_leader(lambda: [rank] * 3, group=groups[rank // 2])
        return found, str(group_device(dist.group.WORLD, preferred="cuda"))

    assert ranks(4, run) == [([2 * (rank // 2)] * 3, "cpu") for rank in range(4)]


class LocalError(Exception):
    """Cannot be read back from a pickle."""

    def __init__(self, code, why):
        super().__init__(f"{why} ({code})")


def _raise(error):
    raise error


def _bad(column):
    return lambda: BatchedDataDict({"bad": column})


_MISSING = MissingDataError("'a_g0' lacks 'advantages'.", backend="noop", partition_id="train")
#: What the leader does, what it raises, the cause that its siblings raise, and what both say.
FAILURES = {
    "it cannot read": (lambda: _raise(_MISSING), "MissingDataError", "MissingDataError", "'a_g0' lacks 'advantages'"),
    "an error that cannot be pickled": (
        lambda: _raise(LocalError(3, "the socket is gone")),
        "LocalError",
        "DataPlaneError",
        "the socket is gone (3)",
    ),
    "a column that cannot be pickled": (_bad([lambda: None]), "", "", "pickle"),
    "a tensor without bytes": (_bad(torch.zeros(3, device="meta")), "InvalidTypeError", "InvalidTypeError", "layout"),
    "a sparse tensor": (_bad(torch.eye(3).to_sparse()), "InvalidTypeError", "InvalidTypeError", "layout"),
}


def test_siblings_raise_with_the_leaders_error_as_cause_and_the_group_works_on(ranks):
    def run(rank):
        seen = []
        for produce, *_ in FAILURES.values():
            seen.append(told(lambda produce=produce: send(produce)))
            assert send(_bad([1, 2])).size == 2
        return seen

    leader, *siblings = ranks(3, run)
    for number, (name, (_, error, cause, said)) in enumerate(FAILURES.items()):
        assert leader[number][0] == error or not error, name
        assert said in leader[number][2], name
        for kind, cause_found, text in (sibling[number] for sibling in siblings):
            assert kind == "ReplicaLeaderError", name
            assert cause_found == cause or not cause, name
            assert "rank 0" in text, name
            assert said in text, name


def test_siblings_of_a_leader_that_dies_raise_instead_of_hanging(ranks):
    leader, sibling = ranks.outcomes(2, lambda _: told(lambda: send(lambda: os._exit(1))))
    assert "the worker process died" in str(leader)
    assert sibling[0] == "ReplicaLeaderError"
    assert "its replica group broke" in sibling[2]


def test_a_sibling_without_memory_says_so_and_does_not_blame_the_leader(ranks):
    def run(rank):
        empty = torch.empty

        def limited(size, *args, **options):
            if rank and size == 7:
                raise RuntimeError("cannot allocate memory")
            return empty(size, *args, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "empty", limited)
            said = told(lambda: send(lambda: torch.arange(7, dtype=torch.uint8)))
        if rank:
            dist.broadcast(empty(7, dtype=torch.uint8), 0)  # for which the leader waits
        return said

    assert ranks(2, run) == [("", "", ""), ("RuntimeError", "NoneType", "cannot allocate memory\nNone")]


# --- what a worker fetched --------------------------------------------------------------------------------------------

PAD_ID = 7


def _rows(lengths, dtype, *trailing):
    """Bits of every kind; for int16 experts' numbers."""
    seeds = range(sum(lengths), sum(lengths) + len(lengths))
    rows = [random_cells(dtype, (length, *trailing), seed) for seed, length in zip(seeds, lengths, strict=True)]
    return [row % 2 for row in rows] if dtype is torch.int16 else rows


def _columns(lengths):
    """Rows of every kind by field."""
    return {
        "input_ids": _rows(lengths, torch.int64),
        "token_mask": _rows(lengths, torch.bool),
        "generation_logprobs": _rows(lengths, torch.bfloat16),
        "routed_experts": _rows(lengths, torch.int16, 2, 3),
        "advantages": _rows(lengths, torch.float32),
        "sample_mask": _rows([1] * len(lengths), torch.float64),
        "pixel_values": _rows([3 * (row % 3) for row in range(len(lengths))], torch.float16, 4),
        "same_shape": _rows([20] * len(lengths), torch.float8_e4m3fn),
        "note": [{"answer": f"é{row}", "box": torch.arange(row)} for row in range(len(lengths))],
    }


#: The field's value where a padded column has no token; the others are not padded.
PAD_VALUES = {"input_ids": PAD_ID, "token_mask": 0, "generation_logprobs": 0, "routed_experts": -1, "advantages": 0}


def _worker(lengths, columns=None):
    fields = {
        name: stack_or_nest(rows) if isinstance(rows[0], torch.Tensor) else np.array([*rows, None], dtype=object)[:-1]
        for name, rows in (_columns(lengths) if columns is None else columns).items()
    }
    worker, metrics, meta = worker_of_rank((1, 1, 2), fields, lengths)
    worker.tokenizer = SimpleNamespace(pad_token_id=PAD_ID)
    return worker, metrics, meta


LENGTHS = {"ragged": [3, 9, 1, 6], "empty rows": [0, 4, 0], "one row": [5], "equal": [4, 4], "nothing": [0]}


def test_leader_and_siblings_get_the_bits_that_a_rank_reads_alone(ranks):
    def fetch(rank):
        found = []
        for name, lengths in LENGTHS.items():
            worker, _, meta = _worker(lengths)
            for layout in ("padded", "jagged"):
                for pad, aligned in ((0, True), (16, True), (16, False)):
                    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = pad
                    options = {"layout": layout, "dp_aligned_seq_len": aligned}
                    batch = worker._fetch(meta, **options)
                    alone = worker._fetch(meta, fetch_policy="independent", **options)
                    assert bits(batch) == bits(alone), (name, layout, pad, aligned)
                    assert vars(batch).keys() == vars(alone).keys() == vars(BatchedDataDict()).keys()
                    found.append(bits(batch))
        return found

    leader, sibling = ranks(2, fetch)
    assert leader == sibling


def test_all_ranks_pad_as_the_leader_says_or_all_fail(ranks):
    def fetch(rank):
        worker, metrics, meta = _worker([2, 1])
        if rank:
            worker.tokenizer = SimpleNamespace(pad_token_id=PAD_ID + 1)
            meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 64
        batch = worker._fetch(meta)
        padding = {name: batch[name][1, 1].flatten()[0].item() for name in PAD_VALUES}
        metrics.snapshot(reset=True)
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 1
        too_short = told(lambda: worker._fetch(meta)), "get_samples" in metrics.snapshot()["operations"]
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 2
        worker.tokenizer.pad_token_id = 1 << 70
        return bits(batch), padding, too_short, told(lambda: worker._fetch(meta))

    outcomes = ranks(2, fetch)
    for number, (batch, padding, ((kind, _, said), was_read), (of_pad_value, _, why)) in enumerate(outcomes):
        assert (batch, padding) == (outcomes[0][0], PAD_VALUES)
        assert (kind, was_read) == (["InvalidRequestError", "ReplicaLeaderError"][number], False)
        assert "at least 2, the longest" in said
        assert of_pad_value == "InvalidRequestError"
        assert "'input_ids' of torch.int64 cannot be padded" in why


def test_no_more_is_broadcast_than_was_read(ranks):
    lengths = [16 + 37 * row % 500 for row in range(48)]

    def fetch(rank):
        worker, metrics, meta = _worker(lengths)
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 1024
        with sizes_of_broadcasts() as sizes:
            batch = worker._fetch(meta)
        padded = sum(column.nbytes for name, column in batch.items() if name in PAD_VALUES)
        return metrics.snapshot()["operations"].get("get_samples", {}).get("n_bytes", 0), sizes, padded

    (read, sizes, padded), (_, received, _) = ranks(2, fetch)
    assert sizes == received, "every rank takes part in every broadcast"
    assert sum(sizes) <= 1.05 * read
    assert padded > 3 * read, "or this test proves nothing"


def _resident_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("count", [1, 768], ids=["one tensor", "tensors of objects"])
def test_a_broadcast_takes_the_leader_little_memory_and_goes_in_pieces(ranks, count):
    payload = 48 << 20

    def run(rank):
        rows = [torch.full((payload // count,), number % 251, dtype=torch.uint8) for number in range(count)]
        batch = BatchedDataDict({"column": rows[0].unsqueeze(0) if count == 1 else rows})
        send(_bad([1]))  # to warm up
        with sizes_of_broadcasts() as sizes:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            before = _resident_bytes("VmRSS")
            received = send(lambda: batch)
        right = all(torch.equal(row, sent) for row, sent in zip(received["column"], rows, strict=True))
        return _resident_bytes("VmHWM") - before, sizes, right

    (more, sizes, _), (_, _, right) = ranks(2, run)
    assert right
    assert payload <= sum(sizes) <= 1.01 * payload
    assert max(sizes) <= 4 << 20
    assert more < payload / 2


def test_offsets_that_columns_share_are_broadcast_once_and_stay_shared(ranks):
    def fetch(rank):
        worker, _, meta = _worker([3, 1], columns={name: _rows([3, 1], torch.float32) for name in ("advantages", "b")})
        batch = worker._fetch(meta, layout="jagged")
        together = batch["advantages"] + batch["b"]  # torch combines only columns of the same offsets
        return together.values().shape, batch["advantages"].offsets() is batch["b"].offsets()

    assert ranks(2, fetch) == [((4,), True)] * 2
