"""Every decoder of bytes that come from elsewhere, as a function of bytes, and valid encodings to begin with.

A target may return a value or raise a `DataPlaneError`, and nothing else. What it reads goes on into the code that uses
it, as far as this runs without a server: a decoded command into a ledger, a state into a log, a block of a save
into tensors. Where the encoding has a digest, the target makes the digest, since who forges bytes can do so too.

Not here is what TransferQueue and Ray read: they unpickle (see SECURITY.md).

One long file, since it is one list, and targets use the encodings of those before them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgpack
import msgspec
import numpy as np
import torch
import xxhash
from mutations import JSON_VALUES, Form
from redis.exceptions import RedisError

from dataplane_core import DataPlaneClient, DataPlaneConfig, codec, connect, hosting
from dataplane_core.backends import ExtentClient
from dataplane_core.backends.owner import newest_record
from dataplane_core.codec.cells import KIND_TENSOR, unframe_rows
from dataplane_core.codec.rows import TensorRows, object_column
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import DataPlaneError, FrameError
from dataplane_core.host_memory import Arena
from dataplane_core.ledger import Command, Ledger, LedgerService, commands
from dataplane_core.ledger.state import pack_state, unpack_state
from dataplane_core.log import LoggedLedger
from dataplane_core.saves import SavedFile, pack_rows, unpack_rows
from dataplane_core.spec import CallInfo, ClientInfo, FieldSpec, Question, Ragged, WireFormat
from dataplane_integrations._packed_weights import BYTES, _digest_of, next_version, read_version
from dataplane_observe import Recording
from dataplane_observe._lines import sealed, unsealed
from dataplane_redis import _protocol as redis_protocol
from dataplane_shm._backend import ShmBackend
from dataplane_shm._messages import About
from dataplane_shm._store import Store
from dataplane_testkit import backend_of
from dataplane_tq_simple import _messages as tq
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._messages import Started

__all__ = ["TARGETS", "Target", "resources"]

#: What the targets keep open: clients, and the folder of a save. Close it after the last input.
resources: Final = contextlib.ExitStack()


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        name: Its name.
        seeds: Makes valid encodings, with the encoder that belongs to it.
        read: Decodes, and uses what it decoded.
        form: How an encoding is read as values, to change one of them. None: only bytes are changed.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], object]
    form: Form | None = None


def attempt(call: Callable[[], object]) -> object:
    """What a call returns, or None if it raises an error of the product."""
    try:
        return call()
    except DataPlaneError as error:
        str(error)
        return None


# --- frames, objects, specs -------------------------------------------------------------------------------------------

_BYTES: Final = WireFormat(bytes=True)


def _cells() -> list[bytes]:
    frames: list[Any] = []
    for dtype in sorted(codec.ALL_DTYPES, key=str):
        for shape in ((1,), (1, 0), (1, 5), (1, 3, 2), (1, 2, 0)):
            column = (
                torch.zeros((*shape, 16), dtype=torch.uint8)[..., : dtype.itemsize].contiguous().view(dtype)[..., 0]
            )
            frames += _frames(column)
    frames += _frames(object_column(_items()))
    return [bytes(each) for each in frames]


def _frames(column: Any) -> Any:
    return codec.encode_columns({"x": column}, len(column), _BYTES)[0]["x"]


def _items() -> list[Any]:
    nested = {"k": {"deep": [True, {"a": [1, 2]}]}, "t": torch.arange(3), "z": torch.tensor(1.5)}
    return [None, 7, "text", b"bytes", [1, [2.5, None]], nested, "x" * 5000, [0] * 2000]


def _rows() -> list[bytes]:
    ragged = TensorRows([torch.arange(n) for n in (3, 0, 5)])
    columns = [ragged, torch.arange(3, dtype=torch.int16), object_column(_items()[:5])]
    return [codec.join_row(_frames(column)) for column in columns]


def _read_row(data: bytes) -> object:
    (frames,) = codec.split_rows([data])
    column = _unframed(frames)
    if isinstance(column, torch.Tensor):
        assert (column.values() if column.is_nested else column).nbytes <= len(data)
    return column


def _unframed(frames: Sequence[Any]) -> Any:
    kind, rows = unframe_rows(frames)
    spec = FieldSpec.of_objects()
    if kind == KIND_TENSOR:
        dtype, shape = (rows.values.dtype, rows.values.shape) if isinstance(rows, Ragged) else (rows.dtype, ())
        spec = FieldSpec.of_cells(dtype, tuple(shape))
    return codec.decode_columns({"x": frames}, {"x": spec}, len(frames), _BYTES)["x"]


_FIRST_CELL: Final = bytes(_frames(torch.zeros(1, 5, dtype=torch.int64))[0])


def _read_cell(data: bytes) -> object:
    attempt(lambda: _unframed([_FIRST_CELL, data, data]))
    column = _unframed([data])
    assert not isinstance(column, torch.Tensor) or column.nbytes <= len(data)
    return column


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


def _pack(tree: Any) -> bytes:
    packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return packed


PACKED: Final = Form(_unpack, _pack)


def _read_spec(data: bytes) -> object:
    spec = FieldSpec.from_text(data.decode("utf-8", "surrogateescape"))
    assert FieldSpec.from_text(spec.to_text()) == spec
    return spec.describe()


# --- the ledger: commands and state -----------------------------------------------------------------------------------

_MESSAGES: Final = hosting.Messages()
_X: Final = FieldSpec("tensor", "int64", 1)
_O: Final = FieldSpec.of_objects()


def _claim(task: str, token: str, **others: Any) -> commands.ClaimRequest:
    asked = {"all_or_nothing": False, "lease_s": 5.0, "token": token, "holder": "h"} | others
    return commands.ClaimRequest("p", task, ["x"], 2, **asked)


def _begin(partition: str, ids: list[str], write_id: int, *others: Any, **more: Any) -> commands.BeginPut:
    """A put of ``x``."""
    write = commands.Write(["x"], [8] * len(ids))
    return commands.BeginPut(partition, ids, {"x": _X}, [write], *others, write_id=write_id, ttl_s=9.0, **more)


#: Two fields that are stored apart, the second one once for both rows.
_APART: Final = [commands.Write(["x"], [8, 8]), commands.Write(["o"], [8], [0, 0])]
#: What a ledger holds before a forged command: samples of two writes, a lease, an acked group, a begun put, garbage.
_BEFORE: Final[Sequence[Command[Any]]] = (
    commands.RegisterRequest("p", ["x", "o"], 6, ["t", "u"], 2, {"e": ["a"]}, "epoch"),
    _begin("p", ["q0_g0", "q0_g1"], 100, [{"n": 1}, {"n": 2, "s": "a"}]),
    commands.CommitPut(100),
    commands.BeginPut("p", ["q1_g0", "q1_g1"], {"x": _X, "o": _O}, _APART, write_id=200, ttl_s=9.0),
    commands.CommitPut(200),
    _claim("t", "k"),
    _claim("t", "l", dp_rank=0, dp_size=1, sampler="balanced"),
    commands.AckRequest("p", "t", ["q1_g0", "q1_g1"], ["l", "l"]),
    _begin("p", ["q2_g0", "q2_g1"], 300, ticket="w"),
    commands.RegisterRequest("d", ["x"], None, ["t"], None, {}, "other"),
    _begin("d", ["a"], 400),
    commands.CommitPut(400),
    commands.ClearRequest("d", ["a"]),
)
#: Further valid commands. With those above, each kind is here.
_THEN: Final[Sequence[Command[Any]]] = (
    commands.RegisterRequest("p", ["x", "y"], None, ["v"], 2, {}, "later", if_exists="keep"),
    commands.DescribeRequest("p"),
    commands.WaitForRoom("w", 8, wait_s=1.0),
    commands.CommitPut(300),
    commands.AbortPut(300),
    commands.PutTags("p", ["q0_g0", "q4_g0"], [{"n": 5}, {"b": True, "f": 0.5, "none": None}]),
    commands.Locate("p", ["q0_g0", "q1_g1"], ["x"]),
    commands.ListRequest("p", {"n": (">=", 1)}, ["q0_g0", "q1_g1"]),
    commands.ListPartitionsRequest(),
    commands.InspectRequest("p"),
    commands.FieldsRequest("p", ["q0_g0"]),
    commands.ExportRequest("p"),
    commands.SetCursorRequest("p", "u", ["q0_g0", "q0_g1"], create=True),
    _claim("u", "m", tag_filter={"n": ("in", [1, 2])}, all_or_nothing=True, explain=True),
    _claim("u", "m", lease_s=None, sampler="freshest", dp_rank=1, dp_size=2, batch_index=3, batch_epoch="epoch"),
    commands.AckRequest("p", "t", ["q0_g0", "q0_g1"], ["k", "k"]),
    commands.NackRequest("p", "t", ["q0_g0", "q0_g1"], ["k", "k"]),
    commands.RenewRequest("p", "t", ["q0_g0", "q0_g1"], ["k", "k"], 5.0),
    commands.ConsumptionRequest("p", ["t"]),
    commands.ClearRequest("p", ["q0_g0"]),
    commands.ClearRequest("p", None),
    commands.Collected([(400, 0)]),
    commands.AnnounceRequest(ClientInfo(client_id="c", host="h", pid=1, role="r", open_s=0.0), 9.0),
    commands.InspectRequest("p", [Question(task_name="t", required_fields=["x"], tag_filter={"v": (">=", 7)})]),
    commands.ListClientsRequest(),
)


@functools.cache
def _state() -> bytes:
    """The state of a ledger after `_BEFORE`."""
    ledger = Ledger()
    for command in _BEFORE:
        ledger.apply(command, 0.0)
    return pack_state(ledger)


def _filled() -> Ledger:
    return unpack_state(_state())


def _use(ledger: LedgerService) -> None:
    """What other clients do then. A forged command must not break it for them."""
    for command in (
        *(commands.ListPartitionsRequest(), commands.InspectRequest("p"), commands.ExportRequest("p")),
        *(commands.ListRequest("p", {"n": (">=", 0)}), _claim("u", "n", explain=True), _claim("t", "n")),
        *(commands.Locate("p", ["q1_g0"], ["x", "o"]), commands.ConsumptionRequest("p", ["t", "u"])),
        *(commands.CommitPut(300), _begin("p", ["q5_g0", "q5_g1"], 10**6, [{}, {}])),
    ):
        attempt(functools.partial(ledger.call, command))
    attempt(lambda: ledger.call(commands.CommitPut(10**6)))
    pack_state(ledger.ledger)
    for name in ledger.call(commands.ListPartitionsRequest()):
        ledger.call(commands.ClearRequest(name, None))
    assert ledger.ledger.held_bytes >= 0


def _messages() -> list[bytes]:
    return [_MESSAGES.encode_request(each)[4:] for each in (*_BEFORE, *_THEN)]


def _read_command(data: bytes) -> None:
    """A forged command, and then those of other clients."""
    command = _MESSAGES.decode_request(data)
    if not isinstance(command, Command):
        return
    service = LedgerService(ledger=_filled(), clock=lambda: 1.0)
    attempt(lambda: service.call(command))
    _use(service)


class _Log:
    """A log that holds a state and records."""

    def __init__(self, state: bytes, records: Sequence[bytes]) -> None:
        self.state, self.records = state, [(0.0, each) for each in records]
        self.make_state: Callable[[], bytes] = bytes

    def now(self) -> float:
        return 1.0

    def begin(self) -> None:
        self.make_state()

    def append(self, record: bytes, at: float, **options: Any) -> None:
        pass

    def shorten_if_long(self) -> None:
        pass


def _read_log(data: bytes) -> None:
    """A forged record of a log after good ones."""
    ledger = LoggedLedger(_Log(b"", [*_messages()[: len(_BEFORE)], data]))
    for command in (commands.ListPartitionsRequest(), _claim("u", "n"), commands.ClearRequest("p", None)):
        attempt(functools.partial(ledger.call, command))


def _read_state(data: bytes) -> None:
    """A forged state of a log."""
    ledger = LoggedLedger(_Log(data, []))
    for command in (commands.InspectRequest("p"), _claim("u", "n"), commands.ClearRequest("p", None)):
        attempt(functools.partial(ledger.call, command))


def _states() -> list[bytes]:
    logs = [_Log(b"", _messages()[:count]) for count in (len(_BEFORE), 3)]
    for log in logs:
        LoggedLedger(log)
    return [log.make_state() for log in logs]


class _Engine:
    """An engine whose log has one record."""

    def __init__(self, record: bytes) -> None:
        self.record = record

    def append(self, number: int, record: bytes, deadline: float) -> bool:
        return False

    def read_log(self, first: int | None, deadline: float) -> list[tuple[int, bytes]]:
        return [(1, self.record)]

    def trim(self, before: int, deadline: float) -> None:
        pass


def _log_records() -> list[bytes]:
    place = ("127.0.0.1", 1, b"token", "")
    return [_pack([1, "owner", place, 3, 1.0, [[1.0, b"record"]]]), _pack([1, "owner", None, 3, 1.0, [], b"state"])]


# --- saves ------------------------------------------------------------------------------------------------------------


def _blocks() -> list[bytes]:
    columns = {
        "x": torch.arange(6).view(3, 2),
        "r": torch.nested.nested_tensor([torch.arange(n) for n in (3, 0, 5)], layout=torch.jagged),
        "s": torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16),
        "big": torch.ones(1, 40_000).expand(3, 40_000),
    }
    head = {"sample_ids": ["a", "b", "c"], "created": ["a"], "tags": [{"n": 1}], "consumed": {"t": ["a"]}}
    return [
        pack_rows({name: columns[name] for name in "xrs"}, 3, head),
        pack_rows(columns, 3, head),
        pack_rows({"o": object_column(_items()[1:4])}, 3, head),
        pack_rows({}, 3, head),
    ]


def _folder() -> Path:
    return Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="dpfuzz")))


@functools.cache
def _saved() -> tuple[Path, bytes, bytes]:
    """A save, its first line with the blocks, and its body."""
    folder = _folder()
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], 4, ["t"], grpo_group_size=2)
        client.put_samples(["q0_g0", "q0_g1"], "p", {"x": torch.arange(2)}, tags=[{"n": 1}, {}])
        client.put_samples(["q1_g0"], "p", {"x": torch.arange(1)})
        client.clear_samples(["q1_g0"], "p")
        client.claim_meta("p", "t", ["x"], 2)
        client.register_partition("d", ["x"], None, ["t"])
        client.save(folder, metadata={"step": 3})
    path = folder / "dataplane-partitions.save"
    whole = path.read_bytes()
    start = len(whole) - 24 - struct.unpack("<Q", whole[-24:-16])[0]
    return path, whole[:start], whole[start:-24]


@functools.cache
def _noop() -> DataPlaneClient:
    return resources.enter_context(connect({"backend": "noop", "announce_s": None}))


def _whole_save(body: bytes) -> bytes:
    _, begin, _ = _saved()
    digest = xxhash.xxh3_128_digest(begin.partition(b"\n")[0] + b"\n" + body)
    return begin + body + struct.pack("<Q", len(body)) + digest


def _read_save(data: bytes) -> object:
    path, *_ = _saved()
    path.write_bytes(_whole_save(data))
    client = _noop()
    try:
        metadata = client.load(path.parent)
    except DataPlaneError:
        assert client.list_partitions() == [], "something was loaded before the refusal"
        raise
    finally:
        for name in client.list_partitions():
            client.clear_samples(None, name)
    assert isinstance(metadata, dict), "it is what the caller of save gave"
    return metadata


def _read_save_file(data: bytes) -> object:
    path, *_ = _saved()
    path.write_bytes(data)
    with SavedFile(path.parent, "dataplane-partitions") as saved:
        return list(saved.blocks())


@functools.cache
def _recorded() -> tuple[Path, list[bytes]]:
    """The file of a recording of one client, and the lines that were written to it."""
    folder = _folder() / "recording"
    recorder = {"recorder": {"folder": str(folder), "payload": "all"}}
    with connect({"backend": "noop", "middleware": [recorder]}) as client:
        client.register_partition("p", ["x", "y"], 2, ["t"], enums={"z": ["a"]})
        client.put_samples(["a", "b"], "p", {"x": torch.ones(2, 3), "y": ["u", {"v": 1}]}, tags=[{"k": 1}, {}])
        client.ack(client.claim_meta("p", "t", ["x"], 2, lease_s=60))
        client.mark_step(1, loss=0.5)
        client.clear_samples(None, "p")
    (path,) = folder.glob("*.jsonl")
    return path, [text for text in map(unsealed, path.read_bytes().splitlines()) if text is not None]


def _read_recording(data: bytes) -> None:
    """Reads a recording with another first line, or another second one."""
    path, lines = _recorded()
    begin = data if b'"format"' in data else lines[0]
    path.write_bytes(b"\n".join((sealed(begin), sealed(data), b"")))
    recording = Recording(path.parent)
    for record in recording.records():
        for name, text in record.specs.items():
            FieldSpec.from_text(text)
            record.digests_of(name)
        if record.block is not None:
            recording.rows(record)


JSON: Final = Form(lambda data: json.loads(data), lambda tree: json.dumps(tree).encode(), JSON_VALUES)

# --- shm_store --------------------------------------------------------------------------------------------------------

_ARENA_BYTES: Final = 1 << 16


@functools.cache
def _arena() -> Arena:
    return Arena.create(_ARENA_BYTES)


def _layout(num_rows: int) -> hosting.extents.Layout:
    layout = hosting.extents.Layout([])
    layout.add_dense(num_rows, 8, 1)
    return layout


def _ragged_layout(num_rows: int) -> hosting.extents.Layout:
    layout = hosting.extents.Layout([])
    layout.add_ragged(num_rows, 5, 1, codec.DTYPE_CODES[torch.uint8])
    return layout


_STORE: Final = Store.messages


def _store_requests() -> list[bytes]:
    wanted = [hosting.extents.Wanted(1000, _layout(2), 2), hosting.extents.Wanted(1003, _ragged_layout(2), 2)]
    made: list[Any] = [
        hosting.Allocate(wanted),
        hosting.Allocate(wanted, data=[bytes(each.layout.size_bytes) for each in wanted]),
        hosting.extent_host.Written(1000, [bytes(16)]),
        hosting.extent_host.Fill(1000),
        hosting.extent_host.Find([(400, [0]), (1000, [1, 0])], 7),
        hosting.extent_host.Fetch([(1000, [0], [1, 0])]),
        hosting.Drop([(1000, 0), (9, 5)]),
        hosting.Memory(),
        hosting.messages.Release([7]),
        _claim("u", "m"),
        hosting.messages.StopWaiting("m"),
        commands.CommitPut(1000),
        hosting.messages.Together(
            [_STORE.encode_request(each)[4:] for each in (hosting.extent_host.Written(1000), commands.CommitPut(1000))]
        ),
        *(_BEFORE[1], _BEFORE[3]),
        *_THEN,
    ]
    return [_STORE.encode_request(each)[4:] for each in made]


def _read_store_request(data: bytes) -> None:
    """A forged request to the process of a ledger and its extents, in the middle of a put of the same client, and then
    those of another client."""
    request = _STORE.decode_request(data)
    store = Store(hosting.ExtentService(_arena()), LedgerService(capacity_bytes=_ARENA_BYTES))
    other, forger = store.begin_session(), store.begin_session()
    store.answer(commands.RegisterRequest("d", ["x"], None, ["t"], None, {}, "other"), other)
    store.answer(_begin("d", ["a"], 400), other)
    store.answer(hosting.Allocate([hosting.extents.Wanted(400, _layout(1), 1)], data=[b"12345678"]), other)
    store.answer(commands.CommitPut(400), other)
    for command in _BEFORE[:5]:
        if isinstance(command, commands.CommitPut):
            store.answer(hosting.extent_host.Written(command.write_id), forger)
        store.answer(command, forger)
        if isinstance(command, commands.BeginPut):
            rows = ((key, len(each.row_bytes)) for key, each in command.by_id(command.write_id or 0).items())
            wanted = [hosting.extents.Wanted(key, _layout(count), count) for key, count in rows]
            store.answer(hosting.Allocate(wanted), forger)
    store.answer(_begin("d", ["b", "c"], 1000), forger)
    store.answer(hosting.Allocate([hosting.extents.Wanted(1000, _layout(2), 2)]), forger)
    attempt(lambda: store.answer(request, forger))
    attempt(lambda: store.answer(hosting.extent_host.Written(1000), forger))
    places: Any = attempt(lambda: store.answer(hosting.extent_host.Find([(400, [0])], 9), other))
    if places:
        offset = places[0].offset
        assert _arena().bytes[offset : offset + 8].tobytes() == b"12345678", "a client's request changed others' bytes"
    store.end_session(forger)
    attempt(lambda: store.answer(commands.ClearRequest("p", None), other))
    store.answer(hosting.Memory(), other)


def _places() -> list[hosting.extents.Place]:
    return [hosting.extents.Place(0, _layout(2), 2), hosting.extents.Place(4096, _ragged_layout(2), 2, [1, 0])]


def _store_replies() -> list[bytes]:
    service = LedgerService(ledger=_filled(), clock=lambda: 0.0)
    replies = [(hosting.extent_host.Find, _places()), (hosting.Memory, (1, 2, 3, 4, 5, 6)), (hosting.Allocate, [0, 64])]
    made = [(_KINDS.index(kind), _STORE.encode_reply(reply)[4:]) for kind, reply in replies]
    for command in (*_BEFORE, *_THEN):
        try:
            reply = _STORE.encode_reply(service.call(command))[4:]
        except Exception as error:
            reply = _STORE.encode_error(error)[4:]
        made.append((_KINDS.index(type(command)), reply))
    return [bytes([number]) + reply for number, reply in made]


def _read_store_reply(data: bytes) -> object:
    request: Any = _ASKED[data[0] % len(_ASKED)] if data else hosting.Memory()
    attempt(lambda: hosting.decode_about(hosting.messages.decode_as(data[1:], hosting.messages.Welcome), About))
    return _STORE.decode_reply(request, data[1:])


#: One of each request.
_ASKED: Final = (
    *(hosting.Allocate([]), hosting.extent_host.Written(1), hosting.extent_host.Find([], 1)),
    *(hosting.extent_host.Fetch([]), hosting.Memory()),
    *{type(command): command for command in (*_BEFORE, *_THEN)}.values(),
)
_KINDS: Final = tuple(map(type, _ASKED))


class _ToldSession:
    """A session with a ledger's process that says where cells lie as it is told."""

    welcome = hosting.messages.Welcome(0, 1, about=msgspec.Raw(msgspec.msgpack.encode(hosting.AboutExtents(0, False))))

    def __init__(self) -> None:
        self.reply = b""
        self.descriptors = [os.dup(_arena().fd)]

    def call(self, what: str, deadline: float, request: Any, wake: Any = None) -> Any:
        if isinstance(request, commands.Locate):
            part = commands.Part(100, ("x",), (0,), [0, 1], [0, 1])
            ragged = commands.Part(200, ("y",), (0,), [0, 1], [1, 0])
            return commands.Located([part, ragged], {"x": _X, "y": _X})
        return _STORE.decode_reply(request, self.reply)

    def new_pin(self) -> Any:
        return SimpleNamespace(number=1, release=lambda: None)


