"""Stores in a folder that are wrong in one way each, with their rows, their log, or between processes.

The right one is what `dataplane new-plugin --log` writes. The rows are as in `broken`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
from broken import claims_in_two_steps
from msgspec.structs import replace
from table import Table, settles

from dataplane_core.backends import RefsGoneError
from dataplane_core.codec import split_rows
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError, StalePartitionError
from dataplane_core.ledger import commands
from dataplane_core.spec import new_id
from dataplane_testkit._new_plugin import files_of

_written = {"__name__": __name__}
_source = files_of("folder_store", log=True)["src/dataplane_folder_store/__init__.py"]
exec(compile(_source, "folder_store", "exec", dont_inherit=True), _written)
FolderStore = _written["FolderStore"]


@pytest.fixture
def _options(self, tmp_path_factory):
    return {"path": str(tmp_path_factory.getbasetemp() / "store")}


@pytest.fixture
def _alone(self, tmp_path_factory):
    """Most toys are wrong in their engine, which needs no process of the ledger."""
    return {"path": str(tmp_path_factory.getbasetemp() / "store"), "ledger": "here"}


def _raw_get(self, backend, partition_id, sample_id, field):
    (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
    row = (backend._rows / str(part.write_id + part.positions[0])).read_bytes()
    return split_rows([row])[0][part.slots[0]]


toy = Table(FolderStore, __name__, options=_alone, raw_get=_raw_get)


def _place(self, *names):
    """A file beside those of the store, of which all processes see whether it is there."""
    path = self.config.path.joinpath(*names)
    path.parent.mkdir(exist_ok=True)
    return path


def _each_row(change):
    """Puts rows as ``change(handle, row)`` gives them; None: not at all."""

    def put_rows(self, put_rows, handles, buffer, offsets, deadline):
        for i, handle in enumerate(handles):
            row = change(handle, bytes(buffer[offsets[i] : offsets[i + 1]]))
            if row is not None:
                put_rows([handle], row, [0, len(row)], deadline)

    return put_rows


# fmt: off
# --- rows -------------------------------------------------------------------------------------------------------------
toy.row("KeepsWhatIsCleared", "delete_rows does nothing: what is cleared stays for ever.", delete_rows=lambda *_: None)

@toy("Only clears delete.",
     delete_rows=lambda self, delete, *rows: delete(*rows) if self.seen["clears"] else None)
def keeps_what_a_registration_frees(self, clear_samples, request):
    self.seen["clears"].append(request)
    try:
        return clear_samples(request)
    finally:
        self.seen["clears"].clear()

@toy("get_rows of a handle that is not there gives no row for it.",
     fails="test_what_is_deleted_is_gone_and_said_to_be")
def leaves_out_what_is_missing(self, get_rows, handles, deadline):
    return get_rows([handle for handle in handles if (self._rows / str(handle)).exists()], deadline)

@toy("get_rows says of all rows that they are gone if one is.", fails="test_what_is_deleted_is_gone_and_said_to_be")
def names_all_rows(self, get_rows, handles, deadline):
    try:
        return get_rows(handles, deadline)
    except RefsGoneError as error:
        raise RefsGoneError(error.message, handles=handles) from error

toy.row("RaisesForWhatIsDeletedTwice", "delete_rows of a file that is not there is an error.",
        fails="test_what_is_deleted_is_gone_and_said_to_be",
        delete_rows=lambda self, delete, handles, deadline: [(self._rows / str(each)).unlink() for each in handles])
toy.row("DropsATenth", "Every tenth row, by its handle, is lost.",
        fails="test_many_rows_are_stored_and_read_as_each",
        put_rows=_each_row(lambda handle, row: row if handle % 10 else None))
toy.row("LosesLargeBatches", "put_rows writes the first 64.", fails="test_smoke_hundreds_of_rows_go_in_and_out",
        put_rows=lambda self, put_rows, handles, *rest: put_rows(handles[:64], *rest))
toy.row("KeepsText", "Bytes pass through a string.", fails="test_a_row_comes_back_byte_for_byte[no_text]",
        put_rows=_each_row(lambda handle, row: row.decode(errors="replace").encode()))
toy.row("EndsAtZeros", "Trailing zeros are padding to this engine.",
        fails="test_a_row_comes_back_byte_for_byte[ends_in_zeros]",
        put_rows=_each_row(lambda handle, row: row.rstrip(b"\0")))
toy.row("CutsLargeRows", "A value ends at 16 MB.", fails="test_a_row_comes_back_byte_for_byte[16_mb]",
        put_rows=_each_row(lambda handle, row: row[: 16 << 20]))
toy.row("CountsInFloats", "Handles are floats.", fails="test_handles_do_not_clash",
        put_rows=lambda self, put_rows, handles, *rest: put_rows([int(float(each)) for each in handles], *rest),
        get_rows=lambda self, get_rows, handles, *rest: get_rows([int(float(each)) for each in handles], *rest))

@toy("Every file whose name begins with the handle to delete goes along.", fails="test_handles_do_not_clash")
def deletes_by_prefix(self, delete_rows, handles, deadline):
    for handle in handles:
        for path in self._rows.glob(f"{handle}*"):
            path.unlink(missing_ok=True)

# --- many rows, several threads and clients ---------------------------------------------------------------------------
toy.row("SwapsBatches", "put_rows takes the handles from behind.",
        fails="test_many_rows_are_stored_and_read_as_each",
        put_rows=lambda self, put_rows, handles, *rest: put_rows(handles[::-1], *rest))
toy.row("ReordersRead", "get_rows replies in the order of its index.",
        fails="test_many_rows_are_stored_and_read_as_each",
        get_rows=lambda self, get_rows, handles, deadline: get_rows(sorted(handles), deadline))

@toy("delete_rows ends where it meets a handle that is not there.",
     fails="test_what_is_deleted_is_gone_and_said_to_be")
def stops_at_the_first_missing_row(self, delete_rows, handles, deadline):
    for handle in handles:
        if not (self._rows / str(handle)).exists():
            return
        delete_rows([handle], deadline)

@toy("put_rows goes through a buffer that all threads share.", fails="test_rows_from_several_threads")
def shares_a_buffer(self, put_rows, handles, buffer, *rest):
    self.buffer = buffer
    time.sleep(0.001)
    put_rows(handles, self.buffer, *rest)

@toy("put_rows returns first, and writes when the next one comes.", fails="test_rows_are_seen_by_every_client")
def writes_behind(self, put_rows, handles, buffer, *rest):
    for late in self.seen["late"]:
        put_rows(*late)
    self.seen["late"][:] = [(handles, buffer, *rest)]

@toy.also("WritesBehind")
def _(self, get_rows, handles, deadline):
    late = [handle for put in self.seen["late"] for handle in put[0]]
    if set(handles) & set(late):  # this client's own
        self.put_rows([], b"", [0], deadline)
    return get_rows(handles, deadline)

@toy("get_rows remembers what it put.", fails="test_rows_are_seen_by_every_client",
     delete_rows=lambda self, delete, handles, *rest: self.seen["put"].clear() or delete(handles, *rest))
def caches_what_others_delete(self, put_rows, handles, buffer, offsets, deadline):
    put_rows(handles, buffer, offsets, deadline)
    self.seen["put"][:] = [(handle, bytes(buffer[offsets[i] : offsets[i + 1]])) for i, handle in enumerate(handles)]

@toy.also("CachesWhatOthersDelete")
def _(self, get_rows, handles, deadline):
    known = dict(self.seen["put"])
    return [known[handle] if handle in known else get_rows([handle], deadline)[0] for handle in handles]

# --- the log ----------------------------------------------------------------------------------------------------------
@toy("append replaces what stands there.", fails="test_a_number_in_the_log_is_taken_once_and_in_turn")
def overwrites_records(self, append, number, record, deadline):
    (self._records / str(number)).write_bytes(record)
    return True

toy.row("TakesTheSameRecordTwice",
        "append takes a record that stands there for its own: two clients may write the same.",
        fails="test_a_number_in_the_log_is_taken_once_and_in_turn",
        append=lambda self, append, number, record, deadline: append(number, record, deadline)
        or self.read_log(number, deadline)[:1] == [(number, record)])

@toy("append looks only whether the number is free.", fails="test_a_number_in_the_log_is_taken_once_and_in_turn")
def leaves_gaps(self, append, number, record, deadline):
    with contextlib.suppress(FileExistsError):
        os.link(self._write(record), self._records / str(number))
        return True
    return False

toy.row("OrdersRecordsAsText", "10 comes before 2.", fails="test_the_log_reads_in_order_from_any_number",
        read_log=lambda self, read_log, *asked: sorted(read_log(*asked), key=lambda pair: str(pair[0])))
toy.row("ReadsAPage", "read_log gives a hundred records at most.",
        fails="test_the_log_reads_in_order_from_any_number",
        read_log=lambda self, read_log, *asked: read_log(*asked)[:100])
toy.row("ReadsAllAsTheNewest", "read_log(None) gives all records.",
        fails="test_a_number_in_the_log_is_taken_once_and_in_turn",
        read_log=lambda self, read_log, first, deadline: read_log(first or 0, deadline))

@toy("read_log from behind the end is an error.", fails="test_the_log_reads_in_order_from_any_number")
def raises_at_the_end(self, read_log, first, deadline):
    records = read_log(first, deadline)
    if not records and first:
        raise IndexError(first)
    return records

@toy("read_log asks the store once, and knows from then on only what this client appends.",
     fails="test_a_number_in_the_log_is_taken_once_and_in_turn")
def caches_the_log(self, read_log, first, deadline):
    if not self.seen["asked"]:
        self.seen["asked"], self.seen["known"] = [True], read_log(0, deadline)
    return self.seen["known"][-1:] if first is None else [pair for pair in self.seen["known"] if pair[0] >= first]

@toy.also("CachesTheLog")
def _(self, append, number, record, deadline):
    taken = append(number, record, deadline)
    self.seen["known"] += [(number, record)] if taken and self.seen["asked"] else []
    return taken

@toy("append looks whether the number is the next one, and then takes it.",
     fails="test_racing_appends_take_each_number_once")
def looks_before_it_appends(self, append, number, record, deadline):
    if number != max(self._numbers(), default=0) + 1:
        return False
    time.sleep(0.001)
    self._write(record).rename(self._records / str(number))
    return True

toy.row("TrimsNothing", "trim does nothing, so what it should have dropped is read again.",
        fails="test_a_trimmed_log_begins_where_it_was_told", trim=lambda *_: None)
toy.row("TrimsOneMore", "trim drops the record that it is told, too: the state's.",
        fails="test_a_trimmed_log_begins_where_it_was_told",
        trim=lambda self, trim, before, deadline: trim(before + 1, deadline))
toy.row("ReadsNothingBelowTheFirst", "read_log of a number that was trimmed finds nothing there, and ends.",
        fails="test_a_trimmed_log_begins_where_it_was_told",
        read_log=lambda self, read_log, first, deadline: [] if first and first < self._first()
        else read_log(first, deadline))
toy.row("CountsWhatIsLeft", "append counts the records: a log that was trimmed takes the numbers again.",
        fails="test_a_trimmed_log_begins_where_it_was_told",
        append=lambda self, append, number, record, deadline:
        append(number + self._first() - 1, record, deadline) if self._first() else append(number, record, deadline))

@toy("read_log looks which records there are, finds one gone, and takes that for the end.",
     fails="test_racing_appends_take_each_number_once")
def reads_what_is_trimmed_meanwhile(self, read_log, first, deadline):
    numbers, records = self._numbers(), []
    time.sleep(0.001)
    with contextlib.suppress(FileNotFoundError):
        for number in numbers[-1:] if first is None else numbers:
            records.append((number, (self._records / str(number)).read_bytes()))
    return [pair for pair in records if pair[0] >= (first or 0)]

@toy("trim to the same number is an error.", fails="test_a_trimmed_log_begins_where_it_was_told")
def trims_only_once(self, trim, before, deadline):
    if before == self._first():
        raise FileNotFoundError(before)
    trim(before, deadline)

# --- several processes ------------------------------------------------------------------------------------------------
toy.members = {**toy.members, "options": _options}

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
        time.sleep(0.2)  # so long that a kill is likely to come meanwhile
        return put_samples(request)
    finally:
        lock.unlink()

@toy("Wakes the claim that has waited longest, also if its client was killed.",
     fails="test_a_claim_of_a_killed_process_does_not_stop_the_next")
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
    return len(request.sample_ids)

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
