"""What a streaming consumer claims ahead is handed out as if it had been claimed at its turn, or given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import bits

from dataplane_core.batch import split_message_logs, stack_or_nest
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, MissingDataError
from dataplane_integrations.replay import StreamingConsumer, _consumer

WAIT_S = 30.0
LENGTHS = [3, 1, 4, 2, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture
def stream(client: DataPlaneClient) -> DataPlaneClient:
    """Twelve rows: a token column, a scalar one, and a ragged one."""
    client.register_partition("replay", ["input_ids", "reward", "pixel_values"], len(LENGTHS), ["train", "ahead"])
    client.put_samples(
        [f"p{row}_g0" for row in range(len(LENGTHS))],
        "replay",
        {
            "input_ids": stack_or_nest([torch.full((length,), row) for row, length in enumerate(LENGTHS)]),
            "reward": torch.linspace(0, 1, len(LENGTHS)).bfloat16(),
            "pixel_values": stack_or_nest([torch.rand(row % 3, 4) for row in range(len(LENGTHS))]),
        },
        tags=[{"weight_version": 0, "input_lengths": length} for length in LENGTHS],
    )
    return client


def consumer_of(client: DataPlaneClient, depth: int, *, task: str = "train", **options: Any) -> StreamingConsumer:
    fields = ["input_ids", "reward", "pixel_values"]
    options = {"timeout_s": WAIT_S, "lease_s": 600.0, "clear": False, **options}
    return StreamingConsumer(client, "replay", task, fields, 4, read_ahead=depth, **options)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.005)


def reads(client: Any) -> int:
    found: int = client.metrics.snapshot()["operations"].get("get_samples", {}).get("calls", 0)
    return found


def left_running() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("read-ahead", "lease-renewal"))]


def all_rows_are_free(client: DataPlaneClient, rows: int = 12) -> None:
    """Nothing is on lease and nothing was acked: a claim gets them all."""
    again = client.claim_meta("replay", "train", ["input_ids"], 12, blocking=False)
    assert len(again.sample_ids) == rows


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        [{}],
        [{"layout": "jagged"}],
        [{"pad_to_seqlen": 16, "pad_value_dict": {"input_ids": 7}}],
        [{"token_aligned_fields": ["pixel_values"]}, {}],
        [{"select_fields": ["reward"]}, {"select_fields": ["pixel_values", "input_ids"]}, {}],
    ],
    ids=["plain", "jagged", "padded further", "twice", "in parts"],
)
def test_batches_have_the_bits_that_they_have_without(
    stream: DataPlaneClient, depth: int, options: list[dict[str, Any]]
) -> None:
    def read_all(task: str, depth: int) -> list[Any]:
        found = []
        for batch in consumer_of(stream, depth, task=task):
            with batch:
                for each in options:
                    read = batch.read(**each)
                    found.append((batch.meta.sample_ids, bits(read)))
        return found

    ahead = read_all("ahead", depth)
    assert ahead == read_all("train", 0)
    assert len(ahead) == 3 * len(options)
    assert left_running() == []


@pytest.mark.parametrize("depth", [0, 1])
def test_conversations_are_read_too(client: DataPlaneClient, depth: int) -> None:
    logs = [[{"role": "user", "content": "2+2", "token_ids": torch.arange(number + 1)}] for number in range(4)]
    tokens = stack_or_nest([log[0]["token_ids"] for log in logs])
    client.register_partition("replay", ["input_ids"], 4, ["train"])
    ids = [f"p{number}_g0" for number in range(4)]
    client.put_samples(ids, "replay", {"input_ids": tokens, **split_message_logs(logs)})
    seen = []
    for batch in StreamingConsumer(client, "replay", "train", ["input_ids"], 4, read_ahead=depth):
        with batch:
            seen += [turn["token_ids"].tolist() for log in batch.read(message_logs=True)["message_log"] for turn in log]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("clear", [False, True])
def test_the_next_batch_is_claimed_and_read_while_one_is_trained_on(stream: Any, clear: bool) -> None:
    for number, batch in enumerate(consumer_of(stream, 1, clear=clear), start=1):
        with batch:
            until(lambda number=number: reads(stream) == min(number + 1, 3))
            batch.read()
            assert reads(stream) == min(number + 1, 3), "the batch itself had been read"


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_loop_that_ends_early_gives_back_what_it_did_not_get(stream: Any, depth: int) -> None:
    for batch in consumer_of(stream, depth):
        with batch:
            until(lambda: reads(stream) == (min(depth + 1, 3) if depth else 0))
        break
    assert left_running() == []
    all_rows_are_free(stream, 8)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_step_that_fails_gives_all_back(stream: Any, depth: int) -> None:
    def train() -> None:
        for batch in consumer_of(stream, depth):
            with batch:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    assert left_running() == []
    all_rows_are_free(stream)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_iterator_that_is_closed_leaves_nothing_running(stream: Any, depth: int) -> None:
    batches = iter(consumer_of(stream, depth))
    batch = next(batches)
    until(lambda: reads(stream) > depth)
    batches.close()
    assert left_running() == []
    stream.nack(batch.meta)  # handed out, so it is the caller's
    all_rows_are_free(stream)


def test_a_batch_whose_lease_was_lost_before_its_turn_is_claimed_again(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "RENEWED_AFTER", 1 / 3000)
    renew, lost, found = stream.renew, threading.Event(), []
    renewing: list[threading.Thread] = []

    def lose(meta: Any, lease_s: float) -> None:
        if "p5_g0" in meta.sample_ids and not lost.is_set():
            renewing.append(threading.current_thread())
            stream.nack(meta)  # as if it had come too late
            lost.set()
        renew(meta, lease_s)

    stream.renew = lose
    for batch in consumer_of(stream, 2):
        with batch:
            assert lost.wait(WAIT_S)
            renewing[0].join(WAIT_S)  # it ends when it has noticed
            found.append(batch.read()["input_ids"][:, 0].tolist())
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_that_cannot_be_read_fails_its_own_batch(stream: Any, depth: int) -> None:
    get_samples, read = stream.get_samples, []

    def fail_for_the_second(sample_ids: Any, *args: Any) -> Any:
        if "p5_g0" in sample_ids:
            raise MissingDataError("p5_g0 is gone")
        return get_samples(sample_ids, *args)

    stream.get_samples = fail_for_the_second

    def train() -> None:
        for batch in consumer_of(stream, depth):
            with batch:
                read.append(batch.read().size)

    with pytest.raises(MissingDataError, match="p5_g0"):
        train()
    assert read == [4]
    assert left_running() == []
    all_rows_are_free(stream, 8)


def test_a_negative_depth_is_refused(stream: DataPlaneClient) -> None:
    with pytest.raises(InvalidRequestError, match="read_ahead is -1"):
        consumer_of(stream, -1)
