"""An arena of the host: extents, what they share, limits of the machine, and memory that is used again."""

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from dataplane_core.errors import ConfigError
from dataplane_core.host_memory import Arena, MemoryLimit, check_capacity, copying, limits, memory_limit, recycled_bytes
from dataplane_core.host_memory.arena import Extents, Uses

ATTACH = """
import sys
from dataplane_core.host_memory import Arena
arena = Arena(int(sys.argv[1]), read_only=sys.argv[2] == "read_only")
assert arena.bytes[5] == 7
arena.bytes[6] = 8
"""


def attach(arena, access):
    words = [sys.executable, "-c", ATTACH, str(arena.fd), access]
    return subprocess.run(words, pass_fds=[arena.fd], capture_output=True, text=True, timeout=120)


def test_processes_share_its_bytes_and_none_writes_to_a_mapping_that_is_read_only():
    arena = Arena.create(1 << 20)
    arena.bytes[5] = 7
    assert attach(arena, "read_only").returncode != 0
    assert arena.bytes[6] == 0
    assert attach(arena, "read_write").returncode == 0
    assert arena.bytes[6] == 8
    assert Arena(os.dup(arena.fd), read_only=True).window(owner=None)[5] == 7


def test_it_cannot_be_cut():
    arena = Arena.create(1 << 20)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_memory_is_used_once_it_is_touched():
    arena = Arena.create(1 << 30)
    assert arena.touched_bytes == 0
    arena.touch(100, 1 << 20)
    assert 1 << 20 <= arena.touched_bytes < 1 << 22
    arena.touch_in_background(1 << 20, 3 << 20).join()
    assert arena.touched_bytes >= 3 << 20
    arena.touch((1 << 30) - 10, (1 << 30) + 10)  # beyond its end


def test_a_window_keeps_its_owner_and_the_memory_until_the_last_tensor_is_gone():
    class Owner:
        pass

    arena, owner = Arena.create(1 << 20), Owner()
    arena.bytes[64:68] = [1, 2, 3, 4]
    gone = weakref.ref(owner)
    tensor = torch.from_numpy(arena.window(owner)[64:72])[1:].view(7)[:3]
    del owner, arena
    gc.collect()
    assert gone() is not None
    assert tensor.tolist() == [2, 3, 4]
    del tensor
    gc.collect()
    assert gone() is None


def test_bytes_are_in_the_file_when_they_are_synced(tmp_path):
    arena = Arena.open(tmp_path / "arena", 1 << 20)
    first, nothing, last = arena.bytes[5000:5003], arena.bytes[6000:6000], arena.bytes[9000:9002]
    first[:], last[:] = (1, 2, 3), (4, 5)
    arena.begin_sync(first, last)
    arena.begin_sync(nothing, nothing)
    arena.sync(5000, 9002)
    data = (tmp_path / "arena").read_bytes()
    assert data[5000:5003] + data[9000:9002] == bytes([1, 2, 3, 4, 5])


def test_uses_of_several_processes_are_told_in_order_and_an_empty_one_holds_no_other():
    arena = Arena.create(1 << 20)
    first, second = Uses(arena.fd), Uses(arena.fd)
    first.begin(5000, 6000)
    second.begin(100, 200)
    second.begin(300, 300)  # a column without elements
    assert arena.used_by_others(0, 1 << 20) == [(100, 200), (300, 301), (5000, 6000)]
    assert arena.used_by_others(150, 5500) == [(150, 200), (300, 301), (5000, 5500)]
    second.begin(400, 500)
    second.end(300)
    assert arena.used_by_others(0, 1 << 20) == [(100, 200), (400, 500), (5000, 6000)]
    assert arena.used_by_others(200, 400) == []


def test_bytes_are_used_in_a_block_or_as_long_as_an_object_lives():
    arena, said = Arena.create(1 << 20), []
    uses = Uses(arena.fd)

    def used():
        return arena.used_by_others(0, 1 << 20)

    with uses.during([(0, 64), (128, 192)], lambda: said.append(used())):
        assert used() == [(0, 64), (128, 192)]
    assert not used()
    assert said == [[(0, 64), (128, 192)]], "the owner is asked when others would see it already"

    def has_ended():
        raise RuntimeError

    with pytest.raises(RuntimeError), uses.during([(0, 64)], has_ended):
        pytest.fail("the block runs although the owner has ended")
    assert not used()

    class Holder:
        pass

    holder = Holder()
    uses.as_long_as(holder, [(0, 64), (0, 32)], lambda: None)
    assert used() == [(0, 64)]
    del holder
    assert not used()
    with pytest.raises(RuntimeError):
        uses.as_long_as(Holder(), [(0, 64)], has_ended)
    assert not used()


# --- extents ----------------------------------------------------------------------------------------------------------

SIZE = 64 * 64


