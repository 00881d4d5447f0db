"""The report of a conformance run: how many tests of each capability passed, failed, deviate or were not run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any, Final

import pytest

from dataplane_core.backends import Backend
from dataplane_core.connecting import find_plugins
from dataplane_core.errors import printable
from dataplane_core.spec import CONTRACT_VERSION, Capability, Scope
from dataplane_testkit._author import MOST_COPIES, shown_name
from dataplane_testkit._base import deviation_of, kit_members
from dataplane_testkit.rules import label_of, rule_of

__all__ = ["NOT_SELECTED", "OUTCOMES", "SCHEMA", "Report", "Result", "Row", "record_of", "to_json", "unused_deviations"]

#: Name and version of the JSON format.
SCHEMA: Final = "dataplane-conformance/1"
#: The reason of a test that the user deselected.
NOT_SELECTED: Final = "not selected"
#: The possible outcomes of a test of the kit.
OUTCOMES: Final = ("pass", "fail", "deviation", "not declared", "not run")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test.

    Attributes:
        name: The name of the test, with its parameters.
        chapter: The chapter of the contract.
        proves: The row in which it counts: ``core``, a capability or a scope.
        outcome: One of `OUTCOMES`.
        reason: Why it did not pass. Empty if it passed.
        duration_s: Its duration in seconds.
        rule: The sentence that it tests, and its source.
        check_first: What to check first in a backend that fails the test.
    """

    name: str
    chapter: str
    proves: str
    outcome: str
    reason: str
    duration_s: float
    rule: str = ""
    check_first: str = ""


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that was raised during the tests and did not make one fail.

    Attributes:
        category: The name of its class.
        text: Its text.
        count: How often it was raised. Texts that differ only in numbers and addresses are counted together.
        test: The first test in which it was raised.
    """

    category: str
    text: str
    count: int
    test: str

    def in_words(self) -> str:
        """The warning as one line of text."""
        where = f"in {self.test}" if self.count == 1 else f"{self.count} times, first in {self.test}"
        return f"{self.category}: {self.text} ({where})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: ``core``, a capability or a scope.
        declared: Whether the backend declares it.
        counts: Outcome -> number of tests.
        verdict: ``proven``, ``in part`` (some were not selected), ``failed``, ``deviates``, ``not declared``, or
            ``not run``.
    """

    name: str
    declared: bool
    counts: Mapping[str, int]
    verdict: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the tests of one class proved about one backend.

    Attributes:
        backend: The entry-point name of the backend, or the name of its class.
        distribution: The installed distribution that holds the class, with its version. Empty if there is none.
        core_version: Version of dataplane-core.
        contract_version: Version of the contract.
        scope: The declared scope.
        wire: The declared wire format as text.
        capabilities: The declared capabilities.
        why_not_declared: What the engine does not allow -> why: a capability, a wider scope, fewer copies.
        results: The results of all tests, in the order in which they ran.
        warnings: The warnings that were raised during the tests.
    """

    backend: str
    distribution: str
    core_version: str
    contract_version: int
    scope: str
    wire: str
    capabilities: tuple[str, ...]
    why_not_declared: Mapping[str, str]
    results: tuple[Result, ...]
    warnings: tuple[Warned, ...] = ()

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], warned: Sequence[tuple[str, str, str]] = ()) -> Report:
        """The report of the tests of one class, from the records of the pytest plugin.

        Args:
            records: One record per test.
            warned: Category, text and test of each warning.
        """
        header = records[0]["header"]
        names = [field.name for field in fields(Result)]
        results = tuple(
            Result(**{**{name: record[name] for name in names}, "proves": record["proves"][0]}) for record in records
        )
        capabilities = tuple(header["capabilities"])
        return cls(**{**header, "capabilities": capabilities}, results=results, warnings=_counted(warned))

    @property
    def passed(self) -> bool:
        """Whether at least one test passed and none failed."""
        counts = self.counts
        return not counts["fail"] and counts["pass"] > 0

    @property
    def started(self) -> bool:
        """Whether any test was selected."""
        return any(result.reason != NOT_SELECTED for result in self.results)

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> number of tests."""
        return Counter(result.outcome for result in self.results)

    def rows(self) -> list[Row]:
        """The rows of the table: the core, every capability, every scope wider than one process."""
        names = [
            "core",
            *map(str, Capability),
            *sorted({r.proves for r in self.results if r.proves.startswith("scope")}),
        ]
        rows = []
        for name in names:
            counts = Counter(result.outcome for result in self.results if result.proves == name)
            declared = name == "core" or name in self.capabilities or self._reaches(name)
            whole = not any(r.proves == name and r.reason == NOT_SELECTED for r in self.results)
            verdict = _verdict(declared, counts, whole)
            rows.append(Row(name, declared, {each: counts[each] for each in OUTCOMES}, verdict))
        return rows

    def _reaches(self, name: str) -> bool:
        reach = [str(scope) for scope in Scope]
        scope = name.removeprefix("scope ")
        return name != scope and reach.index(self.scope) >= reach.index(scope)

    # --- forms --------------------------------------------------------------------------------------------------------

    def badge(self) -> str:
        """A summary in one line."""
        counts, rows = self.counts, self.rows()
        proven = [row for row in rows if row.declared and row.verdict == "proven"]
        declared = [row for row in rows if row.declared]
        return (
            f"dataplane contract {self.contract_version} | {self.backend}: {len(proven)} of {len(declared)} declared "
            f"proven, {counts['pass']} passed, {counts['fail']} failed, {counts['deviation']} deviations"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, in the format `SCHEMA`."""
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "distribution": self.distribution,
            "core_version": self.core_version,
            "contract_version": self.contract_version,
            "scope": self.scope,
            "wire": self.wire,
            "declared": list(self.capabilities),
            "why_not_declared": dict(self.why_not_declared),
            "passed": self.passed,
            "badge": self.badge(),
            "counts": {outcome: self.counts[outcome] for outcome in OUTCOMES},
            "capabilities": [
                {"name": row.name, "declared": row.declared, "verdict": row.verdict, **row.counts}
                for row in self.rows()
            ],
            "tests": [{**asdict(result), "duration_s": round(result.duration_s, 4)} for result in self.results],
            "warnings": [asdict(warned) for warned in self.warnings],
        }

    def to_text(self) -> str:
        """The report as plain text."""
        lines = [*self._about(), ""]
        width = max(len(row.name) for row in self.rows())
        lines.append(
            f"{'':<{width}}  {'verdict':<12}  {'pass':>5} {'fail':>5} {'deviation':>9} {'not decl.':>9} {'not run':>7}"
        )
        for row in self.rows():
            c = row.counts
            lines.append(
                f"{row.name:<{width}}  {row.verdict:<12}  {c['pass']:>5} {c['fail']:>5} {c['deviation']:>9} "
                f"{c['not declared']:>9} {c['not run']:>7}"
            )
        for title, listed in self._lists():
            lines += ["", f"{title}:"]
            for text, *details in listed:
                lines += [f"  {text}", *(f"      {detail}" for detail in details)]
        return "\n".join(map(printable, [*lines, "", self.badge()]))

    def to_markdown(self) -> str:
        """The report as Markdown."""
        lines = [f"## {self.backend}", "", *(f"- {line}" for line in self._about()[1:]), ""]
        lines += ["| capability | verdict | pass | fail | deviation | not declared | not run |"]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        for row in self.rows():
            numbers = " | ".join(str(row.counts[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {row.name} | {row.verdict} | {numbers} |")
        for title, listed in self._lists():
            lines += ["", f"**{title[0].upper()}{title[1:]}**", ""]
            for text, *details in listed:
                lines += [f"- {_escape(text)}", *(f"  - {_escape(detail)}" for detail in details)]
        return "\n".join(map(printable, [*lines, "", f"`{self.badge()}`", ""]))

    def _about(self) -> list[str]:
        return [
            f"{self.backend}{f' ({self.distribution})' if self.distribution else ''}",
            f"contract {self.contract_version}, dataplane-core {self.core_version}",
            f"scope {self.scope}; wire: {self.wire}",
            f"declares: {', '.join(self.capabilities) or 'nothing'}",
        ]

    def _lists(self) -> list[tuple[str, list[list[str]]]]:
        """The lists below the table: title -> entries. An entry is its text, followed by its details.

        Failures and deviations with their rules, why the backend does not declare more, the reasons of tests that were
        not run, and the warnings.
        """
        lists: list[tuple[str, list[list[str]]]] = []
        for outcome, title in (("fail", "failures"), ("deviation", "deviations")):
            found = [
                [f"{r.name} ({r.chapter}): {r.reason}", *_named("the rule", r.rule)]
                + (_named("check first", r.check_first) if outcome == "fail" else [])
                for r in self.results
                if r.outcome == outcome
            ]
            if found:
                lists.append((title, found))
        if self.why_not_declared:
            lists.append(
                ("why it does not declare more", [[f"{name}: {why}"] for name, why in self.why_not_declared.items()])
            )
        reasons = Counter(result.reason for result in self.results if result.outcome == "not run")
        if reasons:
            lists.append(
                ("not run", [[f"{count} {'test' if count == 1 else 'tests'}: {r}"] for r, count in reasons.items()])
            )
        if self.warnings:
            lists.append(("warnings", [[each.in_words()] for each in self.warnings]))
        return lists


def _named(what: str, text: str) -> list[str]:
    return [f"{what}: {text}"] if text else []


def _counted(warned: Sequence[tuple[str, str, str]]) -> tuple[Warned, ...]:
    """Counts the warnings. Texts that differ only in numbers and addresses are counted together."""
    found: dict[tuple[str, str], Warned] = {}
    for category, text, test in warned:
        key = (category, re.sub(r"0x[0-9a-f]+|\d+", "#", text))
        known = found.get(key, Warned(category, text, 0, test))
        found[key] = replace(known, count=known.count + 1)
    return tuple(found.values())


def to_json(reports: Sequence[Report]) -> str:
    """A JSON list of reports."""
    return json.dumps([report.to_dict() for report in reports], indent=2) + "\n"


def _verdict(declared: bool, counts: Mapping[str, int], whole: bool) -> str:
    if not declared:
        return "not declared"
    if counts["fail"]:
        return "failed"
    if counts["deviation"]:
        return "deviates"
    if not counts["pass"]:
        return "not run"
    return "proven" if whole else "in part"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# --- for the pytest plugin --------------------------------------------------------------------------------------------


def record_of(item: Any) -> dict[str, Any]:
    """What the report needs to know about a collected test, as JSON values."""
    node, rule = item.getparent(pytest.Class), rule_of(item.obj)
    assert rule is not None, "only tests of the kit are recorded"
    return {
        "class": node.nodeid,
        "name": item.name,
        "chapter": rule.chapter,
        "proves": [label_of(need) for need in rule.proves],
        "rule": rule.text,
        "check_first": rule.check_first,
        "header": _header(item.cls),
    }


@cache
def _header(case: Any) -> dict[str, Any]:
    """The part of a record that is the same for all tests of a class."""
    cls: type[Backend] = case.under_test()
    return {
        "backend": shown_name(case),
        "distribution": _distribution(cls.__module__.partition(".")[0]),
        "core_version": _version("dataplane-core"),
        "contract_version": CONTRACT_VERSION,
        "scope": str(cls.scope),
        "wire": cls.wire.describe(),
        "capabilities": sorted(map(str, cls.capabilities)),
        "why_not_declared": {**{str(name): why for name, why in cls.why_not_declared.items()}, **_more_copies(case)},
    }


def _more_copies(case: Any) -> dict[str, str]:
    """The limits of copies of the payload that the author has raised -> why."""
    allowed = {operation: case.copies_allowed(operation) for operation in MOST_COPIES}
    return {
        f"{most:g} copies in {operation}": why
        for operation, (most, why) in allowed.items()
        if most > MOST_COPIES[operation]
    }


#: Slow: it reads the metadata of all installed packages.
_packages = cache(packages_distributions)


@cache
def _distribution(package: str) -> str:
    # an editable install lists its entry points, but no files
    found = [each.distribution for each in find_plugins() if each.target.partition(".")[0].partition(":")[0] == package]
    found += _packages().get(package, [])
    return f"{found[0]} {_version(found[0])}" if found else ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def unused_deviations(items: Sequence[Any]) -> list[str]:
    """Deviations that match no collected case. Only of classes of which every test was collected."""
    unused = []
    for cls in dict.fromkeys(item.cls for item in items):
        names = [item.name for item in items if item.cls is cls]
        tests = {name for name in kit_members(cls) if name.startswith("test_")}
        if {name.partition("[")[0] for name in names} < tests:
            continue
        for key in cls.all_deviations():
            if not any(deviation_of({key: "x"}, name) for name in names):
                unused.append(f"{cls.__name__}: {key}")
    return unused