class _ToldShm(ShmBackend):
    """The backend, with a session that gives the reply that it is told."""

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        session: Any = _ToldSession()
        self._extents = ExtentClient(session)

    def stop(self) -> None:
        pass


@functools.cache
def _shm_client() -> tuple[DataPlaneClient, _ToldSession]:
    client = resources.enter_context(
        connect_backend(_ToldShm, DataPlaneConfig(backend="shm_store", announce_s=None), bootstrap=True)
    )
    session: Any = backend_of(client)._extents.session
    return client, session


def _read_store_payload(data: bytes) -> object:
    """A forged reply that says where cells are, and the read that follows."""
    client, session = _shm_client()
    session.reply = data
    _arena().bytes[4096 : 4096 + 24].view("int64")[:] = [0, 2, 5]  # the offsets of the ragged column
    return client.get_samples(["a", "b"], "p", ["x", "y"])


STORE_REQUEST: Final = Form(
    lambda data: [data[0], _unpack(data[1:])], lambda tree: bytes([tree[0] % 256]) + _pack(tree[1])
)
STORE_REPLY: Final = Form(
    lambda data: [data[0], data[1], _unpack(data[2:])],
    lambda tree: bytes([tree[0] % 256, tree[1] % 2]) + _pack(tree[2]),
)
STORE_PAYLOAD: Final = Form(lambda data: _unpack(data[1:]), lambda tree: b"\0" + _pack(tree))

