"""Measures what the tests see: runs them against each fault of `mutants.jsonl`, in a process of its own for each.

First it runs the tests once without a fault and notes which of the functions each test enters (the map, kept under
`out/`). A mutant then gets the tests that enter its function. It is caught by the first that fails, or never ends.
Processes that tests start run the mutant too: a copy of the package with the fault is first on their path.

A mutant that no test can tell from the original gets ``"equivalent": "why"`` in the list, by hand. After a change of
the sources, ``--redraw`` replaces the mutants whose code is gone, and only these.

At the end, a control: the tests that failed must pass without a fault. A run that was stopped goes on where it was, as
long as no source and no test has changed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import places
from forked import SOURCES, WORK, Job, preload, run
from places import ROOT, Mutant
from plugin import NOTED, Noting, Telling

#: Their tests need an environment of their own.
APART = {f"tests/long/{name}" for name in ("verl", "areal", "skyrl")}
SLOWER = {"quick": ("engines", "long"), "engines": ("long",)}
CAUGHT = ("caught", "hang")
VERDICTS = (*CAUGHT, "not caught", "not run", "unsure", "equivalent", "gone")


def main() -> None:
    options = arguments()
    if options.redraw:
        print(places.redraw())
        return
    listed = places.load()
    folders = test_folders(options.tests, options.tier)
    state = digest(folders)
    preload()
    entered = Map(folders, state, listed, options)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    rooms = [name and f"{name}/" for name in options.room]
    wanted = [each for each in listed if not options.only or each.id in options.only]
    wanted = [each for each in wanted if f"{each.room}/".startswith(tuple(rooms))]

    def done(mutant: Mutant, **result: Any) -> None:
        results[mutant.id] = {"room": mutant.room, **result, "state": state}
        write(options.out, results)
        cpu_s, by = result.get("cpu_s", 0), result.get("by", "")
        print(f"{mutant.id} {result['verdict']:<10} {cpu_s:5.1f} s  {by}", flush=True)

    jobs, of_job = [], {}
    for mutant in wanted:
        source = ROOT / mutant.file
        mutated = mutant.apply(source.read_text()) if source.exists() else None
        tests, left_out = entered.tests_of(mutant, options.budget)
        if mutant.equivalent:
            done(mutant, verdict="equivalent")
        elif not mutated:
            done(mutant, verdict="gone")
        elif not tests:
            done(mutant, verdict="not run")
        elif options.only or results.get(mutant.id, {}).get("state") != state:
            files = sorted({test.split("::")[0] for test in tests})
            plugin = functools.partial(Telling, wanted=tests, until_failure=True)
            jobs.append(Job(mutant.id, files, plugin, (mutant.file, mutated)))
            of_job[mutant.id] = mutant, {"tests": len(tests), "left_out": left_out}
    run(jobs, options.jobs, lambda job: done(of_job[job.name][0], **verdict_of(job), **of_job[job.name][1]))
    check_catchers(results, state, entered)
    write(options.out, results)
    report(listed, results)
    if options.than:
        before = json.loads(options.than.read_text())
        ended = (*CAUGHT, "equivalent", "gone")
        lost = [name for name, each in before.items() if each["verdict"] in CAUGHT and name in results]
        lost = [name for name in lost if results[name]["verdict"] not in ended]
        print(f"caught in {options.than}, and not now: {' '.join(lost) or 'none'}")


def arguments() -> argparse.Namespace:
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--tests", nargs="+", default=paths, help="folders of tests (those of pyproject.toml)")
    add("--tier", choices=SLOWER, default="quick", help="also the tests under `engines`")
    add("--only", nargs="+", metavar="ID", help="these mutants, also if they were run before")
    add("--room", nargs="+", default=[""], metavar="NAME", help="the mutants of these, such as core/ledger or tools")
    add("--jobs", type=int, choices=(1, 2), default=2)
    add("--budget", type=float, default=40, help="seconds of tests for a mutant: the quickest of those that enter it")
    add("--out", type=Path, default=ROOT / "out" / "mutants.json")
    add("--than", type=Path, help="an earlier result: tells what was caught then and is not now")
    add("--keep-map", action="store_true", help="use the map although sources or tests have changed")
    add("--redraw", action="store_true", help="replace the mutants whose code is gone by new ones")
    return parser.parse_args()


def test_folders(tests: list[str], tier: str) -> list[str]:
    """The folders that hold the files of tests."""
    files = [path.relative_to(ROOT) for each in tests for path in (ROOT / each).rglob("test_*.py")]
    folders = {path.parent for path in files if not set(path.parts) & set(SLOWER[tier])}
    return sorted(str(folder) for folder in folders if not any(folder.is_relative_to(each) for each in APART))


def digest(folders: list[str]) -> str:
    """Of what a result depends on."""
    found = hashlib.sha256()
    for folder in [*SOURCES, *(ROOT / each for each in folders)]:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".lua", ".json")):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


class Map:
    """Which tests enter the functions of the mutants, and how long they take."""

    def __init__(self, folders: list[str], state: str, mutants: list[Mutant], options: argparse.Namespace) -> None:
        self.seconds: dict[str, float] = {}
        self._here: dict[str, list[str]] = {}
        self._elsewhere: dict[str, set[str]] = {}
        functions = {f"{ROOT}/{each.file}::{each.function}" for each in mutants}
        listed = hashlib.sha256("".join(sorted(functions)).encode()).hexdigest()[:16]
        state = f"{'any' if options.keep_map else state} {listed}"
        jobs = []
        for folder in folders:
            cache = _cache(folder)
            if not cache.exists() or not json.loads(cache.read_text())["state"].endswith(state.removeprefix("any")):
                plugin = functools.partial(Noting, folder=ROOT / folder, functions=functions)
                jobs.append(Job(f"map of {folder}", [folder], plugin, first_on_path=NOTED.parent))
        run(jobs, options.jobs, lambda job: self._keep(job, state))
        for folder in folders:
            self._read(json.loads(_cache(folder).read_text())["ran"])

    def _keep(self, job: Job, state: str) -> None:
        said = job.said()
        failed = [each["failed"] for each in said if "failed" in each]
        ran = [each for each in said if "ran" in each]
        print(f"{job.name}: {len(ran)} tests, {said[-1]['cpu_s']} s of CPU; failed, not used: {failed or 'none'}")
        if not any("ended" in each for each in said):
            print(f"  it did not end, see {job.output}", flush=True)
            state = "cut off"
        write(_cache(job.name.removeprefix("map of ")), {"state": state, "ran": ran})

    def _read(self, ran: list[dict[str, Any]]) -> None:
        for each in ran:
            if each["ok"]:
                self.seconds[each["ran"]] = each["s"]
            for function in each["here"]:
                self._here.setdefault(function, []).append(each["ran"])
            for function in each["elsewhere"]:
                self._elsewhere.setdefault(function, set()).add(each["ran"].split("::")[0])

    def tests_of(self, mutant: Mutant, budget_s: float) -> tuple[dict[str, float], int]:
        """The tests that enter the function, and the files that do so in other processes; how many are left out.

        Where none does, the tests of the mutant's room.
        """
        function = f"{ROOT}/{mutant.file}::{mutant.function}"
        here = {test for test in self._here.get(function, ()) if test in self.seconds}
        starts = tuple(f"{file}::" for file in self._elsewhere.get(function, ()))
        if not here and not starts:
            package, _, name = mutant.room.partition("/") if mutant.room.startswith("core/") else (mutant.room, "", "")
            starts = (f"{package}/tests/{name}/" if name else f"{package}/tests/",)
        others = {test for test in self.seconds if test.startswith(starts)} - here
        found: dict[str, float] = {}
        for test in [*sorted(here, key=self.seconds.__getitem__), *sorted(others, key=self.seconds.__getitem__)]:
            budget_s -= self.seconds[test]
            if budget_s >= 0 or not found:
                found[test] = self.seconds[test]
        return found, len(here) + len(others) - len(found)


def _cache(folder: str) -> Path:
    return WORK / f"map_{folder.replace('/', '_')}.json"


def verdict_of(job: Job) -> dict[str, Any]:
    said = job.said()
    result: dict[str, Any] = {"verdict": "caught", "cpu_s": said[-1]["cpu_s"]}
    running = ([""] + [each["test"] for each in said if "test" in each])[-1]
    if failed := [each for each in said if "failed" in each]:
        return result | {"by": failed[0]["failed"], "why": failed[0]["why"]}
    if said[-1]["hung"]:
        return result | {"verdict": "hang", "by": running}
    if any(each.get("ended") == 0 for each in said):
        return result | {"verdict": "not caught"}
    status, why = said[-1]["status"], job.output.read_text()[-2000:]
    return result | {"by": running, "why": f"the process ended with status {status}: {why}"}


def check_catchers(results: dict[str, Any], state: str, entered: Map) -> None:
    """A verdict does not count if its test fails without a fault too."""
    caught = [each for each in results.values() if each["verdict"] == "caught" and each["state"] == state]
    tests = {each["by"]: entered.seconds[each["by"]] for each in caught if each["by"] in entered.seconds}
    files = sorted({test.split("::")[0] for test in tests})
    said: list[dict[str, Any]] = []
    job = Job("control", files, lambda lines: Telling(lines, tests, until_failure=False))
    run([job] if tests else [], 1, lambda job: said.extend(job.said()))
    failed = {each["failed"] for each in said if "failed" in each}
    passed = {each["test"] for each in said if "test" in each} - failed
    print(f"control: {len(passed)} of the {len(tests)} tests that caught a mutant pass without one")
    for each in caught:
        if each["by"] in tests and each["by"] not in passed:
            each["verdict"] = "unsure"


def report(listed: list[Mutant], results: dict[str, Any]) -> None:
    """Prints what was not caught, and a table of the rooms."""
    listed = [each for each in listed if each.id in results]
    for each in listed:
        result = results[each.id]
        if result["verdict"] in ("not caught", "not run", "unsure"):
            print(f"\n{each.id} {result['verdict']} ({result.get('tests', 0)} tests), {each.file}: {each.function}")
            print(f"  - {each.before}\n  + {each.after}")
    groups = {room: [each for each in listed if each.room == room] for room in sorted({each.room for each in listed})}
    print(f"\n{'room':<24}" + "".join(f"{cell:>11}" for cell in ("mutants", *VERDICTS)))
    for name, group in [*groups.items(), ("all", listed)]:
        counts = Counter(results[each.id]["verdict"] for each in group)
        print(f"{name:<24}{len(group):>11}" + "".join(f"{counts[each] or '':>11}" for each in VERDICTS))
    cpu_s = sum(results[each.id].get("cpu_s", 0) for each in listed)
    print(f"{cpu_s / 60:.1f} minutes of CPU, without the map and the control")


def write(path: Path, value: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(value, indent=1) + "\n")
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
