"""What the host of a ledger wrote down, so that the next host goes on where it ended.

What lives here: a `Log` in a folder (`FolderLog`), one in an engine that several hosts reach (`engine`), notes that
outlive a process (`NotesLog`), and the ledger that is kept in one (`LoggedLedger`). Durable stores, controllers and the
owner of a `RowStoreBackend`'s ledger use it. Nothing here imports torch.
"""

from dataplane_core.log.folder import FolderLog, NotesLog
from dataplane_core.log.ledger import LoggedLedger

__all__ = [
    "FolderLog",
    "LoggedLedger",
    "NotesLog",
]
