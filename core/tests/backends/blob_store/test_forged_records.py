"""Records and snapshots with a right digest that no client wrote: refused as damaged, whatever they hold."""

from dataclasses import replace

import msgpack
import pytest
from blob_stores import journaled, open_client
from test_journal_form import BLOBS, RECORDS, first_snapshot, stored

from dataplane_core.errors import CorruptDataError
from dataplane_core.journal.records import DIGEST_BYTES, Record, seal
from dataplane_core.journal.snapshot import Chunks, chunk_key
from dataplane_testkit import backend_of


def changed(op, **others):
    """The first record of an op in the file, with other fields and the right digest."""
    held = next(
        held for each in RECORDS if (held := msgpack.unpackb(each[DIGEST_BYTES:]))["op"] == op and "seq" in held
    )
    return seal(msgpack.packb({**held, **others}))


FORGED = [
    changed("register", consumer_tasks=[["t"]]),
    changed("register", num_samples="4"),
    changed("register", enums={"e": "words"}),
    changed("begin_put", sample_ids=[["a"]]),
    changed("begin_put", writes=[[["x"], [-8], None]]),
    changed("begin_put", specs={"x": "tensor:int64:9:"}),
    changed("begin_put", write_id=b"\xff" * 400),
    changed("begin_put", tags=[1]),
    changed("claim", sampler="new"),
    changed("claim", lease_s=float("nan")),
    changed("claim", sampler="balanced", dp_rank=0, dp_size=2**60),
    changed("expire", leases=[["p"]]),
    changed("collected", refs=[[b"1", ["a"]]]),
    changed("ack", seq="1"),
    seal(msgpack.packb({"v": 9, "op": ["ack"]})),
    seal(msgpack.packb([])),
    seal(b"\xdd\x00\x00\xff\xff" * 300 + b"\xc0" * 9000),
]


@pytest.mark.parametrize("data", FORGED)
def test_a_forged_record_is_refused(data):
    with pytest.raises(CorruptDataError, match="journal record 7 cannot be read"):
        Record.from_bytes(data, 7)


def test_a_forged_record_in_a_journal_is_refused_by_every_call():
    cls = journaled()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        last = max(cls.journal)
        held = msgpack.unpackb(changed("begin_put", writes=[[["x"], [-8], None]])[DIGEST_BYTES:])
        held |= {"seq": last + 1, "prev": cls.journal[last][:DIGEST_BYTES]}
        cls.journal[last + 1] = seal(msgpack.packb(held))
        for _ in range(2):
            with pytest.raises(CorruptDataError, match="begin_put refused"):
                client.list_samples("p")


def change(section, **others):
    return {**section, **others}


@pytest.mark.parametrize(
    "forge",
    [
        lambda part: change(part, row_bytes=[[] for _ in part["row_bytes"]]) if part["part"] == "writes" else part,
        lambda part: change(part, cells=[[0, -1, 0]] * len(part["cells"])) if part["part"] == "rows" else part,
        lambda part: change(part, seqs=part["seqs"][::-1]) if part["part"] == "rows" else part,
        lambda part: change(part, tags=[1] * len(part["tags"])) if part["part"] == "rows" else part,
        lambda part: change(part, holds=part["holds"] * 2) if part["part"] == "rows" else part,
        lambda part: change(part, consumer_tasks=[1]) if part["part"] == "partition" else part,
        lambda part: change(part, part=["ledger"]) if part["part"] == "ledger" else part,
        lambda part: {"part": part["part"]},
        lambda part: 7,
    ],
)
def test_a_forged_snapshot_is_refused(forge):
    seq = first_snapshot()
    record = Record.from_bytes(RECORDS[seq], seq)
    named = record.command
    sections = []
    for index in range(named.chunks):
        unpacker = msgpack.Unpacker()
        unpacker.feed(BLOBS[chunk_key(named.snapshot, index)][DIGEST_BYTES:])
        sections += unpacker
    chunk = seal(b"".join(map(msgpack.packb, [sections[0], *map(forge, sections[1:])])))
    chunks = Chunks()
    chunks.add(chunk)
    forged = replace(record, command=replace(named, chunks=1, digest=chunks.digest))
    with stored("snapshot") as client:
        cls = type(backend_of(client))
        backend_of(client).blobs[chunk_key(named.snapshot, 0)] = chunk
        cls.journal.clear()
        cls.journal[seq] = forged.to_bytes()
        for _ in range(2):
            with pytest.raises(CorruptDataError, match="cannot be read"):
                client.list_samples("p")
