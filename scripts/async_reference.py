"""Lets the reference show the coroutines of `AsyncDataPlaneClient` (`extensions` in mkdocs.yml).

They are made from the methods of `DataPlaneClient`, so the source shows neither their arguments nor their docstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_MADE = re.compile(r"(?:_in_thread|_like|wraps)\(DataPlaneClient\.(\w+)")


class AsyncReference(griffe.Extension):
    """Gives each coroutine the signature and the docstring of the method that it is made from."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe when a package is loaded."""
        if pkg.name != "dataplane_core":
            return
        client: Any = pkg["client.client.DataPlaneClient"]
        own: Any = pkg["client.async_client.AsyncDataPlaneClient"]
        for name, member in list(own.members.items()):
            made_by = [member] if member.is_attribute else member.decorators if member.is_function else []
            text = " ".join(str(part.value) for part in made_by)
            if method := _MADE.match(text):
                own.set_member(name, _coroutine(name, client.members[method[1]], member))


def _coroutine(name: str, method: Any, member: Any) -> griffe.Function:
    method = method.final_target if method.is_alias else method
    made = griffe.Function(
        name,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parameters=method.parameters,
        returns=method.returns,
        docstring=method.docstring,
        parent=member.parent,
    )
    if member.is_attribute or "async" in member.labels:
        made.labels |= {"async"}
    return made
