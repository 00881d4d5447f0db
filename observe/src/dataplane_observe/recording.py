"""Reads what `Recorder` wrote: the operations of all clients of a run in the order of their ends, and their rows."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from dataplane_core.codec import cell_digests, encode_columns
from dataplane_core.digests import fast_digest, fast_hash
from dataplane_core.errors import CorruptDataError, DataPlaneError, MissingDataError, SaveError
from dataplane_core.saves import read_head, tensor_rows, unpack_rows
from dataplane_core.spec import FieldSpec, WireFormat
from dataplane_observe._lines import is_held, texts_of, unsealed

FORMAT: Final = "dataplane-recording"
VERSION: Final = 3
MARK: Final = "recording.json"
DROPPED: Final = "dropped.jsonl"
LINES_SUFFIX: Final = ".jsonl"
ROWS_SUFFIX: Final = ".rows"
#: The name of a segment: its client, and its number.
SEGMENT_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9]{6,9}", re.ASCII)
#: The form of the columns whose cells' digests are recorded, on a backend whose own form is bytes.
PLAIN: Final = WireFormat(ragged="jagged", objects="native", shared_rows=True)


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """A client of the run.

    Attributes:
        client: Its id in the recording.
        role: The config's ``role``, or the name of its program.
        host: The name of its host.
        pid: Its process.
        backend: Entry-point name of its backend.
        payload: What it recorded of puts, see `RecorderConfig.payload`.
        run: The id of the run that began the folder.
        at: When it began, in seconds since 1970.
    """

    client: str
    role: str
    host: str
    pid: int
    backend: str
    payload: Literal["none", "digests", "all"] | float
    run: str
    at: float

    def __str__(self) -> str:
        return f"{self.role} (process {self.pid} on {self.host})"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An operation or a step that has ended, lines that were lost, or the end of a client that was closed.

    Attributes:
        at: Its end, in seconds since 1970, on the clock of its host.
        op: Name of the hook; ``step``; ``lost``; or ``end``.
        partition: The partition.
        rows: Samples named by the request, or handed out or dropped by the reply.
        bytes: Payload bytes put or read.
        seconds: How long it took, inner middleware included.
        status: ``ok``, or how it failed: ``error``, ``timeout``.
        error: The name of the error's class, or empty.
        task: The consumer task of a claim, an ack and the like.
        fields: Of a put, a read or a registration.
        ids: The samples. Empty where a whole partition is cleared.
        drops_all: Whether it dropped what the partition held: a clear of all, or a registration that replaces another.
        tags: A dict per sample: those that a put merged in; or those that a claim replied. None: a put of no tags.
        specs: Field -> the text of its `FieldSpec`. Of a put.
        digests: Field -> a digest of each cell as 16 hex digits, end to end; see `digests_of`. Of a put.
        block: Where the rows are that the recording has of a put; see `Recording.rows`.
        left_out: Fields whose cells are not recorded, since only pickle could encode them.
        required_fields: Of a claim, as the next ones: see `ClaimRequest` and `Claim`.
        epoch: Of a registration: the id of the registration that is now current.
        num_samples: Of a registration, as the next ones: see `RegisterRequest`.
        step: The number of a step that has ended.
        values: What is known of that step.
        lines: Of ``lost``: how many lines could not be written before this one.
        client: Who did it.
        segment: The name of its segment.
        line: Its line there, from 1.
    """

    at: float
    op: str
    partition: str = ""
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    status: Literal["ok", "error", "timeout"] = "ok"
    error: str = ""
    task: str = ""
    fields: list[str] = []  # msgspec copies it
    ids: list[str] = []
    drops_all: bool = False
    tags: list[dict[str, Any]] | None = None
    specs: dict[str, str] = {}
    digests: dict[str, str] = {}
    block: tuple[int, int, str] | None = None
    left_out: list[str] = []
    required_fields: list[str] = []
    batch_size: int = 0
    tag_filter: dict[str, tuple[str, Any]] | None = None
    sampler: str = ""
    holder: str = ""
    dp_rank: int | None = None
    dp_size: int | None = None
    batch_index: int = 0
    lease_s: float | None = None
    max_rows: int | None = None
    max_tokens: int | None = None
    exhausted: bool = False
    num_ranks: int | None = None
    epoch: str = ""
    num_samples: int | None = None
    consumer_tasks: list[str] = []
    grpo_group_size: int | None = None
    rollouts: bool = False
    enums: dict[str, list[str]] = {}
    if_exists: Literal["", "replace", "keep"] = ""
    step: int | None = None
    values: dict[str, float] = {}
    lines: int = 0
    client: Writer
    segment: str
    line: int

    def digests_of(self, field: str) -> np.ndarray[Any, np.dtype[np.uint64]] | None:
        """The digest of each cell of a field, (N,) uint64, as `cell_digests` gives them. None: none is recorded."""
        text = self.digests.get(field)
        return None if text is None else np.frombuffer(bytes.fromhex(text), dtype=">u8").astype(np.uint64)


