import contextlib
import os
import signal
import time
import uuid

from dataplane_testkit import AuthorsClass, Disturbance, Settings, run_chaos


class Redis(AuthorsClass):
    backend = "redis_store"

    def disturbances(self, backend):
        @contextlib.contextmanager
        def signalled(first, then=None):
            pid = backend.owner_pid(time.monotonic() + 60)
            os.kill(pid, first)
            yield
            if then is not None:
                with contextlib.suppress(ProcessLookupError):  # it found that it is not the owner any more
                    os.kill(pid, then)

        return {
            "the owner is killed": Disturbance(lambda: signalled(signal.SIGKILL), lasts=False),
            "the owner is stopped": Disturbance(lambda: signalled(signal.SIGSTOP, signal.SIGCONT)),
        }


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped, the owner among them."""
    options = {"server": "private", "namespace": f"chaos-{uuid.uuid4().hex[:8]}"}
    verdict = run_chaos(Redis(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
