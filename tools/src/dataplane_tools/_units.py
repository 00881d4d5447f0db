"""`dataplane units`: lists the storage units of a running store."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from dataplane_core.errors import printable
from dataplane_core.spec import UnitInfo
from dataplane_tools._inspect import attach, size_text, table


def run(config_path: str, *, as_json: bool = False) -> int:
    """Prints all storage units. Its arguments are those of the command.

    Raises:
        BackendUnavailableError: No store runs.
        UnsupportedOperationError: The units of this store cannot be listed.
    """
    with attach(config_path) as client:
        units = client.list_units()
    lines = [json.dumps(msgspec.to_builtins(units), indent=2)] if as_json else map(printable, _lines(units))
    print("\n".join(lines))
    return 0


def _lines(units: Sequence[UnitInfo]) -> list[str]:
    rows = [
        [
            each.name,
            each.state,
            each.address,
            each.node[:8],
            each.path,
            str(each.num_rows),
            size_text(each.size_bytes),
            str(each.num_lost),
            str(each.num_starts),
        ]
        for each in units
    ]
    lines = table(
        ["unit", "state", "address", "node", "path", "rows", "held", "rows lost", "starts"], rows, right=range(5, 9)
    )
    for each in units:
        if each.num_lost:
            lines.append(f"{each.num_lost} rows were lost with {each.name}: clear and produce these samples again.")
    return lines
