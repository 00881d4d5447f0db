"""What a client can learn about a store without reading cells: partitions, samples, tags, counts, cursors."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from dataplane_core._compiler_marks import with_methods_not_compiled
from dataplane_core.client.announcing import describe_client
from dataplane_core.client.checks import check_counts, check_ids, check_name, check_names
from dataplane_core.client.connection import Connection
from dataplane_core.client.verdict import Facts, judge, question_of, room_is_wanted
from dataplane_core.config import size_bytes
from dataplane_core.errors import (
    BackendError,
    MissingDataError,
    UnknownPartitionError,
    UnknownTaskError,
    Verdict,
    preview,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import (
    Answer,
    Capability,
    ClientInfo,
    ClientList,
    ConsumptionReply,
    ConsumptionRequest,
    ExportRequest,
    FieldList,
    FieldsRequest,
    InspectRequest,
    ListClientsRequest,
    ListPartitionsRequest,
    ListRequest,
    ListUnitsRequest,
    PartitionDescription,
    PartitionList,
    PartitionState,
    Question,
    SampleList,
    SetCursorRequest,
    SettleReply,
    TagFilter,
    TagValue,
    UnitInfo,
    UnitList,
    check_tag_filter,
    lengths_of,
)

#: How long a task may wait before what might be slow counts as a fault, if the config does not say it.
PATIENCE_S: Final = 60.0
#: A client that has not announced itself for so many periods, and so many seconds, is late.
_LATE: Final = 1.5
_LATE_S: Final = 0.5
#: Fields whose names begin with it belong to middleware. Callers do not see them.
_HIDDEN: Final = "~"


@with_methods_not_compiled
class Overview(Connection):
    """The part of `DataPlaneClient` that lists and counts. Its examples continue those of `DataPlaneClient`."""

    def ping(self) -> None:
        """Asks the store for a sign of life. Blocks until it answers, at most ``op_timeout_s``.

        Raises:
            OperationTimeoutError, BackendUnavailableError: It does not answer.
            UnsupportedOperationError: The backend does not declare ``listing``.

        Examples:
            >>> client.ping()
        """
        self._list_partitions("ping")

    def list_partitions(self) -> list[str]:
        """The names of all registered partitions, sorted.

        Examples:
            >>> client.list_partitions()
            ['step-1']
        """
        return self._list_partitions("list_partitions")

    def describe(self, partition_id: str, *, count_rows: bool = True) -> PartitionDescription:
        """Counts what a partition holds, and what its tasks were given.

        Args:
            partition_id: A registered partition.
            count_rows: Whether ``num_rows`` is needed. If not, a backend that would look at all samples for it leaves
                it out.

        Returns:
            Its registration (``info``), kind, dtype and shape of each written field (``specs``) and how many samples
            have it (``num_rows``), the number of samples held and cleared, their bytes, the age of the oldest, and per
            task how many are ready, leased and consumed.

        Raises:
            UnknownPartitionError: Not registered.

        Examples:
            >>> found = client.describe("step-1")
            >>> found.num_samples, found.num_cleared, found.specs["reward"].dtype
            (3, 1, 'float32')
            >>> found.tasks["trainer"].num_consumed
            3
        """
        with self._operation("describe", partition_id, needs=Capability.LISTING):
            request = InspectRequest(partition_id, count_rows=count_rows)
            found = self._call("inspect_partition", request, PartitionDescription)
            shown = {name: spec for name, spec in found.specs.items() if not name.startswith(_HIDDEN)}
            num_rows = {name: count for name, count in found.num_rows.items() if name in shown}
            return replace(found, specs=shown, num_rows=num_rows)

    def list_samples(
        self, partition_id: str, tag_filter: TagFilter | None = None, sample_ids: Sequence[str] | None = None
    ) -> KVBatchMeta:
        """The ids and tags of a partition's samples, in order of first write. No cells are read.

        Args:
            partition_id: A registered partition.
            tag_filter: A condition on tags, as for `claim_meta`.
            sample_ids: Only these samples, in this order. Those that are not there are left out.

        Raises:
            UnknownPartitionError: Not registered.

        Examples:
            >>> client.list_samples("step-1", {"input_lengths": (">=", 2)}).sample_ids
            ['p0_g1', 'p1_g1']
            >>> client.list_samples("step-1", sample_ids=["p1_g1", "p9_g9"]).tags
            [{'input_lengths': 2}]
        """
        with self._operation("list_samples", partition_id, needs=Capability.LISTING):
            condition = check_tag_filter(tag_filter)
            if condition is not None:
                self._require(Capability.TAG_FILTERS, "list_samples(tag_filter=...)")
            ids = None if sample_ids is None else list(dict.fromkeys(check_ids(sample_ids)))
            if ids == []:
                return KVBatchMeta(partition_id, None, [], tags=[])
            listed = self._call("list_samples", ListRequest(partition_id, condition, ids), SampleList)
            ids, tags = list(listed.sample_ids), [dict(row) for row in listed.tags]
            check_counts(f"list_samples('{partition_id}')", len(ids), tags=len(tags))
            return KVBatchMeta(partition_id, None, ids, sequence_lengths=lengths_of(tags), tags=tags)

    def list_sample_ids(
        self, partition_id: str, tag_filter: TagFilter | None = None, *, fields: Sequence[str] = ()
    ) -> list[str]:
        """As `list_samples`, the ids alone.

        Args:
            partition_id: A registered partition.
            tag_filter: A condition on tags, as for `claim_meta`.
            fields: Only samples that have all of these fields, so that a read of them does not fail.

        Raises:
            UnknownPartitionError: Not registered.

        Examples:
            >>> client.list_sample_ids("step-1")
            ['p0_g1', 'p1_g0', 'p1_g1']
            >>> client.list_sample_ids("step-1", fields=["reward", "advantages"])
            []
        """
        wanted = check_names("fields", fields)
        ids = self.list_samples(partition_id, tag_filter).sample_ids
        while wanted and ids:
            what = f"list_sample_ids('{partition_id}', fields={wanted})"
            try:
                has = self._list_fields(what, partition_id, ids)
                return [each for each, names in zip(ids, has, strict=True) if set(wanted) <= set(names)]
            except UnknownPartitionError:
                raise
            except MissingDataError:  # samples were cleared meanwhile
                ids = self.list_samples(partition_id, tag_filter, ids).sample_ids
        return ids

    def list_fields(self, sample_ids: Sequence[str], partition_id: str) -> list[list[str]]:
        """For each sample, the fields that it has. No cells are read.

        Raises:
            MissingDataError: A sample is not there. It is also a `KeyError`.
            UnknownPartitionError: Not registered.

        Examples:
            >>> client.list_fields(["p1_g0"], "step-1")
            [['input_ids', 'reward']]
        """
        check_name("partition_id", partition_id)
        ids = check_ids(sample_ids)
        if not ids:
            return []
        unique = list(dict.fromkeys(ids))
        found = self._list_fields(f"list_fields('{partition_id}', {len(unique)} samples)", partition_id, unique)
        fields = dict(zip(unique, found, strict=True))
        return [fields[each] for each in ids]

    def list_consumed(self, partition_id: str, task_name: str) -> list[str]:
        """The held samples that a task was given for good (without a lease, or acked), in order of first write.

        Raises:
            UnknownPartitionError: Not registered.

        Examples:
            >>> client.list_consumed("step-1", "trainer")
            ['p0_g1', 'p1_g0', 'p1_g1']
        """
        with self._naming_errors():
            check_name("task_name", task_name)
            state = self._export("list_consumed", partition_id)
            if task_name not in state.consumed:
                raise UnknownTaskError(
                    f"partition '{partition_id}' has no consumer task '{task_name}'.",
                    hint=f"Registered: {preview(state.consumed, limit=5) or 'none'}.",
                )
            return list(state.consumed[task_name])

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: Sequence[str] = ()) -> None:
        """Takes back all that a task was given, so that it can claim the samples again. Its leases end.

        Args:
            partition_id: A registered partition.
            task_name: A task of it.
            sample_ids: Samples that it keeps, or is given now, for good. Those that are not there are ignored.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.

        Examples:
            >>> client.reset_consumption("step-1", "trainer")
            >>> client.claim_meta("step-1", "trainer", ["reward"], 3).sample_ids
            ['p0_g1', 'p1_g0', 'p1_g1']
        """
        self._set_cursor("reset_consumption", partition_id, task_name, check_ids(sample_ids), create=False)

    def why(self, partition_id: str | None = None, task_name: str | None = None) -> list[Verdict]:
        """Why tasks get no samples: for each task its state, and the one cause with names. Changes nothing.

        It looks at all samples of the tasks whose claims wait. The times of clients are as of their last announcement.

        Args:
            partition_id: A partition. None: all.
            task_name: A task. None: all.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
            UnsupportedOperationError: The backend does not declare ``listing`` and ``claims``.

        Examples:
            >>> [(each.task_name, each.state) for each in client.why("step-1")]
            [('trainer', 'done')]
        """
        partition = filter(None, [partition_id])  # None: all of them
        with self._operation("why", *partition, needs=Capability.LISTING):
            self._require(Capability.CLAIMS, "why")
            verdicts = self._judged(partition_id, task_name)
            if not verdicts and task_name is not None:
                raise UnknownTaskError(f"why refused: no partition has a consumer task '{task_name}'.")
            return verdicts

    def list_clients(self, *, ended: bool = False) -> list[ClientInfo]:
        """The clients of the store, as they announced themselves, sorted by host and process.

        A client announces itself one second after it was opened, and then every ``announce_s`` seconds of its config
        (less often in a store with more than 500 clients). One that ended without `close` is listed a little longer
        than three times as many seconds.

        Args:
            ended: Whether to list also those that closed, or were not heard of for too long, in the last ten minutes.
                Their ``state`` says which, and whether a process of this host is stopped or gone.

        Raises:
            UnsupportedOperationError: The backend does not declare ``clients``.

        Examples:
            >>> [(each.pid, each.role, each.calls) for each in client.list_clients()]
            []
        """
        with self._operation("list_clients", needs=Capability.CLIENTS):
            return self._list_clients(ended=ended)

    def list_units(self) -> list[UnitInfo]:
        """The storage units: the processes that hold the payload, in order of their first start.

        Raises:
            UnsupportedOperationError: The backend does not declare ``units``.

        Examples:
            >>> [(unit.name, unit.num_rows) for unit in client.list_units()]  # doctest: +SKIP
            [('unit-0', 512), ('unit-1', 512)]
        """
        with self._operation("list_units", needs=Capability.UNITS):
            return list(self._call("list_units", ListUnitsRequest(), UnitList).units)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _list_clients(self, *, ended: bool, deadline: float = math.inf) -> list[ClientInfo]:
        request = ListClientsRequest(ended=ended, deadline=deadline)
        found = self._call("list_clients", request, ClientList).clients
        if ended:
            found = [replace(each, state=_state_of(each)) for each in found]
        return sorted(found, key=lambda client: (client.host, client.pid, client.client_id))

    def _judged(self, partition_id: str | None, task_name: str | None, deadline: float = math.inf) -> list[Verdict]:
        """The verdicts of tasks: of one partition, or of all; of one task, or of all."""
        facts = self._facts(partition_id, deadline)
        names = sorted(facts.partitions) if partition_id is None else [partition_id]
        tasks = [(name, task) for name in names for task in facts.partitions[name].tasks if task_name in (None, task)]
        return judge(facts, tasks)

    def _facts(self, partition_id: str | None, deadline: float) -> Facts:
        """What the store knows of a partition, or of all, and of its clients."""
        own = describe_client(self, self._announcer)  # what it announced last may be seconds old
        clients = [own]
        if Capability.CLIENTS in self._capabilities:
            found = self._list_clients(ended=True, deadline=deadline)
            clients += [each for each in found if each.client_id != own.client_id]
        capacity = self._config.options.get("capacity_bytes")
        wants_all = partition_id is None or (capacity is not None and room_is_wanted(clients))
        names = self._list_partitions("why", deadline) if wants_all else [partition_id or ""]
        partitions: dict[str, PartitionDescription] = {}
        answers: dict[tuple[str, str], Answer | None] = {}
        finished: set[tuple[str, str]] = set()
        for name in names:
            asked = {task: question_of(clients, name, task) for task in _tasks_of(clients, name)}
            waiting = [each for each in asked.values() if each is not None]
            questions = [
                Question(
                    task_name=each.task_name,
                    required_fields=list(each.fields),
                    tag_filter=None if each.tag_filter is None else dict(each.tag_filter),
                    explain=each.waits_s is not None or each.unserved_s is not None,
                )
                for each in waiting
            ]
            try:
                count_rows = any(each.explain for each in questions)  # all samples are looked at then, anyway
                request = InspectRequest(name, questions, count_rows=count_rows, deadline=deadline)
                partitions[name] = self._call("inspect_partition", request, PartitionDescription)
            except UnknownPartitionError:
                if name == partition_id:
                    raise
                continue  # cleared meanwhile
            said = partitions[name].answers or [None] * len(waiting)  # a backend may answer none
            answers |= {(name, each.task_name): answer for each, answer in zip(waiting, said, strict=True)}
            has_ended = partitions[name].is_complete and partitions[name].info.grpo_group_size is not None
            for task in partitions[name].tasks if has_ended else ():  # those that stay short may be left
                consumption = ConsumptionRequest(name, [task], deadline=deadline)
                if self._call("check_consumption", consumption, ConsumptionReply).consumed:
                    finished.add((name, task))
        facts = Facts(
            partitions=partitions,
            answers=answers,
            finished=finished,
            clients=clients,
            held_bytes=sum(each.held_bytes for each in partitions.values()) if wants_all else 0,
            capacity_bytes=None if capacity is None else int(size_bytes(capacity)) * self._config.num_ledgers,
            patience_s=self._config.warn_after_s or PATIENCE_S,
            now=time.time(),
        )
        return self._with_names(facts, deadline)

    def _with_names(self, facts: Facts, deadline: float) -> Facts:
        """Adds what is known of the samples and groups that shortfalls name."""
        tags: dict[tuple[str, str], Mapping[str, TagValue]] = {}
        members: dict[tuple[str, str], list[str]] = {}
        for (name, _), answer in facts.answers.items():
            shortfall = None if answer is None else answer.shortfall
            if shortfall is None or not (shortfall.not_matching or shortfall.incomplete_groups):
                continue
            size = facts.partitions[name].info.grpo_group_size or 1
            groups = {group: [f"{group}_g{place}" for place in range(size)] for group in shortfall.incomplete_groups}
            ids = [*shortfall.not_matching, *(each for some in groups.values() for each in some)]
            with suppress(UnknownPartitionError):  # cleared meanwhile
                request = ListRequest(name, None, list(dict.fromkeys(ids)), deadline=deadline)
                listed = self._call("list_samples", request, SampleList)
                there = dict(zip(listed.sample_ids, listed.tags, strict=True))
                tags |= {(name, each): there[each] for each in shortfall.not_matching if each in there}
                members |= {(name, group): [each for each in some if each in there] for group, some in groups.items()}
        return replace(facts, tags=tags, members=members)

    def _list_partitions(self, what: str, deadline: float = math.inf) -> list[str]:
        with self._operation(what, needs=Capability.LISTING):
            request = ListPartitionsRequest(deadline=deadline)
            return sorted(self._call("list_partitions", request, PartitionList).partition_ids)

    def _list_fields(self, what: str, partition_id: str, sample_ids: list[str]) -> list[list[str]]:
        """For each sample the fields that it has, without those of middleware. Equal lists are the same object."""
        with self._operation("list_fields", partition_id):
            self._require(Capability.LISTING, what)
            found = self._call("list_fields", FieldsRequest(partition_id, sample_ids), FieldList)
            check_counts(what, len(sample_ids), samples=len(found.index))
            if found.index and not 0 <= min(found.index) <= max(found.index) < len(found.patterns):
                raise BackendError(
                    f"{what}: the backend's reply holds {len(found.patterns)} sets of fields, and names others. "
                    "Expected a set for each sample."
                )
        patterns = [[name for name in names if not name.startswith(_HIDDEN)] for names in found.patterns]
        return [patterns[place] for place in found.index]

    def _export(self, what: str, partition_id: str) -> PartitionState:
        with self._operation(what, partition_id, needs=Capability.CURSORS):
            return self._call("export_partition", ExportRequest(partition_id), PartitionState)

    def _set_cursor(
        self, what: str, partition_id: str, task_name: str, sample_ids: Sequence[str], *, create: bool
    ) -> int:
        with self._operation(what, partition_id, needs=Capability.CURSORS):
            check_name("task_name", task_name)
            request = SetCursorRequest(partition_id, task_name, list(sample_ids), create)
            return self._call("set_cursor", request, SettleReply).num_samples


def _tasks_of(clients: Iterable[ClientInfo], partition_id: str) -> list[str]:
    """The tasks of a partition for which clients claim."""
    work = (each for client in clients for each in client.work)
    return list(dict.fromkeys(each.task_name for each in work if each.task_name and each.partition_id == partition_id))


def _state_of(client: ClientInfo) -> Literal["open", "closed", "silent", "stopped", "gone"]:
    """The state of a client, with what this host knows of its process if it should have announced itself by now."""
    # a process that still announces itself is there, even if this host lists it under another number
    is_late = client.heard_s > _LATE * client.period_s + _LATE_S
    if client.host != socket.gethostname() or client.state == "closed" or not (client.period_s and is_late):
        return client.state
    try:
        state = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, IndexError):
        return client.state
    return "stopped" if state in "Tt" else "gone" if state in "ZX" else client.state


def common_fields(fields: Iterable[list[str]]) -> list[str]:
    """The fields that all samples have, from what `DataPlaneClient.list_fields` returned. Empty without samples.

    Examples:
        >>> common_fields([["input_ids", "reward"], ["reward"]])
        ['reward']
    """
    patterns = list({id(names): names for names in fields}.values())  # samples with equal fields share a list
    return [name for name in patterns[0] if all(name in names for names in patterns)] if patterns else []
