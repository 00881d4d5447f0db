"""What the processes of an instance tell each other beside the commands of the ledger.

Each node has a storage unit, whose rows are in memory or in a folder. Memory ends with its process. A folder is served
by one process after the other, also on a node that has it later. So rows belong to a *life*: of a folder, or of a
process. All rows of a put go to one life, whose number is part of the ids of the put's writes. So an id says where its
rows are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from dataplane_core.errors import LostReplyError
from dataplane_core.hosting import Messages, Request
from dataplane_core.ledger import commands
from dataplane_core.spec import UnitInfo

#: The id of a write is ``life << LIFE_BITS | number``.
LIFE_BITS: Final = 40


class UnitsGoneError(LostReplyError):
    """A storage unit has ended; or no unit takes rows.

    Units are started again, and others take new rows meanwhile: core tries a put again.
    """


class Started(NamedTuple):
    """What the process of a unit says about itself when it runs."""

    token: str  # identifies the life
    ip: str
    port: int  # where it serves rows
    node: str  # the id of its node
    socket: str = ""  # the name of the Unix socket where it serves them
    secret: bytes = b""  # what clients show there
    size_bytes: int = 0  # of its memory
    kept: bool = False  # its rows outlive it


@dataclass(slots=True)
class Life:
    """A unit, and its life of now, or its last one."""

    unit: str  # its name
    number: int  # of the life
    started: Started  # what its process says, or the last one said
    node: str = ""  # that has the unit; "": none
    alive: bool = True  # its rows are not lost
    served: bool = False  # by a process; if not, the rows are waited for
    num_starts: int = 0  # processes that the unit had
    why: str = ""  # its node does not serve it, if that will not change by itself


class View(NamedTuple):
    """What clients need to find rows: the lives that have not ended, by their numbers. The version grows with every
    change."""

    version: int
    lives: dict[int, Life]


class BeginNear(Request[int], frozen=True):
    """Begins a put whose rows go to the unit of a node, if it has room. Reply and errors as of `commands.BeginPut`.
    Lives in ``full`` get none of its rows, if others take rows."""

    put: commands.BeginPut
    node: str
    full: list[int]

    def check(self) -> None:
        self.put.check()


class ViewUnits(Request[View | None], frozen=True):
    """Reply: where rows are, unless this version is the newest."""

    version: int


class UnitRecords(Request[list[UnitInfo]], frozen=True):
    """Reply: the storage units."""


MESSAGES: Final = Messages(BeginNear, ViewUnits, UnitRecords, errors=[UnitsGoneError])
