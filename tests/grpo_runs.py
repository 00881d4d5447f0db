"""Runs of the GRPO example as a program, and those that tests share, as fixtures."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from filelock import FileLock
from grpo.task import Problem, decode, reward as task_reward

from dataplane_core import connect

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo"
TRAIN = EXAMPLE / "train.py"

#: A run of seconds: a tiny model, and few steps. Everything else is the real thing.
SHORT_RUN = {
    "seed": 5,
    "data": {"file": "prompts.jsonl", "eval_prompts": 8},
    "model": {"width": 32, "layers": 1, "heads": 2},
    "grpo": {"steps": 4, "prompts_per_step": 8, "answers_per_prompt": 4, "learning_rate": 3.0e-3},
    "rollouts": {"prompts_per_put": 2},
    "dynamic_batching": {"max_tokens_per_microbatch": 64},
}


def write_config(folder, **sections):
    """A configuration of `SHORT_RUN` with some keys replaced, and the prompts it names, in ``folder``."""
    config = {
        name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value
        for name, value in SHORT_RUN.items()
    }
    config |= {name: value for name, value in sections.items() if name not in SHORT_RUN}
    shutil.copy(EXAMPLE / "prompts.jsonl", folder)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config, out, *arguments, path="in-memory", python=None):
    """Starts the program over ``path``: ``in-memory``, or a backend's name. With the fixture `python`, it has the
    imports behind it."""
    over = ["--in-memory"] if path == "in-memory" else ["--backend", path]
    words = [str(TRAIN), "--config", str(config), *over, "--out", str(out), *arguments]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": out.parent}
    return subprocess.Popen([sys.executable, *words], **how) if python is None else python.start(*words, **how)


def finish(process, timeout_s=400.0):
    """Exit status, standard output, standard error; a run that does not end is ended and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run did not end within {timeout_s:g} s")
    finally:
        if process.returncode is None:  # that, or the test's own time is up
            process.kill()
            process.communicate()
    return process.returncode, out, err


@dataclass
class Finished:
    """A run that ended well: its folder and what it printed."""

    folder: Path
    printed: str

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def results(self):
        """What was computed, without what it took."""
        costs = {"seconds", "spans", "bytes_put", "bytes_get", "path"}
        return [{name: value for name, value in record.items() if name not in costs} for record in self.metrics]

    @property
    def evaluation(self):
        return json.loads((self.folder / "summary.json").read_text())["evaluation"]


def run(config, out, *arguments, path="in-memory", python=None):
    """Runs the program to its end, which must be a good one."""
    code, printed, err = finish(start(config, out, *arguments, path=path, python=python))
    assert (code, err) == (0, "")
    return Finished(out, printed)


@dataclass
class Running:
    """A run in the middle of its steps.

    Attributes:
        process: The program.
        pids: Process ids of its actors, by name.
        family: All processes that descend from it.
    """

    process: subprocess.Popen[str]
    pids: dict[str, int]
    family: list[psutil.Process]


@contextlib.contextmanager
def running_past(step, process):
    """Waits until a run has reported ``step``; ends it, with all that descends from it, on the way out."""
    family = []
    try:
        assert process.stdout is not None
        pids = {}
        printed = ""
        for line in process.stdout:
            pids |= {name: int(pid) for name, pid in re.findall(r"([a-z]+ worker(?: \d)?) \(pid (\d+)\)", line)}
            printed += line
            if re.match(rf"step +{step}/", line):
                break
        else:
            _, err = process.communicate()
            raise AssertionError(f"the run ended before step {step}, and printed:\n{printed}\n{err}")
        assert set(pids) == {"rollout worker", "policy worker 0", "policy worker 1"}
        family = psutil.Process(process.pid).children(recursive=True)
        yield Running(process, pids, family)
    finally:
        for member in [process, *(p for p in family if p.is_running())]:
            member.kill()
        process.communicate()


def assert_gone(family):
    assert len(family) >= 5  # Ray's own daemons and the actors
    _, alive = psutil.wait_procs(family, timeout=150)
    left = [" ".join(process.cmdline()) for process in alive]
    assert not left, f"still there: {left}"


def without_ray_agents(family):
    """All but two helpers of a raylet: killed while they start, it leaves them calling it for a minute."""

    def is_agent(process):
        try:
            arguments = process.cmdline()
        except psutil.Error:  # gone already
            return False
        starting = any(each.endswith(("/dashboard/agent.py", "/runtime_env/agent/main.py")) for each in arguments)
        return starting or any(each.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent")) for each in arguments)

    return [process for process in family if not is_agent(process)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _shared_run(factory, worker_id, ray_server, python, *arguments, path):
    """A run that nothing disturbed. Processes that run tests side by side share it."""
    base = factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / path
    printed = folder / "printed.txt"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed in another process
            folder.mkdir()
            config = write_config(folder, ray={"address": ray_server})
            printed.write_text(run(config, folder / "out", *arguments, path=path, python=python).printed)
    return Finished(folder / "out", printed.read_text())


@pytest.fixture(scope="session")
def in_memory(tmp_path_factory, worker_id, ray_server, python):
    """A run without a data plane: what others are compared with."""
    return _shared_run(tmp_path_factory, worker_id, ray_server, python, path="in-memory")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, worker_id, ray_server, python):
    """A run over shm_store, with a recording."""
    return _shared_run(tmp_path_factory, worker_id, ray_server, python, "--record", path="shm_store")


def assert_like(in_memory, over, backend):
    """The run over a backend has the results of that in memory, and wrote its pages and the rows of its last step."""
    assert f"running over {backend}: " in over.printed
    records = over.metrics
    assert {record["path"] for record in records} == {backend}
    assert all(record["bytes_put"] > 0 and record["bytes_get"] > 0 for record in records)
    assert (over.results, over.evaluation) == (in_memory.results, in_memory.evaluation)
    run = (over.folder / "run.html").read_text()
    assert run.count(": 4 steps,") == 1
    assert "put advantages" in run  # of the driver
    assert "put input_ids +4" in run  # of the rollout worker
    assert "put prev_logprobs" in run  # of the policy workers
    assert not (in_memory.folder / "run.html").exists()
    assert_kept(over.folder / "last_step", records[-1]["reward"])
    assert "<title>train: 32 samples" in (over.folder / "answers.html").read_text()
    assert not (in_memory.folder / "last_step").exists()


def assert_kept(save, reward):
    """The save has all rows of a step, with prompts, answers and rewards for people to read."""
    with connect({"backend": "noop"}) as client:
        client.load(save)
        rows = client.get_samples(client.list_sample_ids("train"), "train", ["input_ids", "token_mask", "reward"])
    assert rows["reward"].mean().item() == reward
    answers_of = {}
    for ids, mask, score in zip(rows["input_ids"], rows["token_mask"], rows["reward"].tolist(), strict=True):
        prompt, answer = decode(ids[mask == 0].tolist()), decode(ids[mask == 1].tolist())
        answers_of.setdefault(prompt, []).append(answer)
        right = "".join(str((int(digit) + 1) % 10) for digit in prompt.removesuffix("="))
        assert task_reward(Problem(prompt, right), answer) == pytest.approx(score)
    assert [len(answers) for answers in answers_of.values()] == [4] * 8
