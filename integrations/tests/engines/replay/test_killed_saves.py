"""A save that is killed at every call into the operating system leaves a whole one.

Run as a program, it makes the saves, and prints per kill which save was found, as one line of JSON.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

from dataplane_core.saves import SavedFile, write_save

STEPS = ("makedirs", "open", "write", "fsync", "close", "replace", "unlink")


def save(folder, number):
    write_save(folder, "test", {"number": number}, [b"%d" % number * 1000, b"", b"second block"])


def read(folder):
    """The number of the save, which is whole."""
    with SavedFile(folder, "test") as saved:
        number: int = saved.body["number"]
        assert [block.decode() for block in saved.blocks()] == [str(number) * 1000, "", "second block"]
    return number


def kill_at(step):
    """Ends this process at one of its next calls, as kill -9 does; a write has written half by then."""
    left = itertools.count(step, -1)

    def dying(name, call):
        def called(*args, **kwargs):
            if next(left) == 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return called

    for name in STEPS:
        setattr(os, name, dying(name, getattr(os, name)))


def main(root):
    found = []
    for step in itertools.count():
        folder = root / f"killed-{step}"
        save(folder, 1)
        child = os.fork()
        if child == 0:
            kill_at(step)
            save(folder, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(read(folder))
        save(folder, 3)
        assert read(folder) == 3
        assert len(list(folder.iterdir())) == 1
        if not os.WIFSIGNALED(status):  # it came to its end
            print(json.dumps(found))
            return


def test_a_save_killed_at_any_step_leaves_a_whole_one(tmp_path, python):
    found = json.loads(python.run(Path(__file__), tmp_path).stdout)
    assert found == sorted(found), "the one before up to some step, the new one from there on"
    assert found.count(1) > 8
    assert found.count(2) > 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
