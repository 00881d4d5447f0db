"""A store in a folder: its arena is a file, and its ledger is kept in a log. It outlives its processes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

from dataplane_core.durable_files import disk_hint
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.host_memory import arena_bytes_for
from dataplane_core.hosting import Client
from dataplane_core.kept_extents import KeptExtents
from dataplane_core.ledger import commands
from dataplane_core.log import FolderLog, LoggedLedger
from dataplane_core.ownership import lock_folder
from dataplane_shm._store import Store

_JOURNAL: Final = "journal"
#: Seconds that an owner which was killed may take to end.
_ENDING_S: Final = 2.0
#: The numbers of sessions below this one were used. They are part of write ids, which are never used again.
_SESSIONS_NOTE: Final = "sessions"
_SESSIONS_TOGETHER: Final = 64


class DurableStore(Store):
    """As `Store`, of what lies in a folder, which it makes. With ``sync``, what is answered survives the end
    of the machine. ``namespace`` is told to others that want the folder.

    Raises:
        AlreadyRunningError: Another process has the folder open.
        BackendUnavailableError: The folder cannot be used.
        CorruptDataError: What is in it is damaged, or of another version.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        on_full: str,
        *,
        sync: bool,
        touch_ahead_bytes: int = 0,
        namespace: str = "default",
    ) -> None:
        try:
            self._lock = lock_folder(folder, _JOURNAL, _ENDING_S, f"namespace '{namespace}'")
            self._log = FolderLog(folder / _JOURNAL, sync=sync)
            logged = LoggedLedger(self._log, capacity_bytes, lazy=(commands.BeginPut,), ends_holds=True)
            self.kept = KeptExtents(
                folder, arena_bytes_for(capacity_bytes), self._log, sync=sync, touch_ahead_bytes=touch_ahead_bytes
            )
            self.kept.retain({write_id: positions for write_id, (_, positions) in logged.ledger.payload().items()})
        except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
            raise
        except OSError as error:
            raise BackendUnavailableError(
                f"the folder {folder} cannot be used: {error}.",
                retryable=False,
                hint=disk_hint(error),
            ) from error
        self.folder = os.path.realpath(folder)
        super().__init__(self.kept, logged, capacity_bytes, on_full, self._log.commit_or_end)
        self._numbers = itertools.count(int(self._log.notes.get(_SESSIONS_NOTE, b"1")))
        self._sweep()
        self._log.commit()

    def close(self) -> None:
        """Ends the store, whose folder can then be moved."""
        self.kept.finish()
        self._log.finish()
        self._log.close()
        os.close(self._lock)

    def _new_client(self, number: int) -> Client:
        if number >= int(self._log.notes.get(_SESSIONS_NOTE, b"1")):
            self._log.note(_SESSIONS_NOTE, b"%d" % (number + _SESSIONS_TOGETHER))
            self._log.commit_or_end()  # before any write id has that number
        return super()._new_client(number)
