"""Two hosts on one machine: network namespaces joined by a cable, a Ray head in one and a node in the other.

Each host has a link-local interface besides, which its system lists first: what asks the system for "the" address of
the host gets one that the other cannot reach.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane_testkit._timing import eventually

_PROGRAM = Path(__file__).parent / "engines" / "hosts" / "crossing.py"
_RAY_PORT = 6399
_NUMBERS = itertools.count()
#: Only what hangs takes this long; a busy machine may need minutes to start the processes of both hosts.
_CROSSING_TIMEOUT_S = 400
#: Ray turns token authentication on where an earlier `ray.init` left a token, and then refuses drivers without one.
_ENV = {"RAY_AUTH_MODE": "disabled"}


class Host:
    """A network namespace with an address on the cable and a link-local one that leads nowhere."""

    def __init__(self, name, address):
        self.name = name
        self.address = address
        self._mount: tuple[str, ...] = ()

    def mount(self, own, seen_at):
        """What is started from now on sees a folder of this host's own where all hosts have one."""
        self._mount = ("sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(own), str(seen_at))

    def start(self, *words, env=None, **options):
        """Starts a program on this host."""
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        inherited["MC_TCP_BIND_ADDRESS"] = "169.254.7.1"  # as from elsewhere
        options = {"stdin": subprocess.DEVNULL, "text": True, "env": {**inherited, **_ENV, **(env or {})}, **options}
        return subprocess.Popen(["ip", "netns", "exec", self.name, *self._mount, *words], **options)

    def run(self, *words):
        """Runs a program on this host to its end."""
        return _run("ip", "netns", "exec", self.name, *words)

    def kill(self):
        """Kills all that runs on this host, by process id."""

        def are_gone():
            pids = _run("ip", "netns", "pids", self.name).split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            return not pids

        eventually(are_gone, 30.0)

    def close(self):
        """Ends what still runs on the host, and the host."""
        self.kill()
        _run("ip", "netns", "delete", self.name)


class Pair:
    """The two hosts, and what was started on them."""

    def __init__(self, here, there, folder, sessions):
        self.here = here
        self.there = there
        self.ray_address = f"{here.address}:{_RAY_PORT}"
        self._folder = folder
        self._sessions = sessions
        self._started: list[subprocess.Popen[str]] = []

    def start_head(self, *, num_cpus=1, redis=""):
        """Starts Ray's head on the first host, also again. It keeps its state in the Redis at this address, if any."""
        # Ray looks there, and among the processes of both hosts, for a head that runs already.
        (self._sessions / "ray_current_cluster").unlink(missing_ok=True)
        words = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", f"--temp-dir={self._sessions}"]
        self._start_ray(self.here, num_cpus, *words, env={"RAY_REDIS_ADDRESS": redis} if redis else {})

    def start_node(self, host, *, num_cpus=1):
        """Starts a Ray node on a host, also again."""
        self._start_ray(host, num_cpus, f"--address={self.ray_address}")

    def _start_ray(self, host, num_cpus, *words, env=None):
        common = ["--disable-usage-stats", "--include-log-monitor=false", "--no-monitor", "--block"]
        common += [f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}", "--object-store-memory=100000000"]
        ray = str(Path(sys.executable).with_name("ray"))
        with (self._folder / f"{host.name}.log").open("w+") as log:
            process = host.start(ray, "start", *words, *common, env=env, stdout=log, stderr=subprocess.STDOUT)
            self._started.append(process)
            _await_ray(process, log)

    def start_redis(self, host):
        """Starts a Redis server that both hosts can reach; its address."""
        words = ["--bind", host.address, "--protected-mode", "no", "--save", "", "--dir", str(self._folder)]
        self._started.append(host.start("redis-server", *words, stdout=subprocess.DEVNULL))
        ping = "redis-cli", "-h", host.address, "ping"
        eventually(lambda: self.here.start(*ping, stdout=subprocess.DEVNULL).wait() == 0, 60.0)
        return f"{host.address}:6379"

    def cut(self):
        """Unplugs the cable on the second host: it knows that it has no network, and the first one does not."""
        self.there.run("ip", "link", "set", "cable", "down")

    def join(self):
        """Plugs the cable in again."""
        self.there.run("ip", "link", "set", "cable", "up")

    def close(self):
        """Has Ray end what it started."""
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cross(self, *backends):
        """Runs ``crossing.py`` on the first host; what it found for each."""
        redis = f"redis://{self.start_redis(self.here)}/0"
        words = [sys.executable, str(_PROGRAM), self.ray_address, self.there.address, redis, *backends]
        with (self._folder / "crossing.err").open("w+") as err:
            program = self.here.start(*words, stdout=subprocess.PIPE, stderr=err)
            try:
                out, _ = program.communicate(timeout=_CROSSING_TIMEOUT_S)
            finally:
                if program.returncode is None:
                    program.kill()
                    program.communicate()
            err.seek(0)
            assert program.returncode == 0, err.read()[-4000:]
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The pair, with Ray on both hosts."""
    with _made(tmp_path_factory.mktemp("hosts")) as pair:
        pair.start_head()
        pair.start_node(pair.there)
        yield pair


@pytest.fixture
def mortal_pair(tmp_path):
    """A pair of a test's own, on which nothing runs yet."""
    with _made(tmp_path) as pair:
        yield pair


@contextlib.contextmanager
def _made(folder):
    """Makes a pair. Skips the test, with the reason, where the machine allows no namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("not run: no `ip` on the PATH (apt-get install iproute2)")
    if os.geteuid() != 0:
        pytest.skip("not run: network namespaces need root")
    number = next(_NUMBERS)
    names = [f"dataplane-{os.getpid()}-{number}{each}" for each in "ab"]
    here, there = (Host(name, f"10.213.77.{number}") for number, name in enumerate(names, 1))
    with contextlib.ExitStack() as stack:
        try:
            for host in (here, there):
                _run("ip", "netns", "add", host.name)
                stack.callback(host.close)
                # the trap comes first, in age and in name
                host.run("ip", "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
                for end in range(2):
                    host.run("ip", "address", "add", f"169.254.7.{end + 1}/16", "dev", f"aaa{end}")
                    host.run("ip", "link", "set", f"aaa{end}", "up")
                host.run("ip", "link", "set", "lo", "up")
            here.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", there.name)
            for host in (here, there):
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
                host.run("ip", "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"not run: this machine allows no network namespaces: {error.stderr.strip()}")
        # Ray keeps unix sockets there, whose paths must be short.
        sessions = Path(f"/tmp/dp-hosts-{os.getpid()}-{number}")
        stack.callback(shutil.rmtree, sessions, ignore_errors=True)
        pair = Pair(here, there, folder, sessions)
        stack.callback(pair.close)
        yield pair


def _run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def _await_ray(process, log):
    def runs():
        log.seek(0)
        said = log.read()
        assert process.poll() is None, said
        return "Ray runtime started" in said

    eventually(runs, 120.0, "the start of Ray")
