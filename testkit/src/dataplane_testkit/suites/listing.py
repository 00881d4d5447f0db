"""What a store tells: its samples, partitions, clients and storage units."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dataplane_core.errors import InvalidRequestError, LeaseHolder, LostSamplesError
from dataplane_core.spec import CallInfo, Capability, ClientInfo, FieldSpec, PhaseInfo, Question, WorkInfo, this_process
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, jagged
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import STARTS_S, eventually

_LONG_S, _SHORT_S = 600.0, 0.1
#: Rows of a put. Ten such puts reach every unit.
_NUM_ROWS = 24


def _oldest_lease(store: Store, partition: str) -> LeaseHolder:
    found = store.client.describe(partition).tasks["train"].oldest_lease
    assert found is not None, "describe names no lease"
    return found


def _client(**about: Any) -> ClientInfo:
    made = ClientInfo(
        client_id=uuid.uuid4().hex, host="a host", pid=7, role="a role", open_s=1.5, metrics_address="a host:8000"
    )
    return replace(made, **about)


def _close(store: Store, *clients: ClientInfo) -> None:
    """The clients are closed. Otherwise other tests count them for minutes."""
    for each in clients:
        store.hooks.announce(each, 0.0)


def _put_on_all_units(store: Store, partition: str) -> list[str]:
    """Puts so often that each unit gets rows. Returns the ids."""
    names = ids(10 * _NUM_ROWS)
    for first in range(0, len(names), _NUM_ROWS):
        store.put(partition, names[first : first + _NUM_ROWS], x=torch.arange(_NUM_ROWS))
    return names


def _held(store: Store, name: str) -> int | None:
    """The rows that a unit holds; None if it is no longer listed."""
    return {each.name: each.num_rows for each in store.client.list_units()}.get(name)


class ListingSuite(Suite, chapter="listing"):
    """Lists of samples, partitions, clients and units."""

    def test_listing_gives_ids_and_tags(self, store: Store) -> None:
        partition = store.register("x", "y")
        assert store.client.list_samples(partition).sample_ids == []
        store.put(partition, ["b", "a"], [{"n": 1, "input_lengths": 3}, {"input_lengths": 4}], x=torch.arange(2))
        store.put(partition, ["c"], y=torch.zeros(1))
        store.put(partition, ["tags"], [{"n": 1}])
        for _ in range(2):
            meta = store.client.list_samples(partition)
            assert (meta.partition_id, meta.sample_ids) == (partition, ["b", "a", "c", "tags"])
            assert meta.tags == [{"n": 1, "input_lengths": 3}, {"input_lengths": 4}, {}, {"n": 1}]
            meta.tags[0]["n"] = 9

    def test_listing_of_given_samples(self, store: Store) -> None:
        partition = store.filled(["a", "b"], "x", "y", tags=[{"n": 1}, {"n": 2}])
        store.put(partition, ["tags"], [{"n": 3}])
        store.put(partition, ["cells"], x=torch.zeros(1, dtype=torch.int64), y=torch.zeros(1))
        store.client.clear_samples(["a"], partition)
        meta = store.client.list_samples(partition, sample_ids=["cells", "nobody", "tags", "b", "a", "b"])
        assert (meta.sample_ids, meta.tags) == (["cells", "tags", "b"], [{}, {"n": 3}, {"n": 2}])
        if store.declares(Capability.TAG_FILTERS):
            assert store.client.list_samples(partition, {"n": (">", 2)}, ["tags", "b"]).sample_ids == ["tags"]
        for none in ([], ["nobody"]):
            assert store.client.list_samples(partition, sample_ids=none).sample_ids == []
        found = store.client.list_fields(["tags", "cells", "b", "cells"], partition)
        assert [sorted(names) for names in found] == [[], ["x", "y"], ["x"], ["x", "y"]]
        with store.refusal(KeyError, "nobody"):
            store.client.list_fields(["b", "nobody"], partition)

    def test_listing_of_many_samples(self, store: Store) -> None:
        partition = store.filled(ids(1500)[::-1], tags=[{"n": index} for index in range(1500)])
        meta = store.client.list_samples(partition)
        assert meta.sample_ids == ids(1500)[::-1]
        assert meta.tags == [{"n": index} for index in range(1500)]

    def test_partitions_are_listed(self, store: Store) -> None:
        first, second = sorted([store.register("x"), store.register("x")])
        store.client.ping()
        listed = store.client.list_partitions()
        assert listed == sorted(listed)
        assert {first, second} <= set(listed)
        assert first in store.same_store_client().list_partitions()
        store.client.clear_samples(None, first)
        listed = store.client.list_partitions()
        assert (first in listed, second in listed) == (False, True)

    # --- describe -----------------------------------------------------------------------------------------------------

    def test_describe_counts_samples(self, store: Store) -> None:
        partition = store.register("x", num_samples=64, tasks=["a", "b"])
        empty = store.client.describe(partition)
        assert (empty.num_samples, empty.num_cleared, empty.held_bytes, empty.oldest_s) == (0, 0, 0, None)
        info = (empty.info.fields, empty.info.num_samples, empty.info.consumer_tasks)
        assert info == (("x",), 64, ("a", "b"))
        store.put(partition, ids(64), x=torch.zeros(64, 100, dtype=torch.float64))
        full = store.client.describe(partition)
        assert 64 * 800 <= full.held_bytes <= 2 * 64 * 800
        assert full.oldest_s is not None
        for cleared in (48, 64):
            store.client.clear_samples(ids(cleared), partition)
            less = store.client.describe(partition)
            assert (less.num_samples, less.num_cleared) == (64 - cleared, cleared)
            assert less.held_bytes == full.held_bytes * (64 - cleared) // 64
        assert less.oldest_s is None
        with store.refusal(KeyError, "nowhere"):
            store.client.describe("nowhere")

    def test_describe_tells_the_schema(self, store: Store) -> None:
        partition = store.register("x", "never")
        x = jagged([torch.zeros(3, 2), torch.zeros(1, 2)])
        store.put(partition, ids(2), x=x, o=as_objects(1, 2))
        store.put(partition, ["s0", "s2"], s=torch.zeros(2))
        found = store.client.describe(partition)
        specs = {"x": FieldSpec("tensor", "float32", 2, (2,)), "o": FieldSpec.of_objects()}
        assert found.specs == {**specs, "s": FieldSpec("tensor", "float32", 0)}
        assert found.num_rows == {"x": 2, "o": 2, "s": 2}
        if store.declares(Capability.OVERWRITE):
            store.put(partition, ["s0"], x=x.unbind()[0][None])
        store.client.clear_samples(["s1", "s2"], partition)
        assert store.client.describe(partition).num_rows == {"x": 1, "o": 1, "s": 1}

    def test_describe_counts_per_task(self, store: Store) -> None:
        group_size = 2 if store.declares(Capability.GROUPS) else None
        whole = [f"{group}_g{member}" for group in "kmn" for member in range(2)]
        partition = store.filled([*whole, "late_g0", "late_g1"], "x", "y", tasks=["a", "b"], group_size=group_size)
        store.put(partition, [*whole, "late_g0"], y=torch.zeros(7))
        store.claim(partition, 2, task="a")
        store.claim(partition, 2, task="a", lease_s=_LONG_S)
        tasks = store.client.describe(partition).tasks
        found = {name: (task.num_ready, task.num_leased, task.num_consumed) for name, task in tasks.items()}
        alone = 0 if group_size else 1  # late_g0 lacks its group
        assert found == {"a": (2 + alone, 2, 2), "b": (6 + alone, 0, 0)}

    def test_questions_are_answered(self, store: Store) -> None:
        partition = store.filled(5, "x", "y", tags=[{"v": number} for number in range(5)])
        store.put(partition, ids(3), y=torch.zeros(3))
        ask = partial(Question, required_fields=["x"], task_name="train")
        lacking = ask(required_fields=["x", "y"], explain=True)
        questions = [ask(), lacking, ask(tag_filter={"v": (">=", 3)}, explain=True), ask(task_name="nobody")]
        plain, both, filtered, unknown = store.hooks.answers(partition, *questions)
        assert (plain.num_ready, plain.shortfall, unknown) == (5, None, None)
        assert (both.num_ready, both.shortfall.num_lacking) == (3, 2)
        assert both.shortfall.missing_cells == {"s3": ("y",), "s4": ("y",)}
        assert (filtered.num_ready, list(filtered.shortfall.not_matching)) == (2, ["s2", "s1", "s0"])
        assert store.claim(partition, 5).size == 5, "a question took samples"

    def test_describe_names_the_oldest_lease(self, store: Store) -> None:
        partition = store.filled(8, tasks=["train", "b"])
        first, second = (store.claim(partition, 2, lease_s=lease_s) for lease_s in (_LONG_S, 60.0))
        found = _oldest_lease(store, partition)
        assert (found.sample_id in first.sample_ids, found.holder) == (True, this_process())
        assert 60.0 < found.left_s <= _LONG_S
        store.client.ack(first.slice(0, 1))
        store.client.nack(first.slice(1, 2))
        assert _oldest_lease(store, partition).sample_id in second.sample_ids
        store.client.ack(second)
        store.claim(partition, 1, task="b", lease_s=_SHORT_S)
        eventually(lambda: store.client.describe(partition).tasks["b"].num_ready == 8, what="the end of a lease")
        assert [task.oldest_lease for task in store.client.describe(partition).tasks.values()] == [None, None]

    @pytest.mark.parametrize("left", [0, 1], ids=["the_renewed_one", "the_other_one"])
    def test_a_renewal_of_a_part_changes_no_age(self, store: Store, left: int) -> None:
        partition = store.filled(2)
        meta = store.claim(partition, 2, lease_s=_LONG_S)

        def age_s() -> float:
            return _oldest_lease(store, partition).held_s or 0.0

        eventually(lambda: age_s() >= 0.1, what="a lease that is 0.1 s old")
        before_s = age_s()
        store.client.renew(meta.subset([0]), 2 * _LONG_S)
        store.client.ack(meta.subset([1 - left]))
        assert age_s() >= before_s / 2, "after a renewal of a part of a claim, a lease is younger than before"

    # --- clients ------------------------------------------------------------------------------------------------------

    def test_announced_clients_are_listed(self, store: Store) -> None:
        calls = [CallInfo(operation="claim_meta", partition_id="schritt 1 \u2192 \u2713", running_s=3.25)]
        phases = [PhaseInfo(name="generate \u2713", running_s=2.5, partition_id="p", groups=("q1", "q\u00e9"))]
        mine, other = _client(role="rollout: 1 \u00e9\n\x00", calls=calls, num_calls=1, phases=phases), _client()
        for each in (replace(mine, calls=[], num_calls=0), other, mine):
            store.hooks.announce(each, _LONG_S)
        for hooks in (store.hooks, Hooks(backend_of(store.same_store_client()))):
            listed = {each.client_id: each for each in hooks.clients()}
            assert other.client_id in listed
            found = listed[mine.client_id]
            assert 0.0 <= found.heard_s < _LONG_S
            assert list(found.calls) == calls
            assert [replace(each, groups=tuple(each.groups)) for each in found.phases] == phases
            assert replace(found, heard_s=0.0, calls=calls, work=(), phases=phases) == mine
        _close(store, mine, other)

    def test_the_number_of_clients_is_replied(self, store: Store) -> None:
        made = [_client() for _ in range(50)]
        for each in made:
            store.hooks.announce(each, _LONG_S)

        def replied_as_listed() -> bool:
            num_clients: int = store.hooks.announce(made[0], _LONG_S).num_clients
            listed = [each.client_id for each in store.hooks.clients()]
            assert {each.client_id for each in made} <= set(listed)
            return num_clients == len(listed)  # unless another client came or went meanwhile

        eventually(replied_as_listed, STARTS_S, "the number of clients that are listed")
        while len(made) > 1:
            _close(store, made.pop())
        eventually(replied_as_listed, STARTS_S, "the number of clients that are listed")
        _close(store, *made)

    def test_clients_that_ended_are_listed_if_asked_for(self, store: Store) -> None:
        claim = WorkInfo(operation="claim_meta", partition_id="p", fields=("x",), tag_filter={"v": (">=", 7)})
        closed, silent, back, other = _client(), _client(work=[claim]), _client(), _client()
        for each in (closed, back, other):
            store.hooks.announce(each, _LONG_S)
        _close(store, closed, closed, back, _client())
        store.hooks.announce(silent, 0.3)
        store.hooks.announce(back, _LONG_S)
        made = {each.client_id for each in (closed, silent, back, other)}

        def states(ended: bool) -> dict[str, str]:
            return {each.client_id: each.state for each in store.hooks.clients(ended=ended) if each.client_id in made}

        is_open = {back.client_id: "open", other.client_id: "open"}
        eventually(lambda: states(False) == is_open, what="that a silent client is not listed, and others are")
        assert states(True) == {closed.client_id: "closed", silent.client_id: "silent", **is_open}
        (found,) = (each for each in store.hooks.clients(ended=True) if each.client_id == silent.client_id)
        assert [replace(each, fields=tuple(each.fields)) for each in found.work] == [claim]
        _close(store, back, other)

    # --- units --------------------------------------------------------------------------------------------------------

    def test_a_unit_that_is_added_gets_rows_and_is_drained(self, store: Store) -> None:
        partition = store.register("x")
        before = {each.name for each in store.client.list_units()}
        (new,) = store.client.add_units(1)
        assert (new.name in before, new.state) == (False, "serving")
        assert {each.name for each in Hooks(backend_of(store.same_store_client())).units()} == {*before, new.name}
        names = _put_on_all_units(store, partition)
        held = _held(store, new.name)
        assert held, "a new unit gets no rows"
        removed = store.client.remove_unit(new.name)
        assert removed is not None
        assert removed.state == "draining"
        store.put(partition, ["later"], x=torch.arange(1))
        assert _held(store, new.name) == held, "a unit that is drained gets rows"
        assert store.get(partition, [*names, "later"])["x"].tolist() == [*range(_NUM_ROWS)] * 10 + [0]
        store.client.clear_samples(names, partition)
        eventually(lambda: _held(store, new.name) is None, STARTS_S, "the end of the unit")
        assert store.has(partition, "later")

    def test_a_unit_that_is_removed_now_loses_its_rows_and_no_others(self, store: Store) -> None:
        partition = store.register("x")
        (new,) = store.client.add_units(1)
        names = _put_on_all_units(store, partition)
        held = _held(store, new.name)
        store.client.remove_unit(new.name, now=True)
        with store.refusal(LostSamplesError) as caught:
            store.get(partition, names)
        lost = caught.value.missing_samples
        assert len(lost) == held
        kept = [name for name in names if name not in lost]
        assert store.get(partition, kept)["x"].tolist() == [int(name[1:]) % _NUM_ROWS for name in kept]
        store.client.clear_samples(lost, partition)
        store.put(partition, lost, x=torch.arange(len(lost)))
        assert store.get(partition, lost)["x"].tolist() == [*range(len(lost))]
        store.client.clear_samples(None, partition)
        eventually(lambda: _held(store, new.name) is None, STARTS_S, "the end of the unit")

    def test_units_that_are_not_there_are_refused(self, store: Store) -> None:
        names = [each.name for each in store.client.list_units() if each.state == "serving"]
        for refused in ("no such unit", *(names if len(names) == 1 else ())):
            with store.refusal(InvalidRequestError):
                store.client.remove_unit(refused)
        assert [each.name for each in store.client.list_units() if each.state == "serving"] == names
