"""The book of the storage units, in the controller's process: which unit has which rows, and which one takes new ones.

A unit that is started again has lost its rows, so rows belong to a *life*: from one start of a unit to its end. If the
unit keeps its rows in a folder, the life is that of the folder, and goes on in the next process that finds it: after a
while in which nobody serves it, at another address, perhaps under the name of another unit. All rows of a put go to one
life, whose number is part of the ids of the put's writes. So an id says where its rows are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dataplane_core.errors import BackendUnavailableError, CorruptDataError, preview
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._errors import UnitsGoneError

#: The id of a write is ``life << LIFE_BITS | number``.
LIFE_BITS: Final = 40

#: The note of a journal that holds the units and their lives.
UNITS_NOTE: Final = "units"

#: How much of its memory a unit is given as payload. The rest is for tables, and for cleared rows that are still read.
_FILLED: Final = 3 / 4


class Started(NamedTuple):
    """What a storage unit says about itself when it runs.

    Attributes:
        token: Identifies this life. If its rows outlive its process, it is the name of their folder.
        ip: Its address.
        port: The port where it serves rows.
        node: The id of its node.
        socket: The name of the Unix socket where it serves them.
        secret: What clients show there.
        size_bytes: The size of its memory.
        kept: Whether its rows outlive its process.
    """

    token: str
    ip: str
    port: int
    node: str
    socket: str = ""
    secret: bytes = b""
    size_bytes: int = 0
    kept: bool = False


class Life(NamedTuple):
    """A life of a storage unit, as clients know it.

    Attributes:
        unit: The unit.
        alive: Whether its rows exist.
        served: Whether a process serves them. If not, they are waited for.
        why: Why the unit cannot serve them, if that will not change by itself.
        started: What its process says, or the last one said.
    """

    unit: str
    alive: bool
    served: bool
    why: str
    started: Started


class View(NamedTuple):
    """What clients need to find rows: the lives by their numbers. The version grows with every change."""

    version: int
    lives: dict[int, Life]


@dataclass(slots=True)
class _Unit:
    """A unit. It belongs to a node; without one, the node is gone."""

    name: str
    node: str
    life: int | None = None
    num_starts: int = 0
    why: str = ""  # it cannot open what it keeps


@dataclass(slots=True)
class _Stored:
    """A write whose rows are not all collected.

    Attributes:
        row_bytes: The size of each row.
        left: For each row 1, or 0 if it is collected: two clients that clear at the same time may both report a row.
        num_left: How many are 1.
    """

    row_bytes: Sequence[int]
    left: bytearray
    num_left: int


@dataclass(slots=True)
class _Held:
    """A life, and the rows that were given to it and not yet collected: its writes by their ids."""

    unit: str
    started: Started
    alive: bool = True
    served: bool = True
    writes: dict[int, _Stored] = field(default_factory=dict)
    num_rows: int = 0
    size_bytes: int = 0

    @property
    def room_bytes(self) -> float:
        return self.started.size_bytes * _FILLED - self.size_bytes


class _Packed(NamedTuple):
    """What is noted: the first fields of each unit; the number and the first fields of each life."""

    units: list[tuple[str, str, int | None, int]]
    lives: list[tuple[int, str, Started, bool, bool]]
    next_life: int
    version: int


@dataclass(slots=True)
class UnitBook:
    """The units, their lives, and what each life holds. Thread-safe.

    The server's thread in the controller and the keeper's thread use it. No method blocks.

    Attributes:
        lock: Held by each method.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    _version: int = 0
    _units: dict[str, _Unit] = field(default_factory=dict)
    _lives: dict[int, _Held] = field(default_factory=dict)
    _next_life: int = 0
    _next_number: int = 1
    _saved_version: int = 0

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing runs yet: the lives of processes before these are waited for, and are of no unit."""
        with self.lock:
            for unit in self._units.values():
                unit.node, unit.life = "", None
            for held in self._lives.values():
                held.served = False
            self._changes()

    def unit_on(self, node: str) -> str:
        """The name of the unit of a node. If the node had none, it takes the place of one whose node is gone."""
        with self.lock:
            for unit in self._units.values():
                if unit.node == node:
                    return unit.name
            gone = next((each for each in self._units.values() if not each.node), None)
            name = f"unit-{len(self._units)}" if gone is None else gone.name
            unit = self._units.setdefault(name, _Unit(name, node))
            unit.node = node
            self._changes()
            return name

    def nodes(self) -> dict[str, str]:
        """The units whose nodes are not gone: name -> node."""
        with self.lock:
            return {each.name: each.node for each in self._units.values() if each.node}

    def started(self, name: str, started: Started) -> None:
        """A unit runs. An earlier life of it has ended, if this is another one. Ignores what is known."""
        with self.lock:
            unit = self._units[name]
            if unit.life is not None:
                held = self._lives[unit.life]
                if held.started == started and held.served:
                    return
                if held.started.token != started.token:
                    self._end(unit.life)
            known = (number for number, held in self._lives.items() if held.started.token == started.token)
            number = next(known, None) if started.kept else None
            if number is None:
                number, self._next_life = self._next_life, self._next_life + 1
                self._lives[number] = _Held(name, started)
            held = self._lives[number]
            held.unit, held.started, held.alive, held.served = name, started, True, True
            unit.life, unit.why, unit.num_starts = number, "", unit.num_starts + 1
            self._changes()
            self._forget()

    def ended(self, name: str) -> None:
        """The process of a unit has ended, and with it its life, unless its rows are kept."""
        with self.lock:
            unit = self._units[name]
            if unit.life is None or not self._lives[unit.life].served:
                return
            if self._lives[unit.life].started.kept:
                self._lives[unit.life].served = False
                self._changes()
            else:
                self._end(unit.life)

    def left(self, name: str) -> None:
        """The node of a unit is gone. A life that is kept waits for the unit of another node."""
        with self.lock:
            self.ended(name)
            unit = self._units[name]
            unit.node, unit.life = "", None
            self._changes()
            self._forget()

    def waits(self, name: str, why: str) -> None:
        """A unit cannot open what it keeps, or not yet. Whoever waits is told why, if that is not ``""``."""
        with self.lock:
            unit = self._units[name]
            if unit.why != why:
                unit.why = why
                self._changes()

    def give_up(self, number: int) -> None:
        """Nobody waits any more for a life: its rows are lost."""
        with self.lock:
            self._end(number)

    def awaited(self) -> dict[int, bool]:
        """The lives that nobody serves: number -> whether the unit that had it last says why."""
        with self.lock:
            return {
                number: bool(self._units[held.unit].why) if held.unit in self._units else False
                for number, held in self._lives.items()
                if held.alive and not held.served
            }

    def token_of(self, name: str) -> str:
        """The token of a unit's life, or ``""`` if it has none."""
        with self.lock:
            life = self._units[name].life
            return "" if life is None else self._lives[life].started.token

    def rows_of(self, name: str) -> dict[int, list[int]]:
        """Of the life of a unit, the rows that are not collected: write id -> positions."""
        with self.lock:
            life = self._units[name].life
            writes = {} if life is None else self._lives[life].writes
            left = [(write_id, bytes(stored.left)) for write_id, stored in writes.items()]
        return {write_id: [at for at, is_left in enumerate(each) if is_left] for write_id, each in left}

    def is_here(self, name: str, ref: Ref) -> bool:
        """Whether the life of a unit has a row."""
        return self._units[name].life == ref[0] >> LIFE_BITS

    # --- the ledger's service -----------------------------------------------------------------------------------------

    def choose(self, num_ids: int, size_bytes: int, node: str, full: Sequence[int] = ()) -> int:
        """A new write id, and as many unused ones after it as a put needs. It says which unit gets the rows.

        It is that of the node, if it has room; else the one with the most room.

        Args:
            num_ids: How many.
            size_bytes: The size of the put.
            node: The node.
            full: Lives that get no rows, unless there are no others.

        Raises:
            UnitsGoneError: No unit takes rows at the moment.
            BackendUnavailableError: Nor will one, until somebody mends what they keep.
        """
        with self.lock:
            serving = {number: held for number, held in self._lives.items() if held.alive and held.served}
            serving = {number: held for number, held in serving.items() if number not in full} or serving
            if not serving:
                self._refuse()
            chosen = max(serving, key=lambda number: serving[number].room_bytes)
            near = (number for number, held in serving.items() if held.started.node == node)
            chosen = next((number for number in near if serving[number].room_bytes >= size_bytes), chosen)
            write_id = chosen << LIFE_BITS | self._next_number
            self._next_number += num_ids
            return write_id

    def _refuse(self) -> None:
        units = [each for each in self._units.values() if each.node]
        if units and all(each.why for each in units):
            why = "; ".join(f"{each.name}: {each.why}" for each in units)
            raise BackendUnavailableError(f"no storage unit takes rows. {why}", retryable=False)
        names = [each.name for each in units]
        raise UnitsGoneError(f"no storage unit takes rows: {preview(names) or 'none'} of {len(units)} are starting.")

    def add(self, writes: Mapping[int, commands.Write]) -> None:
        """The rows of a put that was begun: its writes by their ids."""
        with self.lock:
            for write_id, write in writes.items():
                self._hold(write_id, write.row_bytes, range(len(write.row_bytes)))

    def _hold(self, write_id: int, row_bytes: Sequence[int], positions: Sequence[int]) -> None:
        held, left = self._lives[write_id >> LIFE_BITS], bytearray(len(row_bytes))
        for position in positions:
            left[position] = 1
        held.writes[write_id] = _Stored(row_bytes, left, len(positions))
        held.num_rows += len(positions)
        held.size_bytes += sum(row_bytes[position] for position in positions)

    def check(self, write_id: int) -> None:
        """Raises `UnitsGoneError` if the unit of a put has ended since it was begun."""
        with self.lock:
            held = self._lives.get(write_id >> LIFE_BITS)
            if held is not None and not held.alive:
                raise UnitsGoneError(f"{held.unit} ended while the put ran. Nothing was written.")

    def collected(self, refs: Iterable[Ref]) -> None:
        """The payload of these rows is deleted."""
        with self.lock:
            for write_id, position in refs:
                held = self._lives.get(write_id >> LIFE_BITS)
                stored = None if held is None else held.writes.get(write_id)
                if held is None or stored is None or not stored.left[position]:
                    continue
                stored.left[position] = 0
                stored.num_left -= 1
                held.num_rows -= 1
                held.size_bytes -= stored.row_bytes[position]
                if not stored.num_left:
                    del held.writes[write_id]
            self._forget()

    # --- clients ------------------------------------------------------------------------------------------------------

    def view(self, known: int = -1) -> View | None:
        """What clients need to find rows. None if ``known`` is still its version."""
        with self.lock:
            if known == self._version:
                return None
            lives = {}
            for number, held in self._lives.items():
                why = "" if held.served or held.unit not in self._units else self._units[held.unit].why
                lives[number] = Life(held.unit, held.alive, held.served, why, held.started)
            return View(self._version, lives)

    def records(self) -> list[UnitInfo]:
        """All units."""
        with self.lock:
            lost: dict[str, int] = {}
            for held in self._lives.values():
                if not held.alive:
                    lost[held.unit] = lost.get(held.unit, 0) + held.num_rows
            return [self._record(unit, lost.get(unit.name, 0)) for unit in self._units.values()]

    def _record(self, unit: _Unit, num_lost: int) -> UnitInfo:
        held = None if unit.life is None else self._lives[unit.life]
        if held is None:  # it waits for rows, or for the unit of another node that has them
            held = next((each for each in self._lives.values() if each.unit == unit.name and each.alive), None)
        served = held is not None and held.served
        return UnitInfo(
            name=unit.name,
            state="serving" if served else "starting" if unit.node or held is not None else "removed",
            node=unit.node,
            address="" if held is None else f"{held.started.ip}:{held.started.port}",
            num_rows=0 if held is None else held.num_rows,
            size_bytes=0 if held is None else held.size_bytes,
            num_lost=num_lost,
            num_starts=unit.num_starts,
        )

    # --- a journal ----------------------------------------------------------------------------------------------------

    def save(self, note: Callable[[str, bytes | None], None]) -> None:
        """Has the units and lives noted, if they changed since."""
        with self.lock:
            if self._version == self._saved_version:
                return
            units = [(each.name, each.node, each.life, each.num_starts) for each in self._units.values()]
            lives = [(number, each.unit, each.started, each.alive, each.served) for number, each in self._lives.items()]
            packed = _Packed(units, lives, self._next_life, self._version)
            note(UNITS_NOTE, msgspec.msgpack.encode(packed))
            self._saved_version = self._version

    def restore(
        self, packed: bytes, payload: Mapping[int, tuple[Sequence[int] | None, Sequence[int]]], next_number: int
    ) -> None:
        """Is where another book was.

        Args:
            packed: What that one noted.
            payload: Write id -> the bytes of all its rows, if known, and the rows that the units may still hold.
            next_number: The first number for handles that was never used.

        Raises:
            CorruptDataError: That one was of another version.
        """
        with self.lock:
            try:
                noted = msgspec.msgpack.decode(packed, type=_Packed)
            except msgspec.MsgspecError as error:
                raise CorruptDataError(f"the journal's book of storage units is of another version: {error}") from error
            self._units = {each[0]: _Unit(*each) for each in noted.units}
            self._lives = {each[0]: _Held(*each[1:]) for each in noted.lives}
            self._next_life, self._next_number = noted.next_life, next_number
            self._version = noted.version + 1
            for write_id, (row_bytes, positions) in payload.items():
                if write_id >> LIFE_BITS in self._lives and positions:
                    # of what was freed, the ledger does not know the size
                    self._hold(write_id, row_bytes or [0] * (max(positions) + 1), positions)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _changes(self) -> None:
        self._version += 1

    def _end(self, number: int) -> None:
        """Ends a life: its rows are lost."""
        held = self._lives[number]
        held.alive = held.served = False
        for unit in self._units.values():
            if unit.life == number:
                unit.life = None
        self._changes()
        self._forget()

    def _forget(self) -> None:
        """Forgets the ended lives that have no rows, and the units without a node that have none."""
        for number in [each for each, held in self._lives.items() if not held.alive and not held.writes]:
            del self._lives[number]
            self._changes()
        named = {held.unit for held in self._lives.values()}
        for name in [each.name for each in self._units.values() if not each.node and each.name not in named]:
            del self._units[name]
            self._changes()
