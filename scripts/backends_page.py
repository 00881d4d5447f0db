"""Writes the second half of docs/backends.md: what each installed backend declares, and what the kit proved of it.

python scripts/backends_page.py            runs every backend's test_conformance.py (minutes)
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

from dataplane_core.connecting import load_backend
from dataplane_core.entry_points import find_plugins
from dataplane_core.spec import Capability
from dataplane_core.spec.capabilities import GUARANTEES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "backends.md"

#: What is above this heading is written by hand.
FIRST = "## Declared"


def installed() -> list[str]:
    """Names of the backends of this workspace that are installed: the reference first."""
    names = {record.name for record in find_plugins()} & set(_test_files())
    return sorted(names, key=lambda name: (load_backend(name).scope != "process", name))


def _test_files() -> dict[str, Path]:
    """Backend -> its file of the whole kit: in tests/engines, if tests has only a part of it. A plugin's folder has the
    name of its entry point.
    """
    places = [
        *ROOT.glob("plugins/*/tests/test_conformance.py"),
        *ROOT.glob("plugins/*/tests/engines/test_conformance.py"),
    ]
    return {path.relative_to(ROOT).parts[1]: path for path in places}


def declared(names: Sequence[str]) -> str:
    """What the classes say, side by side. Needs no run."""
    classes = {name: load_backend(name) for name in names}
    packages = {record.name: record.distribution for record in find_plugins()}
    rows = [
        ["distribution", *(f"{packages[name]} {version(packages[name])}" for name in names)],
        ["clients may be in", *({"process": "one process"}.get(c.scope, f"one {c.scope}") for c in classes.values())],
        ["wire", *(cls.wire.describe() for cls in classes.values())],
    ]
    for capability in sorted(Capability, key=lambda capability: capability in GUARANTEES):
        rows.append([f"`{capability}`", *("yes" if capability in c.capabilities else "no" for c in classes.values())])
    reasons = [
        f"- {name}, `{what}`: {why}."
        for name, cls in classes.items()
        for what, why in sorted((str(what), why) for what, why in cls.why_not_declared.items())
    ]
    lines = [FIRST, "", *_table(["", *names], rows)]
    if reasons:
        lines += ["", "What a backend does not declare, and why:", "", *reasons]
    return "\n".join([*lines, ""])


def proven(reports: Sequence[dict[str, Any]]) -> str:
    """What the kit found, side by side and one by one."""
    names = [report["backend"] for report in reports]
    chapters = list(dict.fromkeys(test["chapter"] for report in reports for test in report["tests"]))
    counts = {
        report["backend"]: Counter((test["chapter"], test["outcome"]) for test in report["tests"]) for report in reports
    }
    rows = [[chapter, *(_of(counts[name], chapter) for name in names)] for chapter in chapters]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    outcomes = {"pass": "passed", "fail": "failed"}
    total = [
        [f"**{outcomes.get(each, each)}**", *(str(report["counts"][each]) for report in reports)]
        for each in reports[0]["counts"]
    ]
    said = "Tests passed in each chapter of the kit. A dash: none ran. What is not declared is tested to be refused."
    lines = ["## Proven", "", said, ""]
    lines += [*_table(["chapter", *names], [*rows, *total], align="---:"), ""]
    for report in reports:
        lines += [f"### {report['backend']}", "", f"`{report['badge']}`", *_findings(report), ""]
    return "\n".join(lines).rstrip() + "\n"


def _of(counts: Counter[tuple[str, str]], chapter: str) -> str:
    passed, others = counts[chapter, "pass"], []
    for outcome in ("fail", "deviation", "not run"):
        if counts[chapter, outcome]:
            others.append(f"{counts[chapter, outcome]} {outcome}")
    return ", ".join([str(passed), *others]) if passed or others else "-"


def _findings(report: dict[str, Any]) -> list[str]:
    verdicts = [row for row in report["capabilities"] if row["declared"]]
    lines = [f"- {row['name']}: {row['verdict']}." for row in verdicts if row["verdict"] != "proven"]
    deviations = [test for test in report["tests"] if test["outcome"] == "deviation"]
    lines += [f"- Deviation, `{test['name']}`: {test['reason']}." for test in deviations]
    reasons = Counter(test["reason"] for test in report["tests"] if test["outcome"] == "not run")
    lines += [f"- Not run, {count}: {reason}." for reason, count in reasons.items()]
    copies = {what: why for what, why in report["why_not_declared"].items() if " copies in " in what}
    lines += [f"- {what}: {why}." for what, why in copies.items()]
    return ["", *lines] if lines else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> list[str]:
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """Runs the kit against one backend; its reports."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(_test_files()[name])]
    done = subprocess.run([*command, "--dataplane-json", str(path)], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"the kit fails on {name}: the page is not written.")
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The reports in a file, without those of classes of which no test ran."""
    reports: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [report for report in reports if report["counts"]["pass"] + report["counts"]["fail"]]


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
    by_hand = PAGE.read_text(encoding="utf-8").partition(FIRST)[0]
    generated = "\n".join([declared(names), proven([reports[name] for name in names])])
    PAGE.write_text(by_hand + generated, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
