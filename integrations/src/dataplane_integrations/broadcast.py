"""Broadcast of a `BatchedDataDict` from a replica group's leader to its siblings.

There are two phases. The first broadcasts a small descriptor object: names, dtypes, shapes and all values that are not
tensors; or the leader's failure. The second broadcasts each tensor with `torch.distributed.broadcast` on the group's
device. Tensors are sent as bytes, because no backend supports every dtype (gloo refuses float8). Tensors inside list
and object columns are sent together in one message.

Every rank of the group must call `broadcast_from_leader`, in the same order.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import InvalidTypeError
from dataplane_integrations.errors import ReplicaLeaderError

__all__ = ["broadcast_from_leader", "group_device"]

#: Group rank of the leader: 0 on every replicated axis.
_LEADER: Final = 0
#: In a shared message, tensors start at multiples of this many bytes: the largest element size.
_ALIGN: Final = 16


@dataclass(frozen=True, slots=True)
class _Slot:
    """Placeholder in the descriptor for the tensor of that index."""

    index: int


@dataclass(frozen=True, slots=True)
class _JaggedSlot:
    """Placeholder for a jagged nested tensor."""

    values: int
    offsets: int
    ragged_idx: int
    min_seqlen: int
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class _ObjectArray:
    """Placeholder for an ``np.ndarray(dtype=object)``, whose items may hold tensors."""

    items: list[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str
    together: bool  # sent in one message with the other such tensors of its device

    @property
    def nbytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """The object that the first phase broadcasts."""

    batch_class: type[BatchedDataDict]
    columns: dict[str, Any]
    attributes: dict[str, Any]
    tensors: list[_TensorInfo]


def broadcast_from_leader(
    produce: Callable[[], BatchedDataDict], *, group: dist.ProcessGroup, leader: int = _LEADER
) -> BatchedDataDict:
    """The leader makes a batch, and every rank of the group gets it. Collective over ``group``.

    The siblings block until the leader is done, or until the group's timeout. That timeout must be longer than the data
    plane's ``op_timeout_s``.

    Args:
        produce: Called only on the leader.
        group: The replica group. NCCL broadcasts on this process's CUDA device, gloo on the CPU.
        leader: Group rank of the leader. A result of a pipeline comes from its last rank.

    Returns:
        On the leader, what ``produce`` returned. On siblings, a copy with the same class, column order, dtypes, values,
        jagged containers, object columns and extra attributes such as ``micro_batch_indices``. Each tensor is on the
        same type of device as on the leader.

    Raises:
        ReplicaLeaderError: On siblings, if ``produce`` raised (its error is the cause), or if the leader's process is
            gone. The leader raises the error of ``produce`` itself.
    """
    if dist.get_rank(group) == leader:
        return _send(produce, group)
    return _receive(group, leader)


def group_device(group: dist.ProcessGroup, preferred: str = "cpu") -> torch.device:
    """The device on which ``group`` communicates.

    Args:
        group: A process group.
        preferred: Type of device to choose if the group has several.
    """
    backends = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    # gloo copies CUDA tensors to the host itself: then start from the host
    usable = [kind for kind, backend in backends.items() if backend != "gloo" or kind == "cpu"]
    kind = preferred if preferred in usable else next(iter(usable), "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


# --- the leader ------------------------------------------------------------------------------------------------------


def _send(produce: Callable[[], BatchedDataDict], group: dist.ProcessGroup) -> BatchedDataDict:
    try:
        batch = produce()
        tensors: list[Tensor] = []
        infos: list[_TensorInfo] = []
        descriptor = _Descriptor(
            batch_class=type(batch),
            columns={name: _take_out(column, tensors, infos, top=True) for name, column in batch.data.items()},
            attributes={
                name: _take_out(value, tensors, infos, top=False)
                for name, value in vars(batch).items()
                if name != "data"
            },
            tensors=infos,
        )
        # fails here if a column cannot be pickled, so that the siblings get the error; later they would hang
        pickle.dumps(descriptor)
        messages = _pack_messages(tensors, infos)
        staging = _staging([message.numel() for message, _ in messages], [kind for _, kind in messages], group)
    except BaseException as error:
        _send_failure(error, group)
        raise
    own_rank = dist.get_rank(group)
    _broadcast_object(descriptor, group, own_rank)
    for message, kind in messages:
        _broadcast_bytes(message, kind, staging, group, own_rank, receive=False)
    return batch


def _send_failure(error: BaseException, group: dist.ProcessGroup) -> None:
    failed = f"the leader of its replica group, rank {dist.get_rank()}, failed: {type(error).__name__}: {error}"
    failure = ReplicaLeaderError(failed)
    failure.__cause__ = error  # pickled as its description if it cannot be pickled itself
    try:
        _broadcast_object(failure, group, dist.get_rank(group))
    except Exception as broken:  # the group is broken too: report the first error
        error.add_note(f"The replica group could not be notified: {type(broken).__name__}: {broken}")


def _take_out(value: Any, tensors: list[Tensor], infos: list[_TensorInfo], *, top: bool) -> Any:
    """A copy of ``value`` with placeholders for its tensors, which are appended to ``tensors``."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return _take_out_jagged(value, tensors, infos, top=top)
        if value.layout is not torch.strided or value.device.type == "meta":
            raise InvalidTypeError(
                f"broadcast refused: a tensor of layout {value.layout} on device '{value.device}'. Expected dense or "
                "jagged tensors that hold data."
            )
        plain = value.detach().resolve_conj().resolve_neg()
        tensors.append(plain)
        infos.append(_TensorInfo(plain.dtype, tuple(plain.shape), plain.device.type, together=not top))
        return _Slot(len(tensors) - 1)
    if type(value) is list:
        return [_take_out(item, tensors, infos, top=False) for item in value]
    if type(value) is tuple:
        return tuple(_take_out(item, tensors, infos, top=False) for item in value)
    if type(value) is dict:
        return {key: _take_out(item, tensors, infos, top=False) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == object:
        items = [_take_out(item, tensors, infos, top=False) for item in value.ravel()]
        return _ObjectArray(items, value.shape)
    return value


def _take_out_jagged(value: Tensor, tensors: list[Tensor], infos: list[_TensorInfo], *, top: bool) -> _JaggedSlot:
    nested: Any = value  # torch's stubs do not know nested tensors
    if value.layout is not torch.jagged or nested.lengths() is not None:
        # a strided nested tensor, or a jagged one with holes: join its rows end to end
        nested = torch.nested.as_nested_tensor(list(value.unbind()), layout=torch.jagged)
    lengths = nested.offsets().diff()
    low, high = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)
    values = _take_out(nested.values(), tensors, infos, top=top)
    offsets = _take_out(nested.offsets(), tensors, infos, top=False)
    return _JaggedSlot(values.index, offsets.index, int(nested._ragged_idx), low, high)


