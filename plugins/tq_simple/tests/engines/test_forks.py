"""A process that was forked from one that had a client cannot use Ray: connecting there is refused at once."""

_CHILD = """
import os, signal, sys, time
import dataplane_core  # and so torch, but no backend

def forked():
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # a hang ends the child
        try:
            from dataplane_core import connect
            from dataplane_core.errors import BackendUnavailableError
            options = {"instance": "forks", "ray_address": sys.argv[1]}
            for bootstrap in (False, True):
                try:
                    connect({"backend": "tq_simple", "options": options, "op_timeout_s": 60}, bootstrap=bootstrap)
                except BackendUnavailableError as error:
                    assert "was forked from one that used Ray" in error.message, error
                    assert "spawn" in error.hint and not error.retryable
                else:
                    os._exit(3)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

_PROGRAM = (
    _CHILD
    + """
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig
from dataplane_tq_simple._messages import UnitRecords

config = TQSimpleConfig(instance="forks", ray_address=sys.argv[1])
backend = TQSimpleBackend(config)
backend.start(bootstrap=True, deadline=time.monotonic() + 240)
forked()  # by who connected a client
assert backend.call(UnitRecords(), time.monotonic() + 240)
backend.stop()
forked()  # by who has closed it, and is disconnected from Ray
"""
)


def test_connecting_in_a_fork_is_refused_and_says_what_works(ray_server, python):
    python.run("-c", _PROGRAM, ray_server, timeout=300)
