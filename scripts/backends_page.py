"""Writes docs/backends.md: what each installed backend declares, and what the conformance kit proved of it.

python scripts/backends_page.py            runs every backend's tests/test_conformance.py (minutes)
python scripts/backends_page.py R.json...  takes reports that --dataplane-json wrote instead
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dataplane_core.plugins import find_plugins, load_backend
from dataplane_core.spec import GUARANTEES, OPERATIONS, Capability

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "backends.md"

HEAD = """# Backends

Written by `make backends-page`; not by hand. What a backend declares is read from its class. What is proven comes from
the conformance kit, run by each backend's own `tests/test_conformance.py`; on your machine, `dataplane conformance
NAME` prints the same report, less what needs a second way into the engine. To choose between them, see
[operating](operating.md#choose-a-backend); for their speed, [performance](performance.md).
"""


def installed() -> list[str]:
    """Names of the backends of this workspace that are installed: the reference first."""
    names = {record.name for record in find_plugins()} & set(_test_files())
    return sorted(names, key=lambda name: (load_backend(name).scope != "process", name))


def _test_files() -> dict[str, Path]:
    """Backend -> its file of conformance tests; a plugin's folder has the name of its entry point."""
    return {path.parents[1].name: path for path in sorted(ROOT.glob("plugins/*/tests/test_conformance.py"))}


def declared(names: Sequence[str]) -> str:
    """What the classes say, side by side. Needs no run."""
    classes = {name: load_backend(name) for name in names}
    packages = {record.name: record.distribution for record in find_plugins()}
    rows = [
        ["distribution", *(f"{packages[name]} {version(packages[name])}" for name in names)],
        ["clients may be in", *({"process": "one process"}.get(c.scope, f"one {c.scope}") for c in classes.values())],
        ["wire", *(cls.wire.describe() for cls in classes.values())],
    ]
    for capability in [each for kind in (OPERATIONS, GUARANTEES) for each in Capability if each in kind]:
        rows.append([f"`{capability}`", *("yes" if capability in c.capabilities else "no" for c in classes.values())])
    reasons = [
        f"- {name}, `{what}`: {why}."
        for name, cls in classes.items()
        for what, why in sorted((str(what), why) for what, why in cls.why_not_declared.items())
    ]
    lines = ["## Declared", "", *_table(["", *names], rows)]
    if reasons:
        lines += ["", "What is not declared is refused, and has its reason:", "", *reasons]
    return "\n".join([*lines, ""])


def proven(reports: Sequence[dict[str, Any]]) -> str:
    """What the kit found, side by side and one by one."""
    names = [report["backend"] for report in reports]
    chapters = list(dict.fromkeys(test["chapter"] for report in reports for test in report["tests"]))
    counts = {
        report["backend"]: Counter((test["chapter"], test["outcome"]) for test in report["tests"]) for report in reports
    }
    rows = [[chapter, *(_of(counts[name], chapter) for name in names)] for chapter in chapters]
    outcomes = {"pass": "passed", "fail": "failed"}
    total = [
        [f"**{outcomes.get(each, each)}**", *(str(report["counts"][each]) for report in reports)]
        for each in reports[0]["counts"]
    ]
    lines = ["## Proven", "", "Tests passed per chapter of the kit; a dash where nothing of it ran.", ""]
    lines += [*_table(["chapter", *names], [*rows, *total], align="---:"), ""]
    for report in reports:
        lines += [f"### {report['backend']}", "", f"`{report['badge']}`", "", *_findings(report)]
    return "\n".join(lines).rstrip() + "\n"


def _of(counts: Counter[tuple[str, str]], chapter: str) -> str:
    passed, others = counts[chapter, "pass"], []
    for outcome in ("fail", "deviation", "not run"):
        if counts[chapter, outcome]:
            others.append(f"{counts[chapter, outcome]} {outcome}")
    return ", ".join([str(passed), *others]) if passed or others else "-"


def _findings(report: dict[str, Any]) -> list[str]:
    verdicts = [row for row in report["capabilities"] if row["declared"]]
    lines = ["- Proven: " + ", ".join(row["name"] for row in verdicts if row["verdict"] == "proven") + "."]
    lines += [f"- {row['name']}: {row['verdict']}." for row in verdicts if row["verdict"] != "proven"]
    undeclared = [row["name"] for row in report["capabilities"] if not row["declared"]]
    if undeclared:
        lines.append(f"- Not declared, and tested to be refused where it is an operation: {', '.join(undeclared)}.")
    deviations = [test for test in report["tests"] if test["outcome"] == "deviation"]
    lines += [f"- Deviation, `{test['name']}`: {test['reason']}." for test in deviations]
    if not deviations:
        lines.append("- Deviations: none.")
    reasons = Counter(test["reason"] for test in report["tests"] if test["outcome"] == "not run")
    lines += [f"- Not run, {count}: {reason}." for reason, count in reasons.items()]
    copies = {what: why for what, why in report["why_not_declared"].items() if " copies in " in what}
    lines += [f"- {what}: {why}." for what, why in copies.items()]
    return [*lines, ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> list[str]:
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """Runs the kit against one backend; its reports."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", "not ThroughAsyncio", str(_test_files()[name])]
    done = subprocess.run([*command, "-m", "not long", "--dataplane-json", str(path)], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"the kit fails on {name}: the page is not written.")
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The reports in a file."""
    reports: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return reports


def main(files: Sequence[str]) -> None:
    """Writes the page."""
    names = installed()
    if files:
        found = [report for file in files for report in read(Path(file))]
    else:
        with tempfile.TemporaryDirectory(prefix="dataplane-page-") as folder:
            found = [report for name in names for report in run(name, Path(folder))]
    reports = {report["backend"]: report for report in found}
    missing = [name for name in names if name not in reports]
    if missing:
        sys.exit(f"no report of {', '.join(missing)}: the page is not written.")
    page = "\n".join([HEAD, declared(names), proven([reports[name] for name in names])])
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
