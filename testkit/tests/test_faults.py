"""What authors may do with `Faults` and the kit does not."""

from __future__ import annotations

import pytest

from dataplane_core.connecting import connect
from dataplane_core.errors import BackendError
from dataplane_testkit import Faults


def test_truncation_cuts_jagged_columns_too():
    faults = Faults()
    with connect({"backend": "noop", "middleware": [faults]}) as client:
        client.register_partition("p", ["z"], None, ["train"])
        client.put_samples(["a", "b"], "p", {"z": [[1, 2], [1, 2, 3]]})
        with faults.truncation(), pytest.raises(BackendError, match="1 rows"):
            client.get_samples(["a", "b"], "p", ["z"])
        assert len(client.get_samples(["a", "b"], "p", ["z"])["z"].unbind()) == 2
