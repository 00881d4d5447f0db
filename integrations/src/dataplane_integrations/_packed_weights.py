"""The weights of a version as one array of bytes, and what differs between two of them. No I/O.

A version is stored as cells of a row: a header, which is an object, and bytes. Tensors are cut into chunks. A chunk of
a delta is the XOR of its bytes with those before, in planes (the first bytes of all elements, then the second ones),
compressed by zstd; nothing, if it has not changed; or the chunk itself, if that is no larger. All comparisons are of
bits, so NaNs and -0.0 are values like others.

Shape legend: ``B`` bytes of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import zstandard
from torch import Tensor
from xxhash import xxh3_128_digest

from dataplane_core.codec import DTYPE_CODES, DTYPE_OF_CODE, as_column, byte_array, empty_tensor, host_tensor
from dataplane_core.errors import CorruptDataError, DataPlaneError, InvalidTypeError, LostSamplesError
from dataplane_core.host_memory import copy_arrays, default_copy_threads, in_threads

__all__ = ["BYTES", "HEADER", "Version", "next_version", "read_version"]

_Array: TypeAlias = np.ndarray[Any, Any]
#: Name -> [code of `DTYPE_CODES`, shape]. The bytes of the tensors follow one another in this order, without gaps.
_Forms: TypeAlias = dict[str, Any]
_T = TypeVar("_T")

#: The cells of a version: what the bytes are, and the bytes. Further cells of bytes have a number.
HEADER: Final = "weight_header"
BYTES: Final = "weight_bytes"
#: A cell has at most so many bytes. Redis takes at most 512 MiB.
_CELL_BYTES: Final = 128 << 20
#: A chunk has at most so many bytes: the work on it stays in the cache of a core, and several threads have work.
_CHUNK_BYTES: Final = 4 << 20
#: Higher levels take several times as long, and save nothing on these bytes.
_LEVEL: Final = 1


class _Chunk(NamedTuple):
    start: int  # in bytes
    stop: int
    width: int  # bytes of an element


@dataclass(frozen=True)
class Version:
    """A version that a delta can build on. Who makes or reads the next one gives it away: its memory is used again.

    Attributes:
        number: The version.
        forms: What its tensors are.
        tied: Name -> the tensor whose memory this one is.
        data: (B,) uint8.
        digest: Of all these, as the publisher said.
        objects: Its weights that are no tensors.
    """

    number: int
    forms: _Forms
    tied: dict[str, str]
    data: _Array
    digest: bytes
    objects: dict[str, Any]

    def weights(self) -> dict[str, Any]:
        """Name -> tensor, each in memory of its own, or object.

        Raises:
            CorruptDataError: They are not what was published.
        """
        tensors: dict[str, Tensor] = {}
        start = 0
        with _naming(self.number):
            if _digest_of(self.forms, self.tied, self.data) != self.digest:
                raise ValueError("it has not the digest of what was published")
            for name, (code, shape) in self.forms.items():
                tensor = tensors[name] = empty_tensor(shape, DTYPE_OF_CODE[code])
                copy_arrays([(byte_array(tensor), self.data[start : start + tensor.nbytes])])
                start += tensor.nbytes
            tensors |= {name: tensors[other].clone() for name, other in self.tied.items()}
        return {**tensors, **self.objects}


def next_version(base: Version | None, number: int, weights: Mapping[str, Any]) -> tuple[Version, dict[str, Any]]:
    """Copies weights into a version. Returns it with its cells, which may alias its memory.

    It is an anchor if there is no base or one of other tensors, and if a delta is not smaller. Takes one tensor at a
    time to the host. If it raises, the bytes of the base are those of no version.

    Raises:
        InvalidTypeError: A tensor that the store does not take, or a name that is no string.
    """
    tensors, tied, objects = _sorted_out(weights)
    forms = {name: [DTYPE_CODES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    if base is not None and (base.forms, base.tied) != (forms, tied):
        base = None
    data = np.empty(_size_of(forms), dtype=np.uint8) if base is None else base.data

    def replace(source: _Array, start: int, chunk: _Chunk) -> _Array:
        old, new = data[chunk.start : chunk.stop], source[chunk.start - start : chunk.stop - start]
        piece = None if base is None else _difference(new, old, chunk.width)
        old[:] = new
        return old if piece is None else piece

    pieces: list[_Array] = []
    for name, chunks in _chunks_of(forms).items():
        source = byte_array(host_tensor(tensors[name], f"weight '{name}'"))
        pieces += _in_threads([partial(replace, source, chunks[0].start, chunk) for chunk in chunks])
    version = Version(number, forms, tied, data, _digest_of(forms, tied, data), objects)
    sizes = [len(piece) for piece in pieces]
    header: dict[str, Any] = {"digest": version.digest, "objects": objects}
    if base is None or sum(sizes) >= len(data):
        stored = data
        header |= {"base": None, "forms": forms, "tied": tied}
    else:
        stored = np.concatenate(pieces)
        header |= {"base": base.number, "sizes": sizes}
    cells = {
        f"{BYTES}.{start}" if start else BYTES: stored[start : start + _CELL_BYTES]
        for start in range(0, max(1, len(stored)), _CELL_BYTES)
    }
    return version, {HEADER: {**header, "cells": list(cells)}, **cells}


def read_version(base: Version | None, number: int, cells: Mapping[str, Any]) -> Version:
    """The version of a row. `Version.weights` checks whether it is what was published.

    Args:
        base: The version before. An anchor needs none.
        number: The version.
        cells: Of `next_version`, perhaps among others. Copied.

    Raises:
        CorruptDataError: They are damaged. The bytes of the base are those of no version.
        LostSamplesError: They are made for a version that is not ``base``: there is a gap.
    """
    with _naming(number):
        header = cells[HEADER]
        digest, objects = header["digest"], dict(header["objects"])
        data = np.concatenate([np.asarray(cells[name]) for name in header["cells"]])
        if header["base"] is None:
            if len(data) != _size_of(header["forms"]):
                raise ValueError(f"{len(data)} bytes of other tensors")
            return Version(number, header["forms"], header["tied"], data, digest, objects)
        if base is None or header["base"] != base.number:
            raise LostSamplesError(
                f"the weights of version {number} build on version {header['base']}, which is not in the store.",
                hint="The trainer's next version has all of them.",
            )
        chunks = chain.from_iterable(_chunks_of(base.forms).values())
        ends = pairwise(accumulate(header["sizes"], initial=0))
        _in_threads(
            [
                partial(_apply, data[start:stop], base.data[chunk.start : chunk.stop], chunk.width)
                for chunk, (start, stop) in zip(chunks, ends, strict=True)
                if start != stop
            ]
        )
        return Version(number, base.forms, base.tied, base.data, digest, objects)


@contextmanager
def _naming(version: int) -> Iterator[None]:
    """Whatever fails inside is damage of this version: its row may hold anything."""
    try:
        yield
    except DataPlaneError:
        raise
    except Exception as error:
        raise CorruptDataError(f"version {version} of the weights is damaged: {error!r}") from error


def _sorted_out(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The tensors among weights, arrays too, in the order of their names; those that are tied to them; the objects."""
    dense: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for name, value in weights.items():
        if type(name) is not str:
            raise InvalidTypeError(f"publish_weights refused: the name {name!r} is a {type(name).__name__}, no string.")
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = as_column(f"publish_weights refused: weight '{name}'", value[None])[0]
        if not isinstance(value, Tensor):
            objects[name] = value
            continue
        is_strided = value.layout == torch.strided and not value.is_nested and not value.is_meta
        if type(value) not in (Tensor, torch.nn.Parameter) or not is_strided or value.dtype not in DTYPE_CODES:
            value = host_tensor(value, f"publish_weights refused: weight '{name}'")
        dense[name] = value.detach()
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_of: dict[Any, str] = {}  # memory -> the tensor that has it
    for name, tensor in sorted(dense.items()):
        bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        first = first_of.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), bits), name)
        if first == name or not tensor.numel():
            tensors[name] = tensor
        else:
            tied[name] = first
    return tensors, tied, objects


