"""Stores in a folder that are wrong in one way each, with their blobs, their journal, or between processes.

The right one is what `dataplane new-plugin --journal` writes. The rows are as in `broken`.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
import zlib
from dataclasses import replace

import pytest
from broken import claims_in_two_steps
from table import Table, settles

from dataplane_core.codec import split_rows
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError, StalePartitionError
from dataplane_core.ledger import commands
from dataplane_core.spec import Capability, PutReply, new_id
from dataplane_testkit._new_plugin import files_of

_written = {"__name__": __name__}
_source = files_of("folder_store", journal=True)["src/dataplane_folder_store/__init__.py"]
exec(compile(_source, "folder_store", "exec", dont_inherit=True), _written)
FolderStore = _written["FolderStore"]


@pytest.fixture
def _options(self, tmp_path_factory):
    return {"path": str(tmp_path_factory.getbasetemp() / "store")}


def _raw_get(self, backend, partition_id, sample_id, field):
    (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
    row = (backend._blobs / f"row{part.write_id + part.positions[0]:x}").read_bytes()
    return split_rows([row])[0][part.slots[0]]


toy = Table(FolderStore, __name__, options=_options, raw_get=_raw_get)


def _place(self, *names):
    """A file beside those of the store, of which all processes see whether it is there."""
    path = self.config.path.joinpath(*names)
    path.parent.mkdir(exist_ok=True)
    return path


# fmt: off
# --- one blob ---------------------------------------------------------------------------------------------------------
toy.row("DeletesNothing", "delete does nothing: what is cleared stays for ever.",
        fails="test_what_is_deleted_is_gone[delete]", delete=lambda *_: None)
toy.row("KeepsWhatIsCleared", "The one delete that clears call is not there.",
        fails="test_what_is_dropped_leaves_the_engine[half_of_the_rows]", delete_rows=lambda *_: None)

@toy("Only clears delete.", fails="test_what_is_dropped_leaves_the_engine[an_old_registration]",
     delete_rows=lambda self, delete, *rows: delete(*rows) if self.seen["clears"] else None)
def keeps_what_a_registration_frees(self, clear_samples, request):
    self.seen["clears"].append(request)
    try:
        return clear_samples(request)
    finally:
        self.seen["clears"].clear()

@toy("get is a dict's `[]`.", fails="test_an_empty_blob_is_told_from_a_missing_one",
     get_many=lambda self, get_many, keys: [FolderStore.get(self, key) for key in keys])
def raises_key_error_for_what_is_missing(self, get, key):
    data = get(key)
    if data is None:
        raise KeyError(key)
    return data

toy.row("ReadsWhatIsMissingAsEmpty", 'get returns b"" for a key that is not there.',
        fails="test_an_empty_blob_is_told_from_a_missing_one", get=lambda self, get, key: get(key) or b"")
toy.row("ReadsWhatIsEmptyAsMissing", "get asks for truth where it means None.",
        fails="test_an_empty_blob_is_told_from_a_missing_one", get=lambda self, get, key: get(key) or None)
toy.row("RaisesForWhatIsDeletedTwice", "delete of a file that is not there is an error.",
        fails="test_what_is_deleted_is_gone[delete]", delete=lambda self, delete, key: (self._blobs / key).unlink())
toy.row("DropsATenth", "Every tenth blob, by its key, is lost.", fails="test_smoke_hundreds_of_blobs_come_back",
        put=lambda self, put, key, data: put(key, data) if zlib.crc32(key.encode()) % 10 else None)
toy.row("LosesLargeBatches", "put_many writes the first 64.", fails="test_smoke_hundreds_of_rows_go_in_and_out",
        put_many=lambda self, put_many, blobs: put_many(dict(list(blobs.items())[:64])))
toy.row("KeepsText", "Bytes pass through a string.", fails="test_a_blob_comes_back_byte_for_byte[no_text]",
        put=lambda self, put, key, data: put(key, data.decode(errors="replace").encode()))
toy.row("EndsAtZeros", "Trailing zeros are padding to this engine.",
        fails="test_a_blob_comes_back_byte_for_byte[ends_in_zeros]",
        get=lambda self, get, key: data.rstrip(b"\0") if (data := get(key)) else data)
toy.row("CutsLargeBlobs", "A value ends at 16 MB.", fails="test_a_blob_comes_back_byte_for_byte[16_mb]",
        put=lambda self, put, key, data: put(key, data[: 16 << 20]))

@toy("Keys have at most 40 characters.", fails="test_keys_do_not_clash", get=lambda self, get, key: get(key[:40]))
def shortens_keys(self, put, key, data):
    with contextlib.suppress(FileExistsError):
        put(key[:40], data)

@toy("Every key that begins with the one to delete goes along.", fails="test_keys_do_not_clash")
def deletes_by_prefix(self, delete, key):
    for path in self._blobs.glob(f"{key}*"):
        path.unlink(missing_ok=True)

# --- many blobs, several threads and clients --------------------------------------------------------------------------
toy.row("SwapsBatches", "put_many sorts the blobs, and not their keys.",
        fails="test_many_blobs_are_stored_and_read_as_each",
        put_many=lambda self, put_many, blobs: put_many(dict(zip(blobs, sorted(blobs.values()), strict=True))))
toy.row("ReordersBlobs", "get_many replies in the order of its index.",
        fails="test_many_blobs_are_stored_and_read_as_each",
        get_many=lambda self, get_many, keys: get_many(sorted(keys)))
toy.row("LeavesOutWhatIsMissing", "get_many replies with what is there.",
        fails="test_many_blobs_are_stored_and_read_as_each",
        get_many=lambda self, get_many, keys: [data for data in get_many(keys) if data is not None])

@toy("delete_many ends where it meets a key that is not there.", fails="test_what_is_deleted_is_gone[delete_many]")
def stops_at_the_first_missing_key(self, delete_many, keys):
    for key in keys:
        if self.get(key) is None:
            return
        self.delete(key)

@toy("put goes through a buffer that all threads share.", fails="test_blobs_from_several_threads")
def shares_a_buffer(self, put, key, data):
    self.buffer = data
    time.sleep(0.001)
    put(key, self.buffer)

@toy("put returns first, and writes when the next one comes.", fails="test_blobs_are_seen_by_every_client",
     get=lambda self, get, key: dict(self.seen["late"]).get(key) or get(key))
def writes_behind(self, put, key, data):
    for late in self.seen["late"]:
        put(*late)
    self.seen["late"][:] = [(key, data)]

@toy("get remembers what it put.", fails="test_blobs_are_seen_by_every_client",
     get=lambda self, get, key: self.seen[key][0] if self.seen[key] else get(key),
     delete=lambda self, delete, key: self.seen[key].clear() or delete(key))
def caches_what_others_delete(self, put, key, data):
    put(key, data)
    self.seen[key][:] = [data]

# --- the journal ------------------------------------------------------------------------------------------------------
@toy("append replaces what stands there.", fails="test_a_place_in_the_journal_is_taken_once")
def overwrites_records(self, append, seq, record):
    (self._records / str(seq)).write_bytes(record)
    return True

toy.row("TakesTheSameRecordTwice",
        "append takes a record that stands there for its own: two clients may write the same.",
        fails="test_a_place_in_the_journal_is_taken_once",
        append=lambda self, append, seq, record: append(seq, record) or self.read(seq)[0] == record)
toy.row("OrdersRecordsAsText", "10 comes before 2.", fails="test_the_journal_reads_in_order_from_any_place",
        read=lambda self, read, first: [
            record for seq, record in sorted(enumerate(read(0)), key=lambda pair: str(pair[0])) if seq >= first])
toy.row("ReadsAPage", "read gives a hundred records at most.", fails="test_the_journal_reads_in_order_from_any_place",
        read=lambda self, read, first: read(first)[:100])

@toy("read from the end on is an error.", fails="test_the_journal_reads_in_order_from_any_place")
def raises_at_the_end(self, read, first):
    records = read(first)
    if not records:
        raise IndexError(first)
    return records

@toy("The journal can be written with a NaN in it, and then not be read.", fails="test_tags_keep_their_types")
def cannot_read_nan(self, read, first):
    records = read(first)
    if any(struct.pack(">d", math.nan) in record for record in records):
        raise ValueError("Out of range float values are not JSON compliant")
    return records

@toy("read asks the store once, and knows from then on only what this client appends.",
     fails="test_other_clients_read_what_was_appended")
def caches_the_journal(self, read, first):
    if not self.seen["asked"]:
        self.seen["asked"], self.seen["known"] = [True], read(0)
    return self.seen["known"][first:]

@toy.also("CachesTheJournal")
def _(self, append, seq, record):
    taken = append(seq, record)
    self.seen["known"] += [record] if taken and self.seen["asked"] else []
    return taken

@toy("append looks whether the place is free, and then takes it.", fails="test_racing_appends_take_each_place_once")
def looks_before_it_appends(self, append, seq, record):
    path = self._records / str(seq)
    if path.exists():
        return False
    time.sleep(0.001)
    path.write_bytes(record)
    return True

toy.row("TrimsNothing", "trim does nothing, so what it should have dropped is read again.",
        fails="test_a_trimmed_journal_begins_where_it_was_told", trim=lambda *_: None)
toy.row("TrimsOneMore", "trim drops the record that it is told, too: the snapshot's.",
        fails="test_a_trimmed_journal_begins_where_it_was_told", trim=lambda self, trim, before: trim(before + 1))
toy.row("ReadsNothingBelowTheFirst", "read of a number that was trimmed finds nothing there, and ends.",
        fails="test_a_trimmed_journal_begins_where_it_was_told",
        read=lambda self, read, first: read(first) if first >= self._first() else [])

@toy("read looks where the journal begins, finds that record gone, and takes that for the end.",
     fails="test_a_read_beside_a_trim_misses_no_record")
def reads_what_is_trimmed_meanwhile(self, read, first):
    first, records = max(first, self._first()), []
    time.sleep(0.001)
    with contextlib.suppress(FileNotFoundError):
        while True:
            records.append((self._records / str(first + len(records))).read_bytes())
    return records

@toy("trim to a lower number sets back where the journal begins: nothing is there, so read finds none.",
     fails="test_a_trimmed_journal_begins_where_it_was_told")
def trims_back(self, trim, before):
    trim(before)
    for place in self._trims.iterdir():
        place.rename(self._trims / str(before))

@toy("trim to the same number is an error.",
     fails="test_a_trimmed_journal_begins_where_it_was_told")
def trims_only_once(self, trim, before):
    if before == self._first():
        raise FileNotFoundError(before)
    trim(before)

@toy("append looks only at the records that are there.", fails="test_a_trimmed_journal_begins_where_it_was_told")
def takes_what_was_trimmed(self, append, seq, record):
    with contextlib.suppress(FileExistsError):
        os.link(self._write(record), self._records / str(seq))
        return True
    return False

# --- several processes ------------------------------------------------------------------------------------------------
toy.row("KeepsCursorsInTheClient",
        "Every process remembers for itself what it gave: right in one process, wrong in two.",
        fails="test_many_claimers_get_each_sample_once[alone]", claim=claims_in_two_steps)

@toy("Says of a store that is not there that it never will be.", fails="test_an_attach_waits_for_an_owner_that_is_late")
def gives_up_at_once(self, start, **how):
    try:
        start(**how)
    except BackendUnavailableError as error:
        error.retryable = False
        raise

@toy("Bootstraps over a store of equal options, also where it was told to be the only one.",
     fails="test_of_processes_that_connect_with_auto_one_bootstraps")
def bootstraps_over_what_runs(self, start, *, bootstrap, deadline):
    self.exclusive = False
    if bootstrap:
        time.sleep(2.0)  # it starts slowly: all who look meanwhile find nothing
    start(bootstrap=bootstrap, deadline=deadline)

_opened_by = []

@toy("Waits for a thread that a fork does not have.", fails="test_a_fork_opens_a_client_of_its_own")
def hangs_in_forks(self, start, *, bootstrap, deadline):
    if _opened_by not in ([], [os.getpid()]):
        threading.Event().wait(max(0.0, deadline - time.monotonic()))
    _opened_by[:] = [os.getpid()]
    start(bootstrap=bootstrap, deadline=deadline)

@toy("One lock for all, which a client takes before a put and gives back after it.",
     fails="test_the_store_serves_others_after_every_kill")
def locks_the_store(self, put_samples, request):
    lock, until = _place(self, "lock"), time.monotonic() + 0.5
    while True:
        try:
            lock.touch(exist_ok=False)
            break
        except FileExistsError:
            if time.monotonic() > until:
                raise OperationTimeoutError("the store is locked.") from None
        time.sleep(0.001)
    try:
        time.sleep(0.05)  # so long that a kill is likely to come meanwhile
        return put_samples(request)
    finally:
        lock.unlink()

@toy("Wakes the claim that has waited longest, also if its client was killed.",
     fails="test_a_claim_of_a_killed_process_does_not_stop_the_next",
     capabilities=FolderStore.capabilities | {Capability.WAKES})
def wakes_the_dead(self, call_ledger_waking, deadline, command, wake):
    place = _place(self, "waiting", f"{time.monotonic_ns():020}")
    place.touch()

    def listen():
        while place.exists() and not wake._ended:
            time.sleep(0.01)
        wake()

    threading.Thread(target=listen, daemon=True).start()
    return self.call_ledger(deadline, command)

@toy.also("WakesTheDead")
def _(self, put_samples, request):
    reply = put_samples(request)
    for longest in sorted(_place(self, "waiting").glob("*"))[:1]:
        longest.unlink()
    return reply

@toy(
     """What an attached client does is right unless it is killed meanwhile. It writes a put column by column; its every
     second put is written after it has returned, when later ones have; ids that it is writing are reserved; a claim
     without a lease is confirmed a moment later; and what it holds on a lease stays its.""",
     fails="""test_killed_producers_leave_no_half_rows test_killed_producers_lose_no_committed_sample
     test_what_a_killed_producer_was_putting_can_be_put_again test_killed_consumers_get_no_sample_twice
     test_killed_consumers_lose_no_leased_sample""")
def dies_badly(self, start, *, bootstrap, deadline):
    self.attached = not bootstrap
    start(bootstrap=bootstrap, deadline=deadline)

@toy.also("DiesBadly")
def _(self, put_samples, request):
    reserved = [_place(self, "reserved", each) for each in request.sample_ids]
    if not self.attached:
        if any(each.exists() for each in reserved):
            raise StalePartitionError("another client writes them.")
        return put_samples(request)
    for each in reserved:
        each.touch()
    late = self.seen["late"]
    late.append((replace(request, columns={name: list(c) for name, c in request.columns.items()}), reserved))
    self.seen["turns"].append(request)
    if len(self.seen["turns"]) % 2:
        _write(put_samples, *late.pop())
    elif len(late) > 2:
        _write(put_samples, *late.pop(0))
    return PutReply(num_samples=len(request.sample_ids))

def _write(put_samples, request, reserved):
    for name, column in request.columns.items():
        put_samples(replace(request, columns={name: column}, specs={name: request.specs[name]}, request_id=new_id()))
        time.sleep(0.2)  # so long that a kill is likely to come meanwhile
    for each in reserved:
        each.unlink(missing_ok=True)

@toy.also("DiesBadly")
def _(self, claim, request):
    if not self.attached:
        return claim(request)
    given = claim(replace(request, lease_s=0.05 if request.lease_s is None else None))
    tokens = None if request.lease_s is None else ["mine"] * len(given.sample_ids)
    return replace(given, lease_tokens=tokens)

@toy.also("DiesBadly")
def _(self, ack, request):
    return settles(self, ack, request) if request.lease_tokens[0] == "mine" else ack(request)
# fmt: on
