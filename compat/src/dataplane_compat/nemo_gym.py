"""NeMo Gym's exact token ids on dataplane: a sink and a source for its ``token_id_capture``.

Each rollout has a partition of its own while its model calls are written. `DataPlaneTokenStore.freeze` finishes it, so
that the store refuses later writes, and makes one ordinary row of the calls in the partition of finished rollouts.
Importing this module does not import NeMo Gym.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import numpy as np
import torch
from tensordict import TensorDict

from dataplane_core import AsyncDataPlaneClient, connect
from dataplane_core.errors import InvalidRequestError, MissingDataError, UnknownPartitionError

if TYPE_CHECKING:
    from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry

__all__ = ["FIELDS", "DataPlaneTokenStore", "token_entries"]

_LENGTHS: Final = {
    "prompt_token_ids": "prompt_lengths",
    "generation_token_ids": "generation_lengths",
    "generation_log_probs": "log_prob_lengths",
}
#: Of a finished rollout.
FIELDS: Final = (*_LENGTHS, *_LENGTHS.values(), "calls")
_STATE: Final = "?"  # the row of a rollout's state. Ids of calls end in a digest, those of intents in "?begun"
_Rows = dict[str, dict[str, Any]]


def token_entries(rows: TensorDict) -> list[list[TokenEntry]]:
    """The model calls of each of N finished rollouts, such as ``client.get_data(meta)`` gives. No call comes first."""
    from nemo_gym.token_id_capture import TokenEntry

    found: list[list[TokenEntry]] = []
    for index, calls in enumerate(rows["calls"].tolist()):
        parts = [rows[name][index].split(rows[of][index].tolist()) for name, of in _LENGTHS.items()]
        arrays = (dict(zip(_LENGTHS, map(torch.Tensor.tolist, call), strict=True)) for call in zip(*parts, strict=True))
        found.append([TokenEntry.model_validate(call | each) for call, each in zip(calls, arrays, strict=True)])
    return found


class DataPlaneTokenStore:
    """A ``TokenSink`` and ``TokenSource`` of NeMo Gym, on any backend with listing, tag filters and cursors.

    Any number of processes may write and read. Methods are coroutines, and do not stop the event loop. They raise what
    NeMo Gym's ``TokenCaptureStore`` raises: `RuntimeError` if the rollout is frozen or retired, `ValueError` if a call
    id is used again with another payload; and what an `AsyncDataPlaneClient` raises.

    A finished rollout of C calls is a row: ``prompt_token_ids``, ``generation_token_ids`` (int64) and
    ``generation_log_probs`` (float64) of all calls one after the other, ``prompt_lengths``, ``generation_lengths`` and
    ``log_prob_lengths`` ``(C,)``, and ``calls``, a list of C dicts with the rest. Its id is the rollout's. Its tags are
    ``snapshot_id``, ``version``, ``incomplete``, ``calls``, and ``input_lengths`` (tokens of the longest call).

    Args:
        config: A config of dataplane, or a file of one. Connects at once, and blocks until it has.
        partition: Of the finished rollouts. A rollout ``r`` is written in the partition ``<partition>/r``.
        tasks: That may claim finished rollouts.
        bootstrap: As for `connect`. False: the store runs already.

    Examples:
        >>> store = DataPlaneTokenStore({"backend": "noop"}, bootstrap=True)
        >>> asyncio.run(store.close())
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str],
        *,
        partition: str = "captures",
        tasks: Sequence[str] = ("train",),
        bootstrap: Any = False,
    ) -> None:
        #: The client that is used. Claims, reads and lists as any other does.
        self.client: Final = AsyncDataPlaneClient(connect(config, bootstrap), threads=4)
        self._partition, self._tasks = partition, list(tasks)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Notes that a call begins. If its entry never comes, the rollout is incomplete."""
        await self._add(rollout_id, f"{model_call_id}?begun", {"begun": model_call_id})

    async def put(self, entry: TokenEntry) -> None:
        """Writes a call. Again with the same payload, it changes nothing."""
        digest, columns = await asyncio.to_thread(_coded, entry)
        # the same payload is the same row, and another payload another row, whoever writes it and when
        rollout_id, call_id, row_id = entry.rollout_id, entry.model_call_id, f"{entry.model_call_id}.{digest}"
        found = await self._add(rollout_id, row_id, {"call": call_id}, columns)
        if any(row.get("call") == call_id and each != row_id for each, row in found.items()):
            await self.mark_incomplete(rollout_id, call_id)
            await self.client.clear_samples([row_id], self._where(rollout_id))
            raise ValueError(f"Model call id {call_id!r} was reused with a different payload for rollout {rollout_id}.")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Notes that a call was lost: the rollout must not be trained on, and earlier snapshots are outdated."""
        await self._look(rollout_id)
        where = self._where(rollout_id)
        await self._set(where, _STATE, incomplete=True, lost=model_call_id, state=uuid4().hex)
        if await self.client.list_consumed(where, "retire"):  # the drop was first
            raise _closed(rollout_id, "retired")
        if (await self.client.list_samples(self._partition, sample_ids=[rollout_id])).size:
            await self._set(self._partition, rollout_id, incomplete=True)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Ends the writing of a rollout, and returns what was written. Again, it returns the same."""
        from nemo_gym.token_id_capture import TokenCaptureSnapshot

        await self._look(rollout_id)
        where = self._where(rollout_id)
        await self.client.finish_partition(where)
        snapshot_id = (await self.client.describe(where, count_rows=False)).info.epoch
        while True:
            found = await self._rows(where)
            state = found[_STATE]
            if "retired" in state:
                await self.client.clear_samples([rollout_id], self._partition)  # a freeze that was late may have put it
                raise _closed(rollout_id, "retired")
            try:
                if "sealed" not in state:
                    await self._seal(rollout_id, snapshot_id, found)
                    continue
                rows = await self.client.get_samples([rollout_id], self._partition, FIELDS)
            except MissingDataError:  # another process has sealed or dropped it in between
                if await self._rows(where) == found:
                    raise
                continue
            incomplete = "incomplete" in state
            version = 2 if incomplete else 1
            if state.get("state") == str(version):
                (entries,) = await asyncio.to_thread(token_entries, rows)
                return TokenCaptureSnapshot(rollout_id, tuple(entries), incomplete, snapshot_id, version)
            await self._set(self._partition, rollout_id, incomplete=incomplete, version=version)
            await self._set(where, _STATE, state=str(version))  # and look again: it may have been marked meanwhile

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Clears a frozen rollout, if it is as in the snapshot. Its late writers are still refused."""
        where = self._where(rollout_id)
        now = {"state": str(version)}
        try:
            if (await self.client.describe(where, count_rows=False)).info.epoch != snapshot_id:
                return False
            # the claim is the condition: one process gets the row of the state, while it has this tag
            taken = await self.client.claim_meta(
                where,  # type: ignore[arg-type] # `wraps` takes the signature of the synchronous client
                "retire",
                [],
                1,
                blocking=False,
                tag_filter=now,
            )
            if not taken.size:  # or a drop of this snapshot was cut off
                same = await self.client.list_samples(where, now)
                if not same.size or not await self.client.list_consumed(where, "retire"):
                    return False
        except UnknownPartitionError:
            return False
        await self._set(where, _STATE, retired=True)
        await self.client.clear_samples([rollout_id], self._partition)
        return True

    async def delete(self, rollout_id: str) -> None:
        """Forgets a rollout. Its id may be used again; its writers must have ended."""
        await self.client.clear_samples(None, self._where(rollout_id))
        if self._partition in await self.client.list_partitions():
            await self.client.clear_samples([rollout_id], self._partition)

    async def close(self) -> None:
        """Closes the client. Idempotent."""
        await self.client.close()

    def _where(self, rollout_id: str) -> str:
        return f"{self._partition}/{rollout_id}"

    async def _set(self, where: str, row_id: str, **tags: Any) -> None:
        await self.client.put_samples([row_id], where, tags=[tags])

    async def _rows(self, where: str) -> _Rows:
        found = await self.client.list_samples(where)
        return dict(zip(found.sample_ids, found.tags or (), strict=True))

    async def _look(self, rollout_id: str) -> _Rows:
        """The tags of a rollout's rows. Opens it if need be."""
        where, found = self._where(rollout_id), _Rows()
        try:
            found = await self._rows(where)
        except UnknownPartitionError:
            for name, tasks in ((self._partition, self._tasks), (where, ["retire"])):
                await self.client.register_partition(name, list(FIELDS), None, tasks, if_exists="keep")
        if _STATE not in found:
            await self._set(where, _STATE, rollout_id=rollout_id)
            found = await self._rows(where)
        if "retired" in found[_STATE]:
            raise _closed(rollout_id, "retired")
        return found

    async def _add(self, rollout_id: str, row_id: str, tags: dict[str, Any], columns: Any = None) -> _Rows:
        """Writes a row, if the rollout is not frozen. Returns the tags of all rows."""
        where, found = self._where(rollout_id), await self._look(rollout_id)
        if "sealed" in found[_STATE]:
            raise _closed(rollout_id, "already frozen")
        if row_id in found:
            return found
        try:
            await self.client.put_samples([row_id], where, columns, tags=[tags])
        except InvalidRequestError as error:
            if (await self.client.describe(where, count_rows=False)).info.num_samples is None:
                raise
            raise _closed(rollout_id, "already frozen") from error
        found = await self._rows(where)
        if "sealed" in found[_STATE]:  # the snapshot has it, or it was there before and was put by two at once
            await self.client.clear_samples([row_id], where)
        return found

    async def _seal(self, rollout_id: str, snapshot_id: str, found: _Rows) -> None:
        """Makes one row of the calls of a finished rollout, and clears them."""
        where = self._where(rollout_id)
        row_ids = [row_id for row_id, tags in found.items() if "call" in tags]
        calls = {found[row_id]["call"] for row_id in row_ids}
        begun = {tags["begun"] for tags in found.values() if "begun" in tags}
        columns, length = _columns([]), 0
        if row_ids:
            rows = await self.client.get_samples(row_ids, where, FIELDS)
            columns, length = await asyncio.to_thread(_joined, rows)
        tags: dict[str, Any] = {"snapshot_id": snapshot_id, "calls": len(row_ids), "input_lengths": length}
        await self.client.put_samples([rollout_id], self._partition, columns, tags=[tags])
        lost = begun - calls or len(calls) < len(row_ids)  # a call that never came, or one with two payloads
        await self._set(where, _STATE, sealed=True, **({"incomplete": True} if lost else {}))
        await self.client.clear_samples([each for each in found if each != _STATE], where)


