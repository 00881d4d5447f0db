"""Links between the pages lead to a file, and to a heading in it. Tables are whole."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("docs", "core", "testkit", "tools", "plugins", "integrations", "compat", "examples")
PAGES = [
    *ROOT.glob("*.md"),
    *(p for top in TOPS for p in ROOT.glob(f"{top}/**/*.md")),
]


def _prose(page: Path) -> str:
    """Its text without blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Of its headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in _anchors(found), f"{page.name} links {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_tables_follow_a_head(page: Path) -> None:
    """A blank line within a table turns the rows after it into text."""
    for table in re.findall(r"(?:^\|.*\n)+", _prose(page), re.MULTILINE):
        assert re.match(r".*\n[|: -]+\n", table), f"{page.name}: no head above {table[:60]}"


def test_what_the_readme_installs_is_there() -> None:
    named = re.findall(r"pip install ((?:\./[\w/]+ ?)+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    folders = [folder for line in named for folder in line.split()]
    assert len(folders) >= 4
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)


def test_the_page_of_versions_says_the_numbers_of_the_code() -> None:
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (\d+) \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(rows) == 11
    for number, where in rows:
        module = importlib.import_module(where.removesuffix(".CONTRACT_VERSION"))
        assert {value for name, value in vars(module).items() if name.endswith("VERSION")} == {int(number)}, where
