"""How a toy is written: a row of a table, `NAME.HOOK: what the hook does`, in Python, in place of the right one.

    ReordersRows.get_samples: request.sample_ids = sorted(request.sample_ids)
    LosesTags.claim: -> reply = replace(reply, tags=[{} for _ in reply.tags])
    FillsGaps.get_samples: -! MissingDataError: return zeros(request)

What stands before ``->`` is done before the right hook is called, what follows it after that, to its ``reply``. What
follows ``-! ERROR:`` is done when the right hook raises that error; unless it returns or raises, the error is raised
again. Names of the table's ``lazy`` are found where they are used, errors are those of core. ``seen[...]`` are lists
that the toy keeps. Further lines of a row are indented. Above rows stands the test of the kit that they must fail. A
member that is no hook is an expression.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from functools import partial, wraps
from textwrap import indent
from typing import Any, NamedTuple

from dataplane_core import errors
from dataplane_noop import NoopBackend
from dataplane_testkit import BackendConformance


class TestIt(BackendConformance):
    """Is replaced in each fork of `run`. First, for the imports, of a right backend."""

    backend_class = NoopBackend


class Run(NamedTuple):
    """Tests of the kit on a backend."""

    backend: type
    tests: Mapping[str, str]  # their outcomes in the report
    selection: str | None = None  # chooses more tests, as pytest's -k, of which none may fail
    least: int = 0  # how many must pass
    members: Mapping[str, Any] = {}  # what else the class of the tests has, such as `options`


class Table(dict[str, Run]):
    """Name -> broken backend: the right one, `base`, but for some hooks."""

    def __init__(self, base: type, module: str, lazy: Mapping[str, str], **members: Any) -> None:
        super().__init__()
        self._base, self._module, self._lazy, self.members = base, sys.modules[module], lazy, members

    def rows(self, text: str) -> None:
        """Adds toys."""
        tests: list[str] = []
        for row in re.split(r"\n+(?=\S)", text.strip()):
            if row.startswith("#"):
                continue
            if ": " not in row:
                tests = row.split()
            else:
                place, _, code = row.partition(": ")
                name, _, hook = place.partition(".")
                is_hook = inspect.isfunction(getattr(self._base, hook))
                value = self._compiled(hook, code) if is_hook else eval(code, vars(self._module))
                self.toy(name, *tests, **{hook: value})

    def toy(self, name: str, *tests: str, **members: Any) -> None:
        """Adds a toy, or more of its members. A hook is a function ``(self, right, *arguments)``."""
        if name not in self:
            seen = property(lambda self: vars(self).setdefault("_seen", defaultdict(list)))
            backend = type(name, (self._base,), {"seen": seen, "__module__": self._module.__name__})
            setattr(self._module, name, backend)  # where other processes look for it
            self[name] = Run(backend, dict.fromkeys(tests, "fail"), members=self.members)
        for member, value in members.items():
            right = getattr(self._base, member, None)
            setattr(self[name].backend, member, _hook(right, value) if inspect.isfunction(right) else value)

    def _compiled(self, hook: str, code: str) -> Any:
        before, *rest = re.split(r"(?<!\S)-(>|! \w+:)", code)
        parts = dict(zip(rest[::2], rest[1::2], strict=True))
        parameters = list(inspect.signature(getattr(self._base, hook)).parameters.values())[1:]
        named = [f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in parameters]
        declared = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
        lines = [f"def {hook}(self, right, {declared}):", "    seen = self.seen"]
        lines += ["    request = shallow(request)"] if "request" in named else []
        lines += [
            self._part(before),
            "    try:",
            f"        reply = right({', '.join(named)})",
            "    except ():",
            "        pass",
        ]
        for kind, part in parts.items():
            if kind != ">":
                lines += [f"    except {kind[2:-1]} as error:", indent(self._part(part), "    "), "        raise"]
        lines += [self._part(parts.get(">", "")), "    return reply"]
        space = {**vars(errors), **vars(self._module), "shallow": copy}
        exec("\n".join(lines), space)
        return space[hook]

    def _part(self, code: str) -> str:
        """The lines of a part. With a partition that is not there, nothing is done."""
        text = re.sub(r"^ {4}", "", code.strip(), flags=re.MULTILINE) or "pass"
        found = [f"{name} = {value}\n" for name, value in self._lazy.items() if re.search(rf"(?<!\.)\b{name}\b", text)]
        if re.search(r"(?<!\.)\bpartition\.", text):
            text = f"if partition is not None:\n{indent(text, '    ')}"
        return indent("".join(found) + text, "    ")


def _hook(right: Any, change: Any) -> Any:
    return wraps(right)(lambda self, *arguments, **named: change(self, partial(right, self), *arguments, **named))
