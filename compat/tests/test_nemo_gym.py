"""The token store for NeMo Gym, over a small stand-in for its records.

`scripts/checkouts/test_nemo_gym_checkout.py` runs NeMo Gym's own tests, where a checkout of it is given.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import in_long

from dataplane_compat.nemo_gym import FIELDS, DataPlaneTokenStore, token_entries
from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.errors import LostReplyError, MissingDataError, SchemaMismatchError, UnknownPartitionError

STAND_IN = str(Path(__file__).parent / "nemo_gym_stand_in")


@pytest.fixture(autouse=True)
def nemo_gym(monkeypatch):
    """The stand-in, importable."""
    monkeypatch.syspath_prepend(STAND_IN)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_gym"]:
        del sys.modules[name]


BACKENDS = ["noop", *in_long("shm_store", "redis_store", "tq_simple", "tq_mooncake")]
SHARED = ["shm_store", *in_long("redis_store", "tq_simple", "tq_mooncake")]


@pytest.fixture(scope="module")
def config(request):
    """The config of a store that runs."""
    config = {"backend": request.param, "op_timeout_s": 120}
    if request.param == "noop":
        yield config
        return
    if request.param.startswith("tq_"):
        config["options"] = {"ray_address": request.getfixturevalue("ray_address")}  # for the processes of the tests
    with connect(config):
        yield config


@pytest.fixture
def open_store(config, request):
    """Opens further stores of the same test. On noop, which has no second client, all are one."""
    made = []

    def open_store():
        if config["backend"] != "noop" or not made:
            bootstrap = config["backend"] == "noop"
            made.append(DataPlaneTokenStore(config, partition=request.node.name, bootstrap=bootstrap))
        return made[-1]

    yield open_store
    for store in made:
        asyncio.run(store.close())


@pytest.fixture
def store(open_store):
    return open_store()


def entry(call_id, *, rollout_id="r", prompt=(1, 2, 3), ids=(4, 5), **others):
    from nemo_gym.token_id_capture import TokenEntry

    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=list(prompt),
        generation_token_ids=list(ids),
        generation_log_probs=[-0.1 * each for each in range(len(ids))],
        **others,
    )


def call_ids(snapshot):
    return [each.model_call_id for each in snapshot.entries]


on_all = pytest.mark.parametrize("config", BACKENDS, indirect=True)
on_shared = pytest.mark.parametrize("config", SHARED, indirect=True)


# --- what is written is what is read ----------------------------------------------------------------------------------


@on_all
def test_a_snapshot_holds_the_exact_calls(store):
    message = {"type": "message", "content": [{"text": "größer 🙂", "logprob": -0.1}], "flag": None, "n": 2**53 + 1}
    calls = [
        entry("first", model="m", output_items=[message], token_item_index=0, created_at=1.5),
        entry("ünï/🙂", prompt=(1, 2, 3, 4, 5, 6), ids=[2**40], routed_experts=[[1, 2], [3]], added_later={"a": 1}),
        entry("no tokens", prompt=(), ids=()),
        entry("floats", ids=(1, 2, 3)).model_copy(update={"generation_log_probs": [-1e-300, -math.inf, -0.1]}),
        entry("huge", prompt=range(200_000), ids=[7] * 50_000),
    ]

    async def run():
        for call in calls:
            await store.put(call)
        return await store.freeze("r"), await store.freeze("r")

    first, second = asyncio.run(run())
    assert first.entries == tuple(calls)
    assert first == second
    assert first.rollout_id == "r"
    assert not first.incomplete


@on_all
def test_ids_of_any_kind(store):
    rollout_ids = ["a/b", "..", "größe 🙂", "x" * 200]

    async def run():
        for rollout_id in rollout_ids:
            await store.put(entry("?", rollout_id=rollout_id))
        return [await store.freeze(rollout_id) for rollout_id in rollout_ids]

    assert [(each.rollout_id, call_ids(each)) for each in asyncio.run(run())] == [(each, ["?"]) for each in rollout_ids]


@on_all
def test_a_rollout_without_calls_is_an_empty_snapshot(store):
    async def run():
        snapshot = await store.freeze("r")
        with pytest.raises(RuntimeError, match="already frozen"):
            await store.put(entry("late"))
        dropped = await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        return snapshot.entries, snapshot.incomplete, dropped

    assert asyncio.run(run()) == ((), False, True)


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


@on_all
def test_a_put_whose_answer_was_lost_is_repeated(store, monkeypatch):
    put_samples = store.client.put_samples

    async def lose_reply(sample_ids, *args, **kwargs):
        await put_samples(sample_ids, *args, **kwargs)
        if sample_ids != ["?"]:
            raise LostReplyError("no answer")

    async def run():
        with monkeypatch.context() as patch:
            patch.setattr(store.client, "put_samples", lose_reply)
            with pytest.raises(LostReplyError):
                await store.put(entry("c"))
        await store.put(entry("c"))
        return await store.freeze("r")

    snapshot = asyncio.run(run())
    assert snapshot.entries == (entry("c"),)
    assert not snapshot.incomplete


@on_all
def test_another_payload_for_a_call_is_refused_and_the_first_stays(store):
    async def run():
        await store.put(entry("c"))
        with pytest.raises(ValueError, match="'c' was reused with a different payload"):
            await store.put(entry("c", ids=(9,)))
        await store.put(entry("c"))
        return await store.freeze("r")

    snapshot = asyncio.run(run())
    assert snapshot.entries == (entry("c"),)
    assert snapshot.incomplete


@on_all
def test_two_writers_of_a_call(open_store):
    stores = [open_store(), open_store()]

    async def run():
        same = [store.put(entry("c")) for store in stores * 4]
        assert await asyncio.gather(*same) == [None] * 8
        other = [store.put(entry("d", ids=[i])) for i, store in enumerate(stores * 4)]
        ends = await asyncio.gather(*other, return_exceptions=True)
        return ends, await stores[0].freeze("r")

    ends, snapshot = asyncio.run(run())
    assert [type(each) for each in ends if each is not None] == [ValueError] * sum(each is not None for each in ends)
    assert sum(each is None for each in ends) <= 1
    assert snapshot.incomplete
    assert call_ids(snapshot)[0] == "c"


# --- freezing ---------------------------------------------------------------------------------------------------------


@on_all
def test_after_a_freeze_nothing_is_written(store):
    async def run():
        await store.put(entry("c"))
        await store.freeze("r")
        for late in (entry("late"), entry("c"), entry("c", ids=(9,))):
            with pytest.raises(RuntimeError, match="already frozen"):
                await store.put(late)
        with pytest.raises(RuntimeError, match="already frozen"):
            await store.begin_call("r", "late")
        return await store.freeze("r")

    snapshot = asyncio.run(run())
    assert snapshot.entries == (entry("c"),)
    assert not snapshot.incomplete


@on_all
def test_a_put_that_succeeds_beside_a_freeze_is_in_the_snapshot(open_store):
    stores = [open_store() for _ in range(3)]

    async def write(store, first, rollout_id):
        done = []
        for i in range(first, first + 40):
            try:
                await store.put(entry(str(i), rollout_id=rollout_id))
            except RuntimeError as error:
                if "already frozen" not in str(error):
                    raise
                break
            done.append(str(i))
        return done

    async def freeze(store, rollout_id, pause):
        for _ in range(pause):
            await store.client.ping()
        return await store.freeze(rollout_id)

    async def run(rollout_id, pause):
        return await asyncio.gather(
            *(write(store, 100 * i, rollout_id) for i, store in enumerate(stores)),
            *(freeze(store, rollout_id, pause) for store in stores),
        )

    for pause in (0, 1, 3, 10, 30):
        *written, first, second, third = asyncio.run(run(f"r{pause}", pause))
        assert sorted(call_ids(first)) == sorted(each for done in written for each in done)
        assert first == second == third


@on_all
def test_a_call_that_began_and_never_came_makes_the_rollout_incomplete(store):
    async def run():
        await store.begin_call("whole", "c")
        await store.begin_call("whole", "c")
        await store.put(entry("c", rollout_id="whole"))
        await store.begin_call("lost", "c")
        await store.mark_incomplete("marked")
        return [(await store.freeze(each)).incomplete for each in ("whole", "lost", "marked")]

    assert asyncio.run(run()) == [False, True, True]


# --- dropping ---------------------------------------------------------------------------------------------------------


@on_all
def test_a_drop_clears_the_snapshot_it_names_and_no_other(store):
    async def run():
        await store.put(entry("c"))
        assert not await store.drop("r", snapshot_id="", version=1)  # it is not frozen
        old = await store.freeze("r")
        assert not await store.drop("r", snapshot_id="other", version=old.version)
        assert not await store.drop("r", snapshot_id=old.snapshot_id, version=old.version + 7)
        await store.mark_incomplete("r", "late")
        assert not await store.drop("r", snapshot_id=old.snapshot_id, version=old.version)
        new = await store.freeze("r")
        assert (new.incomplete, new.entries, new.snapshot_id) == (True, old.entries, old.snapshot_id)
        assert not await store.drop("r", snapshot_id=old.snapshot_id, version=old.version)
        await store.mark_incomplete("r", "another")  # which changes nothing
        assert await store.freeze("r") == new
        assert await store.drop("r", snapshot_id=new.snapshot_id, version=new.version)
        assert await store.drop("r", snapshot_id=new.snapshot_id, version=new.version)  # again
        for late in (
            store.put(entry("c")),
            store.begin_call("r", "d"),
            store.mark_incomplete("r"),
            store.freeze("r"),
        ):
            with pytest.raises(RuntimeError, match="retired"):
                await late
        assert not (await store.client.list_samples(store._partition)).size
        await store.client.clear_samples(None, f"{store._partition}/r")  # it is forgotten
        await store.put(entry("e"))
        assert not await store.drop("r", snapshot_id=new.snapshot_id, version=new.version)
        return await store.freeze("r")

    assert call_ids(asyncio.run(run())) == ["e"]


@on_all
def test_a_drop_beside_marks_and_reads(open_store):
    stores = [open_store() for _ in range(3)]

    async def read(store, rollout_id, found):
        while True:
            try:
                found.append(await store.freeze(rollout_id))
            except RuntimeError as error:
                if "retired" not in str(error):
                    raise
                return

    async def mark(store, rollout_id):
        try:
            await store.mark_incomplete(rollout_id, "late")
        except RuntimeError as error:
            if "retired" not in str(error):
                raise
            return False
        return True

    async def run(rollout_id):
        await stores[0].put(entry("c", rollout_id=rollout_id, ids=range(1000)))
        old = await stores[0].freeze(rollout_id)
        found = []
        readers = [asyncio.create_task(read(store, rollout_id, found)) for store in stores]
        marked, dropped = await asyncio.gather(
            mark(stores[1], rollout_id),
            stores[2].drop(rollout_id, snapshot_id=old.snapshot_id, version=old.version),
        )
        assert marked != dropped  # one of the two was first, and the other knows
        if not dropped:
            now = await stores[0].freeze(rollout_id)
            assert now.incomplete
            assert await stores[0].drop(rollout_id, snapshot_id=now.snapshot_id, version=now.version)
        await asyncio.gather(*readers)
        assert all(each.entries == old.entries for each in found)

    for i in range(10):
        asyncio.run(run(f"r{i}"))


@on_all
def test_a_drop_that_was_cut_off_is_completed(store, monkeypatch):
    async def fail(*args, **kwargs):
        raise LostReplyError("no answer")

    async def run():
        await store.put(entry("c"))
        snapshot = await store.freeze("r")
        name = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        with monkeypatch.context() as patch:
            patch.setattr(store.client, "put_samples", fail)
            with pytest.raises(LostReplyError):
                await store.drop("r", **name)
        assert await store.drop("r", **name)
        return (await store.client.list_samples(store._partition)).size

    assert asyncio.run(run()) == 0


# --- a trainer --------------------------------------------------------------------------------------------------------


@on_all
def test_a_trainer_claims_finished_rollouts(open_store):
    writer, trainer = open_store(), open_store()

    async def run():
        for rollout_id, turns in (("a", 3), ("b", 1), ("open", 2), ("lost", 1)):
            for turn in range(turns):
                await writer.put(entry(f"turn{turn}", rollout_id=rollout_id, prompt=range(10 * turn + 1)))
        await writer.mark_incomplete("lost")
        for rollout_id in ("lost", "b", "a"):
            await writer.freeze(rollout_id)
        meta = await trainer.client.claim_meta(
            trainer._partition, "train", FIELDS, 2, lease_s=600, tag_filter={"incomplete": False}
        )
        rows = token_entries(await trainer.client.get_data(meta))
        left = await trainer.client.claim_meta(trainer._partition, "train", FIELDS, 9, blocking=False)
        await trainer.client.ack(meta)
        dropped = [
            await trainer.drop(each, snapshot_id=tags["snapshot_id"], version=tags["version"])
            for each, tags in zip(meta.sample_ids, meta.tags, strict=True)
        ]
        return meta, rows, left.sample_ids, dropped

    meta, rows, left, dropped = asyncio.run(run())
    assert meta.sample_ids == ["b", "a"]
    assert meta.sequence_lengths == [3, 23]
    assert [tags["calls"] for tags in meta.tags] == [1, 3]
    assert [[each.model_call_id for each in row] for row in rows] == [["turn0"], ["turn0", "turn1", "turn2"]]
    assert rows[1][2] == entry("turn2", rollout_id="a", prompt=range(21))
    assert left == ["lost"]
    assert dropped == [True, True]


@pytest.mark.parametrize("config", ["shm_store"], indirect=True)
def test_read_and_export_show_the_rows(store, config, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "run.json").write_text(json.dumps(config))
    name, run = store._partition, str(tmp_path / "run.json")

    async def write():
        await store.put(entry("first", rollout_id="a"))
        await store.put(entry("second", rollout_id="a", ids=(6, 7, 8)))
        await store.put(entry("other", rollout_id="open"))
        await store.freeze("a")

    asyncio.run(write())
    assert main(["read", run, name, "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["sample_id"] == "a"
    assert sample["objects"]["generation_token_ids"] == [4, 5, 6, 7, 8]
    assert main(["read", run, f"{name}/open"]) == 0
    assert "other" in capsys.readouterr().out
    assert main(["export", run, name, str(tmp_path / "out")]) == 0
    (row,) = pq.read_table(tmp_path / "out").to_pylist()
    assert row["sample_id"] == "a"
    assert row["generation_token_ids"] == [4, 5, 6, 7, 8]
    assert row["generation_lengths"] == [2, 3]
    assert [each["model_call_id"] for each in json.loads(row["calls"])] == ["first", "second"]
    assert main(["import", str(tmp_path / "out"), run, f"{name}-again"]) == 0
    again = DataPlaneTokenStore(config, partition=f"{name}-again")
    rows = asyncio.run(again.client.get_samples(["a"], f"{name}-again", FIELDS))
    assert token_entries(rows)[0] == list(asyncio.run(store.freeze("a")).entries)
    asyncio.run(again.close())


# --- processes that die -----------------------------------------------------------------------------------------------

WRITER = """
import asyncio, json, sys
from test_nemo_gym import entry
from dataplane_compat.nemo_gym import DataPlaneTokenStore

