"""What goes in comes out: the simplest uses of a store, rows, and columns of every dtype and layout."""

from __future__ import annotations

import datetime
import gc
import math
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import torch
from pydantic import BaseModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dataplane_core.errors import ConfigError, LostSamplesError
from dataplane_core.spec import Capability, Scope, WireFormat
from dataplane_testkit._columns import (
    DTYPES,
    NUM_ROWS,
    as_objects,
    batch,
    bits,
    check_column,
    ids,
    items_of,
    jagged,
    laid,
    layouts_of,
    naming,
    random_cells,
    rows_of,
    same_items,
    shared,
)
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._store import Store, Suite, not_declared
from dataplane_testkit._timing import PROMPT_S, bounded, eventually, in_threads
from dataplane_testkit.faults import Faults

#: Rows of the larger tests. With so many rows, a store that loses one in a hundred is nearly always caught.
_ROWS: Final = 400
#: Rows of one put.
_STEP: Final = 100
#: Capability -> the others of which it needs one.
_NEEDS: Final[dict[Capability, set[Capability]]] = {
    **{capability: {Capability.CLAIMS} for capability in (Capability.GROUPS, Capability.LEASES, Capability.CURSORS)},
    Capability.SAMPLERS: {Capability.CLAIMS},
    Capability.TAG_FILTERS: {Capability.CLAIMS, Capability.LISTING},
    Capability.ATOMIC_OVERWRITE: {Capability.OVERWRITE},
}


def _require_content(store: Store) -> None:
    if not store.backend_class.wire.by_content:
        not_declared("a wire format with by_content")


@contextmanager
def _other_defaults() -> Iterator[None]:
    """Every global state of torch is another one than usual."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
        torch.use_deterministic_algorithms(before[2])


def _rows(values: list[int]) -> list[torch.Tensor]:
    return [torch.full((value % 5,), value) for value in values]


def _check(store: Store, partition: str, values: list[int]) -> None:
    """Asserts that these rows are there. Fails long before the client's own deadline."""
    names = [f"s{value}" for value in values]
    Hooks(store.client, PROMPT_S).ask("get_samples", partition, sample_ids=names, fields=["x", "y"])
    columns = store.get(partition, names, "x", "y")
    assert columns["x"].tolist() == values
    check_column(columns["y"], _rows(values))


class SmokeSuite(Suite, chapter="smoke"):
    def test_declarations_are_consistent(self, store: Store) -> None:
        cls = store.backend_class
        declared = cls.capabilities
        assert isinstance(cls.wire, WireFormat)
        assert isinstance(declared, frozenset)
        assert all(isinstance(capability, Capability) for capability in declared)
        assert isinstance(cls.scope, Scope)
        assert issubclass(cls.Config, BaseModel)
        with pytest.raises(ConfigError, match="no_such_option_of_the_kit"):
            store.connect({**store.options, "no_such_option_of_the_kit": 1})
        assert (store.client.capabilities, store.client.scope) == (declared, cls.scope)
        assert store.client.backend_name == store.name
        wrong = cls.why_not_declared.keys() - ({*Capability} - declared) - {"scope"}
        assert not wrong, f"why_not_declared has the keys {sorted(wrong)}, which are declared or are not capabilities"
        assert all(why.strip() for why in cls.why_not_declared.values())
        for capability in declared & _NEEDS.keys():
            needed = _NEEDS[capability]
            assert declared & needed, f"'{capability}' needs {' or '.join(map(repr, sorted(needed)))}"
        has_options = {"capacity_bytes", "on_full"} <= cls.Config.model_fields.keys()
        assert has_options == (Capability.CAPACITY in declared), "'capacity' goes with capacity_bytes and on_full"

    def test_smoke_a_few_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(3), [{"n": 0}, {"n": 1}, {"n": 2}], x=torch.arange(3), y=jagged(_rows([0, 1, 2])))
        _check(store, partition, [2, 0, 1])

    def test_smoke_hundreds_of_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        for start in range(0, _ROWS, _STEP):
            values = list(range(start, start + _STEP))
            store.put(partition, [f"s{n}" for n in values], x=torch.tensor(values), y=jagged(_rows(values)))
        _check(store, partition, list(range(_ROWS))[::-1])

    @pytest.mark.parametrize("state", ["defaults", "no_grad", "compile"])
    def test_smoke_torchs_defaults_change_nothing(self, store: Store, state: str) -> None:
        partition = store.register("x", "y", "f", "o")
        floats = [[0.5], [1.5, 2.5], []]
        columns = {"x": torch.arange(3), "y": jagged(_rows([7, 8, 9])), "f": floats, "o": as_objects(1, "a", {})}

        def put_and_get() -> Any:
            store.client.put_samples(ids(3), partition, columns, tags=[{"n": 0}, {"n": 1}, {"n": 2}])
            return store.client.get_samples(ids(3), partition, list(columns))

        if state == "compile":
            inside = torch.compile(put_and_get, backend="eager")()
        else:
            with _other_defaults() if state == "defaults" else torch.no_grad():
                inside = put_and_get()
        for read in (inside, store.get(partition, ids(3), *columns)):
            assert read["x"].tolist() == [0, 1, 2]
            check_column(read["y"], _rows([7, 8, 9]))
            check_column(read.get("f"), [torch.tensor(row, dtype=torch.float32) for row in floats])
            assert items_of(read.get("o")) == [1, "a", {}]


