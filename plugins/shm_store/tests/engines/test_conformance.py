from shm_case import ShmCase

from dataplane_testkit import AuthorsClass, BackendConformance, Settings, run_chaos


class TestShm(ShmCase, BackendConformance):
    """shm_store keeps the whole contract."""


class Shm(AuthorsClass):
    backend = "shm_store"


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped."""
    verdict = run_chaos(Shm(), {}, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
