"""Messages of a host and its clients, and the layout of rows in an extent."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataplane_core.errors import BackendError, BackendUnavailableError, CapacityExceededError, InvalidRequestError
from dataplane_core.hosting.extents import Layout, offsets_at, squeeze
from dataplane_core.hosting.messages import (
    HELLO,
    VERSION,
    Hello,
    Messages,
    Release,
    StopWaiting,
    Together,
    Welcome,
    decode_as,
    encode,
)
from dataplane_core.ledger import Located, commands
from dataplane_core.spec import FieldSpec

MESSAGES = Messages()
X = {"x": FieldSpec("tensor", "int64", 1)}
LOCATED = Located([commands.Part(7, ("x",), (0,), [0], [1])], X)
FULL = CapacityExceededError("full", hint="clear", ask_again_s=0.5)
REQUESTS = {
    "claim": commands.ClaimRequest(
        "p", "t", ["x"], 2, all_or_nothing=True, lease_s=None, tag_filter=None, token="k", holder="h"
    ),
    "stop": StopWaiting("m"),
    "release": Release([7]),
    "begin": commands.BeginPut("p", ["a"], X, [commands.Write(list(X), [8])], [{"n": 1}], write_id=2**40, ttl_s=9.0),
    "clients": commands.ListClientsRequest(),
    "together": Together([b"\x10\x93"]),
}


def written():
    """Name -> the bytes of a message."""
    return {
        "hello": encode(Hello(VERSION, "k", b"t")),
        "welcome": encode(Welcome(VERSION, 1, "k", b"t")),
        **{name: MESSAGES.encode_request(request) for name, request in REQUESTS.items()},
        "reply": MESSAGES.encode_reply(LOCATED),
        "error": MESSAGES.encode_error(FULL),
    }


def test_the_bytes_of_messages_change_only_with_their_version():
    """If they do, raise `VERSION`, and `COMMANDS_FORM` if they are of a command, and write the file anew."""
    lines = [f"{name} {data.hex()}" for name, data in written().items()]
    assert lines == Path(__file__).with_name(f"messages_{VERSION}.txt").read_text().splitlines()


def test_what_was_written_is_read():
    data = {name: message[4:] for name, message in written().items()}
    assert HELLO.decode(data["hello"]) == Hello(VERSION, "k", b"t")
    assert decode_as(data["welcome"], Welcome).session == 1
    for name, request in REQUESTS.items():
        assert MESSAGES.decode_request(data[name]) == request
    assert MESSAGES.decode_reply(commands.Locate("p", ["a"], ["x"]), data["reply"]) == LOCATED
    with pytest.raises(CapacityExceededError, match="full clear") as caught:
        MESSAGES.decode_reply(REQUESTS["begin"], data["error"])
    assert vars(caught.value) == vars(FULL)


@pytest.mark.parametrize(
    "message", [b"", b"\x80", b"\x10", b"\x10\xc1", b"\x00\x91" + b"\x91" * 200_000, b"\xff\x93", b"\xff\x90"]
)
def test_what_is_no_request_is_refused(message):
    with pytest.raises(InvalidRequestError, match="is no request"):
        MESSAGES.decode_request(message)


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
        MESSAGES.decode_reply(REQUESTS["clients"], message)
    assert str(caught.value)
    with pytest.raises(BackendError):
        decode_as(message, Welcome)


def test_an_attribute_that_an_error_lacks_has_its_usual_value():
    with pytest.raises(CapacityExceededError) as caught:
        MESSAGES.decode_reply(
            REQUESTS["begin"], b"\x01" + msgspec.msgpack.encode(["CapacityExceededError", "full", {}])
        )
    assert caught.value.retryable
    assert caught.value.ask_again_s == 0.0


class OwnError(BackendUnavailableError):
    """An error of a host's own."""


def test_an_error_of_a_host_travels_only_between_those_that_know_it():
    knows = Messages(errors=[OwnError])
    with pytest.raises(OwnError, match="gone"):
        knows.decode_reply(REQUESTS["begin"], knows.encode_error(OwnError("gone"))[4:])
    with pytest.raises(BackendError, match="OwnError: gone"):
        MESSAGES.decode_reply(REQUESTS["begin"], MESSAGES.encode_error(OwnError("gone"))[4:])


# --- layouts ----------------------------------------------------------------------------------------------------------


@st.composite
def puts(draw):
    num_rows = draw(st.integers(1, 12))
    columns = []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from([1, 4, 8, 200]))
        lengths = draw(st.none() | st.lists(st.integers(0, 40), min_size=num_rows, max_size=num_rows))
        columns.append((step, lengths))
    kept = draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    return num_rows, columns, sorted(kept)


@given(puts())
def test_what_is_kept_keeps_its_bytes(put):
    num_rows, columns, kept = put
    draw = np.random.default_rng(0)
    layout, cells = Layout([]), []
    for step, lengths in columns:
        if lengths is None:
            layout.add_dense(num_rows, step)
            cells.append([draw.bytes(step) for _ in range(num_rows)])
        else:
            layout.add_ragged(num_rows, sum(lengths), step)
            cells.append([draw.bytes(step * length) for length in lengths])
    extent = np.full(layout.size_bytes + 10, 99, np.uint8)
    for column, (_, lengths), rows in zip(layout.columns, columns, cells, strict=True):
        if lengths is not None:
            offsets_at(extent, column, num_rows)[:] = np.cumsum([0, *lengths])
        data = np.frombuffer(b"".join(rows), np.uint8)
        extent[column.start : column.start + len(data)] = data

    squeezed = squeeze(extent, layout, num_rows, kept)

    assert squeezed.size_bytes <= layout.size_bytes
    assert (extent[layout.size_bytes :] == 99).all()
    for column, (step, lengths), rows in zip(squeezed.columns, columns, cells, strict=True):
        cuts = np.arange(len(kept) + 1) if lengths is None else offsets_at(extent, column, len(kept))
        for index, row in enumerate(kept):
            begin, end = (column.start + cuts[index : index + 2] * step).tolist()
            assert extent[begin:end].tobytes() == rows[row]
            assert column.start % 16 == 0
