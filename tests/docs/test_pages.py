"""Links between the pages lead to a file, and to a heading in it. Tables are whole."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("docs", "core", "testkit", "tools", "plugins", "integrations", "compat", "examples")
PAGES = [
    *ROOT.glob("*.md"),
    *(p for top in TOPS for p in ROOT.glob(f"{top}/**/*.md")),
]


def _prose(page: Path) -> str:
    """Its text without blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def _anchors(page: Path) -> set[str]:
    """Of its headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
            found = (page.parent / target).resolve() if target else page
            if not found.exists() or (anchor and anchor not in _anchors(found)):
                wrong.append(f"{page.relative_to(ROOT)} links {target}#{anchor}")
    assert not wrong, "\n".join(wrong)


def test_rows_of_tables_follow_a_head() -> None:
    """A blank line within a table turns the rows after it into text."""
    wrong = [
        f"{page.relative_to(ROOT)}: no head above {table[:60]}"
        for page in PAGES
        for table in re.findall(r"(?:^\|.*\n)+", _prose(page), re.MULTILINE)
        if not re.match(r".*\n[|: -]+\n", table)
    ]
    assert not wrong, "\n".join(wrong)


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
