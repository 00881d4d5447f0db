"""Where instances keep what outlives their processes: ``FOLDER/INSTANCE/journal`` and ``FOLDER/INSTANCE/units/PLACE``.

A unit has a place in the folder of its node, which it locks. What it notes there is of one instance: its journal knows
which rows exist. Where that is not, the rows mean nothing, and a unit refuses to serve them.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.hosting import KeptExtents, has_extents, lock_folder, open_extents
from dataplane_core.journal import NotesFile
from dataplane_core.spec import new_id

_logger = logging.getLogger(__name__)

JOURNAL: Final = "journal"
_UNITS: Final = "units"
_NOTES: Final = "notes"
#: What a place that is damaged is named with, so that nobody opens it again.
_DAMAGED: Final = "damaged-"
#: What a place that is being deleted is named with, so that nobody finds a part of it.
_DELETED: Final = "deleted-"
#: Seconds that a process which had a place or the journal may take to end.
ENDING_S: Final = 10.0

_INSTANCE_NOTE: Final = "instance"
_TOKEN_NOTE: Final = "token"


class Place(NamedTuple):
    """Where a unit keeps its rows.

    Attributes:
        folder: The folder of the instance's units on its node.
        name: The name of the place in it.
        instance: Identifies the instance.
        found: Whether a node has it. Where it is not there, it is elsewhere.
    """

    folder: str
    name: str
    instance: str
    found: bool = False


class Opened(NamedTuple):
    """A place that a unit has opened.

    Attributes:
        extents: Its rows.
        notes: Where it notes them.
        token: Identifies the place, and what is in it.
        lock: The file descriptor that keeps others away.
    """

    extents: KeptExtents
    notes: NotesFile
    token: str
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


def places_in(units: Path) -> list[str]:
    """The places of units on this node."""
    try:
        return sorted(each for each in os.listdir(units) if not each.startswith((_DAMAGED, _DELETED)))
    except FileNotFoundError:
        return []


def delete_place(place: Place) -> None:
    """Deletes a place with what is in it, and what was left of others whose process ended while it deleted them."""
    units = Path(place.folder)
    with suppress(FileNotFoundError):
        units.joinpath(place.name).rename(units / f"{_DELETED}{place.name}-{new_id()}")
    for each in units.glob(f"{_DELETED}*"):
        shutil.rmtree(each, ignore_errors=True)


def open_place(
    place: Place,
    size_bytes: int | None,
    default_bytes: Callable[[], int],
    *,
    sync: bool = False,
    touch_ahead_bytes: int = 0,
) -> Opened:
    """Opens a place for this process. One that does not exist is made. One that is damaged is set aside, and made anew.

    Args:
        place: The place.
        size_bytes: The most bytes of its extents. None: as many as before.
        default_bytes: How many, if there is no before.
        sync, touch_ahead_bytes: See `KeptExtents`.

    Raises:
        AlreadyRunningError: Another process has it.
        BackendUnavailableError: It belongs to another instance, or cannot be used.
    """
    path = Path(place.folder, place.name)
    try:
        while True:
            lock = lock_folder(path, _NOTES, ENDING_S)
            try:
                return _open(place, path, size_bytes, default_bytes, sync, touch_ahead_bytes, lock)
            except BaseException as error:
                try:
                    if not isinstance(error, CorruptDataError):
                        raise
                    aside = path.with_name(f"{_DAMAGED}{place.name}-{new_id()}")
                    path.rename(aside)
                finally:
                    os.close(lock)
                _logger.error("the rows of a storage unit are lost: %s They are left in %s.", error, aside)
    except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
        raise
    except OSError as error:
        why = error.strerror or error  # not the name that a damaged place would have got, which is another each time
        raise BackendUnavailableError(f"the folder {path} cannot be used: {why}.", retryable=False) from error


def _open(
    place: Place,
    path: Path,
    size_bytes: int | None,
    default_bytes: Callable[[], int],
    sync: bool,
    touch_ahead_bytes: int,
    lock: int,
) -> Opened:
    notes = NotesFile(path / _NOTES, sync=sync)
    try:
        instance = notes.notes.get(_INSTANCE_NOTE, place.instance.encode()).decode()
        if instance != place.instance:
            raise BackendUnavailableError(
                f"the folder {path} holds rows of an instance whose journal is not the one that was found.",
                retryable=False,
                hint="Bootstrap where that journal is, or remove the folder: its rows are lost then.",
            )
        if size_bytes is None and not has_extents(notes):
            size_bytes = default_bytes()
        extents = open_extents(path, size_bytes, notes, None, sync=sync, touch_ahead_bytes=touch_ahead_bytes)
        token = notes.notes.get(_TOKEN_NOTE, new_id().encode())
        notes.note(_TOKEN_NOTE, token)
        notes.note(_INSTANCE_NOTE, instance.encode())
        notes.commit()
    except BaseException:
        notes.close()
        raise
    return Opened(extents, notes, token.decode(), lock)
