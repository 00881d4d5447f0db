"""Puts and gets of whole batches, and of small ones."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.bench import Table, case
from benchmarks.peers import PEERS
from dataplane_core import DataPlaneClient, connect

STORES = (
    *("noop", "shm_store", "shm_store views", "tq_simple", "tq_simple views", "tq_simple wire"),
    *("redis_store", "tq_mooncake"),
)
MB = 1_000_000
#: Head of a batch -> store or peer -> median milliseconds of a put and a get.
Medians = dict[str, dict[str, tuple[float, ...]]]


def measured(stores: Sequence[str], batches: Sequence[str], rounds: int) -> Medians:
    """Opens stores and peers, and measures them."""
    with ExitStack() as stack:
        if any(name.startswith("tq_") for name in stores):
            bench.start_ray(stack)
        steps_of: dict[str, Any] = {}
        if any(name.endswith("in TQ") for name in stores) and "TransferQueue" not in stores:
            stack.enter_context(PEERS["TransferQueue"]())
        for name in sorted(stores, key=lambda name: name != "TransferQueue"):
            if name in PEERS:
                steps_of[name] = stack.enter_context(PEERS[name]())
            else:
                client = stack.enter_context(connect(bench.config_of(name), "auto"))
                steps_of[name] = partial(bench.client_steps, client)
        return medians_of({name: steps_of[name] for name in stores}, batches, rounds)


def medians_of(steps_of: Mapping[str, Callable[[Any], bench.Steps]], batches: Sequence[str], rounds: int) -> Medians:
    """Measures what moves batches."""
    medians: Medians = {}
    for name in batches:
        columns = bench.batch(name)
        steps = {store: make(columns) for store, make in steps_of.items()}
        medians[f"{name}, {bench.size_bytes(columns) / 1e6:.0f} MB"] = bench.medians_ms(steps, rounds)
    return medians


def by_store(name: str, medians: Medians) -> Table:
    """A row for each store, a column for each batch."""
    stores = next(iter(medians.values()))
    return Table(
        name, ["put / get, ms", *medians], [[store, *(ms[store] for ms in medians.values())] for store in stores]
    )


@case
def put_get(
    stores: tuple[str, ...] = (*STORES, "TransferQueue", "Ray", "TCP", "Unix", "copy"),
    batches: tuple[str, ...] = bench.BATCHES,
    rounds: int = 7,
) -> Iterator[Table]:
    """Milliseconds of a put and a get of whole batches by the client, on every backend, beside peers that do less.

    The client's figures have all that a user gets: checks, codec, ledger, confirmed commits. Peers are "TransferQueue",
    its own calls; "Ray", its put and get of the packed bytes; "TCP", "TCP x 4", "Unix" and "Unix x 4", connections of
    the loopback; and "copy". "tq_simple in TQ" has its rows in a storage unit of TransferQueue.
    """
    yield by_store("put-get", measured(stores, batches, rounds))


@case
def wire(
    stores: tuple[str, ...] = ("Unix", "Unix x 4", "TCP", "TCP x 4", "redis_store", "tq_simple wire"), rounds: int = 11
) -> Iterator[Table]:
    """What connections of this host's loopback carry of batch B, beside what backends over a socket make of them."""
    ((head, medians),) = measured(stores, ["B"], rounds).items()
    least = medians[stores[0]]
    rows = [[store, *ms, *(a / b for a, b in zip(ms, least, strict=True))] for store, ms in medians.items()]
    yield Table("wire", [head, "put ms", "get ms", f"put / {stores[0]}", f"get / {stores[0]}"], rows)


# --- in a folder ------------------------------------------------------------------------------------------------------


def _file_steps(path: Path, new: bool, columns: Any) -> bench.Steps:
    """Writes and syncs a file: a new one, or one that is there."""
    data = memoryview(bench.random_rows(1, bench.size_bytes(columns)).numpy().reshape(-1))

    def write() -> None:
        if new:
            path.unlink(missing_ok=True)
        fd, left = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), data
        while left:
            left = left[os.write(fd, left) :]
        os.fdatasync(fd)
        os.close(fd)

    return write, lambda: None, lambda: None


