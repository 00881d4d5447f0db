"""What a claim that timed out says of the samples that it did not get: as the ledger says it."""

import random

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.errors import ClaimTimeoutError, DataPlaneError, OperationTimeoutError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec, check_tag_filter, new_id, this_process
from dataplane_redis import _claims
from dataplane_redis._scripts import SCRIPTS

_SPECS = {"x": FieldSpec("tensor", "float32", 0), "y": FieldSpec("tensor", "float32", 0)}
_FIELDS = ["x", "y"]


class Both:
    """A store and a ledger that are told the same."""

    def __init__(self, client, group_size):
        self.client, self.ledger = client, Ledger()
        client.register_partition("p", _FIELDS, None, ["train"], grpo_group_size=group_size)
        self.ledger.apply(commands.Register("p", _FIELDS, None, ["train"], group_size, {}, new_id()), 0.0)

    def put(self, ids, fields, tags):
        columns = TensorDict({field: torch.ones(len(ids)) for field in fields}, batch_size=[len(ids)])
        self.client.put_samples(ids, "p", columns if fields else None, tags)
        specs = {field: _SPECS[field] for field in fields}
        write = self.ledger.apply(commands.BeginPut("p", ids, specs, [4] * len(ids), tags, None, ttl_s=9.0), 0.0)
        self.ledger.apply(commands.CommitPut(write), 0.0)

    def clear(self, ids):
        self.client.clear_samples(ids, "p")
        self.ledger.apply(commands.Clear("p", ids), 0.0)

    def claim(self, batch_size, lease_s):
        meta = self.client.claim_meta("p", "train", ["x"], batch_size, blocking=False, lease_s=lease_s)
        given = self.ask(batch_size, ["x"], None, False, lease_s)
        assert meta.sample_ids == list(given.sample_ids)

    def ask(self, batch_size, fields, tag_filter, all_or_nothing, lease_s):
        return self.ledger.apply(
            commands.ClaimSamples(
                "p",
                "train",
                fields,
                batch_size,
                all_or_nothing=all_or_nothing,
                lease_s=lease_s,
                tag_filter=check_tag_filter(tag_filter),
                explain=True,
                token=new_id(),
                holder=this_process(),
            ),
            0.0,
        )

    def compare(self, fields, tag_filter):
        expected = self.ask(1000, fields, tag_filter, True, None)
        with pytest.raises(ClaimTimeoutError) as caught:
            self.client.claim_meta("p", "train", fields, 1000, timeout_s=0.0, tag_filter=tag_filter)
        assert caught.value.num_ready == expected.num_ready
        found, wanted = caught.value.shortfall, expected.shortfall
        for name in type(wanted).__slots__:
            if name == "leased":
                assert [(each.sample_id, each.holder) for each in found.leased] == [
                    (each.sample_id, each.holder) for each in wanted.leased
                ]
                for mine, theirs in zip(found.leased, wanted.leased, strict=True):
                    assert theirs.left_s - 60 < mine.left_s <= theirs.left_s
            else:
                assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize("look_rows", [1, 2500], ids=["in steps", "at once"])
@pytest.mark.parametrize("group_size", [None, 2], ids=["rows", "groups"])
def test_it_is_what_the_ledger_says(plain, connect, monkeypatch, group_size, look_rows):
    monkeypatch.setattr(_claims, "_LOOK_ROWS", look_rows)
    chance = random.Random(7)
    for _ in range(6):
        both = Both(connect(url=plain.url), group_size)
        ids = [f"q{number // 2}_g{number % 2}" for number in range(24)]
        for step in range(12):
            some = chance.sample(ids, chance.randint(1, 6))
            act = chance.choice(["put", "put", "put", "clear", "claim"])
            if act == "put":
                tags = [{"v": chance.randint(0, 1)} for _ in some]
                both.put(some, chance.choice([["x"], ["y"], ["x", "y"], []]), tags)
            elif act == "clear":
                both.clear(some[:2])
            else:
                both.claim(2, chance.choice([None, 1000.0 + 100 * step]))
            both.compare(chance.choice([["x"], ["y"], ["x", "y"]]), chance.choice([None, {"v": 1}]))


def test_a_holder_is_forgotten_with_its_lease(plain, connect):
    client = connect(url=plain.url)
    client.register_partition("p", ["x"], None, ["train"])
    client.put_samples(["a", "b", "c"], "p", TensorDict({"x": torch.ones(3)}, batch_size=[3]))
    first, second = (client.claim_meta("p", "train", ["x"], 1, lease_s=600) for _ in range(2))
    gone = client.claim_meta("p", "train", ["x"], 1, lease_s=600)
    with pytest.raises(ClaimTimeoutError, match=f"3 are leased \\('a' by {this_process()} for another [0-9.]+ s"):
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
    client.ack(first)
    client.nack(second)
    client.clear_samples(gone.sample_ids, "p")
    base = client._backend._session.base.decode()
    (records,) = plain.admin("KEYS", f"{base}:e:*:k")
    assert plain.admin("HLEN", records) == 2  # which token may ack 'a' again, and a mark
    assert this_process().encode() not in b"".join(plain.admin("HVALS", records))
    assert plain.admin("ZCARD", records.removesuffix(b"k") + b"q") == 1  # a mark
    assert plain.admin("KEYS", f"{base}:e:*:a") == []


def fill(client, count):
    client.register_partition("p", ["x", "y"], None, ["train"])
    for first in range(0, count, 5000):
        ids = [f"s{number}" for number in range(first, first + 5000)]
        client.put_samples(ids, "p", TensorDict({"y": torch.ones(5000)}, batch_size=[5000]))


def test_many_that_time_out_at_once_look_at_the_rows_once(plain, connect, at_once):
    client = connect(url=plain.url)
    fill(client, 20_000)
    errors = []

    def wait():
        try:
            client.claim_meta("p", "train", ["x"], 1, timeout_s=0.5)
        except DataPlaneError as error:
            errors.append(error)

    at_once(wait, 32)
    assert [type(error) for error in errors] == [ClaimTimeoutError] * 32
    assert max(error.shortfall.num_lacking for error in errors) == 20_000


def test_a_timeout_tells_what_was_counted_until_the_deadline(plain, connect, monkeypatch):
    client = connect(url=plain.url)
    fill(client, 5000)
    script, asked = client._backend._session.link.script, []

    def slow(what, deadline, run, *words, **more):
        if run is SCRIPTS["shortfall"]:
            asked.append(run)
            if len(asked) == 2:
                raise OperationTimeoutError("the server did not answer in time.")
        return script(what, deadline, run, *words, **more)

    monkeypatch.setattr(client._backend._session.link, "script", slow)
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 1000)
    with pytest.raises(ClaimTimeoutError) as caught:
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
    assert len(asked) >= 2
    assert caught.value.shortfall.num_lacking in (1000, 5000)
