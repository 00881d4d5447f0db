"""NeMo Gym's exact token ids on dataplane: a sink and a source for its ``token_id_capture``.

While a rollout is written, each of its calls is a row of a partition of its own. `DataPlaneTokenStore.freeze` finishes
that partition, and makes one row of them, or a rollout of as many rows. Importing this module does not import NeMo Gym.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tensordict import TensorDict

from dataplane_core import AsyncDataPlaneClient, connect
from dataplane_core.config import ConfigSource
from dataplane_core.errors import InvalidRequestError, MissingDataError, UnknownPartitionError
from dataplane_core.ledger import group_of
from dataplane_core.schema import ROLLOUT_ROWS_TAG

if TYPE_CHECKING:
    from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry

__all__ = ["FIELDS", "DataPlaneTokenStore", "token_entries"]

_ARRAYS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_LENGTHS: Final = ("prompt_lengths", "generation_lengths", "log_prob_lengths")
#: Of a finished rollout.
FIELDS: Final = (*_ARRAYS, *_LENGTHS, "calls")
_STATE: Final = "?"  # the row of a rollout's state. Ids of calls end in a digest, those of intents in "?begun"


def token_entries(rows: TensorDict) -> list[list[TokenEntry]]:
    """The model calls of each of N rows of finished rollouts, such as ``client.get_data`` gives. None comes first."""
    from nemo_gym.token_id_capture import TokenEntry

    found: list[list[TokenEntry]] = []
    for index, calls in enumerate(rows["calls"].tolist() if len(rows) else []):
        parts = (rows[name][index].split(rows[of][index].tolist()) for name, of in zip(_ARRAYS, _LENGTHS, strict=True))
        arrays = (dict(zip(_ARRAYS, (part.tolist() for part in row), strict=True)) for row in zip(*parts, strict=True))
        found.append([TokenEntry.model_validate(call | each) for call, each in zip(calls, arrays, strict=True)])
    return found


class DataPlaneTokenStore:
    """A ``TokenSink`` and ``TokenSource`` of NeMo Gym, on any backend with listing, tag filters and cursors.

    Any number of processes may write and read. Methods do not stop the event loop. They raise `RuntimeError` if the
    rollout is frozen or retired, `ValueError` if a call id comes again with another payload, and what a client raises.

    A finished rollout of C calls is a row, whose id is the rollout's: ``prompt_token_ids``, ``generation_token_ids``
    (int64) and ``generation_log_probs`` (float64) of all calls one after the other, ``prompt_lengths``,
    ``generation_lengths`` and ``log_prob_lengths`` ``(C,)``, and ``calls``, a list of C dicts with the rest. Its tags
    are ``snapshot_id``, ``version``, ``incomplete``, ``calls``, and ``input_lengths`` (tokens of the longest call).

    With ``rollouts``, each call is such a row, and `freeze` seals them: ``q0_g1/0``, ``q0_g1/1``, ... of the rollout
    ``q0_g1`` of the group ``q0``. Gym's own ids, ``TASK-ROLLOUT``, give ``TASK_gROLLOUT``; freeze one attempt of each.
    A further tag, ``rollout_id``, has Gym's id. A rollout without calls has one row. Claims give whole groups; rows of
    a rollout that is incomplete come with the others, to be masked.

    Args:
        config: A config of dataplane, or a file of one. Connects at once, and blocks until it has.
        partition: Of the finished rollouts. A rollout ``r`` is written in the partition ``<partition>/r``.
        task: That may claim finished rollouts. `register_partition` with ``if_exists="keep"`` adds others.
        bootstrap: As for `connect`. False: the store runs already.
        rollouts: Whether calls stay rows. All stores of a partition are made with the same.
        grpo_group_size: Rollouts of a group. None: `DataPlaneClient.seal` ends groups.

    Examples:
        >>> store = DataPlaneTokenStore({"backend": "noop"}, bootstrap=True)
        >>> asyncio.run(store.close())
    """

    def __init__(
        self,
        config: ConfigSource,
        *,
        partition: str = "captures",
        task: str = "train",
        bootstrap: Any = False,
        rollouts: bool = False,
        grpo_group_size: int | None = None,
    ) -> None:
        #: The client that is used. Claims, reads and lists as any other does.
        self.client: Final = AsyncDataPlaneClient(connect(config, bootstrap), threads=4)
        self._partition, self._task = partition, task
        self._rollouts, self._group_size = rollouts, grpo_group_size

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Notes that a call begins. If its entry never comes, the rollout is incomplete."""
        await self._add(rollout_id, f"{model_call_id}?begun", {"begun": model_call_id})

    async def put(self, entry: TokenEntry) -> None:
        """Writes a call. Again with the same payload, it changes nothing."""
        tags, columns = await asyncio.to_thread(_row, [entry])
        # the same payload is the same row, and another payload another row, whoever writes it and when
        call_id, row_id = entry.model_call_id, f"{entry.model_call_id}.{tags['snapshot_id']}"
        found = await self._add(entry.rollout_id, row_id, {"call": call_id}, columns)
        if any(row.get("call") == call_id and each != row_id for each, row in found.items()):
            await self.mark_incomplete(entry.rollout_id, call_id)
            await self.client.clear_samples([row_id], f"{self._partition}/{entry.rollout_id}")
            raise ValueError(f"Model call id {call_id!r} was reused with a different payload in {entry.rollout_id!r}.")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Notes that a call was lost: the rollout must not be trained on, and its complete snapshot is outdated."""
        where, _ = await self._open(rollout_id)
        await self.client.put_samples([_STATE], where, tags=[{"lost": model_call_id, "version": 2}])
        if await self.client.list_consumed(where, "retire"):  # the drop was first
            raise RuntimeError(f"Token capture for rollout {rollout_id} is retired.")
        ids = self._ids(rollout_id, (await self._open(rollout_id))[1])
        if there := (await self.client.list_samples(self._partition, sample_ids=ids)).sample_ids:
            tags = [{"incomplete": True, "version": 2}] * len(there)
            await self.client.put_samples(there, self._partition, tags=tags)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Ends the writing of a rollout, and returns what was written. Again, it returns the same."""
        from nemo_gym.token_id_capture import TokenCaptureSnapshot

        await self.client.finish_partition((await self._open(rollout_id))[0])
        while True:
            where, found = await self._open(rollout_id)
            state = found[_STATE]
            version = 1 + ("lost" in state)
            try:
                if "sealed" not in state:
                    await self._seal(rollout_id, where, found, version)
                elif state["version"] != version:  # it was marked as another process sealed it
                    await self.mark_incomplete(rollout_id, state["lost"])
                else:
                    rows = await self.client.get_samples(self._ids(rollout_id, found), self._partition, FIELDS)
                    entries = chain.from_iterable(await asyncio.to_thread(token_entries, rows))
                    return TokenCaptureSnapshot(rollout_id, tuple(entries), version == 2, state["sealed"], version)
            except MissingDataError:  # another process has sealed or dropped it in between
                if (await self._open(rollout_id))[1] == found:
                    raise

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Clears a frozen rollout, if it is as in the snapshot. Its late writers are still refused.

        With ``rollouts``, first claim its group: one that lost rows is never given.
        """
        where, now = f"{self._partition}/{rollout_id}", {"sealed": snapshot_id, "version": version}
        with contextlib.suppress(UnknownPartitionError):
            # the claim is the condition: one process gets the row of the state, while it has these tags
            taken = await self.client.claim_meta(where, "retire", [], 1, blocking=False, tag_filter=now)
            same = taken if taken.size else await self.client.list_samples(where, now)
            if taken.size or (same.size and await self.client.list_consumed(where, "retire")):  # or a drop was cut off
                await self.client.put_samples([_STATE], where, tags=[{"retired": True}])
                ids = self._ids(rollout_id, dict(zip(same.sample_ids, same.tags or (), strict=True)))
                await self.client.clear_samples(ids, self._partition)
                return True
        return False

    async def close(self) -> None:
        """Closes the client. Idempotent."""
        await self.client.close()

    async def _open(self, rollout_id: str) -> tuple[str, dict[str, dict[str, Any]]]:
        """The partition in which a rollout is written, registered if need be, and the tags of its rows."""
        where = f"{self._partition}/{rollout_id}"
        if self._rollouts:
            group_of(_rollout(rollout_id))  # refuses an id that is of no group
        try:
            listed = await self.client.list_samples(where)
        except UnknownPartitionError:
            await self._register()
            await self.client.register_partition(where, list(FIELDS), None, ["retire"], if_exists="keep")
            return await self._open(rollout_id)
        found = dict(zip(listed.sample_ids, listed.tags or (), strict=True))
        if _STATE not in found:
            await self.client.put_samples([_STATE], where, tags=[{"rollout_id": rollout_id}])
            return await self._open(rollout_id)
        if "retired" in found[_STATE]:
            ids = self._ids(rollout_id, found)
            await self.client.clear_samples(ids, self._partition)  # a freeze that was late may have put them
            raise RuntimeError(f"Token capture for rollout {rollout_id} is retired.")
        return where, found

    async def _register(self) -> None:
        """Registers the partition of the finished rollouts. Refused if another store did so with other groups."""
        partition = (self._partition, list(FIELDS), None, [self._task], self._group_size)
        await self.client.register_partition(*partition, if_exists="keep", rollouts=self._rollouts)

    async def _add(self, rollout_id: str, row_id: str, tags: dict[str, Any], columns: Any = None) -> dict[str, Any]:
        """Writes a row, if the rollout is not frozen. Returns the tags of all rows."""
        where, found = await self._open(rollout_id)
        if "sealed" in found[_STATE]:
            raise RuntimeError(f"Token capture for rollout {rollout_id} is already frozen.")
        if row_id not in found:
            try:
                await self.client.put_samples([row_id], where, columns, tags=[tags])
            except InvalidRequestError as error:
                if (await self.client.describe(where, count_rows=False)).info.num_samples is None:
                    raise
                raise RuntimeError(f"Token capture for rollout {rollout_id} is already frozen.") from error
            _, found = await self._open(rollout_id)
            if "sealed" in found[_STATE]:  # the snapshot has it, or it was there before and was put by two at once
                await self.client.clear_samples([row_id], where)
        return found

    async def _seal(self, rollout_id: str, where: str, found: dict[str, Any], version: int) -> None:
        """Makes the rows of a finished rollout of its calls, and clears these."""
        calls = {row_id: tags["call"] for row_id, tags in found.items() if "call" in tags}
        lost = {tags["begun"] for tags in found.values() if "begun" in tags} - set(calls.values())
        if version == 1 and (lost or len(set(calls.values())) < len(calls)):  # or a call has two payloads
            await self.mark_incomplete(rollout_id, ", ".join(lost))
            return
        if self._rollouts:
            await self._register()
        rows = await self.client.get_samples(list(calls), where, FIELDS)
        columns, tags = await asyncio.to_thread(self._finished, rollout_id, rows)
        tags = [row | {"version": version, "incomplete": version == 2} for row in tags]
        await self.client.put_samples(self._ids(rollout_id, found), self._partition, columns, tags=tags)
        state = {"sealed": tags[0]["snapshot_id"], "version": version, "rows": len(tags)}
        await self.client.put_samples([_STATE], where, tags=[state])
        await self.client.clear_samples([each for each in found if each != _STATE], where)

    def _ids(self, rollout_id: str, found: dict[str, Any]) -> list[str]:
        """The rows of a finished rollout, by the tags of those that it was written in."""
        if not self._rollouts:
            return [rollout_id]
        num_rows = found[_STATE].get("rows") or max(1, sum("call" in tags for tags in found.values()))
        return [f"{_rollout(rollout_id)}/{number}" for number in range(num_rows)]

    def _finished(self, rollout_id: str, rows: TensorDict) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Columns and tags of the rows of a finished rollout, from the rows of its calls."""
        entries = [entry for calls in token_entries(rows) for entry in calls]
        if not self._rollouts:
            tags, columns = _row(entries)
            return columns, [tags]
        made = [_row([entry]) for entry in entries] or [_row([])]
        digest = hashlib.sha256("".join(tags["snapshot_id"] for tags, _ in made).encode()).hexdigest()
        of_rows = [tags | {"snapshot_id": digest, "rollout_id": rollout_id} for tags, _ in made]
        of_rows[-1][ROLLOUT_ROWS_TAG] = len(made)
        return {name: [cell for _, columns in made for cell in columns[name]] for name in FIELDS}, of_rows


def _rollout(rollout_id: str) -> str:
    """The name of a rollout in a group. Gym's own ids are ``TASK-ROLLOUT``, with ``-aN`` for a further attempt."""
    return rollout_id if "_g" in rollout_id else re.sub(r"-(?=\d+(-a\d+)?$)", "_g", rollout_id)


def _row(entries: list[TokenEntry]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tags and columns of a row of calls."""
    calls = [entry.model_dump(mode="json") for entry in entries]
    digest = hashlib.sha256(json.dumps(calls, sort_keys=True).encode()).hexdigest()
    lengths = [len(entry.prompt_token_ids) + len(entry.generation_token_ids) for entry in entries]
    columns: dict[str, Any] = {"calls": [calls]}
    for name, of, dtype in zip(_ARRAYS, _LENGTHS, (np.int64, np.int64, np.float64), strict=True):
        arrays = [call.pop(name) for call in calls]
        columns[name] = [np.array([value for array in arrays for value in array], dtype)]
        columns[of] = [np.array([len(array) for array in arrays], np.int64)]
    return {"snapshot_id": digest, "calls": len(calls), "input_lengths": max(lengths, default=0)}, columns