async def main(config, partition, rollout_id, count, tokens):
    store = DataPlaneTokenStore(config, partition=partition)
    for i in range(count):
        await store.begin_call(rollout_id, str(i))
    print("begun", flush=True)
    await asyncio.gather(*(store.put(entry(str(i), rollout_id=rollout_id, ids=[i] * tokens)) for i in range(count)))
    print("done", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def start_writer(python, *arguments):
    paths = [STAND_IN, os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return python.start("-c", WRITER, json.dumps(arguments), env=env, stdout=subprocess.PIPE, text=True)


@on_shared
def test_a_writer_is_killed_after_its_puts(store, config, python):
    with start_writer(python, config, store._partition, "r", 3, 2) as writer:
        assert [writer.stdout.readline(), writer.stdout.readline()] == ["begun\n", "done\n"]
        writer.kill()
    snapshot = asyncio.run(store.freeze("r"))
    assert sorted(call_ids(snapshot)) == ["0", "1", "2"]
    assert not snapshot.incomplete


@on_shared
def test_a_writer_is_killed_in_its_puts(store, config, python):
    count, tokens = 60, 20_000

    async def run(writer, rollout_id):
        deadline = time.monotonic() + 120
        while True:
            rows = await store.client.list_samples(f"{store._partition}/{rollout_id}")
            if any("call" in tags for tags in rows.tags):
                writer.kill()
                return await store.freeze(rollout_id)
            assert time.monotonic() < deadline

    with start_writer(python, config, store._partition, "r", count, tokens) as writer:
        assert writer.stdout.readline() == "begun\n"
        snapshot = asyncio.run(run(writer, "r"))
    assert asyncio.run(store.freeze("r")) == snapshot
    for each in snapshot.entries:
        assert each == entry(each.model_call_id, rollout_id="r", ids=[int(each.model_call_id)] * tokens)
    assert snapshot.incomplete == (len(snapshot.entries) < count)


@on_shared
def test_a_freeze_that_was_cut_off_is_completed_by_another_process(open_store, monkeypatch):
    dying, store = open_store(), open_store()

    async def fail(*args, **kwargs):
        raise LostReplyError("no answer")

    async def run(rollout_id, operation):
        await store.put(entry("c", rollout_id=rollout_id))
        with monkeypatch.context() as patch:
            patch.setattr(dying.client, operation, fail)
            with pytest.raises(LostReplyError):
                await dying.freeze(rollout_id)
        with pytest.raises(RuntimeError, match="already frozen"):
            await store.put(entry("late", rollout_id=rollout_id))
        return await store.freeze(rollout_id)

    for operation in ("get_samples", "put_samples", "clear_samples"):
        snapshot = asyncio.run(run(operation, operation))
        assert call_ids(snapshot) == ["c"]
        assert not snapshot.incomplete


@on_all
def test_what_others_cleared_is_said(store):
    async def run():
        await store.put(entry("c"))
        await store.freeze("r")
        await store.client.clear_samples(["r"], store._partition)
        with pytest.raises(MissingDataError, match="'r'"):
            await store.freeze("r")
        await store.client.clear_samples(None, store._partition)
        with pytest.raises(UnknownPartitionError):
            await store.freeze("r")

    asyncio.run(run())
