"""The header of a framed cell, and single tensors as frames.

A header is ``DPF``, a version, the kind, a dtype code, the rank, a zero byte, and the shape as little-endian int64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from dataplane_core.codec.tensors import DTYPE_CODES, DTYPE_OF_CODE, byte_view, from_bytes, host_tensor
from dataplane_core.errors import FrameError, InvalidTypeError
from dataplane_core.packed import BytesLike

MAGIC: Final = b"DPF"
VERSION: Final = 1
KIND_TENSOR: Final = 1
KIND_OBJECT: Final = 2
#: magic, version, kind, dtype code, rank, a zero byte; then ``rank`` little-endian int64 dims; then the payload.
_FIXED: Final = struct.Struct("<3sBBBBB")
HEADER_SIZE: Final = _FIXED.size
#: Where a header has its dtype code.
CODE_AT: Final = 5
MAX_RANK: Final = 64
#: The most bytes of a cell, dims of 0 counted as 1. More would overflow a stride in torch.
MAX_CELL_BYTES: Final = 2**48


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame.

    Attributes:
        kind: `KIND_TENSOR` or `KIND_OBJECT`.
        dtype: The tensor's dtype; uint8 for an object.
        shape: The cell's shape; for an object, the number of its encoded bytes.
        size: Bytes of the header, which the payload follows.
    """

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int


def pack_header(kind: int, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The header bytes of one cell."""
    return _FIXED.pack(MAGIC, VERSION, kind, DTYPE_CODES[dtype], len(shape), 0) + struct.pack(f"<{len(shape)}q", *shape)


def parse_header(frame: BytesLike) -> Header:
    """Reads and checks one frame's header, and checks that the frame has the size that the header says.

    Raises:
        FrameError: The frame is truncated or too long; the magic, version, kind or dtype is wrong; a dim is negative or
            too large.
    """
    length = len(frame)
    if length < HEADER_SIZE:
        raise FrameError(f"frame of {length} bytes is truncated: a header has at least {HEADER_SIZE}.")
    magic, version, kind, code, rank, zero = _FIXED.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r}. Expected the magic {MAGIC!r}: this is not a framed cell.")
    if version != VERSION:
        raise FrameError(
            f"frame has format version {version}. Expected {VERSION}.",
            hint="It was written by another version of dataplane-core; use one version on all hosts.",
        )
    if kind not in (KIND_TENSOR, KIND_OBJECT) or zero:
        raise FrameError(f"frame has kind {kind} and flags {zero}. Expected kind 1 (tensor) or 2 (object), flags 0.")
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise FrameError(f"frame has dtype code {code}, which is not known.")
    if rank > MAX_RANK:
        raise FrameError(f"frame has rank {rank}. Expected at most {MAX_RANK}.")
    if kind == KIND_OBJECT and (rank != 1 or dtype != torch.uint8):
        raise FrameError(f"object frame has rank {rank} and dtype {dtype}. Expected 1 and torch.uint8.")
    size = HEADER_SIZE + 8 * rank
    if length < size:
        raise FrameError(f"frame of {length} bytes is truncated: its header of rank {rank} has {size}.")
    shape = struct.unpack_from(f"<{rank}q", frame, HEADER_SIZE)
    if any(dim < 0 for dim in shape):
        raise FrameError(f"frame has a negative dim in its shape {shape}.")
    extent = dtype.itemsize * math.prod(max(dim, 1) for dim in shape)
    if extent > MAX_CELL_BYTES:
        raise FrameError(f"frame has the shape {shape} of {dtype}: more than {MAX_CELL_BYTES} bytes.")
    payload = dtype.itemsize * math.prod(shape)
    if length != size + payload:
        word = "truncated" if length < size + payload else "too long"
        raise FrameError(
            f"frame of {length} bytes is {word}: {dtype} of shape {shape} takes {payload} bytes after a header of "
            f"{size}."
        )
    return Header(kind, dtype, shape, size)


def pack_tensor(tensor: torch.Tensor, what: str) -> bytes:
    """One tensor of any rank as a frame.

    Raises:
        InvalidTypeError: As `host_tensor`, or a rank above `MAX_RANK`.
    """
    plain = host_tensor(tensor, what)
    check_extent(plain.dtype, plain.shape, what)
    return pack_header(KIND_TENSOR, plain.dtype, plain.shape) + byte_view(plain)


def unpack_tensor(frame: BytesLike) -> torch.Tensor:
    """Reads `pack_tensor`'s bytes into new memory.

    Raises:
        FrameError: The frame is malformed, or holds an object.
    """
    header = parse_header(frame)
    if header.kind != KIND_TENSOR:
        raise FrameError("frame holds an object. Expected a tensor.")
    return from_bytes(bytearray(memoryview(frame)[header.size :]), header.dtype, header.shape)


def check_extent(dtype: torch.dtype, shape: Sequence[int], what: str) -> None:
    """Refuses cells that are too large for a frame.

    Raises:
        InvalidTypeError: The cell has more than `MAX_RANK` dims or `MAX_CELL_BYTES` bytes.
    """
    if len(shape) > MAX_RANK or dtype.itemsize * math.prod(max(dim, 1) for dim in shape) > MAX_CELL_BYTES:
        raise InvalidTypeError(
            f"{what} is {dtype} of shape {tuple(shape)}. Expected at most {MAX_RANK} dims and {MAX_CELL_BYTES} bytes."
        )
