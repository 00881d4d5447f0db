"""What the cases share: their table, stores, batches, processes and clocks."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import psutil
import torch
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, RowStoreBackend
from dataplane_testkit import backend_of

# --- cases ------------------------------------------------------------------------------------------------------------

#: A word, a number, or several numbers.
Cell: TypeAlias = str | float | tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """Figures. Where a page has a line ``<!-- name -->``, `--page` writes them below it."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Case: TypeAlias = Callable[..., Iterator[Table]]
#: Name -> function.
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Adds a case. Its name is that of the function, its help the docstring, and its options are the parameters."""
    CASES[function.__name__.replace("_", "-")] = function
    return function


def text_of(cell: Cell) -> str:
    """A cell as it is printed."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, tuple):
        return " / ".join(map(text_of, cell))
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 20 else f"{cell:.2f}"


# --- stores -----------------------------------------------------------------------------------------------------------

_WAYS: dict[str, dict[str, Any]] = {
    "views": {"views": True},
    "wire": {"share_memory": False},
    "in TQ": {"instance": f"rows-{os.getpid()}", "storage": "transfer_queue"},
}


def config_of(name: str, number: int = 0, **options: Any) -> dict[str, Any]:
    """The config of this program's own store: of a backend, or of a backend and one of three ways to use it.

    ``views``: reads are views. ``wire``: memory is not shared. ``in TQ``: rows lie in a storage unit of TransferQueue.

    Args:
        name: Such as ``tq_simple wire``.
        number: Stores with different ones share nothing.
        options: Further options of the backend.
    """
    backend, _, way = name.partition(" ")
    own = f"bench-{os.getpid()}-{number}"
    options_of_backend: dict[str, dict[str, Any]] = {
        "shm_store": {"namespace": own},
        "redis_store": {"server": "private", "namespace": own},
        "tq_simple": {"instance": own},
        "tq_mooncake": {"instance": own},
    }
    options = {**options_of_backend.get(backend, {}), **_WAYS.get(way, {}), **options}
    return {"backend": backend, "options": options, "op_timeout_s": 300.0}


def attaching(client: DataPlaneClient, config: dict[str, Any]) -> dict[str, Any]:
    """The config by which other processes attach to a client's store."""
    options = getattr(backend_of(client), "attach_options", dict)()
    return {**config, "options": {**config["options"], **options}}


