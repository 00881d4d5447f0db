"""The recorder and its reader: what a recording says, what is left of one that is cut or damaged, what it refuses.

Kills, full disks and several processes: engines/test_written_files.py.
"""

import json
import os
import shutil
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dataplane_sqlite_example import SQLiteStore

from dataplane_core import connect
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import (
    BackendUnavailableError,
    ClaimTimeoutError,
    ConfigError,
    CorruptDataError,
    MissingDataError,
    SchemaMismatchError,
    UnsupportedOperationError,
)
from dataplane_observe import Recording, _lines, recorder as recorder_module


def recorded(folder, payload="digests", backend="noop", allow_pickle=False, **options):
    """A client whose operations are recorded."""
    recorder = {"recorder": {"folder": str(folder), "payload": payload, **options}}
    config = {"backend": backend, "allow_pickle": allow_pickle, "middleware": [recorder]}
    if backend == "sqlite":  # a wire of bytes
        return connect_backend(SQLiteStore, DataPlaneConfig(options={"path": str(folder.parent / "store")}, **config))
    return connect(config)


def records(folder, op=None):
    return [each for each in Recording(folder).records() if op in (None, each.op)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def put_of(folder, columns, ids=("a", "b"), **recorder):
    """Records one put. Returns its record, and the recording."""
    with recorded(folder, **recorder) as client:
        client.register_partition("p", list(columns), None, ["t"])
        client.put_samples(list(ids), "p", columns)
    (put,) = records(folder, "put_samples")
    return put, Recording(folder)


COLUMNS = {
    "ids": [torch.tensor([1, 2, 3]), torch.tensor([70_000])],
    "bf16": torch.tensor([[1.5], [float("nan")]], dtype=torch.bfloat16),
    "reward": torch.tensor([0.5, -0.0]),
    "none": torch.zeros(2, 0),
    "said": ["hello", {"role": "tool", "content": [1, None]}],
}


def a_run(client):
    client.register_partition("p", list(COLUMNS), 2, ["t"])
    client.put_samples(["a_g0", "a_g1"], "p", COLUMNS, tags=[{"weight_version": 3}, {"weight_version": 4}])
    claim = client.claim_meta("p", "t", ["reward"], 2, lease_s=60, tag_filter={"weight_version": (">=", 3)})
    client.get_samples(claim.sample_ids, "p", ["reward"])
    client.nack(claim)
    client.ack(client.claim_meta("p", "t", ["ids"], 2, lease_s=60))
    client.claim_meta("p", "t", ["ids"], 2)
    client.mark_step(1, loss=np.float32(0.25), staleness=torch.tensor(1), kl=float("nan"), op=2, at=3)
    client.clear_samples(["a_g0"], "p")
    client.clear_samples(None, "p")


def test_a_recording_says_what_was_done_with_what_and_by_whom(folder):
    with recorded(folder) as client:
        a_run(client)
        client.list_partitions()
    found = records(folder)
    assert [each.op for each in found] == [
        "register_partition", "put_samples", "claim", "get_samples", "nack", "claim", "ack", "claim", "step",
        "clear_samples", "clear_samples", "end",
    ]  # fmt: skip
    register, put, claim, get, nack, again, ack, end, step, clear, all_clear, _ = found
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert (register.fields, register.num_samples, register.consumer_tasks) == (list(COLUMNS), 2, ["t"])
    assert (register.if_exists, register.drops_all, bool(register.epoch)) == ("replace", True, True)
    assert put.ids == ["a_g0", "a_g1"]
    assert put.tags == [{"weight_version": 3}, {"weight_version": 4}]
    assert put.specs["bf16"] == "tensor:bfloat16:1:"
    assert set(put.digests) == set(COLUMNS)
    assert (claim.ids, claim.task, claim.required_fields, claim.batch_size) == (put.ids, "t", ["reward"], 2)
    assert (claim.tags, claim.lease_s, claim.tag_filter) == (put.tags, 60, {"weight_version": (">=", 3)})
    assert (get.ids, get.fields, nack.ids, again.ids, ack.ids) == (put.ids, ["reward"], put.ids, put.ids, put.ids)
    assert (end.ids, end.exhausted) == ([], True)
    assert (step.step, step.values) == (1, {"loss": 0.25, "staleness": 1.0, "op": 2.0, "at": 3.0})
    assert (clear.ids, clear.drops_all, all_clear.ids, all_clear.drops_all) == (["a_g0"], False, [], True)
    (writer,) = Recording(folder).writers
    assert (writer.backend, writer.payload) == ("noop", "digests")
    assert all(each.client == writer for each in found)


def test_digests_do_not_depend_on_the_backend_and_tell_a_changed_cell(tmp_path):
    def digests(name, columns, backend="noop"):
        put, _ = put_of(tmp_path / name / "recording", columns, backend=backend)
        return {field: put.digests_of(field).tolist() for field in COLUMNS}

    first = digests("first", COLUMNS)
    assert digests("again", COLUMNS) == first
    (tmp_path / "bytes").mkdir()
    assert digests("bytes", COLUMNS, "sqlite") == first
    for field, changed in [
        ("ids", [torch.tensor([1, 2, 3]), torch.tensor([70_001])]),
        ("bf16", torch.tensor([[1.5], [1.0]], dtype=torch.bfloat16)),
        ("reward", torch.tensor([0.5, 0.0])),
        ("said", ["hello", {"role": "tool", "content": [1]}]),
    ]:
        other = digests(f"changed {field}", {**COLUMNS, field: changed})
        assert other[field][0] == first[field][0]
        assert other[field][1] != first[field][1]
    assert np.array([first["reward"][0]], dtype=np.uint64).astype("<u4").view(np.float32)[0] == 0.5


def test_a_share_of_the_samples_is_the_same_in_every_process_and_digests_are_of_all(tmp_path):
    ids, kept = [f"q{number}" for number in range(400)], []
    for name in ("one", "two"):
        put, recording = put_of(tmp_path / name, {"x": torch.arange(400.0)}, ids, payload=0.1)
        found, columns = recording.rows(put)
        assert columns["x"].tolist() == [float(each[1:]) for each in found]
        assert len(put.digests_of("x")) == 400
        kept.append(found)
    assert kept[0] == kept[1]
    assert 10 < len(kept[0]) < 100


@pytest.mark.parametrize("payload", [0.5, "all"])
@pytest.mark.parametrize("backend", ["noop", "sqlite"])
def test_columns_of_equal_large_cells_of_lists_and_of_nothing_are_recorded_as_they_are(folder, payload, backend):
    image = torch.arange(70_000.0)
    columns = {"image": [image] * 4 + [image + 1] * 4, "empty": [[]] * 8, "ints": [[1, 2]] * 8}
    put, recording = put_of(folder, columns, [f"q{number}" for number in range(8)], payload=payload, backend=backend)
    (folder / "notes.jsonl").write_text("{}\n")  # no file of the recorder
    ids, found = recording.rows(put)
    assert ids == put.ids if payload == "all" else 0 < len(ids) < 8
    for sample_id, row, empty, ints in zip(ids, found["image"], found["empty"], found["ints"], strict=True):
        assert torch.equal(row, columns["image"][int(sample_id[1:])])
        assert (list(empty), list(ints)) == ([], [1, 2])
    assert recording.damage(put) == []


def test_none_records_neither_digests_nor_rows(folder):
    put, _ = put_of(folder, COLUMNS, payload="none")
    assert (put.digests, put.block) == ({}, None)
    assert set(put.specs) == set(COLUMNS)


def test_neither_checksums_nor_secrets_nor_what_only_pickle_could_encode_are_recorded(folder):
    middleware = [{"recorder": {"folder": str(folder), "payload": "all"}}, "wire_guard"]
    config = {"backend": "noop", "allow_pickle": True, "middleware": middleware}
    with connect({**config, "options": {"capacity_bytes": 98_765_432}}) as client:
        client.register_partition("p", ["x", "odd"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1), "odd": [3 + 4j]})
    (put,) = records(folder, "put_samples")
    assert put.left_out == ["odd"]
    ids, columns = Recording(folder).rows(put)
    assert (ids, list(columns)) == (["a"], ["x"])
    everything = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"~xxh3" not in everything
    assert b"98765432" not in everything


