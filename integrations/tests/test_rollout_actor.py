"""The rollout actor: one call from prompts to written rows, with message logs made into columns."""

from types import SimpleNamespace

import pytest
import torch

from dataplane_core import BatchedDataDict
from dataplane_core.batch import read_columns, rebuild_message_logs
from dataplane_core.errors import ClientClosedError, InvalidRequestError
from dataplane_core.ledger import group_of
from dataplane_integrations.rollout import SyncRolloutActor, flatten_message_logs
from dataplane_testkit._timing import STARTS_S, eventually


def turn(role, *tokens, **more):
    made = {"role": role, "content": f"{role} {tokens}", "token_ids": torch.tensor(tokens)}
    if "logprobs" in more:
        made["generation_logprobs"] = torch.tensor(more.pop("logprobs"))
    return {**made, **more}


#: The prompt of the second has an answer of an earlier turn; the first calls a tool, and answers again.
LOGS = [
    [turn("user", 1, 2), turn("assistant", 3, logprobs=[-0.5]), turn("tool", 4), turn("assistant", 5, logprobs=[-0.1])],
    [turn("user", 6), turn("assistant", 7, 8), turn("user", 9), turn("assistant", 10, logprobs=[-0.2])],
]


def test_turns_are_joined_to_columns_and_only_what_was_generated_is_trained_on():
    columns, prompts = flatten_message_logs(LOGS, torch.tensor([2, 4]), pad_token_id=99)
    assert columns["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert columns["input_lengths"].tolist() == [5, 5]
    assert columns["token_mask"].tolist() == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    assert torch.equal(
        columns["generation_logprobs"], torch.tensor([[0, 0, -0.5, 0, -0.1], [0, 0, 0, 0, -0.2]], dtype=torch.float32)
    )
    assert prompts.tolist() == [[1, 2, 99, 99], [6, 7, 8, 9]]
    assert columns["turn_lengths"] == [[2, 1, 1, 1], [1, 2, 1, 1]]
    assert columns["response_token_lengths"].tolist() == [1, 2]
    assert "token_mask" not in LOGS[0][0], "the logs themselves are not changed"
    with pytest.raises(InvalidRequestError, match="0 message logs"):
        flatten_message_logs([], [])
    with pytest.raises(InvalidRequestError, match="a turn of sample 1 lacks 'token_ids'"):
        flatten_message_logs([LOGS[0], [{"role": "user", "content": "hi"}]], [2, 0])


def test_none_in_a_turn_is_as_if_it_were_not_there_and_its_own_mask_stays():
    """As logs are that went through Arrow, where each turn has all keys."""
    keys = dict.fromkeys(("generation_logprobs", "routed_experts", "token_mask", "tool_calls"))
    logs = [[keys | each for each in log] for log in LOGS]
    logs[0][3]["token_mask"] = [0]  # another policy generated it
    columns, _ = flatten_message_logs(logs, [2, 4])
    assert columns["token_mask"].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert "routed_experts" not in columns
    with pytest.raises(InvalidRequestError, match="a turn of sample 0 lacks 'token_ids'"):
        flatten_message_logs([[turn("user", 1) | {"token_ids": None}]], [1])


def test_further_tensors_of_turns_go_along_per_token_or_per_image():
    experts = torch.ones(1, 2, 3, dtype=torch.int8)
    images = torch.rand(4, 6)
    logs = [
        [turn("user", 1, pixel_values=images, note="x"), turn("assistant", 2, logprobs=[-1.0], routed_experts=experts)],
        [turn("user", 3, 4, 5), turn("assistant", 6, logprobs=[-1.0], weight=torch.tensor([0.5]))],
    ]
    columns, _ = flatten_message_logs(logs, [1, 3])
    assert columns["routed_experts"].shape == (2, 4, 2, 3)
    assert columns["routed_experts"].dtype == torch.int8
    assert columns["routed_experts"][:, :, 0, 0].tolist() == [[-1, 1, -1, -1], [-1, -1, -1, -1]]
    assert columns["weight"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0.5]]
    patches = columns["pixel_values"].unbind()
    assert torch.equal(patches[0], images)
    assert patches[1].shape == (0, 6)
    assert "note" not in columns
    logs[1][1]["weight"] = torch.ones(2)
    with pytest.raises(InvalidRequestError, match=r"'weight' of a turn of sample 1 has 2 rows. Expected 1"):
        flatten_message_logs(logs, [1, 3])


class Engine:
    def __init__(self):
        self.calls = []
        self.clear_logger_metrics = lambda: self.calls.append("clear")
        self.snapshot_step_metrics = lambda: self.calls.append("snapshot")
        self.finish_generation = lambda: self.calls.append("finish")
        self.get_logger_metrics = lambda: {"calls": list(self.calls)}


class Rollouts(SyncRolloutActor):
    def run_rollout(self, input_batch, task_to_env):
        made = {
            "message_log": LOGS,
            "length": torch.tensor([2, 4]),
            "total_reward": torch.tensor([1.0, 0.0]),
            "reward/format": torch.tensor([0.5, 0.5]),
            "loss_multiplier": torch.ones(2),
            "truncated": [False, True],
            "boxes": [[[1, 2], [3]], [[4]]],
        }
        return BatchedDataDict(made), {"environments": list(task_to_env)}


