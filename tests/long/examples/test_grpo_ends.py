"""The GRPO example when it is broken off: how it ends, that it leaves nothing, and how it goes on."""

import os
import random
import re
import signal

import pytest
from grpo_runs import assert_gone, finish, run, running_past, start, without_ray_agents, write_config

AHEAD = ("--mode", "async")
DIED = "error: .*policy worker 1 died while "
AHEAD_DIED = r"error: rollout worker died while generating for step \d+\."
SILENT = r"error: no answer from rollout worker within 5 s while .* in step \d+\."


@pytest.mark.timeout(540)
@pytest.mark.parametrize(
    ("path", "options", "who", "signum", "code", "said"),
    [
        ("tq_simple", (), "policy worker 1", signal.SIGKILL, 1, DIED),
        ("in-memory", (), "policy worker 1", signal.SIGKILL, 1, DIED),
        ("redis_store", AHEAD, "rollout worker", signal.SIGKILL, 1, AHEAD_DIED),
        ("in-memory", (), "rollout worker", signal.SIGSTOP, 1, SILENT),
        *[
            (path, options, "driver", signum, 130, r"\Ainterrupted\n\Z")
            for signum in (signal.SIGTERM, signal.SIGINT)
            for path, options in [("shm_store", ()), ("tq_simple", ()), ("in-memory", ()), ("redis_store", AHEAD)]
        ],
        *[
            (path, (), "driver", signal.SIGKILL, -signal.SIGKILL, "")
            for path in ("in-memory", "redis_store", "tq_simple")
        ],
    ],
)
def test_a_run_of_which_a_process_gets_a_signal_says_why_it_ends_and_leaves_no_process(
    tmp_path, path, options, who, signum, code, said
):
    # only the test of the deadline shortens it: a busy machine may take minutes
    config = write_config(tmp_path, ray={"step_timeout_s": 5 if signum == signal.SIGSTOP else 400})
    endless = start(config, tmp_path / "out", *options, "--steps", "100000", path=path)
    with running_past(3, endless) as running:
        os.kill({"driver": running.process.pid, **running.pids}[who], signum)
        ended, _, err = finish(running.process)
        assert ended == code
        assert re.search(said, err)
        assert code < 0 or "Traceback" not in err
        assert who != "policy worker 1" or (tmp_path / "out" / "failure.txt").stat().st_size > 0
        assert_gone(running.family)


@pytest.mark.timeout(540)  # three whole runs
@pytest.mark.parametrize(
    ("path", "uncut", "arguments"),  # over two paths where there are two: results do not depend on how rows travel
    [
        ("redis_store", "tq_simple", ("--mode", "async")),
        ("redis_store", "in-memory", ()),
        ("in-memory", "in-memory", ()),
        ("tq_simple", "tq_simple", ("--dynamic-sampling",)),
        ("tq_simple", "in-memory", ("--tp", "2", "--packing")),
        ("tq_simple", "redis_store", ("--mode", "async", "--staleness", "3")),
        ("redis_store", "tq_simple", ("--mode", "async", "--workers", "megatron")),
    ],
)
def test_a_run_killed_at_a_random_step_goes_on_to_the_results_of_one_that_was_not(tmp_path, path, uncut, arguments):
    config = write_config(tmp_path)
    killed = random.randint(2, 6)
    endless = start(config, tmp_path / "cut", *arguments, "--steps", "100000", "--save-every", "1", path=path)
    with running_past(killed, endless) as running:
        running.process.kill()
        running.process.wait()
        assert_gone(without_ray_agents(running.family))
    saves = (tmp_path / "cut" / "checkpoints").glob("step_*")
    saved = max(int(path.name.removeprefix("step_")) for path in saves)
    assert saved >= killed - 1

    options = (*arguments, "--steps", str(saved + 2))
    cut = run(config, tmp_path / "cut", *options, "--resume", path=path)
    assert f"going on after step {saved}, from " in cut.printed
    assert re.findall(r"^step +(\d+)/", cut.printed, re.MULTILINE) == [str(saved + 1), str(saved + 2)]
    whole = run(config, tmp_path / "uncut", *options, path=uncut)
    assert (cut.results, cut.evaluation) == (whole.results, whole.evaluation), f"killed at {killed}"
