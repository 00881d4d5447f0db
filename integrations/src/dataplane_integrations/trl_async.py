"""TRL's asynchronous trainer on the data plane: a rollout worker and a weight transfer for `AsyncGRPOTrainer`.

Tried with TRL 1.16.0. Rollout processes write samples into a partition and take weights from another one. Nothing here
imports TRL before a sample is made.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from torch import Tensor

from dataplane_core import DataPlaneClient, KVBatchMeta
from dataplane_core.client import Feed, Terms
from dataplane_core.errors import ClaimTimeoutError, ClientClosedError, DataPlaneError, InvalidRequestError
from dataplane_core.ledger import group_of
from dataplane_integrations.weights import WEIGHTS, publish_weights

__all__ = ["SAMPLE_FIELDS", "StoreRolloutWorker", "StoreWeightTransfer"]

#: What a rollout process writes of each sample. S tokens are those of prompt and answer: ``input_ids`` (S,) int64,
#: ``token_mask`` (S,) with 1 at the tokens to train on, ``generation_logprobs`` (S,) float32 with 0 elsewhere;
#: ``advantage`` () float32; ``metrics``: a dict of floats, such as ``reward``, which the trainer logs as means.
SAMPLE_FIELDS: Final = ("input_ids", "token_mask", "generation_logprobs", "advantage", "metrics")
#: The tag of a sample that says which weights generated it.
_VERSION: Final = "weight_version"
#: Seconds after which a thread that waits for room in the buffer looks whether the worker was stopped.
_POLL_S: Final = 0.2


class StoreWeightTransfer:
    """Publishes the trainer's weights as versions in a store: a `weight_transfer` for `AsyncGRPOTrainer`.

    Rollout processes take them with `WeightReader`, whenever they like. A version is put whole, so nobody has to pause:
    who generates goes on with the version that it has, and tags its samples with it.

    A trainer that begins again goes on counting where the one before was killed, and readers go on with its versions.

    Args:
        client: The trainer's client. Publishing blocks until readers can see the version.
        partition_id: The partition of the weights; opened if it is not.
        options: Further arguments of `publish_weights`, such as ``keep``.

    Attributes:
        version: The version that was published last, from 1. 0: none.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str = WEIGHTS, **options: Any) -> None:
        self.version = 0
        self._client = client
        self._partition_id = partition_id
        self._options = options

    def init_weight_transfer(self) -> None:
        self._client.register_partition(self._partition_id, [_VERSION], None, [], if_exists="keep")
        held = self._client.list_samples(self._partition_id).tags or []
        self.version = max((int(tags[_VERSION]) for tags in held), default=0)

    def pause(self) -> None:
        """Nothing pauses."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publishes the next version. Errors of `publish_weights` reach the trainer."""
        publish_weights(
            self._client, self.version + 1, dict(iterator), partition_id=self._partition_id, **self._options
        )
        self.version += 1

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """The versions stay for the rollout processes. Who ends the run clears the partition."""


