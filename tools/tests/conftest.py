"""A store that commands look at."""

import pytest


@pytest.fixture
def config(tmp_path):
    """The path of the config of a store that other processes of the host can attach to."""
    path = tmp_path / "config.yaml"
    path.write_text("{backend: shm_store, announce_s: null, options: {capacity_bytes: 50MB}, middleware: [metrics]}")
    return str(path)
