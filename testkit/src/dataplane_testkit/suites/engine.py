"""The methods of a `BlobStore` called directly: what its docstrings ask of them.

Core builds everything else of a `BlobStore` on these methods. A fault in one of them can make any other test fail.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import pytest

from dataplane_core.backends import BlobStore
from dataplane_core.errors import preview
from dataplane_testkit._base import Suite
from dataplane_testkit._blobs import new_keys, of_all
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import in_threads
from dataplane_testkit._workers import call_backend

_MANY: Final = 300
_THREADS: Final = 8

#: Contents that a conversion to text, a C string, stripped whitespace or compression would change.
_CONTENTS: Final[dict[str, bytes]] = {
    "one_byte": b"\0",
    "every_byte": bytes(range(256)),
    "no_text": b"\xff\xfe\xc3\x28\x80",
    "ends_in_zeros": b"data\0\0\0",
    "ends_in_newlines": b" \tdata\r\n\n",
    "looks_like_a_number": b"007",
    "looks_like_nothing": b"None",
    "64_kb": bytes(range(256)) * 256,
    "16_mb": random.Random(7).randbytes((16 << 20) + 3),
}

#: Enough records to find numbers that are sorted as text, and pages of a hundred.
_RECORDS: Final = 230
_WRITERS: Final = 4
#: A number of two digits, to find numbers that are sorted as text.
_TRIMMED: Final = 12
_PLACES: Final = 40
#: How often a journal is trimmed beside reads, each time after so many appends.
_TRIMS: Final = 50
_BETWEEN: Final = 4


def _same(found: Any, data: bytes | None) -> bool:
    if found is None or data is None:
        return found is data
    return bytes(found) == data


def _holds(blobs: BlobStore, expected: Mapping[str, bytes | None], after: str) -> None:
    """Asserts that ``get``, for every key, and ``get_many``, in the order of the keys, return exactly this."""
    many = list(blobs.get_many(list(expected)))
    assert len(many) == len(expected), f"get_many returned {len(many)} replies for {len(expected)} keys"
    for method, found in (("get", [blobs.get(key) for key in expected]), ("get_many", many)):
        wrong = [key for key, data in zip(expected, found, strict=True) if not _same(data, expected[key])]
        assert not wrong, (
            f"{of_all(wrong, expected)} are wrong after {after}. The first: {method} returned "
            f"{found[list(expected).index(wrong[0])]!r:.80}, expected {expected[wrong[0]]!r:.80}"
        )


def _journals(store: Store, tag: str, *, trims: bool = False) -> tuple[BlobStore, BlobStore]:
    """Two clients of a separate store. Nobody else writes its journal: these records are not the ledger's."""
    backend = store.blobs()
    if trims and type(backend).trim is BlobStore.trim:
        not_run("the author's class does not override trim: its journal is never trimmed")
    case, options = store.case, store.deployment.options
    if case.isolated_options(dict(options), tag) == options:
        not_run("the author's class supplies no isolated_options, and the test would damage the shared store's journal")
    client = store.deployment.isolated(tag)
    attach = case.attach_options(dict(client.config.options), backend_of(client))
    other = store.keep(store.deployment.connect(attach, bootstrap=False))
    return backend_of(client), backend_of(other)


def _records(backend: BlobStore, from_seq: int) -> list[bytes]:
    return [bytes(record) for record in backend.read(from_seq)]


def _end(backend: BlobStore) -> int:
    """The first free place."""
    return len(_records(backend, 0))


def _append(backend: BlobStore, begin: int, records: Sequence[bytes]) -> None:
    """Appends to free places, from ``begin`` on."""
    for place, record in enumerate(records, begin):
        assert backend.append(place, record), f"append to free place {place} returned False"


def _are_taken(backend: BlobStore, *places: int, after: str) -> None:
    """Asserts that ``append`` refuses these places."""
    for place in places:
        assert not backend.append(place, b"late"), f"append to place {place} returned True after {after}"


