"""The Lua scripts that run on the server, one per operation, and how clients and scripts encode what they exchange.

A script is the file of its operation, after the definitions that it uses from the other files. A server runs the whole
text on each call, and to define a function costs it about as much as a small command. So a text has no others, and what
only a block after an ``if`` uses is defined inside that block.

The file begins with ``-- Request: {NAME, NAME (what it means), ...}``: the one description of what the script is asked.
Clients name these values, which are sent in this order, and the script has them as variables of these names.

Servers keep scripts in memory only, and know one by its SHA-1 digest. One that has lost them answers NOSCRIPT, and the
client sends the text again.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from dataplane_core.errors import CorruptDataError
from dataplane_core.ledger import commands
from dataplane_core.packed import unpack_msgpack
from dataplane_core.spec import FieldSpec, TagValue

#: The version of keys and scripts. A client refuses an instance of another version.
STORE_VERSION: Final = 12

#: The files with definitions. A definition uses only those before it.
_LIBRARIES: Final = ("common", "leases", "line", "filter", "waiting", "question", "wakes", "unknown", "adding", "drop")
#: Each script but ``instance`` begins with it: it refuses a client of another instance.
_FIRST: Final = "INSTANCE"
#: Scripts that write nothing.
_NO_WRITES: Final = frozenset(
    {"describe", "partitions", "locate", "list", "consumed", "inspect", "fields", "consumed_ids", "clients"}
)

#: Puts and reads of at most so many bytes and rows are sent inside their script, in one round trip.
INLINE_BYTES: Final = 32 * 1024
INLINE_ROWS: Final = 512
#: What no part of a partition is without, see common.lua.
MARK: Final = b"\xff"
#: Names may hold lone surrogates, which are legal in a str.
_ERRORS: Final = "surrogatepass"
_SIZE: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<d")
#: Tags that are no number and no text.
_CONSTANTS: Final = {b"n": None, b"t": True, b"u": False}
#: Up to this magnitude, a double holds every integer exactly.
_MAX_EXACT_INT: Final = 1 << 53

_ROW_HEAD: Final = 16  # its seq and time
_REF: Final = np.dtype([("write", "V16"), ("position", "<u4"), ("layout", "<u4"), ("size", "<u8")])
#: Every ref of a row, the latest write last: (write, position, number of the layout, bytes of the cells).
Refs: TypeAlias = list[tuple[bytes, int, int, int]]


# --- the scripts ------------------------------------------------------------------------------------------------------

_NAMES: Final = re.compile(r"local (?:function )?([\w, ]+)")
_WORD: Final = re.compile(r"\w+")
_COMMENT: Final = re.compile(r"--.*")
_REQUEST: Final = re.compile(r"-- Request: \{(.*?)\}", re.DOTALL)
_SHORT_ELSE: Final = re.compile(r"^( *)(if .*? then) (.+?) else (.+) end$", re.MULTILINE)
_SHORT_IF: Final = re.compile(r"^( *)(if .*? then) ((?!.*\belse).+) end$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, the digest by which a server knows it, and the names of the values that it is asked with."""

    text: bytes
    sha: bytes
    names: tuple[str, ...]

    def pack(self, asked: Mapping[str, Any]) -> bytes:
        """Packs a request: strings, bytes, numbers, and lists of them, by name."""
        assert len(asked) == len(self.names), f"expected {self.names}, got {tuple(asked)}"
        return pack_value([asked[name] for name in self.names])


