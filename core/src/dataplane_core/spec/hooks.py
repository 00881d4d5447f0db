"""The operations of `DataPlaneClient` as pluggy hook specs.

Every hook takes one mutable request object, and its first result is the answer (``firstresult=True``). A backend
implements the hooks as plain methods. Middleware wraps them with ``@hookimpl(wrapper=True)``: it may change the
request's attributes before ``yield`` and return another reply after it.

Core checks these before it calls a hook: sample ids are unique, non-empty strings; lists are not empty; columns are
encoded in the backend's `WireFormat` and have one row per id; tags are valid. Hooks run in the process of the client
and in the caller's thread, possibly in several threads at once, but never in the middle of another hook of the same
client and thread. They must return or raise before ``deadline``.
"""

# mypy: disable-error-code="empty-body"
# A hook spec has no body: pluggy calls the implementations.

from __future__ import annotations

from typing import Final

import pluggy

from dataplane_core.spec import replies, requests

#: The version of the contract that this core speaks.
CONTRACT_VERSION: Final = 1

hookspec = pluggy.HookspecMarker("dataplane")
#: Marks middleware wrappers: ``@hookimpl(wrapper=True)``. Backends need no marker.
hookimpl = pluggy.HookimplMarker("dataplane")


class DataPlaneSpec:
    """The hook specs.

    A hook may raise any other `DataPlaneError` too. Core wraps every other exception in `BackendError`.
    """

    @hookspec(firstresult=True)
    def register_partition(self, request: requests.RegisterRequest) -> replies.PartitionInfo:
        """Opens the partition. On return, an earlier registration is dropped or extended, as ``if_exists`` says.

        To finish a partition, the client sends ``keep`` with ``num_samples`` 0.

        Raises:
            InvalidRequestError: ``if_exists`` is ``keep``, and the partition has another group size. Nothing changed.
        """

    @hookspec(firstresult=True)
    def describe_partition(self, request: requests.DescribeRequest) -> replies.PartitionInfo:
        """Reads the registration.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def put_samples(self, request: requests.PutRequest) -> replies.PutReply:
        """Commits cells and tags, then marks the cells as produced. Returns once every client sees the commit.

        Raises:
            UnknownPartitionError: Not registered.
            SchemaMismatchError: A spec differs from the field's first write (`FieldSpec.after`). Its ``expected`` has
                the specs of these fields. Nothing is written.
            InvalidRequestError: An id has no ``_g``, or a group would have too many members. Nothing is written.
            InvalidRequestError: More distinct ids than ``num_samples`` would have been written. Nothing is written.
            StalePartitionError: ``epoch`` is not the current registration. Nothing is written.
            CapacityExceededError: The store is full and configured to raise.
            LostReplyError: The put was sent and its reply is lost. The client calls the hook again with the same
                ``request_id``, if the backend declares ``repeatable``.
            OperationTimeoutError: Its ``outcome`` says whether the put is written.
        """

    @hookspec(firstresult=True)
    def get_samples(self, request: requests.GetRequest) -> replies.WireBatch:
        """Reads exactly one row per id in every column asked for.

        Raises:
            UnknownPartitionError: Not registered.
            MissingDataError: Names the first missing samples or cells, and counts the rest.
            LostSamplesError: The payload of produced cells is gone from the store.
            OpenCellsError: Cells of one field are stored in different forms, since some were put while it was open
                (`FieldSpec.reading`). The client then reads each group by itself.
        """

    @hookspec(firstresult=True)
    def claim(self, request: requests.ClaimRequest) -> replies.Claim:
        """Hands out ready samples, each at most once per task; with leases, to one holder at a time. Never waits.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
            InvalidRequestError: ``batch_size`` is not a multiple of the group size. Or the batch of the rank was given
                before, and its samples are cleared.
        """

    @hookspec(firstresult=True)
    def ack(self, request: requests.AckRequest) -> replies.SettleReply:
        """Settles all of the rows or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def nack(self, request: requests.NackRequest) -> replies.SettleReply:
        """Gives all of the rows back or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def renew(self, request: requests.RenewRequest) -> replies.SettleReply:
        """Renews all of the leases or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def check_consumption(self, request: requests.ConsumptionRequest) -> replies.ConsumptionReply:
        """Answers from the store's own state. False for an unknown partition or task, and before ``num_samples``
        distinct ids were written; without ``num_samples``, while no sample is held.
        """

    @hookspec(firstresult=True)
    def clear_samples(self, request: requests.ClearRequest) -> replies.ClearReply:
        """Drops rows with their tags and cursors, or the whole partition. Ignores samples that are not there."""

    @hookspec(firstresult=True)
    def list_samples(self, request: requests.ListRequest) -> replies.SampleList:
        """Lists ids and tags.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def list_partitions(self, request: requests.ListPartitionsRequest) -> replies.PartitionList:
        """Lists the registered partitions."""

    @hookspec(firstresult=True)
    def inspect_partition(self, request: requests.InspectRequest) -> replies.PartitionDescription:
        """Counts what the partition holds, and what its tasks were given.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def list_fields(self, request: requests.FieldsRequest) -> replies.FieldList:
        """Lists the produced fields of samples.

        Raises:
            UnknownPartitionError: Not registered.
            MissingDataError: Names the first missing samples, and counts the rest.
        """

    @hookspec(firstresult=True)
    def announce(self, request: requests.AnnounceRequest) -> replies.AnnounceReply:
        """Lists the client for ``ttl_s`` seconds in place of what it announced before. 0: no longer."""

    @hookspec(firstresult=True)
    def list_clients(self, request: requests.ListClientsRequest) -> replies.ClientList:
        """Lists the clients that were announced and whose time is not over."""

    @hookspec(firstresult=True)
    def list_units(self, request: requests.ListUnitsRequest) -> replies.UnitList:
        """Lists the storage units."""

    @hookspec(firstresult=True)
    def export_partition(self, request: requests.ExportRequest) -> replies.PartitionState:
        """Reads cursors and history.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def set_cursor(self, request: requests.SetCursorRequest) -> replies.SettleReply:
        """Sets which samples a task has been given, all at once. Replies how many of the samples are there.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
        """
