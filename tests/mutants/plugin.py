"""What pytest does in a process of `run.py`: it tells what happens in a file, since it may be ended at any time."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NOTED = Path(__file__).parent / "noted" / "sitecustomize.py"
_FIRST_LIMIT_S, _LIMIT_S, _TIMES = 300, 30, 10  # of a test: a busy machine may take so many times what the map says


class Telling:
    """Tells each test that starts and each that fails, of those wanted. May end the process at the first failure."""

    def __init__(self, lines: Path, wanted: Mapping[str, float], until_failure: bool) -> None:
        self._lines = lines.open("a", buffering=1)
        self._wanted = wanted
        self._until_failure = until_failure

    def tell(self, **said: object) -> None:
        self._lines.write(json.dumps(said) + "\n")

    def pytest_sessionstart(self) -> None:
        self.tell(folder=tempfile.gettempdir())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the tests that are wanted, quick files first."""
        items[:] = [each for each in items if each.nodeid in self._wanted]
        per_file = Counter[str]()
        for each in items:
            per_file[_file(each.nodeid)] += self._wanted[each.nodeid]
        items.sort(key=lambda each: per_file[_file(each.nodeid)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        seconds = self._wanted.get(nodeid)
        self.tell(test=nodeid, limit_s=_FIRST_LIMIT_S if seconds is None else _LIMIT_S + _TIMES * seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell(failed=report.nodeid, why=f"{report.when}: {report.longreprtext[-2000:]}")
            if self._until_failure:
                os._exit(1)  # what is left of the test is of no use, and may take long

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(failed=report.nodeid, why=f"import: {report.longreprtext[-2000:]}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.tell(ended=int(exitstatus))


class Noting(Telling):
    """Tells of each test of a folder how long it took and which functions it entered, here and in other processes."""

    def __init__(self, lines: Path, folder: Path, functions: set[str]) -> None:
        super().__init__(lines, {}, until_failure=False)
        self._folder, self._functions = folder, functions
        self._failed: set[str] = set()
        self._here: set[str] = set()
        self._notes = lines.with_suffix(".notes")  # where other processes note what they enter
        os.environ["DATAPLANE_MUTANTS_NOTES"] = str(self._notes)
        spec = importlib.util.spec_from_file_location("noted", NOTED)
        assert spec is not None
        assert spec.loader is not None
        self._noted: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._noted)
        self._noted.tell = self._here.add

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path.is_dir() and self._folder in collection_path.parents else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        pass

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        start = time.monotonic()
        self._noted.seen.clear()
        self._here.clear()
        sys.setprofile(self._noted.note)
        try:
            return (yield)
        finally:
            elsewhere = set(self._notes.read_text().splitlines()) if self._notes.exists() else set()
            self._notes.unlink(missing_ok=True)
            self.tell(
                ran=item.nodeid,
                s=round(time.monotonic() - start, 3),
                ok=item.nodeid not in self._failed,
                here=sorted(self._functions & self._here),
                elsewhere=sorted(self._functions & elsewhere),
            )


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]