@pytest.mark.parametrize(("backend", "payload"), [("sqlite", "digests"), ("sqlite", "all"), ("shm_store", "all")])
def test_an_object_that_only_pickle_could_encode_is_put_on_every_wire(folder, backend, payload):
    with recorded(folder, payload, backend, allow_pickle=True) as client:
        client.register_partition("p", ["x", "odd"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1), "odd": [3 + 4j]})
        assert client.get_samples(["a"], "p", ["odd"])["odd"] == [3 + 4j]
    (put,) = records(folder, "put_samples")
    assert put.left_out == (["odd"] if payload == "all" else [])


def test_failed_operations_are_recorded_without_content(folder):
    with recorded(folder, "all") as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
        with pytest.raises(SchemaMismatchError):
            client.put_samples(["b"], "p", {"x": torch.ones(1, dtype=torch.float64)})
        with pytest.raises(ClaimTimeoutError):
            client.claim_meta("p", "t", ["x"], 5, timeout_s=0.01)
        assert client.claim_meta("p", "t", ["x"], 5, blocking=False).sample_ids == ["a"]
        for _ in range(3):  # one line: a program may ask often
            assert client.claim_meta("p", "t", ["x"], 5, blocking=False).size == 0
    found = [(each.op, each.status, each.error, each.ids) for each in records(folder)]
    assert ("put_samples", "error", "SchemaMismatchError", ["b"]) in found
    assert [each for each in found if each[0] == "claim"] == [("claim", "ok", "", ids) for ids in ([], ["a"], [])]
    _, failed = records(folder, "put_samples")
    assert (failed.digests, failed.block, failed.fields) == ({}, None, ["x"])


