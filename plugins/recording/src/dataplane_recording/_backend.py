"""`RecordingBackend`: a store in this process, in which a recorded run happens again.

The base class keeps the cells. What is here finds what an operation stands for in the recording, loads the cells that
other processes of the run wrote, and compares those that this process writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from msgspec.structs import replace

from dataplane_core import errors, spec
from dataplane_core.backends import LEDGER_CAPABILITIES, CapacityOptions, RefsGoneError, RowStoreBackend
from dataplane_core.codec import Columns, decode_columns, encode_columns, scalar_of_digest, take_rows
from dataplane_core.errors import preview
from dataplane_observe import row_digests
from dataplane_recording._replay import Replay
from dataplane_recording._timeline import Event, Registration, Timeline

_R = TypeVar("_R")
_log = logging.getLogger(__name__)


class DifferenceError(errors.DataPlaneError, ValueError):
    """A put is not what the run put. Nothing was written.

    Attributes:
        step: The step whose end was the last before the recorded put, or None.
        sample_id: The first sample that differs.
        field: The first column of it that differs.
    """

    step: int | None = None
    sample_id: str = ""
    field: str = ""


class RecordingOptions(CapacityOptions):
    """The options of `RecordingBackend`.

    Attributes:
        folder: The folder of the middleware ``recorder``.
        after_step: The replay begins after the end of this step of the run, as a trainer does that goes on from a save.
            None: it begins where the run began.
        on_difference: What a put does that is not what the run put: raise (``error``), or log (``warn``).
        other_partitions: Whether a partition that the run did not have is refused (``refuse``), or an ordinary one in
            this process (``serve``).
    """

    folder: Path
    after_step: int | None = None
    on_difference: Literal["error", "warn"] = "error"
    other_partitions: Literal["refuse", "serve"] = "refuse"


def _replayed(method: Callable[[Any, Replay, Any], _R]) -> Callable[[Any, Any], _R]:
    """A hook for partitions of the run. Other partitions, and those that are not registered, get the base class's."""
    plain: Callable[[Any, Any], _R] = getattr(RowStoreBackend, method.__name__)

    def hook(self: RecordingBackend, request: Any) -> _R:
        with self._lock:
            now = self._at(request)
            if now is not None and not isinstance(request, spec.PutRequest):
                return method(self, now, request)
        return plain(self, request) if now is None else method(self, now, request)  # a put may wait for room

    hook.__name__, hook.__doc__ = method.__name__, method.__doc__
    return hook


