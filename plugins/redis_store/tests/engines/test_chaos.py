import uuid

from dataplane_testkit import AuthorsClass, Settings, run_chaos


class Redis(AuthorsClass):
    backend = "redis_store"


def test_a_random_history_keeps_the_contract(tmp_path):
    """Of processes that are killed and stopped."""
    options = {"server": "private", "namespace": f"chaos-{uuid.uuid4().hex[:8]}"}
    verdict = run_chaos(Redis(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
