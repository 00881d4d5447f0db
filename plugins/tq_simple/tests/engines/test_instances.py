"""Instances: their start, their names, their end."""

import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from pydantic import ValidationError

from dataplane_core import connect
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
    OperationTimeoutError,
)
from dataplane_testkit._timing import eventually
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig
from dataplane_tq_simple._messages import UnitRecords
from dataplane_tq_simple._ray import RayConnection, _this_one

_OWN_RAY = """
import json, os, sys, time, warnings
warnings.simplefilter("error")
import psutil, ray
from ray._private import ray_constants
from dataplane_core.spec import ListUnitsRequest
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig

ray_constants.SETUP_WORKER_FILENAME = sys.argv[1]
deadline = time.monotonic() + 480
first, second = TQSimpleBackend(TQSimpleConfig(ray_num_cpus=1)), TQSimpleBackend(TQSimpleConfig())
first.start(bootstrap=True, deadline=deadline)
second.start(bootstrap=False, deadline=deadline)
assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 1
for backend in (first, second):
    assert [unit.path for unit in backend.list_units(ListUnitsRequest(deadline=deadline))] == ["memory"]
started = [process.pid for process in psutil.Process().children(recursive=True)]
actors = [ray.get_actor(name, namespace="dataplane") for name in ("tq-default", f"tq-default/{first._ray().node}")]
started += ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])
first.stop()
assert ray.is_initialized(), "a client still uses it"
second.stop()
second.stop()
assert not ray.is_initialized()
print(json.dumps(started))
"""


