"""What the kit does with an author's class: deviations, quiet overrides, options, capabilities, the report."""

from __future__ import annotations

import json

import pytest

from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass, BackendConformance, ConformanceError
from dataplane_testkit._author import AUTHORS_NAMES
from dataplane_testkit.rules import RULES

pytest_plugins = ["pytester"]

_HEAD = """
import pytest
from dataplane_testkit import BackendConformance
from dataplane_testkit.suites.rows import RowSuite
from dataplane_noop import NoopBackend
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a test file in this process and returns pytest's result and the reports."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(body, *arguments, conftest=None):
        pytester.makepyfile(_HEAD + body)
        if conftest is not None:
            pytester.makeconftest(conftest)
        path = pytester.path / "report.json"
        result = pytester.runpytest_inprocess(
            "-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--dataplane-json", str(path), *arguments
        )
        reports = json.loads(path.read_text()) if path.exists() else []
        return result, reports

    return run


def _selected(report):
    return {test["name"]: test for test in report["tests"] if test["reason"] != "not selected"}


# --- an author's class ------------------------------------------------------------------------------------------------


def test_ten_lines_are_enough(run):
    body = "class TestMine(BackendConformance):\n    backend_class = NoopBackend\n"
    result, (report,) = run(body, "-k", "order_asked_for or given_once")
    result.assert_outcomes(passed=2, deselected=len(report["tests"]) - 2)
    assert report["backend"] == "NoopBackend"
    assert report["distribution"].startswith("dataplane-noop ")
    result.stdout.fnmatch_lines(["*conformance of NoopBackend*", "core * in part * 1 *", "*dataplane contract 1 |*"])


def test_a_backend_may_be_named(run):
    _, (report,) = run("class TestMine(RowSuite):\n    backend = 'noop'\n", "-k", "order_asked_for")
    assert report["backend"] == "noop"
    assert report["counts"]["pass"] == 1


def test_a_class_that_names_no_backend_says_so(run):
    result, _ = run("class TestMine(RowSuite):\n    pass\n", "-k", "order_asked_for")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*TestMine names no backend.*"])


def test_options_are_a_fixture_that_may_use_others(run):
    body = """
class TestMine(RowSuite):
    backend_class = NoopBackend

    @pytest.fixture(scope="session")
    def server(self):
        return 5_000_000

    @pytest.fixture
    def options(self, server, tmp_path):
        return {"capacity_bytes": server}

    def test_of_my_own(self, store):
        assert store.client.config.options == {"capacity_bytes": 5_000_000}
"""
    result, (report,) = run(body, "-k", "order_asked_for or of_my_own", "-W", "default")
    result.assert_outcomes(
        passed=2, warnings=result.parseoutcomes().get("warnings", 0), deselected=len(report["tests"]) - 1
    )
    # an author's own tests run beside the kit's, and are not part of its report
    assert list(_selected(report)) == ["test_get_keeps_the_order_asked_for"]


def test_what_an_author_leaves_out_is_not_run(run):
    body = "class TestMine(BackendConformance):\n    backend_class = NoopBackend\n"
    _, (report,) = run(body, "-k", "engine_holds_what or a_refused_put] or lost_payload")
    assert {name: (test["outcome"], test["reason"]) for name, test in _selected(report).items()} == {
        "test_the_engine_holds_what_was_put": ("not run", "the author's class supplies no raw_get"),
        "test_what_is_dropped_leaves_the_engine[a_refused_put]": (
            "not run",
            "the author's class supplies no held_bytes",
        ),
        "test_lost_payload_is_named": ("pass", ""),
    }


def test_one_store_serves_the_class_unless_told_otherwise(run):
    body = """
class Counts(NoopBackend):
    started = []

    def start(self, *, bootstrap, deadline):
        self.started.append(1)

class TestOne(RowSuite):
    backend_class = Counts

class TestMany(RowSuite):
    backend_class = Counts
    store_per_test = True

def test_counts():
    # classes run in the order of the file
    assert len(Counts.started) == 1 + 3