# --- tq_simple --------------------------------------------------------------------------------------------------------


def _tq_requests() -> list[bytes]:
    made: list[Any] = [
        tq.BeginNear(commands.BeginPut("p", ["a"], {"x": _X}, [commands.Write(["x"], [8])], ttl_s=9.0), "n0", [1]),
        tq.ViewUnits(-1),
        tq.UnitRecords(),
        _claim("u", "m"),
    ]
    return [tq.MESSAGES.encode_request(each)[4:] for each in made]


def _read_tq_request(data: bytes) -> None:
    """A forged request to the controller, and then that of another client."""
    request = tq.MESSAGES.decode_request(data)
    host = ControllerHost(LedgerService())
    for each in ("n0", "n1"):
        host.book.started(Started(each, "ip", 1, each))
    client = hosting.Client(1)
    host.answer(_BEFORE[0], client)
    attempt(lambda: host.answer(request, client))
    host.answer(tq.ViewUnits(-1), client)
    host.answer(commands.ListPartitionsRequest(), client)


# --- redis_store ------------------------------------------------------------------------------------------------------


def _resp(value: Any) -> bytes:
    """A value as Redis sends it."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, (list, tuple)):
        return b"*%d\r\n" % len(value) + b"".join(map(_resp, value))
    if isinstance(value, int):
        return b":%d\r\n" % value
    data = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%b\r\n" % (len(data), data)


class _Socket:
    """A socket on which some bytes arrive, a few at a time, before it is closed."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def settimeout(self, timeout_s: float) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        size = min(len(buffer), len(self._data), 700)
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


