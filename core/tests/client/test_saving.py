"""What a save keeps of samples that were cleared, and what it says when files cannot be written or read."""

import math
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from tensordict import NonTensorStack

from dataplane_core import connect
from dataplane_core.client import saving
from dataplane_core.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidTypeError,
    LostSamplesError,
    MissingDataError,
    SaveError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
)
from dataplane_core.spec import new_id

NAME = "dataplane-partitions.save"


def once(step):
    """What `Faults` calls beside an operation: a step of the test, the first time."""
    todo = [step]

    def act(request, reply=None):
        if todo:
            todo.pop()()
        return reply

    return act


@pytest.fixture
def client(faults):
    with connect({"backend": "noop", "open_partitions": True, "middleware": [faults]}) as opened:
        yield opened


def put(client, *sample_ids):
    client.put_samples(sample_ids, "p", {"x": torch.arange(len(sample_ids))})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["list_samples", "export_partition", "get_samples"])
@pytest.mark.parametrize("num_samples", [4, None])
def test_a_sample_that_is_cleared_during_a_save_is_saved_or_counts_as_cleared(
    client, faults, tmp_path, num_samples, when, call
):
    client.register_partition("p", ["x"], num_samples, ["t"], 2)
    put(client, "q0_g0", "q0_g1", "q1_g0", "q1_g1")
    with getattr(faults, when)(call, once(lambda: client.clear_samples(["q0_g0"], "p"))):
        client.save(tmp_path)
    assert client.list_sample_ids("p") == ["q0_g1", "q1_g0", "q1_g1"]
    client.load(tmp_path)
    assert client.claim_meta("p", "t", ["x"], 4, blocking=False).sample_ids == ["q1_g0", "q1_g1"]
    if num_samples is not None:
        assert client.claim_meta("p", "t", ["x"], 2, timeout_s=0).sample_ids == []  # no more is to come
    else:
        put(client, "q0_g0")  # its group had lost it
        assert client.claim_meta("p", "t", ["x"], 2, blocking=False).sample_ids == []


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["list_samples", "export_partition", "get_samples"])
def test_a_row_that_is_written_during_a_save_is_saved_as_it_was_at_one_moment(
    client, faults, tmp_path, call, when, tagged
):
    client.register_partition("p", ["x", "y", "z"], None, ["t"])
    ids = ["a", "b", "c"]
    client.put_samples(ids, "p", {"x": torch.zeros(3)}, tags=[{"n": 0}] * 3)
    client.put_samples(["b"], "p", {"y": torch.zeros(1)})  # which is read apart

    def write():
        client.claim_meta("p", "t", ["x"], 3, blocking=False)
        columns = {"x": torch.ones(1), "y": torch.ones(1), **({"z": torch.ones(1)} if tagged else {})}
        client.put_samples(["b"], "p", columns, tags=[{"n": 1}] if tagged else None)

    with getattr(faults, when)(call, once(write)):
        client.save(tmp_path)
    client.load(tmp_path)
    assert client.list_sample_ids("p") == ids
    n = int(client.get_samples(["b"], "p", ["y"])["y"])
    assert client.get_samples(ids, "p", ["x"])["x"].tolist() == [0, n, 0]
    assert client.list_samples("p").tags[1]["n"] == n * tagged
    assert client.list_sample_ids("p", fields=["z"]) == ["b"] * n * tagged
    if n:
        assert "b" in client.list_consumed("p", "t"), "it was claimed before it was written"


def in_shared_memory():
    return connect({"backend": "shm_store", "options": {"capacity_bytes": "1 MiB", "namespace": f"test-{new_id()}"}})


def content(client):
    """What a save keeps of the partition ``p``, as values that can be compared."""
    listed, told = client.list_samples("p"), client.describe("p")
    columns = client.get_samples(listed.sample_ids, "p", ["loss", "tokens", "info"])
    rows = columns["loss"].view(torch.int16).tolist(), [row.tolist() for row in columns["tokens"].unbind()]
    fields = client.list_fields(listed.sample_ids, "p"), {name: spec.to_text() for name, spec in told.specs.items()}
    task = client.list_consumed("p", "t"), client.check_consumption_status("p", ["t"])
    return listed.sample_ids, listed.tags, rows, columns["info"].tolist(), fields, task, told.info.registration()


