"""Instances of ``tq_simple``. In `SimpleInstance`, the controller keeps a storage unit on each node.

Importing this module imports Ray.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dataplane_core.errors import ConfigError
from dataplane_core.host_memory import arena_bytes_for
from dataplane_tq_simple._actors import get_within, nodes_for_units
from dataplane_tq_simple._cluster import Instance, check_addresses, env_vars
from dataplane_tq_simple._folders import units_of
from dataplane_tq_simple._units import UnitOptions
from dataplane_tq_simple.config import TQSimpleConfig


class InstanceOfStorage(Instance):
    """What instances of all values of the option ``storage`` have in common: names that do not repeat."""

    prefix = "tq-"
    distribution = "dataplane-tq-simple"
    protocol = 12

    @classmethod
    def find(cls, config: TQSimpleConfig, *, deadline: float, wait_s: float = 0.0) -> Self:
        """As `Instance.find`. Raises `ConfigError` if its storage is not that of ``config``."""
        found = super().find(config, deadline=deadline, wait_s=wait_s)
        if found.config.storage != config.storage:
            raise ConfigError(
                f"instance {config.instance!r} runs with storage: {found.config.storage}, and this client has storage: "
                f"{config.storage}.",
                hint=f"Set storage: {found.config.storage}.",
            )
        return found


class SimpleInstance(InstanceOfStorage):
    """See above."""

    @classmethod
    def num_units(cls, config: TQSimpleConfig) -> int:
        """One for each node."""
        return len(nodes_for_units())

    @classmethod
    def _controller_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        size_bytes = config.unit_bytes
        if size_bytes is None and config.capacity_bytes is not None:
            size_bytes = arena_bytes_for(config.capacity_bytes)
        units = UnitOptions(
            size_bytes=size_bytes,
            touch_ahead_bytes=config.touch_ahead_bytes,
            folder=None if config.durable is None else str(units_of(config.durable, config.instance)),
            sync=config.sync == "commit",
            num_cpus=config.unit_num_cpus,
            detached=config.journal is not None,
            node_wait_s=config.node_wait_s,
            env_vars=env_vars(),
        )
        return {"units": units}

    @classmethod
    def _create_units(cls, config: TQSimpleConfig, deadline: float) -> dict[str, Any]:
        return {}

    def _prepare(self, answers: Sequence[Any], deadline: float) -> None:
        keeping = self._controller.keep_units.remote(max(0.0, deadline - time.monotonic()))
        units = get_within(keeping, "start the storage units", deadline)
        check_addresses({f"storage unit of node {each.node}": each.ip for each in units})
