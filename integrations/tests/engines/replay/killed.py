"""Run as a program: drivers and rollouts on a running store that are killed at given points, and started again.

``killed.py JOB``: ``JOB`` is a JSON file: ``role``, ``config``, ``num_prompts``, ``folder``, ``bad`` (prompts whose
rollouts fail: they are given up, and there is a spare prompt for each), and ``kills``, a list of ``[point, nth]``. For
each of them a process is forked that ends itself by SIGKILL when it comes to that point for the nth time; a last one
runs to the end. What they did goes line by line to ``folder/log``.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from dataplane_core import connect
from dataplane_core.errors import MissingDataError
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer, TargetStepPolicy, serve

#: Others make the prompts of a process that was killed when its lease has ended.
LEASE_S = 2.0
WAIT_S = 60.0


class Points:
    """Ends the process at one of them."""

    def __init__(self, folder, point, nth):
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._point, self._left = point, nth

    def log(self, what, names):
        os.write(self._log, "".join(f"{what} {name}\n" for name in names).encode())

    def pass_by(self, point):
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def write(client, points, reservation):
    """The two answers to a prompt, one after the other."""

    def put(index):
        ids, columns = [reservation.sample_ids[index]], {"input_ids": torch.tensor([[reservation.prompt]])}
        return client.put_samples(ids, "replay", columns, tags=[reservation.tags])

    first = put(0)
    points.pass_by("half")
    meta = first.concat(put(1))
    points.pass_by("written")
    return meta


def roll(job, points):
    """A rollout process."""
    with connect(job["config"], bootstrap=False) as client:

        def rollout(reservations):
            (reservation,) = reservations
            points.log("made", [f"{reservation.prompt} {reservation.attempt}"])
            points.pass_by("claimed")
            return write(client, points, reservation)

        serve(client, "replay", rollout, lease_s=LEASE_S)


def drive(job, points):
    """A driver that collects, trains and saves; after a crash it goes on from its newest save."""
    folder = Path(job["folder"])
    with connect(job["config"], bootstrap=False) as client:
        bad = job["bad"]
        policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
        if bad:
            policy = TargetStepPolicy(max_staleness=1, groups_per_version=2, borrow=True)
        trained = []
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

        def rollout(reservations):
            (reservation,) = reservations
            if reservation.prompt in bad:
                points.pass_by("failing")
                raise RuntimeError(f"prompt {reservation.prompt} has no answer")
            return write(client, points, reservation)

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


def main(job):
    role = {"drive": drive, "roll": roll}[job["role"]]
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
