"""The listeners for TensorBoard and Weights & Biases. The real wandb: engines/test_wandb.py."""

from unittest.mock import MagicMock

import pytest
import torch

from dataplane_core import connect
from dataplane_core.middleware import Metrics
from dataplane_observe import TensorBoardListener, WandbListener


def train(listener):
    """Three steps; the second moves nothing, and in the third a get fails."""
    with connect({"backend": "noop", "middleware": [Metrics(on_event=listener)]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a", "b", "c", "d"], "p", {"x": torch.zeros(4, 2)})
        client.get_samples(["a", "b", "c", "d"], "p", ["x"])
        listener.step(1, staleness=0)
        listener.step(2, staleness=1)
        client.put_samples(["e", "f"], "p", {"x": torch.zeros(2, 2)})
        with pytest.raises(KeyError):
            client.get_samples(["zz"], "p", ["x"])
        listener.step(3, staleness=1)


def test_tensorboard_has_scalars_per_step(tmp_path):
    pytest.importorskip("tensorboard", reason="not run: tensorboard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        train(TensorBoardListener(writer))
    board = EventAccumulator(str(tmp_path)).Reload()

    def values(name):
        return [(each.step, each.value) for each in board.Scalars(f"dataplane/{name}")]

    assert values("put/rows") == [(1, 4), (2, 0), (3, 2)]
    assert values("put/bytes") == [(1, 32), (2, 0), (3, 16)]
    assert values("get/errors") == [(1, 0), (2, 0), (3, 1)]
    assert values("staleness") == [(1, 0), (2, 1), (3, 1)]
    assert [value > 0 for _, value in values("put/seconds")] == [True, False, True]


def test_wandb_gets_all_scalars_of_a_step_in_one_call():
    run = MagicMock()
    train(WandbListener(run))
    logged = [call.args[0] for call in run.log.call_args_list]
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [1, 2, 3]
    assert [scalars["dataplane/put/rows"] for scalars in logged] == [4, 0, 2]
    assert [scalars["dataplane/staleness"] for scalars in logged] == [0, 1, 1]
