"""`SyncRolloutActor`: one call generates a step's rows, writes them, and returns a meta and the driver's small columns.

Runs in the rollout process, on Ray or not. The trainer supplies the rollout itself, which makes message logs.
`flatten_message_logs` makes columns of them.

Shape legend: ``N`` rows (prompts x group size), ``S`` tokens of the longest row, ``P`` tokens of the longest prompt.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dataplane_core.batch import BatchedDataDict, split_message_logs, stack_or_nest
from dataplane_core.codec import as_column
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    INPUT_IDS_FIELD,
    INPUT_LENGTHS_FIELD,
    MULTIMODAL_FIELDS,
    RESPONSE_TOKEN_LENGTHS_FIELD,
    ROUTED_EXPERTS_FIELD,
    TURN_CONTENTS_FIELD,
    TURN_ROLES_FIELD,
)
from dataplane_integrations.attach import DataPlaneSource
from dataplane_integrations.rollout.first_write import DataPlaneRolloutMixin, mint_sample_ids

_TOKENS: Final = "token_ids"
_LOGPROBS: Final = "generation_logprobs"
_MASK: Final = "token_mask"
#: What a turn may have as a list, and the dtype of its tensor, whatever torch's default is.
_OF_LISTS: Final = {_TOKENS: torch.int64, _LOGPROBS: torch.float32, _MASK: torch.int64}
#: Columns of one value per row that a rollout must have; the driver gets them.
_PER_ROW: Final = ("total_reward", "loss_multiplier", "truncated", "length")
#: Columns that the driver gets only if it asks for them.
_OPTIONAL: Final = (TURN_ROLES_FIELD, TURN_CONTENTS_FIELD)


class SyncRolloutActor(DataPlaneRolloutMixin):
    """Generates and writes the rows of a step. A subclass defines `run_rollout`.

    Args:
        policy_generation: The generation engine, or None. Its methods ``snapshot_step_metrics``,
            ``clear_logger_metrics``, ``finish_generation`` and ``get_logger_metrics`` are called where it has them.
        tokenizer: Its ``pad_token_id`` pads.
        task_to_env: Task -> environment, for `run_rollout`.
        master_config: The trainer's config, a mapping or an object. Of its ``policy``,
            ``make_sequence_length_divisible_by`` and ``router_replay["enabled"]`` are read where they are there.
        dp_cfg: The config that the driver connected with, or a client of this process.
    """

    def __init__(
        self,
        policy_generation: Any,
        tokenizer: Any,
        task_to_env: Mapping[str, Any],
        master_config: Any,
        dp_cfg: DataPlaneSource,
    ) -> None:
        self.policy_generation = policy_generation
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.master_config = master_config
        self.setup_data_plane(dp_cfg)

    def run_rollout(
        self, input_batch: BatchedDataDict, task_to_env: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Generates. The subclass defines it.

        Args:
            input_batch: The prompts; each is there once per generation.
            task_to_env: The environments of this call.

        Returns:
            The final batch and the metrics of the rollout. The batch has N rows: ``message_log`` (see
            `flatten_message_logs`), ``length`` (N,), the tokens of each prompt, ``total_reward``, ``loss_multiplier``
            and ``truncated`` (N,), and perhaps parts of the reward, as ``reward/NAME``. Its other columns, also of
            objects, are written too.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define run_rollout(input_batch, task_to_env).")

    def rollout_to_tq(
        self,
        input_batch: BatchedDataDict,
        *,
        partition_id: str,
        group_size: int = 1,
        first_iter: bool = True,
        finish_generation: bool = True,
        task_to_env_override: Mapping[str, Any] | None = None,
        carry_keys: Sequence[str] | None = None,
    ) -> tuple[KVBatchMeta, BatchedDataDict, dict[str, Any], dict[str, Any] | None]:
        """Generates a step's rows, or those of one of its rounds, and writes them in one put.

        While it generates, the client is in the phase ``generate`` (`DataPlaneClient.phase`).

        Args:
            input_batch: The prompts; the ``group_size`` rows of a prompt are adjacent.
            partition_id: The partition of the rows; also the task in the meta.
            group_size: Generations per prompt.
            first_iter: Whether this is the step's first round.
            finish_generation: Let the engine free its memory afterwards.
            task_to_env_override: The environments of this call, instead of the actor's.
            carry_keys: The columns that the driver wants. None: all but ``turn_roles`` and ``turn_contents``.

        Returns:
            Four values: the meta of the rows, whose ids are new in every call; the driver's columns,
            ``total_reward``, ``loss_multiplier``, ``truncated``, ``length``, ``input_lengths`` and
            ``response_token_lengths`` (N,), ``prompt_ids_for_adv`` (N, P), and the parts of the reward; the metrics of
            `run_rollout`, which the meta has too; and the engine's metrics, or None.

        Raises:
            InvalidRequestError: Numbers of rows that do not fit, a carry key that is not there, or a missing column.
        """
        engine = self.policy_generation
        if first_iter:
            _call(engine, "snapshot_step_metrics")
        _call(engine, "clear_logger_metrics")
        try:
            with self._require_dp_client().phase("generate"):
                made, metrics = self.run_rollout(
                    input_batch, self.task_to_env if task_to_env_override is None else task_to_env_override
                )
            meta, carry = self._write(input_batch.size, made, metrics, partition_id, group_size, carry_keys)
        finally:
            if finish_generation:
                _call(engine, "finish_generation")
        return meta, carry, metrics, _call(engine, "get_logger_metrics")

    def shutdown(self) -> None:
        """Detaches from the data plane. Idempotent."""
        self.close_data_plane()

    def _write(
        self,
        num_inputs: int,
        made: Mapping[str, Any],
        metrics: dict[str, Any],
        partition_id: str,
        group_size: int,
        carry_keys: Sequence[str] | None,
    ) -> tuple[KVBatchMeta, BatchedDataDict]:
        """Writes what `run_rollout` has made. Returns the meta and the driver's columns."""
        lacking = [name for name in ("message_log", *_PER_ROW) if name not in made]
        if lacking:
            raise InvalidRequestError(
                f"rollout_to_tq refused: run_rollout returned a batch without {', '.join(lacking)}. Found: "
                f"{', '.join(made)}."
            )
        columns, prompts = flatten_message_logs(
            made["message_log"], made["length"], pad_token_id=self.tokenizer.pad_token_id or 0
        )
        columns["sample_mask"] = made["loss_multiplier"]
        columns["content"] = columns[TURN_CONTENTS_FIELD]  # what trainers log
        others = [name for name in made if name != "message_log" and name not in columns]
        columns.update({name: _column_of(made[name]) for name in others})
        carry = {
            **{name: as_column(f"rollout_to_tq refused: '{name}'", made[name]) for name in _PER_ROW},
            **{name: columns[name] for name in (INPUT_LENGTHS_FIELD, RESPONSE_TOKEN_LENGTHS_FIELD)},
            "prompt_ids_for_adv": prompts,
            **{name: column for name, column in made.items() if name.startswith("reward/")},
        }
        if carry_keys is not None:
            offered = {**carry, **{name: columns[name] for name in _OPTIONAL}}
            missing = [name for name in carry_keys if name not in offered]
            if missing:
                raise InvalidRequestError(
                    f"rollout_to_tq refused: carry_keys {missing} are not there. Found: {', '.join(offered)}."
                )
            carry = {name: offered[name] for name in carry_keys}
        receipt = self._first_write(
            columns,
            sample_ids=self._new_ids(num_inputs, columns.size, group_size),
            partition_id=partition_id,
            carry_fields=(),
            extra_info={"rollout_metrics": metrics},
            task_name=partition_id,
            pad_to_multiple=int(self._policy_option("make_sequence_length_divisible_by") or 1),
            required_fields=(
                [ROUTED_EXPERTS_FIELD] if (self._policy_option("router_replay") or {}).get("enabled") else []
            ),
        )
        return receipt.meta, BatchedDataDict(carry)

    def _new_ids(self, num_inputs: int, num_rows: int, group_size: int) -> list[str]:
        prompts, left = divmod(num_inputs, max(group_size, 1))
        if group_size < 1 or left or not prompts or num_rows % prompts:
            raise InvalidRequestError(
                f"rollout_to_tq refused: {num_inputs} rows of prompts in groups of {group_size} made {num_rows} rows. "
                "Expected whole groups, and as many rows for each prompt."
            )
        return mint_sample_ids([str(uuid.uuid4()) for _ in range(prompts)], num_rows // prompts)

    def _policy_option(self, name: str) -> Any:
        config = self.master_config
        policy = config.get("policy") if isinstance(config, Mapping) else getattr(config, "policy", None)
        return policy.get(name) if isinstance(policy, Mapping) else getattr(policy, name, None)


def _column_of(values: Any) -> Any:
    """What a rollout returned of its rows. Lists that are no column, such as nested ones, are objects."""
    if isinstance(values, list):
        try:
            as_column("a column", values)
        except InvalidTypeError:
            return np.fromiter(values, dtype=object, count=len(values))
    return values


def _call(engine: Any, name: str) -> Any:
    method = getattr(engine, name, None)
    return None if method is None else method()


def flatten_message_logs(
    message_logs: Sequence[Sequence[Mapping[str, Any]]],
    prompt_lengths: Tensor | Sequence[int],
    *,
    pad_token_id: int = 0,
) -> tuple[BatchedDataDict, Tensor]:
    """Makes columns of message logs: the turns of each sample, end to end.

    A turn has ``role``, ``content`` and ``token_ids``; a turn that was generated also has ``generation_logprobs``. It
    may have a ``token_mask`` of its own, such as for tokens that another policy generated. None is as if it were not
    there. Its other tensors have a row per token, except those of `schema.MULTIMODAL_FIELDS`, which have a row per
    patch or image. Values that are not tensors are dropped.

    Args:
        message_logs: Per sample its turns. Not changed.
        prompt_lengths: (N,), the tokens of each prompt. A prompt may have answers of earlier turns in it.
        pad_token_id: What pads token ids.

    Returns:
        The columns, padded: ``input_ids``, ``generation_logprobs`` (0 where nothing was generated), ``token_mask`` (1
        on the tokens that were generated, where the turn does not say it) and the other tensors per token (N, S, ...),
        with zeros (``routed_experts``: -1) for turns that lack them; ``input_lengths`` (N,); multimodal columns,
        jagged; and what `split_message_logs` returns. And the token ids of the prompts (N, P).

    Raises:
        InvalidRequestError: No samples, a turn lacks a key, or a tensor does not have a row per token.
    """
    if not len(message_logs):  # may be an array
        raise InvalidRequestError("flatten_message_logs refused: 0 message logs. Expected at least one sample.")
    columns = BatchedDataDict(split_message_logs(message_logs))
    logs = [[_masked(turn, sample) for turn in log] for sample, log in enumerate(message_logs)]
    empties: dict[str, Tensor] = {
        _TOKENS: torch.zeros(0, dtype=torch.int64, device="cpu"),
        _LOGPROBS: torch.zeros(0, dtype=torch.float32, device="cpu"),
    }
    for turn in (turn for log in logs for turn in log):
        empties.update({name: value[:0] for name, value in turn.items() if isinstance(value, Tensor)})
    for name, empty in empties.items():
        ragged = name in MULTIMODAL_FIELDS
        fill = -1 if name == ROUTED_EXPERTS_FIELD else 0
        rows = [
            torch.cat([empty, *(_part(turn, name, empty, fill, sample, ragged=ragged) for turn in log)])
            for sample, log in enumerate(logs)
        ]
        if ragged:
            columns[name] = stack_or_nest(rows)
        else:
            padding = pad_token_id if name == _TOKENS else fill
            columns[INPUT_IDS_FIELD if name == _TOKENS else name] = pad_sequence(rows, True, padding)
    columns[INPUT_LENGTHS_FIELD] = torch.tensor([sum(len(turn[_TOKENS]) for turn in log) for log in logs], device="cpu")
    prompts = [_prompt(log, int(length)) for log, length in zip(logs, prompt_lengths, strict=True)]
    return columns, pad_sequence(prompts, True, pad_token_id)


def _masked(turn: Mapping[str, Any], sample: int) -> dict[str, Any]:
    """A copy of a turn, with its tokens as a tensor and their mask. Only generated turns have logprobs."""
    made = {name: value for name, value in turn.items() if value is not None}  # as Arrow and others say "not there"
    if _TOKENS not in made:
        raise InvalidRequestError(f"flatten_message_logs refused: a turn of sample {sample} lacks '{_TOKENS}'.")
    for name, dtype in _OF_LISTS.items():
        if name in made:
            of_list = None if hasattr(made[name], "dtype") else dtype  # arrays and tensors keep theirs
            made[name] = torch.as_tensor(made[name], dtype=of_list, device="cpu")
    generated = made["role"] == "assistant" and _LOGPROBS in made
    made.setdefault(_MASK, torch.full_like(made[_TOKENS], int(generated)))
    return made


def _part(turn: Mapping[str, Any], name: str, empty: Tensor, fill: int, sample: int, *, ragged: bool) -> Tensor:
    value = turn.get(name)
    tokens = len(turn[_TOKENS])
    if value is None:
        return empty if ragged else empty.new_full((tokens, *empty.shape[1:]), fill)
    if not ragged and len(value) != tokens:
        raise InvalidRequestError(
            f"flatten_message_logs: '{name}' of a turn of sample {sample} has {len(value)} rows. Expected {tokens}, "
            "one per token."
        )
    part: Tensor = value
    return part


def _prompt(log: Sequence[Mapping[str, Any]], length: int) -> Tensor:
    """The turns that make up the first ``length`` tokens."""
    parts: list[Tensor] = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for turn in log:
        if sum(map(len, parts)) >= length:
            break
        parts.append(turn[_TOKENS])
    return torch.cat(parts)
