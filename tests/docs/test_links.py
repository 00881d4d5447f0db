"""Links between the pages lead somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(p for top in ("docs", "core", "plugins", "integrations", "examples") for p in ROOT.glob(f"{top}/**/*.md")),
]


def _anchors(page: Path) -> set[str]:
    """Of its headings, as code hosts make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in _anchors(found), f"{page.name} links {target}#{anchor}"


def test_what_the_readme_installs_is_there() -> None:
    named = re.findall(r"pip install ((?:\./[\w/]+ ?)+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    folders = [folder for line in named for folder in line.split()]
    assert len(folders) >= 4
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)
