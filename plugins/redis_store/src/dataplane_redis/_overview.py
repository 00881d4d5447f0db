"""What is known about partitions besides their cells: registrations, counts, cursors. Set cursors, too."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from dataplane_core.errors import CorruptDataError, InvalidRequestError, LeaseHolder
from dataplane_core.spec import (
    AnnounceReply,
    AnnounceRequest,
    CallInfo,
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
    RegisterRequest,
    SetCursorRequest,
    SettleReply,
    TaskDescription,
    holds,
)
from dataplane_redis import _refusals
from dataplane_redis._acknowledged import Acknowledged
from dataplane_redis._claims import Claims
from dataplane_redis._session import Session
from dataplane_redis._wire import MARK, pack_strings, text_of, tuples_of

__all__ = ["Overview"]

#: Rows that one script looks at, and members that one command scans.
_LIST_ROWS: Final = 4000
_SCAN: Final = b"4000"
#: How the head of a group begins: its seq, and whether it is broken (see common.lua).
_GROUP_HEAD: Final = struct.Struct("<Q?")
#: What is stored as JSON: a registration, a client, and what it has under way.
_REGISTRATION: Final[Mapping[str, Any]] = {
    "fields": Sequence[str],
    "num_samples": int | None,
    "consumer_tasks": Sequence[str],
    "grpo_group_size": int | None,
    "enums": Mapping[str, Sequence[str]],
}
_CLIENT: Final[Mapping[str, Any]] = {
    "client_id": str,
    "host": str,
    "pid": int,
    "role": str,
    "open_s": float,
    "num_calls": int,
    "calls": Sequence[Mapping[str, Any]],
    "metrics_address": str,
}
_CALL: Final[Mapping[str, Any]] = {"operation": str, "partition_id": str, "running_s": float}


class Overview:
    """Registrations and cursors, as one client sees them."""

    def __init__(self, session: Session, claims: Claims) -> None:
        self._session = session
        self._claims = claims

    # --- registrations ------------------------------------------------------------------------------------------------

    def register(self, request: RegisterRequest) -> tuple[PartitionInfo, int]:
        """Registers a partition, or adds to its registration. Replies also whether dropped payload is left to delete.

        Two clients that add at the same time both succeed: the script changes only the description that was read.
        """
        what = f"register_partition('{request.partition_id}')"
        while True:
            known = self._read(what, request.partition_id, request.deadline) if request.if_exists == "keep" else None
            if known is None:
                reply = self._open(what, request)
                if reply is not None:
                    return reply
                continue
            epoch, text = known
            info = _info_of(epoch, text)
            if info.grpo_group_size != request.grpo_group_size:
                raise InvalidRequestError(
                    f"{what} refused: grpo_group_size is {request.grpo_group_size}. The partition that is kept has "
                    f"{info.grpo_group_size}. Nothing was changed."
                )
            extended = info.extended(request.fields, request.consumer_tasks, request.enums)
            num = request.num_samples if info.num_samples is None and request.num_samples is not None else -1
            if extended == info and num < 0:
                return info, 0
            tasks = [name for name in extended.consumer_tasks if name not in info.consumer_tasks]
            names = (request.partition_id, epoch, text, _text_of(extended), tasks, num)
            call = Acknowledged("register_partition", request.partition_id)
            reply = self._session.run(what, request.deadline, "extend", *names, confirms=call)
            if reply[0] == b"ok":
                return (extended if num < 0 else replace(extended, num_samples=reply[1])), 0

    def _open(self, what: str, request: RegisterRequest) -> tuple[PartitionInfo, int] | None:
        """Opens a partition. None if it is there and must be kept."""
        info = PartitionInfo.requested(request)
        reply = self._session.run(
            what,
            request.deadline,
            "register",
            request.partition_id,
            request.epoch,
            _text_of(info),
            -1 if request.num_samples is None else request.num_samples,
            -1 if request.grpo_group_size is None else request.grpo_group_size,
            request.consumer_tasks,
            int(request.if_exists == "keep"),
            confirms=Acknowledged("register_partition", request.partition_id),
        )
        return None if reply[0] == b"changed" else (info, reply[1])

    def describe(self, request: DescribeRequest) -> PartitionInfo:
        """Reads a registration."""
        what = f"describe_partition('{request.partition_id}')"
        reply = self._session.run(what, request.deadline, "describe", request.partition_id)
        if reply[0] != b"ok":
            _refusals.raise_partition(request.partition_id, reply)
        return _info_of(text_of(reply[1]), reply[2])

    def _read(self, what: str, partition_id: str, deadline: float) -> tuple[str, bytes] | None:
        """The epoch and the stored description of a registration. None if there is none."""
        reply = self._session.run(what, deadline, "describe", partition_id)
        return (text_of(reply[1]), reply[2]) if reply[0] == b"ok" else None

    def list_partitions(self, request: ListPartitionsRequest) -> PartitionList:
        """Lists the registered partitions."""
        _, names = self._session.run("list_partitions()", request.deadline, "partitions")
        return PartitionList(partition_ids=list(map(text_of, names)))

    # --- counts -------------------------------------------------------------------------------------------------------

    def inspect(self, request: InspectRequest) -> PartitionDescription:
        """Counts what a partition holds. Ready and leased samples are counted as for the shortfall of a claim."""
        what = f"describe('{request.partition_id}')"
        reply = self._session.run(what, request.deadline, "inspect", request.partition_id)
        if reply[0] != b"ok":
            _refusals.raise_partition(request.partition_id, reply)
        _, epoch, text, specs, num_samples, num_cleared, held_bytes, oldest_s, tasks, leases = reply
        info = _info_of(text_of(epoch), text)
        required = pack_strings(sorted(info.fields))
        consumed = {text_of(name): count for name, count in tuples_of(tasks, 2)}
        oldest = {text_of(name): _holder_of(*lease) for name, lease in tuples_of(leases, 2)}
        described = {}
        for name in info.consumer_tasks:
            ready, leased = self._claims.count(what, request.partition_id, name, required, request.deadline)
            described[name] = TaskDescription(
                num_ready=ready,
                num_leased=leased,
                num_consumed=int(consumed.get(name, 0)),
                oldest_lease=oldest.get(name) if leased else None,
            )
        return PartitionDescription(
            info=info,
            specs={text_of(name): FieldSpec.from_text(spec.decode()) for name, spec in tuples_of(specs, 2) if spec},
            num_samples=int(num_samples),
            num_cleared=int(num_cleared),
            held_bytes=int(held_bytes),
            oldest_s=float(oldest_s) if oldest_s else None,
            tasks=described,
        )

    # --- clients ------------------------------------------------------------------------------------------------------

    def announce(self, request: AnnounceRequest) -> AnnounceReply:
        """Lists a client for a time."""
        client = request.client
        text = json.dumps(asdict(client))
        with self._session.quietly():
            reply = self._session.run("announce()", request.deadline, "announce", client.client_id, text, request.ttl_s)
        return AnnounceReply(num_clients=reply[1])

    def list_clients(self, request: ListClientsRequest) -> ClientList:
        """Lists the clients."""
        reply = self._session.run("list_clients()", request.deadline, "clients")
        return ClientList(clients=[_client_of(text, float(heard_s)) for text, heard_s in tuples_of(reply[1:], 2)])

    # --- cursors ------------------------------------------------------------------------------------------------------

    def export(self, request: ExportRequest) -> PartitionState:
        """Reads cursors and history, in parts. Starts again if the partition is registered again meanwhile."""
        what = f"export_partition('{request.partition_id}')"
        consumed: dict[str, list[str]] = {}
        present: set[str] = set()
        epoch, seq = b"", b"0"
        while seq:
            reply = self._session.run(
                what, request.deadline, "consumed_ids", request.partition_id, epoch, seq, _LIST_ROWS
            )
            if reply[0] == b"changed":
                consumed, present, epoch, seq = {}, set(), b"", b"0"
                continue
            if reply[0] != b"ok":
                _refusals.raise_partition(request.partition_id, reply)
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
            known = self._read(what, request.partition_id, request.deadline) if request.create else None
            if known is not None:
                info = _info_of(*known)
                if request.task_name not in info.consumer_tasks:
                    epoch, text = known
                    new_text = _text_of(info.extended((), (request.task_name,), {}))
            names = (request.partition_id, request.task_name, request.sample_ids, epoch, text, new_text)
            call = Acknowledged("set_cursor", request.partition_id, request.task_name, request.sample_ids)
            reply = self._session.run(what, request.deadline, "cursor", *names, confirms=call)
            if reply[0] == b"ok":
                return SettleReply(num_samples=reply[1])
            if reply[0] != b"changed":
                _refusals.raise_task(request.partition_id, request.task_name, reply)


def _text_of(info: PartitionInfo) -> str:
    return json.dumps(info.registration())


def _info_of(epoch: str, text: bytes) -> PartitionInfo:
    return PartitionInfo.of(epoch, _told(text, _REGISTRATION))


def _told(text: bytes, forms: Mapping[str, Any]) -> dict[str, Any]:
    """A dict that a client stored as JSON."""
    try:
        told = json.loads(text)
        if not (isinstance(told, dict) and holds(told, forms)):
            raise ValueError("it has a part of a wrong type")
        return told
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptDataError(
            f"a description on the server cannot be read: {error}. Another program may have changed the keys of this "
            "namespace."
        ) from error


def _holder_of(sample_id: bytes, holder: bytes, left_s: bytes, held_s: bytes) -> LeaseHolder:
    return LeaseHolder(sample_id=text_of(sample_id), holder=text_of(holder), left_s=float(left_s), held_s=float(held_s))


def _client_of(text: bytes, heard_s: float) -> ClientInfo:
    told = _told(text, _CLIENT)
    calls = [CallInfo(**{name: each[name] for name in _CALL}) for each in told["calls"] if holds(each, _CALL)]
    return ClientInfo(**{**{name: told[name] for name in _CLIENT}, "calls": calls, "heard_s": heard_s})