def test_a_save_is_loaded_into_another_backend_and_back(client, tmp_path):
    ids = [f"p{number // 2}_g{number % 2}" for number in range(8)]
    columns = {
        "loss": torch.randn(8, dtype=torch.bfloat16),
        "tokens": torch.nested.as_nested_tensor([torch.arange(1 + row) for row in range(8)], layout=torch.jagged),
        "info": NonTensorStack(*[{"row": row, "of": [None, b"x", "ü"]} for row in range(8)]),
    }
    with in_shared_memory() as first, in_shared_memory() as last:
        first.register_partition("p", list(columns), 10, ["t"], 2, {"source": ["a", "b"]})
        first.put_samples(ids, "p", columns, [{"input_lengths": 1 + row, "source": "b"} for row in range(8)])
        first.put_samples(ids[:1], "p", {"late": [1]})  # a field that few rows have, and that is still open
        first.claim_meta("p", "t", ["loss"], 4)
        first.claim_meta("p", "t", ["loss"], 2, lease_s=600.0)
        first.clear_samples(ids[2:4], "p")
        first.save(tmp_path, {"step": 7})
        before = content(first)
        assert client.load(tmp_path) == {"step": 7}
        client.save(tmp_path)
        for other in (client, last):
            other.load(tmp_path)
            assert content(other) == before
        assert last.claim_meta("p", "t", ["loss"], 2).sample_ids == ids[4:6], "a lease is not saved"


def test_a_tag_that_is_nan_has_not_changed(tmp_path):
    with in_shared_memory() as client:  # each listing makes a NaN of its own
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1)}, tags=[{"n": float("nan")}])
        client.save(tmp_path)
        client.load(tmp_path)
        assert math.isnan(client.list_samples("p").tags[0]["n"])


def test_a_row_that_was_cleared_and_written_as_before_is_not_consumed(client, faults, tmp_path):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a")
    client.claim_meta("p", "t", ["x"], 1, blocking=False)

    def again():
        client.clear_samples(["a"], "p")
        put(client, "a")

    with faults.before("get_samples", once(again)):
        client.save(tmp_path)
    client.load(tmp_path)
    assert client.list_consumed("p", "t") == []


