"""What a client of an instance asks its controller beside the commands of the ledger."""

from __future__ import annotations

from typing import Final

from dataplane_core.hosting import Messages, Request
from dataplane_core.ledger import commands
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._book import View
from dataplane_tq_simple._errors import UnitsGoneError


class BeginNear(Request[int], frozen=True):
    """Begins a put whose rows go to the unit of a node, if it has room. Reply and errors as of `commands.BeginPut`.

    Attributes:
        put: The put.
        node: The node.
        full: Lives of units that get none of its rows, if others take rows.
    """

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