def _arrays() -> list[bytes]:
    return [_resp([b"a" * 3, b"", None]) + _resp([b"b" * 3000]), b"-ERR no\r\n", _resp([]) + _resp([b"c"] * 20)]


def _read_arrays(data: bytes) -> None:
    reader = redis_protocol.ArrayReader(_Socket(data), 100, time.monotonic() + 60.0)
    try:
        for _ in range(4):
            reader.read()
    except (RedisError, OSError):  # `Link` makes errors of the product of these
        pass


# --- weights ----------------------------------------------------------------------------------------------------------


def _versions_of_weights() -> list[Any]:
    """The versions 0 to 2, each with its cells: an anchor and two deltas, with chunks of most kinds."""
    found, base = [], None
    for number in range(3):
        many, few = torch.arange(600, dtype=torch.int32) * (1 + number), torch.zeros(3000, dtype=torch.bfloat16)
        few[: 40 * number : 7] = 1.0
        weights = {"many": many, "few": few, "tied": few, "step": torch.tensor(number), "none": torch.ones(9, 2)}
        base, cells = next_version(base, number, {**weights, "extra": {"a": [1]}})
        found.append((number, cells | {BYTES: cells[BYTES].copy()}))
    return found


def _weights() -> list[bytes]:
    anchor, _, delta = _versions_of_weights()
    return [codec.encode_item(cells | {BYTES: cells[BYTES].tobytes()}) for _, cells in (anchor, delta)]


