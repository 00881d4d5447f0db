from tq_simple_case import TQSimpleCase

from dataplane_testkit import AuthorsClass, BackendConformance, Settings, run_chaos


class TestTQSimple(TQSimpleCase, BackendConformance):
    """tq_simple keeps the whole contract."""


class TQSimple(AuthorsClass):
    backend = "tq_simple"


def test_a_random_history_keeps_the_contract(ray_address, tmp_path):
    """Of processes that are killed and stopped."""
    options = {"instance": "random", "ray_address": ray_address}
    verdict = run_chaos(TQSimple(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
