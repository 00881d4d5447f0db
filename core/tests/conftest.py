"""What the tests of the codec and of batches share: cells of random bits, and equality of bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)  # torch warns of this dtype once per process


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    plain = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)  # a dim of size 1 may have odd strides
    return plain.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _random_cell(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(tuple(shape))


def _assert_rows(column: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """The column holds these rows bit for bit, in the container that the contract names."""
    assert column.dtype == rows[0].dtype
    assert not column.requires_grad
    if len({row.shape for row in rows}) == 1:
        assert not column.is_nested
        assert type(column) is torch.Tensor
        assert column.shape == (len(rows), *rows[0].shape)
        assert column.is_contiguous()
        assert _bits(column) == b"".join(map(_bits, rows))
        return
    assert column.layout == torch.jagged
    assert column.size(0) == len(rows)
    assert column.is_contiguous()
    lengths = [len(row) for row in rows]
    assert column.offsets().dtype == torch.int64
    assert column.offsets().diff().tolist() == lengths
    assert column.values().is_contiguous()
    # known without asking the offsets: torch's own padding takes 100 times longer otherwise
    assert column._maybe_min_seqlen == min(lengths)
    assert column._maybe_max_seqlen == max(lengths)
    assert column.values().shape[1:] == rows[0].shape[1:]
    assert _bits(column.values()) == b"".join(map(_bits, rows))


@pytest.fixture(scope="session")
def bits() -> Callable[[torch.Tensor], bytes]:
    """A tensor's bits, NaN payloads and all."""
    return _bits


@pytest.fixture(scope="session")
def random_cell() -> Callable[..., torch.Tensor]:
    """``random_cell(shape, dtype, seed)``: a cell of random bits."""
    return _random_cell


@pytest.fixture(scope="session")
def assert_rows() -> Callable[[torch.Tensor, Sequence[torch.Tensor]], None]:
    """Checks a column that was read back."""
    return _assert_rows
