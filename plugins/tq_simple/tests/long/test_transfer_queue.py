"""The contract on ``storage: transfer_queue``."""

from transfer_queue_case import TransferQueueCase, config_of, holds

from dataplane_testkit import BackendConformance, Settings, run_chaos

__all__ = ["holds"]


class TestTransferQueue(TransferQueueCase, BackendConformance):
    """It keeps what it declares."""


def test_a_random_history_keeps_the_contract(ray_address, holds, tmp_path):
    """Of processes that are killed and stopped."""
    options = config_of("random", ray_address)["options"]
    verdict = run_chaos(TransferQueueCase(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
