"""tq_mooncake keeps the contract in a random history of processes that are killed and stopped."""

from dataplane_testkit import AuthorsClass, Settings, run_chaos


class TQMooncake(AuthorsClass):
    backend = "tq_mooncake"


def test_a_random_history_keeps_the_contract(ray_address, tmp_path):
    options = {
        "instance": "random",
        "ray_address": ray_address,
        "segment_size_bytes": 256 << 20,
        "master_start_s": 85,  # a busy machine may need long
        "local_buffer_size_bytes": 16 << 20,
    }
    verdict = run_chaos(TQMooncake(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
