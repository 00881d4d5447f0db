"""The wire guard between processes: one puts, bits are flipped in the store itself, another gets."""

import json
import time
import uuid

import numpy as np
import pytest
from tiers import in_long

from dataplane_core import connect
from dataplane_core.codec import split_rows
from dataplane_core.errors import CorruptDataError
from dataplane_core.ledger import commands
from dataplane_redis._scripts import to_bytes, unpack_rows
from dataplane_testkit import backend_of

pytestmark = pytest.mark.timeout(600)  # Ray, a queue and another process start within the first test

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


class Redis:
    """Rows in a server's memory."""

    def __init__(self):
        self.config = {"backend": "redis_store", "options": {"namespace": f"guard-{uuid.uuid4().hex[:8]}"}}

    def change(self, backend, sample_id, change):
        """Replaces the stored row of a sample by ``change(row)``."""

        def ask(*words):
            return backend._session.link.command("change", time.monotonic() + 60, *words)

        base = backend._session.base
        at = base + b":e:" + ask(b"HGET", base + b":p:p", b"epoch") + b":"
        (((write, position, _, _), *_),) = unpack_rows([ask(b"HGET", at + b"r", to_bytes(sample_id))])
        key, field = b"%s:w:%s" % (base, write.hex().encode()), b"%d" % position
        ask(b"HSET", key, field, change(bytearray(ask(b"HGET", key, field))))


class TQSimple:
    """Rows in a storage unit's memory."""

    def __init__(self):
        self.config = {"backend": "tq_simple", "options": {"instance": f"guard-{uuid.uuid4().hex[:8]}"}}

    def change(self, backend, sample_id, change):
        (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate("p", [sample_id], ["reward"])).parts
        handle = part.write_id + part.positions[0]
        deadline = time.monotonic() + 60
        (row,) = backend._engine.get_rows([handle], deadline=deadline)
        changed = change(bytearray(row))
        backend._engine.put_rows([handle], changed, np.array([0, len(changed)]), deadline=deadline)


@pytest.fixture(scope="module", params=["redis_store", *in_long("tq_simple")])
def stored(request, python):
    """A guarded client of a store into which another process has put, and the store."""
    store = Redis() if request.param == "redis_store" else TQSimple()
    config = {**store.config, "middleware": ["wire_guard"], "op_timeout_s": 120.0}
    other = dict(config)
    if request.param == "tq_simple":
        address = request.getfixturevalue("ray_address")
        other["options"] = {**config["options"], "ray_address": address}
    with connect(config) as client:
        client.register_partition("p", FIELDS, len(IDS), ["train"])
        python.run("-c", WRITER, json.dumps(other))
        yield client, store


@pytest.fixture
def changed(stored):
    """Changes rows in the store for one test."""
    client, store = stored
    originals = {}

    def change(sample_id, how):
        def keep(row):
            originals.setdefault(sample_id, bytes(row))
            return bytes(how(row))

        store.change(backend_of(client), sample_id, keep)

    yield change
    for sample_id, row in originals.items():
        store.change(backend_of(client), sample_id, lambda _, row=row: row)


def test_what_another_process_put_comes_back(stored):
    client, _ = stored
    back = client.get_samples(IDS, "p", FIELDS)
    assert back["reward"].tolist() == [float(row) for row in range(16)]
    assert [len(row) for row in back["input_ids"].unbind()] == [5 + 7 * row % 11 for row in range(16)]
    assert back["messages"].tolist()[3] == {"role": "user", "n": 3}
    assert set(back.keys()) == set(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_one_bit_flipped_in_the_store_is_caught_and_named(stored, changed, field):
    client, _ = stored

    def flip(row):
        cell = bytes(split_rows([bytes(row)])[0][FIELDS.index(field)])
        row[bytes(row).index(cell) + len(cell) - 1] ^= 1  # the last byte of the payload
        return row

    changed(IDS[5], flip)
    with pytest.raises(CorruptDataError, match=rf"'{IDS[5]}' in '{field}'\.") as caught:
        client.get_samples(IDS, "p", FIELDS)
    assert caught.value.cells == {IDS[5]: (field,)}
    rest = [each for each in IDS if each != IDS[5]]
    assert client.get_samples(rest, "p", FIELDS).batch_size == (15,)


def test_rows_swapped_in_the_store_are_caught_on_both_sides(stored, changed):
    client, store = stored
    rows = {}
    for each in IDS[2:4]:
        store.change(backend_of(client), each, lambda row, each=each: rows.setdefault(each, bytes(row)))
    changed(IDS[2], lambda _: rows[IDS[3]])
    changed(IDS[3], lambda _: rows[IDS[2]])
    with pytest.raises(CorruptDataError) as caught:
        client.get_samples(IDS, "p", FIELDS)
    assert caught.value.cells == {each: tuple(FIELDS) for each in IDS[2:4]}


def test_no_byte_of_a_stored_row_can_change_unnoticed(stored, changed):
    client, _ = stored
    size = 0

    def measure(row):
        nonlocal size
        size = len(row)
        return row

    changed(IDS[0], measure)
    for position in range(size):

        def damage(row, position=position):
            row[position] ^= 0x10
            return row

        changed(IDS[0], damage)
        with pytest.raises(CorruptDataError):
            client.get_samples([IDS[0]], "p", FIELDS)
        changed(IDS[0], damage)
    assert client.get_samples([IDS[0]], "p", FIELDS).batch_size == (1,)
