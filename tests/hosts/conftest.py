"""Two hosts on one machine: network namespaces joined by a cable, a Ray head in one and a node in the other.

Each host has a link-local interface besides, which its system lists first: what asks the system for "the" address of
the host gets one that the other cannot reach.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).with_name("crossing.py")
_RAY_PORT = 6399
#: Only what hangs takes this long; a busy machine may need minutes to start the processes of both hosts.
_CROSSING_TIMEOUT_S = 400
#: Ray turns token authentication on where an earlier `ray.init` left a token, and then refuses drivers without one.
_ENV = {"RAY_AUTH_MODE": "disabled"}


class Host:
    """A network namespace with an address on the cable and a link-local one that leads nowhere."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a program on this host."""
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= _ENV | {"MC_TCP_BIND_ADDRESS": "169.254.7.1"}  # as inherited from elsewhere
        return subprocess.Popen(["ip", "netns", "exec", self.name, *words], env=env, text=True, **options)

    def run(self, *words: str) -> str:
        """Runs a program on this host to its end."""
        return _run("ip", "netns", "exec", self.name, *words)


class Pair:
    """The two hosts, with Ray on both."""

    def __init__(self, here: Host, there: Host, folder: Path) -> None:
        self.here = here
        self.there = there
        self._folder = folder

    def cross(self, *backends: str) -> list[dict[str, Any]]:
        """Runs ``crossing.py`` on the first host; what it found for each."""
        words = [sys.executable, str(_PROGRAM), f"{self.here.address}:{_RAY_PORT}", self.there.address, *backends]
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
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair; skipped, with the reason, where the machine allows no namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("not run: no `ip` on the PATH (apt-get install iproute2)")
    if os.geteuid() != 0:
        pytest.skip("not run: network namespaces need root")
    names = [f"dataplane-{os.getpid()}-{each}" for each in "ab"]
    here, there = (Host(name, f"10.213.77.{number}") for number, name in enumerate(names, 1))
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.ExitStack() as stack:
        try:
            for host in (here, there):
                _run("ip", "netns", "add", host.name)
                stack.callback(_end, host)
                # the trap comes first, in age and in name
                host.run("ip", "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
                for number in range(2):
                    host.run("ip", "address", "add", f"169.254.7.{number + 1}/16", "dev", f"aaa{number}")
                    host.run("ip", "link", "set", f"aaa{number}", "up")
                host.run("ip", "link", "set", "lo", "up")
            here.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", there.name)
            for host in (here, there):
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
                host.run("ip", "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"not run: this machine allows no network namespaces: {error.stderr.strip()}")
        # Ray keeps unix sockets there, whose paths must be short.
        sessions = Path(f"/tmp/dp-hosts-{os.getpid()}")
        stack.callback(shutil.rmtree, sessions, ignore_errors=True)
        common = ["--num-cpus=1", "--disable-usage-stats", "--include-log-monitor=false", "--no-monitor", "--block"]
        ray = str(Path(sys.executable).with_name("ray"))
        head = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", f"--temp-dir={sessions}"]
        node = [f"--address={here.address}:{_RAY_PORT}"]
        for host, words in ((here, head), (there, node)):
            log = stack.enter_context((folder / f"{host.name}.log").open("w+"))
            process = host.start(
                *[ray, "start", *words, f"--node-ip-address={host.address}", *common],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            stack.callback(_end_ray, process)
            _await_ray(process, log)
        yield Pair(here, there, folder)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def _await_ray(process: subprocess.Popen[str], log: Any) -> None:
    deadline = time.monotonic() + 120
    while True:
        log.seek(0)
        said = log.read()
        if "Ray runtime started" in said:
            return
        assert process.poll() is None, said
        assert time.monotonic() < deadline, f"Ray did not start: {said}"
        time.sleep(0.1)


def _end_ray(process: subprocess.Popen[str]) -> None:
    """Asks `ray start --block`, which ends what it started."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end(host: Host) -> None:
    """Ends what still runs on the host, by process id, and the host."""
    deadline = time.monotonic() + 30
    while pids := _run("ip", "netns", "pids", host.name).split():
        assert time.monotonic() < deadline, f"processes {pids} cannot be ended"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    _run("ip", "netns", "delete", host.name)
