"""A run: starts the workers, kills, stops and continues them, audits the store, and has the history checked."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from dataplane_core.errors import ConfigError, DataPlaneError, MissingDataError, OperationTimeoutError, printable
from dataplane_core.spec import Capability, Scope
from dataplane_testkit._author import AuthorsClass, Disturbance
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._store import OwnerChangedError, Store
from dataplane_testkit._timing import STARTS_S, Background, eventually
from dataplane_testkit._workers import Worker
from dataplane_testkit.chaos.checker import GRANTED, RULES, Finding, Judged, judged, shrunk
from dataplane_testkit.chaos.history import OK, REFUSED, UNKNOWN, Call, Event, History, read_calls, said
from dataplane_testkit.chaos.worker import (
    BASE,
    LATER,
    MEDIA,
    PARTITIONS,
    ROLLOUTS,
    SHARE_ABOVE,
    STEPS,
    TASKS,
    Hands,
    Plan,
    Settings,
    live,
    seen_of,
    shown_by,
)

#: The process that puts again what killed ones were putting.
HEIR: Final = "heir"
#: Seconds beyond its deadline for which a put of a killed process may hold bytes, and between two looks at these.
_ABANDONED_S: Final = 40.0
_HELD_LOOK_S: Final = 2.0
#: The batch size of the claims of the audit, and the most of them per task and partition. No store holds so many.
_AUDIT_CLAIMS: Final = 64
_MOST_AUDIT_CLAIMS: Final = 30
#: The reads of the audit that may take longer than their deadline before it stops reading.
_MOST_HUNG: Final = 4
#: How likely it is that a worker is killed or stopped, or that something is done to the store.
_WEIGHTS: Final[Mapping[str, float]] = {"kill": 5, "stop": 4}
_OTHERS: Final = 2
#: How long it lasts, in leases: some stops outlast them.
_LENGTHS: Final = (0.2, 0.5, 1.5, 3.0)
#: Seconds between two looks at workers that end, and at whether a call begins.
_LOOK_S: Final = 0.02
_AIM_LOOK_S: Final = 0.0002
#: Seconds for which it waits for a call of the worker that it is about to kill or stop.
_AIM_S: Final = 1.0
#: How many calls a worker has made when `Run._kill_all` kills it.
_CALLS: Final = 15
#: The most calls that are listed per finding, the most samples per call, and the most characters of a call.
_MOST_CALLS: Final = 60
_MOST_SAMPLES: Final = 6
_MOST_CHARACTERS: Final = 300
_LEGEND: Final = (
    "Times are seconds since the run began. A call takes effect at some moment between its begin and its end. `w0.2` "
    "is worker 0 in its life 2: a new life begins after each kill. The calls with `*` prove the fault; without the "
    "others it would not be certain. `#v` is the tag that holds the version, `#z` that of the field `z`."
)


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
        return "\n".join([self.facts, *self.found(), f"see {self.page}" if self.page else "nothing was found"])

    def found(self) -> list[str]:
        """What was found, as lines of text."""
        faults = [f"FAULT {finding.rule}: {finding.text}" for finding in self.findings]
        return [*faults, *(f"seen, not promised: {finding.rule}: {finding.text}" for finding in self.seen)]

    @property
    def passed(self) -> bool:
        """Whether no rule was broken."""
        return not self.findings

    def counts(self) -> dict[str, dict[str, int]]:
        """Operation -> outcome, or the class of the error -> how many calls."""
        counts: dict[str, Counter[str]] = {}
        for call in self.history.calls:
            how = call.error_name if call.outcome == REFUSED else call.outcome
            counts.setdefault(call.operation, Counter())[how] += 1
        return {operation: dict(counts[operation].most_common()) for operation in sorted(counts)}

    def table(self) -> list[str]:
        """The counts as lines of text."""
        rows = {operation: [f"{count} {how}" for how, count in row.items()] for operation, row in self.counts().items()}
        return [f"  {operation:<9} {', '.join(row)}" for operation, row in rows.items()]

    def summary(self) -> dict[str, Any]:
        """The verdict in plain values."""
        findings, seen = (
            [{"rule": one.rule, "text": one.text, "calls": [call.name for call in one.calls]} for one in part]
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
    how: dict[str, Any] = {"op_timeout_s": max(starts_s, settings.op_timeout_s), "share_above": SHARE_ABOVE}
    with (
        closing(Store(case, isolated, **how, read_cache_bytes=0)) as store,  # the audit fetches each cell
        run_on(store, settings, progress, capacity_bytes, store.held() if store.can_say_held else None) as run,
    ):
        return run.verdict(store.name, folder, command)


def run_on(
    store: Store,
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
    capacity_bytes: int | None = None,
    grown: Callable[[], int] | None = None,
) -> Run:
    """A run on a store. One that others use too has no capacity, and nobody can say what it holds."""
    cls = store.backend_class
    able, threaded = cls.capabilities, cls.scope is Scope.PROCESS or settings.num_steps is not None
    how: dict[str, Any] = {"op_timeout_s": settings.op_timeout_s, "share_above": SHARE_ABOVE}
    return Run(
        settings,
        progress,
        client=store.client,
        op_timeout_s=store.client.config.op_timeout_s,
        new_worker=None if threaded else partial(store.new_worker, **how),
        steps=frozenset(step for step, (needed, _) in STEPS.items() if needed is None or needed in able),
        disturbances={} if threaded else store.case.disturbances(backend_of(store.client)),
        base=(*BASE, MEDIA) if cls.wire.by_content else BASE,
        grown=grown,
        capacity_bytes=capacity_bytes,
        atomic_overwrite=Capability.ATOMIC_OVERWRITE in able,
        fenced=Capability.FENCED in able,
    )


@dataclass(slots=True)
class _Life:
    """A worker from its start to its kill. While it is stopped: since when, and when to continue it."""

    number: int
    life: int
    process: Worker
    stopped_s: float | None = None
    due_s: float = 0.0

    @property
    def name(self) -> str:
        return f"w{self.number}.{self.life}"


class Run(ExitStack):
    """A run on a store: the workers, which get a new life after each kill, and what is done to them and to the store.

    It ends its processes with the block, and leaves the store to its owner. Without ``new_worker``, the workers are
    threads with ``client``. ``promised`` is what a `History` says of the store.
    """

    def __init__(
        self,
        settings: Settings,
        progress: Callable[[str], None],
        *,
        client: Any,
        op_timeout_s: float,
        new_worker: Callable[[], Worker] | None,
        steps: frozenset[str],
        disturbances: Mapping[str, Disturbance],
        tags: bool = True,
        base: tuple[str, ...] = BASE,
        grown: Callable[[], int] | None = None,
        **promised: Any,
    ) -> None:
        super().__init__()
        self._settings, self._progress, self._promised, self._grown = settings, progress, promised, grown
        self._client, self._op_timeout_s, self._new_worker = client, op_timeout_s, new_worker
        possible: dict[str, Disturbance | None] = {"kill": None, "stop": None, **disturbances}
        faults, chosen = settings.faults, steps if settings.steps is None else settings.steps
        for what, asked, has in (("faults", faults or (), sorted(possible)), ("steps", chosen, sorted(steps))):
            if unknown := sorted(set(asked) - set(has)):
                raise ConfigError(f"{what}: '{unknown[0]}' cannot be done to this store. Expected some of {has}.")
        self._faults = {name: disturbance for name, disturbance in possible.items() if faults is None or name in faults}
        self._able = steps
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="dataplane-chaos-")))
        self._plan = Plan(
            settings=settings,
            folder=self._folder,
            epoch_s=time.monotonic(),
            steps=chosen,
            leases="ack" in steps,
            tags=tags,
            base=base,
        )
        self._events: list[Event] = []
        self._processes: list[str] = []
        self._workers: dict[int, _Life] = {}
        self._until_s = 0.0

    def verdict(self, name: str, folder: Path, command: str, promises: Mapping[str, str] | None = None) -> Verdict:
        """Runs the schedule and has its history judged: by ``promises``, as in `Shim`, or by the whole contract."""
        history = self.history()
        self._progress("checking the history")
        broken, seen = judged(history, promises)
        facts, path = self._facts(history), None
        if broken or seen:
            self._progress("shortening the history")
            short = [[(finding, shrunk(held, finding)) for finding, held in part] for part in (broken, seen)]
            folder.mkdir(parents=True, exist_ok=True)
            for process in self._processes:
                shutil.copy(self._plan.file_of(process), folder)
            (folder / "history.json").write_text(json.dumps(asdict(history)), encoding="utf-8")
            path = folder / "finding.md"
            path.write_text(page(name, command, short[0], facts, short[1], promises), encoding="utf-8")
        findings, others = (tuple(finding for finding, _ in part) for part in (broken, seen))
        return Verdict(findings=findings, seen=others, history=history, facts=facts, page=path)

    def history(self) -> History:
        """Runs the schedule and the audit."""
        settings = self._settings
        registers = self._plan.partitions if "register" in self._able else ()
        first, heir = self._hands("first", 900_000_000), self._hands(HEIR, 901_000_000)
        for partition in registers:
            first.register(partition, "register")
        if self._new_worker is None:
            self._run_threads()
        else:
            self._run_processes(self._new_worker)
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
        for partition in PARTITIONS if "list" in self._able else ():
            self._read_all(audit, partition)
        calls, end_s = self._calls(), self._now()
        saved = [loaded for call in calls if call.operation == "save" for loaded in self._saved(call)]
        for partition in self._plan.partitions:
            audit.clear_all(partition)
        how: dict[str, Any] = {"end_s": end_s, "audited_s": audited_s, "allowance_s": settings.allowance_s}
        how["left_bytes"] = self._left_bytes()
        return History(calls=(*self._calls(), *saved), events=tuple(self._events), **how, **self._promised)

    def _left_bytes(self) -> int | None:
        """By how many bytes the engine has grown, once no dead process can hold any. None: nobody can say."""
        give_up = time.monotonic() + self._settings.op_timeout_s + _ABANDONED_S
        with suppress(OwnerChangedError):
            while self._grown is not None:
                left_bytes = max(0, self._grown())
                if not left_bytes or time.monotonic() > give_up:
                    return left_bytes
                self._progress(f"{left_bytes} bytes are left, perhaps of puts under way")
                time.sleep(_HELD_LOOK_S)
                self._client.clear_samples(None, PARTITIONS[0])  # collects what was abandoned
        return None

    def _facts(self, history: History) -> str:
        """What ran, in a sentence."""
        outcomes = Counter(call.outcome for call in history.calls)
        kinds = Counter(event.kind for event in history.events)
        done = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "no kills"
        return (
            f"Seed {self._settings.seed}: {len(history.calls)} calls of {len(self._processes) - 3} processes in "
            f"{history.audited_s:.0f} s ({outcomes[OK]} succeeded, {outcomes[REFUSED]} were refused, "
            f"{outcomes[UNKNOWN]} have an unknown outcome); {done}."
            + ("" if history.left_bytes is None else f" At the end, {history.left_bytes} bytes were left.")
        )

    def _now(self) -> float:
        return time.monotonic() - self._plan.epoch_s

    def _look(self) -> None:
        left_s, kinds = self._settings.schedule_s - self._now(), Counter(event.kind for event in self._events)
        self._progress(f"{max(0.0, left_s):.0f} s left, {kinds['kill']} kills, {kinds['stop']} stops")

    def _calls(self) -> list[Call]:
        return [call for name in self._processes for call in read_calls(self._plan.file_of(name), name)]

    def _hands(self, process: str, first_version: int) -> Hands:
        self._processes.append(process)
        limit_s = self._op_timeout_s  # also of leases: the audit acks in time, however busy the machine is
        plan = replace(self._plan, settings=replace(self._settings, op_timeout_s=limit_s, lease_s=limit_s))
        return self.enter_context(closing(Hands(self._client, plan, process, first_version)))

    def _put_again(self, heir: Hands) -> None:
        """Puts what killed workers were putting."""
        for call in self._calls():
            if call.operation == "put" and call.outcome == UNKNOWN and call.partition == ROLLOUTS:
                heir.end_group(call.samples[0])
            elif call.operation == "put" and call.outcome == UNKNOWN:
                fields = tuple(name for name in call.fields if not name.startswith("#"))
                if "overwrite" in self._plan.steps or not heir.read(call.partition, call.samples, fields):
                    heir.write(call.partition, call.samples, fields)

    def _run_threads(self) -> None:
        until_s = time.monotonic() + self._settings.schedule_s
        give_up = until_s + self._settings.op_timeout_s + self._settings.allowance_s
        threads = []
        for worker in range(self._settings.workers):
            self._add(f"w{worker}.0")
            threads.append(Background(partial(live, self._client, self._plan, worker, 0, until_s)))
        while any(thread.running for thread in threads) and time.monotonic() < give_up:
            time.sleep(0.05)
            self._look()
        for thread in threads:
            if not thread.running:
                thread.result()  # raises what a step raised

    def _run_processes(self, new_worker: Callable[[], Worker]) -> None:
        settings = self._settings
        try:
            for number in range(settings.workers):
                self._workers[number] = _Life(number, 0, new_worker())
            for worker in self._workers.values():
                worker.process.wait_ready()
            self._until_s = time.monotonic() + settings.schedule_s
            for worker in self._workers.values():
                self._begin(worker)
            if settings.kills is None:
                self._disrupt(new_worker)
                self._finish(self._until_s + settings.op_timeout_s + settings.allowance_s)
            else:
                self._kill_all(settings.kills, new_worker)
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.close()

    def _disrupt(self, new_worker: Callable[[], Worker]) -> None:
        """Kills and stops workers and disturbs the store, until the time is over."""
        faults, every_s = self._faults, self._settings.every_s
        rng, due_s = random.Random(f"{self._settings.seed} nemesis"), time.monotonic() + every_s / 2
        others = len(faults.keys() - _WEIGHTS.keys())
        weights = [_WEIGHTS.get(name) or _OTHERS / others for name in faults]
        while True:
            due_s += rng.uniform(0.3, 1.7) * every_s if faults else math.inf
            while time.monotonic() < min(due_s, self._until_s):
                self._continue(self._now())
                self._look()
                time.sleep(0.05)
            if time.monotonic() >= self._until_s:
                return
            name, number = rng.choices(list(faults), weights)[0], rng.randrange(len(self._workers))
            for_s, disturbance = rng.choice(_LENGTHS) * self._settings.lease_s, faults[name]
            if disturbance is not None:
                began_s = self._now()
                with disturbance.act():
                    time.sleep(for_s if disturbance.lasts else 0.0)
                times = {"begin_s": began_s, "end_s": self._now()}
                self._events.append(Event(kind=name, process="", **times, loses_data=disturbance.loses_data))
                continue
            self._stop(self._workers[number], rng.random(), for_s)
            if name == "kill":
                self._kill(self._workers[number], new_worker)

    def _kill_all(self, count: int, new_worker: Callable[[], Worker]) -> None:
        """Kills so many workers, each after some calls, or fewer if the time is over. When it returns, none is left."""

        def has_called(worker: _Life) -> bool:
            if worker.process.replied:
                worker.process.result()  # raises what ended it
            is_over = time.monotonic() >= self._until_s
            return is_over or self._plan.file_of(worker.name).read_bytes().count(b"\n") >= 2 * _CALLS

        rng, size, turn = random.Random(self._settings.seed), len(self._workers), 0
        within_s = STARTS_S + _CALLS * self._settings.op_timeout_s  # each may be a put that waits for room
        while self._workers:
            worker = self._workers[turn % size]
            eventually(partial(has_called, worker), within_s, f"the first calls of {worker.name}")
            self._look()
            self._stop(worker, rng.random(), operation="put")
            goes_on = turn < count - size and time.monotonic() < self._until_s
            self._kill(worker, new_worker if goes_on else None)
            turn += 1

    def _finish(self, give_up: float) -> None:
        """Waits until all workers have ended, but not for ever: their last calls are then ones that never ended."""
        self._continue(math.inf)
        for worker in self._workers.values():
            while not worker.process.replied and time.monotonic() < give_up:
                time.sleep(_LOOK_S)
            if worker.process.replied:
                worker.process.result()  # raises what the worker raised, or that it died by itself

    def _add(self, name: str) -> None:
        self._processes.append(name)
        self._plan.file_of(name).touch()

    def _begin(self, worker: _Life) -> None:
        self._add(worker.name)
        worker.process.start(live, self._plan, worker.number, worker.life, self._until_s)

    def _kill(self, worker: _Life, new_worker: Callable[[], Worker] | None) -> None:
        """Kills a worker that is stopped, and gives it a new life, if there is to be one."""
        worker.process.kill()
        self._add_event("kill", worker)
        worker.process.close()
        del self._workers[worker.number]
        if new_worker is not None:
            renewed = self._workers[worker.number] = _Life(worker.number, worker.life + 1, new_worker())
            renewed.process.wait_ready()
            self._begin(renewed)

    def _continue(self, by_s: float) -> None:
        """Continues the workers whose stop is over by a moment."""
        for worker in self._workers.values():
            if worker.stopped_s is not None and worker.due_s <= by_s:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGCONT)
                self._add_event("stop", worker)

    def _add_event(self, kind: str, worker: _Life) -> None:
        assert worker.stopped_s is not None
        self._events.append(Event(kind=kind, process=worker.name, begin_s=worker.stopped_s, end_s=self._now()))
        worker.stopped_s = None

    def _stop(self, worker: _Life, choice: float, for_s: float = 0.0, operation: str = "") -> None:
        """Stops a worker in the middle of a call, if one begins soon: most of the time it pauses.

        ``choice``: at which part of the time that its calls took so far. ``operation``: which call it must be.
        """
        if worker.stopped_s is not None:
            return
        path, text = self._plan.file_of(worker.name), b""
        calls = [call for call in read_calls(path, worker.name) if operation in ("", call.operation)]
        after_s = choice * statistics.median([call.end_s - call.begin_s for call in calls if call.outcome == OK] or [0])
        with path.open("rb") as file:

            def in_call() -> bool:
                """Each call is a line at its start and one at its end."""
                nonlocal text
                text += file.read()
                *lines, _ = text.split(b"\n")
                return len(lines) % 2 == 1 and operation in ("", json.loads(lines[-1])["operation"])

            worker.stopped_s, give_up = self._now(), time.monotonic() + _AIM_S
            while True:
                over = time.monotonic() > give_up
                if in_call() or over:
                    time.sleep(after_s)
                    os.kill(worker.process.pid, signal.SIGSTOP)
                    if in_call() or over:
                        break
                    os.kill(worker.process.pid, signal.SIGCONT)
                time.sleep(_AIM_LOOK_S)
        worker.due_s = self._now() + for_s

    def _take_the_rest(self, audit: Hands) -> None:
        """Claims (and acks) for all tasks until nothing has come back for longer than any lease lasts."""
        tasks = TASKS if "claim" in self._able else ()
        left = {(partition, task) for partition in self._plan.partitions for task in tasks}
        gave_s, tells = time.monotonic(), "consumed" in self._able
        claims: Counter[tuple[str, str]] = Counter()
        while left:
            for partition, task in sorted(left):
                self._progress(f"auditing task {task} of {partition}")
                begin_s, leased = time.monotonic(), self._plan.lease_of(task) is not None
                meta = audit.claim(partition, task, _AUDIT_CLAIMS)
                if meta is None:
                    over = True  # why is in the history
                elif meta.size:
                    claims[partition, task] += 1
                    if partition == ROLLOUTS:
                        audit.read(partition, meta.sample_ids, self._plan.base)
                    over = claims[partition, task] > _MOST_AUDIT_CLAIMS  # a store that gives the same again and again
                    if leased and tells:
                        audit.consumed(partition, task)  # not yet: these are not acked
                    if leased:
                        audit.settle("ack", meta)
                    gave_s = time.monotonic()
                else:
                    over = not leased or (tells and audit.consumed(partition, task))
                    over = over or begin_s > gave_s + 3 * self._settings.lease_s + 1
                left -= {(partition, task)} if over else set()
            time.sleep(0.2)

    def _read_all(self, audit: Hands, partition: str) -> None:
        names, hung = audit.listed(partition), 0
        for start in range(0, len(names), 16):
            for field in (*self._plan.base, LATER):
                for name in names[start : start + 16]:
                    began_s = time.monotonic()
                    audit.read(partition, [name], (field,))
                    hung += time.monotonic() - began_s > self._op_timeout_s
                    if hung > _MOST_HUNG:  # as of a store whose parts are dead: all others may take as long
                        return

    def _saved(self, save: Call) -> list[Call]:
        """What a save holds, loaded into the store, which nobody uses any more. Nothing if there is no save."""
        client, partition = self._client, save.partition
        loaded = replace(save, number=save.number + 1_000_000, operation="saved", outcome=UNKNOWN)
        if save.outcome == REFUSED:
            return []
        try:
            for name in PARTITIONS:  # which makes room
                client.clear_samples(None, name)
            client.load(self._folder / f"save-{save.process}-{save.version}-{partition}")
            meta = client.list_samples(partition)
            shown = shown_by(meta)
            for name, fields in zip(meta.sample_ids, client.list_fields(meta.sample_ids, partition), strict=True):
                mine = [field for field in fields if field in (*self._plan.base, LATER)]
                rows = client.get_samples([name], partition, mine)
                shown["seen"][name] |= seen_of(rows, partition, [name], mine)[name]
            return [replace(loaded, outcome=OK, error="", samples=tuple(meta.sample_ids), seen=shown["seen"])]
        except DataPlaneError as error:
            absent = isinstance(error, MissingDataError) and save.outcome != OK
            return [] if absent else [replace(loaded, error=said(error))]


def page(
    name: str,
    command: str,
    broken: Sequence[Judged],
    facts: str,
    seen: Sequence[Judged] = (),
    promises: Mapping[str, str] | None = None,
) -> str:
    """The page: what was found, each with its shrunk history. What is ``seen`` breaks the contract, but no promise."""
    count = "1 fault" if len(broken) == 1 else f"{len(broken)} faults"
    lines = [f"# {count} of {name} under chaos", "", facts, "", "The same schedule again (times will differ):", ""]
    lines += [f"    {command}", ""]
    for number, (finding, history) in enumerate([*broken, *seen], start=1):
        promise = None if promises is None else promises.get(finding.rule)
        title = finding.rule if number <= len(broken) else f"Seen, not promised: {finding.rule}"
        lines += [f"## {number}. {title}", "", finding.text, "", f'The contract: "{RULES[finding.rule]}"', ""]
        if promises is not None:
            lines += ["The store does not promise this." if promise is None else f"The store: {promise}", ""]
        if promise is not None and number > len(broken):
            lacks = ", ".join(f"`{name}`" for name in GRANTED if name not in (promises or {}))
            lines += [f"This takes for granted some of what the store does not promise: {lacks}.", ""]
        lines += [*(f"    {line}" for line in table(finding, history)), ""]
    return "\n".join(map(printable, [*lines, _LEGEND])) + "\n"


def table(finding: Finding, history: History) -> list[str]:
    """The calls of a history and what was done meanwhile, one per line. Those that prove the finding have a star."""
    proof = {call.name for call in finding.calls}
    calls = list(history.calls)
    if len(calls) > _MOST_CALLS:
        calls = [call for call in calls if call.name in proof][-_MOST_CALLS:]
    since_s = min((call.begin_s for call in calls), default=0.0) - 1
    until_s = max((min(call.end_s, call.begin_s + 60) for call in calls), default=0.0) + 1
    shown: list[Call | Event] = [*calls, *(event for event in history.events if since_s <= event.begin_s <= until_s)]
    return [_line(entry, proof) for entry in sorted(shown, key=lambda entry: entry.begin_s)]


def _line(entry: Call | Event, proof: set[str]) -> str:
    end = "never" if math.isinf(entry.end_s) else f"{entry.end_s:.3f}"
    if isinstance(entry, Call):
        star = "*" if entry.name in proof else " "
        text = f"{entry.name:<9} {_asked(entry)} -> {_reply(entry)}"
        text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    else:
        what = {"kill": "kill -9", "stop": "stopped with SIGSTOP, then continued"}.get(entry.kind, entry.kind)
        star, text = " ", f"{entry.process or 'the store':<9} {what}"
    return f"{entry.begin_s:8.3f} {end:>8} {star} {text}"


def _asked(call: Call) -> str:
    words = [call.operation, call.partition, call.task and f"task {call.task}"]
    words += [f"version {call.version}" if call.operation == "put" else "", ",".join(call.fields)]
    if call.operation == "claim":
        words.append(f"{'a full batch of' if call.blocking else 'up to'} {call.limit}")
    words += [f"lease {call.lease_s:g} s" if call.lease_s is not None else "", "everything" if call.whole else ""]
    words += [_samples(call)] if call.operation not in ("claim", "list", "saved") else []
    return " ".join(filter(None, words))


def _reply(call: Call) -> str:
    if call.outcome != OK:
        return f"{call.outcome} {call.error}".strip()
    if call.operation == "consumed":
        return str(call.flag)
    return _samples(call) or "nothing" if call.operation in ("get", "claim", "list", "saved") else "ok"


def _samples(call: Call) -> str:
    """The samples of a call, with the ends of their tokens and with what the reply showed of them."""
    tokens = dict(zip(call.samples, call.tokens, strict=False))
    shown = []
    for sample in call.samples[:_MOST_SAMPLES]:
        cells = " ".join(f"{name}={version}" for name, version in call.seen.get(sample, {}).items())
        token = f"({tokens[sample][-6:]})" if tokens.get(sample) else ""
        shown.append(" ".join(filter(None, [sample, token, cells])))
    more = len(call.samples) - _MOST_SAMPLES
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
