"""How a toy is written: a row of a table, with what each of its hooks does to a request, a reply or an error."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from dataplane_core.ledger import commands

#: The test that must fail for a toy that is wrong in its answers: the kit's machine.
HISTORY = "test_random_histories_agree_with_the_ledger"


class Run(NamedTuple):
    """Tests of the kit on a backend: its own, or those that `selection` chooses, as pytest's ``-k``.

    Attributes:
        backend: The class of the backend. Its docstring says what is wrong with it, or rare.
        tests: The tests -> their outcomes in the report.
        selection: Chooses more tests, of which none may fail. None: no more.
        least: How many must pass.
        members: What else the class of the tests has, such as ``options``.
    """

    backend: type
    tests: Mapping[str, str]
    selection: str | None = None
    least: int = 0
    members: Mapping[str, Any] = {}


class Table(dict[str, Run]):
    """Name -> broken backend: the right one, `base`, but for some hooks.

    A hook is a function ``(self, right, *arguments)``; ``right`` is the hook of the right backend. It may keep what it
    saw in ``self.seen[...]``, a list.
    """

    def __init__(self, base: type, module: str, **members: Any) -> None:
        super().__init__()
        self._base, self._module, self.members = base, sys.modules[module], members

    def row(self, name: str, report: str, fails: str = HISTORY, **hooks: Any) -> None:
        """Adds a toy: what is wrong as a bug report, the tests that it must fail, its hooks and other members."""
        seen = property(lambda self: vars(self).setdefault("_seen", defaultdict(list)))
        backend = type(name, (self._base,), {"seen": seen, "__module__": self._module.__name__, "__doc__": report})
        setattr(self._module, name, backend)  # where other processes look for it
        self[name] = Run(backend, dict.fromkeys(fails.split(), "fail"), members=self.members)
        for member, value in hooks.items():
            self._set(name, member, value)

    def __call__(self, report: str, fails: str = HISTORY, **others: Any) -> Any:
        """Decorates a hook. Its name is that of the toy; the name of its parameter `right` says which hook it is."""

        def add(change: Any) -> Any:
            name = "".join(word[0].upper() + word[1:] for word in change.__name__.split("_"))
            self.row(name, report, fails, **others)
            return self.also(name)(change)

        return add

    def also(self, name: str) -> Any:
        """Decorates a further hook of a toy."""

        def add(change: Any) -> Any:
            self._set(name, list(inspect.signature(change).parameters)[1], change)
            return change

        return add

    def _set(self, name: str, member: str, value: Any) -> None:
        right = getattr(self._base, member, None)
        setattr(self[name].backend, member, _hook(right, value) if inspect.isfunction(right) else value)


def _hook(right, change):
    return wraps(right)(lambda self, *arguments, **named: change(self, partial(right, self), *arguments, **named))


# --- what hooks do ----------------------------------------------------------------------------------------------------


def asks(**changes):
    """Changes the request: name -> value, or function of the request."""
    return lambda self, right, request: right(changed(request, changes))


def replies(**changes):
    """Changes the reply: name -> value, or function of the reply."""
    return lambda self, right, request: changed(right(request), changes)


def changed(thing, changes):
    return replace(thing, **{name: new(thing) if callable(new) else new for name, new in changes.items()})


def then(do):
    """Calls the right hook, then ``do(self, request, reply)``."""

    def hook(self, right, request):
        reply = right(request)
        do(self, request, reply)
        return reply

    return hook


def notes(what):
    """Keeps ``what(*arguments)``, a list, in ``self.seen["noted"]`` before the call."""

    def hook(self, right, *arguments):
        self.seen["noted"] += what(*arguments)
        return right(*arguments)

    return hook


def numbers(**texts):
    """Puts the number of the call into a value of the request."""

    def hook(self, right, request):
        self.seen["numbered"].append(request)
        count = len(self.seen["numbered"])
        return right(replace(request, **{name: text.format(count) for name, text in texts.items()}))

    return hook


def rows(change):
    """Changes the pairs of sample id and tags in what a claim or a listing gives: ``change(self, rows)``."""

    def hook(self, right, request):
        reply = right(request)
        pairs = change(self, list(zip(reply.sample_ids, reply.tags, strict=True)))
        return replace(reply, sample_ids=[each for each, _ in pairs], tags=[tags for _, tags in pairs])

    return hook


def settles(self, right, request):
    """Says that all is done, and does nothing."""
    return len(request.sample_ids)


def catches(kind, then):
    """Replies with ``then(self, request, error)`` where the right hook raises; raises that, if it is an error."""

    def hook(self, right, request):
        try:
            return right(request)
        except kind as error:
            reply = then(self, request, error) or error
            if reply is error:
                raise
            if isinstance(reply, Exception):
                raise reply from error
            return reply

    return hook


def reads(sort, change):
    """Changes the columns of a sort in what a read gives: a dtype of dense tensors, "dense", "ragged" or "objects"."""
    return replies(columns=lambda reply: {name: change(c) if _is(sort, c) else c for name, c in reply.columns.items()})


def _is(sort, column):
    if not isinstance(column, torch.Tensor):
        return sort == "objects" and isinstance(column, list)
    return sort == "ragged" if column.is_nested else sort in ("dense", column.dtype)


def reads_as(sort, change, **spec):
    """Changes the columns of a dtype or a rank in what a read gives, and says so in their specs."""

    def hook(self, right, request):
        reply = right(request)
        columns, specs = dict(reply.columns), dict(reply.specs)
        for name, each in specs.items():
            if each.kind == "tensor" and sort in (each.dtype, each.rank) and not columns[name].is_nested:
                columns[name], specs[name] = change(columns[name]), replace(each, **spec)
        return replace(reply, columns=columns, specs=specs)

    return hook


def counts(sizes):
    """Reserves other room for a put: ``sizes(write)`` are the bytes of its rows."""

    def call_ledger(self, right, deadline, command):
        if isinstance(command, commands.BeginPut):
            command = replace(command, writes=[replace(each, row_bytes=sizes(each)) for each in command.writes])
        return right(deadline, command)

    return call_ledger
