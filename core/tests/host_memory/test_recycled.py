"""Memory of large results: used again when nobody holds it, and never before."""

import gc
import threading

import numpy as np
import pytest
import torch

from dataplane_core.host_memory import copying, recycled_bytes

MIB = 1 << 20


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


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB + 7])
def test_any_size_can_be_written_whole(size):
    for _ in range(2):
        array = recycled_bytes(size)
        array[:] = 3
        assert array.shape == (size,)
        assert int(array.sum(dtype=np.int64)) == 3 * size


def test_a_block_is_not_given_to_a_much_smaller_array(unused):
    recycled_bytes(8 * MIB)
    recycled_bytes(3 * MIB)
    assert sorted(block.size_bytes for block in unused) == [3 * MIB, 8 * MIB]


def test_what_is_kept_is_bounded(unused):
    arrays = [recycled_bytes(50 * MIB) for _ in range(4)]
    del arrays
    assert sum(block.size_bytes for block in unused) <= 128 * MIB
    recycled_bytes(200 * MIB)
    assert sum(block.size_bytes for block in unused) <= 128 * MIB


def test_threads_never_get_the_same_memory():
    wrong = []

    def use(number):
        for _ in range(300):
            array = recycled_bytes(MIB + number)
            array[::4096] = number
            if (array[::4096] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