class StoreRolloutWorker:
    """Feeds `AsyncGRPOTrainer` with samples that rollout processes write to a store: a `rollout_worker`.

    A thread claims samples on lease, renews the leases, and puts the samples into `rollout_buffer`. They are acked and
    cleared when the trainer has been trained on them, or has dropped them as too stale. The trainer says that with
    `update_model_version`: it has then been trained on all samples that it had taken at the call before, but for the
    newest one, which may wait for the next microbatch. So an ack comes one call late, never early.

    Claims that are not acked when the worker stops, also by an error, are given back at once; those of a trainer that
    was killed, when their leases end. The next trainer gets them, whole groups again.

    Args:
        client: The trainer's client. Its backend has leases.
        partition_id: The partition of the samples, registered with `SAMPLE_FIELDS` and the task. Each sample has the
            tag ``weight_version``, which `WeightReader.version` tells. The samples of a prompt are a group: their ids
            are equal up to the last ``_g``. A prompt that is drawn again needs another id.
        task_name: A task of the partition.
        claim_size: Samples of a claim; a multiple of the group size where the partition has one.
        weights: The trainer's weight transfer. It says which version the trainer has published, so that the age of
            samples from before a restart is right. None: the tags hold the trainer's own ``model_version``.
        buffer_size: How many samples may wait in `rollout_buffer`, where they grow old.
        lease_s: Seconds after which the samples of a killed trainer are handed out again.
        texts: Whether samples also have the columns ``prompt`` and ``completion``, chats, for the trainer's traces.

    Attributes:
        rollout_buffer: A queue of TRL's `RolloutSample`.
        metrics_queue: A queue of dicts. Per claim: ``rollout/claim_s``, how long it waited for samples, and
            ``rollout/samples_total``.
        acked: How many samples the trainer has been trained on or has dropped, as far as is known.
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
        texts: bool = False,
    ) -> None:
        if buffer_size < 1:
            raise InvalidRequestError(f"StoreRolloutWorker refused: buffer_size is {buffer_size}. Expected at least 1.")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(buffer_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.acked = 0
        self._client = client
        fields = [*SAMPLE_FIELDS, *(("prompt", "completion") if texts else ())]
        self._terms = Terms(
            partition_id, task_name, fields, claim_size, lease_s, 0, self._samples, threading.TIMEOUT_MAX, None, {}
        )
        self._weights = weights
        self._ahead = 0  # by how much versions in the store are higher than the trainer's
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._begin()

    def start(self) -> None:
        """Begins to claim. If it has begun already, nothing happens; after `stop` it begins anew."""
        if self._thread is None:
            self._begin()
            self._feed = Feed(self._client, self._terms)
            self._thread = threading.Thread(target=self._fill, args=(self._feed,), name="rollout-claims", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the claims, and gives back what is not acked. Rollout processes go on. Idempotent. Blocks."""
        feed, self._feed, thread, self._thread = self._feed, None, self._thread, None
        if feed is not None and thread is not None:
            feed.close()
            thread.join()
            with self.rollout_buffer.mutex:
                self.rollout_buffer.queue.clear()

    def update_model_version(self, model_version: int) -> None:
        """Called after each update of the weights: acks what the trainer has been trained on.

        Raises:
            LeaseExpiredError: The lease of such samples had ended, because this process was suspended for longer than
                ``lease_s``. Others may have been given them.
            DataPlaneError: The claims have failed.
        """
        self._raise_failure()
        taken = self._num_put - self.rollout_buffer.qsize()
        trained, self._taken = self._taken - 1, taken
        done: list[KVBatchMeta] = []
        while self._claims and self._claims[0][0] <= trained:
            done.append(self._claims.popleft()[1])
        if done:
            meta = done[0].concat(*done[1:])
            self._client.ack(meta)
            self._client.clear_samples(meta.sample_ids, meta.partition_id)
            self.acked += meta.size
            self._client.mark_step(model_version + self._ahead - 1)
        if self._weights is not None:
            self._ahead = self._weights.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Called while the trainer waits for a sample.

        Raises:
            ClaimTimeoutError: No claim got samples for ``stale_after_s`` seconds, or there will be no more. It says
                which process is the cause, if the store knows.
            DataPlaneError: The claims have failed.
        """
        self._raise_failure()
        partition, task, waited_s = self._terms.partition_id, self._terms.task_name, time.monotonic() - self._newest
        if self._thread is None or not self._thread.is_alive():
            raise ClaimTimeoutError(
                f"the trainer waits for samples of '{partition}', and gets no more: the worker was stopped, or the "
                "partition is finished. Expected at least as many samples as the steps of the trainer need."
            )
        if waited_s > stale_after_s:
            try:
                text = " ".join(map(str, self._client.why(partition, task)))
            except DataPlaneError as error:
                text = f"The store does not say why: {error}"
            raise ClaimTimeoutError(
                f"the trainer got no samples for {waited_s:.0f} s, longer than {stale_after_s:g} s. {text}",
                hint="Start rollout processes again, or wait longer: heartbeat_stale_after_s of AsyncGRPOConfig.",
            )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._claims: deque[tuple[int, KVBatchMeta]] = deque()  # not acked; with the number of samples up to its end
        self._num_put = self._taken = 0
        self._newest = time.monotonic()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fill(self, feed: Feed) -> None:
        """Runs in the thread: claims, reads, and fills the buffer."""
        try:
            for meta, samples in feed.batches():
                waited_s, self._newest = time.monotonic() - self._newest, time.monotonic()
                self.metrics_queue.put({"rollout/claim_s": waited_s, "rollout/samples_total": float(meta.size)})
                self._claims.append((self._num_put + meta.size, meta))
                for sample in samples:
                    while not self._put(sample):
                        if self._feed is not feed:
                            return
                self._newest = time.monotonic()  # the time for which the buffer was full is nobody's fault
        except ClientClosedError as error:
            if self._feed is feed:  # nobody has stopped it
                self._failure = error
        except BaseException as error:  # the trainer's thread raises it
            self._failure = error

    def _put(self, sample: Any) -> bool:
        try:
            self.rollout_buffer.put(sample, timeout=_POLL_S)
        except queue.Full:
            return False
        self._num_put += 1
        return True

    def _samples(self, meta: KVBatchMeta, columns: Any) -> tuple[KVBatchMeta, list[Any]]:
        """TRL's samples from the columns of a claim."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        tags = meta.tags or [{}] * meta.size
        lacking = [name for name, row in zip(meta.sample_ids, tags, strict=True) if _VERSION not in row]
        if lacking:
            raise InvalidRequestError(
                f"samples of '{meta.partition_id}' have no tag '{_VERSION}', such as '{lacking[0]}'. Expected the "
                "version of the weights that generated them."
            )
        rows = {name: _rows(columns[name]) for name in self._terms.fields}
        nothing: list[list[Any]] = [[]] * meta.size
        return meta, [
            RolloutSample(
                prompt=rows.get("prompt", nothing)[index],
                completion=rows.get("completion", nothing)[index],
                input_ids=rows["input_ids"][index].astype(np.int64),
                completion_mask=rows["token_mask"][index].astype(np.int64),
                old_log_probs=rows["generation_logprobs"][index].astype(np.float32),
                advantage=float(rows["advantage"][index]),
                model_version=int(tags[index][_VERSION]) - self._ahead,
                group_id=_number(group_of(sample_id)),
                metrics=dict(rows["metrics"][index]),
                enqueued_at=time.time(),
            )
            for index, sample_id in enumerate(meta.sample_ids)
        ]


def _rows(column: Any) -> list[Any]:
    return [row.numpy() for row in column.unbind()] if isinstance(column, Tensor) else list(column)


def _number(group: str) -> int:
    """A number for a group's id, the same in every process. TRL counts groups by numbers."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big")
