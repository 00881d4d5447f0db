"""Stores in a folder that are wrong in one way each, with their rows, their log, or between processes; see `table`.

The right one is what `dataplane new-plugin --log` writes.
"""
# ruff: noqa: F401 - the rows use what is imported

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from itertools import accumulate

import pytest
from broken import ClaimsInTwoSteps, by_column, in_parts
from msgspec.structs import replace
from table import Table

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_core.spec import SharedRows
from dataplane_testkit.commands import files_of

_written = {"__name__": __name__}
_source = files_of("folder_store", log=True)["src/dataplane_folder_store/__init__.py"]
exec(compile(_source, "folder_store", "exec", dont_inherit=True), _written)
FolderStore, RefsGoneError = _written["FolderStore"], _written["RefsGoneError"]


_options = pytest.fixture(lambda self, tmp_path_factory: {"path": str(tmp_path_factory.getbasetemp() / "s")})
_alone = pytest.fixture(lambda self, tmp_path_factory: {"path": str(tmp_path_factory.getbasetemp()), "ledger": "here"})


def _raw_get(self, backend, partition_id, sample_id, field):
    (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
    row = (backend._rows / str(part.write_id + part.positions[0])).read_bytes()
    return split_rows([row])[0][part.slots[0]]


_LAZY = {
    "missing": "[handle for handle in handles if not (self._rows / str(handle)).exists()]",
    "rows": "[bytes(buffer[offsets[i] : offsets[i + 1]]) for i in range(len(handles))]",
}
#: Most toys are wrong in their engine, which needs no process of the ledger.
engines = Table(FolderStore, __name__, _LAZY, options=_alone, raw_get=_raw_get)
processes = Table(FolderStore, __name__, _LAZY, options=_options, raw_get=_raw_get)
opened_by: list[int] = []  # processes


def joined(rows):
    """The buffer and the offsets of rows."""
    return b"".join(rows), [0, *accumulate(map(len, rows))]


def kept(column):
    """A column for after its put has returned."""
    return (
        SharedRows(list(column.rows), column.index, column.digests) if isinstance(column, SharedRows) else list(column)
    )


def place(self, *names):
    """A file beside those of the store, of which all processes see whether it is there."""
    path = self.config.path.joinpath(*names)
    path.parent.mkdir(exist_ok=True)
    return path


def when_gone(path, wake):
    give_up = time.monotonic() + 60
    while path.exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    wake()


def put_slowly(put_samples, request, reserved):
    in_parts(put_samples, by_column(request), 0.2)  # so long that a kill is likely to come meanwhile
    for path in reserved:
        path.unlink(missing_ok=True)


engines.rows("""
test_random_histories_agree_with_the_ledger
KeepsWhatIsCleared.delete_rows: return
KeepsWhatARegistrationFrees.clear_samples: seen["clears"].append(1)
    -! DataPlaneError: seen["clears"].clear()
    -> seen["clears"].clear()
KeepsWhatARegistrationFrees.delete_rows: if not seen["clears"]: return
test_what_is_deleted_is_gone_and_said_to_be
LeavesOutWhatIsMissing.get_rows: handles = [handle for handle in handles if handle not in missing]
NamesAllRows.get_rows: -! RefsGoneError: raise RefsGoneError(error.message, handles=handles) from error
RaisesForWhatIsDeletedTwice.delete_rows: if missing: raise FileNotFoundError(missing)
StopsAtTheFirstMissingRow.delete_rows: handles = handles[: list(handles).index(missing[0])] if missing else handles
test_many_rows_are_stored_and_read_as_each
DropsATenth.put_rows: kept = [(handle, row) for handle, row in zip(handles, rows, strict=True) if handle % 10]
    handles, (buffer, offsets) = [handle for handle, _ in kept], joined([row for _, row in kept])
SwapsBatches.put_rows: handles = handles[::-1]
ReordersRead.get_rows: handles = sorted(handles)
test_smoke_hundreds_of_rows_go_in_and_out
LosesLargeBatches.put_rows: handles = handles[:64]
test_a_row_comes_back_byte_for_byte[no_text]
KeepsText.put_rows: buffer, offsets = joined([row.decode(errors="replace").encode() for row in rows])
test_a_row_comes_back_byte_for_byte[ends_in_zeros]
EndsAtZeros.put_rows: buffer, offsets = joined([row.rstrip(bytes(1)) for row in rows])
test_a_row_comes_back_byte_for_byte[16_mb]
CutsLargeRows.put_rows: buffer, offsets = joined([row[: 16 << 20] for row in rows])
test_handles_do_not_clash
CountsInFloats.put_rows: handles = [int(float(each)) for each in handles]
CountsInFloats.get_rows: handles = [int(float(each)) for each in handles]
DeletesByPrefix.delete_rows: for handle in handles:
        for path in self._rows.glob(f"{handle}*"): path.unlink()
test_rows_from_several_threads
SharesABuffer.put_rows: self.buffer = buffer; time.sleep(0.001); buffer = self.buffer
test_rows_are_seen_by_every_client
WritesBehind.put_rows: late, seen["late"] = seen["late"], [(handles, buffer, offsets, deadline)]
    return [right(*put) for put in late] and None
WritesBehind.get_rows: own = {handle for put in seen["late"] for handle in put[0]}
    if own & {*handles}: self.put_rows([], b"", [0], deadline)
CachesWhatOthersDelete.put_rows: seen["put"] = list(zip(handles, rows, strict=True))
CachesWhatOthersDelete.get_rows: known = dict(seen["put"])
    return [known[each] if each in known else right([each], deadline)[0] for each in handles]
CachesWhatOthersDelete.delete_rows: seen["put"].clear()
test_a_number_in_the_log_is_taken_once_and_in_turn
OverwritesRecords.append: return bool((self._records / str(number)).write_bytes(record))
TakesTheSameRecordTwice.append: -> reply = reply or self.read_log(number, deadline)[:1] == [(number, record)]
LeavesGaps.append: with suppress(FileExistsError): return not os.link(self._write(record), self._records / str(number))
    return False
ReadsAllAsTheNewest.read_log: first = first or 0
CachesTheLog.read_log: if not seen["asked"]: seen["asked"], seen["known"] = [True], right(0, deadline)
    return seen["known"][-1:] if first is None else [pair for pair in seen["known"] if pair[0] >= first]
CachesTheLog.append: -> seen["known"] += [(number, record)] if reply and seen["asked"] else []
test_the_log_reads_in_order_from_any_number
OrdersRecordsAsText.read_log: -> reply = sorted(reply, key=lambda pair: str(pair[0]))
ReadsAPage.read_log: -> reply = reply[:100]
RaisesAtTheEnd.read_log: -> if first and not reply: raise IndexError(first)
test_racing_appends_take_each_number_once
LooksBeforeItAppends.append: if number != max(self._numbers(), default=0) + 1: return False
    time.sleep(0.001); return bool(self._write(record).rename(self._records / str(number)))
ReadsWhatIsTrimmedMeanwhile.append: time.sleep(0.005)  # so that the race goes on for some reads
ReadsWhatIsTrimmedMeanwhile.read_log: numbers, records = self._numbers(), []; time.sleep(0.03)
    with suppress(FileNotFoundError):
        for number in numbers[-1:] if first is None else numbers:
            records.append((number, (self._records / str(number)).read_bytes()))
    return [pair for pair in records if pair[0] >= (first or 0)]
test_a_trimmed_log_begins_where_it_was_told
TrimsNothing.trim: return
TrimsOneMore.trim: before += 1
ReadsNothingBelowTheFirst.read_log: if first and first < self._first(): return []
CountsWhatIsLeft.append: number += max(0, self._first() - 1)
TrimsOnlyOnce.trim: if before == self._first(): raise FileNotFoundError(before)
""")
processes.rows("""
test_many_claimers_get_each_sample_once[alone]
KeepsCursorsInTheClient.claim: return ClaimsInTwoSteps.claim(self, request)
test_an_attach_waits_for_an_owner_that_is_late
GivesUpAtOnce.start: -! BackendUnavailableError: error.retryable = False
test_of_processes_that_connect_with_auto_one_bootstraps
BootstrapsOverWhatRuns.start: self.exclusive = False
    if bootstrap: time.sleep(2.0)  # it starts slowly: all who look meanwhile find nothing
test_a_fork_opens_a_client_of_its_own
HangsInForks.start: if opened_by not in ([], [os.getpid()]): time.sleep(max(0.0, deadline - time.monotonic()))
    opened_by[:] = [os.getpid()]
test_the_store_serves_others_after_every_kill
LocksTheStore.put_samples: lock, until = place(self, "lock"), time.monotonic() + 0.5
    while lock.exists():
        if time.monotonic() > until: raise OperationTimeoutError("the store is locked.")
        time.sleep(0.001)
    lock.touch()
    time.sleep(0.2)  # so long that a kill is likely to come meanwhile
    -! DataPlaneError: lock.unlink(missing_ok=True)
    -> lock.unlink(missing_ok=True)
test_a_claim_of_a_killed_process_does_not_stop_the_next
WakesTheDead.call_ledger: if wake: (waiting := place(self, "waiting", f"{time.monotonic_ns():020}")).touch()
    if wake: threading.Thread(target=when_gone, args=(waiting, wake), daemon=True).start()
    wake = None
WakesTheDead.put_samples: -> for longest in sorted(place(self, "waiting").glob("*"))[:1]: longest.unlink()
# What an attached client does is right unless it is killed meanwhile. It writes a put column by column; its every
# second put is written after it has returned, when later ones have; ids that it is writing are reserved; a claim
# without a lease is confirmed a moment later; and what it holds on a lease stays its.
test_killed_producers_leave_no_half_rows test_killed_producers_lose_no_committed_sample
    test_what_a_killed_producer_was_putting_can_be_put_again test_killed_consumers_get_no_sample_twice
    test_killed_consumers_lose_no_leased_sample
DiesBadly.start: self.attached = not bootstrap
DiesBadly.put_samples: reserved = [place(self, "reserved", each) for each in request.sample_ids]
    if not self.attached and any(path.exists() for path in reserved):
        raise StalePartitionError("another client writes them.")
    if not self.attached: return right(request)
    for path in reserved: path.touch()
    late, turns = seen["late"], seen["turns"]
    late.append((replace(request, columns={name: kept(c) for name, c in request.columns.items()}), reserved))
    turns.append(request)
    if len(turns) % 2: put_slowly(right, *late.pop())
    elif len(late) > 2: put_slowly(right, *late.pop(0))
    return len(request.sample_ids)
DiesBadly.claim: lease_s = request.lease_s
    if self.attached: request.lease_s = 0.05 if lease_s is None else None
    -> mine = None if lease_s is None else ["mine"] * len(reply.sample_ids)
    reply = replace(reply, lease_tokens=mine) if self.attached else reply
DiesBadly.ack: if request.lease_tokens[0] == "mine": return len(request.sample_ids)
""")
toys = {**engines, **processes}
