"""The pages: links lead to a file and a heading in it, tables are whole, and what is said of the code is so."""

import importlib
import re
import runpy
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("docs", "core", "testkit", "tools", "plugins", "integrations", "compat", "examples")
PAGES = [*ROOT.glob("*.md"), *(p for top in TOPS for p in ROOT.glob(f"{top}/**/*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def _prose(page):
    """Its text without blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def _anchors(page):
    """Of its headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
            found = (page.parent / target).resolve() if target else page
            if not found.exists() or (anchor and anchor not in _anchors(found)):
                wrong.append(f"{page.relative_to(ROOT)} links {target}#{anchor}")
    assert not wrong, "\n".join(wrong)


def test_rows_of_tables_follow_a_head():
    """A blank line within a table turns the rows after it into text."""
    wrong = [
        f"{page.relative_to(ROOT)}: no head above {table[:60]}"
        for page in PAGES
        for table in re.findall(r"(?:^\|.*\n)+", _prose(page), re.MULTILINE)
        if not re.match(r".*\n[|: -]+\n", table)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_diagram_is_text_or_a_picture():
    """Mermaid would be loaded from another host, so a page of the site would show its source."""
    assert [str(page) for page in PAGES if "```mermaid" in page.read_text(encoding="utf-8")] == []


def test_what_the_readme_installs_is_there():
    named = re.findall(r"pip install ((?:\./[\w/]+ ?)+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    folders = [folder for line in named for folder in line.split()]
    assert len(folders) >= 4
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)


def test_the_table_of_formats_says_the_numbers_of_the_code():
    page = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (\d+) \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(rows) == 10
    for number, where in rows:
        module = importlib.import_module(where.removesuffix(".CONTRACT_VERSION"))
        assert {value for name, value in vars(module).items() if name.endswith("VERSION")} == {int(number)}, where


def test_the_page_of_backends_declares_what_the_classes_declare_and_reports_no_failure():
    script = runpy.run_path(str(ROOT / "scripts" / "backends_page.py"))
    names, page = script["installed"](), script["PAGE"].read_text(encoding="utf-8")
    assert "noop" in names
    assert script["declared"](names) in page, "run make backends-page"
    for name in names:
        badge = next(line for line in page.splitlines() if line.startswith(f"`dataplane contract 1 | {name}:"))
        assert ", 0 failed, " in badge


def _defined(folder):
    return {name for path in folder.rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}


def test_every_test_that_a_promise_names_exists_and_the_troubles_are_numbered_by_their_rank():
    named = re.findall(r"`(test_\w+)`(?: \(([\w/]+)\))?", ARCHITECTURE)
    assert len(named) > 20
    kit = _defined(ROOT / "testkit" / "src" / "dataplane_testkit")
    assert [name for name, folder in named if name not in (_defined(ROOT / folder) if folder else kit)] == []
    numbers = re.findall(r"^\| (\d+) \|", ARCHITECTURE, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