"""
    result, _ = run(body, "-k", "16_mb or order_asked_for or later_puts_add or test_counts")
    result.assert_outcomes(passed=7, deselected=result.parseoutcomes()["deselected"])


def test_all_that_an_author_may_define_is_documented():
    for name in AUTHORS_NAMES:
        about = f"{AuthorsClass.__doc__} {getattr(getattr(AuthorsClass, name), '__doc__', '')}"
        assert f"{name}: " in about or getattr(AuthorsClass, name).__doc__, name
    assert {"backend", "options", "restart", "disturbances", "most_copies"} <= AUTHORS_NAMES
    assert not AUTHORS_NAMES & {"under_test", "supplies", "store"}


def test_copies_that_the_kit_cannot_count_are_not_run(run):
    body = """
class TestMine(BackendConformance):
    backend_class = NoopBackend
    through_asyncio = True
"""
    _, (report,) = run(body, "-k", "copied_no_more")
    assert {test["outcome"] for test in _selected(report).values()} == {"not run"}


# --- deviations and quiet overrides -----------------------------------------------------------------------------------

_DROPS = """
class Drops(NoopBackend):
    def get_samples(self, request):
        request.sample_ids = sorted(request.sample_ids)
        return super().get_samples(request)

class TestMine(RowSuite):
    backend_class = Drops
    deviations = {deviations}
"""
_WHOLE = _DROPS.replace("RowSuite", "BackendConformance")


def test_a_deviation_is_an_expected_failure(run):
    body = _DROPS.format(deviations="{'test_get_keeps_the_order_asked_for': 'the engine sorts'}")
    result, (report,) = run(body, "-k", "order_asked_for")
    result.assert_outcomes(xfailed=1, deselected=len(report["tests"]) - 1)
    test = _selected(report)["test_get_keeps_the_order_asked_for"]
    assert (test["outcome"], test["reason"]) == ("deviation", "the engine sorts")
    assert {row["name"]: row["verdict"] for row in report["capabilities"]}["core"] == "deviates"
    result.stdout.fnmatch_lines(["deviations:", "*test_get_keeps_the_order_asked_for (rows): the engine sorts"])


def test_a_backend_may_bring_its_deviations(run):
    body = _DROPS.format(deviations="{}").replace(
        "    def get", "    deviations = {'test_get_keeps_the_order_asked_for': 'the engine sorts'}\n\n    def get", 1
    )
    result, (report,) = run(body, "-k", "order_asked_for")
    result.assert_outcomes(xfailed=1, deselected=len(report["tests"]) - 1)
    assert _selected(report)["test_get_keeps_the_order_asked_for"]["reason"] == "the engine sorts"


def test_the_facts_of_an_engine_and_what_it_costs_more_are_reported(run):
    body = """
class TestMine(RowSuite):
    backend_class = NoopBackend
    most_copies = {"put_samples": (6, "the engine copies twice")}
"""
    result, (report,) = run(body, "-k", "order_asked_for")
    assert report["why_not_declared"]["6 copies in put_samples"] == "the engine copies twice"
    assert report["why_not_declared"]["durable"] == NoopBackend.why_not_declared["durable"]
    result.stdout.fnmatch_lines(
        ["why it does not declare more:", "*durable: *", "*6 copies in put_samples: the engine copies*"]
    )


def test_a_deviation_that_passes_fails(run):
    body = _DROPS.format(deviations="{'test_a_cell_of_16_mb': 'it was broken once'}")
    result, (report,) = run(body, "-k", "a_cell_of_16_mb")
    result.assert_outcomes(failed=1, deselected=len(report["tests"]) - 1)
    assert _selected(report)["test_a_cell_of_16_mb"]["reason"] == "[XPASS(strict)] it was broken once"
    assert not report["passed"]


def test_a_deviation_may_name_cases(run):
    body = _WHOLE.format(deviations="{'test_a_field_keeps_its_schema[*dtype]': 'never fails'}")
    result, (report,) = run(body, "-k", "keeps_its_schema and dtype")
    result.assert_outcomes(failed=2, passed=2, deselected=len(report["tests"]) - 4)


def test_a_deviation_whose_case_does_not_exist_is_refused(run):
    body = _WHOLE.format(deviations="{'test_columns_come_back_bit_for_bit[float9]': 'no such dtype'}")
    result, _ = run(body, "-k", "order_asked_for")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*float9*"])


@pytest.mark.parametrize(
    ("namespace", "words"),
    [
        ({"test_get_keeps_the_order_asked_for": lambda self: None}, "overrides test_get_keeps_the_order_asked_for"),
        ({"test_get_keeps_the_order_asked_for": None}, "overrides test_get_keeps_the_order_asked_for"),
        ({"store": None}, "overrides store"),
        ({"_conformance_gate": None}, "overrides _conformance_gate"),
        ({"deviations": {"test_no_such": "why"}}, "is no test of the kit"),
        ({"most_copies": {"claim": (9, "why")}}, "names 'claim'. Expected put_samples or get_samples"),
        ({"most_copies": {"put_samples": (9, "")}}, "gives no reason"),
        ({"deviations": {"test_get_keeps_the_order_asked_for": " "}}, "gives no reason"),
        ({"pytestmark": pytest.mark.xfail}, "marks the whole kit xfail"),
        ({"pytestmark": [pytest.mark.xfail(reason="x")]}, "marks the whole kit xfail"),
    ],
)
def test_quiet_overrides_are_refused(namespace, words):
    with pytest.raises(ConformanceError, match=words):
        type("TestMine", (BackendConformance,), namespace)


def test_an_override_by_a_mixin_is_refused():
    class Mixin:
        def test_cleared_rows_are_gone(self):
            pass

    with pytest.raises(ConformanceError, match="overrides test_cleared_rows_are_gone"):
        type("TestMine", (Mixin, BackendConformance), {})


def test_an_override_fails_the_collection_of_its_file(run):
    body = """
