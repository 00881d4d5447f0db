"""A run: starts the workers, lets the nemesis at them, audits the store, and has the history checked."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
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
from dataplane_testkit.chaos.checker import judged, shrunk
from dataplane_testkit.chaos.history import OK, REFUSED, UNKNOWN, Call, Event, History, read_calls, said
from dataplane_testkit.chaos.nemesis import Nemesis
from dataplane_testkit.chaos.page import page
from dataplane_testkit.chaos.rules import Finding
from dataplane_testkit.chaos.worker import BASE, LATER, PARTITIONS, STEPS, TASKS, Hands, Plan, live, seen_of, shown_by

#: The process that puts again what killed ones were putting.
HEIR: Final = "heir"
#: The batch size of the claims of the audit, and the most of them per task and partition. No store holds so many.
_AUDIT_CLAIMS: Final = 64
_MOST_AUDIT_CLAIMS: Final = 30
#: The reads of the audit that may take longer than their deadline before it stops reading.
_MOST_HUNG: Final = 4


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
        steps: What the workers do, such as ``put`` and ``claim``. None: all that the store can do.
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
        return "\n".join([self.facts, *self.found(), *([f"see {self.page}"] if self.page else [])])

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
        rows = {operation: [f"{count} {how}" for how, count in row.items()] for operation, row in self.counts().items()}
        return [f"  {operation:<9} {', '.join(row)}" for operation, row in rows.items()]

    def summary(self) -> dict[str, Any]:
        """The verdict in plain values."""
        findings, seen = (
            [{"rule": each.rule, "text": each.text, "calls": [call.name for call in each.calls]} for each in part]
            for part in (self.findings, self.seen)
        )
        return {
            "passed": self.passed,
            "facts": self.facts,
            "calls": self.counts(),
            "events": dict(Counter(event.kind for event in self.history.events)),
            "findings": findings,
            "seen": seen,
            "page": None if self.page is None else str(self.page),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The store that a run works on."""

    name: str
    #: What `Hands` call in this process, and its deadline of a call.
    client: Any
    op_timeout_s: float
    #: Starts a process with a client that is attached to the store. None: the workers are threads with ``client``.
    new_worker: Callable[[], Worker] | None
    #: The steps that the store can take, and what can be done to it.
    steps: frozenset[str]
    disturbances: Mapping[str, Disturbance]
    #: What the store may hold, and whether it holds tags.
    capacity_bytes: int | None = None
    tags: bool = True
    #: As in `History`.
    atomic_overwrite: bool = True
    fenced: bool = True
    #: As in `Shim`. None: the whole contract.
    promises: Mapping[str, str] | None = None


def _of(deployment: Deployment, settings: Settings, capacity_bytes: int | None) -> Target:
    declared = deployment.backend_class.capabilities
    threaded = deployment.backend_class.scope is Scope.PROCESS
    return Target(
        name=deployment.name,
        client=deployment.client,
        op_timeout_s=deployment.client.config.op_timeout_s,
        new_worker=None if threaded else partial(deployment.new_worker, op_timeout_s=settings.op_timeout_s),
        steps=frozenset(step for step, (needed, _) in STEPS.items() if needed is None or needed in declared),
        disturbances={} if threaded else deployment.case.disturbances(backend_of(deployment.client)),
        capacity_bytes=capacity_bytes,
        atomic_overwrite=Capability.ATOMIC_OVERWRITE in declared,
        fenced=Capability.FENCED in declared,
    )


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
        folder: If something is found: gets the page and the history of each process.
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
    starts_s = 0.0 if backend_class.scope is Scope.PROCESS else case.op_timeout_s
    with closing(Deployment(case, isolated, op_timeout_s=max(starts_s, settings.op_timeout_s))) as deployment:
        return run_on(_of(deployment, settings, capacity_bytes), settings, folder, command, progress)


def run_on(target: Target, settings: Settings, folder: Path, command: str, progress: Callable[[str], None]) -> Verdict:
    """Runs a schedule on a store and has its history judged. The arguments are those of `run_chaos`."""
    with _Run(target, settings, progress) as run:
        history = run.history()
        progress("checking the history")
        broken, seen = judged(history, target.promises)
        facts, path = run.facts(history), None
        if broken or seen:
            progress("shortening the history")
            short = [[(each, shrunk(held, each)) for each, held in part] for part in (broken, seen)]
            run.keep(folder, history)
            path = folder / "finding.md"
            path.write_text(page(target.name, command, short[0], facts, short[1], target.promises), encoding="utf-8")
        findings, others = (tuple(each for each, _ in part) for part in (broken, seen))
        return Verdict(findings=findings, seen=others, history=history, facts=facts, page=path)


