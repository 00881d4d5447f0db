"""The weights of a version as one array of bytes, and what differs between two of them. No I/O.

A version is stored as a header, an item of an object column, and bytes. Tensors are cut into chunks. A chunk of a delta
is the XOR of its bytes with those before, in planes (the first bytes of all elements, then the second ones), compressed
by zstd; nothing, if it has not changed; or the chunk itself, if that is no larger. All comparisons are of bits, so NaNs
and -0.0 are values like others.

Shape legend: ``B`` bytes of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from dataplane_core.codec import DTYPE_CODES, DTYPE_OF_CODE, as_column, byte_array, empty_tensor, host_tensor
from dataplane_core.errors import CorruptDataError, DataPlaneError, InvalidTypeError, LostSamplesError
from dataplane_core.host_memory import copy_arrays, default_copy_threads, in_threads

try:
    import zstandard
except ImportError as error:
    raise ImportError(
        "dataplane_integrations.weights needs zstandard. Install it with: pip install zstandard"
    ) from error

__all__ = ["Layout", "Version", "next_version", "read_version"]

_Array: TypeAlias = np.ndarray[Any, Any]

#: A chunk has at most so many bytes: the work on it stays in the cache of a core, and several threads have work.
_CHUNK_BYTES: Final = 4 << 20
#: Higher levels take several times as long, and save nothing on these bytes.
_LEVEL: Final = 1


class _Entry(NamedTuple):
    name: str
    dtype: int  # of DTYPE_CODES
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    same_as: str | None  # the tensor whose memory this one is (tied weights)


class _Chunk(NamedTuple):
    start: int  # in bytes
    stop: int
    width: int  # bytes of an element


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the bytes: without gaps, in the order of the entries."""

    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of tensors of any device. Their order does not matter."""
        first_of: dict[Any, str] = {}
        entries = []
        for name in sorted(tensors):
            tensor = tensors[name]
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            first = first_of.setdefault((*memory, tensor.is_conj(), tensor.is_neg()), name) if tensor.numel() else name
            entries.append(
                _Entry(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), None if first == name else first)
            )
        return cls(tuple(entries))

    @classmethod
    def load(cls, plain: Any) -> Layout:
        """The layout that `plain` wrote. Raises `CorruptDataError` if it is none."""
        try:
            entries = msgspec.convert(plain, tuple[_Entry, ...])
            forms: dict[str, tuple[int, tuple[int, ...]]] = {}
            for name, code, shape, same_as in entries:
                if name in forms or code not in DTYPE_OF_CODE or math.prod(shape) >= 2**60:
                    raise ValueError(name)
                if same_as is not None and forms.get(same_as) != (code, shape):
                    raise ValueError(name)
                forms[name] = code, shape
        except (ValueError, msgspec.ValidationError) as error:
            raise CorruptDataError(f"the layout of weights is damaged: {error}") from error
        return cls(entries)

    @property
    def plain(self) -> list[list[Any]]:
        """As an item of an object column."""
        return [[entry.name, entry.dtype, list(entry.shape), entry.same_as] for entry in self.entries]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Name -> its range of bytes."""
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, code, shape, same_as in self.entries:
            if same_as is None:
                start, end = end, end + math.prod(shape) * DTYPE_OF_CODE[code].itemsize
                places[name] = start, end
            else:
                places[name] = places[same_as]
        return places

    @property
    def size_bytes(self) -> int:
        """B."""
        return max((stop for _, stop in self.places.values()), default=0)

    def chunks_of(self, *entries: _Entry) -> list[_Chunk]:
        """The chunks of some tensors, in the order of the bytes. Tied ones have none of their own."""
        return [
            _Chunk(at, min(at + _CHUNK_BYTES, self.places[entry.name][1]), DTYPE_OF_CODE[entry.dtype].itemsize)
            for entry in entries
            if entry.same_as is None
            for at in range(*self.places[entry.name], _CHUNK_BYTES)
        ]


@dataclass(frozen=True)
class Version:
    """A version that a delta can build on. Who makes or reads the next one gives it away: its memory is used again.

    Attributes:
        number: The version.
        layout: Where each tensor lies.
        data: (B,) uint8.
        digest: Of these, as the publisher said.
        objects: Its weights that are no tensors.
    """

    number: int
    layout: Layout
    data: _Array
    digest: bytes
    objects: dict[str, Any]

    def has_its_digest(self) -> bool:
        """Whether the bytes are those that were published."""
        return _digest_of(self.layout, self.data) == self.digest

    def weights(self) -> dict[str, Any]:
        """Name -> tensor, each in memory of its own, or object."""
        tensors = {}
        for name, code, shape, _ in self.layout.entries:
            tensors[name] = empty_tensor(shape, DTYPE_OF_CODE[code])
            start, stop = self.layout.places[name]
            copy_arrays([(byte_array(tensors[name]), self.data[start:stop])])
        return {**tensors, **self.objects}


