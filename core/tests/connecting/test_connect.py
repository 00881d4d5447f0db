"""Connecting: what is imported, found by its name, and checked."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

import pytest

from dataplane_core import DataPlaneConfig, RowStoreBackend, connect
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClientClosedError,
    InvalidRequestError,
    OperationTimeoutError,
    PluginError,
    PluginSignatureError,
)
from dataplane_core.middleware import Middleware
from dataplane_core.spec import Capability, Scope, WireFormat, hookimpl
from dataplane_testkit import backend_of


class Door(RowStoreBackend):
    """A backend of which only the door counts: what an attach finds, try by try, is written down in advance."""

    scope = Scope.CLUSTER
    attach: ClassVar[list[Exception | None]] = []  # each test sets its own
    bootstrap: ClassVar[Exception | None] = None
    tries: ClassVar[list[tuple[bool, bool, float]]] = []

    def start(self, *, bootstrap, deadline):
        self.tries.append((bootstrap, self.exclusive, self.attach_wait_s))
        found = type(self).bootstrap if bootstrap else self.attach.pop(0)
        if found is not None:
            raise found

    def put_rows(self, handles, buffer, offsets, deadline): ...

    def get_rows(self, handles, deadline): ...

    def delete_rows(self, handles, deadline): ...


NOTHING = BackendUnavailableError("nothing there")
FASTER = AlreadyRunningError("another was faster", retryable=True)


@pytest.fixture
def door(monkeypatch):
    """Connects to a `Door`; says whether it bootstrapped, and what was tried."""

    def opened(bootstrap, attach=(), at_bootstrap=None, **config):
        monkeypatch.setattr(Door, "attach", list(attach))
        monkeypatch.setattr(Door, "bootstrap", at_bootstrap)
        monkeypatch.setattr(Door, "tries", [])
        with connect_backend(Door, DataPlaneConfig(backend="door", **config), bootstrap=bootstrap) as client:
            return client.bootstrapped

    return opened


@pytest.mark.parametrize("num_ledgers", [1, 2])
def test_options_choose_the_class_of_the_store(num_ledgers):
    class Small(Door):
        wire = WireFormat(bytes=True)
        capabilities = Door.capabilities - {Capability.WAKES}

        @classmethod
        def isolated_options(cls, options, tag):
            return {**options, "capacity_bytes": options["capacity_bytes"] + int(tag[0])}

    class Large(Door):
        @classmethod
        def class_for(cls, config):
            return Small if config.capacity_bytes else cls

    small = DataPlaneConfig(backend="door", options={"capacity_bytes": 9}, num_ledgers=num_ledgers)
    with connect_backend(Large, small) as client:
        assert client.capabilities == Small.capabilities
        assert type(backend_of(client)).wire == Small.wire
    with connect_backend(Large, DataPlaneConfig(backend="door")) as client:
        assert client.capabilities == Large.capabilities


@pytest.mark.parametrize("value", [None, 1, 0, "yes", "AUTO", "", "true", [True]])
def test_other_values_of_bootstrap_are_refused(value):
    with pytest.raises(InvalidRequestError, match="bootstrap must be True, False or 'auto', got"):
        connect({"backend": "noop"}, bootstrap=value)


def test_auto_attaches_to_what_runs_or_bootstraps_alone_where_nothing_does(door):
    assert not door("auto", [None])
    assert Door.tries == [(False, False, 0.0)]
    assert door("auto", [NOTHING])
    assert [each[:2] for each in Door.tries] == [(False, False), (True, True)]


def test_auto_attaches_to_whoever_was_faster(door):
    for wait_s in (10, 0):
        assert not door("auto", [NOTHING, NOTHING, None], FASTER, attach_wait_s=wait_s)
        assert [each[0] for each in Door.tries] == [False, True, False, True, False]


def test_auto_says_why_it_can_neither_attach_nor_bootstrap(door):
    with pytest.raises(AlreadyRunningError, match="its controller is dead") as caught:
        door("auto", [NOTHING] * 99, AlreadyRunningError("its controller is dead"))
    assert caught.value.__cause__ is NOTHING
    assert len(Door.tries) == 2


def test_auto_gives_up_on_what_runs_and_cannot_be_attached_to(door):
    with pytest.raises(BackendUnavailableError, match="nothing there") as caught:
        door("auto", [NOTHING] * 99, FASTER, op_timeout_s=0.3)
    assert caught.value.__cause__ is FASTER


def test_an_attach_waits_for_a_late_owner(door):
    assert not door(False, [NOTHING, NOTHING, NOTHING, None])
    waits = [each[2] for each in Door.tries]
    assert sorted(waits, reverse=True) == waits
    assert 9 < waits[0] <= 10, "the default, for a backend that waits by itself"


def test_an_attach_waits_no_longer_than_it_may(door):
    for wait in ({"attach_wait_s": 0.2}, {"op_timeout_s": 0.2}):
        with pytest.raises(BackendUnavailableError, match="nothing there"):
            door(False, [NOTHING] * 99, **wait)
    with pytest.raises(BackendUnavailableError, match="nothing there"):
        door(False, [NOTHING] * 99, attach_wait_s=0)
    assert len(Door.tries) == 1


def test_what_waiting_does_not_mend_is_raised_at_once(door):
    for error in (BackendUnavailableError("broken", retryable=False), OperationTimeoutError("it does not answer")):
        for bootstrap in (False, "auto"):  # which does not bootstrap beside what it may not enter
            with pytest.raises(type(error), match=error.message):
                door(bootstrap, [error])
            assert len(Door.tries) == 1


# --- forks ------------------------------------------------------------------------------------------------------------


class Forked(Door):
    opens_in_forks = False


@pytest.mark.parametrize(
    ("cls", "hint"),
    [(Door, r"connect\(config, bootstrap=False\) in this process"), (Forked, "multiprocessing_context='spawn'")],
)
def test_the_hint_of_a_fork_is_true_for_the_backend(cls, hint, monkeypatch):
    monkeypatch.setattr(Door, "bootstrap", None)
    monkeypatch.setattr(Door, "attach", [None])
    config = DataPlaneConfig(backend="door")
    with connect_backend(cls, config) as client, monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: client._connection.pid + 1)
        with pytest.raises(ClientClosedError, match=hint):
            client.clear_samples(None, "p")
        if cls.opens_in_forks:
            assert not connect_backend(cls, config, bootstrap=False)._connection.closed
        else:
            with pytest.raises(BackendUnavailableError, match=hint) as refused:
                connect_backend(cls, config, bootstrap=False)
            assert not refused.value.retryable
    with monkeypatch.context() as fork:  # of a process that has closed its client
        fork.setattr(os, "getpid", lambda: client._connection.pid + 1)
        monkeypatch.setattr(Door, "attach", [None])
        connect_backend(cls, config, bootstrap=False).close()


# --- plugins ----------------------------------------------------------------------------------------------------------


def install(folder, point, group="backends"):
    """Makes a distribution of one entry point, in a folder of ``sys.path``."""
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dataplane.{group}]\n{point}\n")
    return info


#: What the module of a middleware has, its entry point, and what the error must say besides plugin and distribution.
BROKEN = {
    "ends the program": ("import sys; sys.exit()", "bad = bad_plugin:Mine", "cannot be imported: SystemExit"),
    "no value": ("", "bad =", "its entry point is ''"),
    "needs arguments": (
        "class Mine(Middleware):\n    def __init__(self, path): pass",
        "bad = bad_plugin:Mine",
        "cannot be made: TypeError",
    ),
    "ends the program later": (
        "class Mine(Middleware):\n    def __init__(self): raise SystemExit(0)",
        "bad = bad_plugin:Mine",
        "cannot be made: SystemExit",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_plugin_that_misbehaves_is_named(tmp_path, monkeypatch, kind):
    code, point, says = BROKEN[kind]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_plugin", raising=False)
    (tmp_path / "bad_plugin.py").write_text(f"from dataplane_core.middleware import Middleware\n{code}\n")
    install(tmp_path, point, "middleware")
    with pytest.raises(PluginError, match=r"middleware 'bad' \(acme 1\.0\)") as caught:
        connect({"backend": "noop", "middleware": ["bad"]})
    assert says in str(caught.value)


def test_a_hook_that_is_no_generator_is_named():
    class Plain(Middleware):
        @hookimpl(wrapper=True)
        def put_samples(self, request):
            return request

    with pytest.raises(PluginSignatureError, match="middleware 'Plain', hook 'put_samples': is no generator"):
        connect({"backend": "noop", "middleware": [Plain()]})
