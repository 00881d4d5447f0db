"""The report of a conformance run: how many tests of each capability passed, failed, deviate or were not run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any, Final

import pytest

from dataplane_core.backends import Backend
from dataplane_core.entry_points import find_plugins
from dataplane_core.errors import printable
from dataplane_core.spec import CONTRACT_VERSION, Capability, Scope
from dataplane_testkit._author import MOST_COPIES, shown_name
from dataplane_testkit.rules import rule_of

__all__ = ["Report", "record_of"]

#: Name and version of the JSON format.
SCHEMA: Final = "dataplane-conformance/1"
#: The reason of a test that the user deselected.
NOT_SELECTED: Final = "not selected"
#: What a test of the kit may end with.
OUTCOMES: Final = ("pass", "fail", "deviation", "not declared", "not run")


@dataclass(frozen=True, slots=True)
class Report:
    """What the tests of one class proved about one backend.

    Attributes:
        header: ``backend`` (its entry-point name, or the name of its class), ``distribution`` (the installed one that
            holds the class, with its version; or empty), ``core_version``, ``contract_version``, and what the class
            declares: ``scope``, ``wire``, ``declared`` (the capabilities), and ``why_not_declared`` (what the engine
            does not allow -> why).
        tests: For each test, in the order in which they ran: ``name`` (with its parameters), ``chapter``, ``proves``
            (the row in which it counts), ``outcome`` (one of `OUTCOMES`), ``reason`` (why it did not pass),
            ``duration_s``, ``rule`` (the sentence that it tests, and its source), and ``check_first``.
    """

    header: Mapping[str, Any]
    tests: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Report:
        """The report of the tests of one class, from their records."""
        tests = [{**record, "proves": record["proves"][0]} for record in records]
        for test in tests:
            del test["class"], test["header"]
        return cls(records[0]["header"], tests)

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return str(self.header["backend"])

    @property
    def passed(self) -> bool:
        """Whether at least one test passed and none failed."""
        return not self.counts["fail"] and self.counts["pass"] > 0

    @property
    def started(self) -> bool:
        """Whether any test was selected."""
        return any(test["reason"] != NOT_SELECTED for test in self.tests)

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> number of tests."""
        return _counted(self.tests)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table: the core, every capability, every scope wider than one process.

        Returns:
            For each: ``name``, ``declared``, the number of tests of each outcome, and ``verdict``: ``proven``, ``in
            part`` (some were not selected), ``failed``, ``deviates``, ``not declared`` or ``not run``.
        """
        scopes = [f"scope {scope}" for scope in Scope]
        declared = {"core", *self.header["declared"], *scopes[: scopes.index(f"scope {self.header['scope']}") + 1]}
        proven = sorted({test["proves"] for test in self.tests} & {*scopes})
        return [self._row(name, name in declared) for name in ("core", *map(str, Capability), *proven)]

    def _row(self, name: str, declared: bool) -> dict[str, Any]:
        tests = [test for test in self.tests if test["proves"] == name]
        counts = _counted(tests)
        if not declared:
            verdict = "not declared"
        elif counts["fail"]:
            verdict = "failed"
        elif counts["deviation"]:
            verdict = "deviates"
        elif not counts["pass"]:
            verdict = "not run"
        else:
            verdict = "in part" if any(test["reason"] == NOT_SELECTED for test in tests) else "proven"
        return {"name": name, "declared": declared, "verdict": verdict, **counts}

    def badge(self) -> str:
        """A summary in one line."""
        counts, verdicts = self.counts, [row["verdict"] for row in self.rows() if row["declared"]]
        return (
            f"dataplane contract {self.header['contract_version']} | {self.backend}: {verdicts.count('proven')} of "
            f"{len(verdicts)} declared proven, {counts['pass']} passed, {counts['fail']} failed, "
            f"{counts['deviation']} deviations"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, in the format `SCHEMA`."""
        return {
            "schema": SCHEMA,
            **self.header,
            "passed": self.passed,
            "badge": self.badge(),
            "counts": self.counts,
            "capabilities": self.rows(),
            "tests": [{**test, "duration_s": round(test["duration_s"], 4)} for test in self.tests],
        }

    def to_markdown(self) -> str:
        """The report as Markdown."""
        return self.to_text(lambda text: re.sub(r"([|*])", r"\\\1", text).replace("<", "&lt;"))

    def to_text(self, escape: Callable[[str], str] = str) -> str:
        """The same for a terminal: nothing in it is escaped."""
        about = self.header
        lines = [
            f"## {self.backend}" + (f" ({about['distribution']})" if about["distribution"] else ""),
            "",
            f"- contract {about['contract_version']}, dataplane-core {about['core_version']}",
            f"- scope {about['scope']}; wire: {about['wire']}",
            f"- declares: {', '.join(about['declared']) or 'nothing'}",
            "",
            f"| {'capability':<16} | verdict      | {' | '.join(OUTCOMES)} |",
            f"|{'-' * 18}|{'-' * 14}|{''.join('-' * (len(outcome) + 1) + ':|' for outcome in OUTCOMES)}",
        ]
        for row in self.rows():
            counts = " | ".join(f"{row[outcome]:>{len(outcome)}}" for outcome in OUTCOMES)
            lines.append(f"| {row['name']:<16} | {row['verdict']:<12} | {counts} |")
        for title, entries in self._lists().items():
            lines += ["", f"{title}:", "", *(escape(entry) for entry in entries)] if entries else []
        return "\n".join(map(printable, [*lines, "", f"`{self.badge()}`", ""]))

    def _lists(self) -> dict[str, list[str]]:
        declared = self.header["why_not_declared"]
        reasons = Counter(test["reason"] for test in self.tests if test["outcome"] == "not run")
        return {
            "failures": [line for test in self.tests if test["outcome"] == "fail" for line in _broken(test)],
            "deviations": [line for test in self.tests if test["outcome"] == "deviation" for line in _broken(test)[:2]],
            "why it does not declare more": [f"- {what}: {why}" for what, why in declared.items()],
            "not run": [f"- {count} {'test' if count == 1 else 'tests'}: {why}" for why, count in reasons.items()],
        }


