"""A chaos run on any store: through a shim, and judged by what that store promises."""

from __future__ import annotations

import importlib
import json
import sys
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import torch

from dataplane_core._compiler_marks import load_compiler
from dataplane_core.errors import (
    BackendError,
    ConfigError,
    DataPlaneError,
    MissingDataError,
    OperationTimeoutError,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_testkit._author import Disturbance
from dataplane_testkit._columns import items_of
from dataplane_testkit._timing import Background
from dataplane_testkit._workers import Worker
from dataplane_testkit.chaos.checker import GUARANTEES, RULES
from dataplane_testkit.chaos.run import Run, Verdict
from dataplane_testkit.chaos.worker import TASKS, Settings

#: What workers can do with each shim; they also ack where claims have leases.
_STEPS: Final = ("put", "put_later", "overwrite", "put_again", "get", "get_one_field", "claim", "list", "clear")
#: Seconds from the end of a call's allowance to when it is given up.
_GIVE_UP_S: Final = 1.0

#: Sample -> field -> the bytes of a cell.
Rows = Mapping[str, Mapping[str, bytes]]


class Shim(ABC):
    """The calls of a store that a chaos run needs. Subclass it to have a store of your own checked.

    Each process of a run makes an object of the class, the process that starts the run before all others. One thread at
    a time uses it, unless a call hangs. Partitions are new names in each run. A call may raise anything: it then counts
    as one that may have been carried out or not.

    Attributes:
        promises: What the store promises: a name of `RULES` or `GUARANTEES` -> where it says so. A history is held to
            these. What else it breaks of the contract is shown as seen, not promised. If it promises ``lease``, claims
            have leases.

    Args:
        tasks: Task -> the fields that a sample must have before a claim of the task may give it.
        options: The options of the run, such as an address.
    """

    promises: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def __init__(self, tasks: Mapping[str, Sequence[str]], **options: Any) -> None: ...

    @abstractmethod
    def put(self, partition: str, rows: Rows) -> None:
        """Writes cells; those of other fields stay. Returns when the store says that it is done."""

    @abstractmethod
    def get(self, partition: str, samples: Sequence[str], fields: Sequence[str]) -> Rows:
        """Reads cells. Leaves out what is not there, and may return more fields."""

    @abstractmethod
    def claim(
        self, partition: str, task: str, fields: Sequence[str], limit: int, lease_s: float | None
    ) -> Sequence[str] | Mapping[str, str]:
        """Takes up to ``limit`` samples that have these fields, and that the task was not given yet. Does not wait.

        Returns them in the order in which they are given; with a lease, sample -> its token. ``lease_s``: the seconds
        after which a sample that is not acked is given again. None: it is given for good.
        """

    @abstractmethod
    def list(self, partition: str) -> Sequence[str]:
        """The samples of a partition."""

    @abstractmethod
    def clear(self, partition: str, samples: Sequence[str]) -> None:
        """Drops samples. The tasks may be given them again when they are put again."""

    def ack(self, partition: str, task: str, tokens: Mapping[str, str]) -> None:
        """Says that samples are done with, by their tokens. Only of a store that promises ``lease``."""
        raise NotImplementedError  # nobody calls it unless the store promises `lease`

    def disturbances(self) -> Mapping[str, Disturbance]:
        """What a run can do to the store itself. Called once, in the process that starts the run. Default: nothing."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Ends the connection."""


def load_shim(name: str) -> type[Shim]:
    """The class of a shim: ``FILE.py:Class``, or ``module:Class``.

    Raises:
        ConfigError: There is no such class, or it promises something that is neither a rule nor a guarantee.
    """
    place, _, cls = name.rpartition(":")
    try:
        shim = getattr(_module(place), cls, None)
    except (ImportError, OSError) as error:
        raise ConfigError(f"shim '{name}' cannot be imported: {error}") from error
    if not (isinstance(shim, type) and issubclass(shim, Shim)):
        raise ConfigError(f"'{name}' is no shim. Expected FILE.py:Class, where Class is a subclass of Shim.")
    if unknown := sorted(shim.promises.keys() - RULES.keys() - set(GUARANTEES)):
        rules = ", ".join([*RULES, *GUARANTEES])
        raise ConfigError(f"shim '{name}' promises '{unknown[0]}', which is no rule. Expected some of: {rules}.")
    return shim


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    name = f"dataplane_shim_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__file__ = str(path)
        try:
            SourceFileLoader(name, str(path)).exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _packed(field: str, value: Any) -> bytes:
    return json.dumps(value).encode() if field == "o" else value.numpy().tobytes()


def _unpacked(field: str, data: bytes) -> Any:
    """The cell, or the bytes if they are none."""
    try:
        if field == "o":
            return json.loads(data)
        return torch.frombuffer(bytearray(data), dtype=torch.float64 if field == "y" else torch.int64)
    except ValueError:
        return data


class ShimClient:
    """What `Hands` call, over a shim; as a context manager it closes it. A call is left alone after ``give_up_s``.

    ``mark`` begins the names of the partitions in the store.
    """

    def __init__(self, shim: Shim, mark: str, give_up_s: float) -> None:
        self.shim, self._mark, self._give_up_s = shim, mark, give_up_s

    def __enter__(self) -> ShimClient:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(DataPlaneError):
            self._ask("close")

    def put_samples(self, names: Sequence[str], partition: str, columns: Mapping[str, Any], tags: object) -> None:
        cells = {field: items_of(column) if field == "o" else column for field, column in columns.items()}
        rows = {
            name: {field: _packed(field, column[place]) for field, column in cells.items()}
            for place, name in enumerate(names)
        }
        self._ask("put", self._mark + partition, rows)

    def get_samples(self, names: Sequence[str], partition: str, fields: Sequence[str]) -> dict[str, list[Any]]:
        rows = self._ask("get", self._mark + partition, list(names), list(fields))
        missing = [f"{name}.{field}" for name in names for field in fields if field not in rows.get(name, {})]
        if missing:
            raise MissingDataError(f"not there: {', '.join(missing[:6])}")
        return {field: [_unpacked(field, rows[name][field]) for name in names] for field in fields}

    def claim_meta(self, partition: str, task: str, fields: Sequence[str], limit: int, **how: Any) -> KVBatchMeta:
        samples = self._ask("claim", self._mark + partition, task, list(fields), limit, how["lease_s"])
        tokens = list(samples.values()) if isinstance(samples, Mapping) else None
        return KVBatchMeta(partition, task, list(samples), lease_tokens=tokens)

    def ack(self, meta: KVBatchMeta) -> None:
        tokens = dict(zip(meta.sample_ids, meta.lease_tokens or [], strict=True))
        self._ask("ack", self._mark + meta.partition_id, meta.task_name, tokens)

    def list_samples(self, partition: str) -> KVBatchMeta:
        return KVBatchMeta(partition, None, list(self._ask("list", self._mark + partition)))

    def clear_samples(self, names: Sequence[str] | None, partition: str) -> None:
        """Drops samples. None: all; and if the store does not answer, none."""
        with suppress(*([DataPlaneError] if names is None else [])):
            samples = self.list_samples(partition).sample_ids if names is None else names
            self._ask("clear", self._mark + partition, samples)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        call = Background(partial(getattr(self.shim, operation), *arguments))
        try:
            return call.result(self._give_up_s)
        except Exception as error:
            if call.running:
                raise OperationTimeoutError(f"given up after {self._give_up_s:g} s") from None
            if isinstance(error, DataPlaneError):
                raise
            raise BackendError(f"{type(error).__name__}: {error}") from error


def _opened(name: str, options: Mapping[str, Any], mark: str, give_up_s: float) -> ShimClient:
    tasks = {task: fields for task, (fields, _) in TASKS.items()}
    return ShimClient(load_shim(name)(tasks, **options), mark, give_up_s)


def run_shim(
    name: str,
    options: Mapping[str, Any],
    settings: Settings,
    *,
    folder: Path,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """As `run_chaos`, on any store: judges the history by what the store promises.

    The store must run, or be started by the shim. `Verdict.findings` are promises that were broken. The other arguments
    are those of `run_chaos`.

    Args:
        name: The class of the shim, see `load_shim`.
        options: Its keyword arguments. They must be picklable.

    Raises:
        ConfigError: There is no such shim, or the run asks for a fault or step that is not possible.
        OperationTimeoutError: The workers made no call in the time of the schedule.
    """
    promises, give_up_s = load_shim(name).promises, settings.op_timeout_s + settings.allowance_s + _GIVE_UP_S
    opened = partial(_opened, name, dict(options), f"chaos-{uuid.uuid4().hex[:8]}-", give_up_s)
    progress("connecting")
    load_compiler()  # which the first nested tensor would import during a call
    with (
        opened() as client,
        Run(
            settings,
            progress,
            client=client,
            op_timeout_s=settings.op_timeout_s,
            new_worker=partial(Worker, opened),
            steps=frozenset((*_STEPS, "ack") if "lease" in promises else _STEPS),
            disturbances=client.shim.disturbances(),
            tags=False,
        ) as run,
    ):
        return run.verdict(name.rpartition(":")[2], folder, command, promises)
