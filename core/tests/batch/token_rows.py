"""Columns with a row per sample, as tests of reads and writes make them and look at them."""

import torch


def jagged(lengths, *trailing, dtype=torch.float32):
    """Rows of these lengths, whose values differ."""
    rows = [torch.arange(1.0, 1 + length * torch.Size(trailing).numel()).view(length, *trailing) for length in lengths]
    return torch.nested.as_nested_tensor([row.to(dtype) for row in rows], layout=torch.jagged)


def padded(rows, width, sides, pad=0):
    """Rows that are padded to a width, each on its side: left, right or both."""
    built = []
    for row, side in zip(rows, sides, strict=True):
        left = {"l": width - len(row), "r": 0, "b": (width - len(row) + 1) // 2}[side]
        built.append([pad] * left + row + [pad] * (width - len(row) - left))
    return torch.tensor(built)


def form(column):
    """The lengths of the rows of a jagged column, or the shape of another one."""
    return column.offsets().diff().tolist() if column.is_nested else tuple(column.shape)


def rows_of(column):
    return [row.tolist() for row in column.unbind()]
