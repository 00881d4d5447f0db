"""The Lua scripts that run on the server: one per operation. A server knows a script by its SHA-1 digest.

The text of a script includes the files that it needs. Servers keep scripts in memory only: one that has lost them
answers NOSCRIPT, and the client sends the text again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

__all__ = ["SCRIPTS", "STORE_VERSION", "Script"]

#: The version of keys and scripts. A client refuses an instance of another version.
STORE_VERSION: Final = 5

#: What a script needs after whose changes claims may be woken.
_WAKES: Final = ("filter", "waiting", "question", "wakes")
#: Operation -> the flags of its script, and the files that its text starts with. Scripts that free memory, or need
#: almost none, may also run while the server is out of memory.
_OPERATIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "instance": ("allow-oom", ()),
    "register": ("allow-oom", ("common", *_WAKES, "drop")),
    "extend": ("allow-oom", ("common", "adding")),
    "describe": ("no-writes", ("common",)),
    "put": ("", ("common", "line", *_WAKES)),
    "room": ("allow-oom", ("common", "line")),
    "abort": ("allow-oom", ("common", "line", "unknown")),
    "locate": ("no-writes", ("common",)),
    "list": ("no-writes", ("common", "filter")),
    "claim": ("allow-oom", ("common", "leases", *_WAKES)),
    "leave": ("allow-oom", ("common", *_WAKES)),
    "shortfall": ("allow-oom", ("common", "leases", "filter")),
    "settle": ("allow-oom", ("common", "leases", *_WAKES)),
    "consumed": ("no-writes", ("common",)),
    "inspect": ("no-writes", ("common", "leases")),
    "consumed_ids": ("no-writes", ("common", "leases")),
    "cursor": ("allow-oom", ("common", "leases", *_WAKES, "adding")),
    "clear": ("allow-oom", ("common", "leases", *_WAKES, "drop")),
    "collect": ("allow-oom", ("common",)),
    "sweep": ("allow-oom", ("common", "unknown")),
    "announce": ("allow-oom", ("common",)),
    "clients": ("no-writes", ("common",)),
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
