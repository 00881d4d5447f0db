"""The page of backends says what the classes that are installed declare."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "backends_page.py"


def _script():
    spec = importlib.util.spec_from_file_location("backends_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_declares_what_the_classes_declare():
    script = _script()
    names = script.installed()
    assert "noop" in names
    assert script.declared(names) in script.PAGE.read_text(encoding="utf-8"), "run make backends-page"


def test_every_backend_is_reported_and_none_fails():
    script = _script()
    page = script.PAGE.read_text(encoding="utf-8")
    for name in script.installed():
        badge = next(line for line in page.splitlines() if line.startswith(f"`dataplane contract 1 | {name}:"))
        assert ", 0 failed, " in badge
