"""A run: starts the workers, lets the nemesis at them, audits the store, and has the history checked."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dataplane_core.errors import ConfigError, DataPlaneError, MissingDataError, OperationTimeoutError
from dataplane_core.spec import Capability, Scope
from dataplane_testkit._author import AuthorsClass, Disturbance
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._profiles import by_profile, is_long, new_seed
from dataplane_testkit._store import Deployment
from dataplane_testkit._timing import Background
from dataplane_testkit._workers import Worker
from dataplane_testkit.chaos.checker import check, shrunk
from dataplane_testkit.chaos.history import OK, REFUSED, UNKNOWN, Call, Event, History, Recorder, read_calls, to_json
from dataplane_testkit.chaos.nemesis import Nemesis
from dataplane_testkit.chaos.page import page
from dataplane_testkit.chaos.rules import Finding
from dataplane_testkit.chaos.schedule import (
    BASE,
    DISRUPTIONS,
    KINDS,
    LATER,
    PARTITIONS,
    TASKS,
    Plan,
    disruptions,
    steps,
)
from dataplane_testkit.chaos.worker import Hands, live, seen_of, tags_seen

#: The process that puts again what killed ones were putting.
HEIR: Final = "heir"
#: The batch size of the claims of the audit.
_AUDIT_CLAIMS: Final = 64
#: The most claims of the audit per task and partition. No store holds so many samples.
_MOST_AUDIT_CLAIMS: Final = 30
#: The reads of the audit that may take longer than their deadline before it stops reading.
_MOST_HUNG: Final = 4
#: The most steps of each life that are written to the folder of a failed run.
_STEPS_SHOWN: Final = 1000
#: Step -> the capability that it needs.
_NEEDS: Final[Mapping[str, Capability]] = {
    "overwrite": Capability.OVERWRITE,
    "put_again": Capability.OVERWRITE,
    "put_later": Capability.OVERWRITE,
    "claim": Capability.CLAIMS,
    "wait": Capability.CLAIMS,
    "consumed": Capability.CLAIMS,
    "ack": Capability.LEASES,
    "nack": Capability.LEASES,
    "renew": Capability.LEASES,
    "list": Capability.LISTING,
    "save": Capability.CURSORS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run goes.

    Attributes:
        seed: The random seed of all schedules.
        schedule_s: How long the workers take steps, in seconds.
        workers: How many processes, or threads of a backend of scope process.
        pause_s: The mean pause between two steps of a worker, in seconds.
        every_s: The mean time between two kills or stops, in seconds.
        lease_s: The lease of a claim, in seconds.
        op_timeout_s: The deadline of a call, in seconds.
        allowance_s: Seconds that a call may take beyond its deadline on a busy machine.
        capacity_bytes: What the store may hold, if the backend can limit it.
        kills: How many processes are killed, each after some calls, in place of kills and stops by the clock. With the
            last of them the run is over. None: the clock decides.
        faults: What is done to the processes and the store: ``kill``, ``stop``, and names of the store's disturbances.
            None: all of it.
        steps: What the workers do, of `KINDS`. None: all that the store can do.
    """

    seed: int
    schedule_s: float
    workers: int = 3
    pause_s: float = 0.05
    every_s: float = 2.0
    lease_s: float = 1.0
    op_timeout_s: float = 30.0
    allowance_s: float = 15.0
    capacity_bytes: int = 640 * 1024
    kills: int | None = None
    faults: frozenset[str] | None = None
    steps: frozenset[str] | None = None

    @classmethod
    def brief(cls) -> Settings:
        """For a backend's own tests: 10 s with few calls and a fixed seed. 30 s and a new seed under the profile long;
        4 s, in which faults follow each other faster, under the profile brief.

        ``DATAPLANE_CONFORMANCE_SEED`` sets the seed.
        """
        if is_long():
            return cls(seed=new_seed(), schedule_s=30.0)
        schedule_s = by_profile(4.0, 10.0, 30.0)
        seed = int(os.environ.get("DATAPLANE_CONFORMANCE_SEED") or 1)
        return cls(seed=seed, schedule_s=schedule_s, pause_s=0.15, every_s=schedule_s / 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run found.

    Attributes:
        findings: The rules that were broken.
        seen: Of a store that does not promise all rules of the contract: the others that its history breaks.
        history: The history.
        facts: What ran, in a sentence.
        page: The path of the page. None if nothing was found.
    """

    findings: tuple[Finding, ...]
    history: History
    facts: str
    page: Path | None
    seen: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        lines = [self.facts, *self.found(), *([f"see {self.page}"] if self.page else [])]
        return "\n".join(lines)

    def found(self) -> list[str]:
        """What was found, as lines of text."""
        faults = [f"FAULT {each.rule}: {each.text}" for each in self.findings]
        return [*faults, *(f"seen, not promised: {each.rule}: {each.text}" for each in self.seen)]

    @property
    def passed(self) -> bool:
        """Whether no rule was broken."""
        return not self.findings

    def counts(self) -> dict[str, dict[str, int]]:
        """Operation -> outcome, or the class of the error -> how many calls."""
        found: dict[str, Counter[str]] = {}
        for call in self.history.calls:
            how = call.error_name if call.outcome == REFUSED else call.outcome
            found.setdefault(call.operation, Counter())[how] += 1
        return {operation: dict(found[operation].most_common()) for operation in sorted(found)}

    def table(self) -> list[str]:
        """The counts as lines of text."""
        return [
            f"  {operation:<9} " + ", ".join(f"{count} {how}" for how, count in counts.items())
            for operation, counts in self.counts().items()
        ]

    def summary(self) -> dict[str, Any]:
        """The verdict in plain values."""
        return {
            "passed": self.passed,
            "facts": self.facts,
            "calls": self.counts(),
            "events": dict(Counter(event.kind for event in self.history.events)),
            "findings": [_plain(each) for each in self.findings],
            "seen": [_plain(each) for each in self.seen],
            "page": None if self.page is None else str(self.page),
        }


def _plain(found: Finding) -> dict[str, Any]:
    return {"rule": found.rule, "text": found.text, "calls": [call.name for call in found.calls]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The store that a run works on.

    Attributes:
        client: What `Hands` call, in this process.
        op_timeout_s: Its deadline of a call, in seconds.
        new_worker: Starts a process with a client that is attached to the store.
        threaded: Whether the workers are threads that share ``client``.
        steps: What the workers can do, of `KINDS`.
        disturbances: Name -> what can be done to the store.
        tags: Whether the store holds tags.
        atomic_overwrite: As in `History`.
        fenced: As in `History`.
    """

    client: Any
    op_timeout_s: float
    new_worker: Callable[[], Worker]
    threaded: bool = False
    steps: frozenset[str] = KINDS
    disturbances: Mapping[str, Disturbance]
    tags: bool = True
    atomic_overwrite: bool = True
    fenced: bool = True


def _of(deployment: Deployment, settings: Settings) -> Target:
    declared = deployment.backend_class.capabilities
    threaded = deployment.backend_class.scope is Scope.PROCESS
    return Target(
        client=deployment.client,
        op_timeout_s=deployment.client.config.op_timeout_s,
        new_worker=partial(deployment.new_worker, op_timeout_s=settings.op_timeout_s),
        threaded=threaded,
        steps=frozenset(step for step in KINDS if step not in _NEEDS or _NEEDS[step] in declared),
        disturbances={} if threaded else deployment.case.disturbances(backend_of(deployment.client)),
        atomic_overwrite=Capability.ATOMIC_OVERWRITE in declared,
        fenced=Capability.FENCED in declared,
    )


#: Findings, each with the history in which `check` finds it.
Found = list[tuple[Finding, History]]
#: Gives what a history breaks of what the store promises, and of what it does not.
Judge = Callable[[History], tuple[Found, Found]]


def by_the_contract(history: History) -> tuple[Found, Found]:
    """The `Judge` of a store that promises what the contract says."""
    return [(each, history) for each in check(history)], []


def run_chaos(
    case: AuthorsClass,
    options: Mapping[str, Any],
    settings: Settings,
    *,
    folder: Path,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Runs a random schedule under kills and stops, and checks its history against the contract.

    It blocks for the time of the schedule, and as long as the store and the audit take besides.

    Args:
        case: An object of the author's class, or of a bare subclass of `AuthorsClass` that names the backend.
        options: The backend's options. The run uses an isolated store, with a small capacity if it can be limited.
        settings: How the run goes.
        folder: If something is found: gets the page, the history of each process, and the schedules.
        command: The command that repeats the run, for the page.
        progress: Called a few times a second with what is going on.

    Returns:
        What was found.

    Raises:
        DataPlaneError: The store cannot be started, or the workers made no call in the time of the schedule.
    """
    backend_class = case.under_test()
    capacity_bytes = settings.capacity_bytes if Capability.CAPACITY in backend_class.capabilities else None
    isolated = case.isolated_options(dict(options), f"chaos-{os.getpid()}")
    if capacity_bytes is not None:
        # with every fourth seed puts wait for room, with the others they are refused
        isolated |= {"capacity_bytes": capacity_bytes, "on_full": "raise" if settings.seed % 4 else "block"}
    progress("starting the store")
    # of scope process, the workers share this client; elsewhere it has the time to start the store
    threaded = backend_class.scope is Scope.PROCESS
    timeout_s = settings.op_timeout_s if threaded else max(case.op_timeout_s, settings.op_timeout_s)
    with closing(Deployment(case, isolated, op_timeout_s=timeout_s)) as deployment:
        write = partial(page, deployment.name, command)
        return run_on(_of(deployment, settings), settings, capacity_bytes, by_the_contract, write, folder, progress)


def run_on(
    target: Target,
    settings: Settings,
    capacity_bytes: int | None,
    judge: Judge,
    write: Callable[[Found, str, Found], str],
    folder: Path,
    progress: Callable[[str], None],
) -> Verdict:
    """Runs a schedule on a store and has its history judged.

    Args:
        target: The store.
        settings: As for `run_chaos`.
        capacity_bytes: What the store may hold.
        judge: Judges the history.
        write: What was found, each with its shrunk history, the facts, and what was seen and not promised -> the page.
        folder: As for `run_chaos`.
        progress: As for `run_chaos`.
    """
    with _Run(target, settings, capacity_bytes, progress) as run:
        history = run.history()
        progress("checking the history")
        broken, seen = judge(history)
        facts = run.facts(history)
        path = None
        if broken or seen:
            progress("shortening the history")
            found, other = ([(each, shrunk(held, each)) for each, held in part] for part in (broken, seen))
            path = run.keep(folder, history, write(found, facts, other))
        return Verdict(
            findings=tuple(each for each, _ in broken),
            seen=tuple(each for each, _ in seen),
            history=history,
            facts=facts,
            page=path,
        )


def history_of(deployment: Deployment, settings: Settings) -> History:
    """The history of a run on a store that others use too: there is no limit to what it may hold."""
    with _Run(_of(deployment, settings), settings, None) as run:
        return run.history()


def _chosen(target: Target, settings: Settings) -> tuple[dict[str, Disturbance], list[str]]:
    """The disturbances of a run, and the kinds of its disruptions."""
    known = {"kill", "stop", *target.disturbances}
    faults = known if settings.faults is None else settings.faults
    for what, asked, has in (("faults", faults, known), ("steps", settings.steps or (), target.steps)):
        if unknown := sorted(set(asked) - has):
            raise ConfigError(f"{what}: '{unknown[0]}' cannot be done to this store. Expected some of {sorted(has)}.")
    disturbances = {name: each for name, each in target.disturbances.items() if name in faults}
    kinds = [kind for kind in DISRUPTIONS if kind in faults or (kind == "disturb" and disturbances)]
    return disturbances, kinds


class _Run(ExitStack):
    """A run on a store. It ends its processes with the block, and leaves the store to its owner."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        capacity_bytes: int | None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self._target, self._settings, self._progress = target, settings, progress
        self._capacity = capacity_bytes
        self._disturbances, self._disruptions = _chosen(target, settings)
        self._folder = Path(tempfile.mkdtemp(prefix="dataplane-chaos-"))
        self.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._tasks = tuple(TASKS) if "claim" in target.steps else ()
        steps = target.steps if settings.steps is None else target.steps & settings.steps
        self._plan = Plan(
            settings.seed,
            settings.pause_s,
            settings.lease_s,
            steps,
            self._tasks or ("once",),
            leases="ack" in target.steps,
            tags=target.tags,
        )
        self._epoch_s = time.monotonic()
        self._events: list[Event] = []
        self._processes: list[str] = []
        self._audited_s = float("inf")

    def history(self) -> History:
        """Runs the schedule and the audit."""
        settings, first, heir = self._settings, self._hands("first", 900_000_000), self._hands(HEIR, 901_000_000)
        for partition in PARTITIONS if "register" in self._target.steps else ():
            first.register(partition, "register")
        if self._target.threaded:
            self._threads()
        else:
            self._workers()
        workers = [self._folder / f"{name}.jsonl" for name in self._processes if name.startswith("w")]
        if not any(path.stat().st_size for path in workers):
            raise OperationTimeoutError(
                f"a chaos run refused to judge: no worker made a call in the {settings.schedule_s:g} s of the run. "
                "Expected some.",
                hint="The machine may be too busy: run it again, for longer. Or no step makes a call by itself: ack, "
                "nack and renew need claim.",
            )
        if settings.kills is not None:
            self._put_again(heir)
        self._audited_s = self._now()
        audit = self._hands("audit", 902_000_000)
        self._take_the_rest(audit)
        for partition in PARTITIONS:
            self._read_all(audit, partition)
        calls, end_s = self._calls(), self._now()
        calls += self._saves(calls)
        for partition in PARTITIONS:
            self._target.client.clear_samples(None, partition)
        return History(
            calls=tuple(calls),
            events=tuple(self._events),
            end_s=end_s,
            audited_s=self._audited_s,
            capacity_bytes=self._capacity,
            atomic_overwrite=self._target.atomic_overwrite,
            fenced=self._target.fenced,
            allowance_s=settings.allowance_s,
        )

    def facts(self, history: History) -> str:
        """What ran, in a sentence."""
        outcomes = Counter(call.outcome for call in history.calls)
        kinds = Counter(event.kind for event in history.events)
        done = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "no kills"
        return (
            f"Seed {self._settings.seed}: {len(history.calls)} calls of {len(self._processes) - 3} processes in "
            f"{self._settings.schedule_s:g} s ({outcomes[OK]} succeeded, {outcomes['refused']} were refused, "
            f"{outcomes[UNKNOWN]} have an unknown outcome); {done}."
        )

    def keep(self, folder: Path, history: History, text: str) -> Path:
        """Writes the page, the histories and the schedules."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._processes:
            shutil.copy(self._folder / f"{name}.jsonl", folder / f"{name}.jsonl")
            worker, _, life = name.removeprefix("w").partition(".")
            if name.startswith("w"):
                lines = zip(range(_STEPS_SHOWN), steps(self._plan, int(worker), int(life)), strict=False)
                schedule = "\n".join(str(step) for _, step in lines)
                (folder / f"{name}.schedule.txt").write_text(schedule + "\n", encoding="utf-8")
        (folder / "history.json").write_text(to_json(history), encoding="utf-8")
        path = folder / "finding.md"
        path.write_text(text, encoding="utf-8")
        return path

    # --- workers ------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._epoch_s

    def _calls(self) -> list[Call]:
        return [call for name in self._processes for call in read_calls(self._folder / f"{name}.jsonl", name)]

    def _hands(self, process: str, first_version: int) -> Hands:
        self._processes.append(process)
        recorder = Recorder(self._folder / f"{process}.jsonl", process, self._epoch_s)
        self.callback(recorder.close)
        target = self._target
        return Hands(target.client, recorder, self._plan, first_version, target.op_timeout_s, self._folder)

    def _arguments(self, worker: int, life: int, until_s: float) -> tuple[Any, ...]:
        name = f"w{worker}.{life}"
        self._processes.append(name)
        path = self._folder / f"{name}.jsonl"
        path.touch()
        return self._plan, worker, life, str(path), self._epoch_s, until_s, self._settings.op_timeout_s

    def _threads(self) -> None:
        until_s = time.monotonic() + self._settings.schedule_s
        arguments = [self._arguments(worker, 0, until_s) for worker in range(self._settings.workers)]
        threads = [Background(partial(live, self._target.client, *each)) for each in arguments]
        give_up = until_s + self._settings.op_timeout_s + self._settings.allowance_s
        while any(thread.running for thread in threads) and time.monotonic() < give_up:
            time.sleep(0.05)
            self._progress(self._time_left(until_s))
        for thread in threads:
            if not thread.running:
                thread.result()  # raises what a step raised

    def _workers(self) -> None:
        settings, disturbances = self._settings, self._disturbances
        nemesis = Nemesis(self._target.new_worker, self._arguments, self._events, self._now, disturbances)
        with nemesis:
            nemesis.start(settings.workers)
            until_s = time.monotonic() + settings.schedule_s
            nemesis.begin(until_s)
            if settings.kills is not None:
                nemesis.kill_all(settings.kills, settings.seed, until_s)
                return
            began = time.monotonic()
            planned = disruptions(self._plan, settings.workers, settings.every_s, self._disruptions)
            for each in planned if self._disruptions else ():
                while time.monotonic() < min(began + each.at_s, until_s):
                    nemesis.continue_those_due()
                    self._progress(self._time_left(until_s))
                    time.sleep(0.05)
                if time.monotonic() >= until_s:
                    break
                nemesis.do(each, until_s)
            nemesis.finish(until_s + settings.op_timeout_s + settings.allowance_s)

    def _time_left(self, until_s: float) -> str:
        left_s = max(0.0, until_s - time.monotonic())
        kinds = Counter(event.kind for event in self._events)
        return f"{left_s:.0f} s left, {kinds['kill']} kills, {kinds['stop']} stops"

    def _put_again(self, heir: Hands) -> None:
        """Puts what killed workers were putting."""
        for partition in PARTITIONS if "register" in self._target.steps else ():
            heir.register(partition, "keep")
        for call in self._calls():
            if call.operation == "put" and call.outcome == UNKNOWN:
                fields = tuple(field for field in call.fields if not field.startswith("#"))
                tag = "v" if fields == BASE else "z"
                if "overwrite" in self._plan.steps or not heir.read(call.partition, call.samples, fields):
                    heir.write(call.partition, call.samples, fields, tag, [3] * len(call.samples))

    # --- the audit ----------------------------------------------------------------------------------------------------

    def _take_the_rest(self, audit: Hands) -> None:
        """Claims (and acks) for all tasks until nothing has come back for longer than any lease lasts."""
        left = {(partition, task) for partition in PARTITIONS for task in self._tasks}
        last = time.monotonic()
        given: Counter[tuple[str, str]] = Counter()
        tells = "consumed" in self._target.steps
        while left and time.monotonic() < last + 3 * self._settings.lease_s + 1:
            for partition, task in sorted(left):
                self._progress(f"auditing task {task} of {partition}")
                meta = audit.claim(partition, task, _AUDIT_CLAIMS)
                if meta is None:  # why is in the history
                    left.discard((partition, task))
                elif meta.size:
                    given[partition, task] += 1
                    if given[partition, task] > _MOST_AUDIT_CLAIMS:  # a store that gives the same again and again
                        left.discard((partition, task))
                    last = time.monotonic()
                    if self._plan.lease_of(task) is not None:
                        if tells:
                            audit.consumed(partition, task)  # not yet: these are not acked
                        audit.ack(meta)
                elif (tells and audit.consumed(partition, task)) or self._plan.lease_of(task) is None:
                    left.discard((partition, task))
            time.sleep(0.2)

    def _read_all(self, audit: Hands, partition: str) -> None:
        names, hung = audit.listed(partition), 0
        for start in range(0, len(names), 16):
            for field in (*BASE, LATER):
                for name in names[start : start + 16]:
                    began = time.monotonic()
                    audit.read(partition, [name], (field,))
                    hung += time.monotonic() - began > self._target.op_timeout_s
                    if hung > _MOST_HUNG:  # as of a store whose parts are dead: all others may take as long
                        return

    def _saves(self, calls: list[Call]) -> list[Call]:
        """What the saves hold, each loaded into the store, which nobody uses any more."""
        client, found = self._target.client, []
        for call in [each for each in calls if each.operation == "save"]:
            about: dict[str, Any] = {"process": call.process, "number": call.number + 1_000_000, "operation": "saved"}
            about |= {"partition": call.partition, "begin_s": call.begin_s, "end_s": call.end_s}
            folder = self._folder / f"save-{call.process}-{call.version}-{call.partition}"
            if call.outcome == "refused":
                continue
            try:
                for partition in PARTITIONS:  # which makes room
                    client.clear_samples(None, partition)
                client.load(folder)
                meta = client.list_samples(call.partition)
                seen = dict(zip(meta.sample_ids, map(tags_seen, meta.tags or []), strict=True))
                fields = dict(zip(meta.sample_ids, client.list_fields(meta.sample_ids, call.partition), strict=True))
                for name in meta.sample_ids:
                    mine = [each for each in fields[name] if each in (*BASE, LATER)]
                    seen[name] |= seen_of(client.get_samples([name], call.partition, mine), [name], mine)[name]
                found.append(Call(**about, outcome=OK, samples=tuple(meta.sample_ids), seen=seen))
            except MissingDataError as error:
                if call.outcome == OK:
                    found.append(Call(**about, outcome=UNKNOWN, error=f"{type(error).__name__}: {error}"))
            except DataPlaneError as error:
                found.append(Call(**about, outcome=UNKNOWN, error=f"{type(error).__name__}: {error}"))
        return found
