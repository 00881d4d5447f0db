"""TRL's AsyncGRPOTrainer (tried with 1.16.0) on a store: its `rollout_worker`, its `weight_transfer`, its rollouts."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from dataplane_core import DataPlaneClient, KVBatchMeta
from dataplane_core.client import Feed, Terms
from dataplane_core.errors import ClaimTimeoutError, ClientClosedError, DataPlaneError, InvalidRequestError
from dataplane_core.ledger import group_of
from dataplane_core.schema import GROUP_ROLLOUTS_TAG, ROLLOUT_ROWS_TAG, WEIGHT_VERSION_TAG
from dataplane_integrations.weights import WEIGHTS, publish_weights

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

__all__ = ["SAMPLE_FIELDS", "StoreRolloutWorker", "StoreWeightTransfer", "put_rollouts"]

#: What rollout processes write of a sample, of S tokens: ``input_ids`` (S,), ints; ``token_mask`` (S,), 1 at tokens to
#: train on; ``generation_logprobs`` (S,) float32; ``advantage`` (), a float; ``metrics``, a dict of floats to log.
SAMPLE_FIELDS: Final = ("input_ids", "token_mask", "generation_logprobs", "advantage", "metrics")


#: The attributes of TRL's `RolloutSample` that have them.
_OF_SAMPLES: Final = ("input_ids", "completion_mask", "old_log_probs", "advantage", "metrics")


def put_rollouts(
    client: DataPlaneClient, partition_id: str, group: str, rollouts: Sequence[Sequence[RolloutSample]]
) -> KVBatchMeta:
    """Writes a group of rollouts, sealed, in one put. Blocks until it is stored.

    TRL makes several samples of a conversation whose history was rewritten between two turns. Each is a row:
    ``p7_g0/0``, ``p7_g0/1``, ... of the group ``p7``.

    Args:
        client: The rollout process's client.
        partition_id: A partition with `SAMPLE_FIELDS`, registered with ``rollouts=True``.
        group: The name of the group, of one prompt.
        rollouts: The samples of each conversation, as TRL scores them. A conversation without samples is left out.
            ``model_version`` is the version of the weights that generated a sample.

    Returns:
        The meta of the rows. Empty: there was no sample.

    Raises:
        InvalidRequestError: The group is sealed with other rollouts.
    """
    made = [samples for samples in rollouts if samples]
    ids = [f"{group}_g{number}/{row}" for number, samples in enumerate(made) for row in range(len(samples))]
    rows = [sample for samples in made for sample in samples]
    tags = [
        {WEIGHT_VERSION_TAG: sample.model_version, ROLLOUT_ROWS_TAG: len(samples), GROUP_ROLLOUTS_TAG: len(made)}
        for samples in made
        for sample in samples
    ]
    columns = {
        name: [getattr(sample, of) for sample in rows] for name, of in zip(SAMPLE_FIELDS, _OF_SAMPLES, strict=True)
    }
    return client.put_samples(ids, partition_id, columns, tags=tags)


class StoreWeightTransfer:
    """Publishes the trainer's weights in a store. Rollout processes take them with `WeightReader` when they like.

    A version is put whole, so nobody pauses: who generates finishes with the version that it has. A trainer that begins
    again counts on from the versions that the store holds.

    Args:
        client: The trainer's client. ``send_weights`` blocks until readers can see the version.
        partition_id: The partition of the weights; it is opened if it is not there.
        options: Further arguments of `publish_weights`, such as ``keep``.

    Attributes:
        version: The version that was published last. 0: none.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str = WEIGHTS, **options: Any) -> None:
        self.version = 0
        self._client, self._partition_id, self._options = client, partition_id, options | {"partition_id": partition_id}

    def init_weight_transfer(self) -> None:
        self._client.register_partition(self._partition_id, [WEIGHT_VERSION_TAG], None, [], if_exists="keep")
        held = self._client.list_samples(self._partition_id).tags or []
        self.version = max((int(tags[WEIGHT_VERSION_TAG]) for tags in held), default=0)

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        publish_weights(self._client, self.version + 1, dict(iterator), **self._options)
        self.version += 1

    def pause(self) -> None:
        """Does nothing, as `resume` and `destroy`: the versions stay until somebody clears the partition."""

    resume = destroy = pause


