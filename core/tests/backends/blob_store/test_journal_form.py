"""The form on disk: a file written by the first core that had it is read by every later one, record by record."""

import base64
import json
import time
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
from blob_stores import Clock, journaled, open_client, trimmed

from dataplane_core.backends.journal_records import DIGEST_BYTES, OPS, Record, seal
from dataplane_core.errors import AlreadyDoneError, CorruptDataError, LeaseExpiredError
from dataplane_core.ledger import commands

_GOLDEN = {
    version: json.loads((Path(__file__).parent / "golden" / f"v{version}.json").read_text())
    for version in (3, 4, 5, 6, 7)
}
RECORDS = {version: [base64.b64decode(text) for text in file["records"]] for version, file in _GOLDEN.items()}
BLOBS = {
    version: {key: base64.b64decode(text) for key, text in file["blobs"].items()} for version, file in _GOLDEN.items()
}
FIELDS = {
    "begin": "store",
    "expire": "leases writes done",
    "plan": "snapshot",
    "snapshot": "store snapshot chunks nbytes digest records garbage",
    "register": "partition_id fields num_samples consumer_tasks grpo_group_size enums epoch if_exists",
    "begin_put": "partition_id sample_ids specs row_bytes tags epoch write_id splits ticket ttl_s request_id",
    "wait_for_room": "ticket size_bytes wait_s",
    "commit_put": "write_id",
    "abort_put": "write_id",
    "put_tags": "partition_id sample_ids tags epoch request_id left_s",
    "claim": (
        "partition_id task_name required_fields batch_size all_or_nothing lease_s tag_filter token holder sampler "
        "dp_rank dp_size batch_index batch_epoch"
    ),
    "set_cursor": "partition_id task_name sample_ids create",
    "ack": "partition_id task_name sample_ids tokens request_id left_s",
    "nack": "partition_id task_name sample_ids tokens request_id left_s",
    "renew": "partition_id task_name sample_ids tokens request_id left_s lease_s",
    "clear": "partition_id sample_ids",
    "collected": "refs",
}


def stored(cls, version, first=0):
    """A store with the file's records from ``first`` on."""
    client = open_client(cls)
    cls.journal.update({seq: data for seq, data in enumerate(RECORDS[version]) if seq >= first})
    client._backend.blobs.update(BLOBS[version])
    return client


def test_the_ops_and_their_fields_are_these():
    """Another field, or another meaning of one, is another version, and needs another file beside this one."""
    assert {op: " ".join(fields) for op, fields in OPS.items()} == FIELDS


def test_the_file_holds_every_op_and_is_written_again_byte_for_byte():
    seen = set()
    for seq, data in enumerate(RECORDS[7]):
        record = Record.from_bytes(data, seq)
        held = msgpack.unpackb(data[DIGEST_BYTES:])
        assert list(held) == ["v", "seq", "prev", "op", *FIELDS[record.command.op].split()]
        assert record.to_bytes() == data
        seen.add(record.command.op)
    assert seen == set(FIELDS)


