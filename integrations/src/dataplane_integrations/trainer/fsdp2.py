"""FSDP2: a rank's coordinates and its replica group, from the names of the dims of a `DeviceMesh`.

There may be several data axes, as in ``(dp_replicate, dp_shard, tp)``.
"""

from __future__ import annotations

from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataplane_core.errors import ConfigError, UnsupportedOperationError
from dataplane_integrations.attach import DataPlaneSource
from dataplane_integrations.trainer.worker import DataPlaneWorkerMixin

_SHORT_NAMES: Final = {"cp": "context_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel"}
_REPLICATED: Final = _SHORT_NAMES | {name: name for name in _SHORT_NAMES.values()}


class FSDP2DataPlaneMixin(DataPlaneWorkerMixin):
    """`DataPlaneWorkerMixin` for a worker whose attribute ``device_mesh`` or ``mesh`` holds its `DeviceMesh`."""

    def setup_data_plane(self, cfg: DataPlaneSource) -> None:
        """Attaches. If the mesh exists, first makes the replica group; it is then collective over the mesh."""
        if self._find_mesh() is not None:
            self._get_replica_group()
        super().setup_data_plane(cfg)  # may fail on one rank: no other rank waits for it by now

    def _find_mesh(self) -> DeviceMesh | None:
        mesh = getattr(self, "device_mesh", None)
        mesh = getattr(self, "mesh", None) if mesh is None else mesh
        return mesh if isinstance(mesh, DeviceMesh) else None

    def _require_mesh(self) -> DeviceMesh:
        mesh = self._find_mesh()
        if mesh is None:
            raise UnsupportedOperationError(
                f"{type(self).__name__} has no DeviceMesh. Expected one in its attribute 'device_mesh' or 'mesh' "
                "before the first fetch.",
                hint="Call init_device_mesh(..., mesh_dim_names=('dp', 'cp', 'tp')) first.",
            )
        return mesh

    def _local_coords(self) -> dict[str, int]:
        """``data_parallel``, one number for all data axes together, and the replicated axes that the mesh has.

        Raises:
            ConfigError: The mesh has no names, or a name that is not known.
        """
        mesh = self._require_mesh()
        data, replicated = _split_axes(mesh)
        coords = {"data_parallel": 0}
        for axis in data:
            coords["data_parallel"] = coords["data_parallel"] * mesh[axis].size() + mesh.get_local_rank(axis)
        coords.update({_REPLICATED[axis]: mesh.get_local_rank(axis) for axis in replicated})
        return coords

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        """If several replicated axes are larger than 1, the first call makes the group: collective over the mesh."""
        mesh = self._require_mesh()
        large = tuple(axis for axis in _split_axes(mesh)[1] if mesh[axis].size() > 1)
        if not large:
            return None
        if len(large) == 1:
            return mesh.get_group(large[0])
        flat = mesh[large]._flatten("dataplane_" + "_".join(large))  # torch has no public method for this
        return flat.get_group()


def _split_axes(mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    """The names of the data axes and of the replicated axes, in the mesh's order."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(
            "DeviceMesh refused: its dims have no names. Expected mesh_dim_names such as ('dp', 'cp', 'tp')."
        )
    unknown = [name for name in names if name not in _REPLICATED and not name.startswith(("dp", "data_parallel"))]
    if unknown:
        raise ConfigError(
            f"DeviceMesh refused: the dim '{unknown[0]}' of {names} says neither whether its ranks see the same rows "
            f"nor whether they see others. Expected names that begin with 'dp', or {', '.join(_REPLICATED)}."
        )
    return [name for name in names if name not in _REPLICATED], [name for name in names if name in _REPLICATED]
