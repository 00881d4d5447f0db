"""The pages that scripts write say what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BACKENDS = _script("backends_page")
NAMES = BACKENDS.installed()


def test_the_page_declares_what_the_classes_declare():
    assert "noop" in NAMES
    assert BACKENDS.declared(NAMES) in BACKENDS.PAGE.read_text(encoding="utf-8"), "run make backends-page"


def test_every_backend_is_reported_and_none_fails():
    page = BACKENDS.PAGE.read_text(encoding="utf-8")
    for name in NAMES:
        badge = next(line for line in page.splitlines() if line.startswith(f"`dataplane contract 1 | {name}:"))
        assert ", 0 failed, " in badge
