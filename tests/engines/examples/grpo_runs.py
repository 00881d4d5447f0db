"""Runs of the GRPO example as a program, for the tests beside this module."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "grpo"
TRAIN = EXAMPLE / "train.py"

#: A run of seconds: a tiny model, and few steps. Everything else is the real thing.
SHORT_RUN: dict[str, Any] = {
    "seed": 5,
    "data": {"file": "prompts.jsonl", "eval_prompts": 8},
    "model": {"width": 32, "layers": 1, "heads": 2},
    "grpo": {"steps": 4, "prompts_per_step": 8, "answers_per_prompt": 4, "learning_rate": 3.0e-3},
    "rollouts": {"prompts_per_put": 2},
    "dynamic_batching": {"max_tokens_per_microbatch": 64},
}


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
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


def start(
    config: Path, out: Path, *arguments: str, path: str = "in-memory", python: Any = None
) -> subprocess.Popen[str]:
    """Starts the program over ``path``: ``in-memory``, or a backend's name. With the fixture `python`, it has the
    imports behind it."""
    over = ["--in-memory"] if path == "in-memory" else ["--backend", path]
    words = [str(TRAIN), "--config", str(config), *over, "--out", str(out), *arguments]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": out.parent}
    return subprocess.Popen([sys.executable, *words], **how) if python is None else python.start(*words, **how)


def finish(process: subprocess.Popen[str], timeout_s: float = 400.0) -> tuple[int, str, str]:
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


def read_metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def results(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was computed, without what it took."""
    costs = {"seconds", "spans", "bytes_put", "bytes_get", "path"}
    return [{name: value for name, value in record.items() if name not in costs} for record in records]


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
def running_past(step: int, process: subprocess.Popen[str]) -> Iterator[Running]:
    """Waits until a run has reported ``step``; ends it, with all that descends from it, on the way out."""
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        pids: dict[str, int] = {}
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


@dataclass
class Finished:
    """A run that ended well: its folder and what it printed."""

    folder: Path
    printed: str


def assert_gone(family: list[psutil.Process]) -> None:
    assert len(family) >= 5  # Ray's own daemons and the actors
    _, alive = psutil.wait_procs(family, timeout=150)
    left = [" ".join(process.cmdline()) for process in alive]
    assert not left, f"still there: {left}"


def without_ray_agents(family: list[psutil.Process]) -> list[psutil.Process]:
    """All but two helpers of a raylet: killed while they start, it leaves them calling it for a minute."""

    def is_agent(process: psutil.Process) -> bool:
        try:
            arguments = process.cmdline()
        except psutil.Error:  # gone already
            return False
        starting = any(each.endswith(("/dashboard/agent.py", "/runtime_env/agent/main.py")) for each in arguments)
        return starting or any(each.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent")) for each in arguments)

    return [process for process in family if not is_agent(process)]
