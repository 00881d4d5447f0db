"""What pytest does in a process of `run.py`: it tells what happens in a file, since it may be ended at any time."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from places import ROOT


class Telling:
    """Tells each test that starts, and at the first failure ends the process: what is left of the test is of no use."""

    def __init__(self, lines: Path, wanted: dict[str, float] | None = None) -> None:
        self._lines = lines.open("a", buffering=1)
        self._wanted = wanted

    def tell(self, **said: object) -> None:
        self._lines.write(json.dumps(said) + "\n")

    def pytest_sessionstart(self) -> None:
        self.tell(folder=tempfile.gettempdir())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the tests that are wanted, quick files first."""
        if self._wanted is None:
            return
        items[:] = [each for each in items if each.nodeid in self._wanted]
        per_file: dict[str, float] = {}
        for each in items:
            per_file[_file(each)] = per_file.get(_file(each), 0) + self._wanted[each.nodeid]
        items.sort(key=lambda each: per_file[_file(each)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(test=nodeid, limit_s=30 + 10 * (self._wanted or {}).get(nodeid, 30))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report.nodeid, f"{report.when}: {report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report.nodeid, f"import: {report.longreprtext}")

    def _failed(self, nodeid: str, why: str) -> None:
        self.tell(failed=nodeid, why=why[-2000:])
        os._exit(1)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.tell(ended=int(exitstatus))


class Control(Telling):
    """Goes on after a failure."""

    def _failed(self, nodeid: str, why: str) -> None:
        self.tell(failed=nodeid, why=why[-2000:])


class Mapping(Telling):
    """Tells of each test of a folder how long it took and which functions it entered, here and in other processes."""

    def __init__(self, lines: Path, folder: Path, notes: Path) -> None:
        super().__init__(lines)
        self._folder, self._notes = folder, notes
        self._ok = True
        self._entered: set[str] = set()
        os.environ["DATAPLANE_MUTANTS_NOTES"] = str(notes)
        spec = importlib.util.spec_from_file_location("noted", Path(__file__).parent / "noted" / "sitecustomize.py")
        assert spec is not None
        assert spec.loader is not None
        self._noted: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._noted)
        self._noted.tell = lambda code: self._entered.add(f"{code.co_filename}::{code.co_qualname}")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path.is_dir() and self._folder in collection_path.parents else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._ok, start = True, time.monotonic()
        self._noted.seen.clear()
        self._entered.clear()
        sys.setprofile(self._noted._note)
        try:
            return (yield)
        finally:
            elsewhere = self._notes.read_text().splitlines() if self._notes.exists() else []
            self._notes.unlink(missing_ok=True)
            self.tell(
                ran=item.nodeid,
                s=round(time.monotonic() - start, 3),
                ok=self._ok,
                here=self._of_packages(self._entered),
                elsewhere=self._of_packages(set(elsewhere)),
            )

    def _of_packages(self, names: set[str]) -> list[str]:
        ours = f"{ROOT}/"
        return sorted(name.removeprefix(ours) for name in names if name.startswith(ours))

    def _failed(self, nodeid: str, why: str) -> None:
        self._ok = False
        self.tell(failed=nodeid, why=why[-2000:])


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]
