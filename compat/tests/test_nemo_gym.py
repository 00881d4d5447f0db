"""The token store for NeMo Gym, over a small stand-in for its records.

`scripts/checkouts/test_trainer_checkouts.py` runs NeMo Gym's own tests, where a checkout of it is given.
"""

import asyncio
import math

import pytest
from nemo_gym_stores import OTHERS, call_ids, config, entry, nemo_gym, open_store, store
from tiers import in_long

from dataplane_compat.nemo_gym import FIELDS, DataPlaneTokenStore, token_entries
from dataplane_core.errors import LostReplyError, MissingDataError, SchemaMismatchError, UnknownPartitionError

__all__ = ["config", "nemo_gym", "open_store", "store"]

pytestmark = pytest.mark.anyio
FROZEN = pytest.raises(RuntimeError, match="already frozen")


async def refused(call, said):
    """Whether a call was refused with these words."""
    try:
        await call
    except RuntimeError as error:
        if said not in str(error):
            raise
        return True
    return False


async def drop(store, snapshot, **other):
    """Drops a rollout by its snapshot, or by another id or version."""
    names = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version, **other}
    return await store.drop(snapshot.rollout_id, **names)


# --- what is written is what is read ----------------------------------------------------------------------------------


async def test_a_snapshot_holds_the_exact_calls(store):
    message = {"type": "message", "content": [{"text": "größer 🙂", "logprob": -0.1}], "flag": None, "n": 2**53 + 1}
    calls = [
        entry("first", model="m", output_items=[message], token_item_index=0, created_at=1.5),
        entry("ünï/🙂", prompt=(1, 2, 3, 4, 5, 6), ids=[2**40], routed_experts=[[1, 2], [3]], added_later={"a": 1}),
        entry("no tokens", prompt=(), ids=()),
        entry("floats", ids=(1, 2, 3)).model_copy(update={"generation_log_probs": [-1e-300, -math.inf, -0.1]}),
        entry("large", prompt=range(20_000), ids=[7] * 5_000),
    ]
    for call in calls:
        await store.put(call)
    first, second = await store.freeze("r"), await store.freeze("r")
    assert first.entries == tuple(calls)
    assert first == second
    assert first.rollout_id == "r"
    assert not first.incomplete


async def test_ids_of_any_kind_and_a_rollout_without_calls(store):
    rollout_ids = ["a/b", "..", "größe 🙂", "x" * 200]
    for rollout_id in rollout_ids:
        await store.put(entry("?", rollout_id=rollout_id))
    for rollout_id in rollout_ids:
        snapshot = await store.freeze(rollout_id)
        assert (snapshot.rollout_id, call_ids(snapshot)) == (rollout_id, ["?"])
    empty = await store.freeze("r")
    assert (empty.entries, empty.incomplete) == ((), False)
    with FROZEN:
        await store.put(entry("late"))
    assert await drop(store, empty)


def test_the_wrong_is_refused():
    async def run(store):
        with pytest.raises(ValueError, match="sample_id"):
            await store.put(entry("\ud800"))
        with pytest.raises(TypeError, match="bit"):
            await store.put(entry("c", output_items=[{"n": 2**70}]))
        assert not await store.drop("never seen", snapshot_id="x", version=1)
        await store.client.register_partition("captures", list(FIELDS), None, ["train"], if_exists="keep")
        await store.client.put_samples(["other"], "captures", {"calls": [1]})
        with pytest.raises(SchemaMismatchError):  # a partition of another kind
            await store.freeze("r")
        await store.close()
        await store.close()

    asyncio.run(run(DataPlaneTokenStore({"backend": "noop"}, bootstrap=True)))
    with pytest.raises(TypeError):
        DataPlaneTokenStore()


# --- a call is written once -------------------------------------------------------------------------------------------


async def test_of_two_writers_of_a_call_the_first_payload_stays_and_another_is_refused(open_store):
    stores = [open_store(), open_store()]
    same = [store.put(entry("c")) for store in stores * 4]
    assert await asyncio.gather(*same) == [None] * 8
    with pytest.raises(ValueError, match="'c' was reused with a different payload"):
        await stores[1].put(entry("c", ids=(9,)))
    other = [store.put(entry("d", ids=[i])) for i, store in enumerate(stores * 4)]
    refused = [each for each in await asyncio.gather(*other, return_exceptions=True) if each is not None]
    assert {type(each) for each in refused} == {ValueError}
    assert len(refused) >= 7
    snapshot = await stores[0].freeze("r")
    assert snapshot.incomplete
    assert snapshot.entries[0] == entry("c")


# --- freezing ---------------------------------------------------------------------------------------------------------


async def test_after_a_freeze_nothing_is_written(store):
    await store.put(entry("c"))
    await store.freeze("r")
    for late in (entry("late"), entry("c"), entry("c", ids=(9,))):
        with FROZEN:
            await store.put(late)
    with FROZEN:
        await store.begin_call("r", "late")
    assert (await store.client.list_samples(f"{store._partition}/r")).size == 1, "only the state is left there"
    snapshot = await store.freeze("r")
    assert snapshot.entries == (entry("c"),)
    assert not snapshot.incomplete


