"""What a disk holds when the power is cut, and what a store in a folder then has."""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from dataplane_core.errors import CapacityExceededError
from dataplane_core.host_memory import Arena
from dataplane_core.kept_extents import KeptExtents


class Disk:
    """What a disk holds for sure: of each file what was synced, and of each folder what was when that was synced.

    Args:
        monkeypatch: Pytest's. From now on, what this process syncs is noted.
        root: The folder that is looked at. It is on the disk.
    """

    def __init__(self, monkeypatch, root):
        self.root, self.content = root, {}
        self.folders: dict[Path, dict[str, int]] = {root.parent: {root.name: 0}}
        self.at_each_sync: Callable[[], None] = lambda: None
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._sync)
        monkeypatch.setattr(Arena, "sync", lambda *args: self._sync_memory(*args))

    def _sync(self, fd):
        self.at_each_sync()
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.folders[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.content[os.fstat(fd).st_ino] = bytearray(path.read_bytes())

    def _sync_memory(self, arena, start, stop):
        self.at_each_sync()
        self.content[os.fstat(arena.fd).st_ino][start:stop] = arena.bytes[start:stop].tobytes()

    def restore(self, target, is_ahead, part=0.0):
        """Writes it into a folder; of files for which ``is_ahead(path)`` also what was not synced, without this part of
        that at its beginning."""
        self._restore(self.root, target, is_ahead, part)

    def _restore(self, folder, target, is_ahead, part):
        target.mkdir(exist_ok=True)
        for name, inode in self.folders.get(folder, {}).items():
            path = folder / name
            if path.is_file() and is_ahead(path):
                data, synced = bytearray(path.read_bytes()), len(self.content.get(inode, b""))
                lost = int((len(data) - synced) * part)
                data[synced : synced + lost] = bytes(lost)
                (target / name).write_bytes(data)
            elif inode in self.content:
                (target / name).write_bytes(self.content[inode])
            elif path in self.folders:
                self._restore(path, target / name, is_ahead, part)


def survives_at_each_sync(monkeypatch, folder, start, ahead, *, num_steps=60, opens=True):
    """Clients of a store put and clear. At each sync, the disk is looked at as it would be if the power were cut then:
    a store that is started on it has all that was answered.

    Args:
        monkeypatch: Pytest's.
        folder: The folder of the store.
        start: Starts a life of the store: of a folder, and whether it syncs.
        ahead: What the disk has beside what was synced: of which files, and without which part of that at its
            beginning. If there are several, one is taken after the other.
        num_steps: How many puts there are.
        opens: Whether it is looked at also while the store is begun.
    """
    model, unsure, images, squeezed, looks = {}, set(), [], [], cycle(ahead)
    with monkeypatch.context() as patch:
        disk = Disk(patch, folder)
        life = None

        def look():
            if life is not None or (opens and folder in disk.folders):
                image = folder.with_name(f"image {len(images)}")
                disk.restore(image, *next(looks))
                images.append((image, dict(model), set(unsure)))

        squeeze = KeptExtents._squeeze
        patch.setattr(KeptExtents, "_squeeze", lambda *args: squeezed.append(squeeze(*args)) or squeezed[-1])
        disk.at_each_sync = look
        life = start(folder, True)
        life.register()
        rng = random.Random(1)
        for number in range(1, num_steps):
            made = rng.sample(sorted(model), min(len(model), rng.randint(0, 2)))
            ids = [*made, *(f"s{number}-{row}" for row in range(rng.randint(1, 3)))]
            length = rng.choice([10, 1500])
            unsure |= set(ids)
            with suppress(CapacityExceededError):
                life.put(ids, length, number, whole=rng.random() < 0.5)
                model.update(dict.fromkeys(ids, bytes([number]) * length))
            unsure.clear()
            if len(model) > 8:
                # some that are cleared and one that is put, settled together where one process does both
                unsure |= set(gone := rng.sample(sorted(model), 4))
                unsure.add(new := f"n{number}")
                with life.settled_together(), suppress(CapacityExceededError):
                    life.clear(gone)
                    for sample_id in gone:
                        del model[sample_id]
                    life.put([new], 10, number, whole=True)
                    model[new] = bytes([number]) * 10
                unsure.clear()
        life.kill()
    assert len(images) > 100 * num_steps // 60
    assert any(squeezed) or num_steps < 60, "rows are moved to make room"
    for image, wanted, under_way in images:
        life = start(image, False)
        there = set(life.ids_there())
        assert there ^ wanted.keys() <= under_way
        known = sorted((there & wanted.keys()) - under_way)
        assert life.read(known) == [wanted[sample_id] for sample_id in known]
        assert None not in life.read(sorted(there))
        life.kill()
        shutil.rmtree(image)
