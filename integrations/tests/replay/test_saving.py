"""Saves of a replay buffer: a run cut at any step goes on as if it had not been, and no crash costs the former save."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack
from tiers import in_long

from dataplane_core import connect, kv_first_write
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    BackendUnavailableError,
    CorruptDataError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    OperationTimeoutError,
    UnsupportedOperationError,
)
from dataplane_core.spec import Capability
from dataplane_integrations.replay import (
    Collector,
    InOrderPolicy,
    ReadyFirstPolicy,
    ReplayBuffer,
    Reservation,
    parse_sample_id,
    restore_replay,
    save_replay,
)

REGISTRATION: dict[str, Any] = {
    "fields": ("x", "grade"),
    "num_samples": None,
    "consumer_tasks": ["train", "score"],
    "grpo_group_size": 2,
    "enums": {"grade": ["good", "bad"]},
}
SMALL = {"fields": ["x"], "num_samples": None, "consumer_tasks": ["train"]}
WAIT_S = 60.0
Stores = Callable[..., DataPlaneClient]


@pytest.fixture
def stores() -> Iterator[Stores]:
    """``stores()`` is a fresh store, as a process has it that starts anew; or with a partition, ``stores(options)``."""
    opened: list[DataPlaneClient] = []

    def new(registration: dict[str, Any] | None = None) -> DataPlaneClient:
        opened.append(connect({"backend": "noop"}))
        if registration is not None:
            opened[-1].register_partition("replay", **registration)
        return opened[-1]

    yield new
    for client in opened:
        client.close()


# --- a run that is cut ------------------------------------------------------------------------------------------------


class Run:
    """A "model" of one float64 weight; rollouts and losses depend on every bit of it and on the version."""

    def __init__(self, client: DataPlaneClient, folder: Path, *, resume: bool, num_steps: int) -> None:
        self.client, self.folder, self.num_steps = client, folder, num_steps
        policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
        self.buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=2 * num_steps)
        self.step = 0
        self.losses: list[float] = []
        self.weights = {0: torch.tensor(0.5, dtype=torch.float64)}
        if resume:
            restored = restore_replay(folder, client, buffer=self.buffer)
            self.step = restored.extra["step"]
            # what is in flight is made with the newest weights only, as nothing was in flight in the save
            self.weights = {self.step: restored.extra["weight"]}
        else:
            client.register_partition("replay", **REGISTRATION)

    def rollout(self, reservations: Sequence[Reservation]) -> dict[str, Any]:
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

    def go(self, cut_at: int | None = None) -> list[float]:
        with Collector(self.buffer, self.rollout, client=self.client) as collector:
            while self.step < self.num_steps:
                if self.step == cut_at:
                    with collector.quiet():
                        extra = {"step": self.step, "weight": self.weights[self.step]}
                        save_replay(
                            self.folder, self.client, buffer=self.buffer, registration=REGISTRATION, extra=extra
                        )
                    return self.losses
                self.train()
        return self.losses

    def train(self) -> None:
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
def test_a_run_cut_at_any_step_goes_on_as_one_that_was_not_cut(stores: Stores, tmp_path: Path, num_steps: int) -> None:
    whole = Run(stores(), tmp_path / "none", resume=False, num_steps=num_steps).go()
    assert len(whole) == len(set(whole)) == num_steps
    for cut_at in range(num_steps):
        folder = tmp_path / str(cut_at)
        before = Run(stores(), folder, resume=False, num_steps=num_steps).go(cut_at)
        after = Run(stores(), folder, resume=True, num_steps=num_steps).go()
        assert before + after == whole, f"cut at step {cut_at}"


def test_a_save_in_full_run_loses_and_doubles_no_prompt(stores: Stores, tmp_path: Path, answers: Any) -> None:
    """No quiet moment: some groups are being made, some are ready, one is in training and is consumed meanwhile."""
    policy = ReadyFirstPolicy(max_staleness=100, groups_per_version=1)
    client = stores({**SMALL, "grpo_group_size": 2})
    buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=40)
    prompts: list[int] = []
    with Collector(buffer, answers, client=client, num_threads=3):
        for _ in range(7):
            meta = buffer.select(1, timeout_s=WAIT_S)
            prompts.append(parse_sample_id(meta.sample_ids[0])["prompt"])
            buffer.consume(meta)
        meta = buffer.select(1, timeout_s=WAIT_S)
        get, seen = client.get_samples, []

        def get_and_consume(*args: Any, **options: Any) -> Any:
            if not seen:
                seen.append(meta)
                buffer.consume(meta)  # its rows must stay until the save has read them
            return get(*args, **options)

        client.get_samples = get_and_consume
        save_replay(tmp_path, client, buffer=buffer)
        client.get_samples = get
        assert not set(client.list_samples("replay").sample_ids) & set(meta.sample_ids)
        buffer.close()

    client = stores({**SMALL, "grpo_group_size": 2})
    buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=40)
    restore_replay(tmp_path, client, buffer=buffer)
    with Collector(buffer, answers, client=client, num_threads=3):
        while (meta := buffer.select(1, timeout_s=WAIT_S)).size:
            rows = client.get_data(meta, ["input_ids"])["input_ids"].unbind()
            prompts.append(parse_sample_id(meta.sample_ids[0])["prompt"])
            assert [row.tolist() for row in rows] == [[prompts[-1]], [prompts[-1]] * 2]
            buffer.consume(meta)
    assert sorted(prompts) == list(range(40))


# --- what is kept -----------------------------------------------------------------------------------------------------


def buffer_of(client: DataPlaneClient, num_groups: int = 2) -> ReplayBuffer:
    """In order, with room for so many groups of 2."""
    return ReplayBuffer(client, "replay", InOrderPolicy(max_staleness=0, groups_per_version=num_groups), group_size=2)


def filled(client: DataPlaneClient, columns: Mapping[str, Any], num_groups: int = 1, **tags: Any) -> ReplayBuffer:
    """A buffer with groups whose rows have these columns."""
    buffer = buffer_of(client, num_groups)
    groups = buffer.reserve(num_groups)
    ids = [sample_id for each in groups for sample_id in each.sample_ids]
    own = [{**each.tags, **tags} for each in groups for _ in each.sample_ids]
    buffer.commit(groups, client.put_samples(ids, "replay", columns, tags=own))
    return buffer


def test_every_kind_of_column_comes_back_bit_for_bit_without_pickle(stores: Stores, tmp_path: Path) -> None:
    client = stores(REGISTRATION)
    num_rows = 600  # more than two blocks
    ragged = torch.nested.nested_tensor(
        [torch.full((row % 4, 2), float(row), dtype=torch.bfloat16) for row in range(num_rows)], layout=torch.jagged
    )
    odd = torch.tensor([math.nan, -0.0, math.inf])
    fields = {
        "ragged": ragged,
        "flag": torch.arange(num_rows) % 2 == 0,
        "odd": odd.repeat(num_rows, 1),
        "grade": np.array(["good", "bad"] * (num_rows // 2), dtype=object),
        "log": NonTensorStack(*[{"role": "user", "tokens": torch.arange(row % 3)} for row in range(num_rows)]),
    }
    buffer = filled(client, fields, num_rows // 2, score=math.nan, third=1 / 3, text="\u00e4")
    save_replay(tmp_path, client, buffer=buffer, registration=REGISTRATION)
    other = stores()
    restored = restore_replay(tmp_path, other, buffer=buffer_of(other, num_rows // 2))
    mine, theirs = (each.list_samples("replay") for each in (client, other))
    assert restored.meta.sample_ids == theirs.sample_ids == mine.sample_ids
    assert repr(restored.meta.tags) == repr(theirs.tags) == repr(mine.tags)
    before, after = (each.get_samples(mine.sample_ids, "replay", list(fields)) for each in (client, other))
    for name in ("flag", "odd"):
        assert before[name].dtype == after[name].dtype
        assert before[name].numpy().tobytes() == after[name].numpy().tobytes()
    assert torch.equal(before["ragged"].values(), after["ragged"].values())
    assert torch.equal(before["ragged"].offsets(), after["ragged"].offsets())
    assert before["grade"].tolist() == after["grade"].tolist()
    assert repr(before["log"].tolist()) == repr(after["log"].tolist())
    with pytest.raises(InvalidRequestError, match="excellent"):  # the vocabulary is back too
        other.put_samples(["x_g0"], "replay", {"grade": np.array(["excellent"], dtype=object)})


def test_what_tasks_were_given_is_not_given_again(stores: Stores, tmp_path: Path) -> None:
    registration = {**REGISTRATION, "grpo_group_size": None}
    client = stores(registration)
    buffer = filled(client, {"x": torch.arange(8.0)}, 4)
    ids = client.list_samples("replay").sample_ids
    last = client.claim_meta("replay", "score", ["x"], 2, blocking=False, tag_filter={"prompt": 3})
    first = client.claim_meta("replay", "score", ["x"], 2)
    assert last.sample_ids + first.sample_ids == ids[6:] + ids[:2]
    save_replay(tmp_path, client, buffer=buffer, registration=registration)
    other = stores()
    restore_replay(tmp_path, other, buffer=buffer_of(other, 4))
    for task, left in (("score", ids[2:6]), ("train", ids)):
        assert other.claim_meta("replay", task, ["x"], len(left)).sample_ids == left
    assert other.check_consumption_status("replay", ["score", "train"])


def test_a_save_that_is_larger_than_the_room_is_cut_to_the_freshest_and_the_rest_is_generated_again(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = stores(REGISTRATION)
    buffer = ReplayBuffer(client, "replay", ReadyFirstPolicy(max_staleness=3, groups_per_version=2), group_size=2)
    for version in range(3):  # prompts 0 to 5
        reservations = buffer.reserve(2)
        ids = [sample_id for each in reservations for sample_id in each.sample_ids]
        shared = torch.full((300,), float(version))  # stored once
        columns = {"x": [torch.arange(row + 1.0) for row in range(4)], "image": [shared] * 4, "grade": ["good"] * 4}
        buffer.commit(
            reservations,
            client.put_samples(ids, "replay", columns, tags=[each.tags for each in reservations for _ in "ab"]),
        )
        buffer.set_weight_version(version + 1)
    given = client.claim_meta("replay", "score", ["x"], 6)
    assert given.sample_ids == client.list_samples("replay").sample_ids[:6]
    save_replay(tmp_path, client, buffer=buffer, registration=REGISTRATION)
    other = stores()
    smaller = ReplayBuffer(other, "replay", ReadyFirstPolicy(max_staleness=2, groups_per_version=1), group_size=2)
    restored = restore_replay(tmp_path, other, buffer=smaller)
    kept = ["v1_p3_g0", "v1_p3_g1", "v2_p4_g0", "v2_p4_g1", "v2_p5_g0", "v2_p5_g1"]
    assert restored.meta.sample_ids == other.list_samples("replay").sample_ids == kept
    assert [tags["prompt"] for tags in restored.meta.tags or []] == [3, 3, 4, 4, 5, 5]
    assert "holds 6 groups" in caplog.text
    assert "has room for 3. 3 are generated again" in caplog.text
    for name in ("x", "image"):
        one, two = (each.get_samples(kept, "replay", [name])[name] for each in (client, other))
        assert all(map(torch.equal, one.unbind(), two.unbind()))
    assert other.claim_meta("replay", "score", ["x"], 6, blocking=False).sample_ids == kept
    smaller.consume(smaller.select(3))
    assert smaller.counts.evicted == 3
    assert [(each.prompt, each.attempt) for each in smaller.reserve(3)] == [(0, 1), (1, 1), (2, 1)]


def test_a_backend_without_cursors_refuses_rows_that_were_given_before_anything_is_written(
    stores: Stores, tmp_path: Path
) -> None:
    client, other = stores(REGISTRATION), stores()
    buffer = filled(client, {"x": torch.arange(2.0)})
    other._connection.capabilities -= {Capability.CURSORS}
    save_replay(tmp_path, client, buffer=buffer, registration=REGISTRATION)
    restore_replay(tmp_path, other, buffer=buffer_of(other))  # no task had been given any
    other.clear_samples(None, "replay")
    client.claim_meta("replay", "score", ["x"], 2)
    save_replay(tmp_path, client, buffer=buffer, registration=REGISTRATION)
    restored = buffer_of(other)
    with pytest.raises(UnsupportedOperationError, match="given to 'score', and backend 'noop' does not declare"):
        restore_replay(tmp_path, other, buffer=restored)
    assert other.list_partitions() == []
    assert not restored.view().groups


def test_only_committed_rows_are_saved_and_what_is_in_training_is_ready_again(stores: Stores, tmp_path: Path) -> None:
    client = stores(REGISTRATION)
    policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2)
    reservations = buffer.reserve(4)
    for each in reservations[:3]:
        batch = {"x": torch.tensor([1.0, 2.0])}
        meta = kv_first_write(
            batch, sample_ids=each.sample_ids, dp_client=client, partition_id="replay", tags=[each.tags] * 2
        )
        if each is not reservations[2]:
            meta.stamp_tags({"answer": ["4", "5"]})
            buffer.commit([each], meta)
    buffer.select(1)
    save_replay(tmp_path, client, buffer=buffer, registration=REGISTRATION, extra={"epoch": 3})
    other = stores()
    restored_buffer = ReplayBuffer(other, "replay", policy, group_size=2)
    restored = restore_replay(tmp_path, other, buffer=restored_buffer)
    assert restored.extra == {"epoch": 3}
    assert other.list_samples("replay").sample_ids == ["v0_p0_g0", "v0_p0_g1", "v0_p1_g0", "v0_p1_g1"]
    selected = restored_buffer.select(2, timeout_s=0)
    assert [tags["answer"] for tags in selected.tags or []] == ["4", "5"] * 2
    assert [each.group for each in restored_buffer.reserve(2)] == ["v0_p2r1", "v0_p3r1"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(client: DataPlaneClient, tmp_path: Path) -> Path:
    """A save of two rows."""
    client.register_partition("replay", **SMALL)
    buffer = filled(client, {"x": torch.arange(2000.0).reshape(2, 1000)})
    save_replay(tmp_path / "save", client, buffer=buffer, registration=SMALL)
    client.clear_samples(None, "replay")
    return tmp_path / "save"


IDS = ["v0_p0_g0", "v0_p0_g1"]


def restored_ids(saved: Path, client: DataPlaneClient) -> list[str]:
    return restore_replay(saved, client, buffer=buffer_of(client)).meta.sample_ids


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_anywhere_is_found_before_anything_is_written(saved: Path, client: DataPlaneClient) -> None:
    (path,) = saved.iterdir()
    data = path.read_bytes()
    harms: list[Callable[[], Any]] = [
        lambda at=at: damage(path, at) for at in range(0, len(data) - 1, max(1, len(data) // 80))
    ]
    harms += [lambda size=size: path.write_bytes(data[:size]) for size in (0, 1, len(data) // 2)]
    harms.append(lambda: path.write_bytes(data + b"x"))
    for harm in harms:
        harm()
        with pytest.raises((CorruptDataError, UnsupportedOperationError)):
            restored_ids(saved, client)
        with pytest.raises(KeyError):
            client.list_samples("replay")
        path.write_bytes(data)
    assert restored_ids(saved, client) == IDS


def test_refusals_say_what_is_wrong(saved: Path, client: DataPlaneClient, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no save in '.*none'"):
        restored_ids(tmp_path / "none", client)
    path = saved / "dataplane-replay.save"
    head, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(head.replace(b'"version": 4', b'"version": 5') + b"\n" + rest)
    with pytest.raises(UnsupportedOperationError, match=r"is of format version 5\. Expected 4"):
        restored_ids(saved, client)
    path.write_bytes(b'{"format": "other", "version": 1}\n{}')
    with pytest.raises(CorruptDataError, match="says format 'other'"):
        restored_ids(saved, client)


def test_a_buffer_of_another_shape_refuses_the_save(
    client: DataPlaneClient, make_buffer: Any, fill: Any, tmp_path: Path
) -> None:
    buffer = make_buffer()
    fill(buffer)
    save_replay(tmp_path, client, buffer=buffer)
    with pytest.raises(InvalidRequestError, match="group_size is 2 in the state and 3 in the buffer"):
        restore_replay(tmp_path, client, buffer=make_buffer(group_size=3))


def test_extra_info_of_any_values_is_saved(
    client: DataPlaneClient, make_buffer: Any, write: Any, tmp_path: Path
) -> None:
    buffer = make_buffer()
    for each in buffer.reserve(2):
        meta = write(client, [each])
        metrics = {"mean": np.float32(0.5), "loss": torch.tensor(2), "raw": b"x", "all": (1, None)}
        meta.extra_info["rollout_metrics"] = metrics
        buffer.commit([each], meta)
    save_replay(tmp_path, client, buffer=buffer)
    again = make_buffer()
    restore_replay(tmp_path, client, buffer=again)
    found = again.select(1).extra_info["rollout_metrics"]
    assert found == {"mean": 0.5, "loss": 2, "raw": b"x", "all": [1, None]}
    [each] = buffer.reserve(1)
    meta = write(client, [each])
    meta.extra_info["rollout_metrics"] = {1: 2}
    buffer.commit([each], meta)
    with pytest.raises(InvalidTypeError, match="'extra_info'"):
        save_replay(tmp_path, client, buffer=buffer)


def test_a_save_without_rows_of_a_group_is_refused_and_the_former_save_stays(
    client: DataPlaneClient, make_buffer: Any, write: Any, tmp_path: Path
) -> None:
    buffer = make_buffer()
    reservations = buffer.reserve(2)
    rows = write(client, reservations)
    buffer.commit(reservations, rows)
    save_replay(tmp_path, client, buffer=buffer)
    meta = buffer.select(1)
    client.clear_samples(meta.sample_ids, "replay")  # as a policy does after a failed call
    with pytest.raises(MissingDataError, match=r"'v0_p0_g0', 'v0_p0_g1' of groups.*discard\(meta, requeue=True\)"):
        save_replay(tmp_path, client, buffer=buffer)
    client.clear_samples(rows.sample_ids, "replay")
    assert restore_replay(tmp_path, client, buffer=make_buffer()).meta.sample_ids == rows.sample_ids


def test_a_registration_may_name_its_fields_tasks_and_enums_in_sets(
    client: DataPlaneClient, tmp_path: Path, stores: Stores
) -> None:
    registration = {**REGISTRATION, "fields": {"x": None}.keys(), "consumer_tasks": {"train"}, "enums": {"x": {"good"}}}
    client.register_partition("replay", **registration)
    save_replay(tmp_path, client, buffer=buffer_of(client), registration=registration)
    other = stores()
    restore_replay(tmp_path, other, buffer=buffer_of(other))
    info = other.describe("replay").info
    assert (info.fields, info.consumer_tasks, info.enums) == (("x",), ("train",), {"x": ("good",)})


def test_what_would_need_pickle_is_refused_and_the_former_save_stays(saved: Path, client: DataPlaneClient) -> None:
    client.register_partition("replay", **SMALL)
    with pytest.raises(InvalidTypeError):
        save_replay(saved, client, buffer=buffer_of(client), extra={"run": object()})
    assert restored_ids(saved, client) == IDS


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_save_is_renamed_only_after_it_is_on_the_disk(
    saved: Path, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    opened: dict[int, str] = {}
    real_open, fsync, replace = os.open, os.fsync, os.replace

    def note_open(path: Any, *args: Any) -> int:
        descriptor = real_open(path, *args)
        opened[descriptor] = Path(path).name
        return descriptor

    def note_sync(descriptor: int) -> None:
        steps.append(f"sync {opened[descriptor]}")
        fsync(descriptor)

    def note_replace(*args: Any) -> None:
        steps.append("replace")
        replace(*args)

    buffer = buffer_of(client)
    restore_replay(saved, client, buffer=buffer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note_open)
        patch.setattr(os, "fsync", note_sync)
        patch.setattr(os, "replace", note_replace)
        save_replay(saved, client, buffer=buffer)
    assert steps == ["sync dataplane-replay.new", "replace", "sync save"]


@pytest.mark.parametrize("error", [OperationTimeoutError("no answer"), BackendUnavailableError("gone")])
def test_a_store_that_fails_in_a_save_is_not_taken_for_the_disk(
    saved: Path, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    client.register_partition("replay", **SMALL)
    buffer = filled(client, {"x": torch.zeros(2, 1)})
    with monkeypatch.context() as patch:
        patch.setattr(client, "get_samples", refuse)
        with pytest.raises(type(error)) as info:
            save_replay(saved, client, buffer=buffer)
    assert info.value is error
    assert restored_ids(saved, client) == IDS
