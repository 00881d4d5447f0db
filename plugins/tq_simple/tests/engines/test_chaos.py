"""tq_simple keeps the contract in random histories in which its controller and its unit are killed."""

import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
import ray

from dataplane_testkit import AuthorsClass, Disturbance, Settings, run_chaos
from dataplane_testkit._timing import eventually
from dataplane_testkit.chaos.worker import STEPS

#: What is killed -> the ends of the names of its actors.
ACTORS = {"the controller": [""], "the unit": ["/"], "both": ["", "/"]}


@pytest.fixture
def kill(pid_of):
    """Kills actors at once, also ones that are being started again."""

    def pid_if_it_runs(actor):
        with suppress(ray.exceptions.RayActorError, ValueError):
            return pid_of(actor)

    def kill(actors):
        for pid in [eventually(lambda name=name: pid_if_it_runs(name), 120.0, name) for name in actors]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return kill


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kept", ["journal", "durable"])
def test_a_random_history_keeps_the_contract_though_units_and_the_controller_are_killed(
    ray_address, tmp_path, kill, kept
):
    """With a journal, the rows of a unit are lost with it, and nothing else. In a folder nothing is."""

    class TQSimple(AuthorsClass):
        backend = "tq_simple"

        def disturbances(self, backend):
            @contextmanager
            def act(ends):
                kill([f"tq-{backend.config.instance}{end}" for end in ends])
                yield

            return {what: Disturbance(partial(act, ends), lasts=False) for what, ends in ACTORS.items()}

    folder = tmp_path / "kept"
    folder.mkdir()
    options = {"instance": "chaos", "ray_address": ray_address, "unit_bytes": 64 << 20, kept: str(folder)}
    steps = frozenset(STEPS) - {"save"}  # which would meet the rows that are lost
    settings = replace(Settings.brief(), schedule_s=20.0, every_s=4.0, faults=frozenset(ACTORS), steps=steps)
    verdict = run_chaos(TQSimple(), options, settings, folder=tmp_path / "found")
    print(verdict.facts, *verdict.table(), sep="\n")
    broken = {finding.rule for finding in verdict.findings}
    assert broken <= ({"lost"} if kept == "journal" else set()), verdict
