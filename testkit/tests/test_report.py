"""The report: verdicts, forms, and the versioned JSON."""

from __future__ import annotations

import json

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


def _verdicts(report):
    return {row.name: row.verdict for row in report.rows()}


def test_a_capability_is_proven_by_tests_that_passed():
    verdicts = _verdicts(_report(("a", "core", "pass", ""), ("b", "claims", "pass", "")))
    assert verdicts["core"] == "proven"
    assert verdicts["claims"] == "proven"
    assert verdicts["leases"] == "not declared"


def test_one_failure_or_deviation_shows():
    report = _report(
        ("a", "core", "pass", ""),
        ("b", "core", "fail", "broke"),
        ("c", "claims", "pass", ""),
        ("d", "claims", "deviation", "w"),
    )
    assert _verdicts(report)["core"] == "failed"
    assert _verdicts(report)["claims"] == "deviates"
    assert not report.passed


def test_what_did_not_run_is_not_proven():
    report = _report(("a", "core", "not run", "no server"), ("b", "claims", "not run", NOT_SELECTED))
    assert _verdicts(report)["core"] == "not run"
    assert not report.passed
    part = _report(("a", "core", "pass", ""), ("b", "core", "not run", NOT_SELECTED))
    assert _verdicts(part)["core"] == "in part"
    assert part.passed


def test_deviations_do_not_fail_a_report():
    assert _report(("a", "core", "pass", ""), ("b", "core", "deviation", "why")).passed


def test_scopes_have_rows():
    host = _report(("a", "scope host", "pass", ""), scope="cluster")
    process = _report(("a", "scope host", "not declared", "scope host"), scope="process")
    assert _verdicts(host)["scope host"] == "proven"
    assert _verdicts(process)["scope host"] == "not declared"


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
