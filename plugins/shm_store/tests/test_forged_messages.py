"""Messages on the socket that no client of this package sends: refused, and without harm to other clients."""

import msgspec
import pytest

from dataplane_core.errors import BackendError, CapacityExceededError, InvalidRequestError
from dataplane_core.host_memory import Arena
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import FieldSpec
from dataplane_shm._layout import Layout
from dataplane_shm._messages import (
    Begin,
    Drop,
    Find,
    PutWhole,
    Release,
    Status,
    decode_reply,
    decode_request,
    decode_welcome,
    encode_error,
    encode_request,
)
from dataplane_shm._store import Store

SPECS = {"x": FieldSpec("tensor", "uint8", 1)}
PUT = commands.BeginPut("p", ["a", "b"], SPECS, [8, 8], write_id=1, ttl_s=9.0)


def layout(num_rows=2, step=8, size_bytes=None):
    made = Layout([])
    made.add_dense(num_rows, step, step)
    made.size_bytes = made.size_bytes if size_bytes is None else size_bytes
    return made


def sent(request):
    return decode_request(encode_request(request)[4:])


@pytest.mark.parametrize(
    "request_",
    [
        PutWhole(PUT, layout(), bytes(17)),
        PutWhole(PUT, layout(size_bytes=8), bytes(8)),
        PutWhole(PUT, layout(step=-8, size_bytes=16), bytes(16)),
        Begin(PUT, []),
        Begin(PUT, [layout(), layout()]),
        Begin(PUT, [Layout([])]),
        Begin(commands.BeginPut("p", ["a"], SPECS, [-8], write_id=1, ttl_s=9.0), [layout(1)]),
        Find(commands.Locate("p", ["a"], []), 1),
        commands.Ack("p", "t", ["a"], []),
    ],
)
def test_a_request_whose_parts_do_not_fit_is_refused(request_):
    with pytest.raises(InvalidRequestError):
        sent(request_)


@pytest.mark.parametrize("message", [b"", b"\xff", b"\x00", b"\x00\xc1", b"\x03\x91" + b"\x91" * 200_000, b"\x00\xdf"])
def test_what_is_no_request_is_refused(message):
    with pytest.raises(InvalidRequestError, match="is no request"):
        decode_request(message)


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\x00", b"\x00\xa1\xff", b"\x01\x93\xa1x\xa1y\x80", b"\x01\x93\xa8preview \xa1y\x80", b"\x01\xc1"),
        b"\x01" + msgspec.msgpack.encode(["BackendError", "why", {"hint": ["no", "text"]}]),
        b"\x01" + msgspec.msgpack.encode(["LeaseExpiredError", "why", {"sample_ids": 3}]),
    ],
)
def test_what_is_no_reply_is_an_error_of_the_backend(message):
    with pytest.raises(BackendError, match="sent what this client cannot read") as caught:
        decode_reply(Status(), message)
    assert str(caught.value)
    with pytest.raises(BackendError):
        decode_welcome(message)


def test_an_error_of_a_reply_has_all_its_attributes():
    error = CapacityExceededError("full", hint="clear", ask_again_s=0.5)
    with pytest.raises(CapacityExceededError, match="full clear") as caught:
        decode_reply(Status(), encode_error(error)[4:])
    assert vars(caught.value) == vars(error)
    with pytest.raises(CapacityExceededError) as caught:
        decode_reply(Status(), b"\x01" + msgspec.msgpack.encode(["CapacityExceededError", "full", {}]))
    assert caught.value.retryable
    assert caught.value.ask_again_s == 0.0


@pytest.fixture
def store():
    made = Store(Arena.create(1 << 16), LedgerService())
    session = made.begin_session()
    made.handle(commands.Register("p", ["x"], None, [], None, {}, "e"), session)
    made.handle(PutWhole(PUT, layout(), bytes(16)), session)
    return made, session


def test_a_pin_that_is_used_twice_holds_what_it_names_last(store):
    made, session = store
    for _ in range(2):
        made.handle(Find(commands.Locate("p", ["a"], ["x"]), 7), session)
    made.handle(Release([7]), session)
    assert made.handle(Status(), session).pinned_bytes == 0
    made.handle(commands.Clear("p", None), session)
    assert made.handle(Status(), session).num_extents == 0


def test_rows_that_do_not_exist_are_not_dropped(store):
    made, session = store
    made.handle(Drop([(1, -1), (1, 2), (9, 0)]), session)
    assert made.handle(Find(commands.Locate("p", ["a", "b"], ["x"]), 7), session).gone == []
