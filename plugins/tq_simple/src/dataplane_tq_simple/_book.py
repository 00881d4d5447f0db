"""The book of the storage units, in the controller's process: which unit has which rows, and which units take new ones.

A unit that is started again has lost its rows, so rows belong to a *life* of a unit, from one start to its end. A
*spread* is a list of lives over which the rows of a put are dealt out. The number of its spread is part of a row's
handle, so a handle alone says where its row is: `life_of`. Spreads never change. When a unit ends or comes, later puts
get other spreads.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from dataplane_core.errors import InvalidRequestError, preview
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._errors import UnitsGoneError

#: A handle is ``spread << SPREAD_BITS | number``. The ledger's own numbers stay below ``1 << SPREAD_BITS``.
SPREAD_BITS: Final = 40
#: The spread of handles that are numbers alone: all units with which the instance started.
FIRST_SPREAD: Final = 0
#: Units of an instance.
_MOST_UNITS: Final = 1024
_NUMBER: Final = (1 << SPREAD_BITS) - 1

#: The notes of a journal: the units and their lives; the number of the next spread; each spread, by its number.
UNITS_NOTE: Final = "units"
_NEXT_SPREAD_NOTE: Final = "next spread"
_SPREAD_NOTE: Final = "spread "

#: A unit gets rows of a put although others hold less, if it is ahead by less than the put and this share of the mean.
#: Units are chosen anew when puts have brought this share of what they hold.
_SLACK: Final = 1 / 8


class Started(NamedTuple):
    """What a storage unit says about itself when it runs.

    Attributes:
        token: Identifies this life of the unit; requests carry it.
        ip: Its address.
        port: Its port.
        node: The id of its node.
    """

    token: str
    ip: str
    port: int
    node: str


class Life(NamedTuple):
    """A life of a storage unit, as clients know it.

    Attributes:
        unit: The unit.
        actor: Its Ray actor name.
        token: See `Started`.
        ip: Its address.
        port: Its port.
        alive: Whether its rows can be read.
    """

    unit: str
    actor: str
    token: str
    ip: str
    port: int
    alive: bool


class View(NamedTuple):
    """What clients need to find rows.

    Attributes:
        version: Grows with every change.
        lives: By number.
        spreads: The numbers of their lives, by number.
    """

    version: int
    lives: dict[int, Life]
    spreads: dict[int, tuple[int, ...]]


def life_of(handle: int, spread: Sequence[int]) -> int:
    """The number of the life that has the row of a handle of a spread."""
    return spread[(handle & _NUMBER) % len(spread)]


def _spread_note(spread: int) -> str:
    return f"{_SPREAD_NOTE}{spread}"


@dataclass(slots=True)
class _Unit:
    name: str
    actor: str
    life: int | None = None
    state: Literal["serving", "starting", "draining", "removed"] = "starting"
    created: bool = True
    num_starts: int = 0


@dataclass(slots=True)
class _Held:
    """A life, and the rows that were given to it and not yet collected."""

    unit: _Unit
    started: Started
    alive: bool = True
    num_rows: int = 0
    size_bytes: int = 0


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
class _Choice:
    """The spread of the next puts, and how many bytes they may have in all."""

    spread: int
    left_bytes: float


@dataclass(slots=True)
class UnitBook:
    """The units, their lives, the spreads, and what each life holds. Thread-safe.

    The server's thread in the controller and the keeper's thread use it. No method blocks.

    Attributes:
        changed: Set when the keeper has something to do.
        lock: Held by each method.
    """

    changed: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _version: int = 0
    _units: dict[str, _Unit] = field(default_factory=dict)
    _lives: dict[int, _Held] = field(default_factory=dict)
    _spreads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _rows_of_spread: dict[int, int] = field(default_factory=dict)
    _current: dict[tuple[int, ...], int] = field(default_factory=dict)  # the spreads whose lives are alive
    _choices: dict[str | None, _Choice] = field(default_factory=dict)  # by the node for which units were chosen
    _placing: int = FIRST_SPREAD  # the spread of a put whose rows are not added yet
    _stored: dict[int, _Stored] = field(default_factory=dict)
    _next_life: int = 0
    _next_spread: int = FIRST_SPREAD
    _next_unit: int = 0
    _next_number: int = 1
    _actor_prefix: str = ""
    _failures: list[str] = field(default_factory=list)
    _revision: int = 0  # grows with every change but those of the spreads
    _saved_revision: int = 0
    _unsaved_spreads: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def begin(self, actor_prefix: str, units: Sequence[tuple[str, str, Started]]) -> None:
        """What the names of actors begin with, and the units with which the instance starts: names, actors, answers."""
        with self.lock:
            self._actor_prefix = actor_prefix
            for name, actor, started in units:
                self._units[name] = unit = _Unit(name, actor)
                self._start(unit, started)
            self._next_unit = len(units)
            self._new_spread(tuple(self._lives))

    def new_unit(self) -> tuple[str, str] | None:
        """The name and actor of a unit that is to be created now, or None."""
        with self.lock:
            for unit in self._units.values():
                if not unit.created:
                    unit.created = True
                    self._revision += 1
                    return unit.name, unit.actor
            return None

    def started(self, name: str, started: Started) -> None:
        """A unit runs. An earlier life of it has ended. Ignores a life that is known, and a unit that was removed."""
        with self.lock:
            unit = self._units.get(name)
            if unit is None or unit.state in ("draining", "removed"):
                return
            if unit.life is not None:
                if self._lives[unit.life].started.token == started.token:
                    return
                self._end(unit)
            self._start(unit, started)

    def ended(self, name: str, token: str) -> None:
        """A life of a unit has ended. A unit that was draining is not started again."""
        with self.lock:
            unit = self._units.get(name)
            if unit is not None and unit.life is not None and self._lives[unit.life].started.token == token:
                self._end(unit)

    def failed(self, name: str, why: str) -> None:
        """A unit ended for good, or could not be created."""
        with self.lock:
            unit = self._units.get(name)
            if unit is not None:
                self._fail(unit, why)
                self._forget()

    def live(self) -> list[tuple[str, str, Started]]:
        """The units that run: names, actors, and what they said."""
        with self.lock:
            return [
                (unit.name, unit.actor, self._lives[unit.life].started)
                for unit in self._units.values()
                if unit.life is not None
            ]

    def waiting(self) -> list[tuple[str, str]]:
        """The units that were created, have no life and should get one: names and actors."""
        with self.lock:
            return [
                (each.name, each.actor) for each in self._units.values() if each.created and each.state == "starting"
            ]

    def removed(self, garbage: Callable[[], Iterable[Ref]]) -> list[str]:
        """Ends the units that are draining and hold nothing but ``garbage()``. Returns the actors to end."""
        with self.lock:
            draining = [unit for unit in self._units.values() if unit.state == "draining"]
            if not draining:
                return []
            free = Counter(self._life(write_id + position) for write_id, position in garbage())
            done = [
                unit for unit in draining if unit.life is None or self._lives[unit.life].num_rows <= free[unit.life]
            ]
            for unit in done:
                self._end(unit)
                unit.state = "removed"
            if done:
                self._forget()
            return [unit.actor for unit in done]

    # --- the ledger's service -----------------------------------------------------------------------------------------

    def place(self, num_ids: int, size_bytes: int, node: str | None) -> int:
        """A new write id, and as many unused ones after it as a put needs. It says which units get the rows.

        These are the units that hold the fewest bytes: half of all that take rows, and those that hold little more.
        The choice stands for a while, since each choice may be a spread that every client must learn.

        Args:
            num_ids: How many.
            size_bytes: The size of the put.
            node: Only units of this node, if there are any.

        Raises:
            UnitsGoneError: No unit takes rows at the moment.
        """
        with self.lock:
            choice = self._choices.get(node)
            if choice is None or choice.left_bytes <= 0:
                choice = self._choices[node] = self._choose(size_bytes, node)
            choice.left_bytes -= size_bytes
            self._placing = choice.spread
            write_id = choice.spread << SPREAD_BITS | self._next_number
            self._next_number += num_ids
            return write_id

    def _choose(self, size_bytes: int, node: str | None) -> _Choice:
        lives = [
            (self._lives[unit.life].size_bytes, unit.life)
            for unit in self._units.values()
            if unit.state == "serving" and unit.life is not None
        ]
        if not lives:
            names = [unit.name for unit in self._units.values() if unit.state == "starting"]
            raise UnitsGoneError(
                f"no storage unit takes rows: {preview(names) or 'none'} of {len(self._units)} are starting."
            )
        near = [each for each in lives if self._lives[each[1]].started.node == node]
        lives = sorted(near or lives)
        half = lives[(len(lives) - 1) // 2][0]
        total = sum(held for held, _ in lives)
        most = max(half, lives[0][0] + total / len(lives) * _SLACK + size_bytes)
        chosen = tuple(sorted(life for held, life in lives if held <= most))
        spread = self._current.get(chosen)
        if spread is None:
            spread = self._current[chosen] = self._new_spread(chosen)
            self._version += 1
        return _Choice(spread, total * _SLACK)

    def add(self, writes: Mapping[int, commands.Write]) -> None:
        """The rows of a put that was begun: its writes by their ids."""
        with self.lock:
            for write_id, write in writes.items():
                spread = write_id >> SPREAD_BITS
                lives = self._spreads[spread]
                num_rows = len(write.row_bytes)
                self._stored[write_id] = _Stored(write.row_bytes, bytearray(b"\1" * num_rows), num_rows)
                self._rows_of_spread[spread] = self._rows_of_spread.get(spread, 0) + num_rows
                for first in range(min(num_rows, len(lives))):
                    held = self._lives[life_of(write_id + first, lives)]
                    sizes = write.row_bytes[first :: len(lives)]
                    held.num_rows += len(sizes)
                    held.size_bytes += sum(sizes)
            self._placing = FIRST_SPREAD

    def check(self, write_id: int) -> None:
        """Raises `UnitsGoneError` if a unit of a put's spread has ended since it was begun."""
        with self.lock:
            lives = self._spreads.get(write_id >> SPREAD_BITS, ())
            ended = [self._lives[life].unit.name for life in lives if not self._lives[life].alive]
        if ended:
            raise UnitsGoneError(f"{preview(ended)} ended while the put ran. Nothing was written.")

    def collected(self, refs: Iterable[Ref]) -> None:
        """The payload of these rows is deleted."""
        with self.lock:
            positions: dict[int, list[int]] = {}
            for write_id, position in refs:
                positions.setdefault(write_id, []).append(position)
            for write_id, gone in positions.items():
                stored = self._stored.get(write_id)
                if stored is None:
                    continue
                spread = write_id >> SPREAD_BITS
                lives = [self._lives[life] for life in self._spreads[spread]]
                first, num_lives, sizes, left = write_id & _NUMBER, len(lives), stored.row_bytes, stored.left
                for position in gone:
                    if left[position]:
                        left[position] = 0
                        stored.num_left -= 1
                        held = lives[(first + position) % num_lives]
                        held.num_rows -= 1
                        held.size_bytes -= sizes[position]
                        self._rows_of_spread[spread] -= 1
                if not stored.num_left:
                    del self._stored[write_id]
            self._forget()
            if any(unit.state == "draining" for unit in self._units.values()):
                self.changed.set()

    # --- clients ------------------------------------------------------------------------------------------------------

    def view(self, known: int = -1) -> View | None:
        """What clients need to find rows. None if ``known`` is still its version."""
        with self.lock:
            if known == self._version:
                return None
            lives = {
                number: Life(held.unit.name, held.unit.actor, *held.started[:3], held.alive)
                for number, held in self._lives.items()
            }
            return View(self._version, lives, dict(self._spreads))

    def records(self) -> tuple[list[UnitInfo], list[str]]:
        """All units, and the newest failures as text."""
        with self.lock:
            lost: dict[str, int] = {}
            for held in self._lives.values():
                if not held.alive:
                    lost[held.unit.name] = lost.get(held.unit.name, 0) + held.num_rows
            records = []
            for unit in self._units.values():
                held_now = None if unit.life is None else self._lives[unit.life]
                records.append(
                    UnitInfo(
                        name=unit.name,
                        state=unit.state,
                        node="" if held_now is None else held_now.started.node,
                        address="" if held_now is None else f"{held_now.started.ip}:{held_now.started.port}",
                        num_rows=0 if held_now is None else held_now.num_rows,
                        size_bytes=0 if held_now is None else held_now.size_bytes,
                        num_lost=lost.get(unit.name, 0),
                        num_starts=unit.num_starts,
                    )
                )
            return records, list(self._failures)

    def add_units(self, count: int) -> list[str]:
        """Asks the keeper for more units. Returns their names. Raises `InvalidRequestError` for too many."""
        with self.lock:
            if len(self._units) + count > _MOST_UNITS:
                raise InvalidRequestError(
                    f"add_units({count}) refused: {len(self._units)} storage units are there. Expected at most "
                    f"{_MOST_UNITS} in all."
                )
            names = [f"unit-{number}" for number in range(self._next_unit, self._next_unit + count)]
            for name in names:
                self._units[name] = _Unit(name, f"{self._actor_prefix}{name}", created=False)
            self._next_unit += count
            self._changes()
            return names

    def remove_unit(self, name: str, now: bool) -> None:
        """A unit gets no more rows, and ends when its last row is collected; with ``now`` at once.

        Raises:
            InvalidRequestError: There is no such unit, or no other one that takes rows.
        """
        with self.lock:
            unit = self._units.get(name)
            if unit is None or unit.state == "removed":
                names = [each.name for each in self._units.values() if each.state != "removed"]
                raise InvalidRequestError(f"there is no storage unit {name!r}. Expected one of: {', '.join(names)}.")
            others = [each for each in self._units.values() if each is not unit and each.state == "serving"]
            if not others:
                raise InvalidRequestError(
                    f"{name} is the only storage unit that takes rows.", hint="Add another one first."
                )
            if now and unit.life is not None:
                self._end(unit)
            unit.state = "draining"
            self._changes()

    # --- a journal ----------------------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """The units and their lives, for `restore`."""
        with self.lock:
            units = [
                (each.name, each.actor, each.life, each.state, each.created, each.num_starts)
                for each in self._units.values()
            ]
            lives = {number: (held.unit.name, tuple(held.started), held.alive) for number, held in self._lives.items()}
            after = (self._actor_prefix, self._next_unit, self._next_life, self._version)
            return pickle.dumps({"units": units, "lives": lives, "next": after, "failures": self._failures})

    def save(self, note: Callable[[str, bytes | None], None]) -> None:
        """Has all noted that changed since it was saved, by name. None: it is no longer needed.

        In this order, no spread that is kept has a life that is not.
        """
        with self.lock:
            changed = self._unsaved_spreads
            for spread in [each for each, lives in changed.items() if lives is None]:
                note(_spread_note(spread), None)
            if self._revision != self._saved_revision:
                note(UNITS_NOTE, self.pack())
            if changed:
                note(_NEXT_SPREAD_NOTE, pickle.dumps((self._next_spread, self._version)))
            for spread, lives in changed.items():
                if lives is not None:
                    note(_spread_note(spread), pickle.dumps(lives))
            self._saved_revision, self._unsaved_spreads = self._revision, {}

    def restore(
        self,
        notes: Mapping[str, bytes],
        payload: Mapping[int, tuple[Sequence[int] | None, Sequence[int]]],
        next_number: int,
    ) -> None:
        """Is where another book was.

        Args:
            notes: What that one gave to be noted.
            payload: Write id -> the bytes of all its rows, if known, and the rows that the units may still hold.
            next_number: The first number for handles that was never used.
        """
        with self.lock:
            packed = pickle.loads(notes[UNITS_NOTE])
            self._actor_prefix, self._next_unit, self._next_life, self._version = packed["next"]
            self._failures = packed["failures"]
            self._units = {each[0]: _Unit(*each) for each in packed["units"]}
            for number, (name, started, alive) in packed["lives"].items():
                unit = self._units.get(name) or _Unit(name, "", state="removed")
                self._lives[number] = _Held(unit, Started(*started), alive)
            self._next_spread, version = pickle.loads(notes[_NEXT_SPREAD_NOTE])
            self._version = max(self._version, version) + 1
            for name, note in notes.items():
                if name.startswith(_SPREAD_NOTE):
                    spread = int(name.removeprefix(_SPREAD_NOTE))
                    self._spreads[spread] = pickle.loads(note)
                    if spread != FIRST_SPREAD and all(self._lives[life].alive for life in self._spreads[spread]):
                        self._current[self._spreads[spread]] = spread
            self._next_number = next_number
            for write_id, (row_bytes, positions) in payload.items():
                self._hold_again(write_id, row_bytes, positions)

    def _hold_again(self, write_id: int, row_bytes: Sequence[int] | None, positions: Sequence[int]) -> None:
        spread = write_id >> SPREAD_BITS
        if spread not in self._spreads or not positions:
            return
        sizes = row_bytes or [0] * (max(positions) + 1)  # of what was freed, the ledger does not know the size
        stored = self._stored[write_id] = _Stored(sizes, bytearray(len(sizes)), len(positions))
        self._rows_of_spread[spread] = self._rows_of_spread.get(spread, 0) + len(positions)
        for position in positions:
            stored.left[position] = 1
            held = self._lives[life_of(write_id + position, self._spreads[spread])]
            held.num_rows += 1
            held.size_bytes += sizes[position]

    def come_back(self, running: Iterable[str]) -> None:
        """After `restore`: the actors that run. The units of others ended, or were never created."""
        actors = set(running)
        with self.lock:
            for unit in self._units.values():
                if unit.state == "removed":
                    continue
                if unit.actor in actors:
                    unit.created = True
                elif unit.num_starts == 0 and unit.state == "starting":
                    unit.created = False
                else:
                    self._fail(unit, "its actor ended")
            self._forget()
            self._changes()

    def actors(self) -> dict[str, str]:
        """The units that are not removed: name -> actor."""
        with self.lock:
            return {each.name: each.actor for each in self._units.values() if each.state != "removed"}

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _changes(self) -> None:
        self._version += 1
        self._revision += 1
        self._choices.clear()
        self.changed.set()

    def _new_spread(self, lives: tuple[int, ...]) -> int:
        spread = self._next_spread
        self._spreads[spread] = self._unsaved_spreads[spread] = lives
        self._next_spread += 1
        return spread

    def _start(self, unit: _Unit, started: Started) -> None:
        self._lives[self._next_life] = _Held(unit, started)
        unit.life = self._next_life
        unit.state = "serving"
        unit.num_starts += 1
        self._next_life += 1
        self._changes()

    def _end(self, unit: _Unit) -> None:
        """Ends the life of a unit, if it has one: its rows are lost."""
        self._changes()
        if unit.life is None:
            return
        life, unit.life = unit.life, None
        self._lives[life].alive = False
        if unit.state == "serving":
            unit.state = "starting"
        self._current = {lives: spread for lives, spread in self._current.items() if life not in lives}
        self._forget()

    def _fail(self, unit: _Unit, why: str) -> None:
        self._failures = [*self._failures[-9:], f"{unit.name}: {why}"]
        self._end(unit)
        unit.state = "removed"

    def _life(self, handle: int) -> int | None:
        lives = self._spreads.get(handle >> SPREAD_BITS)
        return None if lives is None else life_of(handle, lives)

    def _forget(self) -> None:
        """Forgets the spreads and the ended lives that have no rows, and the removed units that have none."""
        used = {FIRST_SPREAD, self._placing, *(each.spread for each in self._choices.values())}
        for spread in [each for each in self._spreads if each not in used and not self._rows_of_spread.get(each)]:
            self._current.pop(self._spreads.pop(spread), None)
            self._unsaved_spreads[spread] = None
            self._rows_of_spread.pop(spread, None)
        placed = {life for lives in self._spreads.values() for life in lives}
        for life in [each for each, held in self._lives.items() if not held.alive and each not in placed]:
            del self._lives[life]
            self._revision += 1
        for name in [each for each, unit in self._units.items() if unit.state == "removed"]:
            if not any(held.num_rows for held in self._lives.values() if held.unit.name == name):
                del self._units[name]
                self._revision += 1
