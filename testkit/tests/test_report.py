"""The report: verdicts, forms, and the versioned JSON."""

from __future__ import annotations

import json

import pytest

from dataplane_testkit.report import NOT_SELECTED, SCHEMA, Report, Result, to_json


def _report(*results, capabilities=("claims",), scope="process"):
    return Report(
        backend="toy",
        distribution="toy-dist 1.0",
        core_version="0.1.0",
        contract_version=1,
        scope=scope,
        wire="jagged",
        capabilities=capabilities,
        why_not_declared={"durable": "it is all in memory"},
        results=tuple(
            Result(name, "chapter", proves, outcome, reason, 0.1) for name, proves, outcome, reason in results
        ),
    )


@pytest.mark.parametrize(
    ("results", "scope", "verdicts", "passed"),
    [
        (
            [("a", "core", "pass", ""), ("b", "claims", "pass", "")],
            "process",
            {"core": "proven", "claims": "proven", "leases": "not declared"},
            True,
        ),
        (
            [("a", "core", "pass", ""), ("b", "core", "fail", "broke"), ("c", "claims", "deviation", "why")],
            "process",
            {"core": "failed", "claims": "deviates"},
            False,
        ),
        ([("a", "core", "pass", ""), ("b", "core", "deviation", "why")], "process", {"core": "deviates"}, True),
        (
            [("a", "core", "not run", "no server"), ("b", "claims", "not run", NOT_SELECTED)],
            "process",
            {"core": "not run"},
            False,
        ),
        ([("a", "core", "pass", ""), ("b", "core", "not run", NOT_SELECTED)], "process", {"core": "in part"}, True),
        ([("a", "scope host", "pass", "")], "cluster", {"scope host": "proven"}, True),
        ([("a", "scope host", "not declared", "scope host")], "process", {"scope host": "not declared"}, False),
    ],
)
def test_verdicts(results, scope, verdicts, passed):
    report = _report(*results, scope=scope)
    assert {row.name: row.verdict for row in report.rows()}.items() >= verdicts.items()
    assert report.passed == passed


def test_json_is_versioned_and_complete():
    report = _report(("a", "core", "pass", ""), ("b", "claims", "fail", "broke"))
    (read,) = json.loads(to_json([report]))
    assert read["schema"] == SCHEMA == "dataplane-conformance/1"
    assert read["counts"] == {"pass": 1, "fail": 1, "deviation": 0, "not declared": 0, "not run": 0}
    assert [test["name"] for test in read["tests"]] == ["a", "b"]
    assert read["badge"] == report.badge()
    assert {row["name"] for row in read["capabilities"]} >= {"core", "claims", "durable"}


def test_text_and_markdown_name_failures_deviations_and_reasons():
    report = _report(
        ("a", "core", "fail", "broke | here"),
        ("b", "core", "deviation", "the engine <cannot>"),
        ("c", "core", "not run", "no server"),
        ("d", "core", "not run", "no server"),
    )
    text, markdown = report.to_text(), report.to_markdown()
    assert "a (chapter): broke | here" in text
    assert "2 tests: no server" in text
    assert "broke \\| here" in markdown
    assert "&lt;cannot>" in markdown
    assert "| core | failed | 0 | 1 | 1 | 0 | 2 |" in markdown


def test_the_badge_is_one_line():
    badge = _report(("a", "core", "pass", ""), ("b", "claims", "pass", "")).badge()
    assert badge == "dataplane contract 1 | toy: 2 of 2 declared proven, 2 passed, 0 failed, 0 deviations"
