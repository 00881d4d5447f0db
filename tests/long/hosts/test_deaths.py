"""Ray's head, a node, and the network between two hosts go and come back, while four processes put, claim and read."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataplane_testkit._timing import eventually

pytestmark = pytest.mark.timeout(900)

_PROGRAM = Path(__file__).with_name("going_on.py")
_STARTS_S = 60.0
_SEEN_S = 2 * _STARTS_S
#: Ray takes a node that does not answer for dead after about 30 s.
_OP_TIMEOUT_S = 180.0
_ACTS = ("put", "lease", "take", "read")


class Process:
    """A process on a host that runs `going_on.py`."""

    def __init__(self, pair, host, act, config, log):
        words = [sys.executable, str(_PROGRAM), act, json.dumps(config), pair.ray_address, host.address]
        self.what = act
        self._log = log
        with log.open("w") as err:
            pipe = subprocess.PIPE
            self._process = host.start(*words, stdin=pipe, stdout=pipe, stderr=err)

    def hear(self):
        """The next line that it prints."""
        line = self._process.stdout.readline()
        assert line, f"{self.what} ended: {self._log.read_text()[-4000:]}"
        return json.loads(line)

    def tell(self, *words):
        """Calls a method. Its value is the next line."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def ask(self, *words):
        """Calls a method, and returns its value."""
        self.tell(*words)
        return self.hear()

    def has_ended(self):
        """Whether it has ended."""
        return self._process.poll() is not None

    def close(self):
        """Has it close its client, and end."""
        assert self.ask("close") == "closed"
        assert self._process.wait(_STARTS_S) == 0

    def end(self):
        """Ends it."""
        if not self.has_ended():
            self._process.kill()
        self._process.communicate()


class Run:
    """An instance, and four processes on the given hosts that put, claim and read."""

    def __init__(self, pair, folder, hosts, backend, **options):
        self._pair = pair
        self._folder = folder
        self._stack = contextlib.ExitStack()
        own = {"instance": "goes-on", "journal_sync": False, **options}
        if backend == "tq_mooncake":
            own |= {"num_storage_units": 2, "segment_size_bytes": 32 << 20, "local_buffer_size_bytes": 4 << 20}
        self._config = {"backend": backend, "op_timeout_s": _OP_TIMEOUT_S, "options": own}
        with contextlib.ExitStack() as stack:
            stack.callback(self._stack.close)
            self.owner = self.start("own", hosts["own"])
            assert self.owner.hear() == "connected"
            self.workers = [self.start(act, hosts[act]) for act in _ACTS]
            for each in self.workers:
                assert each.hear() == "connected"
            apart = self.start("put_there", pair.there)  # the unit of its host has these rows
            assert apart.hear() == "connected"
            eventually(lambda: apart.ask("state")["rounds"] > 3, _SEEN_S)
            self._apart = apart.ask("stop")["done"]
            apart.close()
            stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, act, host):
        """Starts a process."""
        process = Process(self._pair, host, act, self._config, self._folder / f"{act}.err")
        self._stack.callback(process.end)
        return process

    def all_go_on(self, workers=None):
        """All, or these, do their thing some more times."""
        workers = self.workers if workers is None else workers

        def rounds():
            states = [each.ask("state") for each in workers]
            assert [each["failure"] for each in states if each["failure"]] == []
            return [each["rounds"] for each in states]

        before = rounds()
        eventually(lambda: all(now > then + 2 for now, then in zip(rounds(), before, strict=True)), _OP_TIMEOUT_S)

    def eventually_nodes(self, count):
        """Waits until Ray takes so many nodes for alive."""
        eventually(lambda: self.owner.ask("num_nodes") == count, _SEEN_S)

    def eventually_units(self, *states):
        """Waits until all storage units are in one of these states."""
        eventually(lambda: set(self.owner.ask("states_of_units")) <= set(states), _SEEN_S)

    def check(self):
        """Stops the processes. Each committed sample is there or lost, and was given once. Returns the lost ones."""
        for each in self.workers:
            each.tell("stop")
        end = [f"end-{row}" for row in range(6)]
        self.owner.ask("put", end)  # for a claim that waits
        states = {each.what: each.hear() for each in self.workers}
        assert [each["failure"] for each in states.values() if each["failure"]] == []
        mine = states["put"]["done"] + self._apart + end
        assert sorted(self.owner.ask("samples")) == sorted(mine)
        assert set(states["read"]["done"]) <= set(mine)
        for task, act in (("leased", "lease"), ("taken", "take")):
            rest = self.owner.ask("rest", task)
            assert sorted([*states[act]["done"], *rest]) == sorted(mine), f"{task}: each is given once"
        return self.owner.ask("lost", mine)

    def close(self):
        """Has all processes close their clients."""
        for each in (*self.workers, self.owner):
            each.close()