@pytest.mark.parametrize("version", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_the_file_replays_to_what_it_was(way, version):
    cls = journaled() if way == "all records" else trimmed()
    first = 0
    if way == "snapshot":
        first = next(
            seq for seq, data in enumerate(RECORDS[version]) if Record.from_bytes(data, seq).command.op == "snapshot"
        )
        cls.trims.append(first)
    with stored(cls, version, first) as client:
        clock = Clock(client)
        listed = client.list_samples("p")
        assert listed.sample_ids == ["k_g0", "k_g1", "m_g0", "m_g1"]
        primitives = {"f": 0.5, "s": "ü", "b": True, "none": None}
        assert listed.tags == [
            {"n": 0, **primitives, "late": 2},
            {"n": 1, **primitives, "late": 3},
            {"n": 2, **primitives},
            {"n": 3, **primitives},
        ]
        assert client.get_samples(["m_g1", "k_g0"], "p", ["x"])["x"].tolist() == [3, 0]
        assert list(client.get_samples(["k_g1"], "p", ["word"])["word"]) == ["b"]
        assert client.get_samples(["k_g0"], "p", ["z"])["z"].tolist() == [[0.0, 0.0, 0.0]]
        with pytest.raises(KeyError, match="'q' is not registered"):
            client.list_samples("q")
        with pytest.raises(ValueError, match="group 'k' would have 3 members"):
            client.put_samples(["k_g2"], "p", tags=[{}])
        claim = next(Record.from_bytes(data, 0).command for data in reversed(RECORDS[version]) if b"claim" in data)
        assert client.claim_meta("p", "t", ["x"], 2, blocking=False).sample_ids == []  # acked, and leased
        clock.now += 10.1
        again = client.claim_meta("p", "t", ["x"], 2, blocking=False, lease_s=5.0)
        assert again.sample_ids == ["m_g0", "m_g1"]
        lost = again.subset([0, 1])
        lost.lease_tokens = [claim.token] * 2
        with pytest.raises(LeaseExpiredError):
            client.ack(lost)
        client.ack(again)
        assert client.list_consumed("p", "t") == listed.sample_ids
        assert client.list_consumed("p", "u") == []
        client.clear_samples(None, "p")
        client.clear_samples(None, "ranks")
        client.clear_samples(None, "anew")
        assert not [key for key in client._backend.blobs if key.startswith("row")]


@pytest.mark.parametrize("version", [4, 5, 6, 7])
@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_a_row_that_samples_share_is_freed_with_the_last_of_them(way, version):
    cls = journaled() if way == "all records" else trimmed()
    first = 0
    if way == "snapshot":
        first = next(
            seq for seq, data in enumerate(RECORDS[version]) if Record.from_bytes(data, seq).command.op == "snapshot"
        )
        cls.trims.append(first)
    with stored(cls, version, first) as client:
        in_partition = [client.describe("shared").held_bytes]
        ledger = client._backend._journal._service._ledger
        held = [ledger.held_bytes]
        for name in ("a", "b", "c"):
            client.clear_samples([name], "shared")
            held.append(ledger.held_bytes)
            in_partition.append(client.describe("shared").held_bytes)
        assert [before - after for before, after in pairwise(held)] == [8, 208, 108]
        assert in_partition == [324, 316, 108, 0]


@pytest.mark.parametrize("version", [5, 6, 7])
@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_what_ranks_were_given_is_kept(way, version):
    cls = journaled() if way == "all records" else trimmed()
    first = 0
    if way == "snapshot":
        first = next(
            seq for seq, data in enumerate(RECORDS[version]) if Record.from_bytes(data, seq).command.op == "snapshot"
        )
        cls.trims.append(first)
    with stored(cls, version, first) as client:
        claimed = [
            client.claim_meta("ranks", "t", ["x"], 1, rank, blocking=False, sampler="balanced", dp_size=2, lease_s=1.0)
            for rank in (0, 1)
        ]
        assert [meta.sample_ids for meta in claimed] == [["a"], ["b"]]
        client.ack(claimed[0].concat(claimed[1]))
        found = client.describe("ranks")
        assert (found.num_cleared, found.held_bytes, found.tasks["t"].num_consumed) == (1, 32, 2)
        assert client.describe("p").info.consumer_tasks == ("t", "u", "v")
        if version == 7:
            for batch_index in range(3):
                with pytest.raises(ValueError, match="cleared"):
                    client.claim_meta("anew", "t", ["x"], 1, 0, batch_index=batch_index)
            assert client.claim_meta("anew", "t", ["x"], 1, 0, batch_index=3).sample_ids == ["a"]


@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_the_ids_of_requests_that_were_carried_out_are_kept(way):
    cls = journaled() if way == "all records" else trimmed()
    first = 0
    if way == "snapshot":
        first = next(
            seq for seq, data in enumerate(RECORDS[7]) if Record.from_bytes(data, seq).command.op == "snapshot"
        )
        cls.trims.append(first)
    with stored(cls, 7, first) as client:
        again = commands.PutTags("p", ["k_g0"], [{"n": 77}], request_id="d0" * 16, left_s=60.0)
        with pytest.raises(AlreadyDoneError):
            client._backend._ledger(time.monotonic() + 60, again)
        assert client.list_samples("p").tags[0]["n"] == 0


@pytest.mark.parametrize("version", [1, 2])
def test_versions_before_the_fields_had_names_are_refused_with_the_reason(version):
    cls = journaled()
    with open_client(cls) as client:
        cls.journal[0] = msgpack.packb([version, 0.0, "clear", ["p", None], {}])
        with pytest.raises(
            CorruptDataError,
            match=rf"of version {version}\. Expected 3, 4, 5, 6 or 7\. Another dataplane-core wrote it",
        ):
            client.list_samples("p")


def test_a_later_version_is_refused_with_the_reason():
    cls = journaled()
    with open_client(cls) as client:
        cls.journal[0] = seal(msgpack.packb({"v": 8, "anything": "else"}))
        with pytest.raises(CorruptDataError, match=r"record 0 is of version 8\. Expected 3, 4, 5, 6 or 7\."):
            client.list_samples("p")
