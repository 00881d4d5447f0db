"""A pytest plugin that puts `RTensorStore` under AReaL's own tests. `test_trainer_checkouts.py` runs pytest with it.

Most of those tests put tensors into a worker's memory over its HTTP endpoints, and then read them through the backend.
So the endpoints' memory, in the tests and in the worker that they start, is the same store here.
"""

import os
import subprocess
from collections.abc import MutableMapping

from dataplane_compat.areal import _PARTITION, CONFIG_VARIABLE, RTensorStore, activate, main


class Storage(MutableMapping):
    """What AReaL's endpoints keep tensors in, over the backend of this process."""

    def __getitem__(self, shard_id):
        from areal.infra.rpc.rtensor import TensorShardInfo, get_backend

        return get_backend().fetch([TensorShardInfo(shard_id, "")])[0]

    def __contains__(self, shard_id):
        return any(stored_id == shard_id for stored_id in self)

    def __setitem__(self, shard_id, tensor):
        from areal.infra.rpc.rtensor import get_backend

        get_backend().store_as(shard_id, tensor)

    def __delitem__(self, shard_id):
        from areal.infra.rpc.rtensor import get_backend

        get_backend()._clear([shard_id])

    def __iter__(self):
        from areal.infra.rpc.rtensor import get_backend

        return iter(get_backend().client.list_sample_ids(_PARTITION))

    def __len__(self):
        return sum(1 for _ in self)


class Sizes(dict):
    """AReaL's sizes of the tensors that this process stored; another one may delete them."""

    def __delitem__(self, shard_id):
        self.pop(shard_id, None)


def share_storage():
    from areal.infra.rpc import rtensor

    rtensor._storage, rtensor._storage_stats = Storage(), Sizes()


class Popen(subprocess.Popen):
    """Starts AReaL's worker by our command."""

    def __init__(self, args, *rest, **options):
        if isinstance(args, list) and args[1:3] == ["-m", "areal.infra.rpc.rpc_server"]:
            args = [args[0], "-m", "areal_suite", *args[1:]]
        super().__init__(args, *rest, **options)


def pytest_configure(config):
    config.stash_backend = activate(os.environ[CONFIG_VARIABLE], bootstrap=True)
    share_storage()
    subprocess.Popen = Popen


def pytest_unconfigure(config):
    assert isinstance(config.stash_backend, RTensorStore)
    config.stash_backend.close()


if __name__ == "__main__":
    share_storage()
    main()
