"""What the kit does with an author's class: deviations, quiet overrides, options, capabilities, the report."""

import json

import pytest
from tiers import in_long

from dataplane_core.connecting import connect
from dataplane_core.errors import BackendError
from dataplane_testkit import BackendConformance, ConformanceError, Faults
from dataplane_testkit.rules import RULES
from dataplane_testkit.suites.values import RowSuite

pytest_plugins = ["pytester"]

ORDER = "test_get_keeps_the_order_asked_for"
HEAD = f"""
import pytest
from dataplane_testkit import BackendConformance
from dataplane_testkit.suites.values import RowSuite
from dataplane_noop import NoopBackend

ORDER = {ORDER!r}

def of(name, cls=NoopBackend, base=RowSuite, **more):
    return type("Test", (base,), {{"backend": name, "backend_class": cls, **more}})

class Sorts(NoopBackend):
    def get_samples(self, request):
        request.sample_ids = sorted(request.sample_ids)
        return super().get_samples(request)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a test file in this process. Its result, and the reports by the name of the backend."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(body, *words):
        path = pytester.path / "report.json"
        pytester.makepyfile(HEAD + body)
        options = ["-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--dataplane-json", str(path)]
        result = pytester.runpytest_inprocess(*options, *words)
        reports = json.loads(path.read_text()) if path.exists() else []
        return result, {report["backend"]: report for report in reports}

    return run


def selected(report):
    """Test -> outcome and reason."""
    tests = [test for test in report["tests"] if test["reason"] != "not selected"]
    return {test["name"]: (test["outcome"], test["reason"]) for test in tests}


# --- the report -------------------------------------------------------------------------------------------------------

CLASSES = """
class SortsAndSaysSo(Sorts):
    deviations = {ORDER: "its engine sorts"}

class Dead(NoopBackend):
    tries = []

    def start(self, *, bootstrap, deadline):
        self.tries.append(1)
        raise OSError(f"port 6379 is taken, try {len(self.tries)}")

@pytest.fixture
def no_server(self):
    pytest.skip("no server on this machine")

TestRight = of("right", most_copies={"put_samples": (6, "the engine copies twice")})
TestBroken = of("broken", Sorts)
TestDeviates = of("deviates", Sorts, deviations={ORDER: "the engine sorts"})
TestBackend = of("backend deviates", SortsAndSaysSo)
TestKeepsIt = of("keeps it", deviations={ORDER: "it was broken once"})
TestCannotRun = of("cannot run", options=no_server)
TestDead = of("dead", Dead)
TestSkipped, TestXfailed = of("skipped"), of("xfailed")
TestByName = of("noop", None)
TestCases = of("cases", base=BackendConformance, deviations={"test_columns_come_back_bit_for_bit[*loat16]": "fails"})
"""
QUIETLY = """
import pytest

MARKS = {"skipped": pytest.mark.skip, "xfailed": pytest.mark.xfail}

def pytest_collection_modifyitems(items):
    for item in items:
        if item.cls.backend in MARKS:
            item.add_marker(MARKS[item.cls.backend](reason="quietly"))
"""
#: Backend -> outcome and reason of the selected test, and the verdict on the core.
EXPECTED = {
    "right": ("pass", "", "in part"),
    "noop": ("pass", "", "in part"),
    "broken": ("fail", "assert ", "failed"),
    "deviates": ("deviation", "the engine sorts", "deviates"),
    "backend deviates": ("deviation", "its engine sorts", "deviates"),
    "keeps it": ("fail", "[XPASS(strict)] it was broken once", "failed"),
    "cannot run": ("not run", "no server on this machine", "not run"),
    "dead": ("fail", "setup: dataplane_core.errors.BackendError: [dead] connect failed", "failed"),
    "skipped": ("fail", f"setup: Failed: {ORDER} is a test of the conformance kit and", "failed"),
    "xfailed": ("fail", f"setup: Failed: {ORDER} is a test of the conformance kit and", "failed"),
}


@pytest.mark.parametrize("processes", [[], *in_long(["-n", "2"])], ids=lambda words: " ".join(words) or "one process")
def test_the_report_says_what_each_class_proved(run, pytester, processes):
    pytester.makeconftest(QUIETLY)
    markdown = pytester.path / "report.md"
    some = "order_asked_for or (TestCases and bit_for_bit and 16) or (TestDead and lost_payload)"
    result, reports = run(CLASSES, "-k", some, "--dataplane-markdown", str(markdown), *processes)
    for name, (outcome, reason, verdict) in EXPECTED.items():
        report = reports[name]
        found, why = selected(report)[ORDER]
        assert (found, report["capabilities"][0]["verdict"]) == (outcome, verdict), name
        assert why.startswith(reason), name
        assert report["passed"] == (outcome == "pass"), name
        assert report["counts"]["not run"] >= 5, "tests that were not selected are counted"
    cases = [outcome for name, (outcome, _) in selected(reports["cases"]).items() if name != ORDER]
    assert sorted(cases) == ["fail", "fail", "pass", "pass"], "two cases are said to fail, and do not"
    again = "the store could not be connected: BackendError: [dead] connect failed"
    dead = [again in why and "try 1" in why for _, why in selected(reports["dead"]).values()]
    assert processes or sorted(dead) == [False, True], "it was not tried again"

    right, broken = reports["right"], reports["broken"]
    assert right["schema"] == "dataplane-conformance/1"
    assert right["distribution"].startswith("dataplane-noop ")
    assert right["why_not_declared"]["6 copies in put_samples"] == "the engine copies twice"
    (test,) = [test for test in broken["tests"] if test["name"] == ORDER]
    assert test["rule"] == 'Contract: "Exactly one row per id given, in that order, repeats included."'
    assert test["check_first"] == "bring the engine's rows into the order of request.sample_ids."
    result.stdout.fnmatch_lines(["*the rule that it breaks*", test["rule"], "Check first: *", "*of broken*"])
    for text in (result.stdout.str(), markdown.read_text()):
        assert f"\n  - the rule: {test['rule']}\n  - check first: {test['check_first']}\n" in text
        assert all(report["badge"] in text for report in reports.values())


# --- an author's class ------------------------------------------------------------------------------------------------

STORES = """
class Counts(NoopBackend):
    started = []
    def start(self, *, bootstrap, deadline):
        self.started.append(1)
        super().start(bootstrap=bootstrap, deadline=deadline)

