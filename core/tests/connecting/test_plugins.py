"""Installed plugins: what is found, and what is said of one that misbehaves."""

from __future__ import annotations

import logging
import shutil
import sys

import pytest

import dataplane_core.entry_points
from dataplane_core import connect
from dataplane_core.entry_points import find_plugins
from dataplane_core.errors import PluginError, PluginImportError, PluginSignatureError
from dataplane_core.middleware import Middleware
from dataplane_core.spec import hookimpl


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


def test_an_import_that_takes_long_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dataplane_core.entry_points, "_LONG_S", 0.01)
    monkeypatch.syspath_prepend(tmp_path)
    waits = "import logging, time\nwhile not logging.getLogger('dataplane_core.entry_points').told: time.sleep(0.01)\n"
    (tmp_path / "slow_plugin.py").write_text(waits)
    install(tmp_path, "slow = slow_plugin:Mine", "middleware")
    log = logging.getLogger("dataplane_core.entry_points")
    monkeypatch.setattr(log, "told", [], raising=False)
    monkeypatch.setattr(log, "filter", lambda record: log.told.append(record) or True)
    with pytest.raises(PluginImportError, match="slow_plugin"):
        connect({"backend": "noop", "middleware": ["slow"]})
    assert "middleware 'slow' (acme 1.0) is still being imported" in caplog.text


def test_a_plugin_that_is_installed_or_removed_meanwhile_is_noticed(tmp_path, monkeypatch):
    """What is installed is read once, and again after a change."""
    monkeypatch.syspath_prepend(tmp_path)

    def is_found():
        return "of-this-test" in [each.name for each in find_plugins()]

    assert not is_found()
    info = install(tmp_path, "of-this-test = acme_late:Mine")
    assert is_found()
    shutil.rmtree(info)
    assert not is_found()
