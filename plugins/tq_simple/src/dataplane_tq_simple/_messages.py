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
    """Begins a put whose rows go to the unit of a node, if it has room. Reply and errors as of `commands.BeginPut`.

    Attributes:
        put: The put.
        node: The node.
        full: Lives of units that get none of its rows, if others take rows.
    """

    put: commands.BeginPut
    node: str
    full: list[int]


@dataclass(frozen=True, slots=True)
class ViewUnits(Request[View | None]):
    """Reply: where rows are, unless this version is the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class UnitRecords(Request[list[UnitInfo]]):
    """Reply: the storage units."""


MESSAGES: Final = Messages(BeginNear, ViewUnits, UnitRecords, errors=[UnitsGoneError])
