"""The scripts that run on the server: one Lua text per operation, named by its digest.

A text starts with `common.lua`, so that each script is whole. Servers keep scripts in memory only; one that lost them
answers NOSCRIPT, and the client sends the text again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

__all__ = ["SCRIPTS", "STORE_VERSION", "Script"]

#: The version of keys and scripts; an instance of another version is refused.
STORE_VERSION: Final = 1

#: Operation -> the flags of its script, and the files between `common.lua` and its own. Scripts that free memory, or
#: need next to none, also run where the server is out of memory.
_OPERATIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "register": ("allow-oom", ("drop",)),
    "describe": ("no-writes", ()),
    "put": ("", ()),
    "abort": ("allow-oom", ()),
    "locate": ("no-writes", ()),
    "list": ("no-writes", ("filter",)),
    "claim": ("allow-oom", ("filter",)),
    "settle": ("allow-oom", ()),
    "consumed": ("no-writes", ()),
    "clear": ("allow-oom", ("drop",)),
    "collect": ("allow-oom", ()),
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
    parts += [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("common", *libraries, name)]
    text = "\n".join(parts).encode()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


SCRIPTS: Final[dict[str, Script]] = {name: _load(name) for name in _OPERATIONS}