@case
def durable(batches: tuple[str, ...] = ("A", "B"), rounds: int = 40, disk: Path = Path(".")) -> Iterator[Table]:
    """shm_store in a folder beside shm_store, and beside a file of as many bytes that is written and synced.

    The folder is in /dev/shm, and on the disk that ``--disk`` names; there with ``sync: commit`` too.
    """
    with ExitStack() as stack:
        memory, on_disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(None, "dataplane-durable-", parent)))
            for parent in ("/dev/shm", disk)
        )
        options: dict[str, Any] = {
            "shm_store": {},
            "`durable` on tmpfs": {"durable": str(memory / "store")},
            "`durable` on a disk": {"durable": str(on_disk / "store")},
            "`durable` on a disk, `sync: commit`": {"durable": str(on_disk / "synced"), "sync": "commit"},
        }
        steps_of: dict[str, Callable[[Any], bench.Steps]] = {}
        for number, (name, settings) in enumerate(options.items()):
            client = stack.enter_context(connect(bench.config_of("shm_store", number, **settings)))
            steps_of[name] = partial(bench.client_steps, client)
        steps_of["a file that is there, `write` and `fdatasync`"] = partial(_file_steps, on_disk / "file", False)
        steps_of["a new file, the same way"] = partial(_file_steps, on_disk / "new", True)
        yield by_store("durable", medians_of(steps_of, batches, rounds))


# --- small batches ----------------------------------------------------------------------------------------------------


@case
def small(backends: tuple[str, ...] = ("noop", "shm_store"), repeats: int = 500) -> Iterator[Table]:
    """Microseconds of calls for one sample with one scalar, and of a put, claim and get of 64 rows, 6 ragged columns.

    The ragged columns have 1 to 39 floats in a row.
    """
    offsets = torch.cat((torch.zeros(1), torch.randint(1, 40, (64,)).cumsum(0))).long()
    nested = torch.nested.nested_tensor_from_jagged
    ragged = {f"c{number}": nested(torch.rand(int(offsets[-1])), offsets) for number in range(6)}
    rows = []
    for backend in backends:
        with connect(bench.config_of(backend)) as client:
            client.register_partition("small", ["x"], None, ["train"])
            client.register_partition("round", list(ragged), None, ["train"])

            def move(number: int, client: Any = client) -> None:
                client.put_samples([f"{number}-{row}" for row in range(64)], "round", ragged)
                client.get_data(client.claim_meta("round", "train", list(ragged), 64))

            steps = (
                lambda number, client=client: client.put_samples([f"s{number}"], "small", bench.scalars(1)),
                lambda number, client=client: client.get_samples([f"s{number}"], "small", ["x"]),
                lambda _, client=client: client.claim_meta("small", "train", ["x"], 1, blocking=False),
                move,
            )
            times = ([bench.timed_ms(partial(step, number)) for number in range(repeats)] for step in steps)
            rows.append([backend, *(statistics.median(ms) * 1e3 for ms in times)])
    yield Table("small", ["one sample, one scalar", "put us", "read us", "claim us", "64 ragged rows us"], rows)


# --- settings ---------------------------------------------------------------------------------------------------------

AS_PUT = "as put"


