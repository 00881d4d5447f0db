"""The scripts that run on the server: one Lua text per operation, named by its digest.

A text starts with the files that it needs, so that each script is whole. Servers keep scripts in memory only;
one that lost them answers NOSCRIPT, and the client sends the text again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

__all__ = ["SCRIPTS", "STORE_VERSION", "Script"]

#: The version of keys and scripts; an instance of another version is refused.
STORE_VERSION: Final = 2

#: Operation -> the flags of its script, and the files before its own. Scripts that free memory, or
#: need next to none, also run where the server is out of memory.
_OPERATIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "instance": ("allow-oom", ()),
    "register": ("allow-oom", ("common", "drop")),
    "describe": ("no-writes", ("common",)),
    "put": ("", ("common", "line")),
    "room": ("allow-oom", ("common", "line")),
    "abort": ("allow-oom", ("common", "line")),
    "locate": ("no-writes", ("common",)),
    "list": ("no-writes", ("common", "filter")),
    "claim": ("allow-oom", ("common", "leases", "filter", "waiting")),
    "shortfall": ("allow-oom", ("common", "leases", "filter")),
    "settle": ("allow-oom", ("common", "leases")),
    "consumed": ("no-writes", ("common",)),
    "clear": ("allow-oom", ("common", "leases", "drop")),
    "collect": ("allow-oom", ("common",)),
}


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which a server knows it."""

    text: bytes
    sha: bytes


def _load(name: str) -> Script:
    flags, libraries = _OPERATIONS[name]
    folder = resources.files("dataplane_redis") / "lua"
    parts = [f"#!lua flags={flags}" if flags else "#!lua", f"-- dataplane {name}, version {STORE_VERSION}"]
    parts += [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in (*libraries, name)]
    text = "\n".join(parts).encode()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


SCRIPTS: Final[dict[str, Script]] = {name: _load(name) for name in _OPERATIONS}
