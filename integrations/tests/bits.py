"""Values and columns bit by bit; tests send it to other processes by value."""

from collections.abc import Mapping

import numpy as np
import torch

from dataplane_testkit._columns import bits as bits_of_tensor


def bits(value):
    """What is equal only for a value of the same container, dtype, shape and bits, whatever pickle carries."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "jagged", bits(value.values()), bits(value.offsets())
        return str(value.dtype), tuple(value.shape), value.device.type, bits_of_tensor(value)
    if isinstance(value, np.ndarray):
        return "objects", [bits(item) for item in value]
    if isinstance(value, Mapping):
        return [(key, bits(item)) for key, item in value.items()]
    return value
