"""What the pytest plugins ``*_suite.py`` share, which put dataplane under another project's own tests.

The environment variable ``DATAPLANE_CONFIG`` names the file of the config. Ray is started for the backends that need
it, and the store when the first client is asked for. Both stay until the end.
"""

import functools
import os

from dataplane_core import connect
from dataplane_core.config import load_config
from dataplane_core.connecting import load_backend

CONFIG = load_config(os.environ["DATAPLANE_CONFIG"])
#: Whether the store lives in one process, and so has one client only.
ALONE = load_backend(CONFIG.backend).scope == "process"
#: What is closed at the end, before the store. Most of their tests close nothing.
OPENED = []


@functools.cache
def owner():
    """The client that started the store."""
    if CONFIG.backend.startswith("tq_"):
        import ray

        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    return connect(CONFIG)


def pytest_unconfigure():
    for client in OPENED:
        client.close()
    if owner.cache_info().currsize:
        owner().close()
