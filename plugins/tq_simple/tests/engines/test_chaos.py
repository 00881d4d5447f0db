"""tq_simple keeps the contract in a random history of processes that are killed and stopped."""

from dataplane_testkit import AuthorsClass, Settings, run_chaos


class TQSimple(AuthorsClass):
    backend = "tq_simple"


def test_a_random_history_keeps_the_contract(ray_address, tmp_path):
    options = {"instance": "random", "ray_address": ray_address}
    verdict = run_chaos(TQSimple(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