def _closed(rollout_id: str, how: str) -> RuntimeError:
    return RuntimeError(f"Token capture for rollout {rollout_id} is {how}.")


def _coded(entry: TokenEntry) -> tuple[str, dict[str, Any]]:
    """The digest of a call, and its row."""
    dump = entry.model_dump(mode="json")
    return hashlib.sha256(json.dumps(dump, sort_keys=True).encode()).hexdigest(), _columns([dump])


def _joined(rows: TensorDict) -> tuple[dict[str, Any], int]:
    """Rows as one row, and the length of the longest call."""
    entries = [entry for calls in token_entries(rows) for entry in calls]
    length = max(len(entry.prompt_token_ids) + len(entry.generation_token_ids) for entry in entries)
    return _columns([entry.model_dump(mode="json") for entry in entries]), length


def _columns(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the calls, out of which it takes what has columns of its own."""
    columns: dict[str, Any] = {"calls": np.empty(1, dtype=object)}
    columns["calls"][0] = calls
    for name, lengths in _LENGTHS.items():
        arrays = [call.pop(name) for call in calls]
        dtype = torch.float64 if name == "generation_log_probs" else torch.int64
        columns[name] = [torch.tensor([value for array in arrays for value in array], dtype=dtype, device="cpu")]
        columns[lengths] = [torch.tensor([len(array) for array in arrays], dtype=torch.int64, device="cpu")]
    return columns
