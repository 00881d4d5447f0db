"""A Ray whose head is dead."""

import os
import re

_OWN_RAY_LOSES_ITS_HEAD = """
import os, signal, time
import psutil, ray
from dataplane_core.errors import BackendUnavailableError
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig, _instance, _ray
from dataplane_tq_simple._messages import UnitRecords

_instance._END_ACTORS_S = _ray._SHUTDOWN_S = 2.0  # Ray's own threads spin all that time
backend = TQSimpleBackend(TQSimpleConfig(ray_num_cpus=1))
backend.start(bootstrap=True, deadline=time.monotonic() + 240)
controller = ray.get(backend._instance.controller.__ray_call__.remote(lambda _: os.getpid()))
(head,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
rest = psutil.Process().children(recursive=True)
head.kill()
head.wait()
os.kill(controller, signal.SIGKILL)
try:
    backend.call(UnitRecords(), time.monotonic() + 240)
except BackendUnavailableError as error:
    print(error.retryable, error, flush=True)
backend.stop()
for each in rest:
    try:
        each.kill()
    except psutil.NoSuchProcess:
        pass
os._exit(0)
"""


def test_closing_ends_though_rays_head_is_dead(python):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = python.run("-c", _OWN_RAY_LOSES_ITS_HEAD, timeout=500, env=env)
    assert "within 2 s: its head node is dead or does not respond" in done.stderr
    assert re.search(r"False .* is dead, and so is the head of its Ray: .* in a new process", done.stdout)