def _read_weights(data: bytes) -> object:
    cells = codec.decode_item(data)
    if not isinstance(cells, dict) or not isinstance(cells.get(BYTES), bytes):
        raise FrameError("not a row")
    base = None
    for number, earlier in _versions_of_weights()[:2]:
        base = read_version(base, number, earlier)
    version = read_version(base, 2, cells | {BYTES: np.frombuffer(cells[BYTES], dtype=np.uint8)})
    return replace(version, rows={2: _digest_of(version.forms, version.data).hex()}).weights()


# --- the list ---------------------------------------------------------------------------------------------------------


def _encoded_items() -> list[bytes]:
    return [codec.encode_item(each) for each in [*_items(), {"info": [CallInfo.__name__], "deep": [[[[[1]]]]]}]]


def _specs() -> list[bytes]:
    made = [FieldSpec("tensor", "bfloat16", 2, (16,)), FieldSpec("tensor", "int64"), _O]
    return [each.to_text().encode() for each in (*made, FieldSpec("tensor", "bool", 3, (2, 3)))]


TARGETS: Final[dict[str, Target]] = {
    each.name: each
    for each in (
        Target("cell", _cells, _read_cell),
        Target("row", _rows, _read_row),
        Target("object", _encoded_items, codec.decode_item, PACKED),
        Target("spec", _specs, _read_spec),
        Target("command", _messages, _read_command, STORE_REQUEST),
        Target("log", _messages, _read_log, STORE_REQUEST),
        Target("state", _states, _read_state, PACKED),
        Target("log of an engine", _log_records, lambda data: newest_record(_Engine(data), math.inf), PACKED),
        Target("save block", _blocks, unpack_rows, PACKED),
        Target(
            "save file", lambda: [_whole_save(_saved()[2]), b'{"format": "x", "version": 1}\n{}\n'], _read_save_file
        ),
        Target("save", lambda: [_saved()[2]], _read_save, JSON),
        Target("recording", lambda: _recorded()[1], _read_recording, JSON),
        Target("store request", _store_requests, _read_store_request, STORE_REQUEST),
        Target("tq request", _tq_requests, _read_tq_request, STORE_REQUEST),
        Target("store reply", _store_replies, _read_store_reply, STORE_REPLY),
        Target("store payload", lambda: [_STORE.encode_reply(_places())[4:]], _read_store_payload, STORE_PAYLOAD),
        Target("weights", _weights, _read_weights, PACKED),
        Target("redis rows", _arrays, _read_arrays),
    )
}
