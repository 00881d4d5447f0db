"""`RedisBackend`: every operation is a script on the server. Large payload bypasses the scripts.

Puts are in `_puts`, reads and listings in `_reads`, claims and their settling in `_claims`. Here are a client's life,
registrations, counts, cursors and clears.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import struct
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from dataplane_core.backends import Finding
from dataplane_core.errors import (
    BackendUnavailableError,
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
    OperationTimeoutError,
    UnknownPartitionError,
    UnknownTaskError,
)
from dataplane_core.host_memory import check_capacity
from dataplane_core.spec import (
    AnnounceReply,
    AnnounceRequest,
    Answer,
    Capability,
    ClearReply,
    ClearRequest,
    ClientInfo,
    ClientList,
    DescribeRequest,
    ExportRequest,
    FieldSpec,
    InspectRequest,
    ListClientsRequest,
    ListPartitionsRequest,
    PartitionDescription,
    PartitionInfo,
    PartitionList,
    PartitionState,
    Question,
    RegisterRequest,
    Replaced,
    Scope,
    SetCursorRequest,
    SettleReply,
    TaskDescription,
    WireFormat,
)
from dataplane_redis._acknowledged import Acknowledged, Acknowledgements
from dataplane_redis._claims import Claims, holder_of, question_of
from dataplane_redis._link import Link
from dataplane_redis._payload import NUM_BUCKETS, Payload
from dataplane_redis._puts import Puts
from dataplane_redis._reads import Reads
from dataplane_redis._scripts import MARK, damaged, pack_strings, text_of, tuples_of
from dataplane_redis._server import (
    Durability,
    PrivateServer,
    check_server,
    diagnose,
    durability_of,
    greeting,
    private_url,
)
from dataplane_redis._session import Instance, Session
from dataplane_redis._wakes import Wakes
from dataplane_redis.config import RedisConfig, base_of

_log = logging.getLogger("dataplane_redis")

#: Rows that one script clears.
_CLEAR_ROWS: Final = 1000
#: Seconds that close may take at most to end what waits, and to remove this client as the owner of the instance.
_CLOSE_S: Final = 2.0
#: Rows that one script looks at, and members that one command scans.
_LIST_ROWS: Final = 4000
_SCAN: Final = b"4000"
#: How the head of a group begins: its seq, and whether it is broken (see common.lua).
_GROUP_HEAD: Final = struct.Struct("<Q?")
_T = TypeVar("_T")


class RedisBackend(Puts, Reads, Claims):
    """All clients connect to one Redis server, from any host that reaches it. In a Redis Cluster, one node holds the
    ledger of the namespace, and the payload is spread over all nodes.

    ``durable`` depends on the settings of the server at ``url``: a committed put survives the death of the server if it
    runs with ``appendonly yes`` and ``appendfsync always``. The data of a private server end with the server, since
    nobody starts it again. `durability` says what holds.
    """

    wire = WireFormat(bytes=True, shared_rows=True)
    capabilities = frozenset(Capability) - {Capability.SAMPLERS, Capability.UNITS}
    why_not_declared: ClassVar = {
        Capability.SAMPLERS: "the server's scripts give samples in order of first write only",
        Capability.UNITS: "Redis servers hold the payload, and their operator adds and removes them",
    }
    scope = Scope.CLUSTER
    Config = RedisConfig

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._server: PrivateServer | None = None
        self._bootstrapped = False
        told = None
        if config.url is not None:
            told = Acknowledgements(base_of(config.namespace), config.wait_replicas, config.wait_fsync)
        self._session = Session(config.namespace, told)
        self._payload = Payload(self._session, config.namespace)
        self._wakes = Wakes(self._session)
        weakref.finalize(self, self._wakes.close)

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of an instance that shares nothing but the server with that of ``options``."""
        name = options.get("namespace", RedisConfig.model_fields["namespace"].default)
        return {**options, "namespace": f"{name}-{tag}"[:64]}

    @classmethod
    def diagnose(cls, config: RedisConfig, *, deadline: float) -> Iterable[Finding]:
        """Checks the installed or the running server: version, eviction, persistence, access."""
        return diagnose(config, deadline)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts a private server if needed. Connects, checks the server, and creates or finds the instance."""
        config: RedisConfig = self.config
        session = self._session
        if config.url is None:
            if bootstrap:
                check_capacity(config.capacity_bytes)
                self._server = PrivateServer(config)
                self._server.start(deadline)
            link = Link(private_url(config.namespace), f"the private redis-server of namespace '{config.namespace}'")
            link.greeting = lambda: greeting(config.namespace) or ""  # one that does not run may not have started yet
        else:
            link = Link(config.url.get_secret_value(), told=session.acknowledgements)
        session.link = link
        slots = link.follow("connect", deadline, session.base)
        durability = check_server(link, config, deadline)
        action = "attach" if not bootstrap else "bootstrap alone" if self.exclusive else "bootstrap"
        num_buckets = 1 if slots is None else NUM_BUCKETS
        session.instance = Instance.connect(action, link, config, deadline, num_buckets)
        self._payload.open(slots or ())
        if config.url is None:
            link.greeting = functools.partial(greeting, config.namespace)
        self._bootstrapped = bootstrap
        _log.info("connected to %s: %s", link.label, durability.describe())

    def stop(self) -> None:
        """Disconnects. The bootstrapping client also ends the instance: it ends its private server. On the server of a
        ``url`` it removes itself as the owner, and the data stays."""
        session = self._session
        deadline = min(self.stop_by, time.monotonic() + _CLOSE_S)
        self._wakes.close(deadline)
        link, session.link = session.link, None
        if link is not None:
            with contextlib.suppress(DataPlaneError), session.quietly():  # the server may be gone
                if self._bootstrapped and self._server is None and session.instance is not None:
                    session.instance.end(link, self.config, deadline)
                if session.acknowledgements is not None:
                    session.acknowledgements.end(link.command, deadline)
            link.close()
            if self._payload.nodes is not None:
                self._payload.nodes.close()
        if self._server is not None:
            self._server.stop(self.stop_by)

    def durability(self, deadline: float) -> Durability:
        """How the server keeps data, by its current settings."""
        return durability_of(self._session.connected()[0], self.config, deadline)

    # --- registrations ------------------------------------------------------------------------------------------------

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        """Registers a partition. Drops an earlier registration of it, or adds to it.

        Two clients that add at the same time both succeed: the script changes only the description that was read.
        """
        what = f"register_partition('{request.partition_id}')"
        while True:
            known = self._known(what, request) if request.if_exists == "keep" else None
            if known is None:
                opened = self._open(what, request)
                if opened is not None:
                    return opened
                continue
            epoch, text = known
            info = _info_of(epoch, text)
            if info.grpo_group_size != request.grpo_group_size:
                raise InvalidRequestError(
                    f"{what} refused: grpo_group_size is {request.grpo_group_size}. The partition that is kept has "
                    f"{info.grpo_group_size}. Nothing was changed."
                )
            extended = info.extended(request.fields, request.consumer_tasks, request.enums, request.followers)
            num = request.num_samples if info.num_samples is None and request.num_samples is not None else -1
            if extended == info and num < 0:
                return info
            tasks = [name for name in extended.consumer_tasks if name not in info.consumer_tasks]
            reply = self._session.run(
                what,
                request.deadline,
                "extend",
                confirms=Acknowledged("register_partition", request.partition_id),
                name=request.partition_id,
                epoch=epoch,
                info=text,
                new_info=_text_of(extended),
                tasks=tasks,
                num=num,
            )
            if reply[0] == b"ok":
                return extended if num < 0 else replace(extended, num_samples=reply[1])

    def _open(self, what: str, request: RegisterRequest) -> PartitionInfo | None:
        """Opens a partition. None if it is there and must be kept."""
        info = PartitionInfo.requested(request)
        reply = self._session.run(
            what,
            request.deadline,
            "register",
            confirms=Acknowledged("register_partition", request.partition_id),
            name=request.partition_id,
            epoch=request.epoch,
            info=_text_of(info),
            num=-1 if request.num_samples is None else request.num_samples,
            group=-1 if request.grpo_group_size is None else request.grpo_group_size,
            tasks=request.consumer_tasks,
            keep=int(request.if_exists == "keep"),
        )
        if reply[0] == b"changed":
            return None
        self._payload.collect(reply[1], request.deadline)
        replaced = None
        if reply[2]:
            epoch, text, num_samples, given = reply[2]
            with contextlib.suppress(CorruptDataError):  # a damaged one is replaced all the same
                old = _info_of(text_of(epoch), text)
                replaced = Replaced(
                    epoch=old.epoch,
                    registered_by=old.registered_by,
                    registered_at=old.registered_at,
                    num_samples=num_samples,
                    num_left={text_of(task): num_samples - count for task, count in tuples_of(given, 2)},
                )
        return replace(info, replaced=replaced)

    def describe_partition(self, request: DescribeRequest) -> PartitionInfo:
        """Reads a registration."""
        return _info_of(*self._read(f"describe_partition('{request.partition_id}')", request))

    def _read(self, what: str, request: DescribeRequest | RegisterRequest | SetCursorRequest) -> tuple[str, bytes]:
        """The epoch and the stored description of a registration."""
        _, epoch, text = self._session.run(what, request.deadline, "describe", name=request.partition_id)
        return text_of(epoch), text

    def _known(self, what: str, request: RegisterRequest | SetCursorRequest) -> tuple[str, bytes] | None:
        """As `_read`. None if there is none."""
        with contextlib.suppress(UnknownPartitionError):
            return self._read(what, request)
        return None

    def list_partitions(self, request: ListPartitionsRequest) -> PartitionList:
        """Lists the registered partitions."""
        _, names = self._session.run("list_partitions()", request.deadline, "partitions")
        return PartitionList(partition_ids=list(map(text_of, names)))

    # --- counts -------------------------------------------------------------------------------------------------------

    def inspect_partition(self, request: InspectRequest) -> PartitionDescription:
        """Counts what a partition holds. Ready and leased samples are counted as for the shortfall of a claim."""
        what = f"describe('{request.partition_id}')"
        reply = self._session.run(what, request.deadline, "inspect", name=request.partition_id)
        _, epoch, text, specs, num_samples, num_cleared, held_bytes, oldest_s, tasks, leases = reply
        info = _info_of(text_of(epoch), text)
        required = pack_strings(sorted(info.fields))
        consumed = {text_of(name): count for name, count in tuples_of(tasks, 2)}
        oldest = {text_of(name): holder_of(*lease) for name, lease in tuples_of(leases, 2)}
        described = {}
        for name in info.consumer_tasks:
            ready, leased = self._count(what, request.partition_id, name, required, request.deadline)
            described[name] = TaskDescription(
                num_ready=ready,
                num_leased=leased,
                num_consumed=int(consumed.get(name, 0)),
                oldest_lease=oldest.get(name) if leased else None,
            )
        written = {text_of(name): FieldSpec.from_text(spec.decode()) for name, spec in tuples_of(specs, 2) if spec}
        return PartitionDescription(
            info=info,
            specs=written,
            num_samples=int(num_samples),
            num_cleared=int(num_cleared),
            held_bytes=int(held_bytes),
            oldest_s=float(oldest_s) if oldest_s else None,
            tasks=described,
            num_rows=self._count_rows(what, request, written) if request.count_rows else {},
            answers=[self._answer(what, request, each) for each in request.questions],
        )

    def _count_rows(self, what: str, request: InspectRequest, fields: Iterable[str]) -> dict[str, int]:
        """How many samples have each field, counted in parts."""
        counts, epoch, seq = dict.fromkeys(fields, 0), b"", b"0"
        while seq:
            asked: dict[str, Any] = {"name": request.partition_id, "epoch": epoch, "seq": seq, "most": _LIST_ROWS}
            reply = self._session.run(what, request.deadline, "fields", **asked)
            if reply[0] == b"changed":
                counts, epoch, seq = dict.fromkeys(fields, 0), b"", b"0"
                continue
            _, epoch, seq, some = reply
            for name, count in tuples_of(some, 2):
                counts[text_of(name)] = counts.get(text_of(name), 0) + int(count)
        return counts

    def _answer(self, what: str, request: InspectRequest, asked: Question) -> Answer | None:
        """What a claim would find. None: there is no such task. Counts the ready samples as the shortfall does."""
        with contextlib.suppress(UnknownTaskError):
            num_ready, shortfall = self._explain(what, request.deadline, question_of(request.partition_id, asked))
            return Answer(num_ready=num_ready, shortfall=shortfall if asked.explain else None)
        return None

    # --- clients ------------------------------------------------------------------------------------------------------

    def announce(self, request: AnnounceRequest) -> AnnounceReply:
        """Lists a client for a time. In a cluster, also deletes payload that other clients left."""
        client, text = request.client.client_id, json.dumps(asdict(request.client))
        with self._session.quietly():
            reply = self._session.run(
                "announce()", request.deadline, "announce", client=client, text=text, seconds=request.ttl_s
            )
        if request.ttl_s:
            self._payload.look(request.deadline)
        return AnnounceReply(num_clients=reply[1])

    def list_clients(self, request: ListClientsRequest) -> ClientList:
        """Lists the clients."""
        reply = self._session.run("list_clients()", request.deadline, "clients")
        clients = []
        for text, heard, ttl in tuples_of(reply[1:], 3):
            heard_s, ttl_s = float(heard), float(ttl)
            state = "closed" if ttl_s <= 0 else "open" if heard_s < ttl_s else "silent"
            if state == "open" or request.ended:
                clients.append(_read_as(ClientInfo, text, heard_s=heard_s, state=state))
        return ClientList(clients=clients)

    # --- cursors ------------------------------------------------------------------------------------------------------

    def export_partition(self, request: ExportRequest) -> PartitionState:
        """Reads cursors and history, in parts. Starts again if the partition is registered again meanwhile."""
        what = f"export_partition('{request.partition_id}')"
        consumed: dict[str, list[str]] = {}
        present: set[str] = set()
        epoch, seq = b"", b"0"
        while seq:
            asked: dict[str, Any] = {"name": request.partition_id, "epoch": epoch, "seq": seq, "most": _LIST_ROWS}
            reply = self._session.run(what, request.deadline, "consumed_ids", **asked)
            if reply[0] == b"changed":
                consumed, present, epoch, seq = {}, set(), b"", b"0"
                continue
            _, some, epoch, seq, tasks = reply
            ids = list(map(text_of, some))
            present.update(ids)
            for name, marks in tuples_of(tasks, 2):
                given = consumed.setdefault(text_of(name), [])
                given += [each for each, mark in zip(ids, marks.decode(), strict=True) if mark == "1"]
        rows = b"%s:e:%s:" % (self._session.base, epoch)
        ever = {text_of(each) for each in self._scan(what, request.deadline, b"SSCAN", rows + b"x") if each != MARK}
        heads = self._scan(what, request.deadline, b"HSCAN", rows + b"g")
        broken = [text_of(name) for name, head in tuples_of(heads, 2) if head and _GROUP_HEAD.unpack_from(head)[1]]
        return PartitionState(consumed=consumed, cleared_ids=sorted(ever - present), broken_groups=sorted(set(broken)))

    def _scan(self, what: str, deadline: float, command: bytes, key: bytes) -> Iterator[bytes]:
        """The members of a set or a hash, in parts."""
        cursor = b"0"
        while True:
            cursor, some = self._session.command(what, deadline, command, key, cursor, b"COUNT", _SCAN)
            yield from some
            if cursor == b"0":
                return

    def set_cursor(self, request: SetCursorRequest) -> SettleReply:
        """Sets which samples a task has been given, in one script."""
        what = f"set_cursor('{request.partition_id}', '{request.task_name}')"
        while True:
            epoch, text, new_text = "", b"", ""
            known = self._known(what, request) if request.create else None
            if known is not None:
                info = _info_of(*known)
                if request.task_name not in info.consumer_tasks:
                    epoch, text = known
                    new_text = _text_of(info.extended((), (request.task_name,), {}))
            reply = self._session.run(
                what,
                request.deadline,
                "cursor",
                confirms=Acknowledged("set_cursor", request.partition_id, request.task_name, request.sample_ids),
                name=request.partition_id,
                task_name=request.task_name,
                ids=request.sample_ids,
                epoch=epoch,
                info=text,
                new_info=new_text,
            )
            if reply[0] == b"ok":
                return SettleReply(num_samples=reply[1])

    # --- clearing -----------------------------------------------------------------------------------------------------

    def clear_samples(self, request: ClearRequest) -> ClearReply:
        """Deletes samples with their payload, or a whole partition."""
        ids = request.sample_ids
        what = f"clear_samples('{request.partition_id}')"
        parts = [[]] if ids is None else [ids[at : at + _CLEAR_ROWS] for at in range(0, len(ids), _CLEAR_ROWS)]
        count, epoch = 0, b""
        for number, some in enumerate(parts, 1):
            asked = {"name": request.partition_id, "epoch": epoch, "ids": some, "whole": int(ids is None)}
            call = Acknowledged("clear_samples", request.partition_id, sample_ids=some)
            try:
                with self._session.quietly() if number > 1 else contextlib.nullcontext():  # it has changed something
                    _, cleared, left, epoch = self._session.run(what, request.deadline, "clear", confirms=call, **asked)
            except (BackendUnavailableError, OperationTimeoutError) as error:
                if (error.outcome == "not_done" and number > 1) or (error.outcome == "done" and number < len(parts)):
                    error.outcome = "unknown"  # a part is cleared, and a part is not
                raise
            count += int(cleared)
            if not epoch:  # the partition is gone
                break
        self._payload.collect(left, request.deadline)
        return ClearReply(num_samples=count)


def _text_of(info: PartitionInfo) -> str:
    by = {"registered_by": info.registered_by, "registered_at": info.registered_at}
    return json.dumps({**info.registration(), **by})


def _info_of(epoch: str, text: bytes) -> PartitionInfo:
    return _read_as(PartitionInfo, text, epoch=epoch)


def _read_as(form: type[_T], text: bytes, **more: Any) -> _T:
    """What a client stored as JSON."""
    try:
        return msgspec.convert(json.loads(text) | more, form)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise damaged("a description on the server", error) from error