@pytest.fixture
def rollouts(client):
    client.register_partition("train", ["input_ids"], None, ["train"], grpo_group_size=2)
    config = {"policy": {"make_sequence_length_divisible_by": 8}}
    tokenizer = SimpleNamespace(pad_token_id=99)
    return Rollouts(
        policy_generation=Engine(), tokenizer=tokenizer, task_to_env={"math": None}, master_config=config, dp_cfg=client
    )


PROMPTS = BatchedDataDict(idx=[0, 0])


def test_one_call_writes_the_rows_and_returns_meta_carry_and_metrics(rollouts, client):
    meta, carry, metrics, engine = rollouts.rollout_to_tq(PROMPTS, partition_id="train", group_size=2)
    assert client.metrics.snapshot()["operations"]["put_samples"]["calls"] == 1
    assert len({group_of(sample_id) for sample_id in meta.sample_ids}) == 1
    assert (meta.task_name, meta.sequence_lengths, meta.extra_info["pad_to_multiple"]) == ("train", [5, 5], 8)
    assert meta.extra_info["rollout_metrics"] == metrics == {"environments": ["math"]}
    assert engine == {"calls": ["snapshot", "clear", "finish"]}
    assert isinstance(carry, BatchedDataDict)
    assert {name: column.tolist() for name, column in carry.items()} == {
        "total_reward": [1.0, 0.0],
        "loss_multiplier": [1.0, 1.0],
        "truncated": [False, True],
        "length": [2, 4],
        "input_lengths": [5, 5],
        "response_token_lengths": [1, 2],
        "prompt_ids_for_adv": [[1, 2, 99, 99], [6, 7, 8, 9]],
        "reward/format": [0.5, 0.5],
    }
    read = read_columns(client, meta, ["content", "boxes"])
    assert read["content"].tolist() == [[turn["content"] for turn in log] for log in LOGS]
    assert read["boxes"].tolist() == [[[1, 2], [3]], [[4]]]
    names = ["input_ids", "turn_lengths", "turn_roles", "turn_contents"]
    logs = rebuild_message_logs(read_columns(client, meta, names))
    assert [[turn["token_ids"].tolist() for turn in log] for log in logs] == [
        [turn["token_ids"].tolist() for turn in log] for log in LOGS
    ]
    assert client.get_data(meta, ["sample_mask"])["sample_mask"].tolist() == [1.0, 1.0]


def test_while_it_generates_the_client_says_so_and_a_later_round_has_what_it_asks_for(rollouts, client):
    generate = rollouts.run_rollout

    def told():
        return [phase.name for each in client.list_clients() for phase in each.phases]

    def run_rollout(*arguments):
        eventually(lambda: told() == ["generate"], STARTS_S, "a phase that is announced")
        return generate(*arguments)

    rollouts.run_rollout = run_rollout
    first = rollouts.rollout_to_tq(PROMPTS, partition_id="train", group_size=2)[0]
    meta, carry, metrics, engine = rollouts.rollout_to_tq(
        PROMPTS,
        partition_id="train",
        group_size=2,
        first_iter=False,
        finish_generation=False,
        task_to_env_override={"validation": None},
        carry_keys=["total_reward", "turn_roles"],
    )
    assert not set(first.sample_ids) & set(meta.sample_ids)
    assert engine == {"calls": ["snapshot", "clear", "finish", "clear"]}
    assert metrics == {"environments": ["validation"]}
    assert list(carry) == ["total_reward", "turn_roles"]
    assert list(carry["turn_roles"][1]) == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("lacks", ["message_log", "length", "total_reward", "loss_multiplier", "truncated"])
def test_a_rollout_that_lacks_a_column_is_refused_and_the_engine_still_frees_its_memory(rollouts, client, lacks):
    made, metrics = rollouts.run_rollout(PROMPTS, {})
    del made[lacks]
    rollouts.run_rollout = lambda *_: (made, metrics)
    with pytest.raises(InvalidRequestError, match=f"run_rollout returned a batch without {lacks}"):
        rollouts.rollout_to_tq(PROMPTS, partition_id="train", group_size=2)
    assert rollouts.policy_generation.calls == ["snapshot", "clear", "finish"]
    assert client.list_samples("train").size == 0


def test_what_does_not_fit_is_refused_and_nothing_is_written(rollouts, client):
    for options, said in [
        ({"group_size": 3}, "2 rows of prompts in groups of 3 made 2 rows"),
        ({"group_size": 2, "carry_keys": ["nothing"]}, r"carry_keys \['nothing'\] are not there. Found: total_reward"),
    ]:
        with pytest.raises(InvalidRequestError, match=said):
            rollouts.rollout_to_tq(PROMPTS, partition_id="train", **options)
    rollouts.master_config = SimpleNamespace(policy={"router_replay": {"enabled": True}})
    with pytest.raises(InvalidRequestError, match="no 'routed_experts', which is required"):
        rollouts.rollout_to_tq(PROMPTS, partition_id="train", group_size=2)
    assert client.list_samples("train").size == 0
    rollouts.shutdown()
    with pytest.raises(ClientClosedError):
        rollouts.rollout_to_tq(PROMPTS, partition_id="train", group_size=2)
