"""What this package uses of TransferQueue beyond its clients' API: one definition for each name, and used nowhere else.

Each docstring begins with the name, as ``module:Class.attribute``, so that a test can say which of them another version
of TransferQueue has moved. For that reason the version is pinned.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.controller import TransferQueueController
from transfer_queue.storage import simple_storage
from transfer_queue.utils import zmq_utils

# --- the controller --------------------------------------------------------------------------------------------------

ControllerClass: Any = TransferQueueController.__ray_metadata__.modified_class
"""``transfer_queue.controller:TransferQueueController``: the controller as a plain class.

TransferQueue exports a Ray actor class, which cannot be derived from. The class that Ray made it of can.
"""


def node_ip(controller: Any) -> str:
    """``transfer_queue.controller:TransferQueueController._node_ip``: the address that it listens on."""
    ip: str = controller._node_ip
    return ip


def store_config(controller: Any, description: Any) -> None:
    """``transfer_queue.controller:TransferQueueController.store_config``: keeps what attaching clients ask for."""
    ControllerClass.store_config(controller, description)


def set_config(controller: Any, description: Any) -> None:
    """``transfer_queue.controller:TransferQueueController.tq_config``: where `store_config` keeps it."""
    controller.tq_config = description


# --- a storage unit --------------------------------------------------------------------------------------------------

UnitClass: Any = simple_storage.SimpleStorageUnit.__ray_metadata__.modified_class
"""``transfer_queue.storage.simple_storage:SimpleStorageUnit``: a unit as a plain class; see `ControllerClass`.

Ray sends the actor class to the worker by value, together with the settings that the driver's module has read. A class
that is derived here is sent by reference, so a unit reads its own environment.
"""


def answer_put(unit: Any, request: Any) -> Any:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit._handle_put``: stores rows. Units override it."""
    return UnitClass._handle_put(unit, request)


def answer_get(unit: Any, request: Any) -> Any:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit._handle_get``: returns rows. Units override it."""
    return UnitClass._handle_get(unit, request)


def answer_clear(unit: Any, request: Any) -> Any:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit._handle_clear``: deletes rows. Units override it."""
    return UnitClass._handle_clear(unit, request)


def active_keys(unit: Any) -> set[int]:
    """``transfer_queue.storage.simple_storage:StorageUnitData._active_keys``: the handles of the rows that it holds."""
    keys: set[int] = unit.storage_data._active_keys
    return keys


def unit_id(unit: Any) -> str:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit.storage_unit_id``: drawn anew by each process."""
    name: str = unit.storage_unit_id
    return name


def unit_server(unit: Any) -> tuple[str, int]:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit.zmq_server_info``: where it answers requests."""
    info = unit.zmq_server_info
    return info.ip, info.ports["put_get_socket"]


key_not_found: str = simple_storage.KEY_NOT_FOUND_MARKER
"""``transfer_queue.storage.simple_storage:KEY_NOT_FOUND_MARKER``: is in the refusal of a read of a row that is gone."""


# --- messages --------------------------------------------------------------------------------------------------------

Message: Any = zmq_utils.ZMQMessage
"""``transfer_queue.utils.zmq_utils:ZMQMessage``: requests and replies, as frames."""

RequestType: Any = zmq_utils.ZMQRequestType
"""``transfer_queue.utils.zmq_utils:ZMQRequestType``: what a message asks for or answers."""

identity_prefix: str = zmq_utils.STORAGE_MANAGER_IDENTITY_PREFIX
"""``transfer_queue.utils.zmq_utils:STORAGE_MANAGER_IDENTITY_PREFIX``: what the names of a unit's clients begin with."""

new_socket: Any = zmq_utils.create_zmq_socket
"""``transfer_queue.utils.zmq_utils:create_zmq_socket``: a socket with the settings that its servers expect."""