def test_names_and_tags_of_any_text_and_number_come_back(folder):
    tags = {"text": 'é "\\\n\x00', "nan": float("nan"), "big": 2**60, "yes": True, "inf": float("-inf")}
    partition, task = np.array(["päß \n", "trainer"])
    with recorded(folder) as client:
        client.register_partition(partition, ["x"], None, [task])
        client.put_samples(["ü\u2028"], partition, {"x": torch.ones(1)}, tags=[tags])
        client.claim_meta(partition, task, ["x"], 1)
    register, put, claim, _ = records(folder)
    assert [each.partition for each in (register, put, claim)] == ["päß \n"] * 3
    assert (put.ids, claim.task) == (["ü\u2028"], "trainer")
    assert {name: repr(value) for name, value in put.tags[0].items()} == {k: repr(v) for k, v in tags.items()}


# --- damage and bounds ------------------------------------------------------------------------------------------------


def test_cut_anywhere_it_has_the_records_that_are_whole(folder):
    with recorded(folder) as client:
        client.register_partition("p", ["x"], 2, ["t"])
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
        client.mark_step(1)
    whole = [(each.op, each.ids) for each in records(folder)]
    (lines,) = folder.glob("*.jsonl")
    data = lines.read_bytes()
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    around = {end + beside for end in ends for beside in (-1, 0, 1, 2) if end + beside < len(data)}
    for size in sorted({*around, *range(0, len(data), 7)}):
        lines.write_bytes(data[:size])
        recording = Recording(folder)
        found = [(each.op, each.ids) for each in recording.records()]
        num_whole = sum(end <= size for end in ends)  # also without its line feed
        assert found == whole[: max(0, num_whole - 1)], size
        assert bool(recording.remarks) == (size not in (*ends, *(end + 1 for end in ends))), size


def test_a_damaged_byte_is_an_error_that_names_segment_line_and_step(folder):
    with recorded(folder, "all") as client:
        a_run(client)
    (lines,), (rows,) = folder.glob("*.jsonl"), folder.glob("*.rows")
    data = lines.read_bytes()
    for at in range(0, len(data), 23):
        if data[at : at + 1] == b"\n":
            continue
        lines.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((CorruptDataError, UnsupportedOperationError), match=r"damaged|no record|of run|Expected"):
            records(folder)
    at = data.index(b'"op":"clear_samples"') + 8
    lines.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(CorruptDataError, match=f"line 11 of segment {lines.stem} .* is damaged. It is after step 1"):
        records(folder)
    lines.write_bytes(data)
    put, block = records(folder, "put_samples")[0], rows.read_bytes()
    for changed in (block[:-1], block[:50] + bytes([block[50] ^ 1]) + block[51:], b""):
        rows.write_bytes(changed)
        with pytest.raises(CorruptDataError, match="are not as they were written"):
            Recording(folder).rows(put)
    rows.unlink()
    with pytest.raises(CorruptDataError, match="are missing"):
        Recording(folder).rows(put)


@pytest.fixture
def _small_segments(monkeypatch):
    monkeypatch.setattr(recorder_module, "_LEAST_SEGMENT_BYTES", 1 << 12)


