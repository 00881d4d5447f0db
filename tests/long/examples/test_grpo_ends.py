"""`examples/grpo.py` when a process of it gets a signal: how it ends, and that it leaves nothing."""

import re
import signal
import subprocess
import sys

import psutil
import pytest
from grpo_runs import EXAMPLES


@pytest.mark.timeout(540)
@pytest.mark.parametrize(
    ("who", "signum", "said"),
    [
        ("PolicyWorker", signal.SIGKILL, "WorkerFailedError: .*policy worker [01] died while "),
        ("RolloutWorker", signal.SIGKILL, "died"),
        ("driver", signal.SIGTERM, ""),
        ("driver", signal.SIGINT, "KeyboardInterrupt"),
        ("driver", signal.SIGKILL, ""),
    ],
)
def test_a_run_of_which_a_process_gets_a_signal_says_why_it_ends_and_leaves_no_process(tmp_path, who, signum, said):
    command = [sys.executable, EXAMPLES / "grpo.py", "--steps", "100000", "--out", tmp_path]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    family = []
    try:
        for line in run.stdout:
            if re.match(r"step +3/", line):
                break
        family = psutil.Process(run.pid).children(recursive=True)
        named = [process for process in family if process.name().startswith(f"ray::{who}"[:15])]
        (named[0] if named else run).send_signal(signum)
        _, err = run.communicate(timeout=400)
        assert run.returncode != 0
        assert re.search(said, err), err
        assert len(family) >= 5  # Ray's own daemons and the actors
        _, alive = psutil.wait_procs(family, timeout=150)
        assert not alive
    finally:
        for process in [run, *(member for member in family if member.is_running())]:
            process.kill()
        run.communicate()
