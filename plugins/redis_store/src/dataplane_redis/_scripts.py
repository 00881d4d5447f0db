"""The Lua scripts that run on the server: one per operation. A server knows a script by its SHA-1 digest.

A script is the file of its operation, after the definitions that it uses from the other files. A server runs the whole
text on each call, and to define a function costs it about as much as a small command. So a text has no others, and what
a block needs only now and then is defined inside it, at the line ``-- define here: NAME, NAME``.

Servers keep scripts in memory only: one that has lost them answers NOSCRIPT, and the client sends the text again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Final

__all__ = ["SCRIPTS", "STORE_VERSION", "Script"]

#: The version of keys and scripts. A client refuses an instance of another version.
STORE_VERSION: Final = 8

#: Operation -> the flags of its script. Scripts that free memory, or need almost none, may also run while the server is
#: out of memory.
_OPERATIONS: Final = {
    "instance": "allow-oom",
    "register": "allow-oom",
    "extend": "allow-oom",
    "describe": "no-writes",
    "partitions": "no-writes",
    "put": "",
    "room": "allow-oom",
    "abort": "allow-oom",
    "locate": "no-writes",
    "list": "no-writes",
    "claim": "allow-oom",
    "leave": "allow-oom",
    "shortfall": "allow-oom",
    "settle": "allow-oom",
    "consumed": "no-writes",
    "inspect": "no-writes",
    "consumed_ids": "no-writes",
    "cursor": "allow-oom",
    "clear": "allow-oom",
    "collect": "allow-oom",
    "sweep": "allow-oom",
    "announce": "allow-oom",
    "clients": "no-writes",
}
#: The files with definitions. A definition uses only those before it.
_LIBRARIES: Final = (
    "common",
    "leases",
    "line",
    "filter",
    "waiting",
    "question",
    "wakes",
    "unknown",
    "adding",
    "drop",
)
#: Each script but this one begins with it: it refuses a client of another instance.
_FIRST: Final = "INSTANCE"
_WITHOUT_FIRST: Final = ("instance",)

_NAMES: Final = re.compile(r"local (?:function )?([\w, ]+)")
_WORD: Final = re.compile(r"\w+")
_NESTED: Final = re.compile(r"^ *-- define here: (.*)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which a server knows it."""

    text: bytes
    sha: bytes


class _Definition:
    """A definition of a library: its text, the names that it defines, and the words in it that may be names."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = _NAMES.match(text)
        assert found is not None
        self.names = set(_WORD.findall(found.group(1)))
        self.words = _words_of(text)


def _words_of(text: str) -> set[str]:
    """The words of a text, without those of comments, and without names that are defined inside it."""
    words = set(_WORD.findall(re.sub(r"--.*", "", text)))
    return words.difference(*map(_WORD.findall, _NESTED.findall(text)))


def _read(name: str) -> str:
    return (resources.files("dataplane_redis") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _definitions() -> list[_Definition]:
    found = []
    for name in _LIBRARIES:
        parts = re.split(r"^(?=local )", _without_comments_between(_read(name)), flags=re.MULTILINE)
        found += [_Definition(each) for each in parts[1:]]
    return found


def _without_comments_between(text: str) -> str:
    """The text without comments that begin a line: those before a definition would follow the one before it."""
    return re.sub(r"^--.*\n", "", text, flags=re.MULTILINE)


def _used(definitions: Iterable[_Definition], words: set[str]) -> list[_Definition]:
    """The definitions that a text with these words uses, and those that they use."""
    wanted, used = set(words), []
    for each in reversed(list(definitions)):
        if each.names & wanted:
            used.append(each)
            wanted |= each.words
    return used[::-1]


def _link(definitions: list[_Definition], operation: str, name: str) -> str:
    """The text of an operation after the definitions that it uses."""
    words = _words_of(operation)
    if name not in _WITHOUT_FIRST:
        words.add(_FIRST)
    outer = _used(definitions, words)

    def link(text: str, known: list[_Definition]) -> str:
        def nested(line: re.Match[str]) -> str:
            inner = _used([each for each in definitions if each not in known], set(_WORD.findall(line.group(1))))
            return "".join(link(each.text, known + inner) for each in inner)

        return _NESTED.sub(nested, text)

    return "".join([*(link(each.text, outer) for each in outer), link(operation, outer)])


def _load() -> dict[str, Script]:
    definitions = _definitions()
    scripts = {}
    for name, flags in _OPERATIONS.items():
        head = f"#!lua flags={flags}\n" if flags else "#!lua\n"
        text = f"{head}-- dataplane {name}, version {STORE_VERSION}\n{_link(definitions, _read(name), name)}".encode()
        scripts[name] = Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())
    return scripts


SCRIPTS: Final[dict[str, Script]] = _load()