class Memory(RuleBasedStateMachine):
    """Extents beside the bytes that they stand for: each holds its own number until it is freed."""

    held = Bundle("held")

    @initialize()
    def begin(self):
        self.extents = Extents(SIZE)
        self.bytes = np.zeros(SIZE, np.uint8)
        self.numbers = {}
        self.last = 0

    def keep(self, extent):
        self.last = self.last % 250 + 1
        self.numbers[extent] = self.last
        self.bytes[extent.offset : extent.offset + extent.size_bytes] = self.last
        return extent

    @rule(target=held, size=st.integers(1, SIZE // 3))
    def allocate(self, size):
        extent = self.extents.allocate(size)
        return multiple() if extent is None else self.keep(extent)

    @rule(extent=consumes(held))
    def free(self, extent):
        del self.numbers[extent]
        extent.pins = 0
        self.extents.free(extent)

    @rule(extent=held, pinned=st.booleans())
    def pin(self, extent, pinned):
        extent.pins = int(pinned)

    @rule(extent=held, share=st.floats(0, 1))
    def shrink(self, extent, share):
        self.extents.shrink(extent, max(1, int(extent.size_bytes * share)))

    @rule(target=held, size=st.integers(1, SIZE))
    def make_room(self, size):
        pinned = {extent: extent.offset for extent in self.numbers if extent.pins}
        walls = sorted((offset, offset + extent.size_bytes) for extent, offset in pinned.items())
        starts, ends = [0, *(end for _, end in walls)], [*(start for start, _ in walls), SIZE]
        between = [
            end - start - sum(e.size_bytes for e in self.numbers if not e.pins and start <= e.offset < end)
            for start, end in zip(starts, ends, strict=True)
        ]
        made = self.extents.make_room(size, self.move)
        assert made == (max(between) >= size), "room is made wherever enough bytes are free between two pins"
        assert all(extent.offset == offset for extent, offset in pinned.items())
        return self.keep(self.extents.allocate(size)) if made else multiple()

    def move(self, source, target, size):
        assert target < source
        self.bytes[target : target + size] = self.bytes[source : source + size].copy()

    @invariant()
    def each_holds_its_own_bytes(self):
        for extent, number in self.numbers.items():
            assert (self.bytes[extent.offset : extent.offset + extent.size_bytes] == number).all()
        assert self.extents.used_bytes == sum(extent.size_bytes for extent in self.numbers)


TestMemory = Memory.TestCase
TestMemory.settings = settings(stateful_step_count=40)


def test_a_size_that_can_never_fit_moves_nothing():
    extents = Extents(1024)
    extents.free(extents.allocate(64))
    assert not extents.make_room(1025, move=None)
    assert extents.allocate(1025) is None


# --- limits -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Writes files below a root, and returns what is found there. 1,000 MiB are available."""

    def make(cgroup, files):
        for name, text in {
            "proc/meminfo": f"MemTotal: {2000 << 10} kB\nMemAvailable: {1000 << 10} kB\n",
            **files,
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if cgroup is not None:
            (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc/self/cgroup").write_text(cgroup)
        return memory_limit(tmp_path)

    return make


def limited(folder, limit, used, version=2, stat=""):
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    files = dict(zip(names, (limit, used), strict=True)) | ({"memory.stat": stat} if stat else {})
    return {f"sys/fs/cgroup/{folder}{name}": str(value) for name, value in files.items()}


NESTED = {**limited("", "max", 5), **limited("a/", 100 * MIB, 90 * MIB), **limited("a/b/", 800 * MIB, 0)}
TOTAL = f"total_inactive_file {450 * MIB}\n"
MACHINE = MemoryLimit(1000 * MIB, "this machine", 2000 * MIB)


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        (None, {}, MACHINE),
        ("0::/a\n", limited("a/", "max", 5), MACHINE),
        ("0::/\n", limited("", 500 * MIB, 200 * MIB), MemoryLimit(300 * MIB, "the container's limit", 500 * MIB)),
        ("0::/a/b\n", NESTED, 10 * MIB),  # that of a group above
        ("5:cpu:/x\n4:memory:/a\n", limited("memory/a/", 400 * MIB, 100 * MIB, version=1), 300 * MIB),
        ("0::/\n", limited("", MIB, 2 * MIB), 0),  # it uses more than it may
        # pages of files that the kernel can drop are available
        ("0::/\n", limited("", 500 * MIB, 500 * MIB, stat=f"anon 5\ninactive_file {450 * MIB}\n"), 450 * MIB),
        ("4:memory:/\n", limited("memory/", 500 * MIB, 500 * MIB, 1, f"inactive_file 0\n{TOTAL}"), 450 * MIB),
    ],
)
def test_the_memory_that_is_left(machine, cgroup, files, limit):
    found = machine(cgroup, files)
    assert (found if isinstance(limit, MemoryLimit) else found.available_bytes) == limit


def test_a_capacity_that_this_host_does_not_have_is_refused():
    most_bytes = memory_limit().most_bytes
    check_capacity(None)
    check_capacity(most_bytes)
    with pytest.raises(ConfigError, match=r"Expected at most the memory that this host, or its container, has in all"):
        check_capacity(most_bytes + 1)


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (None, {}, 8),
        ("0::/a/b\n", {"a/cpu.max": "max 100000", "a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000"}, 8),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores(machine, tmp_path, monkeypatch, cgroup, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    machine(cgroup, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert limits.usable_cores(tmp_path) == expected


def test_a_thread_that_is_pinned_to_a_core_has_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert limits.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


# --- memory that is used again ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unused():
    copying._unused.clear()
    yield copying._unused
    copying._unused.clear()


def address(array):
    return array.ctypes.data


def test_it_is_used_again_once_the_last_tensor_on_it_is_gone():
    array = recycled_bytes(3 * MIB)
    first, tensor = address(array), torch.from_numpy(array)[MIB:].view(torch.float32)
    del array
    gc.collect()
    other = recycled_bytes(3 * MIB)
    assert address(other) != first
    tensor[:] = 1.5
    del tensor
    gc.collect()
    assert address(recycled_bytes(2 * MIB)) == first


def test_what_is_kept_is_bounded(unused):
    arrays = [recycled_bytes(50 * MIB) for _ in range(4)]
    del arrays
    assert sum(block.size_bytes for block in unused) <= 128 * MIB
    recycled_bytes(200 * MIB)
    assert sum(block.size_bytes for block in unused) <= 128 * MIB
