"""`StreamingDataset`: the batches of a task in the workers of a torch `DataLoader`, acked where they are trained on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataplane_core.client import DataPlaneClient
from dataplane_core.client.streams import Collate, Feed, StreamBatch, Terms, Uneven
from dataplane_core.config import load_config
from dataplane_core.connecting import connect
from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta

__all__ = ["StreamingDataset"]


class StreamingDataset(IterableDataset[StreamBatch]):
    """The batches of a task, for a `DataLoader` with any number of workers, forked or spawned, persistent or not.

    Each worker, and each rank of a parallel job, connects a client of its own and claims with leases, so each sample
    goes to one of them. A worker reads ahead, so it cannot know what was trained on: nothing is acked in it. Use
    `loader`, which acks in the process that trains; or a `DataLoader` of your own with ``batch_size=None`` and
    ``in_order=False``, and ``client.ack(batch.meta)`` after each step.

    A worker renews the leases of its batches until they are acked, for at most ``most_held_s``. Batches that are not
    acked when the loop is left are given back (with ``persistent_workers``, when the next loop begins). The leases of a
    process that was killed end; its samples are then claimed again. With ``dp_rank``, all ranks need as many workers,
    which claim the rank's batches in turn, from the first one on: iterate once. Other arguments are those of `stream`.

    Args:
        config: The config of a running store, as for `dataplane_core.connect`; workers attach. Or a client, which
            serves only ``num_workers=0``.
        lease_s: Seconds after which samples of a process that died come back.
        most_held_s: Seconds for which a worker renews the lease of a batch that is not acked.
        collate: Called in the worker with the meta and the columns of each batch. Its result takes the columns' place.

    Examples:
        >>> import torch
        >>> from dataplane_core import StreamingDataset, connect
        >>> client = connect({"backend": "noop"})
        >>> client.register_partition("step-1", ["reward"], 3, ["trainer"])
        >>> meta = client.put_samples(["a", "b", "c"], "step-1", {"reward": torch.tensor([1.0, 2.0, 3.0])})
        >>> dataset = StreamingDataset(client, "step-1", "trainer", ["reward"], 2)
        >>> [batch.columns["reward"].tolist() for batch in dataset.loader(client)]
        [[1.0, 2.0], [3.0]]
        >>> client.close()
    """

    def __init__(
        self,
        config: Any,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        batch_size: int,
        *,
        lease_s: float = 60.0,
        most_held_s: float = 3600.0,
        collate: Collate | None = None,
        timeout_s: float | None = None,
        uneven: Uneven | None = None,
        **claim: Any,
    ) -> None:
        super().__init__()
        self._client = config if isinstance(config, DataPlaneClient) else None
        self._config = None if self._client is not None else load_config(config)
        make = StreamBatch if collate is None else partial(_collated, collate)
        terms = (partition_id, task_name, list(fields), batch_size, lease_s, 0, make, timeout_s, uneven, claim)
        self._terms = Terms(*terms, most_held_s)
        self._feed: Feed | None = None

    def __iter__(self) -> Iterator[StreamBatch]:
        self.close()  # an iteration that was left
        client = self._client or connect(self._config, bootstrap=False)
        worker = get_worker_info()
        options: dict[str, Any] = {}
        if worker is not None and self._terms.claim.get("dp_rank") is not None:
            options["batch_indexes"] = itertools.count(worker.id, worker.num_workers)
        self._feed = Feed(client, self._terms, closes=self._client is None, **options)
        yield from self._feed.batches()

    def loader(self, client: DataPlaneClient, num_workers: int = 0, **options: Any) -> StreamingLoader:
        """A `DataLoader` of this dataset that acks each batch with ``client`` when the next one is asked for.

        Batches come in the order in which the workers have them ready. ``options`` are further arguments of
        `DataLoader`, such as ``multiprocessing_context`` or ``prefetch_factor``.
        """
        as_is: Any = _as_is
        # in order, batches of a worker that has ended would wait here for others, and nobody would renew their leases
        options = {"in_order": False, **options}
        return StreamingLoader(
            client, self, DataLoader(self, batch_size=None, collate_fn=as_is, num_workers=num_workers, **options)
        )

    def close(self) -> None:
        """Gives back what this process claimed and nobody acked. A next iteration begins anew. Idempotent."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` checks. What was trained on is in the store, which `DataPlaneClient.save` saves."""
        return {"partition_id": self._terms.partition_id, "task_name": self._terms.task_name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another partition or task (`InvalidRequestError`). The next iteration gives what was not
        acked."""
        if dict(state) != self.state_dict():
            raise InvalidRequestError(f"load_state_dict refused: the state is {dict(state)}. Expected that of {self}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_feed": None}

    def __repr__(self) -> str:
        return f"<StreamingDataset partition {self._terms.partition_id!r}, task {self._terms.task_name!r}>"


class StreamingLoader:
    """What `StreamingDataset.loader` makes."""

    def __init__(self, client: DataPlaneClient, dataset: StreamingDataset, loader: DataLoader[StreamBatch]) -> None:
        self._client, self._dataset, self._loader = client, dataset, loader

    def __iter__(self) -> Iterator[StreamBatch]:
        try:
            for batch in self._loader:
                try:
                    yield batch
                    self._client.ack(batch.meta)
                except BaseException:  # the loop was left, or the ack failed
                    with contextlib.suppress(DataPlaneError):
                        self._client.nack(batch.meta)
                    raise
        finally:
            self._dataset.close()


def _collated(collate: Collate, meta: KVBatchMeta, columns: Any) -> StreamBatch:
    """A batch with the result of ``collate`` in the place of the columns."""
    return StreamBatch(meta, collate(meta, columns))


def _as_is(batch: StreamBatch) -> StreamBatch:
    return batch
