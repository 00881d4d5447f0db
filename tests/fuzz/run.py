"""Feeds forged bytes to the decoders in `targets`, each target in a process of its own.

    python tests/fuzz/run.py                          # all targets, 100,000 inputs each
    python tests/fuzz/run.py row --inputs 1000000     # one of them
    python tests/fuzz/run.py row --seed 7             # other ones

The inputs are mutations of valid encodings that a seed determines. A target that fails prints the input, which
``--input HEX`` runs again. An input that raises anything but an error of the product, or allocates more than
`LIMIT_BYTES` and `LIMIT_FACTOR` times its own size, is a failure, and so is one that ends the process.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import traceback
import tracemalloc

from mutations import mutate
from targets import TARGETS, Target

from dataplane_core.errors import DataPlaneError

#: An input of n bytes may allocate so many bytes and n times the factor: buffers and small structures have a size of
#: their own, and a value takes up to some hundred times the byte that it is in msgpack.
LIMIT_BYTES = 24 << 20
LIMIT_FACTOR = 300
#: Of so many inputs, one is measured.
MEASURE_EVERY = 16


class HostileInputError(Exception):
    """An input did what none may do."""


def run_one(target: Target, data: bytes, *, measured: bool = False) -> bool:
    """Runs a target on an input. Returns whether it was read, not refused.

    Args:
        target: The target.
        data: The input.
        measured: Whether to check how much is allocated, which takes more time.

    Raises:
        HostileInputError: Another exception than those of the product, or too much memory.
    """
    if measured:
        tracemalloc.start()
    try:
        target.read(data)
        read = True
    except DataPlaneError as error:
        str(error)
        read = False
    except Exception as error:
        raise HostileInputError(f"{target.name}: {error!r} for the input {data.hex()}") from error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if peak > LIMIT_BYTES + LIMIT_FACTOR * len(data):
        raise HostileInputError(f"{target.name}: {len(data)} bytes made it allocate {peak}: {data.hex()}")
    return read


def run_plain(target: Target, num_inputs: int, seed: int) -> int:
    """Runs a target on mutations of its seeds, which ``seed`` determines. Returns how many were read."""
    dice = random.Random(f"{target.name} {seed}")
    seeds = target.seeds()
    if 2 * sum(run_one(target, data, measured=True) for data in seeds) < len(seeds):
        raise HostileInputError(f"{target.name}: most valid encodings are refused")
    num_read = 0
    for number in range(num_inputs):
        data = mutate(dice.choice(seeds), dice, seeds, target.form)
        num_read += run_one(target, data, measured=number % MEASURE_EVERY == 0)
    return num_read


def _child(arguments: argparse.Namespace) -> None:
    target = TARGETS[arguments.target]
    if arguments.input is not None:
        run_one(target, bytes.fromhex(arguments.input))
        return
    start = time.process_time()
    num_read = run_plain(target, arguments.inputs, arguments.seed)
    spent_s = time.process_time() - start
    print(f"{target.name}: {arguments.inputs} inputs, {num_read} read, {spent_s:.1f} s of CPU", flush=True)


def main() -> None:
    """Runs the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), help="one target; default: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", help="one input, in hexadecimal digits")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child or arguments.input is not None:
        try:
            _child(arguments)
        except HostileInputError:
            traceback.print_exc()
            sys.exit(1)
        return
    failed = []
    for name in [arguments.target] if arguments.target else TARGETS:
        words = [name, "--child", f"--inputs={arguments.inputs}", f"--seed={arguments.seed}"]
        if subprocess.run([sys.executable, __file__, *words], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