def soon(seconds=240.0):
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"instance": "a/b"}, "instance"),
        ({"ray_address": "ray://127.0.0.1:10001"}, "Ray Client"),
        ({"journal": "here"}, "not an absolute path"),
        ({"durable": "here"}, "not an absolute path"),
        ({"sync": "commit"}, "'sync' needs 'durable'"),
        ({"storage": "transfer_queue", "durable": "/somewhere"}, "'durable' needs storage: memory"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        TQSimpleConfig(**options)


def test_instances_share_nothing_and_attached_engines_leave_them_alone(ray_address, note, opened):
    with (
        opened(instance="one", ray_address=ray_address) as one,
        opened(instance="two", unit_bytes=1 << 20, unit_num_cpus=0.5) as two,
    ):
        note(one, "one")
        assert note(two, "two") == ["two"]
        # An attached client knows the instance's options beside its own.
        with opened(instance="two", unit_bytes=1 << 21, bootstrap=False) as attached:
            assert attached._instance.config == two._instance.config
            assert attached._instance.config.unit_bytes == 1 << 20
            assert not attached._bootstrapped
        with pytest.raises(ClientClosedError):
            note(attached, "closed")
        assert note(two, "still") == ["two", "still"]

        with connect({"backend": "tq_simple", "options": {"instance": "two"}}, bootstrap=False) as client:
            client.register_partition("p", ["x"], None, ["train"])
            with pytest.raises(CapacityExceededError, match="of whose 1048576 bytes"):
                client.put_samples(["a"], "p", {"x": torch.zeros(1, 1 << 19)})
            client.put_samples(["a"], "p", {"x": torch.zeros(1, 1 << 17)})

        with pytest.raises(AlreadyRunningError, match="'one' is already running"):
            TQSimpleBackend(TQSimpleConfig(instance="one", unit_bytes=1 << 21)).start(bootstrap=True, deadline=soon())
        assert note(one, "more") == ["one", "more"]

        with pytest.raises(
            BackendUnavailableError, match=r"no instance 'three' runs on .* there: 'one', 'two'"
        ) as error:
            TQSimpleBackend(TQSimpleConfig(instance="three")).start(bootstrap=False, deadline=soon())
        assert "Bootstrap it first" in str(error.value)


@ray.remote(num_cpus=0)
def attach_and_list_units(config):
    backend = TQSimpleBackend(config)
    backend.attach_wait_s = 60.0
    backend.start(bootstrap=False, deadline=soon())
    units = backend.call(UnitRecords(), soon())
    backend.stop()
    return units


def test_close_ends_the_processes_and_the_name_can_be_used_again(ray_address, note, pid_of, runs, opened):
    config = TQSimpleConfig(instance="again")
    owner, attached = TQSimpleBackend(config), TQSimpleBackend(config)
    owner.start(bootstrap=True, deadline=soon())
    pids = [pid_of("tq-again"), pid_of("tq-again/")]
    attached.start(bootstrap=False, deadline=soon())
    owner.stop()
    owner.stop()
    eventually(lambda: not any(map(runs, pids)), 120.0)
    assert ray.is_initialized()  # it was not this client that started Ray
    with pytest.raises(ClientClosedError):
        owner.call(UnitRecords(), soon())
    with pytest.raises(BackendUnavailableError, match="controller of instance 'again' is dead"):
        attached.call(UnitRecords(), soon())
    attached.stop()

    # The name is free, and who wants to attach waits for the instance to come up.
    late = attach_and_list_units.remote(config)
    with opened(instance="again") as engine:
        assert note(engine, "afresh") == ["afresh"]
        assert ray.get(late, timeout=60) == engine.call(UnitRecords(), soon())


def test_too_few_cpus_are_reported_with_numbers(ray_address):
    config = TQSimpleConfig(instance="cpus", controller_num_cpus=1, unit_num_cpus=8)
    with pytest.raises(BackendUnavailableError, match=r"needs 9 CPUs .* has 8") as error:
        TQSimpleBackend(config).start(bootstrap=True, deadline=soon())
    assert not error.value.retryable
    assert "unit_num_cpus to 0" in str(error.value)


def test_another_cluster_than_the_connected_one_is_refused(ray_address):
    with pytest.raises(ConfigError, match="one cluster per process"):
        TQSimpleBackend(TQSimpleConfig(ray_address="127.0.0.1:1")).start(bootstrap=False, deadline=soon())


def test_a_client_does_not_wait_beyond_its_deadline_for_another_one_that_connects_to_ray(ray_address):
    with ThreadPoolExecutor(1) as pool, RayConnection._lock:  # as the other one holds it
        attaching = pool.submit(TQSimpleBackend(TQSimpleConfig()).start, bootstrap=False, deadline=soon(0.1))
        with pytest.raises(OperationTimeoutError, match="another client of this process"):
            attaching.result(timeout=20)


def test_the_connection_to_an_older_ray_ends_too(ray_address, monkeypatch):
    """Its `shutdown` has no argument."""
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(RayConnection, "_ours", _this_one())
    monkeypatch.setattr(RayConnection, "_num_users", 1)
    RayConnection(ours=True).release()
    assert ended


def test_a_crashed_owner_takes_its_instance_along(ray_address, python, pid_of, runs, actors, opened):
    options = {"instance": "crash", "ray_address": ray_address}
    from owners import owning  # not above: Ray's workers import this file, and do not find that one

    with owning(python, {"backend": "tq_simple", "options": options, "op_timeout_s": 240}, "'runs'") as (owner, said):
        assert said == "runs\n"
        with opened(instance="crash", bootstrap=False) as attached:
            assert len(attached.call(UnitRecords(), soon())) == 1
            pids = [pid_of(f"tq-crash{name}") for name in ("", "/")]
            owner.send_signal(signal.SIGKILL)
            owner.wait(timeout=30)
            eventually(lambda: not any(map(runs, pids)), 120.0)
    eventually(lambda: not actors("tq-crash"), 120.0)  # Ray learns of a death a moment later


def test_a_ray_of_its_own_is_started_shared_and_ended_quietly(ray_server, python, runs):
    """Its workers are forked by the process that forks those of the Ray that the tests share."""
    (forks,) = Path(tempfile.gettempdir()).glob("ray-workers-*")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["DATAPLANE_TEST_FORKS"] = str(forks)
    done = python.run("-c", _OWN_RAY, Path(__file__).parents[4] / "tests" / "forking_ray.py", env=env)
    *_, pids = done.stdout.splitlines()
    assert len(json.loads(pids)) >= 5
    eventually(lambda: not any(map(runs, json.loads(pids))), 120.0)
    for word in ("WARNING", "ERROR", "StorageUnit", "Traceback"):
        assert word not in done.stdout + done.stderr
