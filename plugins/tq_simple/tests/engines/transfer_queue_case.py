"""What the tests of ``storage: transfer_queue`` share: a TransferQueue that was there before, and a case of the kit."""

import ast
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from stored_cells import StoresRows

from dataplane_core import connect
from dataplane_core.backends import Level, RefsGoneError
from dataplane_core.errors import BackendUnavailableError
from dataplane_tq_simple._transfer_queue import TransferQueueBackend
from dataplane_tq_simple.config import TQSimpleConfig


def config_of(instance, ray_address, **more):
    options = {"storage": "transfer_queue", "instance": instance, "ray_address": ray_address, **more}
    return {"backend": "tq_simple", "options": options, "open_partitions": True}


def found_by_doctor(config):
    found = TransferQueueBackend.diagnose(TQSimpleConfig(**config["options"]), deadline=time.monotonic() + 60)
    return [(each.level, each.what) for each in found]


@pytest.fixture(scope="module")
def holds(ray_address):
    """Starts TransferQueue in a process of its own. Says what it holds, by partition."""
    config = config_of("none", ray_address)
    with pytest.raises(BackendUnavailableError, match=r"no TransferQueue runs .*transfer_queue.init"):
        connect(config)
    level, what = found_by_doctor(config)[-1]
    assert level is Level.ERROR
    assert what.startswith("no TransferQueue runs on the Ray cluster")
    command = [sys.executable, Path(__file__).with_name("transfer_queue_system.py"), ray_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as system:
        assert system.stdout.readline() == "runs\n"

        def ask():
            system.stdin.write("?\n")
            system.stdin.flush()
            return ast.literal_eval(system.stdout.readline())

        yield ask
        system.communicate()  # Ray's exit may hang if it has errors to print, and finds the output closed


class TransferQueueCase(StoresRows):
    backend = "tq_simple"
    backend_class = TransferQueueBackend

    @pytest.fixture
    def options(self, ray_address, holds):
        return config_of("conformance", ray_address)["options"]

    def held_bytes(self, backend):
        """What TransferQueue holds in the instance's partition."""
        deadline = time.monotonic() + 60
        entries = backend._run("list", backend._client.async_kv_list(backend._partition), deadline)
        held = 0
        for key in entries.get(backend._partition, ()):
            with suppress(RefsGoneError):  # a put was given up between its entry and its row
                held += sum(map(len, backend.get_rows([int(key)], deadline)))
        return held

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1 << 40}