def test_a_rollout_is_not_loaded_as_rows_of_two_attempts(client, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_FIRST_ROWS", 1)
    client.register_partition("p", ["x"], None, ["t"], 1, rollouts=True)
    reads = []
    put(client, "q0_g0/0", "q0_g0/1", "q1_g0/0", "q1_g0/1", "q2_g0/0")

    def begin_anew(request):
        reads.append(request.sample_ids)
        if len(reads) == 2:  # the first row is read
            client.clear_samples(["q0_g0/0", "q0_g0/1"], "p")
            put(client, "q0_g0/0", "q0_g0/1")
            client.seal({"q0_g0": 2}, "p")

    client.seal({"q1_g0": 2}, "p")
    with faults.before("get_samples", begin_anew):
        client.save(tmp_path)
    assert client.claim_meta("p", "t", ["x"], 2, blocking=False).size == 4
    client.load(tmp_path)
    client.seal({"q2_g0": 1}, "p")
    assert client.claim_meta("p", "t", ["x"], 3, blocking=False).sample_ids == ["q1_g0/0", "q1_g0/1", "q2_g0/0"]
    client.save(tmp_path)
    client.load(tmp_path)
    assert client.list_consumed("p", "t") == ["q1_g0/0", "q1_g0/1", "q2_g0/0"]


def test_a_row_that_is_written_all_the_time_is_named(client, faults, tmp_path):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a", "b")
    n = iter(range(10_000))
    with (
        faults.before("get_samples", lambda request: client.put_samples(["b"], "p", tags=[{"n": next(n)}])),
        pytest.raises(StalePartitionError, match="sample 'b' is written all the time"),
    ):
        client.save(tmp_path)


def test_rows_whose_payload_is_lost_are_named_and_not_taken_for_cleared(client, faults, tmp_path):
    put(client, "a")
    lost = LostSamplesError.for_payload("get_samples", "p", [("a", ["x"])])
    with faults.error_before("get_samples", lost), pytest.raises(LostSamplesError, match="'a' lacks 'x'"):
        client.save(tmp_path)


@pytest.mark.parametrize(
    ("fails", "kept", "step"),
    [("os.replace", "A former save is as it was.", 1), ("dataplane_core.saves.sync_path", "It is there", 2)],
)
def test_an_error_says_which_save_is_there(client, tmp_path, monkeypatch, fails, kept, step):
    def refuse(*_):
        raise OSError(28, "the disk is full")

    client.save(tmp_path, {"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(fails, refuse)
        with pytest.raises(SaveError, match=f"could not be written: the disk is full. {kept}"):
            client.save(tmp_path, {"step": 2})
    assert client.load(tmp_path) == {"step": step}


def test_other_files_in_the_folder_stay_and_a_save_of_another_version_is_named(client, tmp_path):
    (tmp_path / NAME).write_text('{"format": "dataplane-partitions", "version": 3}\n{}\n')
    with pytest.raises(UnsupportedOperationError, match=r"version 3\. Expected 4"):
        client.load(tmp_path)
    (tmp_path / "dataplane-replay.save").write_text("another")
    client.save(tmp_path, {"step": 1})
    assert client.load(tmp_path) == {"step": 1}
    assert (tmp_path / "dataplane-replay.save").read_text() == "another"


def test_claims_during_a_load_are_given_no_sample_twice(client, faults, tmp_path):
    ids = [f"s{number}" for number in range(200)]  # several blocks
    client.put_samples(ids, "p", {"x": torch.arange(200)})
    client.put_samples(ids[:3], "p", {"y": torch.zeros(3)})
    given = {"t": [*client.claim_meta("p", "t", ["x"], 70).sample_ids], "u": []}
    client.save(tmp_path)

    def claim(request=None, reply=None):
        for task, known in given.items():
            known += client.claim_meta("p", task, ["x"], 1000, blocking=False).sample_ids
        return reply

    with faults.after("put_samples", claim):
        client.load(tmp_path)
    claim()
    assert given == {"t": ids, "u": ids}


def test_a_load_reads_its_save_to_the_end_while_the_next_one_replaces_it(client, faults, tmp_path):
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    client.save(tmp_path, {"step": 1})
    with faults.after("put_samples", once(lambda: client.save(tmp_path, {"step": 2}, []))):
        assert client.load(tmp_path) == {"step": 1}
    assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]
    assert client.load(tmp_path) == {"step": 2}


def test_a_save_that_fails_leaves_nothing_and_replaces_what_crashes_left(client, tmp_path):
    put(client, "a")
    client.save(tmp_path)
    (tmp_path / "dataplane-partitions.new").write_bytes(b"left by a crash")
    with pytest.raises(UnknownPartitionError):
        client.save(tmp_path, None, ["nowhere"])
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a"]


@pytest.mark.parametrize("be_no_file", [Path.mkdir, lambda path: path.symlink_to(path)], ids=["a folder", "a loop"])
def test_a_save_with_something_else_than_a_file_is_refused(client, tmp_path, be_no_file):
    put(client, "a")
    client.save(tmp_path)
    (tmp_path / NAME).unlink()
    be_no_file(tmp_path / NAME)
    with pytest.raises(SaveError, match="cannot be read"):
        client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a"]


def forged(whole, old, new):
    """A save with other text in its body, and the right digest."""
    (size,) = struct.unpack("<Q", whole[-24:-16])
    head, blocks = whole.split(b"\n")[0] + b"\n", whole[: -24 - size]
    body = whole[-24 - size : -24].replace(old, new)
    return blocks + body + struct.pack("<Q", len(body)) + xxhash.xxh3_128_digest(head + body)


DAMAGE = {
    "cut": lambda whole: whole[:-1],
    "nothing left": lambda whole: b"",
    "longer": lambda whole: whole + b"x",
    "a block": lambda whole: whole[:70] + bytes([whole[70] ^ 1]) + whole[71:],
    "the body": lambda whole: whole.replace(b'"num_blocks":1', b'"num_blocks":0'),
    "a block less": lambda whole: forged(whole, b'"num_blocks":1', b'"num_blocks":0'),
    "half of a surrogate pair": lambda whole: forged(whole, b'"num_blocks"', b'"\\ud800":0,"num_blocks"'),
    "a block of another size": lambda whole: forged(whole, b'"blocks":[[', b'"blocks":[[1'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_save_that_is_damaged_is_refused_before_anything_is_changed(client, tmp_path, damage):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a", "b")
    client.save(tmp_path)
    put(client, "c")
    path = tmp_path / NAME
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    with pytest.raises(CorruptDataError):
        client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a", "b", "c"]
    path.write_bytes(whole)
    client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a", "b"]


def test_wrong_arguments_and_what_is_not_there_are_named(client, tmp_path):
    for metadata in ([1, 2], {"a": {1}}, "ab", 7):
        with pytest.raises(InvalidTypeError, match="must be a dict of JSON values"):
            client.save(tmp_path, metadata)
    assert not list(tmp_path.iterdir())
    client.save(tmp_path)
    with pytest.raises(InvalidRequestError, match="nowhere"):
        client.load(tmp_path, ["nowhere"])
    with pytest.raises(InvalidTypeError, match="partitions"):
        client.load(tmp_path, "p")
    with pytest.raises(MissingDataError, match="no save"):
        client.load(tmp_path / "none")


def test_a_partition_that_is_registered_anew_while_its_rows_are_read_is_stale(client, faults, tmp_path):
    put(client, "a")
    anew = once(lambda: client.register_partition("p", ["y"], None, []))
    with faults.after("get_samples", anew), pytest.raises(StalePartitionError, match="registered again"):
        client.save(tmp_path)