def write(folder, role, max_bytes, count):
    """A client that puts and clears one sample after the other."""
    recorder = {"folder": str(folder), "payload": "all", "max_bytes": max_bytes}
    with connect({"backend": "noop", "role": role, "middleware": [{"recorder": recorder}]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for number in range(count):
            client.put_samples([f"{role}{number}"], "p", {"x": torch.full((1, 8), float(number))})
            client.clear_samples([f"{role}{number}"], "p")


@pytest.mark.usefixtures("_small_segments")
def test_beyond_max_bytes_the_oldest_segments_go_and_the_recording_says_so(folder):
    folder.mkdir()
    others = [folder / name for name in ("events.jsonl", "notes.jsonl", "a-b.jsonl", "a-c.rows")]
    for path in others:
        path.write_text("{}\n")
    write(folder, "a", 1 << 13, 50)
    assert sum(path.stat().st_size for path in folder.iterdir()) < (1 << 13) + 2 * (1 << 12)
    recording = Recording(folder)
    puts = [each for each in recording.records() if each.op == "put_samples"]
    numbers = [int(each.ids[0][1:]) for each in puts]
    assert numbers == list(range(numbers[0], 50))
    assert numbers[0] > 0
    names = [each.name for each in recording.dropped]
    assert names == [f"{recording.writers[0].client}-{number:06}" for number in range(len(names))]
    assert all(each.until <= puts[0].at and each.size_bytes > 0 for each in recording.dropped)
    recording.rows(puts[0])
    assert all(path.exists() for path in others)
    notes = folder / "dropped.jsonl"
    notes.write_bytes(b"\n" + notes.read_bytes())
    assert Recording(folder).dropped == recording.dropped
    notes.unlink()
    with pytest.raises(CorruptDataError, match=f"lacks its segment {names[0]}, which was not deleted"):
        Recording(folder)


@pytest.mark.usefixtures("_small_segments")
def test_a_client_keeps_its_newest_segment_until_it_ends(folder):
    for name in ("a", "b"):
        write(folder, name, 10**9, 3)
    with recorded(folder) as still_open:
        write(folder, "long", 1 << 13, 50)
        recording = Recording(folder)
        (kept,) = (each for each in recording.writers if each.role != "long")
        assert recording.is_open(kept.client)
        still_open.list_partitions()
    assert len(recording.dropped) >= 2


@pytest.fixture
def fcntl():
    """What locks files. Windows has none: there, files are not locked, and what the lock promises is not asked."""
    return pytest.importorskip("fcntl", reason="not run: Windows has no fcntl, which locks files")


def test_a_file_counts_as_held_only_by_its_writer(tmp_path, monkeypatch, fcntl):
    path = tmp_path / "lines.jsonl"
    path.touch()
    with path.open("rb") as asking:
        fcntl.flock(asking.fileno(), fcntl.LOCK_SH)
        assert not _lines.is_held(path), "another process asks the same"
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                fcntl.flock(asking.fileno(), fcntl.LOCK_UN)

        monkeypatch.setattr(_lines.time, "sleep", pause)
        file = _lines.LineFile(path)
        assert len(pauses) == 3
    assert _lines.is_held(path)
    kept = os.dup(file._file.fileno())  # as a process that was forked off has it
    file.close()
    assert not _lines.is_held(path)
    os.close(kept)


@pytest.mark.parametrize("is_locked", [False, True], ids=["another has the lock", "locked"])
def test_a_short_write_cuts_off_no_line_of_another(tmp_path, monkeypatch, fcntl, is_locked):
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(_lines.time, "sleep", lambda seconds: None)
    with path.open("ab", buffering=0) as other:
        if not is_locked:
            fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        with closing(_lines.LineFile(path, shared=True)) as file:
            real = file._file
            file._file = SimpleNamespace(fileno=real.fileno, write=lambda data: other.write(b"half"), close=real.close)
            with pytest.raises(OSError, match="No space left"):
                file.write({})
    assert path.read_bytes() == (b"" if is_locked else b"half")


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_or_continued_is_refused(folder, tmp_path):
    with pytest.raises(MissingDataError, match="no recording in"):
        Recording(folder)
    for place in (folder, tmp_path / "other"):
        with recorded(place) as client:
            client.register_partition("p", ["x"], None, ["t"])
    (foreign,) = (tmp_path / "other").glob("*.jsonl")
    shutil.copy(foreign, folder)
    with pytest.raises(CorruptDataError, match=f"segment {foreign.stem} .* is of run"):
        Recording(folder)
    mark = folder / "recording.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "version": 9}))
    for open_it in (Recording, recorded):
        with pytest.raises(UnsupportedOperationError, match=r"format version 9\. Expected 3"):
            open_it(folder)
    mark.write_text("[]")
    with pytest.raises(CorruptDataError):
        Recording(folder)
    with pytest.raises(BackendUnavailableError, match="the recorder cannot write to"):
        recorded(mark / "recording")


@pytest.mark.parametrize("options", [{"payload": "some"}, {"payload": 0.0}, {"payload": 1.5}, {"max_bytes": 10}])
def test_bad_options_are_refused(folder, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        recorded(folder, **options)
    assert not folder.exists()