async def test_a_put_that_succeeds_beside_a_freeze_is_in_the_snapshot(open_store):
    stores = [open_store() for _ in range(3)]

    async def write(store, first, rollout_id):
        done = []
        for i in range(first, first + 40):
            if await refused(store.put(entry(str(i), rollout_id=rollout_id)), "already frozen"):
                break
            done.append(str(i))
        return done

    async def freeze(store, rollout_id, pause):
        for _ in range(pause):
            await store.client.ping()
        return await store.freeze(rollout_id)

    for pause in (0, 1, 3, 10, 30):
        rollout_id = f"r{pause}"
        *written, first, second, third = await asyncio.gather(
            *(write(store, 100 * i, rollout_id) for i, store in enumerate(stores)),
            *(freeze(store, rollout_id, pause) for store in stores),
        )
        assert sorted(call_ids(first)) == sorted(each for done in written for each in done)
        assert first == second == third


async def test_a_call_that_began_and_never_came_makes_the_rollout_incomplete(store):
    await store.begin_call("whole", "c")
    await store.begin_call("whole", "c")
    await store.put(entry("c", rollout_id="whole"))
    await store.begin_call("lost", "c")
    await store.mark_incomplete("marked")
    assert [(await store.freeze(each)).incomplete for each in ("whole", "lost", "marked")] == [False, True, True]


# --- dropping ---------------------------------------------------------------------------------------------------------


async def test_a_drop_clears_the_snapshot_it_names_and_no_other(store):
    await store.put(entry("c"))
    assert not await store.drop("r", snapshot_id="", version=1)  # it is not frozen
    old = await store.freeze("r")
    assert not await drop(store, old, snapshot_id="other")
    assert not await drop(store, old, version=old.version + 7)
    await store.mark_incomplete("r", "late")
    assert not await drop(store, old)
    new = await store.freeze("r")
    assert (new.incomplete, new.entries, new.snapshot_id) == (True, old.entries, old.snapshot_id)
    assert not await drop(store, old)
    await store.mark_incomplete("r", "another")  # which changes nothing
    assert await store.freeze("r") == new
    assert await drop(store, new)
    assert await drop(store, new)  # again
    late = (store.put(entry("c")), store.begin_call("r", "d"), store.mark_incomplete("r"), store.freeze("r"))
    for call in late:
        with pytest.raises(RuntimeError, match="retired"):
            await call
    assert not (await store.client.list_samples(store._partition)).size
    await store.client.clear_samples(None, f"{store._partition}/r")  # it is forgotten
    await store.put(entry("e"))
    assert not await drop(store, new)
    assert call_ids(await store.freeze("r")) == ["e"]


async def test_a_drop_beside_marks_and_reads(open_store):
    stores = [open_store() for _ in range(3)]

    async def read(store, rollout_id, found):
        async def once():
            found.append(await store.freeze(rollout_id))

        while not await refused(once(), "retired"):
            pass

    for rollout_id in map(str, range(10)):
        await stores[0].put(entry("c", rollout_id=rollout_id, ids=range(1000)))
        old, found = await stores[0].freeze(rollout_id), []
        readers = [asyncio.create_task(read(store, rollout_id, found)) for store in stores]
        mark = refused(stores[1].mark_incomplete(rollout_id, "late"), "retired")
        too_late, dropped = await asyncio.gather(mark, drop(stores[2], old))
        assert too_late == dropped  # one of the two was first, and the other knows
        if not dropped:
            now = await stores[0].freeze(rollout_id)
            assert now.incomplete
            assert await drop(stores[0], now)
        await asyncio.gather(*readers)
        assert all(each.entries == old.entries for each in found)


@pytest.mark.parametrize("config", ["noop", "shm_store", *in_long(*OTHERS)], indirect=True)
async def test_a_freeze_and_a_drop_that_were_cut_off_are_completed(open_store, monkeypatch):
    """By another process."""
    dying, store = open_store(), open_store()

    async def fail(*args, **kwargs):
        raise LostReplyError("no answer")

    for operation in ("get_samples", "put_samples", "clear_samples"):
        await store.put(entry("c", rollout_id=operation))
        with monkeypatch.context() as patch:
            patch.setattr(dying.client, operation, fail)
            with pytest.raises(LostReplyError):
                await dying.freeze(operation)
        with FROZEN:
            await store.put(entry("late", rollout_id=operation))
        snapshot = await store.freeze(operation)
        assert call_ids(snapshot) == ["c"]
        assert not snapshot.incomplete
        with monkeypatch.context() as patch:
            patch.setattr(dying.client, "put_samples", fail)
            with pytest.raises(LostReplyError):
                await drop(dying, snapshot)
        assert await drop(store, snapshot)
    assert (await store.client.list_samples(store._partition)).size == 0


