"""Whether the parts of a command fit together. A host that reads commands from bytes checks them before it runs them.

The client checks the same before it sends anything, so a command that fails here was damaged, or made by another
program. Without the check, it could leave the ledger in a state in which the calls of other clients fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger import commands
from dataplane_core.spec import Command, check_tag_filter

#: The most payload bytes of a put, data-parallel ranks of a claim, and ids.
_MOST_BYTES: Final = 1 << 50
_MOST_RANKS: Final = 1 << 20
_MOST_IDS: Final = 1 << 128
#: The most characters of the id of a request.
_MOST_CHARACTERS: Final = 64


def check_command(command: Command[Any]) -> None:
    """Refuses a command whose parts do not fit together. The types of its fields must be right.

    Raises:
        InvalidRequestError: It cannot be run.
    """
    match command:
        case commands.RegisterRequest():
            _expect(command, command.num_samples is None or command.num_samples >= 0, "num_samples")
            _expect(command, command.grpo_group_size is None or command.grpo_group_size >= 1, "grpo_group_size")
        case commands.BeginPut():
            _check_put(command)
        case commands.CommitPut() | commands.AbortPut():
            _expect(command, 0 <= command.write_id < _MOST_IDS, "write_id")
        case commands.WaitForRoom():
            _expect(command, 0 <= command.size_bytes <= _MOST_BYTES, "size_bytes")
            _expect(command, not math.isnan(command.wait_s), "wait_s")
        case commands.PutTags():
            _check_rows(command, command.sample_ids, command.tags)
            _check_request(command, command.request_id, command.left_s)
        case commands.Locate():
            _expect(command, len(command.fields) > 0, "fields")
        case commands.ListRequest():
            check_tag_filter(command.tag_filter)
        case commands.InspectRequest():
            for question in command.questions:
                check_tag_filter(question.tag_filter)
        case commands.ClaimRequest():
            _check_claim(command)
        case commands.SettleRequest():
            _expect(command, len(command.sample_ids) == len(command.lease_tokens), "lease_tokens")
            _check_request(command, command.request_id, command.left_s)
            if isinstance(command, commands.RenewRequest):
                _expect(command, math.isfinite(command.lease_s) and command.lease_s > 0, "lease_s")
        case commands.AnnounceRequest():
            _expect(command, math.isfinite(command.ttl_s), "ttl_s")


def _check_put(put: commands.BeginPut) -> None:
    _check_rows(put, put.sample_ids, put.sample_ids if put.tags is None else put.tags)
    names = [name for write in put.writes for name in write.fields]
    _expect(put, len(names) == len(put.specs) and put.specs.keys() == set(names), "writes")
    for write in put.writes:
        of = range(len(put.sample_ids)) if write.positions is None else write.positions
        fit = len(of) == len(put.sample_ids) and set(of) == set(range(len(write.row_bytes)))
        _expect(put, fit and len(write.fields) > 0 and min(write.row_bytes, default=0) >= 0, "writes")
    _expect(put, put.size_bytes <= _MOST_BYTES, "writes")
    _expect(put, put.write_id is None or 0 <= put.write_id < _MOST_IDS - put.num_ids, "write_id")
    _check_request(put, put.request_id, put.ttl_s, "ttl_s")


def _check_claim(claim: commands.ClaimRequest) -> None:
    check_tag_filter(claim.tag_filter)
    _expect(claim, claim.batch_size >= 1, "batch_size")
    _expect(claim, claim.lease_s is None or (math.isfinite(claim.lease_s) and claim.lease_s > 0), "lease_s")
    _expect(claim, claim.dp_size is None or 1 <= claim.dp_size <= _MOST_RANKS, "dp_size")
    _expect(claim, claim.dp_rank is None or 0 <= claim.dp_rank < (claim.dp_size or _MOST_RANKS), "dp_rank")
    _expect(claim, claim.sampler != "balanced" or None not in (claim.dp_rank, claim.dp_size), "dp_rank")


def _check_rows(command: Command[Any], sample_ids: Sequence[str], aligned: Sequence[Any]) -> None:
    _expect(command, len(set(sample_ids)) == len(sample_ids) == len(aligned), "sample_ids")


def _check_request(command: Command[Any], request_id: str | None, left_s: float, name: str = "left_s") -> None:
    _expect(command, request_id is None or len(request_id) <= _MOST_CHARACTERS, "request_id")
    _expect(command, math.isfinite(left_s), name)


def _expect(command: Command[Any], good: bool, name: str) -> None:
    if not good:
        raise InvalidRequestError(
            f"{command.op} refused: its {name} cannot be right.",
            hint="The command was damaged, or another program made it.",
        )
