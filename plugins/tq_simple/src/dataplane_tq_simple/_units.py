"""Instances whose units are TransferQueue's SimpleStorage.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.storage.simple_storage import SimpleStorageUnit

from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple.config import TQSimpleConfig

__all__ = ["SimpleStorageInstance", "StorageUnit"]


class StorageUnit(SimpleStorageUnit.__ray_metadata__.modified_class):  # type: ignore[misc]  # has no types
    """TransferQueue's storage unit as an importable class.

    TransferQueue exports only a Ray actor class, which Ray sends to the worker by value, together with the settings
    that the driver's module has read. An importable class is sent by reference, so a unit reads its own environment.
    """


class SimpleStorageInstance(Instance):
    """An instance of ``tq_simple``."""

    prefix = "tq-"
    distribution = "dataplane-tq-simple"
    protocol = 2

    @classmethod
    def _unit_class(cls) -> type:
        return StorageUnit

    @classmethod
    def _unit_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        return {"config": {"total_storage_size": config.storage_unit_size, "num_data_storage_units": 1}}

    @staticmethod
    def _ask_unit(handle: Any) -> Any:
        return handle.get_zmq_server_info.remote()

    @staticmethod
    def _unit_address(answer: Any) -> tuple[str, int]:
        return answer.ip, answer.ports["put_get_socket"]
