"""The arena: one memory for all that have its descriptor, and nothing left when they are gone."""

import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dataplane_core.host_memory import Arena
from dataplane_core.host_memory.arena import Uses

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


def test_processes_share_its_bytes():
    arena = Arena.create(1 << 20)
    arena.bytes[5] = 7
    assert attach(arena, "read_write").returncode == 0
    assert arena.bytes[6] == 8


def test_a_write_into_a_read_only_mapping_changes_nothing():
    arena = Arena.create(1 << 20)
    arena.bytes[5] = 7
    done = attach(arena, "read_only")
    assert done.returncode != 0
    assert arena.bytes[6] == 0
    window = Arena(os.dup(arena.fd), read_only=True).window(owner=None)
    assert window[5] == 7


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


def test_nothing_is_left_of_it():
    def mappings():
        return Path("/proc/self/maps").read_text().count("memfd:dataplane")

    gc.collect()  # what other tests left
    mapped, opened = mappings(), set(os.listdir("/proc/self/fd"))
    arena = Arena.create(mmap.PAGESIZE)
    view = np.frombuffer(arena.bytes, np.uint8)
    assert mappings() == mapped + 1
    del arena, view
    gc.collect()
    assert mappings() == mapped
    assert set(os.listdir("/proc/self/fd")) <= opened


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
