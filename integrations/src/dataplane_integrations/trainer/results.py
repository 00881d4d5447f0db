"""Combines the workers' training results into one result per step. Each replica group counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from dataplane_core.errors import InvalidRequestError

#: Dense 16-bit floating-point peak of a device in TFLOP/s, by a part of its name.
_PEAK_TFLOPS_16_BIT: Final = {
    "B200": 2250.0,
    "GB200": 2450.0,
    "H100": 989.5,
    "H200": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
}
_HALF: Final = frozenset({"bfloat16", "float16"})


class FlopsTracker(Protocol):
    """Counts the floating point operations of a training step from sequence lengths."""

    total_flops: float

    def reset(self) -> None:
        """Sets the count to zero."""

    def track_batch(self, sequence_lengths: list[int]) -> None:
        """Adds the rows of one shard."""


def aggregate_training_results(results: Sequence[Mapping[str, Any]], dp_ranks: Sequence[int]) -> dict[str, Any]:
    """Combines the results of all workers into one.

    Args:
        results: Per worker, ``global_loss`` and ``grad_norm`` (equal on all ranks), ``all_mb_metrics`` (name -> this
            rank's values, one per microbatch), and anything else that the worker reports.
        dp_ranks: Per worker, its data-parallel rank.

    Returns:
        ``loss`` and ``grad_norm`` of the first rank; ``all_mb_metrics``: name -> the values of all data-parallel ranks
        in their order; all other keys of the first rank.

    Raises:
        InvalidRequestError: A data-parallel rank has no replica leader, or several; or a result without
            ``global_loss``.
    """
    chosen: list[Mapping[str, Any]] = []
    for rank in range(max(dp_ranks) + 1):
        leaders = [r for r, of in zip(results, dp_ranks, strict=True) if of == rank and r.get("is_replica_leader")]
        if len(leaders) != 1:
            raise InvalidRequestError(
                f"training results refused: data-parallel rank {rank} has {len(leaders)} replica leaders among "
                f"{list(dp_ranks).count(rank)} workers. Expected one: check the workers' _local_coords() against the "
                "dp_ranks of the worker group."
            )
        chosen += leaders
    first = chosen[0]
    if "global_loss" not in first:
        raise InvalidRequestError(
            f"training results refused: a worker returned the keys {', '.join(map(str, first))}. Expected "
            "'global_loss', 'grad_norm' and 'all_mb_metrics'."
        )
    metrics: dict[str, list[Any]] = {}
    for result in chosen:
        for name, values in result.get("all_mb_metrics", {}).items():
            metrics.setdefault(name, []).extend(values)
    own = {"global_loss", "all_mb_metrics", "is_replica_leader"}
    return {
        "loss": first["global_loss"],
        "grad_norm": first.get("grad_norm"),
        **{name: value for name, value in first.items() if name not in own},
        "all_mb_metrics": metrics,
    }


def theoretical_tflops(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Peak of all workers' devices together in TFLOP/s.

    Args:
        results: Per worker, ``gpu_name`` and ``model_dtype`` (a torch dtype or its name).

    Returns:
        None if a worker does not report its device and dtype, or if their peak is not known.
    """
    total = 0.0
    for result in results:
        dtype = str(result.get("model_dtype", "")).removeprefix("torch.")
        name = str(result.get("gpu_name", "")).upper()
        # take the longest match: "GB200" contains "B200", and "H200" contains "H20"
        parts = sorted((part for part in _PEAK_TFLOPS_16_BIT if part in name), key=len)
        if dtype not in _HALF or not parts:
            return None
        total += _PEAK_TFLOPS_16_BIT[parts[-1]]
    return total
