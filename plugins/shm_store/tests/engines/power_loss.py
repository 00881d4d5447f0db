"""What a disk holds when the power is cut."""

import os
from collections.abc import Callable
from pathlib import Path

from dataplane_core.host_memory import Arena


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
