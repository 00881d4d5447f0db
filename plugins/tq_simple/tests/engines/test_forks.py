"""A process that was forked from one that had a client cannot use Ray: connecting there is refused at once."""

_PROGRAM = """
import os, signal, sys
from dataplane_core import connect
from dataplane_core.errors import BackendUnavailableError

config = {"backend": "tq_simple", "options": {"instance": "forks", "ray_address": sys.argv[1]}, "op_timeout_s": 240}
with connect(config, bootstrap=True) as client:
    assert client.list_partitions() == []
pid = os.fork()  # by who has closed its client, and is disconnected from Ray
if pid == 0:
    signal.alarm(100)  # a hang ends the child
    refused = []
    for bootstrap in (False, True):
        try:
            connect(config, bootstrap=bootstrap)
        except BackendUnavailableError as error:
            refused.append("was forked from one that used Ray" in error.message and "spawn" in error.hint)
            refused.append(not error.retryable)
    os._exit(refused != [True] * 4)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_connecting_in_a_fork_is_refused_and_says_what_works(ray_server, python):
    python.run("-c", _PROGRAM, ray_server, timeout=300)
