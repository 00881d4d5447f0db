"""Connecting: what is imported, found by its name, and checked."""

from __future__ import annotations

import json
import os
import sys
from typing import ClassVar

import pytest

from dataplane_core import DataPlaneConfig, RowStoreBackend, connect
from dataplane_core.cli import _examination, main
from dataplane_core.connecting import connect_backend
from dataplane_core.entry_points import find_plugins
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClientClosedError,
    InvalidRequestError,
    OperationTimeoutError,
    PluginError,
    PluginSignatureError,
)
from dataplane_core.spec import Capability, Scope, WireFormat
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
        for call in (lambda: client.clear_samples(None, "p"), lambda: client.mark_step(1)):
            with pytest.raises(ClientClosedError, match=hint):
                call()
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

GOOD = """
from dataplane_core import Backend

class Mine(Backend):
    def register_partition(self, request): ...
    def describe_partition(self, request): ...
    def put_samples(self, request): ...
    def get_samples(self, request): ...
    def clear_samples(self, request): ...
"""
NO_LIBRARY = 'import ctypes\nctypes.CDLL("libacme_fabric.so.7")\n'


def taking(hook):
    return GOOD.replace("def get_samples(self, request): ...", hook)


#: Distribution -> the name of its backend, and its module.
DISTRIBUTIONS = {
    "acme-store": ("mine", GOOD),
    "acme-other": ("other", GOOD),
    "acme-twice": ("twice", GOOD),
    "rival-twice": ("twice", GOOD),
    "acme-library": ("no_library", NO_LIBRARY),
    "acme-misspelt": ("misspelt", GOOD.replace("def put_samples", "def put_sample")),
    "acme-extra": ("misspelt_extra", GOOD + "    def list_sample(self, request): ...\n"),
    "acme-newer": ("newer", GOOD + "    contract_version = 99\n"),
    "acme-none": ("no_backend", "Mine = dict\n"),
    "acme-default": ("default", taking("def get_samples(self, request, verbose=False): ...")),
    "acme-request-default": ("request_default", taking("def get_samples(self, request=None): ...")),
    "acme-star": ("star", taking("def get_samples(self, *args): ...")),
    "acme-keyword": ("keyword", taking("def get_samples(self, *, request): ...")),
    "acme-other-name": ("other_name", taking("def get_samples(self, req): ...")),
    "acme-coroutine": ("coroutine", taking("async def get_samples(self, request): ...")),
}
#: The name that is asked for -> the error, and what its text names.
REFUSED = {
    "twice": ("DuplicatePluginError", ["acme-twice", "rival-twice"]),
    "no_library": ("PluginImportError", ["libacme_fabric.so.7: cannot open shared object file", "acme-library 1.0"]),
    "misspelt": ("PluginSignatureError", ["does not implement 'put_samples'", "'put_sample'"]),
    "misspelt_extra": ("PluginSignatureError", ["'list_sample'", "'list_samples'"]),
    "newer": ("PluginSignatureError", ["contract version 99", "pip install --upgrade dataplane-core"]),
    "no_backend": ("PluginSignatureError", ["Expected a subclass of dataplane_core.Backend"]),
    "default": ("PluginSignatureError", ["hook 'get_samples'", "verbose="]),
    "request_default": ("PluginSignatureError", ["hook 'get_samples'", "request="]),
    "star": ("PluginSignatureError", ["hook 'get_samples'", "*args"]),
    "keyword": ("PluginSignatureError", ["hook 'get_samples'", "*, request"]),
    "other_name": ("PluginSignatureError", ["hook 'get_samples'", "takes (self, req)"]),
    "coroutine": ("PluginSignatureError", ["hook 'get_samples'", "is async"]),
    "mime": ("UnknownBackendError", ["Did you mean 'mine'?", "noop"]),
    "redis_stor": ("UnknownBackendError", ["Did you mean 'redis_store'?"]),
}


def install(folder, name, point, source, group="backends"):
    """Makes a distribution of one entry point and its module, in a folder of ``sys.path``."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dataplane.{group}]\n{point}\n")
    (folder / f"{module_of(name)}.py").write_text(source)


def module_of(distribution):
    return f"plug_{distribution.replace('-', '_')}"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which plugins are found, of which none has been imported."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.startswith("plug_")]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


@pytest.fixture
def distributions(site):
    for name, (backend, source) in DISTRIBUTIONS.items():
        install(site, name, f"{backend} = {module_of(name)}:Mine", source)


def test_an_installed_backend_connects_by_name_and_one_that_is_none_is_refused_by_what_it_lacks(distributions):
    for number, (name, (error, words)) in enumerate(REFUSED.items()):
        with pytest.raises(PluginError) as refused:
            connect({"backend": name})
        assert type(refused.value).__name__ == error, name
        assert [word for word in words if word not in str(refused.value)] == [], refused.value
        if not number:
            connect({"backend": "mine"}).close()
            assert [module for module in sys.modules if module.startswith("plug_")] == ["plug_acme_store"]
    assert {("mine", "acme-store"), ("other", "acme-other")} <= {(p.name, p.distribution) for p in find_plugins()}


def test_the_doctor_names_the_library_that_a_backend_lacks_and_what_brings_it(distributions, monkeypatch, capsys):
    monkeypatch.setattr(_examination, "ask", lambda function, **asked: getattr(_examination, function)(**asked))
    assert main(["doctor", "no_library", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["distributions"] == ["acme-library 1.0"]
    (finding,) = report["findings"]
    assert "libacme_fabric.so.7: cannot open shared object file" in finding["what"]
    assert "apt-file search libacme_fabric.so.7" in finding["hint"]


MINE = "class Mine(Middleware):\n    "
WRAPS = f"{MINE}@hookimpl(wrapper=True)\n    def "
#: What the module of a middleware has, if its entry point names one, and what the error must say.
BROKEN = {
    "ends the program": ("import sys; sys.exit()", "cannot be imported: SystemExit"),
    "no value": (None, "its entry point is ''"),
    "needs arguments": (f"{MINE}def __init__(self, path): pass", "cannot be made: TypeError"),
    "ends the program later": (f"{MINE}def __init__(self): raise SystemExit(0)", "cannot be made: SystemExit"),
}
#: The same of one with a hook that is none. Then the error is a PluginSignatureError.
WRONG_HOOKS = {
    "not marked": (f"{MINE}def put_samples(self, request): ...", "'put_samples': is not marked"),
    "no wrapper": (f"{MINE}@hookimpl\n    def put_samples(self, request): ...", "@hookimpl(wrapper=True)"),
    "no generator": (f"{WRAPS}put_samples(self, request): ...", "'put_samples': is no generator"),
    "misspelt": (f"{WRAPS}put_sample(self, request): yield", "Did you mean 'put_samples'"),
    "another argument": (f"{WRAPS}put_samples(self, req): yield", "takes (self, req)"),
}


@pytest.mark.parametrize("kind", BROKEN | WRONG_HOOKS)
def test_a_plugin_that_misbehaves_is_named(site, kind):
    code, says = (BROKEN | WRONG_HOOKS)[kind]
    error, named = PluginError, r"'bad' \(acme 1\.0\)"
    if kind in WRONG_HOOKS:
        error, named = PluginSignatureError, "'Mine', hook"
    source = f"from dataplane_core.middleware import Middleware\nfrom dataplane_core.spec import hookimpl\n{code}\n"
    install(site, "acme", "bad =" if code is None else "bad = plug_acme:Mine", source, "middleware")
    with pytest.raises(error, match=f"middleware {named}") as caught:
        connect({"backend": "noop", "middleware": ["bad"]})
    assert says in str(caught.value)
