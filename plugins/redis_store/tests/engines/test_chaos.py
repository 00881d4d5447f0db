import contextlib
import os
import signal
import time
import uuid
from dataclasses import replace

from redis_case import RedisCase
from redis_servers import wait_until

from dataplane_core.ledger import commands
from dataplane_testkit import Disturbance, Settings, run_chaos


def owner_of(backend):
    """The process id of the owner that answers now."""
    backend.call_ledger(time.monotonic() + 120, commands.ListPartitionsRequest())
    return backend.owner_pid(time.monotonic() + 60)


class Redis(RedisCase):
    def disturbances(self, backend):
        @contextlib.contextmanager
        def killed():
            os.kill(owner_of(backend), signal.SIGKILL)
            yield

        @contextlib.contextmanager
        def stopped():
            pid = owner_of(backend)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: owner_of(backend) != pid)
            finally:
                os.kill(pid, signal.SIGCONT)
            yield

        return {
            **super().disturbances(backend),  # the server is killed, and starts again
            "the owner is killed": Disturbance(killed, lasts=False),
            "the owner is stopped until another takes its place": Disturbance(stopped, lasts=False),
        }


def test_a_random_history_keeps_the_contract(tmp_path):
    """Whatever is done to the owner, and to a server that syncs each write."""
    synced = {"appendonly": True, "appendfsync": "always"}
    options = {"server": "private", "namespace": f"chaos-{uuid.uuid4().hex[:8]}", **synced}
    faults = frozenset(Redis().disturbances(None))
    settings = replace(Settings.brief(), schedule_s=25.0, every_s=4.0, faults=faults)
    verdict = run_chaos(Redis(), options, settings, folder=tmp_path)
    print(verdict.facts, *verdict.table(), sep="\n")
    assert verdict.passed, verdict
