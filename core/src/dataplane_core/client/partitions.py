"""What `DataPlaneClient` does with a partition: registers it, writes, reads, clears and lists its rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final

from msgspec.structs import replace

from dataplane_core.arguments import check_name, checked
from dataplane_core.client.announcing import program_name
from dataplane_core.client.connection import Connection, check_counts
from dataplane_core.errors import (
    BackendError,
    DataPlaneError,
    FrameError,
    InvalidRequestError,
    OpenCellsError,
    SchemaMismatchError,
    Shortfall,
    printable,
)
from dataplane_core.spec import (
    Capability,
    FieldSpec,
    GetRequest,
    PartitionDescription,
    PartitionInfo,
    PutRequest,
    Question,
    RegisterRequest,
    WireBatch,
    this_process,
)
from dataplane_core.spec.replies import PartitionState, Replaced
from dataplane_core.spec.requests import MOST_LETTERS, MOST_WORDS, ExportRequest, InspectRequest, SetCursorRequest

_log = logging.getLogger(__name__)

#: Fields whose names begin with it belong to middleware. Callers do not see them.
HIDDEN: Final = "~"
_DAMAGED: Final = (
    "They were damaged in the store or on the way. Clear these samples and produce them again. The middleware "
    "wire_guard also finds damage that leaves the bytes readable."
)


@contextmanager
def _naming_samples(partition_id: str, sample_ids: Sequence[str]) -> Iterator[None]:
    """Names the sample in the error for bytes that cannot be read."""
    try:
        yield
    except FrameError as error:
        what = f"get_samples('{partition_id}', {len(sample_ids)} samples)"
        if error.row is not None:
            sample_id = sample_ids[error.row]
            what, error.cells = f"{what}: the bytes of sample '{sample_id}' cannot be read", {sample_id: error.fields}
        error.message = f"{what}: {error.message}"
        error.hint = error.hint or _DAMAGED
        raise


# --- registrations ----------------------------------------------------------------------------------------------------


def register(connection: Connection, request: RegisterRequest) -> PartitionInfo:
    """Registers a partition, and says who does. A finished one may have any number of samples."""
    partition_id = request.partition_id
    _sign(connection, request)
    connection.work.begin("register_partition", partition_id)
    info: PartitionInfo = connection.call(request)
    if (dropped := info.replaced) is not None and dropped.num_samples and dropped.epoch not in connection.registered:
        _log.warning("%s", printable(_dropped(partition_id, dropped)))
    if info.epoch == request.epoch:
        connection.registered.append(info.epoch)
    return info


def declared_fields(where: str, fields: Any) -> dict[str, str]:
    """What is declared of fields, if they are a dict, as text."""
    forms = fields.items() if isinstance(fields, Mapping) else ()
    declared = {name: FieldSpec.declared(f"{where}: field '{name}'", form) for name, form in forms if form is not None}
    return {name: spec.to_text() for name, spec in declared.items()}


def opening(connection: Connection, partition_id: str, fields: Sequence[str], tasks: list[str]) -> RegisterRequest:
    """What registers the partition of a put or a claim, as a config with ``open_partitions`` allows."""
    request = RegisterRequest(partition_id, fields=list(fields), consumer_tasks=tasks, if_exists="keep")
    return _sign(connection, request)


def _sign(connection: Connection, request: RegisterRequest) -> RegisterRequest:
    request.registered_by = f"{this_process()} ({connection.config.role or program_name()})"
    request.registered_at = time.time()
    return request


def advise(connection: Connection, where: str, advice: str) -> None:
    """Logs what the store says of field names, once. With ``open_partitions``, nobody chose the names."""
    if advice not in connection.advice and not connection.config.open_partitions:
        connection.advice.add(advice)
        _log.warning("%s", printable(f"{where}: {advice} If it is right, register it."))


def tell_short_groups(connection: Connection, partition_id: str, info: PartitionInfo) -> None:
    """Warns of groups that are not whole, if no more samples come."""
    questions = [Question(task_name=name, required_fields=[], explain=True) for name in info.consumer_tasks]
    with suppress(DataPlaneError):  # it is advice
        description: PartitionDescription = connection.call(InspectRequest(partition_id, questions))
        shortfalls = [answer.shortfall for answer in description.answers if answer is not None and answer.shortfall]
        short = max(shortfalls, key=lambda shortfall: shortfall.num_incomplete, default=Shortfall())
        if description.is_complete and short.num_incomplete:
            groups = [f"'{name}' has {count}" for name, count in short.incomplete_groups.items()]
            lack = "have no seal" if info.rollouts else f"lack some of their {info.grpo_group_size} samples"
            text = f"groups that {lack} are never given"
            left = f"{', '.join(groups)}. Samples in such groups: {short.num_incomplete}."
            _log.warning("%s", printable(f"finish_partition('{partition_id}'): {text}: {left}"))


def _dropped(partition_id: str, replaced: Replaced) -> str:
    """What a registration dropped that another client had made."""
    task, count = max(replaced.num_left.items(), key=lambda task: task[1], default=("", 0))
    left = f", {count} of them not consumed by '{task}'" if task else ""
    by, ago_s = replaced.registered_by or "another client", max(0.0, time.time() - replaced.registered_at)
    return (
        f"register_partition('{partition_id}') dropped {replaced.num_samples} samples{left}: {by} had registered it "
        f"{ago_s:.0f} s ago. Let one process register a partition, or pass if_exists='keep'."
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def encode(connection: Connection, where: str, request: PutRequest, inputs: Any) -> None:
    """Adds columns to a put."""
    from dataplane_core.codec.wire import encode_columns

    for name in inputs.keys():
        check_name("field name", name)
        if name.startswith(HIDDEN):
            raise InvalidRequestError(f"{where} refused: field name '{name}' is reserved ('~' is middleware's).")
    config = connection.config
    columns, specs = encode_columns(
        inputs,
        len(request.sample_ids),
        connection.wire,
        allow_pickle=config.allow_pickle,
        narrow=connection.backend.narrow and config.narrow,
        share_above=config.share_above,
    )
    request.columns.update(columns)
    request.specs.update(specs)
    for name, spec in specs.items():
        if spec.kind == "object" and (strings := _strings_of(inputs[name])) != []:
            request.strings[name] = strings


def read(connection: Connection, request: GetRequest, share_rows: bool) -> dict[str, Any]:
    """The columns of different samples."""
    from dataplane_core.codec.rows import join_parts
    from dataplane_core.codec.wire import decode_columns

    partition_id, ids, names = request.partition_id, request.sample_ids, request.fields
    try:
        with _naming_samples(partition_id, ids):
            batch: WireBatch = connection.call(request)
    except OpenCellsError as error:
        parts = [read(connection, replace(request, sample_ids=list(group)), share_rows) for group in error.groups]
        places = {sample_id: place for place, sample_id in enumerate(chain.from_iterable(error.groups))}
        order = [places[sample_id] for sample_id in ids]
        return {name: join_parts([part[name] for part in parts], order) for name in names}
    for name in names:
        if name not in batch.columns or name not in batch.specs:
            raise BackendError(
                f"get_samples('{partition_id}', {len(ids)} samples): the backend's reply lacks column '{name}'.",
                backend=connection.config.backend,
            )
    with _naming_samples(partition_id, ids):
        return decode_columns(
            {name: batch.columns[name] for name in names},
            {name: batch.specs[name] for name in names},
            len(ids),
            connection.wire,
            allow_pickle=connection.config.allow_pickle,
            share_rows=share_rows,
        )


def put(connection: Connection, where: str, request: PutRequest, inputs: Any) -> None:
    """Puts. A list is written as its field's known spec says, if the store refuses what it became."""
    from dataplane_core.codec.inputs import list_as, misfit_of
    from dataplane_core.codec.rows import Columns

    tried: set[str] = set()
    while True:
        try:
            num_samples: int = connection.call(request)
            check_counts(where, len(request.sample_ids), rows=num_samples)
            return
        except SchemaMismatchError as error:
            lists = inputs.lists if isinstance(inputs, Columns) else {}
            fitting: dict[str, Any] = {}
            for name, text in error.expected.items():
                column = list_as(lists[name], FieldSpec.from_text(text)) if name in lists else None
                if column is None or name in tried:
                    if name in lists:
                        misfit = misfit_of(lists[name], FieldSpec.from_text(text))
                        error.hint = f"A list becomes what its field holds, if all of its rows fit: {misfit}."
                    raise
                fitting[name] = column
            if not fitting:
                raise
            tried |= fitting.keys()
            encode(connection, where, request, fitting)