TestOneStore, TestStorePerTest = of("one", Counts), of("several", Counts, store_per_test=True)

def test_counts():  # classes run in the order of the file
    assert len(Counts.started) == 1 + 2

@pytest.fixture(scope="session")
def server():
    return 50_000_000

class TestOptions(of("options")):
    @pytest.fixture
    def options(self, server, tmp_path):
        return {"capacity_bytes": server}

    def test_of_my_own(self, store):
        assert store.client.config.options == {"capacity_bytes": 50_000_000}

TestPlain = of("plain", base=BackendConformance)
"""
OF_PLAIN = {
    "test_the_engine_holds_what_was_put": ("not run", "the author's class supplies no raw_get"),
    "test_what_is_dropped_leaves_the_engine": ("not run", "the author's class supplies no held_bytes"),
    "test_lost_payload_is_named": ("pass", ""),
}


def test_what_an_author_gives_is_used_and_what_is_left_out_is_not_run(run):
    more = ("order_asked_for", "test_counts", "of_my_own")
    result, reports = run(STORES, "-k", " or ".join((*OF_PLAIN, *more)))
    assert not {"failed", "errors"} & result.parseoutcomes().keys()
    found = selected(reports["plain"])
    assert found.items() >= OF_PLAIN.items()
    assert "test_of_my_own" not in str(reports), "an author's own tests run, but are not part of the report"


def test_a_deviation_whose_case_does_not_exist_is_refused(run):
    deviations = {"test_columns_come_back_bit_for_bit[float9]": "no such dtype"}
    result, _ = run(f"TestMine = of('mine', base=BackendConformance, deviations={deviations})", "-k", "order")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*float9*"])


class Mixin:
    def test_any_string_is_an_id(self):
        pass


@pytest.mark.parametrize(
    ("bases", "namespace", "words"),
    [
        ((), {ORDER: lambda self: None}, f"overrides {ORDER}.*deviations = {{"),
        ((), {ORDER: pytest.mark.skip(lambda self: None)}, f"overrides {ORDER}"),
        ((Mixin,), {}, "overrides test_any_string_is_an_id"),
        ((), {"store": None}, "overrides store"),
        ((), {"deviations": {"test_no_such": "why"}}, "no tests of the kit: test_no_such"),
        ((), {"deviations": {ORDER: " "}}, "gives no reason for deviations"),
        ((), {"most_copies": {"claim": (9, "why")}}, "other most_copies than of put_samples and get_samples"),
        ((), {"most_copies": {"put_samples": (9, "")}}, "gives no reason for most_copies"),
        ((), {"pytestmark": pytest.mark.xfail}, "marks the whole kit xfail"),
        ((), {"pytestmark": [pytest.mark.xfail(reason="x")]}, "marks the whole kit xfail"),
    ],
)
def test_quiet_overrides_are_refused(bases, namespace, words):
    with pytest.raises(ConformanceError, match=f"(?s){words}"):
        type("TestMine", (*bases, BackendConformance), namespace)


def test_a_class_that_names_no_backend_is_refused():
    with pytest.raises(ConformanceError, match="TestMine names no backend"):
        type("TestMine", (RowSuite,), {}).under_test()


# --- the plugin -------------------------------------------------------------------------------------------------------


def test_the_kits_tests_carry_a_marker_and_the_quick_ones_come_first(run):
    body = "TestMine = of('mine', base=BackendConformance)\n\ndef test_not_of_the_kit():\n    pass\n"
    result, _ = run(body, "--collect-only", "-q", "-m", "dataplane")
    names = [line.rpartition("::")[2].partition("[")[0] for line in result.outlines if "::" in line]
    order = list(dict.fromkeys(RULES[name].chapter for name in names))
    assert order == list(dict.fromkeys(rule.chapter for rule in RULES.values()))
    assert order[0] == "smoke"


def test_without_the_plugin_the_kit_still_judges(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(HEAD + CLASSES)
    words = ["-p", "no:dataplane_conformance", "-p", "no:cacheprovider", "--strict-markers", "-W", "error"]
    result = pytester.runpytest_inprocess(*words, "-k", "order_asked_for and (Right or Broken or TestDeviates)")
    result.assert_outcomes(passed=1, failed=1, xfailed=1, deselected=result.parseoutcomes()["deselected"])


def test_other_suites_are_left_alone(pytester):
    pytester.makepyfile("import sys\n\ndef test_it():\n    assert not {'dataplane_core', 'torch'} & set(sys.modules)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=1)
    assert "conformance" not in result.stdout.str()


def test_truncation_cuts_jagged_columns_too():
    faults = Faults()
    with connect({"backend": "noop", "middleware": [faults]}) as client:
        client.register_partition("p", ["z"], None, ["train"])
        client.put_samples(["a", "b"], "p", {"z": [[1, 2], [1, 2, 3]]})
        with faults.truncation(), pytest.raises(BackendError, match="1 rows"):
            client.get_samples(["a", "b"], "p", ["z"])
        assert len(client.get_samples(["a", "b"], "p", ["z"])["z"].unbind()) == 2
