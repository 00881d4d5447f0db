"""Several clients of one store of `noop`, which is as quick as one client: no process is started."""

from contextlib import contextmanager

from dataplane_testkit import backend_of


@contextmanager
def joined(client, other):
    """Makes ``other`` a client of the store of ``client`` until the block ends. Closes it then."""
    with other:
        store, own = backend_of(client), backend_of(other)
        before = own._service, own._segments
        own._service, own._segments = store._service, store._segments
        try:
            yield other
        finally:
            own._service, own._segments = before  # closing it would end the store's
