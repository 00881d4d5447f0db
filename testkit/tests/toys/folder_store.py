"""A `BlobStore` in a folder, shared by the processes of a host, and stores of blobs that are wrong in one way each.

The right one is what `dataplane new-plugin` writes. Each docstring of the others is the bug report; the kit's test that
names it is in `BROKEN`.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
import zlib
from string import Template

from broken import Broken

from dataplane_core.errors import ConfigError
from dataplane_testkit._new_plugin import _JOURNALED

BROKEN = Broken()
breaks = BROKEN.breaks


def _written():
    """What `dataplane new-plugin folder_store --journal` writes."""
    names = {"__name__": __name__}
    source = Template(_JOURNALED).substitute(name="folder_store", cls="FolderStore")
    exec(compile(source, "folder_store", "exec", dont_inherit=True), names)
    return names["FolderStore"]


FolderStore = _written()


class OneCapacity(FolderStore):
    """Right, too: all its clients have the capacity of the first one."""

    def start(self, *, bootstrap, deadline):
        super().start(bootstrap=bootstrap, deadline=deadline)
        path = self.config.path / "capacity"
        if bootstrap:
            path.write_text(str(self.config.capacity_bytes))
        elif path.read_text() != str(self.config.capacity_bytes):
            raise ConfigError(f"the store at '{self.config.path}' has another capacity.")


# --- one blob ---------------------------------------------------------------------------------------------------------


@breaks("test_a_deleted_blob_is_gone")
class DeletesNothing(FolderStore):
    """delete does nothing: what is cleared stays for ever."""

    def delete(self, key):
        pass


@breaks("test_rows_that_are_cleared_leave_the_engine")
class KeepsWhatIsCleared(FolderStore):
    """The one delete that clears call is not there."""

    def delete_rows(self, handles, deadline):
        pass


@breaks("test_a_new_registration_leaves_nothing_of_the_old_in_the_engine")
class KeepsWhatARegistrationFrees(FolderStore):
    """Only clears delete."""

    def clear_samples(self, request):
        self.clears = True
        try:
            return super().clear_samples(request)
        finally:
            self.clears = False

    def delete_rows(self, handles, deadline):
        if getattr(self, "clears", False):
            super().delete_rows(handles, deadline)


@breaks("test_a_missing_blob_reads_as_none")
class RaisesKeyErrorForWhatIsMissing(FolderStore):
    """get is a dict's `[]`."""

    def get(self, key):
        data = super().get(key)
        if data is None:
            raise KeyError(key)
        return data

    def get_many(self, keys):
        return [super(RaisesKeyErrorForWhatIsMissing, self).get(key) for key in keys]


@breaks("test_a_missing_blob_reads_as_none")
class ReadsWhatIsMissingAsEmpty(FolderStore):
    """get returns b"" for a key that is not there."""

    def get(self, key):
        return super().get(key) or b""


@breaks("test_an_empty_blob_is_told_from_a_missing_one")
class ReadsWhatIsEmptyAsMissing(FolderStore):
    """get asks for truth where it means None."""

    def get(self, key):
        return super().get(key) or None


@breaks("test_deleting_what_is_not_there_is_ignored")
class RaisesForWhatIsDeletedTwice(FolderStore):
    """delete of a file that is not there is an error."""

    def delete(self, key):
        (self._blobs / key).unlink()


@breaks("test_smoke_hundreds_of_blobs_come_back")
class DropsATenth(FolderStore):
    """Every tenth blob, by its key, is lost."""

    def put(self, key, data):
        if zlib.crc32(key.encode()) % 10:
            super().put(key, data)


@breaks("test_smoke_hundreds_of_rows_go_in_and_out")
class LosesLargeBatches(FolderStore):
    """put_many writes the first 64."""

    def put_many(self, blobs):
        super().put_many(dict(list(blobs.items())[:64]))


@breaks("test_a_blob_comes_back_byte_for_byte[no_text]")
class KeepsText(FolderStore):
    """Bytes pass through a string."""

    def put(self, key, data):
        super().put(key, data.decode(errors="replace").encode())


