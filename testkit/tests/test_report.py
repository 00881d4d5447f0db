"""The report: verdicts, and what Markdown would take for its own. `test_kit_rules` shows the rest."""

from __future__ import annotations

import pytest

from dataplane_testkit.report import NOT_SELECTED, Report


def report_of(*tests, scope="process"):
    header = {"backend": "toy", "distribution": "toy-dist 1.0", "core_version": "0.1.0", "contract_version": 1}
    declared = {
        "scope": scope,
        "wire": "jagged",
        "declared": ["claims"],
        "why_not_declared": {"durable": "all in memory"},
    }
    names = ("name", "proves", "outcome", "reason")
    rest = {"chapter": "chapter", "duration_s": 0.1, "rule": "a rule", "check_first": "the engine"}
    return Report({**header, **declared}, [dict(zip(names, test, strict=True)) | rest for test in tests])


@pytest.mark.parametrize(
    ("outcomes", "scope", "verdicts", "passed"),
    [
        ("core pass, claims pass", "process", "core proven, claims proven, leases not declared", True),
        ("core pass, core fail, claims deviation", "process", "core failed, claims deviates", False),
        ("core pass, core deviation", "process", "core deviates", True),
        ("core not run, claims not selected", "process", "core not run, claims not run", False),
        ("core pass, core not selected", "process", "core in part", True),
        ("scope_host pass", "cluster", "scope_host proven, core not run", True),
        ("scope_host not declared", "process", "scope_host not declared", False),
    ],
)
def test_verdicts(outcomes, scope, verdicts, passed):
    tests = []
    for row, _, outcome in (each.partition(" ") for each in outcomes.split(", ")):
        reason = NOT_SELECTED if outcome == NOT_SELECTED else "why"
        tests.append(("a", row.replace("_", " "), outcome.replace(NOT_SELECTED, "not run"), reason))
    report = report_of(*tests, scope=scope)
    found = {row["name"].replace(" ", "_"): row["verdict"] for row in report.rows()}
    assert found.items() >= dict(each.split(" ", 1) for each in verdicts.split(", ")).items()
    assert report.passed == passed


def test_markdown_is_escaped_and_text_is_not():
    report = report_of(
        ("a", "core", "fail", "broke | here"),
        ("b", "core", "deviation", "the engine <cannot>"),
        ("c", "core", "not run", "no server"),
        ("d", "core", "not run", "no server"),
    )
    text, markdown = report.to_text(), report.to_markdown()
    assert "- a (chapter): broke | here\n  - the rule: a rule\n  - check first: the engine\n" in text
    assert "- b (chapter): the engine <cannot>\n" in text
    assert "- 2 tests: no server" in text
    assert "broke \\| here" in markdown
    assert "&lt;cannot>" in markdown
    assert "| core | failed | 0 | 1 | 1 | 0 | 2 |" in " ".join(markdown.split())
    badge = "dataplane contract 1 | toy: 0 of 2 declared proven, 0 passed, 1 failed, 1 deviations"
    assert badge in markdown
    assert report.to_dict()["badge"] == badge
