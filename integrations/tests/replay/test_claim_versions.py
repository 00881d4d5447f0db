"""Claims over partitions that hold one weight version each."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import ClaimTimeoutError, InvalidRequestError, InvalidTypeError, UnknownTaskError
from dataplane_integrations.replay import claim_versions

PATTERN = "train_v{version}"


@pytest.fixture(scope="module", params=["noop", "redis_store", "shm_store"])
def store(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    with connect({"backend": request.param}) as client:
        yield client


@pytest.fixture
def client(store: DataPlaneClient) -> Iterator[DataPlaneClient]:
    yield store
    for partition in store.list_partitions():
        store.clear_samples(None, partition)


def write(client: DataPlaneClient, version: int, count: int = 2, name: str = PATTERN, **registration: Any) -> None:
    partition = name.format(version=version)
    client.register_partition(partition, ["x"], None, ["train"], if_exists="keep", **registration)
    if count:
        client.put_samples([f"v{version}_p0_g{row}" for row in range(count)], partition, {"x": [1.0] * count})


def claim(client: DataPlaneClient, size: int, **options: Any) -> list[tuple[str, int]]:
    metas = claim_versions(client, PATTERN, "train", ["x"], size, **{"lease_s": 60.0, **options})
    return [(meta.partition_id, meta.size) for meta in metas]


def test_versions_come_in_their_order_as_numbers_and_only_those_of_the_range(client: DataPlaneClient) -> None:
    for version in (2, 9, 10, 11):
        write(client, version)
    write(client, 10, name="train_v{version}_old")  # of another pattern
    write(client, 10, name="train_v0{version}")
    assert claim(client, 3, oldest=9, newest=10) == [("train_v10", 2), ("train_v9", 1)]
    assert claim(client, 5, order="oldest") == [("train_v2", 2), ("train_v9", 1), ("train_v11", 2)]
    assert claim(client, 5, blocking=False) == []


def test_each_partition_has_leases_of_its_own(client: DataPlaneClient) -> None:
    for version in (1, 2):
        write(client, version)
    newer, older = claim_versions(client, PATTERN, "train", ["x"], 4, lease_s=60.0)
    client.ack(newer)
    client.nack(older)
    assert claim(client, 4) == [("train_v1", 2)]
    assert client.check_consumption_status("train_v2", ["train"])


def do_before_claims(client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], None]) -> None:
    """The first claims of the client are each preceded by a step."""
    left, claim_meta = iter(steps), client.claim_meta

    def claimed(*args: Any, **options: Any) -> Any:
        next(left, nothing)()
        return claim_meta(*args, **options)

    monkeypatch.setattr(client, "claim_meta", claimed)


def nothing() -> None:
    pass


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_between_partitions_gives_back_what_was_claimed(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        write(client, version)
    do_before_claims(client, monkeypatch, nothing, nothing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        claim(client, 6)
    assert claim(client, 6, blocking=False) == [("train_v3", 2), ("train_v2", 2), ("train_v1", 2)]


def test_an_interrupt_after_a_wait_gives_back_what_was_claimed(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, 1, 0)
    do_before_claims(client, monkeypatch, nothing, lambda: write(client, 1), interrupt)
    with pytest.raises(KeyboardInterrupt):
        claim(client, 2)
    assert claim(client, 2, blocking=False) == [("train_v1", 2)]


def test_partitions_may_appear_and_be_cleared_between_the_claims_of_a_call(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        write(client, version)
    do_before_claims(client, monkeypatch, lambda: write(client, 4), lambda: client.clear_samples(None, "train_v2"))
    assert claim(client, 8) == [("train_v3", 2), ("train_v1", 2)]
    assert claim(client, 8) == [("train_v4", 2)]


def test_a_claim_that_waits_gets_the_samples_of_a_partition_that_appears(client: DataPlaneClient) -> None:
    write(client, 1, 0)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(claim(client, 4, timeout_s=60.0)))
    thread.start()
    write(client, 2)
    thread.join()
    [given] = found
    assert sum(size for _, size in given) in (1, 2), "what was ready when it looked"
    rest = claim(client, 4, blocking=False)
    assert sum(size for _, size in given + rest) == 2
    assert {name for name, _ in given + rest} == {"train_v2"}


def test_whole_groups_are_claimed(client: DataPlaneClient) -> None:
    for version in (3, 4):
        write(client, version, grpo_group_size=2)
    assert claim(client, 4) == [("train_v4", 2), ("train_v3", 2)]
    with pytest.raises(InvalidRequestError, match="multiple"):
        claim(client, 3)


def test_partitions_that_are_finished_or_cleared_do_not_end_the_wait_and_a_timeout_names_them(
    client: DataPlaneClient,
) -> None:
    write(client, 1)
    client.finish_partition("train_v1")
    assert claim(client, 2) == [("train_v1", 2)]
    with pytest.raises(ClaimTimeoutError, match="no sample was ready in 'train_v1'"):
        claim(client, 2, timeout_s=0.2)
    client.clear_samples(None, "train_v1")
    with pytest.raises(ClaimTimeoutError, match="none of these versions is registered"):
        claim(client, 2, timeout_s=0.2)


def test_what_cannot_be_claimed_is_refused(client: DataPlaneClient) -> None:
    write(client, 1)
    for options, part in [({"order": "newest"}, "'freshest' or 'oldest'"), ({"oldest": 2, "newest": 1}, "newest is 1")]:
        with pytest.raises(InvalidRequestError, match=part):
            claim(client, 1, **options)
    with pytest.raises(InvalidRequestError, match="once"):
        claim_versions(client, "train", "train", ["x"], 1, lease_s=60.0)
    with pytest.raises(UnknownTaskError):
        claim_versions(client, PATTERN, "critic", ["x"], 1, lease_s=60.0)
    with pytest.raises(InvalidRequestError):
        claim(client, 0)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"batch_size": "4"}, "batch_size must be an int, got str"),
        ({"timeout_s": None}, "timeout_s must be float, got NoneType"),
        ({"oldest": "1"}, "oldest must be an int, got str"),
        ({"newest": 1.5}, "newest must be an int, got float"),
    ],
)
def test_numbers_of_another_type_are_refused_at_once(options: dict[str, Any], part: str) -> None:
    given = {"batch_size": 1, "lease_s": 60.0, "timeout_s": 0.1, **options}
    with connect({"backend": "noop"}) as client, pytest.raises(InvalidTypeError, match=part):
        claim_versions(client, PATTERN, "train", ["x"], **given)


def test_a_client_that_opens_partitions_adds_its_task_to_none() -> None:
    with connect({"backend": "noop", "open_partitions": True}) as client:
        client.register_partition("train_v1", ["x"], None, ["other"])
        with pytest.raises(InvalidRequestError, match="the client has open_partitions"):
            claim_versions(client, PATTERN, "train", ["x"], 1, blocking=False, lease_s=60.0)
        assert client.describe("train_v1").info.consumer_tasks == ("other",)
