"""The module of the class of tests that a fork of `run` makes. First, for the imports, of a right backend."""

from dataplane_noop import NoopBackend
from dataplane_testkit import BackendConformance


class TestIt(BackendConformance):
    """Is replaced in each fork."""

    backend_class = NoopBackend
