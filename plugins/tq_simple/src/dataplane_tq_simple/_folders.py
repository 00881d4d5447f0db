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
from typing import Final, NamedTuple

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CorruptDataError
from dataplane_core.hosting import KeptExtents
from dataplane_core.log import NotesLog
from dataplane_core.ownership import lock_folder
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
    open_in: Callable[[Path, NotesLog], KeptExtents],
    *,
    sync: bool = False,
) -> Opened:
    """Opens a folder for this process. One that is damaged is set aside.

    Args:
        units: The folder of the instance's units.
        names: Those that may be opened; the first that no other process has is.
        new: The one that is made if there are none.
        instance: Identifies the instance.
        open_in: Opens the extents in a folder.
        sync: See `NotesLog`.

    Raises:
        AlreadyRunningError: Other processes have them.
        BackendUnavailableError: It belongs to another instance, or cannot be used.
    """

    def open_one(name: str, patience_s: float) -> Opened | None:
        """None: it is damaged, and was set aside."""
        path = units / name
        try:
            lock = lock_folder(path, _NOTES, patience_s)
            try:
                return Opened(name, *_open(path, instance, open_in, sync), lock)
            except BaseException as error:
                try:
                    if not isinstance(error, CorruptDataError):
                        raise
                    aside = path.with_name(f"{_DAMAGED}{name}-{new_id()}")
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

    left = list(names)
    for waits in (False, True):
        for name in list(left):
            with nullcontext() if waits else suppress(AlreadyRunningError):
                opened = open_one(name, ENDING_S if waits else 0.0)
                if opened is not None:
                    return opened
                left.remove(name)
    opened = open_one(new, 0.0)
    assert opened is not None
    return opened


def _open(
    path: Path, instance: str, open_in: Callable[[Path, NotesLog], KeptExtents], sync: bool
) -> tuple[KeptExtents, NotesLog]:
    notes = NotesLog(path / _NOTES, sync=sync)
    try:
        if notes.notes.get(_INSTANCE_NOTE, instance.encode()) != instance.encode():
            raise BackendUnavailableError(
                f"the folder {path} holds rows of an instance whose journal is not the one that was found.",
                retryable=False,
                hint="Bootstrap where that journal is, or remove the folder: its rows are lost then.",
            )
        extents = open_in(path, notes)
        notes.note(_INSTANCE_NOTE, instance.encode())
        notes.commit()
    except BaseException:
        notes.close()
        raise
    return extents, notes
