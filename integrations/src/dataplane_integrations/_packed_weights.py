"""The weights of a version as one array of bytes, and what differs between two of them. No I/O.

A version is stored as a header, an item of an object column, and bytes. Tensors are cut into chunks. A chunk of a delta
is the smallest of: nothing, the changed elements, or all elements, XORed with the ones before and compressed, or the
chunk itself. All comparisons are of bits, so NaNs and -0.0 are values like others.

Shape legend: ``B`` bytes of all tensors, ``n`` elements of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeAlias

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

__all__ = ["Layout", "PackedWeights", "Version", "next_version", "read_version"]

_Array: TypeAlias = np.ndarray[Any, Any]

#: A chunk has at most so many bytes: the work on it stays in the cache of a core, and several threads have work.
_CHUNK_BYTES: Final = 4 << 20
#: What a chunk of a delta is. Changed elements: the bytes of a distance (1, 2 or 4).
_EQUAL: Final = 0
_XOR: Final = 8
_WHOLE: Final = 9
#: Below this share of changed elements only they are tried, above the other one only all of them.
_FEW: Final = 0.25
_MOST: Final = 0.75
_NONE: Final = np.empty(0, dtype=np.uint8)
#: Higher levels take several times as long, and save nothing on these bytes.
_LEVEL: Final = 1


class _Entry(NamedTuple):
    name: str
    dtype: int  # of DTYPE_CODES
    shape: tuple[int, ...]
    same_as: str | None  # the tensor whose memory this one is (tied weights)


class _Chunk(NamedTuple):
    start: int  # in bytes
    stop: int
    width: int  # bytes of an element: 1, 2, 4 or 8


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the bytes: without gaps, wide elements first, so that all are aligned."""

    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of tensors of any device. Their order does not matter."""
        seen: dict[Any, str] = {}
        entries = []
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            tensor = tensors[name]
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            first = seen.setdefault((*memory, tensor.is_conj(), tensor.is_neg()), name) if tensor.numel() else name
            same_as = None if first == name else first
            entries.append(_Entry(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), same_as))
        return cls(tuple(entries))

    @classmethod
    def load(cls, plain: Any) -> Layout:
        """The layout that `plain` wrote.

        Raises:
            CorruptDataError: It is none.
        """
        try:
            entries = [_Entry(name, code, tuple(shape), same_as) for name, code, shape, same_as in plain]
            known: dict[str, tuple[int, tuple[int, ...]]] = {}
            for name, code, shape, same_as in entries:
                sizes = all(type(size) is int and 0 <= size < 2**63 for size in shape)
                tied = same_as is None or known.get(same_as) == (code, shape)
                if type(name) is not str or name in known or code not in DTYPE_OF_CODE or not sizes or not tied:
                    raise ValueError(name)
                known[name] = code, shape
            widths = [DTYPE_OF_CODE[each.dtype].itemsize for each in entries]
            if widths != sorted(widths, reverse=True):
                raise ValueError("not aligned")
        except (TypeError, ValueError) as error:
            raise CorruptDataError(f"the layout of weights is damaged: {error}") from error
        return cls(tuple(entries))

    @property
    def plain(self) -> list[list[Any]]:
        """As an item of an object column."""
        return [[each.name, each.dtype, list(each.shape), each.same_as] for each in self.entries]

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

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """All of them, in the order of the bytes."""
        return [chunk for each in self.entries if each.same_as is None for chunk in self.chunks_of(each)]

    def chunks_of(self, entry: _Entry) -> Iterator[_Chunk]:
        """Those of a tensor."""
        start, stop = self.places[entry.name]
        for at in range(start, stop, _CHUNK_BYTES):
            yield _Chunk(at, min(at + _CHUNK_BYTES, stop), min(8, DTYPE_OF_CODE[entry.dtype].itemsize))


class Delta(NamedTuple):
    """What changed between two versions of one layout: what each chunk is, its size in bytes, and these end to end."""

    kinds: list[int]
    sizes: list[int]
    data: _Array


class PackedWeights:
    """The bytes of a version, in memory of its own.

    Attributes:
        layout: Where each tensor lies.
        data: (B,) uint8.
    """

    def __init__(self, layout: Layout, data: _Array | None = None) -> None:
        self.layout = layout
        self.data: _Array = np.empty(layout.size_bytes, dtype=np.uint8) if data is None else data
        if self.data.shape != (layout.size_bytes,):
            raise CorruptDataError(
                f"weights have {self.data.shape} bytes. Expected {layout.size_bytes}, as their layout says."
            )

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors in."""
        for entry, source in self._sources(tensors):
            start, stop = self.layout.places[entry.name]
            copy_arrays([(self.data[start:stop], source)])

    def replace(self, tensors: Mapping[str, Tensor]) -> Delta:
        """Copies tensors of the same layout in. Returns what changed. Takes one tensor at a time to the host.

        If it raises, the bytes are those of no version.
        """
        pieces: dict[_Chunk, tuple[int, Any]] = {}

        def put(chunk: _Chunk, new: _Array) -> None:
            old = self.data[chunk.start : chunk.stop]
            pieces[chunk] = _difference(new, old, np.dtype(f"u{chunk.width}"))
            old[:] = new

        for entry, source in self._sources(tensors):
            first = self.layout.places[entry.name][0]
            _in_threads(
                [
                    partial(put, chunk, source[chunk.start - first : chunk.stop - first])
                    for chunk in self.layout.chunks_of(entry)
                ]
            )
        found = [pieces[chunk] for chunk in self.layout.chunks]
        parts = [
            self.data[chunk.start : chunk.stop] if kind == _WHOLE else piece
            for chunk, (kind, piece) in zip(self.layout.chunks, found, strict=True)
        ]
        data = np.concatenate([np.frombuffer(each, dtype=np.uint8) for each in parts if len(each)] or [_NONE])
        return Delta([kind for kind, _ in found], list(map(len, parts)), data)

    def apply(self, delta: Delta) -> None:
        """Makes this the version of which the delta was made.

        Raises:
            CorruptDataError: The delta does not fit. The bytes are then those of no version.
        """
        chunks = self.layout.chunks
        whole = all(type(each) is int and each >= 0 for each in delta.sizes) and sum(delta.sizes) == len(delta.data)
        if not whole or not len(chunks) == len(delta.kinds) == len(delta.sizes):
            raise CorruptDataError("a delta of weights has not the chunks that its version has.")
        stops = np.cumsum([0, *delta.sizes]).tolist()
        _in_threads(
            [
                partial(_apply, kind, delta.data[start:stop], self.data[chunk.start : chunk.stop], chunk.width)
                for chunk, kind, start, stop in zip(chunks, delta.kinds, stops[:-1], stops[1:], strict=True)
                if kind != _EQUAL or start != stop
            ]
        )

    def digest(self) -> bytes:
        """Of the layout and of all bytes: 16 bytes, XXH3."""
        chunks = self.layout.chunks
        digests = [b""] * len(chunks)

        def add(number: int, chunk: _Chunk) -> None:
            digests[number] = xxh3_128_digest(self.data[chunk.start : chunk.stop].data)

        _in_threads([partial(add, number, chunk) for number, chunk in enumerate(chunks)])
        return xxh3_128_digest(repr(self.layout.plain).encode() + b"".join(digests))

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, each in memory of its own."""
        found = {}
        for name, code, shape, _ in self.layout.entries:
            found[name] = empty_tensor(shape, DTYPE_OF_CODE[code])
            start, stop = self.layout.places[name]
            copy_arrays([(byte_array(found[name]), self.data[start:stop])])
        return found

    def _sources(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[_Entry, _Array]]:
        """The bytes of each tensor, on the host one after the other."""
        for entry in self.layout.entries:
            if entry.same_as is None:
                yield entry, byte_array(host_tensor(tensors[entry.name], f"weight '{entry.name}'"))


@dataclass(frozen=True)
class Version:
    """A version that a delta can build on. Who makes or reads the next one gives it away: its memory is used again.

    Attributes:
        number: The version.
        packed: Its tensors.
        digest: Of these, as the publisher said.
        objects: Its weights that are no tensors.
    """

    number: int
    packed: PackedWeights
    digest: bytes
    objects: dict[str, Any]


def next_version(
    base: Version | None, number: int, weights: Mapping[str, Any], *, anchor: bool
) -> tuple[Version, dict[str, Any], _Array]:
    """Copies weights into a version. Returns it with its header and its bytes, which may alias its memory.

    It is an anchor if ``anchor`` says so, if there is no base or one of another layout, and if a delta is not smaller.

    Raises:
        InvalidTypeError: A tensor that the store does not take, or a name that is no string.
    """
    tensors, objects = _tensors_of(weights)
    layout = Layout.of(tensors)
    delta = None
    if base is None or base.packed.layout != layout:
        packed = PackedWeights(layout)
        packed.fill(tensors)
    elif anchor:
        packed = base.packed
        packed.fill(tensors)
    else:
        packed = base.packed
        delta = packed.replace(tensors)
    version = Version(number, packed, packed.digest(), objects)
    header: dict[str, Any] = {"base": None, "digest": version.digest, "objects": objects}
    if base is None or delta is None or len(delta.data) >= len(packed.data):
        return version, {**header, "layout": layout.plain}, packed.data
    header |= {"base": base.number, "base_digest": base.digest, "kinds": delta.kinds, "sizes": delta.sizes}
    return version, header, delta.data


def read_version(base: Version | None, number: int, header: Any, parts: Sequence[_Array]) -> Version:
    """The version of a header and its bytes. Whether its bytes have its digest is not checked.

    Args:
        base: The version before. An anchor needs none.
        number: The version.
        header: Of `next_version`.
        parts: Its bytes end to end, each (bytes,) uint8. Copied.

    Raises:
        CorruptDataError: They are damaged, or made for another base.
        LostSamplesError: They are made for a version that is not ``base``: there is a gap.
    """
    try:
        digest, objects, data = header["digest"], dict(header["objects"]), np.concatenate(parts)
        if header["base"] is None:
            packed = PackedWeights(Layout.load(header["layout"]), data)
        else:
            if base is None or header["base"] != base.number:
                raise LostSamplesError(
                    f"the weights of version {number} build on version {header['base']}, which is not in the store.",
                    hint="The trainer's next version has all of them.",
                )
            if header["base_digest"] != base.digest:
                raise CorruptDataError(f"the weights of version {number} were made for another version {base.number}.")
            packed = base.packed
            packed.apply(Delta(header["kinds"], header["sizes"], data))
    except DataPlaneError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"the header of version {number} of the weights is damaged: {error!r}") from error
    return Version(number, packed, digest, objects)


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
            if type(value) not in (Tensor, torch.nn.Parameter) or _is_unusual(value):
                value = host_tensor(value, f"publish_weights refused: weight '{name}'")
            tensors[name] = value.detach()
        else:
            objects[name] = value
    return tensors, objects


def _is_unusual(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES or tensor.is_nested or tensor.is_meta


def _in_threads(work: list[Callable[[], None]]) -> None:
    in_threads(work, min(default_copy_threads(), max(1, len(work))))


# --- chunks -----------------------------------------------------------------------------------------------------------


def _difference(new: _Array, old: _Array, unit: np.dtype[Any]) -> tuple[int, bytes]:
    """What a chunk of a delta is, and its bytes; none if it is the chunk itself."""
    changed = _xor(new.view(unit), old.view(unit))
    places = _places(changed)
    if not len(places):
        return _EQUAL, b""
    found = []
    if len(places) < _MOST * len(changed):
        distances = np.diff(places, prepend=-1) - 1
        width = next(each for each in (1, 2, 4) if int(distances.max()) < 1 << 8 * each)
        few = [_planes(distances.astype(f"u{width}")), _planes(changed[places])]
        found.append((width, _compressed(np.concatenate(few))))
    if len(places) >= _FEW * len(changed):
        found.append((_XOR, _compressed(_planes(changed))))
    kind, piece = min(found, key=lambda each: len(each[1]))
    return (kind, piece) if len(piece) < len(new) else (_WHOLE, b"")


def _xor(new: _Array, old: _Array) -> _Array:
    """(n,), with zeros behind its end up to a multiple of 8 bytes."""
    size = -(-new.nbytes // 8) * 8 // new.itemsize
    changed = np.empty(size, dtype=new.dtype)
    np.bitwise_xor(new, old, out=changed[: len(new)])
    changed[len(new) :] = 0
    return changed[: len(new)]


def _places(changed: _Array) -> _Array:
    """The indices of what is not 0. `changed` is of `_xor`."""
    base = changed.base
    assert base is not None
    words = base.view(np.uint64)
    if np.count_nonzero(words) * 16 > len(words):
        return np.flatnonzero(changed)
    each = 8 // changed.itemsize
    places = np.flatnonzero(words)  # several elements at a time, where few of them have changed
    inside = np.flatnonzero(base.reshape(-1, each)[places])
    found: _Array = places[inside // each] * each + inside % each
    return found


def _apply(kind: Any, piece: _Array, target: _Array, width: int) -> None:
    """Changes a chunk in place."""
    if kind == _WHOLE and len(piece) == len(target):
        target[:] = piece
        return
    elements = target.view(f"u{width}")
    if kind == _XOR:
        elements ^= _unplaned(_expanded(piece, target.nbytes, target.nbytes), width)
        return
    if type(kind) is not int or kind not in (1, 2, 4):
        raise CorruptDataError(f"a delta of weights has a chunk of kind {kind!r} and {len(piece)} bytes.")
    found = _expanded(piece, 0, len(elements) * (kind + width))
    count, rest = divmod(len(found), kind + width)
    places = np.cumsum(_unplaned(found[: count * kind], kind).astype(np.int64) + 1) - 1
    if rest or (count and places[-1] >= len(elements)):
        raise CorruptDataError("a delta of weights changes elements that are not there.")
    elements[places] ^= _unplaned(found[count * kind :], width)


def _planes(elements: _Array) -> _Array:
    """The lowest bytes of all elements, then the next ones: equal ones lie together."""
    planes = np.empty((elements.itemsize, len(elements)), dtype=np.uint8)
    for number, plane in enumerate(planes):
        np.copyto(plane, elements >> (8 * number) if number else elements, casting="unsafe")
    return planes.reshape(-1)


def _unplaned(planes: _Array, width: int) -> _Array:
    elements = np.zeros(len(planes) // width, dtype=f"u{width}")
    for number, plane in enumerate(planes.reshape(width, -1)):
        elements |= plane.astype(elements.dtype) << np.array(8 * number, dtype=elements.dtype)
    return elements


def _compressed(data: _Array) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)


def _expanded(piece: _Array, least: int, most: int) -> _Array:
    """The bytes of a frame. Refuses other sizes before it allocates them."""
    try:
        size = zstandard.get_frame_parameters(piece.data).content_size
        if not least <= size <= most:
            raise CorruptDataError(f"a delta of weights has {size} bytes in a chunk. Expected {least} to {most}.")
        reader = zstandard.ZstdDecompressor(max_window_size=2 * _CHUNK_BYTES)
        found = reader.decompress(piece.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"a delta of weights is damaged: {error}") from error
    return np.frombuffer(found, dtype=np.uint8)
