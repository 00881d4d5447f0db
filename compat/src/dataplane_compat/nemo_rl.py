"""NeMo RL on dataplane: where its config says ``impl: dataplane``, its factory builds the adapter of this module.

The driver calls `activate`, which replaces the factory in its process, or is started by ``python -m
dataplane_compat.nemo_rl SCRIPT``. Processes that build a client are given the ``data_plane`` section, or a client, by
the driver; both activate where they are unpickled. So no process is reached that needs no client, and Ray needs no
hook. Importing this module does not import NeMo RL.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, WrapValidator
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, KVBatchMeta, connect
from dataplane_core.config import DataPlaneConfig, load_config
from dataplane_core.errors import ConfigError, UnknownPartitionError, UnknownTaskError

__all__ = ["NemoRLAdapter", "Section", "activate", "client_class"]

_INTERFACES: Final = "nemo_rl.data_plane.interfaces"
_IMPL: Final = "dataplane"
_FACTORY: Final = "build_data_plane_client"
_SCHEMA: Final = "__get_pydantic_core_schema__"


@functools.cache
def client_class() -> type[NemoRLAdapter]:
    """The adapter as a subclass of NeMo RL's abstract ``DataPlaneClient``. Imports NeMo RL."""
    theirs = importlib.import_module(_INTERFACES).DataPlaneClient
    return type("NemoRLDataPlaneClient", (NemoRLAdapter, theirs), {"__doc__": NemoRLAdapter.__doc__})


