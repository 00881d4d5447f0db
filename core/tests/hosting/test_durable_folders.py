"""The folder of what outlives its processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dataplane_core.hosting import durable, lock_folder


def test_only_the_folder_itself_is_its_owners_alone(tmp_path: Path) -> None:
    """Its parents may be shared: those that are missing are made as other programs make them."""
    before = os.umask(0o022)
    try:
        os.close(lock_folder(tmp_path / "volume" / "runs" / "own", "notes", 0.0))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("volume", "volume/runs", "volume/runs/own")]
    assert modes == [0o755, 0o755, 0o700]


def test_a_folder_is_made_where_the_parent_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(durable, "sync_path", refuse)  # root may read it
    for _ in range(2):
        os.close(lock_folder(tmp_path / "own", "notes", 0.0))
