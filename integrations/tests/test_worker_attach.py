"""A worker attaches once, and says so when it was not attached."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import BackendUnavailableError, ClientClosedError, DataPlaneError, InvalidRequestError
from dataplane_integrations import DataPlaneWorkerMixin


def test_a_worker_that_was_not_attached_says_what_to_call(toy_worker: Any) -> None:
    with pytest.raises(ClientClosedError, match=r"ToyWorker is not attached.*setup_data_plane"):
        toy_worker()._require_dp_client()


def test_attaching_twice_to_the_same_does_nothing(toy_worker: Any, client: DataPlaneClient) -> None:
    worker = toy_worker()
    worker.setup_data_plane(client)
    worker.setup_data_plane(client)
    assert worker._require_dp_client() is client


def test_attaching_to_something_else_is_refused(toy_worker: Any, client: DataPlaneClient) -> None:
    worker = toy_worker()
    worker.setup_data_plane(client)
    with pytest.raises(InvalidRequestError, match="attached to backend 'noop' with another config"):
        worker.setup_data_plane({"backend": "noop", "op_timeout_s": 3})


def test_attaching_never_starts_a_backend(toy_worker: Any) -> None:
    with pytest.raises(BackendUnavailableError, match="nothing to attach to"):
        toy_worker().setup_data_plane({"backend": "noop"})


def test_closing_a_worker_leaves_a_shared_client_open(toy_worker: Any, client: DataPlaneClient) -> None:
    worker = toy_worker()
    worker.setup_data_plane(client)
    worker.close_data_plane()
    worker.close_data_plane()
    client.register_partition("still_open", ["a"], None, [])
    with pytest.raises(ClientClosedError):
        worker._require_dp_client()
    worker.setup_data_plane(client)


def test_coordinates_have_no_default() -> None:
    with pytest.raises(DataPlaneError, match=r"does not say where it stands.*_local_coords\(\)"):
        DataPlaneWorkerMixin()._is_replica_leader()


@pytest.mark.parametrize(
    ("coords", "leads"),
    [
        ({"data_parallel": 3}, True),
        ({"data_parallel": 1, "tensor_parallel": 0, "context_parallel": 0, "pipeline_parallel": 0}, True),
        ({"data_parallel": 0, "tensor_parallel": 1}, False),
        ({"data_parallel": 0, "context_parallel": 1}, False),
        ({"data_parallel": 0, "pipeline_parallel": 2}, False),
    ],
)
def test_the_leader_is_0_on_every_replicated_axis(toy_worker: Any, coords: dict[str, int], leads: bool) -> None:
    worker = toy_worker()
    worker.coords = coords
    assert worker._is_replica_leader() is leads
