"""Saves of a run, and trainers that start again: a run cut at any step goes on as if it had not been."""

from typing import Any

import numpy as np
import pytest
import torch
from replaying import WAIT_S, answers, prompts_of, write
from tiers import in_long

from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_integrations.replay import Collector, InOrderPolicy, ReadyFirstPolicy, ReplayBuffer

REGISTRATION: dict[str, Any] = {
    "fields": ("x", "grade"),
    "num_samples": None,
    "consumer_tasks": ["train", "score"],
    "grpo_group_size": 2,
    "enums": {"grade": ["good", "bad"]},
}


@pytest.fixture
def stores():
    """``stores()`` is a fresh store, as a process has it that starts anew."""
    opened: list[DataPlaneClient] = []

    def new():
        opened.append(connect({"backend": "noop"}))
        return opened[-1]

    yield new
    for client in opened:
        client.close()


class Run:
    """A "model" of one float64 weight; rollouts and losses depend on every bit of it and on the version."""

    def __init__(self, client, folder, *, resume, num_steps):
        self.client, self.folder, self.num_steps = client, folder, num_steps
        if resume:
            saved = client.load(folder)
        else:
            client.register_partition("replay", **REGISTRATION)
            saved = {"step": 0, "weight": 0.5}
        policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
        self.buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=2 * num_steps, resume=resume)
        self.step = saved["step"]
        self.losses: list[float] = []
        # what is in flight is made with the newest weights only, as nothing was in flight in the save
        self.weights = {self.step: torch.tensor(saved["weight"], dtype=torch.float64)}

    def rollout(self, reservations):
        rows = [(each, index) for each in reservations for index in range(2)]
        values = [
            torch.sin(self.weights[each.weight_version] * (7 * each.prompt + index + 1)).repeat(index + 1)
            for each, index in rows
        ]
        padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        return {
            "x": padded,
            "input_ids": padded.long(),
            "input_lengths": torch.tensor([len(value) for value in values]),
            "grade": ["good" if value[0] > 0 else "bad" for value in values],
        }

    def go(self, cut_at=None):
        with Collector(self.buffer, self.rollout, client=self.client) as collector:
            while self.step < self.num_steps:
                if self.step == cut_at:
                    with collector.quiet():
                        metadata = {"step": self.step, "weight": self.weights[self.step].item()}
                        self.buffer.save(self.folder, metadata)
                    break
                self.train()
        self.buffer.close()
        return self.losses

    def train(self):
        meta, columns = self.buffer.take(2, timeout_s=WAIT_S)
        ages = torch.tensor([self.step - tags["weight_version"] for tags in meta.tags or []])
        signs = torch.tensor([1.0 if grade == "good" else -0.5 for grade in columns["grade"]], dtype=torch.float64)
        weight = self.weights[self.step]
        loss = (columns["x"].sum(1) * signs * (1 + ages)).mean() * weight
        self.losses.append(loss.item())
        self.buffer.wait_until_reserved(timeout_s=WAIT_S)
        self.step += 1
        self.weights[self.step] = weight - 0.1 * loss
        self.buffer.set_weight_version(self.step)


@pytest.mark.parametrize("num_steps", [4, *in_long(8)])
def test_a_run_cut_at_any_step_goes_on_as_one_that_was_not_cut(stores, tmp_path, num_steps):
    whole = Run(stores(), tmp_path / "none", resume=False, num_steps=num_steps).go()
    assert len(whole) == len(set(whole)) == num_steps
    for cut_at in range(num_steps):
        folder = tmp_path / str(cut_at)
        before = Run(stores(), folder, resume=False, num_steps=num_steps).go(cut_at)
        after = Run(stores(), folder, resume=True, num_steps=num_steps).go()
        assert before + after == whole, f"cut at step {cut_at}"


def test_a_save_in_full_run_loses_and_doubles_no_prompt(stores, tmp_path):
    """No quiet moment: some groups are being made, some are ready, one is in training."""
    policy = ReadyFirstPolicy(max_staleness=100, groups_per_version=1)
    client = stores()
    client.register_partition("replay", ["x"], None, ["train"], grpo_group_size=2)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=40)
    prompts: list[int] = []
    with Collector(buffer, answers, client=client, num_threads=3):
        for _ in range(7):
            meta = buffer.select(1, timeout_s=WAIT_S)
            prompts.append(prompts_of(meta)[0])
            buffer.consume(meta)
        buffer.select(1, timeout_s=WAIT_S)
        buffer.save(tmp_path)
    buffer.close()

    client = stores()
    client.load(tmp_path)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=40, resume=True)
    with Collector(buffer, answers, client=client, num_threads=3):
        for meta in buffer.batches(1, timeout_s=WAIT_S):
            rows = client.get_data(meta, ["input_ids"])["input_ids"].unbind()
            prompts.append(prompts_of(meta)[0])
            assert [row.tolist() for row in rows] == [[prompts[-1]], [prompts[-1]] * 2]
    assert sorted(prompts) == list(range(40))
    buffer.close()


def test_a_trainer_that_starts_again_finds_its_groups_and_what_was_in_training_is_ready(make_buffer, fill, client):
    buffer = make_buffer()
    fill(buffer, 2)
    made = buffer.reserve(1)
    buffer.select(1)
    buffer.set_weight_version(1)
    again = make_buffer(resume=True)
    assert again.weight_version == 1
    assert [view.committed for view in again.view().groups] == [0, 1, None]
    assert again.select(2, timeout_s=0).sample_ids == ["v0_p0_g0", "v0_p0_g1", "v0_p1_g0", "v0_p1_g1"]
    assert again.counts.committed == 2
    assert buffer.to_abort(made) == [], "a collector goes on"
    anew = make_buffer()
    assert client.list_samples("replay").size == 0
    assert [reservation.group for reservation in anew.reserve(1)] == ["v0_p0"]


def test_answers_that_a_save_lacks_are_made_again(make_buffer, fill, client):
    buffer = make_buffer()
    fill(buffer, 2)
    client.clear_samples(["v0_p0_g0", "v0_p0_g1"], "replay")  # as trained on during a save
    again = make_buffer(resume=True)
    assert [reservation.group for reservation in again.reserve(3)] == ["v0_p2", "v0_p3", "v0_p0r1"]


def test_a_run_of_another_group_size_is_refused(make_buffer, fill):
    fill(make_buffer())
    with pytest.raises(InvalidRequestError, match="group_size is 2 in the store and 3 here"):
        make_buffer(group_size=3, resume=True)


def test_extra_info_of_any_values_comes_back(make_buffer, client):
    buffer = make_buffer()
    first, second = buffer.reserve(2)
    meta = write(client, [first])
    metrics = {"mean": np.float32(0.5), "loss": torch.tensor(2), "raw": b"x", "all": (1, None)}
    meta.extra_info["rollout_metrics"] = metrics
    buffer.commit([first], meta)
    restored = make_buffer(resume=True).select(1).extra_info["rollout_metrics"]
    assert restored == {"mean": 0.5, "loss": 2, "raw": b"x", "all": [1, None]}
    meta = write(client, [second])
    meta.extra_info["rollout_metrics"] = {1: 2}
    with pytest.raises(InvalidTypeError, match="'extra_info'"):
        buffer.commit([second], meta)