class StoreRolloutWorker:
    """Feeds the trainer with samples that rollout processes write to a store.

    A thread claims samples on lease, and queues them. The trainer calls `update_model_version` after a step: it has
    then been trained on all that it had taken at the call before, but for the newest sample, which may wait for the
    next microbatch; or it has dropped them as stale. These are acked and cleared, claim by claim. What is not acked
    when the worker stops, also by an error, is given back at once; if the trainer is killed, when the leases end.

    Args:
        client: The trainer's client; its backend has ``leases``.
        partition_id: The partition, with `SAMPLE_FIELDS`, the tag ``weight_version``, and ids such as ``p7_g0``, where
            what is before ``_g`` is that of a group, the answers to a prompt.
        task_name: A task of the partition.
        claim_size: Samples of a claim, a multiple of the group size; with ``rollouts``, groups.
        weights: The trainer's weight transfer, if the tags are versions that it has published, also before a restart.
            None: they are the trainer's ``model_version``.
        buffer_size: If so many samples wait in the queue, nothing is claimed.
        lease_s: Seconds until the samples of a killed trainer are handed out again.

    Attributes:
        rollout_buffer: The queue, of `RolloutSample`.
        metrics_queue: For the trainer's log: ``rollout/claim_s``, how long a claim waited, ``rollout/samples_total``.
        acked: How many samples were acked.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        task_name: str,
        *,
        claim_size: int,
        weights: StoreWeightTransfer | None = None,
        buffer_size: int = 256,
        lease_s: float = 60.0,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.acked = 0
        self._client, self._weights, self._buffer_size = client, weights, buffer_size
        wanted = (partition_id, task_name, list(SAMPLE_FIELDS), claim_size, lease_s)
        self._terms = Terms(*wanted, 0, self._samples, threading.TIMEOUT_MAX, None, {})
        self._ahead = 0  # of the trainer's versions are those of the store
        self._feed: Feed | None = None
        self._thread = threading.Thread()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begins to claim; again after `stop`. Does nothing while it runs."""
        if self._feed is None:
            self._claims: deque[tuple[int, KVBatchMeta]] = deque()  # not acked; with the number of samples up to there
            self._num_put = self._num_taken = 0
            self._newest, self._feed = time.monotonic(), Feed(self._client, self._terms)
            self._thread = threading.Thread(target=self._fill, args=(self._feed,), name="rollout-claims", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Gives back what is not acked. Rollout processes go on. Idempotent. Blocks until the thread has ended."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            self._thread.join()
            with self.rollout_buffer.mutex:
                self.rollout_buffer.queue.clear()

    def update_model_version(self, model_version: int) -> None:
        """Acks and clears what the trainer has been trained on. Raises what the thread has raised.

        Raises:
            LeaseExpiredError: This process was suspended for longer than ``lease_s``. Others may have the samples.
        """
        done: list[KVBatchMeta] = []
        if self._failure is not None:
            raise self._failure
        if self._feed is not None:
            trained, self._num_taken = self._num_taken - 1, self._num_put - self.rollout_buffer.qsize()
            while self._claims and self._claims[0][0] <= trained:
                done.append(self._claims.popleft()[1])
        if done:
            meta = done[0].concat(*done[1:])
            self._client.ack(meta)
            self._client.clear_samples(meta.sample_ids, meta.partition_id)
            self._client.mark_step(model_version + self._ahead - 1)
            self.acked += meta.size
        self._ahead = 0 if self._weights is None else self._weights.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """The trainer calls it while it waits for a sample. Raises what the thread has raised.

        Raises:
            ClaimTimeoutError: There was none for ``stale_after_s`` seconds, and why; or there will be none.
        """
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():
            raise ClaimTimeoutError(f"'{self._terms.partition_id}' is finished, or not started: no samples will come.")
        waited_s, why = time.monotonic() - self._newest, ""
        if waited_s > stale_after_s:
            with contextlib.suppress(DataPlaneError):  # the backend cannot say why
                why = " ".join(map(str, self._client.why(self._terms.partition_id, self._terms.task_name)))
            raise ClaimTimeoutError(
                f"no samples of '{self._terms.partition_id}' for {waited_s:.0f} s. {why}",
                hint="Start rollout processes, or wait longer: heartbeat_stale_after_s of AsyncGRPOConfig.",
            )

    def _fill(self, feed: Feed) -> None:
        """Runs in the thread. Its errors are raised in that of the trainer."""
        try:
            for meta, samples in feed.batches():
                claim_s, self._newest = time.monotonic() - self._newest, time.monotonic()
                self.metrics_queue.put({"rollout/claim_s": claim_s, "rollout/samples_total": float(meta.size)})
                for sample in samples:
                    self.rollout_buffer.put(sample)
                self._num_put += meta.size
                self._claims.append((self._num_put, meta))
                while self._feed is feed and self.rollout_buffer.qsize() >= self._buffer_size:
                    time.sleep(0.02)
                    self._newest = time.monotonic()
        except BaseException as error:
            if self._feed is feed or not isinstance(error, ClientClosedError):  # which `stop` causes
                self._failure = error

    def _samples(self, meta: KVBatchMeta, columns: Any) -> tuple[KVBatchMeta, list[Any]]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        versions: list[Any] = [row.get(WEIGHT_VERSION_TAG) for row in meta.tags or [{}] * meta.size]
        if None in versions:
            raise InvalidRequestError(
                f"sample '{meta.sample_ids[versions.index(None)]}' of '{meta.partition_id}' has no tag "
                f"'{WEIGHT_VERSION_TAG}'. Expected the version of the weights that generated it."
            )
        types = {"input_ids": np.int64, "token_mask": np.int64, "generation_logprobs": np.float32}
        arrays = [[row.numpy().astype(types[name]) for row in columns[name].unbind()] for name in types]
        own = [version - self._ahead for version in versions]  # of the trainer
        groups = [hash(group_of(sample_id)) for sample_id in meta.sample_ids]  # TRL counts groups by numbers
        rows = zip(*arrays, columns["advantage"].tolist(), own, groups, columns["metrics"], strict=True)
        return meta, [RolloutSample([], [], *row, enqueued_at=time.time()) for row in rows]
