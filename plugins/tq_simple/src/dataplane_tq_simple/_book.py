"""The book of the storage units, in the controller: which unit has which rows, and which one takes new ones."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, NamedTuple

import msgspec

from dataplane_core.errors import BackendUnavailableError, CorruptDataError, preview
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._messages import LIFE_BITS, Life, Started, UnitsGoneError, View

#: The note of a journal that holds the units.
UNITS_NOTE: Final = "units"

#: How much of its memory a unit is given as payload. The rest is for tables, and for cleared rows that are still read.
_FILLED: Final = 3 / 4


@dataclass(slots=True)
class _Rows:
    """The rows of a life that are not collected: write id -> position -> bytes."""

    writes: dict[int, dict[int, int]] = field(default_factory=dict)
    size_bytes: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.writes.values()))


class _Noted(NamedTuple):
    """What a controller that is started again must know. See the attributes of the book."""

    units: list[Life]
    lost: dict[int, str]
    next_life: int
    version: int


class UnitBook:
    """The units, and what each holds. Thread-safe.

    The server's thread in the controller and the keeper's thread use it. No method blocks.

    Attributes:
        lock: Held by each method.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._lives: list[Life] = []
        self._lost: dict[int, str] = {}  # lives that have ended and have rows that are not collected -> their units
        self._rows: dict[int, _Rows] = defaultdict(_Rows)  # by life
        self._next_life = 0
        self._version = self._saved_version = 0

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing runs yet: the folders of before are waited for, and no node has them."""
        with self.lock:
            for life in self._lives:
                life.node, life.served, life.why = "", False, ""
            self._version += 1

    def started(self, started: Started) -> None:
        """The process of a node serves a folder, or memory. Ignores what is known."""
        with self.lock:
            life = self._unit_of(started)
            if life.served and life.started == started:
                return
            if life.started.token != started.token:
                self._end(life)
                life.number, life.alive = self._new_life(), True
            elif not life.alive:  # who comes late is welcome
                self._lost.pop(life.number, None)
            before = self._on(started.node)
            if before is not None and before is not life:  # it was damaged, or given up
                before.node = ""
                self._end(before)
            life.node, life.started, life.alive, life.served, life.why = started.node, started, True, True, ""
            life.num_starts += 1
            self._version += 1
            self._forget()

    def ended(self, node: str) -> None:
        """The process of a node has ended, and with it the life of its unit, unless its rows are kept."""
        with self.lock:
            life = self._on(node)
            if life is not None and life.served:
                life.served = False
                self._version += 1
                if not life.started.kept:
                    self._end(life)

    def left(self, node: str) -> None:
        """A node is gone. If its unit is a folder, another node may have that."""
        with self.lock:
            self.ended(node)
            life = self._on(node)
            if life is not None:
                life.node = life.why = ""
                self._version += 1
                self._forget()

    def waits(self, node: str, why: str) -> None:
        """A node cannot open what its unit keeps, or not yet. Whoever waits is told why, if that is not ``""``."""
        with self.lock:
            life = self._on(node)
            if life is not None and not life.served and life.why != why:
                life.why = why
                self._version += 1

    def give_up(self, number: int) -> None:
        """Nobody waits any more for a life: its rows are lost."""
        with self.lock:
            for life in [each for each in self._lives if each.number == number]:
                self._end(life)

    def awaited(self) -> dict[int, bool]:
        """The lives that nobody serves: number -> whether their node says why."""
        with self.lock:
            return {life.number: bool(life.why) for life in self._lives if life.alive and not life.served}

    def nodes(self) -> list[str]:
        """The nodes that have a unit."""
        with self.lock:
            return [life.node for life in self._lives if life.node]

    def token_on(self, node: str) -> str:
        """The token of the life of a node's unit, or ``""`` if it has none."""
        with self.lock:
            life = self._on(node)
            return "" if life is None or not life.alive else life.started.token

    def rows_on(self, node: str, garbage: Iterable[Ref]) -> tuple[dict[int, list[int]], list[Ref]]:
        """Of a node's unit, the rows that are not collected: write id -> positions. And which of the refs it has."""
        with self.lock:
            life = self._on(node)
            if life is None:
                return {}, []
            rows = {write_id: sorted(each) for write_id, each in self._rows[life.number].writes.items()}
            return rows, [ref for ref in garbage if ref[0] >> LIFE_BITS == life.number]

    # --- the ledger's service -----------------------------------------------------------------------------------------

    def choose(self, number: int, size_bytes: int, node: str, full: Sequence[int] = ()) -> int:
        """A write id with this number. It says which unit gets the rows.

        It is that of the node, if it has room; else the one with the most room.

        Args:
            number: From which on no number of ``LIFE_BITS`` bits was used.
            size_bytes: The size of the put.
            node: The node.
            full: Lives that get no rows, unless there are no others.

        Raises:
            UnitsGoneError: No unit takes rows at the moment.
            BackendUnavailableError: Nor will one, until somebody mends what they keep.
        """
        with self.lock:
            serving = [life for life in self._lives if life.served]
            if not serving:
                self._refuse()
            serving = [life for life in serving if life.number not in full] or serving
            near = (each for each in serving if each.node == node and self._room_bytes(each) >= size_bytes)
            return next(near, max(serving, key=self._room_bytes)).number << LIFE_BITS | number

    def _room_bytes(self, life: Life) -> float:
        return life.started.size_bytes * _FILLED - self._rows[life.number].size_bytes

    def _refuse(self) -> None:
        units = [each for each in self._lives if each.node]
        if units and all(each.why for each in units):
            why = "; ".join(f"{each.unit}: {each.why}" for each in units)
            raise BackendUnavailableError(f"no storage unit takes rows. {why}", retryable=False)
        names = [each.unit for each in units]
        raise UnitsGoneError(f"no storage unit takes rows: {preview(names) or 'none'} of {len(units)} are starting.")

    def add(self, writes: Mapping[int, commands.Write]) -> None:
        """The rows of a put that was begun: its writes by their ids."""
        with self.lock:
            for write_id, write in writes.items():
                self._hold(write_id, dict(enumerate(write.row_bytes)))

    def _hold(self, write_id: int, rows: dict[int, int]) -> None:
        held = self._rows[write_id >> LIFE_BITS]
        held.writes[write_id] = rows
        held.size_bytes += sum(rows.values())

    def check(self, write_id: int) -> None:
        """Raises `UnitsGoneError` if the unit of a put has ended since it was begun."""
        with self.lock:
            name = self._lost.get(write_id >> LIFE_BITS)
            if name is not None:
                raise UnitsGoneError(f"{name} ended while the put ran. Nothing was written.")

    def collected(self, refs: Iterable[Ref]) -> None:
        """The payload of these rows is deleted. Two clients that clear at the same time may both report a row."""
        with self.lock:
            for write_id, position in refs:
                held = self._rows.get(write_id >> LIFE_BITS)
                if held is not None and write_id in held.writes:
                    rows = held.writes[write_id]
                    held.size_bytes -= rows.pop(position, 0)
                    if not rows:
                        del held.writes[write_id]
            self._forget()

    # --- clients ------------------------------------------------------------------------------------------------------

    def view(self, known: int = -1) -> View | None:
        """What clients need to find rows. None if ``known`` is still its version."""
        with self.lock:
            if known == self._version:
                return None
            return View(self._version, {life.number: replace(life) for life in self._lives if life.alive})

    def records(self) -> list[UnitInfo]:
        """All units."""
        with self.lock:
            lost: Counter[str] = Counter()
            for number, name in self._lost.items():
                lost[name] += len(self._rows[number])
            return [self._record(life, lost[life.unit]) for life in self._lives]

    def _record(self, life: Life, num_lost: int) -> UnitInfo:
        rows = self._rows[life.number] if life.alive else _Rows()
        return UnitInfo(
            name=life.unit,
            state="serving" if life.served else "starting" if life.node or life.alive else "removed",
            node=life.node,
            address=f"{life.started.ip}:{life.started.port}" if life.alive else "",
            num_rows=len(rows),
            size_bytes=rows.size_bytes,
            num_lost=num_lost,
            num_starts=life.num_starts,
        )

    # --- a journal ----------------------------------------------------------------------------------------------------

    def save(self, note: Callable[[str, bytes | None], None]) -> None:
        """Has the units noted, if they changed since."""
        with self.lock:
            if self._version != self._saved_version:
                noted = _Noted(self._lives, self._lost, self._next_life, self._version)
                note(UNITS_NOTE, msgspec.msgpack.encode(noted))
                self._saved_version = self._version

    def restore(self, noted: bytes, payload: Mapping[int, tuple[Sequence[int] | None, Sequence[int]]]) -> None:
        """Is where another book was.

        Args:
            noted: What that one noted.
            payload: Write id -> the bytes of all its rows, if known, and the rows that the units may still hold.

        Raises:
            CorruptDataError: That one was of another version.
        """
        with self.lock:
            try:
                found = msgspec.msgpack.decode(noted, type=_Noted)
            except msgspec.MsgspecError as error:
                raise CorruptDataError(f"the journal's book of storage units is of another version: {error}") from error
            self._lives, self._lost, self._next_life, self._version = found
            self._version += 1
            known = {life.number for life in self._lives} | self._lost.keys()
            for write_id, (row_bytes, positions) in payload.items():
                if write_id >> LIFE_BITS not in known:
                    continue
                # of what was freed, the ledger does not know the size
                self._hold(write_id, {each: row_bytes[each] if row_bytes else 0 for each in positions})

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _on(self, node: str) -> Life | None:
        return next((life for life in self._lives if life.node == node), None)

    def _unit_of(self, started: Started) -> Life:
        """The unit that a process serves: its folder's, or its node's. A new one, if there is none."""
        for life in self._lives:
            if life.started.token == started.token or (life.node == started.node and not started.kept):
                return life
        taken = {life.unit for life in self._lives}
        name = next(each for each in map("unit-{}".format, count()) if each not in taken)
        life = Life(name, self._new_life(), started)
        self._lives.append(life)
        return life

    def _new_life(self) -> int:
        self._next_life += 1
        return self._next_life - 1

    def _end(self, life: Life) -> None:
        """Ends a life: its rows are lost."""
        if life.alive:
            life.alive = life.served = False
            self._lost[life.number] = life.unit
            self._version += 1
            self._forget()

    def _forget(self) -> None:
        """Forgets the ended lives that have no rows, and the units that no node has and that have none."""
        for number in [each for each in self._lost if not self._rows[each].writes]:
            del self._lost[number], self._rows[number]
            self._version += 1
        named = set(self._lost.values())
        gone = [each for each in self._lives if not (each.node or each.alive or each.unit in named)]
        if gone:
            self._lives = [each for each in self._lives if each not in gone]
            self._version += 1
