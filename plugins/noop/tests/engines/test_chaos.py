from noop_case import NoopCase

from dataplane_testkit import Settings, run_chaos


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of threads."""
    verdict = run_chaos(NoopCase(), {}, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
