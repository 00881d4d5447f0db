"""The book of the storage units, in the controller's process: which unit has which rows, and which units take new ones.

A unit that is started again has lost its rows, so rows belong to a *life* of a unit, from one start to its end. If it
keeps its rows in a folder, its life goes on in the next process that finds them there: after a while in which nobody
serves them, at another address, perhaps under the name of another unit. A *spread* is a list of lives over which the
rows of a put are dealt out. The number of its spread is part of the id of a write, so the id says where each row is.
Spreads never change. When a unit ends or comes, later puts get other spreads.

The module is long because units, lives and spreads change together, under one lock, and are saved together.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from dataplane_core.errors import BackendUnavailableError, InvalidRequestError, preview
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._errors import UnitsGoneError

#: The id of a write is ``spread << SPREAD_BITS | number``.
SPREAD_BITS: Final = 40
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
#: How much of its memory a unit is given as payload. The rest is for tables, and for cleared rows that are still read.
_FILLED: Final = 3 / 4
#: The rows of a put are dealt out in so many blocks for each life, or somewhat more: so all get about as many.
_BLOCKS: Final = 4
#: Writes that are listed at once: while the lock is held, nobody is answered.
_PORTION: Final = 1000


class Started(NamedTuple):
    """What a storage unit says about itself when it runs.

    Attributes:
        token: Identifies this life of the unit; requests carry it.
        ip: Its address.
        port: The port where it serves rows.
        node: The id of its node.
        socket: The name of the Unix socket where it serves them.
        secret: What clients show there.
        size_bytes: The size of its memory.
        place: The name of the place where its rows lie, if they outlive its process: then the token is that of the
            place. Else ``""``.
    """

    token: str
    ip: str
    port: int
    node: str
    socket: str = ""
    secret: bytes = b""
    size_bytes: int = 0
    place: str = ""

    @property
    def kept(self) -> bool:
        """Whether its rows outlive its process."""
        return bool(self.place)


class Life(NamedTuple):
    """A life of a storage unit, as clients know it.

    Attributes:
        unit: The unit.
        alive: Whether its rows exist.
        served: Whether a process serves them. If not, one is started that does.
        why: Why the one that was started cannot serve them, if that will not change by itself.
        started: What its process says, or the last one said.
    """

    unit: str
    alive: bool
    served: bool
    why: str
    started: Started


class Spread(NamedTuple):
    """How the rows of puts are dealt out: in blocks, to one life after the other, which keeps its blocks in order.

    Attributes:
        lives: The numbers of the lives.
        shift: A block has ``1 << shift`` rows.

    Example:
        >>> spread = Spread((7, 8), shift=1)
        >>> spread.runs(write_id=0, num_rows=5)
        {7: [(0, 2), (4, 5)], 8: [(2, 4)]}
        >>> spread.split(write_id=0, positions=[4, 3])
        {7: [(0, 2)], 8: [(1, 1)]}
    """

    lives: tuple[int, ...]
    shift: int = 0

    def life_of(self, write_id: int, position: int) -> int:
        """The life that has a row of a write."""
        return self.lives[((position >> self.shift) + (write_id & _NUMBER)) % len(self.lives)]

    def runs(self, write_id: int, num_rows: int) -> dict[int, list[tuple[int, int]]]:
        """Life -> which rows of a write it gets, from the first to before the second number."""
        if len(self.lives) == 1:
            return {self.lives[0]: [(0, num_rows)]}
        runs: dict[int, list[tuple[int, int]]] = {}
        for first in range(0, num_rows, 1 << self.shift):
            end = min(first + (1 << self.shift), num_rows)
            runs.setdefault(self.life_of(write_id, first), []).append((first, end))
        return runs

    def split(self, write_id: int, positions: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Life -> of the positions that it has, the index among ``positions``, and the position there."""
        count, low = len(self.lives), (1 << self.shift) - 1
        if count == 1:
            return {self.lives[0]: list(enumerate(positions))}
        found: dict[int, list[tuple[int, int]]] = {}
        for index, position in enumerate(positions):
            there = (position >> self.shift) // count << self.shift | position & low
            found.setdefault(self.life_of(write_id, position), []).append((index, there))
        return found


class View(NamedTuple):
    """What clients need to find rows.

    Attributes:
        version: Grows with every change.
        lives: By number.
        spreads: By number.
    """

    version: int
    lives: dict[int, Life]
    spreads: dict[int, Spread]


