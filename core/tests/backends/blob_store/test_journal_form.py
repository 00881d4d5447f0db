"""The form on disk: a file written by the first core that had it is read and written again, record by record."""

import base64
import json
import time
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
from blob_stores import Clock, journaled, open_client, trimmed

from dataplane_core.errors import AlreadyDoneError, CorruptDataError, LeaseExpiredError
from dataplane_core.journal.records import DIGEST_BYTES, OPS, Record, seal
from dataplane_core.ledger import commands
from dataplane_testkit import backend_of

_GOLDEN = json.loads((Path(__file__).parent / "golden" / "v10.json").read_text())
RECORDS = [base64.b64decode(text) for text in _GOLDEN["records"]]
BLOBS = {key: base64.b64decode(text) for key, text in _GOLDEN["blobs"].items()}
FIELDS = {
    "begin": "store",
    "expire": "leases writes done",
    "plan": "snapshot",
    "snapshot": "store snapshot chunks nbytes digest records garbage",
    "register": "partition_id fields num_samples consumer_tasks grpo_group_size enums epoch if_exists followers "
    "registered_by registered_at",
    "begin_put": "partition_id sample_ids specs writes tags epoch write_id ticket ttl_s request_id",
    "wait_for_room": "ticket size_bytes wait_s",
    "commit_put": "write_id",
    "abort_put": "write_id",
    "put_tags": "partition_id sample_ids tags epoch request_id left_s",
    "claim": (
        "partition_id task_name required_fields batch_size all_or_nothing lease_s tag_filter token holder sampler "
        "dp_rank dp_size batch_index batch_epoch"
    ),
    "set_cursor": "partition_id task_name sample_ids create",
    "ack": "partition_id task_name sample_ids lease_tokens request_id left_s",
    "nack": "partition_id task_name sample_ids lease_tokens request_id left_s",
    "renew": "partition_id task_name sample_ids lease_tokens request_id left_s lease_s",
    "clear": "partition_id sample_ids",
    "collected": "refs",
}


def first_snapshot():
    """The number of the record that names a snapshot."""
    return next(seq for seq, data in enumerate(RECORDS) if Record.from_bytes(data, seq).command.op == "snapshot")


def stored(way):
    """A store with the file's records: all, or only those from its snapshot on."""
    cls = journaled() if way == "all records" else trimmed()
    first = 0
    if way == "snapshot":
        first = first_snapshot()
        cls.trims.append(first)
    client = open_client(cls)
    cls.journal.update({seq: data for seq, data in enumerate(RECORDS) if seq >= first})
    backend_of(client).blobs.update(BLOBS)
    return client


def test_the_ops_and_their_fields_are_these():
    """Another field, or another meaning of one, is another version, and needs another file beside this one."""
    assert {op: " ".join(fields) for op, fields in OPS.items()} == FIELDS


def test_the_file_holds_every_op_and_is_written_again_byte_for_byte():
    seen = set()
    for seq, data in enumerate(RECORDS):
        record = Record.from_bytes(data, seq)
        held = msgpack.unpackb(data[DIGEST_BYTES:])
        assert list(held) == ["v", "seq", "prev", "op", *FIELDS[record.command.op].split()]
        assert record.to_bytes() == data
        seen.add(record.command.op)
    assert seen == set(FIELDS)


@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_the_file_replays_to_what_it_was(way):
    with stored(way) as client:
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
        claim = next(Record.from_bytes(data, 0).command for data in reversed(RECORDS) if b"claim" in data)
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
        assert not [key for key in backend_of(client).blobs if key.startswith("row")]


@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_a_row_that_samples_share_is_freed_with_the_last_of_them(way):
    with stored(way) as client:
        in_partition = [client.describe("shared").held_bytes]
        ledger = backend_of(client)._journal.service._ledger
        held = [ledger.held_bytes]
        for name in ("a", "b", "c"):
            client.clear_samples([name], "shared")
            held.append(ledger.held_bytes)
            in_partition.append(client.describe("shared").held_bytes)
        assert [before - after for before, after in pairwise(held)] == [8, 208, 108]
        assert in_partition == [324, 316, 108, 0]


@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_what_ranks_were_given_is_kept(way):
    with stored(way) as client:
        claimed = [
            client.claim_meta("ranks", "t", ["x"], 1, rank, blocking=False, sampler="balanced", dp_size=2, lease_s=600)
            for rank in (0, 1)
        ]
        assert [meta.sample_ids for meta in claimed] == [["a"], ["b"]]
        client.ack(claimed[0].concat(claimed[1]))
        found = client.describe("ranks")
        assert (found.num_cleared, found.held_bytes, found.tasks["t"].num_consumed) == (1, 32, 2)
        assert client.describe("p").info.consumer_tasks == ("t", "u", "v")
        for batch_index in range(3):
            with pytest.raises(ValueError, match="cleared"):
                client.claim_meta("anew", "t", ["x"], 1, 0, batch_index=batch_index)
        assert client.claim_meta("anew", "t", ["x"], 1, 0, batch_index=3).sample_ids == ["a"]


@pytest.mark.parametrize("way", ["all records", "snapshot"])
def test_the_ids_of_requests_that_were_carried_out_are_kept(way):
    with stored(way) as client:
        again = commands.PutTags("p", ["k_g0"], [{"n": 77}], request_id="d0" * 16, left_s=60.0)
        with pytest.raises(AlreadyDoneError):
            backend_of(client).call_ledger(time.monotonic() + 60, again)
        assert client.list_samples("p").tags[0]["n"] == 0


@pytest.mark.parametrize("version", [9, 11])
def test_another_version_is_refused_with_the_reason(version):
    cls = journaled()
    with open_client(cls) as client:
        cls.journal[0] = seal(msgpack.packb({"v": version, "anything": "else"}))
        with pytest.raises(CorruptDataError, match=rf"record 0 is of version {version}\. Expected 10\. Another"):
            client.list_samples("p")
