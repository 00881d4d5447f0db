"""The page of promises names tests; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "promises.md"
KIT = ROOT / "testkit" / "src" / "dataplane_testkit"


def _defined(folder: Path) -> set[str]:
    return {name for path in folder.rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+)`(?: \(([\w/]+)\))?", PAGE.read_text())
    assert len(named) > 20
    kit = _defined(KIT)
    missing = [name for name, folder in named if name not in (_defined(ROOT / folder) if folder else kit)]
    assert not missing


def test_the_troubles_are_numbered_by_their_rank() -> None:
    numbers = re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, 27))
