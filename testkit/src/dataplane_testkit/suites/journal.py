"""The journal of a `BlobStore`, called directly: `append` fills each place once, `read` returns records in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Final

import pytest

from dataplane_core.backends import BlobStore
from dataplane_core.errors import preview
from dataplane_testkit._base import Suite
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import in_threads

#: Enough records to find numbers that are sorted as text, and pages of a hundred.
_RECORDS: Final = 230
_WRITERS: Final = 4
#: A number of two digits, to find numbers that are sorted as text.
_TRIMMED: Final = 12
_PLACES: Final = 40
#: How often a journal is trimmed beside reads, each time after so many appends.
_TRIMS: Final = 50
_BETWEEN: Final = 4


def _end(backend: BlobStore) -> int:
    """The first free place."""
    return sum(1 for _ in backend.read(0))


def _records(backend: BlobStore, from_seq: int) -> list[bytes]:
    return [bytes(record) for record in backend.read(from_seq)]


def _journals(store: Store, tag: str = "journal") -> tuple[BlobStore, BlobStore]:
    """Two clients of one store. Nobody else writes its journal."""
    store.blobs()
    case, options = store.case, store.deployment.options
    if case.isolated_options(dict(options), tag) == options:
        not_run(
            "the author's class supplies no isolated_options, and this test would damage the shared store's journal"
        )
    client = store.deployment.isolated(tag)
    attach = case.attach_options(dict(client.config.options), backend_of(client))
    other = store.keep(store.deployment.connect(attach, bootstrap=False))
    mine, another = backend_of(client), backend_of(other)
    assert isinstance(mine, BlobStore)
    assert isinstance(another, BlobStore)
    return mine, another


def _trimming(store: Store, tag: str) -> tuple[BlobStore, BlobStore]:
    """Two clients of a store that can trim its journal."""
    if type(store.blobs()).trim is BlobStore.trim:
        not_run("the author's class does not override trim: its journal is never trimmed")
    return _journals(store, tag)


def _trimmed(store: Store, tag: str) -> tuple[tuple[BlobStore, BlobStore], int, list[bytes]]:
    """Two clients of a store whose first half of records was trimmed; the place of the first record; all records."""
    journals = _trimming(store, tag)
    begin = _end(journals[0])
    records = [f"record {number}".encode() for number in range(2 * _TRIMMED)]
    for number, record in enumerate(records):
        assert journals[0].append(begin + number, record), f"append to free place {begin + number} returned False"
    journals[1].trim(begin + _TRIMMED)
    return journals, begin, records


class JournalSuite(Suite, chapter="journal"):
    """For a `BlobStore` that several processes use. On a separate store, because these records are not the ledger's."""

    def test_a_place_in_the_journal_is_taken_once(self, store: Store) -> None:
        backend, another = _journals(store)
        place = _end(backend)
        assert backend.append(place, b"first"), "append to a free place returned False"
        for each in (backend, another):
            assert not each.append(place, b"second"), "append to a taken place returned True"
            assert not each.append(place, b"first"), (
                "append to a taken place returned True because the place holds the same bytes. They may be another "
                "client's record"
            )
        assert _records(backend, place) == [b"first"], "append replaced the record of a taken place"
        assert another.append(place + 1, b"first"), "append to a free place returned False"
        assert _records(backend, place) == [b"first", b"first"]

    def test_the_journal_reads_in_order_from_any_place(self, store: Store) -> None:
        backend, _ = _journals(store)
        begin = _end(backend)
        records = [bytes([number % 256]) * (1 + number % 50) for number in range(_RECORDS)]
        records[_RECORDS // 2] = b"long" * 300_000
        for number, record in enumerate(records):
            assert backend.append(begin + number, record), f"append to free place {begin + number} returned False"
        for start in (0, 1, 2, 9, 10, 99, 100, _RECORDS - 1, _RECORDS, _RECORDS + 5):
            try:
                found = _records(backend, begin + start)
            except Exception as error:
                pytest.fail(f"read({begin + start}) of {begin + _RECORDS} records raised {error!r}.")
            assert len(found) == len(records[start:]), (
                f"read({begin + start}) returned {len(found)} of {len(records[start:])} records"
            )
            wrong = [index for index, record in enumerate(found) if record != records[start + index]]
            assert not wrong, f"read({begin + start}): the records at {preview(wrong)} are out of order"

    def test_other_clients_read_what_was_appended(self, store: Store) -> None:
        backend, another = _journals(store)
        place = _end(backend)
        assert _end(another) == place, "the two clients read different numbers of records"
        for number, (writer, reader) in enumerate(itertools.islice(itertools.cycle([(0, 1), (1, 0)]), 12)):
            stores = (backend, another)
            record = f"record {number}".encode()
            assert stores[writer].append(place + number, record)
            assert _records(stores[reader], place + number) == [record], "another client does not read the record"
            assert not stores[reader].append(place + number, b"late"), (
                "append to a place that another client has taken returned True"
            )

    def test_racing_appends_take_each_place_once(self, store: Store) -> None:
        backend, another = _journals(store)
        begin = _end(backend)
        start = threading.Barrier(_WRITERS)
        done = threading.Event()

        def writer(number: int, journal: BlobStore) -> Callable[[], list[int]]:
            def run() -> list[int]:
                taken = []
                try:
                    for place in range(begin, begin + _PLACES):
                        start.wait(60)
                        if journal.append(place, f"{place} by {number}".encode()):
                            taken.append(place)
                except BaseException:
                    start.abort()
                    raise
                finally:
                    done.set()
                return taken

            return run

        def reader() -> list[int]:
            while True:
                last = done.is_set()
                for index, record in enumerate(_records(another, begin)):
                    place = record.partition(b" ")[0]
                    assert place == str(begin + index).encode(), (
                        f"the record at place {begin + index} is {record!r:.40}"
                    )
                if last:
                    return []

        writers = [writer(number, (backend, another)[number % 2]) for number in range(_WRITERS)]
        winners = in_threads(*writers, reader)[:-1]
        for place in range(begin, begin + _PLACES):
            won = [number for number, taken in enumerate(winners) if place in taken]
            assert len(won) == 1, (
                f"append to place {place} returned True for {len(won)} of {_WRITERS} writers. Expected one"
            )
            (record,) = _records(backend, place)[:1]
            assert record == f"{place} by {won[0]}".encode(), (
                f"place {place} holds {record!r}, which is not the record of the writer that took it"
            )

    def test_a_trimmed_journal_begins_where_it_was_told(self, store: Store) -> None:
        journals, begin, records = _trimmed(store, "trim")
        for backend in journals:
            for start in (0, begin, begin + _TRIMMED - 1, begin + _TRIMMED, begin + _TRIMMED + 5):
                expected = records[max(start - begin, _TRIMMED) :]
                found = _records(backend, start)
                assert found == expected, (
                    f"read({start}) returned {len(found)} records, {preview(found[:1]) or 'none'} first, after "
                    f"trim({begin + _TRIMMED}). Expected {len(expected)}, {expected[0]!r} first"
                )

    def test_a_read_beside_a_trim_misses_no_record(self, store: Store) -> None:
        backend, another = _trimming(store, "beside")
        begin = appended = _end(backend)
        done = threading.Event()

        def writer() -> None:
            nonlocal appended
            try:
                for _ in range(_TRIMS):
                    for place in range(appended, appended + _BETWEEN):
                        taken = backend.append(place, str(place).encode())
                        assert taken, f"append to free place {place} returned False"
                        appended = place + 1
                    backend.trim(appended - 1)
            finally:
                done.set()

        def reader() -> None:
            last = False
            while not last:
                last, before = done.is_set(), appended
                found = [int(record) for record in _records(another, begin)]
                got = f"records {found[0]} to {found[-1]}" if found else "no records"
                assert found == [found[0] + index for index in range(len(found))], (
                    f"read({begin}) returned {got}, but not in order, or with a gap"
                )
                assert before == begin or found[-1:] >= [before - 1], (
                    f"read({begin}) returned {got}, although record {before - 1} was appended before, and is kept. "
                    "Meanwhile another client trimmed the journal"
                )

        in_threads(writer, reader)

    def test_a_journal_is_trimmed_to_the_same_or_a_lower_number_without_a_change(self, store: Store) -> None:
        journals, begin, records = _trimmed(store, "again")
        kept, free = records[_TRIMMED:], begin + len(records)
        for backend in journals:
            for number in (begin + _TRIMMED, begin + _TRIMMED - 3, 0):
                trimming = f"trim({number}) of a journal that begins with record {begin + _TRIMMED}"
                try:
                    backend.trim(number)
                except Exception as error:
                    pytest.fail(f"{trimming} raised {error!r}. Expected no error and no change.")
                for each in journals:
                    assert _records(each, 0) == kept, f"{trimming} changed the records that read(0) returns"
                    for place in (begin, begin + _TRIMMED - 1):
                        assert not each.append(place, b"late"), (
                            f"append to place {place} returned True after {trimming}"
                        )
        assert journals[0].append(free, b"next"), f"append to the next place, {free}, returned False after these trims"
        assert _records(journals[1], 0) == [*kept, b"next"]

    def test_a_trimmed_place_stays_taken(self, store: Store) -> None:
        journals, begin, records = _trimmed(store, "taken")
        for backend in journals:
            for place in (0, begin, begin + 1, begin + _TRIMMED - 1, begin + _TRIMMED):
                assert not backend.append(place, b"late"), (
                    f"append to place {place} returned True after trim({begin + _TRIMMED})"
                )
        assert _records(journals[0], 0) == records[_TRIMMED:]
        assert journals[0].append(begin + len(records), b"next"), "append to the next place returned False after a trim"
        assert _records(journals[1], 0) == [*records[_TRIMMED:], b"next"]
