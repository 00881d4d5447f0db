"""`dataplane import`: rows are put once, what does not fit is refused, and a damaged folder changes nothing."""

import os

import pytest
import torch
from contents import changed, content

from dataplane_core.errors import (
    CorruptDataError,
    InvalidRequestError,
    MissingDataError,
    SchemaMismatchError,
    UnsupportedOperationError,
)
from dataplane_tools import _portions as portions_module, export_partition, follow_partition, import_folder


def test_import_twice_into_another_partition_and_where_rows_differ(written, other, tmp_path):
    export_partition(written, "p", tmp_path / "out", partial=True)
    first, again = (import_folder(tmp_path / "out", other) for _ in range(2))
    assert (first.num_rows, first.num_new, again.num_new) == (5, 5, 0)
    other.clear_samples(None, "p")
    other.register_partition("q", ["tokens"], None, ["x"])
    other.put_samples(
        ["b"],
        "q",
        {"tokens": [[4]], "reward": torch.tensor([0.25]).bfloat16()},
        tags=[{"weight_version": 8, "reward": "good", "kind": 1, "more": 1}],
    )
    assert import_folder(tmp_path / "out", other, "q").num_new == 4
    assert sorted(other.list_sample_ids("q")) == ["a", "b", "c", "d", "e"]
    assert set(other.describe("q").info.consumer_tasks) == {"x", "train"}
    other.put_samples(["d"], "q", {"tokens": [[5, 7]]})
    with pytest.raises(InvalidRequestError, match="partition 'q' holds 'd' with other values"):
        import_folder(tmp_path / "out", other, "q")


def test_import_registers_for_the_rows_and_fields_of_the_folder(written, other, tmp_path):
    export_partition(written, "p", tmp_path / "out", fields=["reward"])
    import_folder(tmp_path / "out", other)
    info = other.describe("p").info
    assert (info.fields, info.num_samples, info.consumer_tasks) == (("reward",), 4, ("train",))
    assert other.claim_meta("p", "train", ["reward"], 3, timeout_s=5).size == 3
    assert other.claim_meta("p", "train", ["reward"], 3, timeout_s=5).size == 1


@pytest.mark.parametrize(
    ("registration", "columns", "error", "said"),
    [
        ((["tokens"], None, [], 2), None, InvalidRequestError, "its groups have 2 samples, those of the export None"),
        ((["tokens"], 4, []), {"tokens": [[1]]}, InvalidRequestError, "for 4 samples, has 1, and would get 4 more"),
        ((["tokens"], None, []), {"tokens": torch.ones(1)}, SchemaMismatchError, "'tokens' has float32 scalars"),
    ],
)
def test_a_partition_that_does_not_fit_is_left_as_it_is(written, other, tmp_path, registration, columns, error, said):
    export_partition(written, "p", tmp_path / "out")
    other.register_partition("p", *registration)
    if columns:
        other.put_samples(["z"], "p", columns)
    before = content(other, "p"), other.describe("p").info
    with pytest.raises(error, match=said):
        import_folder(tmp_path / "out", other)
    assert (content(other, "p"), other.describe("p").info) == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda out: (out / ".export.json").unlink(), MissingDataError, "no export in"),
        (lambda out: (out / ".export.json").write_bytes(b'{"form'), CorruptDataError, "it is damaged"),
        (lambda out: (out / ".export.json").write_bytes(b"[" * 99999), CorruptDataError, "it is damaged"),
        (
            lambda out: (out / ".export.json").write_text('{"format": "x", "version": 1}'),
            CorruptDataError,
            "format 'x'",
        ),
        (lambda out: changed(out / ".export.json", version=3), UnsupportedOperationError, "version 3. Expected 2"),
        (lambda out: changed(out / ".export.json", shards=[{"name": 1}]), CorruptDataError, "holds what no manifest"),
        (lambda out: changed(out / ".export.json", registration={}), CorruptDataError, "holds what no manifest"),
        (lambda out: changed(out / ".export.json", export="other"), CorruptDataError, "none of this export"),
        (lambda out: changed(out / ".export.json", closed=False), CorruptDataError, "was not completed"),
        (lambda out: (out / "part-00001.parquet").unlink(), CorruptDataError, "lacks part-00001.parquet"),
        (lambda out: flip(out / "part-00001.parquet"), CorruptDataError, "not as it was written"),
        (lambda out: os.truncate(out / "part-00001.parquet", 99), CorruptDataError, "not as it was written: 99 bytes"),
    ],
)
def test_a_damaged_folder_changes_nothing(written, other, tmp_path, monkeypatch, damage, error, said):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 2)
    export_partition(written, "p", tmp_path / "out", shard_bytes=1)
    damage(tmp_path / "out")
    with pytest.raises(error, match=said):
        import_folder(tmp_path / "out", other)
    assert other.list_partitions() == []


def test_an_import_has_no_tasks_that_only_follow(client, other, tmp_path):
    client.register_partition("p", ["x"], 2, ["trainer", "copy"], followers=["copy"])
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    follow_partition(client, "p", tmp_path / "followed")
    info = client.describe("p").info
    assert info.followers == tuple(name for name in info.consumer_tasks if name != "trainer")
    assert len(info.followers) == 2
    export_partition(client, "p", tmp_path / "out")
    import_folder(tmp_path / "out", other)
    info = other.describe("p").info
    assert (info.consumer_tasks, info.followers) == (("trainer",), ())
