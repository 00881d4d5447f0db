import uuid

from redis_case import RedisCase

from dataplane_testkit import Settings, run_chaos


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped."""
    options = {"server": "private", "namespace": f"chaos-{uuid.uuid4().hex[:8]}"}
    verdict = run_chaos(RedisCase(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
