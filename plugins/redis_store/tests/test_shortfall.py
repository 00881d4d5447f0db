"""What a claim that timed out says of the samples that it did not get."""

import pytest
import torch

from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, OperationTimeoutError
from dataplane_core.spec import this_process
from dataplane_redis import _claims
from dataplane_redis._scripts import SCRIPTS
from dataplane_testkit import backend_of


def test_a_holder_is_forgotten_with_its_lease(plain, connect):
    client = connect(url=plain.url, partition="p")
    client.put_samples(["a", "b", "c"], "p", {"x": torch.ones(3)})
    first, second = (client.claim_meta("p", "train", ["x"], 1, lease_s=600) for _ in range(2))
    gone = client.claim_meta("p", "train", ["x"], 1, lease_s=600)
    with pytest.raises(ClaimTimeoutError, match=f"3 are leased \\('a' by {this_process()} for another [0-9.]+ s"):
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
    client.ack(first)
    client.nack(second)
    client.clear_samples(gone.sample_ids, "p")
    base = backend_of(client)._session.base.decode()
    (records,) = plain.admin("KEYS", f"{base}:e:*:k")
    assert plain.admin("HLEN", records) == 2  # which token may ack 'a' again, and a mark
    assert this_process().encode() not in b"".join(plain.admin("HVALS", records))
    assert plain.admin("ZCARD", records.removesuffix(b"k") + b"q") == 1  # a mark
    assert plain.admin("KEYS", f"{base}:e:*:a") == []


def fill(client, count):
    client.register_partition("p", ["x", "y"], None, ["train"])
    for first in range(0, count, 5000):
        ids = [f"s{number}" for number in range(first, first + 5000)]
        client.put_samples(ids, "p", {"y": torch.ones(5000)})


def test_many_that_time_out_at_once_share_a_count(plain, connect, at_once, monkeypatch):
    client = connect(url=plain.url)
    fill(client, 20_000)
    script, asked, errors = backend_of(client)._session.link.script, [], []

    def noted(what, deadline, run, *words, **more):
        asked.append(run)
        return script(what, deadline, run, *words, **more)

    monkeypatch.setattr(backend_of(client)._session.link, "script", noted)

    def wait():
        try:
            client.claim_meta("p", "train", ["x"], 1, timeout_s=0.5)
        except DataPlaneError as error:
            errors.append(error)

    at_once(wait, 32)
    assert [type(error) for error in errors] == [ClaimTimeoutError] * 32
    assert asked.count(SCRIPTS["shortfall"]) < 32 * 20_000 / _claims._LOOK_ROWS


def test_a_timeout_tells_what_was_counted_until_the_deadline(plain, connect, monkeypatch):
    client = connect(url=plain.url)
    fill(client, 5000)
    script, asked = backend_of(client)._session.link.script, []

    def slow(what, deadline, run, *words, **more):
        if run is SCRIPTS["shortfall"]:
            asked.append(run)
            if len(asked) == 2:
                raise OperationTimeoutError("the server did not answer in time.")
        return script(what, deadline, run, *words, **more)

    monkeypatch.setattr(backend_of(client)._session.link, "script", slow)
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 1000)
    with pytest.raises(ClaimTimeoutError) as caught:
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
    assert len(asked) >= 2
    assert caught.value.shortfall.num_lacking in (1000, 5000)


def test_the_rows_of_each_field_are_not_counted_if_nobody_needs_them(plain, connect, monkeypatch):
    client = connect(url=plain.url)
    fill(client, 5000)
    session, ran = backend_of(client)._session, []
    run = session.run

    def noted(what, deadline, script, **asked):
        ran.append(script)
        return run(what, deadline, script, **asked)

    monkeypatch.setattr(session, "run", noted)
    few = client.describe("p", count_rows=False)
    assert (few.num_samples, dict(few.num_rows), list(few.specs)) == (5000, {}, ["y"])
    assert "fields" not in ran
    assert client.describe("p").num_rows == {"y": 5000}
    assert "fields" in ran
