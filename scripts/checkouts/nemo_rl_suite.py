"""A pytest plugin that puts the adapter under NeMo RL's own tests. `test_trainer_checkouts.py` runs pytest with it.

Where a test makes NeMo RL's in-memory client or its TransferQueue client, it gets the adapter. Tests that cannot run so
are deselected.
"""

from checkouts import leaving_out
from over_dataplane import ALONE, CONFIG, OPENED, owner, pytest_unconfigure as pytest_unconfigure

from dataplane_compat.nemo_rl import activate, client_class

SECTION = {"enabled": True, "impl": "dataplane", "dataplane": CONFIG.model_dump()}

#: Seven tests choose each of TransferQueue's storages in turn: Mooncake is for the backend on Mooncake.
OTHER_STORAGE = "[simple]" if CONFIG.backend == "tq_mooncake" else "[mooncake_cpu]"

pytest_collection_modifyitems = leaving_out(
    {
        OTHER_STORAGE: "chooses the storage of TransferQueue that this backend does not have",
        "test_leader_broadcast_round_trip": "uses no client of a data plane, and gives its processes 30 s only",
        "test_double_register_partition_is_idempotent_overwrite": "reads a private attribute of the in-memory client",
    }
)


def new_client(*_, **__):
    """A client of an empty store. It stays: ZeroMQ hangs where such a client of TransferQueue is collected."""
    if not ALONE:
        for name in owner().list_partitions():
            owner().clear_samples(None, name)
    OPENED.append(client_class()(SECTION, bootstrap=ALONE))
    return OPENED[-1]


def install():
    """At import, since NeMo RL's conftest imports the factory by name."""
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
