"""The report: verdicts, and what Markdown would take for its own. `test_kit_rules` shows the rest."""

import pytest

from dataplane_testkit.report import Report

HEADER = {"backend": "toy", "distribution": "toy-dist 1.0", "core_version": "0.1.0", "contract_version": 1}
DECLARED = {"wire": "jagged", "declared": ["claims"], "why_not_declared": {"durable": "all in memory"}}


def report_of(*tests, scope="process"):
    names = ("name", "proves", "outcome", "reason")
    rest = {"chapter": "chapter", "duration_s": 0.1, "rule": "a rule", "check_first": "the engine"}
    return Report(
        {**HEADER, **DECLARED, "scope": scope}, [dict(zip(names, test, strict=True)) | rest for test in tests]
    )


@pytest.mark.parametrize(
    ("row", "outcomes", "scope", "verdict"),
    [
        ("core", ["pass", "pass"], "process", "proven"),
        ("core", ["pass", "fail", "deviation"], "process", "failed"),
        ("core", ["pass", "deviation"], "process", "deviates"),
        ("core", ["not run"], "process", "not run"),
        ("core", ["pass", "not selected"], "process", "in part"),
        ("claims", ["pass"], "process", "proven"),
        ("leases", ["pass"], "process", "not declared"),
        ("scope host", ["pass"], "host", "proven"),
        ("scope host", ["not declared"], "process", "not declared"),
    ],
)
def test_verdicts(row, outcomes, scope, verdict):
    report = report_of(*(("a", row, each.replace("selected", "run"), each) for each in outcomes), scope=scope)
    assert {each["name"]: each["verdict"] for each in report.rows()}[row] == verdict
    assert report.passed == ("pass" in outcomes and "fail" not in outcomes)


def test_markdown_is_escaped_and_text_is_not():
    cannot = [(name, "core", "not run", "no server") for name in "cd"]
    report = report_of(("a", "core", "fail", "broke | here"), ("b", "core", "deviation", "<cannot>"), *cannot)
    text, markdown = report.to_text(), report.to_markdown()
    assert "- a (chapter): broke | here\n  - the rule: a rule\n  - check first: the engine\n" in text
    assert "- b (chapter): <cannot>\n" in text
    assert "- 2 tests: no server" in text
    assert "broke \\| here" in markdown
    assert "&lt;cannot>" in markdown
    assert "| core | failed | 0 | 1 | 1 | 0 | 2 |" in " ".join(markdown.split())
    badge = "dataplane contract 1 | toy: 0 of 2 declared proven, 0 passed, 1 failed, 1 deviations"
    assert badge in markdown
    assert report.to_dict()["badge"] == badge
