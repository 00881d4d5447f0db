"""Stores in dicts, shared by their instances as processes share a disk, and what the tests do with them."""

import itertools

from dataplane_core import BlobStore, DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_testkit import backend_of


class Plain(BlobStore):
    """Blobs in a dict."""

    def __init__(self, config):
        super().__init__(config)
        self.blobs = {}

    def put(self, key, data):
        self.blobs[key] = data

    def get(self, key):
        return self.blobs.get(key)

    def delete(self, key):
        self.blobs.pop(key, None)


def journaled():
    """A class whose instances share one store; its journal lies open as ``journal``, number -> record, and its blobs as
    ``stored``."""
    blobs, records = {}, {}

    class Shared(Plain):
        journal = records
        stored = blobs

        def __init__(self, config):
            super().__init__(config)
            self.blobs = blobs

        def append(self, seq, record):
            return records.setdefault(seq, record) is record

        def read(self, from_seq):
            return list(itertools.takewhile(lambda r: r is not None, map(records.get, itertools.count(from_seq))))

    return Shared


def trimmed():
    """As `journaled`, of a class that can trim; where it did so stands in ``trims``."""
    trimmed_at = []

    class Trimmed(journaled()):
        trims = trimmed_at

        @property
        def _first(self):
            return self.trims[-1] if self.trims else 0

        def append(self, seq, record):
            return seq >= self._first and super().append(seq, record)

        def read(self, from_seq):
            return super().read(max(from_seq, self._first))

        def trim(self, before_seq):
            first = self._first
            if before_seq > first:
                self.trims.append(before_seq)
            for seq in range(first, before_seq):
                del self.journal[seq]

    return Trimmed


class Clock:
    """A process's clock for leases, set by hand."""

    def __init__(self, *clients, now=0.0):
        self.now = now
        for client in clients:
            backend_of(client)._journal.clock = self

    def __call__(self):
        return self.now


def open_client(cls, bootstrap=True, op_timeout_s=60, **options):
    config = DataPlaneConfig(backend="blobs", options=options, op_timeout_s=op_timeout_s)
    return connect_backend(cls, config, bootstrap=bootstrap)
