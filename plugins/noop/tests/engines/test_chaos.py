"""noop keeps the contract in a random history of threads."""

from dataplane_testkit import AuthorsClass, Settings, run_chaos


class Noop(AuthorsClass):
    backend = "noop"


def test_a_random_history_keeps_the_contract(tmp_path):
    options = {}
    verdict = run_chaos(Noop(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
