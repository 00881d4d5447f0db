"""A pytest plugin that puts the adapter under NeMo RL's own tests. `test_nemo_rl_checkout.py` runs pytest with it.

Where a test makes NeMo RL's in-memory client or its TransferQueue client, it gets the adapter, over the config of
dataplane in the environment variable ``DATAPLANE_SUITE_CONFIG`` (JSON). Tests that cannot run so are deselected.
"""

import functools
import json
import os
import sys
import typing

import typing_extensions

from dataplane_compat.nemo_rl import activate, client_class
from dataplane_core import connect
from dataplane_core.config import load_config
from dataplane_core.connecting import load_backend

CONFIG = json.loads(os.environ["DATAPLANE_SUITE_CONFIG"])
SECTION = {"enabled": True, "impl": "dataplane", "dataplane": CONFIG}

#: Seven tests choose each of TransferQueue's storages in turn: Mooncake is for the backend on Mooncake.
OTHER_STORAGE = "[simple]" if CONFIG["backend"] == "tq_mooncake" else "[mooncake_cpu]"

#: Part of a test's name -> why it is left out.
LEFT_OUT = {
    OTHER_STORAGE: "chooses the storage of TransferQueue that this backend does not have",
    "test_double_register_partition_is_idempotent_overwrite": "reads the private `_partitions` of the in-memory client",
}


@functools.cache
def owner():
    """The client that started the store. It stays until the end."""
    if CONFIG["backend"].startswith("tq_"):
        import ray

        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    return connect(CONFIG, bootstrap=True)


#: Most of the tests do not close their clients. ZeroMQ hangs where such a client of TransferQueue is collected.
CLIENTS = []


def new_client(*_, **__):
    """A client of an empty store."""
    alone = load_backend(load_config(CONFIG).backend).scope == "process"
    if not alone:
        for name in owner().list_partitions():
            owner().clear_samples(None, name)
    CLIENTS.append(client_class()(SECTION, bootstrap=alone))
    return CLIENTS[-1]


def install():
    """At import, since NeMo RL's conftest imports the factory by name."""
    if sys.version_info < (3, 12):  # pydantic asks for it there; NeMo RL runs on newer Pythons only
        typing.TypedDict = typing_extensions.TypedDict
    activate()
    import nemo_rl.data_plane as theirs
    from nemo_rl.data_plane.adapters import noop

    build = theirs.build_data_plane_client

    def build_over_dataplane(cfg, *, bootstrap=True):
        if cfg and cfg["enabled"] and cfg["impl"] == "transfer_queue":
            return new_client()
        return build(cfg, bootstrap=bootstrap)

    theirs.build_data_plane_client = build_over_dataplane
    noop.NoOpDataPlaneClient = new_client


install()


def pytest_collection_modifyitems(config, items):
    out = [item for item in items if any(part in item.nodeid for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


def pytest_unconfigure(config):
    for client in CLIENTS:
        client.close()
    if owner.cache_info().currsize:
        owner().close()