def next_version(
    base: Version | None, number: int, weights: Mapping[str, Any], *, anchor: bool
) -> tuple[Version, dict[str, Any], _Array]:
    """Copies weights into a version. Returns it with its header and its bytes, which may alias its memory.

    It is an anchor if ``anchor`` says so, if there is no base or one of another layout, and if a delta is not smaller.
    Takes one tensor at a time to the host. If it raises, the bytes of the base are those of no version.

    Raises:
        InvalidTypeError: A tensor that the store does not take, or a name that is no string.
    """
    tensors, objects = _tensors_of(weights)
    layout = Layout.of(tensors)
    if base is not None and base.layout != layout:
        base = None
    data = np.empty(layout.size_bytes, dtype=np.uint8) if base is None else base.data
    pieces: dict[_Chunk, _Array] = {}

    def put(chunk: _Chunk, new: _Array) -> None:
        old = data[chunk.start : chunk.stop]
        piece = None if base is None or anchor else _difference(new, old, chunk.width)
        old[:] = new
        pieces[chunk] = old if piece is None else piece

    for entry in layout.entries:
        chunks = layout.chunks_of(entry)
        if chunks:
            source, first = byte_array(host_tensor(tensors[entry.name], f"weight '{entry.name}'")), chunks[0].start
            _in_threads([partial(put, chunk, source[chunk.start - first : chunk.stop - first]) for chunk in chunks])
    version = Version(number, layout, data, _digest_of(layout, data), objects)
    header: dict[str, Any] = {"base": None, "digest": version.digest, "objects": objects}
    sizes = [len(pieces[chunk]) for chunk in layout.chunks_of(*layout.entries)]
    if base is None or anchor or sum(sizes) >= len(data):
        return version, {**header, "layout": layout.plain}, data
    header |= {"base": base.number, "base_digest": base.digest, "sizes": sizes}
    changed = [pieces[chunk] for chunk in layout.chunks_of(*layout.entries)]
    return version, header, np.concatenate(changed)


def read_version(base: Version | None, number: int, header: Any, parts: Sequence[_Array]) -> Version:
    """The version of a header and its bytes. Whether its bytes have its digest is not checked.

    Args:
        base: The version before. An anchor needs none.
        number: The version.
        header: Of `next_version`.
        parts: Its bytes end to end, each (bytes,) uint8. Copied.

    Raises:
        CorruptDataError: They are damaged, or made for another base. The bytes of the base are those of no version.
        LostSamplesError: They are made for a version that is not ``base``: there is a gap.
    """
    try:
        digest, objects, data = header["digest"], dict(header["objects"]), np.concatenate(parts)
        if header["base"] is None:
            layout = Layout.load(header["layout"])
            if data.shape != (layout.size_bytes,):
                raise ValueError(f"{data.shape} bytes, and {layout.size_bytes} by the layout")
            return Version(number, layout, data, digest, objects)
        if base is None or header["base"] != base.number:
            raise LostSamplesError(
                f"the weights of version {number} build on version {header['base']}, which is not in the store.",
                hint="The trainer's next version has all of them.",
            )
        if header["base_digest"] != base.digest:
            raise CorruptDataError(f"the weights of version {number} were made for another version {base.number}.")
        chunks, sizes = base.layout.chunks_of(*base.layout.entries), header["sizes"]
        whole = all(type(size) is int and size >= 0 for size in sizes)
        if not whole or sum(sizes) != len(data) or len(sizes) != len(chunks):
            raise ValueError("other chunks than its base has")
        stops = np.cumsum([0, *sizes]).tolist()
        _in_threads(
            [
                partial(_apply, data[start:stop], base.data[chunk.start : chunk.stop], chunk.width)
                for chunk, start, stop in zip(chunks, stops[:-1], stops[1:], strict=True)
                if start != stop
            ]
        )
    except DataPlaneError:
        raise
    except (KeyError, TypeError, ValueError, zstandard.ZstdError) as error:
        raise CorruptDataError(f"the header of version {number} of the weights is damaged: {error!r}") from error
    return Version(number, base.layout, base.data, digest, objects)


def _tensors_of(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors among weights, arrays too, and the objects. Copies nothing."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for name, value in weights.items():
        if type(name) is not str:
            raise InvalidTypeError(f"publish_weights refused: the name {name!r} is a {type(name).__name__}, no string.")
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = as_column(f"publish_weights refused: weight '{name}'", value[None])[0]
        if isinstance(value, Tensor):
            is_strided = value.layout == torch.strided and not value.is_nested and not value.is_meta
            if type(value) not in (Tensor, torch.nn.Parameter) or not is_strided or value.dtype not in DTYPE_CODES:
                value = host_tensor(value, f"publish_weights refused: weight '{name}'")
            tensors[name] = value.detach()
        else:
            objects[name] = value
    return tensors, objects


def _digest_of(layout: Layout, data: _Array) -> bytes:
    """Of the layout and of all bytes: 16 bytes, XXH3."""
    chunks = layout.chunks_of(*layout.entries)
    digests = [b""] * len(chunks)

    def add(number: int, chunk: _Chunk) -> None:
        digests[number] = xxh3_128_digest(data[chunk.start : chunk.stop].data)

    _in_threads([partial(add, number, chunk) for number, chunk in enumerate(chunks)])
    return xxh3_128_digest(repr(layout.plain).encode() + b"".join(digests))


def _in_threads(work: list[Callable[[], None]]) -> None:
    in_threads(work, min(default_copy_threads(), max(1, len(work))))


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
        raise CorruptDataError(f"a delta of weights has {size} bytes in a chunk. Expected {len(target)}.")
    reader = zstandard.ZstdDecompressor(max_window_size=2 * _CHUNK_BYTES)
    planes = np.frombuffer(reader.decompress(piece.data, allow_extra_data=False), dtype=np.uint8)
    target ^= planes.reshape(width, -1).T.reshape(-1)