def _pack_messages(tensors: Sequence[Tensor], infos: Sequence[_TensorInfo]) -> list[tuple[Tensor, str]]:
    """The byte tensors to broadcast, in the order of `_message_plan`."""
    messages = []
    for indices, kind, size_bytes in _message_plan(infos):
        if len(indices) == 1 and not infos[indices[0]].together:
            messages.append((_as_bytes(tensors[indices[0]]), kind))
            continue
        buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=tensors[indices[0]].device)
        for index, start in zip(indices, _starts(infos[index].nbytes for index in indices), strict=True):
            buffer[start : start + infos[index].nbytes] = _as_bytes(tensors[index]).to(buffer.device)
        messages.append((buffer, kind))
    return messages


# --- the siblings ----------------------------------------------------------------------------------------------------


def _receive(group: dist.ProcessGroup, leader: int) -> BatchedDataDict:
    with _collective_errors_name_the_leader():
        descriptor = _broadcast_object(None, group, leader)
    if isinstance(descriptor, ReplicaLeaderError):
        descriptor.message = f"no batch for rank {dist.get_rank()}: {descriptor.message}"
        raise descriptor
    tensors = _receive_tensors(descriptor.tensors, group, leader)
    columns = {name: _put_back(column, tensors) for name, column in descriptor.columns.items()}
    batch: BatchedDataDict = descriptor.batch_class(columns)
    for name, value in descriptor.attributes.items():
        setattr(batch, name, _put_back(value, tensors))
    return batch


