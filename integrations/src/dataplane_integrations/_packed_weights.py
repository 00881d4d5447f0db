"""The weights of a version as one array of bytes, and what differs between two of them. No I/O.

A version is stored as cells of a row: a header, which is an object, and bytes. What differs from the version before is
cut into chunks: the XOR of both, in planes (the first of every 8 bytes, then the second ones), compressed by zstd;
nothing, if they are equal; or the chunk itself, if that is no larger. All comparisons are of bits, so NaNs and -0.0 are
values like others.

Shape legend: ``B`` bytes of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import torch
import zstandard
from torch import Tensor
from xxhash import xxh3_128_digest

from dataplane_core.codec import DTYPE_CODES, DTYPE_OF_CODE, as_column, byte_array, empty_tensor, host_tensor
from dataplane_core.errors import CorruptDataError, DataPlaneError, InvalidTypeError, LostSamplesError
from dataplane_core.host_memory import copy_arrays, default_copy_threads

__all__ = ["BYTES", "HEADER", "Version", "next_version", "read_version"]

_Array: TypeAlias = np.ndarray[Any, Any]
#: Name -> [code of `DTYPE_CODES`, shape, where its bytes begin]. Tensors that are tied begin at the same byte.
_Forms: TypeAlias = dict[str, Any]
_T = TypeVar("_T")

#: The cells of a version: what the bytes are, and the bytes. Further cells of bytes have a number.
HEADER: Final = "weight_header"
BYTES: Final = "weight_bytes"
#: A cell has at most so many bytes. Redis takes at most 512 MiB.
_CELL_BYTES: Final = 128 << 20
#: A chunk has at most so many bytes: the work on it stays in the cache of a core, and several threads have work.
_CHUNK_BYTES: Final = 4 << 20
#: There are so many planes, and the bytes of a tensor begin at a multiple of it: it suits elements of up to 8 bytes.
_PLANES: Final = 8
#: Higher levels take several times as long, and save nothing on these bytes.
_LEVEL: Final = 1


@dataclass(frozen=True)
class Version:
    """A version, on which a delta can build.

    Attributes:
        number: The version.
        forms: What its tensors are.
        data: (B,) uint8. Nobody changes it.
        objects: Its weights that are no tensors.
        rows: The versions of which it is made, ascending: an anchor and the deltas after it. Each with the digest of
            its forms and data, as the publisher said.
    """

    number: int
    forms: _Forms
    data: _Array
    objects: dict[str, Any]
    rows: dict[int, str]

    def weights(self) -> dict[str, Any]:
        """Name -> tensor, each in memory of its own, or object.

        Raises:
            CorruptDataError: They are not what was published.
        """
        weights: dict[str, Any] = {}
        with _naming(self.number):
            if _digest_of(self.forms, self.data).hex() != self.rows[self.number]:
                raise ValueError("it has not the digest of what was published")
            for name, (code, shape, start) in self.forms.items():
                stop = start + math.prod(shape) * DTYPE_OF_CODE[code].itemsize
                if not 0 <= start <= stop <= len(self.data):  # before so much is allocated
                    raise ValueError(f"'{name}' is outside of the {len(self.data)} bytes")
                weights[name] = empty_tensor(shape, DTYPE_OF_CODE[code])
                copy_arrays([(byte_array(weights[name]), self.data[start:stop])])
            return {**weights, **self.objects}


def next_version(base: Version | None, number: int, weights: Mapping[str, Any]) -> tuple[Version, dict[str, Any]]:
    """Copies weights into a version. Returns it with its cells, which may alias its memory.

    It is an anchor if there is no base or one of other tensors, and if a delta is not smaller. Takes one tensor at a
    time to the host.

    Raises:
        InvalidTypeError: A tensor that the store does not take, or a name that is no string.
    """
    tensors, objects = _sorted_out(weights)
    forms, data = _laid_out(tensors)
    digest = _digest_of(forms, data)
    header: dict[str, Any] = {"digest": digest, "objects": objects, "base": None, "forms": forms}
    stored, rows = data, {number: digest.hex()}
    if base is not None and base.forms == forms:
        pieces = _on_chunks(lambda chunk: _difference(data[chunk], base.data[chunk]), data)
        sizes = [len(piece) for piece in pieces]
        if sum(sizes) < len(data):
            header |= {"base": base.number, "forms": None, "sizes": sizes}
            stored, rows = np.concatenate(pieces), base.rows | rows
    cells = {
        f"{BYTES}.{start}" if start else BYTES: stored[start : start + _CELL_BYTES]
        for start in range(0, max(1, len(stored)), _CELL_BYTES)
    }
    return Version(number, forms, data, objects, rows), {HEADER: {**header, "cells": list(cells)}, **cells}


def read_version(base: Version | None, number: int, cells: Mapping[str, Any]) -> Version:
    """The version of a row. `Version.weights` checks whether it is what was published.

    Args:
        base: The version before. An anchor needs none.
        number: The version.
        cells: Of `next_version`, perhaps among others. Copied.

    Raises:
        CorruptDataError: They are damaged.
        LostSamplesError: They are made for a version that is not ``base``: there is a gap.
    """
    with _naming(number):
        header = cells[HEADER]
        objects, rows = dict(header["objects"]), {number: header["digest"].hex()}
        stored = np.concatenate([np.asarray(cells[name]) for name in header["cells"]])
        if header["base"] is None:
            return Version(number, header["forms"], stored, objects, rows)
        if base is None or header["base"] != base.number:
            raise LostSamplesError(
                f"the weights of version {number} build on version {header['base']}, which is not in the store.",
                hint="The trainer's next version has all of them.",
            )
        places = pairwise(accumulate(header["sizes"], initial=0))
        pieces = {chunk.start: stored[slice(*place)] for chunk, place in zip(_chunks(base.data), places, strict=True)}
        data = np.empty_like(base.data)
        _on_chunks(lambda chunk: _apply(pieces[chunk.start], base.data[chunk], data[chunk]), data)
        return Version(number, base.forms, data, objects, base.rows | rows)


@contextmanager
def _naming(version: int) -> Iterator[None]:
    """Whatever fails inside is damage of this version: its row may hold anything."""
    try:
        yield
    except DataPlaneError:
        raise
    except Exception as error:
        raise CorruptDataError(f"version {version} of the weights is damaged: {error!r}") from error


def _sorted_out(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors among weights, arrays too, and the objects."""
    tensors: dict[str, Tensor] = {}
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
        tensors[name] = value.detach()
    return tensors, objects