class EngineSuite(Suite, chapter="engine"):
    """The methods of a `BlobStore`. Other backends do not have them, so these tests are skipped for them."""

    # --- blobs --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("content", list(_CONTENTS))
    def test_a_blob_comes_back_byte_for_byte(self, store: Store, content: str) -> None:
        (key,), data = new_keys(1), _CONTENTS[content]
        store.blobs().put(key, data)
        for get in ("the first get", "the second get"):
            _holds(store.blobs(), {key: data}, f"put and {get}")

    def test_an_empty_blob_is_told_from_a_missing_one(self, store: Store) -> None:
        blobs, (empty, missing) = store.blobs(), new_keys(2)
        _holds(blobs, {empty: None, missing: None}, "no put at all")
        blobs.put(empty, b"")
        _holds(blobs, {empty: b"", missing: None}, "a put of an empty blob")

    @pytest.mark.parametrize("method", ["delete", "delete_many"])
    def test_what_is_deleted_is_gone(self, store: Store, method: str) -> None:
        blobs, keys = store.blobs(), new_keys(_MANY)
        never, gone, stays = keys[::3], keys[1::3], keys[2::3]
        blobs.put_many({key: b"data" if number % 5 else b"" for number, key in enumerate([*gone, *stays])})
        kept = {key: blobs.get(key) for key in stays}
        for some in ([*never, *gone], gone):  # those that are not there are ignored
            if method == "delete_many":
                blobs.delete_many(some)
            else:
                for key in some:
                    blobs.delete(key)
            _holds(blobs, {**dict.fromkeys([*never, *gone]), **kept}, method)

    def test_keys_do_not_clash(self, store: Store) -> None:
        blobs, (base,) = store.blobs(), new_keys(1)
        ends = ["", "0", "00", "1", "01", "10", "100", "9007199254740992", "9007199254740993", "18446744073709551615"]
        expected: dict[str, bytes | None] = {f"{base}{end}": f"of {end}".encode() for end in ends}
        for end in ends:
            blobs.put(f"{base}{end}", f"of {end}".encode())
        _holds(blobs, expected, "put of keys that are alike")
        blobs.delete(base)
        _holds(blobs, expected | {base: None}, "delete of one of the keys that are alike")

    def test_many_blobs_are_stored_and_read_as_each(self, store: Store) -> None:
        blobs, keys = store.blobs(), new_keys(_MANY)
        expected = {key: key.encode() * (index % 4) for index, key in enumerate(keys) if index % 5}
        blobs.put_many(expected)
        random.Random(11).shuffle(keys)
        _holds(blobs, {key: expected.get(key) for key in keys}, "one put_many")

    def test_blobs_from_several_threads(self, store: Store) -> None:
        blobs = store.blobs()

        def work(keys: list[str]) -> None:
            for key in keys:
                blobs.put(key, key.encode() * 50)
                _holds(blobs, {key: key.encode() * 50}, f"put, with {_THREADS} threads")
                blobs.delete(key)
                _holds(blobs, {key: None}, f"delete, with {_THREADS} threads")

        in_threads(*(partial(work, new_keys(20)) for _ in range(_THREADS)))

    def test_blobs_are_seen_by_every_client(self, store: Store) -> None:
        blobs, other = store.blobs(), backend_of(store.attached_client())
        for writer, reader in ((blobs, other), (other, blobs)):
            for key in new_keys(10):
                writer.put(key, key.encode())
                _holds(reader, {key: key.encode()}, "another client's put")
                reader.delete(key)
                _holds(writer, {key: None}, "another client's delete")
        (worker,), (here, there) = store.deployment.workers(1), new_keys(2)
        blobs.put(here, here.encode())
        found, _ = worker.run(call_backend, "get_many", [here, there])
        assert _same(found, here.encode()), "another process does not see a blob that this client put"
        worker.run(call_backend, "put_many", {there: there.encode()})
        _holds(blobs, {there: there.encode()}, "another process's put_many")
        worker.run(call_backend, "delete", here)
        _holds(blobs, {here: None}, "another process's delete")

    # --- the journal --------------------------------------------------------------------------------------------------

    def test_a_place_in_the_journal_is_taken_once(self, store: Store) -> None:
        backend, another = _journals(store, "journal")
        place = _end(backend)
        _append(backend, place, [b"first"])
        for each in (backend, another):
            _are_taken(each, place, after="it was taken")
            assert not each.append(place, b"first"), (
                "append to a taken place returned True because the place holds the same bytes. They may be another "
                "client's record"
            )
        assert _records(backend, place) == [b"first"], "append replaced the record of a taken place"
        _append(another, place + 1, [b"first"])
        assert _records(backend, place) == [b"first", b"first"]

    def test_the_journal_reads_in_order_from_any_place(self, store: Store) -> None:
        backend, _ = _journals(store, "journal")
        begin = _end(backend)
        records = [bytes([number % 256]) * (1 + number % 50) for number in range(_RECORDS)]
        records[_RECORDS // 2] = b"long" * 300_000
        _append(backend, begin, records)
        for start in (0, 1, 2, 9, 10, 99, 100, _RECORDS - 1, _RECORDS, _RECORDS + 5):
            found, expected = _records(backend, begin + start), records[start:]
            wrong = [index for index, record in enumerate(found) if record not in expected[index : index + 1]]
            assert found == expected, (
                f"read({begin + start}) returned {len(found)} of {len(expected)} records, wrong at {preview(wrong)}"
            )

    def test_other_clients_read_what_was_appended(self, store: Store) -> None:
        backend, another = _journals(store, "journal")
        place = _end(backend)
        assert _end(another) == place, "the two clients read different numbers of records"
        for number, (writer, reader) in enumerate([(backend, another), (another, backend)] * 6):
            record = f"record {number}".encode()
            _append(writer, place + number, [record])
            assert _records(reader, place + number) == [record], "another client does not read the record"
            _are_taken(reader, place + number, after="another client has taken it")

    def test_racing_appends_take_each_place_once(self, store: Store) -> None:
        backend, another = _journals(store, "journal")
        begin = _end(backend)
        start, done = threading.Barrier(_WRITERS), threading.Event()

        def write(number: int) -> list[int]:
            journal, taken = (backend, another)[number % 2], []
            try:
                for place in range(begin, begin + _PLACES):
                    start.wait(60)
                    if journal.append(place, f"{place} by {number}".encode()):
                        taken.append(place)
            finally:
                done.set()
            return taken

        def read() -> list[int]:
            last = False
            while not last:
                last = done.is_set()
                for place, record in enumerate(_records(another, begin), begin):
                    assert record.startswith(b"%d by " % place), f"the record at place {place} is {record!r:.40}"
            return []

        *winners, _ = in_threads(*(partial(write, number) for number in range(_WRITERS)), read)
        for place, record in enumerate(_records(backend, begin), begin):
            won = [number for number, taken in enumerate(winners) if place in taken]
            assert len(won) == 1, f"append to place {place} returned True for {len(won)} of {_WRITERS} writers, not one"
            assert record == f"{place} by {won[0]}".encode(), f"place {place} holds {record!r}, of another writer"

    def test_a_trimmed_journal_begins_where_it_was_told(self, store: Store) -> None:
        journals = _journals(store, "trim", trims=True)
        begin = _end(journals[0])
        records = [f"record {number}".encode() for number in range(2 * _TRIMMED)]
        _append(journals[0], begin, records)
        first = begin + _TRIMMED
        for number in (first, first, first - 3, 0):  # to the same or a lower number: nothing changes
            for trimming in journals:
                trimming.trim(number)
                for backend in journals:
                    for start in (0, begin, first - 1, first, first + 5):
                        found, expected = _records(backend, start), records[max(start - begin, _TRIMMED) :]
                        assert found == expected, (
                            f"read({start}) returned {len(found)} records, {preview(found[:1]) or 'none'} first, of a "
                            f"journal that begins with record {first}, after trim({number}). Expected {len(expected)}, "
                            f"{expected[0]!r} first"
                        )
                    _are_taken(backend, 0, begin, begin + 1, first - 1, first, after=f"trim({number})")
        _append(journals[0], begin + len(records), [b"next"])
        assert _records(journals[1], 0) == [*records[_TRIMMED:], b"next"]

    def test_a_read_beside_a_trim_misses_no_record(self, store: Store) -> None:
        backend, another = _journals(store, "beside", trims=True)
        begin = appended = _end(backend)
        done = threading.Event()

        def write() -> None:
            nonlocal appended
            try:
                for _ in range(_TRIMS):
                    for place in range(appended, appended + _BETWEEN):
                        _append(backend, place, [str(place).encode()])
                        appended = place + 1
                    backend.trim(appended - 1)
            finally:
                done.set()

        def read() -> None:
            last = False
            while not last:
                last, before = done.is_set(), appended
                found = [int(record) for record in _records(another, begin)]
                got = f"read({begin}) returned records {preview(found[:1])} to {preview(found[-1:])}"
                assert found == [found[0] + index for index in range(len(found))], f"{got}, not in order or with a gap"
                assert before == begin or found[-1:] >= [before - 1], (
                    f"{got}, although record {before - 1} was appended before, and is kept. Meanwhile another client "
                    "trimmed the journal"
                )

        in_threads(write, read)