class NemoRLAdapter:
    """The methods of NeMo RL's ``DataPlaneClient``, with its names, arguments and metas, over a client of dataplane.

    It covers all versions of the interface: of those methods that a version lacks, its trainer makes no use. Pickling
    is allowed: the copy attaches to the same store.

    Attributes:
        client: The client underneath, for what NeMo RL's interface lacks, such as leases.
    """

    def __init__(self, section: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        """Connects.

        Args:
            section: NeMo RL's ``data_plane`` section. Its key ``dataplane`` holds a config of dataplane.
            bootstrap: Whether to start the store (the driver), or to attach to it (workers).
        """
        self._section = section
        self.client: DataPlaneClient = connect(_config_of(section), bootstrap=bootstrap)
        self._tasks: dict[str, set[str]] = {}  # partition -> the tasks that it is known to have

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (Section(self._section),)

    # --- samples by id ------------------------------------------------------------------------------------------------

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Writes columns, tags, or both; with neither, the samples alone. Returns NeMo RL's meta."""
        ids = list(sample_ids)
        columns = None if fields is None or not len(fields.keys()) else fields
        rows = None if tags is None else [{name: _plain(value) for name, value in row.items()} for row in tags]
        if columns is None and rows is None:
            rows = [{} for _ in ids]
        written = self.client.put_samples(ids, partition_id, columns, rows)
        return self._meta(written, tags=None if tags is None else written.tags)

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """Reads one row per id."""
        return self.client.get_samples(list(sample_ids), partition_id, list(select_fields))

    def get_data(self, meta: Any, select_fields: list[str] | None = None) -> TensorDict:
        """Reads the rows that a meta names: ``select_fields``, or else ``meta.fields``."""
        ours = KVBatchMeta(meta.partition_id, meta.task_name, list(meta.sample_ids), fields=meta.fields)
        return self.client.get_data(ours, select_fields)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Removes samples. None: all that the partition holds, whoever wrote them; the partition stays registered."""
        if sample_ids is None:
            sample_ids = self.list_sample_ids(partition_id)
            if not sample_ids:
                warnings.warn(
                    f"clear_samples(None, '{partition_id}'): the partition holds no samples.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if sample_ids:
            self.client.clear_samples(list(sample_ids), partition_id)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """The ids of the samples that a partition holds. An unknown partition holds none."""
        try:
            return self.client.list_sample_ids(partition_id)
        except UnknownPartitionError:
            return []

    # --- partitions, tasks and claims ---------------------------------------------------------------------------------

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Registers a partition, or adds fields, tasks and enums to it. It keeps the rows that it has.

        ``num_samples`` and ``grpo_group_size`` are not used: NeMo RL registers a partition for every batch that it
        generates while rows of earlier ones live, so neither number holds for the partition.
        """
        self.client.register_partition(partition_id, fields, None, consumer_tasks, enums=enums, if_exists="keep")
        self._tasks.setdefault(partition_id, set()).update(consumer_tasks)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> Any:
        """Hands out samples that the task has not been given. Returns NeMo RL's meta.

        Blocking: waits for ``batch_size`` samples, at most ``timeout_s`` seconds, then raises `TimeoutError`. Otherwise
        it gives what is ready, perhaps nothing. ``dp_rank`` is not used, as in NeMo RL's own adapters: no two claims
        get the same sample.

        Raises:
            KeyError: The partition has tasks, and this is none of them.
            TimeoutError: Too few samples were ready in time.
        """
        self._check_task(partition_id, task_name)
        claimed = self.client.claim_meta(
            partition_id, task_name, required_fields, batch_size, blocking=blocking, timeout_s=max(0.0, timeout_s)
        )
        return self._meta(claimed, sequence_lengths=_lengths_of(claimed.tags), tags=claimed.tags or None)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Whether the tasks were given all samples that the partition holds. False while it holds none."""
        return self.client.check_consumption_status(partition_id, task_names)

    # --- checkpoints, end ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Saves all partitions in a folder, with what tasks have consumed."""
        self.client.save(checkpoint_dir, metadata)

    def load_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Loads what `save_checkpoint` saved, with this backend or another one; returns its metadata."""
        return self.client.load(checkpoint_dir)

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self.client.close()

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _meta(
        self,
        ours: KVBatchMeta,
        *,
        sequence_lengths: list[int] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        return importlib.import_module(_INTERFACES).KVBatchMeta(
            partition_id=ours.partition_id,
            task_name=ours.task_name,
            sample_ids=list(ours.sample_ids),
            fields=list(ours.fields) if ours.fields else None,
            sequence_lengths=sequence_lengths,
            tags=None if tags is None else [dict(row) for row in tags],
        )

    def _check_task(self, partition_id: str, task_name: str) -> None:
        """Refuses a misspelt task, which ``open_partitions`` would add. A partition without tasks takes any."""
        if task_name in self._tasks.get(partition_id, ()):
            return
        try:
            tasks = set(self.client.describe(partition_id).info.consumer_tasks)
        except UnknownPartitionError:
            return
        if tasks and task_name not in tasks:
            raise UnknownTaskError(
                f"claim_meta('{partition_id}') refused: the partition has no consumer task '{task_name}'. It has: "
                f"{', '.join(sorted(tasks))}.",
                hint="Register the partition with this task. That keeps its rows.",
            )
        self._tasks[partition_id] = tasks | {task_name}


def _config_of(section: Mapping[str, Any]) -> DataPlaneConfig:
    """The config of dataplane in a section of NeMo RL."""
    config = section.get("dataplane")
    if config is None:
        raise ConfigError(
            "data_plane.dataplane is missing.",
            hint="With impl: dataplane, the section needs a key 'dataplane' with a config of dataplane, such as "
            "{'backend': 'redis_store', 'options': {...}}.",
        )
    return load_config(config).model_copy(update={"open_partitions": True})


def _lengths_of(tags: Sequence[Mapping[str, Any]] | None) -> list[int] | None:
    """As NeMo RL has them: from the tag ``input_lengths``, 0 for a row without it, None if no row has it."""
    if not any("input_lengths" in row for row in tags or ()):
        return None
    return [int(row.get("input_lengths", 0)) for row in tags or ()]


def _plain(value: Any) -> Any:
    """A tag's value. Scalars of torch and numpy become Python's."""
    return value.item() if hasattr(value, "item") else value


# --- activation -------------------------------------------------------------------------------------------------------


class Section(dict[str, Any]):
    """NeMo RL's ``data_plane`` section with ``impl: dataplane``. A process that unpickles it is activated.

    After `activate`, NeMo RL's ``MasterConfig`` makes it. Code that makes its config otherwise calls ``Section(cfg)``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_section, (dict(self),)


def activate() -> None:
    """Makes NeMo RL build the adapter where its config says ``impl: dataplane``. Imports NeMo RL. May be called again.

    Call it in the driver before ``MasterConfig`` is made.
    """
    factory = importlib.import_module("nemo_rl.data_plane.factory")
    interfaces = importlib.import_module(_INTERFACES)
    original = getattr(factory, _FACTORY)
    if hasattr(original, "dataplane_section"):
        return
    replaced = _factory_over(original)
    _accept_section(interfaces.DataPlaneConfig)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "nemo_rl":
            continue
        for value in list(vars(module).values()):  # models that were made before, with the schema of then
            if isinstance(value, type) and issubclass(value, BaseModel) and "data_plane" in value.model_fields:
                value.model_rebuild(force=True)
        if vars(module).get(_FACTORY) is original:
            setattr(module, _FACTORY, replaced)


def attach(section: Mapping[str, Any]) -> NemoRLAdapter:
    """A client that attaches to the store of a section. Unpickling a client calls it."""
    return client_class()(section, bootstrap=False)


def _unpickle_section(values: dict[str, Any]) -> Section:
    activate()
    return Section(values)


def _factory_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo RL's factory, with one more ``impl``."""

    @functools.wraps(original)
    def build_data_plane_client(cfg: Any, *, bootstrap: bool = True) -> Any:
        if cfg is None or not cfg["enabled"] or cfg["impl"] != _IMPL:
            return original(cfg, bootstrap=bootstrap)
        client: Any = client_class()(cfg, bootstrap=bootstrap)
        observability = cfg.get("observability") or {}
        if observability.get("enabled", False):
            theirs = importlib.import_module("nemo_rl.data_plane.observability")
            on_event = observability.get("callback") or theirs.log_event
            client = theirs.MetricsDataPlaneClient(client, on_event=on_event)
        return client

    build_data_plane_client.dataplane_section = Section  # type: ignore[attr-defined] # a mark on a function
    return build_data_plane_client


def _accept_section(config_type: Any) -> None:
    """Makes pydantic take ``impl: dataplane``, which the type's Literal excludes, and keep the key ``dataplane``."""

    def validate(value: Any, theirs: Any) -> Any:
        if isinstance(value, Mapping) and value.get("impl") == _IMPL:
            return Section(value)
        return theirs(value)

    setattr(config_type, _SCHEMA, WrapValidator(validate).__get_pydantic_core_schema__)


def main() -> None:
    """``python -m dataplane_compat.nemo_rl SCRIPT [ARGUMENTS]``: activates, then runs the script as Python would."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m dataplane_compat.nemo_rl SCRIPT [ARGUMENTS]")
    activate()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("dataplane_compat.nemo_rl").main()  # not the copy of this module that is __main__