_R = TypeVar("_R")

#: Rows of a put whose copies are counted.
_NUM_ROWS: Final = 32

_ODD_NAMES: Final = [
    *("a b", "x" * 300, "../up", "a/b:c@d|e,f;g", "0", "-1"),
    *("ünïcode-字-🙂", "line\nbreak", "nul\0byte", "{braces}*?[x]", "'quo\"ted'", "%s%d"),
]


class RowSuite(Suite, chapter="rows"):
    def test_a_cell_of_16_mb(self, store: Store) -> None:
        partition = store.register("x")
        big = torch.arange(4 * 1024 * 1024, dtype=torch.int32)
        store.put(partition, ["big"], x=big.unsqueeze(0))
        assert torch.equal(store.get(partition, ["big"])["x"][0], big)

    def test_any_string_is_an_id(self, store: Store) -> None:
        partition = store.register("x", partition_id=f"{store.new_id()} / ü:@|\n", tasks=["t a/b:ü"])
        columns = {f"f{name}": torch.arange(len(_ODD_NAMES)) * 100 + place for place, name in enumerate(_ODD_NAMES)}
        store.put(partition, _ODD_NAMES, columns=columns)
        read = store.get(partition, _ODD_NAMES[::-1], *columns)
        for place, name in enumerate(columns):
            assert read[name].tolist() == [100 * row + place for row in reversed(range(len(_ODD_NAMES)))], name
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 99, *columns, task="t a/b:ü").sample_ids == _ODD_NAMES

    def test_thousands_of_samples_in_one_call(self, store: Store) -> None:
        names = [f"q_g{number}" for number in range(9000)]
        tags = [{"n": number} for number in range(9000)]
        partition = store.filled(names, tags=tags, grpo_group_size=9000 if store.declares(Capability.GROUPS) else None)
        assert store.get(partition, names[::-1])["x"].tolist() == [*range(9000)][::-1]
        if store.declares(Capability.LISTING):
            meta = store.client.list_samples(partition)
            assert (meta.sample_ids, meta.tags) == (names, tags)
        if store.declares(Capability.LEASES):
            held = store.claim(partition, 9000, blocking=True, lease_s=600.0)
            store.client.renew(held, 600.0)
            store.client.nack(held)
        if store.declares(Capability.CLAIMS):
            assert sorted(store.claim(partition, 9000, blocking=True).sample_ids) == sorted(names)
        store.client.clear_samples(names[1:], partition)
        assert [store.has(partition, name) for name in (names[0], names[-1])] == [True, False]

    def test_get_keeps_the_order_asked_for(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.full((index % 4,), index) for index in range(12)]
        for names in (ids(12)[6:], ids(12)[:6]):
            numbers = [int(name[1:]) for name in names]
            columns = {"x": jagged([rows[number] for number in numbers]), "y": torch.tensor(numbers)}
            store.put(partition, names, columns=columns, o=as_objects(*numbers))
        for order in ([7, 0, 11, 3, 4, 5, 1], [2, 0, 2, 10, 2, 1, 0]):
            read = store.get(partition, [f"s{index}" for index in order], "x", "y", "o")
            assert read.batch_size == (7,)
            assert read["y"].tolist() == order
            assert items_of(read["o"]) == order
            check_column(read["x"], [rows[index] for index in order])

    def test_lost_payload_is_named(self, store: Store) -> None:
        partition = store.filled(3, "x", "y")
        store.put(partition, ids(3), y=torch.arange(3))
        store.lose(partition, "s1", "x")
        with store.refusal(LostSamplesError, "'s1'", "x") as caught:
            bounded(lambda: store.get(partition, ids(3), "y", "x"), what="a read of lost payload")
        assert not caught.value.retryable
        assert caught.value.missing_cells == {"s1": ("x",)}
        assert store.get(partition, ids(3), "y")["y"].tolist() == [0, 1, 2]
        store.client.clear_samples(["s1"], partition)
        store.put(partition, ["s1"], x=torch.tensor([7]))
        assert store.get(partition, ids(3))["x"].tolist() == [0, 7, 2]

    def test_what_comes_back_is_owned_by_the_caller(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        rows = [torch.tensor([1, 2]), torch.tensor([3])]
        store.put(partition, ids(2), x=jagged(rows), y=torch.arange(4).view(2, 2), o=as_objects([1], [2]))
        for names in (ids(2), ["s0", "s1", "s0"]):
            first, second = (store.get(partition, names, "x", "y", "o") for _ in range(2))
            for field in ("x", "y"):
                assert not shared(first[field], second[field]), "two reads share memory"
        first["x"].values()[:3] = -1
        first["y"][:2] = -1
        items_of(first["o"])[0].append("changed")
        assert first["x"].unbind()[2].tolist() == [1, 2], "repeated rows share memory"
        assert first["y"][2].tolist() == [0, 1], "repeated rows share memory"
        assert items_of(first["o"])[2] == [1], "repeated rows share one item"
        for read in (second, store.get(partition, ["s0", "s1", "s0"], "x", "y", "o")):
            check_column(read["x"], [*rows, rows[0]])
            assert read["y"].tolist() == [[0, 1], [2, 3], [0, 1]]
            assert items_of(read["o"]) == [[1], [2], [1]]

    @pytest.mark.parametrize("operation", ["put_samples", "get_samples"])
    def test_the_payload_is_copied_no_more_than_it_may_be(self, store: Store, operation: str) -> None:
        partition = store.register("x", "y")
        rows = [torch.randn(64 + index, 128) for index in range(_NUM_ROWS)]
        fields = batch(_NUM_ROWS, x=torch.randn(_NUM_ROWS, 16384), y=jagged(rows))
        payload_bytes = 4 * (_NUM_ROWS * 16384 + sum(row.numel() for row in rows))
        for names in (ids(_NUM_ROWS, "first"), ids(_NUM_ROWS)):  # the first calls allocate more
            _, put = allocated(partial(store.client.put_samples, names, partition, fields))
            read, get = allocated(partial(store.get, partition, names[::-1], "x", "y"))
        assert rows_of(read["y"], _NUM_ROWS)[0].equal(rows[-1])
        copies = {"put_samples": put, "get_samples": get}[operation] / payload_bytes
        most, _ = store.case.copies_allowed(operation)
        print(f"{operation}: {copies:.2f} copies of the payload, {most:g} allowed")
        assert copies <= most, f"{operation} holds {copies:.1f} copies of its payload. At most {most:g} are allowed."

    def test_a_save_is_loaded(self, store: Store, tmp_path: Path) -> None:
        client, empty = store.client, store.register("x", num_samples=2)
        partition = store.filled(6, num_samples=8, tasks=["train", "b"], tags=[{"n": row} for row in range(6)])
        store.put(partition, ["tagged"], [{"only": True}])
        store.put(partition, ids(4), late=as_objects(*([row, None, b"b"] for row in range(4))))
        store.put(partition, ids(6), large=torch.arange(40_000).expand(6, -1))
        store.claim(partition, 2)
        client.clear_samples(["s0", "s5"], partition)

        def content() -> list[Any]:
            meta = client.list_samples(partition)
            about = [(of.info.registration(), of.num_rows) for of in map(client.describe, (partition, empty))]
            late = items_of(store.get(partition, ["s3", "s1"], "late")["late"])
            return [meta.sample_ids, meta.tags, about, store.get(partition, ids(5)[1:])["x"].tolist(), late]

        before, held_bytes = content(), client.describe(partition).held_bytes
        client.save(tmp_path, {"step": 7}, [partition, empty])
        store.put(partition, ["s0"], x=torch.arange(1))
        store.claim(partition, 8, task="b")
        client.clear_samples(None, empty)
        assert client.load(tmp_path) == {"step": 7}
        assert content() == before
        assert client.describe(partition).held_bytes <= 1.1 * held_bytes, "equal cells are no longer stored once"
        assert client.list_consumed(partition, "train") == ["s1"]
        store.put(partition, ["s6"], x=torch.arange(1))
        client.clear_samples(["tagged"], partition)  # it will never be ready
        rest = store.claim(partition, 8, blocking=True, timeout_s=10.0)
        assert rest.sample_ids == ["s2", "s3", "s4", "s6"], "what was cleared no longer counts for num_samples"
        assert store.claim(partition, 9, task="b").sample_ids == ["s1", "s2", "s3", "s4", "s6"]
        if store.declares(Capability.OVERWRITE):
            moving = store.filled(2, tags=[{"n": 0}] * 2)
            puts = [partial(store.put, moving, ["s1"], [{"n": 7}], x=torch.tensor([7]))]

            def once(request: object) -> None:
                if puts:
                    puts.pop()()

            with Faults.of(client).before("get_samples", once):
                client.save(tmp_path, None, [moving])
            client.load(tmp_path)
            row = ((client.list_samples(moving).tags or [])[1], store.get(moving, ["s1"])["x"].tolist())
            assert row == ({"n": 7}, [7]), "a row that is written during a save has tags and cells of different puts"


def allocated(call: Callable[[], _R]) -> tuple[_R, int]:
    """Makes a call and counts the bytes that it allocated in this process, but not those of an engine's own library.

    What torch's operators in the calling thread allocate counts even if it was freed. Of Python and numpy, it is the
    peak, less what was allocated before the call.
    """
    gc.collect()
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with _Storages() as storages:
            result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    return result, storages.size_bytes + peak - before


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    """Adds up the bytes of storages that operators return and that were not among their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.size_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = dict(_sized((args, kwargs)))
        self.size_bytes += sum(size for address, size in dict(_sized(result)).items() if address not in before)
        return result


def _sized(values: Any) -> Iterator[tuple[int, int]]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            plain = leaf.values() if leaf.is_nested and leaf.layout == torch.jagged else leaf
            if plain.device.type == "cpu" and not plain.is_nested:
                storage = plain.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()


_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in DTYPES]

_ITEMS: Final[dict[str, list[Any]]] = {
    "none": [None, None, 0],
    "bool_and_int": [True, 1, False, 0],
    "int_extremes": [2**63 - 1, -(2**63), 0, -1],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.0],
    "strings": ["", "plain", "ünï-字-🙂", "nul\0", "line\n", "\ud800", "x" * 10_000],
    "bytes": [b"", b"\0\xff", bytes(range(256)), b"x" * 10_000],
    "lists": [[], [1, [2, [3, [None]]]], [[], {}], [True, "a", b"b", 1.5]],
    "dicts": [{}, {"a": 1, "": {"b": [1, 2]}}, {"z": 1, "a": 2}, {"ü": None}],
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4), torch.ones(2, 2, dtype=torch.bfloat16)],
    "tensors_inside": [{"image": torch.arange(6).view(2, 3), "masks": [torch.tensor([True]), None]}, [torch.zeros(1)]],
    "messages": [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text"}]}], []],
    "mixed_kinds": [None, True, 1, 1.0, "1", b"1", [1], {"1": 1}, torch.tensor(1)],
    "deep": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]],
}

#: Which of three images each of six samples has.
_IMAGE_OF: Final = (0, 1, 0, 0, 2, 1)


class ColumnSuite(Suite, chapter="columns"):
    @pytest.mark.parametrize("dtype", DTYPES, ids=_NAMES)
    def test_columns_come_back_bit_for_bit(self, store: Store, dtype: torch.dtype) -> None:
        partition, rows = store.register(*layouts_of(dtype)), dict[str, list[torch.Tensor]]()
        for layout in layouts_of(dtype):
            with naming(layout):
                puts = [laid(layout, dtype, seed) for seed in (7, 8)]
                rows[layout] = [row for _, some in puts for row in some]
                names = ids(len(rows[layout]))
                for place, (column, some) in enumerate(puts):
                    store.put(partition, names[place * len(some) :][: len(some)], columns={layout: column})
        for count in {len(column) // 2 for column in rows.values()}:
            layouts, names = [layout for layout in rows if len(rows[layout]) == 2 * count], ids(2 * count)
            # one put, both puts, and rows of both that may be of one length where others are not
            equal = [1 % count, 3 % count, count + 1 % count]
            for order in (range(count), range(2 * count), range(2 * count)[::-3], equal, [0, 0]):
                read = store.get(partition, [names[row] for row in order], *layouts)
                for layout in layouts:
                    with naming(layout):
                        check_column(read[layout], [rows[layout][row] for row in order])

    def test_objects_come_back_equal(self, store: Store) -> None:
        partition = store.register("o")
        for kind, items in _ITEMS.items():
            names = ids(len(items), kind)
            store.put(partition, names, o=as_objects(*items))
            for some, expected in ((names, items), (names[-1:], items[-1:])):
                read = items_of(store.get(partition, some, "o")["o"])
                assert len(read) == len(expected)
                for item, written in zip(read, expected, strict=True):
                    assert same_items(item, written), f"{kind}: {written!r} was read as {item!r}"

    def test_allow_pickle_opens_the_set(self, store: Store) -> None:
        client = store.another_client(allow_pickle=True)
        partition = store.register("o", client=client)
        items = [(1, 2), {3, 4}, 1j, {"inside": datetime.date(2024, 1, 1)}]
        client.put_samples(ids(4), partition, batch(4, o=as_objects(*items)))
        assert items_of(client.get_samples(ids(4), partition, ["o"])["o"]) == items

    def test_the_engine_holds_what_was_put(self, store: Store) -> None:
        partition = store.register("x")
        for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.float32):
            for layout in ("scalars", "vectors", "jagged_with_empty_rows", "trailing_dims", "expanded"):
                column, rows = laid(layout, dtype, 11)
                store.put(partition, ids(NUM_ROWS), columns={f"{layout} {dtype}": column})
                for name, row in zip(ids(NUM_ROWS), rows, strict=True):
                    raw = store.raw_cell(partition, name, f"{layout} {dtype}", row.dim())
                    assert raw == bits(row), f"the engine's cell of '{name}' in '{layout} {dtype}' is not the row put"
        items = [None, {"a": [1, 2.5, "x", b"y"]}, "text"]
        store.put(partition, ids(3), o=as_objects(*items))
        assert same_items([store.raw_cell(partition, name, "o", None) for name in ids(3)], items)

    def test_equal_cells_come_back_as_they_were_written(self, store: Store) -> None:
        partition, samples = store.register("column", "objects"), ids(len(_IMAGE_OF))
        # large enough to be stored once
        large = [random_cells(torch.float32, (40_000 - 100 * number, 2), number) for number in range(3)]
        images = [large[number] for number in _IMAGE_OF]
        store.put(partition, samples, column=jagged(images), objects=as_objects(*images))

        def rows(*places: int, **how: Any) -> list[list[torch.Tensor]]:
            names = [samples[place] for place in places]
            columns = store.client.get_samples(names, partition, ["column", "objects"], **how).values()
            read = [list(c.unbind()) if isinstance(c, torch.Tensor) else items_of(c) for c in columns]
            for column in read:
                assert [*map(bits, column)] == [bits(images[place]) for place in places], "images were mixed up"
            return read

        for places in ([5, 4, 3, 2, 1, 0], [2], [3, 0], [1, 1, 4]):
            rows(*places)
        for column in rows(*range(6)):
            column[0].zero_()
            assert [*map(bits, column[1:])] == [*map(bits, images[1:])], "rows of a read share memory"
        for column in rows(*range(6), share_rows=True):
            if store.backend_class.wire.shared_rows:
                assert len({id(row) for row in column}) == 3, "3 images were read as more than 3 tensors"
        rows(*range(6))

    def test_content_is_kept_once_for_all_puts(self, store: Store) -> None:
        _require_content(store)
        one, other = store.register("image"), store.register("picture")
        images = [random_cells(torch.uint8, (100_000 + number // 2,), 1) for number in range(3)]
        images[1][-99] ^= 1  # the only difference to the first
        items = [row.numpy().tobytes() for row in images]
        writer, reader = store.client, store.same_store_client()
        puts = [(one if number < 6 else other, f"n{number}-") for number in range(10)]
        held = store.held()
        for number, (partition, prefix) in enumerate(puts):
            rows, field = images[number % 3 :] + images[: number % 3], "image" if number < 8 else "picture"
            columns = {field: jagged(rows), "turn": jagged(rows[::-1]), "o": as_objects(*items)}
            writer.put_samples(ids(3, prefix), partition, batch(3, **columns))
            writer, reader = reader, writer
        once = sum(map(len, items))
        assert held() <= 2 * 1.05 * once + 4096, f"ten puts of {2 * once} bytes of cells hold {held()}"
        for partition in (one, other):
            assert store.client.describe(partition).held_bytes <= 2 * 1.05 * once + 4096, "counted more than once"

        def check(number: int, *places: int) -> None:
            (partition, prefix), field = puts[number], "image" if number < 8 else "picture"
            names = [ids(3, prefix)[place] for place in places]
            columns = writer.get_samples(names, partition, [field, "turn", "o"])
            turns, rows = columns["turn"].unbind(), list(columns[field].unbind())
            assert [*map(bits, turns)] == [bits(images[(2 - place + number) % 3]) for place in places], "mixed up"
            assert [*map(bits, rows)] == [bits(images[(place + number) % 3]) for place in places], "mixed up"
            rows[0].zero_()
            assert items_of(columns["o"]) == [items[place] for place in places], "items were mixed up"

        for _ in range(2):  # the second time, a client may have them
            for number in range(10):
                check(number, 2, 0, 1)
        writer.put_samples(ids(3, "n1-"), one, batch(3, image=jagged(images[::-1])))  # in place of equal ones
        for partition, prefix in puts[:1] + puts[2:9]:
            writer.clear_samples(ids(3, prefix)[:2] if prefix == "n0-" else ids(3, prefix), partition)
        check(9, 0, 1, 2)
        check(0, 2)
        column = writer.get_samples(ids(3, "n1-"), one, ["image"])["image"]
        assert [*map(bits, column.unbind())] == [*map(bits, images[::-1])], "cells were mixed up"
        writer.clear_samples(None, one)
        check(9, 1)
        writer.clear_samples(None, other)
        eventually(lambda: held() <= 4096, what="that cells go with the last sample that has them")

    def test_puts_that_bring_the_same_cell_at_once_leave_it_once(self, store: Store) -> None:
        _require_content(store)
        partition = store.register("image")
        clients = [store.client, store.same_store_client()]
        held = store.held()
        for number in range(5):
            image = random_cells(torch.uint8, (200_000,), number)

            def put(who: int, number: int = number, image: torch.Tensor = image) -> None:
                clients[who % 2].put_samples([f"s{number}-{who}"], partition, {"image": image.repeat(1, 1)})

            in_threads(*(partial(put, who) for who in range(4)))
            is_once = partial(lambda most: held() <= most, (number + 1) * 210_000)
            eventually(is_once, what="that a cell is held once")
        names = [f"s{number}-{who}" for number in range(5) for who in range(4)]
        for name, row in zip(names, store.client.get_samples(names, partition, ["image"])["image"], strict=True):
            expected = random_cells(torch.uint8, (200_000,), int(name[1]))
            assert bits(row) == bits(expected), "cells were mixed up"
        store.client.clear_samples(None, partition)
        eventually(lambda: held() <= 4096, what="that cells go with the last sample that has them")

    def test_lost_content_is_brought_again(self, store: Store) -> None:
        _require_content(store)
        partition, image = store.register("image"), random_cells(torch.uint8, (200_000,), 1)
        for name in ("a", "b"):
            store.put(partition, [name], image=image[None])
        store.lose(partition, "a", "image")
        with pytest.raises(LostSamplesError):
            store.client.get_samples(["a"], partition, ["image"])
        names = ("c", "a") if store.declares(Capability.OVERWRITE) else ("c",)
        for name in names:
            store.put(partition, [name], image=image[None])
        for name in names:
            row = store.client.get_samples([name], partition, ["image"])["image"][0]
            assert bits(row) == bits(image), "a cell that was put again is not there"
        with pytest.raises(LostSamplesError):
            store.client.get_samples(["b"], partition, ["image"])

    def test_narrow_integers_take_less_room(self, store: Store) -> None:
        wire = store.backend_class.wire
        if not (store.backend.narrow and (wire.bytes or wire.narrow)):
            not_declared("a wire format with narrow integers")
        partition = store.register("x")
        column = torch.arange(1 << 18).view(8, -1) % 100
        held = store.held()
        store.put(partition, ids(8), x=column)
        assert held() < column.nbytes // 2, f"{held()} bytes for values that take {column.nbytes // 8}"
