"""`plain`: values as Python's own, before they are stored as objects, tags or parts of a save."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def plain(item: Any) -> Any:
    """An item with Python numbers for numpy's, and lists for tuples; also inside of dicts and lists."""
    kind = type(item)
    if kind in (str, int, float, bool, bytes, type(None)) or isinstance(item, torch.Tensor):
        return item
    if isinstance(item, np.generic):
        return item.item()
    if kind is dict:
        return {key: plain(value) for key, value in item.items()}
    if kind in (list, tuple):
        return [plain(value) for value in item]
    return item
