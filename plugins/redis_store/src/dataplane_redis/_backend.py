"""`RedisBackend`: every operation is a script on the server. Large payload bypasses the scripts.

Puts are in `_puts`, reads and listings in `_reads`, claims and their settling in `_claims`, registrations, counts and
cursors in `_overview`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from dataplane_core.backends import Backend, Finding
from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity
from dataplane_core.spec import (
    AckRequest,
    AnnounceReply,
    AnnounceRequest,
    Capability,
    Claim,
    ClaimRequest,
    ClearReply,
    ClearRequest,
    ClientList,
    ConsumptionReply,
    ConsumptionRequest,
    DescribeRequest,
    ExportRequest,
    FieldList,
    FieldsRequest,
    GetRequest,
    InspectRequest,
    ListClientsRequest,
    ListPartitionsRequest,
    ListRequest,
    NackRequest,
    PartitionDescription,
    PartitionInfo,
    PartitionList,
    PartitionState,
    PutReply,
    PutRequest,
    RegisterRequest,
    RenewRequest,
    SampleList,
    Scope,
    SetCursorRequest,
    SettleReply,
    WireBatch,
    WireFormat,
)
from dataplane_redis import _refusals
from dataplane_redis._acknowledged import Acknowledged, Acknowledgements
from dataplane_redis._claims import Claims
from dataplane_redis._diagnosis import diagnose
from dataplane_redis._instance import Durability, Instance, check_server, durability_of
from dataplane_redis._link import Link
from dataplane_redis._litter import Litter
from dataplane_redis._nodes import Nodes
from dataplane_redis._overview import Overview
from dataplane_redis._payload import Payload
from dataplane_redis._placing import NUM_BUCKETS, Placing, base_of
from dataplane_redis._puts import Puts
from dataplane_redis._reads import Reads
from dataplane_redis._server import PrivateServer, has_ended, private_url
from dataplane_redis._session import Session
from dataplane_redis._wakes import Wakes
from dataplane_redis.config import RedisConfig

__all__ = ["RedisBackend"]

_log = logging.getLogger("dataplane_redis")

#: Rows that one script clears.
_CLEAR_ROWS: Final = 1000
#: Seconds that close may take at most to end what waits, and to remove this client as the owner of the instance.
_CLOSE_S: Final = 2.0


class RedisBackend(Backend):
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
    #: See `bundles_of`.
    row_cost_bytes: ClassVar[int | None] = 6144

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._server: PrivateServer | None = None
        self._bootstrapped = False
        self._session = Session(config.namespace, _acknowledgements_of(config))
        payload = Payload(self._session)
        self._litter = Litter(self._session, payload)
        self._wakes = Wakes(self._session)
        weakref.finalize(self, self._wakes.close)
        self._puts = Puts(self._session, payload, self._litter, self._wakes)
        self._reads = Reads(self._session, payload)
        self._claims = Claims(self._session, self._wakes)
        self._overview = Overview(self._session, self._claims)

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
        if config.url is None:
            url, label = private_url(config.namespace), f"the private redis-server of namespace '{config.namespace}'"
            if bootstrap:
                check_capacity(config.capacity_bytes)
                self._server = PrivateServer(config)
                self._server.start(deadline)
        else:
            url, label = config.url.get_secret_value(), _refusals.label_of(config.url.get_secret_value())
        session = self._session
        link = session.link = Link(url, label)
        link.watch = session.acknowledgements
        slots = link.follow("connect", deadline, session.base)
        durability = check_server(link, config, deadline)
        if bootstrap:
            num_buckets = 1 if slots is None else NUM_BUCKETS
            session.instance = Instance.bootstrap(
                link, session.base, config, deadline, exclusive=self.exclusive, num_buckets=num_buckets
            )
        else:
            session.instance = Instance.attach(link, session.base, config, deadline)
        session.placing = Placing(config.namespace, session.instance.num_buckets)
        if session.placing.is_spread:
            session.nodes = Nodes(link)
            session.nodes.learn(slots or ())
        if config.url is None:
            link.has_ended = functools.partial(has_ended, config.namespace)
        self._bootstrapped = bootstrap
        _log.info("connected to %s: %s", label, durability.describe())

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
                    session.instance.end(link, session.base, self.config, deadline)
                if session.acknowledgements is not None:
                    session.acknowledgements.end(link, deadline)
            link.close()
            if session.nodes is not None:
                session.nodes.close()
        if self._server is not None:
            self._server.stop(self.stop_by)

    def durability(self, deadline: float) -> Durability:
        """How the server keeps data, by its current settings."""
        return durability_of(self._session.connected()[0], self.config, deadline)

    # --- registrations ------------------------------------------------------------------------------------------------

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        """Registers a partition. Drops an earlier registration of it, or adds to it."""
        info, left = self._overview.register(request)
        self._litter.collect(left, request.deadline)
        return info

    def describe_partition(self, request: DescribeRequest) -> PartitionInfo:
        """Reads a registration."""
        return self._overview.describe(request)

    def list_partitions(self, request: ListPartitionsRequest) -> PartitionList:
        """Lists the registered partitions."""
        return self._overview.list_partitions(request)

    def inspect_partition(self, request: InspectRequest) -> PartitionDescription:
        """Counts what a partition holds."""
        return self._overview.inspect(request)

    def list_fields(self, request: FieldsRequest) -> FieldList:
        """Lists the produced fields of samples."""
        return self._reads.list_fields(request)

    def announce(self, request: AnnounceRequest) -> AnnounceReply:
        """Lists a client. In a cluster, also deletes payload that other clients left."""
        reply = self._overview.announce(request)
        if request.ttl_s:
            self._litter.look(request.deadline)
        return reply

    def list_clients(self, request: ListClientsRequest) -> ClientList:
        """Lists the clients."""
        return self._overview.list_clients(request)

    def export_partition(self, request: ExportRequest) -> PartitionState:
        """Reads cursors and history."""
        return self._overview.export(request)

    def set_cursor(self, request: SetCursorRequest) -> SettleReply:
        """Sets which samples a task has been given."""
        return self._overview.set_cursor(request)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def put_samples(self, request: PutRequest) -> PutReply:
        """Runs one script for a small put; else reserves, writes the rows and commits."""
        return self._puts.put_samples(request, self.row_cost_bytes)

    # --- reads --------------------------------------------------------------------------------------------------------

    def get_samples(self, request: GetRequest) -> WireBatch:
        """Locates the rows and fetches them."""
        return self._reads.get_samples(request)

    def list_samples(self, request: ListRequest) -> SampleList:
        """Lists ids and tags."""
        return self._reads.list_samples(request)

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
        """Whether the tasks have consumed the partition."""
        what = f"check_consumption_status('{request.partition_id}')"
        reply = self._session.run(what, request.deadline, "consumed", request.partition_id, request.task_names)
        return ConsumptionReply(consumed=bool(reply[1]))

    # --- clearing -----------------------------------------------------------------------------------------------------

    def clear_samples(self, request: ClearRequest) -> ClearReply:
        """Deletes samples with their payload, or a whole partition."""
        ids = request.sample_ids
        what = f"clear_samples('{request.partition_id}')"
        parts = [[]] if ids is None else [ids[at : at + _CLEAR_ROWS] for at in range(0, len(ids), _CLEAR_ROWS)]
        count, epoch = 0, b""
        for number, some in enumerate(parts, 1):
            asked = (request.partition_id, epoch, some, int(ids is None))
            call = Acknowledged("clear_samples", request.partition_id, sample_ids=some)
            try:
                with self._session.quietly() if number > 1 else contextlib.nullcontext():  # it has changed something
                    _, cleared, left, epoch = self._session.run(what, request.deadline, "clear", *asked, confirms=call)
            except (BackendUnavailableError, OperationTimeoutError) as error:
                if (error.outcome == "not_done" and number > 1) or (error.outcome == "done" and number < len(parts)):
                    error.outcome = "unknown"  # a part is cleared, and a part is not
                raise
            count += int(cleared)
            if not epoch:  # the partition is gone
                break
        self._litter.collect(left, request.deadline)
        return ClearReply(num_samples=count)


def _acknowledgements_of(config: RedisConfig) -> Acknowledgements | None:
    if config.url is None:
        return None
    return Acknowledgements(base_of(config.namespace), config.wait_replicas, config.wait_fsync)
