from shm_case import ShmCase

from dataplane_testkit import BackendConformance, Settings, run_chaos


class TestShm(ShmCase, BackendConformance):
    """shm_store keeps the whole contract."""


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped."""
    verdict = run_chaos(ShmCase(), {}, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
