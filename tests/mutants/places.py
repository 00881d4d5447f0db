"""What a mutant is: one change of the code of a function. How it is drawn, kept in the list, and found again.

A mutant is kept by its function and the code that it changes, not by a line: an edit elsewhere leaves it in place.
"""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.jsonl")
#: The two parts of the list: how many mutants, and the packages that they are drawn from.
OTHERS = ("plugins/noop", "plugins/recording", "plugins/redis_store", "plugins/shm_store", "plugins/tq_simple")
OTHERS += ("plugins/tq_mooncake", "integrations", "compat", "tools")
PARTS = {"core": (200, ("core", "observe")), "other": (100, OTHERS)}
SEED = 20261128

_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "in": "not in", "is": "is not"}
_OPPOSITE |= {after: before for before, after in _OPPOSITE.items()}
_NEIGHBOUR = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_SIGNS: dict[type[ast.AST], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.In: "in"}
_SIGNS |= {ast.NotEq: "!=", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not"}
_LARGEST = 160  # characters of the code that is changed: the list stays readable
_PER_FILE = 4
#: Their change says nothing of the behaviour that users depend on.
_NOT_CHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NOT_CALLED = ("log", "_log", "logger", "_logger", "logging", "warnings")
_NOT_GIVEN = ("strict", "stacklevel", "daemon")
#: A mutant of a function that calls one of these could end or delete what is not a test's.
_DANGEROUS = {"kill", "killpg", "rmtree", "send_signal", "terminate"}


@dataclass
class Mutant:
    id: str
    file: str
    function: str  #: as in `__qualname__`
    kind: str
    before: str  #: the code that is replaced, in the form of `ast.unparse`
    after: str
    nth: int = 0  #: of those alike in the function
    equivalent: str = ""  #: why no test can tell it from the original. Written by hand

    @property
    def room(self) -> str:
        return room(self.file)

    def apply(self, source: str) -> str | None:
        """The source with the change, or None where the code to change is gone."""
        bodies = [node for name, node in functions(ast.parse(source)) if name == self.function]
        alike = [
            node
            for body in bodies
            for kind, node, after in changes(body)
            if (kind, after) == (self.kind, self.after) and ast.unparse(node) == self.before
        ]
        if self.nth >= len(alike):
            return None
        node, text = alike[self.nth], source.encode()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return (text[:start] + self.after.encode() + text[end:]).decode()


def room(file: str) -> str:
    """The sub-package of core, or the package, that a file is in."""
    package, _, inside = file.partition("/src/")
    folders = inside.split("/")[1:-1]
    return f"{package}/{folders[0]}" if package == "core" and folders else package


def load() -> list[Mutant]:
    return [Mutant(**json.loads(line)) for line in LIST.read_text().splitlines()]


def save(mutants: list[Mutant]) -> None:
    lines = [json.dumps({name: value for name, value in asdict(each).items() if value}) for each in mutants]
    LIST.write_text("\n".join(lines) + "\n")


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a module, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """The mutants of a function, but for those of functions inside it: kind, the code that goes, what replaces it."""
    todo: list[ast.AST] = list(reversed(function.body))
    while todo:
        node = todo.pop()
        if isinstance(node, _NOT_CHANGED) or _speaks(node):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield from _changes_of(node)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not _flips(node.test):
            yield "negate", node.test, f"not ({ast.unparse(node.test)})"
        children = [node.value] if isinstance(node, ast.AnnAssign) and node.value else list(ast.iter_child_nodes(node))
        given = [each for each in children if not (isinstance(each, ast.keyword) and each.arg in _NOT_GIVEN)]
        todo += reversed(given)


def _speaks(node: ast.AST) -> bool:
    """Whether this is a docstring, a log line or a warning."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[0] in _NOT_CALLED


def _flips(test: ast.expr) -> bool:
    """Whether another kind of change negates the test already."""
    return isinstance(test, ast.UnaryOp | ast.Compare)


def _changes_of(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            sides = ast.unparse(left), ast.unparse(right)
            for signs in (_OPPOSITE, _NEIGHBOUR):
                if after := signs.get(_SIGNS[type(sign)]):
                    yield "compare", node, f"({sides[0]} {after} {sides[1]})"
        case ast.BoolOp(op=op, values=values):
            other = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield "and-or", node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "un-not", node, f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                yield "plus-minus", node, f"({ast.unparse(ast.BinOp(left, other, right))})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(value=0 | 1 | 2 as value) if type(value) is int:
            yield "constant", node, repr(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop", node, "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", node, "return None"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def candidates(package: str) -> tuple[list[Mutant], Counter[str]]:
    """Every mutant of a package, and the lines of code of each room."""
    found, lines = [], Counter[str]()
    for path in sorted((ROOT / package / "src").rglob("*.py")):
        tree, file = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
        for name, function in functions(tree):
            nodes = list(ast.walk(function))
            lines[room(file)] += len({node.lineno for node in nodes if isinstance(node, ast.expr | ast.stmt)})
            called = {node.func.attr for node in nodes if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
            if function.name in ("__repr__", "__str__") or called & _DANGEROUS:
                continue
            alike = Counter[tuple[str, str, str]]()
            for kind, node, after in changes(function):
                change = kind, ast.unparse(node), after
                if len(change[1]) <= _LARGEST:
                    found.append(Mutant("", file, name, *change, nth=alike[change]))
                alike[change] += 1
    return found, lines


def draw(kept: list[Mutant]) -> list[Mutant]:
    """Fills the list up: in each room in proportion to its code, few in a file, one in a function."""
    mutants = list(kept)
    for part, (number, packages) in PARTS.items():
        mine = [each for each in kept if each.id.startswith(part)]
        last = max((int(each.id.split("-")[1]) for each in mine), default=0)
        found, lines = [], Counter[str]()
        for package in packages:
            more, its_lines = candidates(package)
            found += more
            lines += its_lines
        random.Random(f"{SEED} {part} {last}").shuffle(found)
        for nth in range(last + 1, last + 1 + number - len(mine)):
            taken = {(each.file, each.function) for each in mine}
            full = {file for file, count in Counter(each.file for each in mine).items() if count == _PER_FILE}
            found = [each for each in found if (each.file, each.function) not in taken and each.file not in full]
            has = Counter(each.room for each in mine)
            shares = {each.room: (has[each.room] + 1) / lines[each.room] for each in found}
            poorest = min(sorted(shares), key=shares.__getitem__)
            drawn = next(each for each in found if each.room == poorest)
            drawn.id = f"{part}-{nth:03}"
            mine.append(drawn)
            mutants.append(drawn)
    return sorted(mutants, key=lambda each: each.id)


def redraw() -> str:
    """Replaces the mutants whose place is gone by new ones, and says how many."""
    listed = load() if LIST.exists() else []
    kept = []
    for each in listed:
        path = ROOT / each.file
        if path.exists() and each.apply(path.read_text()):
            kept.append(each)
    save(draw(kept))
    return f"{len(listed) - len(kept)} of {len(listed)} mutants were gone; the list has {len(load())}"
