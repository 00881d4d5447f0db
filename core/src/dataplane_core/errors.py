"""The error hierarchy: every failure of the data plane derives from `DataPlaneError`.

Each concrete class also derives from the builtin that a user would catch (`ValueError`, `KeyError`, `TypeError`,
`TimeoutError`, `ConnectionError`), so code that does not know this package can still handle the failure.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import msgspec


class Frozen(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that goes over sockets, and that nobody changes. `msgspec.structs.replace` makes a changed one."""


#: How many samples, cells or groups an error names; it counts the rest.
_NUM_NAMED: Final = 3


def preview(names: Iterable[object], limit: int = _NUM_NAMED) -> str:
    """Names the first few of many things and counts the rest: ``'a', 'b', 'c' and 9 more``."""
    left = iter(names)
    text = ", ".join(map(repr, islice(left, limit)))
    rest = len(names) - limit if isinstance(names, Sized) else sum(1 for _ in left)
    return f"{text} and {rest} more" if rest > 0 else text


def printable(text: str) -> str:
    """The text, with escapes such as ``\\x1b`` and ``\\n`` for all that a terminal or a page would not show as it is.

    Whatever shows names that come from a store passes them through this: they may hold control characters, marks that
    change the direction of writing, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class DataPlaneError(Exception):
    """Base of all data-plane errors.

    Keeps its attributes and its cause when pickled. A cause that cannot be pickled is replaced by its description.
    Its text is one `printable` line, whatever the names in it hold.

    Attributes:
        backend: Entry-point name of the backend at fault, or None where none was involved.
        retryable: Whether the same call, unchanged, may succeed later.
        hint: What to do about it, or None.
    """

    #: Class default of ``retryable``.
    default_retryable = False

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        retryable: bool | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.backend = backend
        self.retryable = self.default_retryable if retryable is None else retryable
        self.hint = hint

    def __str__(self) -> str:
        # KeyError's own __str__ would print a repr of the message
        text = self.message if self.hint is None else f"{self.message} {self.hint}"
        return printable(text if self.backend is None else f"[{self.backend}] {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        state.pop("__notes__", None)
        return rebuild_error, (type(self), self.message, state, _portable(self.__cause__))


def _portable(cause: BaseException | None) -> BaseException | None:
    """The cause itself if it can be pickled and read back, else an error that carries its description."""
    if cause is None:
        return None
    try:
        pickle.loads(pickle.dumps(cause))  # an object of this process, not data from outside
    except Exception:
        return DataPlaneError(f"{type(cause).__name__}: {cause}")
    return cause


def rebuild_error(
    cls: type[DataPlaneError], message: str, state: dict[str, Any], cause: BaseException | None
) -> DataPlaneError:
    """An error with the attributes ``state``, without a call of its constructor."""
    builtin: Any = cls
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__  # the one whose memory the class extends: only its __new__ can make an object
    error: DataPlaneError = builtin.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    error.__cause__ = cause
    return error


# --- configuration and plugins ---------------------------------------------------------------------------------------


class ConfigError(DataPlaneError, ValueError):
    """The configuration cannot be used: an unknown key, a wrong value, a missing one."""


class PluginError(DataPlaneError):
    """A backend or middleware cannot be used as a plugin."""


class UnknownBackendError(PluginError, ConfigError):
    """No installed distribution registers a plugin of that name."""


class DuplicatePluginError(PluginError):
    """Two installed distributions register the same name."""


class PluginImportError(PluginError, ImportError):
    """A plugin's module fails to import; the cause is the real error."""


class PluginSignatureError(PluginError, TypeError):
    """A plugin's hooks do not match the hook specs."""


class AlreadyRunningError(DataPlaneError, RuntimeError):
    """``bootstrap=True`` found a running instance of that name. Retryable if a client can attach to it, now or soon."""


# --- requests --------------------------------------------------------------------------------------------------------


class InvalidRequestError(DataPlaneError, ValueError):
    """An argument has a wrong value: sizes that differ, repeated ids, a batch size of 0."""


class InvalidTypeError(DataPlaneError, TypeError):
    """An argument has a wrong type, such as a non-tensor leaf or an object item outside the closed set."""


