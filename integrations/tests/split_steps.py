"""What a split step promises, tried on one rank of a real worker; tests send it to other processes by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dataplane_core import KVBatchMeta
from dataplane_core.errors import InvalidRequestError


def try_split_step(
    make_worker: Callable[[], Any], loss_fn: Any, whole: KVBatchMeta, portions: Sequence[KVBatchMeta]
) -> dict[str, Any]:
    """Compares a step over portions with one over all rows, from the same weights. Collective over all ranks.

    Args:
        make_worker: Makes an attached worker; every one with the same weights.
        loss_fn: The loss.
        whole: This rank's rows.
        portions: The same rows in several metas, each with a plan of its own.

    Returns:
        Facts to assert: refusals, and differences between the two ways.
    """
    at_once = make_worker()
    expected = at_once.train_presharded(whole, loss_fn)
    gradients = at_once.gradients()

    worker: Any = make_worker()
    seen: dict[str, Any] = {"refusals": []}

    def refused(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except InvalidRequestError as error:
            seen["refusals"].append(str(error))

    refused(worker.train_microbatch_presharded, portions[0])
    refused(worker.finish_train_step_presharded)
    worker.abort_train_step_presharded()  # nothing to abort
    worker.begin_train_step_presharded(loss_fn)
    for portion in portions:
        worker.train_microbatch_presharded(portion)
    result = worker.finish_train_step_presharded()
    seen["loss"] = (result["global_loss"] - expected["global_loss"]).abs().max().item()
    seen["gradients"] = max((worker.gradients()[name] - grad).abs().max().item() for name, grad in gradients.items())
    seen["largest_gradient"] = max(grad.abs().max().item() for grad in gradients.values())
    seen["tags"] = (result["is_replica_leader"], worker._is_replica_leader())

    # now the optimizer has something to lose
    before = worker.state()
    worker.begin_train_step_presharded(loss_fn)
    refused(worker.begin_train_step_presharded, loss_fn)
    refused(worker.train_presharded, whole, loss_fn)
    worker.train_microbatch_presharded(portions[0])
    worker.abort_train_step_presharded()
    seen["untouched"] = all(map(torch.equal, before, worker.state()))
    seen["state_size"] = len(before)
    refused(worker.finish_train_step_presharded)
    # and nothing of the aborted step is left in the next
    at_once.train_presharded(whole, loss_fn)
    worker.train_presharded(whole, loss_fn)
    after = at_once.gradients()
    seen["gradients_after"] = max((worker.gradients()[name] - grad).abs().max().item() for name, grad in after.items())
    return seen


def check_split_step(seen: dict[str, Any]) -> None:
    """Asserts what `try_split_step` found on one rank."""
    assert [text.split(" refused: ")[0] for text in seen["refusals"]] == [
        "train_microbatch_presharded",
        "finish_train_step_presharded",
        "begin_train_step_presharded",
        "train_presharded",
        "finish_train_step_presharded",
    ]
    assert seen["largest_gradient"] > 1e-2
    assert seen["gradients"] <= 1e-6
    assert seen["loss"] <= 1e-6
    assert seen["tags"][0] == seen["tags"][1]
    assert seen["state_size"] > 2
    assert seen["untouched"]
    assert seen["gradients_after"] <= 1e-6
