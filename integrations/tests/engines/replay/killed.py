"""Run as a program: trainers and drivers on a running store that are killed at given points, and started again.

``killed.py JOB``: ``JOB`` is a JSON file: ``role``, ``config``, ``registration``, ``num_prompts``, ``folder``, ``bad``
(prompts whose rollouts fail: they are given up, and there is a spare prompt for each), and
``kills``, a list of ``[point, nth]``. For each of them a process is forked that ends itself by SIGKILL when it comes to
that point for the nth time; a last one runs to the end. What they did goes line by line to ``folder/log``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dataplane_core import DataPlaneClient, KVBatchMeta, connect, stream
from dataplane_core.errors import LeaseExpiredError, MissingDataError
from dataplane_integrations.replay import (
    Collector,
    InOrderPolicy,
    ReplayBuffer,
    Reservation,
    StalenessPolicy,
    TargetStepPolicy,
    parse_sample_id,
    serve,
)

LEASE_S = 30.0
#: What is left of the lease of a trainer that is killed: the next one waits so long.
LEFT_S = 2.0
WAIT_S = 60.0


class Points:
    """Ends the process at one of them.

    Attributes:
        before_end: Called then.
    """

    def __init__(self, folder: Path, point: str, nth: int) -> None:
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._point, self._left = point, nth
        self.before_end: Callable[[], object] = lambda: None

    def log(self, what: str, names: Sequence[str]) -> None:
        os.write(self._log, "".join(f"{what} {name}\n" for name in names).encode())

    def pass_by(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                with contextlib.suppress(LeaseExpiredError):  # it was acked
                    self.before_end()
                os.kill(os.getpid(), signal.SIGKILL)


def train(job: dict[str, Any], points: Points) -> None:
    """A streaming trainer."""
    with connect(job["config"], bootstrap=False) as client:
        ack, clear = client.ack, client.clear_samples

        def noted_ack(meta: KVBatchMeta) -> None:
            ack(meta)
            points.log("acked", meta.sample_ids)
            points.pass_by("acked")

        def noted_clear(sample_ids: Any, partition_id: str) -> None:
            clear(sample_ids, partition_id)
            points.pass_by("cleared")

        client.ack, client.clear_samples = noted_ack, noted_clear
        batches = stream(
            client,
            "replay",
            "train",
            ["input_ids"],
            8,
            lease_s=LEASE_S,
            prefetch=0,
            timeout_s=WAIT_S,
            clear=True,
            fresh=lambda: {"weight_version": (">=", 1)},
        )
        for batch in batches:
            points.before_end = functools.partial(client.renew, batch.meta, LEFT_S)
            points.pass_by("claimed")
            tokens = batch.columns["input_ids"][:, 0].tolist()
            assert tokens == [parse_sample_id(each)["prompt"] for each in batch.meta.sample_ids]
            points.pass_by("read")
            points.log("trained", batch.meta.sample_ids)
            points.pass_by("trained")


def put(client: DataPlaneClient, each: Reservation, index: int) -> KVBatchMeta:
    return client.put_samples(
        [each.sample_ids[index]], "replay", {"input_ids": torch.tensor([[each.prompt]])}, tags=[each.tags]
    )


def roll(job: dict[str, Any], points: Points) -> None:
    """A rollout process."""
    with connect(job["config"], bootstrap=False) as client:

        def rollout(reservations: Sequence[Reservation]) -> KVBatchMeta:
            (each,) = reservations
            points.log("made", [f"{each.prompt} {each.attempt}"])
            points.pass_by("claimed")
            first = put(client, each, 0)
            points.pass_by("half")
            meta = first.concat(put(client, each, 1))
            points.pass_by("written")
            return meta

        serve(client, "replay", rollout, lease_s=LEFT_S)


def drive(job: dict[str, Any], points: Points) -> None:
    """A driver that collects, trains and saves; after a crash it goes on from its newest save."""
    folder = Path(job["folder"])
    with connect(job["config"], bootstrap=False) as client:
        bad = job["bad"]
        policy: StalenessPolicy = InOrderPolicy(max_staleness=1, groups_per_version=2)
        if bad:
            policy = TargetStepPolicy(max_staleness=1, groups_per_version=2, borrow=True)
        trained: list[int] = []
        resume = True
        try:
            trained = list(client.load(folder / "save")["trained"])
        except MissingDataError:
            resume = False
        buffer = ReplayBuffer(
            client,
            "replay",
            policy,
            group_size=2,
            num_prompts=job["num_prompts"],
            spare_prompts=len(bad),
            max_attempts=2 if bad else None,
            resume=resume,
        )
        points.log("start", [f"{client.list_samples('replay').size} {len(trained)}"])

        def rollout(reservations: Sequence[Reservation]) -> KVBatchMeta:
            (each,) = reservations
            if each.prompt in bad:
                points.pass_by("failing")
                raise RuntimeError(f"prompt {each.prompt} has no answer")
            first = put(client, each, 0)
            points.pass_by("half")
            meta = first.concat(put(client, each, 1))
            points.pass_by("written")
            return meta

        with Collector(buffer, rollout):
            while (meta := buffer.select(2, timeout_s=WAIT_S)).size:
                prompts = client.get_data(meta, ["input_ids"])["input_ids"].flatten().tolist()
                points.pass_by("read")
                trained += sorted(set(prompts))
                buffer.consume(meta)
                points.pass_by("consumed")
                buffer.set_weight_version(buffer.weight_version + 1)
                buffer.save(folder / "save", {"trained": trained})
                points.pass_by("saved")
        buffer.close()
        assert client.list_samples("replay").size == 0
        points.log("trained", [str(prompt) for prompt in trained])


def main(job: dict[str, Any]) -> None:
    role: Callable[..., None] = {"train": train, "drive": drive, "roll": roll}[job["role"]]
    for point, nth in [*job["kills"], ["never", 1]]:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                role(job, Points(Path(job["folder"]), point, nth))
                status = 0
            finally:
                sys.stderr.flush()
                if status:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if killed != (point != "never") or (not killed and status):
            sys.exit(f"the process that was to be killed at {point} {nth} ended with status {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()))
