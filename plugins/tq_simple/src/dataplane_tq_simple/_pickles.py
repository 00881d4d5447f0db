"""Pickles commands and replies of the ledger at a fraction of the usual cost.

Pickle asks a frozen dataclass with slots for its state, and gives it the state back, by a loop over the descriptions of
its fields. That takes longer than the ledger takes for a command. Here the loops know each class's fields beforehand.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, Final

from dataplane_core.ledger import commands
from dataplane_core.spec import Claim, FieldSpec

__all__ = ["dumps"]


@cache
def _setters(cls: type) -> tuple[Callable[[Any, Any], None], ...]:
    return tuple([getattr(cls, each.name).__set__ for each in fields(cls)])


def _restored(cls: type, *values: Any) -> Any:
    made: Any = object.__new__(cls)
    for setter, value in zip(_setters(cls), values, strict=True):
        setter(made, value)
    return made


@lru_cache(maxsize=4096)
def _shared_spec(*values: Any) -> FieldSpec:
    """The spec with these values. Many fields have the same, and share it."""
    return FieldSpec(*values)


def _reduced_spec(spec: FieldSpec) -> tuple[Any, ...]:
    return _shared_spec, (spec.kind, spec.dtype, spec.rank, spec.trailing)


def _reducer(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    getters = tuple([getattr(cls, each.name).__get__ for each in fields(cls)])
    return lambda made: (_restored, (cls, *[get(made) for get in getters]))


_TABLE: Final[dict[type, Callable[[Any], Any]]] = {
    **copyreg.dispatch_table,
    **{cls: _reducer(cls) for cls in (*commands.COMMANDS, commands.Split, commands.Located, commands.Part, Claim)},
    FieldSpec: _reduced_spec,
}


def dumps(value: object) -> bytes:
    """As `pickle.dumps`; `pickle.loads` reads it."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(value)
    return buffer.getvalue()