class RecordingBackend(RowStoreBackend):
    """Replays a recording. Each process of a replaying run opens the folder for itself, and needs no other process.

    What another process of the replay writes is not seen here. What the one of the run wrote, is.
    """

    capabilities = LEDGER_CAPABILITIES | {spec.Capability.NO_PICKLE}
    opens_anywhere = True
    why_not_declared: ClassVar[Mapping[str, str]] = {
        spec.Capability.CLIENTS: "each process has a store of its own",
        spec.Capability.UNITS: "the client's own process holds the payload",
        spec.Capability.WAKES: "the recording answers a claim at once",
        spec.Capability.DURABLE: "what is put ends with its process",
        "scope": "each process reads the recording for itself, and sees no other process",
    }
    Config = RecordingOptions
    config: RecordingOptions

    def __init__(self, config: RecordingOptions) -> None:
        super().__init__(config)
        self._rows: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self._open: dict[str, Replay] = {}
        self._next: dict[str, int] = {}  # partition -> the number of its next registration
        self._registered: set[str] = set()  # by this process
        self._told: set[tuple[str, str]] = set()

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Reads the recording."""
        super().start(bootstrap=bootstrap, deadline=deadline)
        self._timeline = Timeline(self.config.folder, self.config.after_step)

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        for row, handle in enumerate(handles):
            self._rows[handle] = bytes(buffer[offsets[row] : offsets[row + 1]])

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[bytes]:
        gone = [handle for handle in handles if handle not in self._rows]
        if gone:
            raise RefsGoneError(f"{len(gone)} rows are gone.", handles=gone)
        return [self._rows[handle] for handle in handles]

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        for handle in handles:
            self._rows.pop(handle, None)

    # --- registrations ------------------------------------------------------------------------------------------------

    def register_partition(self, request: spec.RegisterRequest) -> spec.PartitionInfo:
        """Begins the next registration of this name in the recording."""
        name, keeps = request.partition_id, request.if_exists == "keep"
        with self._lock:
            known, now = self._timeline.registrations(name), self._open.get(name)
            if not known and self.config.other_partitions == "refuse":
                raise errors.InvalidRequestError(
                    f"register_partition('{name}') refused: the run had no such partition.",
                    hint="With other_partitions: serve it is an ordinary one in this process.",
                )
            if not known:
                return super().register_partition(request)
            number = self._next.get(name, 0)
            if now is not None:
                number = now.run.number + (not keeps and (now.is_ours or now.is_used))
            if number >= len(known):
                raise errors.InvalidRequestError(
                    f"register_partition('{name}') refused: the run registered it {len(known)} times, the last one "
                    f"{self._timeline.when(known[-1].first)}. This would be one more."
                )
            run = known[number]
            self._check_registration(request, run)
            if now is None or not keeps:
                now = self._begin(name, run, request.epoch, run.first.record.num_samples)
            info = now.info.extended(request.fields, request.consumer_tasks, request.enums)
            if keeps and info.num_samples is None and request.num_samples is not None:
                info = replace(info, num_samples=max(request.num_samples, len(now.sample_ids())))
            now.is_ours, now.info = True, info
            self._registered.add(name)
            return info

    def _check_registration(self, request: spec.RegisterRequest, run: Registration) -> None:
        first, opens = run.first.record, request.if_exists == "replace"
        others = [name for name in request.consumer_tasks if name not in run.consumer_tasks]
        if request.grpo_group_size != first.grpo_group_size and (opens or request.grpo_group_size is not None):
            found, recorded = f"grpo_group_size is {request.grpo_group_size}", str(first.grpo_group_size)
        elif request.rollouts != first.rollouts and (opens or request.rollouts):
            found, recorded = f"rollouts is {request.rollouts}", str(first.rollouts)
        elif request.num_samples != first.num_samples and opens:
            found, recorded = f"num_samples is {request.num_samples}", str(first.num_samples)
        elif others:
            found, recorded = f"consumer_tasks has {preview(others)}", preview(run.consumer_tasks) or "none"
        else:
            return
        raise errors.InvalidRequestError(
            f"register_partition('{request.partition_id}') refused: {found}. The run had {recorded}, in registration "
            f"{run.number + 1} of it, {self._timeline.when(run.first)}."
        )

    def _begin(self, name: str, run: Registration, epoch: str, num_samples: int | None) -> Replay:
        """Opens a registration. The ledger needs to know of it only what lets it keep cells."""
        request = spec.RegisterRequest(name, list(run.fields), None, list(run.consumer_tasks), epoch=epoch)
        info = replace(
            super().register_partition(request),
            num_samples=num_samples,
            grpo_group_size=run.first.record.grpo_group_size,
            rollouts=run.first.record.rollouts,
            enums={field: tuple(words) for field, words in run.enums.items()},
        )
        now = self._open[name] = Replay(run, info)
        return now

    def _at(self, request: Any) -> Replay | None:
        """The registration in which an operation happens again. None: the base class answers it.

        A process that registers a partition is in what it registered. Any other one, such as a worker, is in the first
        registration, from its last one on, in which the run did this more often than this process has.
        """
        name = request.partition_id
        known, now = self._timeline.registrations(name), self._open.get(name)
        if not known or (now is None and name in self._registered):
            return None
        if now is None or not now.is_ours:
            start = self._next.get(name, 0) if now is None else now.run.number
            task, ids = getattr(request, "task_name", ""), getattr(request, "sample_ids", None) or [""]
            is_claim = isinstance(request, spec.ClaimRequest)
            fit = (run for run in known[start:] if (task in run.claims if is_claim else ids[0] in run.puts))
            numbers = [run.number for run in islice(fit, 2)]
            if now is not None and numbers[:1] == [start] and len(numbers) > 1 and not now.has_more(request):
                numbers = numbers[1:]
            number = numbers[0] if numbers else start
            if number >= len(known):
                return None
            if now is None or number != start:
                run, first = known[number], known[number].first.record
                now = self._begin(name, run, first.epoch, len(run.puts) if run.is_finished else first.num_samples)
        now.is_used |= isinstance(request, (spec.ClaimRequest, spec.GetRequest, spec.PutRequest, spec.ClearRequest))
        return now

    @_replayed
    def describe_partition(self, now: Replay, request: spec.DescribeRequest) -> spec.PartitionInfo:
        """As it was registered."""
        return now.info

    @_replayed
    def inspect_partition(self, now: Replay, request: spec.InspectRequest) -> spec.PartitionDescription:
        """What this process holds of it."""
        found: spec.PartitionDescription = super().inspect_partition(request)
        return replace(found, info=now.info)

    # --- claims -------------------------------------------------------------------------------------------------------

    @_replayed
    def claim(self, now: Replay, request: spec.ClaimRequest) -> spec.Claim:
        """Gives what the recorded claim gave."""
        found = now.next_claim(request)
        no_tokens: list[str] | None = None if request.lease_s is None else []
        if found is None:
            last = self._last_claim(now, request)
            return spec.Claim(exhausted=True, lease_tokens=no_tokens, epoch=now.info.epoch, num_ranks=last.num_ranks)
        key, event = found
        record, ids = event.record, event.record.ids
        self._check_claim(now, request, event)
        now.given.setdefault(request.task_name, set()).add(key)
        now.claimed.update(dict.fromkeys(ids, event.at))
        if no_tokens is not None:
            now.leases.setdefault(request.task_name, {}).update(dict.fromkeys(ids, (request.token, False)))
        return spec.Claim(
            sample_ids=list(ids),
            tags=[dict(tags) for tags in record.tags or [{}] * len(ids)],
            lease_tokens=no_tokens if no_tokens is None else [request.token] * len(ids),
            exhausted=record.exhausted or not ids,
            epoch=now.info.epoch,
            num_ranks=record.num_ranks,
            counts_groups=now.info.rollouts,
        )

    def _last_claim(self, now: Replay, request: spec.ClaimRequest) -> Any:
        """The record of the last claim before one that the run did not make, if it found the end of the partition."""
        claims, rank = now.run.claims.get(request.task_name, {}), request.dp_rank
        what = f"claim_meta('{request.partition_id}', '{request.task_name}') refused: "
        mine = [claim for (its_rank, _), claim in claims.items() if its_rank == rank and not claim.is_lost]
        if not mine and claims:
            ranks = sorted({-1 if its_rank is None else its_rank for its_rank, _ in claims})
            raise errors.InvalidRequestError(
                f"{what}{'it names no rank' if rank is None else f'it is of rank {rank}'}. The run claimed "
                f"{'without ranks' if ranks == [-1] else f'for ranks {preview(ranks)}'}, "
                f"{self._timeline.when(next(iter(claims.values())))}.",
            )
        if mine and mine[-1].record.exhausted:
            return mine[-1].record
        later = self._timeline.registrations(request.partition_id)[now.run.number + 1 :]
        when = self._timeline.when(later[0].first) if later else ""
        raise errors.MissingDataError(
            f"{what}the recording ends here. The run claimed {len(mine)} batches for this task in this registration"
            + (f", the last one {self._timeline.when(mine[-1])}." if mine else "."),
            hint=f"The run registered it again {when}: with after_step, a replay begins there." if later else None,
        )

    def _check_claim(self, now: Replay, request: spec.ClaimRequest, event: Event) -> None:
        what, record = f"claim_meta('{request.partition_id}', '{request.task_name}') refused: ", event.record
        for name in ("batch_size", "dp_size", "max_rows", "max_tokens"):
            if (asked := getattr(request, name)) != (was := getattr(record, name)):
                raise errors.InvalidRequestError(
                    f"{what}{name} is {asked}. The run's claim had {was}, {self._timeline.when(event)}.",
                    hint="Replay with the batch sizes and ranks of the run.",
                )
        for sample_id in record.ids:
            for name in request.required_fields:
                if not now.is_own(sample_id, name) and not now.run.puts_of(sample_id, name):
                    raise self._not_put(what, now, sample_id, name)

    @_replayed
    def ack(self, now: Replay, request: spec.SettleRequest) -> int:
        """Settles leases, which do not run out in a replay."""
        lost = now.settle(request)
        if lost:
            raise errors.LeaseExpiredError(
                f"{request.op}('{request.partition_id}', '{request.task_name}', {len(request.sample_ids)} samples) "
                f"refused: the lease on {preview(lost)} is not held. No row was changed.",
                sample_ids=lost,
            )
        return len(request.sample_ids)

    nack = renew = ack  # type: ignore[assignment]  # a hook with its own signature

    @_replayed
    def check_consumption(self, now: Replay, request: spec.ConsumptionRequest) -> bool:
        """See `Replay.is_consumed`."""
        return all(map(now.is_consumed, request.task_names))

    @_replayed
    def set_cursor(self, now: Replay, request: spec.SetCursorRequest) -> int:
        """Changes nothing: the recording says what a task is given."""
        return len(request.sample_ids)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @_replayed
    def get_samples(self, now: Replay, request: spec.GetRequest) -> spec.WireBatch:
        """Reads the cells that this process put, and of others what the run's read found."""
        self._load(now, request)
        batch = super().get_samples(request)
        now.reads.update((sample_id, name) for sample_id in request.sample_ids for name in request.fields)
        return batch

    def _load(self, now: Replay, request: spec.GetRequest) -> None:
        """Puts the recorded cells that a read needs in the store."""
        what = f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples) refused: "
        missing: dict[tuple[int, str], tuple[Event, list[str]]] = {}
        for sample_id in request.sample_ids:
            for name in request.fields if now.has(sample_id) else ():  # the ledger says which samples are not there
                if now.is_own(sample_id, name):
                    continue
                event = now.version((sample_id, name))
                if event is None:
                    raise self._not_put(what, now, sample_id, name)
                if now.stands_for.get((sample_id, name)) != event.at:
                    missing.setdefault((event.at, name), (event, []))[1].append(sample_id)
        for (at, name), (event, ids) in missing.items():
            columns = self._recorded(event, name, ids, what)
            encoded, specs = encode_columns(columns, len(ids), self.wire, allow_pickle=self.allow_pickle)
            put = spec.PutRequest(request.partition_id, sample_ids=ids, columns=encoded, specs=specs, tags=None)
            super().put_samples(put)
            now.stands_for.update(dict.fromkeys(((sample_id, name) for sample_id in ids), at))

    def _recorded(self, event: Event, name: str, ids: Sequence[str], what: str) -> Columns:
        """Recorded cells of a put, as a column."""
        when, record = f"The run put them {self._timeline.when(event)}.", event.record
        try:
            row_of, columns = self._timeline.block(event)
        except errors.DataPlaneError as error:
            error.message = f"{what}{error.message} {when}"
            raise
        absent = [sample_id for sample_id in ids if sample_id not in row_of or name not in columns]
        if absent:
            raise errors.MissingDataError(
                f"{what}field '{name}' of {preview(absent)} is not among the recorded rows: payload was "
                f"{record.client.payload!r}, and {preview(record.left_out) or 'no field'} could only be pickled. {when}"
            )
        return Columns({name: take_rows(columns[name], [row_of[sample_id] for sample_id in ids])}, ints=columns.ints)

    def _not_put(self, what: str, now: Replay, sample_id: str, name: str) -> errors.MissingDataError:
        puts = now.run.puts.get(sample_id)
        return errors.MissingDataError(
            f"{what}the run did not put field '{name}' of sample '{sample_id}'. It put "
            f"{preview(now.recorded_fields(sample_id)) or 'no field'}"
            + (f", the last of them {self._timeline.when(puts[-1])}." if puts else "."),
            missing_cells={sample_id: [name]},
        )

    @_replayed
    def put_samples(self, now: Replay, request: spec.PutRequest) -> int:
        """Takes what this process puts, and compares it with what the run put."""
        ids = request.sample_ids
        names = [name for name in request.columns if not name.startswith("~")]
        with self._lock:
            events = {(row, name): now.next_put((ids[row], name)) for row in range(len(ids)) for name in names}
            self._compare(request, {place: event for place, event in events.items() if event is not None})
        if request.columns:
            super().put_samples(replace(request, tags=None))
        with self._lock:
            for sample_id, tags in zip(ids, request.tags or [{}] * len(ids), strict=True):
                now.tags.setdefault(sample_id, {}).update(tags)
                now.own.setdefault(sample_id, set()).update(names)
            now.stands_for.update(((ids[row], name), event.at) for (row, name), event in events.items() if event)
        return len(ids)

    def _compare(self, request: spec.PutRequest, events: Mapping[tuple[int, str], Event]) -> None:
        """Compares the digests of cells with those of the recorded puts that they stand for."""
        names = list(dict.fromkeys(name for _, name in events))
        if not names:
            return
        ids, columns = request.sample_ids, {name: request.columns[name] for name in names}
        pickles = self.allow_pickle
        rows = decode_columns(columns, request.specs, len(ids), self.wire, allow_pickle=pickles, share_rows=True)
        sums, specs = row_digests(rows, request.specs, len(ids), allow_pickle=pickles)
        recorded: dict[tuple[int, str], tuple[Any, spec.FieldSpec]] = {}
        different = []
        for (row, name), event in events.items():
            if (event.at, name) not in recorded:
                its_spec = spec.FieldSpec.from_text(event.record.specs[name]).stored
                recorded[event.at, name] = event.record.digests_of(name), its_spec
            theirs, its_spec = recorded[event.at, name]
            if theirs is not None and (theirs[event.place] != sums[name][row] or its_spec != specs[name].stored):
                different.append((row, name, event, scalar_of_digest(int(theirs[event.place]), its_spec)))
        if any(theirs is None for theirs, _ in recorded.values()):
            self._tell(request.partition_id, "", "puts are not compared: the run recorded payload none")
        if different:
            row, name, event, was = different[0]
            error = self._difference(request, event, row, name, _cell(rows[name], row), was, len(different) - 1)
            if self.config.on_difference == "error":
                raise error
            self._tell(request.partition_id, name, str(error))

    def _tell(self, partition_id: str, name: str, text: str) -> None:
        """Logs the first difference of a column: more follow from it."""
        if (partition_id, name) not in self._told:
            self._told.add((partition_id, name))
            _log.warning("%s", text)

    def _difference(
        self, request: spec.PutRequest, event: Event, row: int, name: str, is_now: Any, was: Any, others: int
    ) -> DifferenceError:
        sample_id = request.sample_ids[row]
        if event.record.block is not None:
            row_of, columns = self._timeline.block(event)
            if sample_id in row_of and name in columns:
                was = _cell(columns[name], row_of[sample_id])
        error = DifferenceError(
            f"put_samples('{request.partition_id}', {len(request.sample_ids)} samples): column '{name}' of sample "
            f"'{sample_id}' is not what the run put {self._timeline.when(event)}. {_in_words(is_now, was)}"
            + (f" {others} more cells of this put differ." if others else ""),
            hint="With on_difference: warn it is taken." if self.config.on_difference == "error" else None,
        )
        error.step, error.sample_id, error.field = self._timeline.step_before(event), sample_id, name
        return error

    @_replayed
    def clear_samples(self, now: Replay, request: spec.ClearRequest) -> int:
        """Clears for this process."""
        super().clear_samples(request)
        there = now.sample_ids()
        asked = there if request.sample_ids is None else request.sample_ids
        gone = [sample_id for sample_id in asked if sample_id in there]
        if request.sample_ids is None:
            del self._open[request.partition_id]
            self._next[request.partition_id] = now.run.number + 1
        for sample_id in gone:
            now.clear(sample_id)
        return len(gone)

    @_replayed
    def list_samples(self, now: Replay, request: spec.ListRequest) -> spec.SampleList:
        """Lists what other processes of the run put in this registration, and this process, without what it cleared."""
        tags = now.listed()
        asked = tags if request.sample_ids is None else request.sample_ids
        ids = [sample for sample in asked if sample in tags and spec.matches(tags[sample], request.tag_filter)]
        return spec.SampleList(sample_ids=ids, tags=[tags[sample_id] for sample_id in ids])

    @_replayed
    def list_fields(self, now: Replay, request: spec.FieldsRequest) -> spec.FieldList:
        """Lists the fields that the run put in this registration, and those that this process put."""
        absent = [sample_id for sample_id in request.sample_ids if not now.has(sample_id)]
        if absent:
            what = f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples)"
            raise errors.MissingDataError.for_samples(what, request.partition_id, absent)
        patterns: dict[tuple[str, ...], int] = {}
        index = [patterns.setdefault(now.fields_of(sample_id), len(patterns)) for sample_id in request.sample_ids]
        return spec.FieldList(patterns=list(patterns), index=index)


def _cell(column: Any, row: int) -> Any:
    """A row of a column as `tensor_rows` or `decode_columns` gives it."""
    return (column if isinstance(column, (list, torch.Tensor)) else column.tolist())[row]


def _in_words(now: Any, was: Any) -> str:
    """What two cells are. ``was`` is None if it is not known."""
    if was is None:
        return "Their digests differ."
    if not (isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor)):
        return f"It is {now!r:.100}, and was {was!r:.100}."
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"It is {now.dtype} of shape {tuple(now.shape)}, and was {was.dtype} of shape {tuple(was.shape)}."
    bits_now, bits_was = (cell.reshape(-1, 1).view(torch.uint8) for cell in (now, was))
    place = int((bits_now != bits_was).any(1).nonzero()[0, 0])
    is_now, it_was = (cell.reshape(-1)[place].item() for cell in (now, was))
    return f"{f'Its element {place}' if now.dim() else 'It'} is {is_now!r}, and was {it_was!r}."
