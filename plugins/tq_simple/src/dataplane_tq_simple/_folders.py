"""The folder of an instance, in that of the option ``durable``.

``FOLDER/INSTANCE/journal`` is on the controller's node, and ``FOLDER/INSTANCE/unit``, with rows, on each node.

Each process locks its folder. The folder of a unit notes whose rows it has: the journal of that instance knows which
exist. Where that is not, the rows mean nothing, and a unit refuses to serve them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.host_memory import memory_limit
from dataplane_core.kept_extents import KeptExtents, check_extents
from dataplane_core.log import FolderLog
from dataplane_core.ownership import lock_folder
from dataplane_core.spec import new_id

_logger = logging.getLogger(__name__)

JOURNAL: Final = "journal"
_UNIT: Final = "unit"
#: The least memory of a unit whose size is not said.
_LEAST_BYTES: Final = 64 << 20
_NOTES: Final = "notes"
#: Seconds that a process which had a folder may take to end.
ENDING_S: Final = 10.0

_INSTANCE_NOTE: Final = "instance"
_TOKEN_NOTE: Final = "token"


def default_bytes() -> int:
    """The memory of a unit of which nobody says how much it may use."""
    return max(memory_limit().available_bytes // 2, _LEAST_BYTES)


class OpenedUnit(NamedTuple):
    """The folder of a unit, opened: what identifies its rows, the rows, and where they are noted."""

    token: str
    extents: KeptExtents
    notes: FolderLog


def folder_of(folder: str, instance: str) -> Path:
    """The folder of an instance, in the folder that an option names."""
    return Path(folder, instance)


def unit_of(folder: str, instance: str) -> Path:
    """The folder of an instance's unit on this node."""
    return folder_of(folder, instance) / _UNIT


def open_unit(
    path: Path, instance: str, size_bytes: int | None, *, sync: bool = False, touch_ahead_bytes: int = 0
) -> OpenedUnit:
    """Opens the folder of a unit, which is locked until this process ends. One that is damaged is set aside.

    Without ``size_bytes``, rows may take as much as before, or `default_bytes`.

    Raises:
        AlreadyRunningError: Another process has it.
        BackendUnavailableError: It belongs to another instance, or cannot be used.
    """
    try:
        lock_folder(path, _NOTES, ENDING_S)
        try:
            return _open(path, instance, size_bytes, sync, touch_ahead_bytes)
        except CorruptDataError as error:
            aside = path.with_name(f"damaged-{new_id()}")
            path.rename(aside)
            _logger.error("the rows of a storage unit are lost: %s They are left in %s.", error, aside)
        lock_folder(path, _NOTES, ENDING_S)
        return _open(path, instance, size_bytes, sync, touch_ahead_bytes)
    except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
        raise
    except OSError as error:
        why = error.strerror or error  # not the name of a damaged one, which is another each time
        raise BackendUnavailableError(f"the folder {path} cannot be used: {why}.", retryable=False) from error


def _open(path: Path, instance: str, size_bytes: int | None, sync: bool, touch_ahead_bytes: int) -> OpenedUnit:
    notes = FolderLog(path / _NOTES, sync=sync)
    notes.begin()
    if notes.notes.get(_INSTANCE_NOTE, instance.encode()) != instance.encode():
        raise BackendUnavailableError(
            f"the folder {path} holds rows of an instance whose journal is not the one that was found.",
            retryable=False,
            hint="Bootstrap where that journal is, or remove the folder: its rows are lost then.",
        )
    size_bytes = size_bytes or check_extents(path, notes.notes) or default_bytes()
    extents = KeptExtents(path, size_bytes, notes, sync=sync, touch_ahead_bytes=touch_ahead_bytes)
    token = notes.notes.get(_TOKEN_NOTE, new_id().encode())
    notes.note(_INSTANCE_NOTE, instance.encode())
    notes.note(_TOKEN_NOTE, token)
    notes.commit()
    return OpenedUnit(token.decode(), extents, notes)