def by_write(refs: Iterable[Ref]) -> dict[int, list[int]]:
    """Write id -> positions."""
    positions: dict[int, list[int]] = {}
    for write_id, position in refs:
        positions.setdefault(write_id, []).append(position)
    return positions


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
    why: str = ""  # it cannot open what it keeps


@dataclass(slots=True)
class _Held:
    """A life, and the rows that were given to it and not yet collected."""

    unit: _Unit
    started: Started
    alive: bool = True
    served: bool = True
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
    """The lives that get the next puts, how many bytes these may have in all, and for how many there is room."""

    lives: tuple[int, ...]
    left_bytes: float
    room_bytes: float


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
    _spreads: dict[int, Spread] = field(default_factory=dict)
    _rows_of_spread: dict[int, int] = field(default_factory=dict)
    _current: dict[Spread, int] = field(default_factory=dict)  # the spreads whose lives are alive
    _choices: dict[str | None, _Choice] = field(default_factory=dict)  # by the node for which units were chosen
    _placing: int | None = None  # the spread of a put whose rows are not added yet
    _stored: dict[int, _Stored] = field(default_factory=dict)
    _next_life: int = 0
    _next_spread: int = 0
    _next_unit: int = 0
    _next_number: int = 1
    _actor_prefix: str = ""
    _failures: list[str] = field(default_factory=list)
    _revision: int = 0  # grows with every change but those of the spreads
    _saved_revision: int = 0
    _unsaved_spreads: dict[int, Spread | None] = field(default_factory=dict)

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def begin(self, actor_prefix: str, units: Sequence[tuple[str, str, Started]]) -> None:
        """What the names of actors begin with, and the units with which the instance starts: names, actors, answers."""
        with self.lock:
            self._actor_prefix = actor_prefix
            for unit in self._units.values():  # of processes before these
                unit.life, unit.state = None, "removed"
            self._units = {name: _Unit(name, actor) for name, actor, _ in units}
            for name, _, started in units:
                self._start(self._units[name], started)
            for held in self._lives.values():
                if held.unit.state == "removed":
                    held.alive = False
                    self._units.setdefault(held.unit.name, held.unit)
            self._current = {each: number for each, number in self._current.items() if self._is_alive(each)}
            self._next_unit = len(units)
            self._forget()

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
        """A unit runs. An earlier life of it has ended, if this is another one. Ignores what is known, and a unit that
        was removed."""
        with self.lock:
            unit = self._units.get(name)
            if unit is None or unit.state == "removed" or (unit.state == "draining" and unit.life is None):
                return
            if unit.life is not None:
                held = self._lives[unit.life]
                if held.started == started and held.served:
                    return
                if held.started.token != started.token:
                    self._end(unit)
                    if unit.state == "draining":
                        return
            self._start(unit, started)

    def ended(self, name: str, started: Started) -> None:
        """The process of a unit has ended, and with it its life, unless its rows are kept. A unit that was draining is
        started again only for rows that are kept."""
        with self.lock:
            unit = self._units.get(name)
            if unit is None or unit.life is None or self._lives[unit.life].started != started:
                return
            if not started.kept:
                self._end(unit)
                return
            self._lives[unit.life].served = False
            if unit.state == "serving":
                unit.state = "starting"
            self._changes()

    def rows_of(self, name: str) -> dict[int, list[int]]:
        """Of the life of a unit, the rows that are not collected: write id -> positions there.

        The lock is not held all the time. So rows may be among them that were collected meanwhile, and are deleted.
        """
        with self.lock:
            unit = self._units.get(name)
            life = None if unit is None else unit.life
            write_ids = iter(list(self._stored))
        found: dict[int, list[int]] = {}
        while portion := list(itertools.islice(write_ids, _PORTION)):
            with self.lock:
                some = [
                    (write_id, self._spreads[write_id >> SPREAD_BITS], bytes(self._stored[write_id].left))
                    for write_id in portion
                    if write_id in self._stored
                ]
            for write_id, spread, left in some:
                if life in spread.lives:
                    here = spread.split(write_id, [position for position, is_left in enumerate(left) if is_left])
                    if mine := here.get(life):
                        found[write_id] = [position for _, position in mine]
        return found

    def here(self, name: str, refs: Iterable[Ref]) -> dict[Ref, Ref]:
        """Of rows, those that the life of a unit has, and what they are there: write id and position."""
        with self.lock:
            unit, spreads = self._units.get(name), dict(self._spreads)
            life = None if unit is None else unit.life
        found: dict[Ref, Ref] = {}
        for write_id, positions in by_write(refs).items():
            spread = spreads.get(write_id >> SPREAD_BITS)
            if spread is not None and life in spread.lives:
                for index, there in spread.split(write_id, positions).get(life, ()):
                    found[write_id, positions[index]] = (write_id, there)
        return found

    def failed(self, name: str, why: str) -> None:
        """A unit ended for good, or could not be created."""
        with self.lock:
            unit = self._units.get(name)
            if unit is not None:
                self._fail(unit, why)
                self._forget()

    def waits(self, name: str, why: str) -> bool:
        """A unit that runs cannot serve, or not yet. Returns whether it has rows that are kept: then it may, when
        somebody has mended that. Whoever waits for them is told why, if that is not ``""``."""
        with self.lock:
            unit = self._units.get(name)
            if unit is None or unit.life is None:
                return False
            if unit.why != why:
                unit.why = why
                self._changes()
            return True

    def place_of(self, name: str) -> str:
        """The name of the place of a unit's life, or ``""`` if it has none."""
        with self.lock:
            unit = self._units.get(name)
            return "" if unit is None or unit.life is None else self._lives[unit.life].started.place

    def live(self) -> list[tuple[str, str, Started]]:
        """The units that run: names, actors, and what they said."""
        with self.lock:
            return [
                (unit.name, unit.actor, self._lives[unit.life].started)
                for unit in self._units.values()
                if unit.life is not None and self._lives[unit.life].served
            ]

    def waiting(self) -> list[tuple[str, str]]:
        """The units that were created and should run, but are not known to: names and actors."""
        with self.lock:
            return [
                (each.name, each.actor)
                for each in self._units.values()
                if (each.created and each.state == "starting")
                or (each.life is not None and not self._lives[each.life].served)
            ]

    def removed(self, garbage: Callable[[], Iterable[Ref]]) -> list[str]:
        """Ends the units that are draining and hold nothing but ``garbage()``. Returns the actors to end."""
        with self.lock:
            draining = [unit for unit in self._units.values() if unit.state == "draining"]
            if not draining:
                return []
            free = Counter(self._life(write_id, position) for write_id, position in garbage())
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

    def place(
        self, num_ids: int, size_bytes: int, node: str | None, num_rows: int = 1, full: Sequence[int] = ()
    ) -> int:
        """A new write id, and as many unused ones after it as a put needs. It says which units get the rows.

        On the node that is given, the unit that holds the fewest bytes gets them, if it has room. Otherwise these are
        the units that hold the fewest bytes: half of all that take rows, and those that hold little more. The choice
        stands for a while, since each choice may be a spread that every client must learn.

        Args:
            num_ids: How many.
            size_bytes: The size of the put.
            node: The node whose units come first, if there are any. None: none.
            num_rows: How many rows the put has.
            full: Lives that get no rows, unless there are no others.

        Raises:
            UnitsGoneError: No unit takes rows at the moment.
            BackendUnavailableError: Nor will one, until somebody mends what they keep.
        """
        with self.lock:
            choice = self._choices.get(node)
            if full or choice is None or choice.left_bytes <= 0 or choice.room_bytes < size_bytes:
                choice = self._choices[node] = self._choose(size_bytes, node, full)
            choice.left_bytes -= size_bytes
            choice.room_bytes -= size_bytes
            count = len(choice.lives)
            shift = 0 if count == 1 else max(0, (num_rows // (_BLOCKS * count)).bit_length() - 1)
            self._placing = self._spread_of(Spread(choice.lives, shift))
            write_id = self._placing << SPREAD_BITS | self._next_number
            self._next_number += num_ids
            return write_id

    def _spread_of(self, spread: Spread) -> int:
        number = self._current.get(spread)
        if number is None:
            number = self._current[spread] = self._next_spread
            self._spreads[number] = self._unsaved_spreads[number] = spread
            self._next_spread += 1
            self._version += 1
        return number

    def _choose(self, size_bytes: int, node: str | None, full: Sequence[int]) -> _Choice:
        serving = {
            unit.life: self._lives[unit.life]
            for unit in self._units.values()
            if unit.state == "serving" and unit.life is not None
        }
        serving = {life: held for life, held in serving.items() if life not in full} or serving
        if not serving:
            starting = [unit for unit in self._units.values() if unit.state == "starting"]
            if starting and all(unit.why for unit in starting):
                why = "; ".join(f"{unit.name}: {unit.why}" for unit in starting)
                raise BackendUnavailableError(f"no storage unit takes rows. {why}", retryable=False)
            names = [unit.name for unit in starting]
            raise UnitsGoneError(
                f"no storage unit takes rows: {preview(names) or 'none'} of {len(self._units)} are starting."
            )
        room = {life: held.started.size_bytes * _FILLED - held.size_bytes for life, held in serving.items()}
        total = sum(held.size_bytes for held in serving.values())
        lives = sorted((held.size_bytes, life) for life, held in serving.items() if room[life] >= size_bytes)
        near = [life for _, life in lives if serving[life].started.node == node]
        if near:
            chosen: tuple[int, ...] = (near[0],)
        else:  # where none has room for all of it, each may have room for its share
            lives = lives or sorted((held.size_bytes, life) for life, held in serving.items())
            half = lives[(len(lives) - 1) // 2][0]
            most = max(half, lives[0][0] + total / len(lives) * _SLACK + size_bytes)
            chosen = tuple(sorted(life for held, life in lives if held <= most))
        return _Choice(chosen, total * _SLACK, min(room[life] for life in chosen) * len(chosen))

    def add(self, writes: Mapping[int, commands.Write]) -> None:
        """The rows of a put that was begun: its writes by their ids."""
        with self.lock:
            for write_id, write in writes.items():
                spread = write_id >> SPREAD_BITS
                num_rows = len(write.row_bytes)
                self._stored[write_id] = _Stored(write.row_bytes, bytearray(b"\1" * num_rows), num_rows)
                self._rows_of_spread[spread] = self._rows_of_spread.get(spread, 0) + num_rows
                for life, runs in self._spreads[spread].runs(write_id, num_rows).items():
                    for first, end in runs:
                        self._lives[life].num_rows += end - first
                        self._lives[life].size_bytes += sum(write.row_bytes[first:end])
            self._placing = None

    def check(self, write_id: int) -> None:
        """Raises `UnitsGoneError` if a unit of a put's spread has ended since it was begun."""
        with self.lock:
            spread = self._spreads.get(write_id >> SPREAD_BITS, Spread(()))
            ended = [self._lives[life].unit.name for life in spread.lives if not self._lives[life].alive]
        if ended:
            raise UnitsGoneError(f"{preview(ended)} ended while the put ran. Nothing was written.")

    def collected(self, refs: Iterable[Ref]) -> None:
        """The payload of these rows is deleted."""
        with self.lock:
            for write_id, gone in by_write(refs).items():
                stored = self._stored.get(write_id)
                if stored is None:
                    continue
                number, sizes, left = write_id >> SPREAD_BITS, stored.row_bytes, stored.left
                spread = self._spreads[number]
                for position in gone:
                    if left[position]:
                        left[position] = 0
                        stored.num_left -= 1
                        held = self._lives[spread.life_of(write_id, position)]
                        held.num_rows -= 1
                        held.size_bytes -= sizes[position]
                        self._rows_of_spread[number] -= 1
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
                number: Life(
                    held.unit.name, held.alive, held.served, "" if held.served else held.unit.why, held.started
                )
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
            lives = {
                number: (held.unit.name, tuple(held.started), held.alive, held.served)
                for number, held in self._lives.items()
            }
            after = (self._actor_prefix, self._next_unit, self._next_life, self._version)
            return pickle.dumps({"units": units, "lives": lives, "next": after, "failures": self._failures})

    def save(self, note: Callable[[str, bytes | None], None]) -> None:
        """Has all noted that changed since it was saved, by name. None: it is no longer needed.

        In this order, no spread that is kept has a life that is not.
        """
        with self.lock:
            changed = self._unsaved_spreads
            for number in [each for each, spread in changed.items() if spread is None]:
                note(_spread_note(number), None)
            if self._revision != self._saved_revision:
                note(UNITS_NOTE, self.pack())
            if changed:
                note(_NEXT_SPREAD_NOTE, pickle.dumps((self._next_spread, self._version)))
            for number, spread in changed.items():
                if spread is not None:
                    note(_spread_note(number), pickle.dumps(tuple(spread)))
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
            for number, (name, started, alive, served) in packed["lives"].items():
                unit = self._units.get(name) or _Unit(name, "", state="removed")
                self._lives[number] = _Held(unit, Started(*started), alive, served)
            version = 0
            if _NEXT_SPREAD_NOTE in notes:  # else there was no put yet
                self._next_spread, version = pickle.loads(notes[_NEXT_SPREAD_NOTE])
            self._version = max(self._version, version) + 1
            for name, note in notes.items():
                if name.startswith(_SPREAD_NOTE):
                    number = int(name.removeprefix(_SPREAD_NOTE))
                    spread = self._spreads[number] = Spread(*pickle.loads(note))
                    if self._is_alive(spread):
                        self._current[spread] = number
            self._next_number = next_number
            for write_id, (row_bytes, positions) in payload.items():
                self._hold_again(write_id, row_bytes, positions)

    def _hold_again(self, write_id: int, row_bytes: Sequence[int] | None, positions: Sequence[int]) -> None:
        number = write_id >> SPREAD_BITS
        if number not in self._spreads or not positions:
            return
        sizes = row_bytes or [0] * (max(positions) + 1)  # of what was freed, the ledger does not know the size
        stored = self._stored[write_id] = _Stored(sizes, bytearray(len(sizes)), len(positions))
        self._rows_of_spread[number] = self._rows_of_spread.get(number, 0) + len(positions)
        for position in positions:
            stored.left[position] = 1
            held = self._lives[self._spreads[number].life_of(write_id, position)]
            held.num_rows += 1
            held.size_bytes += sizes[position]

    def come_back(self, running: Iterable[str]) -> None:
        """After `restore`: the actors that run. Of the others, units that keep rows are to be started again. The rest
        ended, or were never created."""
        actors = set(running)
        with self.lock:
            for unit in self._units.values():
                if unit.state == "removed":
                    continue
                if unit.actor in actors:
                    unit.created = True
                elif unit.num_starts == 0 and unit.state == "starting":
                    unit.created = False
                elif unit.life is not None and self._lives[unit.life].started.kept:
                    self.ended(unit.name, self._lives[unit.life].started)
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

    def _start(self, unit: _Unit, started: Started) -> None:
        known = (number for number, held in self._lives.items() if held.started.token == started.token)
        number = next(known, None) if started.kept else None
        if number is None:
            number, self._next_life = self._next_life, self._next_life + 1
            self._lives[number] = _Held(unit, started)
        else:
            held = self._lives[number]
            if held.unit is not unit and held.unit.life == number:
                held.unit.life = None  # it was served under another name before
            held.unit, held.started, held.alive, held.served = unit, started, True, True
        unit.life = number
        if unit.state != "draining":
            unit.state = "serving"
        unit.num_starts += 1
        unit.why = ""
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
        self._current = {spread: number for spread, number in self._current.items() if life not in spread.lives}
        self._forget()

    def _fail(self, unit: _Unit, why: str) -> None:
        self._failures = [*self._failures[-9:], f"{unit.name}: {why}"]
        self._end(unit)
        unit.state = "removed"

    def _is_alive(self, spread: Spread) -> bool:
        return all(self._lives[life].alive for life in spread.lives)

    def _life(self, write_id: int, position: int) -> int | None:
        spread = self._spreads.get(write_id >> SPREAD_BITS)
        return None if spread is None else spread.life_of(write_id, position)

    def _forget(self) -> None:
        """Forgets the spreads and the ended lives that have no rows, and the removed units that have none."""
        chosen = {each.lives for each in self._choices.values()}
        unused = [
            number
            for number, spread in self._spreads.items()
            if number != self._placing and spread.lives not in chosen and not self._rows_of_spread.get(number)
        ]
        for number in unused:
            self._current.pop(self._spreads.pop(number), None)
            self._unsaved_spreads[number] = None
            self._rows_of_spread.pop(number, None)
        placed = {life for spread in self._spreads.values() for life in spread.lives}
        for life in [each for each, held in self._lives.items() if not held.alive and each not in placed]:
            del self._lives[life]
            self._revision += 1
        for name in [each for each, unit in self._units.items() if unit.state == "removed"]:
            if not any(held.num_rows for held in self._lives.values() if held.unit.name == name):
                del self._units[name]
                self._revision += 1
