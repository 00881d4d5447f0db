from shm_case import ShmCase

from dataplane_testkit import Settings, run_chaos
from dataplane_testkit.suites.clients import ClaimSuite, ListingSuite
from dataplane_testkit.suites.concurrency import ProcessSuite, RaceSuite


class TestShm(ShmCase, ProcessSuite, RaceSuite, ListingSuite, ClaimSuite, chapter=""):
    """shm_store keeps the rest of the contract, that of core's ledger."""


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped."""
    verdict = run_chaos(ShmCase(), {}, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
