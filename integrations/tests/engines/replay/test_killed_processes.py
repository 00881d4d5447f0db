"""Processes killed with -9, over stores that outlive them."""

import json
import random
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from replaying import REGISTRATION
from tiers import in_long

from dataplane_core import connect
from dataplane_integrations.replay import InOrderPolicy, ReplayBuffer, parse_sample_id

PROMPTS = 12
LIMIT_S = 150.0


@pytest.fixture(scope="module", params=["redis_store", *in_long("tq_simple")])
def store(request, config_of):
    """A store that other processes attach to."""
    with connect(config_of(request.param)) as client:
        yield client


Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(python):
    """Starts a process that is killed at some points."""

    def start(role, store, folder, kills, bad=()):
        job = {
            "role": role,
            "config": store.config.model_dump(),
            "num_prompts": PROMPTS,
            "folder": str(folder),
            "bad": list(bad),
            "kills": kills,
        }
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        return python.start(Path(__file__).with_name("killed.py"), path, stderr=subprocess.PIPE, text=True)

    return start


def finish(process):
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said


def drive(run, store, folder, kills, bad=()):
    """Drives a run to its end through kills; per start, the rows that it kept, and prompts trained on before."""
    store.register_partition("replay", **REGISTRATION | {"fields": ["input_ids"]})
    finish(run("drive", store, folder, kills, bad))
    lines = (folder / "log").read_text().splitlines()
    trained = [int(line.split()[1]) for line in lines if line.startswith("trained")]
    wanted = [prompt for prompt in range(PROMPTS + len(bad)) if prompt not in bad]
    assert (sorted(trained) if bad else trained) == wanted, "a prompt was lost, or trained on twice"
    assert store.list_samples("replay").size == 0
    return [tuple(map(int, line.split()[1:])) for line in lines if line.startswith("start")]


def test_a_driver_killed_at_any_point_leaks_no_rows_and_goes_on_from_its_save(run, store, tmp_path):
    # each point is reached whatever the speed of rollouts: no start before it can come to the end of the run
    kills = [("half", 1), ("written", 1), ("read", 1), ("saved", 1), ("half", 3), ("consumed", 2), ("read", 1)]
    starts = drive(run, store, tmp_path, kills)
    assert len(starts) == len(kills) + 1
    # before the first save, a start keeps nothing of what killed rollouts have left
    assert starts[:3] == [(0, 0)] * 3
    assert all(trained >= 2 for _, trained in starts[4:])


def often(seed):
    """Many kills of a driver. One that dies before its second save gets no further, so near kills and far alternate."""
    chosen = random.Random(seed)
    near = [(chosen.choice(["half", "written", "read", "consumed"]), 1) for _ in range(8)]
    return [*near, ("saved", 2), *near[::-1], ("saved", 1)]


#: Prompt 10 is out of reach of the first save, and it is not given up before the third kill.
GIVING_UP = [("failing", 2), ("saved", 1), ("failing", 1), ("written", 1), ("saved", 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "bad"), [(GIVING_UP, [3, 5, 10]), *in_long(*((often(seed), []) for seed in range(3)))]
)
def test_a_driver_that_is_killed_gives_up_the_same_prompts_and_takes_as_many_spares(run, store, tmp_path, kills, bad):
    drive(run, store, tmp_path, kills, bad)


@pytest.mark.timeout(600)
def test_prompts_of_killed_rollout_processes_are_made_by_others_and_nothing_leaks(run, store, tmp_path):
    store.register_partition("replay", **REGISTRATION | {"fields": ["input_ids"]})
    kills = [("claimed", 2), ("half", 1), ("written", 3)]
    first, second = (run("roll", store, folder(tmp_path, name), kills) for name in "ab")  # before there is a trainer
    rule = InOrderPolicy(max_staleness=1, groups_per_version=4)
    trained = []
    with closing(ReplayBuffer(store, "replay", rule, group_size=2, num_prompts=2 * PROMPTS)) as buffer:
        for step, meta in enumerate(buffer.batches(4, timeout_s=LIMIT_S)):
            assert {step - tags["weight_version"] for tags in meta.tags} <= {0, 1}
            tokens = store.get_data(meta, ["input_ids"])["input_ids"].flatten().tolist()
            assert tokens == [parse_sample_id(sample_id)["prompt"] for sample_id in meta.sample_ids]
            trained += tokens[::2]
            buffer.set_weight_version(step + 1)
        for process in (first, second):
            finish(process)
    assert trained == list(range(2 * PROMPTS)), "in order, whoever made them"
    made = "".join((tmp_path / name / "log").read_text() for name in "ab").splitlines()
    assert len(made) > 2 * PROMPTS, "some were made again"
    assert len(set(made)) == len(made), "under other ids"
    assert store.list_samples("replay").size == 0


def folder(tmp_path, name):
    path = tmp_path / name
    path.mkdir()
    return path