class _Piece:
    """An operation, or a definition of a library: its lines, and the names of the libraries that it uses.

    ``wanted`` has names by the number of the line before which they are defined: the first one of the block after an
    ``if`` that has all uses, or one for each branch. All else is defined before the piece, at 0: also what only a block
    in a ``for`` uses, which would define it again and again.
    """

    def __init__(self, text: str, libraries: set[str]) -> None:
        found = _NAMES.match(text)
        self.names = set(_WORD.findall(found.group(1))) if found is not None else set()
        text = _SHORT_ELSE.sub(r"\1\2\n\1  \3\n\1else\n\1  \4\n\1end", text)
        self.lines = _SHORT_IF.sub(r"\1\2\n\1  \3\n\1end", text).splitlines(keepends=True)
        uses: dict[str, list[tuple[int, ...]]] = defaultdict(list)  # by name: the first lines of the blocks around it
        around: list[tuple[int, int, str]] = []  # the lines that enclose a line: indent, number, first word
        for number, line in enumerate(self.lines):
            code = _COMMENT.sub("", line)
            indent = len(code) - len(code.lstrip())
            if not code.strip():
                continue
            while around and around[-1][0] >= indent:
                around.pop()
            outer = itertools.takewhile(lambda each: each[2] != "for", around)
            blocks = tuple(at + 1 for _, at, word in outer if word in ("if", "elseif", "else"))
            for name in libraries.intersection(_WORD.findall(code)) - self.names:
                uses[name].append(blocks)
            around.append((indent, number, code.split()[0]))
        self.wanted: dict[int, set[str]] = defaultdict(set)
        self.blocks: dict[int, tuple[int, ...]] = {}  # by such a line: those of the blocks around it, and itself
        for name, places in uses.items():
            for first in {each[:1] for each in places} if () not in places else [()]:
                mine = zip(*(each for each in places if each[:1] == first), strict=False)
                common = tuple(each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, mine))
                self.wanted[common[-1] if common else 0].add(name)
                self.blocks[common[-1] if common else 0] = common


