"""Values and replies that no server with our scripts sends, since another program changed the keys: refused."""

import struct
import time
import tracemalloc

import pytest
from redis.exceptions import ConnectionError as LostConnectionError, InvalidResponse

from dataplane_core.errors import CorruptDataError
from dataplane_core.spec import FieldSpec
from dataplane_redis._backend import _info_of
from dataplane_redis._protocol import ArrayReader
from dataplane_redis._scripts import pack_strings, pack_tags, unpack_layout, unpack_tags


@pytest.mark.parametrize(
    "data",
    [b"\x91", b"\x07", b"\x81\xa1a\x07", b"\x81\xa1a\xa1q", b"\x81\xa1a\xa2ix", b"\x81\x90\xa1n", b"\x81\xa1a\xa2fx"],
)
def test_damaged_tags_are_refused(data):
    with pytest.raises(CorruptDataError, match="the tags of a row cannot be read"):
        unpack_tags(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        struct.pack("<I", 5) + b"x",
        struct.pack("<I", 1) + b"\xff",
        pack_strings(["x"]),
    ],
)
def test_a_damaged_layout_is_refused(data):
    with pytest.raises(CorruptDataError, match="the fields of a write cannot be read"):
        unpack_layout(data)
    with pytest.raises(CorruptDataError, match="'tensor:int64' is no spec of a field"):
        unpack_layout(pack_strings(["x", "tensor:int64"]))


@pytest.mark.parametrize("text", [b"{}", b"[]", b"x", b"[" * 100_000, b'{"fields": "x"}'])
def test_a_damaged_registration_is_refused(text):
    with pytest.raises(CorruptDataError, match="a description on the server cannot be read"):
        _info_of("e", text)


def test_what_was_packed_is_read():
    spec = FieldSpec.from_text("tensor:int64:1:")
    layout = unpack_layout(pack_strings(text for name in ("x", "", "ü") for text in (name, spec.to_text())))
    assert list(layout.items()) == [("x", spec), ("", spec), ("ü", spec)]
    assert unpack_tags(pack_tags({"n": 2**60, "s": "t"})) == {"n": 2**60, "s": "t"}


class Arriving:
    """A socket on which some bytes arrive before it is closed."""

    def __init__(self, data):
        self.data = data

    def settimeout(self, timeout_s):
        pass

    def recv_into(self, buffer):
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"*1\r\n$900000000000000\r\nabc", LostConnectionError),
        (b"*900000000000000\r\n$-1\r\n", LostConnectionError),
        (b"*1\r\n$x\r\n", InvalidResponse),
        (b"*1_0\r\n", InvalidResponse),
        (b"*1\r\n$" + b"9" * 40 + b"\r\n", InvalidResponse),
        (b"-" + b"x" * 10_000_000, InvalidResponse),
        (b":1\r\n", InvalidResponse),
    ],
)
def test_a_forged_reply_is_refused_without_memory_for_what_it_says(data, error):
    reader = ArrayReader(Arriving(data), 100, time.monotonic() + 60.0)
    tracemalloc.start()
    try:
        with pytest.raises(error):
            reader.read()
        assert tracemalloc.get_traced_memory()[1] < 11_000_000
    finally:
        tracemalloc.stop()


def test_a_row_that_is_larger_than_expected_is_read():
    row = bytes(range(256)) * 2000
    reader = ArrayReader(Arriving(b"*2\r\n$%d\r\n%b\r\n$1\r\nz\r\n" % (len(row), row)), 10, time.monotonic() + 60.0)
    assert [bytes(each) for each in reader.read()] == [row, b"z"]
