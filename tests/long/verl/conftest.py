"""verl's own code over our backends. These tests run in an environment of their own: ``make test-verl``."""

import os
import sys
from pathlib import Path

import pytest
import yaml

HERE = str(Path(__file__).parent)

if os.environ.get("DATAPLANE_CONFIG") is None:
    # before verl is imported, which loads its plugins; `store` puts the backend's config into the file
    os.environ["DATAPLANE_CONFIG"] = str(Path(os.environ.get("TMPDIR", "/tmp")) / f"dataplane-verl-{os.getpid()}.yaml")
    os.environ["RAY_DEDUP_LOGS"] = "0"
    sys.path.insert(0, HERE)
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])

BACKENDS = ("shm_store", "redis_store", "tq_simple")


@pytest.fixture(scope="package", params=BACKENDS)
def store(request):
    """A Ray cluster, and the store of one backend, which this process starts as verl's main task does."""
    import ray
    import transfer_queue as tq

    path = Path(os.environ["DATAPLANE_CONFIG"])
    path.write_text(yaml.safe_dump({"backend": request.param, "options": {}}))
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False)
    try:
        tq.init({"backend": {"storage_backend": "SimpleStorage"}})  # as verl calls it: its own config says nothing here
        yield request.param
        tq.close()
    finally:
        ray.shutdown()
        path.unlink(missing_ok=True)  # tests with a store of their own remove it too


@pytest.fixture
def tq(store):
    """What verl imports as ``transfer_queue``; the store is empty."""
    import transfer_queue

    client = transfer_queue.get_client()
    for name in client.get_partition_list():
        client.clear_partition(name)
    return transfer_queue
