"""What all tests of the workspace share: a temporary folder for each process that runs tests."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keeps test processes side by side apart: private Redis servers and Ray clusters are found by this folder.

    Its name is short, since the paths of Unix sockets below it may have 107 bytes only.
    """
    if not hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="dp")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
