"""The recorder: what the clients of a run did, in a folder, for `dataplane audit` and the backend ``recording``.

All processes of a run may use one folder. Each client writes segments of its own, one after the other:

    recording.json                  the version of this format, and an id of the run that began the folder
    <client>-000000.jsonl           a line per operation, each sealed by a digest; the first one says who the client is
    <client>-000000.rows            the rows that its lines refer to: blocks of `dataplane_core.saves`
    dropped.jsonl                   which segments were deleted to keep ``max_bytes``

A line has what its operation needs to be understood, or done again: see `Record`. A killed process leaves at most its
last line cut off.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from dataplane_core.codec import cell_digests, decode_columns, take_rows
from dataplane_core.config import SizeBytes
from dataplane_core.digests import fast_hash
from dataplane_core.errors import BackendUnavailableError, DataPlaneError, InvalidTypeError, MissingDataError
from dataplane_core.middleware import EventMiddleware, MiddlewareContext, OperationEvent
from dataplane_core.saves import pack_rows, tensor_rows
from dataplane_core.spec import Claim, ClaimRequest, DescribeRequest, PartitionInfo, PutRequest, new_id
from dataplane_observe._lines import LineFile, is_held
from dataplane_observe.recording import (
    DROPPED,
    FORMAT,
    LINES_SUFFIX,
    MARK,
    ROWS_SUFFIX,
    SEGMENT_NAME,
    VERSION,
    is_followed,
    pack_digests,
    read_mark,
    row_digests,
)

__all__ = ["Recorder", "RecorderConfig"]

_log = logging.getLogger(__name__)
#: A segment has at most this share of ``max_bytes``, within these bounds.
_SEGMENTS: Final = 32
_LEAST_SEGMENT_BYTES: Final = 1 << 16
_MOST_SEGMENT_BYTES: Final = 1 << 28
#: Of so many partitions, and of so many tasks, a recorder keeps a value: see `_is_new`.
_MOST_KNOWN: Final = 1024
#: What a line says of a request, beside what an event has.
_OF_REQUEST: Final[Mapping[str, Sequence[str]]] = {
    "register_partition": (
        *("fields", "num_samples", "consumer_tasks", "grpo_group_size"),
        *("enums", "declared", "if_exists", "rollouts"),
    ),
    "claim": (
        *("required_fields", "batch_size", "tag_filter", "sampler", "holder"),
        *("dp_rank", "dp_size", "batch_index", "lease_s", "max_rows", "max_tokens"),
    ),
}
#: Operations that are recorded. Others look, or are about leases that go on.
_RECORDED: Final = frozenset(
    (
        *("register_partition", "put_samples", "get_samples", "claim", "ack", "nack"),
        *("clear_samples", "set_cursor"),
    )
)


class RecorderConfig(BaseModel):
    """The options of `Recorder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    """Where to record. It is made. All processes of the run may use the same one; a relative one is relative to each
    process's working directory."""
    payload: Literal["none", "digests", "all"] | float = "digests"
    """What of a put is recorded. ``none``: ids, tags and fields. ``digests``: also a digest of each cell. ``all``: also
    the rows. A number above 0 and below 1: digests, and the rows of this share of the samples, the same ones in every
    process."""
    max_bytes: SizeBytes = 10_000_000_000
    """The most that the folder holds. Beyond it the oldest segments are deleted. The one that a client
    writes stays, so the folder may hold a segment per client more."""

    @field_validator("payload")
    @classmethod
    def _is_a_share(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError(
                f"payload is {value!r}. Expected 'none', 'digests', 'all', or a number above 0 and below 1"
            )
        return value

    @field_validator("max_bytes")
    @classmethod
    def _is_room(cls, value: int) -> int:
        if value < _LEAST_SEGMENT_BYTES:
            raise ValueError(f"max_bytes is {value}. Expected {_LEAST_SEGMENT_BYTES} or more")
        return value


class Recorder(EventMiddleware):
    """Records what one client does. List it before `wire_guard`, whose checksums are not recorded.

    Every put, read, claim, ack, nack, clear and registration is recorded when it has ended, also one that failed; a
    claim that waits once, when it ends. Of claims for the same that get nothing one after the other, the first one is.
    A full disk ends no operation: what could not be recorded is counted, and the next line says so. With
    ``open_partitions``, each put and claim asks the store once more, for the registration that it met.

    Args:
        options: As `RecorderConfig`.

    Example:
        >>> connect({"backend": "shm_store", "middleware": [{"recorder": {"folder": "runs/7/recording"}}]})
    """

    Config: ClassVar[type[BaseModel]] = RecorderConfig
    config: RecorderConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lock = threading.RLock()  # a signal handler may use the client in the middle of a line
        self._segment: _Segment | None = None
        self._segment_bytes = max(_LEAST_SEGMENT_BYTES, min(_MOST_SEGMENT_BYTES, self.config.max_bytes // _SEGMENTS))
        self._contents: dict[int, tuple[dict[str, Any], bytes]] = {}  # of puts under way
        self._num_lost = 0
        self._failed = False
        # partition and task -> what the last claim asked for, if it got nothing
        self._empty: dict[tuple[str, str], tuple[list[str], Any]] = {}
        self._opened: dict[str, PartitionInfo] = {}  # partition -> the registration that was recorded last

    def start(self, context: MiddlewareContext) -> None:
        """Begins a segment.

        Raises:
            UnsupportedOperationError: The folder has a recording of another version.
            BackendUnavailableError: It cannot be written.
        """
        super().start(context)
        folder = self.config.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = _begun(folder)
            about = {
                "run": run,
                "client": new_id()[:16],
                "role": context.role,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "backend": context.backend,
                "payload": self.config.payload,
            }
            self._segment = _Segment(folder, about, 0)
        except OSError as error:
            raise BackendUnavailableError(
                f"the recorder cannot write to '{folder}': {error.strerror or error}.",
                hint="Name a folder in which every process of the run may write.",
            ) from error

    def stop(self) -> None:
        """Closes the segment, with a last line that says so."""
        with self._lock:
            segment, self._segment = self._segment, None
            if segment is not None:
                with suppress(OSError):  # the disk is still full
                    self._write(segment, {"op": "end"})
                segment.close()

    def note_step(self, step: int, values: Mapping[str, float]) -> None:
        """Records a step."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}  # JSON has no others
        self._append({"op": "step", "step": int(step), "values": finite})

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """Records an operation."""
        if operation not in _RECORDED:
            return (yield)
        if isinstance(request, PutRequest):
            self._contents[id(request)] = self._content(request)  # before inner middleware may change it
        return (yield from super().around(operation, request))

    # --- what a line says ---------------------------------------------------------------------------------------------

    def _content(self, request: PutRequest) -> tuple[dict[str, Any], bytes]:
        """What a line says of the cells of a put, and the block of its rows."""
        names = [name for name in request.columns if not name.startswith("~")]
        more: dict[str, Any] = {} if request.tags is None else {"tags": request.tags}
        if not names:
            return more, b""
        more["specs"] = {name: request.specs[name].to_text() for name in names}
        payload = self.config.payload
        if payload == "none":
            return more, b""
        columns = {name: request.columns[name] for name in names}
        specs, wire, count = {name: request.specs[name] for name in names}, self.context.wire, len(request.sample_ids)
        decoded: dict[str, Any] | None = None
        if wire.bytes or payload != "digests":
            shares = payload in ("all", "digests")
            # what is pickled, this client has pickled: it may only put that with `allow_pickle`
            decoded = decode_columns(columns, specs, count, wire, allow_pickle=True, share_rows=shares)
        if wire.bytes:  # digests of tensors do not depend on how a backend frames them
            assert decoded is not None
            digests, specs = row_digests(decoded, specs, count, allow_pickle=True)
        else:
            digests = {name: cell_digests(columns[name], specs[name], wire) for name in names}
        more["digests"] = {name: pack_digests(column) for name, column in digests.items()}
        if payload == "digests":
            return more, b""
        assert decoded is not None
        kept = [row for row, name in enumerate(request.sample_ids) if payload == "all" or is_followed(name, payload)]
        if not kept:
            return more, b""
        if len(kept) < count:
            decoded = {name: take_rows(column, kept) for name, column in decoded.items()}
        block, left_out = _block(tensor_rows(decoded, specs), [request.sample_ids[row] for row in kept])
        if left_out:
            more["left_out"] = left_out
        return more, block

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Writes the line of an operation that has ended."""
        more, block = self._contents.pop(id(request), ({}, b""))
        failed = isinstance(outcome, BaseException)
        if isinstance(outcome, Claim) and not self._tells(request, outcome):
            return
        line: dict[str, Any] = {
            "op": event.op,
            "partition": event.partition_id,
            "rows": event.n_keys,
            "bytes": event.n_bytes,
            "seconds": round(event.wall_ms / 1e3, 6),
        }
        optional: dict[str, Any] = {
            "task": event.task,
            "fields": [name for name in event.fields if not name.startswith("~")],
            "drops_all": event.drops_all,
            "ids": event.sample_ids,
        }
        if failed:  # a claim that was answered in vain has not: a recording has what the store answered
            optional |= {"status": event.status, "error": event.error}
            more, block = {}, b""
        line |= {name: value for name, value in optional.items() if value}
        asked = {name: getattr(request, name) for name in _OF_REQUEST.get(event.op, ())}
        line |= {name: value for name, value in asked.items() if value is not None}
        if isinstance(outcome, Claim):
            line |= {"tags": outcome.tags, "exhausted": outcome.exhausted}
            if outcome.num_ranks is not None:
                line["num_ranks"] = outcome.num_ranks
            if request.batch_epoch not in (None, outcome.epoch):
                line["batch_index"] = 0  # the first batch of another registration than the client knew
        elif event.op == "register_partition" and not failed:
            line["epoch"] = outcome.epoch
        if not failed and getattr(request, "opens", None) is not None:
            self._record_opened(request)
        self._append(line | more, block)

    def _record_opened(self, request: Any) -> None:
        """Records the registration that a put or a claim may have made: there is no operation of its own for that."""
        assert self.context.describe is not None, "a client has started it"
        partition_id = request.partition_id
        try:
            info = self.context.describe(DescribeRequest(partition_id, deadline=request.deadline))
        except DataPlaneError:  # cleared meanwhile
            return
        if not _is_new(self._opened, partition_id, info):
            return
        line = {"op": "register_partition", "partition": partition_id, "rows": 0, "bytes": 0, "seconds": 0.0}
        known = {name: value for name, value in info.registration().items() if value is not None}
        self._append({**line, **known, "if_exists": "keep", "epoch": info.epoch})

    def _tells(self, request: ClaimRequest, reply: Claim) -> bool:
        """Whether a claim is worth a line. Those that get nothing come often: the first of several alike is."""
        key = request.partition_id, request.task_name
        if reply.answered:
            self._empty.pop(key, None)
            return True
        return _is_new(self._empty, key, (request.required_fields, request.tag_filter))

    def _append(self, line: Mapping[str, Any], block: bytes = b"") -> None:
        with self._lock:
            segment = self._segment
            if segment is None:
                return
            try:
                if segment.size_bytes >= self._segment_bytes:
                    segment = self._segment = segment.next()
                    _drop_oldest(self.config.folder, self.config.max_bytes)
                self._write(segment, line, block)
            except (OSError, ValueError) as error:  # a full disk must not end the run
                if not self._failed:
                    _log.warning("the recorder cannot write to '%s': %s", self.config.folder, error)
                self._failed = True
                self._num_lost += 1

    def _write(self, segment: _Segment, line: Mapping[str, Any], block: bytes = b"") -> None:
        if self._num_lost:
            segment.append({"op": "lost", "lines": self._num_lost})
            self._num_lost = 0
        segment.append(line, block)


class _Segment:
    """The two files of a segment that is written."""

    def __init__(self, folder: Path, about: Mapping[str, Any], number: int) -> None:
        name = f"{about['client']}-{number:06}"
        self._folder, self._about, self._number = folder, about, number
        self._rows_path = folder / (name + ROWS_SUFFIX)
        self._rows: int | None = None
        self._rows_end = 0
        self._lines = LineFile(folder / (name + LINES_SUFFIX))
        self._lines.write({"op": "begin", "format": FORMAT, "version": VERSION, **about, "segment": number})

    @property
    def size_bytes(self) -> int:
        return self._lines.size_bytes + self._rows_end

    def append(self, line: Mapping[str, Any], block: bytes = b"") -> None:
        if block:
            if self._rows is None:
                self._rows = os.open(self._rows_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            start = os.lseek(self._rows, self._rows_end, os.SEEK_SET)  # after a write that failed
            left = memoryview(block)
            while left:
                left = left[os.write(self._rows, left) :]
            self._rows_end = start + len(block)
            line = {**line, "block": [start, len(block), fast_hash(block).hexdigest()]}
        self._lines.write(line)

    def next(self) -> _Segment:
        """The segment after this one, which is closed."""
        following = _Segment(self._folder, self._about, self._number + 1)
        self.close()
        return following

    def close(self) -> None:
        self._lines.close()
        if self._rows is not None:
            os.close(self._rows)
            self._rows = None


def _is_new(last: dict[Any, Any], key: Any, value: Any) -> bool:
    """Keeps the value of a key. Returns whether it differs from the last one kept."""
    if last.get(key) == value:
        return False
    if len(last) >= _MOST_KNOWN:
        last.clear()
    last[key] = value
    return True


def _begun(folder: Path) -> str:
    """The id of the run that began the folder: this one, if there was none."""
    with suppress(MissingDataError):
        return read_mark(folder)
    run = new_id()[:16]
    new = folder / f"{MARK}.{run}"
    try:
        new.write_text(json.dumps({"format": FORMAT, "version": VERSION, "run": run}) + "\n")
        with suppress(FileExistsError):
            os.link(new, folder / MARK)  # unlike a rename, it never replaces that of another process
    finally:
        new.unlink(missing_ok=True)
    return read_mark(folder)


def _block(columns: Mapping[str, Any], sample_ids: Sequence[str]) -> tuple[bytes, list[str]]:
    """A block of rows, and the fields that are left out, since only pickle could encode them."""
    try:
        return pack_rows(columns, len(sample_ids), {"ids": list(sample_ids)}), []
    except InvalidTypeError:
        left_out = []
        for name, column in columns.items():
            try:
                pack_rows({name: column}, len(sample_ids), {})
            except DataPlaneError:
                left_out.append(name)
        kept = {name: column for name, column in columns.items() if name not in left_out}
        return (pack_rows(kept, len(sample_ids), {"ids": list(sample_ids)}) if kept else b""), left_out


def _drop_oldest(folder: Path, max_bytes: int) -> None:
    """Deletes the segments that were written first, until the folder holds ``max_bytes``. Notes which."""
    files: dict[str, os.stat_result] = {}
    for path in folder.iterdir():
        if SEGMENT_NAME.fullmatch(path.stem):
            with suppress(FileNotFoundError):  # another process has deleted it
                files[path.name] = path.stat()
    total = sum(found.st_size for found in files.values())
    names = sorted(name.removesuffix(LINES_SUFFIX) for name in files if name.endswith(LINES_SUFFIX))
    for name in sorted(names, key=lambda name: files[name + LINES_SUFFIX].st_mtime):
        if total <= max_bytes:
            break
        if is_held(folder / (name + LINES_SUFFIX)):
            continue
        size = sum(files[name + suffix].st_size for suffix in (LINES_SUFFIX, ROWS_SUFFIX) if name + suffix in files)
        until = round(files[name + LINES_SUFFIX].st_mtime, 6)
        with closing(LineFile(folder / DROPPED, shared=True)) as notes:
            notes.write({"op": "dropped", "segment": name, "bytes": size, "until": until})
        for suffix in (LINES_SUFFIX, ROWS_SUFFIX):
            (folder / (name + suffix)).unlink(missing_ok=True)
        total -= size
        _log.warning("the recording in '%s' is longer than its max_bytes: segment %s was deleted", folder, name)