def _size_of(forms: _Forms) -> int:
    """B."""
    sizes = [math.prod(shape) * DTYPE_OF_CODE[code].itemsize for code, shape in forms.values()]
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("a shape that is none")
    return sum(sizes)


def _chunks_of(forms: _Forms) -> dict[str, list[_Chunk]]:
    """The chunks of each tensor that has bytes."""
    chunks = {}
    end = 0
    for name, (code, shape) in forms.items():
        width = DTYPE_OF_CODE[code].itemsize
        start, end = end, end + math.prod(shape) * width
        if start != end:
            starts = range(start, end, _CHUNK_BYTES)
            chunks[name] = [_Chunk(at, min(at + _CHUNK_BYTES, end), width) for at in starts]
    return chunks


def _digest_of(forms: _Forms, tied: Mapping[str, str], data: _Array) -> bytes:
    """16 bytes, XXH3."""
    chunks = chain.from_iterable(_chunks_of(forms).values())
    digests = _in_threads([partial(xxh3_128_digest, data[chunk.start : chunk.stop].data) for chunk in chunks])
    return xxh3_128_digest(repr((forms, tied)).encode() + b"".join(digests))


def _in_threads(work: Sequence[Callable[[], _T]]) -> list[_T]:
    """Does pieces of work; their results in order."""
    results: dict[int, _T] = {}

    def do(number: int) -> None:
        results[number] = work[number]()

    in_threads([partial(do, number) for number in range(len(work))], min(default_copy_threads(), max(1, len(work))))
    return [results[number] for number in range(len(work))]


def _difference(new: _Array, old: _Array, width: int) -> _Array | None:
    """The piece of a delta that makes a chunk of the one before; empty if they are equal. None: the chunk itself."""
    changed = new ^ old
    if not changed.any():
        return changed[:0]
    planes = np.ascontiguousarray(changed.reshape(-1, width).T)
    piece = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)
    return np.frombuffer(piece, dtype=np.uint8) if len(piece) < len(new) else None


def _apply(piece: _Array, target: _Array, width: int) -> None:
    """Changes a chunk in place."""
    if len(piece) == len(target):
        target[:] = piece
        return
    size = zstandard.get_frame_parameters(piece.data).content_size  # refuses another one before it is allocated
    if size != len(target):
        raise ValueError(f"{size} bytes in a chunk of {len(target)}")
    reader = zstandard.ZstdDecompressor(max_window_size=2 * _CHUNK_BYTES)
    planes = np.frombuffer(reader.decompress(piece.data, allow_extra_data=False), dtype=np.uint8)
    target ^= planes.reshape(width, -1).T.reshape(-1)
