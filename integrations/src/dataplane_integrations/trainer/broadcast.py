"""Broadcast of a value, such as a batch, from a replica group's leader to its siblings.

There are two phases. The first broadcasts a small descriptor object: the value pickled without its tensors, and their
dtypes and shapes; or the leader's failure. The second broadcasts the bytes of all tensors, those inside list and object
columns too, with `torch.distributed.broadcast` on the group's device, in pieces of at most 4 MiB. They are sent as
bytes, because no backend supports every dtype (gloo refuses float8). Integers on the host go in the narrowest dtype
that holds them (`dataplane_core.codec.narrowed`); every rank has the dtype that the leader had.

Every rank of the group must call `broadcast_from_leader`, in the same order.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dataplane_core.codec import narrowed, widened
from dataplane_core.errors import InvalidTypeError
from dataplane_integrations.errors import ReplicaLeaderError, noted_on

#: Large enough that the time of a broadcast is that of its bytes. Small, because a GPU that communicates for tensors on
#: the host has room for a piece.
_PIECE_BYTES: Final = 4 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    dtype: torch.dtype
    sent_as: torch.dtype  # the same, or a narrower one
    shape: tuple[int, ...]
    device_type: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.sent_as.itemsize


def broadcast_from_leader(produce: Callable[[], _T], *, group: dist.ProcessGroup, leader: int = 0) -> _T:
    """The leader makes a value, and every rank of the group gets it. Collective over ``group``.

    The siblings block until the leader is done, or until the group's timeout. That timeout must be longer than the data
    plane's ``op_timeout_s``.

    Args:
        produce: Called only on the leader.
        group: The replica group. NCCL broadcasts on this process's CUDA device, gloo on the CPU.
        leader: Group rank of the leader. A result of a pipeline comes from its last rank.

    Returns:
        On the leader, what ``produce`` returned. On siblings, a copy. Batches in it have the same class, column order,
        dtypes, values, jagged containers, object columns and extra attributes such as ``micro_batch_indices``. Each
        tensor is on the same type of device as on the leader.

    Raises:
        ReplicaLeaderError: On siblings, if ``produce`` raised (its error is the cause), or if the leader's process is
            gone. The leader raises the error of ``produce`` itself.
    """
    if dist.get_rank(group) == leader:
        return _send(produce, group)
    received: _T = _receive(group, leader)
    return received


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
    return _own_device(kind)


# --- the leader ------------------------------------------------------------------------------------------------------


def _send(produce: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    try:
        value = produce()
        # whatever cannot be sent fails here, so that the siblings get the error; later they would hang
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(value)
        infos, contents = [], []
        for tensor in pickler.tensors:
            sent = narrowed(tensor.contiguous()) if tensor.device.type == "cpu" else tensor.contiguous()
            infos.append(_TensorInfo(tensor.dtype, sent.dtype, tuple(tensor.shape), tensor.device.type))
            contents.append(sent.reshape(-1).view(torch.uint8))  # shares its memory
    except BaseException as error:
        _send_failure(error, group)
        raise
    own_rank = dist.get_rank(group)
    _broadcast_object((pickled.getvalue(), infos), group, own_rank)
    _broadcast_contents(contents, group, own_rank, receive=False)
    return value


def _send_failure(error: BaseException, group: dist.ProcessGroup) -> None:
    failed = f"the leader of its replica group, rank {dist.get_rank()}, failed: {type(error).__name__}: {error}"
    failure = ReplicaLeaderError(failed)
    failure.__cause__ = error  # pickled as its description if it cannot be pickled itself
    with noted_on(error, "The replica group could not be notified"):  # it may be broken too
        _broadcast_object(failure, group, dist.get_rank(group))


class _Pickler(pickle.Pickler):
    """Pickles a value with numbers in place of its tensors, wherever they are in it.

    Attributes:
        tensors: The tensors. One that columns share, such as the offsets of jagged columns, is there once.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """None for what is pickled itself; what stands for a tensor: its number, or for a jagged one its parts."""
        if not isinstance(obj, Tensor):
            return None
        if obj.is_nested:
            return self._parts_of_jagged(obj)
        if obj.layout is not torch.strided or obj.device.type == "meta":
            raise InvalidTypeError(
                f"broadcast refused: a tensor of layout {obj.layout} on device '{obj.device}'. Expected dense or "
                "jagged tensors that hold data."
            )
        tensor = obj.detach().resolve_conj().resolve_neg()
        # by memory, not by identity: each access of `offsets` makes a new tensor of the same memory
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if same not in self._numbers:
            self._numbers[same] = len(self.tensors)
            self.tensors.append(tensor)  # keeps its memory from being used again
        return self._numbers[same]

    def _parts_of_jagged(self, tensor: Tensor) -> tuple[int, ...]:
        nested: Any = tensor  # torch's stubs do not know nested tensors
        if tensor.layout is not torch.jagged or nested.lengths() is not None:
            # a strided nested tensor, or a jagged one with holes: join its rows end to end
            nested = torch.nested.as_nested_tensor(list(tensor.unbind()), layout=torch.jagged)
        lengths = nested.offsets().diff()
        low, high = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)
        values, offsets = self.persistent_id(nested.values()), self.persistent_id(nested.offsets())
        return values, offsets, int(nested._ragged_idx), low, high


# --- the siblings ----------------------------------------------------------------------------------------------------


def _receive(group: dist.ProcessGroup, leader: int) -> Any:
    with _collective_errors_name_the_leader():
        descriptor = _broadcast_object(None, group, leader)
    if isinstance(descriptor, ReplicaLeaderError):
        descriptor.message = f"no batch for rank {dist.get_rank()}: {descriptor.message}"
        raise descriptor
    infos: list[_TensorInfo]
    pickled, infos = descriptor
    contents = [torch.empty(info.nbytes, dtype=torch.uint8, device=_own_device(info.device_type)) for info in infos]
    _broadcast_contents(contents, group, leader, receive=True)
    tensors = [
        widened(content.view(info.sent_as).reshape(info.shape), info.dtype)
        for content, info in zip(contents, infos, strict=True)
    ]
    return _Unpickler(pickled, tensors).load()


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


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote, with the tensors in their places."""

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        """The tensor that a number or the parts of a jagged tensor stand for."""
        if isinstance(pid, int):
            return self._tensors[pid]
        values, offsets, ragged_idx, low, high = pid
        return torch.nested.nested_tensor_from_jagged(
            self._tensors[values],
            offsets=self._tensors[offsets],
            jagged_dim=ragged_idx,
            min_seqlen=low,
            max_seqlen=high,
        )


# --- both ------------------------------------------------------------------------------------------------------------


def _broadcast_contents(contents: Sequence[Tensor], group: dist.ProcessGroup, leader: int, *, receive: bool) -> None:
    """Broadcasts byte tensors, in place on the siblings. Empty tensors are not sent."""
    for content in filter(len, contents):
        device = group_device(group, content.device.type)
        for piece in torch.split(content, _PIECE_BYTES):
            message = piece.to(device)  # the piece itself, if it is there
            with _collective_errors_name_the_leader() if receive else contextlib.nullcontext():
                dist.broadcast(message, group=group, group_src=leader)
            if receive and message is not piece:
                piece.copy_(message)


def _own_device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _broadcast_object(value: Any, group: dist.ProcessGroup, leader: int) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=leader, device=group_device(group))
    return box[0]
