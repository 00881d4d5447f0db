"""The wire guard between processes: one puts, bits are flipped in the store itself, another gets."""

import json
import time
import uuid

import pytest

from dataplane_core import connect
from dataplane_core.codec import split_rows
from dataplane_core.errors import CorruptDataError
from dataplane_redis._scripts import to_bytes, unpack_rows
from dataplane_testkit import backend_of

IDS = [f"prompt{number // 4}_g{number % 4}" for number in range(16)]
FIELDS = ["input_ids", "advantages", "reward", "messages"]

WRITER = f"""
import json, sys
import torch
from tensordict import NonTensorStack, TensorDict
from dataplane_core import connect

ids = {IDS!r}
lengths = [5 + 7 * row % 11 for row in range(len(ids))]
tokens = torch.nested.nested_tensor([torch.arange(each) for each in lengths], layout=torch.jagged)
columns = {{
    "input_ids": tokens,
    "advantages": torch.nested.nested_tensor([torch.full((each,), 0.5) for each in lengths], layout=torch.jagged),
    "reward": torch.arange(16.0),
    "messages": NonTensorStack(*[{{"role": "user", "n": row}} for row in range(16)]),
}}
with connect(json.loads(sys.argv[1]), bootstrap=False) as client:
    client.put_samples(ids, "p", TensorDict(columns, [16]))
"""


@pytest.fixture(scope="module")
def client(python):
    """A guarded client of a store into which another process has put."""
    options = {"namespace": f"guard-{uuid.uuid4().hex[:8]}"}
    config = {"backend": "redis_store", "options": options, "middleware": ["wire_guard"], "op_timeout_s": 120.0}
    with connect(config) as client:
        client.register_partition("p", FIELDS, len(IDS), ["train"])
        python.run("-c", WRITER, json.dumps(config))
        yield client


@pytest.fixture
def change(client):
    """``change(sample_id, row)`` replaces the stored row of a sample for one test. ``change(sample_id)`` returns it."""
    originals, session = {}, backend_of(client)._session

    def ask(*words):
        return session.link.command("change", time.monotonic() + 60, *words)

    def change(sample_id, row=None):
        at = session.base + b":e:" + ask(b"HGET", session.base + b":p:p", b"epoch") + b":"
        (((write, position, _, _), *_),) = unpack_rows([ask(b"HGET", at + b"r", to_bytes(sample_id))])
        key, field = b"%s:w:%s" % (session.base, write.hex().encode()), b"%d" % position
        before = ask(b"HGET", key, field)
        if row is not None:
            originals.setdefault(sample_id, before)
            ask(b"HSET", key, field, row)
        return bytes(before)

    yield change
    for sample_id, row in originals.items():
        change(sample_id, row)


@pytest.mark.parametrize("field", FIELDS)
def test_one_bit_flipped_in_the_store_is_caught_and_named(client, change, field):
    row = bytearray(change(IDS[5]))
    cell = bytes(split_rows([bytes(row)])[0][FIELDS.index(field)])
    row[bytes(row).index(cell) + len(cell) - 1] ^= 1  # the last byte of the payload
    change(IDS[5], bytes(row))
    with pytest.raises(CorruptDataError, match=rf"'{IDS[5]}' in '{field}'\.") as caught:
        client.get_samples(IDS, "p", FIELDS)
    assert caught.value.cells == {IDS[5]: (field,)}
    rest = client.get_samples([each for each in IDS if each != IDS[5]], "p", FIELDS)
    assert rest["reward"].tolist() == [float(row) for row in range(16) if row != 5]
    assert [each["n"] for each in rest["messages"].tolist()] == [row for row in range(16) if row != 5]


def test_rows_swapped_in_the_store_are_caught_on_both_sides(client, change):
    rows = {each: change(each) for each in IDS[2:4]}
    change(IDS[2], rows[IDS[3]])
    change(IDS[3], rows[IDS[2]])
    with pytest.raises(CorruptDataError) as caught:
        client.get_samples(IDS, "p", FIELDS)
    assert caught.value.cells == {each: tuple(FIELDS) for each in IDS[2:4]}


def test_no_byte_of_a_stored_row_can_change_unnoticed(client, change):
    row = change(IDS[0])
    for position in range(len(row)):
        change(IDS[0], row[:position] + bytes([row[position] ^ 0x10]) + row[position + 1 :])
        with pytest.raises(CorruptDataError):
            client.get_samples([IDS[0]], "p", FIELDS)
