"""For each broken backend the suite of the kit that holds the test it must fail."""

from __future__ import annotations

import broken_claims
import broken_clears
import broken_guarantees
import broken_leases
import broken_reads
import broken_repeats
import broken_writes

from dataplane_testkit import BackendConformance

BROKEN = {
    **broken_reads.BROKEN,
    **broken_writes.BROKEN,
    **broken_clears.BROKEN,
    **broken_claims.BROKEN,
    **broken_leases.BROKEN,
    **broken_guarantees.BROKEN,
    **broken_repeats.BROKEN,
}


def held_bytes(self, backend):
    """Bytes of the tensors in the segments."""
    return sum(column.nbytes for segment in backend._segments.values() for column in segment._columns.values())


def suite_of(test):
    """The suite of the kit that holds a test."""
    (suite,) = (suite for suite in BackendConformance.__bases__ if test.partition("[")[0] in vars(suite))
    return suite


for _backend, _test in BROKEN.items():
    _name = f"Test{_backend.__name__}"
    _members = {"backend_class": _backend, "__module__": __name__, "held_bytes": held_bytes}
    globals()[_name] = type(_name, (suite_of(_test),), _members)