@pytest.fixture
def journal(tmp_path):
    """A folder for the journals of controllers, which is empty at the end."""
    folder = tmp_path / "journal"
    folder.mkdir()
    yield str(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("backend", ["tq_simple", "tq_mooncake"])
def test_the_head_dies_and_comes_back(mortal_pair, tmp_path, journal, backend):
    """With its state in a Redis. Meanwhile all go on; but a controller that dies then starts only when it is back."""
    pair = mortal_pair
    redis = pair.start_redis(pair.there)
    pair.start_head(num_cpus=0, redis=redis)
    pair.start_node(pair.there)
    hosts = dict.fromkeys(("own", *_ACTS), pair.there)
    with Run(pair, tmp_path, hosts, backend, journal=journal, controller_num_cpus=1) as run:
        run.all_go_on()
        pid, address = run.owner.ask("controller")
        assert address == pair.there.address
        pair.here.kill()
        run.all_go_on()
        os.kill(pid, signal.SIGKILL)
        pair.start_head(num_cpus=0, redis=redis)
        run.all_go_on()
        late = run.start("read", pair.there)
        assert late.hear() == "connected"
        eventually(lambda: late.ask("state")["rounds"], _SEEN_S)
        late.close()
        assert run.check() == []
        run.close()


@pytest.mark.parametrize("backend", ["tq_simple", "tq_mooncake"])
def test_a_node_dies_with_the_controller_and_a_unit(mortal_pair, tmp_path, journal, backend):
    """The controller waits for a node with CPUs for it. What only that unit held is lost and named."""
    pair = mortal_pair
    pair.start_head()
    pair.start_node(pair.there, num_cpus=2)
    hosts = dict.fromkeys(("own", *_ACTS), pair.here)
    with Run(pair, tmp_path, hosts, backend, journal=journal, controller_num_cpus=2) as run:
        run.all_go_on()
        old, address = run.owner.ask("controller")
        assert address == pair.there.address
        put_before = run.owner.ask("samples")
        pair.there.kill()
        run.eventually_nodes(1)
        pair.start_node(pair.there, num_cpus=2)
        run.all_go_on()
        assert run.owner.ask("controller")[0] != old
        if backend == "tq_simple":
            run.eventually_units("serving", "removed")
        lost = run.check()
        assert 0 < len(set(lost) & set(put_before)) < len(put_before)
        run.close()


@pytest.mark.parametrize("silent", [False, True])
def test_nodes_with_durable_units_die_and_come_back(mortal_pair, tmp_path, silent):
    """First one node, then both, each with a folder of its own. A silent one is as without power: nothing is closed."""
    pair, folder = mortal_pair, tmp_path / "durable"
    folder.mkdir()
    for host in (pair.here, pair.there):
        own = tmp_path / f"of {host.name}"
        own.mkdir()
        host.mount(own, folder)

    def start_nodes():
        pair.start_head()
        pair.start_node(pair.there)

    start_nodes()
    hosts = dict.fromkeys(("own", *_ACTS), pair.here)
    with Run(pair, tmp_path, hosts, "tq_simple", durable=str(folder), unit_bytes=64 << 20) as run:
        for turn in range(int(os.environ.get("DATAPLANE_KILL_ROUNDS", "1"))):
            run.all_go_on()
            put_before = run.owner.ask("samples")
            if silent:
                pair.cut()
            else:
                pair.there.kill()
            meanwhile = [f"m{turn}-{row}" for row in range(6)]
            eventually(lambda: "starting" in run.owner.ask("states_of_units"), _SEEN_S)
            run.owner.ask("put", meanwhile)
            assert run.owner.ask("lost", meanwhile) == [], "the other node serves on"
            if silent:
                pair.there.kill()
                pair.join()
            pair.start_node(pair.there)
            run.eventually_units("serving")
            run.all_go_on()
            assert run.owner.ask("lost", put_before) == []
        done = {each.what: each.ask("so_far") for each in run.workers}
        committed = run.owner.ask("samples")
        pair.there.kill()
        pair.here.kill()
        start_nodes()
        owner = run.start("own", pair.here)
        assert owner.hear() == "connected"
        samples = owner.ask("samples")
        assert set(committed) <= set(samples)
        assert owner.ask("lost", samples) == []
        for task, act in (("leased", "lease"), ("taken", "take")):
            assert not set(owner.ask("rest", task)) & set(done[act]), f"{task}: given again"
        owner.close()


@pytest.mark.parametrize("backend", ["tq_simple", "tq_mooncake"])
@pytest.mark.parametrize("controller", ["here", "there"])
def test_the_network_is_cut_and_joined(mortal_pair, tmp_path, journal, backend, controller):
    """Cut for seconds, all wait. Cut for longer, Ray gives the second host up: the first one goes on with what it has,
    and the second one when it is joined again. A controller that was given up gives nothing any longer.
    """
    pair = mortal_pair
    pair.start_head(num_cpus=2 if controller == "here" else 1)
    pair.start_node(pair.there, num_cpus=2 if controller == "there" else 1)
    hosts = {"own": pair.here, "put": pair.here, "lease": pair.here, "take": pair.there, "read": pair.there}
    with Run(pair, tmp_path, hosts, backend, journal=journal, controller_num_cpus=2) as run:
        run.all_go_on()
        old, address = run.owner.ask("controller")
        assert address == getattr(pair, controller).address
        pair.cut()
        time.sleep(5)
        pair.join()
        run.all_go_on()
        assert run.owner.ask("num_nodes") == 2
        if controller == "there":
            pair.start_node(pair.here, num_cpus=2)  # for a new controller
        put_before = run.owner.ask("samples")
        pair.cut()
        run.eventually_nodes(2 if controller == "there" else 1)
        near = [each for each in run.workers if hosts[each.what] is pair.here]
        run.all_go_on(near)
        assert (run.owner.ask("controller")[0] == old) == (controller == "here")
        pair.join()
        run.all_go_on()
        if backend == "tq_simple":
            run.eventually_units("serving", "removed")
        lost = run.check()
        assert 0 < len(set(lost) & set(put_before)) < len(put_before)
        run.close()
