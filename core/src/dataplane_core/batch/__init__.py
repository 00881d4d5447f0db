"""The data on the trainer's side: `BatchedDataDict`, jagged and padded columns, reads and writes of columns, all-gather
over a process group, message logs.

Trainers and `dataplane_integrations` use it; backends do not.
"""

from dataplane_core import _compiler_marks as _compiler_marks  # before tensordict
from dataplane_core.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from dataplane_core.batch.columns import (
    pack_per_token_field,
    response_from_nested,
    rollouts_of,
    stack_or_nest,
    to_nested_by_length,
)
from dataplane_core.batch.tokens import token_columns
from dataplane_core.batch.transfer import (
    add_message_logs,
    kv_first_write,
    pad_columns,
    read_columns,
    rebuild_message_logs,
    split_message_logs,
    write_columns,
)

__all__ = [
    "BatchedDataDict",
    "SlicedDataDict",
    "add_message_logs",
    "kv_first_write",
    "pack_per_token_field",
    "pad_columns",
    "read_columns",
    "rebuild_message_logs",
    "response_from_nested",
    "rollouts_of",
    "split_message_logs",
    "stack_or_nest",
    "to_nested_by_length",
    "token_columns",
    "write_columns",
]
