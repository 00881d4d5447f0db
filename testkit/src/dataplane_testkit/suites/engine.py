"""The methods of a `RowStoreBackend` called directly: what its docstrings ask of them.

Core builds everything else on these methods. A fault in one of them can make any other test fail.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, Final

import numpy as np
import pytest

from dataplane_core.backends import RefsGoneError, RowStoreBackend
from dataplane_core.errors import preview
from dataplane_testkit._hooks import backend_of, rows_at, soon, stores_rows
from dataplane_testkit._store import Store, Suite, not_declared, not_run
from dataplane_testkit._timing import in_threads
from dataplane_testkit._workers import Worker, call_engine

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
#: A number of two digits, to find numbers that are sorted as text.
_TRIMMED: Final = 12
#: To how many numbers several writers append, and after how many the log is trimmed.
_RACES: Final = 160
_BETWEEN: Final = 4


def new_handles(count: int) -> range:
    """Handles that nobody has used. Those of the ledger are smaller."""
    first = (1 << 62) + (secrets.randbits(40) << 20)
    return range(first, first + count)


def put(backend: RowStoreBackend, rows: Mapping[int, bytes]) -> None:
    """Puts rows, those of consecutive handles in one call, as core does."""
    for _, some in itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        handles = [handle for _, handle in some]
        offsets = np.cumsum([0, *(len(rows[handle]) for handle in handles)], dtype=np.int64)
        data = memoryview(b"".join(rows[handle] for handle in handles))
        backend.put_rows(range(handles[0], handles[-1] + 1), data, offsets, soon())


def log_of(backend: RowStoreBackend, first: int | None = 0) -> list[tuple[int, bytes]]:
    """The records of the log, from a number on; None: the newest one."""
    return [(number, bytes(record)) for number, record in backend.read_log(first, soon())]


@contextmanager
def opened(cls: type[Any], options: Mapping[str, Any], bootstrap: bool) -> Iterator[RowStoreBackend]:
    """A backend whose engine alone is open: it has no ledger."""
    backend = cls(cls.Config.model_validate(options))
    try:
        backend.open_engine(bootstrap=bootstrap, deadline=soon())
        yield backend
    finally:
        backend.close_engine()


def _holds(backend: RowStoreBackend, expected: Mapping[int, bytes | None], after: str) -> None:
    """Asserts that the rows are exactly these: read one by one, and together, in this order."""
    here = {handle: row for handle, row in expected.items() if row is not None}
    ways = [("one by one", rows_at(backend, expected), dict(expected))]
    if here:
        together = dict(zip(here, map(bytes, backend.get_rows([*here], soon())), strict=True))
        ways.append(("together", {**together}, dict(here)))
    for way, rows, right in ways:
        wrong = [handle for handle in right if rows[handle] != right[handle]]
        assert not wrong, (
            f"{len(wrong)} of {len(right)} rows are wrong after {after}, read {way}. The first, {wrong[0]}: "
            f"{rows[wrong[0]]!r:.80}, expected {right[wrong[0]]!r:.80}"
        )


@contextmanager
def _logs(store: Store) -> Iterator[tuple[RowStoreBackend, RowStoreBackend]]:
    """Two clients of the log of a separate store, which is empty, and in which no owner writes."""
    if not stores_rows(store.backend) or type(store.backend).append is RowStoreBackend.append:
        not_declared("a log: the backend overrides no append")
    case, options = store.case, store.options
    separate = case.isolated_options(dict(options), f"log{secrets.token_hex(4)}")
    if separate == options:
        not_run("the author's class supplies no isolated_options, and the test would damage the shared store's log")
    cls = type(store.backend)
    with opened(cls, separate, True) as engine, opened(cls, case.attach_options(separate, engine), False) as another:
        yield engine, another


def _append(engine: RowStoreBackend, begin: int, records: Sequence[bytes]) -> None:
    """Appends records, from the number ``begin`` on, which follows the newest."""
    for number, record in enumerate(records, begin):
        assert engine.append(number, record, soon()), f"append({number}), which follows the newest, returned False"


def _refuses(engine: RowStoreBackend, *numbers: int, after: str, record: bytes = b"late") -> None:
    for number in numbers:
        assert not engine.append(number, record, soon()), f"append({number}) returned True after {after}"


def race(engine: RowStoreBackend, name: str, taken: list[int] | None = None) -> list[int]:
    """Appends to each number, and trims the log now and then. Returns the numbers that it took."""
    taken = [] if taken is None else taken
    for number in range(1, _RACES + 1):
        if engine.append(number, f"{number} by {name}".encode(), soon()):
            taken.append(number)
        if number % _BETWEEN == 0:
            engine.trim(number, soon())
    return taken


def _check_records(records: Sequence[tuple[int, bytes]], newest: int) -> None:
    """Asserts that a read beside appends and trims leaves out no record, up to one that was appended before."""
    numbers = [number for number, _ in records]
    got = f"read_log(1) returned the records {preview(numbers)}"
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else not newest, f"{got}, with a gap"
    assert all(record.startswith(b"%d by " % number) for number, record in records), "records have wrong numbers"
    assert not newest or numbers[-1] >= newest, (
        f"{got}, although record {newest} was appended before, and is kept. Meanwhile another client trimmed the log"
    )


class EngineSuite(Suite, chapter="engine"):
    """The methods of a `RowStoreBackend`. Other backends do not have them, so these tests are skipped for them."""

    @pytest.mark.parametrize("content", list(_CONTENTS))
    def test_a_row_comes_back_byte_for_byte(self, store: Store, content: str) -> None:
        row = dict.fromkeys(new_handles(1), _CONTENTS[content])
        put(store.rows(), row)
        for get in ("the first get", "the second get"):
            _holds(store.rows(), row, f"put_rows and {get}")

    def test_what_is_deleted_is_gone_and_said_to_be(self, store: Store) -> None:
        backend, handles = store.rows(), new_handles(_MANY)
        never, gone, stays = handles[::3], handles[1::3], handles[2::3]
        kept = {handle: str(handle).encode() for handle in stays}
        put(backend, {**kept, **dict.fromkeys(gone, b"gone")})
        for some in ([*never, *gone], gone):  # those that are not there are ignored
            backend.delete_rows(some, soon())
            _holds(backend, {**dict.fromkeys([*never, *gone]), **kept}, "delete_rows")
        with pytest.raises(RefsGoneError) as caught:
            backend.get_rows(handles[:30], soon())
        missing = set(handles[:30]) - set(stays)
        assert set(caught.value.handles) in (set(), missing), "get_rows names other rows than those that are gone"

    def test_handles_do_not_clash(self, store: Store) -> None:
        backend, (base,) = store.rows(), new_handles(1)
        alike = [base, base + 1, base + 2**31, base + 2**32, base + 2**53, base // 10, base >> 4]
        expected: dict[int, bytes | None] = {}
        for handle in alike:
            put(backend, {handle: str(handle).encode()})
            expected[handle] = str(handle).encode()
        _holds(backend, expected, "put_rows of handles that are alike")
        for handle in (base // 10, base):
            backend.delete_rows([handle], soon())
            expected[handle] = None
            _holds(backend, expected, "delete_rows of one of the handles that are alike")

    def test_many_rows_are_stored_and_read_as_each(self, store: Store) -> None:
        backend, handles = store.rows(), [*new_handles(_MANY)]
        rows: dict[int, bytes | None] = {handle: str(handle).encode() * (1 + handle % 4) for handle in handles}
        put(backend, {handle: row for handle, row in rows.items() if row})
        random.Random(11).shuffle(handles)
        _holds(backend, {handle: rows[handle] for handle in handles}, "one put_rows")

    def test_rows_from_several_threads(self, store: Store) -> None:
        backend = store.rows()

        def work(handles: range) -> None:
            for handle in handles:
                row = str(handle).encode() * 50
                put(backend, {handle: row})
                _holds(backend, {handle: row}, f"put_rows, with {_THREADS} threads")
                backend.delete_rows([handle], soon())
                _holds(backend, {handle: None}, f"delete_rows, with {_THREADS} threads")

        in_threads(*(partial(work, new_handles(20)) for _ in range(_THREADS)))

    def test_rows_are_seen_by_every_client(self, store: Store) -> None:
        backend, other = store.rows(), backend_of(store.attached_client())
        for writer, reader in ((backend, other), (other, backend)):
            for handle in new_handles(10):
                put(writer, {handle: b"row"})
                _holds(reader, {handle: b"row"}, "another client's put_rows")
                reader.delete_rows([handle], soon())
                _holds(writer, {handle: None}, "another client's delete_rows")
        (worker,), (here, there) = store.workers(1), new_handles(2)
        put(backend, {here: b"here"})
        seen = worker.run(call_engine, rows_at, [here, there])
        assert seen == {here: b"here", there: None}, "another process does not see a row that this client put"
        worker.run(call_engine, put, {there: b"there"})
        worker.run(call_engine, methodcaller("delete_rows", [here], soon()))
        _holds(backend, {here: None, there: b"there"}, "another process's put_rows and delete_rows")

    def test_a_number_in_the_log_is_taken_once_and_in_turn(self, store: Store) -> None:
        with _logs(store) as logs:
            assert [log_of(log, first) for log in logs for first in (None, 0)] == [[]] * 4
            for number, taking in enumerate((*logs, *logs), 1):
                for log in logs:
                    _refuses(log, number + 1, number + 2, after=f"record {number - 1}, which leaves a gap")
                _append(taking, number, [b"record"])
                for log in logs:
                    # also the same bytes: they may be another client's record
                    _refuses(log, *range(1, number + 1), after="it was taken", record=b"record")
                    assert log_of(log, number) == log_of(log, None) == [(number, b"record")]

    def test_the_log_reads_in_order_from_any_number(self, store: Store) -> None:
        with _logs(store) as (engine, another):
            records = [bytes([number % 256]) * (1 + number % 50) for number in range(_RECORDS)]
            records[_RECORDS // 2] = b"long" * 300_000
            _append(engine, 1, records)
            numbered = [*enumerate(records, 1)]
            for first in (0, 1, 2, 9, 10, 99, 100, _RECORDS, _RECORDS + 1, _RECORDS + 5):
                for log in (engine, another):
                    read, expected = log_of(log, first), [pair for pair in numbered if pair[0] >= first]
                    assert read == expected, (
                        f"read_log({first}) returned {len(read)} records, {preview([n for n, _ in read])}. Expected "
                        f"{len(expected)}, {preview([n for n, _ in expected])}"
                    )
            assert log_of(another, None) == numbered[-1:], "read_log(None) did not return just the newest record"

    def test_a_trimmed_log_begins_where_it_was_told(self, store: Store) -> None:
        with _logs(store) as logs:
            records = [f"record {number}".encode() for number in range(1, 2 * _TRIMMED)]
            _append(logs[0], 1, records)
            kept = [*enumerate(records, 1)][_TRIMMED - 1 :]
            for before in (_TRIMMED, _TRIMMED, _TRIMMED - 3, 0):  # to the same or a lower number: nothing changes
                for trimming in logs:
                    trimming.trim(before, soon())
                    for log in logs:
                        for first in (0, 1, _TRIMMED - 1, _TRIMMED, _TRIMMED + 5):
                            read, expected = log_of(log, first), kept[max(first - _TRIMMED, 0) :]
                            assert read == expected, (
                                f"read_log({first}) returned {len(read)} records, {read[:1]} first, of a log that "
                                f"begins with record {_TRIMMED}, after trim({before}). Expected {len(expected)}, "
                                f"{expected[0]} first"
                            )
                        _refuses(log, 1, 2, _TRIMMED - 1, _TRIMMED, after=f"trim({before})")
            last = len(records)
            logs[0].trim(last, soon())
            _refuses(logs[1], 1, last, last + 2, after="all but the newest record were trimmed")
            _append(logs[0], last + 1, [b"next"])
            assert log_of(logs[1]) == [(last, records[-1]), (last + 1, b"next")]

    def test_racing_appends_take_each_number_once(self, store: Store) -> None:
        with _logs(store) as (engine, another):
            # also with the options that are secrets elsewhere
            worker = Worker(partial(opened, type(engine), another.owner_options(), False))
            writers = {"one": engine, "two": another, "three": engine}
            won: dict[str, list[int]] = {name: [] for name in writers}
            done = threading.Event()

            def write(name: str) -> None:
                try:
                    race(writers[name], name, won[name])
                finally:
                    done.set()

            def read() -> None:
                last = False
                while not last:
                    last, newest = done.is_set(), max((number for taken in won.values() for number in taken), default=0)
                    _check_records(log_of(another, 1), newest)

            try:
                worker.wait_ready()
                worker.start(race, "another process")
                in_threads(*(partial(write, name) for name in writers), read)
                won["another process"] = worker.result()
            finally:
                worker.close()
            left = log_of(engine, 1)
            for number in range(1, _RACES + 1):
                names = [name for name, taken in won.items() if number in taken]
                # a record may be trimmed by another writer before the append that made it returns
                right = len(names) == 1 or (not names and number < left[0][0])
                assert right, f"append({number}) returned True for {len(names)} writers, not one"
            for number, record in left:
                assert number in won[record.decode().partition(" by ")[2]], f"record {number} is of another writer"
