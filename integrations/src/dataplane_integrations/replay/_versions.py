"""`claim_versions`: a claim over partitions that hold one weight version each, such as ``train_v7``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from dataplane_core.arguments import Seconds, check_count, checked_as, takes
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    UnknownPartitionError,
    UnknownTaskError,
    preview,
)
from dataplane_core.ledger import backoff_s
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import TagFilter

_VERSION = "{version}"


@takes
def claim_versions(
    client: DataPlaneClient,
    partitions: str,
    task_name: str,
    required_fields: Sequence[str],
    batch_size: int,
    *,
    lease_s: float,
    oldest: int = 0,
    newest: int | None = None,
    order: Literal["freshest", "oldest"] = "freshest",
    blocking: bool = True,
    timeout_s: float = 60.0,
    tag_filter: TagFilter | None = None,
) -> list[KVBatchMeta]:
    """Claims samples of a task from all partitions of a range of weight versions.

    It takes what is ready, version by version, until it has ``batch_size`` samples. If nothing is ready, it waits for
    the first samples. It holds no samples while it waits. Partitions that are registered meanwhile count, those that
    are cleared do not. If it is interrupted, it gives back what it has claimed. Whole generations are retired by
    ``client.clear_samples(None, "train_v7")``.

    Args:
        client: A client whose backend has claims and listing. Not one with ``open_partitions``: its claims add the task
            to every partition, and register those anew that are cleared meanwhile.
        partitions: The names, with ``{version}`` for the number, such as ``train_v{version}``.
        task_name: The task. Partitions without it are passed over, as long as one has it.
        required_fields: As for `DataPlaneClient.claim_meta`.
        batch_size: The most samples to claim; a multiple of the group size where partitions have one.
        lease_s: As for `DataPlaneClient.claim_meta`. A lease is required: samples without one could not be given back.
        oldest: The lowest version to claim from, such as the trainer's version minus the staleness that it allows.
        newest: The highest one. None: no limit.
        order: Which versions come first.
        blocking: Whether to wait for the first samples.
        timeout_s: How long to wait, in seconds. Where the backend declares ``wakes``, the store wakes the claim for
            samples of the version that comes first. It looks at the others, and for new partitions, after a twentieth
            of the time waited so far, at most 2 s.
        tag_filter: As for `DataPlaneClient.claim_meta`.

    Returns:
        Metas of the partitions that gave samples, in order. Each is read, acked and given back by itself. Fewer samples
        than ``batch_size`` if fewer were ready; an empty list if none was and ``blocking`` is False.

    Raises:
        ClaimTimeoutError: No sample was ready in time. It names the partitions.
        UnknownTaskError: None of the partitions has the task.
        InvalidRequestError: The pattern has no ``{version}``, an order or range does not exist, or the client has
            ``open_partitions``; also what `claim_meta` refuses.
        InvalidTypeError: A number is none.

    Examples:
        >>> from dataplane_core import connect
        >>> client = connect({"backend": "noop"})
        >>> for version in (7, 8):
        ...     client.register_partition(f"train_v{version}", ["reward"], None, ["train"])
        ...     _ = client.put_samples([f"a{version}"], f"train_v{version}", {"reward": [0.5]})
        >>> metas = claim_versions(client, "train_v{version}", "train", ["reward"], 2, lease_s=60, oldest=7)
        >>> [(meta.partition_id, meta.sample_ids) for meta in metas]
        [('train_v8', ['a8']), ('train_v7', ['a7'])]
        >>> client.close()
    """
    check_count("claim_versions: batch_size", batch_size)
    checked_as("claim_versions: timeout_s", Seconds, timeout_s)
    if partitions.count(_VERSION) != 1 or order not in ("freshest", "oldest"):
        raise InvalidRequestError(
            f"claim_versions('{partitions}', order={order!r}) refused. Expected a pattern with {_VERSION} once, and "
            "'freshest' or 'oldest'."
        )
    if client.config.open_partitions:
        raise InvalidRequestError(
            f"claim_versions('{partitions}', '{task_name}') refused: the client has open_partitions, so a claim would "
            "add the task to every partition, and register those anew that are cleared meanwhile. Expected a client "
            "without it.",
            hint="Connect another one, with open_partitions: false and bootstrap=False.",
        )
    if newest is not None and newest < oldest:
        raise InvalidRequestError(f"claim_versions refused: newest is {newest}. Expected at least oldest, {oldest}.")
    terms: dict[str, Any] = {"lease_s": lease_s, "tag_filter": tag_filter}
    pattern = re.compile(r"(0|[1-9]\d*)".join(map(re.escape, partitions.split(_VERSION))))
    start = time.monotonic()
    while True:
        found = [(int(match[1]), name) for name in client.list_partitions() if (match := pattern.fullmatch(name))]
        chosen = [each for each in found if oldest <= each[0] and (newest is None or each[0] <= newest)]
        names = [name for _, name in sorted(chosen, reverse=order == "freshest")]
        lacking: list[UnknownTaskError] = []
        with _given_back_if_interrupted(client) as metas:
            for name in names:
                left = batch_size - sum(meta.size for meta in metas)
                if not left:
                    break
                try:
                    metas.append(client.claim_meta(name, task_name, required_fields, left, blocking=False, **terms))
                except UnknownPartitionError:  # cleared meanwhile
                    continue
                except UnknownTaskError as error:
                    lacking.append(error)
                except DataPlaneError:
                    if not any(meta.size for meta in metas):
                        raise
                    break  # what was claimed is not lost: the next call raises
        if lacking and len(lacking) == len(names):
            raise lacking[0]
        metas = [meta for meta in metas if meta.size]
        waited_s = time.monotonic() - start
        if metas or not blocking:
            return metas
        if waited_s >= timeout_s:
            raise ClaimTimeoutError(
                f"claim_versions('{partitions}', '{task_name}') timed out after {timeout_s:g} s: no sample was ready "
                f"in {preview(names) if names else 'any partition, since none of these versions is registered'}."
            )
        pause_s = min(backoff_s(waited_s), timeout_s - waited_s)
        for name in names:
            try:  # one group, or one sample, is enough to wake it; the rest is claimed in the next round
                unit = client.describe(name, count_rows=False).info.grpo_group_size or 1
                first = client.claim_meta(name, task_name, required_fields, unit, timeout_s=pause_s, **terms)
            except (UnknownPartitionError, UnknownTaskError):
                continue
            except ClaimTimeoutError:
                break
            if first.size:
                with _given_back_if_interrupted(client) as metas:
                    metas.append(first)
                    metas += _more(client, first, required_fields, batch_size - first.size, terms)
                return metas
        else:  # there is none to wait for: none is registered, or they are finished
            time.sleep(pause_s)


@contextmanager
def _given_back_if_interrupted(client: DataPlaneClient) -> Iterator[list[KVBatchMeta]]:
    """A list for claims. What it holds is given back if an error leaves the block."""
    metas: list[KVBatchMeta] = []
    try:
        yield metas
    except BaseException:
        for meta in metas:
            with suppress(DataPlaneError):  # the lease ends by itself
                client.nack(meta)
        raise


def _more(
    client: DataPlaneClient, first: KVBatchMeta, fields: Sequence[str], left: int, terms: dict[str, Any]
) -> list[KVBatchMeta]:
    """What else is ready in the partition that a claim was woken for."""
    if not left or first.task_name is None:
        return []
    try:
        more = client.claim_meta(first.partition_id, first.task_name, fields, left, blocking=False, **terms)
    except DataPlaneError:  # the first samples are not lost: the next call raises
        return []
    return [more] if more.size else []
