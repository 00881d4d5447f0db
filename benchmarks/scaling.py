"""How much of one server a run takes, computed from measured figures and stated assumptions.

Run:  python benchmarks/server_cost.py --sizes 16 --values 1344 --out figures.json
      python benchmarks/scaling.py figures.json [--gpus 8 64 512] [--rate 2] [--tokens 1536] [--size 16]

Assumed: each GPU finishes ``--rate`` samples per second. A sample has ``--tokens`` tokens in one int64 and five float32
columns, 28 bytes for each token. It is put twice, by the rollout and by whoever adds columns; two tasks claim, get and
ack it; one call clears it. Calls have ``--size`` samples. Its bytes pass the server three times: in once, out twice.

Shown for each process that keeps the store: its CPU in percent of one core. A process with one thread ends at 100; plan
for half of that. Each measured put and get moves the bytes that ``--values`` gave a sample: 8 fields of 1,344 float32
are 43 KB, as are 1,536 tokens. A second put that adds a few columns moves fewer, so the CPU is rather too high.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

#: How often a sample goes through each call.
TIMES = {"put": 2, "claim": 2, "get": 2, "ack": 2, "clear": 1}
BYTES_PER_TOKEN = 28
#: As many as TransferQueue says that it serves.
MANY_CLIENTS = 8192
PASSES = 3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rate", type=float, default=2.0, help="samples per second and GPU")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a sample")
    parser.add_argument("--size", default="16", help="samples of each call, as measured")
    arguments = parser.parse_args()
    rates = [gpus * arguments.rate for gpus in arguments.gpus]
    sample_bytes = arguments.tokens * BYTES_PER_TOKEN
    print("| | " + " | ".join(f"{gpus} GPUs" for gpus in arguments.gpus) + " |")
    print("|---" * (len(rates) + 1) + "|")
    print("| samples per second | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    passed = [rate * sample_bytes * PASSES / 1e6 for rate in rates]
    print("| MB per second through the server | " + " | ".join(f"{each:,.1f}" for each in passed) + " |")
    for name, sizes in json.loads(arguments.figures.read_text()).items():
        steps = sizes[arguments.size]
        sample_us = sum(times * steps[step] for step, times in TIMES.items())
        shares = " | ".join(f"{rate * sample_us / 1e4:,.1f}" for rate in rates)
        print(f"| {name}, % of a core ({sample_us:,.0f} us for each sample) | {shares} |")
    print(
        "\n| one core can serve | samples per second | clients, with a call's samples each second "
        f"| seconds between a client's calls, with {MANY_CLIENTS:,} clients |"
    )
    print("|---" * 4 + "|")
    for name, sizes in json.loads(arguments.figures.read_text()).items():
        most = 1e6 / sum(times * sizes[arguments.size][step] for step, times in TIMES.items())
        clients = most / int(arguments.size)  # that move the samples of one call each second
        print(f"| {name} | {most:,.0f} | {clients:,.0f} | {MANY_CLIENTS / clients:.1f} |")


if __name__ == "__main__":
    main()