@breaks("test_a_blob_comes_back_byte_for_byte[ends_in_zeros]")
class EndsAtZeros(FolderStore):
    """Trailing zeros are padding to this engine."""

    def get(self, key):
        data = super().get(key)
        return data and data.rstrip(b"\0")


@breaks("test_a_blob_comes_back_byte_for_byte[16_mb]")
class CutsLargeBlobs(FolderStore):
    """A value ends at 16 MB."""

    def put(self, key, data):
        super().put(key, data[: 16 << 20])


@breaks("test_keys_do_not_clash")
class ShortensKeys(FolderStore):
    """Keys have at most 40 characters."""

    def get(self, key):
        return super().get(key[:40])

    def put(self, key, data):
        with contextlib.suppress(FileExistsError):
            super().put(key[:40], data)


@breaks("test_keys_do_not_clash")
class DeletesByPrefix(FolderStore):
    """Every key that begins with the one to delete goes along."""

    def delete(self, key):
        for path in self._blobs.glob(f"{key}*"):
            path.unlink(missing_ok=True)


# --- many at once -----------------------------------------------------------------------------------------------------


@breaks("test_put_many_stores_as_put_does")
class SwapsBatches(FolderStore):
    """put_many sorts the blobs, and not their keys."""

    def put_many(self, blobs):
        super().put_many(dict(zip(blobs, sorted(blobs.values()), strict=True)))


@breaks("test_get_many_replies_as_get_does")
class ReordersBlobs(FolderStore):
    """get_many replies in the order of its index."""

    def get_many(self, keys):
        return super().get_many(sorted(keys))


@breaks("test_get_many_replies_as_get_does")
class LeavesOutWhatIsMissing(FolderStore):
    """get_many replies with what is there."""

    def get_many(self, keys):
        return [data for data in super().get_many(keys) if data is not None]


@breaks("test_delete_many_deletes_as_delete_does")
class StopsAtTheFirstMissingKey(FolderStore):
    """delete_many ends where it meets a key that is not there."""

    def delete_many(self, keys):
        for key in keys:
            if self.get(key) is None:
                return
            self.delete(key)


# --- several at once --------------------------------------------------------------------------------------------------


@breaks("test_blobs_from_several_threads")
class SharesABuffer(FolderStore):
    """put goes through a buffer that all threads share."""

    def put(self, key, data):
        self.buffer = data
        time.sleep(0.001)
        super().put(key, self.buffer)


@breaks("test_blobs_are_seen_by_every_client")
class WritesBehind(FolderStore):
    """put returns first, and writes when the next one comes."""

    def __init__(self, config):
        super().__init__(config)
        self.late = {}

    def put(self, key, data):
        for name in list(self.late):
            super().put(name, self.late.pop(name))
        self.late[key] = data

    def get(self, key):
        return self.late[key] if key in self.late else super().get(key)


@breaks("test_blobs_are_seen_by_every_client")
class CachesWhatOthersDelete(FolderStore):
    """get remembers what it put."""

    def __init__(self, config):
        super().__init__(config)
        self.cache = {}

    def put(self, key, data):
        super().put(key, data)
        self.cache[key] = data

    def get(self, key):
        return self.cache[key] if key in self.cache else super().get(key)

    def delete(self, key):
        self.cache.pop(key, None)
        super().delete(key)


# --- the journal ------------------------------------------------------------------------------------------------------


@breaks("test_a_place_in_the_journal_is_taken_once")
class OverwritesRecords(FolderStore):
    """append replaces what stands there."""

    def append(self, seq, record):
        (self._records / str(seq)).write_bytes(record)
        return True


@breaks("test_a_place_in_the_journal_is_taken_once")
class TakesTheSameRecordTwice(FolderStore):
    """append takes a record that stands there for its own: two clients may write the same."""

    def append(self, seq, record):
        return super().append(seq, record) or self.read(seq)[0] == record


