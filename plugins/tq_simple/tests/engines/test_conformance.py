from tq_simple_case import TQSimpleCase

from dataplane_testkit import BackendConformance


class TestTQSimple(TQSimpleCase, BackendConformance):
    """tq_simple keeps the whole contract."""