def _laid_out(tensors: Mapping[str, Tensor]) -> tuple[_Forms, _Array]:
    """Copies tensors to one array, in the order of their names. Those that share memory lie there once."""
    forms: _Forms = {}
    starts: dict[Any, int] = {}  # memory -> where its copy begins
    first: dict[str, int] = {}  # tensors that no earlier one is tied to
    end = 0
    for name, tensor in sorted(tensors.items()):
        bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), bits)
        if memory not in starts:
            starts[memory] = first[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _PLANES) * _PLANES
        forms[name] = [DTYPE_CODES[tensor.dtype], list(tensor.shape), starts[memory]]
    data = np.zeros(end, dtype=np.uint8)
    for name, start in first.items():
        source = byte_array(host_tensor(tensors[name], f"weight '{name}'"))
        copy_arrays([(data[start : start + len(source)], source)])
    return forms, data


def _digest_of(forms: _Forms, data: _Array) -> bytes:
    """16 bytes, XXH3."""
    return xxh3_128_digest(repr(forms).encode() + b"".join(_on_chunks(lambda at: xxh3_128_digest(data[at].data), data)))


def _chunks(data: _Array) -> list[slice]:
    return [slice(start, start + _CHUNK_BYTES) for start in range(0, len(data), _CHUNK_BYTES)]


def _on_chunks(work: Callable[[slice], _T], data: _Array) -> list[_T]:
    """Does the work on each chunk, in several threads."""
    with ThreadPoolExecutor(default_copy_threads()) as threads:
        return list(threads.map(work, _chunks(data)))


def _difference(new: _Array, old: _Array) -> _Array:
    """The piece of a delta that makes a chunk of the one before."""
    changed = new ^ old
    if not changed.any():
        return changed[:0]
    planes = np.ascontiguousarray(changed.reshape(-1, _PLANES).T)
    piece = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)
    return np.frombuffer(piece, dtype=np.uint8) if len(piece) < len(new) else new


def _apply(piece: _Array, old: _Array, new: _Array) -> None:
    """Makes a chunk of the one before."""
    if len(piece) in (0, len(new)):
        new[:] = piece if len(piece) else old
        return
    size = zstandard.get_frame_parameters(piece.data).content_size  # refuses another one before it is allocated
    if size != len(new):
        raise ValueError(f"{size} bytes in a chunk of {len(new)}")
    reader = zstandard.ZstdDecompressor(max_window_size=2 * _CHUNK_BYTES)
    planes = np.frombuffer(reader.decompress(piece.data, allow_extra_data=False), dtype=np.uint8)
    np.bitwise_xor(old, planes.reshape(_PLANES, -1).T.reshape(-1), out=new)
