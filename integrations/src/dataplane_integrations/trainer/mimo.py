"""Data parallelism per module, for heterogeneous multimodal models (MIMO).

Each module of such a model (the language model and every encoder) has its own `HyperCommGrid`, and so its own number of
data-parallel ranks. So all ranks that load data read the *same* global micro-batch (`read_columns` with one meta), and
each cuts out the part of its module's data-parallel rank. The parts are contiguous and in the order of the ranks:
Megatron joins the outputs of the encoders in this order for the language model.

Everything here runs in the worker's process, without communication.

Shape legend: ``N`` rows of the global micro-batch, ``n`` images, ``T`` patches of all images together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dataplane_core.batch import BatchedDataDict, SlicedDataDict
from dataplane_core.errors import ConfigError, InvalidRequestError

#: The name of the language model among the modules.
LANGUAGE_MODULE: Final = "language"
#: The key of a batch that holds the encoders' inputs, by module.
MODALITY_INPUTS: Final = "modality_inputs"

_POSITION_IDS: Final = "position_ids"
_PATCHES: Final = "hidden_states"
_GRIDS: Final = "grid_thw"

_Batch = TypeVar("_Batch", bound=Mapping[str, Any])


class ModuleGrid(Protocol):
    """The part of `megatron.core.hyper_comm_grid.HyperCommGrid` that is used here."""

    rank_offset: int
    size: Any  # an integer of numpy's

    def get_pg(self, dims: Any) -> dist.ProcessGroup | None:
        """The group along ``dims`` that this rank is in."""


#: The grids of a model by module name.
ModuleGrids: TypeAlias = Mapping[str, ModuleGrid]


# --- this rank's place ------------------------------------------------------------------------------------------------


def get_megatron_mimo_dp_info(
    cfg: Any, grids: ModuleGrids, *, every_language_stage: bool = False
) -> tuple[int, int, bool, str]:
    """What this rank works on, as arguments of `slice_batch_for_megatron_mimo`.

    Args:
        cfg: The trainer's parallelism config. Not used: the grids have all the information.
        grids: Module name -> grid. Where modules share ranks, pass one of them to ask for it.
        every_language_stage: Whether the inner pipeline stages of the language model need data too. Models whose
            decoder blocks take ``position_ids``, as with M-RoPE, need this.

    Returns:
        Data-parallel rank and size within this rank's module, whether the rank needs data, and the module's name.
        Outside every grid ``(0, 1, False, "language")``. If several modules share the rank, the values of the first
        module, in the order of ``grids``, that needs data here; see `get_megatron_mimo_shared_dp_info` for all.

    Raises:
        ConfigError: The groups ``dp`` and ``pp`` of a grid were not created.
    """
    held = _modules_of_rank(grids)
    loaders = [name for name in held if _needs_data_for_module(held[name], name, every_language_stage)]
    name = next(iter([*loaders, *held]), None)
    if name is None:
        return 0, 1, False, LANGUAGE_MODULE
    return *_coordinate(held[name], name, "dp"), bool(loaders), name


def get_megatron_mimo_sampling_info(
    cfg: Any, grids: ModuleGrids, *, every_language_stage: bool = False
) -> tuple[int, int, bool]:
    """The values for the sampler: ``(0, 1, needs_data)``, since all loading ranks see the same global micro-batch.

    Arguments and errors are those of `get_megatron_mimo_dp_info`.
    """
    return 0, 1, get_megatron_mimo_dp_info(cfg, grids, every_language_stage=every_language_stage)[2]


def get_megatron_mimo_shared_dp_info(grids: ModuleGrids) -> dict[str, tuple[int, int]]:
    """Data-parallel rank and size in each module whose grid contains this rank, for modules that share ranks.

    Args:
        grids: Module name -> grid.

    Returns:
        Module name -> ``(dp_rank, dp_size)``, as `slice_batch_for_megatron_mimo` takes it; empty outside every grid.

    Raises:
        ConfigError: The group ``dp`` of a grid was not created.
    """
    return {name: _coordinate(grid, name, "dp") for name, grid in _modules_of_rank(grids).items()}


def _find_rank_module(grids: ModuleGrids) -> tuple[ModuleGrid, str] | tuple[None, None]:
    """The first grid that contains this rank, and its module; ``(None, None)`` outside every grid."""
    return next(((grid, name) for name, grid in _modules_of_rank(grids).items()), (None, None))


def _needs_data_for_module(grid: ModuleGrid, module_name: str, every_language_stage: bool = False) -> bool:
    """Whether this rank loads data for a module. False if it is not in the grid.

    The language model needs data on its first pipeline stage (token ids) and its last (labels), or on every stage; an
    encoder on its first.

    Raises:
        ConfigError: The grid's group ``pp`` was not created.
    """
    if not _holds_rank(grid):
        return False
    stage, stages = _coordinate(grid, module_name, "pp")
    return stage == 0 or (module_name == LANGUAGE_MODULE and (every_language_stage or stage == stages - 1))


def _modules_of_rank(grids: ModuleGrids) -> dict[str, ModuleGrid]:
    return {name: grid for name, grid in grids.items() if _holds_rank(grid)}


def _holds_rank(grid: ModuleGrid) -> bool:
    return grid.rank_offset <= dist.get_rank() < grid.rank_offset + int(grid.size)


def _coordinate(grid: ModuleGrid, module_name: str, dim: str) -> tuple[int, int]:
    """This rank's coordinate along a dim, and the dim's size; (0, 1) if the grid has no such dim."""
    try:
        group = grid.get_pg([dim])
    except ValueError:  # the grid has no such dim
        return 0, 1
    except KeyError as error:
        raise ConfigError(
            f"the grid of module '{module_name}' has no process group '{dim}'. Expected it to be there.",
            hint=f"Call grid.create_pg(['{dim}']) for every grid, on all ranks and in one order.",
        ) from error
    assert group is not None, "a rank of the grid is in one group along each dim"
    return group.rank(), group.size()


# --- cutting the global micro-batch -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Share:
    """One of ``size`` equal parts."""

    rank: int
    size: int

    def bounds(self, key: str, count: int, what: str) -> tuple[int, int]:
        """Start and end of this part of ``count`` items."""
        if count % self.size:
            raise InvalidRequestError(
                f"slice_batch_for_megatron_mimo refused: '{key}' has {count} {what}, which is not divisible by the "
                f"module's {self.size} data-parallel ranks. Choose a micro-batch that all modules can divide."
            )
        part = count // self.size
        return self.rank * part, (self.rank + 1) * part


def slice_batch_for_megatron_mimo(
    batch: _Batch, dp_rank: int | Mapping[str, tuple[int, int]], dp_size: int | None = None
) -> _Batch | dict[str, Any]:
    """Cuts a global micro-batch to the contiguous part that this rank's module works on.

    - Tensors, dense or jagged, are cut along dim 0. ``position_ids`` of shape (3, N, ...), as for M-RoPE, are cut
      along dim 1.
    - Lists, and the arrays in which object columns are read, are cut in the same way if their length can be divided.
    - Nested dicts are cut in the same way. In a dict with ``hidden_states`` (T, ...), the patches of all images end to
      end, and ``grid_thw`` (n, 3), these two are cut by whole images. All its other values are not changed.
    - Other values (other lists, numpy arrays of numbers, scalars, strings, None, tensors without dims) are not changed.

    Args:
        batch: The global micro-batch. Not changed.
        dp_rank: This rank's data-parallel rank in the module. If modules share ranks: module name ->
            ``(dp_rank, dp_size)``. Then the values under a module's name, in the batch or in its ``modality_inputs``,
            are cut by that module's parallelism, and all others by that of the module ``"language"``.
        dp_size: Number of the module's data-parallel ranks. Omit it if ``dp_rank`` is a mapping.

    Returns:
        The part: a `SlicedDataDict` for a `BatchedDataDict`, else a dict. Its dense tensors are views. If every size is
        1, ``batch`` itself.

    Raises:
        InvalidRequestError: The rows or images are not a multiple of the ranks (names the key); a rank is out of range;
            the parallelism of a module is missing.
    """
    if isinstance(dp_rank, Mapping):
        if dp_size is not None:
            raise InvalidRequestError(
                f"slice_batch_for_megatron_mimo refused: got parallelism by module and dp_size {dp_size}. Expected one "
                "or the other."
            )
        shares = {name: _share(*pair) for name, pair in dp_rank.items()}
        whole = all(share.size == 1 for share in shares.values())
        return batch if whole else _like(batch, _slice_by_module(batch, shares))
    share = _share(dp_rank, dp_size)
    return batch if share.size == 1 else _like(batch, _slice_dict(batch, share, ""))


def _share(rank: int, size: int | None) -> _Share:
    if size is None or size < 1 or not 0 <= rank < size:
        raise InvalidRequestError(
            f"slice_batch_for_megatron_mimo refused: dp_rank {rank} of dp_size {size}. Expected a rank of 0 or more, "
            "below the size."
        )
    return _Share(rank, size)


def _like(batch: Mapping[str, Any], columns: dict[str, Any]) -> Any:
    return SlicedDataDict(columns) if isinstance(batch, BatchedDataDict) else columns


def _slice_by_module(batch: Mapping[str, Any], shares: Mapping[str, _Share]) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for key, value in batch.items():
        if key == MODALITY_INPUTS and isinstance(value, Mapping):
            cut[key] = {
                name: _slice_value(f"{key}.{name}", name, inputs, _share_of(f"{key}.{name}", name, shares))
                for name, inputs in value.items()
            }
        else:
            name = key if key in shares else LANGUAGE_MODULE
            cut[key] = _slice_value(key, key, value, _share_of(key, name, shares))
    return cut


def _share_of(key: str, module_name: str, shares: Mapping[str, _Share]) -> _Share:
    if module_name not in shares:
        raise InvalidRequestError(
            f"slice_batch_for_megatron_mimo refused: '{key}' is of module '{module_name}', but the parallelism given "
            f"is that of {', '.join(map(repr, shares)) or 'no module'}. Expected the modules of this rank, and inputs "
            "of these only.",
            hint="get_megatron_mimo_shared_dp_info(grids) gives the parallelism of all modules that share this rank.",
        )
    return shares[module_name]


def _slice_dict(batch: Mapping[str, Any], share: _Share, path: str) -> dict[str, Any]:
    patches, grids = batch.get(_PATCHES), batch.get(_GRIDS)
    if isinstance(patches, Tensor) and patches.dim() and isinstance(grids, Tensor) and grids.shape[1:] == (3,):
        return {**batch, **_slice_images(patches, grids, share, path)}
    return {key: _slice_value(path + key, key, value, share) for key, value in batch.items()}


def _slice_value(path: str, key: str, value: Any, share: _Share) -> Any:
    """Cuts one value. ``path`` is its name in errors."""
    if share.size == 1:
        return value
    if isinstance(value, Mapping):
        return _like(value, _slice_dict(value, share, f"{path}."))
    if isinstance(value, Tensor) and value.dim():
        if key == _POSITION_IDS and value.dim() >= 3 and value.shape[0] == 3:
            start, end = share.bounds(path, value.shape[1], "rows on dim 1")
            return value[:, start:end]
    elif isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object and value.ndim):
        if len(value) % share.size:  # not a value per row
            return value
    else:
        return value
    column = BatchedDataDict({key: value})  # knows how to cut each kind of column
    return column.slice(*share.bounds(path, column.size, "rows"))[key]


def _slice_images(patches: Tensor, grids: Tensor, share: _Share, path: str) -> dict[str, Tensor]:
    counts = grids.to(torch.int64).prod(dim=1).tolist()
    if len(patches) != sum(counts):
        raise InvalidRequestError(
            f"slice_batch_for_megatron_mimo refused: '{path}{_PATCHES}' has {len(patches)} rows. Expected "
            f"{sum(counts)}, one per patch of '{_GRIDS}'."
        )
    start, end = share.bounds(f"{path}{_GRIDS}", len(grids), "images")
    first, last = sum(counts[:start]), sum(counts[:end])
    return {_PATCHES: patches[first:last], _GRIDS: grids[start:end]}
