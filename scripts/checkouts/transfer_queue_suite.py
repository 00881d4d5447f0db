"""A pytest plugin for TransferQueue's own tests. `test_transfer_queue_checkout.py` runs pytest with it.

Their tests start Ray with as many CPUs as the machine has, which are too few for the storage units. Some look into the
controller, an actor of Ray, and into a private variable of a module. Over our module both have stand-ins here. Tests
that cannot run so are deselected.
"""

import functools
import os
from types import ModuleType, SimpleNamespace

import numpy as np
import ray
from checkouts import leaving_out

from dataplane_compat.transfer_queue import _session, interface
from dataplane_compat.transfer_queue._rows import find_rows

_FILES = "looks into the files of a checkpoint, which are others here"
OVER_DATAPLANE = "DATAPLANE_CONFIG" in os.environ
#: Part of a test's name -> why it is left out over our module.
LEFT_OUT = {
    "TestCheckpointRoundtrip::test_tensor_fields": _FILES,
    "TestCheckpointRoundtrip::test_user_metadata_preserved": _FILES,
    "TestIncludeStorageFalse::test_storage_saved_is_true": _FILES,
    "TestCheckpointErrors::test_load_raises_on_storage_unit_count_mismatch": _FILES,
    "TestCheckpointErrors::test_no_partial_state_on_failed_save": _FILES,
}
pytest_collection_modifyitems = leaving_out(LEFT_OUT if OVER_DATAPLANE else {})


class Controller:
    """Answers from the store what their tests ask TransferQueue's controller."""

    def __getattr__(self, name):
        answer = getattr(self, f"_{name}")
        return SimpleNamespace(remote=lambda *arguments: ray.put(answer(*arguments)))

    def _list_partitions(self):
        return _session.current().client.get_partition_list()

    def _clear_partition(self, partition_id):
        _session.current().client.clear_partition(partition_id)

    def _get_partition_snapshot(self, partition_id):
        """Rows are numbered by their place: the index of a row with a key is too large for an array."""
        rows = find_rows(_session.current().client.store, partition_id)
        fields = {name: place for place, name in enumerate(sorted({name for row in rows for name in row.fields}))}
        return SimpleNamespace(
            keys_mapping={row.sample_id: place for place, row in enumerate(rows)},
            custom_meta={place: row.tags for place, row in enumerate(rows)},
            global_indexes=set(range(len(rows))),
            field_name_mapping=fields,
            production_status=np.array([[name in row.fields for name in fields] for row in rows], dtype=np.int8),
        )


class Interface(ModuleType):
    """Their tests set the private variable to None, and so say that `init` was not called."""

    @property
    def _TQ_CONTROLLER(self):  # noqa: N802
        return _session._session

    @_TQ_CONTROLLER.setter
    def _TQ_CONTROLLER(self, session):  # noqa: N802
        _session._session = session


def install():
    """At import, since their modules start Ray when they are imported."""
    ray.init = functools.partial(ray.init, num_cpus=16, include_dashboard=False)
    if OVER_DATAPLANE:
        get_actor = ray.get_actor
        ray.get_actor = lambda name, namespace=None: (
            Controller() if name == "TransferQueueController" and _session.current() else get_actor(name, namespace)
        )
        interface.__class__ = Interface


install()
