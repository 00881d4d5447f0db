"""Run as a program: saves that are killed at every step, and what can be read after each. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dataplane_core.saves import SavedFiles, write_save

STEPS = ("makedirs", "open", "write", "fsync", "close", "replace", "unlink")


def save(folder: Path, number: int) -> None:
    write_save(folder, "test", {"number": number}, [b"%d" % number * 1000, b"", b"second block"])


def count_or_kill(kill_at: int | None) -> list[str]:
    """Notes every call into the operating system, and ends this process at one of them, as kill -9 does."""
    steps: list[str] = []

    def noting(name: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            if len(steps) - 1 == kill_at:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return noted

    for name in STEPS:
        setattr(os, name, noting(name, getattr(os, name)))
    return steps


def in_a_fork(work: Any) -> None:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    os.waitpid(child, 0)


def main(root: Path) -> None:
    plain = root / "plain"
    save(plain, 1)
    report = root / "steps.json"

    def counted() -> None:
        steps = count_or_kill(None)
        save(plain, 2)
        report.write_text(json.dumps(steps))

    in_a_fork(counted)
    steps = json.loads(report.read_text())
    # the report itself is written with calls that count
    steps = steps[: max(at for at, name in enumerate(steps) if name == "unlink") + 1]
    results = []
    for kill_at in range(len(steps)):
        folder = root / f"killed-{kill_at}"
        save(folder, 1)

        def killed(folder: Path = folder, kill_at: int = kill_at) -> None:
            count_or_kill(kill_at)
            save(folder, 2)

        in_a_fork(killed)
        with SavedFiles(folder, "test") as saved:
            blocks = [block.decode() for block in saved.blocks()]
        whole = blocks == [str(saved.body["number"]) * 1000, "", "second block"]
        number = saved.body["number"]
        save(folder, 3)
        with SavedFiles(folder, "test") as saved:
            following = saved.body["number"]
        results.append(
            {
                "step": steps[kill_at],
                "read": number,
                "whole": whole,
                "next": following,
                "files": len(list(folder.iterdir())),
            }
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