def with_settings(
    backend: str, name: str, ways: Sequence[str], rounds: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, int]]:
    """Way -> median ms of a put, a claim and a get; way -> the payload that the store holds. The first is "none"."""
    columns = bench.batch(name.removesuffix(" wide"))
    if name.endswith("wide"):
        columns["input_ids"].values().add_(1 << 40)
    names, held, steps = list(columns.keys()), {}, {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if backend.startswith("tq_"):
            bench.start_ray(stack)
        for number, way in enumerate(("none", *ways)):
            middleware, _, payload = way.partition(" ")
            layer: Any = middleware
            if payload:
                layer = {middleware: {"folder": f"{folder}/{number}", "payload": payload, "max_bytes": "1GB"}}
            layers = [] if way in ("none", AS_PUT) else [layer]
            config = {**bench.config_of(backend, number), "middleware": layers, "narrow": way != AS_PUT}
            client = stack.enter_context(connect(config))
            put, get, clear = bench.client_steps(client, columns)
            put()
            held[way] = client.describe("bench").held_bytes
            clear()
            steps[way] = (put, partial(client.claim_meta, "bench", "train", names, len(columns)), get, clear)
        return bench.medians_ms(steps, rounds), held


@case
def settings(
    ways: tuple[str, ...] = ("wire_guard", "metrics", "recorder none", "recorder digests", "recorder all", AS_PUT),
    backends: tuple[str, ...] = ("noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"),
    batches: tuple[str, ...] = ("A", "B"),
    rounds: int = 15,
) -> Iterator[Table]:
    """Milliseconds of puts, claims and gets of whole batches without a setting and with it, on every backend.

    A way is a middleware, or "as put": integers are not stored narrower than they are. "A wide" is batch A with token
    ids that int64 needs, so that nothing is saved. Each way has a store of its own.
    """
    for name in batches:
        rows = []
        for backend in backends:
            medians, held = with_settings(backend, name, ways, rounds)
            rows += [[f"{backend}, {way}", *ms, held[way] / held["none"]] for way, ms in medians.items()]
        yield Table(f"settings: {name}", [f"batch {name}", "put ms", "claim ms", "get ms", "held / none"], rows)


@case
def narrow(
    backends: tuple[str, ...] = ("noop", "shm_store", "redis_store", "tq_simple"), rounds: int = 20
) -> Iterator[Table]:
    """Puts and gets of routed experts as narrow integers, relative to puts and gets of int64. 0.5 is twice as fast."""
    rows = []
    for backend in backends:
        medians, held = with_settings(backend, "experts", [AS_PUT], rounds)
        put, _, get = (a / b for a, b in zip(medians["none"], medians[AS_PUT], strict=True))
        rows.append([backend, put, get, held["none"] / held[AS_PUT]])
    yield Table("narrow", ["", "put", "get", "bytes stored"], rows)


# --- cells that are kept by content -----------------------------------------------------------------------------------


def moved_and_held(client: DataPlaneClient, puts: Sequence[Mapping[str, torch.Tensor]]) -> tuple[int, int]:
    """The bytes that puts of one row send and a read of each row fetches, and the bytes that the store then holds."""
    backend: Any = bench.backend_of(client)
    begin_of, fetch_fields, moved = backend.begin_of, backend.fetch_fields, 0

    def begin(*arguments: Any) -> Any:
        nonlocal moved
        command = begin_of(*arguments)
        moved += command.size_bytes
        return command

    def fetch(located: Any, num_rows: int, deadline: float) -> Any:
        nonlocal moved
        columns = fetch_fields(located, num_rows, deadline)
        moved += sum(sum(map(len, cells)) if isinstance(cells, list) else cells.nbytes for cells in columns.values())
        return columns

    backend.begin_of, backend.fetch_fields = begin, fetch
    client.register_partition("media", [], None, ["train"])
    for number, columns in enumerate(puts):
        client.put_samples([f"row{number}"], "media", columns)
        client.get_samples([f"row{number}"], "media", list(columns))
    backend.begin_of, backend.fetch_fields = begin_of, fetch_fields
    return moved, client.describe("media").held_bytes


@case
def media(
    backends: tuple[str, ...] = ("noop", "shm_store", "redis_store"), turns: int = 15, rounds: int = 20
) -> Iterator[Table]:
    """Bytes moved and held if many puts have the same images, relative to a store that keeps them for each put.

    Ten puts of eight images of 1 MB; and a rollout whose rows have all screenshots so far, each in a column of its own.
    The last column: the time of a put of 64 images that the store does not have.
    """
    images = {f"image{number}": torch.randint(256, (1, MB), dtype=torch.uint8) for number in range(turns)}
    names = list(images)
    cases = [[{name: images[name] for name in names[:8]}] * 10]
    cases += [[{name: images[name] for name in names[: turn + 1]} for turn in range(turns)]]
    rows = []
    for backend in backends:
        figures: list[float] = []
        steps: dict[str, bench.Steps] = {}
        with ExitStack() as stack:
            clients = [
                stack.enter_context(connect({**bench.config_of(backend, number), "share_above": share_above}))
                for number, share_above in enumerate((64 << 10, None))
            ]
            for puts in cases:
                kept, apart = (moved_and_held(client, puts) for client in clients)
                figures += [kept[0] / apart[0], kept[1] / apart[1]]
            for way, client in zip(("kept", "apart"), clients, strict=True):
                put, _, clear = bench.client_steps(client, bench.batch("images"))
                steps[way] = (put, clear)
            (kept_ms,), (apart_ms,) = bench.medians_ms(steps, rounds).values()
        rows.append([backend, *figures, kept_ms / apart_ms])
    what = ["ten puts: moved", "held", f"{turns} turns: moved", "held", "a put of new images: time"]
    yield Table("media", ["", *what], rows)
