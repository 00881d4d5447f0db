"""Puts and gets with narrow integers beside the same without, and the bytes that are stored.

Run:  python benchmarks/narrow.py [--rounds 15] [--tokens 400] [--backends noop shm_store redis_store]

``experts`` is a batch with ``routed_experts``: 512 rows of up to ``--tokens`` tokens, 8 layers x 8 experts per token,
int64 below 128. ``A wide`` is batch A of `batches.py` with token ids that int64 needs, so that nothing is saved; ``A``
is as it is, with token ids below 50,000. Rounds are interleaved in one process. Printed are the least times, and the
ratios of the least times and of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

from batches import Step, batch, client_steps, routed_experts, size_bytes
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect

#: Backend -> the option that keeps two stores apart, where it is not "namespace".
KEYS = {"tq_simple": "instance", "tq_mooncake": "instance"}


def wide_a() -> TensorDict:
    """Batch A, where no column can be narrower."""
    columns = batch("A")
    values = columns["input_ids"].values()
    values += 1 << 40
    return columns


def ms(step: Step) -> float:
    """Milliseconds of a call."""
    started = time.perf_counter()
    step()
    return (time.perf_counter() - started) * 1e3


def stored_bytes(client: DataPlaneClient) -> int:
    """The payload bytes of the partition."""
    return client.describe("bench").held_bytes


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--batches", nargs="+", default=["experts", "A wide", "A"])
    parser.add_argument("--backends", nargs="+", default=["noop", "shm_store", "redis_store"])
    options = parser.parse_args()
    batches = {"experts": lambda: routed_experts(options.tokens), "A wide": wide_a, "A": lambda: batch("A")}
    print(
        f"{'':24}{'put ms':>10}{'as put':>10}{'least':>8}{'median':>8}"
        f"{'get ms':>10}{'as put':>10}{'least':>8}{'median':>8}{'bytes':>8}"
    )
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            clients = {}
            for narrow in (True, False):
                own = {} if backend == "noop" else {KEYS.get(backend, "namespace"): f"narrow-{narrow}"}
                own |= {"server": "private"} if backend == "redis_store" else {}
                config = {"backend": backend, "options": own, "narrow": narrow}
                clients[narrow] = stack.enter_context(connect(config))
            for name in options.batches:
                columns = batches[name]()
                steps = {narrow: client_steps(client, columns) for narrow, client in clients.items()}
                times: dict[tuple[bool, str], list[float]] = {}
                held = {}
                for number in range(options.rounds + 1):
                    order = (True, False) if number % 2 else (False, True)
                    for what, at in (("put", 0), ("get", 1)):
                        for narrow in order:
                            spent = ms(steps[narrow][at])
                            if number:
                                times.setdefault((narrow, what), []).append(spent)
                    for narrow in order:
                        held[narrow] = stored_bytes(clients[narrow])
                        steps[narrow][2]()
                line = f"{backend:14}{name:10}"
                for what in ("put", "get"):
                    new, old = times[True, what], times[False, what]
                    line += f"{min(new):10.2f}{min(old):10.2f}{min(new) / min(old):8.2f}"
                    line += f"{statistics.median(new) / statistics.median(old):8.2f}"
                print(line + f"{held[True] / held[False]:8.2f}   {size_bytes(columns) / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