class TestMine(BackendConformance):
    backend_class = NoopBackend

    @pytest.mark.skip
    def test_cleared_rows_are_gone(self):
        pass
"""
    result, reports = run(body)
    assert result.ret != 0
    assert reports == []
    result.stdout.fnmatch_lines(["*TestMine overrides test_cleared_rows_are_gone*deviations = {*"])


def test_skip_marks_from_outside_fail(run):
    conftest = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if "order_asked_for" in item.name:
            item.add_marker(pytest.mark.skip(reason="quietly"))
        if "a_cell_of_16_mb" in item.name:
            item.add_marker(pytest.mark.xfail(reason="quietly"))
"""
    body = "class TestMine(RowSuite):\n    backend_class = NoopBackend\n"
    result, (report,) = run(body, "-k", "order_asked_for or a_cell_of_16_mb", conftest=conftest)
    assert not report["passed"]
    assert {test["outcome"] for test in _selected(report).values()} == {"fail"}
    result.stdout.fnmatch_lines(["*carries the mark 'skip'*", "*carries the mark 'xfail'*"])


def test_what_a_machine_cannot_run_is_not_run(run):
    body = """
class TestMine(BackendConformance):
    backend_class = NoopBackend

    @pytest.fixture
    def options(self):
        pytest.skip("no server on this machine")
"""
    result, (report,) = run(body, "-k", "order_asked_for or cleared_rows")
    result.assert_outcomes(skipped=2, deselected=len(report["tests"]) - 2)
    assert {test["outcome"] for test in _selected(report).values()} == {"not run"}
    assert not report["passed"], "a run in which nothing ran proves nothing"
    result.stdout.fnmatch_lines(["not run:", "*2 tests: no server on this machine"])


def test_a_store_that_does_not_start_fails_once_with_its_reason(run):
    body = """
class Dead(NoopBackend):
    tries = []

    def start(self, *, bootstrap, deadline):
        self.tries.append(1)
        raise OSError("port 6379 is taken")

class TestMine(BackendConformance):
    backend_class = Dead

def test_tries():
    assert Dead.tries == [1]
"""
    result, (report,) = run(body, "-k", "cleared_rows or order_asked_for or test_tries")
    assert result.parseoutcomes()["errors"] == 2
    assert result.parseoutcomes()["passed"] == 1
    assert all("port 6379 is taken" in test["reason"] for test in _selected(report).values())
    assert "the rule that it breaks" not in result.stdout.str(), "nothing was tested, so no rule is to blame"


# --- the plugin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processes", [[], pytest.param(["-n", "2"], marks=pytest.mark.long)], ids=["one_process", "several"]
)
def test_what_was_not_selected_is_counted(run, processes):
    body = "class TestMine(RowSuite):\n    backend_class = NoopBackend\n"
    _, (report,) = run(body, "-k", "order_asked_for", *processes)
    assert {row["name"]: row["verdict"] for row in report["capabilities"]}["core"] == "in part"
    assert (report["counts"]["pass"], report["counts"]["not run"]) == (1, len(report["tests"]) - 1)
    assert len(report["tests"]) > 10