def _is_valid(text: str) -> bool:
    """Whether it is valid Unicode, as the words of an enum are."""
    return text.isascii() or text.encode(errors="ignore").decode() == text


def _strings_of(column: Any) -> list[str] | None:
    """The different strings among the items of an object column. None: an enum cannot have them all."""
    strings: dict[str, None] = {}
    for item in column.tolist() if hasattr(column, "tolist") else column:
        if isinstance(item, str):
            strings[str.__str__(item)] = None
            if len(item) > MOST_LETTERS or len(strings) > MOST_WORDS or not _is_valid(item):
                return None
    return list(strings)


def export(connection: Connection, what: str, partition_id: str, sample_ids: list[str] | None = None) -> PartitionState:
    """What tasks have consumed, and what was cleared; or what is known of samples."""
    with connection.operation(what, partition_id, needs=Capability.CURSORS):
        state: PartitionState = connection.call(ExportRequest(partition_id, sample_ids))
        return state


def set_cursor(
    connection: Connection, what: str, partition_id: str, task_name: str, sample_ids: Sequence[str], *, create: bool
) -> int:
    """Sets what a task has consumed. Returns how many samples that are."""
    with connection.operation(what, partition_id, needs=Capability.CURSORS):
        about = {"partition_id": partition_id, "task_name": task_name, "sample_ids": sample_ids, "create": create}
        request = checked(what, SetCursorRequest, **about)
        num_samples: int = connection.call(request)
        return num_samples


def common_fields(fields: Iterable[list[str]]) -> list[str]:
    """The fields that all samples have, from what `DataPlaneClient.list_fields` returned. Empty without samples.

    Examples:
        >>> common_fields([["input_ids", "reward"], ["reward"]])
        ['reward']
    """
    patterns = list({id(names): names for names in fields}.values())  # samples with equal fields share a list
    return [name for name in patterns[0] if all(name in names for names in patterns)] if patterns else []
