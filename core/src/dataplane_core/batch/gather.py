"""All-gather of columns over a process group, for `BatchedDataDict.all_gather`."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataplane_core.batch.selection import checked_num_rows
from dataplane_core.errors import InvalidRequestError, preview


@dataclass(frozen=True, slots=True)
class _TensorForm:
    """The facts about a tensor that the other ranks need."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def all_gather_columns(columns: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Concatenates the columns of all ranks, in rank order. Collective, and blocks.

    All ranks learn before the first tensor is sent if a rank cannot send its columns, or if ranks disagree. They then
    all raise, and none waits for the others.

    Args:
        columns: Tensors, lists or arrays; the leading size may differ between ranks. A rank may have no columns at all.
        group: The process group; None: the default one. Lists and object arrays are pickled between its ranks.

    Returns:
        The joined columns. Tensors are on the device of this rank's column; on a rank without columns, on the group's
        device.

    Raises:
        InvalidRequestError: On every rank: the ranks disagree on names, dtypes or trailing shapes, or one of them has
            columns of unequal length, or items that cannot be pickled.
    """
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, _describe(columns), group=group)
    faults = [f"rank {rank}: {said}" for rank, said in enumerate(everyone) if isinstance(said, str)]
    if faults:
        raise InvalidRequestError(f"all_gather refused: {'; '.join(faults)}.")
    senders = {rank: said for rank, said in enumerate(everyone) if said}
    # every rank walks the columns in the same order
    names = list(dict.fromkeys(name for said in senders.values() for name in said))
    for name in names:
        _check(name, senders)
    backends = str(dist.get_backend_config(group))
    all_gather = functools.partial(dist.all_gather, group=group)
    joined: dict[str, Any] = {}
    for name in names:
        parts = [said.get(name) for said in everyone]
        known = next(part for part in parts if part is not None)
        if isinstance(known, _TensorForm):
            via = _transport(backends, (part for part in parts if part is not None))
            shapes = [(0, *known.shape[1:]) if part is None else part.shape for part in parts]
            joined[name] = _gather_tensor(columns.get(name), known.dtype, shapes, via, all_gather)
        elif isinstance(known, np.ndarray):
            joined[name] = np.concatenate([part for part in parts if part is not None])
        else:
            joined[name] = [item for part in parts if part is not None for item in part]
    return joined


def _describe(columns: Mapping[str, Any]) -> dict[str, Any] | str:
    """Per column its `_TensorForm`, or the column itself if it is no tensor; or text that says what is wrong."""
    try:
        sizes = {name: checked_num_rows(name, column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            return f"columns differ in length: {sizes}"
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        nested = [name for name, column in tensors.items() if column.is_nested]
        if nested:
            return f"columns {preview(nested)} are nested tensors; expected padded ones: materialize(td, 'padded')"
        unsent = [
            name
            for name, column in tensors.items()
            if column.is_meta or column.layout != torch.strided or column.is_quantized
        ]
        if unsent:
            return f"columns {preview(unsent)} are sparse, quantised or on device 'meta'; expected dense tensors"
        described = {
            name: _TensorForm(column.dtype, tuple(column.shape), column.device.type)
            if isinstance(column, torch.Tensor)
            else column
            for name, column in columns.items()
        }
        # all_gather_object pickles too, but a rank that fails inside it leaves the others waiting
        pickle.dumps(described)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return described


def _check(name: str, senders: Mapping[int, Mapping[str, Any]]) -> None:
    forms: dict[str, list[int]] = {}
    for rank, said in senders.items():
        part = said.get(name)
        if name not in said:
            form = "missing"
        elif isinstance(part, _TensorForm):
            form = f"{part.dtype} with rows of shape {part.shape[1:]}"
        elif isinstance(part, np.ndarray):
            form = f"array of {part.dtype} with rows of shape {part.shape[1:]}"
        else:
            form = type(part).__name__
        forms.setdefault(form, []).append(rank)
    if len(forms) > 1:
        held = "; ".join(f"{form} on ranks {ranks}" for form, ranks in forms.items())
        raise InvalidRequestError(
            f"all_gather refused: column '{name}' is {held}. Expected one dtype and row shape; pad to a common width."
        )


def _transport(backends: str, forms: Iterable[_TensorForm]) -> torch.device:
    """The device for sending a column, the same on all ranks, from a backend config such as ``cpu:gloo,cuda:nccl``."""
    if "nccl" not in backends:
        return torch.device("cpu")
    if "cpu:" in backends and all(form.device_type == "cpu" for form in forms):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _gather_tensor(
    column: torch.Tensor | None,
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    via: torch.device,
    all_gather: Callable[[list[torch.Tensor], torch.Tensor], object],
) -> torch.Tensor:
    """Pads the leading size to the largest, gathers as bytes (so that every dtype works), and removes the padding."""
    home = via if column is None else column.device
    joined = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=home)
    if not joined.numel():
        return joined
    row_bytes = joined.element_size() * math.prod(shapes[0][1:])
    sent = torch.zeros(max(shape[0] for shape in shapes) * row_bytes, dtype=torch.uint8, device=via)
    if column is not None and len(column):
        sent[: len(column) * row_bytes] = _flat(column).view(torch.uint8).to(via)
    received = [torch.empty_like(sent) for _ in shapes]
    all_gather(received, sent)
    joined_bytes = joined.view(-1).view(torch.uint8)
    start = 0
    for part, shape in zip(received, shapes, strict=True):
        end = start + shape[0] * row_bytes
        joined_bytes[start:end] = part[: end - start].to(home)
        start = end
    return joined


def _flat(column: torch.Tensor) -> torch.Tensor:
    """All elements in one dim, without lazy conjugation or negation."""
    plain = column.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,))  # dims of size 1 may have unusual strides
