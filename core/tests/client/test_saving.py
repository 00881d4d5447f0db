"""What a save keeps of samples that were cleared, and what it says when files cannot be written or read."""

import hashlib
import math
import os

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    SaveError,
    StalePartitionError,
    UnknownPartitionError,
)
from dataplane_core.saves import files
from dataplane_core.spec import new_id


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


def test_a_group_whose_cleared_member_was_written_again_counts_for_no_further_sample(client, tmp_path):
    client.register_partition("p", ["x"], 4, ["t"], 2)
    put(client, "q0_g1", "q0_g2")
    client.clear_samples(["q0_g1"], "p")
    put(client, "q0_g1")
    client.save(tmp_path)
    client.load(tmp_path)
    put(client, "q1_g1")
    with pytest.raises(TimeoutError):  # the other member is still to come
        client.claim_meta("p", "t", ["x"], 2, timeout_s=0)
    put(client, "q1_g2")
    assert client.claim_meta("p", "t", ["x"], 2, timeout_s=0).sample_ids == ["q1_g1", "q1_g2"]


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
@pytest.mark.parametrize("call", ["list_samples", "list_fields", "export_partition", "get_samples"])
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
    if tagged and n:
        assert "b" in client.list_consumed("p", "t"), "it was claimed before it was written"


def test_a_tag_that_is_nan_has_not_changed(tmp_path):
    options = {"capacity_bytes": "1 MiB", "namespace": f"test-{new_id()}"}
    with connect({"backend": "shm_store", "options": options}) as client:  # each listing makes a NaN of its own
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


def test_a_row_that_is_written_all_the_time_is_named(client, faults, tmp_path):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a", "b")
    n = iter(range(10_000))
    with (
        faults.before("get_samples", lambda request: client.put_samples(["b"], "p", tags=[{"n": next(n)}])),
        pytest.raises(StalePartitionError, match="sample 'b' is written all the time"),
    ):
        client.save(tmp_path)


def test_an_old_file_that_cannot_be_removed_does_no_harm_to_the_new_save(client, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "not yours", path)

    client.save(tmp_path, {"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        client.save(tmp_path, {"step": 2})
    assert client.load(tmp_path) == {"step": 2}
    (tmp_path / "rows-train.bin").write_text("mine")
    client.save(tmp_path)  # which removes the old one, and keeps what no save wrote
    assert len(list(tmp_path.glob("rows-*.bin"))) == 2
    assert (tmp_path / "rows-train.bin").read_text() == "mine"


@pytest.mark.parametrize(("works", "kept", "step"), [(0, "A former save is as it was.", 1), (1, "It is there", 2)])
def test_an_error_says_which_save_is_there(client, tmp_path, monkeypatch, works, kept, step):
    client.save(tmp_path, {"step": 1})
    calls = []

    def sync(folder):
        calls.append(folder)
        if len(calls) > works:
            raise OSError(28, "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("dataplane_core.saves.files.sync_path", sync)
        with pytest.raises(SaveError, match=f"could not be written: the disk is full. {kept}"):
            client.save(tmp_path, {"step": 2})
    assert client.load(tmp_path) == {"step": step}


@pytest.mark.parametrize("text", ['{"format": "dataplane-replay", "version": 2}\n{}\n', '{\n  "my": "app"\n}', "[1]"])
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(client, tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "rows-train.bin").write_text("mine")
    with pytest.raises(InvalidRequestError, match="Nothing was written"):
        client.save(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["manifest.json", "rows-train.bin"]


@pytest.mark.parametrize("metadata", [[1, 2], {"a": {1}}, "ab", 7])
def test_metadata_is_a_dict_of_json_values(client, tmp_path, metadata):
    with pytest.raises(InvalidTypeError, match="must be a dict of JSON values"):
        client.save(tmp_path, metadata)
    assert not list(tmp_path.iterdir())


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


def test_a_load_that_meets_the_next_save_reads_that_one(client, tmp_path, monkeypatch):
    client.save(tmp_path, {"step": 1})
    read = files._read_manifest

    def replaced_after(path, kind):
        body = read(path, kind)
        monkeypatch.undo()
        client.save(tmp_path, {"step": 2})
        return body

    monkeypatch.setattr(files, "_read_manifest", replaced_after)
    assert client.load(tmp_path) == {"step": 2}


def test_a_save_that_fails_keeps_the_rows_of_the_one_before_and_removes_what_crashes_left(client, tmp_path):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a")
    client.save(tmp_path)
    left = tmp_path / f"rows-{'0' * 32}.bin"
    left.write_bytes(b"left by a crash")
    with pytest.raises(UnknownPartitionError):
        client.save(tmp_path, None, ["nowhere"])
    assert not left.exists()
    manifest, (rows,) = tmp_path / "manifest.json", tmp_path.glob("rows-*.bin")
    whole = manifest.read_text()
    manifest.write_text(whole.replace(rows.name, left.name))  # damaged: it may be mended
    with pytest.raises(UnknownPartitionError):
        client.save(tmp_path, None, ["nowhere"])
    manifest.write_text(whole)
    client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a"]


def be_no_file(path, kind):
    """Puts something that is no file in the place of a file."""
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)


@pytest.mark.parametrize("kind", ["folder", "loop"])
@pytest.mark.parametrize("name", ["manifest.json", "rows-*.bin"])
def test_a_save_with_something_else_than_a_file_is_refused(client, tmp_path, kind, name):
    put(client, "a")
    client.save(tmp_path)
    (path,) = tmp_path.glob(name)
    be_no_file(path, kind)
    with pytest.raises(SaveError, match="cannot be read"):
        client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a"]


@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "manifest", "forged"])
def test_a_save_that_is_damaged_is_refused_before_anything_is_changed(client, tmp_path, damage):
    client.register_partition("p", ["x"], None, ["t"])
    put(client, "a", "b")
    client.save(tmp_path)
    put(client, "c")
    (path,) = tmp_path.glob("rows-*.bin" if damage in ("cut", "longer", "changed") else "manifest.json")
    whole = path.read_bytes()
    head, body, _ = whole.split(b"\n") if damage == "forged" else [b""] * 3
    forged = body.replace(b'"num_blocks"', b'"\\ud800":0,"num_blocks"')  # half of a surrogate pair
    forged_head = head.replace(*(hashlib.sha256(each).hexdigest().encode() for each in (body, forged)))
    damaged = {"cut": whole[:-1], "longer": whole + b"x", "changed": whole[:-1] + bytes([whole[-1] ^ 1])}
    damaged["forged"] = forged_head + b"\n" + forged + b"\n"
    path.write_bytes(damaged.get(damage) or whole.replace(b'"num_blocks":1', b'"num_blocks":0'))
    with pytest.raises(CorruptDataError):
        client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a", "b", "c"]
    path.write_bytes(whole)
    with pytest.raises(InvalidRequestError, match="nowhere"):
        client.load(tmp_path, ["nowhere"])
    with pytest.raises(InvalidTypeError, match="partitions"):
        client.load(tmp_path, "p")
    with pytest.raises(MissingDataError, match="no save"):
        client.load(tmp_path / "none")
    client.load(tmp_path)
    assert client.list_sample_ids("p") == ["a", "b"]