def test_a_failure_names_its_rule_in_the_report(run, pytester):
    markdown = pytester.path / "report.md"
    result, (report,) = run(
        _DROPS.format(deviations="{}"), "-k", "order_asked_for", "--dataplane-markdown", str(markdown)
    )
    test = _selected(report)["test_get_keeps_the_order_asked_for"]
    assert test["rule"] == 'Contract: "Exactly one row per id given, in that order, repeats included."'
    assert test["check_first"] == "bring the engine's rows into the order of request.sample_ids."
    result.stdout.fnmatch_lines(
        [
            "*the rule that it breaks*",
            'Contract: "Exactly one row per id given, in that order, repeats included."',
            "*Check first:*",
            "failures:",
            "*the rule: Contract: *",
            "*check first: bring the engine's rows*",
        ]
    )
    assert "  - check first: bring the engine's rows" in markdown.read_text()


_WARNS = """
import socket, warnings

class Warns(NoopBackend):
    def get_samples(self, request):
        {warn}
        return super().get_samples(request)

class TestMine(RowSuite):
    backend_class = Warns
"""


@pytest.mark.parametrize(
    ("warn", "category", "text"),
    [
        ("warnings.warn(f'row at {id(request):#x}\\nis old', DeprecationWarning)", "DeprecationWarning", "is old"),
        ("socket.socket()", "ResourceWarning", "unclosed <socket.socket"),
    ],
)
def test_the_text_of_warnings_is_told(run, warn, category, text):
    body = _WARNS.format(warn=warn)
    result, (report,) = run(body, "-k", "a_cell_of_16_mb", "-W", "default")
    (warning,) = report["warnings"]
    assert (warning["category"], warning["test"]) == (category, "test_a_cell_of_16_mb")
    assert text in warning["text"]
    result.stdout.fnmatch_lines(["warnings:", f"  {category}: *{text}*"])
    # and where they are errors, the failure says which warning it was
    result, (report,) = run(body, "-k", "a_cell_of_16_mb", "-W", "error")
    assert report["warnings"] == []
    (test,) = _selected(report).values()
    assert category in test["reason"]
    assert text in test["reason"]


# --- order ------------------------------------------------------------------------------------------------------------


def test_quick_tests_come_first_and_the_machine_last(run):
    body = "class TestMine(BackendConformance):\n    backend_class = NoopBackend\n"
    result, _ = run(body, "--collect-only", "-q")
    names = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    order = list(dict.fromkeys(RULES[name.partition("[")[0]].chapter for name in names))
    assert order[:2] == ["smoke", "engine"]
    assert order[-3:] == ["races", "processes", "machine"]
    assert order == list(dict.fromkeys(rule.chapter for rule in RULES.values()))
    assert sum(RULES[name.partition("[")[0]].chapter == "smoke" for name in names) >= 5


def test_tests_carry_a_marker(run):
    body = "class TestMine(RowSuite):\n    backend_class = NoopBackend\n\ndef test_not_of_the_kit():\n    pass\n"
    result, _ = run(body, "-m", "dataplane", "-k", "order_asked_for or not_of_the_kit")
    result.assert_outcomes(passed=1, deselected=result.parseoutcomes()["deselected"])


def test_without_the_plugin_the_kit_still_judges(pytester):
    pytester.makepyfile(_HEAD + _WHOLE.format(deviations="{'test_get_keeps_the_order_asked_for': 'the engine sorts'}"))
    arguments = ["-p", "no:dataplane_conformance", "-p", "no:cacheprovider", "--strict-markers", "-W", "error"]
    result = pytester.runpytest_inprocess(*arguments, "-k", "order_asked_for or later_puts_add or puts_that_overlap")
    result.assert_outcomes(failed=1, xfailed=1, passed=2, deselected=result.parseoutcomes()["deselected"])
    assert "conformance of" not in result.stdout.str()


def test_other_suites_are_left_alone(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert not {"dataplane_core", "torch"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=1)
    assert "conformance" not in result.stdout.str()
