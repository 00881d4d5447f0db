"""`RedisBackend`: every operation as a script on the server, and the payload past the scripts.

A put reserves (one script), writes its rows as one hash of their own, and commits (another script, sent along with the
rows); a small one is a single script. Rows are never changed after they are written and their names never used again,
so a read that finds its rows (one script) and then fetches them sees whole rows, or finds them gone and looks again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from dataplane_core.backend import Backend
from dataplane_core.capabilities import Capability, Scope, WireFormat
from dataplane_core.codec.frames import join_rows, split_rows
from dataplane_core.codec.sizes import row_nbytes
from dataplane_core.diagnosis import Finding
from dataplane_core.errors import (
    BackendUnavailableError,
    CorruptDataError,
    DataPlaneError,
    OperationTimeoutError,
)
from dataplane_core.fields import FieldSpec
from dataplane_core.hookspecs import (
    AckRequest,
    Claim,
    ClaimRequest,
    ClearReply,
    ClearRequest,
    ConsumptionReply,
    ConsumptionRequest,
    DescribeRequest,
    GetRequest,
    ListRequest,
    NackRequest,
    PartitionInfo,
    PutReply,
    PutRequest,
    RegisterRequest,
    RenewRequest,
    SampleList,
    SettleReply,
    WireBatch,
    WireColumn,
)
from dataplane_core.row_store import framed_columns
from dataplane_core.tags import TagValue
from dataplane_redis import _refusals
from dataplane_redis._claims import Claims
from dataplane_redis._diagnosis import diagnose
from dataplane_redis._instance import Durability, Instance, check_server, durability_of
from dataplane_redis._link import Link, Read, pack
from dataplane_redis._rows import ReadPlans, pack_rows, row_overhead
from dataplane_redis._scripts import SCRIPTS
from dataplane_redis._server import PrivateServer, private_url
from dataplane_redis._wire import (
    Refs,
    pack_filter,
    pack_layout,
    pack_request,
    pack_tags,
    text_of,
    unpack_layout,
    unpack_rows,
    unpack_tags,
)
from dataplane_redis.config import RedisConfig

__all__ = ["RedisBackend"]

_log = logging.getLogger("dataplane_redis")

#: Puts and reads of at most so many bytes travel inside their script, in one round trip.
_INLINE_BYTES: Final = 32 * 1024
_INLINE_ROWS: Final = 512
#: Rows are sent in commands of about this size.
_CHUNK_BYTES: Final = 4 << 20
#: Rows are asked for in commands with replies of this size: the server copies one while the client receives another.
_READ_BYTES: Final = 512 * 1024
#: Seconds beyond its deadline after which a put that was not committed counts as abandoned.
_ABANDON_GRACE_S: Final = 30.0
#: Seconds that undoing a failed put may take, where the put's deadline leaves so much.
_UNDO_S: Final = 5.0
#: Failed puts that a client remembers to undo.
_MOST_BEGUN: Final = 1000
#: The least pause of a put that waits for room: this share of the time waited, in seconds at most so long.
_PAUSE_SHARE: Final = 0.05
_PAUSE_S: Final = 0.1
#: What is left of its time in seconds when a put that waits for room gives up.
_LAST_ASK_S: Final = 0.02
#: Rows that one script locates, clears, or lists, and writes that it deletes. A script then takes some 10 ms.
_LOCATE_ROWS: Final = 4000
_CLEAR_ROWS: Final = 1000
_LIST_ROWS: Final = 4000
_COLLECT_WRITES: Final = 10_000
#: Seconds that ending an instance's marker may take on close.
_CLOSE_S: Final = 2.0


#: Where a row lies: the write, and the position in it.
_Place: TypeAlias = tuple[bytes, int]


class RedisBackend(Backend):
    """Every client speaks to one Redis server, from any host that reaches it; of a cluster to the node that serves the
    namespace.

    ``durable`` holds as the server of a ``url`` is set: a committed put survives the server's death where it runs with
    ``appendonly yes`` and ``appendfsync always``. A private server's data live as long as it, since nobody starts it
    again. `durability` says what holds.
    """

    wire = WireFormat(bytes=True)
    capabilities = frozenset(Capability)
    scope = Scope.CLUSTER
    Config = RedisConfig

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._base = b"dp:{%s}" % config.namespace.encode()
        self._link: Link | None = None
        self._server: PrivateServer | None = None
        self._instance: Instance | None = None
        self._bootstrapped = False
        self._claims = Claims(self._run, self._command, self._base)
        self._begun: deque[bytes] = deque(maxlen=_MOST_BEGUN)  # puts that failed and are not undone yet

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of an instance that shares nothing but the server with that of ``options``."""
        name = options.get("namespace", RedisConfig.model_fields["namespace"].default)
        return {**options, "namespace": f"{name}-{tag}"[:64]}

    @classmethod
    def diagnose(cls, config: RedisConfig, *, deadline: float) -> Iterable[Finding]:
        """The server that would be started, or the one that runs: version, eviction, persistence, who is let in."""
        return diagnose(config, deadline)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts a private server where told to; connects, checks the server, and makes or finds the instance."""
        config: RedisConfig = self.config
        if config.url is None:
            url, label = private_url(config.namespace), f"the private redis-server of namespace '{config.namespace}'"
            if bootstrap:
                self._server = PrivateServer(config)
                self._server.start(deadline)
        else:
            url, label = config.url.get_secret_value(), _refusals.label_of(config.url.get_secret_value())
        self._link = Link(url, label)
        self._link.follow("connect", deadline, self._base)
        durability = check_server(self._link, config, deadline)
        if bootstrap:
            self._instance = Instance.bootstrap(self._link, self._base, config, deadline, exclusive=self.exclusive)
        else:
            self._instance = Instance.attach(self._link, self._base, config, deadline)
        self._bootstrapped = bootstrap
        _log.info("connected to %s: %s", label, durability.describe())

    def stop(self) -> None:
        """Disconnects. The bootstrapping client ends the instance: its private server, or the marker on a server that
        is not its own, where the data stays."""
        link, self._link = self._link, None
        if link is not None:
            if self._bootstrapped and self._server is None and self._instance is not None:
                with contextlib.suppress(DataPlaneError):  # the server may be gone
                    self._instance.end(link, self._base, self.config, time.monotonic() + _CLOSE_S)
            link.close()
        if self._server is not None:
            self._server.stop()

    def durability(self, deadline: float) -> Durability:
        """How the server keeps data, as it is set now."""
        return durability_of(self._connected()[0], self.config, deadline)

    # --- registration -------------------------------------------------------------------------------------------------

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        """Opens a partition afresh."""
        info = {
            "fields": request.fields,
            "num_samples": request.num_samples,
            "consumer_tasks": request.consumer_tasks,
            "grpo_group_size": request.grpo_group_size,
            "enums": request.enums,
        }
        _, left = self._run(
            f"register_partition('{request.partition_id}')",
            request.deadline,
            "register",
            request.partition_id,
            request.epoch,
            json.dumps(info),
            -1 if request.num_samples is None else request.num_samples,
            -1 if request.grpo_group_size is None else request.grpo_group_size,
            request.consumer_tasks,
        )
        self._collect(left, request.deadline)
        return _info_of(request.epoch, info)

    def describe_partition(self, request: DescribeRequest) -> PartitionInfo:
        """Reads a registration."""
        what = f"describe_partition('{request.partition_id}')"
        reply = self._run(what, request.deadline, "describe", request.partition_id)
        if reply[0] != b"ok":
            _refusals.raise_partition(request.partition_id, reply)
        return _info_of(text_of(reply[1]), json.loads(reply[2]))

    # --- puts ---------------------------------------------------------------------------------------------------------

    def put_samples(self, request: PutRequest) -> PutReply:
        """Small puts: one script. Others: reserve, write the rows, commit."""
        instance = self._connected()[1]
        self._undo_earlier(request.deadline)
        num_samples = len(request.sample_ids)
        what = f"put_samples('{request.partition_id}', {num_samples} samples)"
        names = list(request.columns)
        frames = framed_columns(request.columns)
        sizes = row_nbytes(request.columns, num_samples) if names else [0] * num_samples
        total = sum(sizes)
        left_s = max(0.0, request.deadline - time.monotonic())
        wait_s = left_s if instance.on_full == "block" else 0.0
        common = (
            request.partition_id,
            "" if request.epoch is None else request.epoch,
            request.sample_ids,
            sizes,
            pack_layout(names),
            [text for name in names for text in (name, request.specs[name].to_text())],
            "" if request.tags is None else [pack_tags(row) for row in request.tags],
            instance.capacity_bytes or 0,
            left_s + _ABANDON_GRACE_S,
        )
        small = num_samples <= _INLINE_ROWS and total + 32 * num_samples * len(names) <= _INLINE_BYTES
        if small or not names:
            rows: list[memoryview] = []
            if names:
                buffer, offsets = join_rows(frames)
                view, cuts = memoryview(buffer), offsets.tolist()
                rows = [view[cuts[row] : cuts[row + 1]] for row in range(num_samples)]
            write = _new_write()
            packed = pack_request("inline", *common, write, b"", wait_s)
            with self._undoing(write, request.deadline):
                self._reserve(what, request, total, write, packed, rows)
            return PutReply(num_samples=num_samples)
        link, _ = self._connected()
        link.again_where_refused(request.deadline, lambda: self._put_rows(what, request, total, frames, common, wait_s))
        return PutReply(num_samples=num_samples)

    def _put_rows(
        self,
        what: str,
        request: PutRequest,
        total: int,
        frames: Sequence[Sequence[Any]],
        common: Sequence[Any],
        wait_s: float,
    ) -> None:
        """Reserves, writes the rows, commits; where that fails, undoes it."""
        write = _new_write()
        begin = pack_request("begin", *common, write, b"", wait_s)
        with self._undoing(write, request.deadline):
            reply = self._reserve(what, request, total, write, begin, ())
            commit = pack_request("commit", common[0], reply[1], *common[2:], write, reply[2])
            self._write(what, write, frames, total, commit, request)

    def _reserve(
        self, what: str, request: PutRequest, total: int, write: bytes, packed: bytes, rows: Sequence[memoryview]
    ) -> Any:
        """Runs the put script, again where the store was full and there is room now."""
        while True:
            reply = self._script(what, request.deadline, "put", packed, *rows)
            if reply[0] == b"ok":
                return reply
            if reply[0] != b"full":
                _refusals.raise_put(what, request, reply)
            self._wait_for_room(what, request, total, write, reply)

    def _wait_for_room(self, what: str, request: PutRequest, total: int, write: bytes, reply: Any) -> None:
        """Waits in the line of those that wait for room, as the store says how often to ask.

        Raises:
            CapacityExceededError: It never fits, or ``on_full`` is ``raise``.
            OperationTimeoutError: There was no room until the deadline.
        """
        _, instance = self._connected()
        if total > (instance.capacity_bytes or 0) or instance.on_full == "raise":
            raise instance.refuse_full(what, total, reply[1], reply[2])
        start = time.monotonic()
        while reply[0] == b"full":
            _, held, num_before, pause_s = reply
            now = time.monotonic()
            left_s = request.deadline - now - _LAST_ASK_S
            if left_s <= 0:
                error = instance.refuse_full(what, total, held, num_before)
                raise OperationTimeoutError(
                    f"{what} timed out waiting for room. Nothing was written. {error.message}", hint=error.hint
                ) from error
            time.sleep(min(left_s, max(float(pause_s), min(_PAUSE_SHARE * (now - start), _PAUSE_S))))
            reply = self._run(what, request.deadline, "room", write, total, instance.capacity_bytes, left_s)

    def _write(
        self,
        what: str,
        write: bytes,
        frames: Sequence[Sequence[Any]],
        total: int,
        commit: bytes,
        request: PutRequest,
    ) -> None:
        """Sends the rows, and with them the commit; raises unless it is confirmed."""
        link, instance = self._connected()
        num_samples = len(request.sample_ids)
        key = self._key(write)
        step = max(1, min(1000, _CHUNK_BYTES * num_samples // max(1, total)))
        starts = range(0, num_samples, step)
        left_s = max(0.0, request.deadline - time.monotonic()) + _ABANDON_GRACE_S
        expiry = pack((b"PEXPIRE", key, b"%d" % int(left_s * 1000)))
        multi, execute = pack((b"MULTI",)), pack((b"EXEC",))
        put = SCRIPTS["put"]

        def commands() -> Iterator[list[Any]]:
            for start in starts:  # rows never lie there without an expiry: whoever dies, they go
                yield multi
                yield pack_rows(key, start, [column[start : start + step] for column in frames])
                yield expiry
                yield execute
            yield pack((b"EVALSHA", put.sha, b"1", self._base, commit, instance.asker()))

        replies = link.commands(what, request.deadline, commands(), 4 * len(starts) + 1)
        reply = replies.pop()
        for each in replies:
            if isinstance(each, Exception):
                link.refuse(what, each)
        if isinstance(reply, Exception):
            if not str(reply).startswith(("NOSCRIPT", "No matching script")):
                link.refuse(what, reply)
            reply = self._script(what, request.deadline, "put", commit)
        if reply[0] == b"other_history":
            _refusals.raise_history(what, link.label)
        if reply[0] != b"ok":
            _refusals.raise_put(what, request, reply)

    @contextlib.contextmanager
    def _undoing(self, write: bytes, deadline: float) -> Iterator[None]:
        """Undoes a put that fails: it holds no room then, and nobody waits behind it."""
        try:
            yield
        except BaseException:
            self._undo(write, deadline)
            raise

    def _undo(self, write: bytes, deadline: float) -> None:
        """Undoes a failed put in the time that it has left, else before this client's next put. Where that does not
        come, a later script of any client gives the put up, and its rows expire.

        A put whose commit went through although its reply was lost stays.
        """
        try:
            self._run("put_samples", min(deadline, time.monotonic() + _UNDO_S), "abort", write)
        except DataPlaneError:
            self._begun.append(write)

    def _undo_earlier(self, deadline: float) -> None:
        """Undoes what earlier puts had no time to."""
        while self._begun:
            try:
                write = self._begun.popleft()
            except IndexError:
                return  # another thread took it
            try:
                self._run("put_samples", deadline, "abort", write)
            except DataPlaneError:
                self._begun.append(write)
                raise

    # --- reads --------------------------------------------------------------------------------------------------------

    def get_samples(self, request: GetRequest) -> WireBatch:
        """Locates, fetches; again where the rows moved meanwhile.

        A row moves to a place of its own, so a place that is located again and empty again was lost.
        """
        what = f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples)"
        moved: set[_Place] = set()
        while True:
            reply = self._locate(what, request)
            if reply[0] == b"unknown_partition":
                _refusals.raise_partition(request.partition_id, reply)
            layouts = [unpack_layout(layout) for layout in reply[2]]
            if reply[0] != b"ok" or None in reply[3]:
                _refusals.raise_missing(what, request, reply[1], layouts)
            refs = unpack_rows(reply[1])
            plans = ReadPlans(request.fields, layouts)
            picks = [plans.of(each) for each in refs]
            if None in picks:
                _refusals.raise_missing(what, request, reply[1], layouts)
            specs = {
                name: FieldSpec.from_text(text.decode()) for name, text in zip(request.fields, reply[3], strict=True)
            }
            sent = reply[5] if len(reply) > 5 else None
            columns, empty = self._fetch(what, request, refs, picks, [len(each) for each in layouts], sent)
            if not empty:
                return WireBatch(columns=columns, specs=specs)
            lost = [each for each in empty if sent is not None or each[:2] in moved]
            if lost:
                _refusals.raise_lost(what, request, [(row, pairs) for _, _, row, pairs in lost])
            moved.update(each[:2] for each in empty)
            if time.monotonic() >= request.deadline:
                raise OperationTimeoutError(
                    f"{what} timed out: the rows were overwritten faster than they could be read."
                )

    def _locate(self, what: str, request: GetRequest) -> Any:
        """The reply of the script, put together from those of as many as the rows take."""
        ids = request.sample_ids
        most = _INLINE_BYTES if len(ids) <= _INLINE_ROWS else -1
        whole: Any = None
        first = 0
        while first < len(ids):
            some = ids[first : first + _LOCATE_ROWS]
            reply = self._run(what, request.deadline, "locate", request.partition_id, some, request.fields, most)
            if reply[0] == b"unknown_partition":
                return reply
            if whole is not None and whole[4] != reply[4]:  # registered anew meanwhile
                whole, first = None, 0
                continue
            if whole is not None:
                kind = b"ok" if whole[0] == reply[0] == b"ok" else b"missing"
                reply = [kind, whole[1] + reply[1], *reply[2:]]  # layouts are only ever added
            whole = reply
            first += _LOCATE_ROWS
        return whole

    def _fetch(
        self,
        what: str,
        request: GetRequest,
        refs: Sequence[Refs],
        picks: Sequence[Any],
        num_cells: Sequence[int],
        sent: Sequence[Any] | None,
    ) -> tuple[dict[str, WireColumn], list[tuple[bytes, int, int, Any]]]:
        """Frames in the order of the request; and what is no longer there: write, position, row of the request, its
        (column, slot) pairs.

        Args:
            what: The operation.
            request: The read.
            refs: The refs of each row.
            picks: For each row, (ref, [(column, slot)...]) of every ref that is needed.
            num_cells: For each layout, its number of fields.
            sent: The payload of all refs, where the script sent it along.
        """
        columns: list[list[Any]] = [[None] * len(refs) for _ in request.fields]
        wanted: list[tuple[bytes, int, int, Any]] = []  # as what is no longer there
        payload: list[Any] = []
        if sent is not None:
            start = 0
            for row, (each, plan) in enumerate(zip(refs, picks, strict=True)):
                for index, pairs in plan:
                    wanted.append((*each[index][:2], row, pairs))
                    payload.append(sent[start + index])
                start += len(each)
        else:
            by_write: dict[bytes, list[tuple[int, int]]] = {}
            places: dict[bytes, list[tuple[bytes, int, int, Any]]] = {}
            for row, (each, plan) in enumerate(zip(refs, picks, strict=True)):
                for index, pairs in plan:
                    write, position, layout, size = each[index]
                    by_write.setdefault(write, []).append((position, size + row_overhead(num_cells[layout])))
                    places.setdefault(write, []).append((write, position, row, pairs))
            link, _ = self._connected()
            for found in link.fetch(what, request.deadline, self._reads(by_write)):
                payload += found
            wanted = [place for each in places.values() for place in each]
        if None in payload:
            return {}, [place for place, data in zip(wanted, payload, strict=True) if data is None]
        for (_, _, row, pairs), frames in zip(wanted, split_rows(payload), strict=True):
            for column, slot in pairs:
                if slot >= len(frames):
                    raise CorruptDataError(f"{what}: a row holds {len(frames)} cells. Expected more than {slot}.")
                columns[column][row] = frames[slot]
        return dict(zip(request.fields, columns, strict=True)), []

    def _reads(self, by_write: Mapping[bytes, Sequence[tuple[int, int]]]) -> list[Read]:
        """Commands that read rows, which are given by write as (position, size in bytes).

        Each reply has `_READ_BYTES` at most, or one row.
        """
        reads = []
        for write, rows in by_write.items():
            words, size_bytes = [b"HMGET", self._key(write)], 0
            for position, size in rows:
                if size_bytes and size_bytes + size > _READ_BYTES:
                    reads.append(Read(b"".join(pack(words)), size_bytes))
                    words, size_bytes = [b"HMGET", self._key(write)], 0
                words.append(b"%d" % position)
                size_bytes += size
            reads.append(Read(b"".join(pack(words)), size_bytes))
        return reads

    def list_samples(self, request: ListRequest) -> SampleList:
        """Lists ids and tags."""
        what = f"list_samples('{request.partition_id}')"
        ids: list[str] = []
        tags: list[dict[str, TagValue]] = []
        conditions, epoch, seq = pack_filter(request.tag_filter), b"", b"0"
        while seq:
            reply = self._run(what, request.deadline, "list", request.partition_id, epoch, conditions, seq, _LIST_ROWS)
            if reply[0] == b"changed":  # registered anew meanwhile
                ids, tags, epoch, seq = [], [], b"", b"0"
                continue
            if reply[0] != b"ok":
                _refusals.raise_partition(request.partition_id, reply)
            _, some, some_tags, epoch, seq = reply
            ids += map(text_of, some)
            tags += map(unpack_tags, some_tags)
        return SampleList(sample_ids=ids, tags=tags)

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> Claim:
        """Hands out ready samples."""
        return self._claims.claim(request)

    def ack(self, request: AckRequest) -> SettleReply:
        """Settles leases."""
        return self._claims.settle("ack", request, 0.0)

    def nack(self, request: NackRequest) -> SettleReply:
        """Gives leased samples back."""
        return self._claims.settle("nack", request, 0.0)

    def renew(self, request: RenewRequest) -> SettleReply:
        """Extends leases."""
        return self._claims.settle("renew", request, request.lease_s)

    def check_consumption(self, request: ConsumptionRequest) -> ConsumptionReply:
        """Asks the server."""
        what = f"check_consumption_status('{request.partition_id}')"
        reply = self._run(what, request.deadline, "consumed", request.partition_id, request.task_names)
        return ConsumptionReply(consumed=bool(reply[1]))

    # --- clearing -----------------------------------------------------------------------------------------------------

    def clear_samples(self, request: ClearRequest) -> ClearReply:
        """Drops rows with their payload, or a whole partition."""
        ids = request.sample_ids
        what = f"clear_samples('{request.partition_id}')"
        count, epoch = 0, b""
        for first in range(0, 1 if ids is None else len(ids), _CLEAR_ROWS):
            some = [] if ids is None else ids[first : first + _CLEAR_ROWS]
            _, cleared, left, epoch = self._run(
                what, request.deadline, "clear", request.partition_id, epoch, some, int(ids is None)
            )
            count += int(cleared)
            if not epoch:  # the partition is gone
                break
        self._collect(left, request.deadline)
        return ClearReply(num_samples=count)

    def _collect(self, left: int, deadline: float) -> None:
        """Deletes the payload of dropped registrations, a part at a time; what stays, a later call deletes."""
        while left:
            _, left = self._run("clear_samples", deadline, "collect", _COLLECT_WRITES)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _run(self, what: str, deadline: float, script: str, *values: Any) -> Any:
        return self._script(what, deadline, script, pack_request(*values))

    def _script(self, what: str, deadline: float, script: str, packed: bytes, *rows: memoryview) -> Any:
        """Runs a script; its reply.

        Raises:
            StalePartitionError: The namespace is not the store that this client connected to.
        """
        link, instance = self._connected()
        reply = link.script(what, deadline, SCRIPTS[script], self._base, packed, *rows, instance.asker())
        if reply[0] == b"other_history":
            _refusals.raise_history(what, link.label)
        return reply

    def _command(self, what: str, deadline: float, *words: bytes) -> Any:
        return self._connected()[0].command(what, deadline, *words)

    def _connected(self) -> tuple[Link, Instance]:
        link, instance = self._link, self._instance
        if link is None or instance is None:
            _not_started()
        return link, instance

    def _key(self, write: bytes) -> bytes:
        return b"%s:w:%s" % (self._base, write.hex().encode())


def _new_write() -> bytes:
    """What one attempt of a put is known by: random bits, so that no other has it, whatever the server forgets."""
    return os.urandom(16)


def _info_of(epoch: str, info: Mapping[str, Any]) -> PartitionInfo:
    return PartitionInfo(
        epoch=epoch,
        fields=tuple(info["fields"]),
        num_samples=info["num_samples"],
        consumer_tasks=tuple(info["consumer_tasks"]),
        grpo_group_size=info["grpo_group_size"],
        enums={name: tuple(words) for name, words in info["enums"].items()},
    )


def _not_started() -> NoReturn:
    raise BackendUnavailableError("the backend is not started.", retryable=False)
