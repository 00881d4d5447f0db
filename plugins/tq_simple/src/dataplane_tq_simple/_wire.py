"""The TransferQueue messages that the engine uses: rows to and from the storage units.

A small row is sent and stored as a msgpack binary, the cheapest form of TransferQueue's serialisation: all rows of a
message share one frame, no row costs Python time of its own, and the unit keeps a separate ``bytes`` object for each. A
tensor or array costs a frame, a pickled header and some 15 microseconds per row on each side. For a large row that is
less than the copy into the shared frame, so a large row is sent as an array: the sender does not copy it, and the unit
keeps the frame in which it arrived. In both forms, deleting a row frees its memory.

Importing this module imports TransferQueue.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import BackendError, CapacityExceededError, InvalidRequestError
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._privates import Message, RequestType, key_not_found

#: A message of ``zmq``: one buffer per frame.
Frames = list[Any]

#: The most bytes that a msgpack binary can hold.
MAX_ROW_BYTES = 2**32 - 1

#: Rows of at least this size are sent in frames of their own.
LARGE_ROW_BYTES = 256 * 1024

#: Key of a request to a unit: the life of the unit that it is meant for. A unit that was started again refuses it.
LIFE_KEY = "~life"
#: Marks that refusal.
OTHER_LIFE = "DataplaneOtherLife"

#: The TransferQueue field that holds the rows.
_COLUMN = "dataplane"

_SENDER = "dataplane"


class Chunk(NamedTuple):
    """The rows of one request to one unit.

    Attributes:
        unit: The number of the life of the unit.
        positions: Positions of the rows in the batch, ascending.
        handles: Their handles.
    """

    unit: int
    positions: list[int]
    handles: list[int]


class _GetBody(msgspec.Struct):
    data: dict[str, list[memoryview | msgspec.msgpack.Ext]] | None = None
    message: str | None = None


class _GetReply(msgspec.Struct):
    request_type: str
    body: _GetBody


# Rows are decoded as views into the received frame: no copy on this side.
_get_reply_decoder = msgspec.msgpack.Decoder(_GetReply)


def _request(kind: Any, receiver: str, body: dict[str, Any]) -> Frames:
    frames: Frames = Message.create(request_type=kind, sender_id=_SENDER, receiver_id=receiver, body=body).serialize()
    return frames


def _refused(receiver: str, what: str, reply: Any) -> BackendError | UnitsGoneError:
    message = reply.body.get("message", reply.request_type) if isinstance(reply.body, dict) else reply.request_type
    if OTHER_LIFE in str(message):
        return UnitsGoneError(f"{receiver} was started again, and refused {what}.")
    return BackendError(f"{receiver} refused {what}: {message}")


# --- the storage units -----------------------------------------------------------------------------------------------


def plan_by_bytes(
    units: npt.NDArray[np.int64], handles: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], chunk_bytes: int
) -> list[list[Chunk]]:
    """Splits a batch into requests of about ``chunk_bytes``, for each unit.

    Args:
        units: The unit of each row: the number of its life.
        handles: The row handles.
        sizes: Size of each row, in bytes.
        chunk_bytes: Target size of a chunk, which exceeds it by less than one row.

    Returns:
        For each unit that has rows, its chunks in order.
    """
    plans = []
    several = len(units) > 0 and bool((units != units[0]).any())
    for unit in np.unique(units).tolist() if several else units[:1].tolist():
        positions = np.flatnonzero(units == unit) if several else np.arange(len(handles))
        starts = np.cumsum(sizes[positions]) - sizes[positions]
        plans.append(_cut(unit, handles, positions, starts // chunk_bytes))
    return plans


def plan_by_rows(units: npt.NDArray[np.int64], handles: npt.NDArray[np.int64], chunk_rows: int) -> list[list[Chunk]]:
    """Splits a batch into requests of at most ``chunk_rows`` rows, for each unit; see `plan_by_bytes`."""
    return plan_by_bytes(units, handles, np.ones(len(handles), dtype=np.int64), chunk_rows)


def _cut(
    unit: int, handles: npt.NDArray[np.int64], positions: npt.NDArray[np.intp], bins: npt.NDArray[np.int64]
) -> list[Chunk]:
    """One chunk per run of equal ``bins``."""
    cuts = np.flatnonzero(np.diff(bins)) + 1
    return [Chunk(unit, part.tolist(), handles[part].tolist()) for part in np.split(positions, cuts)]


def put_request(receiver: str, life: str, chunk: Chunk, rows: Sequence[memoryview]) -> Frames:
    """A put of ``rows``, one per handle of ``chunk``. Large rows are not copied: do not change them before the reply.

    Raises:
        InvalidRequestError: A row is larger than `MAX_ROW_BYTES`.
    """
    for position, row in zip(chunk.positions, rows, strict=True):
        if row.nbytes > MAX_ROW_BYTES:
            raise InvalidRequestError(f"row {position} has {row.nbytes} bytes. Expected at most {MAX_ROW_BYTES}.")
    cells = [row if row.nbytes < LARGE_ROW_BYTES else np.frombuffer(row, dtype=np.uint8) for row in rows]
    body = {"global_indexes": chunk.handles, "data": {_COLUMN: cells}, "data_parser": None, LIFE_KEY: life}
    return _request(RequestType.PUT_DATA, receiver, body)


def check_put_reply(receiver: str, frames: Frames, chunk: Chunk) -> None:
    """Checks that the unit stored the chunk.

    Raises:
        CapacityExceededError: The unit holds as many rows as its ``storage_unit_size`` allows.
        UnitsGoneError: The unit was started again, and holds none of the rows.
        BackendError: Any other refusal.
    """
    reply = Message.deserialize(frames)
    if reply.request_type == RequestType.PUT_DATA_RESPONSE:
        return
    error = _refused(receiver, f"to store {len(chunk.handles)} rows", reply)
    if "capacity exceeded" in error.message:
        raise CapacityExceededError(error.message, hint="Raise storage_unit_size or num_storage_units.")
    raise error


def get_request(receiver: str, life: str, handles: list[int]) -> Frames:
    """A read of the rows ``handles``."""
    body = {"global_indexes": handles, "fields": [_COLUMN], LIFE_KEY: life}
    return _request(RequestType.GET_DATA, receiver, body)


def read_get_reply(receiver: str, frames: Frames, chunk: Chunk) -> list[memoryview]:
    """The rows of a reply, as views into its frames.

    Raises:
        RefsGoneError: The unit does not hold one of the rows. With their handles, if it was started again.
        BackendError: Any other refusal, or a reply that cannot be read.
    """
    try:
        reply = _get_reply_decoder.decode(memoryview(frames[0]))
    except msgspec.MsgspecError as error:
        raise BackendError(f"{receiver} sent a reply that cannot be read: {error}") from error
    if reply.body.data is not None:
        rows = reply.body.data.get(_COLUMN, [])
        if len(rows) != len(chunk.handles):
            raise BackendError(f"{receiver} returned {len(rows)} rows of {len(chunk.handles)} asked for.")
        return [row if isinstance(row, memoryview) else _large_row(row, frames) for row in rows]
    message = reply.body.message or reply.request_type
    # A unit that never stored a row reports an unknown field. It means the same: the rows do not exist.
    if key_not_found in message or f"field '{_COLUMN}' not found" in message:
        raise RefsGoneError(f"{receiver} lacks some of the {len(chunk.handles)} rows asked for: {message}")
    if OTHER_LIFE in message:
        raise RefsGoneError(f"{receiver} was started again.", handles=chunk.handles)
    raise BackendError(f"{receiver} refused to return {len(chunk.handles)} rows: {message}")


def _large_row(header: msgspec.msgpack.Ext, frames: Frames) -> memoryview:
    _, _, index = pickle.loads(header.data)  # (dtype, shape, frame): always a 1-D uint8 array
    return memoryview(frames[index])


def delete_request(receiver: str, life: str, handles: list[int]) -> Frames:
    """A request to delete the rows ``handles``. The unit ignores rows that do not exist."""
    return _request(RequestType.CLEAR_DATA, receiver, {"global_indexes": handles, LIFE_KEY: life})


def check_delete_reply(receiver: str, frames: Frames, chunk: Chunk) -> None:
    """Raises `BackendError` unless the unit deleted the chunk; `UnitsGoneError` if it was started again."""
    reply = Message.deserialize(frames)
    if reply.request_type != RequestType.CLEAR_DATA_RESPONSE:
        raise _refused(receiver, f"to delete {len(chunk.handles)} rows", reply)
