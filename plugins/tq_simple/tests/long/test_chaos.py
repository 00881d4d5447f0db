"""tq_simple keeps the contract in a random history in which its actors are killed."""

import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import ray

from dataplane_testkit import AuthorsClass, Disturbance, Settings, run_chaos
from dataplane_testkit._timing import eventually


@pytest.mark.timeout(900)
def test_a_random_history_keeps_the_contract_though_units_and_the_controller_are_killed(ray_address, tmp_path, pid_of):
    """Nothing is lost, since they keep what they have in a folder."""

    faults = [f"kill {what}" for what in ("the controller", "the unit", "both")]

    def pid_if_it_runs(actor):
        with suppress(ray.exceptions.RayActorError, ValueError):  # it is being started again
            return pid_of(actor)

    class Durable(AuthorsClass):
        backend = "tq_simple"

        def disturbances(self, backend):
            name = f"tq-{backend.config.instance}"
            unit = f"{name}/"

            def killing(actors):
                @contextmanager
                def kill():
                    for pid in [eventually(lambda each=each: pid_if_it_runs(each), 120.0, each) for each in actors]:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    yield

                return Disturbance(kill, lasts=False)

            return dict(zip(faults, map(killing, ([name], [unit], [name, unit])), strict=True))

    options = {
        "instance": "killed",
        "ray_address": ray_address,
        "unit_bytes": 64 << 20,
        "durable": str(tmp_path / "durable"),
    }
    settings = replace(Settings.brief(), schedule_s=60.0, faults=frozenset(faults))
    verdict = run_chaos(Durable(), options, settings, folder=tmp_path)
    print(verdict.facts, *verdict.table(), sep="\n")
    assert verdict.passed, verdict