def history_of(deployment: Deployment, settings: Settings) -> History:
    """The history of a run on a store that others use too: there is no limit to what it may hold."""
    with _Run(_of(deployment, settings, None), settings) as run:
        return run.history()


class _Run(ExitStack):
    """A run on a store. It ends its processes with the block, and leaves the store to its owner."""

    def __init__(self, target: Target, settings: Settings, progress: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self._target, self._settings, self._progress = target, settings, progress
        known: dict[str, Disturbance | None] = {"kill": None, "stop": None, **target.disturbances}
        faults, steps = settings.faults, target.steps if settings.steps is None else settings.steps
        for what, asked, has in (("faults", faults or (), sorted(known)), ("steps", steps, sorted(target.steps))):
            if unknown := sorted(set(asked) - set(has)):
                raise ConfigError(f"{what}: '{unknown[0]}' cannot be done to this store. Expected some of {has}.")
        self._faults = {name: each for name, each in known.items() if faults is None or name in faults}
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="dataplane-chaos-")))
        self._plan = Plan(
            seed=settings.seed,
            folder=self._folder,
            epoch_s=time.monotonic(),
            pause_s=settings.pause_s,
            lease_s=settings.lease_s,
            op_timeout_s=settings.op_timeout_s,
            steps=steps,
            leases="ack" in target.steps,
            tags=target.tags,
        )
        self._events: list[Event] = []
        self._processes: list[str] = []

    def history(self) -> History:
        """Runs the schedule and the audit."""
        settings, target = self._settings, self._target
        registers = PARTITIONS if "register" in target.steps else ()
        first, heir = self._hands("first", 900_000_000), self._hands(HEIR, 901_000_000)
        for partition in registers:
            first.register(partition, "register")
        if target.new_worker is None:
            self._threads()
        else:
            with closing(Nemesis(self._plan, target.new_worker, self._processes, self._events)) as nemesis:
                nemesis.start(settings.workers, settings.schedule_s)
                if settings.kills is None:
                    nemesis.disrupt(self._faults, settings.every_s, self._look)
                    nemesis.finish(settings.op_timeout_s + settings.allowance_s)
                else:
                    nemesis.kill_all(settings.kills)
        if not any(call.process.startswith("w") for call in self._calls()):
            raise OperationTimeoutError(
                f"a chaos run refused to judge: no worker made a call in the {settings.schedule_s:g} s of the run. "
                "Expected some.",
                hint="The machine may be too busy: run it again, for longer. Or no step makes a call by itself: ack, "
                "nack and renew need claim.",
            )
        if settings.kills is not None:
            for partition in registers:
                heir.register(partition, "keep")
            self._put_again(heir)
        audited_s, audit = self._now(), self._hands("audit", 902_000_000)
        self._take_the_rest(audit)
        for partition in PARTITIONS:
            self._read_all(audit, partition)
        calls, end_s = self._calls(), self._now()
        calls += [each for call in calls if call.operation == "save" for each in self._saved(call)]
        for partition in PARTITIONS:
            target.client.clear_samples(None, partition)
        return History(
            calls=tuple(calls),
            events=tuple(self._events),
            end_s=end_s,
            audited_s=audited_s,
            capacity_bytes=target.capacity_bytes,
            atomic_overwrite=target.atomic_overwrite,
            fenced=target.fenced,
            allowance_s=settings.allowance_s,
        )

    def facts(self, history: History) -> str:
        """What ran, in a sentence."""
        outcomes = Counter(call.outcome for call in history.calls)
        kinds = Counter(event.kind for event in history.events)
        done = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "no kills"
        return (
            f"Seed {self._settings.seed}: {len(history.calls)} calls of {len(self._processes) - 3} processes in "
            f"{self._settings.schedule_s:g} s ({outcomes[OK]} succeeded, {outcomes[REFUSED]} were refused, "
            f"{outcomes[UNKNOWN]} have an unknown outcome); {done}."
        )

    def keep(self, folder: Path, history: History) -> None:
        """Writes the history, whole and of each process."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._processes:
            shutil.copy(self._plan.file_of(name), folder)
        (folder / "history.json").write_text(json.dumps(asdict(history)), encoding="utf-8")

    def _now(self) -> float:
        return time.monotonic() - self._plan.epoch_s

    def _look(self) -> None:
        left_s, kinds = self._settings.schedule_s - self._now(), Counter(event.kind for event in self._events)
        self._progress(f"{max(0.0, left_s):.0f} s left, {kinds['kill']} kills, {kinds['stop']} stops")

    def _calls(self) -> list[Call]:
        return [call for name in self._processes for call in read_calls(self._plan.file_of(name), name)]

    def _hands(self, process: str, first_version: int) -> Hands:
        self._processes.append(process)
        plan = replace(self._plan, op_timeout_s=self._target.op_timeout_s)
        return self.enter_context(closing(Hands(self._target.client, plan, process, first_version)))

    def _threads(self) -> None:
        until_s = time.monotonic() + self._settings.schedule_s
        give_up = until_s + self._settings.op_timeout_s + self._settings.allowance_s
        threads = []
        for worker in range(self._settings.workers):
            self._processes.append(f"w{worker}.0")
            self._plan.file_of(f"w{worker}.0").touch()
            threads.append(Background(partial(live, self._target.client, self._plan, worker, 0, until_s)))
        while any(thread.running for thread in threads) and time.monotonic() < give_up:
            time.sleep(0.05)
            self._look()
        for thread in threads:
            if not thread.running:
                thread.result()  # raises what a step raised

    def _put_again(self, heir: Hands) -> None:
        """Puts what killed workers were putting."""
        for call in self._calls():
            if call.operation == "put" and call.outcome == UNKNOWN:
                fields = tuple(name for name in call.fields if not name.startswith("#"))
                if "overwrite" in self._plan.steps or not heir.read(call.partition, call.samples, fields):
                    heir.write(call.partition, call.samples, fields)

    # --- the audit ----------------------------------------------------------------------------------------------------

    def _take_the_rest(self, audit: Hands) -> None:
        """Claims (and acks) for all tasks until nothing has come back for longer than any lease lasts."""
        tasks = TASKS if "claim" in self._target.steps else ()
        left = {(partition, task) for partition in PARTITIONS for task in tasks}
        last, tells = time.monotonic(), "consumed" in self._target.steps
        given: Counter[tuple[str, str]] = Counter()
        while left and time.monotonic() < last + 3 * self._settings.lease_s + 1:
            for partition, task in sorted(left):
                self._progress(f"auditing task {task} of {partition}")
                meta, leased = audit.claim(partition, task, _AUDIT_CLAIMS), self._plan.lease_of(task) is not None
                if meta is None:
                    over = True  # why is in the history
                elif meta.size:
                    last, given[partition, task] = time.monotonic(), given[partition, task] + 1
                    over = given[partition, task] > _MOST_AUDIT_CLAIMS  # a store that gives the same again and again
                    if leased and tells:
                        audit.consumed(partition, task)  # not yet: these are not acked
                    if leased:
                        audit.settle("ack", meta)
                else:
                    over = not leased or (tells and audit.consumed(partition, task))
                left -= {(partition, task)} if over else set()
            time.sleep(0.2)

    def _read_all(self, audit: Hands, partition: str) -> None:
        names, hung = audit.listed(partition), 0
        for start in range(0, len(names), 16):
            for field in (*BASE, LATER):
                for name in names[start : start + 16]:
                    began_s = time.monotonic()
                    audit.read(partition, [name], (field,))
                    hung += time.monotonic() - began_s > self._target.op_timeout_s
                    if hung > _MOST_HUNG:  # as of a store whose parts are dead: all others may take as long
                        return

    def _saved(self, save: Call) -> list[Call]:
        """What a save holds, loaded into the store, which nobody uses any more. Nothing if there is no save."""
        client, partition = self._target.client, save.partition
        loaded = replace(save, number=save.number + 1_000_000, operation="saved", outcome=UNKNOWN)
        if save.outcome == REFUSED:
            return []
        try:
            for each in PARTITIONS:  # which makes room
                client.clear_samples(None, each)
            client.load(self._folder / f"save-{save.process}-{save.version}-{partition}")
            meta = client.list_samples(partition)
            shown = shown_by(meta)
            for name, fields in zip(meta.sample_ids, client.list_fields(meta.sample_ids, partition), strict=True):
                mine = [each for each in fields if each in (*BASE, LATER)]
                shown["seen"][name] |= seen_of(client.get_samples([name], partition, mine), [name], mine)[name]
            return [replace(loaded, outcome=OK, error="", samples=tuple(meta.sample_ids), seen=shown["seen"])]
        except DataPlaneError as error:
            absent = isinstance(error, MissingDataError) and save.outcome != OK
            return [] if absent else [replace(loaded, error=said(error))]
