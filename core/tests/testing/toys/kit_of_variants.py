"""The kit on backends that are right, and declare as little, or carry as little, as can be."""

from __future__ import annotations

import torch

from dataplane_core.backends import CapacityOptions, NoOptions
from dataplane_core.spec import Capability, WireFormat
from dataplane_core.testing import BackendConformance
from dataplane_noop import NoopBackend


class DeclaresNothing(NoopBackend):
    """Puts, reads and clears; all else is refused."""

    capabilities = frozenset()
    Config = NoOptions

    def __init__(self, config):
        super().__init__(CapacityOptions())
        self._service._ledger._overwrite = False


class DeclaresClaims(DeclaresNothing):
    """Claims, and no other way to see tags."""

    capabilities = frozenset({Capability.CLAIMS})


class CarriesRows(NoopBackend):
    """An engine with two dtypes, no scalars, no empty rows, no jagged tensors and no objects."""

    wire = WireFormat(
        ragged="rows",
        promote_1d=True,
        objects="encoded",
        dtypes=frozenset({torch.uint8, torch.float32}),
        zero_length_rows=False,
    )


class CarriesBytes(NoopBackend):
    """An engine of bytes."""

    wire = WireFormat(bytes=True)

    def _store(self, write_id, columns, num_samples, deadline):
        copies = {name: [bytes(frame) for frame in column] for name, column in columns.items()}
        super()._store(write_id, copies, num_samples, deadline)


class TestDeclaresNothing(BackendConformance):
    backend_class = DeclaresNothing


class TestDeclaresClaims(BackendConformance):
    backend_class = DeclaresClaims


class TestCarriesRows(BackendConformance):
    backend_class = CarriesRows


class TestCarriesBytes(BackendConformance):
    backend_class = CarriesBytes
