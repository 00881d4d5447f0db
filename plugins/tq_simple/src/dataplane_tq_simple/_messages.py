"""What a client of an instance asks its controller beside the commands of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dataplane_core.hosting import Messages, Request
from dataplane_core.ledger import commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._book import View
from dataplane_tq_simple._errors import UnitsGoneError


@dataclass(frozen=True, slots=True)
class BeginNear(Request[int]):
    """Begins a put whose rows go to a unit of a node, if it has one with room. Reply and errors as of
    `commands.BeginPut`.

    Attributes:
        put: The put.
        node: The node. None: no node comes first.
        full: Lives of units that get none of its rows, if others take rows.
    """

    put: commands.BeginPut
    node: str | None
    full: list[int]


@dataclass(frozen=True, slots=True)
class ViewUnits(Request[View | None]):
    """Reply: where rows are, unless this version is the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class UnitRecords(Request[tuple[list[UnitInfo], list[str]]]):
    """Reply: the storage units, and why some of them failed."""


@dataclass(frozen=True, slots=True)
class AddUnits(Request[list[str]]):
    """Starts so many storage units. Reply: their names. Raises as `UnitBook.add_units`."""

    count: int


@dataclass(frozen=True, slots=True)
class RemoveUnit(Request[None]):
    """Removes a storage unit. Raises as `UnitBook.remove_unit`."""

    name: str
    now: bool


MESSAGES: Final = Messages(BeginNear, ViewUnits, UnitRecords, AddUnits, RemoveUnit, errors=[UnitsGoneError])
