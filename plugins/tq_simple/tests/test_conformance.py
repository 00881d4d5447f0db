"""tq_simple against the contract, on a real Ray."""

import time

import pytest
import ray

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance
from dataplane_tq_simple import TQSimpleBackend


class TestTQSimple(BackendConformance):
    backend = "tq_simple"
    backend_class = TQSimpleBackend

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "conformance", "ray_address": ray_address}

    def raw_get(self, backend, partition_id, sample_id, field):
        """The frame, straight from the storage unit."""
        deadline = time.monotonic() + 10
        (part,) = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field])).parts
        handle = part.write_id + part.positions[0]
        ((*frames,),) = split_rows(backend._engine.get_rows([handle], deadline=deadline))
        return bytes(frames[part.slots[0]])

    def held_bytes(self, backend):
        """The rows in the memory of the storage units, as the units count them."""

        def held(unit):
            return sum(len(row) for column in unit.storage_data.field_data.values() for row in column.values())

        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        mine = [name for name in names if name.startswith("tq-conformance/unit-")]
        units = [ray.get_actor(name, namespace="dataplane") for name in mine]
        return sum(ray.get([unit.__ray_call__.remote(held) for unit in units], timeout=30))

    def conflicting_options(self, options):
        return {**options, "num_storage_units": 2}
