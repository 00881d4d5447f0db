"""What this package uses of TransferQueue beyond its clients' API: one definition for each name, and used nowhere else.

Each docstring begins with the name, as ``module:Class.attribute``, so that a test can say which of them another version
of TransferQueue has moved. For that reason only versions that were tried are accepted.

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


# --- a storage unit --------------------------------------------------------------------------------------------------

UnitClass: Any = simple_storage.SimpleStorageUnit.__ray_metadata__.modified_class
"""``transfer_queue.storage.simple_storage:SimpleStorageUnit``: a unit as a plain class; see `ControllerClass`.

Ray sends the actor class to the worker by value, together with the settings that the driver's module has read. A class
that is derived here is sent by reference, so a unit reads its own environment.
"""


def unit_id(unit: Any) -> str:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit.storage_unit_id``: drawn anew by each process."""
    name: str = unit.storage_unit_id
    return name


def unit_server(unit: Any) -> tuple[str, int]:
    """``transfer_queue.storage.simple_storage:SimpleStorageUnit.zmq_server_info``: where it answers requests."""
    info = unit.zmq_server_info
    return info.ip, info.ports["put_get_socket"]


# --- messages --------------------------------------------------------------------------------------------------------

new_socket: Any = zmq_utils.create_zmq_socket
"""``transfer_queue.utils.zmq_utils:create_zmq_socket``: a socket with the settings that its servers expect."""