class SchemaMismatchError(InvalidRequestError):
    """A column differs in kind, dtype, rank or trailing shape from the field's first write.

    Attributes:
        expected: Field -> the text of the spec that it has (`FieldSpec.from_text`), for the fields that differ. The
            client writes their lists as this says, if they fit.
    """

    def __init__(self, message: str, *, expected: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.expected = dict(expected or {})

    @classmethod
    def for_fields(cls, what: str, fields: Iterable[tuple[str, str, str, str]]) -> SchemaMismatchError:
        """The error for columns that do not fit: name, what it holds, what is expected, and that as text of a spec."""
        wrong = list(fields)
        name, held, expected, _ = wrong[0]
        more = f" {len(wrong) - 1} more fields differ." if len(wrong) > 1 else ""
        return cls(
            f"{what} refused: field '{name}' holds {held}. Expected {expected}, as declared or as "
            f"fixed by its first write.{more} Nothing was written.",
            hint="Convert the column, or write it under another name.",
            expected={name: text for name, _, _, text in wrong},
        )


class OpenCellsError(DataPlaneError, LookupError):
    """A read names cells of one field that are stored in different forms, since some were put while it was open.

    A store raises it, and the client then reads each group by itself. So callers never get it.

    Attributes:
        groups: The samples of the read, each in one group. In a group, all cells of a field have one form.
    """

    def __init__(self, message: str, *, groups: Iterable[Sequence[str]] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.groups = tuple(map(tuple, groups))


class UnsupportedOperationError(DataPlaneError, NotImplementedError):
    """The backend does not declare the capability that this call needs."""


class UnknownPartitionError(DataPlaneError, KeyError):
    """The partition is not registered, or was cleared."""


class UnknownTaskError(DataPlaneError, KeyError):
    """The partition is registered without this consumer task."""


class MissingDataError(DataPlaneError, KeyError):
    """Samples are not in the partition, or cells are not yet produced.

    Attributes:
        partition_id: The partition that was read.
        missing_samples: The first few ids that the partition does not hold.
        missing_cells: For the first few samples, the fields not yet produced.
    """

    def __init__(
        self,
        message: str,
        *,
        partition_id: str = "",
        missing_samples: Sequence[str] = (),
        missing_cells: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(message, **kwargs)
        self.partition_id = partition_id
        self.missing_samples = tuple(missing_samples)
        self.missing_cells = {k: tuple(v) for k, v in (missing_cells or {}).items()}

    @classmethod
    def for_samples(cls, what: str, partition_id: str, absent: Sequence[str]) -> MissingDataError:
        """The error for samples that the partition does not hold."""
        return cls(
            f"{what}: {preview(absent)} {'is' if len(absent) == 1 else 'are'} not in the partition.",
            partition_id=partition_id,
            missing_samples=absent[:_NUM_NAMED],
            hint=f"{'It was' if len(absent) == 1 else 'They were'} never written, or cleared.",
        )

    @classmethod
    def for_cells(cls, what: str, partition_id: str, lacking: Iterable[tuple[str, Sequence[str]]]) -> MissingDataError:
        """The error for cells that are not yet produced."""
        cells, _, shown = _first_cells(lacking)
        return cls(
            f"{what}: cells not yet produced: {shown}.",
            partition_id=partition_id,
            missing_cells=cells,
            hint="Claim samples by their required fields, wait for the producer of those fields, or read only what "
            "list_sample_ids(partition_id, fields=[...]) lists.",
        )


def _first_cells(lacking: Iterable[tuple[str, Sequence[str]]]) -> tuple[dict[str, Sequence[str]], int, str]:
    """The first few samples with the fields they lack, the number of samples, and both as text for a message."""
    cells: dict[str, Sequence[str]] = {}
    count = 0
    for sample_id, names in lacking:
        count += 1
        if count <= _NUM_NAMED:  # columns of middleware only if no other one is missing
            cells[sample_id] = [name for name in names if not name.startswith("~")] or names
    shown = "; ".join(f"'{sample_id}' lacks {preview(names)}" for sample_id, names in cells.items())
    more = f"; and {count - len(cells)} more samples" if count > len(cells) else ""
    return cells, count, shown + more


class LostSamplesError(MissingDataError):
    """Cells are produced, but the store no longer has their payload.

    The engine dropped it, or restarted from an older state. Clear the samples and produce them again.

    Attributes:
        missing_samples: All samples of the read whose payload is gone, in the order of the request.
        missing_cells: For the first few of them, the fields whose payload is gone.
    """

    @classmethod
    def for_payload(cls, what: str, partition_id: str, lost: Iterable[tuple[str, Sequence[str]]]) -> LostSamplesError:
        """The error for cells whose payload is gone."""
        all_lost = list(lost)
        cells, count, shown = _first_cells(all_lost)
        return cls(
            f"{what}: the payload of {count} {'sample' if count == 1 else 'samples'} is gone from the store: {shown}.",
            partition_id=partition_id,
            missing_samples=[sample_id for sample_id, _ in all_lost],
            missing_cells=cells,
            hint="Clear these samples and produce them again.",
        )


class StalePartitionError(DataPlaneError, RuntimeError):
    """The partition was cleared or registered again while the operation ran. Nothing was committed."""

    default_retryable = True


class ContentGoneError(StalePartitionError):
    """A cell that a put did not bring, since the store had it, is gone; or another put brought one that it also brings.
    The client asks again what the store has. So callers never get it."""

    default_retryable = False


class LeaseExpiredError(DataPlaneError, RuntimeError):
    """Some lease tokens are no longer valid. The operation changed no row.

    Attributes:
        sample_ids: The ids whose token is no longer valid.
    """

    def __init__(self, message: str, *, sample_ids: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.sample_ids = tuple(sample_ids)


# --- running ---------------------------------------------------------------------------------------------------------


#: Whether an operation that failed was carried out, as far as the store can tell.
Outcome: TypeAlias = Literal["done", "not_done", "unknown"]


class Unanswered(DataPlaneError):
    """Base of the errors that say by ``outcome`` whether the operation was carried out.

    Attributes:
        outcome: Whether it was carried out: ``done``, ``not_done``, or ``unknown``.
    """

    default_retryable = True

    def __init__(self, message: str, *, outcome: Outcome = "unknown", **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.outcome: Outcome = outcome


class OperationTimeoutError(Unanswered, TimeoutError):
    """The deadline passed. A read or claim returned nothing. Whether another operation was carried out is said
    by ``outcome``: ``done``, ``not_done``, or ``unknown``."""


class LeaseHolder(Frozen, frozen=True):
    """Who holds a sample.

    Attributes:
        sample_id: The sample.
        holder: As `ClaimRequest.holder` named it.
        left_s: Seconds until the lease ends.
        held_s: Seconds since it was given, if asked for and known. A renewal does not change it.
    """

    sample_id: str
    holder: str
    left_s: float
    held_s: float | None = None


class Shortfall(Frozen, frozen=True):
    """Why a claim gets no more samples.

    Counts every sample of the partition that the task cannot be given now, except those that it was given for good
    (without a lease, or acked). Each sample is counted once, under the first reason that applies. A few samples of each
    reason are named.

    Attributes:
        num_leased: Samples under a lease of this task.
        leased: The few of them whose leases end first.
        num_not_matching: Samples that do not match the tag filter.
        not_matching: A few of them: those that were first written last, the newest first. Of each group the newest
            that does not match by itself.
        newest_tags: The tags of the first of these.
        num_incomplete: Samples of groups that lack a member, or lost one.
        incomplete_groups: For the first few of these groups, the number of members that are there.
        members: The members that are there of the first of these groups; of rollouts, those that are whole.
        unsealed: The others of its rollouts, with the number of rows that each lacks; 0: it was not sealed.
        num_lacking: Samples that lack required fields, or whose group has a member that does.
        missing_cells: For the first few samples that lack fields, these fields.
    """

    num_leased: int = 0
    leased: tuple[LeaseHolder, ...] = ()
    num_not_matching: int = 0
    not_matching: tuple[str, ...] = ()
    newest_tags: Mapping[str, bool | int | float | str | None] = msgspec.field(default_factory=dict)
    num_incomplete: int = 0
    incomplete_groups: Mapping[str, int] = msgspec.field(default_factory=dict)
    members: tuple[str, ...] = ()
    unsealed: Mapping[str, int] = msgspec.field(default_factory=dict)
    num_lacking: int = 0
    missing_cells: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


def lack_of_rollout(name: str, num_rows: int) -> str:
    """Says what an entry of `Shortfall.unsealed` says."""
    return f"'{name}' lacks {num_rows} of its rows" if num_rows else f"'{name}' was never sealed"


#: Why a task waits. ``gone``, ``stopped``, ``silent``, ``closed``: the process that it waits for is, or its client.
#: ``stuck``: a call of it does not end. ``works``: it is alive, and works. ``leased``: others hold the samples.
#: ``unwritten``: nobody is known who writes a field. ``group``: groups are not whole. ``filter``: no sample passes the
#: filter. ``full``: the store is. ``short``: fewer samples came than were to. ``unclaimed``: nobody has claimed for the
#: task. ``name``: another name was probably meant.
Cause: TypeAlias = Literal[
    "",
    "gone",
    "stopped",
    "silent",
    "closed",
    "stuck",
    "works",
    "leased",
    "unwritten",
    "group",
    "filter",
    "full",
    "short",
    "unclaimed",
    "name",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a task of a partition fares.

    Attributes:
        partition_id: The partition.
        task_name: The task.
        state: ``moves``; ``waits`` for something that is under way; ``starved``: it gets no samples unless somebody
            acts; ``idle``: nobody claims for it, and nothing is wrong with that; ``done``: it has consumed all.
        cause: Why it waits or is starved.
        culprit: The process, if one is the cause.
        waited_s: Seconds for which it has got nothing.
        backlog: Samples that it has not consumed.
        num_ready: How many of these it could be given now: those with the fields that it claims, and its filter.
        is_over: Whether those that it waits for have ended, and nobody is about to take their place. Or nobody has
            begun, or they wait for the task themselves, for five times ``warn_after_s``.
        text: All of this in a few sentences.
    """

    partition_id: str
    task_name: str
    state: Literal["moves", "waits", "starved", "idle", "done"]
    cause: Cause = ""
    culprit: str = ""
    waited_s: float = 0.0
    backlog: int = 0
    num_ready: int = 0
    is_over: bool = False
    text: str = ""

    def __str__(self) -> str:
        waited = f" for {self.waited_s:.0f} s" if self.waited_s else ""
        return printable(f"{self.partition_id} / {self.task_name}: {self.state}{waited}. {self.text}")


class ClaimTimeoutError(OperationTimeoutError):
    """A blocking claim ran out of time.

    Attributes:
        num_ready: How many samples were ready.
        shortfall: Why the others were not ready. None if the backend does not say.
        missing_cells: For the first few samples that lack required fields, these fields.
        verdict: The cause with its names, see `DataPlaneClient.why`. None if there was no time to find it.
    """

    def __init__(self, message: str, *, num_ready: int = 0, shortfall: Shortfall | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.num_ready = num_ready
        self.shortfall = shortfall
        cells = {} if shortfall is None else shortfall.missing_cells
        self.missing_cells = {sample_id: tuple(fields) for sample_id, fields in cells.items()}
        self.verdict: Verdict | None = None


class CapacityExceededError(DataPlaneError, RuntimeError):
    """The store is full, or the batch can never fit. With ``on_full: block``, a put waits first: `RoomTimeoutError`.

    Attributes:
        ask_again_s: Seconds until a waiting put should ask again. 0: the store does not say.
    """

    default_retryable = True

    def __init__(self, message: str, *, ask_again_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.ask_again_s = ask_again_s


class RoomTimeoutError(CapacityExceededError, OperationTimeoutError):
    """A put waited for room until its deadline, and the store was still full. Nothing was written."""

    @classmethod
    def after(cls, refusal: CapacityExceededError, *, asked_in_vain: bool = False) -> RoomTimeoutError:
        """The error of a put that was refused for the last time, and perhaps got no answer when it asked again."""
        last = " The store did not answer the last question." if asked_in_vain else ""
        return cls(
            f"{refusal.message} No room became free before the deadline. Nothing was written.{last}",
            hint=refusal.hint,
            outcome="not_done",
        )


class ClientClosedError(DataPlaneError, RuntimeError):
    """The client was closed."""


class BackendUnavailableError(Unanswered, ConnectionError):
    """The backend cannot be reached, or died. Whether the operation was carried out is said by ``outcome``: ``done``,
    ``not_done``, or ``unknown``."""


class LostReplyError(BackendUnavailableError):
    """The operation was sent and its reply was lost: it may have happened or not.

    A hook raises it as soon as it knows. The client repeats the operation until its deadline, if the backend declares
    ``repeatable``, and raises it at the deadline.
    """


class AlreadyDoneError(DataPlaneError):
    """An earlier request with the same id was carried out. A backend answers as it did then; no user sees this."""


class BackendError(DataPlaneError, RuntimeError):
    """The backend broke the contract: it gave no result or wrong rows, or raised an exception of its engine."""


class CorruptDataError(DataPlaneError, ValueError):
    """Bytes read back are not the bytes written.

    Attributes:
        cells: Sample -> the fields that are damaged, if known.
    """

    def __init__(self, message: str, *, cells: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.cells = {sample_id: tuple(fields) for sample_id, fields in (cells or {}).items()}


class SaveError(DataPlaneError, OSError):
    """A save cannot be written or read. The cause is the operating system's error."""


class FrameError(CorruptDataError):
    """A framed cell is malformed: bad magic, an unknown version, lengths that do not add up.

    Attributes:
        row: The row that it is in, if known.
        fields: The fields of this row that cannot be read, if known.
    """

    def __init__(self, message: str, *, row: int | None = None, fields: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.row = row
        self.fields = tuple(fields)

    def add_place(self, fields: Sequence[str], row: int | None) -> None:
        """Says that it is in these fields, and in this row of a read."""
        self.fields, self.row = tuple(fields), row
        self.message = f"{'field' if len(self.fields) == 1 else 'fields'} {preview(self.fields)}: {self.message}"
