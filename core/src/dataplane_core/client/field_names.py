"""Field names that nobody registered: most are typing errors, so they are told once, or refused."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from dataplane_core import schema
from dataplane_core.entry_points import nearest
from dataplane_core.errors import InvalidRequestError, preview, printable
from dataplane_core.spec import PartitionInfo

_log = logging.getLogger(__name__)

#: Fields that producers add to any registration, so they are not told when they are written.
_OPTIONAL: Final = schema.MULTIMODAL_FIELDS | {
    schema.ROUTED_EXPERTS_FIELD,
    schema.TURN_CONTENTS_FIELD,
    schema.TURN_LENGTHS_FIELD,
    schema.TURN_ROLES_FIELD,
    schema.RESPONSE_TOKEN_LENGTHS_FIELD,
}


class FieldNames:
    """The field names that a client was told of.

    Args:
        strict: Whether other names than the registered ones are refused. If not, each is logged once.
        open_partitions: Whether puts and claims register partitions. Then nobody chose the names that are registered,
            and none is logged.
    """

    def __init__(self, *, strict: bool, open_partitions: bool) -> None:
        self.strict = strict
        self._silent = open_partitions and not strict
        self._known: dict[str, set[str]] = {"put": set(_OPTIONAL), "claim": set()}

    def unknown(self, use: str, names: Iterable[str], info: PartitionInfo | None) -> list[str]:
        """The names that are not registered and of which nothing was said yet.

        Args:
            use: ``put`` or ``claim``.
            names: The names.
            info: The registration. None: not known yet. If it names no fields, all names are good.
        """
        if self._silent or (info is not None and not info.fields):
            return []
        known = set() if info is None else set(info.fields)
        return [name for name in names if name not in known and (self.strict or name not in self._known[use])]

    def tell(self, use: str, where: str, names: Collection[str], info: PartitionInfo, written: Iterable[str]) -> None:
        """Logs names, each once. Nothing is said of those that are written already.

        Raises:
            InvalidRequestError: Names are neither registered nor written, and the client is strict.
        """
        known = dict.fromkeys([*info.fields, *written])
        wrong = [name for name in names if name not in known]
        self._known[use].update(() if self.strict else names)
        if not wrong:
            return
        near = dict.fromkeys(f"'{found}'" for name in wrong if (found := nearest(name, known)))
        meant = f"Did you mean {', '.join(near)}?" if near else f"Registered: {preview(list(info.fields), limit=8)}."
        what = "not registered" if use == "put" else "neither registered nor written"
        told = f"field {preview(wrong)} is {what}. {meant}"
        if self.strict:
            end = " Nothing was written." if use == "put" else ""
            raise InvalidRequestError(
                f"{where} refused: {told}{end}", hint="Register the field, or leave strict_fields out of the config."
            )
        _log.warning("%s", printable(f"{where}: {told} If it is right, register it."))