@contextlib.contextmanager
def _collective_errors_name_the_leader() -> Iterator[None]:
    """Turns an error of a collective into a `ReplicaLeaderError`. Only for collectives: gloo raises RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise ReplicaLeaderError(
            f"no batch for rank {dist.get_rank()}: its replica group broke while the leader was to broadcast. "
            "Expected the leader to be alive and the group's timeout to be longer than the leader's fetch.",
            hint="Look at the leader's own error first.",
        ) from error


def _receive_tensors(infos: Sequence[_TensorInfo], group: dist.ProcessGroup, leader: int) -> list[Tensor]:
    plan = _message_plan(infos)
    staging = _staging([size for _, _, size in plan], [kind for _, kind, _ in plan], group)
    tensors: dict[int, Tensor] = {}
    for indices, kind, size_bytes in plan:
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        message = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        with _collective_errors_name_the_leader():
            _broadcast_bytes(message, kind, staging, group, leader, receive=True)
        alone = len(indices) == 1 and not infos[indices[0]].together
        for index, start in zip(indices, _starts(infos[index].nbytes for index in indices), strict=True):
            part = message[start : start + infos[index].nbytes]
            # copy out of a shared message: a view would keep the whole message in memory
            tensors[index] = (part if alone else part.clone()).view(infos[index].dtype).reshape(infos[index].shape)
    return [tensors[index] for index in range(len(infos))]


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, _JaggedSlot):
        return torch.nested.nested_tensor_from_jagged(
            tensors[value.values],
            offsets=tensors[value.offsets],
            jagged_dim=value.ragged_idx,
            min_seqlen=value.min_seqlen,
            max_seqlen=value.max_seqlen,
        )
    if isinstance(value, _ObjectArray):
        array = np.empty(len(value.items), dtype=object)
        for position, item in enumerate(value.items):  # assigning a list would make equal-length items a matrix
            array[position] = _put_back(item, tensors)
        return array.reshape(value.shape)
    if type(value) is list:
        return [_put_back(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple(_put_back(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    return value


# --- both ------------------------------------------------------------------------------------------------------------


def _message_plan(infos: Sequence[_TensorInfo]) -> list[tuple[list[int], str, int]]:
    """The messages: indices of their tensors, type of device, size in bytes. An empty message is not sent."""
    alone = [([i], info.device_type, info.nbytes) for i, info in enumerate(infos) if not info.together]
    together: dict[str, list[int]] = {}
    for i, info in enumerate(infos):
        if info.together:
            together.setdefault(info.device_type, []).append(i)
    return alone + [
        (indices, kind, sum(_round_up(infos[i].nbytes) for i in indices)) for kind, indices in together.items()
    ]


def _starts(sizes: Iterable[int]) -> list[int]:
    starts, position = [], 0
    for size in sizes:
        starts.append(position)
        position += _round_up(size)
    return starts


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat; shares memory where the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _staging(sizes: Sequence[int], kinds: Sequence[str], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """For each type of device that the group does not use: a buffer on the group's device for the largest message."""
    staging: dict[str, Tensor] = {}
    for kind in set(kinds):
        device = group_device(group, kind)
        if device.type != kind:
            largest = max(size for size, of in zip(sizes, kinds, strict=True) if of == kind)
            staging[kind] = torch.empty(largest, dtype=torch.uint8, device=device)
    return staging


def _broadcast_bytes(
    message: Tensor, kind: str, staging: dict[str, Tensor], group: dist.ProcessGroup, leader: int, *, receive: bool
) -> None:
    if not message.numel():
        return
    if kind not in staging:
        dist.broadcast(message, group=group, group_src=leader)
        return
    room = staging[kind][: message.numel()]
    if not receive:
        room.copy_(message)
    dist.broadcast(room, group=group, group_src=leader)
    if receive:
        message.copy_(room)


def _broadcast_object(value: Any, group: dist.ProcessGroup, leader: int) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=leader, device=group_device(group))
    return box[0]