async def test_what_others_cleared_is_said(store):
    await store.put(entry("c"))
    await store.freeze("r")
    await store.client.clear_samples(["r"], store._partition)
    with pytest.raises(MissingDataError, match="'r'"):
        await store.freeze("r")
    await store.client.clear_samples(None, store._partition)
    with pytest.raises(UnknownPartitionError):
        await store.freeze("r")


# --- a trainer --------------------------------------------------------------------------------------------------------


async def test_a_trainer_claims_finished_rollouts(open_store):
    writer, trainer = open_store(), open_store()
    for rollout_id, turns in (("a", 3), ("b", 1), ("open", 2), ("lost", 1), ("late", 1)):
        for turn in range(turns):
            await writer.put(entry(f"turn{turn}", rollout_id=rollout_id, prompt=range(10 * turn + 1)))
    await writer.mark_incomplete("lost")
    for rollout_id in ("lost", "late", "b", "a"):
        await writer.freeze(rollout_id)
    await writer.mark_incomplete("late")
    finished = {"lease_s": 600, "tag_filter": {"incomplete": False}}
    meta = await trainer.client.claim_meta(trainer._partition, "train", FIELDS, 2, **finished)
    rows = token_entries(await trainer.client.get_data(meta))
    left = await trainer.client.claim_meta(trainer._partition, "train", FIELDS, 9, blocking=False)
    await trainer.client.ack(meta)
    assert meta.sample_ids == ["b", "a"]
    assert meta.sequence_lengths == [3, 23]
    assert [tags["calls"] for tags in meta.tags] == [1, 3]
    assert [[each.model_call_id for each in row] for row in rows] == [["turn0"], ["turn0", "turn1", "turn2"]]
    assert rows[1][2] == entry("turn2", rollout_id="a", prompt=range(21))
    assert left.sample_ids == ["lost", "late"]
    for rollout_id, tags in zip(meta.sample_ids, meta.tags, strict=True):
        assert await trainer.drop(rollout_id, snapshot_id=tags["snapshot_id"], version=tags["version"])


# --- rollouts of several rows -----------------------------------------------------------------------------------------


async def test_calls_are_the_rows_of_rollouts_whose_groups_a_trainer_claims(open_store):
    store = open_store(rollouts=True, grpo_group_size=2)
    written = {"7-0": 3, "7-1": 0, "7-1-a1": 1, "q0_g0": 2, "q0_g1": 1}  # of Gym's first attempt at 7-1 no end comes
    for rollout_id, num_calls in written.items():
        await store.begin_call(rollout_id, "turn0")
        for turn in range(num_calls):
            await store.put(entry(f"turn{turn}", rollout_id=rollout_id, prompt=range(10 * turn + 1)))
    first, _, last = [await store.freeze(rollout_id) for rollout_id in ("7-0", "q0_g1", "7-1-a1")]
    assert await store.freeze("7-0") == first
    meta = await store.client.claim_meta(store._partition, "train", FIELDS, 1)
    assert meta.sample_ids == ["7_g0/0", "7_g0/1", "7_g0/2", "7_g1-a1/0"]
    assert meta.sequence_lengths == [3, 13, 23, 3]
    assert [tags["rollout_id"] for tags in meta.tags] == ["7-0"] * 3 + ["7-1-a1"]
    calls = token_entries(await store.client.get_data(meta))
    assert [call for row in calls for call in row] == [*first.entries, *last.entries]
    for snapshot, num_left in ((first, 2), (last, 1)):
        assert await drop(store, snapshot)
        assert (await store.client.list_samples(store._partition)).size == num_left

    await store.mark_incomplete("q0_g1")
    await store.mark_incomplete("q0_g0")
    await store.freeze("q0_g0")
    meta = await store.client.claim_meta(store._partition, "train", FIELDS, 1)
    assert meta.sample_ids == ["q0_g1/0", "q0_g0/0", "q0_g0/1"]
    assert all(tags["incomplete"] for tags in meta.tags)


@pytest.mark.parametrize("config", ["noop"], indirect=True)
async def test_a_rollout_without_calls_has_a_row_and_what_is_of_no_group_is_refused(open_store):
    store = open_store(rollouts=True)
    assert (await store.freeze("q0_g0")).entries == ()
    await store.client.seal({"q0_g0": 1}, store._partition, ends_groups=True)
    assert (await store.client.claim_meta(store._partition, "train", FIELDS, 1)).sample_ids == ["q0_g0/0"]
    await store.put(entry("c", rollout_id="q1_g0"))
    await store.client.register_partition(store._partition, list(FIELDS), None, ["train"])  # as another store would
    for call in (store.freeze("q1_g0"), store.put(entry("c", rollout_id="q2_g0"))):
        with pytest.raises(ValueError, match="rollouts is True"):
            await call
    with pytest.raises(ValueError, match="of no group"):
        await store.begin_call("r", "turn0")
