"""`DataPlaneRollouts` and `serve` with a trainer that only counts, in one process."""

import threading
from types import SimpleNamespace

import pytest
import torch
from rollouts import DataPlaneRollouts, serve

from dataplane_core import connect
from dataplane_core.client import Feed

STEPS, PROMPTS, ANSWERS = 6, 3, 2
DATASET = [{"prompt": f"prompt {number}"} for number in range(7)]  # two batches an epoch; the last prompt is left out


@pytest.fixture
def client():
    with connect({"backend": "shm_store"}) as client:
        yield client


@pytest.fixture
def trainer():
    """What `DataPlaneRollouts` needs of a GRPOTrainer. The model's only parameter is the number of its update."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    args = SimpleNamespace(
        generation_batch_size=PROMPTS * ANSWERS,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        max_completion_length=4,
        temperature=1.0,
    )
    return SimpleNamespace(
        args=args,
        model=model,
        num_generations=ANSWERS,
        num_iterations=1,
        train_dataset=DATASET,
        state=SimpleNamespace(max_steps=STEPS, global_step=0),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
    )


def asked(batch):
    """The prompts that GRPOTrainer passes for a generation batch."""
    numbers = [(batch * PROMPTS + index) % (2 * PROMPTS) for index in range(PROMPTS)]
    return [f"prompt {number}" for number in numbers for _ in range(ANSWERS)]


def serving(client, answered=lambda: None):
    """A rollout process, in a thread. An answer is the prompt's number and the version of the weights."""
    model = torch.nn.Linear(1, 1, bias=False)

    def generate(prompts, answers, *how):
        answered()
        numbers = [int(prompt.split()[1]) for prompt in prompts for _ in range(answers)]
        return {
            "prompt_ids": [[number] for number in numbers],
            "completion_ids": [[number, int(model.weight.item())] for number in numbers],
            "logprobs": [[-0.5, -0.25] for _ in numbers],
        }

    def run():  # with a client of its own: a step that the trainer marks acks what streams of its client gave
        with connect(client.config, bootstrap=False) as own:
            serve(own, model, generate, worker="w", timeout_s=60)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def train(rollouts, trainer, steps=STEPS):
    """Per batch, the completions."""
    found = []
    for batch in range(steps):
        rows = rollouts(asked(batch), trainer)
        assert rows["logprobs"] == [[-0.5, -0.25]] * len(asked(batch))
        found.append(rows["completion_ids"])
        with torch.no_grad():
            trainer.model.weight += 1
    return found


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_answers_come_in_the_trainers_order_and_no_staler_than_allowed(client, trainer, ahead):
    rollouts = DataPlaneRollouts(client, ahead=ahead, timeout_s=60)
    thread = serving(client)
    with rollouts:
        found = train(rollouts, trainer)
    thread.join(60)
    assert not thread.is_alive(), "the end of the run ends the rollout process"
    for batch, completions in enumerate(found):
        assert [f"prompt {number}" for number, _ in completions] == asked(batch)
        assert all(0 <= batch - version <= ahead for _, version in completions)
    assert rollouts.trained == [
        f"p{number}_g{answer}" for number in range(STEPS * PROMPTS) for answer in range(ANSWERS)
    ]


def test_prompts_in_another_order_are_refused(client, trainer):
    with (
        pytest.raises(ValueError, match=r"generation batch 0 .* Expected shuffle_dataset=False"),
        DataPlaneRollouts(client) as rollouts,
    ):
        rollouts(asked(1), trainer)


def test_a_training_that_fails_ends_the_rollout_processes(client, trainer):
    thread = serving(client)
    rollouts = DataPlaneRollouts(client, timeout_s=60)

    def fail():
        with rollouts:
            train(rollouts, trainer, steps=2)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    thread.join(60)
    assert not thread.is_alive()
    assert rollouts.trained == [f"p{number}_g{answer}" for number in range(PROMPTS) for answer in range(ANSWERS)]


def test_a_process_that_lost_its_lease_goes_on_and_its_prompt_is_answered_again(client, trainer, monkeypatch):
    """As if it had been stopped for longer than its lease."""
    claimed, calls = [], []
    take = Feed.next

    def noted(feed):
        item = take(feed)
        if item is not None and item.meta.partition_id == "prompts":
            claimed.append(item.meta)
        return item

    monkeypatch.setattr(Feed, "next", noted)

    def lose_the_second_claim():
        calls.append(len(claimed))
        if len(calls) == 2:
            client.nack(claimed[-1])

    thread = serving(client, lose_the_second_claim)
    with DataPlaneRollouts(client, timeout_s=60) as rollouts:
        train(rollouts, trainer)
    thread.join(60)
    assert not thread.is_alive()
    assert len(calls) == STEPS * PROMPTS + 1
    assert len(rollouts.trained) == len(set(rollouts.trained)) == STEPS * PROMPTS * ANSWERS
