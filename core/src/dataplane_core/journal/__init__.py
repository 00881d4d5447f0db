"""What a ledger did, on record: each command that changes something is a record, and a replay gives the same state.

What lives here: the records and their format, and a journal in a folder of a process that can be started again
(`RecordedLedger`), as the controllers on Ray. What only keeps notes, as a storage unit does, has a `NotesFile`. Nothing
here imports torch.
"""

from dataplane_core.journal.file import NotesFile
from dataplane_core.journal.journal import Journal, LedgerFailedError
from dataplane_core.journal.recorded_ledger import RecordedLedger, TakenError
from dataplane_core.journal.records import Record
from dataplane_core.journal.shortening import Shortener

__all__ = ["Journal", "LedgerFailedError", "NotesFile", "Record", "RecordedLedger", "Shortener", "TakenError"]