@breaks("test_the_journal_reads_in_order_from_any_place")
class OrdersRecordsAsText(FolderStore):
    """10 comes before 2."""

    def read(self, from_seq):
        records = list(enumerate(super().read(0)))
        return [record for seq, record in sorted(records, key=lambda pair: str(pair[0])) if seq >= from_seq]


@breaks("test_the_journal_reads_in_order_from_any_place")
class ReadsAPage(FolderStore):
    """read gives a hundred records at most."""

    def read(self, from_seq):
        return super().read(from_seq)[:100]


@breaks("test_the_journal_reads_in_order_from_any_place")
class RaisesAtTheEnd(FolderStore):
    """read from the end on is an error."""

    def read(self, from_seq):
        records = super().read(from_seq)
        if not records:
            raise IndexError(from_seq)
        return records


@breaks("test_tags_that_are_no_finite_numbers_leave_the_store_usable")
class CannotReadNaN(FolderStore):
    """The journal can be written with a NaN in it, and then not be read."""

    def read(self, from_seq):
        records = super().read(from_seq)
        if any(struct.pack(">d", math.nan) in record for record in records):
            raise ValueError("Out of range float values are not JSON compliant")
        return records


@breaks("test_other_clients_read_what_was_appended")
class CachesTheJournal(FolderStore):
    """read asks the store once, and knows from then on only what this client appends."""

    def __init__(self, config):
        super().__init__(config)
        self.known = None

    def append(self, seq, record):
        taken = super().append(seq, record)
        if taken and self.known is not None:
            self.known.append(record)
        return taken

    def read(self, from_seq):
        if self.known is None:
            self.known = super().read(0)
        return self.known[from_seq:]


@breaks("test_racing_appends_take_each_place_once")
class LooksBeforeItAppends(FolderStore):
    """append looks whether the place is free, and then takes it."""

    def append(self, seq, record):
        path = self._records / str(seq)
        if path.exists():
            return False
        time.sleep(0.001)
        path.write_bytes(record)
        return True


@breaks("test_a_trimmed_journal_begins_where_it_was_told")
class TrimsNothing(FolderStore):
    """trim does nothing, so what it should have dropped is read again."""

    def trim(self, before_seq):
        pass


@breaks("test_a_trimmed_journal_begins_where_it_was_told")
class TrimsOneMore(FolderStore):
    """trim drops the record that it is told, too: the snapshot's."""

    def trim(self, before_seq):
        super().trim(before_seq + 1)


@breaks("test_a_trimmed_journal_begins_where_it_was_told")
class ReadsNothingBelowTheFirst(FolderStore):
    """read of a number that was trimmed finds nothing there, and ends."""

    def read(self, from_seq):
        return super().read(from_seq) if from_seq >= self._first() else []


@breaks("test_a_read_beside_a_trim_misses_no_record")
class ReadsWhatIsTrimmedMeanwhile(FolderStore):
    """read looks where the journal begins, finds that record gone, and takes that for the end."""

    def read(self, from_seq):
        first = max(from_seq, self._first())
        time.sleep(0.001)
        records = []
        with contextlib.suppress(FileNotFoundError):
            while True:
                records.append((self._records / str(first + len(records))).read_bytes())
        return records


@breaks("test_a_journal_is_trimmed_to_the_same_or_a_lower_number_without_a_change")
class TrimsBack(FolderStore):
    """trim to a lower number sets back where the journal begins: nothing is there, so read finds none."""

    def trim(self, before_seq):
        super().trim(before_seq)
        for trim in self._trims.iterdir():
            trim.rename(self._trims / str(before_seq))


@breaks("test_a_journal_is_trimmed_to_the_same_or_a_lower_number_without_a_change")
class TrimsOnlyOnce(FolderStore):
    """trim to the same number is an error."""

    def trim(self, before_seq):
        if before_seq == self._first():
            raise FileNotFoundError(before_seq)
        super().trim(before_seq)


@breaks("test_a_trimmed_place_stays_taken")
class TakesWhatWasTrimmed(FolderStore):
    """append looks only at the records that are there."""

    def append(self, seq, record):
        try:
            os.link(self._write(record), self._records / str(seq))
        except FileExistsError:
            return False
        return True
