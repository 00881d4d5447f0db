"""Where instances keep what outlives their processes: ``FOLDER/INSTANCE/journal`` and ``FOLDER/INSTANCE/units/NAME``.

The unit of a node has a folder of its own there, which it locks. What it notes there is of one instance: its journal
knows which rows exist. Where that is not, the rows mean nothing, and a unit refuses to serve them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CorruptDataError
from dataplane_core.hosting import KeptExtents, has_extents, lock_folder, open_extents
from dataplane_core.log import NotesLog
from dataplane_core.spec import new_id

_logger = logging.getLogger(__name__)

JOURNAL: Final = "journal"
_UNITS: Final = "units"
_NOTES: Final = "notes"
#: What a folder that is damaged is named with, so that nobody opens it again.
_DAMAGED: Final = "damaged-"
#: Seconds that a process which had a folder or the journal may take to end.
ENDING_S: Final = 10.0

_INSTANCE_NOTE: Final = "instance"


class Opened(NamedTuple):
    """The folder of a unit, opened: its name, its rows, where it notes them, the descriptor that keeps others away."""

    name: str
    extents: KeptExtents
    notes: NotesLog
    lock: int

    def close(self) -> None:
        """Gives it up. Its rows are not used any more."""
        self.notes.close()
        os.close(self.lock)


def folder_of(folder: str, instance: str) -> Path:
    """The folder of an instance, in the folder that an option names."""
    return Path(folder, instance)


def units_of(folder: str, instance: str) -> Path:
    """The folder of an instance's units."""
    return folder_of(folder, instance) / _UNITS


def folders_in(units: Path) -> list[str]:
    """The names of the folders of units on this node."""
    try:
        return sorted(each for each in os.listdir(units) if not each.startswith(_DAMAGED))
    except FileNotFoundError:
        return []


def open_rows(
    units: Path,
    names: Sequence[str],
    new: str,
    instance: str,
    size_bytes: int | None,
    default_bytes: Callable[[], int],
    *,
    sync: bool = False,
    touch_ahead_bytes: int = 0,
) -> Opened:
    """Opens a folder for this process. One that is damaged is set aside.

    Args:
        units: The folder of the instance's units.
        names: Those that may be opened; the first that no other process has is.
        new: The one that is made if there are none.
        instance: Identifies the instance.
        size_bytes: The most bytes of its extents. None: as many as before.
        default_bytes: How many, if there is no before.
        sync, touch_ahead_bytes: See `KeptExtents`.

    Raises:
        AlreadyRunningError: Other processes have them.
        BackendUnavailableError: It belongs to another instance, or cannot be used.
    """
    left = list(names)
    options = instance, size_bytes, default_bytes, sync, touch_ahead_bytes
    for waits in (False, True):
        for name in list(left):
            with nullcontext() if waits else suppress(AlreadyRunningError):
                opened = _open_or_set_aside(units / name, ENDING_S if waits else 0.0, *options)
                if opened is not None:
                    return opened
                left.remove(name)
    opened = _open_or_set_aside(units / new, 0.0, *options)
    assert opened is not None
    return opened


def _open_or_set_aside(path: Path, patience_s: float, *options: Any) -> Opened | None:
    """None: it is damaged, and was set aside."""
    try:
        lock = lock_folder(path, _NOTES, patience_s)
        try:
            return _open(path, lock, *options)
        except BaseException as error:
            try:
                if not isinstance(error, CorruptDataError):
                    raise
                aside = path.with_name(f"{_DAMAGED}{path.name}-{new_id()}")
                path.rename(aside)
            finally:
                os.close(lock)
            _logger.error("the rows of a storage unit are lost: %s They are left in %s.", error, aside)
            return None
    except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
        raise
    except OSError as error:
        why = error.strerror or error  # not the name that a damaged one would have got, which is another each time
        raise BackendUnavailableError(f"the folder {path} cannot be used: {why}.", retryable=False) from error


def _open(
    path: Path,
    lock: int,
    instance: str,
    size_bytes: int | None,
    default_bytes: Callable[[], int],
    sync: bool,
    touch_ahead_bytes: int,
) -> Opened:
    notes = NotesLog(path / _NOTES, sync=sync)
    try:
        if notes.notes.get(_INSTANCE_NOTE, instance.encode()) != instance.encode():
            raise BackendUnavailableError(
                f"the folder {path} holds rows of an instance whose journal is not the one that was found.",
                retryable=False,
                hint="Bootstrap where that journal is, or remove the folder: its rows are lost then.",
            )
        if size_bytes is None and not has_extents(notes):
            size_bytes = default_bytes()
        extents = open_extents(path, size_bytes, notes, None, sync=sync, touch_ahead_bytes=touch_ahead_bytes)
        notes.note(_INSTANCE_NOTE, instance.encode())
        notes.commit()
    except BaseException:
        notes.close()
        raise
    return Opened(path.name, extents, notes, lock)
