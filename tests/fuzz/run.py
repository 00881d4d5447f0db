"""Feeds forged bytes to the decoders in `targets`, each target in a process of its own.

    python tests/fuzz/run.py                          # all targets, 100,000 inputs each
    python tests/fuzz/run.py row --inputs 1000000     # one of them
    python tests/fuzz/run.py row --plain --seed 7     # without Atheris

With Atheris (``pip install atheris``) the search is guided by coverage; without it, the inputs are mutations of valid
encodings that a seed determines. A target that fails prints the input, which ``--input HEX`` runs again. An input that
raises anything but an error of the product, takes over 20 s, or allocates more than `LIMIT_BYTES` and `LIMIT_FACTOR`
times its own size, is a failure, and so is one that ends the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import subprocess
import sys
import time
import traceback
import tracemalloc
from pathlib import Path

from mutations import mutate
from targets import TARGETS, Target

from dataplane_core.errors import DataPlaneError

#: An input of n bytes may allocate so many bytes and n times the factor: buffers and small structures have a size of
#: their own, and a value takes up to some hundred times the byte that it is in msgpack.
LIMIT_BYTES = 24 << 20
LIMIT_FACTOR = 300
#: Of so many inputs, one is measured.
MEASURE_EVERY = 16
_TIMEOUT_S = 20


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
    for data in seeds:
        run_one(target, data)
    num_read = 0
    for number in range(num_inputs):
        data = mutate(dice.choice(seeds), dice, seeds, target.form)
        num_read += run_one(target, data, measured=number % MEASURE_EVERY == 0)
    return num_read


def run_guided(target: Target, num_inputs: int, seed: int, corpus: Path) -> None:
    """Runs a target under Atheris in this process, which ends with it."""
    import atheris

    seeds = target.seeds()
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        run_one(target, data)  # what is imported and opened once counts for no input
        (corpus / f"seed{number}").write_bytes(data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if dice.random() < 0.4:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(data, dice, seeds, target.form)[:max_size]

    flags = [f"-runs={num_inputs}", f"-seed={seed + 1}", f"-timeout={_TIMEOUT_S}", "-rss_limit_mb=4096"]
    flags += [f"-max_len={max(4096, 2 * max(map(len, seeds)))}", f"-artifact_prefix={corpus.parent}/", "-verbosity=0"]
    flags += ["-print_final_stats=1"]
    numbers = itertools.count()

    def test_one_input(data: bytes) -> None:
        run_one(target, data, measured=next(numbers) % MEASURE_EVERY == 0)

    atheris.Setup([sys.argv[0], *flags, str(corpus)], test_one_input, custom_mutator=mutator)
    atheris.Fuzz()


def _instrumented(name: str) -> Target:
    """The target, with its decoders compiled for Atheris, which sees what they compare and which lines they take."""
    import atheris

    ours = ["dataplane_core", "dataplane_redis", "dataplane_shm", "dataplane_tq_simple", "dataplane_integrations"]
    with atheris.instrument_imports(include=ours):
        for module in [each for each in sys.modules if each.startswith("dataplane_") or each == "targets"]:
            del sys.modules[module]
        import targets

        globals()["DataPlaneError"] = importlib.import_module("dataplane_core.errors").DataPlaneError
    return targets.TARGETS[name]


def _child(arguments: argparse.Namespace) -> None:
    target = TARGETS[arguments.target]
    if arguments.input is not None:
        run_one(target, bytes.fromhex(arguments.input))
        return
    if not arguments.plain:
        run_guided(_instrumented(arguments.target), arguments.inputs, arguments.seed, arguments.corpus / target.name)
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
    parser.add_argument("--plain", action="store_true", help="without Atheris")
    parser.add_argument("--input", help="one input, in hexadecimal digits")
    parser.add_argument(
        "--corpus", type=Path, default=Path("out/fuzz"), help="where inputs are kept that reach new code"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.plain |= importlib.util.find_spec("atheris") is None
    if arguments.child or arguments.input is not None:
        try:
            _child(arguments)
        except HostileInputError:
            traceback.print_exc()
            sys.exit(1)
        return
    failed = []
    for name in [arguments.target] if arguments.target else TARGETS:
        command = [
            sys.executable,
            __file__,
            name,
            "--child",
            f"--inputs={arguments.inputs}",
            f"--seed={arguments.seed}",
        ]
        command += [f"--corpus={arguments.corpus}", *(["--plain"] if arguments.plain else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
