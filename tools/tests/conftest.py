"""A store that commands look at."""

import pytest

from dataplane_core import connect


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The path of the config of a store that other processes of the host can attach to."""
    path = tmp_path_factory.mktemp("store") / "config.yaml"
    path.write_text(
        "{backend: shm_store, announce_s: null, options: {capacity_bytes: 50MB, namespace: of-commands}, "
        "middleware: [metrics]}"
    )
    return str(path)


@pytest.fixture(scope="module")
def opened(config):
    with connect(config) as client:
        yield client


@pytest.fixture
def store(opened):
    """The client of the store, which is empty."""
    yield opened
    for partition in opened.list_partitions():
        opened.clear_samples(None, partition)


@pytest.fixture
def nowhere(tmp_path):
    """The path of the config of a store that is not there, unless the test starts it."""
    path = tmp_path / "nowhere.yaml"
    path.write_text("{backend: shm_store, attach_wait_s: 0, options: {namespace: nowhere, capacity_bytes: 50MB}}")
    return str(path)
