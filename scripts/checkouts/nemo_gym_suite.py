"""A pytest plugin that puts our token store under NeMo Gym's own tests, for `test_trainer_checkouts.py`.

Where a test makes a ``TokenCaptureStore`` of a folder, it gets a `DataPlaneTokenStore` whose partition has the name of
that folder.
"""

import asyncio
import json
import sys
import typing
from types import SimpleNamespace

from checkouts import leaving_out
from over_dataplane import ALONE, CONFIG, OPENED, owner, pytest_unconfigure as pytest_unconfigure

from dataplane_compat import nemo_gym as adapter
from dataplane_core import connect

pytest_collection_modifyitems = leaving_out(
    {
        "uses_the_compact_entry_index": "replaces a private method of their store",
        "recovers_an_unindexed_durable_tail": "writes their store's file",
        "recovers_state_lag_from_the_durable_jsonl_tail": "writes their store's file",
        "sweeps_only_old_retired_tombstones": "`sweep_retired`, which is not of the protocols",
        "a_newer_record_in_the_store_fails": "writes their store's file",
        "an_unsafe_rollout_id_is_rejected": "an id is no file name here",
    }
)


def attach(config, bootstrap):
    return owner() if ALONE else connect(config, bootstrap)


class File:
    """What a test asks of a file of theirs: whether it is there, and the state in it."""

    def __init__(self, store, rollout_id):
        self.store, self.rollout_id = store, rollout_id

    def exists(self):
        return bool(self.store.read_entries(self.rollout_id))

    def read_bytes(self):
        rows = self.store.rows(self.rollout_id)
        calls = {tags["call"]: row_id for row_id, tags in rows.items() if "call" in tags}
        state = {"retired": rows["?"].get("retired"), "indexed_size": len(calls), "entry_digests": calls}
        return json.dumps(state).encode()


class TokenCaptureStore(adapter.DataPlaneTokenStore):
    """Ours, with the synchronous methods of theirs that tests call."""

    def __init__(self, root):
        owner()
        super().__init__(CONFIG, partition=str(root))
        OPENED.append(SimpleNamespace(close=lambda: asyncio.run(self.close())))

    def rows(self, rollout_id):
        try:
            samples = asyncio.run(self.client.list_samples(f"{self._partition}/{rollout_id}"))
        except KeyError:
            return {}
        return dict(zip(samples.sample_ids, samples.tags, strict=True))

    def append(self, entry):
        asyncio.run(self.put(entry))

    def freeze_now(self, rollout_id):
        return asyncio.run(self.freeze(rollout_id))

    def delete(self, rollout_id):
        asyncio.run(self.client.clear_samples(None, f"{self._partition}/{rollout_id}"))

    def is_incomplete(self, rollout_id):
        return "lost" in self.rows(rollout_id).get("?", {})

    def read_entries(self, rollout_id):
        rows = self.rows(rollout_id)
        where = f"{self._partition}/{rollout_id}"
        row_ids = [row_id for row_id, tags in rows.items() if "call" in tags]
        if "sealed" in rows.get("?", {}) and "retired" not in rows["?"]:
            where, row_ids = self._partition, [rollout_id]
        if not row_ids:
            return []
        columns = asyncio.run(self.client.get_samples(row_ids, where, adapter.FIELDS))
        return [entry for calls in adapter.token_entries(columns) for entry in calls]

    def path_for(self, rollout_id):
        return File(self, rollout_id)

    state_path_for = path_for


class ProtocolAttributes:
    """`__protocol_attrs__` of a protocol. It has no setter, since typing_extensions sets it in classes of its own."""

    def __get__(self, protocol, kind):
        return typing._get_protocol_attrs(protocol)


def install():
    """Before the tests import the name."""
    from nemo_gym import token_id_capture as theirs

    for module in (theirs, theirs.store, theirs.consumer):
        module.TokenCaptureStore = TokenCaptureStore
    if sys.version_info < (3, 12):  # NeMo Gym runs on newer Pythons only, where protocols have it
        type(theirs.TokenSink).__protocol_attrs__ = ProtocolAttributes()
    adapter.connect = attach


install()
