"""Messages on the socket that no client of this package sends: refused, and without harm to other clients."""

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_core.host_memory import Arena
from dataplane_core.hosting import ExtentService, Layout, Release
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import FieldSpec
from dataplane_shm._messages import MESSAGES, Begin, Drop, Find, PutWhole, Status
from dataplane_shm._store import Store

SPECS = {"x": FieldSpec("tensor", "uint8", 1)}
PUT = commands.BeginPut("p", ["a", "b"], SPECS, [commands.Write(list(SPECS), [8, 8])], write_id=1, ttl_s=9.0)


def layout(num_rows=2, step=8, size_bytes=None):
    made = Layout([])
    made.add_dense(num_rows, step, step)
    made.size_bytes = made.size_bytes if size_bytes is None else size_bytes
    return made


def sent(request):
    return MESSAGES.decode_request(MESSAGES.encode_request(request)[4:])


@pytest.mark.parametrize(
    "request_",
    [
        PutWhole(PUT, layout(), bytes(17)),
        PutWhole(PUT, layout(size_bytes=8), bytes(8)),
        PutWhole(PUT, layout(step=-8, size_bytes=16), bytes(16)),
        Begin(PUT, []),
        Begin(PUT, [layout(), layout()]),
        Begin(PUT, [Layout([])]),
        Begin(
            commands.BeginPut("p", ["a"], SPECS, [commands.Write(list(SPECS), [-8])], write_id=1, ttl_s=9.0),
            [layout(1)],
        ),
        Find(commands.Locate("p", ["a"], []), 1),
        commands.AckRequest("p", "t", ["a"], []),
    ],
)
def test_a_request_whose_parts_do_not_fit_is_refused(request_):
    with pytest.raises(InvalidRequestError):
        sent(request_)


@pytest.fixture
def store():
    made = Store(ExtentService(Arena.create(1 << 16)), LedgerService())
    session = made.begin_session()
    made.answer(commands.RegisterRequest("p", ["x"], None, [], None, {}, "e"), session)
    made.answer(PutWhole(PUT, layout(), bytes(16)), session)
    return made, session


def test_a_pin_that_is_used_twice_holds_what_it_names_last(store):
    made, session = store
    for _ in range(2):
        made.answer(Find(commands.Locate("p", ["a"], ["x"]), 7), session)
    made.answer(Release([7]), session)
    assert made.answer(Status(), session).pinned_bytes == 0
    made.answer(commands.ClearRequest("p", None), session)
    assert made.answer(Status(), session).num_extents == 0


def test_rows_that_do_not_exist_are_not_dropped(store):
    made, session = store
    made.answer(Drop([(1, -1), (1, 2), (9, 0)]), session)
    assert made.answer(Find(commands.Locate("p", ["a", "b"], ["x"]), 7), session).gone == []
