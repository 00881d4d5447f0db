"""Saves on disk: whole or not there, checked when read, without pickle.

`DataPlaneClient.save` and `load` use it, and so does the replay buffer of the integrations.
"""

from dataplane_core import _compiler_marks as _compiler_marks  # before tensordict
from dataplane_core.durable_files import sync_path as sync_folder, write_file
from dataplane_core.saves.blocks import pack_rows, tensor_rows, unpack_rows
from dataplane_core.saves.files import SavedFiles, read_head, write_save

__all__ = [
    "SavedFiles",
    "pack_rows",
    "read_head",
    "sync_folder",
    "tensor_rows",
    "unpack_rows",
    "write_file",
    "write_save",
]