def _read(name: str) -> str:
    return (resources.files("dataplane_redis") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _definitions() -> list[_Piece]:
    texts = []
    for name in _LIBRARIES:
        text = re.sub(r"^--.*\n", "", _read(name), flags=re.MULTILINE)  # comments would follow the definition before
        texts += re.split(r"^(?=local )", text, flags=re.MULTILINE)[1:]
    names = {name for text in texts for name in _Piece(text, set()).names}
    return [_Piece(text, names) for text in texts]


def _defined(definitions: Sequence[_Piece], wanted: set[str], known: set[str]) -> tuple[str, set[str]]:
    """The definitions of what is wanted and not known, and of what these want; and the names that are known then."""
    missing, chosen = set(wanted - known), []
    for each in reversed(definitions):
        if each.names & missing:
            chosen.append(each)
            missing |= each.wanted[0] - known
    known = known.union(*(each.names for each in chosen))
    return "".join(_linked(each, definitions, known) for each in reversed(chosen)), known


def _linked(piece: _Piece, definitions: Sequence[_Piece], known: set[str]) -> str:
    """The text of a piece, with what only its blocks want."""
    text, inside = "", {0: known}
    for number, line in enumerate(piece.lines):
        if number and number in piece.wanted:
            around = known.union(*(inside[each] for each in piece.blocks[number] if each in inside))
            defined, inside[number] = _defined(definitions, piece.wanted[number], around)
            text += defined
        text += line
    return text


def _load() -> dict[str, Script]:
    definitions = _definitions()
    libraries = {name for each in definitions for name in each.names}
    files = (each.name for each in (resources.files("dataplane_redis") / "lua").iterdir())
    scripts = {}
    for name in sorted({each.removesuffix(".lua") for each in files if each.endswith(".lua")}.difference(_LIBRARIES)):
        text = _read(name)
        request = _REQUEST.match(text)
        names = tuple(_WORD.findall(re.sub(r"\([^()]*\)|--", "", request.group(1)))) if request is not None else ()
        if names:
            text = f"local {', '.join(names)} = unpack(cmsgpack.unpack(ARGV[1]))\n{text}"
        piece = _Piece(text, libraries)
        before, known = _defined(definitions, piece.wanted[0] | ({_FIRST} if name != "instance" else set()), set())
        # scripts that free memory, or need almost none, may also run while the server is out of memory
        flags = "" if name == "put" else " flags=no-writes" if name in _NO_WRITES else " flags=allow-oom"
        head = f"#!lua{flags}\n-- dataplane {name}, version {STORE_VERSION}\n"
        linked = (head + before + _linked(piece, definitions, known)).encode()
        scripts[name] = Script(linked, hashlib.sha1(linked, usedforsecurity=False).hexdigest().encode(), names)
    return scripts


SCRIPTS: Final[dict[str, Script]] = _load()


# --- names and lists --------------------------------------------------------------------------------------------------


def to_bytes(text: str) -> bytes:
    """Encodes a name for the server."""
    return text.encode("utf-8", _ERRORS)


def text_of(data: bytes) -> str:
    """Decodes a name from the server."""
    return data.decode("utf-8", _ERRORS)


def tuples_of(flat: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """What a script replied one after another, in tuples of so many."""
    return zip(*[iter(flat)] * size, strict=True)


def pack_value(value: Any) -> bytes:
    """Packs strings, bytes, numbers, and lists of them, for `cmsgpack` of Lua."""
    packed: bytes = msgpack.packb(value, use_bin_type=False, unicode_errors=_ERRORS)
    return packed


# --- tags -------------------------------------------------------------------------------------------------------------


def _tag_value(value: TagValue) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"u"
    if isinstance(value, float):
        return b"f" + _FLOAT.pack(value)
    if isinstance(value, str):
        return b"s" + to_bytes(value)
    if -_MAX_EXACT_INT <= value <= _MAX_EXACT_INT:
        return b"i%d" % value
    return b"I%d:%d" % (value - int(float(value)), value)  # Lua's numbers are doubles: send the rounding error too


def _unpack_tag_value(data: bytes) -> TagValue:
    if data in _CONSTANTS:
        return _CONSTANTS[data]
    kind = data[:1]
    if kind == b"f":
        (number,) = _FLOAT.unpack(data[1:])
        return float(number)
    if kind == b"s":
        return text_of(data[1:])
    if kind in (b"i", b"I"):
        return int(data[1:] if kind == b"i" else data.partition(b":")[2])
    raise ValueError(f"it is of the unknown kind {kind!r}")


def pack_tags(tags: Mapping[str, TagValue]) -> bytes:
    """Packs one row's tags."""
    return pack_value({name: _tag_value(value) for name, value in tags.items()})


def unpack_tags(data: bytes | None) -> dict[str, TagValue]:
    """Reads tags that `pack_tags` packed or a script merged."""
    if not data:
        return {}
    try:
        found = unpack_msgpack(data, raw=True, strict_map_key=False)
        return {text_of(name): _unpack_tag_value(value) for name, value in found.items()} if found else {}
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise damaged("the tags of a row", error) from error


def pack_filter(tag_filter: Mapping[str, tuple[str, Any]] | None) -> list[Any]:
    """The conditions of a tag filter in its full form: (name, symbol, operand) each."""
    return [
        [name, symbol, [_tag_value(each) for each in operand] if symbol.endswith("in") else _tag_value(operand)]
        for name, (symbol, operand) in (tag_filter or {}).items()
    ]


# --- rows -------------------------------------------------------------------------------------------------------------


def pack_strings(strings: Iterable[str]) -> bytes:
    """Packs strings in order."""
    parts: list[bytes] = []
    for each in map(to_bytes, strings):
        parts += (_SIZE.pack(len(each)), each)
    return b"".join(parts)


def pack_parts(writes: Sequence[commands.Write], specs: Mapping[str, FieldSpec]) -> list[list[Any]]:
    """What a script must know of each write of a put: its layout, the sizes of its rows, and where each sample's row
    is (or nothing, if sample i has row i). A layout is the write's fields in order, each with its spec."""
    return [
        [
            pack_strings(text for name in write.fields for text in (name, specs[name].to_text())),
            write.row_bytes,
            "" if write.positions is None else write.positions,
        ]
        for write in writes
    ]


@functools.lru_cache(maxsize=1024)
def unpack_layout(data: bytes) -> Mapping[str, FieldSpec]:
    """Reads a layout: its fields in order, with their specs."""
    strings = []
    at = 0
    try:
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size + size
            strings.append(text_of(data[at - size : at]))
        if at != len(data):
            raise ValueError("it is cut off")
        names, texts = strings[::2], strings[1::2]
        return dict(zip(names, map(FieldSpec.from_text, texts), strict=True))
    except (ValueError, struct.error) as error:
        raise damaged("the fields of a write", error) from error


def damaged(what: str, error: Exception | str) -> CorruptDataError:
    """The error of what this package wrote and cannot read."""
    return CorruptDataError(
        f"{what} cannot be read: {error}. Another program may have changed the keys of this namespace."
    )


def unpack_rows(rows: Sequence[bytes]) -> list[Refs]:
    """Reads the refs of each row."""
    if not rows:
        return []
    sizes = [len(row) - _ROW_HEAD for row in rows]
    if any(size < 0 or size % _REF.itemsize for size in sizes):
        raise damaged("a row on the server", "it has a length that this package never writes")
    refs = iter(np.frombuffer(b"".join([row[_ROW_HEAD:] for row in rows]), dtype=_REF).tolist())
    return [list(itertools.islice(refs, size // _REF.itemsize)) for size in sizes]
