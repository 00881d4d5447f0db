"""The language of ``--where``: conditions on a sample's tags and on its fields of one value.

``reward < 0.5 and weight_version >= 7``, ``task in ("math", "code")``, ``not (done or reward == nan)``. A comparison
has a name on its left and a value on its right: a number, a quoted string, ``true``, ``false`` or ``none``. ``not``
binds closer than ``and``, and ``and`` closer than ``or``. A name alone asks whether its value is true.

A comparison with a name that a sample lacks, or of values that have no order, is neither true nor false; nor is its
opposite. So such a sample does not match by it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from dataplane_core.errors import InvalidRequestError

_TOKEN: Final = re.compile(
    r"""\s*(?: (?P<number>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:inf|nan)\b))
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<word>[^\W\d](?:[\w./:-]*\w)?)
    | (?P<symbol><=|>=|==|!=|[<>(),]) )""",
    re.VERBOSE,
)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": lambda value, operand: value == operand or (value != value and operand != operand),  # so that nan == nan
    "!=": lambda value, operand: value != operand and (value == value or operand == operand),
    "in": lambda value, operands: any(_COMPARE["=="](value, operand) for operand in operands),
}
_CONSTANTS: Final = {"true": True, "false": False, "none": None}
_KEYWORDS: Final = {"and", "or", "not", "in", *_CONSTANTS}

_Row = Mapping[str, Any]
#: True, False, or None: the row cannot say.
_Test = Callable[[_Row], bool | None]


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on a sample."""

    text: str
    names: tuple[str, ...]  # that it compares, each once, in the order of the text
    _test: _Test

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether a sample's values meet it. ``row``: name -> bool, int, float, str or None."""
        return self._test(row) is True


def parse_where(text: str) -> Where:
    """Reads a condition, or raises an error that names the place."""
    parser = _Parser(text)
    try:
        test = parser.any_of()
    except RecursionError:
        raise InvalidRequestError("--where refused: its parentheses are too deep.") from None
    if parser.kind != "end":
        parser.refuse("'and', 'or' or the end")
    return Where(text, tuple(dict.fromkeys(parser.names)), test)


class _Parser:
    """Reads a text from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self.names: list[str] = []
        self._text = text
        self._end = 0
        self._next()

    def any_of(self) -> _Test:
        return self._joined("or", lambda: self._joined("and", self._opposite))

    def _joined(self, word: str, read: Callable[[], _Test]) -> _Test:
        """Parts with a word between them: ``or`` is decided by one that is true, ``and`` by one that is false."""
        parts = [read()]
        while self._took(word):
            parts.append(read())
        if len(parts) == 1:
            return parts[0]
        return lambda row: _first_of(word == "or", [part(row) for part in parts])

    def _opposite(self) -> _Test:
        if not self._took("not"):
            return self._comparison()
        test = self._opposite()
        return lambda row: None if (answer := test(row)) is None else not answer

    def _comparison(self) -> _Test:
        if self._took("("):
            inner = self.any_of()
            self._expect(")")
            return inner
        if self.kind != "word" or self._token.lower() in _KEYWORDS:
            self.refuse("the name of a tag or field")
        name = self._token
        self.names.append(name)
        self._next()
        opposite = self._took("not")
        symbol = "in" if opposite else self._token.lower()
        if opposite:
            self._expect("in")
        elif symbol not in _COMPARE:
            if self.kind == "end" or symbol in ("and", "or", ")"):
                return lambda row: bool(row[name]) if row.get(name) is not None else None
            self.refuse("one of < <= > >= == != in")
        else:
            self._next()
        operand = self._values() if symbol == "in" else self._value()

        def test(row: _Row) -> bool | None:
            try:
                return bool(_COMPARE[symbol](row[name], operand)) is not opposite
            except (KeyError, TypeError):
                return None

        return test

    def _values(self) -> list[Any]:
        self._expect("(")
        values = [self._value()]
        while self._took(","):
            if self._token == ")":
                break
            values.append(self._value())
        self._expect(")")
        return values

    def _value(self) -> Any:
        token, kind = self._token, self.kind
        if kind == "number":
            value: Any = float(token) if set(token.lower()) & set(".ena") else int(token)
        elif kind == "string":
            try:
                value = ast.literal_eval(token)
            except (SyntaxError, ValueError):
                self.refuse("a string without broken escapes")
        elif kind == "word" and token.lower() in _CONSTANTS:
            value = _CONSTANTS[token.lower()]
        else:
            self.refuse("a number, a string in quotes, true, false or none")
        self._next()
        return value

    def _took(self, token: str) -> bool:
        if self.kind not in ("word", "symbol") or self._token.lower() != token:
            return False
        self._next()
        return True

    def _expect(self, token: str) -> None:
        if not self._took(token):
            self.refuse(f"'{token}'")

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._end)
        if found is not None:
            self.kind = str(found.lastgroup)
            self._token = found[self.kind]
            self._start, self._end = found.span(self.kind)
            return
        rest = self._text[self._end :]
        self._start = self._end + len(rest) - len(rest.lstrip())
        self.kind, self._token = "end", ""
        if rest.strip():
            self.refuse("'==' to compare" if rest.lstrip().startswith("=") else "a name, a value or an operator")

    def refuse(self, expected: str) -> NoReturn:
        """Raises the error for what stands at this place."""
        found = self._text[self._start : self._start + 20]
        what = f"'{found}' at character {self._start + 1}" if found else "the end"
        raise InvalidRequestError(f'--where "{self._text}" refused: found {what}. Expected {expected}.')


def _first_of(decides: bool, found: list[bool | None]) -> bool | None:
    """What parts give together: one that decides does so; else a part that cannot say leaves it open."""
    return decides if decides in found else None if None in found else not decides
