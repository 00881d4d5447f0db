"""Puts and gets with narrow integers beside the same without, and the bytes that are stored.

Run:  python benchmarks/narrow.py [--rounds 15] [--tokens 400] [--backends noop shm_store redis_store]

``experts`` is a batch with ``routed_experts``: 512 rows of up to ``--tokens`` tokens, 8 layers x 8 experts per token,
int64 below 128. ``A wide`` is batch A of `batches.py` with token ids that int64 needs, so that nothing is saved; ``A``
is as it is, with token ids below 50,000. Rounds are interleaved in one process. Printed are medians and their ratios.
"""

from __future__ import annotations

import argparse
import contextlib

from batches import batch, client_steps, medians_ms, routed_experts, size_bytes
from tensordict import TensorDict

from dataplane_core import connect

#: Backend -> the option that keeps two stores apart, where it is not "namespace".
KEYS = {"tq_simple": "instance", "tq_mooncake": "instance"}


def wide_a() -> TensorDict:
    """Batch A, where no column can be narrower."""
    columns = batch("A")
    values = columns["input_ids"].values()
    values += 1 << 40
    return columns


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--batches", nargs="+", default=["experts", "A wide", "A"])
    parser.add_argument("--backends", nargs="+", default=["noop", "shm_store", "redis_store"])
    options = parser.parse_args()
    batches = {"experts": lambda: routed_experts(options.tokens), "A wide": wide_a, "A": lambda: batch("A")}
    print(f"{'':24}{'put ms':>10}{'as put':>10}{'ratio':>8}{'get ms':>10}{'as put':>10}{'ratio':>8}{'bytes':>8}")
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            clients = {}
            for name, narrow in (("narrow", True), ("as put", False)):
                own = {} if backend == "noop" else {KEYS.get(backend, "namespace"): f"narrow-{narrow}"}
                own |= {"server": "private"} if backend == "redis_store" else {}
                config = {"backend": backend, "options": own, "narrow": narrow}
                clients[name] = stack.enter_context(connect(config))
            for name in options.batches:
                columns = batches[name]()
                steps = {each: client_steps(client, columns) for each, client in clients.items()}
                took = medians_ms(steps, options.rounds)
                held = {}
                for each, (put, _, clear) in steps.items():
                    put()
                    held[each] = clients[each].describe("bench").held_bytes
                    clear()
                line = f"{backend:14}{name:10}"
                for new, old in zip(took["narrow"], took["as put"], strict=True):
                    line += f"{new:10.2f}{old:10.2f}{new / old:8.2f}"
                print(line + f"{held['narrow'] / held['as put']:8.2f}   {size_bytes(columns) / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
