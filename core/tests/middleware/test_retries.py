"""Middleware that changes a request in place, where the client makes the operation again."""

from dataclasses import replace

from dataplane_core import BlobStore, DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.middleware import Middleware
from dataplane_core.spec import hookimpl


class Blobs(BlobStore):
    def put(self, key, data): ...

    def get(self, key): ...

    def delete(self, key): ...


class EncodesInPlace(Middleware):
    def __init__(self):
        self.given = []

    @hookimpl(wrapper=True)
    def put_samples(self, request):
        for column in request.columns.values():
            self.given.append(column[0])
            column[0] = b"encoded"
        return (yield)


def test_a_put_that_is_made_again_hands_middleware_the_columns_as_they_were():
    encodes = EncodesInPlace()
    with connect_backend(Blobs, DataPlaneConfig(backend="blobs", middleware=[encodes])) as client:
        client.register_partition("p", ["x"], None, ["t"], enums={"x": ["a", "b"]})
        client._infos["p"] = replace(client._infos["p"], epoch="an earlier one")
        client.put_samples(["s"], "p", {"x": ["a"]})
    first, second = encodes.given
    assert first != b"encoded"
    assert second == first