class DroppedSegment(msgspec.Struct, frozen=True, rename={"name": "segment", "size_bytes": "bytes"}):
    """A segment that was deleted to keep ``max_bytes``."""

    name: str  # the client's id and the segment's number
    until: float  # when it was written last, in seconds since 1970
    size_bytes: int


class Recording:
    """A recording in a folder. It may be read while a run still writes it.

    Args:
        folder: The folder.

    Attributes:
        run: The id of the run that began it.
        writers: Its clients, in the order of their first segment.
        dropped: The segments that were deleted to keep ``max_bytes``.
        remarks: What a reader should know: lines that are cut off, lines that were lost. It grows while `records` goes
            on.

    Raises:
        MissingDataError: The folder has no recording.
        UnsupportedOperationError: It is of another version.
        CorruptDataError: A segment is missing, or of another run, or its first line is damaged.
        SaveError: It cannot be read.

    Example:
        >>> for record in Recording("runs/7/recording").records():
        ...     print(record.at, record.op, record.partition, len(record.ids))
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.remarks: list[str] = []
        try:
            self.run = read_mark(self.folder)
            names = sorted(
                path.stem for path in self.folder.glob("*" + LINES_SUFFIX) if SEGMENT_NAME.fullmatch(path.stem)
            )
            self.dropped = self._read_dropped()  # after the names: what is deleted is noted before
            self._segments: dict[str, list[str]] = {}
            for name in names:
                self._segments.setdefault(name.rpartition("-")[0], []).append(name)
            dropped = {segment.name for segment in self.dropped}
            for client, segments in self._segments.items():
                last = int(segments[-1].rpartition("-")[2])
                expected = {f"{client}-{number:06}" for number in range(last + 1)}
                missing = sorted(expected - set(segments) - dropped)
                if missing:
                    raise CorruptDataError(
                        f"the recording in '{self.folder}' lacks its segment {missing[0]}, which was not deleted for "
                        "max_bytes."
                    )
            writers = {client: self._begun(segments) for client, segments in self._segments.items()}
            self._writers = {client: writer for client, writer in writers.items() if writer is not None}
            self.writers = sorted(self._writers.values(), key=lambda writer: writer.at)
        except OSError as error:
            raise SaveError(f"the recording in '{self.folder}' cannot be read: {error.strerror or error}.") from error

    def records(self) -> Iterator[Record]:
        """The records of all clients in the order of their ends. Those of one client are in the order it wrote them.

        Clocks of hosts differ: so may the order of records of different hosts.

        Raises:
            CorruptDataError: A line is damaged. The message names its segment and line, and the last step before it.
            SaveError: A segment cannot be read.
        """
        step: int | None = None
        try:
            for _, record in heapq.merge(*map(self._records_of, self._writers), key=itemgetter(0)):
                step = step if record.step is None else record.step
                yield record
        except OSError as error:
            raise SaveError(f"the recording in '{self.folder}' cannot be read: {error.strerror or error}.") from error
        except CorruptDataError as error:
            error.message += " It is before the end of any step." if step is None else f" It is after step {step}."
            raise

    def is_open(self, client: str) -> bool:
        """Whether a client writes now, as far as its host tells this one. True if that cannot be known."""
        segments = sorted(self.folder.glob(f"{client}-*{LINES_SUFFIX}"))
        return any(map(is_held, segments[-2:]))  # a new segment is held before the one before it is closed

    def rows(self, record: Record) -> tuple[list[str], dict[str, Any]]:
        """The rows that the recording has of a put: their ids, and their columns, in new memory.

        Raises:
            MissingDataError: It has none of this put.
            CorruptDataError: They are not as they were written.
            SaveError: They cannot be read.
        """
        ids, columns, is_whole = self._block_of(record)
        if not is_whole:
            raise CorruptDataError(f"{self._rows_of(record)} are not as they were written.")
        return ids, columns

    def damage(self, record: Record) -> list[tuple[str, str]]:
        """The cells of a put, as ``(sample id, field)``, whose recorded rows do not have the recorded digests.

        Where the rows are damaged in such a way that no cell can be told, each sample is named once, without a field.

        Raises:
            MissingDataError: The recording has no rows of this put.
            SaveError: They cannot be read.
        """
        try:
            ids, columns, is_whole = self._block_of(record)
            specs = {name: FieldSpec.from_text(record.specs[name]) for name in columns}
            found, _ = row_digests(columns, specs, len(ids))
            places = {name: place for place, name in enumerate(record.ids)}
            rows = [places[name] for name in ids]
        except (MissingDataError, SaveError):
            raise
        except (DataPlaneError, ValueError, KeyError, TypeError):
            return [(name, "") for name in record.ids]
        damaged = []
        for name, digests in found.items():
            recorded = record.digests_of(name)
            if recorded is not None:
                damaged += [(ids[row], name) for row in np.flatnonzero(digests != recorded[rows])]
        return damaged if damaged or is_whole else [(name, "") for name in ids]

    def _rows_of(self, record: Record) -> str:
        return f"the rows of line {record.line} of segment {record.segment} in '{self.folder}'"

    def _block_of(self, record: Record) -> tuple[list[str], dict[str, Any], bool]:
        """The ids and columns of a block, and whether it is as it was written."""
        what = self._rows_of(record)
        if record.block is None:
            raise MissingDataError(
                f"{what} were not recorded: its client recorded payload {record.client.payload!r}.",
                hint="Record with payload: all.",
            )
        start, size, digest = record.block
        try:
            with (self.folder / (record.segment + ROWS_SUFFIX)).open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(min(start, end))
                block = file.read(min(size, end))  # a forged size reserves no memory
        except FileNotFoundError as error:
            raise CorruptDataError(f"{what} are missing.") from error
        except (OSError, ValueError, OverflowError) as error:
            raise SaveError(f"{what} cannot be read: {error}.") from error
        is_whole = len(block) == size and fast_hash(block).hexdigest() == digest
        try:
            columns, head = unpack_rows(block)
            ids = msgspec.convert(head.get("ids"), list[str])
        except (DataPlaneError, msgspec.ValidationError, UnicodeEncodeError) as error:
            raise CorruptDataError(f"{what} are not as they were written.") from error
        return ids, columns, is_whole

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _begun(self, names: Sequence[str]) -> Writer | None:
        """The client of segments. None if it was killed before it had written."""
        for name in names:
            data = self._lines_of(name)
            if data is None:
                continue
            first, _, rest = data.partition(b"\n")
            text = unsealed(first)
            if text is None and not rest and name == names[-1]:
                self.remarks.append(f"Segment {name} has no whole line: its client was killed when it began it.")
                return None
            head = read_head(self.folder / (name + LINES_SUFFIX), text or b"", FORMAT, VERSION)
            try:
                writer = msgspec.convert(head, Writer)
            except (ValueError, OverflowError) as error:
                raise CorruptDataError(
                    f"the first line of segment {name} in '{self.folder}' is damaged: {error}."
                ) from error
            if writer.run != self.run or writer.client != name.rpartition("-")[0]:
                raise CorruptDataError(
                    f"segment {name} in '{self.folder}' is of run {writer.run}. Expected run {self.run}: it was put "
                    "there from another recording."
                )
            return writer
        return None

    def _records_of(self, client: str) -> Iterator[tuple[float, Record]]:
        """The records of a client, each with its time, or that of one before it if the clock was set back."""
        latest, names = 0.0, self._segments[client]
        for name in names:
            data = self._lines_of(name)
            if data is None:
                continue
            for number, text, is_last in texts_of(data):
                if text is None:
                    if is_last and name == names[-1]:
                        self.remarks.append(
                            f"The last line of segment {name} is cut off, as a killed process leaves it. It was left "
                            "out."
                        )
                        return
                    raise CorruptDataError(f"line {number} of segment {name} in '{self.folder}' is damaged.")
                if number == 1:
                    continue
                record = self._record(text, client, name, number)
                if record.op == "lost":
                    self.remarks.append(f"{self._writers[client]} could not write {record.lines} lines: a full disk.")
                latest = max(latest, record.at)
                yield latest, record

    def _record(self, text: bytes, client: str, name: str, number: int) -> Record:
        try:
            held = json.loads(text)
            about = {"client": self._writers[client], "segment": name, "line": number}
            record = msgspec.convert({**held, **about}, Record)
            sizes = {len(bytes.fromhex(digests)) for digests in record.digests.values()}
            if sizes - {8 * len(record.ids)} or len(record.tags or record.ids) != len(record.ids):
                raise ValueError("it has not one digest and tag per sample")
            if record.block is not None and min(record.block[:2]) < 0:
                raise ValueError("its block is at a negative place")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise CorruptDataError(
                f"line {number} of segment {name} in '{self.folder}' is no record: {error}."
            ) from error
        return record

    def _lines_of(self, name: str) -> bytes | None:
        """The lines of a segment. None if it was deleted to keep ``max_bytes`` meanwhile."""
        try:
            return (self.folder / (name + LINES_SUFFIX)).read_bytes()
        except FileNotFoundError:
            self.dropped = self._read_dropped()
            if name not in (segment.name for segment in self.dropped):
                raise
            return None

    def _read_dropped(self) -> list[DroppedSegment]:
        path = self.folder / DROPPED
        dropped: dict[str, DroppedSegment] = {}
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        lines = data.split(b"\n")
        for number, text, is_last in texts_of(data):
            if text is None and lines[number - 1] and not is_last:
                raise CorruptDataError(f"line {number} of '{path}' is damaged.")
            if text is not None:
                try:
                    segment = msgspec.json.decode(text, type=DroppedSegment)
                except (ValueError, RecursionError) as error:
                    raise CorruptDataError(f"line {number} of '{path}' is no note of a segment: {error}.") from error
                dropped[segment.name] = segment
        return list(dropped.values())


def pack_digests(digests: np.ndarray[Any, np.dtype[np.uint64]]) -> str:
    """Digests as `Record.digests` has them."""
    return digests.astype(">u8").tobytes().hex()


def row_digests(
    columns: Mapping[str, Any], specs: Mapping[str, FieldSpec], num_rows: int, *, allow_pickle: bool = False
) -> tuple[dict[str, np.ndarray[Any, np.dtype[np.uint64]]], dict[str, FieldSpec]]:
    """The digests that a recorder writes of rows, the same ones on every backend, whatever the form of its wire.

    Args:
        columns: As `decode_columns` gives them, or `Recording.rows`.
        specs: The spec of each.
        num_rows: N, how many rows they have.
        allow_pickle: Whether an object that only pickle can encode is taken. Its digest is that of no bytes.

    Returns:
        Of each column its digests, (N,) uint64, as `cell_digests` gives them, and its spec.

    Raises:
        DataPlaneError: As a put of these columns.
    """
    encoded, found = encode_columns(tensor_rows(columns, specs), num_rows, PLAIN, allow_pickle=allow_pickle)
    return {name: cell_digests(column, found[name], PLAIN) for name, column in encoded.items()}, found


def read_mark(folder: Path) -> str:
    """The id of the run that began a recording."""
    try:
        return str(read_head(folder / MARK, (folder / MARK).read_bytes(), FORMAT, VERSION)["run"])
    except KeyError as error:
        raise CorruptDataError(f"'{folder / MARK}' names no run.") from error
    except FileNotFoundError as error:
        raise MissingDataError(
            f"no recording in '{folder}': there is no {MARK}.",
            hint="Name the folder of the middleware recorder.",
        ) from error


def is_followed(sample_id: str, share: float = 1 / 16) -> bool:
    """Whether a sample is of a share of all, the same ones in every process."""
    return fast_digest(sample_id.encode(errors="surrogatepass")) < share * 2**64


def is_recording(folder: Path | str) -> bool:
    """Whether a folder has a recording, of any version."""
    return (Path(folder) / MARK).is_file()