def start_ray(stack: ExitStack) -> Any:
    """Ray with CPUs for all its actors, until the stack ends."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
    return ray


def server_pids(client: DataPlaneClient) -> dict[str, int]:
    """The processes that keep the store: name -> process id. With ``num_ledgers``, those of each of its stores."""
    pids: dict[str, int] = {}

    def add(name: str, pid: int) -> None:
        pids[f"{name} {sum(other.startswith(name) for other in pids)}" if name in pids else name] = pid

    for store in getattr(backend_of(client), "_stores", [backend_of(client)]):
        instance = getattr(store, "_instance", None)
        if instance is not None:  # a backend with a controller on Ray
            import ray

            add("controller", ray.get(instance.controller.__ray_call__.remote(lambda _: os.getpid())))
        elif isinstance(store, RowStoreBackend):  # the owner of a store before it may still be ending
            add("owner", store.owner_pid(time.monotonic() + 60.0))
    for child in psutil.Process().children(recursive=True):  # Ray's processes are among them
        words = " ".join(child.cmdline())
        if "StorageUnit" in words:
            add("unit", child.pid)
        elif "redis-server" in child.name():
            add("Redis", child.pid)
        elif "dataplane_shm" in words:
            add("ledger", child.pid)
    return pids or {"process": os.getpid()}


def ledger_pid(client: DataPlaneClient) -> int:
    """The process that keeps the ledger; this one for noop."""
    pids = server_pids(client)
    return next(pids[name] for name in ("controller", "owner", "ledger", "process") if name in pids)


# --- batches ----------------------------------------------------------------------------------------------------------

BATCHES = ("A", "B", "images", "experts")
_MAX_TOKENS = {"A": 2048, "B": 8192}


def batch(name: str) -> TensorDict:
    """The columns of a batch of `BATCHES`.

    A: 512 samples, 6 jagged fields (1 int64, 5 float32) of 256 to 2,048 tokens and 2 per-sample fields, 16 MB. B: the
    same up to 8,192 tokens, 61 MB. Images: 64 samples with an image of 1 MB. Experts: 512 samples of 50 to 400 tokens
    with routed experts, 8 layers x 8 experts per token, int64 below 128, 59 MB.
    """
    if name == "images":
        return TensorDict({"image": random_rows(64, 1 << 20)}, batch_size=[64])
    generator = torch.Generator().manual_seed(0)
    shortest, longest = (50, 400) if name == "experts" else (256, _MAX_TOKENS[name])
    lengths = torch.randint(shortest, longest + 1, (512,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])

    def jagged(values: torch.Tensor) -> torch.Tensor:
        ends = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
        return torch.nested.nested_tensor_from_jagged(values, offsets, **ends)

    if name == "experts":
        experts = jagged(torch.randint(0, 128, (total, 8, 8), generator=generator))
        return TensorDict({"routed_experts": experts}, batch_size=[512])
    columns = {"input_ids": jagged(torch.randint(0, 50_000, (total,), generator=generator))}
    for number in range(5):
        columns[f"column{number}"] = jagged(torch.randn(total, generator=generator))
    columns["reward"] = torch.randn(512, generator=generator)
    columns["input_lengths"] = lengths
    return TensorDict(columns, batch_size=[512])


def random_rows(num_rows: int, num_bytes: int) -> torch.Tensor:
    """Rows of random bytes."""
    return torch.randint(0, 256, (num_rows, num_bytes), dtype=torch.uint8)


def scalars(count: int, size: int = 1) -> TensorDict:
    """``count`` rows of ``size`` float32."""
    return TensorDict({"x": torch.ones(count, size)}, batch_size=[count])


def size_bytes(columns: TensorDict) -> int:
    """Payload bytes."""
    return sum((column.values() if column.is_nested else column).nbytes for _, column in columns.items())


# --- clocks -----------------------------------------------------------------------------------------------------------

Step: TypeAlias = Callable[[], Any]
#: What is timed, and at the end what clears up, untimed.
Steps: TypeAlias = tuple[Step, ...]


def client_steps(client: DataPlaneClient, columns: Any, partition: str = "bench") -> Steps:
    """Put, get and clear by the client."""
    names = list(columns.keys())
    ids = [f"prompt{i // 8}_g{i % 8}" for i in range(len(columns[names[0]]))]
    client.register_partition(partition, names, None, ["train"])
    return (
        lambda: client.put_samples(ids, partition, columns),
        lambda: client.get_samples(ids, partition, names),
        lambda: client.clear_samples(ids, partition),
    )


def timed_ms(step: Step) -> float:
    """How long a step takes."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def cpu_ms(step: Step) -> tuple[Any, float]:
    """What a step returns, and the CPU that this process takes for it."""
    start = time.process_time()
    result = step()
    return result, (time.process_time() - start) * 1e3


def medians_ms(contestants: Mapping[str, Steps], rounds: int) -> dict[str, tuple[float, ...]]:
    """Median milliseconds of each contestant's timed steps. They take turns; a round before the first warms up."""
    times: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, (*steps, clear) in contestants.items():
            times[name].append([timed_ms(step) for step in steps])
            clear()
    return {name: tuple(map(statistics.median, zip(*rows[1:], strict=True))) for name, rows in times.items()}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start, exact to nanoseconds (``CLOCK_PROCESS_CPUTIME_ID`` of it)."""
    return time.clock_gettime((~pid << 3) | 2)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def private_bytes() -> int:
    """Memory of this process that it shares with no other."""
    size_bytes: int = psutil.Process().memory_full_info().uss
    return size_bytes


def watched(step: Step) -> tuple[Any, float, int]:
    """What a step returns, its seconds, and how far this process's private memory grew at most while it ran."""
    before, over, sizes = private_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.003):
            sizes.append(private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    return result, seconds, max(*sizes, private_bytes()) - before


# --- processes --------------------------------------------------------------------------------------------------------

#: What a process does: a generator that yields answers, the first one when it is ready, and gets the next order.
Work: TypeAlias = Callable[..., Generator[Any, Any, None]]


class Processes:
    """Processes that all get the same orders: ``with Processes(work, 4, config) as members: members.ask()``.

    Args:
        work: Called with the number of the process and the arguments.
    """

    def __init__(self, work: Work, count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")  # whose processes have torch at once
        context.set_forkserver_preload(["benchmarks.bench"])
        self._members: list[tuple[Any, Connection]] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work, number, arguments), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def __enter__(self) -> Processes:
        self._answers()
        return self

    def ask(self, order: Any = None) -> list[Any]:
        """Gives all an order, and waits for their answers."""
        for _, pipe in self._members:
            pipe.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for _, pipe in self._members]

    def __exit__(self, *_: object) -> None:
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            process.join(30)
            process.kill()


def _serve(pipe: Connection, work: Work, number: int, arguments: Any) -> None:
    torch.set_num_threads(1)
    with closing(work(number, *arguments)) as orders, suppress(EOFError):
        answer = next(orders)
        while True:
            pipe.send(answer)
            answer = orders.send(pipe.recv())
