"""A store in a file that keeps all that it promises, and some that do not. For the tests of shims."""

import contextlib
import fcntl
import os
import pickle
import time
from pathlib import Path

from dataplane_testkit import Disturbance, Shim


class Files(Shim):
    """One file, which one process at a time reads and replaces. It gives samples in the order of their names."""

    promises = dict.fromkeys(
        ("committed", "bits", "written", "latest", "cleared", "half", "mixed", "given once"), "here"
    )

    def __init__(self, tasks, path):
        self.path = Path(path)

    @contextlib.contextmanager
    def opened(self, partition, empty=False):
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tables = pickle.loads(self.path.read_bytes()) if self.path.exists() and not empty else {}
            yield tables.setdefault(partition, ({}, set()))
            Path(f"{self.path}.new").write_bytes(pickle.dumps(tables))
            os.replace(f"{self.path}.new", self.path)

    def put(self, partition, rows):
        with self.opened(partition) as (held, _):
            held.update({sample: held.get(sample, {}) | cells for sample, cells in rows.items()})

    def get(self, partition, samples, fields):
        with self.opened(partition) as (held, _):
            return {sample: held.get(sample, {}) for sample in samples}

    def claim(self, partition, task, fields, limit, lease_s):
        with self.opened(partition) as (held, given):
            ready = [each for each in sorted(held) if (task, each) not in given and {*fields} <= held[each].keys()]
            given.update((task, each) for each in ready[:limit])
        return ready[:limit]

    def list(self, partition):
        with self.opened(partition) as (held, _):
            return sorted(held)

    def clear(self, partition, samples):
        with self.opened(partition) as (held, given):
            for sample in samples:
                held.pop(sample, None)
                given.difference_update([each for each in given if each[1] == sample])

    def disturbances(self):
        return {"lose all": Disturbance(lambda: self.opened("", empty=True), lasts=False)}


class Forgets(Files):
    """Puts the first sample only."""

    def put(self, partition, rows):
        super().put(partition, dict(list(rows.items())[:1]))


class Hangs(Files):
    """Lists once a file is there."""

    def list(self, partition):
        while not Path(f"{self.path}.go").exists():
            time.sleep(0.02)
        return []


class Raises(Files):
    """Cannot read."""

    def get(self, partition, samples, fields):
        raise ZeroDivisionError("by hand")


class Promises(Files):
    """Promises what is no rule."""

    promises = Files.promises | {"speed": "here"}


class Nothing:
    """Is no shim."""
