"""shm_store keeps the contract in a random history of processes that are killed and stopped."""

from dataplane_testkit import AuthorsClass, Settings, run_chaos


class Shm(AuthorsClass):
    backend = "shm_store"


def test_a_random_history_keeps_the_contract(tmp_path):
    options = {}
    verdict = run_chaos(Shm(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