def _broken(test: Mapping[str, Any]) -> list[str]:
    first = f"- {test['name']} ({test['chapter']}): {test['reason']}"
    return [first, f"  - the rule: {test['rule']}", f"  - check first: {test['check_first']}"]


def _counted(tests: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts = Counter(test["outcome"] for test in tests)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def record_of(item: Any) -> dict[str, Any]:
    """What the report needs to know about a collected test, as JSON values."""
    rule = rule_of(item.obj)
    assert rule is not None, "only tests of the kit are recorded"
    return {
        "class": item.getparent(pytest.Class).nodeid,
        "name": item.name,
        "chapter": rule.chapter,
        "proves": list(rule.proves),
        "rule": rule.text,
        "check_first": rule.check_first,
        "header": _header(item.cls),
    }


@cache
def _header(case: Any) -> dict[str, Any]:
    """The part of a record that is the same for all tests of a class."""
    cls: type[Backend] = case.under_test()
    copies = {operation: case.copies_allowed(operation) for operation in MOST_COPIES}
    more = {f"{most:g} copies in {name}": why for name, (most, why) in copies.items() if most > MOST_COPIES[name]}
    return {
        "backend": shown_name(case),
        "distribution": _distribution(cls.__module__.partition(".")[0]),
        "core_version": _version("dataplane-core"),
        "contract_version": CONTRACT_VERSION,
        "scope": str(cls.scope),
        "wire": cls.wire.describe(),
        "declared": sorted(map(str, cls.capabilities)),
        "why_not_declared": {str(what): why for what, why in cls.why_not_declared.items()} | more,
    }


#: Slow: it reads the metadata of all installed packages.
_packages = cache(packages_distributions)


@cache
def _distribution(package: str) -> str:
    # an editable install lists its entry points, but no files
    targets = [(plugin.distribution, re.split("[.:]", plugin.target)[0]) for plugin in find_plugins()]
    distributions = [name for name, module in targets if module == package]
    distributions += _packages().get(package, [])
    return f"{distributions[0]} {_version(distributions[0])}" if distributions else ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
